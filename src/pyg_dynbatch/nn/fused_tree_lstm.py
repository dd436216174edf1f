"""Run N-ary and child-sum Tree-LSTMs over a whole schedule in one autograd function.

The forward pass computes the leaves, and then the inner nodes level by level, from products with
weights (u, i, o and the forget gates f) to states (h and c). The backward pass goes from the roots
to the leaves; gradients of weights are products over all nodes at once. With a fixed number of
children the forget gates are further columns in the row of a node; with any number of children
(child-sum, ``arity`` None, here called ragged) u, i, o depend on the sum of h, and f has one row
per child.
"""

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.core.row_buffer import check_backward
from pyg_dynbatch.nn.fused_gates import (
    BLOCK,
    FusedPlan,
    Gates,
    Kept,
    StateGradients,
    TorchGates,
    sum_segments,
)
from pyg_dynbatch.nn.native_gates import NativeGates, gates_library
from pyg_dynbatch.nn.native_levels import backward_run, forward_run, multiply_address, narrow_rows
from pyg_dynbatch.nn.products import RowProduct, packs, sum_rows, weight_gradient


def fused_tree_lstm(
    schedule: Levels, inputs: Tensor, weights: Sequence[Tensor], **options: Any
) -> tuple[Tensor, Tensor]:
    """Run a Tree-LSTM over all levels of a schedule, which has the arity of the cell.

    ``inputs`` are as for ``RecursiveCell.run_schedule``, ``weights`` the cell's ``weight_input``,
    ``weight_hidden`` and ``bias``, and ``options`` those of :class:`FusedPlan`.
    """
    plan = FusedPlan(schedule, inputs, **options)
    _check_weights(plan, inputs, weights)
    inputs = inputs.contiguous()
    plan.with_backward = torch.is_grad_enabled() and any(
        each.requires_grad for each in (inputs, *weights)
    )
    plan.at_once = _runs_at_once(plan, inputs, weights)
    if plan.with_backward:
        found: tuple[Tensor, Tensor] = _FusedTreeLSTM.apply(plan, inputs, *weights)
        return found
    return _forward(plan, inputs, weights)[0]


def _check_weights(plan: FusedPlan, inputs: Tensor, weights: Sequence[Tensor]) -> None:
    """Check what kernels read by address: ``functional_call`` can replace any weight."""
    width, slots = weights[2].size(0) // 4, 1 if plan.ragged else plan.arity
    shapes = (4 * width, inputs.size(1)), ((3 + slots) * width, slots * width), (4 * width,)
    for weight, shape in zip(weights, shapes, strict=True):
        same = plan.precision is not None or weight.dtype == inputs.dtype
        if weight.shape != shape or not same or weight.device != inputs.device:
            wanted = (
                f"{inputs.dtype}{list(shape)} on {inputs.device}, as the inputs and other weights"
            )
            what, got = "Tree-LSTM: a weight does not fit", describe_value(weight)
            raise mismatch(ValueError, what, wanted, f"{got} on {weight.device}")


class _FusedTreeLSTM(Function):
    @staticmethod
    def forward(ctx: Any, plan: FusedPlan, inputs: Tensor, *weights: Tensor) -> Any:
        states, kept = _forward(plan, inputs, weights)
        ctx.plan, ctx.counts = plan, (len(kept.leaf_gates), len(kept.gates))
        ctx.save_for_backward(inputs, *weights[:2], *kept.tensors())
        ctx.set_materialize_grads(False)
        return states

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None) -> Any:
        check_backward((grad_h, grad_c))
        plan: FusedPlan = ctx.plan
        # Hooks on saved tensors may have changed the layout.
        saved: list[Any] = [
            each if each is None else each.contiguous() for each in ctx.saved_tensors
        ]
        inputs, weight_input, weight_hidden = saved[:3]
        kept = Kept.of(saved[3:], *ctx.counts)
        with torch.autocast(inputs.device.type, enabled=False):
            given = StateGradients.of_results(plan, grad_h, grad_c, kept.memory)
            backward = backward_run if plan.at_once else _backward_blocks
            grads, of_leaves = backward(plan, kept, weight_hidden, given)
            needed = ctx.needs_input_grad
            grad_inputs = torch.empty_like(inputs) if needed[1] else None
            grad_weight, grad_bias = _input_gradients(
                plan, grads, of_leaves, inputs, weight_input, grad_inputs
            )
            grad_hidden = None
            if needed[3]:
                operand = _operand(plan, kept.gathered, kept.sums)
                grad_hidden = weight_gradient(grads.rows, operand, plan.precision)
                if grads.forget is not None:
                    of_forget = weight_gradient(grads.forget, kept.gathered, plan.precision)
                    grad_hidden = torch.cat([grad_hidden, of_forget])
            return None, grad_inputs, grad_weight, grad_hidden, grad_bias


# Forward.


def _forward(
    plan: FusedPlan, inputs: Tensor, weights: Sequence[Tensor]
) -> tuple[tuple[Tensor, Tensor], Kept]:
    """Return h and c in the requested order, and what the backward pass reads."""
    if plan.at_once:
        hidden, kept = forward_run(plan, inputs, weights)
    else:
        with torch.autocast(inputs.device.type, enabled=False):
            hidden, kept = _forward_blocks(plan, inputs, weights)
    return (plan.in_order(hidden), plan.in_order(kept.memory)), kept


def _forward_blocks(
    plan: FusedPlan, inputs: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Kept]:
    """Compute all nodes, block by block; return what :func:`forward_run` does."""
    weight_input, weight_hidden, bias = weights
    width = bias.size(0) // 4
    # h, c and tanh(c) of all nodes in level order, after a row for missing children.
    states = [bias.new_empty(plan.nodes + 1, width) for _ in range(3)]
    states[0][0], states[1][0] = 0, 0
    leaf_gates, leaf_activated = _forward_leaves(
        plan, inputs, weight_input[: 3 * width], bias[: 3 * width], states
    )
    # Products also read a few rows beyond those already filled, whose results are dropped.
    gathered = bias.new_empty(plan.slots, width)
    sums = bias.new_empty(plan.inner, width) if plan.ragged else None
    kernels = choose_gates(gathered)(plan, states, gathered, sums, inner=True)
    gates = _forward_levels(kernels, inputs, weight_input, weight_hidden, bias)
    hidden, memory, activated = states
    return hidden, Kept(gathered, sums, memory, activated, leaf_activated, None, leaf_gates, gates)


def _forward_leaves(
    plan: FusedPlan, inputs: Tensor, weight: Tensor, bias: Tensor, states: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Compute the states of all leaves; return their gates and ``tanh(c)``."""
    shared, width = plan.leaf_inverse is not None, bias.size(0) // 3
    own = [
        state.new_empty(plan.leaf_cells, width) if shared else state[1 : plan.leaves + 1]
        for state in states
    ]
    kernels = choose_gates(states[0])(plan, own)
    product = RowProduct(weight, bias, plan.precision, plan.leaf_inputs)
    # A missing input is an input of zeros.
    missing = min(plan.leaf_cells - plan.leaf_inputs, plan.block)
    zeros = inputs.new_zeros(missing, inputs.size(1)) if missing else inputs
    found = []
    for block in plan.leaf_blocks():
        read, first = (inputs, block.first) if block.filled else (zeros, 0)
        rows = product(read, first, block.size)
        kernels.forward(block, Gates(rows))
        if plan.with_backward:
            found.append(rows)
    if shared:
        index = plan.spread_leaves()
        for computed, state in zip(own[:2], states, strict=False):
            torch.index_select(computed, 0, index, out=state[1 : plan.leaves + 1])
    return found, own[2]


def _forward_levels(
    kernels: TorchGates, inputs: Tensor, weight_input: Tensor, weight_hidden: Tensor, bias: Tensor
) -> list[Gates]:
    """Compute all inner nodes; return the activated gates of all blocks."""
    plan, width, gathered = kernels.plan, kernels.width, kernels.gathered
    columns, precision = (3 + plan.arity) * width, plan.precision
    if not plan.ragged:
        # All children of a node share the bias of the forget gate.
        bias = torch.cat([bias[: 3 * width], *[bias[3 * width :]] * plan.arity])
    filled = inputs[plan.leaf_inputs :]
    count = filled.size(0)
    input_product = RowProduct(weight_input, precision=precision, rows=count) if count else None
    product = RowProduct(weight_hidden[:columns], bias[:columns], precision, plan.inner)
    forget_product = None
    if plan.ragged:
        of_forget = weight_hidden[columns:], bias[columns:]
        forget_product = RowProduct(*of_forget, precision, plan.slots)
    operand, gates = _operand(plan, gathered, kernels.sums), []
    for block in plan.blocks:
        kernels.gather(block)
        own = forget = None
        if input_product is not None and block.filled:
            own = input_product(filled, block.input, block.filled)
        if forget_product is not None:
            forget = forget_product(gathered, block.edge, block.edges)
        found = Gates(product(operand, block.first, block.size), forget)
        kernels.forward(block, found, own)
        if plan.with_backward:
            gates.append(found)
    return gates


def _operand(plan: FusedPlan, gathered: Tensor, sums: Tensor | None) -> Tensor:
    """What the weights of u, i, o multiply: the sums of h, or the h of all children in a row."""
    return sums if sums is not None else gathered.view(plan.inner, plan.arity * gathered.size(1))


# Backward.


def _backward_blocks(
    plan: FusedPlan, kept: Kept, weight_hidden: Tensor, given: StateGradients
) -> tuple[Gates, Tensor]:
    """Return the gradients of the products of inner nodes and of computed leaves."""
    states = kept.memory, kept.memory, kept.activated  # h is not read
    kernels = choose_gates(kept.memory)(plan, states, inner=True)
    grads = _backward_levels(kernels, weight_hidden, kept.gates, given)
    return grads, _backward_leaves(plan, kept, given)


def _backward_levels(
    kernels: TorchGates, weight: Tensor, gates: Sequence[Gates], given: StateGradients
) -> Gates:
    """Go from the roots to the lowest inner nodes; return the gradients before activation."""
    plan, width = kernels.plan, kernels.width
    columns, precision = (3 + plan.arity) * width, plan.precision
    grads = Gates(
        weight.new_empty(plan.inner, columns),
        weight.new_empty(plan.slots, width) if plan.ragged else None,
    )
    incoming = given.of_nodes(plan.leaves, plan.inner)
    product = RowProduct(weight[:columns].t(), precision=precision, rows=plan.inner)
    if plan.ragged:
        forget_product = RowProduct(weight[columns:].t(), precision=precision, rows=plan.slots)
    for block, found in zip(reversed(plan.blocks), reversed(gates), strict=True):
        to_hidden, to_memory = given.buffers(block.edge, block.edges)
        of_forget = None if grads.forget is None else grads.forget[block.children]
        wanted = Gates(grads.rows[block.nodes], of_forget, to_memory)
        kernels.backward(block, found, incoming, wanted)
        if grads.forget is None:
            product.into(to_hidden.view(block.size, -1), grads.rows, block.first, block.size)
        else:
            of_sums = product(grads.rows, block.first, block.size)
            of_sums = torch.index_select(of_sums, 0, plan.segment_ids_of(block))
            of_each = forget_product(grads.forget, block.edge, block.edges)
            torch.add(of_sums, of_each, out=to_hidden)
        given.scatter(plan.children[block.children], to_hidden, to_memory)
    return grads


def _backward_leaves(plan: FusedPlan, kept: Kept, given: StateGradients) -> Tensor:
    """Return the gradients before activation of all computed leaves."""
    activated = kept.leaf_activated
    grads = activated.new_empty(plan.leaf_cells, 3 * activated.size(1))
    kernels = choose_gates(activated)(plan, [activated] * 3)  # h and c are not read
    given = given.of_nodes(0, plan.leaves)
    if plan.leaf_inverse is not None:
        given = kernels.sum_equal(given, plan.spread_leaves(), plan.leaf_cells)
    for block, rows in zip(plan.leaf_blocks(), kept.leaf_gates, strict=True):
        kernels.backward(block, Gates(rows), given, Gates(grads[block.nodes]))
    return grads


def _input_gradients(
    plan: FusedPlan,
    grads: Gates,
    of_leaves: Tensor,
    inputs: Tensor,
    weight: Tensor,
    grad_inputs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the inputs' weight and the bias, and write those of the inputs."""
    own, read = slice(0, of_leaves.size(1)), slice(0, plan.leaf_inputs)
    width, grad_weight = own.stop // 3, torch.empty_like(weight)
    # Leaves have no forget gates.
    grad_weight[own.stop :] = 0
    weight_gradient(of_leaves[read], inputs[read], plan.precision, grad_weight[own])
    if grad_inputs is not None:
        _write_input_gradients(plan, of_leaves, weight[own], grad_inputs[read])
    if inputs.size(0) > plan.leaf_inputs:
        of_inner = _input_product_gradients(plan, grads, width)
        if grad_inputs is not None:
            _write_input_gradients(plan, of_inner, weight, grad_inputs[plan.leaf_inputs :])
        grad_weight += weight_gradient(of_inner, inputs[plan.leaf_inputs :], plan.precision)
    if grads.forget is None:
        grad_bias = _fold_forget(sum_rows(grads.rows)[None], width)[0]
    else:
        grad_bias = torch.cat([sum_rows(grads.rows), sum_rows(grads.forget)])
    grad_bias[own] += sum_rows(of_leaves)
    return grad_weight, grad_bias


def _write_input_gradients(plan: FusedPlan, grads: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``grads @ weight``, block by block."""
    product = RowProduct(weight.t(), precision=plan.precision, rows=out.size(0))
    for first in range(0, out.size(0), plan.block):
        size = min(plan.block, out.size(0) - first)
        product.into(out[first : first + size], grads, first, size)


def _input_product_gradients(plan: FusedPlan, grads: Gates, width: int) -> Tensor:
    """The gradients of ``W x`` of the inner nodes with an input: all children share that of f."""
    rows = grads.rows
    if grads.forget is not None:
        rows = torch.cat([rows, sum_segments(grads.forget, plan.numbers, plan.child_start)], 1)
    if any(block.filled != block.size for block in plan.blocks):
        parts = [rows[b.first : b.first + b.filled] for b in plan.blocks if b.filled]
        rows = torch.cat(parts) if parts else rows[:0]
    return rows if grads.forget is not None else _fold_forget(rows, width)


def _fold_forget(grads: Tensor, width: int) -> Tensor:
    """Sum the forget gates of all children of a node, which share ``W x + b``."""
    folded = grads[:, : 4 * width].clone()
    for first in range(4 * width, grads.size(1), width):
        folded[:, 3 * width :] += grads[:, first : first + width]
    return folded


# The choice of kernels.

SWITCH = "PYG_DYNBATCH_TRITON"
"""The environment variable that switches Triton off where it is 0."""

_IN_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


def choose_gates(like: Tensor) -> type[TorchGates]:
    """Choose what computes the gates of states like this one."""
    if like.is_cuda and like.dtype in _IN_SINGLE and os.environ.get(SWITCH) != "0":
        return _triton_gates() or TorchGates
    return NativeGates if _chooses_native(like) and gates_library() else TorchGates


_STAYS_IN_CACHE = 2**18
"""Largest number of weights that the second-level cache holds beside a block of rows."""


def _runs_at_once(plan: FusedPlan, inputs: Tensor, weights: Sequence[Tensor]) -> bool:
    """Choose whether C runs a whole schedule in one call."""
    if plan.precision is not None or not plan.single_parent or choose_gates(inputs) != NativeGates:
        return False
    if multiply_address() is None or not all(map(_chooses_native, weights)):
        return False
    # Our kernels that win at 128 rows win at any number of rows if the matrix stays in the cache.
    kept = weights[1].numel() < _STAYS_IN_CACHE and narrow_rows() == BLOCK
    return kept or not packs(weights[1], plan.inner)


def _chooses_native(like: Tensor) -> bool:
    # Tensors of a tracer have no values that C could read, and a dispatch mode would miss what C
    # computes.
    plain = type(like) in (Tensor, Parameter) and not is_in_torch_dispatch_mode()
    in_single = plain and like.device.type == "cpu" and like.dtype == torch.float32
    return in_single and os.environ.get(NATIVE_SWITCH) != "0"


@cache
def _triton_gates() -> type[TorchGates] | None:
    if find_spec("triton") is None:
        return None
    # Importing Triton takes a while, and most machines without a GPU do not have it.
    from pyg_dynbatch.nn.triton_gates import TritonGates

    return TritonGates
