"""Gates and whole levels of small fused runs in C, with the BLAS of torch; float32 on CPUs."""

import ctypes
import logging
import sys
from ctypes import POINTER, byref, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_dynbatch.core.native import native_library
from pyg_dynbatch.nn.fused_gates import Block, FusedPlan, Gates, Nodes, StateGradients, TorchGates

SOURCE = Path(__file__).with_name("native_levels.c")

_log = logging.getLogger(__name__)


class _Struct(ctypes.Structure):
    """A struct of C, made of numbers and of tensors, of which C gets the addresses."""

    def __init__(self, **fields: Tensor | int | None) -> None:
        super().__init__(**{name: _address(value) for name, value in fields.items()})


def _address(value: Tensor | int | None) -> int | None:
    """The address of the first number of a tensor; None for no tensor."""
    return value.data_ptr() if isinstance(value, Tensor) else value


def _fields(numbers: str, pointers: str) -> list[tuple[str, Any]]:
    return [
        *((name, c_int64) for name in numbers.split()),
        *((name, c_void_p) for name in pointers.split()),
    ]


class _Nodes(_Struct):
    """``struct nodes`` in C: what all blocks of a pass share."""

    _fields_ = _fields(
        "width arity",
        "hidden memory activated dropout_mask index starts all_hidden cells gathered sums",
    )


class _Given(_Struct):
    """``struct incoming`` in C: the gradients of states."""

    _fields_ = _fields(
        "outside_hidden_row outside_memory_row", "hidden memory place outside_hidden outside_memory"
    )


class _Levels(_Struct):
    """``struct levels`` in C: what all levels share."""

    _fields_ = _fields(
        "count kept",
        "multiply blocks weight bias weight_forget bias_forget own gates forget"
        " grads to_forget to_memory to_hidden to_sums",
    )


@cache
def gates_library() -> ctypes.CDLL | None:
    """Build and load ``native_levels.c``; None where that fails."""
    library = native_library(SOURCE)
    if library is None:
        return None
    block = [c_int64] * 4
    nodes, given, levels = POINTER(_Nodes), POINTER(_Given), POINTER(_Levels)
    arguments: dict[str, list[Any]] = {
        "gather": [nodes, *block],
        "forward": [nodes, *block, *[c_void_p] * 3, c_int64],
        "backward": [nodes, given, *block, *[c_void_p] * 5],
        "sum_equal": [given, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
        "forward_levels": [nodes, levels],
        "backward_levels": [nodes, given, levels],
    }
    for name, types in arguments.items():
        function = getattr(library, f"tree_lstm_{name}")
        function.argtypes, function.restype = [*types, c_int], None
    return library


class NativeGates(TorchGates):
    """Compute gates by compiled C."""

    activates: ClassVar[bool] = False
    """C activates, not the product."""

    def __init__(self, library: ctypes.CDLL, nodes: Nodes) -> None:
        super().__init__(nodes)
        self.library, self.threads = library, torch.get_num_threads()
        plan, mask = nodes.plan, nodes.dropout_mask
        if mask is not None:
            mask = mask.to(nodes.activated.dtype).contiguous()
        # C reads addresses, so the tensors are kept alive.
        self._held: list[object] = [mask]
        inner = {}
        if nodes.is_inner:
            inner = {
                "arity": -1 if plan.ragged else plan.arity,
                "index": plan.children,
                "starts": plan.child_start if plan.ragged else None,
                "all_hidden": nodes.child_hidden,
                "cells": nodes.child_memory,
                "gathered": nodes.gathered,
                "sums": nodes.sums,
            }
        self.rows = _Nodes(
            width=nodes.activated.size(1), hidden=nodes.hidden, memory=nodes.memory,
            activated=nodes.activated, dropout_mask=mask, **inner,
        )  # fmt: skip
        self._given: tuple[StateGradients, _Given] | None = None

    def gather(self, block: Block) -> None:
        """Gather h of the children of a block, and sum it where sums are wanted."""
        first, size, _, _, edge, edges, _ = block
        self.library.tree_lstm_gather(self.rows, first, size, edge, edges, self.threads)

    def forward(self, block: Block, gates: Gates) -> None:
        """Activate the gates in place, and write the states."""
        first, size, _, filled, edge, edges, _ = block
        rows, forget, own, *_ = gates
        self.library.tree_lstm_forward(
            self.rows, first, size, edge, edges, rows.data_ptr(), _address(forget),
            _address(own), filled, self.threads,
        )  # fmt: skip

    def backward(self, block: Block, gates: Gates, given: StateGradients, grads: Gates) -> None:
        """Write the gradients of products, and those of the children's memory."""
        first, size, _, _, edge, edges, _ = block
        if self._given is None or self._given[0] is not given:
            self._given = given, self.incoming(given)
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
            self.incoming(given), cell.data_ptr(), cell.size(0), width,
            hidden.data_ptr(), memory.data_ptr(), self.threads,
        )  # fmt: skip
        return StateGradients(hidden, memory)

    def incoming(self, given: StateGradients) -> _Given:
        """The gradients of states, as C reads them."""
        self._held += given.hidden, given.memory, given.place
        found = _Given(hidden=given.hidden, memory=given.memory, place=given.place)
        for name, rows in zip(("outside_hidden", "outside_memory"), given.outside, strict=True):
            if rows is not None:
                # A gradient may be expanded from one number, or negated only when it is read.
                rows = rows.resolve_neg()
                rows = rows if rows.stride(1) == 1 else rows.contiguous()
                self._held.append(rows)
                setattr(found, f"{name}_row", rows.stride(0))
                setattr(found, name, rows.data_ptr())
        return found


def forward_levels(
    library: ctypes.CDLL, nodes: Nodes, weight: Tensor, bias: Tensor, own: Tensor | None
) -> list[Gates]:
    """Compute all inner nodes; return the activated gates, of one block if they are not kept."""
    plan, kernels = nodes.plan, NativeGates(library, nodes)
    weight, bias = _plain(weight), _plain(bias)
    rows, places = plan.inner, plan.places
    if not plan.with_backward:
        rows = max((block.size for block in plan.blocks), default=0)
        places = max((block.edges for block in plan.blocks), default=0)
    columns = 3 * nodes.activated.size(1) if plan.ragged else weight.size(0)
    gates = Gates(
        weight.new_empty(rows, columns),
        weight.new_empty(places, weight.size(1)) if plan.ragged else None,
    )
    levels = _levels(
        plan, columns, weight, bias, kept=plan.with_backward, own=own, gates=gates.rows,
        forget=gates.forget,
    )  # fmt: skip
    library.tree_lstm_forward_levels(kernels.rows, levels, kernels.threads)
    return [gates]


def backward_levels(
    library: ctypes.CDLL,
    nodes: Nodes,
    weight: Tensor,
    gates: Gates,
    grads: Gates,
    given: StateGradients,
) -> None:
    """Compute the gradients of all inner nodes, and those of their children's states."""
    plan, kernels = nodes.plan, NativeGates(library, nodes)
    weight = _plain(weight)
    to_hidden, to_memory = given.room(0, plan.places)
    sums = None
    if plan.ragged:
        most = max((block.size for block in plan.blocks), default=0)
        sums = to_hidden.new_empty(most, to_hidden.size(1))
    levels = _levels(
        plan, grads.rows.size(1), weight, None, gates=gates.rows, forget=gates.forget,
        grads=grads.rows, to_forget=grads.forget, to_memory=to_memory, to_hidden=to_hidden,
        to_sums=sums,
    )  # fmt: skip
    incoming = kernels.incoming(given.of_nodes(plan.leaves, plan.inner))
    library.tree_lstm_backward_levels(kernels.rows, incoming, levels, kernels.threads)


def _levels(
    plan: FusedPlan,
    columns: int,
    weight: Tensor,
    bias: Tensor | None,
    **fields: Tensor | int | None,
) -> _Levels:
    """What all levels share; weights below ``columns`` are those of f of any number of children."""
    return _Levels(
        multiply=multiply_address(),
        count=len(plan.blocks),
        blocks=ctypes.addressof(plan.table),
        weight=weight,
        bias=bias,
        weight_forget=weight[columns:],
        bias_forget=None if bias is None else bias[columns:],
        **fields,
    )


def _plain(rows: Tensor) -> Tensor:
    # A tensor that is negated only when it is read is not negated in memory.
    return rows.resolve_neg().contiguous()


@cache
def multiply_address() -> int | None:
    """Find ``sgemm`` in the libraries that torch has loaded."""
    if sys.byteorder != "little":
        # The low half of a number would not come first.
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("*torch_cpu.*")):
        try:
            function = ctypes.CDLL(str(path)).sgemm_
        except (OSError, AttributeError) as error:
            _log.info("no sgemm_ in %s: %s", path.name, error)
            continue
        if _multiplies(function):
            return ctypes.cast(function, c_void_p).value
        _log.info("sgemm_ of %s does not multiply as expected", path.name)
    return None


def _multiplies(function: object) -> bool:
    """Whether a function is called as C will call it: numbers of 64 bits, no lengths of strings."""
    # Whatever dtype and device the user has made the default.
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    left, right = torch.arange(6, **plain).view(2, 3), torch.arange(12, **plain).view(4, 3)
    found = torch.ones(2, 4, **plain)
    sizes = [byref(c_int64(size)) for size in (4, 2, 3)]
    three, four = (byref(c_int64(size)) for size in (3, 4))
    one = byref(ctypes.c_float(1))
    weight, given, out = (c_void_p(part.data_ptr()) for part in (right, left, found))
    function(b"T", b"N", *sizes, one, weight, three, given, three, one, out, four)  # type: ignore[operator]
    return torch.equal(found, left @ right.t() + 1)
