from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyg_dynbatch.core import (
    DependencyGraph,
    Engine,
    Operations,
    Program,
    Schedule,
    agenda_policy,
    depth_policy,
)
from pyg_dynbatch.core.policy import POLICIES, order_calls, policy_of
from tests.core.helpers import VECTOR, Vectors, chain_program, constants, message, tree_program


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
    text = message(ValueError, policy_of, "widest")
    assert "Schedule: unknown policy 'widest'" in text
    assert "'depth' or 'agenda'" in text


def test_a_function_as_policy() -> None:
    vectors = Vectors()
    programs = [tree_program(vectors.mix, ((1, 2), (3, 4)))]
    schedule = Schedule.from_programs(programs, lambda graph: np.arange(graph.num_calls) * 10)
    assert [step.size for step in schedule.steps] == [1, 1, 1]
    wanted = vectors.engine(Schedule.from_programs(programs))["output"]
    assert vectors.engine(schedule)["output"].allclose(wanted)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (lambda graph: np.zeros(graph.num_calls, dtype=int), "not in a later step"),
        (lambda graph: -np.arange(graph.num_calls), "not in a later step"),
        (lambda graph: np.arange(2), "int64 array [2] for 3 calls"),
        (lambda graph: np.arange(graph.num_calls) * 1.0, "float64 array [3] for 3 calls"),
    ],
)
def test_invalid_steps_of_a_function(policy: Any, problem: str) -> None:
    programs = [chain_program(Vectors().mix, 3)]
    text = message(ValueError, Schedule.from_programs, programs, policy)
    assert "invalid steps of the policy" in text
    assert problem in text


def test_a_function_that_mixes_kinds() -> None:
    # Two kinds that feed each other are one group, so the function sees both.
    graph = DependencyGraph(np.array([0, 1, 0, 1]), np.array([0, 1]), np.array([1, 2]))
    text = message(ValueError, order_calls, graph, lambda g: np.array([0, 1, 2, 0]))
    assert "call 3 in one step with a call of a different kind" in text


def typed_tree(vectors: Vectors, length: int) -> Program:
    """Alternate mix and squash, with a score at every node."""
    program = Program()
    state, other = constants(program, 2)
    for _ in range(length):
        state = program.call(vectors.mix, state, other)
        program.output(program.call(vectors.score, state), "score")
        state = program.call(vectors.squash, state)
        program.output(program.call(vectors.score, state), "score")
    return program


@pytest.mark.parametrize("policy", POLICIES)
def test_a_classifier_on_every_node_runs_in_one_step(policy: str) -> None:
    vectors = Vectors()
    programs = [typed_tree(vectors, length) for length in (1, 4, 2)]
    stats = Schedule.from_programs(programs, policy).stats()
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
    program = Program()
    state = program.call(embed, program.constant(VECTOR, [1.0, 2.0, 3.0]))
    for number in range(5):  # a chain: one new leaf a level
        leaf = program.call(embed, program.constant(VECTOR, [number, 1.0, 1.0]))
        state = program.call(mix, state, leaf)
    program.output(state)
    stats = Schedule.from_programs([program], policy).stats()
    assert stats.operations == ("embed", *["mix"] * 5)
    assert stats.widths[0] == 6
    assert Engine(operations)(Schedule.from_programs([program], policy))["output"].shape == (1, 3)


def two_kind_program(vectors: Vectors, kinds: str) -> Program:
    """A chain of mixes (m) and squashes (s), read from the left."""
    program = Program()
    state, other = constants(program, 2)
    for letter in kinds:
        if letter == "m":
            state = program.call(vectors.mix, state, other)
        else:
            state = program.call(vectors.squash, state)
    program.output(state)
    return program


def steps(programs: list[Program], policy: str) -> int:
    return len(Schedule.from_programs(programs, policy).steps)


def test_agenda_can_be_strictly_better_than_depth() -> None:
    vectors = Vectors()
    # By depth the examples always need different kinds; one step later they agree.
    programs = [two_kind_program(vectors, "msmsms"), two_kind_program(vectors, "smsmsm")]
    assert steps(programs, "agenda") < steps(programs, "depth")
    assert steps(programs, "agenda") == 7
    assert steps(programs, "depth") == 12
    found, wanted = (
        vectors.engine(Schedule.from_programs(programs, policy))["output"]
        for policy in ("agenda", "depth")
    )
    assert found.allclose(wanted, atol=1e-6)


def test_agenda_falls_back_to_depth() -> None:
    # By average depth alone, the long run of mixes would come first, with nine steps.
    vectors = Vectors()
    programs = [two_kind_program(vectors, word) for word in ("mmmmmm", "mmmmsms")]
    assert steps(programs, "agenda") == steps(programs, "depth") == 8
