"""Distributed training wants a gradient of every parameter on every rank, used or not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pyg_dynbatch.core import Engine, Operations, Schedule
from tests.core.helpers import VECTOR, Vectors, chain_program
from tests.core.test_merge import Words


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_unused_operations_get_zero_gradients() -> None:
    vectors = Vectors()
    model = DistributedDataParallel(vectors.engine)
    schedule = Schedule.from_programs([chain_program(vectors.mix, 3)])
    for _ in range(2):  # without a gradient of every parameter the second round is refused
        model.zero_grad()
        model(schedule)["output"].sum().backward()
    for operation in vectors.engine.operations:
        used = operation.signature.name == "mix"
        for parameter in operation.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) is used


@pytest.mark.usefixtures("one_process")
def test_unused_operations_of_every_kind_of_argument() -> None:
    words = Words()
    words.engine.operations.add(
        torch.nn.Linear(3, 3), [VECTOR], [VECTOR], name="never", random=True
    )
    model = DistributedDataParallel(words.engine)
    schedule = Schedule.from_programs([words.program([1], "squash")])
    for _ in range(2):
        model.zero_grad()
        model(schedule)["output"].sum().backward()
    start = words.engine.operations["start"].module.row
    assert start.grad.tolist() == [[0.0, 0.0, 0.0]]
    with torch.no_grad():
        assert model(schedule)["output"].shape == (1, 3)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("nodes", [3, 0])
def test_a_cell_without_a_step_whose_inputs_are_of_an_open_type(nodes: int) -> None:
    """All nodes are leaves, which have a module of their own; the rows given say how wide."""

    class Join(torch.nn.Linear):
        def forward(self, x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + left + right

    engine = Engine.of_cell(Join(2, 3), VECTOR, 2, leaf=torch.nn.Linear(2, 3))
    model = DistributedDataParallel(engine)
    schedule = Schedule.from_structure(torch.empty(2, 0, dtype=torch.long), nodes, arity=2)
    for _ in range(2):
        model.zero_grad()
        model(schedule, {"input": torch.ones(nodes, 2)})["node"].sum().backward()
    assert {p.grad is not None for p in engine.parameters()} == {True}
    assert not engine.operations["node"].module.weight.grad.any()


def test_without_a_process_group_unused_operations_are_left_alone() -> None:
    vectors = Vectors()
    schedule = Schedule.from_programs([chain_program(vectors.mix, 3)])
    vectors.engine(schedule)["output"].sum().backward()
    assert vectors.engine.operations["score"].module.weight.grad is None
    assert len(Operations()) == 0
