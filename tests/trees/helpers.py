"""Compare examples and batches field by field."""

import operator
from typing import Any

import torch
from torch_geometric.data import Batch


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
