"""Policies, on calls of which none are fused."""

import json
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyg_dynbatch.core import (
    DependencyGraph,
    Engine,
    LearnedPolicy,
    Operations,
    Recording,
    agenda_policy,
    depth_policy,
)
from pyg_dynbatch.core.policy import POLICIES, order_calls, policy_of
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.core.helpers import VECTOR, Vectors, constants, tree_program, unfused
from tests.strategies import few


@pytest.fixture(scope="module", autouse=True)
def calls_are_not_fused() -> Iterator[None]:
    with unfused():
        yield


@st.composite
def graphs(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    """Draw the fields of a graph, not the graph: its type checks draw random numbers."""
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


def assert_valid(graph: DependencyGraph, step: np.ndarray) -> None:
    assert step.shape == (graph.num_calls,)
    assert (step[graph.source] < step[graph.target]).all()
    for number in range(int(step.max(initial=-1)) + 1):
        assert np.unique(graph.kind[step == number]).size == 1


def longest_chain_of_each_kind(graph: DependencyGraph) -> int:
    chains = np.zeros((graph.num_calls, 4), dtype=np.int64)
    for call in range(graph.num_calls):
        for source in graph.source[graph.target == call]:
            chains[call] = np.maximum(chains[call], chains[source])
        chains[call, graph.kind[call]] += 1
    return int(chains.max(0, initial=0).sum())


@pytest.mark.parametrize("policy", POLICIES)
@given(fields=graphs())
@example(fields=(np.zeros(0, dtype=np.int64),) * 3)
def test_steps_are_valid_and_not_below_the_lower_bound(fields: Any, policy: str) -> None:
    graph = DependencyGraph(*fields)
    if not graph.num_calls:
        assert POLICIES[policy](graph).size == 0
        return
    step = order_calls(graph, policy)
    assert_valid(graph, step)
    assert_valid(graph, POLICIES[policy](graph))
    assert step.max() + 1 >= longest_chain_of_each_kind(graph)
    assert (order_calls(graph, policy) == step).all()


def test_policy_by_name_or_function() -> None:
    assert policy_of("depth") is depth_policy
    assert policy_of("agenda") is agenda_policy


def test_a_function_as_policy() -> None:
    vectors = Vectors()
    recordings = [tree_program(vectors.mix, ((1, 2), (3, 4)))]
    schedule = schedule_recordings(recordings, lambda graph: np.arange(graph.num_calls) * 10)
    assert [step.size for step in schedule.steps] == [1, 1, 1]
    wanted = vectors.engine(schedule_recordings(recordings))["output"]
    assert vectors.engine(schedule)["output"].allclose(wanted)


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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_classifier_on_every_node_runs_in_one_step(policy: str) -> None:
    vectors = Vectors()
    recordings = [typed_tree(vectors, length) for length in (1, 4, 2)]
    stats = schedule_recordings(recordings, policy).stats()
    assert stats.operations.count("score") == 1
    assert stats.operations[-1] == "score"
    assert stats.steps == stats.lower_bound == 4 + 4 + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_an_embedding_runs_in_one_step_and_first(policy: str) -> None:
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


def steps(recordings: list[Recording], policy: Any) -> int:
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


VECTORS = Vectors()
WORDS = st.lists(st.text("ms", min_size=1, max_size=8), min_size=1, max_size=4)


def programs_of(words: list[str]) -> list[Recording]:
    return [two_kind_program(VECTORS, word) for word in words]


@given(graphs())
@example((np.zeros(0, dtype=np.int64),) * 3)
def test_steps_are_valid_and_between_the_bound_and_agenda(fields: Any) -> None:
    graph = DependencyGraph(*fields)
    policy = LearnedPolicy()
    if not graph.num_calls:
        assert policy(graph).size == 0
        return
    step = policy(graph)
    assert_valid(graph, step)
    assert longest_chain_of_each_kind(graph) <= step.max() + 1
    assert step.max() <= min(agenda_policy(graph).max(), depth_policy(graph).max())
    assert (policy(graph) == step).all()
    assert_valid(graph, order_calls(graph, policy))


@few(15)
@given(WORDS, WORDS)
def test_never_more_steps_than_depth_or_agenda(first: list[str], second: list[str]) -> None:
    policy = LearnedPolicy().fit([programs_of(first)])
    for words in (first, second):  # seen and unseen
        recordings = programs_of(words)
        stats = schedule_recordings(recordings, policy).stats()
        best = min(steps(recordings, other) for other in ("depth", "agenda"))
        assert stats.lower_bound <= stats.steps <= best


def test_alternating_chains_reach_the_bound() -> None:
    recordings = programs_of(["msmsms", "smsmsm"])
    stats = schedule_recordings(recordings, LearnedPolicy().fit([recordings])).stats()
    assert stats.steps == stats.lower_bound + 1 == 7
    assert steps(recordings, "depth") == 12


def test_the_search_saves_steps_where_no_rule_does() -> None:
    rng = np.random.default_rng(8)
    batches = [
        programs_of(["".join(rng.choice(list("ms"), 14)) for _ in range(4)]) for _ in range(3)
    ]
    untrained, fitted = LearnedPolicy(), LearnedPolicy().fit(batches)
    counts = [sum(steps(b, policy) for b in batches) for policy in (untrained, fitted)]
    assert counts[1] < counts[0]
    assert len(fitted.table) == 1


def test_the_table_decides_whatever_the_numbers_of_the_kinds() -> None:
    # Neither kind is free: each has a longest chain whose head waits for the other kind.
    words = ["mmmsss", "sssmmm"]
    for order in (words, words[::-1]):  # which kind is met first, so which is number 0
        for name in ("mix", "squash"):
            policy = LearnedPolicy({"table": [[["mix", "squash"], [], name]], "rule": "*nearest"})
            schedule = schedule_recordings(programs_of(order), policy)
            assert schedule.stats().operations[0] == name
            assert len(schedule.steps) == 9


def test_saved_and_pickled_policies_are_the_same() -> None:
    fitted = LearnedPolicy().fit([programs_of(["msmsms", "smsmsm", "mmss"])])
    assert fitted.table
    assert LearnedPolicy(json.loads(json.dumps(fitted.to_dict()))) == fitted
    assert pickle.loads(pickle.dumps(fitted)) == fitted
    assert fitted != LearnedPolicy()
    assert fitted != "depth"
    assert repr(fitted) == f"LearnedPolicy({len(fitted.table)} frontiers)"


def test_fitting_twice_gives_the_same() -> None:
    words = [["msmsms", "smsmsm"], ["mmsms", "ssmms", "m"]]
    first, second = (LearnedPolicy().fit([programs_of(w) for w in words]) for _ in range(2))
    assert first == second
