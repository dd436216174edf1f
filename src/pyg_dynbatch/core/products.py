"""Products of rows with a matrix, by a fixed rule for each make of processor."""

import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

HEIGHTS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Numbers of rows for which oneDNN generates kernels; a kernel for every size of a level would
take longer than the products, as generating one takes a millisecond."""

BLOCK = HEIGHTS[-1]
"""Rows of one block on CPUs: what is computed from them stays in the second-level cache."""

# From here on packing a matrix may cost less than it saves.
_LARGE_MATRIX = 2**17
_MANY_ROWS = 1024

# Largest number of weights that the second-level cache holds beside a block of rows.
_STAYS_IN_CACHE = 2**18

_ALL = sys.maxsize

_CHUNKS = (512, 64)
"""Numbers of rows for which oneDNN generates kernels of weight gradients."""


@dataclass(frozen=True)
class Products:
    """Which products on CPUs are not left to the BLAS of torch.

    Args:
        packed: Whether oneDNN multiplies many rows with a large matrix, which it packs once; in
            float32, or in bfloat16 under autocast.
        chunked_gradients: Whether oneDNN computes the gradients of weights, some rows at a time.
        own_nodes: Schedules with fewer inner nodes are run by one call of C, with our own product.
        own_weights: So are all schedules of a recurrent matrix with fewer numbers than this.
        own_work: So are, even under autocast with bfloat16, those whose inner nodes times recurrent
            weights are fewer: they are computed in float32.
    """

    packed: bool = False
    chunked_gradients: bool = False
    own_nodes: int = 0
    own_weights: int = 0
    own_work: int = 0


# AMD EPYC (Zen 5, AVX-512), torch 2.13, one thread, a matrix of 750 x 300, microseconds: the best
# of 20 rounds in turn, the same within 3 % in a second process. From 250 x 100 to 1500 x 600, ours
# take 0.29 to 0.94 of MKL's time.
#
#                                   MKL
#   1,024 rows             packed  2,380       4,460
#   gradient of 512 rows   chunks  1,300       2,230
#
# Products in bfloat16, which torch leaves to oneDNN on all makes, on one thread of an AMD EPYC
# (Zen 4, AVX-512 with bf16) that others used, too, so that the figures are rough. With a matrix of
# 600 x 1500, packed once or at every call, 8 rows take 104 or 163 us, 128 rows 1,074 or 1,154 us,
# and packing takes 600 us. Blocks with products in bfloat16 take so much of the time of one call of
# C in float32, in training and in inference, by inner nodes times millions of recurrent weights:
#
#   work       150 units      300 units      600 units
#     7 m     1.61, 1.87     1.92, 2.31
#    27 m     0.94, 1.37     1.21, 1.58     1.01, 1.23
#    50 m     0.89, 1.04     1.05, 1.24
#   118 m     0.73, 0.81     0.71, 0.94     0.95, 0.98
#
# Intel Xeon (model 207, AVX-512 with bf16, without AMX), one thread, GFLOP/s with a matrix of
# 750 x 300 and one of 1500 x 600:
#
#               own, packed       MKL       oneDNN in bfloat16
#     8 rows     177, 105       71,  40          46, 54
#    32 rows     182, 156      149, 112          71, 72
#   128 rows     175, 169      154, 143          84, 81
#
# A Xeon with AMX had 160 with MKL and 1,050 in bfloat16.
MAKES = {
    "AuthenticAMD": Products(
        packed=True,
        chunked_gradients=True,
        own_nodes=_MANY_ROWS,
        own_weights=_STAYS_IN_CACHE,
        own_work=2**25,
    ),
    "GenuineIntel, amx_bf16": Products(own_nodes=_ALL),
    "GenuineIntel": Products(own_nodes=_ALL, own_work=_ALL),
}
"""The products of each make of processor that was measured, by what describes it in
``/proc/cpuinfo``; the first that fits. All others use plain torch."""

_asked_for: Products | None = None


def chosen_products() -> Products:
    """Return the products that were asked for, or those of the make of this processor."""
    return _products_of_make() if _asked_for is None else _asked_for


@contextmanager
def use_products(products: Products) -> Iterator[None]:
    """Compute as asked, on any processor and in the whole process, until the block is left.

    Two makes compute the same results up to rounding. Ask for ``Products()`` to leave all products
    to torch.

    Example:
        >>> with use_products(Products(packed=True)):
        ...     chosen_products()
        Products(packed=True, chunked_gradients=False, own_nodes=0, own_weights=0, own_work=0)
    """
    global _asked_for
    before = _asked_for
    _asked_for = products
    try:
        yield
    finally:
        _asked_for = before


def describe_products() -> str:
    """Say in one line which products are chosen, and why."""
    reason = f"the rule for {_make_of_processor()}" if _asked_for is None else "as asked for"
    return f"products   {chosen_products()}, {reason}"


@cache
def _products_of_make() -> Products:
    return MAKES.get(_make_of_processor(), Products())


def _make_of_processor() -> str:
    """Return the make of the processor, or "other makes" if it was not measured."""
    described = Path("/proc/cpuinfo")
    text = described.read_text("utf-8") if described.exists() else platform.processor()
    return next((make for make in MAKES if _describes(make, text)), "other makes")


def _describes(make: str, text: str) -> bool:
    return all(word in text for word in make.split(", "))


class RowProduct:
    """Multiply rows with one matrix, block by block: ``rows @ weight.t() + bias``."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        precision: torch.dtype | None = None,
        rows: int = 0,
    ) -> None:
        self.bias = bias
        self.result = weight.dtype
        self.precision = precision
        self.weight = weight if precision is None else weight.to(precision)
        self.packed = _pack(self.weight) if packs(self.weight, rows) else None
        # oneDNN computes products of low precision in any case, so they want the same heights.
        low = self.weight.dtype in (torch.bfloat16, torch.float16)
        self.padded = self.packed is not None or (weight.device.type == "cpu" and low)

    def __call__(self, rows: Tensor, first: int, size: int) -> Tensor:
        """Multiply ``rows[first : first + size]``."""
        taken = self._taken(rows, first, size)
        if self.packed is not None and taken.size(0) in HEIGHTS and taken.dtype == self.result:
            product = _multiply(taken, self.packed, self.bias)
        elif self.precision is not None:
            product = torch.mm(taken.to(self.precision), self.weight.t()).to(self.result)
            if self.bias is not None:
                product += self.bias
        elif self.bias is not None:
            product = torch.addmm(self.bias, taken, self.weight.t())
        else:
            product = torch.mm(taken, self.weight.t())
        return product if taken.size(0) == size else product[:size]

    def near(self, room: Tensor, rows: Tensor, first: int, size: int) -> Tensor:
        """Return the product, in ``room`` unless it must be copied to get there."""
        if self.padded:
            return self(rows, first, size)
        self.into(room, rows, first, size)
        return room

    def into(self, out: Tensor, rows: Tensor, first: int, size: int) -> None:
        """Write the product into existing rows."""
        if self.padded or out.dtype != self.weight.dtype:
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
    if weight.numel() < _LARGE_MATRIX or rows < _MANY_ROWS or not chosen_products().packed:
        return False
    return _uses_onednn(weight) and (weight.dtype == torch.float32 or _packs_half(weight))


def _uses_onednn(like: Tensor) -> bool:
    """Whether oneDNN can multiply tensors like this one."""
    if like.device.type != "cpu" or is_in_torch_dispatch_mode():
        return False
    backend = torch.backends.mkldnn
    if not bool(backend.enabled) or not backend.is_available():
        return False
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return all(hasattr(torch.ops.mkldnn, name) for name in names)


def _packs_half(weight: Tensor) -> bool:
    """Whether oneDNN multiplies matrices of bfloat16 on this processor, and this is one."""
    is_supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return weight.dtype == torch.bfloat16 and is_supported is not None and bool(is_supported())


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), HEIGHTS[-1])
    return packed


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def weight_gradient(
    grads: Tensor, rows: Tensor, precision: torch.dtype | None, out: Tensor | None = None
) -> Tensor:
    """Compute ``grads.t() @ rows``, the gradient of a matrix over all rows it was used on."""
    in_chunks = chosen_products().chunked_gradients and grads.size(0) >= _CHUNKS[-1]
    if precision is not None:
        gradient = (grads.to(precision).t() @ rows.to(precision)).to(grads.dtype)
    elif in_chunks and grads.dtype == torch.float32 and _uses_onednn(grads):
        gradient = _gradient_in_chunks(grads, rows)
    else:
        return torch.mm(grads.t(), rows, out=out)
    return gradient if out is None else out.copy_(gradient)


def _gradient_in_chunks(grads: Tensor, rows: Tensor) -> Tensor:
    """Compute ``grads.t() @ rows`` with oneDNN, as a sum over chunks of rows.

    It builds a kernel for each number of rows, so chunks have few sizes: first as many of 512 rows
    as there are, then of 64. The BLAS of torch multiplies what is left.
    """
    smallest = _CHUNKS[-1]
    end = grads.size(0) // smallest * smallest
    total = torch.mm(grads[end:].t(), rows[end:])
    first = 0
    for size in _CHUNKS:
        while first + size <= end:
            chunk = slice(first, first + size)
            total += _multiply(grads[chunk].t(), rows[chunk].t())
            first += size
    return total


def sum_rows(rows: Tensor) -> Tensor:
    """Sum rows by multiplying with ones, on CPUs twice as fast as ``sum``."""
    ones = rows.new_ones(1, rows.size(0))
    if rows.dtype == torch.bfloat16:
        return torch.mm(ones, rows)[0].float()
    return torch.mv(rows.t(), ones[0])
