"""Dynamic batching of tree- and graph-structured networks for PyTorch Geometric.

The names below are imported on first use, so ``import pyg_dynbatch`` is fast. All other names are
in the namespaces (``pyg_dynbatch.nn``, ``pyg_dynbatch.datasets``, ...).
"""
# fmt: off
# isort: skip_file

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyg_dynbatch.core import (
        Engine, Levels, Operation, Operations, Recording, Ragged, Signature, Steps, TensorType,
        schedule_recordings, schedule_structure,
    )
    from pyg_dynbatch.samplers import NodeBudgetBatchSampler
    from pyg_dynbatch.trees.collate import Collater, DataLoader
    from pyg_dynbatch.trees.data import DynTreeData

__version__ = "0.1.0"

_NAMESPACES = (
    "autobatch", "blocks", "bulk", "core", "data", "datasets", "loader", "models", "nn", "tasks",
    "testing", "training", "visualize",
)

__all__ = [
    "Collater", "DataLoader", "DynTreeData", "Engine", "Levels", "NodeBudgetBatchSampler",
    "Operation", "Operations", "Recording", "Ragged", "Signature", "Steps", "TensorType",
    "__version__", "schedule_recordings", "schedule_structure",
]


def __getattr__(name: str) -> object:
    """Import a public name or a namespace on first use."""
    if name in _NAMESPACES:
        return import_module(f"pyg_dynbatch.{name}")
    if name in __all__:
        modules = (import_module(f"pyg_dynbatch.{each}") for each in ("core", "loader", "data"))
        value = next(vars(module)[name] for module in modules if name in vars(module))
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pyg_dynbatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names and the namespaces, imported or not."""
    return sorted({*globals(), *__all__, *_NAMESPACES})
