"""The trees of the benchmarks have the shapes and sizes that their names promise."""

import math

import numpy as np
import pytest
import torch

from benchmarks.trees import TREE_SHAPES, Shape, sentiment_like_trees, tree_edges
from pyg_dynbatch.core import depth_of, roots_of


def shape_of(kind: str, leaves: int, seed: int = 0) -> Shape:
    return Shape.draw(kind, leaves, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", ["balanced", "random", "chain"])
@pytest.mark.parametrize("nodes", [1, 2, 3, 10, 100])
def test_edges_are_those_of_a_binary_tree(shape: str, nodes: int) -> None:
    edges = tree_edges(shape, nodes)
    assert edges.shape == (2, nodes - 1)
    assert (edges[0] < edges[1]).all()
    assert roots_of(edges, nodes).tolist() == [nodes - 1]
    assert int(torch.bincount(edges[1], minlength=nodes).max()) <= 2
    assert int(torch.bincount(edges[0], minlength=nodes).max()) <= 1
    depth = int(depth_of(edges, nodes).max())
    assert depth == {"chain": nodes - 1, "balanced": int(math.log2(nodes))}.get(shape, depth)


def test_random_trees_resemble_sentiment_trees() -> None:
    trees = sentiment_like_trees(300)
    words = torch.tensor([float((tree.token >= 0).sum()) for tree in trees])
    assert 17 < words.mean() < 21
    assert words.min() >= 2 and words.max() <= 56
    for tree in trees[:20]:
        tree.validate(require_tree=True, num_tokens=21_702, num_classes=5)
        assert torch.equal(tree.token >= 0, tree.depth == 0)


@pytest.mark.parametrize("kind", TREE_SHAPES)
@pytest.mark.parametrize("leaves", [1, 2, 3, 8, 128])
def test_shapes(kind: str, leaves: int) -> None:
    shape = shape_of(kind, leaves)
    assert len(shape.leaves) == leaves
    assert len(shape.children) == 2 * leaves - 1
    tree = shape.example(torch.arange(leaves))
    tree.validate(require_tree=True, num_tokens=leaves)
    assert Shape.of(tree).children == shape.children
    assert tree.token[shape.leaves].tolist() == list(range(leaves))
    assert tree.root_index.tolist() == [0]
    height = {"balanced": (leaves - 1).bit_length(), "sequence": leaves - 1}
    assert int(tree.depth.max()) == height.get(kind, int(tree.depth.max()))


def test_random_shapes_are_as_high_as_in_the_paper() -> None:
    token = torch.zeros(128, dtype=torch.int64)
    heights = [float(shape_of("random", 128, k).example(token).depth.max()) for k in range(60)]
    assert 13.0 < sum(heights) / 60 < 15.6  # 14.3 by simulation of the published program
