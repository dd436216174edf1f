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
    VECTOR,
    Language,
    Sketch,
    meaning,
    recorded,
    rows_read,
    sketch_of,
    sketches,
)
from tests.nn.recursion import assert_equal
from tests.strategies import few

LANGUAGE = Language()
BATCHES = st.lists(sketches() | st.just(Sketch()), min_size=1, max_size=4)
"""Some of the examples are empty."""


def inputs_of(batch: list[Sketch]) -> Tensor:
    rows = sum(map(rows_read, batch))
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def flat(results: dict[str, Any]) -> list[Tensor]:
    rows = [results[name] for name in sorted(results)]
    return [part for r in rows for part in (r if isinstance(r, tuple) else (r,))]


def gradients(run: Callable[[Tensor], dict[str, Any]], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    leaves = [x, *LANGUAGE.engine.parameters()]
    floats = [part for part in flat(run(x)) if part.is_floating_point()]
    loss = sum((part * torch.linspace(-1, 2, part.numel()).view_as(part)).sum() for part in floats)
    zeros = [torch.zeros_like(each) for each in leaves]
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return zeros
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [z if f is None else f for f, z in zip(found, zeros, strict=True)]


@few(10)
@given(BATCHES)
def test_values_and_gradients_are_those_of_a_plain_recursion(batch: list[Sketch]) -> None:
    recordings, x = [recorded(LANGUAGE, sketch) for sketch in batch], inputs_of(batch)
    ways: list[Callable[[Tensor], dict[str, Any]]] = [
        lambda x: run_one_by_one(LANGUAGE.engine, recordings, {VECTOR: x})
    ]
    for policy in ("depth", "agenda"):
        schedule = schedule_recordings(recordings, policy)
        ways.append(lambda x, s=schedule: LANGUAGE.engine(s, {VECTOR: x}))
    wanted = meaning(LANGUAGE, batch, x)
    right = gradients(lambda x: meaning(LANGUAGE, batch, x), x)
    for run in ways:
        found = run(x)
        assert sorted(found) == sorted(wanted)
        assert_equal(flat(found), flat(wanted))
        assert_equal(gradients(run, x), right)


@few(10)
@given(BATCHES)
def test_agenda_needs_no_more_steps_and_neither_policy_beats_the_bound(batch: list[Sketch]) -> None:
    recordings = [recorded(LANGUAGE, sketch) for sketch in batch]
    depth, agenda = (schedule_recordings(recordings, p).stats() for p in ("depth", "agenda"))
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
        recordings, inputs = (
            [recorded(LANGUAGE, each) for each in batch],
            {VECTOR: inputs_of(batch)},
        )
        with as_users_run_it(), torch.no_grad():
            wanted = run_one_by_one(LANGUAGE.engine, recordings, inputs)
            policy = numbers.choice(("depth", "agenda"))
            found = LANGUAGE.engine(schedule_recordings(recordings, policy), inputs)
        assert list(found) == list(wanted)
        assert_equal(flat(found), flat(wanted))


def chain_of(calls: int) -> Sketch:
    """Return calls that each read the result of the previous one; the first reads an input."""
    leaves = [("constant", name, 1) for name in ("word", "vector", "scalar", "matrix", "state")]
    gates: list[tuple[str, list[Any]]] = [("gate", [1, 5])]
    gates += [("gate", [number, 1]) for number in range(6, calls + 5)]
    return Sketch([*leaves, ("input", "vector", 0)], gates, [(calls + 5, "top")], [])


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
    wanted = meaning(LANGUAGE, [sketch], x)["top"]
    schedule = schedule_recordings([recorded(LANGUAGE, sketch)], policy)
    assert len(schedule.steps) == calls
    with as_users_run_it(), torch.no_grad():
        found = LANGUAGE.engine(schedule, {VECTOR: x})["top"]
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-10)


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
    with as_users_run_it():
        first, second, third = (
            lines_executed(partial(run_one_by_one, LANGUAGE.engine, [recording], {VECTOR: x}))
            for recording in [recorded(LANGUAGE, chain) for chain in chains]
        )
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


def by_hand(calls: str) -> Recording:
    recording, pair = Recording(), TensorType((2,))
    # Each with its own constant, as equal calls are merged.
    value = recording.constant(pair, [1.0, float(next(NUMBERS))])
    for name in calls:
        value = recording.call(Signature(NAMES[name], (pair,), (pair,)), value)
    return recording


@given(calls=st.lists(st.text("12", max_size=4), min_size=1, max_size=5))
def test_every_call_is_scheduled_under_its_own_name(calls: list[str]) -> None:
    steps = schedule_recordings([by_hand(each) for each in calls])
    found: Counter[str] = Counter()
    for step in steps.steps:
        for operation in steps.program_of(step).operations:
            found[steps.signatures[operation].name] += step.size
    wanted = Counter(NAMES[name] for each in calls for name in each)
    assert found == wanted
