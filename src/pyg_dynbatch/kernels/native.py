"""Tree-LSTMs in C on CPUs, in one of two ways.

- :class:`NativeGates`: torch computes the products of each block of nodes, in single precision or
  bfloat16, and C its gates.
- :class:`NativeKernel`: C runs a whole schedule in one call each way, in single precision, with
  products of its own. :func:`runs_at_once` decides by the make of the processor and the sizes.

Arguments of C have the names of the structs in ``native/tree_lstm.h``. C is given addresses: a
tensor must stay alive while a struct with its address is in use.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.native import is_native, loaded_extension
from pyg_dynbatch.core.products import BLOCK, RowProduct, chosen_products
from pyg_dynbatch.kernels.blocks import (
    NO_ROWS,
    Gates,
    Kernel,
    NodeBlock,
    RunPlan,
    RunRows,
    StateGradients,
    TorchGates,
)

# From this many rows on, products with packed panels are faster by more than packing takes.
_WORTH_PACKING = 48

# Panels end with a whole vector, of at most this many numbers: LANES of ``native/products.h``.
_VECTOR = 16


def runs_at_once(plan: RunPlan, weights: Sequence[Tensor]) -> bool:
    """Choose whether C runs a whole schedule in one call, with products of its own."""
    if plan.half or plan.precision is not None or not plan.schedule.single_parent:
        return False
    products = chosen_products()
    return plan.inner < products.own_nodes or weights[1].numel() < products.own_weights


def casting_pays_off(schedule: Levels, inputs: Tensor, weights: Sequence[Tensor]) -> bool:
    """Choose whether autocast casts products to bfloat16; else C runs all at once in float32."""
    inner = schedule.num_nodes - schedule.level_sizes[0]
    is_small = inner * weights[1].numel() < chosen_products().own_work
    return not (is_small and schedule.single_parent and is_native(inputs, *weights))


class NativeGates(TorchGates):
    """Compute the gates of blocks in C, which reads of a block its nodes and their children.

    Arguments are as for :class:`~pyg_dynbatch.kernels.blocks.TorchGates`: ``products`` are read,
    ``gates`` and states are written, and ``own`` is what products lack of nodes with an input.
    """

    def __init__(
        self,
        plan: RunPlan,
        rows: RunRows,
        *,
        inner: bool,
        bias: Tensor = NO_ROWS,
        forget_bias: Tensor = NO_ROWS,
    ) -> None:
        super().__init__(plan, rows, inner=inner, bias=bias, forget_bias=forget_bias)
        self.native = loaded_extension()
        self.threads = torch.get_num_threads()
        self.dropout_mask = _mask(self.dropout_mask, self.memory)
        arity = -1 if plan.ragged else plan.arity
        # A struct with the addresses of the tensors that this object holds.
        self.nodes: bytes = self.native.tree_lstm_nodes(
            width=self.width, arity=arity if inner else 0, half=int(plan.half),
            hidden=self.hidden, memory=self.memory, activated=self.activated,
            half_hidden=self.read_hidden if plan.half else None, dropout_mask=self.dropout_mask,
            bias=self.bias if plan.half else None,
            forget_bias=self.forget_bias if plan.half else None,
            index=plan.children, starts=plan.child_start if plan.ragged else None,
            all_hidden=self.all_hidden, all_memory=self.all_memory, gathered=self.gathered,
            sums=self.sums,
        )  # fmt: skip

    def gather(self, block: NodeBlock) -> None:
        """Gather h of the children of a block, and sum it per node if ``sums`` is given."""
        self.native.tree_lstm_gather(self.nodes, *_place_of(block), self.threads)

    def forward(
        self, block: NodeBlock, products: Gates, gates: Gates, own: Tensor | None = None
    ) -> None:
        """Activate products to gates, and write the states of a block."""
        self.native.tree_lstm_forward(
            self.nodes,
            *_place_of(block),
            products.rows,
            products.forget,
            gates.rows,
            gates.forget,
            own,
            block.filled,
            self.threads,
        )

    def backward(
        self, block: NodeBlock, gates: Gates, incoming: StateGradients, grads: Gates
    ) -> None:
        """Write the gradients of products, and for inner nodes those of the children's c."""
        self.native.tree_lstm_backward(
            self.nodes,
            _incoming_struct(incoming),
            *_place_of(block),
            gates.rows,
            gates.forget,
            grads.rows,
            grads.forget,
            grads.child_memory,
            self.threads,
        )

    def sum_equal(self, incoming: StateGradients, cell: Tensor, cells: int) -> StateGradients:
        """Sum the gradients of equal leaves, always in the same order."""
        width = incoming.hidden.size(1)
        cell = cell.contiguous()
        hidden = incoming.memory.new_zeros(cells, width)
        memory = incoming.memory.new_zeros(cells, width)
        self.native.tree_lstm_sum_equal(
            _incoming_struct(incoming), cell, cell.size(0), width, hidden, memory, self.threads
        )
        return StateGradients(hidden, memory)


class NativeKernel(Kernel):
    """Run a whole schedule in one call of C each way."""

    def forward(self, plan: RunPlan, inputs: Tensor, weights: Sequence[Tensor]) -> RunRows:
        """Compute all nodes; in inference, the gates are those of the last block alone."""
        weight_input, weight_hidden, bias = map(_plain, weights)
        rows = RunRows.of(plan, bias, bias.size(0) // 4)

        # W x of the inner nodes with an input, which C adds to their products of h.
        inner_inputs = inputs[plan.leaf_inputs :]
        num_inner_inputs = inner_inputs.size(0)
        own = None
        if num_inner_inputs:
            product = RowProduct(weight_input, rows=num_inner_inputs)
            own = product(inner_inputs, 0, num_inner_inputs)

        loaded_extension().tree_lstm_forward_run(
            **_shared_fields(plan, rows, weight_hidden), keeps=plan.keeps, hidden=rows.hidden,
            rows=inputs, weight_input=weight_input, bias=bias, own=own,
            all_bias=bias.new_empty(rows.gates.size(1)), features=inputs.size(1),
            products=_room_for_products(plan, rows),
            leaf_hidden=rows.leaf_hidden, leaf_memory=rows.leaf_memory,
            packed_input=_room_for_panels(plan.leaf_inputs, weight_input),
            **_rooms_for_panels(plan, weight_hidden),
        )  # fmt: skip
        return rows

    def backward(
        self, plan: RunPlan, rows: RunRows, weight_hidden: Tensor, incoming: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Go from the roots to the leaves; return gradients before activation."""
        width = rows.memory.size(1)
        grads = rows.new_gates()
        leaf_grads = torch.empty_like(rows.leaf_gates)
        to_hidden, to_memory = incoming.buffers(0, plan.slots)
        to_sums = None
        if plan.ragged:
            widest_level = max(plan.schedule.level_sizes[1:], default=0)
            to_sums = rows.memory.new_empty(min(widest_level, BLOCK), width)

        of_cells = None
        if plan.leaf_inverse is not None:
            # C adds up the gradients of equal leaves in these.
            hidden = rows.memory.new_zeros(plan.leaf_cells, width)
            memory = rows.memory.new_zeros(plan.leaf_cells, width)
            of_cells = _incoming_struct(StateGradients(hidden, memory))

        weight_hidden = _plain(weight_hidden)
        loaded_extension().tree_lstm_backward_run(
            **_shared_fields(plan, rows, weight_hidden), keeps=True,
            **_rooms_for_panels(plan, weight_hidden),
            given=_incoming_struct(incoming), of_cells=of_cells,
            leaf_grads=leaf_grads, grads=grads.rows, to_forget=grads.forget,
            to_hidden=to_hidden, to_memory=to_memory, to_sums=to_sums,
        )  # fmt: skip
        return grads, leaf_grads


def _incoming_struct(incoming: StateGradients) -> bytes:
    """Return a ``struct incoming`` with the addresses of the gradients."""
    of_h, of_c = incoming.outside
    struct: bytes = loaded_extension().tree_lstm_incoming(
        half=int(incoming.hidden.dtype == torch.bfloat16), hidden=incoming.hidden,
        memory=incoming.memory, place=incoming.place,
        outside_hidden=of_h, outside_hidden_row=0 if of_h is None else of_h.stride(0),
        outside_memory=of_c, outside_memory_row=0 if of_c is None else of_c.stride(0),
    )  # fmt: skip
    return struct


def _place_of(block: NodeBlock) -> tuple[int, int, int, int]:
    """Return the fields of ``struct block``."""
    return block.first, block.size, block.edge, block.edges


def _mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the dropout mask as C reads it."""
    return None if mask is None else mask.to(like.dtype).contiguous()


def _shared_fields(plan: RunPlan, rows: RunRows, weight_hidden: Tensor) -> dict[str, Any]:
    """Return the fields of ``struct run`` that both ways read."""
    schedule = plan.schedule
    return {
        "width": rows.memory.size(1), "arity": -1 if plan.ragged else plan.arity,
        "leaves": plan.leaves, "levels": len(schedule.level_sizes), "inner": plan.inner,
        "slots": plan.slots, "cells": plan.leaf_cells, "inputs": plan.leaf_inputs,
        "threads": torch.get_num_threads(), "sizes": array("q", schedule.level_sizes),
        "filled": array("q", schedule.level_inputs), "index": plan.children,
        "starts": plan.child_start if plan.ragged else None,
        "leaf_of": None if plan.leaf_inverse is None else plan.cell_of_leaf.contiguous(),
        "weight_hidden": weight_hidden, "dropout_mask": _mask(plan.dropout_mask, rows.memory),
        "memory": rows.memory, "activated": rows.activated, "leaf_activated": rows.leaf_activated,
        "gathered": rows.gathered, "sums": rows.sums,
        "leaf_gates": rows.leaf_gates, "gates": rows.gates, "forget": rows.forget,
    }  # fmt: skip


def _room_for_products(plan: RunPlan, rows: RunRows) -> Tensor:
    """Make room for the products of any block; those of leaves are narrower."""
    largest_level = max(plan.leaf_cells, *plan.schedule.level_sizes[1:], 0)
    return rows.gates.new_empty(min(BLOCK, largest_level), rows.gates.size(1))


def _rooms_for_panels(plan: RunPlan, weight_hidden: Tensor) -> dict[str, Tensor | None]:
    """Make room to pack the weights of h, where the products of so many rows are worth it."""
    if not plan.ragged:
        return {"packed_hidden": _room_for_panels(plan.inner, weight_hidden), "packed_forget": None}
    width = weight_hidden.size(0) // 4
    of_node, of_child = weight_hidden.split([3 * width, width])  # u, i, o, and the forget gate
    return {
        "packed_hidden": _room_for_panels(plan.inner, of_node),
        "packed_forget": _room_for_panels(plan.slots, of_child),
    }


def _room_for_panels(rows: int, weight: Tensor) -> Tensor | None:
    """Make room for the panels of a matrix or its transpose, if products of so many rows use them.

    The last panel has zeros up to a whole vector, along the columns or those of the transpose.
    """
    if rows < _WORTH_PACKING:
        return None
    columns, inner = weight.shape
    size = max(_whole_vectors(columns) * inner, columns * _whole_vectors(inner))
    return weight.new_empty(size)


def _whole_vectors(count: int) -> int:
    return (count + _VECTOR - 1) // _VECTOR * _VECTOR


def _plain(rows: Tensor) -> Tensor:
    """Return rows as they must be in memory, where a tensor that torch negates lazily is not."""
    return rows.resolve_neg().contiguous()
