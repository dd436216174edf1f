"""Lightning: the base of all tasks and data modules, callbacks, optimisers."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.training.checkpoints import LastCheckpoint, RandomState
from pyg_dynbatch.training.data import SplitDataModule
from pyg_dynbatch.training.ensemble import AveragedNetwork, ensemble_of
from pyg_dynbatch.training.optimizers import (
    OptimizerOptions, RateOptions, SplitOptimizer, VectorOptions, build_optimizer,
)
from pyg_dynbatch.training.predictions import PredictionTable
from pyg_dynbatch.training.report import RunReport
from pyg_dynbatch.training.task import Task

__all__ = [
    "AveragedNetwork", "LastCheckpoint", "OptimizerOptions", "PredictionTable", "RandomState",
    "RateOptions", "RunReport", "SplitDataModule", "SplitOptimizer", "Task", "VectorOptions",
    "build_optimizer", "ensemble_of",
]
