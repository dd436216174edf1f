"""Law: loaders and samplers pass over data as torch's do: each pass draws a new order."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

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


def torch_loader(kind: str, generator: torch.Generator | None, workers: int) -> TorchLoader:
    """Torch's loader of numbers, with the same arguments."""
    options: Options = {"generator": generator, "num_workers": workers, "collate_fn": list}
    numbers = range(COUNT)
    if kind in BUDGETS:
        order = RandomSampler(numbers, generator=generator)
        return TorchLoader(numbers, batch_sampler=BatchSampler(order, SIZE, False), **options)
    if kind == "a sampler":
        order = RandomSampler(numbers, generator=generator)
        return TorchLoader(numbers, SIZE, sampler=order, **options)
    return TorchLoader(numbers, SIZE, shuffle=True, **options)


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


@pytest.fixture(params=["global generator", "own generator"])
def generator(request: pytest.FixtureRequest) -> Iterator[torch.Generator | None]:
    yield torch.Generator().manual_seed(5) if request.param == "own generator" else None


IN_WORKERS = ["trees", "budget of trees"]
CASES = [(kind, 0) for kind in (*LOADERS, *BUDGETS)]
CASES += [pytest.param(kind, 2, marks=pytest.mark.long) for kind in IN_WORKERS]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_passes_are_those_of_torch(kind, way, workers, generator) -> None:
    times = 2 if workers else 12
    make = {**LOADERS, **BUDGETS}[kind]
    found, expected = [], []
    for batches, loader in ((found, make), (expected, lambda *to: torch_loader(kind, *to))):
        torch.manual_seed(3)
        again = None if generator is None else generator.manual_seed(5)
        batches += map(rows, way(loader(again, workers), times))
        batches.append(torch.get_rng_state().tolist())
        batches.append(None if again is None else again.get_state().tolist())
    assert found == expected
    passes = found[:-2]
    assert len({tuple(batch) for batch in passes}) > len(passes) // 2, "orders differ"


@pytest.mark.parametrize("kind", [*LOADERS, *BUDGETS])
def test_two_loaders_do_not_share_an_order(kind) -> None:
    make = {**LOADERS, **BUDGETS}[kind]
    pairs = zip(make(None, 0), make(None, 0), strict=True)
    together = [one == other for pair in pairs for one, other in zip(*map(rows, pair), strict=True)]
    assert sum(together) < COUNT / 4
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)]
    orders = [sum(map(rows, make(generator, 0)), []) for generator in generators]
    assert orders[0] == orders[1] != orders[2]


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
