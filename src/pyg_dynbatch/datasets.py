"""Data sets of trees and molecules, and splits."""

from pyg_dynbatch.dataset import ColumnsDataset
from pyg_dynbatch.molecules.datasets import NCI, MoleculeDataset, MoleculeFile, MoleculeNet
from pyg_dynbatch.molecules.splits import Split, SplitOptions
from pyg_dynbatch.trees.datasets import SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps, ListOpsRecipe

__all__ = [
    "NCI",
    "SST",
    "ColumnsDataset",
    "ListOps",
    "ListOpsRecipe",
    "MoleculeDataset",
    "MoleculeFile",
    "MoleculeNet",
    "Split",
    "SplitOptions",
    "TreeDataset",
    "TreeFile",
]
