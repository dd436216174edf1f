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
from pyg_dynbatch.nn.fused_gates import Block, Gates, Nodes, StateGradients, TorchGates

SOURCE = Path(__file__).with_name("native_levels.c")

_log = logging.getLogger(__name__)


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names]


class _Nodes(ctypes.Structure):
    """``struct nodes`` in C: what all blocks of a pass share."""

    _fields_ = [
        ("width", c_int64),
        ("arity", c_int64),
        *_pointers("hidden", "memory", "activated", "dropout_mask", "index", "starts"),
        *_pointers("all_hidden", "cells", "gathered", "sums"),
    ]


class _Given(ctypes.Structure):
    """``struct incoming`` in C: the gradients of states."""

    _fields_ = [
        *_pointers("hidden", "memory", "place", "outside_hidden", "outside_memory"),
        ("outside_hidden_row", c_int64),
        ("outside_memory_row", c_int64),
    ]


class _Levels(ctypes.Structure):
    """``struct levels`` in C: what all levels share."""

    _fields_ = [
        ("multiply", c_void_p),
        ("count", c_int64),
        *_pointers("blocks", "weight", "bias", "weight_forget", "bias_forget"),
        *_pointers("own", "gates", "forget"),
        ("kept", c_int64),
        *_pointers("grads", "to_forget", "to_memory", "to_hidden", "to_sums"),
    ]


def _set(structure: ctypes.Structure, **tensors: Tensor | None) -> None:
    for name, rows in tensors.items():
        setattr(structure, name, _address(rows))


def _address(rows: Tensor | None) -> int | None:
    """The address of the first number; None for no tensor."""
    return None if rows is None else rows.data_ptr()


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
        self.rows = _Nodes(nodes.activated.size(1), 0)
        _set(self.rows, hidden=nodes.hidden, memory=nodes.memory, activated=nodes.activated)
        _set(self.rows, dropout_mask=mask)
        if nodes.is_inner:
            self.rows.arity = -1 if plan.ragged else plan.arity
            starts = plan.child_start if plan.ragged else None
            _set(self.rows, index=plan.children, starts=starts, all_hidden=nodes.child_hidden)
            _set(self.rows, cells=nodes.child_memory, gathered=nodes.gathered, sums=nodes.sums)
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
        found = _Given()
        self._held += given.hidden, given.memory, given.place
        _set(found, hidden=given.hidden, memory=given.memory, place=given.place)
        for name, rows in zip(("outside_hidden", "outside_memory"), given.outside, strict=True):
            if rows is not None:
                # A gradient may be one number, read again and again, or negated when it is read.
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
    levels, columns = _levels(nodes, weight, bias)
    forget = weight.new_empty(places, weight.size(1)) if plan.ragged else None
    gates = Gates(weight.new_empty(rows, columns), forget)
    _set(levels, own=own, gates=gates.rows, forget=forget)
    levels.kept = plan.with_backward
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
    levels, _ = _levels(nodes, weight)
    to_hidden, to_memory = given.room(0, plan.places)
    sums = None
    if plan.ragged:
        most = max((block.size for block in plan.blocks), default=0)
        sums = to_hidden.new_empty(most, to_hidden.size(1))
    _set(levels, gates=gates.rows, forget=gates.forget)
    _set(levels, grads=grads.rows, to_forget=grads.forget)
    _set(levels, to_memory=to_memory, to_hidden=to_hidden, to_sums=sums)
    incoming = kernels.incoming(given.of_nodes(plan.leaves, plan.inner))
    library.tree_lstm_backward_levels(kernels.rows, incoming, levels, kernels.threads)


def _plain(rows: Tensor) -> Tensor:
    # What is negated when it is read is not negated in memory.
    return rows.resolve_neg().contiguous()


def _levels(nodes: Nodes, weight: Tensor, bias: Tensor | None = None) -> tuple[_Levels, int]:
    """What all levels share, and the number of columns of the gates in a node's row."""
    plan, columns = nodes.plan, weight.size(0)
    found = _Levels(multiply_address(), len(plan.blocks), ctypes.addressof(plan.table))
    if plan.ragged:
        columns = 3 * nodes.activated.size(1)
        _set(found, weight_forget=weight[columns:])
        _set(found, bias_forget=None if bias is None else bias[columns:])
    _set(found, weight=weight, bias=bias)
    return found, columns


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
