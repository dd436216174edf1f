"""Run the N-ary Tree-LSTM over a whole schedule in one autograd function.

The generic path leaves every product of every level to autograd. Here the gates of a block of
nodes are computed in place while they are in the cache, and the gradients of the weights are one
product over all levels after the loop.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dynbatch.core.state_store import refuse_second_derivative
from pyg_dynbatch.nn.fused_downward import Downward
from pyg_dynbatch.nn.fused_inputs import InnerInputs, inner_input_gradients, with_input
from pyg_dynbatch.nn.fused_leaves import backward_leaves, forward_leaves
from pyg_dynbatch.nn.fused_plan import FusedPlan, FusedRun, differentiated
from pyg_dynbatch.nn.fused_products import RowProduct, sum_rows, weight_gradient
from pyg_dynbatch.nn.gate_kernels import gate_kernels, level_library
from pyg_dynbatch.nn.gate_rows import Gates, Outgoing, inner_rows
from pyg_dynbatch.nn.native_levels import LevelWeights, backward_levels, forward_levels

Weights = Sequence[Tensor]


def fused_nary_tree_lstm(
    inputs: Tensor, weight_input: Tensor, weight_hidden: Tensor, bias: Tensor, run: FusedRun
) -> tuple[Tensor, Tensor]:
    """Runs an N-ary Tree-LSTM over all levels of a schedule.

    Args:
        inputs: Input rows in the order of ``schedule.input_node``, ``[input, in_channels]``.
        weight_input: Rows in the order u, i, o, f, ``[4 * out_channels, in_channels]``.
        weight_hidden: Rows in the order u, i, o, f of the first child, f of the second, …,
            ``[(3 + arity) * out_channels, arity * out_channels]``.
        bias: In the order of ``weight_input``, ``[4 * out_channels]``.
        run: The schedule, made with an arity, and what else is asked for.

    Returns:
        Hidden and memory rows, each ``[node, out_channels]``.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.
    """
    weights = weight_input, weight_hidden, bias
    return _FusedNary.apply(inputs, *weights, run, differentiated(inputs, *weights))


class _FusedNary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight_input: Tensor,
        weight_hidden: Tensor,
        bias: Tensor,
        run: FusedRun,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(inputs.device.type, enabled=False):
            width = bias.size(0) // 4
            plan = FusedPlan(run, inputs.size(0), inputs.device, keep)
            inputs = inputs.contiguous()
            states = tuple(bias.new_empty(plan.nodes + 1, width) for _ in range(3))
            states[0][0], states[1][0] = 0, 0
            own = slice(0, 3 * width)
            leaves, leaf_squashed = forward_leaves(
                plan, inputs, weight_input[own], bias[own], states
            )
            gates, children = _forward_blocks(
                plan, inputs, (weight_input, weight_hidden, bias), states
            )
            ctx.plan, ctx.num_leaf_blocks = plan, len(leaves)
            ctx.save_for_backward(
                inputs, weight_input, weight_hidden, children, states[1], states[2],
                leaf_squashed, *leaves, *gates,
            )  # fmt: skip
            ctx.set_materialize_grads(False)
            return plan.in_order(states[0]), plan.in_order(states[1])

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None) -> Any:
        refuse_second_derivative()
        plan: FusedPlan = ctx.plan
        inputs, weight_input, weight_hidden, children, state_c, squashed, leaf_squashed, *blocks = (
            # Hooks may have brought them back in another layout.
            saved.contiguous()
            for saved in ctx.saved_tensors
        )
        leaves, gates = blocks[: ctx.num_leaf_blocks], blocks[ctx.num_leaf_blocks :]
        with torch.autocast(inputs.device.type, enabled=False):
            width = state_c.size(1)
            down = Downward(plan, plan.in_level_order(grad_h), plan.in_level_order(grad_c), state_c)
            grads = _backward_blocks(plan, weight_hidden, gates, down, (state_c, squashed))
            needs = ctx.needs_input_grad
            grad_inputs = torch.empty_like(inputs) if needs[0] else None
            grad_weight, leaf_bias = backward_leaves(
                plan, leaves, leaf_squashed, down, inputs, weight_input, grad_inputs
            )
            if inputs.size(0) > plan.leaf_inputs:
                folded = _fold_forget(with_input(plan, grads), width)
                inner_input_gradients(plan, folded, inputs, weight_input, grad_inputs, grad_weight)
            grad_hidden = weight_gradient(grads, children, plan.run.precision) if needs[2] else None
            grad_bias = _fold_forget(sum_rows(grads)[None], width)[0]
            grad_bias[: 3 * width] += leaf_bias
            return grad_inputs, grad_weight, grad_hidden, grad_bias, None, None


def _forward_blocks(
    plan: FusedPlan, inputs: Tensor, weights: Weights, states: Weights
) -> tuple[list[Tensor], Tensor]:
    """Computes all inner nodes; returns activated gates and the hidden rows of the children.

    Gates that nobody will ask for go at once, so that the next ones find their rows in the cache.
    """
    weight_input, weight_hidden, bias = weights
    width, arity = bias.size(0) // 4, plan.arity or 0
    # Zeros, as products read a few rows beyond those that are filled already.
    gathered = states[0].new_zeros(plan.inner, arity * width)
    nodes = inner_rows(plan, states, gathered)
    bias = torch.cat([bias[: 3 * width], *[bias[3 * width :]] * arity])
    given = InnerInputs(plan, inputs, weight_input)
    plan.library = level_library(plan, weight_hidden, gathered)
    if plan.library is not None:
        wanted = LevelWeights(weight_hidden, bias)
        return forward_levels(plan.library, plan, nodes, wanted, given.all()), gathered
    kernels = gate_kernels(gathered)(nodes)
    product = RowProduct(
        weight_hidden,
        bias,
        candidate=width if kernels.squashes else 0,
        precision=plan.run.precision,
        rows=plan.inner,
    )
    found = []
    for block in plan.blocks:
        kernels.gather(block)
        own = given.of(block, width if product.doubled else 0)
        squash = kernels.squashes and own is None
        rows = product(gathered, block.first, block.size, squash=squash)
        kernels.forward(block, Gates(rows, None, own, product))
        if plan.keep:
            found.append(rows)
    return found, gathered


def _backward_blocks(
    plan: FusedPlan, weight_hidden: Tensor, gates: Sequence[Tensor], down: Downward, states: Weights
) -> Tensor:
    """Goes down from the roots; returns the gradients of all gates before activation."""
    grads = states[0].new_empty(plan.inner, weight_hidden.size(0))
    nodes = inner_rows(plan, (states[0][:0], *states))
    if plan.library is not None:
        backward_levels(plan.library, nodes, LevelWeights(weight_hidden), gates, [grads], down)
        return grads
    kernels = gate_kernels(grads)(nodes)
    given = down.incoming(plan.leaves, plan.inner)
    product = RowProduct(weight_hidden.t(), precision=plan.run.precision, rows=plan.inner)
    for block, activated in zip(reversed(plan.blocks), reversed(gates), strict=True):
        first, size = block.first, block.size
        to_hidden, to_memory = down.room(block.edge, block.edges)
        wanted = Outgoing(grads[first : first + size], None, to_memory)
        kernels.backward(block, Gates(activated), given, wanted)
        product.into(to_hidden.view(size, -1), grads, first, size)
        down.give(block.edge, to_hidden, to_memory)
    return grads


def _fold_forget(grads: Tensor, width: int) -> Tensor:
    """Adds up the forget gates of all children, which share one product with the input."""
    folded = grads[:, : 4 * width].clone()
    for first in range(4 * width, grads.size(1), width):
        folded[:, 3 * width :] += grads[:, first : first + width]
    return folded
