"""This room exists to carry trees and graphs into PyG: one example, one batch, one epoch."""

from pyg_dynbatch.data.bucketed import BucketedCollater
from pyg_dynbatch.data.collate import Collater
from pyg_dynbatch.data.convert import (
    from_edge_index,
    from_nested,
    from_networkx,
    from_nltk,
    from_parents,
    to_nested,
    to_networkx,
    to_nltk,
    to_parents,
)
from pyg_dynbatch.data.epoch_sampler import EpochSampler
from pyg_dynbatch.data.loader import DataLoader
from pyg_dynbatch.data.merge import allow_batches
from pyg_dynbatch.data.molecule import MoleculeData, bonds_of
from pyg_dynbatch.data.molecule_collate import MoleculeCollater
from pyg_dynbatch.data.molecule_columns import MoleculeColumns
from pyg_dynbatch.data.molecule_loader import MoleculeLoader
from pyg_dynbatch.data.packing import node_counts, pair_counts
from pyg_dynbatch.data.sampler import NodeBudgetBatchSampler
from pyg_dynbatch.data.tree import DynTreeData
from pyg_dynbatch.data.tree_columns import TreeColumns

__all__ = [
    "BucketedCollater",
    "Collater",
    "DataLoader",
    "DynTreeData",
    "EpochSampler",
    "MoleculeCollater",
    "MoleculeColumns",
    "MoleculeData",
    "MoleculeLoader",
    "NodeBudgetBatchSampler",
    "TreeColumns",
    "allow_batches",
    "bonds_of",
    "from_edge_index",
    "from_nested",
    "from_networkx",
    "from_nltk",
    "from_parents",
    "node_counts",
    "pair_counts",
    "to_nested",
    "to_networkx",
    "to_nltk",
    "to_parents",
]
