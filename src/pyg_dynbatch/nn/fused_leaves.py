"""The nodes without children of a fused run, forwards and backwards; equal ones once."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_downward import Downward
from pyg_dynbatch.nn.fused_plan import Block, FusedPlan
from pyg_dynbatch.nn.fused_products import RowProduct, sum_rows, weight_gradient
from pyg_dynbatch.nn.gate_kernels import gate_kernels
from pyg_dynbatch.nn.gate_rows import Gates, NodeRows, Outgoing


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
        The activated gates, block by block where they are kept, and tanh(c) of every leaf that
        was computed.
    """
    width = bias.size(0) // 3
    spread = plan.run.leaf_row is not None
    if spread:
        hidden, memory, squashed = (s.new_empty(plan.leaf_cells, width) for s in states)
    else:
        hidden, memory, squashed = (s[1 : plan.leaves + 1] for s in states)
    kernels = gate_kernels(hidden)(NodeRows(hidden, memory, squashed, plan.run.keep))
    found = []
    for block, rows in _products(plan, inputs, weight, bias, kernels.squashes):
        kernels.forward(block, Gates(rows))
        if plan.keep:
            found.append(rows)
    if spread:
        index = plan.spread_leaves()
        for computed, state in zip((hidden, memory), states, strict=False):
            torch.index_select(computed, 0, index, out=state[1 : plan.leaves + 1])
    return found, squashed


def _products(
    plan: FusedPlan, inputs: Tensor, weight: Tensor, bias: Tensor, squash: bool
) -> Iterator[tuple[Block, Tensor]]:
    """Multiplies the inputs of all leaves, block by block."""
    width, precision = bias.size(0) // 3, plan.run.precision
    product = RowProduct(
        weight, bias, candidate=width if squash else 0, precision=precision, rows=plan.leaf_inputs
    )
    zeros = None
    for block in plan.leaf_blocks():
        if block.filled:
            yield block, product(inputs, block.first, block.size, squash=squash)
            continue
        if zeros is None:
            # No input is an input of zeros.
            zeros = inputs.new_zeros(min(plan.block, block.size), inputs.size(1))
        yield block, product(zeros, 0, block.size, squash=squash)


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
        weight: Input weights of u, i, o, f.
        grad_inputs: Where the gradients of the input rows go, if they are wanted.

    Returns:
        The gradient of the weight over leaves, and what they add to that of the bias of u, i, o.
    """
    width = weight.size(0) // 4
    own = slice(0, 3 * width)
    grads = squashed.new_empty(plan.leaf_cells, 3 * width)
    given = down.incoming(0, plan.leaves)
    kernels = gate_kernels(squashed)(NodeRows(squashed[:0], squashed[:0], squashed, plan.run.keep))
    if plan.run.leaf_row is not None:
        given = kernels.sum_equal(given, plan.spread_leaves(), plan.leaf_cells)
    for block, rows in zip(plan.leaf_blocks(), blocks, strict=True):
        wanted = Outgoing(grads[block.first : block.first + block.size])
        kernels.backward(block, Gates(rows), given, wanted)
    if grad_inputs is not None:
        _input_gradient(plan, grads, weight[own], grad_inputs)
    grad_weight, read = torch.empty_like(weight), slice(0, plan.leaf_inputs)
    # Leaves have no forget gates.
    grad_weight[3 * width :] = 0
    weight_gradient(grads[read], inputs[read], plan.run.precision, grad_weight[own])
    return grad_weight, sum_rows(grads)


def _input_gradient(plan: FusedPlan, grads: Tensor, weight: Tensor, out: Tensor) -> None:
    rows = plan.leaf_inputs
    product = RowProduct(weight.t(), precision=plan.run.precision, rows=rows)
    for block in plan.leaf_blocks():
        if block.filled:
            first, size = block.first, block.size
            product.into(out[first : first + size], grads, first, size)
