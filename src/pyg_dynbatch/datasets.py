"""Public namespace of data sets, splits and stores."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.core.files import download_verified
from pyg_dynbatch.molecules.files.build import (
    FeaturizeOptions, build_store, featurize_record, featurize_stream,
)
from pyg_dynbatch.molecules.datasets import NCI, MoleculeFile, MoleculeNet
from pyg_dynbatch.molecules.files.read import BadMolecule, write_error_report
from pyg_dynbatch.molecules.splits import (
    Split, canonical_texts, column_split, find_duplicates, find_leakage, kfold_splits, random_split,
    scaffold_split, stratified_split,
)
from pyg_dynbatch.molecules.files.store import PackedMolecules
from pyg_dynbatch.trees.datasets import SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.trees.sick import SICK, score_to_target

__all__ = [
    "BadMolecule", "FeaturizeOptions", "ListOps", "ListOpsRecipe", "MoleculeFile", "MoleculeNet",
    "NCI", "PackedMolecules", "SICK", "SST", "Split", "TreeDataset", "TreeFile", "build_store",
    "canonical_texts", "column_split", "download_verified", "featurize_record", "featurize_stream",
    "find_duplicates", "find_leakage", "kfold_splits", "random_split", "scaffold_split",
    "score_to_target", "stratified_split", "write_error_report",
]
