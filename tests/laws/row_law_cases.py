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
        arguments: Shape of each argument, or examples for integers.
        refused: Whether it is refused, or its inside is recorded, instead of ``torch.vmap``.
    """

    make: Callable[[], nn.Module]
    arguments: tuple[Any, ...]
    refused: bool


def of_module(make: Callable[[], nn.Module], *arguments: Any, refused: bool = False) -> Case:
    return Case(make, arguments, refused)


class Function(nn.Module):
    """A module from a function, with parts, a vector of parameters and a buffer."""

    def __init__(self, function: Any, start: float, **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.full((3,), start))
        self.register_buffer("mean", torch.zeros(3))
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *rows: Tensor) -> Any:
        return self.function(self, *rows)


def of_function(
    function: Any,
    *arguments: Any,
    start: float = 1.0,
    refused: bool = False,
    **parts: Callable[[], nn.Module],
) -> Case:
    """Return the case of a function of a :class:`Function` and rows, by default of a matrix."""

    def make() -> nn.Module:
        return Function(function, start, **{name: part() for name, part in parts.items()})

    return Case(make, arguments or ((4, 3),), refused)


def attention(batch_first: bool) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(3, 1, batch_first=batch_first)


# Values that mix rows.


def normalized(_: Any, x: Tensor) -> Tensor:
    exponentials = (x - x.max()).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def clipped(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    if m.training and y.abs().max() > 1:
        y = y / 10
    return y


def gumbel_then_mean(m: Any, x: Tensor) -> Tensor:
    if m.training:
        x = x + 0 * F.gumbel_softmax(x, dim=-1)
        x = x - x.mean(0)
    return StraightThrough.apply(x) + x


def batch_normalized(m: Any, x: Tensor) -> Tensor:
    if m.training:
        return F.batch_norm(x, m.mean, m.scale.detach().clone(), training=True)
    return F.batch_norm(x, m.mean, None, training=False)


def seeded(_: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return x @ torch.randn(3, 3, generator=generator, dtype=x.dtype)


def forked(_: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return x @ torch.randn(3, 3, dtype=x.dtype)


def filled(_: Any, x: Tensor) -> Tensor:
    out = torch.zeros(3, dtype=x.dtype)
    out[0] = x.sum()
    return out + x


def through_view(_: Any, x: Tensor) -> Tensor:
    y = x * 1
    y[0] += 1
    return y


def shrunk(x: Tensor) -> Tensor:
    if bool(x.norm() > 5):
        return x / x.norm()
    return x


class Scripted(nn.Module):
    """Reads a value where no function of torch is listed."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.function = torch.jit.script(shrunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


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


class Keeps(nn.Module):
    """Keeps its first argument, as a data-dependent initialization does."""

    def __init__(self) -> None:
        super().__init__()
        self._first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._first is None:
            self._first = x.detach()
        return x - self._first


# Gradients that mix rows.


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
        (x,) = ctx.saved_tensors
        factor = torch.clamp(1e3 / (gradient.norm() + 1e-9), max=1.0)
        return gradient * factor / (1 + (x.abs().amax() > 1e3))


class IfFinite(torch.autograd.Function):
    """Its gradient is zero if that of a row is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(torch.isfinite(gradient).all(), gradient, 0.0)


def hooked(m: Any, x: Tensor) -> Tensor:
    y = x * m.scale
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    return y.tanh()


def hooked_parameter(m: Any, x: Tensor) -> Tensor:
    weight = m.scale * 1
    weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return F.linear(x, weight[None])


def with_backward_hook() -> nn.Module:
    def divide_by_norm(_: nn.Module, gradients: tuple[Tensor], __: Any) -> tuple[Tensor]:
        (gradient,) = gradients
        return (gradient / (1 + gradient.norm()),)

    linear = nn.Linear(3, 3)
    linear.register_full_backward_hook(divide_by_norm)
    return linear


def with_clipping_hook() -> nn.Module:
    def clip(_: nn.Module, gradients: tuple[Tensor], __: Any) -> tuple[Tensor]:
        (gradient,) = gradients
        return (gradient * torch.clamp(1e3 / gradient.norm(), max=1.0),)

    linear = nn.Linear(3, 3)
    linear.register_full_backward_hook(clip)
    return linear


# Independent rows.


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class KeepsTable(nn.Module):
    """Keeps what does not depend on its argument."""

    def __init__(self) -> None:
        super().__init__()
        self._table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._table is None:
            self._table = torch.arange(x.shape[-1]).to(x)
        return x * self._table


def gated(m: Any, x: Tensor) -> Tensor:
    gate, value = m.gates(x).chunk(2, -1)
    return gate.sigmoid() * value.tanh()


def mixture(m: Any, x: Tensor) -> Tensor:
    shares = m.gate(x).softmax(-1).unsqueeze(-1)
    experts = torch.stack([m.a(x), m.b(x)], -2)
    return (shares * experts).sum(-2)


# Silently wrong before rows were judged per operator: values or gradients.
WRONG: dict[str, Case] = {
    "zero gate": of_function(
        lambda m, x: x + m.scale * m.mha(x, x, x)[0], start=0.0, mha=attention(False)
    ),
    "zero gate of softmax": of_function(lambda m, x: x + m.scale * x.softmax(0), start=0.0),
    "LayerScale": of_function(lambda m, x: x + m.scale * x.flip(0), start=1e-5),
    "BatchNorm in evaluation": of_module(lambda: nn.BatchNorm1d(3).eval(), (3, 3)),
    "PReLU": of_module(lambda: nn.PReLU(3), (3, 3)),
    "clamped norm": of_function(lambda m, x: x * (10 / x.norm()).clamp(max=1), (3,)),
    "exponentials": of_function(normalized),
    "entropy": of_function(lambda m, p: p / -(p.softmax(-1) * p.log_softmax(-1)).sum()),
    "isin": of_function(lambda m, a, b: torch.isin(a, b), torch.arange(16), torch.arange(16)),
    "renorm": of_function(lambda m, x: torch.renorm(x, 2, 0, 20.0)),
    "one mask for all": of_function(lambda m, x: x * (torch.rand(x.shape[-1]) > 0.5), (3,)),
    "clip in training": of_function(clipped, (3,), refused=True),
    "norm in training": of_function(lambda m, x: x / x.norm() if m.training else x, (3,)),
    "spectral norm": of_module(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), (3,), refused=True
    ),
    "old spectral norm": of_module(
        lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), (3,), refused=True
    ),
    "gradients scaled by their norm": of_function(hooked, (3,), refused=True),
    "gradients scaled by a hook of a module": of_module(with_backward_hook, (3,), refused=True),
    "gradients scaled by frequency": of_module(
        lambda: nn.Embedding(3, 3, scale_grad_by_freq=True), torch.tensor(1), refused=True
    ),
    "random, then mixing in training": of_function(gumbel_then_mean, refused=True),
    "dropout of features": of_function(lambda m, x: F.dropout1d(x, 0.5)),
    "projection with a seed": of_function(seeded, (3,), refused=True),
    "projection with a forked seed": of_function(forked, (3,), refused=True),
    "hook of a computed parameter": of_function(hooked_parameter, (3,), refused=True),
    "hook that clips large gradients": of_module(with_clipping_hook, (3,), refused=True),
    "function that clips large gradients": of_function(
        lambda m, x: Clipped.apply(x * m.scale), (3,), refused=True
    ),
    "function that drops infinite gradients": of_function(
        lambda m, x: IfFinite.apply(x * m.scale), (3,), refused=True
    ),
    "reads grad_fn": of_function(
        lambda m, x: 2 * x if x.grad_fn is None else x, (3,), refused=True
    ),
    "layer drop": of_function(
        lambda m, x: x if random.random() < 1e-4 else x * m.scale, (3,), refused=True
    ),
    "NumPy noise times zero": of_function(
        lambda m, x: x + m.scale * np.random.rand(), (3,), start=0.0, refused=True
    ),
    "noise of a generator": of_function(
        lambda m, x: x + m.scale * GENERATOR.random(), (3,), start=0.0, refused=True
    ),
    "first argument": of_module(Keeps, (3,), refused=True),
    "scripted branch": of_module(Scripted, (3,), refused=True),
    "reads requires_grad": of_function(
        lambda m, x: 2 * x if x.requires_grad else x, (3,), refused=True
    ),
    "largest norm": of_module(
        lambda: nn.Embedding(5, 3, max_norm=0.1), torch.tensor(1), refused=True
    ),
    "running mean": of_module(lambda: EMA(True), (3,), refused=True),
    "running mean by assignment": of_module(lambda: EMA(False), (3,), refused=True),
    "BatchNorm in training": of_module(lambda: nn.BatchNorm1d(3), (2, 3), refused=True),
    "running mean of F.batch_norm": of_function(batch_normalized, refused=True),
}
MIXES: dict[str, Case] = {
    "mean": of_function(lambda m, x: x - x.mean()),
    "mean of the first axis": of_function(lambda m, x: x - x.mean(0)),
    "flip": of_function(lambda m, x: x.flip(0)),
    "roll": of_function(lambda m, x: x.roll(1, 0)),
    "first": of_function(lambda m, x: x - x[0]),
    "cumsum": of_function(lambda m, x: x.cumsum(0)),
    "sort": of_function(lambda m, x: x.sort(0).values),
    "transpose": of_function(lambda m, x: x @ x.T),
    "gram": of_function(lambda m, x: x.t() @ x),
    "outer": of_function(lambda m, x: x[:, None] * x, (3,)),
    "length": of_function(lambda m, x: x / len(x), (3,)),
    "size": of_function(lambda m, x: x.sum(-1) / x.shape[0]),
    "squeeze": of_function(lambda m, x: x.squeeze(), (3,)),
    "reshape": of_function(lambda m, x: x.reshape(-1)),
    "flatten": of_function(lambda m, x: x.flatten()),
    "branch on a size": of_function(lambda m, x: x.mean(0) + x if len(x) > 8 else x),
    "normalize": of_function(lambda m, x: F.normalize(x, dim=0)),
    "standardize": of_function(lambda m, x: (x - x.mean(0)) / (x.std(0) + 1)),
    "layer norm of all": of_function(lambda m, x: F.layer_norm(x, x.shape)),
    "group norm": of_function(lambda m, x: F.group_norm(x[None], 1)[0]),
    "max over rows": of_function(lambda m, x: x.clamp(max=x.max())),
    "threshold by the mean": of_function(lambda m, x: torch.where(x > x.mean(), x, 0.5 * x)),
    "detached mean": of_function(lambda m, x: x + 1e-6 * m.scale * x.detach().mean(0)),
    "mean times a zero buffer": of_function(lambda m, x: x + m.mean * x.sum(0)),
    "attention": of_module(attention(False), (4, 3), (4, 3), (4, 3)),
    "gradient of a function": of_function(lambda m, x: Custom.apply(x), (3,), refused=True),
    "assignment": of_function(filled, (3,), refused=True),
    "view in place": of_function(through_view, refused=True),
    "counts over all": of_function(lambda m, x: x * (x > 0).sum()),
    "parameter beside a row": of_function(lambda m, x: torch.stack([x, m.scale]), (3,)),
    "embedding of sizes": of_function(
        lambda m, x: x + m.word.weight[x.shape[0] % 5], (3,), word=lambda: nn.Embedding(5, 3)
    ),
    "softmax without an axis": of_function(lambda m, x: F.softmax(x, dim=0), (3,)),
    "loop over the first axis": of_function(lambda m, x: sum(row for row in x)),
    "all": of_function(lambda m, x: x * (x.abs() < 9).all(), (8,)),
    "any": of_function(lambda m, x: torch.where((x.abs() > 30).any(), 2 * x, x), (8,)),
    "all finite": of_function(lambda m, x: x * (x * 1e308).isfinite().all(), (8,)),
    "any of numbers": of_function(lambda m, x: x + (x - 9).relu().any(), (8,)),
    "all of integers": of_function(lambda m, x: x + (x / 9).long().any(), (8,)),
    "largest of booleans": of_function(lambda m, x: x * (x.abs() > 3).max(), (8,)),
    "renorm far away": of_function(lambda m, x: torch.renorm(x * 1e4, 2, 0, 1e4)),
    "size times zero": of_function(lambda m, x: x + m.scale * x.numel(), (3,), start=0.0),
    "power of the length": of_function(lambda m, x: x + (m.scale + 1) ** len(x), (3,), start=0.0),
    "branch on a large size": of_function(lambda m, x: x.relu() if x.shape[0] < 100 else x, (3,)),
    "branch on a large length": of_function(lambda m, x: x.relu() if len(x) < 100 else x, (3,)),
    "branch on half of a size": of_function(
        lambda m, x: x.relu() if x.size(0) // 2 != 50 else x, (3,)
    ),
    "bit of a length": of_function(lambda m, x: x.relu() if x.shape[0] & 64 else x, (3,)),
    "name of a length": of_function(lambda m, x: x.relu() if "100" in f"{x.shape[0]}" else x, (3,)),
    "key of a shape": of_function(lambda m, x: x * {(100, 3): 2.0}.get(tuple(x.shape), 1.0), (3,)),
    "noise like a parameter": of_function(lambda m, x: x + 0 * torch.randn_like(m.scale), (3,)),
    "mask of a parameter": of_function(lambda m, x: x + 0 * F.dropout(m.scale), (3,)),
    "isin of numbers": of_function(
        lambda m, x, y: torch.isin(x.round(), y.round()) * x, (8,), (8,)
    ),
}
RIGHT: dict[str, Case] = {
    "linear": of_module(lambda: nn.Linear(3, 2), (3,)),
    "linear of a matrix": of_module(lambda: nn.Linear(3, 2), (4, 3)),
    "perceptron": of_module(
        lambda: nn.Sequential(
            nn.Linear(3, 8), nn.ReLU(inplace=True), nn.Linear(8, 3), nn.LayerNorm(3)
        ),
        (3,),
    ),
    "GELU": of_module(nn.GELU, (3,)),
    "softmax": of_module(lambda: nn.Softmax(-1), (4, 3)),
    "layer norm": of_module(lambda: nn.LayerNorm(3), (4, 3)),
    "RMS norm": of_module(lambda: nn.RMSNorm(3), (4, 3)),
    "embedding": of_module(lambda: nn.Embedding(20, 3), torch.arange(4)),
    "embedding of a token": of_module(lambda: nn.Embedding(3, 3), torch.tensor(1)),
    "bilinear": of_module(lambda: nn.Bilinear(3, 3, 2), (3,), (3,)),
    "GRU cell": of_module(lambda: nn.GRUCell(3, 3), (3,), (3,)),
    "LSTM cell": of_function(
        lambda m, x, h, c: m.cell(x, (h, c)), (3,), (3,), (3,), cell=lambda: nn.LSTMCell(3, 3)
    ),
    "RNN cell": of_module(lambda: nn.RNNCell(3, 3), (3,), (3,)),
    "attention, batch first": of_module(attention(True), (4, 3), (4, 3), (4, 3)),
    "gates": of_function(gated, (3,), gates=lambda: nn.Linear(3, 6)),
    "residual with a zero gate": of_function(
        lambda m, x: x + m.scale * m.part(x), (3,), start=0.0, part=lambda: nn.Linear(3, 3)
    ),
    "clamped norm per row": of_function(
        lambda m, x: x * (10 / x.norm(dim=-1, keepdim=True)).clamp(max=1), (3,)
    ),
    "norm in training, per row": of_function(
        lambda m, x: x / x.norm(dim=-1, keepdim=True) if m.training else x, (3,)
    ),
    "concatenation": of_function(lambda m, x, y: torch.cat([x, y], -1), (3,), (2,)),
    "shared bias": of_function(lambda m, x: (x + m.scale).relu_(), (3,)),
    "new zeros": of_function(lambda m, x: x + x.new_zeros(3), (3,)),
    "zeros like": of_function(lambda m, x: torch.cat([x, torch.zeros_like(x)], -1), (3,)),
    "mask": of_function(lambda m, x: x.masked_fill(x < 0, 0.0)),
    "index": of_function(lambda m, x: x[..., [2, 0]]),
    "einsum": of_function(lambda m, x: torch.einsum("...ij,...kj->...ik", x, x)),
    "product": of_function(lambda m, x: x @ x.mT),
    "table": of_module(KeepsTable, (3,)),
    "top": of_function(lambda m, x: x.topk(2, -1).values),
    "dropout": of_module(lambda: nn.Dropout(0.5), (3,)),
    "noise": of_function(lambda m, x: x + torch.randn_like(x), (3,)),
    "straight through": of_function(lambda m, x: StraightThrough.apply(x * m.scale), (3,)),
    "weight norm": of_module(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), (3,)),
    "old weight norm": of_module(lambda: nn.utils.weight_norm(nn.Linear(3, 3)), (3,)),
    "spectral norm in evaluation": of_module(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval(), (3,)
    ),
    "our cell": of_function(
        lambda m, x, h, c: m.cell(x, (h, c), None)[0],
        (3,),
        (3,),
        (3,),
        cell=lambda: NaryTreeLSTMCell(3, 3),
    ),
    "our cell of children": of_function(
        lambda m, x, h, c: m.cell(x, [(h, c), (c, h)])[0],
        (3,),
        (3,),
        (3,),
        cell=lambda: ChildSumTreeLSTMCell(3, 3),
    ),
    "gated unit": of_function(
        lambda m, x: F.silu(m.a(x)) * m.b(x),
        (3,),
        a=lambda: nn.Linear(3, 4),
        b=lambda: nn.Linear(3, 4),
    ),
    "root mean square": of_function(
        lambda m, x: x * (x.square().mean(-1, keepdim=True) + 1).rsqrt()
    ),
    "mixture": of_function(
        mixture,
        (3,),
        gate=lambda: nn.Linear(3, 2),
        a=lambda: nn.Linear(3, 4),
        b=lambda: nn.Linear(3, 4),
    ),
    "transformer layer": of_module(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (5, 4)
    ),
}
CASES = {**WRONG, **MIXES, **RIGHT}


def examples(case: Case, count: int = 5, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Draw examples in float64; rows differ by much."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        yield tuple(drawn(argument, number, generator) for argument in case.arguments)


def drawn(argument: Any, number: int, generator: torch.Generator) -> Tensor:
    """Draw a row of a shape, or of given integers."""
    if not isinstance(argument, Tensor):
        row = torch.randn(argument, generator=generator, dtype=torch.float64)
        return row * (1 + 2 * number)
    if argument.dim() == 0:
        return argument + number % 2
    positions = torch.randint(len(argument), argument.shape, generator=generator)
    return argument[positions]
