"""Bring given numbers of any size, some unknown, to a scale that a network can read."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch

_LIMIT = 3.0
# A column that varies less than this, relative to its size, holds rounding errors of float32.
_LEAST_VARIATION = 1e-6


class StandardizedInputs(nn.Module):
    r"""Shifts and scales every column, cuts off what is far out, and puts 0 for unknown numbers.

    .. math::
        z = \mathrm{clip}\left(\frac{x - \mu}{\sigma}, -3, 3\right), \qquad
        z = 0 \text{ where } x \text{ is NaN}

    Mean and deviation are measured once, on what is trained on, and are buffers, so every
    checkpoint has them. A column that is constant or known nowhere has the deviation 0 and always
    gives 0, also where it takes another value later.

    Args:
        num_inputs: Number of columns.

    Shape:
        - x: ``[row, input]``, NaN where unknown
        - returns: ``[row, input]``, finite

    Raises:
        ValueError: When fitted to another number of columns.

    Example:
        >>> scale = StandardizedInputs(2)
        >>> scale.fit(torch.tensor([[1.0, 7.0], [3.0, 7.0], [torch.nan, 7.0]]))
        >>> scale(torch.tensor([[3.0, 7.0], [1e30, 8.0], [torch.nan, 7.0]])).tolist()
        [[1.0, 0.0], [3.0, 0.0], [0.0, 0.0]]
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.register_buffer("mean", torch.zeros(num_inputs))
        self.register_buffer("deviation", torch.ones(num_inputs))

    def fit(self, x: Float[Tensor, "row input"]) -> None:
        """Measures mean and standard deviation of the known numbers of every column.

        In float64: the squares of numbers that float32 can hold would overflow in float32.

        Args:
            x: The numbers to train on, NaN where unknown; what is infinite counts as unknown.
        """
        if x.size(1) != self.num_inputs:
            raise ValueError(
                mismatch(
                    "StandardizedInputs: another number of columns",
                    expected=self.num_inputs,
                    got=x.size(1),
                )
            )
        exact = x.double()
        exact = torch.where(exact.isfinite(), exact, torch.nan)
        mean = exact.nanmean(0).nan_to_num(0.0)
        deviation = (exact - mean).square().nanmean(0).nan_to_num(0.0).sqrt()
        size = torch.cat([exact.new_zeros(1, x.size(1)), exact.abs().nan_to_num(0.0)]).amax(0)
        varies = deviation > (_LEAST_VARIATION * size).clamp(min=torch.finfo(torch.float32).tiny)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(varies, deviation, torch.zeros_like(deviation)))

    def forward(self, x: Float[Tensor, "row input"]) -> Float[Tensor, "row input"]:
        """Standardises."""
        varies = self.deviation > 0
        # The mean stands in for unknown numbers, and 1 for a deviation of 0, so that no NaN
        # arises, which would spread through gradients even from places that are not chosen.
        filled = torch.where(torch.isnan(x), self.mean, x)
        scaled = (filled - self.mean) / torch.where(varies, self.deviation, 1.0)
        return scaled.clamp(-_LIMIT, _LIMIT) * varies

    def extra_repr(self) -> str:
        """Says how many columns there are."""
        return f"{self.num_inputs}"
