"""Laws hold for products that steps of many rows compute, too."""

from collections.abc import Iterator

import pytest

from pyg_dynbatch.core import linear


@pytest.fixture(scope="module", autouse=True)
def _products_of_few_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "_MANY_ROWS", 0)
        patch.setattr(linear, "_LARGE_MATRIX", 1)
        yield
