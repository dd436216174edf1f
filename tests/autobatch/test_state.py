"""What a model keeps between calls, and what scheduled batches take for granted of their model."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.autobatch.models import TreeLSTM, trees

ROWS = [*torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.was_called, self.activation = 2.0, False, nn.Identity()
        self.register_buffer("shift", torch.ones(3))
        self.register_parameter("unused", None)

    def forward(self, x: Tensor) -> Tensor:
        self.was_called = True
        return self.activation(x) * self.factor + self.shift


class Stateful(nn.Module):
    """A model of one function, with state of many kinds."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.part, self.scale = function, nn.Linear(3, 3), Scale()
        self.drop = nn.Dropout(0.0)
        self.kept: list[Any] = []
        self.cache: dict[int, Any] = {}
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def assigned(m: Any, x: Any) -> Any:
    m.state = m.part(x)
    return m.state * m.part(x).sum().item() + m.state


def appended(m: Any, x: Any) -> Any:
    m.kept.clear()
    for number in x:
        m.kept.append(m.part(x * number))
        if m.part(x).sum() > 0:
            m.kept.append(x)
    return torch.stack(m.kept).sum(0)


def remembered(m: Any, x: Any) -> Any:
    m.cache[0] = m.part(x)
    return m.cache[0] * m.part(x).sum().item() + m.cache[0]


def counted(m: Any, x: Any) -> Any:
    m.count = 0
    while (m.part(x) * (1 + m.count)).abs().sum() < 30:
        m.count += 1
    return x * m.count


def buffer(m: Any, x: Any) -> Any:
    m.shift.copy_(x)
    return m.part(x) + m.shift


def inner_buffer(m: Any, x: Any) -> Any:
    m.scale.shift.add_(1)
    return m.scale(m.part(x))


def parameter(m: Any, x: Any) -> Any:
    with torch.no_grad():
        m.weight.div_(m.weight.norm() * x[0])
    return m.part(x) * m.weight


def inner_attribute(m: Any, x: Any) -> Any:
    m.scale.factor = float(x[0])
    return m.scale(m.part(x))


REFUSED = {
    "share 'state' of the model": assigned, "share 'kept' of the model": appended,
    "share 'cache' of the model": remembered, "share 'count' of the model": counted,
    "'shift' was changed while": buffer, "'scale.shift' was changed while": inner_buffer,
    "'weight' was changed while": parameter, "'scale.factor' was changed while": inner_attribute,
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_state_that_examples_would_mix_is_refused(text: str) -> None:
    model = autobatch(Stateful(REFUSED[text]).double())
    with pytest.raises(RuntimeError, match=text) as caught:
        model(ROWS)
    assert str(caught.value).startswith("autobatch: ")
    assert "example " in str(caught.value) or "was changed" in text
    if "was changed" in text:
        ahead = "is recorded ahead uses" if REFUSED[text] is not inner_attribute else text
        with pytest.raises(RuntimeError, match=ahead):
            model.collate(ROWS)


def averaged(m: Any, x: Any) -> Any:
    y = m.part(x)
    m.shift.add_(y)
    return y


def decayed(m: Any, x: Any) -> Any:
    y = m.part(x)
    m.shift.lerp_(y.detach(), 0.1)
    return y


def item_of_buffer(m: Any, x: Any) -> Any:
    y = m.part(x)
    m.shift[0] = y[0]
    return y


def bias_of_part(m: Any, x: Any) -> Any:
    y = m.part(x)
    with torch.no_grad():
        m.part.bias.copy_(y)
    return y


@pytest.mark.parametrize("forward", [averaged, decayed, item_of_buffer, bias_of_part])
def test_changes_by_recorded_values_are_refused_and_not_made(forward: Any) -> None:
    model = autobatch(Stateful(forward).double())
    before = copy.deepcopy(model.state_dict())
    for run in (model, model.collate):
        with pytest.raises(RuntimeError, match="would change a tensor in place"):
            run(ROWS)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def restored_attribute(m: Any, x: Any) -> Any:
    m.drop.p = 1.0
    y = m.drop(m.part(x))
    m.drop.p = 0.0
    return y


def before_a_new_signature(m: Any, x: Any) -> Any:
    y = m.drop(m.part(x))
    m.drop.p = 1.0
    y = y + m.drop(m.part(x)[:2]).sum()
    m.drop.p = 0.0
    return y


def restored_mode(m: Any, x: Any) -> Any:
    m.drop.eval()
    y = m.drop(m.part(x))
    m.drop.train()
    return y


def restored_hook(m: Any, x: Any) -> Any:
    handle = m.part.register_forward_hook(lambda part, given, y: 2 * y)
    y = m.part(x)
    handle.remove()
    return y


def restored_parameters(m: Any, x: Any) -> Any:
    return functional_call(m.part, {"weight": m.part.weight * 2}, x)


def restored_flag(m: Any, x: Any) -> Any:
    m.part.weight.requires_grad_(False)
    y = m.part(x)
    m.part.weight.requires_grad_(True)
    return y


def restored_weight(m: Any, x: Any) -> Any:
    weight, m.part.weight = m.part.weight, nn.Parameter(m.part.weight * 2)
    y = m.part(x)
    m.part.weight = weight
    return y


def replaced_module(m: Any, x: Any) -> Any:
    activation, m.drop = m.drop, nn.Tanh()
    y = activation(x) + m.drop(m.part(x))
    m.drop = activation
    return y


def restored_child(m: Any, x: Any) -> Any:
    child, m.scale.activation = m.scale.activation, nn.Tanh()
    y = m.scale(x)
    m.scale.activation = child
    return y


def restored_inline(m: Any, x: Any) -> Any:
    m.weight.requires_grad_(False)
    y = m.part(x) * m.weight
    m.weight.requires_grad_(True)
    return y


def deleted(m: Any, x: Any) -> Any:
    y, weight = m.part(x), m.part.weight
    del m.part.weight
    m.part.weight = weight
    return y


RESTORED = {
    "'drop.p' was changed": restored_attribute, "'drop.training' was changed": restored_mode,
    "'weight' was changed": restored_inline, "'scale.activation' was changed": restored_child,
}  # fmt: skip
CHANGED_P = "'drop.p' was changed"
REPLACED = (restored_parameters, restored_flag, restored_weight)


@pytest.mark.parametrize(
    "text, forward",
    [
        *RESTORED.items(),
        *(("'part.[wb][a-z]*' was changed", f) for f in REPLACED),
        (CHANGED_P, before_a_new_signature),
    ],
)
def test_changes_that_are_restored_are_refused(text: str, forward: Any) -> None:
    class InForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stateful(forward)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    before = vars(nn.Module).copy()
    for plain, prefix in (Stateful(forward), ""), (InForward(), "inner."):
        plain = plain.double()
        model = autobatch(plain)
        with suppress(RuntimeError) if prefix else pytest.raises(RuntimeError, match=text):
            # In a submodule, which may be called as a whole, it is right.
            torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))
            assert prefix
    assert vars(nn.Module) == before


@pytest.mark.parametrize("forward", [restored_hook, deleted])
def test_changes_that_are_restored_and_right(forward: Any) -> None:
    model = autobatch(Stateful(forward).double())
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


def test_a_change_that_lasts_and_comes_before_all_calls_is_right() -> None:
    def forward(m: Any, x: Any) -> Any:
        m.drop.eval()
        m.drop.p = 0.5
        return m.drop(m.part(x))

    model = autobatch(Stateful(forward).double())
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


def kept_by_one(m: Any, x: Any) -> Any:
    m.state = m.part(x)  # and no example waits for a value
    return m.state + m.state


def cached(m: Any, x: Any) -> Any:
    m.cache.setdefault(len(m.cache), "any object")
    return m.part(x) * m.part(x).sum().item()


def unread_buffer(m: Any, x: Any) -> Any:
    m.shift.add_(1)
    return m.part(x)


def new_buffer(m: Any, x: Any) -> Any:
    m.shift = m.shift * 0 + x
    return m.part(x) * m.shift


def memory_of_numpy(m: Any, x: Any) -> Any:
    memory, total = np.zeros(3), 0
    shared, same = torch.from_numpy(memory), torch.from_numpy(memory)
    for number in range(3):
        memory[:] = number * x.numpy()
        total = total + m.part(shared) * m.part(torch.from_numpy(memory)) * m.part(same)
    return total


WORKS = {
    "kept": kept_by_one, "cached": cached, "unread": unread_buffer, "new": new_buffer,
    "module": replaced_module, "numpy": memory_of_numpy,
    "called": lambda m, x: m.scale(m.part(x)) * m.scale(x).sum().item(),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_other_state_works_as_one_by_one(name: str) -> None:
    model = autobatch(Stateful(WORKS[name]).double())
    found, expected = model(ROWS), model(ROWS, batch=False)
    torch.testing.assert_close(found, expected)
    if name != "numpy":  # the plain loop keeps the memory for its gradients, too
        gradients = [torch.autograd.grad(y.sum(), model.part.weight) for y in (found, expected)]  # type: ignore[union-attr]
        torch.testing.assert_close(*gradients)


def test_a_frozen_layer_needs_no_gradient() -> None:
    def forward(m: Any, x: Any) -> Any:
        first, both = m.part(x), m.part(x) * m.weight
        factors = [first, both, both.detach(), first * x, m.weight * 1, first.argmax(), x]
        return sum((2 + n) * v.sum() for n, v in enumerate(factors) if v.requires_grad) + m.part(x)

    plain = Stateful(forward).double()
    for frozen in (plain.part, plain.weight, None):
        plain.requires_grad_(True)
        (plain if frozen is None else frozen).requires_grad_(False)
        model = autobatch(plain)
        torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


# Scheduled batches.


def doubled(m: Any, x: Any) -> Any:
    return m.part(x) * 2


def eval_mode(m: Any) -> None:
    m.eval()


def more_modules(m: Any) -> None:
    m.plain.added = nn.Identity()


DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "the training mode": eval_mode,
    "the modules or their hooks": more_modules,
    "the shapes or dtypes of parameters": lambda m: m.float(),
}


def refused(model: AutoBatch, batch: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"since a batch was collated, {text} changed"):
        model(batch)


@pytest.mark.parametrize("text", DIFFERENT)
def test_batches_of_a_different_model_are_refused(text: str) -> None:
    model = autobatch(Stateful(doubled).double())
    batch = model.collate(ROWS)
    twin = autobatch(copy.deepcopy(model.plain))
    nn.init.zeros_(twin.plain.part.weight)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(twin(batch), twin(ROWS))
    DIFFERENT[text](twin)
    refused(twin, batch, text)
    torch.testing.assert_close(model(batch), model(ROWS))


def test_autocast_belongs_to_a_batch() -> None:
    model = autobatch(Stateful(doubled))
    batch = model.collate([x.float() for x in ROWS])
    with torch.autocast("cpu", torch.bfloat16):
        refused(model, batch, "autocast")


class Ones(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.ones(3)


@pytest.mark.parametrize("cache", [False, True])
def test_the_default_dtype_may_change_between_calls(cache: bool) -> None:
    model, rows = AutoBatch(nn.Sequential(Ones()), cache=cache), [x.float() for x in ROWS]
    batch = model.collate(rows)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert model(rows).dtype == model(rows, batch=False).dtype == dtype
            if dtype == torch.float64:
                refused(model, batch, "the default dtype")
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(model(batch), torch.stack(rows))


def _collate(model: AutoBatch, queue: Any) -> None:
    batch = model.collate(trees())
    queue.put(pickle.dumps((batch, model.eval().collate(trees()))))


@pytest.mark.long
@pytest.mark.parametrize("cache", [False, True])
def test_batches_mean_the_same_in_spawned_workers(cache: bool) -> None:
    model = autobatch(TreeLSTM(), cache=cache)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    worker = context.Process(target=_collate, args=(model, queue))
    worker.start()
    batch, other = pickle.loads(queue.get(timeout=120))
    worker.join()
    torch.testing.assert_close(model(batch), model(trees()))
    with pytest.raises(ValueError, match="the training mode"):
        model(other)


class Film(nn.Module):
    """Computes as its attributes say, which others may change."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.mixes = -1, False

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean() if self.mixes else x * 2
        return y.softmax(self.dim)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name, value", [("dim", 0), ("mixes", True), ("new", nn.Tanh())])
def test_attributes_that_change_between_calls(name: str, value: Any, cache: bool) -> None:
    def forward(m: Any, x: Any) -> Any:
        return m.scale(m.part(x))

    plain = Stateful(forward).double()
    plain.scale = Film()  # type: ignore[assignment]
    model = autobatch(plain, cache=cache)
    for _ in range(2):
        torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))
        setattr(plain.scale, name, value)


def test_attributes_that_change_inside_before_the_calls_are_refused() -> None:
    def forward(m: Any, x: Any) -> Any:
        m.scale.mixes = m.mixes
        return m.scale(m.part(x))

    plain = Stateful(forward).double()
    plain.scale = Film()  # type: ignore[assignment]
    plain.mixes = False
    model = autobatch(plain)
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))
    plain.mixes = True
    with pytest.raises(RuntimeError, match="changes an attribute of 'scale' before its calls"):
        model(ROWS)
