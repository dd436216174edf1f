"""Format errors in user input: up to five lines in Python, one on a command line."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from numbers import Real
from operator import index, le, lt
from types import ModuleType
from typing import SupportsIndex, TypeVar

import torch

E = TypeVar("E", bound=Exception)
T = TypeVar("T")


class Mismatch(str):
    """The message of an error in user input, which the command line prints in one line."""

    __slots__ = ()


def mismatch_text(
    problem: str, expected: object = "", got: object = "", *, where: object = "", hint: object = ""
) -> Mismatch:
    """Format what is wrong, expected, got, where, and a hint; empty parts are left out."""
    lines = [f"{problem}."]
    parts = (("expected:", expected), ("got:", got), ("where:", where), ("try:", hint))
    lines += [f"  {label:<9} {part}" for label, part in parts if str(part) != ""]
    return Mismatch("\n".join(lines))


def mismatch(
    kind: type[E],
    problem: str,
    expected: object = "",
    got: object = "",
    *,
    where: object = "",
    hint: object = "",
) -> E:
    """Create an error of a built-in class with the message of :func:`mismatch_text`.

    Example:
        >>> raise mismatch(ValueError, "Collater: the list is empty", "at least one example", 0)
        Traceback (most recent call last):
        ValueError: Collater: the list is empty.
          expected: at least one example
          got:      0
    """
    return kind(mismatch_text(problem, expected, got, where=where, hint=hint))


def optional(module: str, problem: str, extra: str, expected: object = "") -> ModuleType:
    """Import a module that an extra of the package installs, or raise an error that names it."""
    try:
        return import_module(module)
    except ImportError as error:
        hint = f"in the checkout: pip install -e '.[{extra}]'"
        raise mismatch(ImportError, problem, expected, error, hint=hint) from error


def check_first_derivative(owner: str, hint: object = "") -> None:
    """Refuse to be recorded; for a backward pass written by hand, which has no derivative."""
    if torch.is_grad_enabled():
        problem = f"{owner}: second derivatives are not available"
        expected = "backward() or autograd.grad() without create_graph"
        raise mismatch(RuntimeError, problem, expected, "create_graph=True", hint=hint)


def describe_value(value: object) -> str:
    """Describe a value found instead of a tensor: its dtype and shape, or its class."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "nested tensor"
        kind = "" if value.layout == torch.strided else f", {value.layout}"
        where = " on meta" if value.device.type == "meta" else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor {list(value.shape)}{kind}{where}"
    return "nothing" if value is None else type(value).__name__


def checked_count(name: str, value: object, least: int = 1) -> int:
    """Return an integer that is not too small, or raise an error."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise mismatch(TypeError, f"{name} is not a whole number", f"{least} or more", repr(value))
    if (number := index(value)) < least:
        raise mismatch(ValueError, f"{name} is too small", f"{least} or more", number)
    return number


def count_or_none(name: str, value: object) -> int | None:
    """Return an integer that is at least 1, or None; raise an error for anything else."""
    return None if value is None else checked_count(name, value)


def checked_range(name: str, value: T, interval: str) -> T:
    """Return a number in an interval, such as ``"[0, 1)"`` without 1, or raise an error."""
    least, most = map(float, interval[1:-1].split(","))
    above = le if interval[0] == "[" else lt
    below = le if interval[-1] == "]" else lt
    if not isinstance(value, Real) or not (above(least, value) and below(value, most)):
        problem = f"{name} is out of range"
        raise mismatch(ValueError, problem, f"a number in {interval}", repr(value))
    return value


def checked_shape(problem: str, value: T | None, shape: Sequence[int], **notes: object) -> T:
    """Return a tensor that has this shape, or raise an error; notes are ``where`` and ``hint``."""
    if value is None or getattr(value, "shape", None) != tuple(shape):
        raise mismatch(ValueError, problem, list(shape), describe_value(value), **notes)
    return value


def checked_choice(problem: str, value: T, choices: Iterable[T], hint: object = "") -> T:
    """Return a value that is one of some choices, or raise a ValueError.

    Example:
        >>> checked_choice("Collater: unknown direction", "up", ["bottom_up", "top_down"])
        Traceback (most recent call last):
        ValueError: Collater: unknown direction.
          expected: 'bottom_up' or 'top_down'
          got:      'up'
    """
    known = list(choices)
    if value in known:
        return value
    *others, last = map(repr, known)
    expected = f"{', '.join(others)} or {last}" if others else last
    raise mismatch(ValueError, problem, expected, repr(value), hint=hint)
