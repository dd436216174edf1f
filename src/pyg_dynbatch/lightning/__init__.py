"""Training with Lightning: the task, the data modules, and a callback."""

from pyg_dynbatch.lightning.callbacks import RandomState
from pyg_dynbatch.lightning.data import (
    DataModule,
    DatasetData,
    ListOpsData,
    MoleculeDataModule,
    MoleculeFileData,
    MoleculeNetData,
    NCIData,
    SSTData,
    TreeData,
    TreeFileData,
    VectorOptions,
)
from pyg_dynbatch.lightning.task import Task

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
