"""Errors that written code raises before it is known where."""

from typing import Any


class UnknownKey(KeyError):
    """Says that a key is unknown, with its message as it is written (``KeyError`` quotes it)."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Complaint(Exception):
    """Carries what written code finds wrong, until the tracer knows the block and the example."""

    def __init__(self, error: type[Exception], what: str, **facts: Any) -> None:
        super().__init__(what)
        self.error, self.what, self.facts = error, what, facts
