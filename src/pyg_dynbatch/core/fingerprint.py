"""The fingerprint of a model: a digest of its code and of all that the code reads.

Recordings carry it, and traced examples in a file are kept under it. It is the same in every
process, and different once a function, or what it reads, has changed: closures, defaults, globals,
attributes, the classes of objects, imported modules. Libraries count by their version.
"""

import copyreg
import dis
import importlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import WRAPPER_ASSIGNMENTS, cache, cached_property, partial
from hashlib import sha256
from inspect import getattr_static
from pathlib import Path
from random import Random
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

from pyg_dynbatch.core.errors import mismatch

_PLAIN = {str, int, float, complex, bool, bytes, type(None), type(...), range, slice}
# Without ``strict``: objects that count, and entries of each array.
_MOST = 100_000
_SLOTS = MemberDescriptorType, GetSetDescriptorType


def digest(value: Any, strict: bool = True) -> str:
    """Digest the content of an object, and that of all objects that it consists of or reads.

    Args:
        value: Any object, such as a function, or plain values and containers.
        strict: Raise an error for what cannot be compared between runs. Otherwise nothing is
            imported and little time is taken: of an object that cannot be compared, or that draws
            random numbers, only the type counts; of a module neither weights nor submodules; of a
            large array some entries; of many objects the first; and no global that a function
            replaces itself.

    Raises:
        TypeError: If ``strict``, and an object has no state that can be read.
    """
    found, seen = sha256(_version_of(__name__).encode()), dict[int, int]()
    # Objects are kept alive, since others could get their id.
    kept: list[Any] = []
    left: list[Iterator[Any]] = [iter((value,))]
    while left and (strict or len(kept) < _MOST):
        for part in left[-1]:
            if type(part) in _PLAIN:
                found.update(f"{type(part).__name__} {part!r}\n".encode())
            elif id(part) in seen:
                found.update(f"again {seen[id(part)]}\n".encode())
            else:
                seen[id(part)] = len(seen)
                kept.append(part)
                found.update(f"{type(part).__qualname__} (\n".encode())
                left.append(iter(_parts(part, strict) if strict else _some_parts(part)))
                break
        else:
            left.pop()
            found.update(b")\n")
    return found.hexdigest()


def _some_parts(value: Any) -> Iterable[Any]:
    """The parts of an object that are the same in every run, if they can be read."""
    try:
        generators = Random | np.random.Generator | torch.Generator
        has_weights = isinstance(value, torch.Tensor) and value.requires_grad
        if has_weights or isinstance(value, generators):
            return ()
        if isinstance(value, nn.Module):
            own = vars(value).items()
            return [part for name, part in own if name[0] != "_" and name != "training"]
        if isinstance(value, np.ndarray) and value.size > _MOST:
            value = (value.shape, value.flat[:: value.size // _MOST])
        return tuple(_parts(value, strict=False))
    except Exception:  # noqa: BLE001 - of the user's own classes
        return ()


def _parts(value: Any, strict: bool) -> Iterable[Any]:
    """The objects that an object consists of."""
    match value:
        case FunctionType():
            return _parts_of_function(value, strict)
        case type():
            return _parts_of_class(value)
        case CodeType():
            # As text, since equal constants are one object in some processes only.
            consts = [c if isinstance(c, CodeType) else _text_of(c) for c in value.co_consts]
            names = repr((value.co_names, value.co_varnames))
            return value.co_code, value.co_exceptiontable, names, *consts
        case MethodType():
            return value.__func__, value.__self__
        case ModuleType():
            return value.__name__, getattr(value, "__version__", None)
        case BuiltinFunctionType():
            return value.__qualname__, getattr(value, "__self__", None)
        case staticmethod() | classmethod():
            return (value.__func__,)
        case property():
            return value.fget, value.fset
        case cached_property():
            return (value.func,)
        case set() | frozenset():
            is_plain = set(map(type, value)) <= _PLAIN
            return sorted(map(repr if is_plain else partial(digest, strict=strict), value))
        case dict() | MappingProxyType() if type(value) in (dict, MappingProxyType):
            return (part for item in value.items() for part in item)
        case list() | tuple() if type(value) in (list, tuple):
            return value
        case np.ndarray() if type(value) is np.ndarray and value.dtype != object:
            return str(value.dtype), value.shape, value.tobytes()
        case torch.Tensor():
            # numpy has no bfloat16; float32 represents it exactly.
            is_short = value.is_floating_point() and value.itemsize < 4
            rows = value.detach().cpu().resolve_conj().resolve_neg()
            return str(value.dtype), (rows.float() if is_short else rows).numpy()
        case ReferenceType():
            return (value(),)
    # The state of a function with a cache around it is only its name. Not getattr, which would
    # run a __getattr__ of the user's.
    is_wrapper, own = getattr_static(value, "__wrapped__", None) is not None, dict[str, Any]()
    with suppress(AttributeError):
        own = object.__getattribute__(value, "__dict__")
    own = {k: v for k, v in own.items() if is_wrapper and k not in WRAPPER_ASSIGNMENTS}
    return type(value), own, *_state(value)


def _text_of(constant: Any) -> str:
    # The order of a set differs between processes.
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _state(value: Any) -> Iterable[Any]:
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        found: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:
        what = "TracedExamples: cannot decide whether a file is up to date"
        expected = "host functions that read functions, numbers, strings and containers"
        got, hint = f"{type(value).__qualname__}: {error}", "a part of the example, or path=None"
        raise mismatch(TypeError, what, expected, got, hint=hint) from error
    # Items of lists and dicts are returned as iterators, whose state cannot be read.
    whole: tuple[Any, ...] = (found,) if isinstance(found, str) else found
    return [list(part) if isinstance(part, Iterator) else part for part in whole]


def _parts_of_class(value: type) -> Iterator[Any]:
    # Without the module of the user's own, which is __mp_main__ in a worker.
    yield value.__qualname__
    if _is_library(value.__module__):
        yield f"{value.__module__} {_version_of(value.__module__)}"
        return
    yield value.__bases__
    for name, member in sorted(vars(value).items()):
        is_own = not name.startswith("__") or callable(member) or isinstance(member, classmethod)
        # Not slots, and not the private registry of abstract classes.
        if is_own and name != "_abc_impl" and not isinstance(member, _SLOTS):
            yield from (name, member)


def _parts_of_function(value: FunctionType, strict: bool) -> Iterator[Any]:
    yield value.__qualname__.rpartition(".")[2]
    home = sys.modules.get(value.__module__ or "")
    is_library = home is not None and value.__globals__ is vars(home) and _is_library(home.__name__)
    if is_library:
        yield f"{value.__module__}.{value.__qualname__} {_version_of(value.__module__)}"
    # Also for a library's decorator, since it contains the decorated function.
    yield from (value.__defaults__, value.__kwdefaults__)
    for cell in value.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "empty"
    if not is_library:
        yield from (value.__code__, vars(value))
        codes = [value.__code__]
        for code in codes:
            # Functions inside the function.
            codes += [const for const in code.co_consts if isinstance(const, CodeType)]
            yield from _read_by(code, value.__globals__, strict)


def _read_by(code: CodeType, known: dict[str, Any], strict: bool) -> Iterator[Any]:
    """The globals and imports named in code, with those members of modules it names."""
    lines = [line for line in dis.get_instructions(code) if line.opname != "EXTENDED_ARG"]
    verb = {(line.opname.partition("_")[0], line.argval) for line in lines
            if line.opname.endswith(("_GLOBAL", "_NAME"))}  # fmt: skip
    names = [name for name in code.co_names if name in known and ("LOAD", name) in verb]
    # What a function replaces itself is not the same in every run.
    left = [known[name] for name in names if strict or ("STORE", name) not in verb]
    for number, line in enumerate(lines if strict else ()):
        if line.opname == "IMPORT_NAME":
            dots = "." * int(lines[number - 2].argval or 0)
            # An import that fails here fails in the function as well, unless it handles that.
            with suppress(ImportError):
                name, package = f"{dots}{line.argval}", known.get("__package__")
                left.append(importlib.import_module(name, package))
    seen: set[int] = set()
    while left:
        part = left.pop()
        yield part
        is_own = isinstance(part, ModuleType) and not _is_library(part.__name__)
        if is_own and id(part) not in seen:
            seen.add(id(part))
            for name in [name for name in code.co_names if name in vars(part)]:
                yield name
                left.append(vars(part)[name])


@cache
def _is_library(module: str | None) -> bool:
    """Whether a module belongs to Python or is installed, so that its version identifies it."""
    top = (module or "").partition(".")[0]
    if top == __name__.partition(".")[0] or top in sys.stdlib_module_names - {"__main__"}:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return file is not None and any(Path(file).is_relative_to(place) for place in places)


def _version_of(module: str) -> str:
    top = module.partition(".")[0]
    return str(getattr(sys.modules.get(top), "__version__", sys.version_info[:2]))
