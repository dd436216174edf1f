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

from pyg_dynbatch import Levels
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

BLOCK = 2**20  # bytes of messages per step on a CPU, so that what a step computes stays in the cache


def jukes_cantor(lengths: Tensor) -> Tensor:
    """Return P(t) of the model of Jukes and Cantor (1969), ``[..., 4, 4]``."""
    kept = torch.exp(lengths * (-4 / 3))[..., None, None]
    return kept * torch.eye(4).to(lengths) + (1 - kept) / 4


class TreeLikelihood(nn.Module):
    """Compute log p(alignment | tree, branch lengths) for trees of any topologies.

    Args:
        alignment: The observed sequences.
        transition: From branch lengths to P(t), of a reversible model with equal frequencies.
        fused: Whether to run all levels in one autograd function, or the cell level by level.
    """

    def __init__(
        self,
        alignment: Alignment,
        transition: Callable[[Tensor], Tensor] = jukes_cantor,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.transition, self.fused = transition, fused
        self.layer = RecursiveLayer(PruningCell(alignment.tips))
        self.register_buffer("count", alignment.count)

    def forward(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return the log-likelihoods ``[tree]`` for lengths ``[tree, branch]``."""
        return self.of_patterns(trees, lengths) @ self.count

    def of_patterns(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return the log-likelihoods of all patterns, ``[tree, pattern]``."""
        matrix = self.transition(pad(lengths, (0, 1)).flatten()[trees.branch])
        if self.fused:
            return _Pruning.apply(self.layer.cell.tips, matrix, trees)
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
    """Compute the likelihoods of patterns, and backwards the gradients of the matrices.

    The derivative of a log-likelihood by a product is that by the normalized product over the
    sum: what the sum adds by its logarithm, it takes away by the division.
    """

    @staticmethod
    def forward(ctx: Any, tips: Tensor, matrix: Tensor, trees: Trees) -> Tensor:
        order = trees.schedule.input_node  # the order of levels
        matrix, taxon = matrix[order], trees.taxon[order]
        message = matrix.new_empty(len(matrix), *tips.shape[1:])
        scale = matrix.new_zeros(len(matrix), tips.size(2))
        for rows, pairs in _blocks(trees.schedule, message):
            if pairs is None:
                product = tips.index_select(0, taxon[rows])
            else:
                product, total = normalized(*_two(message, pairs))
                scale[rows] = total.log_() + torch.add(*_two(scale, pairs))
            torch.bmm(matrix[rows], product, out=message[rows])
        ctx.trees, ctx.tips = trees, tips
        ctx.save_for_backward(matrix, taxon, message)
        ends = trees.schedule.row[trees.ends] - 1
        _, total = normalized(*_two(message, ends))
        return (total / 4).log_() + torch.add(*_two(scale, ends))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        matrix, taxon, message = ctx.saved_tensors
        to_message, to_matrix = torch.empty_like(message), torch.empty_like(matrix)

        def differentiate(pairs: Tensor, above: Tensor) -> Tensor:
            (one, other), both = pairs.unbind(1), _two(message, pairs)
            product, total = normalized(*both)
            above = above / total[:, None]
            to_message.index_copy_(0, one, above * both[1])
            to_message.index_copy_(0, other, above * both[0])
            return product

        schedule = ctx.trees.schedule
        differentiate(schedule.row[ctx.trees.ends] - 1, gradient[:, None])
        for rows, pairs in reversed(_blocks(schedule, message)):
            own = to_message[rows]
            if pairs is None:
                product = ctx.tips.index_select(0, taxon[rows])
            else:
                product = differentiate(pairs, torch.bmm(matrix[rows].mT, own))
            torch.bmm(own, product.mT, out=to_matrix[rows])
        return None, to_matrix[schedule.row - 1], None


def _two(rows: Tensor, pairs: Tensor) -> list[Tensor]:
    return [rows.index_select(0, each) for each in pairs.unbind(1)]


def _blocks(schedule: Levels, message: Tensor) -> list[tuple[slice, Tensor | None]]:
    """Cut the levels into blocks of rows, with the rows of their children; leaves come first."""
    most, first = BLOCK // message[0].nbytes or 1, 0
    blocks, pairs = list[tuple[slice, Tensor | None]](), schedule.children.view(-1, 2) - 1
    for level, size in enumerate(schedule.level_sizes):
        last, step = first + size, most if message.is_cpu else size
        rows = (slice(row, min(row + step, last)) for row in range(first, last, step))
        blocks += [(each, pairs[each] if level else None) for each in rows]
        first = last
    return blocks
