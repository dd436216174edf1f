"""Subnormal numbers are rounded to zero in all threads until a block ends, and then no longer."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pyg_dynbatch import flushed_subnormals
from pyg_dynbatch.nn import ChildSumTreeLSTM
from tests.core.helpers import has_float_modes

pytestmark = pytest.mark.skipif(
    not has_float_modes(),
    reason="the C extension is off or missing, or this processor has no such mode",
)


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.set_flush_denormal(False)
    yield
    torch.set_num_threads(before)


def subnormals() -> Tensor:
    """Compute numbers in all threads."""
    return torch.full((200_000,), 1e-30) * 1e-10


def test_in_all_threads() -> None:
    with flushed_subnormals():
        assert not subnormals().count_nonzero()
    assert subnormals().count_nonzero() == 200_000


def test_restored_after_errors_and_inside_of_others() -> None:
    with flushed_subnormals():
        with pytest.raises(KeyError), flushed_subnormals():
            raise KeyError
        assert not subnormals().count_nonzero()
    assert subnormals().count_nonzero() == 200_000


def test_saturated_gates() -> None:
    """Values and gradients agree to rounding."""
    layer = ChildSumTreeLSTM(4, 3)
    x = torch.randn(60, 4) * 30
    edge_index = torch.stack([torch.arange(59), torch.arange(1, 60)])

    def values_and_gradients() -> list[Tensor]:
        h = layer(x, edge_index)
        return [h, *torch.autograd.grad(h[-1].sum(), list(layer.parameters()))]

    expected = values_and_gradients()
    with flushed_subnormals():
        got = values_and_gradients()
    torch.testing.assert_close(got, expected)
