"""Small things that the tests of the core share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch.core import (
    Engine,
    Operations,
    Ragged,
    Recording,
    RowType,
    Signature,
    TensorType,
    scheduling,
)
from pyg_dynbatch.core.native import extension

SCALAR = TensorType(())
VECTOR = TensorType((3,))
WORD = TensorType((), torch.int64, "word")


@contextmanager
def as_users_run_it() -> Iterator[None]:
    """Switches off the checks of annotations that only the tests have, to read our own errors."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def unfused() -> Any:
    """Every call runs in a step of its own operation, as where there is no C."""
    return mock.patch.object(scheduling, "fuse", lambda calls, *_: calls)


def message(error: type[Exception], call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The text of the error that a call raises, with its notes."""
    with as_users_run_it(), pytest.raises(error) as caught:
        call(*args, **kwargs)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def refuses(call: Callable[[], object], words: str) -> None:
    """The call raises an error; its name and text have the words, which are set apart by " … "."""
    kinds = TypeError, ValueError, RuntimeError, LookupError
    with as_users_run_it(), pytest.raises(kinds) as caught:
        call()
    text = f"{caught.type.__name__}: {caught.value}"
    assert [part for part in words.split(" … ") if part not in text] == [], text


class Mix(nn.Module):
    """An operation of two vectors with parameters of its own."""

    random = False

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(self.left(left) + self.right(right))


class Vectors:
    """An engine with a small language on vectors: mix, squash and score."""

    def __init__(self) -> None:
        operations = Operations()
        self.mix = operations.add(Mix(), [VECTOR, VECTOR], [VECTOR], name="mix")
        linear = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.squash = operations.add(linear, [VECTOR], [VECTOR], name="squash")
        self.score = operations.add(nn.Linear(3, 2), [VECTOR], [TensorType((2,))], name="score")
        self.engine = Engine(operations)


def cell_engine(
    cell: nn.Module, state: RowType, arity: int | None, row: TensorType
) -> tuple[Engine, Signature]:
    """An engine whose one operation is a cell, which reads an input row and states."""
    operations = Operations()
    children = [Ragged(state)] if arity is None else [state] * arity
    node = operations.add(cell, [row, *children], [state], name="node", random=True)
    return Engine(operations), node


def constants(recording: Recording, count: int) -> list[Any]:
    """Different constant vectors."""
    return [recording.constant(VECTOR, [float(n), 0.5, -0.25 * n]) for n in range(count)]


def chain_program(signature: Signature, length: int) -> Recording:
    """One call after another, each on the result of the one before and a constant."""
    recording = Recording()
    state, other = constants(recording, 2)
    for _ in range(length):
        state = recording.call(signature, state, other)
    recording.output(state)
    return recording


def tree_program(signature: Signature, shape: Any) -> Recording:
    """A binary tree written as nested pairs; a leaf is a number."""
    recording = Recording()

    def build(part: Any) -> Any:
        if isinstance(part, tuple):
            return recording.call(signature, build(part[0]), build(part[1]))
        return recording.constant(VECTOR, [float(part)] * 3)

    recording.output(build(shape))
    return recording


def has_float_modes() -> bool:
    """Return whether subnormal numbers can be rounded to zero here; the mode stays as it is."""
    native = extension()
    if native is None:
        return False
    modes = native.flush_subnormals(1)
    native.restore_subnormals(modes)
    return bool(modes)
