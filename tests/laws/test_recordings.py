"""Law of recordings: batched is one by one is a plain recursion, in values and gradients."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_dynbatch.core import Recording, Signature, TensorType, run_one_by_one
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.core.helpers import as_users_run_it
from tests.laws.languages import (
    CONSTANTS,
    VECTOR,
    Language,
    Leaf,
    Output,
    PlainCall,
    Sketch,
    meaning,
    recorded,
    sketch_of,
    sketches,
)
from tests.nn.recursion import assert_equal
from tests.strategies import few

LANGUAGE = Language()
BATCHES = st.lists(sketches() | st.just(Sketch()), min_size=1, max_size=4)
"""Some of the examples are empty."""


POLICIES = ("depth", "agenda")
Run = Callable[[Tensor], dict[str, Any]]


def inputs_of(batch: list[Sketch]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    count = sum(sketch.num_inputs for sketch in batch)
    return torch.randn(count, 3, dtype=torch.float64, generator=generator)


def flat(results: dict[str, Any]) -> list[Tensor]:
    """List the parts of all results in the order of their names."""
    parts: list[Tensor] = []
    for name in sorted(results):
        rows = results[name]
        parts += rows if isinstance(rows, tuple) else [rows]
    return parts


def gradients(run: Run, x: Tensor) -> list[Tensor]:
    """Return the gradients of a weighted sum of all results."""
    x = x.clone().requires_grad_()
    leaves = [x, *LANGUAGE.engine.parameters()]
    loss = sum(leaf.sum() * 0 for leaf in leaves)  # the results may depend on none of them
    for part in flat(run(x)):
        if part.is_floating_point():
            loss = loss + (part * torch.linspace(-1, 2, part.numel()).view_as(part)).sum()
    return list(torch.autograd.grad(loss, leaves))


def check(run: Run, batch: list[Sketch], x: Tensor) -> None:
    def recursion(rows: Tensor) -> dict[str, Any]:
        return meaning(LANGUAGE, batch, rows)

    expected = recursion(x)
    got = run(x)
    assert sorted(got) == sorted(expected)
    assert_equal(flat(got), flat(expected))
    assert_equal(gradients(run, x), gradients(recursion, x))


@few(10)
@given(BATCHES)
def test_one_by_one_is_a_plain_recursion(batch: list[Sketch]) -> None:
    recordings = [recorded(LANGUAGE, sketch) for sketch in batch]
    x = inputs_of(batch)
    check(lambda rows: run_one_by_one(LANGUAGE.engine, recordings, {VECTOR: rows}), batch, x)


@pytest.mark.parametrize("policy", POLICIES)
@few(10)
@given(BATCHES)
def test_batched_is_a_plain_recursion(policy: str, batch: list[Sketch]) -> None:
    recordings = [recorded(LANGUAGE, sketch) for sketch in batch]
    schedule = schedule_recordings(recordings, policy)
    x = inputs_of(batch)
    check(lambda rows: LANGUAGE.engine(schedule, {VECTOR: rows}), batch, x)


@few(10)
@given(BATCHES)
def test_agenda_needs_no_more_steps_and_neither_policy_beats_the_bound(batch: list[Sketch]) -> None:
    recordings = [recorded(LANGUAGE, sketch) for sketch in batch]
    depth = schedule_recordings(recordings, "depth").stats()
    agenda = schedule_recordings(recordings, "agenda").stats()
    assert agenda.steps <= depth.steps
    assert agenda.rows == depth.rows
    assert depth.merged_calls + depth.rows == sum(recording.num_calls for recording in recordings)
    for stats in (depth, agenda):
        assert stats.lower_bound <= stats.steps == len(stats.widths)
        assert stats.critical_path <= stats.steps
        assert stats.steps <= stats.fold_steps


@pytest.mark.parametrize(
    ("chunk", "batches"),
    [(0, 4), *(pytest.param(chunk, 100, marks=pytest.mark.long) for chunk in range(20))],
)
def test_batched_equals_one_by_one_on_many_programs(chunk: int, batches: int) -> None:
    """Check one chunk; all long chunks together are 100,000 recordings."""
    numbers = random.Random(chunk)
    for _ in range(batches):
        batch = [sketch_of(numbers.randint) for _ in range(50)]
        recordings = [recorded(LANGUAGE, sketch) for sketch in batch]
        inputs = {VECTOR: inputs_of(batch)}
        schedule = schedule_recordings(recordings, numbers.choice(POLICIES))
        with as_users_run_it(), torch.no_grad():
            one_by_one = run_one_by_one(LANGUAGE.engine, recordings, inputs)
            batched = LANGUAGE.engine(schedule, inputs)
        assert list(batched) == list(one_by_one)
        assert_equal(flat(batched), flat(one_by_one))


def chain_of(calls: int) -> Sketch:
    """Return calls that each read the result of the previous one; the first reads an input."""
    leaves = [Leaf(False, kind, 1) for kind in CONSTANTS]
    leaves.append(Leaf(True, "vector", 0))
    vector = CONSTANTS.index("vector")
    last = len(leaves) - 1
    gates = [PlainCall("gate", [vector, last])]
    while len(gates) < calls:
        last += 1
        gates.append(PlainCall("gate", [last, vector]))
    return Sketch(leaves, gates, [Output(last + 1, "top")])


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        ("depth", 2_000),
        *(pytest.param(policy, 10_000, marks=pytest.mark.long) for policy in ("depth", "agenda")),
    ],
)
def test_calls_in_a_row_beyond_the_recursion_limit_equal_the_recursion(
    policy: str, calls: int
) -> None:
    sketch = chain_of(calls)
    x = inputs_of([sketch])
    schedule = schedule_recordings([recorded(LANGUAGE, sketch)], policy)
    assert len(schedule.steps) == calls
    expected = meaning(LANGUAGE, [sketch], x)["top"].detach()
    with as_users_run_it(), torch.no_grad():
        got = LANGUAGE.engine(schedule, {VECTOR: x})["top"]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def lines_executed(run: Callable[[], Any]) -> int:
    """Count the lines of Python that a call executes."""
    count, previous = 0, sys.gettrace()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous)
    return count


def test_one_by_one_takes_linear_time() -> None:
    chains = [chain_of(calls) for calls in (100, 200, 300)]
    x = inputs_of(chains[:1])
    lines = []
    for recording in [recorded(LANGUAGE, chain) for chain in chains]:
        run = partial(run_one_by_one, LANGUAGE.engine, [recording], {VECTOR: x})
        with as_users_run_it():
            lines.append(lines_executed(run))
    first, second, third = lines
    assert first < second < third
    assert third - second == pytest.approx(second - first, rel=0.01)


def test_a_freed_graph_raises_an_error() -> None:
    sketch = chain_of(3)
    x = inputs_of([sketch]).requires_grad_()
    schedule = schedule_recordings([recorded(LANGUAGE, sketch)])
    loss = LANGUAGE.engine(schedule, {VECTOR: x})["top"].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


NAMES = {"1": "one", "2": "two"}
NUMBERS = count()


def recording_of(calls: str) -> Recording:
    """Record calls in a row, one per digit."""
    recording = Recording()
    pair = TensorType((2,))
    # Each with its own constant, as equal calls are merged.
    value = recording.constant(pair, [1.0, float(next(NUMBERS))])
    for digit in calls:
        value = recording.call(Signature(NAMES[digit], (pair,), (pair,)), value)
    return recording


@given(calls=st.lists(st.text("12", max_size=4), min_size=1, max_size=5))
def test_every_call_is_scheduled_under_its_own_name(calls: list[str]) -> None:
    schedule = schedule_recordings([recording_of(each) for each in calls])
    got: Counter[str] = Counter()
    for step in schedule.steps:
        for operation in schedule.program_of(step).operations:
            got[schedule.signatures[operation].name] += step.size
    expected = Counter(NAMES[digit] for each in calls for digit in each)
    assert got == expected
