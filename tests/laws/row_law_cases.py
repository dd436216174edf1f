"""Functions of one row, half of which mix rows when they are called on stacked rows.

Each is wrong where today's values hide it: a gate of zero, a clamp that does not act, initial
weights, evaluation mode.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dynbatch.nn import ChildSumTreeLSTMCell, NaryTreeLSTMCell

GENERATOR = random.Random(0)


class Case(NamedTuple):
    """A module for one row.

    Args:
        make: Creates it.
        rows: Shape of each argument, or examples for integers.
        direct: Whether it may be called on stacked rows as it is.
        refused: Whether it is refused, or its inside is recorded, instead of ``torch.vmap``.
    """

    make: Callable[[], nn.Module]
    rows: tuple[Any, ...]
    direct: bool
    refused: bool = False


class Of(nn.Module):
    """A module from a function, with parts and a vector of parameters."""

    def __init__(self, function: Any, start: float = 1.0, **parts: Any) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.full((3,), start))
        self.register_buffer("mean", torch.zeros(3))
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *rows: Tensor) -> Any:
        return self.function(self, *rows)


class Custom(torch.autograd.Function):
    """Right in its values; its gradient mixes rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient - gradient.mean(0)


class Clipped(torch.autograd.Function):
    """Its gradient mixes rows where the norm of a gradient, or of an argument, is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        small = torch.clamp(1e3 / (gradient.norm() + 1e-9), max=1.0)
        return gradient * small / (1 + (ctx.saved_tensors[0].abs().amax() > 1e3))


class IfFinite(torch.autograd.Function):
    """Its gradient is zero if that of a row is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(torch.isfinite(gradient).all(), gradient, 0.0)


def seeded(_: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return x @ torch.randn(3, 3, generator=generator, dtype=x.dtype)


def forked(_: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return x @ torch.randn(3, 3, dtype=x.dtype)


def hooked_parameter(m: Any, x: Tensor) -> Tensor:
    weight = m.scale * 1
    weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return F.linear(x, weight[None])


def with_clipping_hook() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear.register_full_backward_hook(
        lambda m, given, _: (given[0] * torch.clamp(1e3 / given[0].norm(), max=1.0),)
    )
    return linear


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class EMA(nn.Module):
    """Changes a buffer, in place or by assignment."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.in_place:
                self.mean.mul_(0.9).add_(0.1 * x.detach())
            else:
                self.mean = 0.9 * self.mean + 0.1 * x.detach()
        return x - self.mean


def of(function: Any, *rows: Any, direct: bool, start: float = 1.0, **parts: Any) -> Case:
    made = {k: v for k, v in parts.items() if k != "refused"}
    return Case(
        lambda: Of(function, start, **{k: part() for k, part in made.items()}),
        rows or ((4, 3),),
        direct,
        bool(parts.get("refused")),
    )


def normalized(_: Any, x: Tensor) -> Tensor:
    e = (x - x.max()).exp()
    return e / e.sum(-1, keepdim=True)


def clipped(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    if m.training and y.abs().max() > 1:
        y = y / 10
    return y


def hooked(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    if y.requires_grad:
        y.register_hook(lambda g: g / (1 + g.norm()))
    return y.tanh()


def with_backward_hook() -> nn.Module:
    linear = nn.Linear(3, 3)
    linear.register_full_backward_hook(lambda m, given, _: tuple(g / (1 + g.norm()) for g in given))
    return linear


def gumbel_then_mean(m: Any, x: Tensor) -> Tensor:
    if m.training:
        x = x + 0 * F.gumbel_softmax(x, dim=-1)
        x = x - x.mean(0)
    return StraightThrough.apply(x) + x


def filled(_: Any, x: Tensor) -> Tensor:
    out = torch.zeros(3, dtype=x.dtype)
    out[0] = x.sum()
    return out + x


def through_view(_: Any, x: Tensor) -> Tensor:
    y = x * 1
    y[0] += 1
    return y


class Keeps(nn.Module):
    """Keeps its first argument, as a data-dependent initialization does."""

    def __init__(self) -> None:
        super().__init__()
        self._first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._first is None:
            self._first = x.detach()
        return x - self._first


class KeepsTable(nn.Module):
    """Keeps what does not depend on its argument."""

    def __init__(self) -> None:
        super().__init__()
        self._table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._table is None:
            self._table = torch.arange(x.shape[-1]).to(x)
        return x * self._table


class Scripted(nn.Module):
    """Reads a value where no function of torch is listed."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.function = torch.jit.script(shrunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def shrunk(x: Tensor) -> Tensor:
    if bool(x.norm() > 5):
        return x / x.norm()
    return x


def attention(batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(3, 1, batch_first=batch_first)


# Silently wrong before rows were judged per operator: values or gradients.
WRONG: dict[str, Case] = {
    "zero gate": of(lambda m, x: x + m.scale * m.mha(x, x, x)[0], direct=False, start=0.0,
                    mha=attention(False)),
    "zero gate of softmax": of(lambda m, x: x + m.scale * x.softmax(0), direct=False, start=0.0),
    "LayerScale": of(lambda m, x: x + m.scale * x.flip(0), direct=False, start=1e-5),
    "BatchNorm in evaluation": Case(lambda: nn.BatchNorm1d(3).eval(), ((3, 3),), False),
    "PReLU": Case(lambda: nn.PReLU(3), ((3, 3),), False),
    "clamped norm": of(lambda m, x: x * (10 / x.norm()).clamp(max=1), (3,), direct=False),
    "exponentials": of(normalized, direct=False),
    "entropy": of(lambda m, p: p / -(p.softmax(-1) * p.log_softmax(-1)).sum(), direct=False),
    "isin": of(lambda m, a, b: torch.isin(a, b), torch.arange(16), torch.arange(16), direct=False),
    "renorm": of(lambda m, x: torch.renorm(x, 2, 0, 20.0), direct=False),
    "one mask for all": of(lambda m, x: x * (torch.rand(x.shape[-1]) > 0.5), (3,), direct=False),
    "clip in training": of(clipped, (3,), direct=False, refused=True),
    "norm in training": of(lambda m, x: x / x.norm() if m.training else x, (3,), direct=False),
    "spectral norm": Case(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
                          ((3,),), False, True),
    "old spectral norm": Case(lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
                              ((3,),), False, True),
    "gradients scaled by their norm": of(hooked, (3,), direct=False, refused=True),
    "gradients scaled by a hook of a module": Case(with_backward_hook, ((3,),), False, True),
    "gradients scaled by frequency": Case(
        lambda: nn.Embedding(3, 3, scale_grad_by_freq=True), (torch.tensor(1),), False,
        True),
    "random, then mixing in training": of(gumbel_then_mean, direct=False, refused=True),
    "dropout of features": of(lambda m, x: F.dropout1d(x, 0.5), direct=False),
    "projection with a seed": of(seeded, (3,), direct=False, refused=True),
    "projection with a forked seed": of(forked, (3,), direct=False, refused=True),
    "hook of a computed parameter": of(hooked_parameter, (3,), direct=False, refused=True),
    "hook that clips large gradients": Case(with_clipping_hook, ((3,),), False, True),
    "function that clips large gradients": of(lambda m, x: Clipped.apply(x * m.scale), (3,),
                                              direct=False, refused=True),
    "function that drops infinite gradients": of(lambda m, x: IfFinite.apply(x * m.scale), (3,),
                                                 direct=False, refused=True),
    "reads grad_fn": of(lambda m, x: 2 * x if x.grad_fn is None else x, (3,), direct=False,
                        refused=True),
    "layer drop": of(lambda m, x: x if random.random() < 1e-4 else x * m.scale, (3,), direct=False,
                     refused=True),
    "NumPy noise times zero": of(lambda m, x: x + m.scale * np.random.rand(), (3,), direct=False,
                                 start=0.0, refused=True),
    "noise of a generator": of(lambda m, x: x + m.scale * GENERATOR.random(), (3,), direct=False,
                               start=0.0, refused=True),
    "first argument": Case(Keeps, ((3,),), False, True),
    "scripted branch": Case(Scripted, ((3,),), False, True),
    "reads requires_grad": of(lambda m, x: 2 * x if x.requires_grad else x, (3,), direct=False,
                              refused=True),
    "largest norm": Case(lambda: nn.Embedding(5, 3, max_norm=0.1), (torch.tensor(1),),
                         False, True),
    "running mean": Case(lambda: EMA(True), ((3,),), False, True),
    "running mean by assignment": Case(lambda: EMA(False), ((3,),), False, True),
    "BatchNorm in training": Case(lambda: nn.BatchNorm1d(3), ((2, 3),), False, True),
    "running mean of F.batch_norm": of(
        lambda m, x: F.batch_norm(x, m.mean, None, training=False) if not m.training
        else F.batch_norm(x, m.mean, m.scale.detach().clone(), training=True),
        direct=False, refused=True),
}  # fmt: skip
MIXES: dict[str, Case] = {
    "mean": of(lambda m, x: x - x.mean(), direct=False),
    "mean of the first axis": of(lambda m, x: x - x.mean(0), direct=False),
    "flip": of(lambda m, x: x.flip(0), direct=False),
    "roll": of(lambda m, x: x.roll(1, 0), direct=False),
    "first": of(lambda m, x: x - x[0], direct=False),
    "cumsum": of(lambda m, x: x.cumsum(0), direct=False),
    "sort": of(lambda m, x: x.sort(0).values, direct=False),
    "transpose": of(lambda m, x: x @ x.T, direct=False),
    "gram": of(lambda m, x: x.t() @ x, direct=False),
    "outer": of(lambda m, x: x[:, None] * x, (3,), direct=False),
    "length": of(lambda m, x: x / len(x), (3,), direct=False),
    "size": of(lambda m, x: x.sum(-1) / x.shape[0], direct=False),
    "squeeze": of(lambda m, x: x.squeeze(), (3,), direct=False),
    "reshape": of(lambda m, x: x.reshape(-1), direct=False),
    "flatten": of(lambda m, x: x.flatten(), direct=False),
    "branch on a size": of(lambda m, x: x.mean(0) + x if len(x) > 8 else x, direct=False),
    "normalize": of(lambda m, x: F.normalize(x, dim=0), direct=False),
    "standardize": of(lambda m, x: (x - x.mean(0)) / (x.std(0) + 1), direct=False),
    "layer norm of all": of(lambda m, x: F.layer_norm(x, x.shape), direct=False),
    "group norm": of(lambda m, x: F.group_norm(x[None], 1)[0], direct=False),
    "max over rows": of(lambda m, x: x.clamp(max=x.max()), direct=False),
    "threshold by the mean": of(lambda m, x: torch.where(x > x.mean(), x, 0.5 * x), direct=False),
    "detached mean": of(lambda m, x: x + 1e-6 * m.scale * x.detach().mean(0), direct=False),
    "mean times a zero buffer": of(lambda m, x: x + m.mean * x.sum(0), direct=False),
    "attention": Case(attention(False), ((4, 3), (4, 3), (4, 3)), False),
    "gradient of a function": of(lambda m, x: Custom.apply(x), (3,), direct=False, refused=True),
    "assignment": of(filled, (3,), direct=False, refused=True),
    "view in place": of(through_view, direct=False, refused=True),
    "counts over all": of(lambda m, x: x * (x > 0).sum(), direct=False),
    "parameter beside a row": of(lambda m, x: torch.stack([x, m.scale]), (3,), direct=False),
    "embedding of sizes": of(lambda m, x: x + m.word.weight[x.shape[0] % 5], (3,), direct=False,
                             word=lambda: nn.Embedding(5, 3)),
    "softmax without an axis": of(lambda m, x: F.softmax(x, dim=0), (3,), direct=False),
    "loop over the first axis": of(lambda m, x: sum(row for row in x), direct=False),
    "all": of(lambda m, x: x * (x.abs() < 9).all(), (8,), direct=False),
    "any": of(lambda m, x: torch.where((x.abs() > 30).any(), 2 * x, x), (8,), direct=False),
    "all finite": of(lambda m, x: x * (x * 1e308).isfinite().all(), (8,), direct=False),
    "any of numbers": of(lambda m, x: x + (x - 9).relu().any(), (8,), direct=False),
    "all of integers": of(lambda m, x: x + (x / 9).long().any(), (8,), direct=False),
    "largest of booleans": of(lambda m, x: x * (x.abs() > 3).max(), (8,), direct=False),
    "renorm far away": of(lambda m, x: torch.renorm(x * 1e4, 2, 0, 1e4), direct=False),
    "size times zero": of(lambda m, x: x + m.scale * x.numel(), (3,), direct=False, start=0.0),
    "power of the length": of(lambda m, x: x + (m.scale + 1) ** len(x), (3,), direct=False,
                              start=0.0),
    "branch on a large size": of(lambda m, x: x.relu() if x.shape[0] < 100 else x, (3,),
                                 direct=False),
    "branch on a large length": of(lambda m, x: x.relu() if len(x) < 100 else x, (3,),
                                   direct=False),
    "branch on half of a size": of(lambda m, x: x.relu() if x.size(0) // 2 != 50 else x, (3,),
                                   direct=False),
    "bit of a length": of(lambda m, x: x.relu() if x.shape[0] & 64 else x, (3,), direct=False),
    "name of a length": of(lambda m, x: x.relu() if "100" in f"{x.shape[0]}" else x, (3,),
                           direct=False),
    "key of a shape": of(lambda m, x: x * {(100, 3): 2.0}.get(tuple(x.shape), 1.0), (3,),
                         direct=False),
    "noise like a parameter": of(lambda m, x: x + 0 * torch.randn_like(m.scale), (3,),
                                 direct=False),
    "mask of a parameter": of(lambda m, x: x + 0 * F.dropout(m.scale), (3,), direct=False),
    "isin of numbers": of(lambda m, x, y: torch.isin(x.round(), y.round()) * x, (8,), (8,),
                          direct=False),
}  # fmt: skip
RIGHT: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(3, 2), ((3,),), True),
    "linear of a matrix": Case(lambda: nn.Linear(3, 2), ((4, 3),), True),
    "perceptron": Case(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(inplace=True),
                                             nn.Linear(8, 3), nn.LayerNorm(3)), ((3,),), True),
    "GELU": Case(nn.GELU, ((3,),), True),
    "softmax": Case(lambda: nn.Softmax(-1), ((4, 3),), True),
    "layer norm": Case(lambda: nn.LayerNorm(3), ((4, 3),), True),
    "RMS norm": Case(lambda: nn.RMSNorm(3), ((4, 3),), True),
    "embedding": Case(lambda: nn.Embedding(20, 3), (torch.arange(4),), True),
    "embedding of a token": Case(lambda: nn.Embedding(3, 3), (torch.tensor(1),), True),
    "bilinear": Case(lambda: nn.Bilinear(3, 3, 2), ((3,), (3,)), True),
    "GRU cell": Case(lambda: nn.GRUCell(3, 3), ((3,), (3,)), True),
    "LSTM cell": of(lambda m, x, h, c: m.cell(x, (h, c)), (3,), (3,), (3,), direct=True,
                    cell=lambda: nn.LSTMCell(3, 3)),
    "RNN cell": Case(lambda: nn.RNNCell(3, 3), ((3,), (3,)), True),
    "attention, batch first": Case(attention(True), ((4, 3), (4, 3), (4, 3)), True),
    "gates": of(lambda m, x: (lambda a, b: a.sigmoid() * b.tanh())(*m.gates(x).chunk(2, -1)), (3,),
                direct=True, gates=lambda: nn.Linear(3, 6)),
    "residual with a zero gate": of(lambda m, x: x + m.scale * m.part(x), (3,), direct=True,
                                    start=0.0, part=lambda: nn.Linear(3, 3)),
    "clamped norm per row": of(lambda m, x: x * (10 / x.norm(dim=-1, keepdim=True)).clamp(max=1),
                               (3,), direct=True),
    "norm in training, per row": of(
        lambda m, x: x / x.norm(dim=-1, keepdim=True) if m.training else x, (3,), direct=True),
    "concatenation": of(lambda m, x, y: torch.cat([x, y], -1), (3,), (2,), direct=True),
    "shared bias": of(lambda m, x: (x + m.scale).relu_(), (3,), direct=True),
    "new zeros": of(lambda m, x: x + x.new_zeros(3), (3,), direct=True),
    "zeros like": of(lambda m, x: torch.cat([x, torch.zeros_like(x)], -1), (3,), direct=True),
    "mask": of(lambda m, x: x.masked_fill(x < 0, 0.0), direct=True),
    "index": of(lambda m, x: x[..., [2, 0]], direct=True),
    "einsum": of(lambda m, x: torch.einsum("...ij,...kj->...ik", x, x), direct=True),
    "product": of(lambda m, x: x @ x.mT, direct=True),
    "table": Case(KeepsTable, ((3,),), True),
    "top": of(lambda m, x: x.topk(2, -1).values, direct=True),
    "dropout": Case(lambda: nn.Dropout(0.5), ((3,),), True),
    "noise": of(lambda m, x: x + torch.randn_like(x), (3,), direct=True),
    "straight through": of(lambda m, x: StraightThrough.apply(x * m.scale), (3,), direct=True),
    "weight norm": Case(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
                        ((3,),), True),
    "old weight norm": Case(lambda: nn.utils.weight_norm(nn.Linear(3, 3)), ((3,),), True),
    "spectral norm in evaluation": Case(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval(), ((3,),), True),
    "our cell": of(lambda m, x, h, c: m.cell(x, (h, c), None)[0], (3,), (3,), (3,), direct=True,
                   cell=lambda: NaryTreeLSTMCell(3, 3)),
    "our cell of children": of(lambda m, x, h, c: m.cell(x, [(h, c), (c, h)])[0], (3,), (3,), (3,),
                               direct=True, cell=lambda: ChildSumTreeLSTMCell(3, 3)),
    "gated unit": of(lambda m, x: F.silu(m.a(x)) * m.b(x), (3,), direct=True,
                     a=lambda: nn.Linear(3, 4), b=lambda: nn.Linear(3, 4)),
    "root mean square": of(lambda m, x: x * (x.square().mean(-1, keepdim=True) + 1).rsqrt(),
                           direct=True),
    "mixture": of(lambda m, x: (m.gate(x).softmax(-1).unsqueeze(-1) * torch.stack(
        [m.a(x), m.b(x)], -2)).sum(-2), (3,), direct=True, gate=lambda: nn.Linear(3, 2),
        a=lambda: nn.Linear(3, 4), b=lambda: nn.Linear(3, 4)),
    "transformer layer": Case(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        ((5, 4),), True),
}  # fmt: skip
CASES = {**WRONG, **MIXES, **RIGHT}


def examples(case: Case, count: int = 5, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Draw examples in float64; rows differ by much."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        yield tuple(
            row[torch.randint(len(row), row.shape, generator=generator)] if isinstance(row, Tensor)
            and row.dim() else row + number % 2 if isinstance(row, Tensor)
            else torch.randn(row, generator=generator, dtype=torch.float64) * (1 + 2 * number)
            for row in case.rows
        )  # fmt: skip
