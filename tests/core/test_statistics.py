from dataclasses import asdict

import torch

from pyg_dynbatch.core import Program, Schedule
from tests.core.helpers import VECTOR, Vectors, chain_program, constants, tree_program

VECTORS = Vectors()


def stats_of(*shapes: object, policy: str = "depth") -> object:
    return Schedule.from_programs([tree_program(VECTORS.mix, s) for s in shapes], policy).stats()


def test_a_small_tree_by_hand() -> None:
    # mix(mix(1, 2), 3): the constant 3 is read at depth 2, so Fold copies it once.
    stats = stats_of(((1, 2), 3))
    assert asdict(stats) == {
        "examples": 1,
        "steps": 2,
        "rows": 2,
        "merged_calls": 0,
        "critical_path": 2,
        "lower_bound": 2,
        "widths": (1, 1),
        "operations": ("mix", "mix"),
        "gathered_rows": 0,
        "fold_steps": 2,
        "fold_copies": 1,
    }


def test_folds_copies_by_hand() -> None:
    # A comb of 4 leaves: the leaves enter at depths 1, 1, 2, 3 and are copied 0, 0, 1, 2 times.
    assert stats_of((((1, 2), 3), 4)).fold_copies == 3
    # The same constant is carried to its last reader once: 4 is read at depths 1 and 3.
    assert stats_of((((4, 2), 3), 4)).fold_copies == 3


def test_folds_steps_are_every_operation_at_every_depth() -> None:
    program = Program()
    (state,) = constants(program, 1)
    state = program.call(VECTORS.squash, state)
    state = program.call(VECTORS.mix, state, state)
    program.output(program.call(VECTORS.score, state))
    stats = Schedule.from_programs([program]).stats()
    assert (stats.steps, stats.critical_path, stats.lower_bound) == (3, 3, 3)
    assert stats.fold_steps == 9
    assert stats.fold_copies == 0


def test_lower_bound_is_a_sum_over_operations() -> None:
    # One example is a chain of mixes, the other one of squashes: 3 + 4 steps, path of 4.
    squashes = Program()
    (state,) = constants(squashes, 1)
    for _ in range(4):
        state = squashes.call(VECTORS.squash, state)
    squashes.output(state)
    stats = Schedule.from_programs([chain_program(VECTORS.mix, 3), squashes]).stats()
    assert (stats.critical_path, stats.lower_bound, stats.steps) == (4, 7, 7)


def test_merged_calls_are_counted() -> None:
    stats = stats_of(((1, 2), 3), ((1, 2), 4), (1, 2))
    # mix(1, 2) is made once in place of three times.
    assert stats.merged_calls == 2
    assert stats.widths == (1, 2)
    assert stats.rows == 3


def test_gathered_rows() -> None:
    # Rows of constants: 1, 2, 3, 4 are rows 0 to 3; the left arguments are rows 0, 2.
    stats = stats_of((1, 2), (3, 4))
    assert stats.gathered_rows == 4
    assert stats_of((1, 2)).gathered_rows == 0


def test_a_structure_by_hand() -> None:
    # A chain of 3: the inputs of nodes 1 and 2 are read at depths 2 and 3.
    stats = Schedule.from_structure(torch.tensor([[0, 1], [1, 2]]), 3).stats()
    assert stats.widths == (1, 1, 1)
    assert stats.fold_copies == 1 + 2
    assert stats.fold_steps == stats.lower_bound == stats.critical_path == 3


def test_nothing_at_all() -> None:
    stats = Schedule.from_programs([Program(), Program()]).stats()
    assert (stats.examples, stats.steps, stats.rows, stats.fold_copies) == (2, 0, 0, 0)
    assert (stats.critical_path, stats.lower_bound, stats.fold_steps) == (0, 0, 0)


def test_an_input_that_is_only_put_out() -> None:
    program = Program()
    program.output(program.input(VECTOR, 3))
    stats = Schedule.from_programs([program]).stats()
    assert (stats.steps, stats.critical_path) == (0, 0)
