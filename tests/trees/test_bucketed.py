"""Batches whose schedules carry their padded form."""

import pytest
import torch

from pyg_dynbatch.core import Schedule
from pyg_dynbatch.core.padding import LevelBuckets, padded_form
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater, DataLoader
from tests.core.helpers import message


def trees(count: int) -> list[DynTreeData]:
    return [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * count


def buckets(arity: int | None, direction: str = "bottom_up") -> LevelBuckets:
    collate = Collater(arity=arity, direction=direction)
    sample = [collate(trees(count)).schedule for count in (2, 4)]
    return LevelBuckets.fit(sample, margin=0.0)


def padded_nodes(schedule: Schedule) -> int:
    form = padded_form(schedule)
    assert form is not None
    return form.schedule.num_nodes


@pytest.mark.parametrize("workers", (0, 1))
@pytest.mark.parametrize("loader", (DataLoader, torch.utils.data.DataLoader))
def test_in_a_loader(loader: type[torch.utils.data.DataLoader], workers: int) -> None:
    collate = Collater(arity=2, buckets=buckets(2))
    padded = loader(trees(7), 3, collate_fn=collate, num_workers=workers)
    plain = list(DataLoader(trees(7), 3, arity=2))
    for batch, right in zip(padded, plain, strict=True):
        size = 12 if right.num_graphs == 3 else 6
        assert padded_nodes(batch.schedule) == size
        assert batch.schedule.steps == right.schedule.steps
        assert torch.equal(batch.edge_index, right.edge_index)


def test_pairs_and_dicts_of_examples() -> None:
    collate = Collater(arity=2, buckets=buckets(2))
    left, right = collate([(tree, tree) for tree in trees(3)])
    assert padded_nodes(left.schedule) == padded_nodes(right.schedule) == 12
    found = collate([{"tree": tree, "weight": 2.0} for tree in trees(2)])
    assert padded_nodes(found["tree"].schedule) == 6 and found["weight"].tolist() == [2, 2]


def test_from_the_roots_down() -> None:
    down = buckets(None, "top_down")
    options = {"follow_batch": ["edge_index"], "exclude_keys": ["depth"]}
    batch = Collater(direction="top_down", buckets=down, **options)(trees(3))
    # Four trees, and two nodes for edges of padding.
    assert padded_nodes(batch.schedule) == 14 and "schedule_down" not in batch
    assert "edge_index_batch" in batch and "depth" not in batch


def test_batches_too_large_have_an_ordinary_schedule() -> None:
    batch = Collater(arity=2, buckets=buckets(2))(trees(9))
    assert padded_form(batch.schedule) is None and batch.schedule.num_nodes == 27


def test_buckets_of_a_different_kind_are_an_error() -> None:
    for options in ({"arity": 3}, {}, {"arity": 2, "direction": "both"}):
        text = message(ValueError, Collater, buckets=buckets(2), **options)
        assert "the buckets are for other schedules" in text
        assert "got:      arity 2, bottom_up" in text
    shown = repr(Collater(arity=2, buckets=buckets(2)))
    assert shown.startswith("Collater(arity=2, direction='bottom_up', buckets=LevelBuckets(2")
