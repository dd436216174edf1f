"""Run the child-sum Tree-LSTM over a whole schedule in one autograd function.

Children of one node stand side by side, so sums over them are sums over stretches of rows; each
child row is gathered once, for the sum and for its own forget gate.
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
from pyg_dynbatch.nn.fused_plan import Block, FusedPlan, FusedRun, differentiated
from pyg_dynbatch.nn.fused_products import RowProduct, sum_rows, weight_gradient
from pyg_dynbatch.nn.gate_kernels import gate_kernels, level_library
from pyg_dynbatch.nn.gate_rows import GateKernels, Gates, Outgoing, inner_rows, sum_stretches
from pyg_dynbatch.nn.native_levels import LevelWeights, backward_levels, forward_levels

Rows = Sequence[Tensor]


def fused_child_sum_tree_lstm(
    inputs: Tensor, weight_input: Tensor, weight_hidden: Tensor, bias: Tensor, run: FusedRun
) -> tuple[Tensor, Tensor]:
    """Runs a child-sum Tree-LSTM over all levels of a schedule.

    Args:
        inputs: Input rows in the order of ``schedule.input_node``, ``[input, in_channels]``.
        weight_input: Rows in the order u, i, o, f, ``[4 * out_channels, in_channels]``.
        weight_hidden: In the same order, ``[4 * out_channels, out_channels]``.
        bias: In the same order, ``[4 * out_channels]``.
        run: The schedule, made without an arity, and what else is asked for.

    Returns:
        Hidden and memory rows, each ``[node, out_channels]``.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 2-8.
    """
    weights = weight_input, weight_hidden, bias
    return _FusedChildSum.apply(inputs, *weights, run, differentiated(inputs, *weights))


class _FusedChildSum(Function):
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
            level = _Forward(plan, inputs, (weight_input, weight_hidden, bias), states)
            gates = level.run()
            ctx.plan, ctx.num_leaf_blocks = plan, len(leaves)
            ctx.save_for_backward(
                inputs, weight_input, weight_hidden, level.gathered, level.sums, states[1],
                states[2], leaf_squashed, *leaves, *gates,
            )  # fmt: skip
            ctx.set_materialize_grads(False)
            return plan.in_order(states[0]), plan.in_order(states[1])

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None) -> Any:
        refuse_second_derivative()
        plan: FusedPlan = ctx.plan
        # Hooks may have brought them back in another layout.
        saved = [each.contiguous() for each in ctx.saved_tensors]
        inputs, weight_input, weight_hidden, children, sums, *rest = saved
        state_c, squashed, leaf_squashed, *blocks = rest
        leaves, gates = blocks[: ctx.num_leaf_blocks], blocks[ctx.num_leaf_blocks :]
        precision = plan.run.precision
        with torch.autocast(inputs.device.type, enabled=False):
            down = Downward(plan, plan.in_level_order(grad_h), plan.in_level_order(grad_c), state_c)
            grads, forgets = _backward_blocks(plan, weight_hidden, gates, down, (state_c, squashed))
            needs = ctx.needs_input_grad
            grad_inputs = torch.empty_like(inputs) if needs[0] else None
            grad_weight, leaf_bias = backward_leaves(
                plan, leaves, leaf_squashed, down, inputs, weight_input, grad_inputs
            )
            grad_bias = torch.cat([sum_rows(grads) + leaf_bias, sum_rows(forgets)])
            if inputs.size(0) > plan.leaf_inputs:
                # All children's forget gates share one product with the node's input.
                together = torch.cat(
                    [grads, sum_stretches(forgets, plan.numbers, plan.child_start)], 1
                )
                inner_input_gradients(
                    plan, with_input(plan, together), inputs, weight_input, grad_inputs, grad_weight
                )
            grad_hidden = None
            if needs[2]:
                parts = (grads, sums), (forgets, children)
                grad_hidden = torch.cat([weight_gradient(*part, precision) for part in parts])
            return grad_inputs, grad_weight, grad_hidden, grad_bias, None, None


class _Forward:
    """Computes inner nodes block by block.

    Args:
        plan: The plan.
        inputs: Input rows.
        weights: Of inputs, of children, and the bias.
        states: Where h, c and tanh(c) go.
    """

    def __init__(self, plan: FusedPlan, inputs: Tensor, weights: Rows, states: Rows) -> None:
        weight_input, self.weight, self.bias = weights
        self.plan, self.width = plan, self.bias.size(0) // 4
        # Zeros, as products read a few rows beyond those that are filled already.
        self.gathered = states[0].new_zeros(plan.places, self.width)
        self.sums = states[0].new_zeros(plan.inner, self.width)
        self.nodes = inner_rows(plan, states, self.gathered, self.sums)
        self.given = InnerInputs(plan, inputs, weight_input)

    def run(self) -> list[Tensor]:
        """Computes all blocks; returns the gates of each, where they are kept."""
        library = self.plan.library = level_library(self.plan, self.weight, self.sums)
        if library is not None:
            weights = _level_weights(self.weight, self.bias)
            return forward_levels(library, self.plan, self.nodes, weights, self.given.all())
        kernels = gate_kernels(self.sums)(self.nodes)
        products = self._products(kernels)
        found: list[Tensor] = []
        for block in self.plan.blocks:
            gates = self._block(block, kernels, products)
            if self.plan.keep:
                found += gates
        return found

    def _products(self, kernels: GateKernels) -> tuple[RowProduct, RowProduct]:
        """Those with the sums of children, and with every child."""
        plan, precision, own = self.plan, self.plan.run.precision, slice(0, 3 * self.width)
        candidate = self.width if kernels.squashes else 0
        of_sums = RowProduct(
            self.weight[own],
            self.bias[own],
            candidate=candidate,
            precision=precision,
            rows=plan.inner,
        )
        forget = self.weight[3 * self.width :], self.bias[3 * self.width :]
        return of_sums, RowProduct(*forget, precision=precision, rows=plan.places)

    def _block(
        self, block: Block, kernels: GateKernels, products: tuple[RowProduct, RowProduct]
    ) -> tuple[Tensor, Tensor]:
        """Computes one block; returns the activated gates u, i, o, and f of every child."""
        of_sums, of_children = products
        kernels.gather(block)
        own = self.given.of(block, self.width if of_sums.doubled else 0)
        squash = kernels.squashes and own is None
        forget = of_children(self.gathered, block.edge, block.edges, squash=squash)
        rows = of_sums(self.sums, block.first, block.size, squash=squash)
        kernels.forward(block, Gates(rows, forget, own, of_sums))
        return rows, forget


def _backward_blocks(
    plan: FusedPlan,
    weight_hidden: Tensor,
    gates: Sequence[Tensor],
    down: Downward,
    states: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Goes down from the roots; returns the gradients of u, i, o, and of f, before activation."""
    state_c, squashed = states
    width, precision = state_c.size(1), plan.run.precision
    all_grads = state_c.new_empty(plan.inner, 3 * width)
    all_forgets = state_c.new_empty(plan.places, width)
    nodes = inner_rows(plan, (state_c[:0], state_c, squashed))
    if plan.library is not None:
        weights = _level_weights(weight_hidden)
        backward_levels(plan.library, nodes, weights, gates, (all_grads, all_forgets), down)
        return all_grads, all_forgets
    kernels, given = gate_kernels(all_grads)(nodes), down.incoming(plan.leaves, plan.inner)
    to_sums = RowProduct(weight_hidden[: 3 * width].t(), precision=precision, rows=plan.inner)
    to_children = RowProduct(weight_hidden[3 * width :].t(), precision=precision, rows=plan.places)
    pairs = zip(reversed(gates[::2]), reversed(gates[1::2]), strict=True)
    for block, activated in zip(reversed(plan.blocks), pairs, strict=True):
        first, size, edge = block.first, block.size, slice(block.edge, block.edge + block.edges)
        to_hidden, to_memory = down.room(block.edge, block.edges)
        wanted = Outgoing(all_grads[first : first + size], all_forgets[edge], to_memory)
        kernels.backward(block, Gates(*activated), given, wanted)
        owner = plan.owner(block)
        sums = torch.index_select(to_sums(all_grads, first, size), 0, owner)
        torch.add(sums, to_children(all_forgets, block.edge, block.edges), out=to_hidden)
        down.give(block.edge, to_hidden, to_memory)
    return all_grads, all_forgets


def _level_weights(weight: Tensor, bias: Tensor | None = None) -> LevelWeights:
    """The weights of sums (u, i, o), and of single children (f)."""
    columns = weight.size(1) * 3
    biases = (None, None) if bias is None else (bias[:columns], bias[columns:])
    return LevelWeights(weight[:columns], biases[0], weight[columns:], biases[1])
