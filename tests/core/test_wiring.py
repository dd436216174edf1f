import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core.wiring import first_rows


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=6))
def test_first_row_of_stretches_that_lie_side_by_side(stretches: list[list[int]]) -> None:
    lengths = np.array([len(stretch) for stretch in stretches], dtype=np.int64)
    index = np.array([row for stretch in stretches for row in stretch], dtype=np.int64)
    found = first_rows(index, np.cumsum(lengths) - lengths, lengths)
    for stretch, first in zip(stretches, found, strict=True):
        side_by_side = (
            stretch == list(range(stretch[0], stretch[0] + len(stretch))) if stretch else True
        )
        assert first == ((stretch[0] if stretch else 0) if side_by_side else -1)
