"""Public namespace of whole networks: a PyG batch goes in, predictions come out."""

from pyg_dynbatch.molecules.models import WeaveNet, WeaveProgram
from pyg_dynbatch.trees.models import TreeClassifier, TreeEncoder, TreeSimilarity

__all__ = ["TreeClassifier", "TreeEncoder", "TreeSimilarity", "WeaveNet", "WeaveProgram"]
