"""Log-likelihoods of phylogenetic trees by Felsenstein's pruning, for many topologies at once.

The state of a node is the message that it sends to its parent, ``[4, pattern]``: for each base of
the parent, the probability of what is observed below, divided by a factor per pattern whose
logarithm is the second part of the state. :class:`PruningCell` is the definition, a cell as any
other; :class:`_Pruning` does the same without autograd in between, in a third of time and memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from phylogeny_data import Alignment
from phylogeny_trees import Trees
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn.functional import pad

from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

BLOCK = 2**24  # bytes of messages on a CPU


def jukes_cantor(lengths: Tensor) -> Tensor:
    """Return P(t) of the model of Jukes and Cantor (1969), ``[..., 4, 4]``."""
    kept = torch.exp(lengths * (-4 / 3))[..., None, None]
    return kept * torch.eye(4).to(lengths) + (1 - kept) / 4


class TreeLikelihood(nn.Module):
    """Compute log p(alignment | tree, branch lengths) for trees of any topologies.

    Args:
        alignment: The observed sequences.
        transition: From branch lengths to P(t), of a reversible model with equal frequencies.
    """

    def __init__(
        self, alignment: Alignment, transition: Callable[[Tensor], Tensor] = jukes_cantor
    ) -> None:
        super().__init__()
        self.transition = transition
        self.layer = RecursiveLayer(PruningCell(alignment.tips))
        self.register_buffer("count", alignment.count)

    def forward(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return the log-likelihoods ``[tree]`` for lengths ``[tree, branch]``."""
        matrix = self.transition(pad(lengths, (0, 1)).flatten()[trees.branch])
        return _Pruning.apply(self.layer.cell.tips, self.count, matrix, trees)

    def of_patterns(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return the log-likelihoods of all patterns, ``[tree, pattern]``."""
        matrix = self.transition(pad(lengths, (0, 1)).flatten()[trees.branch])
        x = torch.cat([matrix.flatten(1), trees.taxon[:, None].to(matrix)], 1)
        ends = self.layer(x, None, trees.schedule, nodes=trees.ends.flatten(), return_state=True)
        message, scale = (part.unflatten(0, (-1, 2)) for part in ends)
        _, total = normalized(*message.unflatten(2, (4, -1)).unbind(1))
        return (total / 4).log() + scale.sum(1)


class PruningCell(RecursiveCell):
    """Compute the messages of many nodes of binary trees; see the head of this file.

    Input rows are the 16 entries of the matrix P(t) of the branch above the node, followed by the
    number of its taxon, which only leaves read.

    Args:
        tips: 1 where a base is compatible with what is observed, ``[taxon, 4, pattern]``.
    """

    def __init__(self, tips: Tensor) -> None:
        patterns = tips.size(2)
        super().__init__(17, 4 * patterns, arity=2)
        self.state_channels = (4 * patterns, patterns)
        self.register_buffer("tips", tips)

    def leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send the observed bases through the branch."""
        message = x[:, :16].unflatten(1, (4, 4)) @ self.tips[x[:, 16].long()]
        return message.flatten(1), x.new_zeros(x.size(0), self.state_channels[1])

    def step(self, x: Tensor, children: Any) -> tuple[Tensor, Tensor]:
        """Multiply the messages of two children, and send the product through the branch."""
        if children is None:
            return self.leaf(x)
        messages, scale = children
        product, total = normalized(*messages.unflatten(2, (4, -1)).unbind(1))
        message = x[:, :16].unflatten(1, (4, 4)) @ product
        return message.flatten(1), scale.sum(1) + total.log()


def normalized(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of two messages over its sum, and the sum ``[row, pattern]``."""
    product = one * other
    total = product.sum(1)
    # Where the sum is 0, so is the product.
    return product / (total + torch.finfo(total.dtype).tiny)[:, None], total


class _Pruning(Function):
    """Compute log-likelihoods of trees, a block of patterns at a time, with their gradients.

    Rows are in the order of levels, but leaves in that of their taxa, so that all trees multiply
    the observed bases of a taxon in one product.
    """

    @staticmethod
    def forward(ctx: Any, tips: Tensor, count: Tensor, matrix: Tensor, trees: Trees) -> Tensor:
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
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None]:
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
