"""Law of autobatch: a model gives what the plain loop gives, or is refused.

For every model::

    autobatch(model)(examples) == stack([model(example) for example in examples])

in values, dtypes and gradients, and no recorded value stays in the model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from pyg_dynbatch.autobatch import AutoBatch, attend, autobatch, open, rows, total  # noqa: A004
from pyg_dynbatch.autobatch.lazy import Lazy
from pyg_dynbatch.core.errors import Mismatch
from tests.autobatch.test_autobatch import Wrap, check

Forward = Callable[[Any, Any], Any]
LONG = partial(pytest.param, marks=pytest.mark.long)
ROWS = [*torch.randn(3, 3, generator=torch.Generator().manual_seed(0))]


class Part(nn.Module):
    """A module with state of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.kept = list[Any]()
        self.cache = dict[str, Any]()
        self.weight = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.0)
        self.act: nn.Module = nn.Identity()
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(x)) * (self.factor + len(self.kept))
        return x * self.weight + self.shift


def model_of(function: Forward, inner: Forward | None = None) -> Any:
    """Create a model of a function; its part ``inner`` is another one that knows the others."""
    torch.manual_seed(0)
    model: Any = Wrap(function, part=Part(), layer=nn.Linear(3, 3), other=nn.Linear(3, 3))
    model.gru = nn.GRU(1, 2)
    model.attention = nn.MultiheadAttention(4, 2)
    model.deep = nn.GRU(1, 2, 2, dropout=0.5)
    model.kept = []
    model.cache = {}
    model.last = None
    model.register_buffer("buffer", torch.zeros(3))
    if inner is not None:
        model.inner = Wrap(lambda m, x: inner(m.others[0], x), gru=model.gru)
        model.inner.others = [model]  # not as a submodule
    return model


def recorded_values_in(model: nn.Module) -> list[Lazy]:
    """Find recorded values in a model, however deep."""
    found = list[Lazy]()
    seen = set[int]()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if type(value) is Lazy:
            found.append(value)
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += held_by(value)
    return found


def held_by(value: Any) -> list[Any]:
    if callable(value) and not isinstance(value, nn.Module):
        return []
    held = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, dict):
        held += value.values()
    if isinstance(value, list | tuple | set):
        held += value
    return held


def is_refusal(error: Exception) -> bool:
    return isinstance(error.args[0], Mismatch) and str(error).startswith(("autobatch", "Operation"))


def gradient_of_layer(model: Any, results: Tensor) -> Tensor:
    model.zero_grad()
    results.sum().backward(retain_graph=True)
    return model.layer.weight.grad


def check_law(make: Callable[[], Any]) -> None:
    """Compare two calls of a model with the plain loop, unless it is refused."""
    plain = make()
    model = autobatch(make())
    for _ in range(2):
        expected = torch.stack([plain(x) for x in ROWS])
        try:
            batched = model(ROWS)
        except Exception as error:
            assert is_refusal(error), error
            return
        finally:
            assert not recorded_values_in(model.plain)
        torch.testing.assert_close(batched, expected)
        torch.testing.assert_close(
            gradient_of_layer(model, batched), gradient_of_layer(plain, expected)
        )


def double_in_place(m: Any) -> None:
    m.part.weight.data.mul_(2)


def longer(m: Any) -> None:
    m.part.factor += 1


# What a submodule does to another one.
TO_A_SIBLING: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: setattr(m.part, "factor", 3.0),
    "count": longer,
    "list": lambda m: m.part.kept.append(1),
    "parameter": lambda m: setattr(m.part, "weight", nn.Parameter(torch.full((3,), 3.0))),
    "data": double_in_place,
    "buffer": lambda m: setattr(m.part, "shift", m.part.shift + 1),
    "buffer in place": lambda m: m.part.shift.add_(1),
    "child": lambda m: setattr(m.part, "act", nn.Tanh()),
    "mode of a layer": lambda m: m.part.drop.eval(),
    "probability": lambda m: setattr(m.part.drop, "p", 1.0),
}


# Where the submodule is called that changes the other one.
CALLS_OF_THE_SUBMODULE: dict[str, Forward] = {
    "before": lambda m, x: m.part(m.inner(m.layer(x))),
    "between": lambda m, x: m.part(m.inner(m.part(m.layer(x)))),
    "unused": lambda m, x: m.inner(m.layer(x)) * m.part.factor,
}


@pytest.mark.parametrize("where", [LONG("before"), "between", "unused"])
@pytest.mark.parametrize("name", TO_A_SIBLING)
def test_a_submodule_that_changes_another_one_is_right_or_refused(name: str, where: str) -> None:
    def inner(m: Any, x: Any) -> Any:
        TO_A_SIBLING[name](m)
        return x * 2

    check_law(lambda: model_of(CALLS_OF_THE_SUBMODULE[where], inner))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def packed(m: Any, x: Any) -> Any:
    given = pack_sequence([x.view(3, 1), x.view(3, 1)[:2]])
    return pad_packed_sequence(m.gru(given)[0])[0]


def with_weights(m: Any, x: Any) -> Any:
    weights = {"weight": torch.outer(m.layer(x), x), "bias": x}
    return torch.func.functional_call(m.other, weights, (x,))


def cast_for_a_while(m: Any, x: Any) -> Any:
    y = m.other.double()(m.layer(x).double())
    m.other.float()
    return y


def transcribed(m: Any, x: Any) -> Any:
    scores = m.layer(x).view(1, 1, 3).expand(4, 1, 3).log_softmax(-1)
    return F.ctc_loss(scores, torch.tensor([[1, 2]]), (4,), (2,))


def twice(x: Tensor) -> Tensor:
    return 2 * x


with pytest.warns(DeprecationWarning):
    SCRIPTED_FUNCTION = torch.jit.script(twice)
    SCRIPTED_MODULE = torch.jit.script(nn.Linear(3, 3))


def traced_by_outer(x: Any) -> Any:
    return torch.trace(torch.outer(x, x)) * x


UNUSUAL: dict[str, Forward] = {
    "packed": packed,
    "functional_call": with_weights,
    "cast": cast_for_a_while,
    "ctc_loss": transcribed,
    "function": lambda m, x: Square.apply(m.layer(x)),
    "checkpoint": lambda m, x: checkpoint(torch.tanh, m.layer(x), use_reentrant=False),
    "checkpoint of vmap": lambda m, x: checkpoint(traced_by_outer, m.layer(x), use_reentrant=False),
    "reentrant": lambda m, x: checkpoint(torch.tanh, m.layer(x), use_reentrant=True),
    "vmap": lambda m, x: torch.vmap(torch.sin)(m.layer(x)),
    "grad": lambda m, x: torch.func.grad(lambda y: y.square().sum())(m.layer(x)),
    "scripted": lambda m, x: SCRIPTED_FUNCTION(m.layer(x)),
    "scripted module": lambda m, x: m.layer(SCRIPTED_MODULE(x)),
    "attention": lambda m, x: m.attention(*[m.layer(x).view(3, 1, 1).expand(3, 2, 4)] * 3)[0],
    "large number": lambda m, x: m.layer(x) * (10**5000 % 7),
}


def inline(function: Forward) -> Any:
    return model_of(function)


def in_a_submodule(function: Forward) -> Any:
    inner = model_of(function)
    model = model_of(lambda m, x: m.inner(x))
    model.inner = inner
    model.layer = inner.layer
    return model


def in_an_opened_submodule(function: Forward) -> Any:
    model = in_a_submodule(function)
    model.inner = open(model.inner)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:There is a performance drop")
@pytest.mark.parametrize("place", [inline, in_a_submodule, in_an_opened_submodule])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_calls_are_right_or_refused(name: str, place: Callable[[Forward], Any]) -> None:
    check_law(lambda: place(UNUSUAL[name]))


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def keep(m: Any, y: Any) -> None:
    m.other.last = y


# How a model keeps a recorded value.
KEEPS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda m, y: setattr(m, "last", y),
    "new attribute": lambda m, y: setattr(m, "found", [y, {"a": (y, 1)}]),
    "list": lambda m, y: m.kept.append(y),
    "list and attribute": lambda m, y: (m.kept.append(y), setattr(m, "last", y)),
    "dict": lambda m, y: m.cache.update(a=y),
    "buffer": lambda m, y: setattr(m, "buffer", y),
    "layer": keep,
    "part": lambda m, y: setattr(m.part, "last", y),
    "object": lambda m, y: setattr(m, "last", Box(y)),
}


def doubled(x: Tensor, y: Any) -> Any:
    return y * 2


def times_a_value_read(x: Tensor, y: Any) -> Any:
    return y * y.sum().item()


def failing_in_the_second_example(x: Tensor, y: Any) -> Any:
    if x is ROWS[1]:
        raise KeyError("own error")
    return y * 2


def keeping(name: str, ending: Forward) -> Forward:
    """Keep what a layer returns, and go on with it."""

    def function(m: Any, x: Any) -> Any:
        y = m.layer(x)
        KEEPS[name](m, y)
        return ending(x, y)

    return function


def check_that_nothing_stays(model: AutoBatch, run: Callable[[], None]) -> None:
    """Check the model after each of two runs that may be refused."""
    names = sorted(model.state_dict())
    for _ in range(2):
        try:
            run()
        except Exception as error:
            assert is_refusal(error), error
        assert not recorded_values_in(model.plain)
        assert sorted(model.state_dict()) == names


@pytest.mark.parametrize("ending", [doubled, LONG(times_a_value_read)])
@pytest.mark.parametrize("name", KEEPS)
def test_no_recorded_value_stays_after_a_result(name: str, ending: Forward) -> None:
    model = autobatch(model_of(keeping(name, ending)))
    check_that_nothing_stays(model, lambda: model(ROWS))


@pytest.mark.long
@pytest.mark.parametrize("name", KEEPS)
def test_no_recorded_value_stays_beside_a_cache(name: str) -> None:
    model = autobatch(model_of(keeping(name, doubled)), cache=True)
    check_that_nothing_stays(model, lambda: model(ROWS))


@pytest.mark.parametrize("name", KEEPS)
def test_no_recorded_value_stays_after_collation(name: str) -> None:
    model = autobatch(model_of(keeping(name, doubled)))
    check_that_nothing_stays(model, lambda: model.collate(ROWS))


@pytest.mark.parametrize("name", KEEPS)
def test_no_recorded_value_stays_after_an_error(name: str) -> None:
    model = autobatch(model_of(keeping(name, failing_in_the_second_example)))

    def run() -> None:
        with pytest.raises(KeyError, match="own error"):
            model(ROWS)

    check_that_nothing_stays(model, run)


# Where a model finds again what it kept.
KEPT: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda m: m.last,
    "list": lambda m: m.kept[-1],
    "dict": lambda m: m.cache["a"],
    "buffer": lambda m: m.buffer,
}


@pytest.mark.parametrize("cache", [False, LONG(True)])
@pytest.mark.parametrize("name", KEPT)
def test_a_model_keeps_the_value_of_the_last_example(name: str, cache: bool) -> None:
    model = autobatch(model_of(keeping(name, doubled)), cache=cache)
    plain: Any = model.plain
    for _ in range(2):
        model(ROWS)
        torch.testing.assert_close(KEPT[name](plain), plain.layer(ROWS[-1]))


def times_what_a_hook_saw(m: Any, x: Any) -> Any:
    m.layer(x)
    y = m.layer(x)
    return y * m.seen()[-1]


@pytest.mark.parametrize("is_in_the_model", [True, False])
def test_hooks_capture_values_of_single_examples(is_in_the_model: bool) -> None:
    plain: Any = model_of(times_what_a_hook_saw)
    seen: list[Any] = plain.kept if is_in_the_model else []
    plain.seen = lambda: seen
    plain.layer.register_forward_hook(lambda _, arguments, y: seen.append(y))
    batched = autobatch(plain)(ROWS)
    expected = torch.stack([plain.layer(x) ** 2 for x in ROWS])
    torch.testing.assert_close(batched, expected)


# A part in single precision, and numbers of the default dtype.
IN_SINGLE_PRECISION: dict[str, Forward] = {
    "part": lambda m, x: m.part(x),
    "data": lambda m, x: x,
    "number": lambda m, x: m.part(x) * 0.1,
    "tensor": lambda m, x: m.part(x) * torch.tensor(0.1),
    "wide": lambda m, x: m.part(x) * torch.tensor([0.1, 0.2, 0.3]),
    "average": lambda m, x: (m.part(x) > 0).sum() / 3 + m.part(x),
    "read": lambda m, x: torch.tensor(m.part(x).sum().item()) * m.part(x),
    "embedding": lambda m, x: m.word(torch.tensor(1)) + m.part(x),
    "recurrent": lambda m, x: m.gru(m.part(x).view(3, 1))[0],
    "total": lambda m, x: total([m.part(x), x]),
    "attend": lambda m, x: attend(m.part(x), [m.part(x), x], [x, m.part(x)]),
    "rows": lambda m, x: rows(torch.ones(2, 3))[0] * m.part(x),
    "new": lambda m, x: m.part(x) + m.part(x).new_zeros(3) + m.part(x).new_tensor([0.1, 0.2, 0.3]),
}  # fmt: skip


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def dtype(request: pytest.FixtureRequest) -> Any:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", IN_SINGLE_PRECISION)
def test_dtypes_are_those_of_the_plain_loop(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = {"part": nn.Linear(3, 3), "word": nn.Embedding(3, 3), "gru": nn.GRU(1, 2)}
    function = IN_SINGLE_PRECISION[name]
    model = Wrap(lambda m, x: function(m, x) * m.unit, **parts).float()
    model.unit = nn.Parameter(torch.ones((), dtype=torch.float32))
    check(model, ROWS, tolerance=1e-5)


def test_a_recurrent_layer_draws_a_mask_per_example() -> None:
    model: Any = autobatch(model_of(lambda m, x: m.deep(m.layer(x).view(3, 1))[0]))
    rows_of_equal_examples = model(ROWS[:1] * 20)
    rows_of_equal_examples.sum().backward()
    assert len(rows_of_equal_examples.unique(dim=0)) > 1
    assert model.layer.weight.grad.any()
    torch.testing.assert_close(model.eval()(ROWS), model(ROWS, batch=False))


def test_a_random_call_without_a_backward_pass_under_vmap_is_refused() -> None:
    def inner(m: Any, x: Any) -> Any:
        return checkpoint(lambda y: F.dropout(traced_by_outer(y)), x, use_reentrant=False)

    model = autobatch(model_of(lambda m, x: m.inner(m.layer(x)), inner))
    with pytest.raises(TypeError, match="has not been computed"):
        model(ROWS).sum().backward()
