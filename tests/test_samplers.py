import copy
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch_geometric.data import InMemoryDataset

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import NodeBudgetBatchSampler, node_counts


def flat(batches):
    return [example for batch in batches for example in batch]


def ranked(sizes, ranks, epoch=0, shuffle=True, **options):
    """The batches of every rank, each rank planning by itself."""
    plans = []
    for rank in range(ranks):
        order = DistributedSampler(sizes, num_replicas=ranks, rank=rank, shuffle=shuffle)
        order.set_epoch(epoch)
        sampler = NodeBudgetBatchSampler(order, sizes, **options)
        plans.append(list(sampler))
        assert len(plans[-1]) == len(sampler)
    return plans


@given(
    sizes=st.lists(st.integers(0, 20), min_size=8, max_size=40),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_example_comes_once_and_all_ranks_get_equally_many(sizes, ranks, epoch, shuffle):
    plans = ranked(sizes, ranks, epoch, shuffle, max_nodes=45)
    other_epoch = ranked(sizes, ranks, epoch + 1, shuffle, max_nodes=45)
    assert len({len(plan) for plan in (*plans, *other_epoch)}) == 1
    assert Counter(flat(flat(plans))) == Counter(range(len(sizes)))
    for batch in flat(plans):
        assert batch
        assert sum(sizes[example] for example in batch) <= 45


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_the_sampler(shuffle):
    ones = [1] * 11
    make = RandomSampler if shuffle else SequentialSampler
    for seed in range(3):
        torch.manual_seed(seed)
        expected = list(BatchSampler(make(ones), 4, drop_last=False))
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert list(NodeBudgetBatchSampler(make(ones), ones, 4)) == expected
        assert torch.equal(torch.get_rng_state(), state)


def test_epochs_of_a_distributed_sampler_are_set_by_its_user():
    sizes = list(range(1, 50))
    first, again, second = (ranked(sizes, 2, epoch, max_nodes=60) for epoch in (0, 0, 1))
    assert first == again != second


def test_batches_are_well_filled_and_not_sorted_by_size():
    sizes = [*np.random.default_rng(0).integers(1, 60, 1000).tolist(), *[2] * 7]
    sampler = NodeBudgetBatchSampler(RandomSampler(sizes), sizes, max_nodes=95)
    assert len(sampler) * 95 < 1.03 * sum(sizes)
    for _ in range(3):
        loads = [sum(sizes[example] for example in batch) for batch in sampler]
        counts = [len(batch) for batch in sampler]
        assert abs(np.corrcoef(range(len(loads)), loads)[0, 1]) < 0.3
        assert abs(np.corrcoef(range(len(counts)), counts)[0, 1]) < 0.3


def test_batches_of_a_step_are_of_about_equal_size():
    # Odd sizes up to 103, as those of binary parse trees.
    sizes = (2 * np.random.default_rng(0).integers(1, 37, 8544) + 1).tolist()
    plans = ranked(sizes, 8, max_nodes=975)
    loads = np.array([[sum(sizes[i] for i in batch) for batch in plan] for plan in plans])
    assert (loads.max(0) / loads.mean(0)).mean() < 1.02


def test_without_shuffle_the_order_stays():
    sizes = [3, 1, 4, 1, 5, 9, 2, 6]
    sampler = NodeBudgetBatchSampler(SequentialSampler(sizes), sizes, 9)
    assert list(sampler) == list(sampler) == [[0, 1, 2, 3], [4], [5], [6, 7]]


def test_an_example_above_the_budget_is_a_batch_of_its_own() -> None:
    sizes = [2, 50, 3, 4, 60, 5, 6]
    said = r"2 of 7 examples are above the budget of 10 \(the largest 60\): a batch for each"
    with pytest.warns(UserWarning, match=said) as warned:
        in_order = NodeBudgetBatchSampler(SequentialSampler(sizes), sizes, 10)
    assert len(warned) == 1
    assert list(in_order) == [[0], [1], [2, 3], [4], [5], [6]] and len(in_order) == 6
    with pytest.warns(UserWarning, match=said):
        shuffled = NodeBudgetBatchSampler(RandomSampler(sizes), sizes, 10)
    batches = list(shuffled)
    assert [1] in batches and [4] in batches
    assert sorted(flat(batches)) == list(range(7))


def test_the_first_rank_alone_warns_of_examples_above_the_budget() -> None:
    sizes = [2, 50, 3, 4]
    with pytest.warns(UserWarning, match="1 of 4 examples are above the budget") as warned:
        plans = ranked(sizes, 2, max_nodes=10)
    assert len(warned) == 1
    assert [1] in flat(plans)


def test_fewer_examples_than_ranks_are_refused():
    with pytest.raises(ValueError, match="too few examples for equally many batches"):
        ranked([3, 5], 4, max_nodes=10)
    with pytest.raises(ValueError, match="too few examples for equally many batches"):
        ranked([3, 5], 4, max_nodes=10, drop_last=True)


def test_drop_last_leaves_out_the_smallest_batches():
    sizes = [9, 8, 7, 6, 5]
    plans = ranked(sizes, 2, max_nodes=9, drop_last=True)
    assert [len(plan) for plan in plans] == [2, 2]
    assert sorted(flat(flat(plans))) == [0, 1, 2, 3]
    assert len(NodeBudgetBatchSampler(RandomSampler(sizes), sizes, 9, drop_last=True)) == 5


def test_more_lone_examples_than_batches():
    with pytest.warns(UserWarning, match="3 of 5 examples"):
        plans = ranked([50, 60, 70, 2, 3], 2, max_nodes=10, drop_last=True)
    assert {len(plan) for plan in plans} == {2}


def test_a_copy_draws_the_same_orders():
    sizes = torch.arange(3, 30)
    generator = torch.Generator().manual_seed(3)
    sampler = NodeBudgetBatchSampler(RandomSampler(sizes, generator=generator), sizes, 31)
    pickled = pickle.loads(pickle.dumps(sampler))
    copied = copy.deepcopy(sampler)
    assert list(sampler) == list(pickled) == list(copied)
    assert "27 sizes, max_nodes=31" in repr(sampler)


BAD_OPTIONS = [
    ({"sizes": []}, "there are no examples"),
    ({"sizes": [1, -2]}, "a size is negative"),
    ({"max_nodes": 0}, "max_nodes is too small"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NodeBudgetBatchSampler(
            **{"sampler": SequentialSampler([1, 2]), "sizes": [1, 2], "max_nodes": 3} | options
        )


@pytest.mark.parametrize(
    "order",
    [
        SubsetRandomSampler([0, 1]),
        WeightedRandomSampler([0.0, 0.0, 1.0], 3),
        SequentialSampler(range(5)),
    ],
)
def test_samplers_that_select_examples_are_refused(order):
    sampler = NodeBudgetBatchSampler(order, [1, 2, 3], 3)
    with pytest.raises(ValueError, match="does not yield every example once(?s:.)*Subset"):
        list(sampler)


class _Trees(InMemoryDataset):
    def __init__(self, trees):
        super().__init__()
        self._data, self.slices = self.collate(trees)


def test_node_counts_come_without_loading(monkeypatch):
    trees = [
        DynTreeData(torch.stack([torch.arange(1, n), torch.arange(n - 1)]), num_nodes=n)
        for n in (1, 4, 2)
    ]
    dataset = _Trees(trees)
    assert node_counts(trees) == [1, 4, 2]
    monkeypatch.setattr(_Trees, "get", lambda self, i: pytest.fail("an example was loaded"))
    assert node_counts(dataset) == [1, 4, 2]
    assert node_counts(dataset[[2, 1]]) == [2, 4]
    assert node_counts(Subset(dataset, [1])) == [4]
