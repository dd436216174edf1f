"""Law: autobatch leaves the process as it was, after every way to record.

That no import changes it is a test of `tests/training/test_light.py`.
"""

import builtins
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import singledispatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch import autobatch, emit

ROWS = [*torch.randn(4, 3, generator=torch.Generator().manual_seed(0))]


def process() -> dict[str, Any]:
    """Return what autobatch replaces or stops while it records."""
    return {
        "isinstance": builtins.isinstance,
        "singledispatch": functools._find_impl,  # type: ignore[attr-defined]
        "garbage is collected": gc.isenabled(),
        "seeds": (torch.manual_seed, torch.random.seed),
        "calls": (nn.Module.__call__, Part.__call__),
    }


@singledispatch
def kind_of(value: object) -> str:
    return "object"


@kind_of.register
def _(value: Tensor) -> str:
    return "tensor"


class Part(nn.Linear):
    """A submodule with a call of its own."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class Model(nn.Module):
    """Calls a function on what a submodule returns."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.part = Part(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.part(x))


def recorded(value: Any) -> Any:
    assert isinstance(value, Tensor)
    assert kind_of(value) == "tensor"
    return value * 2


def suspended(value: Any) -> Any:
    return recorded(value) + (1 if value.sum() > 0 else 2)


def failing(value: Any) -> Any:
    recorded(value)
    raise KeyError("no such word")


def interrupted(value: Any) -> Any:
    recorded(value)
    raise KeyboardInterrupt


def fails_while_suspended(value: Any) -> Any:
    if value.sum() > 0:
        failing(value)
    return value


def refused(value: Any) -> Any:
    value.add_(1)
    return value


def emits(value: Any) -> Any:
    emit("value", recorded(value))
    return value


FUNCTIONS: dict[Callable[[Any], Any], type[BaseException] | None] = {
    recorded: None,
    suspended: None,
    emits: None,
    failing: KeyError,
    refused: TypeError,
    interrupted: KeyboardInterrupt,
    fails_while_suspended: KeyError,
}
READING_VALUES = (suspended, fails_while_suspended)


def its_error(function: Callable[[Any], Any], method: str) -> AbstractContextManager[Any]:
    if method == "collate" and function in READING_VALUES:
        return pytest.raises(RuntimeError)
    error = FUNCTIONS[function]
    return nullcontext() if error is None else pytest.raises(error)


@pytest.fixture(params=[True, False], ids=["collects garbage", "collects no garbage"])
def _garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.param:
        gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_garbage")
@pytest.mark.parametrize("method", ["__call__", "explain", "collate"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cache", [True, False])
def test_a_call_leaves_the_process_as_it_was(
    function: Callable[[Any], Any], method: str, cache: bool
) -> None:
    model = autobatch(Model(function), cache=cache)
    before = process()
    with its_error(function, method):
        getattr(model, method)(ROWS)
    assert process() == before


def test_threads_that_record_at_once_leave_the_process_as_it_was() -> None:
    before = process()
    barrier = threading.Barrier(3)
    failures = list[BaseException]()

    def meets(value: Any) -> Any:
        barrier.wait(10)
        return suspended(value)

    def record() -> None:
        try:
            autobatch(Model(meets))(ROWS)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert process() == before


def test_what_others_replaced_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.isinstance
    monkeypatch.setattr(builtins, "isinstance", lambda value, kinds: original(value, kinds))
    before = process()
    autobatch(Model(recorded))(ROWS)
    assert process() == before
