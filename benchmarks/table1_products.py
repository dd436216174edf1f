"""The bare matrix products of one cell, level by level."""

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.protocol import Stopwatch
from pyg_dynbatch.core.schedule import Schedule


class LevelProducts:
    """Runs the matrix products of one mini-batch and nothing else.

    Forward: leaves at once, then each level through a chain of matrices. Backward: for each of
    these products that for the gradient of its rows, and for each matrix one product over all
    levels for the gradient of its weights. Results go into memory that is there already.

    Args:
        schedule: Of the mini-batch; the first step are the leaves.
        chain: Widths of each matrix of the cell, rows in and rows out.
        leaf: Widths of the matrix of leaves; nothing where leaves have no product.
        device: Where to run.

    Example:
        >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
        >>> bare = LevelProducts(schedule, [(4, 2), (2, 8)], None, torch.device("cpu"))
        >>> bare.flops
        48
    """

    def __init__(
        self,
        schedule: Schedule,
        chain: Sequence[tuple[int, int]],
        leaf: tuple[int, int] | None,
        device: torch.device,
    ) -> None:
        sizes = [step.size for step in schedule.steps]
        generator = torch.Generator(device).manual_seed(0)

        def rows(count: int, width: int) -> Tensor:
            return torch.randn(count, width, device=device, generator=generator)

        inner = sum(sizes[1:])
        stops = torch.tensor(sizes[1:], dtype=torch.int64).cumsum(0).tolist()
        levels = list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []
        given = [] if leaf is None else [(sizes[0], [(0, sizes[0])], leaf)]
        given += [(inner, levels, widths) for widths in chain]
        self.parts = [
            _Part(rows(wide, inside), rows(inside, outside), rows(wide, outside), places)
            for wide, places, (inside, outside) in given
        ]
        self.leading = 0 if leaf is None else 1
        self.flops = sum(2 * wide * inside * outside for wide, _, (inside, outside) in given)
        """Multiplications and additions of the forward pass; those of the backward pass are
        twice as many."""

    def run(self, lap: Stopwatch) -> None:
        """Runs both passes, then the forward pass alone, under a stopwatch."""
        lap.skip()
        self._forward()
        lap("forward")
        self._backward()
        lap("backward")
        self._forward()
        lap("inference")

    def _forward(self) -> None:
        for part in self.parts[: self.leading]:
            part.forward(0)
        chain = self.parts[self.leading :]
        for level in range(len(chain[0].levels)):
            for part in chain:
                part.forward(level)

    def _backward(self) -> None:
        chain = self.parts[self.leading :]
        for level in reversed(range(len(chain[0].levels))):
            for part in reversed(chain):
                part.backward(level)
        for part in self.parts[: self.leading]:
            part.backward(0)
        for part in self.parts:
            torch.mm(part.rows.t(), part.results, out=part.weight_grad)


class _Part:
    """One matrix, and the rows of all levels before and behind it."""

    def __init__(
        self, rows: Tensor, weight: Tensor, results: Tensor, levels: list[tuple[int, int]]
    ) -> None:
        self.rows, self.weight, self.results, self.levels = rows, weight, results, levels
        self.row_grads, self.weight_grad = torch.empty_like(rows), torch.empty_like(weight)

    def forward(self, level: int) -> None:
        start, stop = self.levels[level]
        torch.mm(self.rows[start:stop], self.weight, out=self.results[start:stop])

    def backward(self, level: int) -> None:
        start, stop = self.levels[level]
        torch.mm(self.results[start:stop], self.weight.t(), out=self.row_grads[start:stop])
