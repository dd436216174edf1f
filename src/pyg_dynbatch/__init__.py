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
        Engine, Levels, Operation, Operations, Ragged, RaggedRows, Recording, Signature, Steps,
        TensorType, Value, flushed_subnormals, keep_freed_memory, run_one_by_one,
        schedule_recordings, schedule_structure,
    )
    from pyg_dynbatch.models import load

__version__ = "0.1.0"

_NAMESPACES = (
    "autobatch", "blocks", "compat.tree_lstm", "data", "datasets", "lightning", "loader", "models",
    "nn", "testing",
)
_MODULES = {name.partition(".")[0] for name in _NAMESPACES}

__all__ = [
    "Engine", "Levels", "Operation", "Operations", "Ragged", "RaggedRows", "Recording", "Signature",
    "Steps", "TensorType", "Value", "__version__", "flushed_subnormals", "keep_freed_memory",
    "load", "run_one_by_one", "schedule_recordings", "schedule_structure",
]


def __getattr__(name: str) -> object:
    """Import a public name or a namespace on first use."""
    if name in _MODULES:
        return import_module(f"pyg_dynbatch.{name}")
    if name in __all__:
        home = "models" if name == "load" else "core"
        value = getattr(import_module(f"pyg_dynbatch.{home}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pyg_dynbatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names and the namespaces, imported or not."""
    return sorted({*globals(), *__all__, *_MODULES})
