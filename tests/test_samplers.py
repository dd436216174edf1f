import pickle
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch_geometric.data import InMemoryDataset

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import NodeBudgetBatchSampler, node_counts
from pyg_dynbatch.samplers import EpochSampler


def ranked(sizes, ranks, epoch=0, **options):
    """The batches of every rank, each rank planning by itself."""
    plans = []
    for rank in range(ranks):
        inner = DistributedSampler(range(len(sizes)), num_replicas=ranks, rank=rank)
        sampler = NodeBudgetBatchSampler(inner, sizes, **options)
        sampler.sampler.set_epoch(epoch)
        plans.append(list(sampler))
        assert len(plans[-1]) == len(sampler)
    return plans


def flat(batches):
    return [example for batch in batches for example in batch]


@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_example_comes_once_and_all_ranks_get_equally_many(sizes, ranks, epoch, shuffle):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plans = ranked(sizes, ranks, epoch, max_nodes=25, shuffle=shuffle)
        lengths = {len(rank) for e in (0, 1) for rank in ranked(sizes, ranks, e, max_nodes=25)}
    assert len({len(plan) for plan in plans}) == 1
    assert len(lengths) == 1, "the number of batches must not change with the epoch"
    seen = Counter(example for plan in plans for example in flat(plan))
    assert set(seen) == set(range(len(sizes)))
    for batch in (batch for plan in plans for batch in plan):
        assert batch
        assert sum(sizes[i] for i in batch) <= 25
    if not caught:
        assert max(seen.values()) == 1


def test_batches_are_well_filled_and_not_sorted_by_size():
    sizes = [*np.random.default_rng(0).integers(1, 60, 1000).tolist(), *[2] * 7]
    sampler = NodeBudgetBatchSampler(None, sizes, max_nodes=95)
    assert len(sampler) * 95 < 1.03 * sum(sizes)
    loads = [sum(sizes[i] for i in batch) for batch in sampler]
    assert loads not in (sorted(loads), sorted(loads, reverse=True))


def test_without_shuffle_the_order_stays():
    sampler = NodeBudgetBatchSampler(None, [3, 1, 4, 1, 5, 9, 2, 6], 9, shuffle=False)
    assert list(sampler) == list(sampler) == [[0, 1, 2, 3], [4], [5], [6, 7]]


def test_an_example_above_the_budget_is_an_error_or_skipped_or_alone():
    sizes = [2, 50, 3, 4, 60, 5, 6]
    with pytest.raises(ValueError, match=r"is larger than the budget[\s\S]*where: +example 1") as e:
        NodeBudgetBatchSampler(None, sizes, 10)
    assert "50 nodes (2 examples are too big)" in str(e.value)
    # PyG's DynamicBatchSampler repeats samples here when it skips what is too big.
    with pytest.warns(UserWarning, match="left out 2 of 7 examples with more than 10 nodes"):
        sampler = NodeBudgetBatchSampler(None, sizes, 10, shuffle=False, oversize="skip")
    assert list(sampler) == [[0, 2, 3], [5], [6]] and len(sampler) == 3
    for shuffle in (False, True):
        batches = list(NodeBudgetBatchSampler(None, sizes, 10, shuffle, oversize="alone"))
        assert [1] in batches and [4] in batches
        assert sorted(flat(batches)) == list(range(7))


def test_an_epoch_depends_on_seed_and_epoch_alone():
    sizes = list(range(1, 50))

    def epoch(number, seed=0):
        sampler = NodeBudgetBatchSampler(None, sizes, 60, seed=seed)
        sampler.set_epoch(number)
        return list(sampler)

    torch.manual_seed(1)
    first = epoch(0)
    torch.manual_seed(2)
    assert epoch(0) == first
    assert epoch(1) != first
    assert epoch(0, seed=1) != first
    assert epoch(1, seed=0) != epoch(0, seed=1)


def test_full_passes_increment_the_epoch_on_one_rank():
    sampler = NodeBudgetBatchSampler(None, list(range(1, 50)), 60)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    next(iter(sampler))
    assert sampler.epoch == 1, "a pass that was broken off is not an epoch"


def test_state_of_a_finished_and_of_a_different_epoch():
    sizes = list(range(1, 50))
    sampler = NodeBudgetBatchSampler(None, sizes, 60)
    sampler.load_state_dict({"epoch": 4, "position": len(sampler)})
    assert where(sampler) == (5, 0)
    sampler.load_state_dict({"epoch": 4, "position": 2})
    sampler.set_epoch(4)  # as Lightning does after loading
    assert len(list(sampler)) == len(sampler) - 2
    sampler.load_state_dict({"epoch": 4, "position": 2})
    sampler.set_epoch(0)
    assert len(list(sampler)) == len(sampler)


def test_fewer_examples_than_ranks_do_not_hang():
    with pytest.warns(
        UserWarning, match="2 examples are fewer than 4 batches on 4 ranks; 2 are repeated"
    ):
        plans = ranked([3, 5], 4, max_nodes=10)
    assert [len(plan) for plan in plans] == [1] * 4
    assert Counter(flat(flat(plans))) == {0: 2, 1: 2}
    with pytest.raises(ValueError, match="there are fewer batches than ranks"):
        ranked([3, 5], 4, max_nodes=10, drop_last=True)


def test_drop_last_leaves_out_the_smallest_batches():
    sizes = [9, 8, 7, 6, 5]
    plans = ranked(sizes, 2, max_nodes=9, drop_last=True)
    assert [len(plan) for plan in plans] == [2, 2]
    assert sorted(flat(flat(plans))) == [0, 1, 2, 3]
    assert len(NodeBudgetBatchSampler(None, sizes, 9, drop_last=True)) == 5


def test_sampler_pickles_and_has_a_repr():
    sampler = NodeBudgetBatchSampler(None, torch.tensor([3, 4, 5]), 7)
    again = pickle.loads(pickle.dumps(sampler))
    assert list(again) == list(sampler)
    assert "3 examples, max_nodes=7, shuffle=True, seed=0, epoch=1" in repr(again)


BAD_OPTIONS = [
    ({"sizes": []}, "there are no examples"),
    ({"sizes": [1, -2]}, "a size is negative"),
    ({"max_nodes": 0}, "max_nodes is too small"),
    ({"virtual_ranks": 0}, "virtual_ranks is too small"),
    ({"seed": -1}, "seed is too small"),
    ({"oversize": "cut"}, "unknown value of oversize"),
    ({"sampler": SequentialSampler(range(5))}, "sizes belong to a different data set"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        NodeBudgetBatchSampler(**{"sampler": None, "sizes": [1, 2], "max_nodes": 3} | options)


def test_samplers_that_select_examples_are_refused():
    NodeBudgetBatchSampler(RandomSampler(range(2)), [1, 2], 3)
    with pytest.raises(TypeError, match="selects examples itself(?s:.)*Subset"):
        NodeBudgetBatchSampler(SubsetRandomSampler([0, 1]), [1, 2], 3)


def test_epoch_sampler_is_repeatable():
    sampler = EpochSampler(range(20), seed=5)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    sampler.set_epoch(1)
    assert list(sampler) == second
    assert EpochSampler(range(3)).seed == torch.initial_seed() % 2**32
    assert isinstance(sampler, RandomSampler)  # so Lightning knows that the loader shuffles


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


def where(sampler):
    """The epoch and the step at which a sampler stands."""
    state = sampler.state_dict()
    return state["epoch"], state["position"]


def virtual(sizes, ranks, planned, state=None, **options):
    """The batches of every step, gathered from the ranks, from a state on."""
    plans = []
    for rank in range(ranks):
        inner = DistributedSampler(range(len(sizes)), num_replicas=ranks, rank=rank)
        sampler = NodeBudgetBatchSampler(inner, sizes, virtual_ranks=planned, **options)
        if state is not None:
            sampler.load_state_dict(state)
        each = sampler.batches_per_step
        batches = list(sampler)
        plans.append([batches[start : start + each] for start in range(0, len(batches), each)])
    # Part k of a step on rank r is the batch of virtual rank k * ranks + r.
    steps = zip(*plans, strict=True)
    return [[batch for part in zip(*step, strict=True) for batch in part] for step in steps]


@given(
    sizes=st.lists(st.integers(1, 20), min_size=12, max_size=40),
    planned=st.sampled_from([1, 2, 4, 6, 12]),
    position=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_any_number_of_ranks_takes_the_same_steps(sizes, planned, position, shuffle):
    options = {"max_nodes": 25, "shuffle": shuffle}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*examples are fewer than")
        expected = virtual(sizes, planned, None, **options)
        assert virtual(sizes, planned, planned, **options) == expected
        stopped = NodeBudgetBatchSampler(None, sizes, virtual_ranks=planned, **options)
        running = iter(stopped)
        taken = [next(running) for _ in range(min(position, len(expected)) * planned)]
        state = stopped.state_dict()
        assert state["position"] == len(taken) // planned
        for ranks in range(1, planned + 1):
            if planned % ranks:
                with pytest.raises(ValueError, match="not a multiple of the number of ranks"):
                    virtual(sizes, ranks, planned, **options)
            else:
                assert virtual(sizes, ranks, planned, **options) == expected
                if state["position"] < len(expected):
                    # The resumed sampler takes over the number of virtual ranks.
                    left = virtual(sizes, ranks, None, state, **options)
                    assert left == expected[state["position"] :]


@pytest.mark.parametrize(
    ("planned", "budget"), [(2, 975), (8, 975), (2, 4000), (8, 4000), (8, 9750)]
)
def test_virtual_ranks_get_nearly_equal_batches_in_every_step(planned, budget):
    # Odd sizes up to 103, as those of binary parse trees.
    sizes = (2 * np.random.default_rng(0).integers(1, 37, 8544) + 1).tolist()
    sampler = NodeBudgetBatchSampler(None, sizes, budget, virtual_ranks=planned)
    shares = sampler.step_weights()
    assert shares.max() <= budget
    assert (shares.max(1) / shares.mean(1)).max() < 1.02
    first = list(sampler)
    assert sorted(flat(first)) == list(range(8544))
    companions = [set(next(b for b in plan if 0 in b)) for plan in (first, list(sampler))]
    assert len(set.intersection(*companions)) < len(companions[0]) / 2, "epochs must differ"


def test_more_lone_examples_than_batches():
    plans = ranked([50, 60, 70, 2, 3], 2, max_nodes=10, drop_last=True, oversize="alone")
    assert {len(plan) for plan in plans} == {2}


def test_batches_of_equal_numbers_are_balanced_by_weight():
    nodes = (2 * np.random.default_rng(0).integers(1, 37, 4000) + 1).tolist()
    given = {"sizes": [1] * 4000, "max_nodes": 25, "virtual_ranks": 8}
    balanced = NodeBudgetBatchSampler(None, **given, weights=nodes)
    shares, epoch = balanced.step_weights(), list(balanced)
    assert sorted(flat(epoch)) == list(range(4000))
    assert max(map(len, epoch)) == 25
    assert (shares.max(1) / shares.mean(1)).mean() < 1.01
    plain = NodeBudgetBatchSampler(None, **given)
    totals = np.array([sum(nodes[i] for i in batch) for batch in plain]).reshape(-1, 8)
    assert (totals.max(1) / totals.mean(1)).mean() > 1.1
    with pytest.raises(ValueError, match="weights belong to a different data set"):
        NodeBudgetBatchSampler(None, **given, weights=nodes[1:])


SIZES = list(range(1, 50))


OTHER_PLANS = [
    ({"virtual_ranks": 2}, r"virtual_ranks differs[\s\S]*expected: 4\s+got: +2"),
    ({"seed": 1}, "seed differs"),
    ({"sizes": [*SIZES, 1]}, r"examples differs[\s\S]*expected: 49\s+got: +50"),
    ({"sizes": SIZES[::-1]}, r"sizes differs[\s\S]*the same order"),
    ({"max_nodes": 70}, r"max_nodes differs[\s\S]*at the end of an epoch"),
    ({"drop_last": True}, "drop_last differs"),
]


@pytest.mark.parametrize(("options", "message"), OTHER_PLANS)
def test_a_state_of_another_plan_is_refused(options, message):
    given = {"sizes": SIZES, "max_nodes": 60, "virtual_ranks": 4}
    sampler = NodeBudgetBatchSampler(None, **given)
    at_start = sampler.state_dict()
    batches = iter(sampler)
    for _ in range(4):
        next(batches)
    other = NodeBudgetBatchSampler(None, **{**given, **options})
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(sampler.state_dict())
    if {"max_nodes", "drop_last"} & options.keys():
        list(batches)
        other.load_state_dict(at_start)
        other.load_state_dict({**at_start, "position": at_start["steps"]})
        assert where(other) == (1, 0)
    else:
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(at_start)


def _other_data(rank, folder, plans):
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        NodeBudgetBatchSampler(None, [3, 4, 5, 6 + rank], 9).compare_ranks()
    except ValueError as error:
        plans.put((rank, str(error)))
    torch.distributed.destroy_process_group()


def test_ranks_with_different_data_are_refused(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    ranks = [context.Process(target=_other_data, args=(r, tmp_path, found)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    messages = dict(found.get() for _ in ranks)
    assert messages.keys() == {0, 1}
    for message in messages.values():
        assert "ranks have different plans" in message and "where:    rank 1" in message
