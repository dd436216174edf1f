"""A stopped loader sees every example of the epoch exactly once, or refuses by name to resume."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from pyg_dynbatch.loader import DataLoader, NodeBudgetBatchSampler, node_counts
from tests.trees.helpers import chain_tree

DATA = [chain_tree(n % 5 + 1, target=torch.tensor([n])) for n in range(24)]


class Stream(IterableDataset):
    """The examples in an order of its own."""

    def __iter__(self):
        return iter(DATA)


def budget(limit, data=DATA, **options):
    sampler = NodeBudgetBatchSampler(None, node_counts(data), limit, **options)
    return DataLoader(data, batch_sampler=sampler)


def batched(size, sampler):
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, size, False))


KINDS = {
    "in order": lambda: DataLoader(DATA, 4),
    "in order, others of a batch": lambda: DataLoader(DATA, 6),
    "in order, the last batch dropped": lambda: DataLoader(DATA, 7, drop_last=True),
    "in order, the last batch kept": lambda: DataLoader(DATA, 7),
    "a part": lambda: DataLoader(Subset(DATA, range(20)), 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True, seed=1),
    "shuffled, others of a batch": lambda: DataLoader(DATA, 6, shuffle=True, seed=1),
    "shuffled otherwise": lambda: DataLoader(DATA, 4, shuffle=True, seed=2),
    "shuffled, the last batch dropped": lambda: DataLoader(DATA, 7, True, seed=1, drop_last=True),
    "shuffled, the last batch kept": lambda: DataLoader(DATA, 7, True, seed=1),
    "a sampler": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA)),
    "a list as sampler": lambda: DataLoader(DATA, 4, sampler=list(range(24))),
    "a list of batches": lambda: DataLoader(
        DATA, batch_sampler=[[0, 1], [2, 3], list(range(4, 24))]
    ),
    "a batch sampler": lambda: batched(4, SequentialSampler(DATA)),
    "a batch sampler at random": lambda: batched(4, RandomSampler(DATA)),
    "one of several ranks": lambda: DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 1, 0)),
    "budget": lambda: budget(12),
    "budget, smaller": lambda: budget(9),
    "budget in order": lambda: budget(12, shuffle=False),
    "budget of ranks": lambda: budget(12, virtual_ranks=2),
    "iterable": lambda: DataLoader(Stream(), 4),
    "iterable, others of a batch": lambda: DataLoader(Stream(), 6),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, seed=1, num_workers=1),
    "iterable, workers": lambda: DataLoader(Stream(), 4, num_workers=1),
}
QUICK = [kind for kind in KINDS if "workers" not in kind]


def numbers(batches):
    return [batch.target.tolist() for batch in batches]


def stopped(kind, stop):
    """Take some batches; return the state, and the examples taken in whole steps."""
    loader = KINDS[kind]()
    running = iter(loader)
    taken = numbers(next(running) for _ in range(stop))
    state = loader.state_dict()
    return state, sum(taken[: state["position"] * state.get("batches_per_step", 1)], [])


def resumed(kind, state):
    """Return the rest of the epoch, or None if this was refused by name."""
    loader = KINDS[kind]()
    again = KINDS[kind]()
    try:
        loader.load_state_dict(state)
        again.load_state_dict(loader.state_dict())
    except ValueError as error:
        assert "DataLoader: cannot resume" in str(error) or "BatchSampler: cannot" in str(error)
        assert "expected:" in str(error) and "got:" in str(error)
        return None
    rest = numbers(loader)
    if "workers" not in kind:  # for the time it takes
        assert rest == numbers(again) or not repeats(kind), "a state saved before any batch"
    return sum(rest, [])


def repeats(kind):
    return not any(word in kind for word in ("a sampler", "at random", "iterable"))


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.long) for k in KINDS]
)
@pytest.mark.parametrize("stop", [1, 2])
def test_every_example_is_seen_once_or_resuming_is_refused(kind, stop):
    state, taken = stopped(kind, stop)
    rest = resumed(kind, state)
    if rest is None:
        assert not repeats(kind) or "a list" in kind
    elif "dropped" in kind:
        whole = sum(numbers(KINDS[kind]()), [])
        assert taken + rest == whole
    else:
        assert sorted(taken + rest) == list(range(len(KINDS[kind]().dataset)))


@pytest.mark.long
@pytest.mark.parametrize("kind", QUICK)
def test_a_state_never_fits_another_loader_that_skips_or_repeats_examples(kind):
    state, taken = stopped(kind, 1)
    for other in QUICK:
        rest = resumed(other, state)
        # Of several virtual ranks no step is finished: the other loader starts its own epoch.
        whole = sum(numbers(KINDS[kind if state["position"] else other]()), [])
        assert rest is None or sorted(taken + rest) == sorted(whole), other


@pytest.mark.parametrize("kind", QUICK)
def test_the_end_of_an_epoch_begins_the_next_one(kind):
    loader, other = KINDS[kind](), KINDS[kind]()
    whole = sum(numbers(loader), [])
    other.load_state_dict(loader.state_dict())
    assert sorted(sum(numbers(other), [])) == sorted(whole) or "dropped" in kind


def test_what_no_loader_can_do_is_said():
    with pytest.raises(ValueError, match=r"DataLoader: shuffle=True needs[\s\S]*got: +Stream"):
        DataLoader(Stream(), 4, shuffle=True)
    for data in (DATA, Stream()):
        with pytest.raises(TypeError, match=r"Collater: got one example[\s\S]*batch_size=1"):
            next(iter(DataLoader(data, batch_size=None)))
