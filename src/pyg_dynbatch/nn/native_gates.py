"""Gates and whole levels of small fused runs in C, with the BLAS of torch."""

import ctypes
import logging
import sys
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_plan import (
    Block,
    Downward,
    FusedPlan,
    Gates,
    Incoming,
    NodeRows,
    Outgoing,
)

_ROWS = ("hidden", "memory", "squashed")
_OF_CHILDREN = ("index", "starts", "all_hidden", "cells", "gathered", "sums")


class _Nodes(ctypes.Structure):
    """What all blocks of a pass share, as in C."""

    _fields_ = [
        ("width", c_int64),
        ("arity", c_int64),
        *((name, c_void_p) for name in (*_ROWS, "keep", *_OF_CHILDREN)),
    ]


class _Given(ctypes.Structure):
    """The gradients that come in, as in C."""

    _fields_ = [
        *((name, c_void_p) for name in ("hidden", "memory", "place")),
        *((name, c_void_p) for name in ("outside_hidden", "outside_memory")),
        *((name, c_int64) for name in ("outside_hidden_row", "outside_memory_row")),
    ]


def declare(library: ctypes.CDLL) -> None:
    """Tells the types of the functions of ``native_gates.c``, a part of ``native_levels.c``."""
    block = [c_int64] * 4
    library.tree_lstm_gather.argtypes = [POINTER(_Nodes), *block, c_int]
    library.tree_lstm_forward.argtypes = [POINTER(_Nodes), *block, *[c_void_p] * 3, c_int64, c_int]
    library.tree_lstm_backward.argtypes = [
        POINTER(_Nodes),
        POINTER(_Given),
        *block,
        *[c_void_p] * 5,
        c_int,
    ]
    library.tree_lstm_sum_equal.argtypes = [
        POINTER(_Given), c_void_p, *[c_int64] * 2, *[c_void_p] * 2, c_int,
    ]  # fmt: skip
    for name in ("gather", "forward", "backward", "sum_equal"):
        getattr(library, f"tree_lstm_{name}").restype = None


class NativeGates:
    """Computes gates by compiled C, in float32 on CPUs."""

    squashes: ClassVar[bool] = False
    """C squashes, not the product."""

    def __init__(self, library: ctypes.CDLL, nodes: NodeRows) -> None:
        self.library, self.threads = library, torch.get_num_threads()
        keep = None if nodes.keep is None else nodes.keep.to(nodes.squashed.dtype).contiguous()
        # C is given addresses, so what stands there is held.
        self._held: list[object] = [nodes, keep]
        self.nodes = _Nodes(nodes.squashed.size(1), 0)
        self._set(self.nodes, (*_ROWS, "keep"), (*nodes[:3], keep))
        children = nodes.children
        if children is not None:
            plan = children.plan
            ragged = plan.arity is None
            self.nodes.arity = -1 if ragged else plan.arity
            starts = plan.child_start if ragged else None
            found = (plan.children, starts, *children[1:])
            self._set(self.nodes, _OF_CHILDREN, found)
        self._given: tuple[Incoming, _Given] | None = None

    def gather(self, block: Block) -> None:
        """Gathers h of the children of a block, and sums it up where that is wanted."""
        first, size, _, _, edge, edges, _ = block
        self.library.tree_lstm_gather(self.nodes, first, size, edge, edges, self.threads)

    def forward(self, block: Block, gates: Gates) -> None:
        """Activates the gates in place, and writes the states."""
        first, size, _, filled, edge, edges, _ = block
        rows, forget, own, _ = gates
        self.library.tree_lstm_forward(
            self.nodes, first, size, edge, edges, rows.data_ptr(), address_of(forget),
            address_of(own), filled, self.threads,
        )  # fmt: skip

    def backward(self, block: Block, gates: Gates, given: Incoming, wanted: Outgoing) -> None:
        """Writes gradients, from the activated gates."""
        first, size, _, _, edge, edges, _ = block
        if self._given is None or self._given[0] is not given:
            self._given = given, self.incoming(given)
        rows, forget, memory = wanted
        self.library.tree_lstm_backward(
            self.nodes, self._given[1], first, size, edge, edges, gates.rows.data_ptr(),
            address_of(gates.forget), rows.data_ptr(), address_of(forget), address_of(memory),
            self.threads,
        )  # fmt: skip

    def sum_equal(self, given: Incoming, cell: Tensor, cells: int) -> Incoming:
        """Adds up the gradients of equal leaves, always in the same order."""
        width, cell = given.hidden.size(1), cell.contiguous()
        hidden, memory = (given.hidden.new_zeros(cells, width) for _ in range(2))
        self.library.tree_lstm_sum_equal(
            self.incoming(given), cell.data_ptr(), cell.size(0), width,
            hidden.data_ptr(), memory.data_ptr(), self.threads,
        )  # fmt: skip
        return Incoming(hidden, memory)

    def incoming(self, given: Incoming) -> _Given:
        """The gradients that come in, as C reads them."""
        found = _Given()
        self._set(found, ("hidden", "memory", "place"), given[:3])
        for name, rows in zip(("outside_hidden", "outside_memory"), given.outside, strict=True):
            if rows is not None:
                # A gradient may be one number, read again and again, or negated when it is read.
                rows = rows.resolve_neg()
                rows = rows if rows.stride(1) == 1 else rows.contiguous()
                setattr(found, f"{name}_row", rows.stride(0))
                self._set(found, (name,), (rows,))
        return found

    def _set(self, structure: Any, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
        self._held += tensors
        for name, rows in zip(names, tensors, strict=True):
            setattr(structure, name, address_of(rows))


def address_of(rows: Tensor | None) -> int | None:
    """Gives the address of the first number, for C; None for no tensor."""
    return None if rows is None else rows.data_ptr()


SOURCE = Path(__file__).with_name("native_levels.c")

_log = logging.getLogger(__name__)


class _Levels(ctypes.Structure):
    """What all levels share, as in C."""

    _fields_ = [
        ("multiply", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("blocks", "weight", "bias", "weight_forget")),
        *((name, c_void_p) for name in ("bias_forget", "own", "gates", "forget")),
        ("kept", c_int64),
        *((name, c_void_p) for name in ("grads", "to_forget", "to_memory", "to_hidden", "to_sums")),
    ]


class LevelWeights(NamedTuple):
    """Weight and bias of the children of inner nodes, ``[column, inner]`` and ``[column]``."""

    weight: Tensor
    bias: Tensor | None = None
    forget: Tensor | None = None
    forget_bias: Tensor | None = None

    def contiguous(self) -> "LevelWeights":
        """As C reads them."""
        others = (part if part is None else _plain(part) for part in self[1:])
        return LevelWeights(_plain(self.weight), *others)


def _plain(rows: Tensor) -> Tensor:
    # What is negated when it is read is not negated in memory.
    return rows.resolve_neg().contiguous()


def declare_levels(library: ctypes.CDLL) -> None:
    """Tells the types of the functions of ``native_levels.c``."""
    library.tree_lstm_forward_levels.argtypes = [c_void_p, POINTER(_Levels), c_int]
    library.tree_lstm_backward_levels.argtypes = [c_void_p, c_void_p, POINTER(_Levels), c_int]
    for function in (library.tree_lstm_forward_levels, library.tree_lstm_backward_levels):
        function.restype = None


@cache
def multiply_address() -> int | None:
    """Finds ``sgemm`` in the libraries that torch has loaded."""
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
    rows = (c_void_p(part.data_ptr()) for part in (right, left, found))
    weight, given, out = rows
    function(b"T", b"N", *sizes, one, weight, three, given, three, one, out, four)  # type: ignore[operator]
    return torch.equal(found, left @ right.t() + 1)


def forward_levels(
    library: ctypes.CDLL,
    plan: FusedPlan,
    nodes: NodeRows,
    weights: LevelWeights,
    own: Tensor | None,
) -> list[Tensor]:
    """Computes all inner nodes."""
    weights = weights.contiguous()
    rows, places = plan.inner, plan.places
    if not plan.keep:
        rows = max((block.size for block in plan.blocks), default=0)
        places = max((block.edges for block in plan.blocks), default=0)
    gates = [weights.weight.new_empty(rows, weights.weight.size(0))]
    if weights.forget is not None:
        gates.append(weights.forget.new_empty(places, weights.forget.size(0)))
    kernels = NativeGates(library, nodes)
    levels = _levels(plan, weights)
    _set(levels, ("own", "gates", "forget"), (own, *gates))
    levels.kept = plan.keep
    library.tree_lstm_forward_levels(byref(kernels.nodes), levels, kernels.threads)
    return gates


def backward_levels(
    library: ctypes.CDLL,
    nodes: NodeRows,
    weights: LevelWeights,
    gates: Sequence[Tensor],
    grads: Sequence[Tensor],
    down: Downward,
) -> None:
    """Computes the gradients of all inner nodes and of what their children gave them."""
    plan, weights = down.plan, weights.contiguous()
    kernels = NativeGates(library, nodes)
    levels = _levels(plan, weights)
    _set(levels, ("gates", "forget"), gates)
    _set(levels, ("grads", "to_forget"), grads)
    to_hidden, to_memory = down.room(0, plan.places)
    most = max((block.size for block in plan.blocks), default=0)
    sums = to_hidden.new_empty(most if weights.forget is not None else 0, to_hidden.size(1))
    _set(levels, ("to_memory", "to_hidden", "to_sums"), (to_memory, to_hidden, sums))
    given = kernels.incoming(down.incoming(plan.leaves, plan.inner))
    library.tree_lstm_backward_levels(byref(kernels.nodes), byref(given), levels, kernels.threads)


def _levels(plan: FusedPlan, weights: LevelWeights) -> _Levels:
    found = _Levels(multiply_address(), len(plan.blocks))
    found.blocks = ctypes.addressof(plan.table)
    _set(found, ("weight", "bias", "weight_forget", "bias_forget"), weights)
    return found


def _set(levels: _Levels, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    for name, rows in zip(names, tensors, strict=False):
        setattr(levels, name, address_of(rows))
