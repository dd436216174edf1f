import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.core import (
    Engine,
    Operations,
    Ragged,
    Recording,
    Signature,
    TensorType,
    run_one_by_one,
)
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.core.helpers import SCALAR, VECTOR, WORD, Vectors, constants, message

ADD = Signature("add", (SCALAR, SCALAR), (SCALAR,))


def constant_of(row_type: TensorType, data: object) -> np.ndarray:
    recording = Recording()
    recording.constant(row_type, data)
    return recording.constants_of(0)[0][0]


def test_a_value_decides_nothing() -> None:
    recording = Recording()
    h = recording.call(ADD, recording.constant(SCALAR, 0.0), recording.constant(SCALAR, 0.0))
    for decide in (lambda: 1 if h else 2, lambda: not h, lambda: h and 1):
        text = message(TypeError, decide)
        assert "used as a truth value while calls are recorded" in text
        assert "depth 1" in text and "torch.where" in text


def test_several_results_come_as_a_tuple() -> None:
    recording = Recording()
    split = Signature("split", (VECTOR,), (SCALAR, (SCALAR, VECTOR)))
    left, right = recording.call(split, recording.constant(VECTOR, [1, 2, 3]))
    assert left.row_type == SCALAR
    assert right.row_type == (SCALAR, VECTOR)


@pytest.mark.parametrize(
    "data", [[1.0, 2.0, 3.0], (1, 2, 3), np.array([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0])]
)
def test_constants_from_anything(data: object) -> None:
    row = constant_of(VECTOR, data)
    given = np.float32 if isinstance(data, torch.Tensor) else np.float64
    assert row.dtype == given, "the engine converts it to its working precision"
    assert row.tolist() == [1.0, 2.0, 3.0]


def test_constants_keep_float64() -> None:
    recording = Recording()
    recording.output(recording.constant(SCALAR, 0.1))
    engine = Engine(Operations())
    schedule = schedule_recordings([recording])
    assert engine(schedule)["output"].tolist() == torch.tensor([0.1]).tolist()
    assert engine.double()(schedule)["output"].tolist() == [0.1]
    double = TensorType((), torch.float64)
    assert constant_of(double, 0.1) == 0.1
    assert constant_of(double, np.float64(0.1)) == 0.1
    assert constant_of(TensorType((2,), torch.float64), [0.1, 0.2]).tolist() == [0.1, 0.2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_constants_of_many_dtypes(dtype: torch.dtype) -> None:
    recording = Recording()
    recording.output(recording.constant(TensorType((), dtype), 1))
    engine = Engine(Operations())
    found = engine(schedule_recordings([recording, recording]))["output"]
    assert found.dtype == dtype
    assert found.tolist() == [1, 1]


@pytest.mark.parametrize("row", [np.zeros(3, dtype=np.float32), torch.zeros(3)])
def test_constants_are_copies(row: Any) -> None:
    kept = constant_of(VECTOR, row)
    row += 1
    assert kept.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("row_type", "data", "error", "found"),
    [
        (VECTOR, [1.0, 2.0], ValueError, ("shape differs", "float32[3]", "float64[2]")),
        (WORD, 1.5, TypeError, ("dtype differs", "int64[]<word>")),
        (TensorType(None), 1.5, TypeError, ("the type leaves shape or dtype open",)),
        (TensorType((), None), 1.5, TypeError, ("the type leaves shape or dtype open",)),
        ((SCALAR, VECTOR), (1.0,), ValueError, ("number of parts", "(float32[], float32[3])")),
    ],
)
def test_invalid_constants(row_type: Any, data: Any, error: type, found: tuple[str, ...]) -> None:
    text = message(error, Recording().constant, row_type, data)
    assert "Recording.constant: " in text and all(part in text for part in found)


@pytest.mark.parametrize("data", [300, [-1], np.array(300), torch.tensor([1, 256])])
def test_integers_beyond_the_dtype(data: object) -> None:
    row_type = TensorType(tuple(np.shape(data)), torch.uint8)
    text = message(ValueError, Recording().constant, row_type, data)
    assert "Recording.constant: a number is beyond the range of its dtype" in text
    assert "uint8" in text and "from 0 to 255" in text
    assert constant_of(TensorType((2,), torch.uint8), np.array([0, 255])).tolist() == [0, 255]
    assert constant_of(TensorType((0,), torch.uint8), np.zeros(0, dtype=int)).tolist() == []
    assert constant_of(TensorType((), torch.bool), 1)
    text = message(ValueError, Recording().constant, TensorType((), torch.bool), 2)
    assert "expected: bool[], 0 or 1" in text


@pytest.mark.parametrize(
    ("dtype", "data"), [(torch.float32, 1e300), (torch.float16, 70000), (torch.bfloat16, 3.4e38)]
)
def test_floats_beyond_the_dtype(dtype: torch.dtype, data: float) -> None:
    text = message(ValueError, Recording().constant, TensorType((), dtype), data)
    assert "a number is beyond the range of its dtype" in text and str(data) in text
    assert constant_of(TensorType((), dtype), float("inf")) == float("inf")


def test_declared_inputs() -> None:
    recording = Recording()
    recording.input(SCALAR, 1)
    assert [*recording.num_inputs.values()] == [2]
    recording.declare_inputs(SCALAR, 5)
    assert [*recording.num_inputs.values()] == [5]
    text = message(ValueError, recording.declare_inputs, SCALAR, 4)
    assert "fewer rows than are read" in text and "at least 5" in text
    assert "Recording.input: invalid row" in message(ValueError, recording.input, SCALAR, -1)


@pytest.mark.parametrize("operation", (torch.nn.Linear(3, 3), torch.tanh, "add", None))
def test_what_is_not_registered_is_not_called(operation: object) -> None:
    recording = Recording()
    text = message(TypeError, recording.call, operation, recording.constant(VECTOR, [1, 2, 3]))
    assert "Recording.call: not a signature" in text
    assert f"got:      {type(operation).__name__}" in text
    assert "operations.add(module, inputs, outputs)" in text
    assert recording.num_calls == 0


def test_invalid_arguments_of_a_call() -> None:
    recording, other = Recording(), Recording()
    one, vector = recording.constant(SCALAR, 1.0), recording.constant(VECTOR, [1, 2, 3])
    text = message(TypeError, recording.call, ADD, one)
    assert "Operation 'add': wrong number of arguments" in text
    assert "2: add(float32[], float32[]) -> float32[]" in text and "call 0" in text
    text = message(TypeError, recording.call, ADD, one, vector)
    assert "Operation 'add': argument types differ" in text
    assert "call 0, argument 1" in text
    text = message(TypeError, recording.call, ADD, 1.0, one)
    assert "Recording: not a value of a recording" in text
    assert "float" in text and "recording.constant(row_type, data)" in text
    text = message(ValueError, recording.call, ADD, one, other.constant(SCALAR, 1.0))
    assert "Recording: a value of a different recording" in text
    assert "Value(0, float32[], depth 0)" in text
    assert recording.num_calls == 0


def test_invalid_outputs() -> None:
    recording = Recording()
    recording.output(recording.constant(SCALAR, 1.0), "a")
    text = message(TypeError, recording.output, recording.constant(VECTOR, [1, 2, 3]), "a")
    assert "Recording.output: 'a' mixes two types" in text
    assert "use a separate name for each type" in text
    assert "output 'a'" in message(
        ValueError, recording.output, Recording().constant(SCALAR, 1.0), "a"
    )


def test_a_value_is_not_pickled_alone() -> None:
    recording = Recording()
    value = recording.constant(SCALAR, 1.0)
    for copier in (pickle.dumps, copy.deepcopy):
        text = message(TypeError, copier, value)
        assert "a value cannot be pickled or copied" in text
        assert "pickle the recording" in text


def test_programs_are_pickled_and_copied() -> None:
    recording = Recording()
    one = recording.constant(SCALAR, 1.0)
    recording.output(recording.call(ADD, one, recording.call(ADD, one, one)))
    wanted = schedule_recordings([recording])
    for twin in (pickle.loads(pickle.dumps(recording)), copy.deepcopy(recording)):
        assert schedule_recordings([twin]) == wanted


def test_a_ragged_argument_takes_a_sequence_or_one_value() -> None:
    operations = Operations()
    total = operations.add(lambda x: x.sum(), [Ragged(SCALAR)], [SCALAR], name="total")
    recording = Recording()
    one, two = recording.constant(SCALAR, 1.0), recording.constant(SCALAR, 2.0)
    for rows in ([one, two, two], one, [], (one, two)):
        recording.output(recording.call(total, rows))
    engine = Engine(operations)
    wanted = [5.0, 1.0, 0.0, 3.0]
    assert engine(schedule_recordings([recording]))["output"].tolist() == wanted
    assert run_one_by_one(engine, [recording])["output"].tolist() == wanted
    text = message(TypeError, recording.call, total, [one, recording.constant(VECTOR, [1, 2, 3])])
    assert "argument types differ" in text


def recorded(language: Vectors, calls: int) -> Recording:
    recording = Recording()
    left, right = constants(recording, 2)
    for _ in range(calls):
        left = recording.call(language.mix, left, right)
    recording.output(recording.call(language.score, left))
    return recording


def test_recordings_are_the_same_after_pickling() -> None:
    language = Vectors()
    recordings = [recorded(language, calls) for calls in (1, 3, 2)]
    finished = pickle.loads(pickle.dumps(recordings))
    wanted = run_one_by_one(language.engine, recordings)["output"]
    for mixed in (finished, [recordings[0], *finished[1:]]):
        torch.testing.assert_close(run_one_by_one(language.engine, mixed)["output"], wanted)
        assert schedule_recordings(mixed) == schedule_recordings(recordings)


def test_depth_size_and_repr() -> None:
    assert Recording().depth == Recording().num_calls == 0
    language = Vectors()
    recording = recorded(language, 4)
    finished = pickle.loads(pickle.dumps(recording))
    assert (finished.depth, finished.num_calls) == (recording.depth, recording.num_calls) == (5, 5)
    assert finished.code == recording.code
    assert repr(finished) == repr(recording) == "Recording(5 calls, depth 5, outputs ['output'])"


def test_programs_grow_after_they_were_scheduled() -> None:
    language = Vectors()
    recording = recorded(language, 1)
    before = schedule_recordings([recording])
    left, right = constants(recording, 2)
    recording.output(recording.call(language.mix, left, right), "more")
    after = schedule_recordings([recording])
    assert list(before.outputs) == ["output"] and list(after.outputs) == ["output", "more"]
    found, wanted = language.engine(after), run_one_by_one(language.engine, [recording])
    assert all(torch.allclose(found[name], rows) for name, rows in wanted.items())


def test_calls_without_arguments_add_no_depth() -> None:
    language, recording = Vectors(), Recording()
    start = language.engine.operations.add(lambda: torch.ones(1, 3), [], [VECTOR], name="start")
    recording.output(recording.call(language.squash, recording.call(start)))
    assert recording.depth == 1
    only = Recording()
    only.output(only.call(start))
    assert only.depth == 0


def test_equal_calls_are_merged_unless_told_otherwise() -> None:
    language = Vectors()
    recordings = [recorded(language, 1)] * 2
    assert schedule_recordings(recordings).steps[0].size == 1
    apart = schedule_recordings(recordings, merge_equal=False)
    assert apart.steps[0].size == 2
    found = language.engine(apart)["output"]
    torch.testing.assert_close(found, run_one_by_one(language.engine, recordings)["output"])


@pytest.mark.parametrize("data", [2 + 3j, np.ma.masked, np.ma.array([1.0], mask=[True])])
def test_constants_lose_nothing(data: Any) -> None:
    with pytest.raises(TypeError, match="Recording.constant: "):
        Recording().constant(TensorType(() if np.ndim(data) == 0 else (1,)), data)
