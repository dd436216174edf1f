"""Count the work of two weave modules, and run the matrix products of the factored form alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.products import Product
from benchmarks.protocol import Stopwatch

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class WeaveSizes:
    """Holds the sizes that decide what two weave modules cost.

    Args:
        atoms: Atoms of the mini-batch.
        pairs: Unordered pairs, atoms with themselves included.
        ordered: Ordered pairs.
        codes: Rows of the pair table.
        atom_in: Width of an atom row.
        pair_in: Width of a row of the pair table.
        units: All other widths.

    Example:
        >>> sizes = WeaveSizes(25, 325, 625, 46, 75, 14, 50)
        >>> sum(product.flops for product, _ in sizes.plain()) / 1e6
        30.6875
    """

    atoms: int
    pairs: int
    ordered: int
    codes: int
    atom_in: int
    pair_in: int
    units: int

    def plain(self) -> list[tuple[Product, bool]]:
        """Lists the products over all ordered pairs; with each, whether it reads raw features."""
        atoms, rows, d = self.atoms, self.ordered, self.units
        return [
            (Product(atoms, self.atom_in, d), True),
            (Product(rows, self.pair_in, 2 * d), True),
            (Product(rows, 2 * self.atom_in, d), True),
            (Product(rows, 2 * self.atom_in, d), True),
            (Product(atoms, 2 * d, d), False),
            (Product(rows, 2 * d, d), False),
            *self._last(rows),
        ]

    def factored(self) -> list[tuple[Product, bool]]:
        """Lists the products of the factored form, in which pairs count once and codes at all."""
        atoms, codes, d = self.atoms, self.codes, self.units
        return [
            (Product(atoms, self.atom_in, 3 * d), True),
            (Product(codes, self.pair_in, 2 * d), True),
            (Product(codes, d, d), False),
            (Product(atoms, codes, d), True),
            (Product(atoms, 2 * d, d), False),
            (Product(self.pairs, d, d), False),
            *self._last(self.pairs),
        ]

    def _last(self, rows: int) -> list[tuple[Product, bool]]:
        atoms, d = self.atoms, self.units
        return [
            (Product(atoms, d, d), False),
            (Product(rows, d, d), False),
            (Product(atoms, 2 * d, d), False),
        ]

    def least_bytes(self) -> int:
        """Counts what must move: atom rows and pair codes in, updated atom rows out."""
        return 4 * self.atoms * (self.atom_in + self.units) + self.pairs


def work(products: Sequence[tuple[Product, bool]]) -> dict[str, int]:
    """Counts operations, and bytes if every matrix of every product moves once.

    Args:
        products: Each with whether it reads raw features, whose gradient nobody wants.

    Returns:
        ``flops_forward``, ``bytes_forward``, ``flops_backward`` and ``bytes_backward``.

    Example:
        >>> work([(Product(2, 3, 4), True)])
        {'flops_forward': 48, 'bytes_forward': 104, 'flops_backward': 48, 'bytes_backward': 104}
    """
    # A product has a gradient for its weights and one for its input, of the same size each.
    times = [(product, 1 if raw else 2) for product, raw in products]
    return {
        "flops_forward": sum(product.flops for product, _ in times),
        "bytes_forward": sum(4 * product.numbers for product, _ in times),
        "flops_backward": sum(count * product.flops for product, count in times),
        "bytes_backward": sum(4 * count * product.numbers for product, count in times),
    }


class _Part(NamedTuple):
    """Holds the matrices of one product and of its gradients."""

    x: Tensor
    weight: Tensor
    grad: Tensor
    out: Tensor
    x_grad: Tensor
    weight_grad: Tensor
    raw: bool


class BareWeave:
    """Runs matrix products and nothing else, into memory that is there already.

    Args:
        products: Each with whether it reads raw features.
        device: Where to run.
    """

    def __init__(self, products: Sequence[tuple[Product, bool]], device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._parts = []
        for (rows, inner, columns), raw in products:
            x, weight, grad = (
                torch.randn(shape, device=device, generator=generator)
                for shape in ((rows, inner), (inner, columns), (rows, columns))
            )
            out, x_grad, weight_grad = (torch.empty_like(each) for each in (grad, x, weight))
            self._parts.append(_Part(x, weight, grad, out, x_grad, weight_grad, raw))

    def run(self, lap: Stopwatch) -> None:
        """Runs both passes, then the forward pass alone, under a stopwatch."""
        lap.skip()
        self._forward()
        lap(FORWARD)
        for part in reversed(self._parts):
            torch.mm(part.x.t(), part.grad, out=part.weight_grad)
            if not part.raw:
                torch.mm(part.grad, part.weight.t(), out=part.x_grad)
        lap(BACKWARD)
        self._forward()
        lap("inference")

    def _forward(self) -> None:
        for part in self._parts:
            torch.mm(part.x, part.weight, out=part.out)


class Machine:
    """Measures how fast the machine multiplies large matrices and moves memory.

    Args:
        device: What is measured.
        width: Rows and columns of the matrices.
        numbers: Numbers that are copied.
    """

    def __init__(self, device: torch.device, width: int = 768, numbers: int = 8_000_000) -> None:
        self.flops = Product(width, width, width).flops
        self.bytes = 2 * 4 * numbers
        self._matrix = torch.randn(width, width, device=device)
        self._product = torch.empty_like(self._matrix)
        self._source = torch.randn(numbers, device=device)
        self._target = torch.empty_like(self._source)

    def run(self, lap: Stopwatch) -> None:
        """Multiplies and copies under a stopwatch."""
        lap.skip()
        torch.mm(self._matrix, self._matrix, out=self._product)
        lap("multiply")
        self._target.copy_(self._source)
        lap("copy")

    def limit(self, seconds: dict[str, float], flops: float | int, moved: float | int) -> float:
        """Gives the least time for some work at the speeds measured.

        Args:
            seconds: Times of the two phases.
            flops: Operations.
            moved: Bytes.
        """
        multiply = flops * seconds["multiply"] / self.flops
        return max(multiply, moved * seconds["copy"] / self.bytes)
