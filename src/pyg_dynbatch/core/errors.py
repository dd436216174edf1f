"""Format errors in user input: up to five lines in Python, one on a command line."""

import argparse
from operator import index
from typing import NoReturn, SupportsIndex, TypeVar

import torch

E = TypeVar("E", bound=Exception)


class Mismatch(str):
    """The message of an error in user input, which the command line prints in one line."""

    __slots__ = ()


def mismatch_text(
    what: str, expected: object = "", got: object = "", *, where: object = "", hint: object = ""
) -> Mismatch:
    """Format what is wrong, expected, got, where, and a hint; empty parts are left out."""
    lines = [f"{what}."]
    parts = (("expected:", expected), ("got:", got), ("where:", where), ("try:", hint))
    lines += [f"  {label:<9} {part}" for label, part in parts if str(part) != ""]
    return Mismatch("\n".join(lines))


def mismatch(
    kind: type[E],
    what: str,
    expected: object = "",
    got: object = "",
    *,
    where: object = "",
    hint: object = "",
) -> E:
    """Make an error of a built-in class with the message of :func:`mismatch_text`.

    Example:
        >>> raise mismatch(ValueError, "Collater: the list is empty", "at least one example", 0)
        Traceback (most recent call last):
        ValueError: Collater: the list is empty.
          expected: at least one example
          got:      0
    """
    return kind(mismatch_text(what, expected, got, where=where, hint=hint))


def described(value: object) -> str:
    """Write what was found in the place of a tensor: dtype and shape, or the class."""
    if isinstance(value, torch.Tensor):
        kind = "" if value.layout == torch.strided else f", {value.layout}"
        where = " on meta" if value.device.type == "meta" else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor {list(value.shape)}{kind}{where}"
    return "nothing" if value is None else type(value).__name__


def checked_count(name: str, value: object) -> int:
    """Return a whole number that is at least 1."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise mismatch(TypeError, f"{name} is not a whole number", "1 or more", repr(value))
    if (number := index(value)) < 1:
        raise mismatch(ValueError, f"{name} is too small", "1 or more", number)
    return number


class OneLineArguments(argparse.ArgumentParser):
    """Parses the options of a sub-command; a wrong one gives one line and exit code 2."""

    def __init__(self, prog: str, description: str = "", **options: object) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print the message on the error stream and ends the program."""
        line = " ".join(message.split())
        self.exit(2, f"pyg-dynbatch: error: {line}; see '{self.prog} --help'\n")
