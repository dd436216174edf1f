"""Standardized inputs: finite whatever comes, and what the definition says where it can say it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pyg_dynbatch.nn import StandardizedInputs

NAN = torch.nan


def fitted(rows: torch.Tensor) -> StandardizedInputs:
    scale = StandardizedInputs(rows.size(1))
    scale.fit(rows)
    return scale


def test_is_the_definition() -> None:
    rows = torch.randn(50, 4) * torch.tensor([1.0, 1e-3, 30.0, 1e4]) + 7
    rows[::3, 1] = NAN
    scale = fitted(rows)
    for column in range(4):
        known = rows[:, column][~rows[:, column].isnan()].double()
        spread = known.std(correction=0)
        assert scale.mean[column].item() == pytest.approx(known.mean().item(), rel=1e-5)
        assert scale.deviation[column].item() == pytest.approx(spread.item(), rel=1e-5)
        expected = ((known - known.mean()) / spread).clamp(-3, 3).float()
        found = scale(rows)[:, column]
        torch.testing.assert_close(found[~rows[:, column].isnan()], expected, rtol=1e-2, atol=1e-2)
        assert found[rows[:, column].isnan()].eq(0).all()


def test_far_out_is_cut_off() -> None:
    scale = fitted(torch.tensor([[-1.0], [1.0]]))
    x = torch.tensor([[2.0], [4.0], [-1e38], [torch.inf], [-torch.inf], [NAN]])
    assert scale(x)[:, 0].tolist() == [2.0, 3.0, -3.0, 3.0, -3.0, 0.0]


def test_huge_numbers_neither_overflow_nor_vanish() -> None:
    """Sums and squares of these do not fit into float32, and the largest not even one more."""
    huge = torch.tensor([[1e30, 3e38], [2e30, -3e38], [3e30, 3e38], [2e30, -3e38]])
    scale = fitted(huge)
    assert scale.mean.dtype == torch.float32
    torch.testing.assert_close(scale.mean, torch.tensor([2e30, 0.0]))
    torch.testing.assert_close(scale.deviation, torch.tensor([0.5**0.5 * 1e30, 3e38]))
    root = 2**0.5
    expected = torch.tensor([[-root, 1.0], [0.0, -1.0], [root, 1.0], [0.0, -1.0]])
    torch.testing.assert_close(scale(huge), expected, rtol=1e-5, atol=1e-5)


def test_constant_and_never_known_columns_give_0() -> None:
    rows = torch.tensor(
        [[7.0, 0.1, 3e38, NAN, 1e30, NAN], [7.0, 0.1, 3e38, NAN, 1e30, 4.0]]
    ).repeat_interleave(7, 0)
    scale = fitted(rows)
    assert scale.deviation.eq(0).all()
    for x in (rows, torch.full((2, 6), 9.0), -rows, torch.full((1, 6), NAN)):
        assert scale(x).eq(0).all()
    # Differences of one in the last place of float32 are no variation.
    near = torch.tensor([1e6, 1e6 + 0.0625])
    assert fitted(near[:, None]).deviation.eq(0).all()
    assert fitted(near[:, None] - 1e6).deviation.gt(0).all()


def test_infinite_numbers_do_not_count() -> None:
    scale = fitted(torch.tensor([[1.0], [3.0], [torch.inf], [-torch.inf], [NAN]]))
    assert (scale.mean.item(), scale.deviation.item()) == (2.0, 1.0)


def test_nothing_to_fit_to() -> None:
    scale = fitted(torch.empty(0, 3))
    assert scale(torch.ones(2, 3)).eq(0).all()


numbers = st.floats(width=32, allow_nan=True, allow_infinity=False)


@given(arrays.arrays(np.float32, st.tuples(st.integers(0, 6), st.just(3)), elements=numbers))
def test_always_finite_and_so_are_gradients(rows: np.ndarray) -> None:
    scale, x = fitted(torch.from_numpy(rows)), torch.from_numpy(rows).clone().requires_grad_()
    assert scale.mean.isfinite().all() and scale.deviation.isfinite().all()
    found = scale(x)
    assert found.isfinite().all() and found.abs().le(3).all()
    found.sum().backward()
    # A deviation as small as float32 can hold has a slope too large for it.
    small = (scale.deviation > 0) & (scale.deviation < 1e-37)
    assert x.grad is not None
    assert x.grad[:, ~small].isfinite().all()


def test_is_kept_with_the_weights() -> None:
    scale, other = fitted(torch.randn(9, 2)), StandardizedInputs(2)
    other.load_state_dict(scale.state_dict())
    x = torch.randn(4, 2)
    assert torch.equal(other(x), scale(x))
    assert scale.double()(x).dtype == torch.double
    assert list(scale.parameters()) == []
    assert repr(scale) == "StandardizedInputs(2)"


def test_forward_does_not_wait_for_the_device() -> None:
    """Tensors without content cannot be looked at."""
    scale = StandardizedInputs(2).to("meta")
    assert scale(torch.empty(3, 2, device="meta")).shape == (3, 2)


def test_wrong_number_of_columns() -> None:
    with pytest.raises(ValueError, match="StandardizedInputs: wrong number of col") as caught:
        StandardizedInputs(2).fit(torch.zeros(3, 5))
    assert "expected: 2\n  got:      5" in str(caught.value)
