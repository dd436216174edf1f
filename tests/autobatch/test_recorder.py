"""The recorder in C records what its definition in Python records, and keeps nothing."""

import gc
import hashlib
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch.autobatch import Stack, attend, autobatch, cond, recorder, total, while_loop
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import SignatureSite
from pyg_dynbatch.core.native import NATIVE_SWITCH
from tests.autobatch.programs import Random, examples
from tests.autobatch.test_autobatch import Wrap, check

X = [*torch.randn(3, 4, generator=torch.Generator().manual_seed(0))]


def of_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.linspace(0, 1, 4)


OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.linspace(-1, 1, 4),
    "view": lambda: torch.eye(4)[1],
    "strided": lambda: torch.eye(4)[:, 2],
    "expanded": lambda: torch.ones(1).expand(4),
    "matrix": lambda: torch.eye(4),
    "number": lambda: torch.tensor(2.5),
    "integer": lambda: torch.tensor(3),
    "integers": lambda: torch.tensor([1, 2, 3, 4]),
    "booleans": lambda: torch.tensor([True, False, True, True]),
    "double": lambda: torch.ones(4, dtype=torch.float64),
    "trained": lambda: torch.ones(4, requires_grad=True),
    "result": lambda: torch.ones(4, requires_grad=True).exp(),
    "of NumPy": lambda: torch.from_numpy(np.linspace(0, 1, 4)),
    "of inference mode": of_inference_mode,
}
"""Tensors that a model does not compute."""


class Outside(nn.Module):
    """Uses tensors of all kinds that it is given, or makes."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.part, self.kinds = nn.Linear(4, 4), kinds or tuple(OUTSIDE)

    def forward(self, given: dict[str, Tensor]) -> Any:
        y = self.part(OUTSIDE["plain"]())
        for kind in self.kinds:
            made = OUTSIDE[kind]()
            y = y + (given[kind] * y).sum() / 9 + (torch.stack([made, made])[1] * y).sum() / 9
            y = y - (y @ made if kind == "plain" else y * made).sum() / 9
        return y.sum()


def outside(number: int) -> list[dict[str, Tensor]]:
    """Return examples; the first two share their tensors."""
    found = [{kind: make() for kind, make in OUTSIDE.items()} for _ in range(number)]
    return [*found[:1], *found]


def digest(seeds: range) -> str:
    """Return the digest of all records of random programs, and of tensors from outside."""
    found = hashlib.sha256()
    for seed in seeds:
        torch.manual_seed(seed)
        models = (Random().double(), examples(seed, 3, 30)), (Outside(), outside(3))
        for model, batch in models if seed else models[1:]:
            session = autobatch(model)._batched(batch)[1]
            found.update(session.past[: session.base].tobytes())
            found.update(repr(session.table.recorded.signatures).encode())
    return found.hexdigest()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.skipif(recorder.native is None, reason="the C extension was not built")
@pytest.mark.parametrize("seeds", [3, pytest.param(24, marks=pytest.mark.long)])
def test_c_records_what_the_definition_records(seeds: int) -> None:
    code = f"from tests.autobatch.test_recorder import digest; print(digest(range({seeds})))"
    environment = {**os.environ, NATIVE_SWITCH: "0"}
    given: Any = {"cwd": Path(__file__).parents[2], "env": environment, "check": True}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **given)
    assert found.stdout.strip() == digest(range(seeds))


CALLS: dict[str, Callable[[Any], Any]] = {
    "many arguments": lambda x: torch.cat([x + k for k in range(40)]).sum(),
    "keywords": lambda x: torch.add(input=x, other=x, alpha=2).clamp(min=-1, max=10**15).sum(),
    "numbers": lambda x: (2**x + x**2 - 1 / (x * x + 1) - (0.0 - x) * -0.0 + x % 2.0).sum(),
    "large numbers": lambda x: (x * 2.0**70 + 2**62).sum() + x.sum() * 10**12,
    "indices": lambda x: (
        x[..., None][:, 0][::2].sum() + x[-1] + x[None, 1:3].sum() + x[[0, 2]].sum()
    ),
    "shapes": lambda x: x.view(torch.Size([2, 2])).reshape((4,)).expand(3, 4).sum(dim=(0, 1)),
    "dtypes": lambda x: x.to(torch.float32).double().sum() + x.to("cpu", torch.float64).sum(),
    "texts": lambda x: torch.div(x, 0.3, rounding_mode="floor").sum(),
    "NumPy": lambda x: (x * np.float64(0.5) + np.int64(2)).sum(),
    "comparisons": lambda x: ((x > 0) & ~(x < 1) | (x != 0.5) ^ (x >= 0)).sum() + 0 * x.sum(),
    "lists of lists": lambda x: torch.stack([torch.cat([x, x]), torch.cat((x, 1 - x))]).sum(),
    "results": lambda x: sum(part.sum() * k for k, part in enumerate(x.chunk(4))) + x.max(0)[0],
    "unused": lambda x: (x.unbind(), (1e6 * abs(x)).exp(), x.sum())[-1],  # an infinite derivative
    "negative": lambda x: (-x + +x + abs(x) + x.__neg__() + (x @ x)).sum(),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_all_kinds(name: str) -> None:
    function = CALLS[name]
    check(
        Wrap(lambda m, x: function(m.part(x)), part=nn.Linear(4, 4)).double(),
        [x.double() for x in X],
    )


@pytest.mark.parametrize("kind", OUTSIDE)
def test_tensors_from_outside(kind: str) -> None:
    model, given = autobatch(Outside(kind)), [outside(3) for _ in range(2)]
    with torch.set_grad_enabled(kind != "of inference mode"):  # those cannot be saved
        results = [model(given[way], batch=way == 0) for way in range(2)]
    torch.testing.assert_close(*results)
    if results[1].requires_grad:
        leaves = [[e[kind] for e in part[1:] if e[kind].is_leaf] for part in given]
        trained = [[*model.parameters(), *(x for x in part if x.requires_grad)] for part in leaves]
        pairs = zip(results, trained, strict=True)
        torch.testing.assert_close(*[torch.autograd.grad(r.sum(), given) for r, given in pairs])


@pytest.mark.parametrize("kind", sorted(OUTSIDE.keys() - {"expanded"}))
def test_tensors_from_outside_are_used_as_they_were(kind: str) -> None:
    def run(m: Any, given: dict[str, Tensor]) -> Any:
        y = m.part(OUTSIDE["plain"]())
        y = y + (given[kind] * y).sum() + given[kind].sum()
        with torch.inference_mode(kind == "of inference mode"):
            changed: Any = given[kind].detach()
            changed = changed.numpy() if kind == "of NumPy" else changed
            changed[...] = 0
        return (y * given[kind]).sum()

    model = autobatch(Wrap(run, part=nn.Linear(4, 4)))
    with torch.no_grad():
        if kind in ("of NumPy", "of inference mode", "integer"):  # the first two uncounted: copied
            wanted = model(outside(2)[1:], batch=False)
            torch.testing.assert_close(model(outside(2)[1:]), wanted)
            return
        with pytest.raises(RuntimeError, match="changed in place after the model had used it"):
            model(outside(2)[1:])


def test_a_tensor_from_outside_that_is_resized_is_refused() -> None:
    def run(m: Any, x: Tensor) -> Any:
        made = torch.zeros(4)
        y = m.part(x) + made
        made.resize_(2)
        return y

    with pytest.raises(RuntimeError, match="changed in place after the model had used it"):
        autobatch(Wrap(run, part=nn.Linear(4, 4)))(X)


SHARED: dict[str, Callable[[Any], Tensor]] = {
    "parameter": lambda m: m.weight,
    "buffer": lambda m: m.shift,
    "frozen": lambda m: m.frozen,
    "view": lambda m: m.part.weight[1],
}
AS_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "total": lambda y, w: total([y, w, y]),
    "like": lambda y, w: total([], like=w) + y,
    "attend": lambda y, w: attend(y, [w, y]),
    "query": lambda y, w: attend(w, [y, 2 * y]),
    "stack": lambda y, w: Stack.of([w, y]).push(w).pop()[1].peek(1),
    "loop": lambda y, w: while_loop(
        lambda _, n: n < 2, lambda x, n: (x + total([w, y]), n + 1), (w, torch.tensor(0))
    )[0],
    "branch": lambda y, w: cond(y.sum() > 0, lambda: w, lambda: 2 * y),
}
AS_OPERANDS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda y, w: w * y,
    "stack": lambda y, w: torch.stack([w, y]).sum(0),
    "cat": lambda y, w: torch.cat([y, w])[1:5],
    "linear": lambda y, w: torch.nn.functional.linear(y, torch.eye(4, dtype=w.dtype), w),
}


class Sharing(nn.Module):
    """Uses a parameter or buffer as the value of a row and as an operand, in any order."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        self.part, self.weight = nn.Linear(4, 4), nn.Parameter(torch.linspace(-1, 1, 4))
        self.frozen = nn.Parameter(torch.linspace(0, 1, 4), requires_grad=False)
        self.register_buffer("shift", torch.linspace(1, 2, 4))
        self.kind, self.seed = kind, seed

    def forward(self, x: Tensor) -> Any:
        draw, y = random.Random(self.seed), self.part(x)
        w = SHARED[self.kind](self)
        for _ in range(draw.randrange(2, 8)):
            y = draw.choice([*AS_ROWS.values(), *AS_OPERANDS.values()])(y, w).tanh()
            if draw.random() < 0.2 and y.sum() > 1e9:
                break
        return y + self.part(x)


@pytest.mark.parametrize("kind", SHARED)
@given(st.integers(0, 2**32))
def test_parameters_as_rows_and_as_operands(kind: str, seed: int) -> None:
    check(Sharing(kind, seed).double(), [x.double() for x in X])


class Deciding(nn.Module):
    """Reads values, loops over rows, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.fails = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        y, _ = while_loop(lambda y, n: n < 2, lambda y, n: (y * x, n + 1), (y, torch.tensor(0)))
        if self.fails and bool(y.sum() < 1e9):
            raise ArithmeticError("fails")
        return y.sum()


class Nested(nn.Module):
    """Takes a tree of values, which cannot be recorded, so that the module is opened."""

    def forward(self, tree: Any) -> Any:
        (((value,),),) = tree
        return value * 2


def taken_apart(m: Any, x: Tensor) -> Any:
    return m.inside((((m.part(x),),),)).sum()


def sessions() -> set[int]:
    gc.collect()
    return {id(each) for each in gc.get_objects() if isinstance(each, Session)}


def test_no_session_outlives_its_call() -> None:
    before = sessions()
    model = autobatch(Deciding())
    ways: list[Callable[[], Any]] = [
        lambda: model(X),
        lambda: model(X).sum().backward(),
        lambda: model.collate(X),
        lambda: [autobatch(model.plain, cache=True)(X) for _ in range(2)],
        lambda: model.explain(X),
        lambda: autobatch(Wrap(taken_apart, part=nn.Linear(4, 4), inside=Nested()))(X),
    ]
    for way in ways:
        way()
    model.plain.fails = True
    with pytest.raises(ArithmeticError):
        model(X)
    assert sessions() <= before
    assert gc.isenabled()


class Token:
    """An object that tells whether it was collected, and refers to others."""

    def __init__(self) -> None:
        self.other: Any = None


def recorder_of(root: object) -> Any:
    return recorder.Recorder(recorder.Lookup(), root, True, False)


def in_recorder(name: str, token: Token) -> None:
    token.other = recorder_of(None)
    setattr(token.other, name, token)


def as_root(token: Token) -> None:
    token.other = recorder_of(token)


def in_lookup(token: Token) -> None:
    site = SignatureSite(0, (0,))
    site.build = token  # type: ignore[assignment]
    token.other = recorder_of(None)
    with pytest.raises(TypeError, match="not callable"):
        token.other.record(site, [])


def in_value(token: Token) -> None:
    token.other = recorder_of(token).record(SignatureSite(0, (0,)), [])


def in_method(token: Token) -> None:
    token.other = recorder.Method(token)  # type: ignore[arg-type]


def in_snapshot(token: Token) -> None:
    token.other = recorder.Snapshot()
    token.other.take(({"token": token},), (), ())


FIELDS = (
    "numbers",
    "belonging",
    "known",
    "like",
    "outside",
    "next_row",
    "unread",
    "device",
    "watcher",
)
CYCLES: dict[str, Callable[[Token], None]] = {
    **{f"recorder, {name}": partial(in_recorder, name) for name in (*FIELDS, "refused")},
    "recorder, root": as_root,
    "lookup": in_lookup,
    "value": in_value,
    "method": in_method,
    "snapshot": in_snapshot,
}


@pytest.mark.skipif(recorder.native is None, reason="the C extension was not built")
@pytest.mark.parametrize("name", CYCLES)
def test_cycles_are_collected(name: str) -> None:
    token = Token()
    CYCLES[name](token)
    is_alive = weakref.ref(token)
    gc.collect()
    assert is_alive() is token
    del token
    gc.collect()
    assert is_alive() is None


def test_threads_record_by_themselves() -> None:
    wanted, found = autobatch(Deciding()), dict[int, Any]()

    def run(number: int) -> None:
        for _ in range(20):
            found[number] = wanted([x * number for x in X])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in found.items():
        torch.testing.assert_close(result, wanted([x * number for x in X], batch=False))
    assert len(found) == 4
