"""Run N-ary and child-sum Tree-LSTMs over a whole schedule in one autograd function."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dynbatch.core.row_buffer import refuse_second_derivative
from pyg_dynbatch.nn.fused_plan import (
    Block,
    Downward,
    FusedPlan,
    FusedRun,
    GateKernels,
    Gates,
    NodeRows,
    Outgoing,
    RowProduct,
    differentiated,
    inner_rows,
    sum_rows,
    sum_stretches,
    weight_gradient,
)
from pyg_dynbatch.nn.gate_kernels import gate_kernels, level_library
from pyg_dynbatch.nn.native_gates import LevelWeights, backward_levels, forward_levels


class InnerInputs:
    """Multiplies the inputs of inner nodes, block by block."""

    def __init__(self, plan: FusedPlan, inputs: Tensor, weight: Tensor) -> None:
        self.rows = inputs[plan.leaf_inputs :]
        count = self.rows.size(0)
        self.product = (
            RowProduct(weight, precision=plan.run.precision, rows=count) if count else None
        )

    def of(self, block: Block, doubled: int) -> Tensor | None:
        """Gives ``W x`` of the first ``block.filled`` nodes of a block; None if that is none."""
        if self.product is None or not block.filled:
            return None
        found = self.product(self.rows, block.input, block.filled)
        if doubled:
            found[:, :doubled] *= 2
        return found

    def all(self) -> Tensor | None:
        """Gives ``W x`` of all of them; None if there are none."""
        return None if self.product is None else self.product(self.rows, 0, self.rows.size(0))


def with_input(plan: FusedPlan, grads: Tensor) -> Tensor:
    """Takes the rows of inner nodes that have an input."""
    if all(block.filled == block.size for block in plan.blocks):
        return grads
    parts = [grads[b.first : b.first + b.filled] for b in plan.blocks if b.filled]
    return torch.cat(parts) if parts else grads[:0]


def inner_input_gradients(
    plan: FusedPlan,
    grads: Tensor,
    inputs: Tensor,
    weight: Tensor,
    grad_inputs: Tensor | None,
    grad_weight: Tensor,
) -> None:
    """Computes the gradients of the inputs of inner nodes, and adds up that of the weight."""
    rows, precision = inputs[plan.leaf_inputs :], plan.run.precision
    if grad_inputs is not None:
        product = RowProduct(weight.t(), precision=precision, rows=rows.size(0))
        own = grad_inputs[plan.leaf_inputs :]
        for first in range(0, rows.size(0), plan.block):
            size = min(plan.block, rows.size(0) - first)
            product.into(own[first : first + size], grads, first, size)
    grad_weight += weight_gradient(grads, rows, precision)


def forward_leaves(
    plan: FusedPlan, inputs: Tensor, weight: Tensor, bias: Tensor, states: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Computes the states of all leaves."""
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
    """Computes the gradients of all that leaves depend on."""
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


Weights = Sequence[Tensor]


def fused_nary_tree_lstm(
    inputs: Tensor, weight_input: Tensor, weight_hidden: Tensor, bias: Tensor, run: FusedRun
) -> tuple[Tensor, Tensor]:
    """Runs an N-ary Tree-LSTM over all levels of a schedule."""
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
    """Computes all inner nodes; returns activated gates and the hidden rows of the children."""
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


Rows = Sequence[Tensor]


def fused_child_sum_tree_lstm(
    inputs: Tensor, weight_input: Tensor, weight_hidden: Tensor, bias: Tensor, run: FusedRun
) -> tuple[Tensor, Tensor]:
    """Runs a child-sum Tree-LSTM over all levels of a schedule."""
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
            grads, forgets = _backward_blocks_fused_child_sum(
                plan, weight_hidden, gates, down, (state_c, squashed)
            )
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
    """Computes inner nodes block by block."""

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


def _backward_blocks_fused_child_sum(
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
