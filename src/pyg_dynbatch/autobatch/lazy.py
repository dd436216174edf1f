"""The stand-in for a tensor while a model is recorded: a number and a row type."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pyg_dynbatch.autobatch import recorder
from pyg_dynbatch.autobatch.recorder import OPERATORS, SPECIAL, Method, RecordedValue
from pyg_dynbatch.core.errors import mismatch


class NeedsPython(Exception):
    """A module's Python must run for every example, as when it reads a value or keeps state."""


class _Active(threading.local):
    """What happens on this thread."""

    examining = ""  # where the call was made that is compared with single rows
    eager: Any = None  # where an example that runs alone emits: lists by name, and its number

    @property
    def session(self) -> Any:
        """The session that records."""
        return recorder.active_recorder()

    @session.setter
    def session(self, session: Any) -> None:
        recorder.activate(session)

    def where(self) -> str:
        """Describe the example and the line that is running, if a model is recorded."""
        return "" if self.session is None else self.session.where()

    def session_for(self, what: str) -> Any:
        """Return the session, if any; say what a call does that cannot be examined."""
        if self.examining:
            raise NeedsPython(what)
        return self.session


ACTIVE = _Active()
unseen = torch._C.DisableTorchFunction
"""Hides what autobatch itself asks of tensors from modes, such as that of traces."""


class Lazy(RecordedValue):
    """One value of one example, computed later together with those of other examples.

    Shape, dtype and length come from its row type. Reading its content (``bool``, ``item``,
    ``int``, ``float``, ``tolist``) suspends the example until it has been computed.
    """

    __slots__ = ()

    # What is known before the value: more of it is defined below, by name.

    @property
    def device(self) -> torch.device:
        """Device on which the value will be computed."""
        return self._session.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow back from the value."""
        differentiable: bool = self.dtype.is_floating_point or self.dtype.is_complex
        return bool(differentiable and self._session.needs_grad(self._number))

    @property
    def is_cuda(self) -> bool:
        """Whether the value will be computed on a CUDA device."""
        return self.device.type == "cuda"

    def __len__(self) -> int:
        if not self.ndim:
            hint = "torch.stack instead of torch.tensor to make a tensor of values"
            raise _refused(self, "len() of a 0-d tensor", hint=hint)
        return self.shape[0]

    def __iter__(self) -> Iterator["Lazy"]:
        """Iterate over the first dimension."""
        if not self.ndim:
            raise TypeError("iteration over a 0-d tensor")
        first: Any = self
        return iter(first.unbind())

    # Reading the value.

    def tolist(self) -> Any:
        """Compute the value and return it as Python numbers."""
        return _copied(self._session.value_of(self))

    def item(self) -> Any:
        """Compute the value and return it as a Python number."""
        found = self._number_or_list()
        return torch.tensor(found).item() if type(found) is list else found

    def __bool__(self) -> bool:
        found = self._number_or_list()
        return bool(torch.tensor(found) if type(found) is list else found)

    def _number_or_list(self) -> Any:
        found = self._session.value_of(self)
        while type(found) is list and len(found) == 1:
            (found,) = found
        return found

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        found: int = self.item().__index__()
        return found

    def __repr__(self) -> str:
        return f"Lazy({self._session.table.row_types[self._kind]})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    # What a lazy value cannot do.

    def __getattr__(self, name: str) -> NoReturn:
        what = f"autobatch: no {name!r} of a value that has not been computed"
        hint = ""
        if name in ("backward", "grad", "retain_grad", "register_hook"):
            hint = "return the value from the model, and use it there"
        raise _refused(self, what, kind=AttributeError, hint=hint)

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: there is no value yet."""
        what = "autobatch: numpy() of a value that has not been computed"
        hint = "tolist() or item() compute it; torch operations are recorded"
        raise _refused(self, what, kind=RuntimeError, hint=hint)

    __array__ = numpy
    __array_ufunc__ = None

    def __setitem__(self, *_: Any) -> NoReturn:
        raise _in_place(self, "an assignment to an index")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Raise an error: a value belongs to one call of the model."""
        what = "autobatch: a lazy value cannot be pickled or copied"
        raise _refused(self, what, hint="return it from the model, or emit it")


_find_impl = functools._find_impl  # type: ignore[attr-defined]


def find_implementation(kind: type, registry: Any) -> Any:
    """Return what ``functools.singledispatch`` calls for a class; a lazy value is a tensor."""
    return _find_impl(torch.Tensor if kind is Lazy else kind, registry)


def _copied(numbers: Any) -> Any:
    return [*map(_copied, numbers)] if type(numbers) is list else numbers


def _refused(value: Lazy, what: str, kind: type[Exception] = TypeError, **facts: str) -> Exception:
    return mismatch(kind, what, got=repr(value), where=value._session.where(), **facts)


def _in_place(value: Lazy, name: str) -> Exception:
    what = f"autobatch: {name} would change a value in place"
    hint = "the form that returns a new tensor, such as x = x + y instead of x += y"
    return _refused(value, what, hint=hint)


def _no_session(func: Callable[..., Any]) -> NoReturn:
    if ACTIVE.examining:
        what = "autobatch: a submodule uses a recorded value that is not among its arguments"
        hint = "pass the value as an argument, or use functional_call in the forward of a submodule"
        raise mismatch(RuntimeError, what, where=ACTIVE.examining, hint=hint)
    what = f"autobatch: {getattr(func, '__name__', func)} of a lazy value outside the model"
    wanted = "lazy values used only while the model is called"
    hint = "return the value from the model, or autobatch.emit it"
    raise mismatch(RuntimeError, what, wanted, "a value of an earlier call", hint=hint)


def _answer(func: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """Answer a function of torch that asks for what is known of a value, or reads it."""
    if func in COMPARISONS:
        args, kwargs = tree_map_only(Lazy, _computed, (args, kwargs or {}))
        return func(*args, **kwargs)
    return getattr([*args, *(kwargs or {}).values()][0], func.__name__)()


def _computed(value: Lazy) -> torch.Tensor:
    content = torch.tensor(value.tolist(), dtype=value.dtype, device=value.device)
    return content.reshape(value.shape)


def _comparison(func: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        return _answer(func, (self, *args), kwargs)

    return method


def _known(name: str) -> Any:
    """Return a method or property that a tensor without content answers."""
    found = getattr(torch.Tensor, name)

    def method(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        with unseen():
            return read(self._session.table.samples[self._kind], *args, **kwargs)

    read = found if callable(found) else found.__get__
    return method if callable(found) else property(method)


def _refuse(name: str) -> Callable[..., Any]:
    def method(self: Lazy, *_: Any, **__: Any) -> NoReturn:
        raise _in_place(self, name)

    return method


class _References:
    """How many references an object has inside of ``x += y`` if nothing but ``x`` refers to it."""

    count = 0

    def __iadd__(self, _: Any) -> "_References":
        _References.count = sys.getrefcount(self)
        return self


def _count_references() -> None:
    x = _References()
    x += 1


_count_references()


def _like(value: Any, result: Any, name: str) -> Any:
    """Give a result the dtype that a value would keep if it were changed in place."""
    same_kind = torch.can_cast(result.dtype, value.dtype)
    if result.shape != value.shape or not same_kind:
        what = f"autobatch: {name} gives a value of another shape or kind"
        expected = f"{value.dtype} {list(value.shape)}"
        got = f"{result.dtype} {list(result.shape)}"
        hint = "a new name, x = x + y"
        raise mismatch(RuntimeError, what, expected, got, where=ACTIVE.where(), hint=hint)
    return result if result.dtype == value.dtype else result.to(value.dtype)


def _rebinding(operator: str, symbol: str) -> Callable[..., Any]:
    """Return what ``x += y`` does: ``x = x + y``, which is the same if nothing else refers to x."""

    def method(self: Lazy, other: Any) -> Any:
        session = self._session
        is_shared = sys.getrefcount(self) > _References.count or session.is_shared(self._number)
        # Under no_grad the value would keep its gradient, which a new one does not.
        if is_shared or (session.grad and not torch.is_grad_enabled()):
            raise _in_place(self, f"{symbol}=")
        return _like(self, getattr(self, operator)(other), f"{symbol}=")

    return method


_NOT_COMPUTED = (
    "data_ptr", "storage", "untyped_storage", "backward", "register_hook", "retain_grad", "grad",
)  # fmt: skip
_KNOWN = (
    "shape", "dtype", "ndim", "layout", "itemsize", "nbytes", "is_sparse", "is_quantized", "dim",
    "ndimension", "numel", "nelement", "size", "stride", "storage_offset", "element_size", "is_neg",
    "is_nested", "is_meta", "is_complex", "is_floating_point", "is_signed", "is_contiguous",
    "is_conj",
)  # fmt: skip
_OTHER = (  # of tensors; iterating makes views
    "device", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "get_device", "__len__", "__iter__",
)  # fmt: skip
METADATA = {getattr(torch, name) for name in _KNOWN if callable(getattr(torch, name, None))}
for _func in (getattr(torch.Tensor, name) for name in (*_KNOWN, *_OTHER)):
    METADATA.add(_func if callable(_func) else _func.__get__)
METADATA |= {torch.result_type, torch.Tensor.is_inference}
METADATA.add(torch.Tensor._version.__get__)  # type: ignore[attr-defined]
COMPARISONS: set[Any] = {torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose}
"""Functions that read values, and return a Python boolean."""
COMPARISONS |= {torch.is_nonzero, torch.Tensor.is_nonzero}
for _name in _KNOWN:
    setattr(Lazy, _name, _known(_name))
for _func in COMPARISONS:
    setattr(Lazy, _func.__name__, _comparison(_func))
for _name in dir(torch.Tensor):
    _func = getattr(torch.Tensor, _name, None)
    if _name in vars(Lazy) or _name.startswith("_"):
        continue
    if _name.endswith("_"):
        setattr(Lazy, _name, _refuse(f"{_name}()"))
    elif callable(_func) and _name not in _NOT_COMPUTED:
        setattr(Lazy, _name, Method(_func))
_PROPERTIES = {
    "T": torch.Tensor.t, "H": torch.Tensor.adjoint,
    "mH": torch.Tensor.adjoint, "data": torch.Tensor.detach, "real": torch.real,
    "imag": torch.imag,
}  # fmt: skip
for _name, _func in _PROPERTIES.items():
    setattr(Lazy, _name, property(Method(_func)))
Lazy.mT = property(lambda self: self.transpose(-2, -1))  # type: ignore[attr-defined]
_SYMBOLS = ["+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>"]
for _name, _symbol in zip(OPERATORS, _SYMBOLS, strict=True):
    setattr(Lazy, f"__i{_name}__", _rebinding(f"__{_name}__", _symbol))
_item = vars(RecordedValue)["__getitem__"]


def _get_item(self: Lazy, index: Any) -> Any:
    """Record an index; the places of a mask that is no recorded value are known now."""
    is_known = isinstance(index, torch.Tensor) and not isinstance(index, Lazy)
    if is_known and index.dtype == torch.bool:
        index = index.nonzero().unbind(1)
    return _item.__get__(self)(index)


setattr(Lazy, "__getitem__", _get_item)  # noqa: B010 - whose methods are those of C
# Of them equal objects need not be the same one.
_CONSTANTS = frozenset({complex, bytes, type(...), torch.dtype, torch.device, torch.layout})
_CONSTANTS |= {torch.memory_format}
recorder.setup(
    lazy=Lazy,
    tensor=torch.Tensor,
    parameter=nn.Parameter,
    size=torch.Size,
    constants=_CONSTANTS,
    module=nn.Module,
    like=torch.empty(0),
    metadata=frozenset(METADATA | COMPARISONS),
    grad_enabled=torch.is_grad_enabled,
    autocast_enabled=torch._C._is_any_autocast_enabled,
    call_module=nn.Module.__call__,
    no_session=_no_session,
    answer=_answer,
    operators=tuple(getattr(torch.Tensor, name, None) for name in SPECIAL),
    zero=0,
    is_wrapped=torch._C._functorch.is_functorch_wrapped_tensor,
)
