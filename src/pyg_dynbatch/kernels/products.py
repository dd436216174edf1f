"""Products of rows with a matrix, in the way that is fastest on the machine."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from pyg_dynbatch.core.native import fastest

HEIGHTS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Numbers of rows for which oneDNN generates kernels; a kernel for every size of a level would
take longer than the products, as generating one takes a millisecond."""

# From here on packing a matrix may cost less than it saves.
_LARGE_MATRIX, _MANY_ROWS = 2**17, 1024

_CHUNKS = (512, 64)
"""Numbers of rows for which oneDNN generates kernels of weight gradients."""


class RowProduct:
    """Multiply rows with one matrix, block by block: ``rows @ weight.t() + bias``."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        precision: torch.dtype | None = None,
        rows: int = 0,
    ) -> None:
        self.bias, self.result, self.precision = bias, weight.dtype, precision
        self.weight = weight if precision is None else weight.to(precision)
        self.packed = _pack(self.weight) if packs(self.weight, rows) else None
        # oneDNN computes products of low precision in any case, so they want the same heights.
        low = self.weight.dtype in (torch.bfloat16, torch.float16)
        self.padded = self.packed is not None or (weight.device.type == "cpu" and low)

    def __call__(self, rows: Tensor, first: int, size: int) -> Tensor:
        """Multiply ``rows[first : first + size]``."""
        taken = self._taken(rows, first, size)
        if self.packed is not None and taken.size(0) in HEIGHTS and taken.dtype == self.result:
            found = _multiply(taken, self.packed, self.bias)
        elif self.precision is not None:
            found = torch.mm(taken.to(self.precision), self.weight.t()).to(self.result)
            if self.bias is not None:
                found += self.bias
        elif self.bias is not None:
            found = torch.addmm(self.bias, taken, self.weight.t())
        else:
            found = torch.mm(taken, self.weight.t())
        return found if taken.size(0) == size else found[:size]

    def into(self, out: Tensor, rows: Tensor, first: int, size: int) -> None:
        """Write the product into existing rows."""
        if self.padded or self.precision is not None:
            out.copy_(self(rows, first, size))
        elif self.bias is not None:
            torch.addmm(self.bias, rows[first : first + size], self.weight.t(), out=out)
        else:
            torch.mm(rows[first : first + size], self.weight.t(), out=out)

    def _taken(self, rows: Tensor, first: int, size: int) -> Tensor:
        """The rows, and the rows after them up to the next height."""
        if self.padded:
            height = next((height for height in HEIGHTS if height >= size), size)
            if first + height <= rows.size(0):
                size = height
        return rows[first : first + size]


def packs(weight: Tensor, rows: int) -> bool:
    """Whether packing a matrix for oneDNN pays off for this many rows."""
    if weight.numel() < _LARGE_MATRIX or rows < _MANY_ROWS:
        return False
    return _uses_onednn(weight) and _packing_wins()


def _uses_onednn(like: Tensor) -> bool:
    """Whether oneDNN can multiply tensors like this one."""
    if like.device.type != "cpu" or like.dtype != torch.float32 or is_in_torch_dispatch_mode():
        return False
    backend, names = torch.backends.mkldnn, ("_linear_pointwise", "_reorder_linear_weight")
    enabled = bool(backend.enabled) and backend.is_available()
    return enabled and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), HEIGHTS[-1])
    return packed


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return found


def ones(*shape: int) -> Tensor:
    """Numbers for a race, whatever the default dtype and device are."""
    return torch.ones(shape, dtype=torch.float32, device="cpu")


@cache
def _packing_wins() -> bool:
    with torch.inference_mode():
        weight, bias, rows = (ones(*shape) for shape in ((750, 300), (750,), (_MANY_ROWS, 300)))

        def packed() -> None:
            found = _pack(weight)
            for block in rows.split(HEIGHTS[-1]):
                _multiply(block, found, bias)

        ways = {"packed": packed, "plain": lambda: torch.addmm(bias, rows, weight.t())}
        return fastest("large-products", ways) == "packed"


def weight_gradient(
    grads: Tensor, rows: Tensor, precision: torch.dtype | None, out: Tensor | None = None
) -> Tensor:
    """Compute ``grads.t() @ rows``, the gradient of a matrix over all rows it was used on."""
    if precision is not None:
        found = (grads.to(precision).t() @ rows.to(precision)).to(grads.dtype)
    elif grads.size(0) >= _CHUNKS[-1] and _uses_onednn(grads) and _transposed_wins():
        found = _in_chunks(grads, rows)
    else:
        return torch.mm(grads.t(), rows, out=out)
    return found if out is None else out.copy_(found)


def _in_chunks(grads: Tensor, rows: Tensor) -> Tensor:
    """Multiply with oneDNN, for a few numbers of rows only, as it builds a kernel for each."""
    end = grads.size(0) // _CHUNKS[-1] * _CHUNKS[-1]
    found, first = torch.mm(grads[end:].t(), rows[end:]), 0
    for size in _CHUNKS:
        while first + size <= end:
            chunk = slice(first, first + size)
            found += _multiply(grads[chunk].t(), rows[chunk].t())
            first += size
    return found


@cache
def _transposed_wins() -> bool:
    with torch.inference_mode():
        grads, rows = ones(_CHUNKS[0], 750), ones(_CHUNKS[0], 300)
        ways: dict[str, Callable[[], object]] = {"onednn": lambda: _in_chunks(grads, rows)}
        ways["blas"] = lambda: torch.mm(grads.t(), rows)
        return fastest("weight-gradients", ways) == "onednn"


def sum_rows(rows: Tensor) -> Tensor:
    """Sum rows by multiplying with ones, on CPUs twice as fast as ``sum``."""
    return torch.mv(rows.t(), rows.new_ones(rows.size(0)))
