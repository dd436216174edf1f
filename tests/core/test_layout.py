import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core import Engine, Operations, Recording, TensorType
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import IndexSlice, Steps, contiguous, packed
from tests.core.test_definitions import random_recordings


@given(st.lists(st.integers(0, 5), max_size=4))
def test_first_of_rows_that_lie_side_by_side(rows: list[int]) -> None:
    first = rows[0] if rows else 0
    side_by_side = rows == list(range(first, first + len(rows)))
    assert contiguous(np.array(rows, dtype=np.int64)) == (first if side_by_side else -1)


def test_arguments_that_share_a_gather() -> None:
    blocks = [IndexSlice(0, 4, 2, -1), IndexSlice(0, 6, 2, -1), IndexSlice(0, 8, 2, -1)]
    assert packed(blocks, 0) == 3
    assert packed(blocks, 1) == 2
    for other in (
        IndexSlice(1, 6, 2, -1),  # of another store
        IndexSlice(0, 7, 2, -1),  # not behind it
        IndexSlice(0, 6, 2, 9),  # used in place
        IndexSlice(0, 6, 2, -1, segments=9),  # ragged
    ):
        assert packed([blocks[0], other], 0) == 1


def test_single_rows_that_share_a_gather() -> None:
    rows = [IndexSlice(0, 4 + place, 1, start) for place, start in enumerate((9, 2, 5, 5))]
    assert packed(rows, 0) == 4
    assert packed(rows[:3], 0) == packed(rows, 1) == 1  # views are faster
    for place, other in (
        (3, IndexSlice(1, 7, 1, 5)),  # of another store
        (3, IndexSlice(0, 8, 1, 5)),  # not behind it
        (3, IndexSlice(0, 7, 2, 5)),  # of two rows
        (3, IndexSlice(0, 7, 1, 5, segments=9)),  # ragged
        (0, IndexSlice(0, 4, 1, 9, segments=9)),
    ):
        assert packed([*rows[:place], other, *rows[place + 1 :]], 0) == 1


def assert_rows_are_in_the_index(steps: Steps) -> None:
    for step in steps.steps:
        for read in step.arguments:
            if read.start >= 0:
                wanted = list(range(read.start, read.start + read.length))
                assert read.rows_in(steps.index).tolist() == wanted


@given(st.integers(0, 2**32))
def test_rows_side_by_side_of_recordings_are_in_the_index_too(seed: int) -> None:
    assert_rows_are_in_the_index(schedule_recordings(random_recordings(random.Random(seed), 12)))


def test_values_and_gradients_of_many_single_rows() -> None:
    vector, operations = TensorType((2,)), Operations()
    weight = torch.randn(2, dtype=torch.float64, requires_grad=True)
    scaled = operations.add(lambda x: x * weight, [vector], [vector], name="scaled")
    joined = operations.add(
        lambda *parts: sum(part * place for place, part in enumerate(parts, 1)),
        [vector] * 5, [vector], name="joined",
    )  # fmt: skip
    recording = Recording()
    parts = [recording.call(scaled, recording.constant(vector, [n, -n / 2])) for n in range(5)]
    recording.output(recording.call(joined, *parts[::-1]))
    (found,) = Engine(operations).double()(schedule_recordings([recording]))["output"]
    rows = [torch.tensor([n, -n / 2], dtype=torch.float64) * weight for n in range(5)]
    expected = sum(row * place for place, row in enumerate(rows[::-1], 1))
    torch.testing.assert_close(found, expected)
    found, expected = (torch.autograd.grad(x.square().sum(), weight) for x in (found, expected))
    torch.testing.assert_close(found, expected)
