"""Calls that come together run in one step: random programs, and the steps of known models."""

import random
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import AutoBatch, autobatch, fibers, total

# Each line of a body is a place of its own; {x} and {y} are values that it has.
ONE = [
    "torch.tanh({x})", "torch.sigmoid({x})", "m.one({x})", "m.two(torch.cat([{x}, {y}]))",
    "{x} + {y}", "{x} * {y}", "{x} - 0.5", "{x} * {y}.sum()", "total([{x}, {y}, {x}])",
]  # fmt: skip
TWO = ["m.four({x}).chunk(2)", "torch.cat([{x}, {y}]).split(4)", "m.cell({x}, ({y}, {x}))"]


def random_body(draw: random.Random) -> Callable[..., list[Tensor]]:
    """Draw a function of two vectors whose code is a few lines, some of which read a number."""
    names, lines = ["a", "b"], ["def body(m, a, b):"]
    for number in range(1 + draw.randrange(9)):
        made = [f"v{number}", f"w{number}"][: 1 + (draw.random() < 0.3)]
        called = draw.choice(ONE if len(made) == 1 else TWO)
        x, y = (draw.choice(names[-4:]) for _ in "xy")
        read = f" * {x}.sum().item()" * (len(made) == 1 and draw.random() < 0.04)
        lines.append(f"{', '.join(made)} = {called.format(x=x, y=y)}{read}")
        names += made
    kept = draw.sample(names[2:], min(len(names) - 2, 1 + draw.randrange(3)))
    lines.append(f"return [{', '.join(f'torch.tanh({name})' for name in kept)}]")
    found: dict[str, Any] = {"torch": torch, "total": total}
    exec(compile("\n    ".join(lines), f"body {draw.random()}", "exec"), found)
    return found["body"]  # type: ignore[no-any-return]


class Program(nn.Module):
    """Applies bodies to values that it keeps, drops, and reads now and then."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.one, self.two, self.four = nn.Linear(4, 4), nn.Linear(8, 4), nn.Linear(4, 8)
        self.cell = nn.LSTMCell(4, 4)
        self.bodies = [random_body(draw) for _ in range(1 + draw.randrange(3))]
        self.drops, self.reads = draw.random(), draw.choice([0.0, 0.2])

    def forward(self, example: tuple[int, Tensor]) -> Tensor:
        draw, states = random.Random(example[0]), [*example[1]]
        for _ in range(draw.randrange(9)):
            states += draw.choice(self.bodies)(self, draw.choice(states), draw.choice(states))
            while len(states) > 1 and draw.random() < self.drops:
                del states[draw.randrange(len(states))]
            if draw.random() < self.reads:
                draw.choice(states).tolist()
        return states[0] + states[-1]


def check(seed: int) -> AutoBatch:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, given = autobatch(Program(draw).double()), list[tuple[int, Tensor]]()
    for _ in range(1 + draw.randrange(5)):
        rows = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
        given.append((draw.randrange(2**20), rows))
    wanted, found = [*model.parameters(), *(rows for _, rows in given)], []
    for batch in (False, True):
        with mock.patch.object(fibers, "greenlet", fibers.greenlet if seed % 4 else None):
            result = model(given, batch=batch)
        gradients = torch.autograd.grad(result.square().sum(), wanted, allow_unused=True)
        zeros = (torch.zeros_like(each) for each in wanted)
        found.append(
            [result, *(z if g is None else g for g, z in zip(gradients, zeros, strict=True))]
        )
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    return model


def check_many(seeds: range) -> None:
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_values_and_gradients_are_those_of_single_calls() -> None:
    check_many(range(15))


@pytest.mark.long
def test_values_and_gradients_of_many_programs_are_those_of_single_calls(
    another_process: Executor,
) -> None:
    another_process.submit(check_many, range(600)).result()


class Trees(nn.Module):
    """A plain Tree-LSTM, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.leaf = nn.Embedding(9, 4), nn.Linear(4, 8)
        self.gates, self.head = nn.Linear(8, 20), nn.Linear(4, 3)

    def state(self, tree: Any) -> Any:
        if isinstance(tree, int):
            h, c = self.leaf(self.words(torch.tensor(tree))).chunk(2)
            return torch.tanh(h), c
        (h1, c1), (h2, c2) = map(self.state, tree)
        i, f, g, o, u = self.gates(torch.cat([h1, h2])).chunk(5)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * c1 + g.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c

    def forward(self, tree: Any) -> Tensor:
        return self.head(self.state(tree)[0])


def tree(draw: random.Random, leaves: int) -> Any:
    left = draw.choice([1, leaves // 2, draw.randrange(1, max(leaves, 2))])
    return draw.randrange(9) if leaves < 2 else (tree(draw, left), tree(draw, leaves - left))


def height(tree: Any) -> int:
    return 0 if isinstance(tree, int) else 1 + max(map(height, tree))


@pytest.mark.parametrize("seed", range(5))
def test_a_plain_tree_lstm_is_one_step_per_level(seed: int) -> None:
    draw = random.Random(seed)
    trees = [tree(draw, draw.randrange(1, 20)) for _ in range(6)]
    model, levels = autobatch(Trees()), max(map(height, trees))
    found = {op.name: op.steps for op in model.explain(trees).operations}
    assert found["leaf"] == 1
    # The last call of each tree may run in the step of the head.
    assert model.explain(trees).steps in (levels + 1, levels + 2)


class Sequence(nn.Module):
    """A recurrence that reads a projection of each word, and whose states are read in between."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.state = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, words: Tensor) -> Tensor:
        state, seen = torch.zeros(4), list[Tensor]()
        for word in words:
            inner = self.state(state) + self.words(word)
            state = torch.tanh(inner)
            seen.append(inner)
        return total(seen)


def test_a_projection_outside_the_recursion_runs_once() -> None:
    found = autobatch(Sequence()).explain([torch.randn(length, 3) for length in (3, 9, 20)])
    steps = {op.name: op.steps for op in found.operations}
    # The projections, one step for each of 20 levels, and the sums, unless they are fused.
    assert (steps["words"], steps["state"]) == (1, 20) and found.steps <= 22
