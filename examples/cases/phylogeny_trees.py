"""Read phylogenetic trees, in Newick's format or from MrBayes, and root them at a branch.

The likelihood of a reversible model does not depend on where a tree is rooted. Here both ends of
the branch in the middle of the longest path send their messages to it, which gives the fewest
levels; so an inner node has two children.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from phylogeny_data import text_of
from torch import Tensor

from pyg_dynbatch import Levels, schedule_structure


@dataclass(eq=False)
class Tree:
    """An unrooted binary tree; nodes in the order of Newick's text, where the top node is last.

    Args:
        parent: Parent of each node but the last, which has three children.
        names: Taxon of each node; empty for inner nodes.
        lengths: Length of the branch above each node but the last; nan where none is given.
    """

    parent: list[int]
    names: list[str]
    lengths: list[float]

    def __post_init__(self) -> None:
        children = Counter(self.parent)
        for node, name in enumerate(self.names):
            wanted = 0 if name else 2 + (node == len(self.parent))
            if children[node] != wanted:
                what = name or f"the {'inner' if wanted == 2 else 'top'} node {node}"
                text = f"{what} has {children[node]} children instead of {wanted}"
                raise ValueError(f"not an unrooted binary tree: {text}")

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """Parse Newick's format; names of inner nodes are ignored."""
        parent, names, lengths = dict[int, int](), list[str](), list[float]()
        levels, previous = [list[int]()], ","
        for token in re.findall(r"[(),;:]|[^(),;:\s]+", re.sub(r"\[.*?\]", "", text)):
            try:
                if token == "(":
                    levels.append([])
                elif token == ")" or (token not in ",;:" and previous in "(,"):
                    children = levels.pop() if token == ")" else []
                    parent.update(dict.fromkeys(children, len(names)))
                    levels[-1].append(len(names))
                    names.append("" if children else token)
                    lengths.append(torch.nan)
                elif previous == ":":
                    lengths[-1] = float(token)
                elif token not in ",;:" and previous != ")":
                    raise ValueError
            except (IndexError, ValueError):
                raise ValueError(f"not a tree: {token!r} after {previous!r} in {text}") from None
            previous = token
        if previous != ";" or len(levels[0]) != 1 or min(lengths, default=0) < 0:
            raise ValueError(f"not one tree in Newick's format, with lengths from 0: {text}")
        return cls([parent[node] for node in range(len(parent))], names, lengths[:-1])

    def rooted(self) -> tuple[list[int], list[int], tuple[int, int]]:
        """Root the tree at a branch in its middle.

        Returns:
            The parent of each node, -1 at both ends of that branch; the branch above each node,
            as the node that it is above in Newick's order; both ends.
        """
        height, deepest = [0] * len(self.names), list(range(len(self.names)))
        longest = 0, 0
        for node, above in enumerate(self.parent):
            path, taller = height[node] + 1 + height[above], height[node] >= height[above]
            longest = max(longest, (path, deepest[node if taller else above]))
            if taller:
                height[above], deepest[above] = height[node] + 1, deepest[node]
        end = longest[1]
        for _ in range((longest[0] - 1) // 2):
            end = self.parent[end]
        parent, branch = [*self.parent, -1], list(range(len(self.names)))
        # Between the branch and the node that was at the top, parents become children.
        below, node, parent[end] = -1, self.parent[end], -1
        other, above_node = node, len(self.parent)
        while node != -1:
            parent[node], below, node = below, node, parent[node]
            branch[below], above_node = above_node, branch[below]
        return parent, branch, (end, other)


@dataclass(eq=False)
class Trees:
    """Trees over the same taxa as one graph, rooted.

    Args:
        taxon: Taxon of each leaf, 0 for inner nodes.
        branch: Place of the branch above each node in lengths ``[tree, branch + 1]``, where the
            last one is 0.
        ends: The two nodes of each tree whose messages meet, ``[tree, 2]``.
        schedule: Levels of all trees.
    """

    taxon: Tensor
    branch: Tensor
    ends: Tensor
    schedule: Levels

    @classmethod
    def of(cls, trees: Sequence[Tree], taxa: Sequence[str]) -> "Trees":
        """Put trees side by side."""
        number = {"": 0} | {name: place for place, name in enumerate(taxa)}
        for tree in trees:
            if sorted(filter(None, tree.names)) != sorted(taxa):
                odd = ", ".join(sorted({*tree.names} ^ {"", *taxa})) or "a taxon that occurs twice"
                raise ValueError(f"tree and alignment differ in their taxa: {odd}")
        size = 2 * len(taxa) - 2
        parts = [tree.rooted() for tree in trees]
        parent, branch, ends = (np.array(part) for part in zip(*parts, strict=True))
        first = size * np.arange(len(trees))[:, None]
        child = np.broadcast_to(first + np.arange(size), parent.shape)
        edges = np.stack([child[parent >= 0], (first + parent)[parent >= 0]])
        taxon = torch.tensor([number[name] for tree in trees for name in tree.names])
        schedule = schedule_structure(torch.from_numpy(edges), len(taxon), arity=2)
        branch, ends = (torch.from_numpy(first + part) for part in (branch, ends))
        return cls(taxon, branch.flatten(), ends, schedule)


def read_mrbayes(path: Path) -> tuple[list[Tree], Tensor]:
    """Read a file of MrBayes with topologies and their posterior weights."""
    text = text_of(path)
    table = dict(re.findall(r"(\d+)\s+([^\s,;]+)[,;]", text.partition("translate")[2]))
    trees, weights = list[Tree](), list[float]()
    for weight, newick in re.findall(r"\[&W (.*?)\]\s*(\(.*;)", text):
        tree = Tree.parse(newick)
        tree.names = [table.get(name, name) for name in tree.names]
        trees.append(tree)
        weights.append(float(weight))
    if not trees:
        raise ValueError(f"{path}: no trees with weights [&W ...]")
    return trees, torch.tensor(weights, dtype=torch.float64)
