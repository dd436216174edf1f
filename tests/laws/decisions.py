"""Random programs of loops, branches and stacks, and what they mean in plain Python."""

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyg_dynbatch import autobatch

WIDTH = 3


@contextmanager
def double_by_default() -> Iterator[None]:
    """Make new tensors double, as long as this lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Example(NamedTuple):
    """What one example is given, and the seed of its program."""

    program: int
    vector: Tensor
    count: Tensor


def plain_while(
    condition: Callable[..., Any], body: Callable[..., Any], state: Any, **_: Any
) -> Any:
    while bool(condition(*state)):
        state = body(*state)
    return state


def plain_cond(
    pred: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Any = ()
) -> Any:
    return true(*operands) if bool(pred) else false(*operands)


class PlainStack:
    """A list that is copied."""

    def __init__(self, like: Any, values: Sequence[Any] = ()) -> None:
        self.values = [*values]

    @classmethod
    def of(cls, values: Sequence[Any]) -> "PlainStack":
        return cls(None, values)

    def push(self, value: Any) -> "PlainStack":
        return PlainStack(None, [*self.values, value])

    def pop(self) -> tuple[Any, "PlainStack"]:
        return self.values[-1], PlainStack(None, self.values[:-1])

    def peek(self, depth: int) -> Any:
        return self.values[-1 - depth]

    @property
    def top(self) -> Any:
        return self.values[-1]

    @property
    def size(self) -> Tensor:
        return torch.tensor(len(self.values))


PLAIN = SimpleNamespace(while_loop=plain_while, cond=plain_cond, Stack=PlainStack)


Env = tuple[Any, ...]
"""What a program computes with: vectors v and w, a count n and a stack s."""


class Random(nn.Module):
    """Draws its program from the seed of the example.

    Args:
        ops: Loops, branches and stacks: those of autobatch, or ``PLAIN``.
        depth: How deep they are inside of each other.
    """

    def __init__(self, ops: Any = autobatch, depth: int = 3) -> None:
        super().__init__()
        self.ops = ops
        self.depth = depth
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pair = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.word = nn.Embedding(5, WIDTH)
        self.drop = nn.Dropout(1.0)  # which is certain
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, example: Example) -> Any:
        start = self.ops.cond(example.count > 2, lambda: self.bias, lambda: torch.ones(WIDTH))
        stack = self.ops.Stack(example.vector)
        if example.program % 2:
            stack = self.ops.Stack.of([self.word(example.count), example.vector])
        # Recorded values only: what is computed of a plain tensor and a parameter runs at once.
        env = (example.vector + 0.1 * start, start, example.count, stack)
        v, w, n, stack = self.run(example.program, env, self.depth)
        last = self.ops.cond(stack.size > 0, lambda: stack.top, lambda: self.bias)
        return v, w, n, last, stack.size

    def run(self, seed: int, env: Env, depth: int) -> Env:
        """Draw and run a few statements; nested ones only above depth 0."""
        draw = random.Random(seed)
        names = [*SIMPLE, *NESTED] if depth else [*SIMPLE]
        outer = env
        for _ in range(draw.randrange(1, 4)):
            name = draw.choice(names)
            inner = draw.randrange(2**30)
            if name in SIMPLE:
                env = SIMPLE[name](self, *env, outer)
            else:
                env = NESTED[name](self, env, inner, depth - 1)
        return env

    def program(self, seed: int, depth: int) -> Callable[..., Env]:
        return lambda *env: self.run(seed, env, depth)


def popped(m: Random, v: Any, w: Any, n: Any, s: Any, _: Env) -> Env:
    def pop() -> tuple[Any, Any]:
        x, rest = s.pop()
        return x * 0.7 + w, rest

    v, s = m.ops.cond(s.size > 0, pop, lambda: (v, s))
    return v.tanh(), w, n, s


def peeked(m: Random, v: Any, w: Any, n: Any, s: Any, _: Env) -> Env:
    w = m.ops.cond(s.size > 1, lambda: (s.peek(1) - w).tanh(), lambda: w * 0.9)
    return v, w, n, s


SIMPLE: dict[str, Callable[..., Env]] = {
    "linear": lambda m, v, w, n, s, _: (torch.tanh(m.linear(v)), w, n, s),
    "pair": lambda m, v, w, n, s, _: (torch.tanh(m.pair(v, w)), v, n, s),
    "parameter": lambda m, v, w, n, s, _: (v, (w + m.bias).sin(), n, s),
    "buffer": lambda m, v, w, n, s, _: (v, (w * m.shift).cos(), n, s),
    "number": lambda m, v, w, n, s, _: (v * torch.tensor(0.5) + n * 0.1, w, n, s),
    "captured": lambda m, v, w, n, s, outer: ((v + outer[0] * outer[1]).tanh(), w, n, s),
    "word": lambda m, v, w, n, s, _: (v + m.word(n % 5), w, n, s),
    "drop": lambda m, v, w, n, s, _: (v, w + m.drop(v), n, s),
    "count": lambda m, v, w, n, s, _: (v, w, (n * 2 + 1) % 5, s),
    "push": lambda m, v, w, n, s, _: (v, w, n, s.push(v * w + 0.3)),
    "restart": lambda m, v, w, n, s, _: (v, w, n, m.ops.Stack.of([v, w])),
    "parameter pushed": lambda m, v, w, n, s, _: (v, w, n, s.push(m.bias)),
    "detached": lambda m, v, w, n, s, _: (v, w + v.detach(), n, s),
    "popped": popped,
    "peeked": peeked,
    "total": lambda m, v, w, n, s, _: (autobatch.total([v, w, m.word(n)]).tanh(), w, n, s),
}


def counted(m: Random, env: Env, seed: int, depth: int) -> Env:
    """Run a program up to three times, as a count says."""
    body = m.program(seed, depth)
    _, _, count, _ = env
    most = count % 4
    v, w, n, s, _ = m.ops.while_loop(
        lambda v, w, n, s, i: i < most,
        lambda v, w, n, s, i: (*body(v, w, n, s), i + 1),
        (*env, torch.tensor(0)),
    )
    return v, w, n, s


def decided(m: Random, env: Env, seed: int, depth: int) -> Env:
    """Run a program up to three times, as its values say; the state is in a dictionary."""
    body = m.program(seed, depth)

    def goes_on(state: dict[str, Env], i: Any) -> Any:
        v, _, _, _ = state["env"]
        return (i < 3) & (v.sum() > 0.05 * i)

    def step(state: dict[str, Env], i: Any) -> tuple[dict[str, Env], Any]:
        return {"env": body(*state["env"])}, i + 1

    state, _ = m.ops.while_loop(goes_on, step, ({"env": env}, torch.tensor(0)))
    return state["env"]


def branched(m: Random, env: Env, seed: int, depth: int) -> Env:
    """Run one of two programs, as a vector or a count says."""
    v, _, n, _ = env
    condition = (v.sum() > 0.05)[None] if seed % 2 else n > 1
    return m.ops.cond(condition, m.program(seed, depth), m.program(seed + 1, 0), env)


NESTED = {"counted": counted, "decided": decided, "branched": branched}


def examples(seed: int, count: int, programs: int, grad: bool = True) -> list[Example]:
    """Draw examples of a few different programs."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    seeds = [draw.randrange(2**30) for _ in range(programs)]
    return [
        Example(
            draw.choice(seeds),
            torch.randn(WIDTH, generator=generator).requires_grad_(grad),
            torch.tensor(draw.randrange(5)),
        )
        for _ in range(count)
    ]


def collated(seed: int) -> bytes:
    """Record and schedule examples, for a different process."""
    torch.manual_seed(0)
    with double_by_default():
        model = autobatch.autobatch(Random())
        given = examples(seed, 6, 2, grad=False)
        return pickle.dumps(model.collate(given))
