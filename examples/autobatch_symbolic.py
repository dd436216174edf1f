"""Fit the constants of many different expressions at once, by gradient descent.

Symbolic regression proposes thousands of expressions, each a different tree with constants of its
own. `autobatch` evaluates all of them together; only how often each function is called differs.
"""

import random

import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch

FUNCTIONS = {"+": torch.add, "-": torch.sub, "*": torch.mul, "sin": torch.sin, "tanh": torch.tanh}


class Expression(nn.Module):
    """The value of one expression at all points; constants are rows of an embedding."""

    def __init__(self, num_constants: int, points: Tensor) -> None:
        super().__init__()
        self.constants = nn.Embedding(num_constants, 1)
        self.register_buffer("points", points)

    def value(self, tree: tuple) -> Tensor:
        """Evaluate a tree: ("x",), ("c", number) or (function, *trees)."""
        if tree[0] == "x":
            return self.points
        if tree[0] == "c":
            return self.constants(tree[1])
        return FUNCTIONS[tree[0]](*map(self.value, tree[1:]))

    def forward(self, tree: tuple) -> Tensor:
        """Return the values of the expression, ``[point]``."""
        return self.value(tree) + torch.zeros_like(self.points)


def draw(rng: random.Random, depth: int, number: list[int]) -> tuple:
    """Draw an expression; constants are numbered."""
    kind = rng.random()
    if depth == 0 or kind < 0.1:
        if rng.random() < 0.5:
            return ("x",)
        number[0] += 1
        return "c", torch.tensor(number[0] - 1)
    name = rng.choice(list(FUNCTIONS))
    parts = 1 if name in ("sin", "tanh") else 2
    return name, *(draw(rng, depth - 1, number) for _ in range(parts))


def problem(count: int, depth: int = 4) -> tuple[list[tuple], int, Tensor]:
    """Draw expressions; also return the number of their constants, and the points."""
    rng, number = random.Random(0), [0]
    trees = [("*", draw(rng, depth, number), draw(rng, depth - 1, number)) for _ in range(count)]
    return trees, number[0], torch.linspace(-2, 2, 32)


def main(count: int = 2000, steps: int = 40) -> float:
    """Fit values that the same expressions have with other constants; return the error left."""
    torch.manual_seed(0)
    trees, num_constants, points = problem(count)
    truth, plain = Expression(num_constants, points), Expression(num_constants, points)
    model = autobatch(plain)
    batch = model.collate(trees)  # the trees stay the same: recorded and scheduled once
    with torch.no_grad():
        target = autobatch(truth)(batch)
        plain.constants.weight.copy_(truth.constants.weight + 0.3 * torch.randn(num_constants, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(steps):
        error = (model(batch) - target).square().mean(1)
        optimizer.zero_grad()
        error.sum().backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"step {step:2}: median error {error.median():.5f}, mean {error.mean():.3f}")
    return float(error.detach().mean())


if __name__ == "__main__":
    main()
