"""Gaussian histograms of atoms, and standardized descriptors of whole molecules."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function
from torch_geometric.nn.aggr import Aggregation

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.native import is_native, loaded_extension

_HALF_MEANS = (1.645, 1.080, 0.739, 0.468, 0.228)
_HALF_WIDTHS = (0.283, 0.170, 0.134, 0.118, 0.114)
MEANS = (*(-mean for mean in _HALF_MEANS), 0.0, *_HALF_MEANS[::-1])
WIDTHS = (*_HALF_WIDTHS, 0.114, *_HALF_WIDTHS[::-1])


class GaussianHistogramAggregation(Aggregation):
    r"""Sum, for each set, the memberships of its elements in eleven Gaussian bins.

    .. math::
        m_k(x) = \mathrm{softmax}_k\Big(-\tfrac12 \big(\tfrac{x - \mu_k}{\sigma_k}\big)^2\Big)

    These are Gaussian densities over their sum, but finite for any x: far outside, x belongs to the
    outermost bin. The bins divide a unit normal distribution into nearly equal parts, so inputs
    should be normalized. Memberships, eleven times as large as the inputs, are computed block by
    block, forward and backward.

    Args:
        block: Number of elements per block.

    Shape:
        - x: ``[element, feature]``, as for any aggregation of PyG with ``index`` or ``ptr``
        - returns: ``[set, feature * 11]``, the bins of one feature adjacent; zeros for an
          empty set

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856, for the idea; bins as in DeepChem's
        ``WeaveGather``.

    Example:
        >>> aggregation = GaussianHistogramAggregation()
        >>> x = torch.tensor([[0.0], [100.0]])
        >>> aggregation(x, torch.tensor([0, 0]))[0, [5, 10]].gt(0.7).tolist()
        [True, True]
    """

    mean: Tensor
    sharpness: Tensor

    def __init__(self, block: int = 64) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("mean", torch.tensor(MEANS)[:, None], persistent=False)
        # -(x - mean)^2 / (2 width^2) = -((x - mean) * sharpness)^2
        sharpness = torch.tensor(WIDTHS).reciprocal() * 0.5**0.5
        self.register_buffer("sharpness", sharpness[:, None], persistent=False)

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(MEANS)

    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
    ) -> Tensor:
        """Compute the histograms of all sets; without index and ptr there is one set."""
        if x.dim() != 2 or dim not in (-2, 0):
            problem = f"{type(self).__name__}: x has the wrong shape"
            got = f"x {[*x.shape]}, dim {dim}"
            raise mismatch(ValueError, problem, "x [element, feature], dim -2", got)
        # PyG's __call__ has set index or ptr, and dim_size.
        if index is None and ptr is not None:
            index = torch.repeat_interleave(ptr.diff(), output_size=x.size(0))
        x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        bins = (self.mean.to(x), self.sharpness.to(x))
        native = not torch.compiler.is_compiling() and is_native(x)
        return _Histogram.apply(x, index, dim_size, *bins, self.block, native)

    def __repr__(self) -> str:
        """Show the class."""
        return f"{type(self).__name__}()"


def _memberships(x: Tensor, mean: Tensor, sharpness: Tensor) -> Tensor:
    """Return ``[element, bin, feature]``, where the softmax runs along whole rows."""
    return ((x[:, None] - mean) * sharpness).square().neg().softmax(1)


class _Histogram(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        index: Tensor,
        num_sets: int,
        mean: Tensor,
        sharpness: Tensor,
        block: int,
        native: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, index, mean, sharpness)
        ctx.num_sets = num_sets
        ctx.block = block
        total = x.new_zeros(num_sets, mean.size(0), x.size(1))
        fits = index.dtype == torch.long and index.is_cpu and index.shape == x.shape[:1]
        if native and fits:
            x = x.resolve_neg().contiguous()
            index = index.contiguous()
            threads = torch.get_num_threads()
            loaded_extension().histogram(
                x, index, *x.shape, mean, sharpness, num_sets, total, threads
            )
        else:
            for rows, segment_ids in _blocks(x, index, block):
                _add_rows(total, segment_ids, _memberships(rows, mean, sharpness))
        return total.transpose(1, 2).reshape(num_sets, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, index, mean, sharpness = ctx.saved_tensors
        shaped = gradient.view(ctx.num_sets, x.size(1), mean.size(0)).transpose(1, 2).contiguous()
        grads = [
            _slope(part, mean, sharpness, shaped.index_select(0, segment_ids))
            for part, segment_ids in _blocks(x, index, ctx.block)
        ]
        return torch.cat(grads) if grads else torch.zeros_like(x), *[None] * 6


def _slope(x: Tensor, mean: Tensor, sharpness: Tensor, gradient: Tensor) -> Tensor:
    """Differentiate the weighted sum of memberships with respect to x; overwrites the weights."""
    distance = (x[:, None] - mean).mul_(sharpness)
    member = distance.square().neg_().softmax(1)
    weighted = gradient.mul_(member)
    weighted.addcmul_(member, weighted.sum(1, keepdim=True), value=-1)
    # The derivative of a logit is -2 distance sharpness; what is common to all bins cancels out.
    return weighted.mul_(distance).mul_(-2 * sharpness).sum(1)


def _blocks(x: Tensor, index: Tensor, block: int) -> Iterable[tuple[Tensor, Tensor]]:
    # One wide kernel is better than many narrow ones where caches are not the limit.
    block = block if x.device.type == "cpu" else 64 * block
    return zip(x.split(block), index.split(block), strict=True) if x.numel() else ()


def _add_rows(total: Tensor, segment_ids: Tensor, rows: Tensor) -> None:
    """Add rows to those of their sets; on GPUs with a matrix product, in a fixed order."""
    if total.device.type == "cpu":
        total.index_add_(0, segment_ids, rows)
        return
    sets = torch.arange(total.size(0), device=segment_ids.device)
    chosen = (sets[:, None] == segment_ids).to(rows.dtype)
    total.view(total.size(0), -1).addmm_(chosen, rows.view(rows.size(0), -1))


_LIMIT = 3.0
# A column that varies less than this, relative to its size, holds rounding errors of float32.
_LEAST_VARIATION = 1e-6


class StandardizedInputs(nn.Module):
    r"""Standardize every column, clip outliers, and replace unknown numbers by 0.

    .. math::
        z = \mathrm{clip}\left(\frac{x - \mu}{\sigma}, -3, 3\right), \qquad
        z = 0 \text{ where } x \text{ is NaN}

    Mean and deviation are measured once, on the training data, and are buffers. A column that is
    constant or always unknown has the deviation 0 and becomes 0, whatever its value.

    Args:
        num_inputs: Number of columns.

    Shape:
        - x: ``[row, input]``, NaN where unknown
        - returns: ``[row, input]``, finite

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
        """Measure mean and standard deviation of the finite numbers of every column."""
        if x.size(1) != self.num_inputs:
            problem = "StandardizedInputs: wrong number of columns"
            raise mismatch(ValueError, problem, self.num_inputs, x.size(1))
        # The squares of numbers that float32 can hold would overflow in float32.
        exact = x.double()
        exact = torch.where(exact.isfinite(), exact, torch.nan)
        mean = exact.nanmean(0).nan_to_num(0.0)
        deviation = (exact - mean).square().nanmean(0).nan_to_num(0.0).sqrt()
        size = torch.cat([exact.new_zeros(1, exact.size(1)), exact.abs().nan_to_num(0.0)]).amax(0)
        varies = deviation > (_LEAST_VARIATION * size).clamp(min=torch.finfo(torch.float32).tiny)
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(varies, deviation, torch.zeros_like(deviation)))

    def forward(self, x: Float[Tensor, "row input"]) -> Float[Tensor, "row input"]:
        """Standardize."""
        varies = self.deviation > 0
        # Unknown numbers become the mean, and deviations of 0 become 1, so that no NaN arises: it
        # would spread through gradients even if it is not selected.
        filled = torch.where(torch.isnan(x), self.mean, x)
        scaled = (filled - self.mean) / torch.where(varies, self.deviation, 1.0)
        return scaled.clamp(-_LIMIT, _LIMIT) * varies

    def extra_repr(self) -> str:
        """Show the number of columns."""
        return f"{self.num_inputs}"
