"""Fit the constants of many different expressions at once, by gradient descent.

    python examples/autobatch_symbolic.py

Symbolic regression proposes thousands of expressions, each a different tree with constants of its
own. `autobatch` evaluates all of them together; only how often each function is called differs.
"""

import random
from collections.abc import Iterator
from itertools import count
from time import perf_counter

import torch
from jsonargparse import auto_cli
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch

FUNCTIONS = {"+": torch.add, "-": torch.sub, "*": torch.mul, "sin": torch.sin, "tanh": torch.tanh}


class Expression(nn.Module):
    """The value of one expression at all points; constants are rows of an embedding."""

    def __init__(self, num_constants: int, points: Tensor) -> None:
        super().__init__()
        self.constants = nn.Embedding(num_constants, 1)
        self.points = (
            points  # not a buffer: batches that are collated keep a plain attribute as data
        )

    def forward(self, tree: tuple) -> Tensor:
        """Evaluate a tree: ("x",), ("c", number) or (function, *trees)."""
        name, *parts = tree
        if name == "x":
            return self.points
        if name == "c":
            return self.constants(*parts).expand_as(self.points)
        return FUNCTIONS[name](*[self.forward(part) for part in parts])


def draw(rng: random.Random, depth: int, numbers: Iterator[int]) -> tuple:
    """Draw an expression; its constants are numbered."""
    if depth == 0 or rng.random() < 0.1:
        return ("x",) if rng.random() < 0.5 else ("c", torch.tensor(next(numbers)))
    name = rng.choice(list(FUNCTIONS))
    parts = 1 if name in ("sin", "tanh") else 2
    return name, *(draw(rng, depth - 1, numbers) for _ in range(parts))


def main(expressions: int = 2000, steps: int = 40) -> None:
    """Fit values that the same expressions have with other constants."""
    torch.manual_seed(0)
    rng = random.Random(0)
    numbers = count()
    points = torch.linspace(-2, 2, 32)
    trees = [draw(rng, depth=5, numbers=numbers) for _ in range(expressions)]
    num_constants = next(numbers)
    truth = Expression(num_constants, points)
    plain = Expression(num_constants, points)
    model = autobatch(plain)
    batch = model.collate(trees)  # the trees stay the same: recorded and scheduled once
    with torch.no_grad():
        target = autobatch(truth)(batch)
        plain.constants.weight.copy_(truth.constants.weight + 0.3 * torch.randn(num_constants, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    start = perf_counter()
    for step in range(steps):
        errors = (model(batch) - target).square().mean(1)
        optimizer.zero_grad()
        errors.sum().backward()
        optimizer.step()
        if step in (0, steps - 1):
            small = (errors < 1e-3).float().mean()
            print(f"step {step:2}: median error {errors.median():.5f}, mean {errors.mean():.3f}")
            print(f"  share of errors below 0.001: {small:.3f}")
    together = (perf_counter() - start) / steps
    start = perf_counter()
    (model(trees[:100], batch=False) - target[:100]).square().mean(1).sum().backward()
    alone = (perf_counter() - start) / 100 * expressions
    print(f"seconds per step: {together:.3f}, in a loop over expressions {alone:.3f}")


if __name__ == "__main__":
    auto_cli(main)
