"""Calls that always come together run in one step."""

import pickle
import random
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.core import (
    Engine,
    Operations,
    Ragged,
    RaggedRows,
    Recording,
    Steps,
    TensorType,
    run_one_by_one,
    schedule_recordings,
)
from tests.core.helpers import VECTOR
from tests.core.terms import Terms, computed, recorded
from tests.core.test_definitions import random_recordings


class Sum(nn.Module):
    def forward(self, children: RaggedRows, bias: Tensor) -> Tensor:
        total = bias.new_zeros(children.num_calls, 3)
        return bias + total.index_add(0, children.segment_ids, children.rows)


class Model:
    """A few operations, and recordings that call them."""

    def __init__(self, **more: nn.Module) -> None:
        torch.manual_seed(0)
        self.operations, one = Operations(), [VECTOR]
        modules: dict[str, Any] = {name: nn.Linear(3, 3) for name in ("left", "right", "top")}
        for name, module in {**modules, "tanh": nn.Tanh(), **more}.items():
            setattr(self, name, self.operations.add(module, one, one, name=name))
        self.add = self.operations.add(torch.add, one * 2, one, name="add")
        self.sum = self.operations.add(Sum(), [Ragged(VECTOR), VECTOR], one, name="sum")
        self.engine = Engine(self.operations)

    def tree(self, recording: Recording, depth: int, draw: random.Random) -> Any:
        """Record tanh(top(left(a) + right(b))) at every node."""
        if depth == 0 or (depth < 5 and draw.random() < 0.2):
            return recording.constant(VECTOR, [draw.random() for _ in range(3)])
        a, b = (self.tree(recording, depth - 1, draw) for _ in range(2))
        both = recording.call(self.add, recording.call(self.left, a), recording.call(self.right, b))
        return recording.call(self.tanh, recording.call(self.top, both))

    def call(self, recording: Recording, name: str, *values: Any) -> Any:
        return recording.call(getattr(self, name), *values)


def names(schedule: Steps) -> list[str]:
    return list(map(schedule.name_of, schedule.steps))


def check(model: Model, recordings: list[Recording], policy: Any = "depth") -> Steps:
    """Compare values and gradients with calls one by one, in double precision."""
    engine = model.engine.double()
    schedule = schedule_recordings(recordings, policy)
    found, gradients = [], []
    for run in (lambda: engine(schedule), lambda: run_one_by_one(engine, recordings)):
        engine.zero_grad()
        found.append(run()["output"])
        found[-1].square().sum().backward()
        gradients.append([p.grad for p in engine.parameters() if p.grad is not None])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
    return schedule


@pytest.mark.parametrize("policy", ["depth", "agenda"])
@pytest.mark.parametrize("seed", range(5))
def test_a_recursion_is_one_step_per_level(seed: int, policy: str) -> None:
    draw, model, recordings = random.Random(seed), Model(), []
    for _ in range(4):
        recordings.append(Recording())
        recordings[-1].output(model.tree(recordings[-1], 5, draw))
    schedule = check(model, recordings, policy)
    assert {*names(schedule)} == {"left+right+add+top+tanh"}
    assert len(schedule.steps) == max(recording.depth for recording in recordings) // 4
    stats = schedule.stats()
    assert stats.rows == sum(recording.num_calls for recording in recordings)
    assert stats.lower_bound == stats.steps and stats.fold_steps == 4 * stats.steps * 5
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert "left+right+add+top+tanh x" in str(schedule)


def test_what_is_fused() -> None:
    model = Model()

    def steps(*calls: Any, output: tuple[int, ...] = (-1,)) -> list[str]:
        """Record calls of the values so far, by number."""
        recordings = []
        for example in range(2):
            recording = Recording()
            values = [recording.constant(VECTOR, [k, example, 2.0]) for k in range(2)]
            for name, *read in calls:
                given = [[values[k] for k in r] if isinstance(r, list) else values[r] for r in read]
                values.append(model.call(recording, name, *given))
            for number in output:
                recording.output(values[number])
            recordings.append(recording)
        return names(check(model, recordings))

    assert steps(("left", 0), ("tanh", 2)) == ["left+tanh"]
    assert steps(("left", 0), ("tanh", 2), output=(-1, 2)) == ["left+tanh"], "an output"
    assert steps(("left", 0), ("add", 2, 2)) == ["left+add"], "read twice"
    assert steps(("left", 0), ("tanh", 2), ("top", 2), ("add", 3, 4)) == ["left+tanh+top+add"]
    assert steps(("left", 0), ("sum", [2], 1)) == ["left", "sum"], "one row of any number"
    assert steps(("left", 0), ("sum", [0, 1], 2)) == ["left", "sum"], "beside any number of rows"
    assert steps(("sum", [0, 1], 1), ("left", 2), ("add", 0, 3)) == ["sum+left+add"]
    assert steps(("left", 0), ("tanh", 2), ("tanh", 1), ("add", 3, 4)) == ["left+tanh+tanh+add"]
    # Others read "left" before what "add" reads is ready.
    sums = [("sum", [2], 1), ("sum", [3], 1)]
    assert steps(("left", 0), *sums, ("add", 2, 4)) == ["left", "sum", "sum+add"]
    # A product outside the recursion that reads it runs once for all levels.
    loop = [("add", 0, 1)]
    for state in (2, 4, 6):
        loop += [("left", 1), ("add", state, state + 1)]
    assert steps(*loop)[0] == "left"


def test_a_long_chain_is_cut() -> None:
    model = Model(**{f"layer_{k}": nn.Linear(3, 3) for k in range(150)})
    recording = Recording()
    value = recording.constant(VECTOR, [1.0, 2.0, 3.0])
    for k in range(150):
        value = model.call(recording, f"layer_{k}", value)
    recording.output(value)
    schedule = check(model, [recording])
    sizes = [len(schedule.program_of(step).operations) for step in schedule.steps]
    assert sum(sizes) == 150 and max(sizes) == 64


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError(f"{len(x)} rows")


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.parametrize(
    ("module", "kind", "words"),
    [
        (InPlace(), RuntimeError, "'odd': its module changed an argument in place"),
        (Fails(), ArithmeticError, "operation 'odd', step 0"),
        (Double(), TypeError, "'odd': its results would be rounded"),
        (nn.Linear(3, 2), TypeError, "'odd': invalid results of its module"),
    ],
)
def test_errors_name_the_operation_within_a_step(
    module: nn.Module, kind: type[Exception], words: str
) -> None:
    model, recording = Model(odd=module), Recording()
    value = recording.input(VECTOR, 0)
    for name in ("left", "odd", "tanh"):
        value = model.call(recording, name, value)
    recording.output(value)
    schedule = schedule_recordings([recording] * 2)
    assert names(schedule) == ["left+odd+tanh"]
    with pytest.raises(kind) as error:
        model.engine(schedule, {VECTOR: torch.ones(2, 3)})
    assert words in "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])


def test_half_precision_within_a_step_is_that_of_written_rows() -> None:
    model, recordings = Model(), []
    for outputs in (False, True):
        recording = Recording()
        one = recording.constant(VECTOR, [0.1, 0.2, 0.3])
        inner = model.call(recording, "left", one)
        recording.output(model.call(recording, "tanh", inner))
        if outputs:
            recording.output(inner, "inner")
        recordings.append(recording)
    with torch.autocast("cpu", torch.bfloat16):
        one, two = (model.engine(schedule_recordings([each])) for each in recordings)
    assert one["output"].equal(two["output"])


def test_scalars_and_integers_are_passed_on() -> None:
    operations, index = Operations(), TensorType((), torch.int64)
    half = operations.add(lambda x: x // 2, [index], [index], name="half")
    look = operations.add(nn.Embedding(4, 3), [index], [VECTOR], name="look")
    recording = Recording()
    recording.output(recording.call(look, recording.call(half, recording.constant(index, 5))))
    schedule = schedule_recordings([recording] * 3)
    engine = Engine(operations)
    assert names(schedule) == ["half+look"]
    weight = engine.operations["look"].module.weight
    assert engine(schedule)["output"].equal(weight[[2, 2, 2]])


def check_terms(seeds: range) -> None:
    """Steps make the calls that were recorded, on the rows that were recorded."""
    for seed in seeds:
        draw, terms = random.Random(seed), Terms()
        recordings = random_recordings(draw, 2 + seed % 25)
        steps = schedule_recordings(recordings, draw.choice(["depth", "agenda"]))
        assert computed(terms, steps) == recorded(terms, recordings), seed


def test_steps_compute_what_was_recorded() -> None:
    check_terms(range(300))


@pytest.mark.long
def test_steps_compute_what_was_recorded_in_many_programs(another_process: Executor) -> None:
    another_process.submit(check_terms, range(4_000)).result()


def test_calls_that_nobody_reads_come_after_those_that_they_read() -> None:
    """The last call of a step may be shallower than what an earlier one reads."""
    model, terms, recording = Model(), Terms(), Recording()
    deep, one, other = (recording.input(VECTOR, number) for number in range(3))
    sums = [deep]
    for _ in range(3):
        sums.append(model.call(recording, "sum", [sums[-1]], one))
    for read, added in ((one, sums[3]), (other, sums[3]), (deep, sums[1])):
        inner = model.call(recording, "left", read)
        model.call(recording, "add", inner, added)
        last = model.call(recording, "tanh", inner)
    recording.output(model.call(recording, "sum", [last], one))  # so that sums read and are read
    steps = schedule_recordings([recording])
    assert {*names(steps)} == {"sum", "left+add+tanh"}
    assert computed(terms, steps) == recorded(terms, [recording])


def test_terms_notice_other_rows() -> None:
    recordings, terms = random_recordings(random.Random(0), 25), Terms()
    steps, expected = schedule_recordings(recordings), recorded(terms, recordings)
    assert computed(terms, steps) == expected
    gathers = [a for step in steps.steps for a in step.arguments if a.start < 0]
    rows = gathers[0].rows_in(steps.index)  # a view, of at least two different rows
    rows[:] = rows[0].item()
    assert computed(terms, steps) != expected
