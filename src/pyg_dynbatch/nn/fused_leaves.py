"""The nodes without children of a fused run, forwards and backwards; equal ones once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_plan import Downward, FusedPlan
from pyg_dynbatch.nn.fused_products import RowProduct, sum_rows, weight_gradient
from pyg_dynbatch.nn.gate_kernels import (
    GateKernels,
    Gates,
    Incoming,
    Outgoing,
    States,
    gate_kernels,
)


def forward_leaves(
    plan: FusedPlan,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor,
    states: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor]:
    """Computes the states of all leaves.

    Args:
        plan: The plan.
        inputs: Input rows, those of leaves first.
        weight: Input weights of u, i, o.
        bias: Bias of u, i, o.
        states: Where h, c and tanh(c) of all nodes go, leaves from row 1 on.

    Returns:
        The activated gates, block by block, and tanh(c) of every leaf that was computed.
    """
    width = bias.size(0) // 3
    spread = plan.run.leaf_row is not None
    if spread:
        hidden, memory, squashed = (s.new_empty(plan.leaf_cells, width) for s in states)
    else:
        hidden, memory, squashed = (s[1 : plan.leaves + 1] for s in states)
    kernels = gate_kernels(hidden)
    product = _product(plan, weight, bias, kernels)
    blocks = _gates(plan, inputs, product, squash=bool(product.candidate))
    first = 0
    for gates in blocks:
        rows = slice(first, first + gates.size(0))
        keep = None if plan.run.keep is None else plan.run.keep[rows]
        states_here = States(memory[rows], squashed[rows], hidden[rows], keep)
        kernels.forward(Gates(gates, None, product), None, states_here)
        first += gates.size(0)
    if spread:
        index = plan.spread_leaves()
        for computed, state in zip((hidden, memory), states, strict=False):
            torch.index_select(computed, 0, index, out=state[1 : plan.leaves + 1])
    return blocks, squashed


def _product(plan: FusedPlan, weight: Tensor, bias: Tensor, kernels: GateKernels) -> RowProduct:
    candidate, precision = kernels.squashed(bias.size(0) // 3), plan.run.precision
    return RowProduct(weight, bias, candidate=candidate, precision=precision, rows=plan.leaf_inputs)


def _gates(plan: FusedPlan, inputs: Tensor, product: RowProduct, squash: bool) -> list[Tensor]:
    """The gates of all leaves, block by block."""
    found = [
        product(inputs, first, size, squash=squash)
        for first, size in plan.leaf_blocks(plan.leaf_inputs)
    ]
    missing = plan.leaf_cells - plan.leaf_inputs
    if missing:
        # No input is an input of zeros.
        zeros = inputs.new_zeros(missing, inputs.size(1))
        found.append(product(zeros, 0, missing, squash=squash))
    return found


def backward_leaves(
    plan: FusedPlan,
    blocks: Sequence[Tensor],
    squashed: Tensor,
    down: Downward,
    inputs: Tensor,
    weight: Tensor,
    grad_inputs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of all that leaves depend on.

    Args:
        plan: The plan.
        blocks: The activated gates.
        squashed: tanh(c) of every leaf that was computed.
        down: The gradients that come from parents and from outside.
        inputs: Input rows.
        weight: Input weights of u, i, o.
        grad_inputs: Where the gradients of the input rows go, if they are wanted.

    Returns:
        What leaves add to the gradient of the weight, and to that of the bias.
    """
    width, precision = weight.size(0) // 3, plan.run.precision
    grads = squashed.new_empty(plan.leaf_cells, 3 * width)
    totals, kernels = _summed(plan, down), gate_kernels(squashed)
    first = 0
    for gates in blocks:
        size = gates.size(0)
        rows = slice(first, first + size)
        here = down.take(first, size) if totals is None else (totals[0][rows], totals[1][rows])
        keep = None if plan.run.keep is None else plan.run.keep[rows]
        given = Incoming(*here, squashed[rows], keep)
        kernels.backward(gates, None, given, Outgoing(grads[rows]))
        first += size
    if grad_inputs is not None:
        _input_gradient(plan, grads, weight, grad_inputs)
    read = inputs[: plan.leaf_inputs]
    return weight_gradient(grads[: plan.leaf_inputs], read, precision), sum_rows(grads)


def _summed(plan: FusedPlan, down: Downward) -> tuple[Tensor, Tensor] | None:
    """Adds up the gradients of equal leaves, if equal leaves were computed once."""
    if plan.run.leaf_row is None:
        return None
    hidden, memory = down.take(0, plan.leaves)
    index = plan.spread_leaves()
    # By sorting, as adding rows to rows in any order would not be the same twice on GPUs.
    order = index.argsort(stable=True)
    # Not by bincount, which waits for the device to find the largest number.
    counts = index.new_zeros(plan.leaf_cells).index_add_(0, index, torch.ones_like(index))
    starts = counts.cumsum(0) - counts
    first, second = (
        torch.embedding_bag(rows, order, starts, False, 0)[0] for rows in (hidden, memory)
    )
    return first, second


def _input_gradient(plan: FusedPlan, grads: Tensor, weight: Tensor, out: Tensor) -> None:
    rows = plan.leaf_inputs
    product = RowProduct(weight.t(), precision=plan.run.precision, rows=rows)
    for first, size in plan.leaf_blocks(rows):
        product.into(out[first : first + size], grads, first, size)
