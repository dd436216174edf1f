"""Law of recordings that are kept: with other weights and buffers they give what the model gives.

Or they are refused, where a batch is collated; or not kept, where it is cached.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, emit, rows, total
from pyg_dynbatch.core.errors import Mismatch

ROWS = [*torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double()]
Forward = Callable[[Any, Any], Any]


class Model(nn.Module):
    """A model of one function, with parameters, a frozen parameter and buffers."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.l = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.w = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.gate = nn.Parameter(torch.ones(()))
        self.word = nn.Embedding(5, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


def added(m: Any, x: Tensor) -> Any:
    m.mean.add_(1)
    return m.l(x)


def shifted(m: Any, x: Tensor) -> Any:
    m.mean += 1
    return m.l(x)


def assigned(m: Any, x: Tensor) -> Any:
    m.mean[0] = 1
    return m.l(x)


def into(m: Any, x: Tensor) -> Any:
    torch.add(x, 1, out=m.mean)
    return m.l(x)


def emitted(m: Any, x: Tensor) -> Any:
    emit("w", m.frozen)
    return m.l(x)


def without_gradient(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return m.l(x) + m.w[0]


# What parameters and buffers hold, computed or returned before any recorded call is run.
REFUSED: dict[str, Forward] = {
    "buffer": lambda m, x: m.l(x - m.mean),
    "detach": lambda m, x: m.l.weight.detach().T @ m.l(x),
    "branch": lambda m, x: m.l(x) * 2 if m.w[0] > 0 else m.l(x),
    "frozen": lambda m, x: m.frozen * x,
    "two": lambda m, x: m.l(x) * (m.frozen + m.mean),
    "trained": lambda m, x: m.l(x) * m.w.tanh(),
    "keyword": lambda m, x: m.l(x) + torch.add(input=x, other=m.frozen),
    "list": lambda m, x: m.l(x) + torch.stack([x, m.mean])[1],
    "own gradient": lambda m, x: m.l(x) * Double.apply(m.frozen),
    "functional": lambda m, x: m.l(x) + F.softmax(m.frozen, 0),
    "item": lambda m, x: m.l(x) * m.w[0].item(),
    "float": lambda m, x: m.l(x) * float(m.w[0]),
    "truth": lambda m, x: m.l(x) if m.w[0] else x,
    "index": lambda m, x: m.l(x) * [1, 2, 3][m.count.long() % 3],
    "format": lambda m, x: m.l(x) * float(f"{m.count:.3f}"),
    "tolist": lambda m, x: m.l(x) * m.frozen.tolist()[0],
    "numpy": lambda m, x: m.l(x) * float(m.frozen.numpy()[0]),
    "data": lambda m, x: m.l(x) * m.w.data,
    "memory": lambda m, x: m.l(x) * torch.from_numpy(m.w.detach().numpy()),
    "equal": lambda m, x: m.l(x) * torch.equal(m.w, m.frozen),
    "copy": lambda m, x: m.l(x) + copy.deepcopy(m.mean),
    "fill": lambda m, x: m.l(x) + torch.full_like(x, m.count),
    "no grad": without_gradient,
    "in place": added,
    "+=": shifted,
    "item assignment": assigned,
    "out": into,
    "result": lambda m, x: (m.l(x), m.mean),
    "number": lambda m, x: (m.word(torch.tensor(0)), m.steps),
    "emit": emitted,
    "rows": lambda m, x: total(rows(m.mean[None])) + m.l(x),
    "open module": lambda m, x: m.l(x) + nn.Linear.forward(m.l, x),
    "module without rows": lambda m, x: m.l(x) + m.act(m.frozen),
}  # fmt: skip

# Parameters and buffers as arguments of recorded calls, views of them, and what they are like.
ACCEPTED: dict[str, Forward] = {
    "modules": lambda m, x: m.act(m.l(x)) + m.word(torch.tensor(1)),
    "arguments": lambda m, x: m.l(x) * m.w + m.mean - m.l(x) * m.frozen * m.gate,
    "views": lambda m, x: m.l(x) * m.w[0] + m.l.weight.T @ m.l(x) + m.w.view(2, 2).flatten(),
    "several views": lambda m, x: m.l(x) * m.w.unbind()[0] + torch.cat([*m.w.chunk(2), m.l(x)])[:4],
    "iterated": lambda m, x: m.l(x) * [*m.w][1],
    "expanded": lambda m, x: m.l(x) + m.gate.expand(4) + m.w.expand_as(x).contiguous(),
    "the same": lambda m, x: m.l(x) * m.w.to(x) * m.w.double(),
    "metadata": lambda m, x: m.l(x) * m.w.shape[0] * len(m.w) * m.w.dim() * m.w.requires_grad,
    "dtype": lambda m, x: m.l(x.float().to(m.w.dtype)) + x.type_as(m.w).to(m.w.device),
    "like": lambda m, x: m.l(x) + torch.zeros_like(m.w) + m.w.new_ones(4) + x.expand_as(m.w),
    "kind": lambda m, x: m.l(x) * (1 + torch.is_floating_point(m.w)) * m.w.numel() + x,
    "other tensors": lambda m, x: m.l(x) * (x * 2 + torch.ones(4)) * x.sum().item(),
}  # fmt: skip


# Of these, what is kept: the others compute something of an argument at once, or of both.
KEPT = {
    "modules", "arguments", "views", "several views", "iterated", "expanded", "the same",
    "metadata", "kind",
}  # fmt: skip
# These are found when the function has ended, so that no line of it can be named.
FOUND_AT_THE_END = ("result", "number", "emit")
FUNCTIONS = {**REFUSED, **ACCEPTED}


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(5 * torch.randn(tensor.shape))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", ACCEPTED)
def test_batches_fit_other_weights(name: str, cache: bool) -> None:
    model = autobatch(Model(ACCEPTED[name]).double(), cache=cache)
    for _ in range(2):
        batch = model.collate(ROWS)
        for _ in range(2):
            torch.testing.assert_close(model(batch), model(ROWS, batch=False))
            change(model)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_batches_that_would_not_fit_other_weights_are_refused(name: str, cache: bool) -> None:
    model = autobatch(Model(REFUSED[name]).double(), cache=cache)
    with pytest.raises(RuntimeError, match="recorded ahead uses '") as caught:
        model.collate(ROWS)
    assert isinstance(caught.value.args[0], Mismatch)
    assert "try:" in str(caught.value)
    if not cache or name not in FOUND_AT_THE_END:
        assert "test_collate.py:" in str(caught.value)
    assert not model.get_buffer("mean").any(), "a buffer was changed"


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_cache_fits_other_weights(name: str) -> None:
    cached = Model(FUNCTIONS[name]).double()
    plain = autobatch(Model(FUNCTIONS[name]).double())
    model = autobatch(cached, cache=True)
    for _ in range(3):
        plain.plain.load_state_dict(cached.state_dict())
        expected = plain(ROWS, batch=False)
        torch.testing.assert_close(model(ROWS), expected)
        change(cached)
    _, session = model._batched(ROWS)
    assert session.replayed == (len(ROWS) if name in KEPT else 0)


def counting(m: Any, x: Tensor) -> Any:
    y = m.l(x) + m.mean
    m.mean.add_(1)
    return y + m.mean


def test_the_cache_refuses_a_buffer_that_changes_between_its_calls() -> None:
    model = autobatch(Model(counting).double(), cache=True)
    with pytest.raises(RuntimeError, match="'mean' was changed while the model was recorded"):
        model(ROWS)


@pytest.mark.parametrize("name", ["buffer", "branch", "frozen", "two", "trained", "item", "data"])
def test_calls_on_examples_themselves_compute_from_weights(name: str) -> None:
    model = autobatch(Model(REFUSED[name]).double())
    for _ in range(2):
        torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))
        change(model)


def doubled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
def test_what_requires_gradients_may_be_computed_from_parameters() -> None:
    scripted: Any = torch.jit.script(doubled)  # which the modes of torch do not see
    model = autobatch(Model(lambda m, x: m.l(x) * scripted(m.w)).double())
    with pytest.raises(ValueError, match="or computed from parameters"):
        model.collate(ROWS)
