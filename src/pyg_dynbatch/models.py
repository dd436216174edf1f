"""Whole networks, from a PyG batch to predictions, and what predicts with checkpoints."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.documents.predict import DocumentPredictor
from pyg_dynbatch.molecules.explain import explain
from pyg_dynbatch.molecules.models import WeaveNet, WeaveProgram
from pyg_dynbatch.molecules.predict import MoleculePredictor
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.prediction import AveragedNetwork, Model
from pyg_dynbatch.trees.models import TreeClassifier, TreeEncoder, TreeSimilarity
from pyg_dynbatch.trees.predict import TreePredictor

__all__ = [
    "AveragedNetwork", "DocumentPredictor", "Model", "MoleculePredictor", "MoleculeSchema",
    "TreeClassifier", "TreeEncoder", "TreePredictor", "TreeSimilarity", "WeaveNet", "WeaveProgram",
    "explain",
]
