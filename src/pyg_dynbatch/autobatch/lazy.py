"""The stand-in for a tensor while a model is recorded: a number and a row type."""

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
from torch import nn
from torch.types import Number
from torch.utils._pytree import tree_map_only

from pyg_dynbatch.autobatch import recorder
from pyg_dynbatch.autobatch.recorder import OPERATORS, SPECIAL, Method, RecordedValue
from pyg_dynbatch.core.errors import mismatch

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.session import Session

Content = Number | list["Content"]
"""The content of a value, as Python numbers."""


class NeedsPython(Exception):
    """A module's Python must run for every example, as when it reads a value or keeps state."""


class _Active(threading.local):
    """What happens on this thread."""

    examining = ""  # where the call was made that is compared with single rows
    # Where an example that runs alone emits, and its number.
    eager: "tuple[EmittedValues, int] | None" = None

    @property
    def session(self) -> "Session | None":
        """The session that records."""
        return recorder.active_recorder()

    @session.setter
    def session(self, session: "Session | None") -> None:
        recorder.activate(session)

    def where(self) -> str:
        """Describe the example and the line that is running, if a model is recorded."""
        session = self.session
        return "" if session is None else session.where()

    def session_for(self, reason: str) -> "Session | None":
        """Return the session, if any; an examined module is refused for a reason."""
        if self.examining:
            raise NeedsPython(reason)
        return self.session


ACTIVE = _Active()
unseen = torch._C.DisableTorchFunction
"""Hides what autobatch itself asks of tensors from modes, such as that of traces."""


@final
class Lazy(RecordedValue):
    """One value of one example, computed later together with those of other examples.

    Shape, dtype and length come from its row type. Reading its content (``bool``, ``item``,
    ``int``, ``float``, ``tolist``) suspends the example until it has been computed.
    """

    __slots__ = ()

    # Methods and properties of tensors are defined below, by name. Those that are used here:
    shape: torch.Size
    dtype: torch.dtype
    ndim: int
    to: Callable[[torch.dtype], "Lazy"]
    transpose: Callable[[int, int], "Lazy"]
    unbind: Callable[[], tuple["Lazy", ...]]

    # What is known before the value.

    @property
    def device(self) -> torch.device:
        """Device on which the value will be computed."""
        return self._session.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow back from the value."""
        is_differentiable = self.dtype.is_floating_point or self.dtype.is_complex
        return is_differentiable and self._session.needs_grad(self._number)

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
        return iter(self.unbind())

    # Reading the value.

    def tolist(self) -> Content:
        """Compute the value and return it as Python numbers."""
        return _copied(self._session.value_of(self))

    def item(self) -> Number:
        """Compute the value and return it as a Python number."""
        content = self._number_or_list()
        return torch.tensor(content).item() if isinstance(content, list) else content

    def __bool__(self) -> bool:
        content = self._number_or_list()
        return bool(torch.tensor(content) if isinstance(content, list) else content)

    def _number_or_list(self) -> Content:
        content = self._session.value_of(self)
        while isinstance(content, list) and len(content) == 1:
            (content,) = content
        return content

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        return operator.index(self.item())  # type: ignore[arg-type] # which refuses other numbers

    def __repr__(self) -> str:
        return f"Lazy({self._session.table.row_types[self._kind]})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    # What a lazy value cannot do.

    def __getattr__(self, name: str) -> NoReturn:
        problem = f"autobatch: no {name!r} of a value that has not been computed"
        hint = ""
        if name in ("backward", "grad", "retain_grad", "register_hook"):
            hint = "return the value from the model, and use it there"
        raise _refused(self, problem, error_class=AttributeError, hint=hint)

    def numpy(self, *_: object, **__: object) -> NoReturn:
        """Raise an error: there is no value yet."""
        problem = "autobatch: numpy() of a value that has not been computed"
        hint = "tolist() or item() compute it; torch operations are recorded"
        raise _refused(self, problem, error_class=RuntimeError, hint=hint)

    __array__ = numpy
    __array_ufunc__ = None

    def __setitem__(self, *_: object) -> NoReturn:
        raise _in_place(self, "an assignment to an index")

    def __reduce_ex__(self, _: object) -> NoReturn:
        """Raise an error: a value belongs to one call of the model."""
        problem = "autobatch: a lazy value cannot be pickled or copied"
        raise _refused(self, problem, hint="return it from the model, or emit it")


TensorOrLazy = torch.Tensor | Lazy
"""What is a tensor to the user's code: one with content, or a value that is computed later."""

EmittedValues = dict[str, tuple[list[TensorOrLazy], list[int]]]
"""Values that were emitted, by name, and the example of each."""

_find_impl = functools._find_impl  # type: ignore[attr-defined]


def find_implementation(
    cls: type, registry: Mapping[type, Callable[..., Any]]
) -> Callable[..., Any] | None:
    """Return what ``functools.singledispatch`` calls for a class; a lazy value is a tensor."""
    return _find_impl(torch.Tensor if cls is Lazy else cls, registry)


def _copied(content: Content) -> Content:
    return [*map(_copied, content)] if isinstance(content, list) else content


def _refused(
    value: Lazy, problem: str, error_class: type[Exception] = TypeError, *, hint: str
) -> Exception:
    return mismatch(error_class, problem, got=repr(value), where=value._session.where(), hint=hint)


def _in_place(value: Lazy, name: str) -> Exception:
    problem = f"autobatch: {name} would change a value in place"
    hint = "the form that returns a new tensor, such as x = x + y instead of x += y"
    return _refused(value, problem, hint=hint)


def _no_session(func: Callable[..., Any]) -> NoReturn:
    if ACTIVE.examining:
        problem = "autobatch: a submodule uses a recorded value that is not among its arguments"
        hint = "pass the value as an argument, or use functional_call in the forward of a submodule"
        raise mismatch(RuntimeError, problem, where=ACTIVE.examining, hint=hint)
    problem = f"autobatch: {getattr(func, '__name__', func)} of a lazy value outside the model"
    expected = "lazy values used only while the model is called"
    hint = "return the value from the model, or autobatch.emit it"
    raise mismatch(RuntimeError, problem, expected, "a value of an earlier call", hint=hint)


def _answer(
    func: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object] | None = None
) -> object:
    """Answer a function of torch that asks for what is known of a value, or reads it."""
    kwargs = kwargs or {}
    if func in COMPARISONS:
        args, kwargs = tree_map_only(Lazy, _computed, (args, kwargs))
        return func(*args, **kwargs)
    value, *_ = (*args, *kwargs.values())
    return getattr(value, func.__name__)()


def _computed(value: Lazy) -> torch.Tensor:
    content = torch.tensor(value.tolist(), dtype=value.dtype, device=value.device)
    return content.reshape(value.shape)


def _comparison(func: Callable[..., Any]) -> Callable[..., object]:
    def method(self: Lazy, *args: object, **kwargs: object) -> object:
        return _answer(func, (self, *args), kwargs)

    return method


def _known(name: str) -> Callable[..., object] | property:
    """Return a method or property that a tensor without content answers."""
    of_tensor = getattr(torch.Tensor, name)
    is_method = callable(of_tensor)
    read = of_tensor if is_method else of_tensor.__get__

    def method(self: Lazy, *args: object, **kwargs: object) -> object:
        with unseen():
            return read(self._session.table.samples[self._kind], *args, **kwargs)

    return method if is_method else property(method)


def _refuse(name: str) -> Callable[..., NoReturn]:
    def method(self: Lazy, *_: object, **__: object) -> NoReturn:
        raise _in_place(self, name)

    return method


class _References:
    """How many references an object has inside of ``x += y`` if nothing but ``x`` refers to it."""

    count = 0

    def __iadd__(self, _: object) -> "_References":
        _References.count = sys.getrefcount(self)
        return self


def _count_references() -> None:
    x = _References()
    x += 1


_count_references()


def _like(value: Lazy, result: Lazy, name: str) -> Lazy:
    """Give a result the dtype that a value would keep if it were changed in place."""
    is_same_kind = torch.can_cast(result.dtype, value.dtype)
    if result.shape != value.shape or not is_same_kind:
        problem = f"autobatch: {name} gives a value of another shape or kind"
        expected = f"{value.dtype} {list(value.shape)}"
        got = f"{result.dtype} {list(result.shape)}"
        hint = "a new name, x = x + y"
        raise mismatch(RuntimeError, problem, expected, got, where=ACTIVE.where(), hint=hint)
    return result if result.dtype == value.dtype else result.to(value.dtype)


def _rebinding(method_name: str, symbol: str) -> Callable[[Lazy, object], Lazy]:
    """Return what ``x += y`` does: ``x = x + y``, which is the same if nothing else refers to x."""

    def method(self: Lazy, other: object) -> Lazy:
        session = self._session
        is_shared = sys.getrefcount(self) > _References.count or session.is_shared(self._number)
        # Under no_grad the value would keep its gradient, which a new one does not.
        if is_shared or (session.grad and not torch.is_grad_enabled()):
            raise _in_place(self, f"{symbol}=")
        return _like(self, getattr(self, method_name)(other), f"{symbol}=")

    return method


# The methods and properties of values, by name: what is known is answered, what reads a value
# flushes, what changes one in place is refused, and all else is recorded.

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

COMPARISONS: set[Callable[..., Any]] = {
    torch.equal,
    torch.allclose,
    torch.Tensor.equal,
    torch.Tensor.allclose,
}
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


def _get_item(self: Lazy, index: object) -> object:
    """Record an index; the places of a mask that is no recorded value are known now."""
    if type(index) is not Lazy and isinstance(index, torch.Tensor) and index.dtype == torch.bool:
        index = index.nonzero().unbind(1)
    return _item.__get__(self)(index)


setattr(Lazy, "__getitem__", _get_item)  # noqa: B010 - whose methods are those of C

# What the recorder has to know of this file and of torch.

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
