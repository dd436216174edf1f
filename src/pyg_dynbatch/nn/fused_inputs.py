"""The inputs of inner nodes in a fused run: their part of the gates, and its gradients."""

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_plan import Block, FusedPlan
from pyg_dynbatch.nn.fused_products import RowProduct, weight_gradient


class InnerInputs:
    """Multiplies the inputs of inner nodes, block by block.

    Args:
        plan: The plan.
        inputs: Input rows, those of leaves first.
        weight: Input weights of all gates.
    """

    def __init__(self, plan: FusedPlan, inputs: Tensor, weight: Tensor) -> None:
        self.rows = inputs[plan.leaf_inputs :]
        count = self.rows.size(0)
        self.product = (
            RowProduct(weight, precision=plan.run.precision, rows=count) if count else None
        )

    def of(self, block: Block, doubled: int) -> Tensor | None:
        """Gives ``W x`` of the first ``block.filled`` nodes of a block; None if that is none.

        Args:
            block: The block.
            doubled: How many of the first columns are wanted twice as large.
        """
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
    """Takes the rows of inner nodes that have an input.

    Args:
        plan: The plan.
        grads: One row an inner node.
    """
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
    """Computes the gradients of the inputs of inner nodes, and adds up that of the weight.

    Args:
        plan: The plan.
        grads: Gradients of all gates, one row an input of an inner node.
        inputs: Input rows, those of leaves first.
        weight: Input weights of all gates.
        grad_inputs: Where the gradients of the input rows go, if they are wanted.
        grad_weight: The gradient so far.
    """
    rows, precision = inputs[plan.leaf_inputs :], plan.run.precision
    if grad_inputs is not None:
        product = RowProduct(weight.t(), precision=precision, rows=rows.size(0))
        own = grad_inputs[plan.leaf_inputs :]
        for first in range(0, rows.size(0), plan.block):
            size = min(plan.block, rows.size(0) - first)
            product.into(own[first : first + size], grads, first, size)
    grad_weight += weight_gradient(grads, rows, precision)
