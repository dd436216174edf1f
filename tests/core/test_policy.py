"""Policies, on calls of which none are fused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyg_dynbatch.core import Engine, Operations, Recording
from pyg_dynbatch.core.policy import Policy, order_calls, steps_by_agenda, steps_by_depth
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.core.helpers import VECTOR, Vectors, constants, unfused

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The kind of each call, the source and the target of each dependency."""


@pytest.fixture(scope="module", autouse=True)
def calls_are_not_fused() -> Iterator[None]:
    with unfused():
        yield


@st.composite
def graphs(draw: st.DrawFn) -> Arrays:
    calls = draw(st.integers(0, 30))
    kind = draw(st.lists(st.integers(0, 3), min_size=calls, max_size=calls))
    pairs = draw(
        st.lists(
            st.tuples(st.integers(0, 29), st.integers(0, 29)).filter(
                lambda pair: pair[0] < pair[1]
            ),
            max_size=60,
        )
    )
    pairs = [(a, b) for a, b in pairs if b < calls]
    source, target = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return np.array(kind, dtype=np.int64), source, target


def assert_valid(graph: Arrays, step: np.ndarray) -> None:
    kind, source, target = graph
    assert step.shape == kind.shape
    assert (step[source] < step[target]).all()
    for number in range(int(step.max(initial=-1)) + 1):
        assert np.unique(kind[step == number]).size == 1


def longest_chain_of_each_kind(graph: Arrays) -> int:
    kind, source, target = graph
    chains = np.zeros((kind.size, 4), dtype=np.int64)
    for call in range(kind.size):
        for before in source[target == call]:
            chains[call] = np.maximum(chains[call], chains[before])
        chains[call, kind[call]] += 1
    return int(chains.max(0, initial=0).sum())


@given(graph=graphs())
@example(graph=(np.zeros(0, dtype=np.int64),) * 3)
def test_steps_are_valid_and_not_below_the_lower_bound(graph: Any) -> None:
    by_depth, by_agenda = (order_calls(*graph, policy) for policy in ("depth", "agenda"))
    bound = longest_chain_of_each_kind(graph)
    for step in (by_depth, by_agenda):
        assert_valid(graph, step)
        assert step.max(initial=-1) + 1 >= bound
    assert_valid(graph, steps_by_depth(*graph))
    assert_valid(graph, steps_by_agenda(*graph))
    assert by_agenda.max(initial=0) <= by_depth.max(initial=0)


def typed_tree(vectors: Vectors, length: int) -> Recording:
    """Alternate mix and squash, with a score at every node."""
    recording = Recording()
    state, other = constants(recording, 2)
    for _ in range(length):
        state = recording.call(vectors.mix, state, other)
        recording.output(recording.call(vectors.score, state), "score")
        state = recording.call(vectors.squash, state)
        recording.output(recording.call(vectors.score, state), "score")
    return recording


@pytest.mark.parametrize("policy", ["depth", "agenda"])
def test_a_classifier_on_every_node_runs_in_one_step(policy: Policy) -> None:
    vectors = Vectors()
    recordings = [typed_tree(vectors, length) for length in (1, 4, 2)]
    stats = schedule_recordings(recordings, policy).stats()
    assert stats.operations.count("score") == 1
    assert stats.operations[-1] == "score"
    assert stats.steps == stats.lower_bound == 4 + 4 + 1


@pytest.mark.parametrize("policy", ["depth", "agenda"])
def test_an_embedding_runs_in_one_step_and_first(policy: Policy) -> None:
    vectors, operations = Vectors(), Operations()
    embed = operations.add(lambda x: x, [VECTOR], [VECTOR], name="embed")
    mix = operations.add(
        vectors.engine.operations["mix"].module, [VECTOR] * 2, [VECTOR], name="mix"
    )
    recording = Recording()
    state = recording.call(embed, recording.constant(VECTOR, [1.0, 2.0, 3.0]))
    for number in range(5):  # a chain: one new leaf a level
        leaf = recording.call(embed, recording.constant(VECTOR, [number, 1.0, 1.0]))
        state = recording.call(mix, state, leaf)
    recording.output(state)
    stats = schedule_recordings([recording], policy).stats()
    assert stats.operations == ("embed", *["mix"] * 5)
    assert stats.widths[0] == 6
    assert Engine(operations)(schedule_recordings([recording], policy))["output"].shape == (1, 3)


def two_kind_program(vectors: Vectors, kinds: str) -> Recording:
    """A chain of mixes (m) and squashes (s), read from the left."""
    recording = Recording()
    state, other = constants(recording, 2)
    for letter in kinds:
        if letter == "m":
            state = recording.call(vectors.mix, state, other)
        else:
            state = recording.call(vectors.squash, state)
    recording.output(state)
    return recording


def steps(recordings: list[Recording], policy: Policy) -> int:
    return len(schedule_recordings(recordings, policy).steps)


def test_agenda_can_be_strictly_better_than_depth() -> None:
    vectors = Vectors()
    # By depth the examples always need different kinds; one step later they agree.
    recordings = [two_kind_program(vectors, "msmsms"), two_kind_program(vectors, "smsmsm")]
    assert steps(recordings, "agenda") < steps(recordings, "depth")
    assert steps(recordings, "agenda") == 7
    assert steps(recordings, "depth") == 12
    found, wanted = (
        vectors.engine(schedule_recordings(recordings, policy))["output"]
        for policy in ("agenda", "depth")
    )
    assert found.allclose(wanted, atol=1e-6)
