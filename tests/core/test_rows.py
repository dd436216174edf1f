from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_dynbatch.core import Engine, Operations, Program, Schedule, TensorType
from tests.core.helpers import SCALAR, VECTOR, message

WORD = TensorType((), torch.int64, "word")
PAIR = (VECTOR, SCALAR)


def reading(row_type: Any, rows: int = 2) -> Schedule:
    program = Program()
    for row in range(rows):
        program.output(program.input(row_type, row))
    return Schedule.from_programs([program])


def complaint(error: type[Exception], row_type: Any, inputs: Any) -> str:
    return message(error, Engine(Operations()), reading(row_type), inputs)


def test_missing_inputs() -> None:
    text = complaint(ValueError, WORD, {"wrod": torch.zeros(2)})
    assert "Engine: the inputs of type int64[]<word> are missing" in text
    assert "2 rows" in text
    assert "inputs for wrod" in text
    assert "engine(schedule, inputs={'word': rows})" in text
    text = complaint(ValueError, VECTOR, None)
    assert "inputs for nothing" in text
    assert "<row type>" in text


def test_wrong_number_of_input_rows() -> None:
    text = complaint(ValueError, VECTOR, {VECTOR: torch.zeros(5, 3)})
    assert "Engine: wrong number of input rows of type float32[3]" in text
    assert "float32 tensor [5, 3]" in text


@pytest.mark.parametrize("rows", [[1.0, 2.0], torch.tensor(1.0), (torch.zeros(2, 3), None)])
def test_inputs_that_are_no_rows(rows: Any) -> None:
    text = complaint(TypeError, VECTOR, {VECTOR: rows})
    assert "Engine: input rows of type float32[3] do not fit" in text
    assert "2 rows of float32[3]" in text


@pytest.mark.parametrize(
    ("row_type", "rows", "got"),
    [
        (VECTOR, torch.zeros(2, 4), "float32 tensor [2, 4]"),
        (VECTOR, torch.zeros(2, 3, dtype=torch.int64), "int64 tensor [2, 3]"),
        (WORD, torch.zeros(2), "float32 tensor [2]"),
        (PAIR, (torch.zeros(2, 3), torch.zeros(2, 1)), "float32 tensor [2, 1]"),
        (PAIR, torch.zeros(2, 3), "float32 tensor [2, 3]"),
    ],
)
def test_input_rows_of_another_type(row_type: Any, rows: Any, got: str) -> None:
    text = complaint(TypeError, row_type, {row_type: rows})
    assert "Engine: input rows of type" in text
    assert got in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_floating_inputs_of_any_precision(dtype: torch.dtype) -> None:
    found = Engine(Operations())(reading(VECTOR), {VECTOR: torch.ones(2, 3, dtype=dtype)})
    assert found["output"].dtype == torch.float32


def returning(module: Any, *outputs: Any) -> str:
    operations, program = Operations(), Program()
    signature = operations.add(module, [VECTOR], outputs or [VECTOR], name="odd")
    program.call(signature, program.constant(VECTOR, [0.0] * 3))
    program.call(signature, program.constant(VECTOR, [1.0] * 3))
    return message(TypeError, Engine(operations), Schedule.from_programs([program]))


def mean_over_all(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True)


@pytest.mark.parametrize(
    ("module", "got"),
    [
        (lambda x: x[:, :2], "float32 tensor [2, 2]"),
        (lambda x: x.long(), "int64 tensor [2, 3]"),
        (mean_over_all, "float32 tensor [1, 3]"),
        (lambda x: (x, x), "float32 tensor [2, 3], float32 tensor [2, 3]"),
        (lambda x: None, "nothing"),
        (lambda x: x.sum(), "float32 tensor []"),
    ],
)
def test_a_module_that_returns_something_else(module: Any, got: str) -> None:
    text = returning(module)
    assert "Operation 'odd': invalid results of its module" in text
    assert got in text
    assert "step 0" in text


def test_the_first_axis_must_stay() -> None:
    text = returning(mean_over_all)
    assert "2 rows of float32[3]" in text
    assert "one row per call, along the first axis" in text


@pytest.mark.parametrize("module", [lambda x: x, lambda x: (x,), lambda x: [x, x]])
def test_too_few_results(module: Any) -> None:
    text = returning(module, VECTOR, VECTOR)
    assert "2 results: odd(float32[3]) -> float32[3], float32[3]" in text


def test_a_change_in_place_is_refused() -> None:
    for module in (torch.nn.ReLU(inplace=True), lambda x: x.add_(1), lambda x: x[:1].zero_() + x):
        operations, program = Operations(), Program()
        signature = operations.add(module, [VECTOR], [VECTOR], name="odd")
        program.call(signature, program.constant(VECTOR, [0.0] * 3))
        text = message(RuntimeError, Engine(operations), Schedule.from_programs([program]))
        assert "Operation 'odd': its module changed an argument in place" in text
        assert "step 0" in text
        assert "inplace=False" in text


def test_a_change_in_place_of_a_part_is_refused() -> None:
    operations, program = Operations(), Program()
    signature = operations.add(lambda x: x[1].add_(1), [PAIR], [SCALAR], name="odd")
    program.call(signature, program.constant(PAIR, ([0.0] * 3, 1.0)))
    message(RuntimeError, Engine(operations), Schedule.from_programs([program]))


def test_a_change_in_place_of_own_tensors_is_fine() -> None:
    operations, program = Operations(), Program()
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=True))
    signature = operations.add(module, [VECTOR], [VECTOR], name="fine")
    program.output(program.call(signature, program.constant(VECTOR, [0.0] * 3)))
    Engine(operations)(Schedule.from_programs([program]))["output"].sum().backward()
