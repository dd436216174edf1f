"""Grow trees of a given shape and size, without recursion."""

import numpy as np
import torch
from torch import Tensor

from benchmarks.table1_trees import Shape
from pyg_dynbatch.trees.data import DynTreeData


def tree_edges(shape: str, num_nodes: int, seed: int = 0) -> Tensor:
    """Gives the edges of one binary tree, children before parents in number.

    Args:
        shape: ``"balanced"`` (a complete tree), ``"random"`` (the two children of a node share
            its other nodes at random, all splits alike likely), or ``"chain"`` (one child a
            node).
        num_nodes: Number of nodes.
        seed: Of the random splits.

    Returns:
        Edges from child to parent, ``[2, num_nodes - 1]``; the first child of a node stands
        before the second.

    Example:
        >>> tree_edges("chain", 3).tolist()
        [[0, 1], [1, 2]]
        >>> tree_edges("balanced", 3).tolist()
        [[1, 0], [2, 2]]
    """
    child = np.arange(1, num_nodes)
    if shape == "chain":
        parent = child - 1
    elif shape == "balanced":
        parent = (child - 1) // 2
    else:
        parent = _random_parents(num_nodes, np.random.default_rng(seed))
    # Counted from the root so far; turned round, so that the root comes last.
    edges = num_nodes - 1 - np.stack([child, parent])
    if shape == "chain":
        edges = edges[:, ::-1]
    return torch.from_numpy(edges.copy())


def _random_parents(num_nodes: int, generator: np.random.Generator) -> np.ndarray:
    """Splits all nodes of a depth at once; nodes are numbered depth by depth from the root."""
    parents: list[np.ndarray] = []
    first, sizes = 0, np.array([num_nodes])
    while sizes.size:
        below = sizes - 1
        left = np.minimum(generator.integers(0, below + 1), below)
        both = np.stack([left, below - left], 1).reshape(-1)
        owner = np.repeat(first + np.arange(sizes.size), 2)
        first += sizes.size
        parents.append(owner[both > 0])
        sizes = both[both > 0]
    return np.concatenate(parents)


def forest_edges(edges: Tensor, num_nodes: int, trees: int) -> Tensor:
    """Puts copies of one tree side by side.

    Args:
        edges: Of one tree, ``[2, edge]``.
        num_nodes: Nodes of one tree.
        trees: Number of copies.

    Example:
        >>> forest_edges(torch.tensor([[0], [1]]), 2, 2).tolist()
        [[0, 2], [1, 3]]
    """
    shift = torch.arange(trees) * num_nodes
    return (edges[:, None] + shift[:, None]).reshape(2, -1)


def sentiment_like_trees(
    trees: int, num_tokens: int = 21_702, num_classes: int = 5, seed: int = 0
) -> list[DynTreeData]:
    """Draws random binary trees that resemble the Stanford Sentiment Treebank in size.

    Sentences have 19 words on average, from 2 to 56; word frequencies fall off as 1 / rank; every
    node has a label. All splits of a phrase are alike likely, so the trees are a little flatter
    than parse trees.

    Args:
        trees: Number of trees.
        num_tokens: Rows of the vocabulary.
        num_classes: Number of classes.
        seed: Seed.

    Returns:
        The trees, leaves with tokens, inner nodes without.

    Example:
        >>> tree = sentiment_like_trees(1)[0]
        >>> int((tree.token >= 0).sum()) * 2 - 1 == tree.num_nodes
        True
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


def frequent_words(count: int, num_tokens: int, generator: np.random.Generator) -> Tensor:
    """Draws words whose frequency falls off as 1 / rank.

    Args:
        count: How many.
        num_tokens: Rows of the vocabulary, the commonest first.
        generator: Draws them.

    Example:
        >>> frequent_words(3, 1, np.random.default_rng(0)).tolist()
        [0, 0, 0]
    """
    rank = np.power(num_tokens, generator.random(count)).astype(int)
    return torch.from_numpy(np.minimum(rank, num_tokens - 1))
