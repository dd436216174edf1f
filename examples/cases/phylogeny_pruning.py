"""Felsenstein's pruning in one autograd function, for trees of any topologies.

Patterns are computed block by block, and where gradients are needed, those of the matrices right
after the values, so that memory grows neither with the patterns nor with what autograd would keep.
"""

from typing import Any

import torch
from phylogeny_trees import Trees
from torch import Tensor
from torch.autograd.function import Function

from pyg_dynbatch.core.errors import check_first_derivative

BLOCK = 2**24  # bytes of messages on a CPU


def normalized(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of two messages over its sum, and the sum ``[row, pattern]``."""
    product = one * other
    total = product.sum(1)
    # Where the sum is 0, so is the product.
    return product / (total + torch.finfo(total.dtype).tiny)[:, None], total


class Pruning(Function):
    """Compute log-likelihoods of trees, a block of patterns at a time, with their gradients.

    Rows are in the order of levels, but leaves in that of their taxa, so that all trees multiply
    the observed bases of a taxon in one product.
    """

    @staticmethod
    def forward(ctx: Any, tips: Tensor, count: Tensor, matrix: Tensor, trees: Trees) -> Tensor:
        """Compute the log-likelihoods ``[tree]`` for the matrices of all branches."""
        order, row, levels = _rows(trees)
        matrix, ends = matrix[order], row[trees.ends]
        total, gradient = matrix.new_zeros(len(ends)), torch.zeros_like(matrix)
        width = max(1, BLOCK // matrix[:, 0].nbytes) if matrix.is_cpu else len(count)
        for part, counts in zip(tips.split(width, 2), count.split(width), strict=True):
            message = matrix.new_empty(len(matrix), 4, len(counts))
            leaves = slice(0, len(tips) * len(ends))
            torch.bmm(_by_taxon(matrix[leaves], tips), part, out=_by_taxon(message[leaves], tips))
            for rows, pairs, tree in levels:
                product, sums = normalized(*_two(message, pairs))
                total.index_add_(0, tree, sums.log_() @ counts)
                torch.bmm(matrix[rows], product, out=message[rows])
            _, sums = normalized(*_two(message, ends))
            total += (sums / 4).log_() @ counts
            if not ctx.needs_input_grad[2]:
                continue
            to_message = torch.empty_like(message)
            _to_children(to_message, message, ends, counts)
            for rows, pairs, _ in reversed(levels):
                above = torch.bmm(matrix[rows].mT, to_message[rows])
                product = _to_children(to_message, message, pairs, above)
                gradient[rows].baddbmm_(to_message[rows], product.mT)
            by_taxon = _by_taxon(to_message[leaves], tips)
            _by_taxon(gradient[leaves], tips).baddbmm_(by_taxon, part.mT)
        ctx.of_matrix = gradient[row]
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None]:
        """Scale the gradients of the matrices, which are known."""
        check_first_derivative("TreeLikelihood", "differences of gradients")
        per_node = gradient.repeat_interleave(len(ctx.of_matrix) // len(gradient))
        return None, None, per_node[:, None, None] * ctx.of_matrix, None


def _rows(trees: Trees) -> tuple[Tensor, Tensor, list[tuple[slice, Tensor, Tensor]]]:
    """Return the node of each row, the row of each node, and rows, children and trees of levels."""
    leaves, *sizes = trees.schedule.level_sizes
    order, first = trees.schedule.input_node.clone(), leaves
    order[:leaves] = order[:leaves][trees.taxon[order[:leaves]].argsort()]
    row = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)).to(order))
    pairs = row[trees.schedule.input_node[trees.schedule.children.view(-1, 2) - 1]]
    tree = order // (len(order) // len(trees.ends))
    levels = list[tuple[slice, Tensor, Tensor]]()
    for size in sizes:
        rows, first = slice(first, first + size), first + size
        levels.append((rows, pairs[rows], tree[rows]))
    return order, row, levels


def _by_taxon(rows: Tensor, tips: Tensor) -> Tensor:
    return rows.view(len(tips), -1, rows.size(2))


def _two(rows: Tensor, pairs: Tensor) -> list[Tensor]:
    return [rows.index_select(0, each) for each in pairs.unbind(1)]


def _to_children(to_message: Tensor, message: Tensor, pairs: Tensor, above: Tensor) -> Tensor:
    """Write the derivatives by the messages of two children; return their normalized product.

    The derivative of a log-likelihood by a product is that by the normalized product over the
    sum: what the sum adds by its logarithm, it takes away by the division.
    """
    (one, other), both = pairs.unbind(1), _two(message, pairs)
    product, sums = normalized(*both)
    above = above / sums[:, None]
    to_message.index_copy_(0, one, above * both[1])
    to_message.index_copy_(0, other, above * both[0])
    return product
