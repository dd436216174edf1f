"""The gates of fused Tree-LSTMs on CPUs by C: one pass over a block forwards, one backwards."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_void_p
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_downward import Incoming
from pyg_dynbatch.nn.fused_plan import Block
from pyg_dynbatch.nn.gate_rows import Gates, NodeRows, Outgoing

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
    """Tells the types of the functions of ``native_gates.c``, a part of ``native_levels.c``.

    Args:
        library: The built file.
    """
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
    """Computes gates by compiled C, in float32 on CPUs.

    Args:
        library: ``native_levels.c``, built and declared.
        nodes: The nodes of the pass.
    """

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
    """Gives the address of the first number, for C; None for no tensor.

    Args:
        rows: The tensor; whoever calls C holds it as long.

    Example:
        >>> address_of(None) is None
        True
    """
    return None if rows is None else rows.data_ptr()
