"""Law: loaders and samplers pass over data as torch's do: each pass draws a new order."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler
from torch.utils.data import DataLoader as TorchLoader
from torch_geometric.loader import DataLoader as PyGLoader

from pyg_dynbatch.loader import Collater, DataLoader, NodeBudgetBatchSampler
from tests.training.helpers import listops, tree_files
from tests.trees.helpers import chain_tree

COUNT, SIZE = 40, 4
TREES = [chain_tree(number % 5 + 1, row=torch.tensor([number])) for number in range(COUNT)]

Options = dict[str, Any]


def budgeted(generator: torch.Generator | None) -> NodeBudgetBatchSampler:
    """Of unit sizes, so that torch's ``BatchSampler`` makes the same batches."""
    return NodeBudgetBatchSampler(RandomSampler(TREES, generator=generator), [1] * COUNT, SIZE)


# Each takes a generator or None, and the number of workers.
LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "trees": lambda g, n: DataLoader(TREES, SIZE, shuffle=True, generator=g, num_workers=n),
    "torch's with our collater": lambda g, n: TorchLoader(
        TREES, SIZE, shuffle=True, generator=g, num_workers=n, collate_fn=Collater()
    ),
    "a sampler": lambda g, n: DataLoader(
        TREES, SIZE, sampler=RandomSampler(TREES, generator=g), generator=g, num_workers=n
    ),
}
BUDGETS: dict[str, Callable[[Any, int], Any]] = {
    "budget of trees": lambda g, n: DataLoader(
        TREES, batch_sampler=budgeted(g), generator=g, num_workers=n
    ),
    "budget in PyG's loader": lambda g, n: PyGLoader(
        TREES, batch_sampler=budgeted(g), generator=g, num_workers=n
    ),
}


OURS = {**LOADERS, **BUDGETS}


def torch_loader(kind: str, generator: torch.Generator | None, workers: int) -> TorchLoader:
    """Torch's loader of numbers, with the same arguments."""
    numbers = range(COUNT)
    make = partial(TorchLoader, numbers, generator=generator, num_workers=workers, collate_fn=list)
    order = RandomSampler(numbers, generator=generator)
    if kind in BUDGETS:
        return make(batch_sampler=BatchSampler(order, SIZE, drop_last=False))
    if kind == "a sampler":
        return make(batch_size=SIZE, sampler=order)
    return make(batch_size=SIZE, shuffle=True)


def rows(batch: Any) -> list[int]:
    return batch if isinstance(batch, list) else batch.row.tolist()


def first_batches(loader: Any, times: int) -> list[Any]:
    return [next(iter(loader)) for _ in range(times)]


def broken_off(loader: Any, times: int) -> list[Any]:
    return [batch for _ in range(times) for batch in islice(loader, 3)]


def zipped_with_numbers(loader: Any, times: int) -> list[Any]:
    return [batch for _ in range(times) for _, batch in zip(range(COUNT), loader, strict=False)]


def zipped_with_a_shorter_one(loader: Any, times: int) -> list[Any]:
    short = TorchLoader(range(8), SIZE, shuffle=True, collate_fn=list)
    return [batch for _ in range(times) for _, batch in zip(short, loader, strict=False)]


WAYS = [first_batches, broken_off, zipped_with_numbers, zipped_with_a_shorter_one]


class Passes(NamedTuple):
    """The batches that a loader gave, and the states of the generators afterwards."""

    batches: list[list[int]]
    global_state: list[int]
    own_state: list[int] | None


def passes_of(
    make: Callable[..., Any],
    way: Callable[..., list[Any]],
    workers: int,
    times: int,
    generator: Any,
) -> Passes:
    """Create a loader and pass over its data, from the same states of the generators."""
    torch.manual_seed(3)
    if generator is not None:
        generator.manual_seed(5)
    batches = [rows(batch) for batch in way(make(generator, workers), times)]
    own_state = None if generator is None else generator.get_state().tolist()
    return Passes(batches, torch.get_rng_state().tolist(), own_state)


@pytest.fixture(params=["global generator", "own generator"])
def generator(request: pytest.FixtureRequest) -> torch.Generator | None:
    return torch.Generator() if request.param == "own generator" else None


def check(kind: str, way: Any, workers: int, times: int, generator: Any) -> None:
    got = passes_of(OURS[kind], way, workers, times, generator)
    expected = passes_of(partial(torch_loader, kind), way, workers, times, generator)
    assert got == expected
    orders = {tuple(batch) for batch in got.batches}
    assert len(orders) > len(got.batches) // 2, "orders differ"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OURS)
def test_passes_are_those_of_torch(kind, way, generator) -> None:
    check(kind, way, workers=0, times=12, generator=generator)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["trees", "budget of trees"])
def test_passes_with_workers_are_those_of_torch(kind, way, generator) -> None:
    check(kind, way, workers=2, times=2, generator=generator)


@pytest.mark.parametrize("kind", OURS)
def test_two_loaders_do_not_share_an_order(kind) -> None:
    one, other = [sum(map(rows, OURS[kind](None, 0)), []) for _ in range(2)]
    in_the_same_place = sum(a == b for a, b in zip(one, other, strict=True))
    assert in_the_same_place < COUNT / 4


@pytest.mark.parametrize("kind", OURS)
def test_the_order_is_that_of_the_generator(kind) -> None:
    def order(seed: int) -> list[int]:
        return sum(map(rows, OURS[kind](torch.Generator().manual_seed(seed), 0)), [])

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_epoch_of_a_distributed_sampler_may_be_set_after_iter(workers) -> None:
    def loader() -> DataLoader:
        order = DistributedSampler(TREES, num_replicas=1, rank=0)
        return DataLoader(TREES, SIZE, sampler=order, num_workers=workers)

    late, early = loader(), loader()
    running = iter(late)
    late.sampler.set_epoch(3)
    early.sampler.set_epoch(3)
    assert [rows(batch) for batch in running] == [rows(batch) for batch in early]


@pytest.mark.parametrize("loading", [{"batch_size": 8}, {"max_size": 60}], ids=str)
@pytest.mark.parametrize("make", [listops, tree_files])
def test_data_modules_without_a_trainer_draw_a_new_order_in_every_pass(
    make: Any, loading: Options, tmp_path: Path
) -> None:
    module = make(tmp_path, **loading)
    module.setup("fit")
    loader = module.train_dataloader()
    assert len({str(next(iter(loader)).token.tolist()) for _ in range(12)}) > 3
