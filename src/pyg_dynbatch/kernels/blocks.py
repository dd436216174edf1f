"""Run a Tree-LSTM block by block: products by ``products.py``, gates by a class of gates.

With a fixed number of children the forget gates are further columns in the row of a node; with any
number of children (child-sum, here called ragged) u, i, o depend on the sum of h, and f has one row
per child.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dynbatch.kernels.gates import Gates, Kept, StateGradients, TorchGates
from pyg_dynbatch.kernels.plan import Plan
from pyg_dynbatch.kernels.products import RowProduct


class Kernel(ABC):
    """What runs a Tree-LSTM over a whole schedule, each way."""

    @abstractmethod
    def forward(self, plan: Plan, inputs: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Kept]:
        """Compute all nodes; return h after a row for missing children, and the rest.

        Where ``plan.keeps`` is False, the gates kept need not be those of all nodes.
        """

    @abstractmethod
    def backward(
        self, plan: Plan, kept: Kept, weight_hidden: Tensor, given: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Return the gradients of the products of inner nodes and of computed leaves."""


@dataclass(frozen=True)
class BlockKernel(Kernel):
    """Run a schedule block by block, with one class of gates."""

    gates: type[TorchGates]

    def forward(self, plan: Plan, inputs: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Kept]:
        """Compute the leaves, and then the inner nodes level by level."""
        weight_input, weight_hidden, bias = weights
        width = bias.size(0) // 4
        # h, c and tanh(c) of all nodes in level order, after a row for missing children.
        states = [bias.new_empty(plan.schedule.num_nodes + 1, width) for _ in range(3)]
        states[0][0], states[1][0] = 0, 0
        of_leaves = weight_input[: 3 * width], bias[: 3 * width]
        leaf_gates, leaf_activated = self._forward_leaves(plan, inputs, *of_leaves, states)
        # Products also read a few rows beyond those already filled, whose results are dropped.
        gathered = bias.new_empty(plan.slots, width)
        sums = bias.new_empty(plan.inner, width) if plan.ragged else None
        rows = self.gates(plan, states, gathered, sums, inner=True)
        gates = _forward_levels(rows, inputs, weights)
        hidden, memory, activated = states
        more = leaf_activated, None, leaf_gates, gates
        return hidden, Kept(gathered, sums, memory, activated, *more)

    def _forward_leaves(
        self, plan: Plan, inputs: Tensor, weight: Tensor, bias: Tensor, states: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Compute the states of all leaves; return their gates and ``tanh(c)``."""
        shared, width = plan.leaf_inverse is not None, bias.size(0) // 3
        own = [
            state.new_empty(plan.leaf_cells, width) if shared else state[1 : plan.leaves + 1]
            for state in states
        ]
        rows = self.gates(plan, own)
        product = RowProduct(weight, bias, plan.precision, plan.leaf_inputs)
        # A missing input is an input of zeros.
        missing = min(plan.leaf_cells - plan.leaf_inputs, plan.block)
        zeros = inputs.new_zeros(missing, inputs.size(1)) if missing else inputs
        gates = []
        for block in plan.leaf_blocks():
            read, first = (inputs, block.first) if block.filled else (zeros, 0)
            found = product(read, first, block.size)
            rows.forward(block, Gates(found))
            if plan.keeps:
                gates.append(found)
        if shared:
            for computed, state in zip(own[:2], states, strict=False):
                out = state[1 : plan.leaves + 1]
                torch.index_select(computed, 0, plan.cell_of_leaf, out=out)
        return gates, own[2]

    def backward(
        self, plan: Plan, kept: Kept, weight_hidden: Tensor, given: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Go from the roots to the leaves; return gradients before activation."""
        states = kept.memory, kept.memory, kept.activated  # h is not read
        rows = self.gates(plan, states, inner=True)
        grads = _backward_levels(rows, weight_hidden, kept.gates, given)
        activated = kept.leaf_activated
        of_leaves = activated.new_empty(plan.leaf_cells, 3 * activated.size(1))
        rows = self.gates(plan, [activated] * 3)  # h and c are not read
        given = given.of_nodes(0, plan.leaves)
        if plan.leaf_inverse is not None:
            given = rows.sum_equal(given, plan.cell_of_leaf, plan.leaf_cells)
        for block, found in zip(plan.leaf_blocks(), kept.leaf_gates, strict=True):
            rows.backward(block, Gates(found), given, Gates(of_leaves[block.nodes]))
        return grads, of_leaves


def _forward_levels(rows: TorchGates, inputs: Tensor, weights: Sequence[Tensor]) -> list[Gates]:
    """Compute all inner nodes; return the activated gates of all blocks."""
    weight_input, weight_hidden, bias = weights
    plan, width, gathered = rows.plan, rows.width, rows.gathered
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
    operand, gates = operand_of(plan, gathered, rows.sums), []
    for block in plan.blocks:
        rows.gather(block)
        own = forget = None
        if input_product is not None and block.filled:
            own = input_product(filled, block.input, block.filled)
        if forget_product is not None:
            forget = forget_product(gathered, block.edge, block.edges)
        found = Gates(product(operand, block.first, block.size), forget)
        rows.forward(block, found, own)
        if plan.keeps:
            gates.append(found)
    return gates


def operand_of(plan: Plan, gathered: Tensor, sums: Tensor | None) -> Tensor:
    """What the weights of u, i, o multiply: the sums of h, or the h of all children in a row."""
    return sums if sums is not None else gathered.view(plan.inner, plan.arity * gathered.size(1))


def _backward_levels(
    rows: TorchGates, weight: Tensor, gates: Sequence[Gates], given: StateGradients
) -> Gates:
    """Go from the roots to the lowest inner nodes; return the gradients before activation."""
    plan, width = rows.plan, rows.width
    columns, precision = (3 + plan.arity) * width, plan.precision
    grads = Gates(
        weight.new_empty(plan.inner, columns),
        weight.new_empty(plan.slots, width) if plan.ragged else None,
    )
    of_inner = given.of_nodes(plan.leaves, plan.inner)
    product = RowProduct(weight[:columns].t(), precision=precision, rows=plan.inner)
    if plan.ragged:
        forget_product = RowProduct(weight[columns:].t(), precision=precision, rows=plan.slots)
    for block, found in zip(reversed(plan.blocks), reversed(gates), strict=True):
        to_hidden, to_memory = given.buffers(block.edge, block.edges)
        of_forget = None if grads.forget is None else grads.forget[block.children]
        wanted = Gates(grads.rows[block.nodes], of_forget, to_memory)
        rows.backward(block, found, of_inner, wanted)
        if grads.forget is None:
            product.into(to_hidden.view(block.size, -1), grads.rows, block.first, block.size)
        else:
            of_sums = product(grads.rows, block.first, block.size)
            of_sums = torch.index_select(of_sums, 0, plan.segment_ids_of(block))
            of_each = forget_product(grads.forget, block.edge, block.edges)
            torch.add(of_sums, of_each, out=to_hidden)
        given.scatter(plan.children[block.children], to_hidden, to_memory)
    return grads
