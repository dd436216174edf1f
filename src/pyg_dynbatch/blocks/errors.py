"""Errors that written code raises before it is known where."""

from typing import Any


class UnknownKey(KeyError):
    """Says that a key is unknown, with its message as it is written (``KeyError`` quotes it).

    Example:
        >>> print(UnknownKey("two lines"))
        two lines
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Complaint(Exception):
    """Carries what written code finds wrong, until the tracer knows the block and the example.

    Args:
        error: Class of the error to raise.
        what: First line of its message.
        **facts: Further lines, and ``path`` where it is known.
    """

    def __init__(self, error: type[Exception], what: str, **facts: Any) -> None:
        super().__init__(what)
        self.error, self.what, self.facts = error, what, facts
