"""Compare examples and batches field by field; write a tree as text, and a checkpoint."""

import operator
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Batch

from pyg_dynbatch.data import DynTreeData, Vocabulary, to_nested
from pyg_dynbatch.models import TreeClassifier, TreeSchema

WORDS = ["good", "not", "very"]


def chain_tree(num_nodes: int, **fields: Any) -> DynTreeData:
    """Make a chain, in which each node is the only child of the one before it."""
    node = torch.arange(num_nodes - 1)
    return DynTreeData(torch.stack([node + 1, node]), num_nodes=num_nodes, **fields)


def assert_same(wanted: Any, found: Any) -> None:
    """Assert that two examples or batches have equal fields, also once taken apart."""
    assert type(found) is type(wanted)
    mine, theirs = found.to_dict(), wanted.to_dict()
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert type(mine[key]) is type(value), key
        equal = torch.equal if isinstance(value, torch.Tensor) else operator.eq
        assert equal(mine[key], value), key
    if isinstance(wanted, Batch):
        assert found.num_graphs == wanted.num_graphs
        for pair in zip(wanted.to_data_list(), found.to_data_list(), strict=True):
            assert_same(*pair)


def bracketed(tree: DynTreeData, vocabulary: Vocabulary) -> str:
    """Write a tree as bracketed text."""
    words = [vocabulary[row] if row >= 0 else None for row in tree.token.tolist()]
    labels = tree.y.tolist() if "y" in tree else [None] * len(words)

    def write(node: int, parts: tuple[str, ...]) -> str:
        head = [str(part) for part in (labels[node], words[node]) if part is not None]
        return f"({' '.join([*head, *parts])})"

    return to_nested(tree, write)


def tree_checkpoint(
    path: Path, seed: int = 0, words: list[str] = WORDS, labels: str = "required", **options: Any
) -> Path:
    """Write a checkpoint of a small classifier with random weights."""
    torch.manual_seed(seed)
    schema = TreeSchema(len(words) + 1, 3, Vocabulary(words), labels)
    TreeClassifier(schema, **{"hidden_channels": 4, **options}).save(path)
    return path
