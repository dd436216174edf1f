import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_dynbatch.core import (
    DependencyGraph,
    LearnedPolicy,
    Program,
    Schedule,
    agenda_policy,
    depth_policy,
)
from pyg_dynbatch.core.learned_policy import RULES
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
def test_steps_are_valid_and_between_the_bound_and_agenda(fields: Any) -> None:
    graph = DependencyGraph(*fields)
    if not graph.num_calls:
        return
    policy = LearnedPolicy()
    step = policy(graph)
    assert_valid(graph, step)
    assert longest_chain_of_each_kind(graph) <= step.max() + 1
    assert step.max() <= min(agenda_policy(graph).max(), depth_policy(graph).max())
    assert (policy(graph) == step).all()
    assert_valid(graph, order_calls(graph, policy))


def test_an_empty_graph() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert LearnedPolicy()(DependencyGraph(none, none, none)).size == 0


@settings(max_examples=30)
@given(WORDS, WORDS)
def test_never_more_steps_than_depth_or_agenda(first: list[str], second: list[str]) -> None:
    policy = LearnedPolicy().fit([programs_of(first)])
    for words in (first, second):  # seen and unseen
        programs = programs_of(words)
        stats = Schedule.from_programs(programs, policy).stats()
        best = min(num_steps(programs, other) for other in ("depth", "agenda"))
        assert stats.lower_bound <= stats.steps <= best


@settings(max_examples=20)
@given(WORDS)
def test_values_and_gradients_as_by_depth(words: list[str]) -> None:
    programs = programs_of(words)
    policy = LearnedPolicy().fit([programs])
    engine, found = VECTORS.engine, []
    for each in ("depth", policy):
        rows = engine(Schedule.from_programs(programs, each))["output"]
        parameters = list(engine.parameters())
        loss = rows.square().sum()
        gradients: tuple[Any, ...] = ()
        if loss.requires_grad:
            gradients = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=True
            )
        found.append((rows, *gradients))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)


def test_chains_that_take_turns_reach_the_bound() -> None:
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


def saved() -> dict[str, Any]:
    return {"table": [[["mix", "squash"], [], "squash"]], "rule": "*nearest"}


def test_the_table_decides_whatever_the_numbers_of_the_kinds() -> None:
    # Neither kind is free: each has a longest chain whose head waits for the other kind.
    words = ["mmmsss", "sssmmm"]
    for order in (words, words[::-1]):  # which kind is met first, so which is number 0
        for name in ("mix", "squash"):
            policy = LearnedPolicy({"table": [[["mix", "squash"], [], name]], "rule": "*nearest"})
            schedule = Schedule.from_programs(programs_of(order), policy)
            assert schedule.stats().operations[0] == name
            assert len(schedule.steps) == 9


def test_a_frontier_it_never_met_falls_back() -> None:
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
def test_what_is_no_saved_table(table: Any, problem: str) -> None:
    text = message(ValueError, LearnedPolicy, table)
    assert "LearnedPolicy: not a saved table" in text
    assert problem in text
    assert LearnedPolicy(saved()).rule in RULES


def test_no_batch_to_learn_from() -> None:
    assert "LearnedPolicy.fit: no batches" in message(ValueError, LearnedPolicy().fit, [])
