"""Types of the values on wires, and their inference in both directions."""

import threading
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Signature, signature
from itertools import repeat
from numbers import Integral
from types import MethodType
from typing import Any, NoReturn, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.types import TensorType as RowTensorType

DtypeLike = str | torch.dtype | np.dtype[Any] | type
"""A dtype of torch, its name, or a dtype of numpy."""

ShapeLike = int | np.integer[Any] | list[int] | tuple[int, ...]
"""The length of a vector, or of each axis."""


# Types of values ----------------------------------------------------------------------------------


class ResultType:
    """Type of a value on a wire; only its subclasses have instances."""

    # What the constructor takes: equal types have equal arguments.
    _arguments: tuple[object, ...] = ()
    # Whether instances are not made of others: tensors and host objects.
    _is_terminal = False
    # Whether the number of terminals differs between instances.
    _varies = False

    def _inside(self) -> tuple["ResultType", ...]:
        """Types of the items or elements."""
        return ()

    def _mapped(self, fn: Callable[["ResultType", Any], object], instance: object) -> object:
        """Replace each terminal of an instance by the result of ``fn(type, value)``."""
        return fn(self, instance) if self._is_terminal else None

    def walk(self) -> Iterator["ResultType"]:
        """Iterate over the type and all types inside."""
        yield self
        for inner in self._inside():
            yield from inner.walk()

    @property
    def size(self) -> int | None:
        """Number of terminals, or ``None`` if it depends on the instance."""
        varies = any(kind._varies for kind in self.walk())
        return None if varies else len(self.terminal_types())

    def terminal_types(self) -> list["ResultType"]:
        """Types of all terminals: tensors and host objects."""
        return [kind for kind in self.walk() if kind._is_terminal]

    def for_each_terminal(self, fn: Callable[["ResultType", Any], None], instance: object) -> None:
        """Call ``fn(type, value)`` on every terminal of an instance, in order."""
        self._mapped(fn, instance)

    def flatten(self, instance: object) -> list[Any]:
        """List the terminals of an instance."""
        flat: list[Any] = []
        self._mapped(lambda _, value: flat.append(value), instance)
        return flat

    def unflatten(self, flat: Iterable[object], shaped_like: object) -> Any:
        """Build an instance from terminals, with sequences as long as in ``shaped_like``."""
        terminals = iter(flat)
        shape = _ANY if shaped_like is None else shaped_like
        return self._mapped(lambda *_: next(terminals), shape)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._arguments == other._arguments

    def __hash__(self) -> int:
        return hash((type(self), self._arguments))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._arguments))})"


TypeLike = (
    ResultType | int | np.integer[Any] | list[Any] | tuple["TypeLike", ...] | str | torch.dtype
)
"""What :func:`convert_to_type` takes."""

# Stands for a tuple of any length, where only terminals matter.
_ANY = object()


class TensorType(ResultType):
    """Shape and dtype of one tensor, without the batch axis.

    Args:
        shape: Dimensions; ``()`` is a scalar, a number n a vector of n.
        dtype: A torch dtype or its name.

    Raises:
        TypeError: If the dtype is unknown, or a dimension is not a number or negative.

    Example:
        >>> TensorType((3,)) == TensorType([3], torch.float32)
        True
        >>> TensorType(())
        TensorType((), 'float32')
    """

    _is_terminal = True

    def __init__(self, shape: ShapeLike, dtype: DtypeLike = "float32") -> None:
        #: Length of each axis.
        self.shape = _lengths_of(shape)
        #: Name of the dtype.
        self.dtype = str(dtype_of(dtype)).removeprefix("torch.")
        self._arguments = self.shape, self.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object."""
        return dtype_of(self.dtype)

    @property
    def row_type(self) -> RowTensorType:
        """The type under which the engine keeps rows of it."""
        return RowTensorType(self.shape, self.torch_dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Zeros of the type, so that ``np.ones_like`` and the like take it."""
        return np.zeros(self.shape, self.dtype if dtype is None else dtype)

    def __str__(self) -> str:
        return str(self.row_type)


class PyObjectType(ResultType):
    """Any Python object; it never reaches the device.

    Example:
        >>> PyObjectType()
        PyObjectType()
    """

    _is_terminal = True

    def __str__(self) -> str:
        return "object"


class VoidType(ResultType):
    """Nothing; its only instance is ``None``.

    Example:
        >>> VoidType().flatten(None)
        []
    """

    def __str__(self) -> str:
        return "nothing"


class TupleType(ResultType):
    """A tuple of values; it behaves as a Python sequence of their types.

    Args:
        *item_types: What :func:`convert_to_type` takes; or one iterable of :class:`ResultType`.

    Example:
        >>> pair = TupleType(3, "int64")
        >>> pair[1], len(pair)
        (TensorType((), 'int64'), 2)
    """

    @overload
    def __init__(self, *item_types: TypeLike) -> None: ...
    @overload
    def __init__(self, item_types: Iterable[ResultType], /) -> None: ...
    def __init__(self, *item_types: Any) -> None:
        only = item_types[0] if len(item_types) == 1 else None
        # Tuple types, strings and shapes can be iterated over, too.
        if isinstance(only, Iterable) and not isinstance(only, ResultType | str | torch.Size):
            items = tuple(only)
            # A list of numbers is a shape, though.
            if all(isinstance(item, ResultType) for item in items):
                item_types = items

        #: The types of the items.
        self.items: tuple[ResultType, ...] = tuple(map(convert_to_type, item_types))
        self._arguments = self.items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[ResultType]:
        return iter(self.items)

    @overload
    def __getitem__(self, key: SupportsIndex) -> ResultType: ...
    @overload
    def __getitem__(self, key: slice) -> "TupleType": ...
    def __getitem__(self, key: SupportsIndex | slice) -> ResultType:
        return TupleType(*self.items[key]) if isinstance(key, slice) else self.items[key]

    def _inside(self) -> tuple[ResultType, ...]:
        return self.items

    def _mapped(self, fn: Callable[[ResultType, Any], object], instance: object) -> object:
        values = (_ANY,) * len(self) if instance is _ANY else instance
        if not isinstance(values, tuple | list) or len(values) != len(self):
            problem = "TupleType: not an instance of the type"
            raise mismatch(TypeError, problem, f"a tuple of {len(self)}", repr(instance))
        pairs = zip(self.items, values, strict=True)
        return tuple(item_type._mapped(fn, value) for item_type, value in pairs)

    def __str__(self) -> str:
        return _tuple_text(map(str, self.items))


class SequenceType(ResultType):
    """A sequence of any length; all its elements are of one type.

    Args:
        elem_type: What :func:`convert_to_type` takes.

    Example:
        >>> SequenceType(3)
        SequenceType(TensorType((3,), 'float32'))
    """

    _varies = True

    def __init__(self, elem_type: TypeLike) -> None:
        #: The type of the elements.
        self.element_type = convert_to_type(elem_type)
        self._arguments = (self.element_type,)

    def _inside(self) -> tuple[ResultType, ...]:
        return (self.element_type,)

    def _mapped(self, fn: Callable[[ResultType, Any], object], instance: Any) -> object:
        return [self.element_type._mapped(fn, element) for element in instance]

    def __str__(self) -> str:
        return f"[{self.element_type}]"


class BroadcastSequenceType(SequenceType):
    """An endless sequence of one value, to be zipped with sequences that end.

    An instance is ``itertools.repeat(value)``.

    Args:
        elem_type: What :func:`convert_to_type` takes.

    Example:
        >>> BroadcastSequenceType(()).unflatten([], repeat(()))
        repeat(())
    """

    _varies = False

    def _mapped(self, fn: Callable[[ResultType, Any], object], instance: Any) -> object:
        return repeat(self.element_type._mapped(fn, repeated_value(instance)))

    def __str__(self) -> str:
        return f"[{self.element_type}, …]"


def repeated_value(instance: object) -> object:
    """The value of ``itertools.repeat(value)``; while examples are traced, the instance itself."""
    return next(instance) if isinstance(instance, repeat) else instance


# Conversion ---------------------------------------------------------------------------------------


def convert_to_type(type_like: TypeLike) -> ResultType:
    """Convert the short form of a type.

    Args:
        type_like: A type; a number n (a vector of n); a list of dimensions, with the dtype last
            if it is not float32; a ``torch.Size``; a tuple of types; a dtype or its name (scalar).

    Raises:
        TypeError: If it is none of these.

    Example:
        >>> convert_to_type((3, [2, 2, "int32"], "int64"))
        TupleType(TensorType((3,), 'float32'), TensorType((2, 2), 'int32'), TensorType((), 'int64'))
    """
    if isinstance(type_like, ResultType):
        return type_like
    if isinstance(type_like, Integral | torch.Size) and not isinstance(type_like, bool):
        return TensorType(type_like)
    if isinstance(type_like, tuple):
        return TupleType(*map(convert_to_type, type_like))
    if isinstance(type_like, list):
        if type_like and not isinstance(type_like[-1], Integral):
            return TensorType(type_like[:-1], type_like[-1])
        return TensorType(type_like)
    if isinstance(type_like, str | torch.dtype):
        return TensorType((), type_like)
    expected = "a type, a number, a list (shape), a tuple (of types), or a dtype"
    raise mismatch(TypeError, "convert_to_type: not a type", expected, repr(type_like))


def canonicalize_type(type_like: TypeLike) -> ResultType:
    """Turn tuples and sequences that hold only host objects into one host object.

    Example:
        >>> canonicalize_type((SequenceType(PyObjectType()), PyObjectType()))
        PyObjectType()
    """
    result = convert_to_type(type_like)
    inside = [canonicalize_type(inner) for inner in result._inside()]
    if not inside:
        return result

    holds_objects = all(inner == PyObjectType() for inner in inside)
    is_endless = isinstance(result, BroadcastSequenceType)
    return PyObjectType() if holds_objects and not is_endless else type(result)(*inside)


def dtype_of(dtype: DtypeLike) -> torch.dtype:
    """Find a torch dtype by object, name, or numpy dtype."""
    name = np.dtype(dtype).name if isinstance(dtype, type | np.dtype) else dtype
    torch_dtype = getattr(torch, name, None) if isinstance(name, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        expected = "a torch dtype or its name, such as 'float32' or 'int64'"
        raise mismatch(TypeError, "TensorType: unknown dtype", expected, repr(dtype))
    return torch_dtype


def _lengths_of(shape: ShapeLike) -> tuple[int, ...]:
    lengths = shape if isinstance(shape, list | tuple) else (shape,)
    expected = "a list or tuple of numbers, without the batch axis"

    if not all(isinstance(length, Integral) for length in lengths):
        problem = "TensorType: the shape must be fully known"
        raise mismatch(TypeError, problem, expected, repr(shape))
    if any(length < 0 for length in lengths):
        raise mismatch(TypeError, "TensorType: negative dimension", expected, repr(shape))

    return tuple(map(int, lengths))


# Components with an input and an output type ------------------------------------------------------


class PerThread(threading.local):
    """A list that each thread has for itself."""

    def __init__(self) -> None:
        self.items: list[Any] = []


_Made = TypeVar("_Made")
_IO = TypeVar("_IO", bound="IOBase")

# Components whose types are being propagated.
_queue = PerThread()


def propagate_types(*components: "IOBase") -> None:
    """Propagate known types, beginning with some components, until nothing changes."""
    queue = _queue.items
    is_running = len(queue) > 0
    queue += components
    if is_running:
        return

    try:
        # More components are appended while this runs.
        for component in queue:
            if component._is_complete:
                component._infer()
    finally:
        queue.clear()


# A subclass of ABCMeta, so that users can define abstract layers.
class _KeepsArguments(ABCMeta):
    """Keep the arguments of a constructor, and start type inference when it has ended."""

    def __call__(cls: type[_Made], *arguments: Any, **named: Any) -> _Made:
        component = super().__call__(*arguments, **named)  # type: ignore[misc]
        component._arguments = arguments, named
        component._is_complete = True
        propagate_types(component)
        return component

    @property
    def __signature__(cls) -> Signature:
        """What ``help`` shows: the parameters of the constructor instead of ``__call__``."""
        return signature(MethodType(cls.__init__, cls))  # type: ignore[misc]


class IOBase(metaclass=_KeepsArguments):
    """Base class of blocks, layers and forward declarations: a name, input and output type.

    A type is ``None`` until it is known. Whenever one becomes known, the component and its
    dependents derive others from it (``_infer``).

    Args:
        input_type: What :func:`convert_to_type` takes, if it is known already.
        output_type: The same for the output.
        name: For messages and drawings.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> io = td.IOBase(input_type=3).set_io_types(td.FC(2))
        >>> io.input_type, io.output_type
        (TensorType((3,), 'float32'), TensorType((2,), 'float32'))
    """

    _arguments: tuple[Sequence[Any], dict[str, Any]] = ((), {})
    # Valid classes of types; empty for all.
    _input_kinds: tuple[type[ResultType], ...] = ()
    _output_kinds: tuple[type[ResultType], ...] = ()

    def __init__(
        self,
        input_type: TypeLike | None = None,
        output_type: TypeLike | None = None,
        name: str | None = None,
    ) -> None:
        if name is not None and not isinstance(name, str):
            problem = f"{type(self).__name__}: the name is not a string"
            raise mismatch(TypeError, problem, "a string or None", repr(name))
        #: Name given by the user.
        self.name: str | None = name
        self._kind = type(self).__name__.lstrip("_")
        # False until the constructor has ended: types are not propagated before.
        self._is_complete = False
        self._types: dict[str, ResultType | None] = {"input": None, "output": None}
        self._classes = {"input": self._input_kinds, "output": self._output_kinds}
        # Components that derive their types again when a type of this one becomes known.
        self._dependents: list[IOBase] = []
        self.set_input_type(input_type).set_output_type(output_type)

    @property
    def input_type(self) -> ResultType | None:
        """Type of the input, ``None`` while it is unknown."""
        return self._types["input"]

    @property
    def output_type(self) -> ResultType | None:
        """Type of the output, ``None`` while it is unknown."""
        return self._types["output"]

    def set_input_type(self: _IO, input_type: TypeLike | None) -> _IO:
        """Set the input type; None changes nothing, and a type that differs is an error."""
        return self._set_type("input", input_type)

    def set_output_type(self: _IO, output_type: TypeLike | None) -> _IO:
        """Set the output type; None changes nothing, and a type that differs is an error."""
        return self._set_type("output", output_type)

    def set_input_type_classes(self: _IO, *classes: type[ResultType]) -> _IO:
        """Restrict the input type to some classes."""
        return self._restrict("input", classes)

    def set_output_type_classes(self: _IO, *classes: type[ResultType]) -> _IO:
        """Restrict the output type to some classes."""
        return self._restrict("output", classes)

    def set_io_types(self: _IO, other: "IOBase") -> _IO:
        """Set both types to the known types of another block or layer."""
        return self.set_input_type(other.input_type).set_output_type(other.output_type)

    def _set_type(self: _IO, side: str, type_like: TypeLike | None) -> _IO:
        if type_like is None:
            return self

        old = self._types[side]
        new = canonicalize_type(type_like)
        if new == old:
            return self
        if old is not None:
            self._fail(f"the {side} type differs", old, new)

        self._check_class(side, new)
        self._types[side] = new
        propagate_types(self, *self._dependents)
        return self

    def _restrict(self: _IO, side: str, classes: tuple[type[ResultType], ...]) -> _IO:
        self._classes[side] = classes
        self._check_class(side, self._types[side])
        return self

    def _check_class(self, side: str, kind: ResultType | None) -> None:
        classes = self._classes[side]
        if classes and kind is not None and not isinstance(kind, classes):
            expected = " or ".join(valid.__name__ for valid in classes)
            self._fail(f"a wrong kind of {side}", expected, kind)

    def _fail(
        self,
        problem: str,
        expected: object = "",
        got: object = "",
        *,
        kind: type[Exception] = TypeError,
        hint: str = "",
    ) -> NoReturn:
        """Raise an error about this component; types are shown in short and as they are made."""
        raise mismatch(
            kind,
            f"{self._label()}: {problem}",
            _type_or_object_text(expected),
            _type_or_object_text(got),
            where=self._path(),
            hint=hint,
        )

    def _check_callable(self, name: str, function: object, expected: str) -> None:
        if not callable(function):
            self._fail(f"{name} cannot be called", expected, repr(function))

    def _label(self) -> str:
        """Name of the component in messages and paths."""
        return self.name or self._kind

    def _path(self) -> str:
        """Path to the component in the whole model."""
        return self._label()

    def _infer(self) -> None:
        """Derive types from those that are known."""

    def _shown_arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the arguments, and those by name, of the call that creates the component."""
        return self._arguments

    def __repr__(self) -> str:
        """Write the call that creates the component; it evaluates to an equal one."""
        arguments, named = self._shown_arguments()
        texts = [_text_of(value) for value in arguments]
        for key, value in named.items():
            if (key, value) != ("name", None):
                texts.append(f"{key}={_text_of(value)}")
        return f"{self._kind}({', '.join(texts)})"


# Texts --------------------------------------------------------------------------------------------


def _text_of(value: object) -> str:
    """Write an argument as in code; functions by their names."""
    if isinstance(value, dict):
        items = [f"{key!r}: {_text_of(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_text_of, value))}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return _tuple_text(map(_text_of, value))
    if isinstance(value, torch.dtype):
        return repr(str(value).removeprefix("torch."))

    is_function = callable(value) and not isinstance(value, IOBase | nn.Module)
    return getattr(value, "__name__", repr(value)) if is_function else repr(value)


def _tuple_text(items: Iterable[str]) -> str:
    texts = list(items)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _type_or_object_text(value: object) -> object:
    return f"{value}, {value!r}" if isinstance(value, ResultType) else value
