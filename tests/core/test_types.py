import pickle

import pytest
import torch

from pyg_dynbatch.core import TensorType
from pyg_dynbatch.core.types import describe, parts_of
from tests.core.helpers import as_users_run_it


def test_equal_by_shape_dtype_and_tag() -> None:
    with as_users_run_it():
        assert TensorType((3,)) == TensorType([3])
    assert len({TensorType((3,)), TensorType((3,), tag="a"), TensorType((3,), torch.int64)}) == 3
    assert pickle.loads(pickle.dumps(TensorType((3,), tag="a"))) == TensorType((3,), tag="a")


@pytest.mark.parametrize(
    ("row_type", "text"),
    [
        (TensorType(()), "float32[]"),
        (TensorType((2, 3), torch.int64, "pair"), "int64[2, 3]<pair>"),
        ((TensorType((2,)), TensorType(())), "(float32[2], float32[])"),
    ],
)
def test_reads_well(row_type: object, text: str) -> None:
    assert describe(row_type) == text
    assert len(parts_of(row_type)) == (2 if isinstance(row_type, tuple) else 1)
