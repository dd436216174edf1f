import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core.steps import IndexSlice, contiguous, packed


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
    stacked = [IndexSlice(0, 4 + place, 5, -1, stride=3) for place in range(3)]
    assert packed(stacked, 0) == 3
    # A part of a stacked group has no stretch of its own.
    assert packed(stacked[:2], 0) == packed(stacked, 1) == 1
