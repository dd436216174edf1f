"""Tasks, data modules, callbacks and optimisers for Lightning."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.documents.task import DocumentFileData, DocumentPrediction
from pyg_dynbatch.molecules.datamodules import (
    MoleculeDataModule, MoleculeFileData, MoleculeNetData, NCIData, PackedMoleculeData,
)
from pyg_dynbatch.molecules.splits import SplitOptions
from pyg_dynbatch.molecules.task import MoleculeProperty
from pyg_dynbatch.molecules.task import Pretrained
from pyg_dynbatch.training.runs import LastCheckpoint, RandomState
from pyg_dynbatch.training.data import SplitDataModule
from pyg_dynbatch.training.optimizers import (
    OptimizerOptions, RateOptions, VectorOptions, build_optimizer,
)
from pyg_dynbatch.training.runs import PredictionTable
from pyg_dynbatch.training.runs import RunReport
from pyg_dynbatch.training.task import Task, ensemble_of
from pyg_dynbatch.trees.task import (
    ListOpsData, SICKData, SSTData, TreeDataModule, TreeFileData,
)
from pyg_dynbatch.trees.task import TreeClassification, TreeRelatedness

__all__ = [
    "DocumentFileData", "DocumentPrediction", "LastCheckpoint", "ListOpsData",
    "MoleculeDataModule", "MoleculeFileData", "MoleculeNetData", "MoleculeProperty", "NCIData",
    "OptimizerOptions", "PackedMoleculeData", "PredictionTable", "Pretrained", "RandomState",
    "RateOptions", "RunReport", "SICKData", "SSTData", "SplitDataModule", "SplitOptions",
    "Task", "TreeClassification", "TreeDataModule", "TreeFileData",
    "TreeRelatedness", "VectorOptions", "build_optimizer", "ensemble_of",
]
