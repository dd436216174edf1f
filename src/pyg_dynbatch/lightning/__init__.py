"""Training with Lightning: the task, the data modules, and a callback."""

from pyg_dynbatch.lightning.callbacks import RandomState
from pyg_dynbatch.lightning.data import DataModule, DatasetData
from pyg_dynbatch.lightning.molecules import (
    MoleculeDataModule,
    MoleculeFileData,
    MoleculeNetData,
    NCIData,
)
from pyg_dynbatch.lightning.task import Task
from pyg_dynbatch.lightning.trees import ListOpsData, SSTData, TreeData, TreeFileData, VectorOptions

__all__ = [
    "DataModule",
    "DatasetData",
    "ListOpsData",
    "MoleculeDataModule",
    "MoleculeFileData",
    "MoleculeNetData",
    "NCIData",
    "RandomState",
    "SSTData",
    "Task",
    "TreeData",
    "TreeFileData",
    "VectorOptions",
]
