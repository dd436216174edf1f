"""Learn input and output types in both directions, as soon as anything is known."""

import threading
from abc import ABC
from typing import Any, TypeVar

from pyg_dynbatch.blocks.result_types import ResultType, canonicalize_type, convert_to_type, shown
from pyg_dynbatch.core.errors import mismatch

_IO = TypeVar("_IO", bound="IOBase")


class _Queue(threading.local):
    """Whoever has to look again at its types; one queue a thread."""

    def __init__(self) -> None:
        self.waiting: list[IOBase] = []
        self.running = False


_queue = _Queue()


def wake(*parts: "IOBase | None") -> None:
    """Lets parts derive what they can from the types they now know, until nobody learns more.

    Types only ever go from unknown to known, so this ends; a queue stands in for recursion.
    """
    _queue.waiting += [part for part in parts if part is not None]
    if _queue.running:
        return
    _queue.running = True
    try:
        while _queue.waiting:
            part = _queue.waiting.pop(0)
            if part._settled:
                part._infer()
    finally:
        _queue.waiting.clear()
        _queue.running = False


class IOBase(ABC):  # noqa: B024 - layers count as such without inheriting
    """Has a name, an input type and an output type, each unknown (``None``) at first.

    Blocks and forward declarations are such; layers have one, and count as such too.

    Args:
        input_type: What :func:`convert_to_type` takes, if it is known already.
        output_type: The same for the output.
        name: For messages and pictures.

    Raises:
        TypeError: If the name is no string.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> io = td.IOBase(input_type=3).set_io_types(td.FC(2))
        >>> io.input_type, io.output_type
        (TensorType((3,), 'float32'), TensorType((2,), 'float32'))
        >>> isinstance(td.Scalar(), td.IOBase), isinstance(td.FC(2), td.IOBase)
        (True, True)
    """

    def __init__(self, input_type: Any = None, output_type: Any = None, name: Any = None) -> None:
        if name is not None and not isinstance(name, str):
            raise TypeError(
                mismatch(
                    f"{type(self).__name__}: the name is no string",
                    expected="a string or None",
                    got=repr(name),
                )
            )
        self._name = name
        self._kind = type(self).__name__.lstrip("_")
        # Nobody looks at types before the constructor is through.
        self._settled = True
        self._types: dict[str, ResultType | None] = {"input": None, "output": None}
        self._classes: dict[str, tuple[type[ResultType], ...]] = {}
        self._listeners: list[IOBase] = []
        for side, given in (("input", input_type), ("output", output_type)):
            if given is not None:
                self._types[side] = canonicalize_type(convert_to_type(given))

    @property
    def name(self) -> str | None:
        """Name given by the user."""
        return self._name

    @property
    def input_type(self) -> ResultType | None:
        """Type of the input, ``None`` while it is unknown."""
        return self._types["input"]

    @property
    def output_type(self) -> ResultType | None:
        """Type of the output, ``None`` while it is unknown."""
        return self._types["output"]

    def set_input_type(self: _IO, input_type: Any) -> _IO:
        """States the input type; None states nothing.

        Raises:
            TypeError: If it is known to be another one, or of a kind that does not fit.
        """
        return self if input_type is None else self._learn("input", input_type)

    def set_output_type(self: _IO, output_type: Any) -> _IO:
        """States the output type; None states nothing.

        Raises:
            TypeError: If it is known to be another one, or of a kind that does not fit.
        """
        return self if output_type is None else self._learn("output", output_type)

    def set_input_type_classes(self: _IO, *classes: type[ResultType]) -> _IO:
        """States of which kinds the input type may be."""
        return self._restrict("input", classes)

    def set_output_type_classes(self: _IO, *classes: type[ResultType]) -> _IO:
        """States of which kinds the output type may be."""
        return self._restrict("output", classes)

    def set_io_types(self: _IO, other: "IOBase") -> _IO:
        """Takes over both types of another block or layer, as far as they are known."""
        for side, known in (("input", other.input_type), ("output", other.output_type)):
            if known is not None:
                self._learn(side, known)
        return self

    def _learn(self: _IO, side: str, given: Any) -> _IO:
        new, old = canonicalize_type(convert_to_type(given)), self._types[side]
        if new == old:
            return self
        if old is not None:
            raise TypeError(
                mismatch(
                    f"{self._label()}: the {side} type is another one",
                    expected=f"{shown(old)}, {old!r}",
                    got=f"{shown(new)}, {new!r}",
                    where=self._path(),
                )
            )
        self._check_class(side, new)
        self._types[side] = new
        wake(self, *self._listeners)
        return self

    def _restrict(self: _IO, side: str, classes: tuple[type[ResultType], ...]) -> _IO:
        self._classes[side] = classes
        known = self._types[side]
        if known is not None:
            self._check_class(side, known)
        return self

    def _check_class(self, side: str, found: ResultType) -> None:
        classes = self._classes.get(side)
        if classes and not isinstance(found, classes):
            raise TypeError(
                mismatch(
                    f"{self._label()}: a wrong kind of {side}",
                    expected=" or ".join(kind.__name__ for kind in classes),
                    got=f"{shown(found)}, {found!r}",
                    where=self._path(),
                )
            )

    def _label(self) -> str:
        """What messages and paths call it."""
        return self._name or self._kind

    def _path(self) -> str:
        """Where it stands in the whole model."""
        return self._label()

    def _infer(self) -> None:  # noqa: B027 - some have nothing to derive
        """Derives types from types; called whenever one became known."""
