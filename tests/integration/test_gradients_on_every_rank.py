"""Distributed training needs a gradient of every parameter on every rank, used or not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core import Engine
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps
from tests.core.helpers import VECTOR, Vectors, chain_program
from tests.core.test_merge import Words


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def two_steps(engine: Engine, schedule: Steps, inputs: dict | None = None) -> None:
    """Train twice: the second step fails if a parameter has had no gradient in the first."""
    model = DistributedDataParallel(engine)
    for _ in range(2):
        model.zero_grad()
        (rows,) = model(schedule, inputs).values()
        rows.sum().backward()


@pytest.mark.usefixtures("one_process")
def test_unused_operations_get_zero_gradients() -> None:
    vectors = Vectors()
    two_steps(vectors.engine, schedule_recordings([chain_program(vectors.mix, 3)]))
    for operation in vectors.engine.operations:
        for parameter in operation.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) is (operation.signature.name == "mix")


@pytest.mark.usefixtures("one_process")
def test_unused_operations_of_every_kind_of_argument() -> None:
    words = Words()
    never = nn.Linear(3, 3)
    words.engine.operations.add(never, [VECTOR], [VECTOR], name="never", random=True)
    schedule = schedule_recordings([words.recording([1], "squash")])
    two_steps(words.engine, schedule)
    assert never.weight.grad is not None
    assert words.engine.operations["start"].module.row.grad.tolist() == [[0.0, 0.0, 0.0]]
    with torch.no_grad():
        assert words.engine(schedule)["output"].shape == (1, 3)


def test_without_a_process_group_unused_operations_get_no_gradient() -> None:
    vectors = Vectors()
    schedule = schedule_recordings([chain_program(vectors.mix, 3)])
    vectors.engine(schedule)["output"].sum().backward()
    assert vectors.engine.operations["score"].module.weight.grad is None


def train_on_rank(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    cases = {width: td.Vector(width) >> td.FC(2, activation=None) for width in (1, 2, 3)}
    model = td.Compiler(td.OneOf(len, cases))
    parallel = DistributedDataParallel(model)
    # Each rank uses one case, and none the third: no rank may wait for the other forever.
    for _ in range(2):
        parallel.zero_grad()
        parallel([[1.0] * (rank + 1)]).output.sum().backward()
    found = {tuple(p.shape): p.grad for p in model.parameters() if p.dim() == 2}
    torch.save(found, folder / f"{rank}.pt")
    del parallel  # freed after the process group, it may wait for the other rank forever
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks processes, on the CPU only")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_two_ranks_that_use_different_cases_of_a_block(tmp_path: Path) -> None:
    start_processes(train_on_rank, (tmp_path,), 2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    torch.testing.assert_close(first, second)
    used = {shape[1]: bool(gradient.any()) for shape, gradient in first.items()}
    assert used == {1: True, 2: True, 3: False}
