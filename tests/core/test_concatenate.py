"""Programs that were joined, or made of finished arrays, stand for those that were recorded."""

import pickle

import numpy as np
import torch

from pyg_dynbatch.core import Program, Schedule, run_one_by_one
from pyg_dynbatch.core.program import concatenate
from tests.core.helpers import VECTOR, Vectors, constants


def recorded(language: Vectors, calls: int) -> Program:
    program = Program()
    left, right = constants(program, 2)
    for _ in range(calls):
        left = program.call(language.mix, left, right)
    program.output(program.call(language.score, left))
    return program


def test_schedules_and_reference_take_either() -> None:
    language = Vectors()
    programs = [recorded(language, calls) for calls in (1, 3, 2)]
    finished = [concatenate([program]) for program in programs]
    wanted = run_one_by_one(language.engine, programs)["output"]
    for mixed in (finished, [programs[0], *finished[1:]]):
        torch.testing.assert_close(run_one_by_one(language.engine, mixed)["output"], wanted)
        found = language.engine(Schedule.from_programs(mixed))["output"]
        torch.testing.assert_close(found, wanted)
    assert Schedule.from_programs(finished) == Schedule.from_programs(programs)
    halves = [concatenate(programs[:2]), concatenate(programs[2:])]
    assert Schedule.from_programs(halves) == Schedule.from_programs(programs)


def test_depth_and_size() -> None:
    language = Vectors()
    program = recorded(language, 4)
    finished = pickle.loads(pickle.dumps(concatenate([program])))
    assert (finished.depth, finished.num_calls) == (program.depth, program.num_calls) == (5, 5)
    assert isinstance(finished.value_place, np.ndarray)
    assert finished.value_place.tolist() == program.value_place.tolist()
    assert repr(finished) == repr(program) == "Program(5 calls, depth 5, outputs ['output'])"


def test_programs_grow_after_they_were_scheduled() -> None:
    language = Vectors()
    program = recorded(language, 1)
    before = Schedule.from_programs([program])
    left, right = constants(program, 2)
    program.output(program.call(language.mix, left, right), "more")
    after = Schedule.from_programs([program])
    assert list(before.outputs) == ["output"] and list(after.outputs) == ["output", "more"]


def test_calls_without_arguments_add_no_depth() -> None:
    language, program = Vectors(), Program()
    start = language.engine.operations.add(lambda: torch.ones(1, 3), [], [VECTOR], name="start")
    program.output(program.call(language.squash, program.call(start)))
    assert program.depth == concatenate([program]).depth == 1
    only = Program()
    only.output(only.call(start))
    assert only.depth == concatenate([only]).depth == 0


def test_equal_calls_are_merged_unless_told_otherwise() -> None:
    language = Vectors()
    programs = [recorded(language, 1)] * 2
    assert Schedule.from_programs(programs).steps[0].size == 1
    apart = Schedule.from_programs(programs, merge_equal=False)
    assert apart.steps[0].size == 2
    found = language.engine(apart)["output"]
    torch.testing.assert_close(found, run_one_by_one(language.engine, programs)["output"])
