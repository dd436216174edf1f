"""Files become data objects, parsed once and cached: one module a data set."""

from pyg_dynbatch.datasets.cached import TreeDataset
from pyg_dynbatch.datasets.download import download_verified
from pyg_dynbatch.datasets.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.datasets.sick import SICK, score_to_target
from pyg_dynbatch.datasets.sst import SST
from pyg_dynbatch.datasets.tree_file import TreeFile

__all__ = [
    "SICK",
    "SST",
    "ListOps",
    "ListOpsRecipe",
    "TreeDataset",
    "TreeFile",
    "download_verified",
    "score_to_target",
]
