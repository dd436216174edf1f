"""Random models: each example draws its own calls, sharing, lists and points where it reads."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dynbatch.autobatch import attend, emit, rows, total

WIDTH = 3

# Forms of torch functions by the ranks of their arguments; results of any rank up to 2.
UNARY: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "tanh": (1, torch.tanh), "sigmoid": (2, torch.sigmoid), "relu": (1, F.relu),
    "neg": (0, lambda x: -x), "abs": (1, abs), "softmax 0": (1, lambda x: x.softmax(0)),
    "softmax matrix": (2, lambda x: torch.softmax(x, 0)),
    "log_softmax": (2, lambda x: F.log_softmax(x, dim=0)),
    "cumsum": (1, lambda x: x.cumsum(0)), "flip": (1, lambda x: x.flip(0)),
    "sum": (1, lambda x: x.sum()), "sum matrix": (2, lambda x: x.sum(0)),
    "mean": (2, lambda x: x.mean()),
    "mean keepdim": (1, lambda x: x.mean(0, keepdim=True) + x), "amax": (2, lambda x: x.amax(1)),
    "max": (1, lambda x: x.max()), "max dim": (2, lambda x: x.max(0).values),
    "logsumexp": (2, lambda x: x.logsumexp(0)),
    "norm": (1, lambda x: (x * x + 1).sum().sqrt()), "var": (1, lambda x: x.var()),
    "clamp": (1, lambda x: x.clamp(-0.5, 0.5)), "pow": (1, lambda x: x**2),
    "rsub": (1, lambda x: 1 - x),
    "rdiv": (1, lambda x: 1 / (2 + x * x)), "view": (2, lambda x: x.contiguous().view(-1)[:WIDTH]),
    "reshape": (2, lambda x: x.reshape(WIDTH * WIDTH)[2 : 2 + WIDTH]), "t": (2, lambda x: x.t()),
    "T": (2, lambda x: x.T),
    "transpose": (2, lambda x: x.transpose(0, 1)), "permute": (2, lambda x: x.permute(1, 0)),
    "unsqueeze": (1, lambda x: x.unsqueeze(0) + x.unsqueeze(1)),
    "squeeze": (1, lambda x: x[None].squeeze(0)),
    "expand": (1, lambda x: x.expand(WIDTH, WIDTH)), "repeat": (1, lambda x: x.repeat(WIDTH, 1)),
    "row": (2, lambda x: x[1]), "column": (2, lambda x: x[:, 0]),
    "slice": (2, lambda x: x[..., 1:2].sum(1)),
    "item": (1, lambda x: x[-1]), "select": (2, lambda x: x.select(1, 0)),
    "narrow": (1, lambda x: x.narrow(0, 0, 2).sum()),
    "chunk": (2, lambda x: x.chunk(3)[1][0]), "split": (1, lambda x: torch.cat(x.split(1)[::-1])),
    "unbind": (2, lambda x: sum(x.unbind())), "iterate": (2, lambda x: [*x][2]),
    "diagonal": (2, lambda x: torch.diagonal(x)),
    "flatten": (2, lambda x: x.flatten()[3:6]), "sort": (1, lambda x: x.sort().values),
    "trace": (2, torch.trace),
    "layer_norm": (1, lambda x: F.layer_norm(x, (WIDTH,))), "prod": (1, lambda x: x.tanh().prod()),
    "cosine": (1, lambda x: F.cosine_similarity(x, x + 1, dim=0)),
    "where": (1, lambda x: torch.where(x > 0, x, 2 * x)),
    "any": (2, lambda x: torch.where((x > 1).any(0), x[0], -x[1])),
    "all": (1, lambda x: x.sum() * torch.all(x > -1)), "amin": (2, lambda x: x.amin(dim=-1)),
    "argmax": (2, lambda x: x[0] * x.argmax(1)), "argsort": (1, lambda x: x + x.argsort(0)),
    "topk": (2, lambda x: x.topk(1, 0).values[0]), "std": (1, lambda x: torch.std(x, 0)),
    "cumprod": (2, lambda x: x.tanh().cumprod(-2)), "glu": (1, lambda x: F.glu(x.repeat(2), 0)),
    "logcumsumexp": (1, lambda x: x.logcumsumexp(0)), "mT": (2, lambda x: x.mT),
    "normalize": (1, lambda x: F.normalize(x + 3, dim=0)), "adjoint": (2, torch.adjoint),
    "movedim": (2, lambda x: x.movedim(0, -1)), "swapaxes": (2, lambda x: x.swapaxes(0, 1)),
    "unflatten": (1, lambda x: x.unflatten(0, (WIDTH, 1)).sum(1)),
    "norm matrix": (2, lambda x: x.norm()), "remainder": (1, lambda x: x.remainder(2.0)),
}  # fmt: skip
BINARY: dict[str, tuple[int, int, Callable[[Any, Any], Any]]] = {
    "add": (1, 1, torch.add), "sub": (2, 2, lambda a, b: a - b), "mul": (1, 1, lambda a, b: a * b),
    "scalar": (0, 1, lambda a, b: a * b), "broadcast": (1, 2, lambda a, b: a + b),
    "minimum": (1, 1, torch.minimum),
    "maximum": (2, 1, torch.maximum), "dot": (1, 1, lambda a, b: a @ b),
    "mv": (2, 1, lambda a, b: a @ b),
    "vm": (1, 2, lambda a, b: a @ b), "mm": (2, 2, torch.matmul), "outer": (1, 1, torch.outer),
    "cat": (1, 1, lambda a, b: torch.cat([a, b])[1:4]),
    "cat last": (2, 2, lambda a, b: torch.cat((a, b), dim=-1)[:, 2:5]),
    "stack": (1, 1, lambda a, b: torch.stack([a, b, a])),
    "stack last": (1, 1, lambda a, b: torch.stack([a, b, b], dim=1)),
    "lerp": (1, 1, lambda a, b: torch.lerp(a, b, 0.3)),
    "where two": (1, 0, lambda a, b: torch.where(b > 0, a, -a)),
    "atan2": (1, 1, lambda a, b: torch.atan2(a, b + 3)), "inner": (1, 1, torch.inner),
    "logaddexp": (2, 1, torch.logaddexp), "hypot": (1, 1, lambda a, b: torch.hypot(a, b + 3)),
    "addcmul": (1, 1, lambda a, b: torch.addcmul(a, a, b, value=0.5)),
    "bmm": (2, 2, lambda a, b: torch.bmm(a[None], b[None])[0]),
    "less": (1, 2, lambda a, b: torch.where(a.lt(b) & (b != 0), a, b)),
    "keyword": (1, 1, lambda a, b: torch.add(input=a, other=b, alpha=2)),
    "attend": (1, 1, lambda a, b: attend(a, [a, b])),
    "total": (2, 2, lambda a, b: total([a, b, a])),
}  # fmt: skip


class Example(NamedTuple):
    """What one example is given, and the seed of its calls."""

    seed: int
    length: int
    vector: Tensor
    matrix: Tensor
    token: Tensor


class Cell(nn.Module):
    """A closed module with states in tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, left: Any, right: Any) -> tuple[Any, Any]:
        a, b = self.linear(torch.cat([left[0], right[0]])).chunk(2, 0)
        return torch.tanh(a), b.sigmoid() * left[1] + right[1]


class Gated(nn.Module):
    """Mixes what it is given along its first axis, behind a gate that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.full((1,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gate * x.softmax(0) + self.scale * x.flip(0)
        return x * (10 / x.norm()).clamp(max=1) if self.training else x


class Random(nn.Module):
    """Draws its calls from the seed of the example.

    Args:
        reads: How often the example decides by a value.
        peeks: How often it reads a value in vain, which forces a flush.
    """

    def __init__(self, reads: float = 0.0, peeks: float = 0.0) -> None:
        super().__init__()
        self.reads, self.peeks = reads, peeks
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.word, self.cell, self.gru = nn.Embedding(5, WIDTH), Cell(), nn.GRUCell(WIDTH, WIDTH)
        self.pair, self.weight = (
            nn.Bilinear(WIDTH, WIDTH, WIDTH),
            nn.Parameter(torch.randn(WIDTH, WIDTH)),
        )
        self.gated, self.prelu, self.rms = Gated(), nn.PReLU(WIDTH), nn.RMSNorm(WIDTH)
        self.groups, self.instances = nn.GroupNorm(1, WIDTH), nn.InstanceNorm1d(WIDTH, affine=True)
        self.lstm, self.rnn = nn.LSTM(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH, bidirectional=True)
        self.attention = nn.MultiheadAttention(WIDTH, 1)
        self.batch = nn.BatchNorm1d(WIDTH).eval()
        nn.init.normal_(self.batch.running_mean)  # type: ignore[arg-type]
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, example: Example) -> Any:
        draw, peek = random.Random(example.seed), random.Random(example.seed + 1)
        known: list[list[Any]] = [
            [example.vector.sum()],
            [example.vector, self.word(example.token)],
            [example.matrix],
        ]
        known[1] += rows(example.matrix)
        for _ in range(example.length):
            result = self.call(draw, known)
            # Sums that are zero but for rounding must not decide.
            if self.reads and draw.random() < self.reads and bool(result.sum() > 0.1):
                result = result * 2
            if result.dim() > 2 or result.shape != (WIDTH,) * result.dim():
                raise AssertionError(result.shape)
            known[result.dim()].append(torch.tanh(result))
            if peek.random() < self.peeks:
                peek.choice(known[peek.randrange(3)]).tolist()
        emit("vector", known[1][-1])
        return known[1][-1] + known[0][-1], (
            total(known[1]),
            {"matrix": known[2][-1].sum(0)},
            example.length,
        )

    def attend(self, x: Any) -> Any:
        rows = torch.stack([x, -x])
        return self.attention(rows, rows, rows, need_weights=False)[0][0]

    def call(self, draw: random.Random, known: list[list[Any]]) -> Any:
        kind = draw.random()
        vector = lambda: draw.choice(known[1])  # noqa: E731
        if kind < 0.45:
            rank, unary = UNARY[draw.choice(sorted(UNARY))]
            return unary(draw.choice(known[rank]))
        if kind < 0.75:
            left, right, binary = BINARY[draw.choice(sorted(BINARY))]
            return binary(draw.choice(known[left]), draw.choice(known[right]))
        if kind < 0.8:
            return total([vector() for _ in range(draw.randrange(4))], like=known[1][0])
        if kind < 0.85:
            return attend(vector(), [vector() for _ in range(draw.randrange(1, 5))])
        modules = [
            lambda: self.linear(vector()), lambda: self.norm(vector()),
            lambda: self.weight @ vector(),
            lambda: vector() + self.weight[1],
            lambda: self.cell((vector(), vector()), (vector(), vector()))[draw.randrange(2)],
            lambda: self.pair(vector(), vector()), lambda: F.linear(vector(), self.weight),
            lambda: self.gru(vector(), vector()),
            lambda: self.gated(vector()), lambda: self.gated(draw.choice(known[2])),
            lambda: self.prelu(draw.choice(known[2])), lambda: self.rms(vector()),
            lambda: self.groups(vector()[None])[0], lambda: self.instances(draw.choice(known[2])),
            lambda: self.lstm(torch.stack([vector() for _ in range(draw.randrange(1, 4))]))[0][-1],
            lambda: self.rnn(draw.choice(known[2]))[0].sum(0)[:WIDTH],
            lambda: self.attend(vector()),
            lambda: self.normed(vector()), lambda: self.batch(draw.choice(known[2])),
        ]  # fmt: skip
        return draw.choice(modules)()


def examples(
    seed: int, count: int, length: int, dtype: torch.dtype = torch.float64
) -> list[Example]:
    """Draw examples; some share their tensors."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    shared = normal(WIDTH), normal(WIDTH, WIDTH)
    return [
        Example(
            draw.randrange(2**30), draw.randrange(length + 1),
            shared[0] if draw.random() < 0.3 else normal(WIDTH),
            shared[1] if draw.random() < 0.3 else normal(WIDTH, WIDTH),
            torch.tensor(draw.randrange(5)),
        )
        for _ in range(count)
    ]  # fmt: skip


def gradients(model: nn.Module, given: list[Example], result: Any) -> list[Tensor | None]:
    """Gradients of a weighted sum of all results: of the parameters and of the examples."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor)]
    loss = sum(
        (leaf * torch.arange(1.0, leaf.numel() + 1, dtype=leaf.dtype).view(leaf.shape)).sum()
        for leaf in leaves
    )
    wanted = [
        *model.parameters(),
        *{id(t): t for e in given for t in (e.vector, e.matrix)}.values(),
    ]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))
