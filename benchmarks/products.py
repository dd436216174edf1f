"""The bare matrix products that a binary Tree-LSTM classifier cannot do without."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.protocol import Stopwatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.nn.fused_gates import BLOCK, RowProduct


class Product(NamedTuple):
    """One product ``[rows, inner] x [inner, columns]``."""

    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def numbers(self) -> int:
        """Numbers read and written, each matrix once."""
        return self.rows * self.inner + self.inner * self.columns + self.rows * self.columns


@dataclass(frozen=True)
class Sizes:
    """Holds the widths of a Tree-LSTM classifier with ordered children.

    Args:
        embedding: Width of an input row.
        units: Width of the hidden row.
        classes: Number of classes.
        arity: Number of child places.
    """

    embedding: int
    units: int
    classes: int
    arity: int = 2

    @property
    def leaf_gates(self) -> int:
        """Columns of the product with the inputs: u, i, o."""
        return 3 * self.units

    @property
    def gates(self) -> int:
        """Columns of the product with the children: u, i, o, and a forget gate a child."""
        return (3 + self.arity) * self.units


class BareProducts:
    """Runs the matrix products of one mini-batch and nothing else.

    Forward: every leaf (once per occurrence) with the input weights; level by level, as the
    states of a level are not known before, the children's states with the hidden weights; all
    nodes with the classifier. Backward, for each of them the product for the gradient of its
    input and the one for that of its weights; those for the hidden weights are one product over
    all levels. Results go into memory that is there already, so no allocation is timed. Inner
    nodes have no input, as in sentiment trees.

    Args:
        schedule: Of the mini-batch, bottom-up with an arity.
        sizes: Widths of the model.
        device: Where to run.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
        >>> bare = BareProducts(schedule, Sizes(4, 2, 5), torch.device("cpu"))
        >>> [product.rows for product in bare.forward_products()]
        [2, 1, 3]
    """

    def __init__(self, schedule: Schedule, sizes: Sizes, device: torch.device) -> None:
        self.sizes = sizes
        self.levels = [step.size for step in schedule.steps]
        self.nodes = schedule.num_nodes
        generator = torch.Generator(device).manual_seed(0)

        def rows(count: int, width: int) -> Tensor:
            return torch.randn(count, width, device=device, generator=generator)

        leaves, inner = self.levels[0], self.nodes - self.levels[0]
        self.inputs, self.leaf_gates = rows(leaves, sizes.embedding), rows(leaves, sizes.leaf_gates)
        self.children = rows(inner, sizes.arity * sizes.units)
        self.gates = rows(inner, sizes.gates)
        self.hidden, self.logits = rows(self.nodes, sizes.units), rows(self.nodes, sizes.classes)
        self.weights = (
            rows(sizes.leaf_gates, sizes.embedding),
            rows(sizes.gates, sizes.arity * sizes.units),
            rows(sizes.classes, sizes.units),
        )
        self.results = [torch.empty_like(t) for t in (self.leaf_gates, self.gates, self.logits)]
        self.input_grads = [torch.empty_like(t) for t in (self.inputs, self.children, self.hidden)]
        self.weight_grads = [torch.empty_like(weight) for weight in self.weights]
        stops = torch.tensor(self.levels[1:], dtype=torch.int64).cumsum(0).tolist()
        self.stretches = list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []

    def forward_products(self) -> list[Product]:
        """Lists the products of the forward pass."""
        sizes = self.sizes
        return [
            Product(self.levels[0], sizes.embedding, sizes.leaf_gates),
            *(Product(size, sizes.arity * sizes.units, sizes.gates) for size in self.levels[1:]),
            Product(self.nodes, sizes.units, sizes.classes),
        ]

    def backward_products(self) -> list[Product]:
        """Lists the products of the backward pass."""
        sizes, inner = self.sizes, self.nodes - self.levels[0]
        forward = self.forward_products()
        return [
            *(Product(p.rows, p.columns, p.inner) for p in forward),
            Product(sizes.leaf_gates, self.levels[0], sizes.embedding),
            Product(sizes.gates, inner, sizes.arity * sizes.units),
            Product(sizes.classes, self.nodes, sizes.units),
        ]

    def forward(self) -> None:
        """Runs the products of the forward pass."""
        leaf, hidden, head = self.weights
        self._multiply(self.inputs, leaf, self.results[0], [(0, self.levels[0])])
        self._multiply(self.children, hidden, self.results[1], self.stretches)
        self._multiply(self.hidden, head, self.results[2], [(0, self.nodes)])

    def backward(self) -> None:
        """Runs the products of the backward pass."""
        leaf, hidden, head = self.weights
        self._multiply(self.logits, head.t(), self.input_grads[2], [(0, self.nodes)])
        torch.mm(self.logits.t(), self.hidden, out=self.weight_grads[2])
        self._multiply(self.gates, hidden.t(), self.input_grads[1], self.stretches[::-1])
        torch.mm(self.gates.t(), self.children, out=self.weight_grads[1])
        self._multiply(self.leaf_gates, leaf.t(), self.input_grads[0], [(0, self.levels[0])])
        torch.mm(self.leaf_gates.t(), self.inputs, out=self.weight_grads[0])

    def _multiply(
        self, rows: Tensor, weight: Tensor, out: Tensor, stretches: Sequence[tuple[int, int]]
    ) -> None:
        """Multiplies stretches of rows with a matrix ``[column, inner]``."""
        for start, stop in stretches:
            torch.mm(rows[start:stop], weight.t(), out=out[start:stop])

    def run(self, lap: Stopwatch) -> None:
        """Runs both passes, then the forward pass alone, under a stopwatch."""
        lap.skip()
        self.forward()
        lap("forward")
        self.backward()
        lap("backward")
        self.forward()
        lap("inference")


class PackedProducts(BareProducts):
    """Runs the same products, those with oneDNN that are faster so, in blocks of rows.

    A matrix is packed anew in every pass, as a training step changes it. Which of the products
    are faster is found out by a race when this is made; those for the gradients of weights stay
    as they are.

    Args:
        schedule: Of the mini-batch, bottom-up with an arity.
        sizes: Widths of the model.
        device: Where to run; there is nothing to pack but on CPUs.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
        >>> packed = PackedProducts(schedule, Sizes(4, 2, 5), torch.device("cpu"))
        >>> len(packed.faster)
        6
    """

    def __init__(self, schedule: Schedule, sizes: Sizes, device: torch.device) -> None:
        super().__init__(schedule, sizes, device)
        self.faster: dict[int, bool] = {}
        """Whether oneDNN won, by where the product of a matrix is written to."""
        self.forward()
        self.backward()

    def _multiply(
        self, rows: Tensor, weight: Tensor, out: Tensor, stretches: Sequence[tuple[int, int]]
    ) -> None:
        key = out.data_ptr()
        if key not in self.faster:
            self.faster[key] = self._race(rows, weight, out, stretches)
        if self.faster[key]:
            _packed(rows, weight, stretches)
        else:
            super()._multiply(rows, weight, out, stretches)

    def _race(
        self, rows: Tensor, weight: Tensor, out: Tensor, stretches: Sequence[tuple[int, int]]
    ) -> bool:
        """Runs both ways in turn and compares the best times."""
        best = [float("inf")] * 2
        for _ in range(4):
            for number in range(2):
                start = time.perf_counter()
                if number:
                    _packed(rows, weight, stretches)
                else:
                    super()._multiply(rows, weight, out, stretches)
                best[number] = min(best[number], time.perf_counter() - start)
        return best[1] < best[0]


def _packed(rows: Tensor, weight: Tensor, stretches: Sequence[tuple[int, int]]) -> None:
    product = RowProduct(weight, rows=rows.size(0))
    for start, stop in stretches:
        for first in range(start, stop, BLOCK):
            product(rows, first, min(BLOCK, stop - first))
