"""Format every complaint about user input alike: five lines in Python, one on a command line."""

import argparse
from operator import index
from typing import NoReturn, SupportsIndex

import torch


class Mismatch(str):
    """The message of an error in what the user gave; the command line knows such errors by it."""

    __slots__ = ()


def mismatch(
    what: str, *, expected: object = "", got: object = "", where: object = "", mend: object = ""
) -> Mismatch:
    """Writes one error message: what is wrong, expected, got, where, and how to mend it.

    Args:
        what: The thing by name, a colon, and what is wrong with it in one clause, without a
            full stop.
        expected: What would have been right; left out when empty.
        got: What was found; left out when empty.
        where: File and line, example, level, argument or block path; left out when empty.
        mend: The usual mend; left out when empty.

    Returns:
        The message, one line a part.

    Example:
        >>> print(mismatch("Collater: the list is empty", expected="one example or more", got=0))
        Collater: the list is empty.
          expected: one example or more
          got:      0
    """
    lines = [f"{what}."]
    parts = (("expected:", expected), ("got:", got), ("where:", where), ("try:", mend))
    lines += [f"  {label:<9} {part}" for label, part in parts if str(part) != ""]
    return Mismatch("\n".join(lines))


def described(value: object) -> str:
    """Writes what was found in the place of a tensor: dtype and shape, or the class.

    Args:
        value: A tensor, None for nothing, or something else.

    Returns:
        A few words.

    Example:
        >>> described(torch.zeros(2, 3)), described([1]), described(None)
        ('float32 tensor [2, 3]', 'list', 'nothing')
    """
    if isinstance(value, torch.Tensor):
        kind = "" if value.layout == torch.strided else f", {value.layout}"
        where = " on meta" if value.device.type == "meta" else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor {list(value.shape)}{kind}{where}"
    return "nothing" if value is None else type(value).__name__


def checked_count(name: str, value: object) -> int:
    """Gives back a whole number of 1 or more.

    Args:
        name: What it counts, and for whom.
        value: The number.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is below 1.

    Example:
        >>> checked_count("NaryTreeLSTMCell: arity", 2)
        2
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            mismatch(f"{name} is not a whole number", expected="1 or more", got=repr(value))
        )
    if (number := index(value)) < 1:
        raise ValueError(mismatch(f"{name} is too small", expected="1 or more", got=number))
    return number


class OneLineArguments(argparse.ArgumentParser):
    """Parses the options of a sub-command; a wrong one gives one line and exit code 2.

    Example:
        >>> OneLineArguments(prog="pyg-dynbatch bench").allow_abbrev
        False
    """

    def __init__(self, prog: str, description: str = "", **options: object) -> None:
        # A shortened option is more often a mistyped one.
        super().__init__(prog, description=description, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Prints the message on the error stream and ends the program."""
        line = " ".join(message.split())
        self.exit(2, f"pyg-dynbatch: error: {line}; see '{self.prog} --help'\n")
