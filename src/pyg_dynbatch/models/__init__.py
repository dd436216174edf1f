"""Whole networks over trees and molecules: a PyG batch goes in, predictions come out."""

from pyg_dynbatch.models.encoder import TreeEncoder
from pyg_dynbatch.models.tree_classifier import TreeClassifier
from pyg_dynbatch.models.tree_similarity import TreeSimilarity
from pyg_dynbatch.models.weave_net import WeaveNet
from pyg_dynbatch.models.weave_program import WeaveProgram

__all__ = ["TreeClassifier", "TreeEncoder", "TreeSimilarity", "WeaveNet", "WeaveProgram"]
