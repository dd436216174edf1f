"""Load the trees of a benchmark: those of the treebank, or random ones of like shape."""

from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.shapes import sentiment_like_trees
from pyg_dynbatch.trees.datasets import SST
from pyg_dynbatch.trees.vocabulary import Vocabulary

CLASSES = 5
"""Of a node, from very negative to very positive."""


class SentimentTrees(NamedTuple):
    """Trees, what records call them, and the rows of an embedding of their words."""

    trees: Any
    source: str
    num_tokens: int


def sentiment_trees(
    raw_dir: Path | None, count: int, seed: int, vocabulary: Vocabulary | None = None
) -> SentimentTrees:
    """Loads the trees of a benchmark.

    Args:
        raw_dir: Folder of the treebank; None for random trees with as many words.
        count: How many random trees.
        seed: Of the random trees.
        vocabulary: Words of the treebank to use; all if left out.

    Example:
        >>> found = sentiment_trees(None, 3, seed=0)
        >>> len(found.trees), found.source
        (3, 'random trees')
    """
    if raw_dir is None:
        return SentimentTrees(sentiment_like_trees(count, seed=seed), "random trees", 21_702)
    trees = SST(None, "train", vocabulary or "all", raw_dir)
    return SentimentTrees(trees, "sst", trees.num_tokens)
