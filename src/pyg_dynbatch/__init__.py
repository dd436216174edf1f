"""Dynamic batching of tree- and graph-structured networks for PyTorch Geometric.

The names below are imported on first use, so ``import pyg_dynbatch`` costs next to nothing; all
else is reached through the rooms (``pyg_dynbatch.nn``, ``pyg_dynbatch.datasets``, ...).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyg_dynbatch.core import Engine as Engine
    from pyg_dynbatch.core import Operation as Operation
    from pyg_dynbatch.core import Operations as Operations
    from pyg_dynbatch.core import Program as Program
    from pyg_dynbatch.core import Ragged as Ragged
    from pyg_dynbatch.core import Schedule as Schedule
    from pyg_dynbatch.core import Signature as Signature
    from pyg_dynbatch.core import TensorType as TensorType
    from pyg_dynbatch.samplers import NodeBudgetBatchSampler as NodeBudgetBatchSampler
    from pyg_dynbatch.trees.collate import Collater as Collater
    from pyg_dynbatch.trees.collate import DataLoader as DataLoader
    from pyg_dynbatch.trees.data import DynTreeData as DynTreeData

__version__ = "0.1.0.dev0"

_ROOM_OF = {
    "Engine": "core",
    "Operation": "core",
    "Operations": "core",
    "Program": "core",
    "Ragged": "core",
    "Schedule": "core",
    "Signature": "core",
    "TensorType": "core",
    "Collater": "loader",
    "DataLoader": "loader",
    "DynTreeData": "data",
    "NodeBudgetBatchSampler": "loader",
}
_ROOMS = (
    "blocks",
    "core",
    "data",
    "datasets",
    "loader",
    "models",
    "nn",
    "tasks",
    "testing",
    "training",
    "visualize",
)

__all__ = ["__version__", *_ROOM_OF]


def __getattr__(name: str) -> object:
    """Imports a public name, or a room, when it is first asked for."""
    if name in _ROOM_OF:
        value = getattr(import_module(f"pyg_dynbatch.{_ROOM_OF[name]}"), name)
        globals()[name] = value
        return value
    if name in _ROOMS:
        return import_module(f"pyg_dynbatch.{name}")
    raise AttributeError(f"module 'pyg_dynbatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names and the rooms, imported or not."""
    return sorted({*globals(), *__all__, *_ROOMS})
