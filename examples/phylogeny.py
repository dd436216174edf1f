"""Estimate the marginal likelihood of an alignment, over topologies and branch lengths.

    python examples/phylogeny.py FOLDER [--repeats 20]

How probable is an alignment of DNA, given a tree with branch lengths? Felsenstein's pruning
answers by a recursion from the leaves to the root, which is a cell here; trees of any topologies
are one batch. FOLDER holds DS1, 27 sequences (``DS1.fasta.gz``), and the topologies that MrBayes
sampled, with their weights (``DS1.rep_1.trprobs.gz``), from https://github.com/zcrabbit/vbpi-gnn.
Protocol: importance sampling with K draws from q(tree) q(log t | tree), where q(tree) are the
weights, and q(log t | tree) is a Gaussian at the mode of the posterior with the inverse of its
Hessian, deviations times 1.05. Prior: uniform over topologies, exponential with mean 0.1 for each
length. Model of Jukes and Cantor (1969). Figures: docs/examples.md.
"""

import argparse
import gzip
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch import Levels, keep_freed_memory, schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

BASES = "ACGT"
CODES = {"R": "AG", "Y": "CT", "S": "CG", "W": "AT", "K": "GT", "M": "AC", "U": "T"}
CODES |= {"B": "CGT", "D": "AGT", "H": "ACT", "V": "ACG"}
CODES |= {base: base for base in BASES} | dict.fromkeys("N-?.", BASES)
RATE = 10.0  # of the prior of a branch length
BATCH = 50  # trees at once


class Alignment(NamedTuple):
    """Aligned sequences; columns that occur several times are kept once, with their number.

    Args:
        taxa: Names of the sequences.
        tips: 1 where a base is compatible with what is observed, ``[taxon, 4, pattern]``.
        count: Number of columns with each pattern.
    """

    taxa: list[str]
    tips: Tensor
    count: Tensor


def read_alignment(path: Path) -> Alignment:
    """Read a compressed FASTA file."""
    sequences = {}
    for entry in gzip.decompress(path.read_bytes()).decode().split(">")[1:]:
        name, *lines = entry.split("\n")
        sequences[name.strip()] = "".join("".join(lines).split()).upper()
    tips = [[[base in CODES[c] for c in row] for base in BASES] for row in sequences.values()]
    patterns, count = np.unique(tips, axis=2, return_counts=True)
    return Alignment(
        list(sequences), torch.from_numpy(patterns).double(), torch.tensor(count).double()
    )


class Tree(NamedTuple):
    """An unrooted binary tree; nodes in the order of Newick's text, the one of degree 3 is last.

    Args:
        parent: Parent of each node but the last.
        names: Taxon of each node; empty for inner nodes.
    """

    parent: list[int]
    names: list[str]


def read_mrbayes(path: Path) -> tuple[list[Tree], Tensor]:
    """Read the topologies that MrBayes sampled, and their posterior weights."""
    text = gzip.decompress(path.read_bytes()).decode()
    taxon = dict(re.findall(r"(\d+)\s+([^\s,;]+)[,;]", text.partition("translate")[2]))
    found = re.findall(r"\[&W (.*?)\]\s*(\(.*;)", text)
    weights = torch.tensor([float(weight) for weight, _ in found], dtype=torch.float64)
    return [parse_newick(newick, taxon) for _, newick in found], weights / weights.sum()


def parse_newick(text: str, taxon: dict[str, str]) -> Tree:
    """Parse a topology in Newick's format, whose leaves are numbers of taxa."""
    parent: dict[int, int] = {}
    names: list[str] = []
    open_groups: list[list[int]] = [[]]
    for token in re.findall(r"[()]|\w+", text):
        if token == "(":
            open_groups.append([])
            continue
        if token == ")":
            parent |= dict.fromkeys(open_groups.pop(), len(names))
        open_groups[-1].append(len(names))
        names.append("" if token == ")" else taxon[token])
    return Tree([parent[node] for node in range(len(parent))], names)


class Trees(NamedTuple):
    """Trees over the same taxa as one graph; each is rooted at its last node's last branch.

    The likelihood does not depend on where a tree is rooted: both ends of the branch send their
    messages to it. So an inner node has two children, and the last node loses its third.

    Args:
        taxon: Taxon of each leaf, 0 for inner nodes.
        ends: The two nodes of each tree whose messages meet, ``[tree, 2]``.
        schedule: Levels of all trees.
    """

    taxon: Tensor
    ends: Tensor
    schedule: Levels


def join(trees: Sequence[Tree], taxa: Sequence[str]) -> Trees:
    """Put trees side by side."""
    number = {"": 0} | {name: place for place, name in enumerate(taxa)}
    size = 2 * len(taxa) - 2
    first = size * np.arange(len(trees))[:, None]
    parent = np.array([tree.parent for tree in trees])
    # The last child of the last node is the node before it: their branch is the root.
    child = np.arange(size - 2)
    edges = np.stack([(first + child).ravel(), (first + parent[:, :-1]).ravel()])
    taxon = torch.tensor([number[name] for tree in trees for name in tree.names])
    ends = torch.from_numpy(first + [size - 2, size - 1])
    return Trees(taxon, ends, schedule_structure(torch.from_numpy(edges), len(taxon), arity=2))


def normalized(messages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product of two messages ``[row, 2, 4 * pattern]`` over its sum, and the sum."""
    one, other = messages.unflatten(2, (4, -1)).unbind(1)
    product = one * other
    total = product.sum(1)
    return product / total[:, None], total


class PruningCell(RecursiveCell):
    """Compute the messages of many nodes of binary trees to their parents.

    A message holds, for each base of the parent, the probability of what is observed below,
    divided by a factor per pattern; the logarithm of the factor is the second part of the state.
    Input rows are the 16 entries of the matrix P(t) of the branch above the node, followed by the
    number of its taxon, which only leaves read.
    """

    def __init__(self, tips: Tensor) -> None:
        patterns = tips.size(2)
        super().__init__(17, 4 * patterns, arity=2)
        self.state_channels = (4 * patterns, patterns)
        self.register_buffer("tips", tips)

    def leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Send the observed bases through the branch."""
        message = x[:, :16].unflatten(1, (4, 4)) @ self.tips[x[:, 16].long()]
        return message.flatten(1), x.new_zeros(len(x), self.tips.size(2))

    def step(self, x: Tensor, children: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Multiply the messages of two children, and send the product through the branch."""
        if children is None:
            return self.leaf(x)
        messages, scale = children
        product, total = normalized(messages)
        message = x[:, :16].unflatten(1, (4, 4)) @ product
        return message.flatten(1), scale.sum(1) + total.log()


class Posterior:
    """The density of branch lengths, given topologies and an alignment.

    Args:
        alignment: The observed sequences.
        trees: The topologies.
    """

    def __init__(self, alignment: Alignment, trees: list[Tree]) -> None:
        self.alignment = alignment
        self.trees = trees
        self.layer = RecursiveLayer(PruningCell(alignment.tips))
        self.num_branches = 2 * len(alignment.taxa) - 3

    def join(self, numbers: Sequence[int]) -> Trees:
        """Put topologies side by side."""
        return join([self.trees[number] for number in numbers], self.alignment.taxa)

    def log_likelihood(self, trees: Trees, lengths: Tensor) -> Tensor:
        """Return log p(alignment | tree, lengths) for lengths ``[tree, branch]``."""
        # The last node has no branch of its own above it: length 0.
        padded = torch.cat([lengths, lengths.new_zeros(len(lengths), 1)], 1).flatten()
        lost = -torch.expm1(padded * (-4 / 3))[:, None]
        matrix = (1 - lost) * torch.eye(4, dtype=lost.dtype).flatten() + lost / 4
        x = torch.cat([matrix, trees.taxon[:, None].to(matrix)], 1)
        ends = trees.ends.flatten()
        message, scale = self.layer(x, None, trees.schedule, nodes=ends, return_state=True)
        _, total = normalized(message.unflatten(0, (-1, 2)))
        by_pattern = (total / 4).log() + scale.unflatten(0, (-1, 2)).sum(1)
        return by_pattern @ self.alignment.count

    def density(self, trees: Trees, u: Tensor) -> Tensor:
        """Return log p(alignment, u | tree) for logarithms of lengths ``[tree, branch]``."""
        t = u.exp()
        return self.log_likelihood(trees, t) + (math.log(RATE) - RATE * t + u).sum(1)

    def gradient(self, trees: Trees, u: Tensor) -> Tensor:
        """Return the derivatives of the density by ``u``."""
        u = u.detach().requires_grad_()
        return torch.autograd.grad(self.density(trees, u).sum(), u)[0]

    def fit(self, numbers: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return mode, axes and deviations of a Gaussian for each topology."""
        trees = self.join(numbers)
        mode = self.find_mode(trees)
        step = 1e-4
        columns = [
            self.gradient(trees, mode + axis) - self.gradient(trees, mode - axis)
            for axis in step * torch.eye(self.num_branches, dtype=mode.dtype)
        ]
        hessian = torch.stack(columns, 2) / (2 * step)
        values, axes = torch.linalg.eigh(-(hessian + hessian.mT) / 2)
        precision = values.clamp(min=0.3)
        # A step of Newton's method, as the Hessian is known anyway.
        slope = axes.mT @ self.gradient(trees, mode)[..., None]
        mode = mode + (axes @ (slope / precision[..., None]))[..., 0]
        return list(zip(mode, axes, 1.05 / precision.sqrt(), strict=True))

    def find_mode(self, trees: Trees) -> Tensor:
        """Find the most probable logarithms of lengths of all trees at once."""
        shape = (len(trees.ends), self.num_branches)
        u = torch.full(shape, math.log(0.05), dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [u], max_iter=400, tolerance_grad=0.01, history_size=30, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -self.density(trees, u).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return u.detach()

    @torch.no_grad()
    def draw(self, drawn: Tensor, gaussians: dict[int, tuple[Tensor, ...]]) -> Tensor:
        """Draw lengths for topologies; return log p(alignment, u | tree) - log q(u | tree)."""
        weights = []
        for numbers in drawn.split(BATCH):
            columns = zip(*[gaussians[number] for number in numbers.tolist()], strict=True)
            mode, axes, deviation = map(torch.stack, columns)
            noise = torch.randn_like(mode)
            u = mode + (axes @ (deviation * noise)[..., None])[..., 0]
            log_q = (-noise.square() / 2 - deviation.log() - math.log(2 * math.pi) / 2).sum(1)
            weights.append(self.density(self.join(numbers.tolist()), u) - log_q)
        return torch.cat(weights)


def main(arguments: Sequence[str] | None = None) -> None:
    """Estimate the marginal likelihood of DS1 several times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draws", type=int, default=1000, help="K of one estimate")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args(arguments)
    keep_freed_memory()
    torch.manual_seed(0)
    start = time.process_time()
    alignment = read_alignment(options.folder / "DS1.fasta.gz")
    trees, weights = read_mrbayes(options.folder / "DS1.rep_1.trprobs.gz")
    posterior = Posterior(alignment, trees)
    drawn = torch.multinomial(weights, options.repeats * options.draws, replacement=True)
    gaussians = {}
    for numbers in drawn.unique().split(BATCH):
        gaussians |= zip(numbers.tolist(), posterior.fit(numbers.tolist()), strict=True)
    log_trees = math.log(math.prod(range(3, 2 * len(alignment.taxa) - 4, 2)))
    log_weights = posterior.draw(drawn, gaussians) - log_trees - weights[drawn].log()
    log_weights = log_weights.view(options.repeats, options.draws)
    estimates = log_weights.logsumexp(1) - math.log(options.draws)
    deviation = estimates.std(correction=int(options.repeats > 1))
    pooled = log_weights.logsumexp((0, 1)) - math.log(drawn.numel())
    seconds = time.process_time() - start
    print(f"{len(gaussians)} of {len(trees)} topologies drawn; {seconds:.0f} s of processor time")
    print(f"log p(Y), K = {options.draws}: {estimates.mean():.2f} ± {deviation:.2f}", end="; ")
    print(f"all draws together {pooled:.2f}")
    print("published: MrBayes, stepping stone: -7108.42 (0.18); VBPI-GNN: -7108.41 (0.14)")


if __name__ == "__main__":
    main()
