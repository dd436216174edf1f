"""What strangers write: it works as in the plain module, or an error says what to write instead."""

import contextlib
import copy
import math
import operator
import pickle
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch.autobatch import AutoBatch, attend, autobatch, emit, rows, total
from tests.autobatch.models import TreeLSTM, trees
from tests.autobatch.test_autobatch import Wrap, check

ROWS = [*torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double()]
Function = Callable[[Any, Any], Any]


def model_of(function: Function, **parts: nn.Module) -> AutoBatch:
    torch.manual_seed(0)
    parts.setdefault("part", nn.Linear(3, 3))
    return autobatch(Wrap(function, **parts).double())


def keys(m: Any, x: Any) -> Any:
    a, b = m.part(x), m.part(-x)
    known = {a: 1, b: 2}
    return known[a] * a + known[b] * b


def categorical(m: Any, x: Any) -> Any:
    return torch.distributions.Categorical(logits=m.part(x)).log_prob(torch.tensor(1))


def metadata(m: Any, x: Any) -> Any:
    y = m.part(x)
    numbers = [*y.stride(), y.stride(0), y.numel(), torch.numel(y), y.ndimension(), y.nbytes]
    flags = [torch.is_floating_point(y), torch.is_complex(input=y), y.is_contiguous()]
    return y * sum((n + 2) * int(value) for n, value in enumerate([*numbers, *flags]))


@singledispatch
def dispatched(x: object) -> Any:
    return x


@dispatched.register
def _(x: Tensor) -> Any:
    return x * 2


def added(m: Any, x: Any) -> Any:
    y = m.part(x)
    y += 1
    y -= m.part(-x)
    return y


def added_to_another_name(m: Any, x: Any) -> Any:
    y = z = m.part(x)
    y += 1
    return z


def added_to_a_view(m: Any, x: Any) -> Any:
    y = m.part(x)
    view = y[:2]
    view += 1
    return y


def added_to_what_is_viewed(m: Any, x: Any) -> Any:
    y = m.part(x)
    view = y[:2]
    y += 1
    return view


def in_format(m: Any, x: Any) -> Any:
    y = m.part(x)
    return m.part(y) * float(f"{y.sum():.2f}") * float("%.1f" % y.sum())  # noqa: UP031


def total_without_gradient(m: Any, x: Any) -> Any:
    y = m.part(x)
    with torch.no_grad():
        s = total([y, y + 1])
    return s * y


class View(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[..., :2]


ZEROS = (0.0, -0.0, np.float64(0.0), np.float64(-0.0))
WORKS: dict[str, Function] = {
    "isinstance": lambda m, x: x if isinstance(m.part(x), Tensor) else -x,
    "isinstance of several": lambda m, x: x if isinstance(m.part(x), (list, Tensor)) else -x,
    "not a list": lambda m, x: x if isinstance(m.part(x), list) else -x,
    "is_tensor": lambda m, x: x if torch.is_tensor(m.part(x)) else -x,
    "== None": lambda m, x: x if m.part(x) == None else -x,  # noqa: E711
    "!= None": lambda m, x: x if m.part(x) != None else -x,  # noqa: E711
    "is None": lambda m, x: x if m.part(x) is None else -x,
    "keys": keys,
    "format": in_format,
    "sorted": lambda m, x: sorted([m.part(x).sum(), m.part(-x).sum()])[0],
    "max": lambda m, x: max(m.part(x)),
    "in": lambda m, x: m.part(x) if m.part(x)[0] in [m.part(-x)[0], m.part(x)[0]] else x,
    "in a value": lambda m, x: x if 5.0 in m.part(x) else -x,
    "math": lambda m, x: m.part(x) * math.exp(m.part(x).sum()),
    "range": lambda m, x: sum(m.part(x) for _ in range(m.part(x).argmax() + 1)),
    "index": lambda m, x: [x, -x, 2 * x][m.part(x).argmax()],
    "unpack": lambda m, x: (lambda a, b, c: a * b + c)(*m.part(x)),
    "numpy scalars": lambda m, x: np.float64(2) * m.part(x) - m.part(x)[np.int64(1)],
    "signed zeros": lambda m, x: torch.cat([m.part(x) / zero for zero in ZEROS]),
    "data": lambda m, x: m.part(x).data * m.part(x),
    "detach": lambda m, x: m.part(x).detach() * m.part(x),
    "to": lambda m, x: m.part(x).to("cpu").to(x.device).to(x).cpu(),
    "to dtype": lambda m, x: m.part(x).to(torch.float32).double(),
    "real": lambda m, x: torch.complex(m.part(x), x).real,
    "H": lambda m, x: torch.outer(m.part(x), x).H,
    "is_cuda": lambda m, x: m.part(x) * m.part(x).nelement() * (1 + m.part(x).is_cuda),
    "no_grad": lambda m, x: torch.no_grad()(lambda: m.part(x))() * m.part(x),
    "outside rows": lambda m, x: torch.stack([m.part(x), x, torch.ones(3).double()]),
    "keyword": lambda m, x: m.part(input=m.part(x)),
    "forward": lambda m, x: m.part.forward(m.part(x)),
    "floor": lambda m, x: m.part(x) + m.part(x).detach() // 0.7 + 2 // m.part(x).detach(),
    "mT": lambda m, x: torch.outer(m.part(x), x).mT,
    "categorical": categorical,
    "metadata": metadata,
    "columns": lambda m, x: torch.column_stack([m.part(x), x]),
    "padded": lambda m, x: nn.utils.rnn.pad_sequence([m.part(x)[:2], x], batch_first=True),
    "single dispatch": lambda m, x: dispatched(m.part(x)),
    "list": lambda m, x: [part(x) for part in (m.part, m.part)][1],
    "total without gradient": total_without_gradient,
    "argument and its view": lambda m, x: torch.cat(m.view(m.part(x))),
    "+=": added,
    "equal": lambda m, x: x if torch.equal(m.part(x), m.part(x)) else -x,
    "equal to a tensor": lambda m, x: x if m.part(x).equal(x) else m.part(-x),
    "allclose": lambda m, x: x if torch.allclose(x, m.part(x), atol=9.0) else -x,
    "is_nonzero": lambda m, x: x if torch.is_nonzero(m.part(x).sum()) else -x,
    "conjugate view": lambda m, x: (m.complex.weight.conj()[0] * m.part(x)).abs(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.parametrize("name", WORKS)
def test_works_as_in_the_plain_module(name: str) -> None:
    parts = {"view": View(), "complex": nn.Linear(3, 3, dtype=torch.complex128)}
    model = model_of(WORKS[name], **parts)
    found, expected = (model(ROWS, batch=batch) for batch in (True, False))
    torch.testing.assert_close(found, expected)
    if expected.requires_grad:
        gradients = [torch.autograd.grad(y.nan_to_num(0, 0, 0).sum(), model.part.weight)  # type: ignore[attr-defined]
                     for y in (found, expected)]  # fmt: skip
        torch.testing.assert_close(*gradients, equal_nan=True)


def attends_to_other_widths(m: Any, x: Any) -> Any:
    return attend(m.part(x)[:2], [m.part(x)])


def attends_to_numbers(m: Any, x: Any) -> Any:
    return attend(m.part(x)[:1], [m.part(x)])


def rows_elsewhere(_: Any, x: Any) -> Any:
    return rows(torch.empty(2, 3, device="meta"))[0] + x


def assigned(m: Any, x: Any) -> Any:
    rows = torch.zeros(2, 3).double()
    rows[0] = m.part(x)
    return rows


def cast(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return m.part(x)


def cast_while_reading(m: Any, x: Any) -> Any:
    y = m.part(x)
    with torch.autocast("cpu", torch.bfloat16):
        return y * y.sum().item()


def read_in_inference_mode(m: Any, x: Any) -> Any:
    y = m.part(x)
    with torch.inference_mode():
        positive = bool(y.sum() > 0)
    return y * 2 if positive else y


def changed_afterwards(m: Any, x: Any) -> Any:
    x = x.clone()
    y = m.part(x)
    x.add_(1)
    return y + m.part(x)


def assigned_to_result(m: Any, x: Any) -> Any:
    y = m.part(x)
    y[0] = 1
    return y


def packed_inside(m: Any, x: Any) -> Any:
    sequence = torch.stack([m.part(x), x])
    return nn.utils.rnn.pack_padded_sequence(sequence, torch.tensor([2]), batch_first=True).data


def packed(m: Any, x: Any) -> Any:
    return m.gru(nn.utils.rnn.pack_sequence([x[:, None]]))[1]


def with_computed_weights(m: Any, x: Any) -> Any:
    weight = torch.outer(m.part(x), x)
    return torch.func.functional_call(m.other, {"weight": weight, "bias": x}, (x,))


def gradient_of_outside(m: Any, x: Any) -> Any:
    return torch.func.grad(lambda y: m.part(y).sum())(x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


MEMORY: list[Tensor] = []


class Memory(nn.Module):
    """Keeps a state between calls, outside of the model."""

    def forward(self, x: Tensor) -> Tensor:
        MEMORY.append(x)
        return torch.stack(MEMORY).sum(0)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2) if x.dim() == 1 else x.flip(0)


PARTS: dict[str, Callable[[], nn.Module]] = {
    "counter": Counter, "memory": Memory, "odd": Odd, "norm": lambda: nn.BatchNorm1d(3),
    "gru": lambda: nn.GRU(1, 3), "other": lambda: nn.Linear(3, 3),
    "inner": lambda: Wrap(lambda m, x: x if torch.equal(x, x.abs()) else -x),
    "batched": lambda: autobatch(TreeLSTM()),
}  # fmt: skip
# The words of an error are set apart by " … ".
REFUSED: dict[str, tuple[type[Exception], str, Function]] = {
    "np.array": (RuntimeError, "numpy … tolist() or item()", lambda m, x: np.array(m.part(x))),
    "numpy": (RuntimeError, "numpy … tolist() or item()", lambda m, x: m.part(x).numpy()),
    "numpy of a list": (RuntimeError, "tolist()", lambda m, x: np.array([m.part(x)])),
    "detach numpy": (RuntimeError, "tolist()", lambda m, x: m.part(x).detach().numpy()),
    "ndarray": (TypeError, "ndarray", lambda m, x: m.part(x)[np.array([0, 1])]),
    "torch.tensor": (TypeError, "torch.stack", lambda m, x: torch.tensor([m.part(x).sum()])),
    "copy": (TypeError, "pickled or copied", lambda m, x: copy.copy(m.part(x))),
    "deepcopy": (TypeError, "pickled or copied", lambda m, x: copy.deepcopy(m.part(x))),
    "pickle": (TypeError, "pickled or copied", lambda m, x: pickle.dumps(m.part(x))),
    "grad": (AttributeError, "return the value", lambda m, x: m.part(x).grad),
    "grad_fn": (AttributeError, "'grad_fn'", lambda m, x: m.part(x).grad_fn),
    "backward": (AttributeError, "return the value", lambda m, x: m.part(x).sum().backward()),
    "requires_grad_": (TypeError, "in place", lambda m, x: m.part(x).requires_grad_()),
    "assignment": (RuntimeError, "torch.stack", assigned),
    "+= of two names": (TypeError, "+= would change a value in place", added_to_another_name),
    "+= of a view": (TypeError, "+= would change a value in place", added_to_a_view),
    "+= of what is viewed": (TypeError, "+= would change", added_to_what_is_viewed),
    "item": (TypeError, "in place", assigned_to_result),
    "zero_": (TypeError, "in place", lambda m, x: m.part(x).zero_()),
    "out": (TypeError, "out", lambda m, x: torch.add(m.part(x), 1, out=torch.empty(3).double())),
    "changed afterwards": (RuntimeError, "changed in place … clone()", changed_afterwards),
    "odd": (Exception, "", lambda m, x: m.odd(m.part(x))),
    "norm": (ValueError, "BatchNorm1d … LayerNorm", lambda m, x: m.norm(m.part(x)[None])[0]),
    "wrong shape": (RuntimeError, "autobatch: part fails", lambda m, x: m.part(m.part(x)[:2])),
    "object": (TypeError, "object", lambda m, x: m.part(x).add(object())),
    "nested model": (RuntimeError, "plain module", lambda m, x: m.batched(trees())),
    "empty total": (ValueError, "empty … like=", lambda m, x: total([])),
    "total of shapes": (TypeError, "shapes", lambda m, x: total([m.part(x), m.part(x)[:2]])),
    "total of a value": (TypeError, "not a list", lambda m, x: total(m.part(x))),
    "attend to nothing": (ValueError, "empty", lambda m, x: attend(m.part(x), [])),
    "values": (ValueError, "one value per key", lambda m, x: attend(x, [m.part(x)], [x, x])),
    "on meta": (
        ValueError,
        "different device … meta",
        lambda m, x: m.part(torch.ones(3, device="meta").double()),
    ),
    "one_hot": (
        ValueError, "depends on values … suspend", lambda m, x: F.one_hot(m.part(x).argmax())
    ),
    "emit": (TypeError, "'loss' is not a tensor", lambda m, x: emit("loss", 1.0)),
    "inference mode": (
        RuntimeError, "inference mode is switched inside the model", read_in_inference_mode
    ),
    "attend to other widths": (TypeError, "vectors of one width", attends_to_other_widths),
    "attend with a number": (TypeError, "vectors of one width", attends_to_numbers),
    "rows elsewhere": (ValueError, "the device of the model", rows_elsewhere),
    "add_": (RuntimeError, "in place", lambda m, x: torch.zeros(3).double().add_(m.part(x))),
    "text operand": (TypeError, "operands of these types", lambda m, x: m.part(x) + "a"),
    "relu_": (RuntimeError, "in place", lambda m, x: torch.relu_(m.part(x))),
    "F.relu": (TypeError, "inplace=False", lambda m, x: F.relu(m.part(x), inplace=True)),
    "nn.ReLU": (TypeError, "inplace=False", lambda m, x: nn.ReLU(inplace=True)(m.part(x))),
    "autocast": (RuntimeError, "around the call", cast),
    "autocast at a read": (RuntimeError, "around the call", cast_while_reading),
    "mask": (ValueError, "getitem", lambda m, x: m.part(x)[m.part(x) > 0]),
    "script": (RuntimeError, "Lazy", lambda m, x: torch.jit.script(twice)(m.part(x))),
    "function": (TypeError, "Lazy", lambda m, x: Twice.apply(m.part(x))),
    "packed": (TypeError, "the sequence itself", packed),
    "packed inside": (TypeError, "the sequence itself", packed_inside),
    "functional_call": (RuntimeError, "not among its arguments", with_computed_weights),
    "transform": (TypeError, "a transform of torch.func", gradient_of_outside),
    "types": (TypeError, "example 1", lambda m, x: m.part(x) if x is not ROWS[1] else 0.0),
    "structures": (
        ValueError, "structures", lambda m, x: (m.part(x),) if x is ROWS[1] else m.part(x)
    ),
    "shapes": (
        ValueError, "float64[2] … emit", lambda m, x: m.part(x)[: 2 + (x is ROWS[1])]
    ),
    "emitted": (ValueError, "'a'", lambda m, x: emit("a", m.part(x)[: 2 + (x is ROWS[1])])),
    "own error": (ZeroDivisionError, "", lambda m, x: m.part(x) / (x is not ROWS[1] or 1 // 0)),
}  # fmt: skip


def twice(x: Tensor) -> Tensor:
    return 2 * x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 5 * gradient


# Seen when the results of all examples are put together.
OF_RESULTS = ("types", "structures", "shapes", "emitted")


OPERATORS = [f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")]
OPERATORS += ["iand", "ior", "ixor"]
METHODS = [name for name in dir(Tensor) if name.endswith("_") and not name.startswith("_")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
def test_no_tensor_is_changed_in_place_by_a_recorded_value(dtype: torch.dtype) -> None:
    one, other = torch.tensor([1, 0, 1]).to(dtype), torch.tensor([1, 1, 1]).to(dtype)
    functions = {name: getattr(operator, name) for name in OPERATORS}
    functions |= {name: getattr(Tensor, name) for name in METHODS}
    works, refused = list[str](), list[str]()

    def forward(m: Any, x: Any) -> Any:
        value = m.part(x)
        given = (value > -math.inf) if dtype == torch.bool else value.to(dtype) * 0 + 1
        for name in works:
            changed = one.clone()
            with pytest.raises(RuntimeError, match="in place|not a storage"):
                functions[name](changed, given)
            assert torch.equal(changed, one)
            refused.append(name)
        return value

    for name, function in functions.items():
        with contextlib.suppress(Exception):
            function(one.clone(), other.clone())
            works.append(name)
    model_of(forward, part=nn.Linear(3, 3))(ROWS[:1])
    assert refused == works and len(works) > 10


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_example_line_and_hint(name: str) -> None:
    kind, words, function = REFUSED[name]
    used = function.__code__.co_names
    model = model_of(function, **{part: make() for part, make in PARTS.items() if part in used})
    with pytest.raises(kind) as caught:
        model(ROWS)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "autobatch" in text and [word for word in words.split(" … ") if word not in text] == []
    assert f"example {int(name in (*OF_RESULTS, 'own error'))}" in text
    assert "test_misuse.py:" in text or name in OF_RESULTS
    if name == "structures":
        with pytest.raises(kind, match=words):
            model(ROWS, batch=False)
    # The model is usable afterwards.
    model.plain.function = lambda m, x: m.part(x)
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


def test_a_buffer_that_counts_calls_is_refused() -> None:
    model = model_of(lambda m, x: m.counter(m.part(x)), counter=Counter())
    with pytest.raises(RuntimeError, match=r"'counter.calls' was changed(.|\n)*new tensor"):
        model(ROWS)


def test_other_calls_that_are_refused() -> None:
    model, inner = model_of(lambda m, x: m.part(x)), autobatch(TreeLSTM())
    reads = model_of(lambda m, x: m.part(x) if bool(m.part(x).sum() > 0) else x)
    leaf = ROWS[0].clone().requires_grad_()
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "not a module for one example", lambda: autobatch(inner)),
        (ValueError, "list of examples is empty", lambda: inner([])),
        (ValueError, "list of examples is empty", lambda: model.explain([])),
        (ValueError, "list of examples is empty", lambda: model.collate([])),
        (TypeError, "can only be run batched", lambda: model(model.collate(ROWS), batch=False)),
        (ValueError, "requires gradients", lambda: model.collate([leaf])),
        (RuntimeError, r"reads a value[\s\S]*test_misuse.py:", lambda: reads.collate(ROWS)),
    ]
    for kind, words, call in calls:
        with pytest.raises(kind, match=words):
            call()


def test_values_of_an_earlier_call() -> None:
    kept: list[Any] = []
    model = model_of(lambda m, x: (kept.append(m.part(x)), kept[0] + 1)[1])
    model(ROWS)
    with pytest.raises(RuntimeError, match=r"different call of the model[\s\S]*test_misuse.py:"):
        model(ROWS)
    for use in (
        lambda: kept[0] + 1,
        lambda: torch.tanh(kept[0]),
        lambda: bool(kept[0].sum()),
        lambda: kept[0].tolist(),
    ):
        with pytest.raises(RuntimeError, match=r"outside the model|different call"):
            use()


def test_second_derivatives_run_one_by_one() -> None:
    model = autobatch(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double())
    examples = [x.clone().requires_grad_() for x in ROWS]

    def second(batch: bool) -> Any:
        loss = model(examples, batch=batch).square().sum()
        first = torch.autograd.grad(loss, examples, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), examples)

    with pytest.raises(RuntimeError, match=r"second derivatives(?s:.*)examples, batch=False"):
        second(batch=True)
    assert len(second(batch=False)) == len(examples)


@pytest.mark.parametrize("noise", [torch.randn_like, lambda x: random.random()])
def test_modules_draw_random_numbers_for_every_example(noise: Any) -> None:
    model = model_of(lambda m, x: m.odd(m.part(x)), odd=Wrap(lambda _, x: x + noise(x)))
    first, second = model(ROWS[:1] * 2)
    assert not torch.equal(first, second)


def test_a_submodule_that_is_recorded_call_by_call_is_named() -> None:
    inner = Wrap(lambda m, x: twice(x) if x.sum() > 9 else Twice.apply(x))
    with pytest.raises(TypeError, match=r"Wrap is recorded call by call: "):
        model_of(lambda m, x: m.inner(m.part(x)), inner=inner)(ROWS)


def test_functions_with_their_own_gradient_belong_into_modules() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Twice.apply(x)

    check(
        Wrap(lambda m, x: m.twice(m.part(x)), part=nn.Linear(3, 3), twice=Module()).double(), ROWS
    )


class Several(nn.Module):
    """A model of many kinds of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.part, self.drop = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Dropout(0.5)
        self.chain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.weight, self.scale = nn.Parameter(torch.randn(3, 3)), 2.0
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.chain(self.part(x)) + self.word(torch.tensor(2)) + self.shift * self.scale
        for layer in self.layers:
            y = layer(y)
        return self.chain[:2](y.to(self.weight.dtype)) @ self.weight + self.weight[1]


def step(model: Any) -> None:
    model([x.to(model.weight.dtype) for x in ROWS]).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def tie(model: Any) -> None:
    model.part.weight = model.layers[0].weight = model.weight


def widen(model: Any) -> None:
    model.word.weight = nn.Parameter(torch.randn(5, 1).double())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "step": step,
    "weight": lambda m: setattr(m.part, "weight", nn.Parameter(torch.randn(3, 3).double())),
    "own weight": lambda m: setattr(m.plain, "weight", nn.Parameter(torch.randn(3, 3).double())),
    "no bias": lambda m: setattr(m.part, "bias", None),
    "other shape": widen,
    "submodule": lambda m: setattr(m.plain, "part", nn.Linear(3, 3).double()),
    "other submodule": lambda m: setattr(m, "part", nn.Identity()),
    "longer list": lambda m: m.layers.append(nn.Linear(3, 3).double()),
    "other item": lambda m: m.chain.__setitem__(0, nn.Identity()),
    "attribute": lambda m: setattr(m.plain, "scale", 3.0),
    "buffer": lambda m: m.shift.add_(1),
    "tied": tie,
    "float": lambda m: m.float(),
    "half": lambda m: m.half(),
    "eval": lambda m: m.train(not m.training),
    "frozen": lambda m: m.requires_grad_(False),
    "loaded": lambda m: m.load_state_dict(Several().double().state_dict(), assign=True),
    "hook": lambda m: m.part.register_forward_hook(lambda _, args, y: 2 * y + args[0]),
    "pre-hook": lambda m: m.chain[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.part),
    "orthogonal": lambda m: nn.utils.parametrizations.orthogonal(m.chain[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_calls_are_seen(name: str) -> None:
    torch.manual_seed(0)
    model: Any = autobatch(Several().double())
    for change in (lambda m: None, CHANGES[name], lambda m: m.weight.requires_grad and step(m)):
        change(model)
        given = [x.to(model.weight.dtype) for x in ROWS]
        near = 5e-2 if model.weight.dtype == torch.float16 else 1e-5
        found, expected = (model(given, batch=batch) for batch in (True, False))
        torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_lazy_modules_take_their_shape_from_the_first_call() -> None:
    model = autobatch(nn.Sequential(nn.LazyLinear(2)).double())
    torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


def test_models_that_share_a_submodule() -> None:
    one, two = Several().double(), Several().double()
    two.chain = one.chain
    models = [autobatch(one), autobatch(two)]
    for model in (*models, *models):
        step(model)
        torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


@dataclass
class Item:
    x: Tensor
    times: int


@pytest.mark.parametrize(
    ("wrap", "x_of"),
    [
        (lambda x: {"x": x}, lambda e: e["x"]), (lambda x: (x, 1), lambda e: e[0]),
        (lambda x: Item(x, 2), lambda e: e.x * e.times), (lambda x: Data(x=x), lambda e: e.x),
    ],
)  # fmt: skip
def test_examples_of_any_kind(wrap: Any, x_of: Any) -> None:
    inner = Wrap(lambda m, e: m.part(x_of(e)), part=nn.Linear(3, 3))
    model = autobatch(Wrap(lambda m, e: m.inner(e) + m.inner.part(x_of(e)), inner=inner).double())
    torch.testing.assert_close(model([wrap(x) for x in ROWS]), model(map(wrap, ROWS), batch=False))


@pytest.mark.parametrize("given", [None, 3, "abc", {"a": ROWS[0]}])
def test_what_is_not_a_list_of_examples(given: Any) -> None:
    for batch in (True, False):
        with pytest.raises(TypeError, match="not a list of examples"):
            model_of(lambda m, x: m.part(x))(given, batch=batch)


def test_iterators_of_examples() -> None:
    model, given = model_of(lambda m, x: m.part(x)), iter(ROWS)
    torch.testing.assert_close(model(given), model(ROWS, batch=False))
    several: list[Iterable[Any]] = [tuple(ROWS), torch.stack(ROWS), map(torch.clone, ROWS)]
    for each in several:
        torch.testing.assert_close(model(each), model(ROWS))


def test_model_stays_usable_after_an_interruption() -> None:
    def forward(m: Any, x: Any) -> Any:
        y = m.part(x) * m.part(x).sum().item()
        if x is ROWS[2] and m.training:
            raise KeyboardInterrupt
        return y

    model = model_of(forward)
    with pytest.raises(KeyboardInterrupt):
        model(ROWS)
    torch.testing.assert_close(model.eval()(ROWS), model(ROWS, batch=False))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_change_between_two_flushes(mode: Any) -> None:
    def forward(m: Any, _: Any) -> Any:
        x = torch.ones(3).double()
        y = m.part(x) * m.part(x).sum().item()
        x.mul_(2)
        return y + m.part(x)

    with mode():
        model = model_of(forward)
        if mode is torch.no_grad:
            with pytest.raises(RuntimeError, match="changed in place"):
                model(ROWS)
        else:  # whose tensors do not count changes
            torch.testing.assert_close(model(ROWS), model(ROWS, batch=False))


def test_equal_tensors_have_their_own_gradients() -> None:
    same = torch.ones(3, dtype=torch.float64, requires_grad=True)
    given = [same, same, torch.ones(3, dtype=torch.float64, requires_grad=True)]
    model = model_of(lambda m, x: m.part(x) * x)
    found, expected = (
        torch.autograd.grad(model(given, batch=batch).sum(), given[1:]) for batch in (True, False)
    )
    torch.testing.assert_close(found, expected)


@dataclass(frozen=True)
class Scored:
    score: Tensor
    parts: tuple[Any, ...]


def test_dataclasses_are_stacked_and_sets_of_values_are_refused() -> None:
    model = model_of(lambda m, x: {"a": Scored(m.part(x), (x.sum(), "name"))})
    expected = model(ROWS, batch=False)["a"]
    batch = pickle.loads(pickle.dumps(model.collate(ROWS)))
    for given in (ROWS, batch):
        found = model(given)["a"]
        assert type(found) is Scored and found.parts[1] == ["name"] * len(ROWS)
        torch.testing.assert_close(found.score, expected.score)
        torch.testing.assert_close(found.parts[0], expected.parts[0])
    for function in (lambda m, x: {m.part(x)}, lambda m, x: (Data(x=m.part(x)), x)):
        with pytest.raises(TypeError, match="cannot be stacked") as caught:
            model_of(function)(ROWS)
        assert "example 0" in str(caught.value)


def test_an_index_out_of_range_names_the_example_and_the_line() -> None:
    words = [torch.tensor(n) for n in (1, 0, 9, 2)]
    model = model_of(lambda m, x: m.word(m.word(x).argmax() * 0 + x), word=nn.Embedding(3, 3))
    with pytest.raises(IndexError) as caught:
        model(words)
    text = "".join(caught.value.__notes__)
    assert "word" in text and "example 2, " in text and "test_misuse.py:" in text


def test_values_emitted_by_submodules() -> None:
    def emitting(_: Any, x: Any) -> Any:
        emit("inside", x * 2)
        return x + 1

    model = model_of(lambda m, x: m.inner(m.part(x)), inner=Wrap(emitting))
    expected = model(ROWS, batch=False)
    wanted = model.emitted["inside"].rows
    torch.testing.assert_close(model(ROWS), expected)
    torch.testing.assert_close(model.emitted["inside"].rows, wanted)
    assert "emits values" in str(model.explain(ROWS))


def test_random_functions_that_normalize_over_rows() -> None:
    found = model_of(lambda m, x: F.gumbel_softmax(m.part(x), dim=0))(ROWS)
    torch.testing.assert_close(found.sum(1), torch.ones(3).double())


def test_no_value_is_read_after_an_error() -> None:
    def broken(_: Any, x: Tensor) -> Any:
        return torch.linalg.cholesky(x.diag()).sum(0)  # not positive definite

    def forward(m: Any, x: Any) -> Any:
        y = m.inner(m.part(x))
        for _ in range(2):
            try:
                return y * bool(y.sum() > 0)
            except RuntimeError as error:
                if "after an error" in str(error):
                    raise
        return y

    with pytest.raises(RuntimeError, match="cholesky|after an error"):
        model_of(forward, inner=Wrap(broken))(ROWS)


def test_many_signatures_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_dynbatch.autobatch.model._MOST_SITES", 20)
    model = model_of(lambda m, x: m.part(x) * float(m.part(x).sum()))
    for _ in range(3):
        model([torch.randn(3, dtype=torch.float64) for _ in range(15)])
    (table,) = vars(model._local).values()
    assert len(table.sites) < 50
