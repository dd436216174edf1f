"""The bare matrix products of a model: the work that no implementation can avoid."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import bench
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.products import BLOCK, Products, RowProduct, use_products


class Product(NamedTuple):
    """The products of one matrix with blocks of rows, each computed after the previous one."""

    levels: Sequence[int]  # rows of each block
    inner: int
    columns: int
    input_gradient: bool = True  # False where the rows are features without a gradient

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return sum(self.levels)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass."""
        return 2 * self.rows * self.inner * self.columns

    def bytes(self, blocks: Sequence[int]) -> int:
        """Count the bytes moved if each product reads and writes every matrix once."""
        rows, matrix = self.inner + self.columns, self.inner * self.columns
        return 4 * (sum(blocks) * rows + len(blocks) * matrix)


def work(products: Sequence[Product]) -> dict[str, int]:
    """Count the operations and bytes of both passes.

    In the backward pass, every product has one product per block for the gradient of its rows and
    a single one, over all blocks, for the gradient of its matrix.
    """
    return {
        "flops_forward": sum(p.flops for p in products),
        "bytes_forward": sum(p.bytes(p.levels) for p in products),
        "flops_backward": sum((1 + p.input_gradient) * p.flops for p in products),
        "bytes_backward": sum(
            p.bytes([p.rows]) + p.input_gradient * p.bytes(p.levels) for p in products
        ),
    }


def classifier_products(
    schedule: Levels, embedding: int, units: int, classes: int
) -> list[Product]:
    """List the products of a binary Tree-LSTM classifier, every leaf once per occurrence."""
    leaves, *levels = schedule.level_sizes
    return [
        Product([leaves], embedding, 3 * units),
        Product(levels, 2 * units, 5 * units),
        Product([schedule.num_nodes], units, classes),
    ]


class Part:
    """The matrices of one product and of its gradients; nothing is allocated when it runs."""

    def __init__(self, product: Product, device: torch.device, generator: torch.Generator) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        self.rows = draw(product.rows, product.inner)
        self.weight = draw(product.columns, product.inner)
        self.out = draw(product.rows, product.columns)
        self.weight_grad = torch.empty_like(self.weight)
        self.row_grad = torch.empty_like(self.rows) if product.input_gradient else None
        stops = torch.tensor(product.levels, dtype=torch.int64).cumsum(0).tolist()
        self.blocks = list(zip([0, *stops], stops, strict=False))

    def forward(self, start: int, stop: int) -> None:
        """Multiply a block of rows."""
        torch.mm(self.rows[start:stop], self.weight.t(), out=self.out[start:stop])

    def backward(self, start: int, stop: int) -> None:
        """Compute the gradient of a block of rows."""
        if self.row_grad is not None:
            torch.mm(self.out[start:stop], self.weight, out=self.row_grad[start:stop])


class BareProducts:
    """Run the products of one mini-batch, level by level, in preallocated memory."""

    def __init__(self, products: Sequence[Product], device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.parts = [Part(product, device, generator) for product in products]
        levels = max(len(part.blocks) for part in self.parts)
        self._calls = [
            (part, *part.blocks[level])
            for level in range(levels)
            for part in self.parts
            if level < len(part.blocks)
        ]

    def forward(self) -> None:
        """Run the products of the forward pass."""
        for part, start, stop in self._calls:
            part.forward(start, stop)

    def backward(self) -> None:
        """Run the products of the backward pass."""
        for part, start, stop in reversed(self._calls):
            part.backward(start, stop)
        for part in self.parts:
            torch.mm(part.out.t(), part.rows, out=part.weight_grad)

    def run(self, lap: bench.Stopwatch) -> None:
        """Time both passes, then the forward pass alone."""
        self.forward()
        lap("forward")
        self.backward()
        lap("backward")
        self.forward()
        lap("inference")


class PackedProducts(BareProducts):
    """Run the same products on a CPU, in blocks of rows, with oneDNN where that is faster.

    A trial run at construction decides for each product. Matrices are packed in every pass, because
    a training step changes them. Gradients of weights are computed as in the base class.
    """

    def __init__(self, products: Sequence[Product], device: torch.device) -> None:
        super().__init__(products, device)
        self.packed = {
            (number, backward): self._packed_wins(part, backward)
            for number, part in enumerate(self.parts)
            for backward in (False, True)
        }

    def forward(self) -> None:
        """Run the products of the forward pass."""
        for number, part in enumerate(self.parts):
            _multiply(part, False, self.packed[number, False])

    def backward(self) -> None:
        """Run the products of the backward pass."""
        for number, part in reversed(list(enumerate(self.parts))):
            _multiply(part, True, self.packed[number, True])
            torch.mm(part.out.t(), part.rows, out=part.weight_grad)

    def _packed_wins(self, part: Part, backward: bool) -> bool:
        """Run both versions in turn and compare their best times."""
        best = {False: float("inf"), True: float("inf")}
        for _ in range(4):
            for packed in best:
                start = time.perf_counter()
                _multiply(part, backward, packed)
                best[packed] = min(best[packed], time.perf_counter() - start)
        return best[True] < best[False]


def _multiply(part: Part, backward: bool, packed: bool) -> None:
    if not packed:
        for start, stop in part.blocks:
            (part.backward if backward else part.forward)(start, stop)
        return
    rows, weight = (part.out, part.weight.t()) if backward else (part.rows, part.weight)
    with use_products(Products(packed=True)):
        product = RowProduct(weight, rows=rows.size(0))
    for start, stop in part.blocks:
        for first in range(start, stop, BLOCK):
            product(rows, first, min(BLOCK, stop - first))
