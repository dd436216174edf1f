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

    def example(structure: int) -> Example:
        form = random.Random(structure)
        own = normal(WIDTH).requires_grad_(form.random() < 0.7)
        vectors = [form.choice([shared, own, normal(WIDTH)]) for _ in range(form.randrange(1, 4))]
        tokens = {name: torch.tensor(draw.randrange(5)) for name in "abc"[: form.randrange(1, 4)]}
        matrix = normal(WIDTH, WIDTH).requires_grad_(form.random() < 0.5)
        length = form.randrange(12)
        scale = form.choice([0.0, -0.0, 1.5])
        return Example(structure, length, vectors, matrix, tokens, scale)

    shared = normal(WIDTH).requires_grad_()
    return [example(draw.choice(structures)) for _ in range(count)]


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


def straight_models(reads: bool = False) -> tuple[AutoBatch, AutoBatch]:
    torch.manual_seed(0)
    model = Straight(reads).double()
    return autobatch(model, cache=True), autobatch(model)


def deciding_models() -> tuple[AutoBatch, AutoBatch]:
    torch.manual_seed(0)
    model = Deciding().double()
    plain = Deciding(decisions.PLAIN).double()
    plain.load_state_dict(model.state_dict())
    return autobatch(model, cache=True), autobatch(plain)


class Kind(NamedTuple):
    """A model with and without a cache, its examples, and how many of them must be replayed."""

    models: Callable[[], tuple[AutoBatch, AutoBatch]]
    examples: Callable[[int, Sequence[int], int], list[Any]]
    least_share_replayed: float


KINDS = {
    "straight": Kind(straight_models, straight, 0.9),
    "reading": Kind(partial(straight_models, reads=True), straight, 0.3),
    "deciding": Kind(deciding_models, deciding, 0.9),
}


def results_of(model: AutoBatch, result: Any) -> list[Tensor]:
    """List all tensors that a call returned or emitted."""
    emitted = [model.emitted[name] for name in sorted(model.emitted)]
    return [leaf for leaf in tree_leaves((result, emitted)) if isinstance(leaf, Tensor)]


def gradients_of(model: AutoBatch, results: list[Tensor], batch: list[Any]) -> list[Tensor]:
    """Return the gradients of a weighted sum of all results, for parameters and data."""
    loss = torch.zeros((), dtype=torch.float64)
    for values in results:
        if values.is_floating_point():
            weights = torch.arange(1.0, values.numel() + 1, dtype=values.dtype)
            loss = loss + (values * weights.view(values.shape)).sum()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.requires_grad]
    without_repeats = {id(leaf): leaf for leaf in data}.values()
    gradients = torch.autograd.grad(loss, [*trained, *without_repeats], allow_unused=True)
    zero = torch.zeros((), dtype=torch.float64)
    return [zero if gradient is None else gradient for gradient in gradients]


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    """Compare tensors; a zero without axes stands for a gradient of zeros."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        size = max(1.0, float(one.double().nan_to_num(0, 0, 0).abs().sum()))
        torch.testing.assert_close(
            one, other.expand_as(one), rtol=1e-9, atol=1e-10 * size, equal_nan=True
        )


def check(cached: AutoBatch, plain: AutoBatch, batch: list[Any], grad: bool) -> int:
    """Compare one batch with the plain loop; return how many examples were replayed."""
    with torch.set_grad_enabled(grad):
        result, session = cached._batched(batch)
        plain_result = plain(batch, batch=False)
    got = results_of(cached, result)
    expected = results_of(plain, plain_result)
    close(got, expected)
    if grad:
        close(gradients_of(cached, got, batch), gradients_of(plain, expected, batch))
    return session.replayed


def take_a_step(model: nn.Module, seed: int) -> None:
    """Move all weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.05 * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)


@double_by_default()
def share_replayed(kind: str, seeds: Sequence[int]) -> float:
    """Compare epochs of random programs; return the share of examples that were replayed."""
    cached, plain = KINDS[kind].models()
    distinct = {id(model.plain): model for model in (cached, plain)}.values()
    replayed, count = 0, 0
    for seed in seeds:
        structures = [random.Random(seed).randrange(2**20) for _ in range(5)]
        for epoch in range(3):
            for model in distinct:  # in one epoch a weight is frozen
                model.get_parameter("linear.weight").requires_grad_(epoch != 1)
            for grad in (True, False):
                batch = KINDS[kind].examples(10 * seed + epoch, structures, 12)
                replayed += check(cached, plain, batch, grad)
                count += len(batch)
            for model in distinct:
                take_a_step(model, seed)
    return replayed / count


LONG = partial(pytest.param, marks=pytest.mark.long)


@pytest.mark.parametrize("seeds", [range(5), LONG(range(1000, 1040))], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_programs_with_the_cache_equal_the_plain_loop(
    kind: str, seeds: Sequence[int], another_process: Executor
) -> None:
    share = another_process.submit(share_replayed, kind, seeds).result()
    assert share >= KINDS[kind].least_share_replayed
