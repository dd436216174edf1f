import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler, get_worker_info
from torch_geometric.data import Data

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.loader import Collater, DataLoader, NodeBudgetBatchSampler, node_counts
from tests.trees.helpers import chain_tree


def trees(count: int = 12) -> list:
    """Chains of 1, 2, 3, … nodes; ``target`` is the number of the example."""
    return [chain_tree(n + 1, target=torch.tensor([n])) for n in range(count)]


def numbers(batches) -> list[list[int]]:
    return [batch.target.tolist() for batch in batches]


class WhereMade:
    """Note in each example which worker loaded it."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        data = self.examples[i].clone()
        info = get_worker_info()
        data.worker = torch.tensor([-1 if info is None else info.id])
        return data


def test_batches_carry_their_schedule():
    for batch in DataLoader(trees(), batch_size=5, arity=2, direction="both"):
        assert isinstance(batch.schedule, Levels)
        assert batch.schedule.arity == 2
        assert batch.schedule.num_nodes == batch.num_nodes
        assert batch.schedule_down.direction == "top_down"
    for batch in DataLoader(trees(), batch_size=5, direction="top_down"):
        assert batch.schedule.direction == "top_down"


@pytest.mark.parametrize("persistent", [False, True])
def test_schedules_come_from_the_workers(persistent):
    loader = DataLoader(
        WhereMade(trees()), batch_size=4, num_workers=2, persistent_workers=persistent
    )
    plain = list(DataLoader(trees(), batch_size=4))
    for _ in range(2):
        batches = list(loader)
        assert {int(batch.worker[0]) for batch in batches} == {0, 1}
        for batch, other in zip(batches, plain, strict=True):
            assert batch.schedule == other.schedule
            assert batch.schedule.index.is_shared()
            assert torch.equal(batch.edge_index, other.edge_index)
            assert len(batch.to_data_list()) == 4


def test_pinning_asks_the_schedule(monkeypatch):
    asked = []
    monkeypatch.setattr(Levels, "pin_memory", lambda self: asked.append(self) or self)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    (batch,) = DataLoader(trees(3), batch_size=3)
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned = pin_memory(batch)
    assert asked == [batch.schedule]
    assert isinstance(pinned.schedule, Levels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_batches_move_whole():
    for batch in DataLoader(trees(), batch_size=4, pin_memory=True, num_workers=1):
        assert batch.schedule.is_pinned()
        moved = batch.to("cuda", non_blocking=True)
        assert moved.schedule.device.type == "cuda"


def test_batch_sampler_is_used():
    data = trees()
    sampler = NodeBudgetBatchSampler(SequentialSampler(data), node_counts(data), 16)
    loader = DataLoader(data, batch_sampler=sampler)
    assert len(loader) == len(sampler)
    assert all(batch.num_nodes <= 16 for batch in loader)
    assert sum(numbers(loader), []) == list(range(12))


def test_options_are_kept_under_their_own_names():
    options = {"arity": 2, "direction": "both", "shuffle": True}
    options |= {"follow_batch": ["y"], "exclude_keys": ["depth"]}
    loader = DataLoader(trees(), **options)
    assert {key: getattr(loader, key) for key in options} == options
    assert isinstance(loader.collate_fn, Collater)


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="DataLoader: collate_fn is given"):
        DataLoader(trees(), collate_fn=list)
    collate = Collater(arity=2)
    assert DataLoader(trees(), collate_fn=collate).collate_fn is collate
    sampler = NodeBudgetBatchSampler(SequentialSampler(range(3)), [1, 2, 3], 10)
    with pytest.raises(ValueError, match="different data set") as caught:
        DataLoader(trees(), batch_sampler=sampler)
    assert "expected: 12 sizes, one per example\n  got:      3" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_example_is_named_also_from_a_worker(workers):
    good = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    bad = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    loader = DataLoader([good, good, bad], batch_size=3, num_workers=workers)
    with pytest.raises(ValueError, match="Collater: example 2 of the batch: .*cycle"):
        list(loader)


class Stream(IterableDataset):
    """The examples in an order of its own."""

    def __iter__(self):
        return iter(trees())


def test_streams_are_loaded_in_their_order():
    assert sum(numbers(DataLoader(Stream(), 5)), []) == list(range(12))
    for data in (trees(), Stream()):
        with pytest.raises(TypeError, match=r"Collater: got one example[\s\S]*batch_size=1"):
            next(iter(DataLoader(data, batch_size=None)))
