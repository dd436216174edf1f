"""The algorithm: recorded calls in, batched calls out; needs torch and numpy alone."""
# fmt: off
# isort: skip_file

from pyg_dynbatch.core.engine import Engine
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.native import keep_freed_memory
from pyg_dynbatch.core.subnormals import flushed_subnormals
from pyg_dynbatch.core.operation import Operation, Operations, Ragged, Signature
from pyg_dynbatch.core.recording import Recording, Value
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import ScheduleStats, Steps
from pyg_dynbatch.core.structure import depth_of, roots_of, slots_of
from pyg_dynbatch.core.types import RaggedRows, RowType, TensorType

__all__ = [
    "Engine", "Levels", "Operation", "Operations", "Ragged", "RaggedRows", "Recording", "RowType",
    "ScheduleStats", "Signature", "Steps", "TensorType", "Value", "depth_of",
    "flushed_subnormals", "keep_freed_memory", "mismatch", "roots_of", "run_one_by_one",
    "schedule_recordings", "schedule_structure", "slots_of",
]
