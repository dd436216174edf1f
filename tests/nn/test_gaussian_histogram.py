"""The histogram readout against its formula in double precision, near and far from the bins."""

import os
from unittest import mock

import pytest
import torch
from torch import Tensor

from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.nn.readout import MEANS, WIDTHS, GaussianHistogramAggregation


def by_formula(x: Tensor) -> Tensor:
    """Densities of peak height one over their sum; [element, feature, bin]."""
    mean, width = torch.tensor(MEANS).double(), torch.tensor(WIDTHS).double()
    density = torch.exp(-((x[..., None] - mean) ** 2) / (2 * width**2))
    return density / density.sum(-1, keepdim=True)


def test_bins_are_symmetric_and_part_a_unit_normal_evenly() -> None:
    assert [-m for m in MEANS[::-1]] == pytest.approx(MEANS)
    x = torch.randn(20_000, 1)
    share = GaussianHistogramAggregation()(x, dim_size=1)[0] / 20_000
    assert 0.08 < share.min() < share.max() < 0.11


def test_sums_of_memberships_are_those_of_the_formula() -> None:
    x = 1.5 * torch.randn(150, 3, dtype=torch.double)
    index = torch.arange(150) // 40
    found = GaussianHistogramAggregation(block=7).double()(x, index, dim_size=6)
    expected = torch.zeros(6, 33).double().index_add(0, index, by_formula(x).flatten(1))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert found[4:].eq(0).all()


@pytest.mark.parametrize("switch", ("0", "1"))
@pytest.mark.parametrize("width", (1, 5, 128))
def test_single_precision_is_close_to_double(switch: str, width: int) -> None:
    x, index = 1.5 * torch.randn(300, width), torch.randint(7, (300,))
    aggregation = GaussianHistogramAggregation()
    exact = aggregation(x.double(), index, dim_size=8)
    with mock.patch.dict(os.environ, {NATIVE_SWITCH: switch}):
        found = aggregation(x, index, dim_size=8)
        torch.testing.assert_close(found, exact.float(), rtol=2e-6, atol=2e-6)
        assert aggregation(torch.full((1, width), torch.nan)).isnan().all()
        with pytest.raises(ValueError, match="invalid 'dim_size'"):
            aggregation(x, index, dim_size=index.max().item())
        for wrong in (index[:0], index[:299]):
            with pytest.raises(RuntimeError, match="indices"):
                aggregation(x, wrong, dim_size=8)


def test_far_inputs_belong_to_the_outermost_bin() -> None:
    """Fails for a quotient of densities, which is 0 / 0 beyond 5.7, or even shares if mended."""
    x = torch.tensor([[5.8], [100.0], [-1e4], [3.0]], requires_grad=True)
    found = GaussianHistogramAggregation()(x, torch.arange(4))
    assert found[:2, 10].eq(1).all()
    assert found[2, 0] == 1
    assert found[3, 10] > 0.9999
    (gradient,) = torch.autograd.grad(found[:, 10].sum(), x)
    assert gradient[:3].eq(0).all()
    assert gradient[3].abs() < 1e-3


@pytest.mark.parametrize("block", (4, 100))
def test_derivatives_are_right(block: int) -> None:
    aggregation = GaussianHistogramAggregation(block).double()
    x = torch.randn(9, 2, dtype=torch.double, requires_grad=True)
    index = torch.tensor([0, 0, 0, 2, 2, 2, 2, 3, 3])
    assert torch.autograd.gradcheck(lambda x: aggregation(x, index, dim_size=5), [x])
    assert torch.autograd.gradgradcheck(lambda x: aggregation(x, index, dim_size=5), [x])


def test_index_ptr_and_neither() -> None:
    aggregation, x = GaussianHistogramAggregation(), torch.randn(5, 2)
    by_index = aggregation(x, torch.tensor([0, 0, 2, 2, 2]))
    torch.testing.assert_close(aggregation(x, ptr=torch.tensor([0, 2, 2, 5])), by_index)
    torch.testing.assert_close(aggregation(x), by_index.sum(0, keepdim=True))
    unsorted = aggregation(x[[2, 0, 3, 1, 4]], torch.tensor([2, 0, 2, 0, 2]))
    torch.testing.assert_close(unsorted, by_index)
    nothing = aggregation(x[:0], torch.zeros(0, dtype=torch.long), dim_size=2)
    assert nothing.eq(0).all()
    assert nothing.shape == (2, 22)
    assert aggregation(x.bfloat16(), dim_size=1).dtype == torch.float32
    assert repr(aggregation) == "GaussianHistogramAggregation()"
    assert not aggregation.state_dict()


def test_empty_batches_have_gradients_too() -> None:
    x = torch.zeros(0, 2, requires_grad=True)
    GaussianHistogramAggregation()(x, dim_size=3).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 2)


def test_other_forms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)x has the wrong shape.*\[2, 3, 4\], dim -2"):
        GaussianHistogramAggregation()(torch.zeros(2, 3, 4))
