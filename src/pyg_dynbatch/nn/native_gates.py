"""Gates in C, and for small runs all levels in one call, with torch's BLAS; float32 on CPUs."""

import ctypes
import logging
import sys
from ctypes import POINTER, byref, c_int, c_int64, c_void_p
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

_log = logging.getLogger(__name__)


class _Struct(ctypes.Structure):
    """A C struct of integers and of addresses of tensors, given by name."""

    def __init__(self, **fields: Tensor | int | None) -> None:
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        fields.update({name: value.data_ptr() for name, value in tensors.items()})
        super().__init__(**fields)
        self.tensors = tensors  # keeps them alive


def _address(rows: Tensor | None) -> int | None:
    """The address of the first number; None for no tensor."""
    return None if rows is None else rows.data_ptr()


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
        self._given: tuple[StateGradients, _Given] | None = None

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
            self._given = given, _incoming(given)
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
            _incoming(given), cell.data_ptr(), cell.size(0), width,
            hidden.data_ptr(), memory.data_ptr(), self.threads,
        )  # fmt: skip
        return StateGradients(hidden, memory)

    def forward_levels(self, weight: Tensor, bias: Tensor, own: Tensor | None) -> Gates:
        """Compute all inner nodes; return the gates, of the last block if they are not kept."""
        plan, rows, slots = self.plan, self.plan.inner, self.plan.slots
        if not plan.with_backward:
            rows = max((block.size for block in plan.blocks), default=0)
            slots = max((block.edges for block in plan.blocks), default=0)
        gates = Gates(
            weight.new_empty(rows, (3 + plan.arity) * self.width),
            weight.new_empty(slots, self.width) if plan.ragged else None,
        )
        levels = self._levels(gates, weight, bias=_plain(bias), own=own, kept=plan.with_backward)
        self.library.tree_lstm_forward_levels(self.rows, levels, self.threads)
        return gates

    def backward_levels(
        self, weight: Tensor, gates: Gates, grads: Gates, given: StateGradients
    ) -> None:
        """Compute the gradients of all inner nodes, and those of their children's states."""
        plan, to_sums = self.plan, None
        to_hidden, to_memory = given.buffers(0, plan.slots)
        if plan.ragged:
            most = max((block.size for block in plan.blocks), default=0)
            to_sums = to_hidden.new_empty(most, self.width)
        levels = self._levels(
            gates, weight, grads=grads.rows, to_forget=grads.forget, to_memory=to_memory,
            to_hidden=to_hidden, to_sums=to_sums,
        )  # fmt: skip
        incoming = _incoming(given.of_nodes(plan.leaves, plan.inner))
        self.library.tree_lstm_backward_levels(self.rows, incoming, levels, self.threads)

    def _levels(
        self, gates: Gates, weight: Tensor, bias: Tensor | None = None, **more: Tensor | int | None
    ) -> _Levels:
        columns, weight = gates.rows.size(1), _plain(weight)
        return _Levels(
            multiply=multiply_address(), count=len(self.plan.blocks),
            blocks=ctypes.addressof(self.plan.table), weight=weight, weight_forget=weight[columns:],
            bias=bias, bias_forget=None if bias is None else bias[columns:],
            gates=gates.rows, forget=gates.forget, **more,
        )  # fmt: skip


def _incoming(given: StateGradients) -> _Given:
    """The gradients of states, as C reads them."""
    of_h, of_c = map(dense_columns, given.outside)
    return _Given(
        hidden=given.hidden, memory=given.memory, place=given.place,
        outside_hidden=of_h, outside_hidden_row=0 if of_h is None else of_h.stride(0),
        outside_memory=of_c, outside_memory_row=0 if of_c is None else of_c.stride(0),
    )  # fmt: skip


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
    # Independent of the default dtype and device.
    plain: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    left, right = torch.arange(6, **plain).view(2, 3), torch.arange(12, **plain).view(4, 3)
    found = torch.ones(2, 4, **plain)
    sizes = [byref(c_int64(size)) for size in (4, 2, 3)]
    three, four = (byref(c_int64(size)) for size in (3, 4))
    one = byref(ctypes.c_float(1))
    weight, given, out = (c_void_p(part.data_ptr()) for part in (right, left, found))
    function(b"T", b"N", *sizes, one, weight, three, given, three, one, out, four)  # type: ignore[operator]
    return torch.equal(found, left @ right.t() + 1)
