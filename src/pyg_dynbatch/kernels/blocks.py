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

from pyg_dynbatch.kernels.gates import Gates, Rows, StateGradients, TorchGates
from pyg_dynbatch.kernels.plan import Plan
from pyg_dynbatch.kernels.products import RowProduct


class Kernel(ABC):
    """What runs a Tree-LSTM over a whole schedule, each way."""

    @abstractmethod
    def forward(self, plan: Plan, inputs: Tensor, weights: Sequence[Tensor]) -> Rows:
        """Compute all nodes."""

    @abstractmethod
    def backward(
        self, plan: Plan, rows: Rows, weight_hidden: Tensor, given: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Return the gradients of the products of inner nodes and of computed leaves."""


@dataclass(frozen=True)
class BlockKernel(Kernel):
    """Run a schedule block by block, with one class of gates."""

    gates: type[TorchGates]

    def forward(self, plan: Plan, inputs: Tensor, weights: Sequence[Tensor]) -> Rows:
        """Compute the leaves, and then the inner nodes level by level."""
        weight_input, _, bias = weights
        width = bias.size(0) // 4
        rows = Rows.of(plan, bias, width)
        rows.hidden[0], rows.memory[0] = 0, 0
        product = RowProduct(
            weight_input[: 3 * width], bias[: 3 * width], plan.precision, plan.leaf_inputs
        )
        self._forward_leaves(plan, rows, inputs, product)
        _forward_levels(self.gates(plan, rows, inner=True), rows, inputs, weights)
        return rows

    def _forward_leaves(self, plan: Plan, rows: Rows, inputs: Tensor, product: RowProduct) -> None:
        # A missing input is an input of zeros.
        missing = min(plan.leaf_cells - plan.leaf_inputs, plan.block)
        zeros = inputs.new_zeros(missing, inputs.size(1)) if missing else inputs
        leaves = self.gates(plan, rows, inner=False)
        for block in plan.leaf_blocks():
            read, first = (inputs, block.first) if block.filled else (zeros, 0)
            gates = rows.leaf_gates[block.nodes] if plan.keeps else rows.leaf_gates[: block.size]
            product.into(gates, read, first, block.size)
            leaves.forward(block, Gates(gates))
        if plan.leaf_inverse is not None:
            for computed, state in (
                (rows.leaf_hidden, rows.hidden),
                (rows.leaf_memory, rows.memory),
            ):
                out = state[1 : plan.leaves + 1]
                torch.index_select(computed, 0, plan.cell_of_leaf, out=out)

    def backward(
        self, plan: Plan, rows: Rows, weight_hidden: Tensor, given: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Go from the roots to the leaves; return gradients before activation."""
        inner = self.gates(plan, rows, inner=True)
        grads = _backward_levels(inner, rows, weight_hidden, given)
        of_leaves = torch.empty_like(rows.leaf_gates)
        leaves = self.gates(plan, rows, inner=False)
        given = given.of_nodes(0, plan.leaves)
        if plan.leaf_inverse is not None:
            given = leaves.sum_equal(given, plan.cell_of_leaf, plan.leaf_cells)
        for block in plan.leaf_blocks():
            here = block.nodes
            leaves.backward(block, Gates(rows.leaf_gates[here]), given, Gates(of_leaves[here]))
        return grads, of_leaves


def _forward_levels(
    inner: TorchGates, rows: Rows, inputs: Tensor, weights: Sequence[Tensor]
) -> None:
    """Compute all inner nodes."""
    weight_input, weight_hidden, bias = weights
    plan, width, gathered = inner.plan, inner.width, rows.gathered
    columns, precision = (3 + plan.arity) * width, plan.precision
    if not plan.ragged:
        # All children of a node share the bias of the forget gate.
        bias = torch.cat([bias[: 3 * width], *[bias[3 * width :]] * plan.arity])
    filled = inputs[plan.leaf_inputs :]
    count = filled.size(0)
    input_product = RowProduct(weight_input, precision=precision, rows=count) if count else None
    product = RowProduct(weight_hidden[:columns], bias[:columns], precision, plan.inner)
    if plan.ragged:
        of_forget = weight_hidden[columns:], bias[columns:]
        forget_product = RowProduct(*of_forget, precision, plan.slots)
    operand = operand_of(plan, rows)
    for block in plan.blocks:
        inner.gather(block)
        gates, own = rows.gates_of(block, plan.keeps), None
        if input_product is not None and block.filled:
            own = input_product(filled, block.input, block.filled)
        if gates.forget is not None:
            forget_product.into(gates.forget, gathered, block.edge, block.edges)
        # It also reads a few rows beyond those already filled, whose results are dropped.
        product.into(gates.rows, operand, block.first, block.size)
        inner.forward(block, gates, own)


def operand_of(plan: Plan, rows: Rows) -> Tensor:
    """What the weights of u, i, o multiply: the sums of h, or the h of all children in a row."""
    if rows.sums is not None:
        return rows.sums
    return rows.gathered.view(plan.inner, plan.arity * rows.gathered.size(1))


def _backward_levels(inner: TorchGates, rows: Rows, weight: Tensor, given: StateGradients) -> Gates:
    """Go from the roots to the lowest inner nodes; return the gradients before activation."""
    plan, precision = inner.plan, inner.plan.precision
    columns = rows.gates.size(1)
    grads = Gates(
        torch.empty_like(rows.gates), None if rows.forget is None else torch.empty_like(rows.forget)
    )
    of_inner = given.of_nodes(plan.leaves, plan.inner)
    product = RowProduct(weight[:columns].t(), precision=precision, rows=plan.inner)
    if plan.ragged:
        forget_product = RowProduct(weight[columns:].t(), precision=precision, rows=plan.slots)
    for block in reversed(plan.blocks):
        to_hidden, to_memory = given.buffers(block.edge, block.edges)
        of_forget = None if grads.forget is None else grads.forget[block.children]
        wanted = Gates(grads.rows[block.nodes], of_forget, to_memory)
        inner.backward(block, rows.gates_of(block, keeps=True), of_inner, wanted)
        if grads.forget is None:
            product.into(to_hidden.view(block.size, -1), grads.rows, block.first, block.size)
        else:
            of_sums = product(grads.rows, block.first, block.size)
            of_sums = torch.index_select(of_sums, 0, plan.segment_ids_of(block))
            of_each = forget_product(grads.forget, block.edge, block.edges)
            torch.add(of_sums, of_each, out=to_hidden)
        given.scatter(plan.children[block.children], to_hidden, to_memory)
    return grads
