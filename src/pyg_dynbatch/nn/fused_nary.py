"""Run the N-ary Tree-LSTM over a whole schedule in one autograd function.

The generic path leaves every product of every level to autograd. Here the products with the
inputs are made once for all levels, the gates of a level are computed in place in one buffer,
and the gradients of the weights are one product over all levels after the loop.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.state_store import refuse_second_derivative


def fused_nary_tree_lstm(
    inputs: Tensor,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias: Tensor,
    schedule: Schedule,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs an N-ary Tree-LSTM over all levels of a schedule.

    Args:
        inputs: Input rows in the order of ``schedule.input_node``, ``[input, in_channels]``.
        weight_input: Rows in the order u, i, o, f, ``[4 * out_channels, in_channels]``.
        weight_hidden: Rows in the order u, i, o, f of the first child, f of the second, …,
            ``[(3 + arity) * out_channels, arity * out_channels]``.
        bias: In the order of ``weight_input``, ``[4 * out_channels]``.
        schedule: Made by ``Schedule.from_structure`` with an arity, with one step or more.
        keep: Factors of the candidate u in level order, ``[node, out_channels]`` (recurrent
            dropout); none where left out.

    Returns:
        Hidden and memory rows in node order, each ``[node, out_channels]``.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.
    """
    return _FusedNary.apply(inputs, weight_input, weight_hidden, bias, schedule, keep)


@dataclass
class _Plan:
    """Sizes of the levels as plain numbers, and the index vectors on the device."""

    schedule: Schedule
    width: int
    arity: int

    def __post_init__(self) -> None:
        steps = self.schedule.steps
        self.leaves = steps[0].size
        self.leaf_inputs = self.schedule.level_inputs[0]
        self.inner = self.schedule.num_nodes - self.leaves
        self.row_of_node = self.schedule.rows_of(self.schedule.outputs["node"].wiring)
        # First row of each inner level among the inner nodes, its nodes, its inputs, children.
        self.levels = [
            (
                step.results[0][1] - 1 - self.leaves,
                step.size,
                inputs,
                self.schedule.children_of(step),
            )
            for step, inputs in zip(steps[1:], self.schedule.level_inputs[1:], strict=True)
        ]

    def with_input(self, rows: Tensor) -> Tensor:
        """The rows of inner nodes that have an input."""
        if all(size == inputs for _, size, inputs, _ in self.levels):
            return rows
        parts = [rows[first : first + inputs] for first, _, inputs, _ in self.levels if inputs]
        return torch.cat(parts) if parts else rows[:0]


class _FusedNary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight_input: Tensor,
        weight_hidden: Tensor,
        bias: Tensor,
        schedule: Schedule,
        keep: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        width = bias.size(0) // 4
        plan = _Plan(schedule, width, schedule.arity or 1)
        state_h, state_c, squashed = (
            inputs.new_empty(schedule.num_nodes + 1, width) for _ in range(3)
        )
        state_h[0], state_c[0] = 0, 0
        leaf_gates = _forward_leaves(
            plan, inputs, weight_input, bias, (state_h, state_c, squashed), keep
        )
        gates, children = _forward_levels(
            plan, inputs, (weight_input, weight_hidden, bias), (state_h, state_c, squashed), keep
        )
        ctx.plan, ctx.keep = plan, keep
        ctx.save_for_backward(
            inputs, weight_input, weight_hidden, leaf_gates, gates, children, state_c, squashed
        )
        ctx.set_materialize_grads(False)
        rows = plan.row_of_node
        return state_h.index_select(0, rows), state_c.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None) -> Any:
        refuse_second_derivative()
        plan: _Plan = ctx.plan
        inputs, weight_input, weight_hidden, leaf_gates, gates, children, state_c, squashed = (
            ctx.saved_tensors
        )
        total_h, total_c = (_into_level_order(plan, grad, state_c) for grad in (grad_h, grad_c))
        grad_gates = _backward_levels(
            plan, weight_hidden, gates, (total_h, total_c, state_c, squashed), ctx.keep
        )
        grad_leaves = _backward_leaves(plan, leaf_gates, (total_h, total_c, squashed), ctx.keep)
        needs = ctx.needs_input_grad
        grad_hidden = grad_gates.t() @ children if needs[2] else None
        folded = _fold_forget(plan, grad_gates)
        grad_input, grad_weight = _input_gradients(
            plan, inputs, weight_input, grad_leaves, plan.with_input(folded), needs
        )
        grad_bias = folded.sum(0)
        grad_bias[: 3 * plan.width] += grad_leaves.sum(0)
        return grad_input, grad_weight, grad_hidden, grad_bias, None, None


def _forward_leaves(
    plan: _Plan,
    inputs: Tensor,
    weight_input: Tensor,
    bias: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
) -> Tensor:
    """Computes all nodes without children; returns their activated gates u, i, o."""
    width = plan.width
    gates = inputs.new_empty(plan.leaves, 3 * width)
    own = bias[: 3 * width]
    with_input = gates[: plan.leaf_inputs]
    torch.addmm(own, inputs[: plan.leaf_inputs], weight_input[: 3 * width].t(), out=with_input)
    gates[plan.leaf_inputs :] = own
    _activate(gates, width)
    u, i, o = gates.split(width, 1)
    state_h, state_c, squashed = (state[1 : plan.leaves + 1] for state in states)
    torch.mul(i, u, out=state_c)
    if keep is not None:
        state_c *= keep[: plan.leaves]
    _tanh(state_c, squashed)
    torch.mul(o, squashed, out=state_h)
    return gates


def _forward_levels(
    plan: _Plan,
    inputs: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    states: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Computes all other nodes; returns activated gates and the hidden rows of the children."""
    weight_input, weight_hidden, bias = weights
    width, arity = plan.width, plan.arity
    state_h, state_c, squashed = states
    gates = inputs.new_empty(plan.inner, weight_hidden.size(0))
    children = inputs.new_empty(plan.inner, arity * width)
    projected = inputs[plan.leaf_inputs :] @ weight_input.t()
    wide_bias = torch.cat([bias[: 3 * width], bias[3 * width :].repeat(arity)])
    hidden_t, seen = weight_hidden.t(), 0
    for first, size, filled, index in plan.levels:
        level = gates[first : first + size]
        gathered = children[first : first + size]
        torch.index_select(state_h, 0, index, out=gathered.view(size * arity, width))
        torch.addmm(wide_bias, gathered, hidden_t, out=level)
        if filled:
            own = projected[seen : seen + filled]
            level[:filled, : 3 * width] += own[:, : 3 * width]
            level[:filled, 3 * width :].unflatten(1, (arity, width)).add_(own[:, None, 3 * width :])
            seen += filled
        _activate(level, width)
        place = slice(plan.leaves + first + 1, plan.leaves + first + 1 + size)
        memory = state_c[place]
        torch.mul(level[:, width : 2 * width], level[:, :width], out=memory)
        if keep is not None:
            memory *= keep[plan.leaves + first : plan.leaves + first + size]
        before = state_c.index_select(0, index).view(size, arity, width)
        for child in range(arity):
            forget = level[:, (3 + child) * width : (4 + child) * width]
            memory.addcmul_(forget, before[:, child])
        _tanh(memory, squashed[place])
        torch.mul(level[:, 2 * width : 3 * width], squashed[place], out=state_h[place])
    return gates, children


def _tanh(rows: Tensor, out: Tensor) -> None:
    """Computes tanh(x) as 2 * sigmoid(2x) - 1, on CPUs several times as fast as tanh itself."""
    torch.mul(rows, 2, out=out)
    out.sigmoid_().mul_(2).sub_(1)


def _activate(gates: Tensor, width: int) -> None:
    """Squashes gates in place: the first by tanh, the others by the logistic function."""
    gates[:, :width] *= 2
    gates.sigmoid_()
    gates[:, :width].mul_(2).sub_(1)


def _into_level_order(plan: _Plan, gradient: Tensor | None, like: Tensor) -> Tensor:
    total = torch.zeros_like(like)
    if gradient is not None:
        total.index_copy_(0, plan.row_of_node, gradient)
    return total


def _backward_gates(
    gates: Tensor,
    grads: Tensor,
    totals: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
    width: int,
) -> Tensor:
    """Writes the gradients of u, i, o before activation; returns the gradient of the memory."""
    total_h, total_c, squashed = totals
    u, i, o = gates[:, :width], gates[:, width : 2 * width], gates[:, 2 * width : 3 * width]
    grad_o = grads[:, 2 * width : 3 * width]
    torch.mul(total_h, squashed, out=grad_o)
    _through_sigmoid(grad_o, o)
    # dc += dh * o * (1 - tanh(c)^2)
    through = total_h * o
    total_c += through
    total_c.addcmul_(through.mul_(squashed), squashed, value=-1)
    candidate = total_c if keep is None else total_c * keep
    grad_u, grad_i = grads[:, :width], grads[:, width : 2 * width]
    torch.mul(candidate, u, out=grad_i)
    _through_sigmoid(grad_i, i)
    torch.mul(candidate, i, out=grad_u)
    _through_tanh(grad_u, u)
    return total_c


def _through_sigmoid(gradient: Tensor, activated: Tensor) -> None:
    torch.ops.aten.sigmoid_backward.grad_input(gradient, activated, grad_input=gradient)


def _through_tanh(gradient: Tensor, activated: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(gradient, activated, grad_input=gradient)


def _backward_levels(
    plan: _Plan,
    weight_hidden: Tensor,
    gates: Tensor,
    totals: tuple[Tensor, Tensor, Tensor, Tensor],
    keep: Tensor | None,
) -> Tensor:
    """Goes down from the roots; returns the gradients of all gates before activation."""
    width, arity = plan.width, plan.arity
    total_h, total_c, state_c, squashed = totals
    grad_gates = torch.empty_like(gates)
    for first, size, _, index in reversed(plan.levels):
        level, grads = gates[first : first + size], grad_gates[first : first + size]
        place = slice(plan.leaves + first + 1, plan.leaves + first + 1 + size)
        dropped = None if keep is None else keep[plan.leaves + first : plan.leaves + first + size]
        here = (total_h[place], total_c[place], squashed[place])
        memory = _backward_gates(level, grads, here, dropped, width)
        forget = level[:, 3 * width :].unflatten(1, (arity, width))
        grad_forget = grads[:, 3 * width :].unflatten(1, (arity, width))
        before = state_c.index_select(0, index).view(size, arity, width)
        torch.mul(memory[:, None], before, out=grad_forget)
        _through_sigmoid(grad_forget, forget)
        down = (memory[:, None] * forget).view(size * arity, width)
        total_c.index_add_(0, index, down)
        total_h.index_add_(0, index, (grads @ weight_hidden).view(size * arity, width))
    return grad_gates


def _backward_leaves(
    plan: _Plan,
    leaf_gates: Tensor,
    totals: tuple[Tensor, Tensor, Tensor],
    keep: Tensor | None,
) -> Tensor:
    grads = torch.empty_like(leaf_gates)
    total_h, total_c, squashed = (total[1 : plan.leaves + 1] for total in totals)
    dropped = None if keep is None else keep[: plan.leaves]
    _backward_gates(leaf_gates, grads, (total_h, total_c, squashed), dropped, plan.width)
    return grads


def _fold_forget(plan: _Plan, grad_gates: Tensor) -> Tensor:
    """Adds up the forget gates of all children, which share one product with the input."""
    width = plan.width
    forget = grad_gates[:, 3 * width :].unflatten(1, (plan.arity, width)).sum(1)
    return torch.cat([grad_gates[:, : 3 * width], forget], 1)


def _input_gradients(
    plan: _Plan,
    inputs: Tensor,
    weight_input: Tensor,
    grad_leaves: Tensor,
    grad_inner: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the inputs and of their weight, one product each for leaves and the rest."""
    rows, width = plan.leaf_inputs, 3 * plan.width
    grad_leaves = grad_leaves[:rows]
    grad_input = grad_weight = None
    if needs[0]:
        grad_input = torch.empty_like(inputs)
        torch.mm(grad_leaves, weight_input[:width], out=grad_input[:rows])
        torch.mm(grad_inner, weight_input, out=grad_input[rows:])
    if needs[1]:
        grad_weight = grad_inner.t() @ inputs[rows:]
        grad_weight[:width].addmm_(grad_leaves.t(), inputs[:rows])
    return grad_input, grad_weight
