"""Say what a host function does, and all it reads, by a text that is the same in every run."""

import builtins
import copyreg
import dis
import importlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch

from pyg_dynbatch.core.errors import mismatch

_PLAIN = (str, int, float, complex, bool, bytes, type(None), type(...), range, slice)
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)


def stable_text(value: Any) -> str:
    """Names a host object by its content: a digest of code, closures, globals and data."""
    digest, seen = sha256(), dict[int, int]()
    # Objects made on the way must live on, or another would get their number.
    kept: list[Any] = []
    left: list[Any] = [iter((value,))]
    while left:
        for found in left[-1]:
            if isinstance(found, _PLAIN):
                digest.update(f"{type(found).__name__} {found!r}\n".encode())
                continue
            if id(found) in seen:
                digest.update(f"again {seen[id(found)]}\n".encode())
                continue
            seen[id(found)] = len(seen)
            kept.append(found)
            digest.update(f"{type(found).__qualname__} (\n".encode())
            left.append(_parts(found))
            break
        else:
            left.pop()
            digest.update(b")\n")
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """What an object consists of."""
    if isinstance(value, CodeType):
        return iter((value.co_code, value.co_names, value.co_varnames, value.co_consts))
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        return iter((value.__func__, value.__self__))
    if isinstance(value, ModuleType):
        return iter((value.__name__, getattr(value, "__version__", None)))
    if isinstance(value, BuiltinFunctionType):
        return iter((value.__qualname__, getattr(value, "__self__", None)))
    if isinstance(value, type):
        return _parts_of_class(value)
    if isinstance(value, set | frozenset):
        return iter(sorted(map(stable_text, value)))
    if isinstance(value, dict) and type(value) is dict:
        return (part for item in value.items() for part in item)
    if type(value) in (list, tuple):
        return iter(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return iter((str(value.dtype), value.shape, value.tobytes()))
    if isinstance(value, torch.Tensor):
        return iter((str(value.dtype), value.detach().cpu().tolist()))
    if isinstance(value, ReferenceType):
        return iter((value(),))
    # The state of a function with a cache around it is but a name.
    return iter((type(value), getattr(value, "__wrapped__", None), *_state(value)))


def _state(value: Any) -> tuple[Any, ...]:
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        found: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:
        raise mismatch(
            TypeError,
            "TracedExamples: cannot tell whether a kept file still fits",
            "host functions that read functions, numbers, texts and containers",
            f"{type(value).__qualname__}: {error}",
            hint="hand it to the function through the example, or keep no file (path=None)",
        ) from error
    # Items of lists and dicts come as iterators, which have no state to be read.
    whole: tuple[Any, ...] = (found,) if isinstance(found, str) else tuple(found)
    return tuple(list(part) if hasattr(part, "__next__") else part for part in whole)


def _parts_of_class(value: type) -> Iterator[Any]:
    yield f"{value.__module__}.{value.__qualname__}"
    if _is_library(value.__module__):
        yield _version_of(value.__module__)
        return
    yield value.__bases__
    for name, member in sorted(vars(value).items()):
        is_own = not name.startswith("__") or isinstance(member, FunctionType)
        # Slots do nothing of their own; what abstract classes keep for themselves neither.
        if is_own and name != "_abc_impl" and not isinstance(member, _SLOTS):
            yield name
            yield from (member.fget, member.fset) if isinstance(member, property) else (member,)


def _parts_of_function(value: FunctionType) -> Iterator[Any]:
    yield value.__qualname__.rpartition(".")[2]
    home = sys.modules.get(value.__module__ or "")
    is_library = home is not None and value.__globals__ is vars(home) and _is_library(home.__name__)
    if is_library:
        yield f"{value.__module__}.{value.__qualname__} {_version_of(value.__module__)}"
    # A decorator of a library holds what it decorates.
    yield from (value.__defaults__, value.__kwdefaults__)
    for cell in value.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            yield "empty"
    if not is_library:
        yield value.__code__
        yield from _globals_of(value)


def _globals_of(function: FunctionType) -> Iterator[Any]:
    """The globals that a function and those inside it name; of modules what they name of them."""
    known = function.__globals__
    for code in _codes(function.__code__):
        for name in code.co_names:
            if name in known:
                yield from _named(known[name], code)
            elif not hasattr(builtins, name):
                yield name
        for module in _imported(code, known):
            yield from _named(module, code)


def _named(value: Any, code: CodeType) -> Iterator[Any]:
    yield value
    left, seen = [value], {id(value)}
    while left:
        module = left.pop()
        if not isinstance(module, ModuleType) or _is_library(module.__name__):
            continue
        for name in [name for name in code.co_names if name in vars(module)]:
            found = vars(module)[name]
            yield from (name, found)
            if id(found) not in seen:
                seen.add(id(found))
                left.append(found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    left = [code]
    while left:
        found = left.pop()
        yield found
        left += [const for const in found.co_consts if isinstance(const, CodeType)]


def _imported(code: CodeType, known: dict[str, Any]) -> Iterator[ModuleType]:
    """The modules that a function imports when it is called."""
    lines = [line for line in dis.get_instructions(code) if line.opname != "EXTENDED_ARG"]
    for number, line in enumerate(lines):
        if line.opname == "IMPORT_NAME":
            dots = "." * int(lines[number - 2].argval or 0)
            try:
                yield importlib.import_module(f"{dots}{line.argval}", known.get("__package__"))
            except ImportError:
                # It fails in the function as well, unless that copes without.
                continue


@cache
def _is_library(module: str | None) -> bool:
    """Whether a module belongs to Python or is installed, so that its version names it."""
    top = (module or "").partition(".")[0]
    if top == __name__.partition(".")[0] or top in sys.stdlib_module_names - {"__main__"}:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    return file is not None and any(Path(file).is_relative_to(place) for place in places)


def _version_of(module: str) -> str:
    top = module.partition(".")[0]
    return str(getattr(sys.modules.get(top), "__version__", sys.version_info[:2]))
