"""Compute gates with compiled C; float32 on CPUs."""

import ctypes
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.native import native_library
from pyg_dynbatch.nn.fused_gates import (
    Block,
    FusedPlan,
    Gates,
    StateGradients,
    TorchGates,
    dense_columns,
)

SOURCE = Path(__file__).with_name("native_levels.c")


class Struct(ctypes.Structure):
    """A C struct of integers and of addresses of tensors, given by name."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            if isinstance(value, Tensor):
                value = value.data_ptr()
            elif isinstance(value, ctypes.Array):
                value = ctypes.addressof(value)
            setattr(self, name, value)
        self.kept_alive = fields


def _address(rows: Tensor | None) -> int | None:
    """The address of the first number; None for no tensor."""
    return None if rows is None else rows.data_ptr()


def fields_of(numbers: str, pointers: str) -> list[tuple[str, Any]]:
    """Return the fields of a struct: integers first, then addresses."""
    return [
        *((name, c_int64) for name in numbers.split()),
        *((name, c_void_p) for name in pointers.split()),
    ]


class _Nodes(Struct):
    """``struct nodes`` in C: what all blocks of a pass share."""

    _fields_ = fields_of(
        "width arity",
        "hidden memory activated dropout_mask index starts all_hidden cells gathered sums",
    )


class Incoming(Struct):
    """``struct incoming`` in C: the gradients of states."""

    _fields_ = fields_of(
        "outside_hidden_row outside_memory_row", "hidden memory place outside_hidden outside_memory"
    )


@cache
def gates_library() -> ctypes.CDLL | None:
    """Build and load ``native_levels.c``; None where that fails."""
    library = native_library(SOURCE)
    if library is None:
        return None
    block = [c_int64] * 4
    nodes, given, run = POINTER(_Nodes), POINTER(Incoming), c_void_p
    arguments: dict[str, list[Any]] = {
        "gather": [nodes, *block],
        "forward": [nodes, *block, *[c_void_p] * 3, c_int64],
        "backward": [nodes, given, *block, *[c_void_p] * 5],
        "sum_equal": [given, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
        "forward_run": [run, c_int64, c_int64],
        "multiply": [run, c_int64, c_int64, c_int64],
        "backward_run": [run, given, given, c_int64, c_int64],
    }
    for name, types in arguments.items():
        function = getattr(library, f"tree_lstm_{name}")
        function.argtypes, function.restype = [*types, c_int], None
    return library


class NativeGates(TorchGates):
    """Compute gates with compiled C, which :func:`gates_library` has built."""

    def __init__(self, plan: FusedPlan, *states_and_rows: Any, inner: bool = False) -> None:
        super().__init__(plan, *states_and_rows, inner=inner)
        self.library: Any = gates_library()
        self.threads = torch.get_num_threads()
        if self.dropout_mask is not None:
            self.dropout_mask = self.dropout_mask.to(self.activated.dtype).contiguous()
        arity = -1 if plan.ragged else plan.arity
        self.rows = _Nodes(
            width=self.width, arity=arity if inner else 0, hidden=self.hidden, memory=self.memory,
            activated=self.activated, dropout_mask=self.dropout_mask, index=plan.children,
            starts=plan.child_start if plan.ragged else None, all_hidden=self.all_hidden,
            cells=self.all_memory, gathered=self.gathered, sums=self.sums,
        )  # fmt: skip
        self._given: tuple[StateGradients, Incoming] | None = None

    def gather(self, block: Block) -> None:
        """Gather h of the children of a block, and sum it per node if ``sums`` is given."""
        first, size, _, _, edge, edges, _ = block
        self.library.tree_lstm_gather(self.rows, first, size, edge, edges, self.threads)

    def forward(self, block: Block, gates: Gates, own: Tensor | None = None) -> None:
        """Activate products to gates in place, and write the states of a block."""
        first, size, _, filled, edge, edges, _ = block
        self.library.tree_lstm_forward(
            self.rows, first, size, edge, edges, gates.rows.data_ptr(), _address(gates.forget),
            _address(own), filled, self.threads,
        )  # fmt: skip

    def backward(self, block: Block, gates: Gates, given: StateGradients, grads: Gates) -> None:
        """Write the gradients of products, and for inner nodes those of the children's c."""
        first, size, _, _, edge, edges, _ = block
        if self._given is None or self._given[0] is not given:
            self._given = given, incoming(given)
        self.library.tree_lstm_backward(
            self.rows, self._given[1], first, size, edge, edges, gates.rows.data_ptr(),
            _address(gates.forget), grads.rows.data_ptr(), _address(grads.forget),
            _address(grads.child_memory), self.threads,
        )  # fmt: skip

    def sum_equal(self, given: StateGradients, cell: Tensor, cells: int) -> StateGradients:
        """Sum the gradients of equal leaves, always in the same order."""
        width, cell = given.hidden.size(1), cell.contiguous()
        hidden, memory = (given.hidden.new_zeros(cells, width) for _ in range(2))
        self.library.tree_lstm_sum_equal(
            incoming(given), cell.data_ptr(), cell.size(0), width,
            hidden.data_ptr(), memory.data_ptr(), self.threads,
        )  # fmt: skip
        return StateGradients(hidden, memory)


def incoming(given: StateGradients) -> Incoming:
    """The gradients of states, as C reads them."""
    of_h, of_c = map(dense_columns, given.outside)
    return Incoming(
        hidden=given.hidden, memory=given.memory, place=given.place,
        outside_hidden=of_h, outside_hidden_row=0 if of_h is None else of_h.stride(0),
        outside_memory=of_c, outside_memory_row=0 if of_c is None else of_c.stride(0),
    )  # fmt: skip
