"""Normalise rows that stand for several rows each, without ever making those."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pairs import Pairs
from pyg_dynbatch.nn.pair_sums import neighbour_sum

Moments = tuple[Tensor, Tensor, int]
"""Mean and variance of every column, and of how many rows."""


class CountedBatchNorm(nn.Module):
    r"""Normalises columns over a mini-batch in which a row may count several times.

    .. math::
        y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad
        \mu = \frac{\sum_r c_r x_r}{\sum_r c_r}, \quad
        \sigma^2 = \frac{\sum_r c_r (x_r - \mu)^2}{\sum_r c_r}

    The same as ``BatchNorm1d`` on rows that are really repeated c times, and like it computed in
    single precision where the rows are of half precision. A mini-batch of one row is not refused:
    its variance is zero.

    Args:
        width: Number of columns.
        eps: Added to the variance.
        momentum: Weight of the newest mini-batch in the running statistics.

    Shape:
        - rows: ``[row, width]``, counts: ``[row]``; returns ``[row, width]``

    Reference:
        Ioffe and Szegedy (2015), arXiv:1502.03167, algorithm 1.

    Example:
        >>> norm, rows = CountedBatchNorm(1), torch.tensor([[0.0], [3.0]])
        >>> counts = torch.tensor([2.0, 1.0])  # as if the rows were 0, 0, 3
        >>> [round(y, 3) for y in norm(rows, counts).flatten().tolist()]
        [-0.707, 1.414]
    """

    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.width, self.eps, self.momentum = width, eps, momentum
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def reset_parameters(self) -> None:
        """Forgets what was learned and seen."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.get_buffer("running_mean"))
        nn.init.ones_(self.get_buffer("running_var"))

    def forward(
        self,
        rows: Float[Tensor, "row width"],
        counts: Float[Tensor, " row"] | None = None,
        total: int | None = None,
    ) -> Float[Tensor, "row width"]:
        """Normalises rows.

        Args:
            rows: The rows.
            counts: How often each one counts; once where left out.
            total: The sum of the counts, where it is known.
        """
        if not self.training or not rows.size(0):
            scale, shift = self.scale_and_shift(None)
            return torch.addcmul(shift, rows, scale)
        result_dtype = torch.promote_types(rows.dtype, self.weight.dtype)
        with torch.autocast(rows.device.type, enabled=False):
            rows = _in_single(rows)
            if counts is None:
                counts, total = rows.new_ones(rows.size(0)), rows.size(0)
            elif total is None:
                total = int(counts.sum(dtype=torch.float64))
            share = counts.to(rows.dtype) / max(total, 1)
            normalised, mean, var = _Normalise.apply(rows, share, self.weight, self.bias, self.eps)
        self._observe(mean, var, total)
        return normalised.to(result_dtype)

    def scale_and_shift(self, moments: "Moments | None") -> tuple[Tensor, Tensor]:
        """Gives the factor and the summand of every column.

        Args:
            moments: Those of the mini-batch, which go into the running statistics; the running
                statistics are used where left out.
        """
        if moments is None:
            mean, var = self.get_buffer("running_mean"), self.get_buffer("running_var")
        else:
            mean, var, total = moments
            self._observe(mean, var, total)
        scale = self.weight * torch.rsqrt(var + self.eps)
        shift = self.bias - mean * scale
        return scale.to(self.weight.dtype), shift.to(self.weight.dtype)

    @torch.no_grad()
    def _observe(self, mean: Tensor, var: Tensor, total: int) -> None:
        unbiased = var * (total / (total - 1)) if total > 1 else var
        for name, seen in (("running_mean", mean), ("running_var", unbiased)):
            buffer = self.get_buffer(name)
            buffer.lerp_(seen.to(buffer.dtype), self.momentum)

    def extra_repr(self) -> str:
        """Says how wide the rows are."""
        return str(self.width)


def _in_single(rows: Tensor) -> Tensor:
    """Rows of half precision in single precision: sums over thousands of rows need it."""
    return rows if rows.dtype == torch.float64 else rows.float()


class _Normalise(Function):
    """Writes each intermediate result once; autograd alone would keep four of them."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, share: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = share @ rows
        centred = rows - mean
        var = share @ centred.square()
        scale = torch.rsqrt(var + eps)
        centred *= scale
        ctx.save_for_backward(centred, share, scale * weight)
        ctx.mark_non_differentiable(mean, var)
        return torch.addcmul(bias, centred, weight), mean, var

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                mismatch(
                    "CountedBatchNorm: second derivatives are not available while training",
                    expected="backward() or autograd.grad() without create_graph",
                    got="create_graph=True",
                    mend="model.eval(), or norm='layer'",
                )
            )
        normalised, share, scale = ctx.saved_tensors
        grad_bias = gradient.sum(0)
        grad_weight = (gradient * normalised).sum(0)
        # g - c / n (sum of g + y times sum of g y), then the scale
        grad_rows = torch.addcmul(grad_bias, normalised, grad_weight)
        grad_rows *= share[:, None]
        torch.sub(gradient, grad_rows, out=grad_rows)
        grad_rows *= scale
        return grad_rows, None, grad_weight, grad_bias, None


def order_moments(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Moments:
    r"""Finds mean and variance of :math:`u_i + v_j` over all ordered pairs from atoms alone.

    With :math:`u` and :math:`v` centred, the variance is
    :math:`\big(\sum_i d_i (u_i^2 + v_i^2) + 2 \sum_i u_i \sum_{j \sim i} v_j\big) / n` for
    :math:`d_i` pairs at atom i and n ordered pairs.

    Args:
        parts: u and v side by side.
        pairs: The pairs, not none of them.

    Returns:
        Mean, variance and number of ordered pairs.
    """
    with torch.autocast(parts.device.type, enabled=False):
        parts = _in_single(parts)
        share = pairs.ptr.diff().to(parts.dtype) / max(pairs.num_entries, 1)
        mean = share @ parts
        u, v = (parts - mean).chunk(2, 1)
        cross = (u * neighbour_sum(v, pairs)).sum(0) / max(pairs.num_entries, 1)
        var = share @ (u.square() + v.square()) + 2 * cross
    return mean[: u.size(1)] + mean[u.size(1) :], var.clamp(min=0), pairs.num_entries
