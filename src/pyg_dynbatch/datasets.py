"""Public namespace of data sets, splits and stores."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.molecules.files.build import FeaturizeOptions, build_store, featurize_record
from pyg_dynbatch.molecules.datasets import NCI, MoleculeFile, MoleculeNet
from pyg_dynbatch.molecules.splits import Split
from pyg_dynbatch.molecules.files.store import PackedMolecules
from pyg_dynbatch.trees.datasets import SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.trees.datasets import SICK

__all__ = [
    "FeaturizeOptions", "ListOps", "ListOpsRecipe", "MoleculeFile", "MoleculeNet", "NCI",
    "PackedMolecules", "SICK", "SST", "Split", "TreeDataset", "TreeFile", "build_store",
    "featurize_record",
]
