import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyg_dynbatch.core import (
    DependencyGraph,
    LearnedPolicy,
    Program,
    Schedule,
    agenda_policy,
    depth_policy,
)
from pyg_dynbatch.core.policy import order_calls
from tests.core.helpers import Vectors, message
from tests.core.test_policy import (
    assert_valid,
    graphs,
    longest_chain_of_each_kind,
    two_kind_program,
)

VECTORS = Vectors()
WORDS = st.lists(st.text("ms", min_size=1, max_size=8), min_size=1, max_size=4)


def programs_of(words: list[str]) -> list[Program]:
    return [two_kind_program(VECTORS, word) for word in words]


def num_steps(programs: list[Program], policy: Any) -> int:
    return len(Schedule.from_programs(programs, policy).steps)


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


@settings(max_examples=15)
@given(WORDS, WORDS)
def test_never_more_steps_than_depth_or_agenda(first: list[str], second: list[str]) -> None:
    policy = LearnedPolicy().fit([programs_of(first)])
    for words in (first, second):  # seen and unseen
        programs = programs_of(words)
        stats = Schedule.from_programs(programs, policy).stats()
        best = min(num_steps(programs, other) for other in ("depth", "agenda"))
        assert stats.lower_bound <= stats.steps <= best


@settings(max_examples=10)
@given(WORDS)
def test_values_and_gradients_as_by_depth(words: list[str]) -> None:
    programs = programs_of(words)
    policy = LearnedPolicy().fit([programs])
    engine, found = VECTORS.engine, []
    for each in ("depth", policy):
        rows = engine(Schedule.from_programs(programs, each))["output"]
        # A program of one constant has no gradients.
        loss = rows.square().sum() + 0 * sum(each.sum() for each in engine.parameters())
        found.append((rows, *torch.autograd.grad(loss, [*engine.parameters()])))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)


def test_alternating_chains_reach_the_bound() -> None:
    programs = programs_of(["msmsms", "smsmsm"])
    stats = Schedule.from_programs(programs, LearnedPolicy().fit([programs])).stats()
    assert stats.steps == stats.lower_bound + 1 == 7
    assert num_steps(programs, "depth") == 12


def test_the_search_saves_steps_where_no_rule_does() -> None:
    rng = np.random.default_rng(8)
    batches = [
        programs_of(["".join(rng.choice(list("ms"), 14)) for _ in range(4)]) for _ in range(3)
    ]
    untrained, fitted = LearnedPolicy(), LearnedPolicy().fit(batches)
    steps = [sum(num_steps(b, policy) for b in batches) for policy in (untrained, fitted)]
    assert steps[1] < steps[0]
    assert len(fitted.table) == 1


def test_the_table_decides_whatever_the_numbers_of_the_kinds() -> None:
    # Neither kind is free: each has a longest chain whose head waits for the other kind.
    words = ["mmmsss", "sssmmm"]
    for order in (words, words[::-1]):  # which kind is met first, so which is number 0
        for name in ("mix", "squash"):
            policy = LearnedPolicy({"table": [[["mix", "squash"], [], name]], "rule": "*nearest"})
            schedule = Schedule.from_programs(programs_of(order), policy)
            assert schedule.stats().operations[0] == name
            assert len(schedule.steps) == 9


def test_an_unknown_frontier() -> None:
    fitted = LearnedPolicy().fit([programs_of(["msms", "smsm"])])
    graph = DependencyGraph(
        np.array([0, 1, 2, 0, 1, 2]),
        np.array([0, 1, 3, 4]),
        np.array([1, 2, 4, 5]),
        ("new", "other", "third"),
    )
    step = fitted(graph)
    assert step.max() <= agenda_policy(graph).max()


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


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({}, "KeyError"),
        ({"table": 3, "rule": "*nearest"}, "TypeError"),
        ({"table": [[1]], "rule": "*nearest"}, "ValueError"),
        ({"table": [], "rule": "widest"}, "neither a rule nor a kind"),
        ({"table": [[["a"], [], "b"]], "rule": "*nearest"}, "neither a rule nor a kind"),
    ],
)
def test_invalid_tables_and_batches(table: Any, problem: str) -> None:
    text = message(ValueError, LearnedPolicy, table)
    assert "LearnedPolicy: not a saved table" in text
    assert problem in text
    assert "LearnedPolicy.fit: no batches" in message(ValueError, LearnedPolicy().fit, [])
