"""Log-likelihoods of phylogenetic trees by Felsenstein's pruning, for many topologies at once.

The state of a node is the message that it sends to its parent, ``[4, pattern]``: for each base of
the parent, the probability of what is observed below, divided by a factor per pattern whose
logarithm is the second part of the state. :class:`PruningCell` is the definition, a cell as any
other; ``phylogeny_pruning.py`` does the same without autograd in between.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from phylogeny_data import Alignment
from phylogeny_pruning import Pruning, normalized
from phylogeny_trees import Trees
from torch import Tensor, nn
from torch.nn.functional import pad

from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer


def jukes_cantor(lengths: Tensor) -> Tensor:
    """Return P(t) of the model of Jukes and Cantor (1969), ``[..., 4, 4]``."""
    lost = -torch.expm1(lengths * (-4 / 3))[..., None, None]  # exact for short branches, too
    return (1 - lost) * torch.eye(4).to(lengths) + lost / 4


class TreeLikelihood(nn.Module):
    """Compute log p(alignment | tree, branch lengths) for trees of any topologies.

    Args:
        alignment: The observed sequences.
        transition: From branch lengths to P(t), ``[..., 4, 4]``, of a reversible model: entry
            [a, b] is the probability that a becomes b along the branch.
        frequencies: Of the bases A, C, G, T in that model; equal by default.
    """

    frequencies: Tensor

    def __init__(
        self,
        alignment: Alignment,
        transition: Callable[[Tensor], Tensor] = jukes_cantor,
        frequencies: Sequence[float] | Tensor = (0.25, 0.25, 0.25, 0.25),
    ) -> None:
        super().__init__()
        self.transition, share = transition, torch.as_tensor(frequencies, dtype=torch.float64)
        if share.shape != (4,) or not (share > 0).all() or abs(share.detach().sum() - 1) > 1e-9:
            raise ValueError(f"frequencies: expected 4 above 0, of sum 1, got {share.tolist()}")
        self.register_buffer("frequencies", share)
        self.layer = RecursiveLayer(PruningCell(alignment.tips))
        self.register_buffer("count", alignment.count)

    def forward(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return the log-likelihoods ``[tree]`` for lengths ``[tree, branch]``."""
        matrix = self._matrices(trees, lengths)
        return Pruning.apply(self.layer.cell.tips, self.count, matrix, trees)

    def _matrices(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return P(t) of the branch above each node."""
        wanted = (len(trees.ends), 2 * len(self.layer.cell.tips) - 3)
        if lengths.shape != wanted:
            raise ValueError(f"lengths: expected {list(wanted)}, got {list(lengths.shape)}")
        if (unknown := lengths.isnan()).any():
            tree, branch = unknown.nonzero()[0].tolist()
            hint = "Newick's text has to give the length of every branch"
            raise ValueError(f"lengths: branch {branch} of tree {tree} is nan; {hint}")
        padded, share = pad(lengths, (0, 1)), self.frequencies.to(lengths)
        matrix = self.transition(padded.flatten()).unflatten(0, padded.shape)
        flow, atol = share[:, None] * matrix.detach(), 1e-9 if share.dtype == torch.double else 1e-5
        if not torch.allclose(flow, flow.mT, rtol=0, atol=atol):
            text = "frequencies[a] P[a, b] has to equal frequencies[b] P[b, a], as roots are moved"
            raise ValueError(f"not a reversible model with frequencies {share.tolist()}: {text}")
        # The last branch is that of length 0 at the root, where all bases count 1/4 below.
        weight = torch.ones_like(matrix[0, :, :, :1])
        weight[-1] = 4 * share[:, None]
        return (matrix * weight).flatten(0, 1)[trees.branch]

    def of_patterns(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return the log-likelihoods of all patterns, ``[tree, pattern]``."""
        matrix = self._matrices(trees, lengths)
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
