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
from tests.core.helpers import SCALAR, VECTOR, Vectors, constants

ADD = Signature("add", (SCALAR, SCALAR), (SCALAR,))


def constant_of(row_type: TensorType, data: object) -> np.ndarray:
    recording = Recording()
    recording.constant(row_type, data)
    return recording.constants_of(0)[0][0]


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


def test_the_largest_numbers_of_a_dtype_are_constants() -> None:
    assert constant_of(TensorType((2,), torch.uint8), np.array([0, 255])).tolist() == [0, 255]
    assert constant_of(TensorType((0,), torch.uint8), np.zeros(0, dtype=int)).tolist() == []
    assert constant_of(TensorType((), torch.bool), 1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert constant_of(TensorType((), dtype), float("inf")) == float("inf")


def test_declared_inputs() -> None:
    recording = Recording()
    recording.input(SCALAR, 1)
    assert [*recording.num_inputs.values()] == [2]
    recording.declare_inputs(SCALAR, 5)
    assert [*recording.num_inputs.values()] == [5]


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


def test_equal_calls_are_merged() -> None:
    language = Vectors()
    recordings = [recorded(language, 1)] * 2
    steps = schedule_recordings(recordings)
    assert steps.steps[0].size == 1
    found = language.engine(steps)["output"]
    torch.testing.assert_close(found, run_one_by_one(language.engine, recordings)["output"])
