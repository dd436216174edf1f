"""Lightning: the only room where the data side and the model side meet."""

from pyg_dynbatch.training.averaging import AveragedNetwork, AveragedProperties
from pyg_dynbatch.training.checkpoints import RandomState, last_checkpoint
from pyg_dynbatch.training.classification import TreeClassification
from pyg_dynbatch.training.datamodule import TreeDataModule
from pyg_dynbatch.training.datamodules import ListOpsData, SICKData, SSTData, TreeFileData
from pyg_dynbatch.training.ensemble import ensemble_of
from pyg_dynbatch.training.molecule_datamodule import MoleculeDataModule
from pyg_dynbatch.training.molecule_datamodules import (
    MoleculeFileData,
    MoleculeNetData,
    NCIData,
    PackedMoleculeData,
)
from pyg_dynbatch.training.molecule_explain import explain
from pyg_dynbatch.training.molecule_predictor import MoleculePredictor
from pyg_dynbatch.training.molecule_property import MoleculeProperty
from pyg_dynbatch.training.molecule_schema import MoleculeSchema
from pyg_dynbatch.training.molecule_splits import SplitOptions
from pyg_dynbatch.training.optimizers import SplitOptimizer, build_optimizer
from pyg_dynbatch.training.options import OptimizerOptions, RateOptions, VectorOptions
from pyg_dynbatch.training.predictions import PredictionTable
from pyg_dynbatch.training.relatedness import TreeRelatedness
from pyg_dynbatch.training.report import RunReport
from pyg_dynbatch.training.split_datamodule import SplitDataModule
from pyg_dynbatch.training.task import Task
from pyg_dynbatch.training.tree_task import TreeTask

__all__ = [
    "AveragedNetwork",
    "AveragedProperties",
    "ListOpsData",
    "MoleculeDataModule",
    "MoleculeFileData",
    "MoleculeNetData",
    "MoleculePredictor",
    "MoleculeProperty",
    "MoleculeSchema",
    "NCIData",
    "OptimizerOptions",
    "PackedMoleculeData",
    "PredictionTable",
    "RandomState",
    "RateOptions",
    "RunReport",
    "SICKData",
    "SSTData",
    "SplitDataModule",
    "SplitOptimizer",
    "SplitOptions",
    "Task",
    "TreeClassification",
    "TreeDataModule",
    "TreeFileData",
    "TreeRelatedness",
    "TreeTask",
    "VectorOptions",
    "build_optimizer",
    "ensemble_of",
    "explain",
    "last_checkpoint",
]
