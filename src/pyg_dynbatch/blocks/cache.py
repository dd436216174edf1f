"""Keep traced examples in memory or in a file, for all epochs and all runs.

A file is used again only if the model, and everything its host functions read, is unchanged:
:func:`stable_text`, the second half of this module, returns a digest of them. Less strictly, it
is part of the fingerprint of a model.
"""

import copyreg
import dis
import importlib
import sys
import sysconfig
import warnings
from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import WRAPPER_ASSIGNMENTS, cache, partial
from hashlib import sha256
from io import BytesIO
from itertools import count
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

from pyg_dynbatch.blocks.code import CompiledSource
from pyg_dynbatch.blocks.tracing import Tracer, traced_in
from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.core.recording import Recording
from pyg_dynbatch.files import atomic_file


class TracedExamples:
    """A data set of traced examples, for a loader whose ``collate_fn`` is a compiler's.

    Args:
        tracer: Of a compiler.
        examples: The examples.
        path: A file to keep them. It is used again as long as the model, the host functions
            with all globals, closures and attributes they read, and the number of examples are
            the same; different examples need a different file, and so do changed files that
            functions read. Reading it runs no code. A corrupt file, or one of something else,
            is renamed to ``*.corrupt`` and written anew, with a warning.
        pool: A pool of processes, from :meth:`Compiler.multiprocessing_pool`.

    Raises:
        TypeError: If there is a path, and a host function reads what cannot be compared between
            runs, such as an open file; or if the label of a metric is not a plain value.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> kept = td.TracedExamples(compiler.tracer, [[1.0, 2.0], [3.0]])
        >>> loader = DataLoader(kept, batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self,
        tracer: Tracer,
        examples: Sequence[Any],
        path: str | Path | None = None,
        pool: Any = None,
    ) -> None:
        # Before tracing, in which a function may change what it reads.
        model = tracer.source.fingerprint
        key = None if path is None else (model, stable_text(tracer.source.names), len(examples))
        found = None if key is None else _read(Path(path), key, tracer.source)  # type: ignore[arg-type]
        if found is None:
            traced = map(tracer, examples, count())
            found = list(traced_in(pool, examples, 64, ordered=True) if pool else traced)
            if key is not None:
                _write(Path(path), key, found)  # type: ignore[arg-type]
        self._traced = found

    def __len__(self) -> int:
        return len(self._traced)

    def __getitem__(self, number: int) -> Recording:
        """Return one traced example."""
        return self._traced[number]


_MAGIC = b"pyg_dynbatch traced examples, sha256 "


def _read(file: Path, key: tuple[str, str, int], source: CompiledSource) -> list[Recording] | None:
    if not file.exists():
        return None
    raw = memoryview(file.read_bytes())
    start = len(_MAGIC) + sha256().digest_size
    if raw[:start] != _MAGIC + sha256(raw[start:]).digest():
        # Kept, since it may hold something else.
        kept = file.replace(f"{file}.corrupt")
        what = "TracedExamples: the file is corrupt; the examples are traced again"
        expected, got = "bytes that match the checksum", f"other bytes, moved to {kept.name}"
        warnings.warn(mismatch_text(what, expected, got, where=file), stacklevel=3)
        return None
    with np.load(BytesIO(raw[start:]), allow_pickle=False) as arrays:
        found_key, names, metrics, labels = literal_eval(str(arrays["text"]))
        if found_key != key:
            return None
        columns = [
            np.split(arrays[f"rows{n}"], arrays[f"counts{n}"].cumsum()[:-1])
            for n in range(len(names))
        ]
    fields = [
        {name: rows for name, rows in zip(names, parts, strict=True) if len(rows)}
        for parts in zip(*columns, strict=True)
    ]
    return [_recording(one, metrics, labels.get(n, {}), source) for n, one in enumerate(fields)]


def _recording(
    fields: dict[Any, np.ndarray],
    metrics: list[str],
    labels: dict[str, Any],
    source: CompiledSource,
) -> Recording:
    """Create an example from arrays that are named by field, by call site or by output."""
    code, inputs = fields.pop("code"), fields.pop("inputs", np.zeros(0, np.int64)).tolist()
    data: Any = {name: [(rows,)] for name, rows in fields.items() if isinstance(name, int)}
    num_inputs = {kind: n for kind, n in zip(source.table.row_types, inputs, strict=False) if n}
    outputs = {name: rows for name, rows in fields.items() if isinstance(name, str)}
    without = {name: [None] * len(outputs.get(f"metric:{name}", ())) for name in metrics}
    more: Any = {"model": source.fingerprint, "result": without | labels}
    return Recording(source.table, code, data, num_inputs, outputs, **more)


def _fields(recording: Recording) -> dict[Any, np.ndarray]:
    data = {site: recording.constants_of(site)[0] for site in recording.data}
    inputs = [recording.num_inputs.get(row_type, 0) for row_type in recording.sites.row_types]
    more = {"inputs": np.array(inputs)} if recording.num_inputs else {}
    return {"code": recording.code, **more, **data, **recording.outputs}


def _write(file: Path, key: tuple[str, str, int], traced: list[Recording]) -> None:
    """Write arrays and plain values atomically."""
    fields = list(map(_fields, traced))
    names = list(dict.fromkeys(name for one in fields for name in one))
    arrays: dict[str, Any] = {}
    for n, name in enumerate(names):
        arrays[f"rows{n}"] = np.concatenate([one[name] for one in fields if name in one])
        arrays[f"counts{n}"] = np.array([len(one.get(name, ())) for one in fields])
    metrics = list(traced[0].result) if traced else []
    labels = {n: found for n, one in enumerate(traced) if (found := _plain_labels(one, n))}
    body = BytesIO()
    np.savez(body, text=np.array(repr((key, names, metrics, labels))), **arrays)
    with atomic_file(file, "wb") as stream:
        stream.write(_MAGIC + sha256(body.getbuffer()).digest())
        stream.write(body.getbuffer())


def _plain_labels(recording: Recording, number: int) -> dict[str, list[Any]]:
    """The labels of each metric that has any; raise an error if they are not plain values."""
    given = {
        n: own for n, own in recording.result.items() if any(label is not None for label in own)
    }
    for name, labels in given.items():
        try:
            is_plain = literal_eval(repr(labels)) == labels
        except (ValueError, SyntaxError):
            is_plain = False
        if not is_plain:
            what = f"TracedExamples: a label of metric {name!r} cannot be kept in a file"
            expected = "None, numbers, strings, or tuples, lists and dicts of them"
            where, hint = f"example {number}", "a plain label, or path=None"
            raise mismatch(TypeError, what, expected, repr(labels)[:200], where=where, hint=hint)
    return given


_PLAIN = (str, int, float, complex, bool, bytes, type(None), type(...), range, slice)
# Without ``strict``: objects that count, and entries of each array.
_MOST = 100_000
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)


def stable_text(value: Any, strict: bool = True) -> str:
    """Digest the content of a host object: its code, closures, globals and data.

    Without ``strict`` it raises no errors, imports nothing and takes little time. Of an object
    that cannot be compared, or that draws random numbers, only the type counts then; of a module
    neither weights nor submodules; of a large array some entries; of many objects the first.
    """
    digest, seen = sha256(), dict[int, int]()
    # Objects are kept alive, since others could get their id.
    kept: list[Any] = []
    left: list[Any] = [iter((value,))]
    while left and (strict or len(kept) < _MOST):
        for found in left[-1]:
            if type(found) in _PLAIN:
                digest.update(f"{type(found).__name__} {found!r}\n".encode())
                continue
            if id(found) in seen:
                digest.update(f"again {seen[id(found)]}\n".encode())
                continue
            seen[id(found)] = len(seen)
            kept.append(found)
            digest.update(f"{type(found).__qualname__} (\n".encode())
            left.append(_parts(found, strict) if strict else _some_parts(found))
            break
        else:
            left.pop()
            digest.update(b")\n")
    return digest.hexdigest()


def _some_parts(value: Any) -> Iterator[Any]:
    """The parts of an object that are the same in every run, if they can be read."""
    try:
        if isinstance(value, Random | np.random.Generator | torch.Generator):
            return iter(())
        if isinstance(value, nn.Module):
            own = vars(value).items()
            return iter([part for n, part in own if n[0] != "_" and n != "training"])
        if isinstance(value, torch.Tensor):
            value = () if value.requires_grad else value.numpy()
        if isinstance(value, np.ndarray) and value.size > _MOST:
            value = (value.shape, value.flat[:: value.size // _MOST])
        return iter(tuple(_parts(value, strict=False)))
    except Exception:  # noqa: BLE001 - of the user's own classes
        return iter(())


def _parts(value: Any, strict: bool) -> Iterator[Any]:
    """Iterate over the objects that an object consists of."""
    match value:
        case FunctionType():
            return _parts_of_function(value, strict)
        case type():
            return _parts_of_class(value)
        case CodeType():
            found: Any = (value.co_code, value.co_names, value.co_varnames, value.co_consts)
        case MethodType():
            found = (value.__func__, value.__self__)
        case ModuleType():
            found = (value.__name__, getattr(value, "__version__", None))
        case BuiltinFunctionType():
            found = (value.__qualname__, getattr(value, "__self__", None))
        case set() | frozenset():
            plain = set(map(type, value)) <= set(_PLAIN)
            found = sorted(map(repr if plain else partial(stable_text, strict=strict), value))
        case MappingProxyType():
            found = (dict(value),)
        case dict() if type(value) is dict:
            found = (part for item in value.items() for part in item)
        case list() | tuple() if type(value) in (list, tuple):
            found = value
        case np.ndarray() if value.dtype != object:
            found = (str(value.dtype), value.shape, value.tobytes())
        case torch.Tensor():
            found = (str(value.dtype), value.detach().cpu().tolist())
        case ReferenceType():
            found = (value(),)
        case _:
            # The state of a function with a cache around it is only its name.
            is_wrapper, own = hasattr(value, "__wrapped__"), getattr(value, "__dict__", {})
            own = {k: v for k, v in own.items() if is_wrapper and k not in WRAPPER_ASSIGNMENTS}
            found = (type(value), own, *_state(value))
    return iter(found)


def _state(value: Any) -> tuple[Any, ...]:
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    try:
        reduce = copyreg.dispatch_table.get(type(value))
        found: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception as error:
        what = "TracedExamples: cannot decide whether a file is up to date"
        expected = "host functions that read functions, numbers, strings and containers"
        got, hint = f"{type(value).__qualname__}: {error}", "a part of the example, or path=None"
        raise mismatch(TypeError, what, expected, got, hint=hint) from error
    # Items of lists and dicts are returned as iterators, whose state cannot be read.
    whole: tuple[Any, ...] = (found,) if isinstance(found, str) else tuple(found)
    return tuple(list(part) if isinstance(part, Iterator) else part for part in whole)


def _parts_of_class(value: type) -> Iterator[Any]:
    # Without the module of the user's own, which is __mp_main__ in a worker.
    yield value.__qualname__
    if _is_library(value.__module__):
        yield f"{value.__module__} {_version_of(value.__module__)}"
        return
    yield value.__bases__
    for name, member in sorted(vars(value).items()):
        is_own = not name.startswith("__") or isinstance(member, FunctionType)
        # Not slots, and not the private registry of abstract classes.
        if is_own and name != "_abc_impl" and not isinstance(member, _SLOTS):
            yield name
            yield from (member.fget, member.fset) if isinstance(member, property) else (member,)


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
        yield from _globals_of(value, strict)


def _globals_of(function: FunctionType, strict: bool) -> Iterator[Any]:
    """The globals and imports named in a function, with those members of modules it names."""
    known, codes = function.__globals__, [function.__code__]
    for code in codes:
        # Functions inside the function.
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
        lines = [n for n in dis.get_instructions(code) if n.opname.endswith(("_GLOBAL", "_NAME"))]
        used = {(line.opname.partition("_")[0], line.argval) for line in lines}
        names = [name for name in code.co_names if name in known and ("LOAD", name) in used]
        # What a function replaces itself is not the same in every run.
        left = [known[name] for name in names if strict or ("STORE", name) not in used]
        left += _imported(code, known) if strict else []
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


def _imported(code: CodeType, known: dict[str, Any]) -> list[Any]:
    """The modules that a function imports when it is called."""
    lines = [line for line in dis.get_instructions(code) if line.opname != "EXTENDED_ARG"]
    modules = []
    for number, line in enumerate(lines):
        if line.opname == "IMPORT_NAME":
            dots = "." * int(lines[number - 2].argval or 0)
            # An import that fails here fails in the function as well, unless it handles that.
            with suppress(ImportError):
                name, package = f"{dots}{line.argval}", known.get("__package__")
                modules.append(importlib.import_module(name, package))
    return modules


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
