"""Public namespace of loaders, collaters and samplers."""

from pyg_dynbatch.molecules.data import MoleculeCollater, MoleculeLoader
from pyg_dynbatch.samplers import NodeBudgetBatchSampler, node_counts, pair_counts
from pyg_dynbatch.trees.data import Collater, DataLoader

__all__ = [
    "Collater", "DataLoader", "MoleculeCollater", "MoleculeLoader", "NodeBudgetBatchSampler",
    "node_counts", "pair_counts",
]  # fmt: skip
