"""What the table of torch functions is made of: calls of one row, and how they take stacked rows.

A maker is given a call and returns how it is run on stacked rows, or ``None``. It is registered for
the functions and methods of some names::

    @form_of("fliplr")
    def flipped_columns(call: TorchCall) -> Batched | None:
        return call.form(lambda rows: rows.flip(2))
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import GetSetDescriptorType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dynbatch.core.types import TensorType

Form = Callable[..., Any]


class _Row:
    """The class of the mark of rows."""

    def __reduce__(self) -> str:
        return "ROW"


ROW = _Row()
"""Marks a row among the arguments of a call."""


Template = tuple[tuple[object, ...], Mapping[str, object]]
"""Positional and keyword arguments of a call, with marks for rows."""


class Batched(NamedTuple):
    """How a call is run on stacked rows.

    Args:
        form: Takes the stacked rows, in the order in which they occur among the arguments.
        is_direct: Whether it is the very same call on stacked rows.
        draws: Whether it draws random numbers: each row, each element its own.
        is_constant: Whether the same call on stacked rows makes what it makes of one row, without
            a batch axis, as ``x.new_zeros(3)`` does.
    """

    form: Form
    is_direct: bool
    draws: bool = False
    is_constant: bool = False


class TorchCall:
    """A call of a function of torch on one row.

    Args:
        func: The function, or the method of ``Tensor``.
        name: Its name.
        args: Positional arguments, with ``ROW`` for each row.
        kwargs: Keyword arguments.
        rows: Type of each row.
    """

    def __init__(
        self,
        func: Form,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rows: Sequence[TensorType],
    ) -> None:
        self.func = func
        self.name = name
        self.args = tuple(args)
        # NumPy's name of a dimension, which torch accepts.
        self.kwargs = {"dim" if name == "axis" else name: kwargs[name] for name in kwargs}
        self.rows = rows

    @cached_property
    def result(self) -> Any:
        """What the call returns, without content."""
        return caller(self.func, meta(self.args), meta(self.kwargs))(*self.meta_rows(None))

    def meta_rows(self, size: int | None) -> list[Tensor]:
        """Return one row, or stacked rows, of each type, without content."""
        axis = () if size is None else (size,)
        shapes = [(*axis, *row.shape) for row in self.rows]
        return [
            torch.empty(shape, dtype=row.dtype, device="meta")
            for shape, row in zip(shapes, self.rows, strict=True)
        ]

    @cached_property
    def operands(self) -> list[TensorType | Tensor]:
        """Rows, as their types, and tensors that all rows share, in order; none in containers."""
        types = iter(self.rows)
        values = (*self.args, *self.kwargs.values())
        return [next(types) if value is ROW else value for value in values if is_tensor(value)]

    @property
    def has_nested_rows(self) -> bool:
        """Whether there are rows in containers."""
        values = (*self.args, *self.kwargs.values())
        return sum(value is ROW for value in values) != len(self.rows)

    @property
    def rank(self) -> int:
        """The largest number of dimensions of a row or shared tensor."""
        return max(len(operand.shape) for operand in self.operands)

    @property
    def is_of_one_row(self) -> bool:
        """Whether the first argument is a row, and no other is a tensor."""
        first = next(iter((*self.args, *self.kwargs.values())), None)
        return first is ROW and len(self.operands) == 1 == len(self.rows)

    @property
    def has_equal_rows(self) -> bool:
        """Whether all tensors among the arguments are rows, of equal rank."""
        ranks = {len(operand.shape) for operand in self.operands}
        return len(ranks) == 1 and len(self.operands) == len(self.rows)

    def argument(self, name: str, position: int, default: object = None) -> Any:
        """Return an argument that is given by position or name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def with_argument(self, name: str, position: int, value: object) -> "TorchCall":
        """Return the call with an argument replaced."""
        args = self.args
        kwargs = self.kwargs
        if len(args) > position:
            args = (*args[:position], value, *args[position + 1 :])
        else:
            kwargs = {**kwargs, name: value}
        return TorchCall(self.func, self.name, args, kwargs, self.rows)

    def bound(self, names: str, **defaults: object) -> dict[str, Any]:
        """Return the arguments by name, those that are given first and in the order of rows.

        Raises:
            TypeError: If an argument has none of these names, or two have the same.
        """
        known = names.split()
        arguments = dict(zip(known, self.args, strict=False))
        if len(self.args) > len(known) or not self.kwargs.keys() <= {*known} - arguments.keys():
            raise TypeError(f"{self.name}() takes {names}")
        arguments |= self.kwargs
        return arguments | {name: defaults.get(name) for name in known if name not in arguments}

    def types_of(self, arguments: Mapping[str, object]) -> dict[str, TensorType | Tensor]:
        """Return the type of each row, and each shared tensor, by the name of the argument."""
        names = [name for name in arguments if is_tensor(arguments[name])]
        return dict(zip(names, self.operands, strict=True))

    @property
    def on_stacked_rows(self) -> Form:
        """The same call on stacked rows."""
        return caller(self.func, self.args, self.kwargs)

    def direct(self, *, draws: bool = False) -> Batched:
        """Run the same call on stacked rows."""
        return Batched(self.on_stacked_rows, is_direct=True, draws=draws)

    def form(self, form: Form, *, draws: bool = False) -> Batched:
        """Run a different call."""
        return Batched(form, is_direct=False, draws=draws)


Maker = Callable[[TorchCall], Batched | None]

TABLE: dict[Any, tuple[str, Maker]] = {}
"""The name and the maker of each function of the table."""


def named(names: str) -> Iterator[Any]:
    """List the functions and methods of these names."""
    for name in names.split():
        owners = (Tensor,) if name.startswith("__") else (torch, Tensor, F, torch._C._nn)
        for owner in owners:
            if function := getattr(owner, name, None):
                yield function


def form_of(names: str) -> Callable[[Maker], Maker]:
    """Register a maker for the functions, methods and attributes of these names."""

    def register(maker: Maker) -> Maker:
        for name in names.split():
            for function in named(name):
                if isinstance(function, torch.dtype):  # such as torch.float
                    continue
                is_attribute = isinstance(function, GetSetDescriptorType)
                TABLE[function.__get__ if is_attribute else function] = name, maker
        return maker

    return register


def form_of_functions(*functions: Callable[..., Any]) -> Callable[[Maker], Maker]:
    """Register a maker for these functions alone, whose namesakes take other arguments."""

    def register(maker: Maker) -> Maker:
        for function in functions:
            TABLE[function] = function.__name__, maker
        return maker

    return register


def mapped(function: Callable[[Any], object], value: Any) -> Any:
    """Apply a function to the items of a container; other objects are returned as they are."""
    if hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if type(value) in (tuple, list):
        return type(value)(map(function, value))
    if isinstance(value, dict):
        return {name: function(item) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(function, (value.start, value.stop, value.step)))
    return value


def filled(value: object, rows: Iterator[Tensor]) -> Any:
    """Put rows in their places."""
    return next(rows) if value is ROW else mapped(lambda item: filled(item, rows), value)


def is_tensor(value: object) -> bool:
    """Return whether an argument is a row or a shared tensor."""
    return value is ROW or isinstance(value, Tensor)


def has_row(value: object) -> bool:
    """Return whether there is a row in nested containers."""
    return value is ROW or any(map(has_row, items_of(value)))


def has_tensor(value: object) -> bool:
    """Return whether there is a row or a shared tensor in nested containers."""
    return is_tensor(value) or any(map(has_tensor, items_of(value)))


def items_of(value: object) -> Iterable[object]:
    """List the items of a container."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    return value if isinstance(value, tuple | list) else ()


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def meta(value: object) -> Any:
    """Return arguments with shared tensors without content, on the meta device."""
    if isinstance(value, Tensor):
        size = value.size()
        stride = value.stride()
        return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
    is_device = isinstance(value, str) and value.partition(":")[0] in _DEVICES
    if is_device or isinstance(value, torch.device):
        return torch.device("meta")
    return mapped(meta, value)


def caller(func: Form, args: Sequence[object], kwargs: Mapping[str, object]) -> Form:
    """Return what calls a function with rows in their places."""
    if not kwargs and all(value is ROW for value in args):
        return func
    if args and args[0] is ROW and not has_row(args[1:]) and not has_row(dict(kwargs)):
        others = tuple(args[1:])
        return lambda row: func(row, *others, **kwargs)

    def call(*rows: Tensor) -> Any:
        rest = iter(rows)
        filled_args = [filled(value, rest) for value in args]
        filled_kwargs = {name: filled(kwargs[name], rest) for name in kwargs}
        return func(*filled_args, **filled_kwargs)

    return call


def aligned(rows: Tensor, rank: int) -> Tensor:
    """Insert dimensions after the batch axis, as broadcasting inserts them before a row."""
    missing = rank + 1 - rows.dim()
    if missing <= 0:
        return rows
    return rows.reshape(rows.shape[:1] + (1,) * missing + rows.shape[1:])


def repeated(tensor: Tensor, size: int) -> Tensor:
    """Give a tensor that all rows share a batch axis."""
    return tensor.expand(size, *tensor.shape)


def is_autocast() -> bool:
    """Return whether autocast may change the dtype of products."""
    return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
