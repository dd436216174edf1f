"""Tree-LSTMs in C on CPUs: gates of blocks, and whole schedules in one call each way.

Single precision; gates of blocks also for products in bfloat16.
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

# Panels end with a whole vector, of at most this many numbers.
_VECTOR = 16


def runs_at_once(plan: RunPlan, weights: Sequence[Tensor]) -> bool:
    """Choose whether C runs a whole schedule in one call, with products of its own."""
    if plan.half or plan.precision is not None or not plan.schedule.single_parent:
        return False
    products = chosen_products()
    return plan.inner < products.own_nodes or weights[1].numel() < products.own_weights


def casting_pays_off(schedule: Levels, inputs: Tensor, weights: Sequence[Tensor]) -> bool:
    """Choose whether products are in bfloat16 under autocast, or C runs it at once in float32."""
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
        self.native.tree_lstm_gather(self.nodes, *block[:4], self.threads)

    def forward(
        self, block: NodeBlock, products: Gates, gates: Gates, own: Tensor | None = None
    ) -> None:
        """Activate products to gates, and write the states of a block."""
        self.native.tree_lstm_forward(
            self.nodes,
            *block[:4],
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
            _packed(incoming),
            *block[:4],
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
        hidden, memory = (incoming.memory.new_zeros(cells, width) for _ in range(2))
        self.native.tree_lstm_sum_equal(
            _packed(incoming), cell, cell.size(0), width, hidden, memory, self.threads
        )
        return StateGradients(hidden, memory)


class NativeKernel(Kernel):
    """Run a whole schedule in one call of C each way."""

    def forward(self, plan: RunPlan, inputs: Tensor, weights: Sequence[Tensor]) -> RunRows:
        """Compute all nodes; in inference, the gates are those of the last block alone."""
        weight_input, weight_hidden, bias = map(_plain, weights)
        rows = RunRows.of(plan, bias, bias.size(0) // 4)

        features = inputs.size(1)
        filled = inputs[plan.leaf_inputs :]
        own = None
        if count := filled.size(0):
            own = RowProduct(weight_input, rows=count)(filled, 0, count)

        loaded_extension().tree_lstm_forward_run(
            **_fields(plan, rows, weight_hidden), keeps=plan.keeps, hidden=rows.hidden,
            rows=inputs, weight_input=weight_input, bias=bias, own=own,
            all_bias=bias.new_empty(rows.gates.size(1)), features=features,
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
            widest = max(plan.schedule.level_sizes[1:], default=0)
            to_sums = rows.memory.new_empty(min(widest, BLOCK), width)

        of_cells = None
        if plan.leaf_inverse is not None:
            hidden, memory = (rows.memory.new_zeros(plan.leaf_cells, width) for _ in range(2))
            of_cells = _packed(StateGradients(hidden, memory))

        weight_hidden = _plain(weight_hidden)
        loaded_extension().tree_lstm_backward_run(
            **_fields(plan, rows, weight_hidden), keeps=True, given=_packed(incoming),
            **_rooms_for_panels(plan, weight_hidden),
            of_cells=of_cells, leaf_grads=leaf_grads, grads=grads.rows, to_forget=grads.forget,
            to_hidden=to_hidden, to_memory=to_memory, to_sums=to_sums,
        )  # fmt: skip
        return grads, leaf_grads


def _packed(incoming: StateGradients) -> bytes:
    """The gradients of states, as C reads them; they must be kept alive."""
    of_h, of_c = incoming.outside
    struct: bytes = loaded_extension().tree_lstm_incoming(
        half=int(incoming.hidden.dtype == torch.bfloat16), hidden=incoming.hidden,
        memory=incoming.memory, place=incoming.place,
        outside_hidden=of_h, outside_hidden_row=0 if of_h is None else of_h.stride(0),
        outside_memory=of_c, outside_memory_row=0 if of_c is None else of_c.stride(0),
    )  # fmt: skip
    return struct


def _mask(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(like.dtype).contiguous()


def _fields(plan: RunPlan, rows: RunRows, weight_hidden: Tensor) -> dict[str, Any]:
    """The fields of ``struct run`` that both ways read."""
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
    """Room for the products of any block; those of leaves are narrower."""
    largest = min(BLOCK, max(plan.leaf_cells, *plan.schedule.level_sizes[1:], 0))
    return rows.gates.new_empty(largest, rows.gates.size(1))


def _rooms_for_panels(plan: RunPlan, weight_hidden: Tensor) -> dict[str, Tensor | None]:
    """Room to pack the weights of h, where the products of so many rows are worth it."""
    columns = weight_hidden.size(0)
    if not plan.ragged:
        return {"packed_hidden": _room_for_panels(plan.inner, weight_hidden), "packed_forget": None}
    gates, forget = weight_hidden.split([columns // 4 * 3, columns // 4])
    return {
        "packed_hidden": _room_for_panels(plan.inner, gates),
        "packed_forget": _room_for_panels(plan.slots, forget),
    }


def _room_for_panels(rows: int, weight: Tensor) -> Tensor | None:
    """Room for the panels of a matrix or of its transpose, if products of so many rows use them."""
    if rows < _WORTH_PACKING:
        return None
    columns, inner = weight.shape
    return weight.new_empty(max(columns * _in_vectors(inner), _in_vectors(columns) * inner))


def _in_vectors(count: int) -> int:
    return (count + _VECTOR - 1) // _VECTOR * _VECTOR


def _plain(rows: Tensor) -> Tensor:
    # A tensor that is negated only when it is read is not negated in memory.
    return rows.resolve_neg().contiguous()
