"""Compact programs stand for the programs they were made of."""

import pickle

import pytest
import torch

from pyg_dynbatch.core import CompactProgram, Program, Schedule, run_one_by_one
from pyg_dynbatch.core.program import ProgramArrays
from tests.core.helpers import VECTOR, Vectors, constants


def compact(program: Program) -> CompactProgram:
    return CompactProgram(
        tuple(program.signatures),
        tuple(program.row_types),
        tuple(program.num_inputs),
        program.arrays(),
    )


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
    small = [compact(program) for program in programs]
    wanted = run_one_by_one(language.engine, programs)["output"]
    for mixed in (small, [programs[0], *small[1:]]):
        torch.testing.assert_close(run_one_by_one(language.engine, mixed)["output"], wanted)
        found = language.engine(Schedule.from_programs(mixed))["output"]
        torch.testing.assert_close(found, wanted)
    assert Schedule.from_programs(small) == Schedule.from_programs(programs)


def test_the_reference_reads_the_fields_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a program is; reading them for every call made long ones quadratic."""
    language, read = Vectors(), []
    small, arrays = compact(recorded(language, 20)), CompactProgram.arrays

    def counted(program: CompactProgram) -> ProgramArrays:
        read.append(program)
        return arrays(program)

    monkeypatch.setattr(CompactProgram, "arrays", counted)
    run_one_by_one(language.engine, [small])
    assert read == [small]
    rows = ProgramArrays.__annotations__
    assert not any(hasattr(small, name) for name in [*rows, "constants"] if name != "outputs")


def test_depth_and_size() -> None:
    language = Vectors()
    program = recorded(language, 4)
    small = pickle.loads(pickle.dumps(compact(program)))
    assert (small.depth, small.num_calls) == (program.depth, program.num_calls) == (5, 5)
    assert small.arrays().value_place.tolist() == program.value_place
    assert repr(small) == "CompactProgram(5 calls, depth 5, outputs ['output'])"


def test_calls_without_arguments_add_no_depth() -> None:
    language, program = Vectors(), Program()
    start = language.engine.operations.add(lambda: torch.ones(1, 3), [], [VECTOR], name="start")
    first = program.call(start)
    program.output(program.call(language.squash, first))
    assert program.depth == compact(program).depth == 1
    only = Program()
    only.output(only.call(start))
    assert only.depth == compact(only).depth == 0


def test_equal_calls_are_merged_unless_told_otherwise() -> None:
    language = Vectors()
    programs = [recorded(language, 1)] * 2
    assert Schedule.from_programs(programs).steps[0].size == 1
    apart = Schedule.from_programs(programs, merge_equal=False)
    assert apart.steps[0].size == 2
    found = language.engine(apart)["output"]
    torch.testing.assert_close(found, run_one_by_one(language.engine, programs)["output"])
