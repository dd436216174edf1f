"""Files become data objects, parsed once and cached: one module a data set."""

from pyg_dynbatch.datasets.bad_rows import BadMolecule, write_error_report
from pyg_dynbatch.datasets.build import build_store
from pyg_dynbatch.datasets.cached import TreeDataset
from pyg_dynbatch.datasets.download import download_verified
from pyg_dynbatch.datasets.duplicates import (
    canonical_texts,
    find_duplicates,
    find_leakage,
)
from pyg_dynbatch.datasets.featurize import (
    FeaturizeOptions,
    featurize_record,
    featurize_stream,
)
from pyg_dynbatch.datasets.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.datasets.molecule_file import MoleculeFile
from pyg_dynbatch.datasets.molecule_net import MoleculeNet
from pyg_dynbatch.datasets.nci import NCI
from pyg_dynbatch.datasets.packed import PackedMolecules
from pyg_dynbatch.datasets.sick import SICK, score_to_target
from pyg_dynbatch.datasets.split import Split
from pyg_dynbatch.datasets.splits import (
    column_split,
    kfold_splits,
    random_split,
    scaffold_split,
    stratified_split,
)
from pyg_dynbatch.datasets.sst import SST
from pyg_dynbatch.datasets.tree_file import TreeFile

__all__ = [
    "NCI",
    "SICK",
    "SST",
    "BadMolecule",
    "FeaturizeOptions",
    "ListOps",
    "ListOpsRecipe",
    "MoleculeFile",
    "MoleculeNet",
    "PackedMolecules",
    "Split",
    "TreeDataset",
    "TreeFile",
    "build_store",
    "canonical_texts",
    "column_split",
    "download_verified",
    "featurize_record",
    "featurize_stream",
    "find_duplicates",
    "find_leakage",
    "kfold_splits",
    "random_split",
    "scaffold_split",
    "score_to_target",
    "stratified_split",
    "write_error_report",
]
