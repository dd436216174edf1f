"""Law of the cache: with it a model gives what the plain loop gives, in values and gradients.

The program of an example is drawn from its seed, which is part of its structure, so that its
recording is kept. Its tensors are data, and are others in each epoch.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import AutoBatch, attend, autobatch, emit, rows, total
from tests.autobatch import programs
from tests.autobatch.programs import WIDTH
from tests.laws import decisions
from tests.laws.decisions import double_by_default

# torch.vmap has no batching rule for attention without weights.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class Example(NamedTuple):
    """What one example is given: its program, and its data in a structure."""

    seed: int
    length: int
    vectors: list[Tensor]
    matrix: Tensor
    tokens: dict[str, Tensor]
    scale: float


class Straight(programs.Random):
    """Draws its calls as its base class does, but computes nothing at once.

    Args:
        reads: Whether every second program decides by its values.
    """

    def __init__(self, reads: bool = False) -> None:
        super().__init__(reads)
        self.points = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)  # a plain attribute

    def forward(self, example: Example) -> Any:
        draw = random.Random(example.seed)
        first = self.linear(example.vectors[0])
        dtype = first.dtype
        known: list[list[Any]] = [
            [first.sum(), first[0] * draw.choice([*example.tokens.values()])],
            [first, *map(self.word, example.tokens.values())],
            [torch.outer(first, first) + example.matrix],
        ]
        for x in (*example.vectors, *rows(example.matrix), self.points):
            known[1].append(draw.choice(MIXED)(self, x, first))
        constant = torch.tensor([0.1, example.scale, float(example.length)], dtype=dtype)
        known[1].append(constant - first)
        known[1].append(first * self.weight[draw.randrange(WIDTH)] + torch.arange(WIDTH))
        for _ in range(example.length):
            result = self.call(draw, known)
            # Sums that are zero but for rounding must not decide.
            if self.reads and example.seed % 2 and bool(result.sum() > 0.1):
                result = result * 2
            known[result.dim()].append(torch.tanh(result))
        for value in known[1][: draw.randrange(3)]:
            emit("vector", value)
        everything = total([*known[1], first]), {"matrix": known[2][-1].sum(0)}
        return known[1][-1] + first, everything, example.length


# A row from outside beside a value.
MIXED: list[Callable[[Any, Any, Any], Any]] = [
    lambda m, x, y: x + y,
    lambda m, x, y: m.linear(x) * y,
    lambda m, x, y: torch.stack([x, y, x]).sum(0),
    lambda m, x, y: total([x, y, x]),
    lambda m, x, y: attend(y, [x, y]),
    lambda m, x, y: m.gru(x, y),
    lambda m, x, y: torch.cat([x, y])[1:4] * torch.ones_like(x),
]


def straight(seed: int, structures: Sequence[int], count: int) -> list[Example]:
    """Draw examples of some structures; some share tensors, within an example too."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shared = normal(WIDTH).requires_grad_()
    found = list[Example]()
    for _ in range(count):
        structure = draw.choice(structures)
        form = random.Random(structure)
        own = normal(WIDTH).requires_grad_(form.random() < 0.7)
        vectors = [form.choice([shared, own, normal(WIDTH)]) for _ in range(form.randrange(1, 4))]
        tokens = {name: torch.tensor(draw.randrange(5)) for name in "abc"[: form.randrange(1, 4)]}
        matrix = normal(WIDTH, WIDTH).requires_grad_(form.random() < 0.5)
        length, scale = form.randrange(12), form.choice([0.0, -0.0, 1.5])
        found.append(Example(structure, length, vectors, matrix, tokens, scale))
    return found


class Deciding(decisions.Random):
    """Loops, branches and stacks, of recorded values only."""

    def forward(self, example: decisions.Example) -> Any:
        count = self.ops.Stack.of([example.count]).top
        return super().forward(example._replace(count=count))


def deciding(seed: int, structures: Sequence[int], count: int) -> list[decisions.Example]:
    """Draw examples of some programs."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [
        decisions.Example(
            draw.choice(structures),
            torch.randn(WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),
            torch.tensor(draw.randrange(5)),
        )
        for _ in range(count)
    ]


def outcome(model: Any, result: Any, given: Any, weigh: bool) -> list[Any]:
    """List results, what was emitted, and the gradients of a weighted sum of all results."""
    emitted = [model.emitted[name] for name in sorted(model.emitted)]
    leaves = [leaf for leaf in tree_leaves((result, emitted)) if isinstance(leaf, Tensor)]
    if not weigh:
        return leaves
    weighted = [
        (leaf * torch.arange(1.0, leaf.numel() + 1, dtype=leaf.dtype).view(leaf.shape)).sum()
        for leaf in leaves
        if leaf.is_floating_point()
    ]
    trained = [p for p in model.parameters() if p.requires_grad]
    data = [t for t in tree_leaves(given) if isinstance(t, Tensor) and t.requires_grad]
    wanted = [*trained, *{id(t): t for t in data}.values()]
    found = torch.autograd.grad(sum(weighted), wanted, allow_unused=True)
    zero = torch.zeros((), dtype=torch.float64)
    return [*leaves, *(zero if gradient is None else gradient for gradient in found)]


def compare(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        size = max(1.0, float(mine.double().nan_to_num(0, 0, 0).abs().sum()))
        torch.testing.assert_close(
            mine, other.expand_as(mine), rtol=1e-9, atol=1e-10 * size, equal_nan=True
        )


def move(model: nn.Module, seed: int) -> None:
    """Take a step with all weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.05 * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)


def straight_models(reads: bool = False) -> tuple[AutoBatch, AutoBatch]:
    torch.manual_seed(0)
    model = Straight(reads).double()
    return autobatch(model, cache=True), autobatch(model)


def deciding_models() -> tuple[AutoBatch, AutoBatch]:
    torch.manual_seed(0)
    model, plain = Deciding().double(), Deciding(decisions.PLAIN).double()
    plain.load_state_dict(model.state_dict())
    return autobatch(model, cache=True), autobatch(plain)


# The models, the examples, and the least share of examples that are replayed.
KINDS: dict[str, tuple[Any, Any, float]] = {
    "straight": (straight_models, straight, 0.9),
    "reading": (partial(straight_models, True), straight, 0.3),
    "deciding": (deciding_models, deciding, 0.9),
}


@double_by_default()
def check_many(kind: str, seeds: Sequence[int]) -> float:
    """Compare epochs of random programs; return the share of examples that were replayed."""
    make, draw, _ = KINDS[kind]
    cached, plain = make()
    replayed, count = 0, 0
    for seed in seeds:
        structures = [random.Random(seed).randrange(2**20) for _ in range(5)]
        for epoch in range(3):
            frozen = [model.get_parameter("linear.weight") for model in (cached, plain)]
            for weight in frozen:
                weight.requires_grad_(epoch != 1)
            for grad in (True, False):
                given = draw(10 * seed + epoch, structures, 12)
                with torch.set_grad_enabled(grad):
                    result, session = cached._batched(given)
                    expected = plain(given, batch=False)
                replayed, count = replayed + session.replayed, count + len(given)
                compare(outcome(cached, result, given, grad), outcome(plain, expected, given, grad))
            for model in {id(each.plain): each for each in (cached, plain)}.values():
                move(model, seed)
    return replayed / count


@pytest.mark.parametrize("kind", KINDS)
def test_programs_with_the_cache_equal_the_plain_loop(kind: str, another_process: Executor) -> None:
    share = another_process.submit(check_many, kind, range(5)).result()
    assert share >= KINDS[kind][2]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_programs_with_the_cache_equal_the_plain_loop(
    kind: str, another_process: Executor
) -> None:
    share = another_process.submit(check_many, kind, range(1000, 1040)).result()
    assert share >= KINDS[kind][2]
