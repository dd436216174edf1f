"""Public namespace of whole networks, from a PyG batch to predictions."""

from pyg_dynbatch.molecules.nets.models import WeaveNet, WeaveProgram
from pyg_dynbatch.trees.models import TreeClassifier, TreeEncoder, TreeSimilarity

__all__ = ["TreeClassifier", "TreeEncoder", "TreeSimilarity", "WeaveNet", "WeaveProgram"]
