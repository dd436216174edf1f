"""Matrix products of a fused run: one matrix, packed once, times the rows of many steps."""

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_gates import finish_candidate

_HEIGHTS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Numbers of rows for which oneDNN makes kernels; one for every width of a level would cost more
than the product itself, as a kernel takes a millisecond to make."""

BLOCK = _HEIGHTS[-1]
"""Rows of one block on CPUs: their gates stay in the second-level cache."""

# From here on packing a matrix costs less than it saves.
_LARGE_MATRIX, _MANY_ROWS = 2**17, 1024


def _has_onednn() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )


class RowProduct:
    """Multiplies rows with one matrix, block by block: ``rows @ weight.t() + bias``.

    On CPUs large matrices in float32 go to oneDNN, packed once, which is up to 1.4 times as fast
    as the product of ``torch.mm`` and squashes on the way; a block is filled up to a few fixed
    heights with rows that happen to lie behind it. ``torch.backends.mkldnn.enabled = False``
    leaves every product to ``torch.mm``, or to the BLAS beneath it where C runs all levels at once.

    Args:
        weight: The matrix, ``[column, inner]``.
        bias: Added to every row; nothing where left out.
        candidate: How many of the first columns are squashed by tanh instead of the logistic
            function: as tanh(x) = 2 * sigmoid(2x) - 1, several times as fast as tanh on CPUs.
        precision: Type in which to multiply (autocast); that of the matrix where left out.
        rows: About how many rows there will be, to see whether packing pays.

    Example:
        >>> product = RowProduct(torch.ones(3, 2), torch.zeros(3))
        >>> product(torch.ones(5, 2), first=1, size=2)
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        candidate: int = 0,
        precision: torch.dtype | None = None,
        rows: int = 0,
    ) -> None:
        self.bias, self.result, self.precision = bias, weight.dtype, precision
        self.candidate, self.doubled = candidate, False
        self.weight = weight if precision is None else weight.to(precision)
        on_cpu = weight.device.type == "cpu"
        self.packed: Tensor | None = None
        if packs(self.weight, rows):
            if candidate and bias is not None:
                self.weight, self.bias = _doubled(weight, candidate), _doubled(bias, candidate)
                self.doubled = True
            weight = self.weight.contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK)
        # Products of low precision are made by oneDNN anyway, so they want the same heights.
        low = self.weight.dtype in (torch.bfloat16, torch.float16)
        self.padded = self.packed is not None or (on_cpu and low)

    def __call__(self, rows: Tensor, first: int, size: int, *, squash: bool = False) -> Tensor:
        """Multiplies ``rows[first : first + size]``.

        Args:
            rows: The rows, side by side; those behind may be read, and do not matter.
            first: The first row.
            size: How many.
            squash: Whether to squash as :meth:`squash` does.

        Returns:
            New rows ``[size, column]``.
        """
        taken = self._taken(rows, first, size)
        if self.packed is not None and taken.size(0) in _HEIGHTS and taken.dtype == self.result:
            kind = "sigmoid" if squash else "none"
            found = torch.ops.mkldnn._linear_pointwise(taken, self.packed, self.bias, kind, [], "")
            if squash and self.candidate:
                finish_candidate(found[:, : self.candidate])
            return found if taken.size(0) == size else found[:size]
        if self.precision is not None:
            found = torch.mm(taken.to(self.precision), self.weight.t()).to(self.result)
            if self.bias is not None:
                found += self.bias
        elif self.bias is not None:
            found = torch.addmm(self.bias, taken, self.weight.t())
        else:
            found = torch.mm(taken, self.weight.t())
        found = found if taken.size(0) == size else found[:size]
        if squash:
            self.squash(found)
        return found

    def squash(self, gates: Tensor) -> None:
        """Squashes products in place: the first columns by tanh, the others logistically.

        Args:
            gates: Products, perhaps with something added; if ``doubled``, twice that in the
                columns of the candidate.
        """
        first = gates[:, : self.candidate]
        if self.candidate and not self.doubled:
            first *= 2
        gates.sigmoid_()
        if self.candidate:
            finish_candidate(first)

    def into(self, out: Tensor, rows: Tensor, first: int, size: int) -> None:
        """Writes the product without bias into rows that are there already.

        Args:
            out: ``[size, column]``.
            rows: As for a call.
            first: The first row.
            size: How many.
        """
        if self.padded or self.precision is not None:
            out.copy_(self(rows, first, size))
        else:
            torch.mm(rows[first : first + size], self.weight.t(), out=out)

    def _taken(self, rows: Tensor, first: int, size: int) -> Tensor:
        """The rows, and as many behind them as the next height has and there are."""
        if self.padded:
            height = _height(size)
            if first + height <= rows.size(0):
                size = height
        return rows[first : first + size]


def packs(weight: Tensor, rows: int) -> bool:
    """Tells whether packing a matrix pays for about so many rows.

    Args:
        weight: The matrix.
        rows: How many rows there will be.

    Example:
        >>> packs(torch.zeros(3, 2), 1000)
        False
    """
    large = weight.numel() >= _LARGE_MATRIX and rows >= _MANY_ROWS
    single = weight.device.type == "cpu" and weight.dtype == torch.float32
    return large and single and _use_onednn()


def _doubled(rows: Tensor, first: int) -> Tensor:
    rows = rows.clone()
    rows[:first] *= 2
    return rows


def _use_onednn() -> bool:
    enabled: bool = torch.backends.mkldnn.enabled  # type: ignore[assignment]
    return enabled and _has_onednn()


def _height(size: int) -> int:
    """The next height, or the size itself beyond all of them."""
    return next((height for height in _HEIGHTS if height >= size), size)


def weight_gradient(
    grads: Tensor, rows: Tensor, precision: torch.dtype | None, out: Tensor | None = None
) -> Tensor:
    """Computes ``grads.t() @ rows``, the gradient of a matrix over all rows it was used on.

    Args:
        grads: Gradients of the products, ``[row, column]``.
        rows: What was multiplied, ``[row, inner]``.
        precision: Type in which to multiply (autocast); that of the rows where left out.
        out: Where to write it; new rows where left out.

    Returns:
        ``[column, inner]``, in the type of the gradients.

    Example:
        >>> weight_gradient(torch.ones(4, 1), torch.ones(4, 2), None)
        tensor([[4., 4.]])
    """
    if precision is None:
        return torch.mm(grads.t(), rows, out=out)
    found = (grads.to(precision).t() @ rows.to(precision)).to(grads.dtype)
    return found if out is None else out.copy_(found)


def sum_rows(rows: Tensor) -> Tensor:
    """Adds up rows by a product with ones, on CPUs twice as fast as ``sum``.

    Args:
        rows: ``[row, column]``.

    Returns:
        ``[column]``.

    Example:
        >>> sum_rows(torch.ones(3, 2))
        tensor([3., 3.])
    """
    return torch.mv(rows.t(), rows.new_ones(rows.size(0)))
