"""What records the calls of a model: the definition of ``native/recorder.c``, which replaces it.

In C, calls are looked up by machine words, and most need no Python. A session is asked about
whatever is new: :meth:`Session.find` which site a call has, :meth:`Session.check_parts` whether a
module that it calls has changed, :meth:`Session.operand_of` what stands for a tensor,
:meth:`Session.foreign` for values of other sessions, and :meth:`Session.call_otherwise` to record
calls whose arguments have other types. Rows from outside that were met before, and new ones of
known shapes, are recorded in C as :meth:`Session.outside_row` does it, in the same attributes.
"""

import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, UnionType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import nn

from pyg_dynbatch.core.native import extension

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.lazy import Lazy
    from pyg_dynbatch.autobatch.session import Session
    from pyg_dynbatch.autobatch.signatures import SignatureSite


class RecordedValue:
    """The number of one value of one example, and that of its row type in the table."""

    __slots__ = ("_kind", "_number", "_session")

    def __init__(self, session: "Session", number: int, kind: int) -> None:
        self._session = session
        self._number = number
        self._kind = kind

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Record a call of a torch function."""
        if func in _from_setup["metadata"]:
            return _from_setup["answer"](func, args, *([kwargs] if kwargs else ()))
        session = active_recorder() or _from_setup["no_session"](func)
        return session.call(func, args, kwargs)


class Method:
    """A function of torch as a method of values."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.__wrapped__ = target

    def __get__(self, value: object, cls: type | None = None) -> "Method | partial[object]":
        return self if value is None else partial(self, value)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Record a call."""
        session = active_recorder() or _from_setup["no_session"](self.__wrapped__)
        return session.call(self.__wrapped__, args, kwargs)


class Snapshot:
    """Whether a module is as it was; the definition leaves that to :class:`WatchedModule`."""

    def take(self, *_: Sequence[object]) -> None:
        """Keep the values of dicts, the sizes of dicts, and the types of tensors."""

    def same(self) -> bool:
        """Return whether all is as it was taken."""
        return False

    def drop(self) -> None:
        """Forget what was taken."""


class Lookup:
    """Sites by what their calls have in common; the definition looks them up by keys."""


class Recorder:
    """The records of a session, and whether gradients flow back from each value.

    call() of each function and module, row_of() of each tensor → record() → recorded(), places(),
    alive() when calls are scheduled → clear() → ...
    """

    def __init__(self, lookup: Lookup, root: nn.Module, grad: bool, autocast: bool) -> None:
        self.root = root
        self.grad = grad
        self.autocast = autocast
        self.refused: object = None  # the argument for which a module is not recorded
        self.base = 0
        self._code = array("i")
        self._needs_grad = bytearray()
        self._is_view = bytearray()
        self.met: dict[int, tuple[int, bool]] = {}  # parameters that were met before
        # Values by dtype and number, and parameters and buffers by identity. Where they are None,
        # as in the body of a loop, C leaves all tensors from outside to :class:`Session`.
        self.numbers: dict[torch.dtype, dict[float, Lazy]] | None = None
        self.belonging: dict[int, str] | None = None
        self.watcher: CodeType | None = None  # code of the mode that watches an example

    @property
    def num_new(self) -> int:
        """The number of integers since the last flush; ``base`` counts those before."""
        return len(self._code)

    def call(
        self,
        target: Callable[..., Any],
        args: Sequence[object],
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        """Record one call of a module or function; ``NotImplemented`` for an open module."""
        return self.call_otherwise(target, args, kwargs or {})

    def call_otherwise(
        self, target: Callable[..., Any], args: Sequence[object], kwargs: dict[str, object]
    ) -> object:
        """Record one call, as :class:`Session` defines it."""
        raise NotImplementedError

    def refuse_switch(self) -> NoReturn:
        """Raise the error for calls with another mode of autocast, as :class:`Session` does."""
        raise NotImplementedError

    def record(
        self, site: "SignatureSite", reads: Sequence[int], code: Sequence[int] | None = None
    ) -> Any:
        """Append one record and return its results; ``code`` if it is more than what is read."""
        if torch._C._is_any_autocast_enabled() is not self.autocast:
            self.refuse_switch()

        # A record is the site and what it reads, and at least as long as there are results.
        begin = len(self._code)
        self._code.append(site.number)
        self._code.extend(reads if code is None else code)
        num_missing = begin + len(site.kinds) - len(self._code)
        self._code.extend([-1] * num_missing)
        size = len(self._code) - begin

        # Both flags have an entry for each integer of the code.
        has_gradient = site.gradient
        if has_gradient is None:  # if one of its arguments has
            has_gradient = any(self._needs_grad[number] for number in reads)
        self._needs_grad += bytes([has_gradient and self.grad]) * size
        self._is_view += bytes([site.is_view]) * size
        if site.is_view:
            for number in reads:  # their memory is that of the results
                self._is_view[number] = 1

        make_value = _from_setup["lazy"]
        first = self.base + begin
        results = [make_value(self, number, kind) for number, kind in enumerate(site.kinds, first)]
        return results[0] if site.build is None else site.build(results)

    def row_of(self, tensor: torch.Tensor) -> "Lazy | None":
        """Return the value of a tensor from outside, or None if :class:`Session` has to see."""

    def extend(self, code: np.ndarray, places: np.ndarray) -> None:
        """Append records that need no gradient."""
        self._code.frombytes(code.tobytes())
        for flags in (self._needs_grad, self._is_view):
            flags += bytes(len(self._code) + self.base - len(flags))

    def recorded(self, first: int | None = None) -> bytes:
        """Return the integers since the last flush, or from a value on."""
        return self._code[0 if first is None else first - self.base :].tobytes()

    def places(self, first: int | None = None) -> bytes:
        """Return where in the user's code each record was made; the definition fuses nothing."""
        return bytes(len(self.recorded(first)))

    def clear(self) -> None:
        """Begin a flush."""
        self.base += len(self._code)
        del self._code[:]

    def alive(self) -> bytes:
        """Return for each value how many objects may stand for it, in C at most 255."""
        return b"\1" * (self.base + len(self._code))

    def is_shared(self, number: int) -> bool:
        """Return whether a value may share memory with one that the model can still use."""
        return bool(self._is_view[number])

    def needs_grad(self, number: int) -> bool:
        """Return whether gradients flow back from a value."""
        return bool(self._needs_grad[number])

    def set_needs_grad(self, number: int) -> None:
        """Let gradients flow back from a value."""
        self._needs_grad[number] = 1


# What lazy.py, which imports this file, gives to setup().
_from_setup: dict[str, Any] = {}
_local = threading.local()


def setup(**names: Any) -> None:
    """Take the types and functions that recording needs."""
    _from_setup.update(names)


def activate(recorder: "Session | None") -> None:
    """Let a session, or None, record on this thread."""
    _local.recorder = recorder


def active_recorder() -> "Session | None":
    """Return the session that records on this thread, or None."""
    return getattr(_local, "recorder", None)


def intercepted(cls: type) -> Callable[..., Any]:
    """Return a method that records calls of a class of modules."""
    return recorded_call(_from_setup["call_module"])


ClassInfo = type | UnionType | tuple["ClassInfo", ...]
"""The second argument of ``isinstance``."""


def is_instance(value: object, classes: ClassInfo) -> bool:
    """Return what ``isinstance`` does, where lazy values are tensors."""
    is_lazy = type(value) is _from_setup["lazy"] and classes is not _from_setup["lazy"]
    return _isinstance(_from_setup["like"] if is_lazy else value, classes)


_isinstance = isinstance


def recorded_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``__call__`` of modules that records calls on threads with a session."""

    def __call__(module: nn.Module, *args: object, **kwargs: object) -> object:  # noqa: N807
        session = active_recorder()
        if session is not None and module is not session.root:
            result = session.call(module, args, kwargs)
            if result is not NotImplemented:
                return result
        return original(module, *args, **kwargs)

    return __call__


OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
SPECIAL = [f"__{prefix}{name}__" for name in OPERATORS for prefix in ("", "r")]
SPECIAL += [f"__{name}__" for name in ("lt", "le", "eq", "ne", "gt", "ge")]
SPECIAL += [f"__{name}__" for name in ("neg", "pos", "abs", "invert", "getitem")]
"""The methods of operators, in the order in which C numbers them."""


def _comparison(target: Callable[..., Any]) -> Callable[[object, object], object]:
    compare = Method(target)
    return lambda value, other: NotImplemented if other is None else compare(value, other)


for _name in SPECIAL:
    if (_target := getattr(torch.Tensor, _name, None)) is not None:
        is_equality = _name in ("__eq__", "__ne__")
        setattr(RecordedValue, _name, _comparison(_target) if is_equality else Method(_target))

# From here on, what C has in place of the definitions above.
if (native := extension()) is not None:
    RecordedValue, Method, Snapshot = native.Value, native.Method, native.Snapshot  # type: ignore[misc]
    Lookup, Recorder = native.Lookup, native.Recorder  # type: ignore[misc]
    setup = native.setup
    activate = native.activate
    active_recorder = native.active_recorder
    intercepted = native.intercepted
    is_instance = native.is_instance
