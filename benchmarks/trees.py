"""The trees of the benchmarks: given shapes, random sentences, the Stanford Sentiment Treebank."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.trees.data import Collater, DynTreeData
from pyg_dynbatch.trees.datasets import SST
from pyg_dynbatch.trees.words import Vocabulary

CLASSES = 5
"""Of a node, from very negative to very positive."""

TREE_SHAPES = ("random", "balanced", "sequence")
FOREST_SHAPES = ("balanced", "random", "chain")


class Shape(NamedTuple):
    """The shape of a binary tree, for example ``Shape([(1, 2), (), ()], [2, 1, 0])``."""

    children: list[tuple[int, ...]]  # children of each node, () for a leaf
    order: list[int]  # all nodes, children before parents

    @classmethod
    def draw(cls, kind: str, leaves: int, generator: np.random.Generator) -> "Shape":
        """Draw a shape: ``"random"``, ``"balanced"``, or ``"sequence"``.

        Random shapes split the leaves of a node uniformly; in a sequence every right child is a
        leaf. Nodes are numbered from the root in preorder.
        """
        children: list[tuple[int, ...]] = []
        waiting = [(leaves, -1)]
        while waiting:
            size, parent = waiting.pop()
            if parent >= 0:
                children[parent] = (*children[parent], len(children))
            if size > 1:
                left = {"balanced": size // 2, "sequence": size - 1}.get(kind, 0)
                left = left or int(generator.integers(1, size))
                waiting += [(size - left, len(children)), (left, len(children))]
            children.append(())
        return cls(children, list(reversed(range(len(children)))))

    @classmethod
    def of(cls, tree: DynTreeData) -> "Shape":
        """Return the shape of a binary tree whose inner nodes have two children."""
        children: list[tuple[int, ...]] = [()] * int(tree.num_nodes or 0)
        first = tree.child_slot.argsort(stable=True)
        for child, parent in tree.edge_index[:, first].t().tolist():
            children[parent] = (*children[parent], child)
        return cls(children, tree.depth.argsort(stable=True).tolist())

    @property
    def leaves(self) -> list[int]:
        """The leaves, from left to right in a shape that was drawn."""
        return [node for node, children in enumerate(self.children) if not children]

    def example(self, token: Tensor, label: Tensor | None = None) -> DynTreeData:
        """Return an example with one token per leaf and one label per node."""
        edges = [(c, node) for node, children in enumerate(self.children) for c in children]
        tokens = torch.full((len(self.children),), -1)
        tokens[self.leaves] = token
        edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous()
        return DynTreeData(
            edge_index, token=tokens, has_input=tokens >= 0, y=label, num_nodes=len(self.children)
        )


def schedule_of(trees: Sequence[DynTreeData]) -> Levels:
    """Return the schedule of some trees as one batch."""
    schedule: Levels = Collater(arity=2)(list(trees)).schedule
    return schedule


class Forest(NamedTuple):
    """Copies of one tree."""

    shape: str
    edges: Tensor  # of one tree, child to parent, [2, edge]
    tree_nodes: int
    trees: int

    @property
    def nodes(self) -> int:
        """Number of nodes of the forest."""
        return self.tree_nodes * self.trees

    @classmethod
    def of(cls, shape: str, nodes: int, largest_tree: int) -> "Forest":
        """Create a forest of about this many nodes."""
        tree_nodes = min(nodes, largest_tree)
        return cls(shape, tree_edges(shape, tree_nodes), tree_nodes, max(1, nodes // tree_nodes))

    def all_edges(self) -> Tensor:
        """Return the edges of all copies."""
        shift = torch.arange(self.trees) * self.tree_nodes
        return (self.edges[:, None] + shift[:, None]).reshape(2, -1)


def tree_edges(shape: str, num_nodes: int, seed: int = 0) -> Tensor:
    """Return the edges of a binary tree whose children have lower numbers than their parents.

    In a random tree, the descendants of a node are split uniformly between its two children; in a
    chain, every node has one child.
    """
    child = np.arange(1, num_nodes)
    if shape == "chain":
        parent = child - 1
    elif shape == "balanced":
        parent = (child - 1) // 2
    else:
        parent = _random_parents(num_nodes, np.random.default_rng(seed))
    # So far the root is node 0; reverse the numbers, so that it is the last node.
    edges = num_nodes - 1 - np.stack([child, parent])
    if shape == "chain":
        edges = edges[:, ::-1]
    return torch.from_numpy(edges.copy())


def _random_parents(num_nodes: int, generator: np.random.Generator) -> np.ndarray:
    """Split all nodes of a depth at once; nodes are numbered depth by depth from the root."""
    parents: list[np.ndarray] = []
    first, sizes = 0, np.array([num_nodes])
    while sizes.size:
        below = sizes - 1
        left = np.minimum(generator.integers(0, below + 1), below)
        both = np.stack([left, below - left], 1).reshape(-1)
        parent = np.repeat(first + np.arange(sizes.size), 2)
        first += sizes.size
        parents.append(parent[both > 0])
        sizes = both[both > 0]
    return np.concatenate(parents)


def frequent_words(count: int, num_tokens: int, generator: np.random.Generator) -> Tensor:
    """Draw words whose frequency is proportional to 1 / rank; word 0 is the most frequent."""
    rank = np.power(num_tokens, generator.random(count)).astype(int)
    return torch.from_numpy(np.minimum(rank, num_tokens - 1))


def sentiment_like_trees(
    trees: int, num_tokens: int = 21_702, num_classes: int = CLASSES, seed: int = 0
) -> list[DynTreeData]:
    """Draw random binary trees that resemble the Stanford Sentiment Treebank in size.

    Sentences have 19 words on average, from 2 to 56, and every node has a label. Phrases are
    split uniformly, so the trees are a little flatter than parse trees.
    """
    generator = np.random.default_rng(seed)
    words = np.clip(generator.gamma(4.2, 4.55, trees).round().astype(int), 2, 56)
    found = []
    for count in words.tolist():
        shape = Shape.draw("random", count, generator)
        token = frequent_words(count, num_tokens, generator)
        label = torch.from_numpy(generator.integers(0, num_classes, 2 * count - 1))
        found.append(shape.example(token, label))
    return found


def sentiment_trees(
    options: Namespace, vocabulary: Vocabulary | None = None
) -> tuple[Any, str, int]:
    """Load the treebank or draw similar trees; return them, their source, and ``num_tokens``."""
    if options.raw_dir is None:
        trees = sentiment_like_trees(options.trees, seed=options.seed)
        return trees, "random trees", 21_702
    treebank = SST(None, "train", vocabulary or "all", options.raw_dir)
    return treebank, "sst", treebank.num_tokens
