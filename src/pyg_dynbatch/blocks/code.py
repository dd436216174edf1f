"""Write the Python function that records the calls of one example."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from pyg_dynbatch.blocks.stable_text import stable_text
from pyg_dynbatch.blocks.types import ResultType, TensorType, TupleType
from pyg_dynbatch.core.operation import Operations, Ragged, Signature
from pyg_dynbatch.core.program import CONSTANT, INPUT, RESULT
from pyg_dynbatch.core.types import RowType

if TYPE_CHECKING:
    from pyg_dynbatch.blocks.block import Block


class Site(NamedTuple):
    """One place in the model that makes values."""

    kind: str
    number: int
    path: str
    fixed: int = 0
    ragged: int = 0
    table: Any = None


@dataclass
class Recipe:
    """All that a tracer needs, and no more; it can be pickled if the user's functions can."""

    source: str
    origin: list[tuple[str, bool]]
    names: dict[str, Any]
    sites: tuple[Site, ...]
    signatures: tuple[Signature, ...]
    row_types: tuple[RowType, ...]
    metric_types: dict[str, ResultType]
    result_type: ResultType
    keeps_result: bool
    tables: dict[str, np.ndarray] = field(init=False)
    free: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Looks at all sites at once, so that finishing an example is a few array operations."""
        kinds = {"constant": CONSTANT, "input": INPUT, "free": RESULT, "call": RESULT}
        self.tables = {
            "kind": np.array([kinds[s.kind] for s in self.sites], dtype=np.int64),
            "number": np.array([s.number for s in self.sites], dtype=np.int64),
            "fixed": np.array([s.fixed for s in self.sites], dtype=np.int64),
            "ragged": np.array([s.ragged for s in self.sites], dtype=np.int64),
            "width": np.array([self._width(s) for s in self.sites], dtype=np.int64),
        }
        slots = max(self.tables["width"].max(initial=1), 1)
        types = np.zeros((len(self.sites), slots), dtype=np.int64)
        for row, site in enumerate(self.sites):
            found = [site.number] if site.kind in ("constant", "input") else self._types(site)
            types[row, : len(found)] = found
        self.tables["type"] = types
        # Their records come first, in this order, in every example.
        self.free = tuple(n for n, s in enumerate(self.sites) if s.kind == "free")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Name of each metric."""
        return tuple(self.metric_types)

    def _width(self, site: Site) -> int:
        calls = site.kind in ("call", "free")
        return len(self.signatures[site.number].outputs) if calls else 1

    def _types(self, site: Site) -> list[int]:
        return [self.row_types.index(t) for t in self.signatures[site.number].outputs]

    def fingerprint(self) -> str:
        """Names the code and all it reads, so that kept programs are not taken for another's."""
        told = [str(self.signatures), str(self.row_types), str(self.result_type)]
        tables = [site.table for site in self.sites]
        return stable_text([self.source, *told, tables, self.names])[:16]


# Python refuses more than 20 loops and 100 indentations inside one another.
MAX_NESTING = 12


class Model:
    """Collects, over all functions of one model: operations, sites, host objects, functions."""

    def __init__(self, operations: Operations, split_linear: bool) -> None:
        self.operations = operations
        self.split_linear = split_linear
        self.signatures: list[Signature] = []
        self.row_types: list[RowType] = []
        self.sites: list[Site] = []
        self.named: dict[str, Any] = {}
        self.metrics: dict[str, int] = {}
        self.metric_types: dict[str, ResultType] = {}
        self.functions: dict[int, Code] = {}
        self.free: dict[int, int] = {}
        self.dictionaries: list[str] = []
        self._waiting: list[Callable[[], None]] = []
        self._wrapped: dict[Any, nn.Module] = {}
        self._memos: dict[int, str] = {}

    def wrapped(self, key: Any, make: Callable[[], nn.Module]) -> nn.Module:
        """Gives the one module of a key, so that equal functions are batched together."""
        if key not in self._wrapped:
            self._wrapped[key] = make()
        return self._wrapped[key]

    def name_of(self, value: Any) -> str:
        """Gives a host object a name in the written code."""
        for name, known in self.named.items():
            if known is value:
                return name
        name = f"g{len(self.named)}"
        self.named[name] = value
        return name

    def dictionary(self) -> str:
        """Names a dictionary that every example begins with empty."""
        name = f"h{len(self.dictionaries)}"
        self.dictionaries.append(name)
        return name

    def memo_of(self, declaration: Any) -> str:
        """Names the dictionary in which a declaration keeps what it has evaluated."""
        if id(declaration) not in self._memos:
            self._memos[id(declaration)] = self.dictionary()
        return self._memos[id(declaration)]

    def number_of_type(self, row_type: RowType) -> int:
        """Numbers a row type."""
        if row_type not in self.row_types:
            self.row_types.append(row_type)
        return self.row_types.index(row_type)

    def signature(
        self,
        module: Callable[..., Any],
        inputs: Sequence[RowType | Ragged],
        outputs: Sequence[RowType],
        name: str | None,
    ) -> int:
        """Registers an operation and numbers its signature."""
        clean = (name or "").replace(".", "_")
        clean = "" if clean in self.operations else clean
        if not clean:
            clean = self._free_name(_name_of(module))
        found = self.operations.add(module, inputs, outputs, name=clean)
        if found not in self.signatures:
            self.signatures.append(found)
            for row_type in outputs:
                self.number_of_type(row_type)
            for wanted in inputs:
                self.number_of_type(wanted.row_type if isinstance(wanted, Ragged) else wanted)
        return self.signatures.index(found)

    def _free_name(self, stem: str) -> str:
        number = 0
        while (name := f"{stem}_{number}" if number else stem) in self.operations:
            number += 1
        return name

    def site(self, site: Site) -> int:
        """Numbers a site."""
        self.sites.append(site)
        return len(self.sites) - 1

    def function_of(self, block: "Block") -> str:
        """Names the function of a block that is written apart, and has it written."""
        if id(block) not in self.functions:
            code = Code(self, f"f{len(self.functions)}")
            self.functions[id(block)] = code
            self._waiting.append(lambda: code.write(block))
        return self.functions[id(block)].function

    def finish(self) -> None:
        """Writes all functions that are still waiting."""
        while self._waiting:
            self._waiting.pop()()


class Code:
    """Writes the body of one generator function."""

    def __init__(self, model: Model, function: str) -> None:
        self.model = model
        self.function = function
        self.lines: list[str] = []
        self.origin: list[tuple[str, bool]] = []
        self.block: Block | None = None
        self.users_own = False
        self._indent, self._names, self._level = 2, 0, 0
        self._levels: dict[str, int] = {}

    def write(self, block: "Block") -> None:
        """Writes the whole function of a block: ``def f(x): … yield None, result``."""
        value = self.new(block._known("input"), "x")
        result = self.inline(block, value)
        self.block = block
        self.line(f"yield None, {packed(result)}")
        self.lines.insert(0, f"    def {self.function}({(arg := packed(value))}):")
        if isinstance(value, tuple):
            self.lines[0] = f"    def {self.function}(x_):"
            self.lines.insert(1, f"        {arg} = x_" if value else "        pass")
        self.origin[:0] = [(block._path(), False)] * (len(self.lines) - len(self.origin))

    def emit(self, block: "Block", value: Any) -> Any:
        """Writes what a block computes, and gives its output value."""
        if self._indent > MAX_NESTING or block._declaration is not None:
            return self.call(block, value)
        return self.inline(block, value)

    def inline(self, block: "Block", value: Any) -> Any:
        """Writes what a block computes right here."""
        outer, self.block = self.block, block
        result = block._emit(self, value)
        self.block = outer
        return result

    def call(self, block: "Block", value: Any) -> Any:
        """Writes a call of a block that has a function of its own."""
        function = self.model.function_of(block)
        result = self.new(block._known("output"))
        self.line(f"{packed(result)} = yield {function}, {packed(value)}")
        return result

    def line(self, text: str, *, users_own: bool = False) -> None:
        """Adds a line; ``users_own`` says that an error in it comes from the user's function."""
        self.lines.append("    " * self._indent + text)
        self.origin.append((self.block._path() if self.block is not None else "Root", users_own))

    def fresh(self, stem: str = "v", *, varying: bool = False) -> str:
        """Makes a new variable; a varying one changes from round to round of the next loop."""
        self._names += 1
        name = f"{stem}{self._names}"
        self._levels[name] = self._level + varying
        return name

    def new(self, result_type: ResultType, stem: str = "v", *, varying: bool = False) -> Any:
        """Makes new variables for a value of a type."""
        from pyg_dynbatch.blocks.types import BroadcastSequenceType

        if isinstance(result_type, TupleType):
            return tuple(self.new(item, stem, varying=varying) for item in result_type)
        if isinstance(result_type, BroadcastSequenceType):
            return self.new(result_type.element_type, stem, varying=varying)
        return self.fresh(stem, varying=varying)

    def is_broadcast(self, value: str) -> bool:
        """Tells whether a tensor was made outside the loop in which we are."""
        return self._levels.get(value, 0) < self._level

    @contextmanager
    def inside(self, header: str, *, loop: bool = False) -> Iterator[None]:
        """Writes an indented part under a header."""
        self.line(header)
        self._indent += 1
        self._level += loop
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self._indent -= 1
        self._level -= loop

    @contextmanager
    def loop(self, target: Any, source: str) -> Iterator[None]:
        """Writes a ``for`` loop whose target is a value."""
        with self.inside(f"for {packed(target) or '_'} in {source}:", loop=True):
            yield

    # Recording.

    def record_constant(self, row_type: TensorType, data: str, table: Any = None) -> str:
        """Writes lines that record a constant of one example."""
        number = self.model.number_of_type(row_type.row_type)
        site = self.model.site(Site("constant", number, self._where(), table=table))
        return self._record_data(site, data)

    def record_input(self, row_type: RowType, row: str) -> str:
        """Writes lines that record the reading of a row from outside."""
        number = self.model.number_of_type(row_type)
        return self._record_data(self.model.site(Site("input", number, self._where())), row)

    def _record_data(self, site: int, data: str) -> str:
        name = self.fresh("c")
        self.line(f"{name} = L(); S({name}); A({site}); d{site}({data})")
        return name

    def record_free(self, signature: int) -> str:
        """Gives the value of an operation without arguments: it is the same everywhere."""
        if signature not in self.model.free:
            self.model.free[signature] = self.model.site(Site("free", signature, self._where()))
        return f"z{self.model.free[signature]}"

    def record_call(
        self, signature: int, arguments: Sequence[str], rows: str = "", *, once: bool = False
    ) -> tuple[str, ...]:
        """Writes lines that record one call."""
        called = self.model.signatures[signature]
        ragged = sum(isinstance(wanted, Ragged) for wanted in called.inputs)
        site = self.model.site(Site("call", signature, self._where(), len(arguments), ragged))
        results = [self.fresh() for _ in called.outputs]
        first = results[0]
        # Every result is named by a place in the record of its call, so that must be long enough.
        padding = ["-1"] * max(0, len(results) - 1 - len(arguments))
        fields = [str(site), *arguments, *([f"*{rows}"] if rows else []), *padding]
        record = f"{first} = L(); S({first}); E(({', '.join(fields)},))"
        if once:
            known = self.model.dictionary()
            key = f"({', '.join(arguments)},)"
            with self.inside(f"if ({first} := {known}.get({key}, -1)) < 0:"):
                self.line(f"{record}; {known}[{key}] = {first}")
        else:
            self.line(record)
        for slot, name in enumerate(results[1:], start=1):
            self.line(f"{name} = {first} + {slot}")
        return tuple(results)

    def _where(self) -> str:
        return self.block._path() if self.block is not None else "Root"


def _name_of(module: Any) -> str:
    module = getattr(module, "called", module)
    if not getattr(module, "name", None):
        # A layer made of a module is known by the module.
        module = getattr(module, "layer_fn", module)
    name = getattr(module, "name", None) or getattr(module, "__name__", None)
    name = name if isinstance(name, str) and name.isidentifier() else type(module).__name__
    return name.lower().strip("_")


def packed(value: Any) -> str:
    """Writes a value as one Python expression."""
    if isinstance(value, str):
        return value
    return f"({', '.join(map(packed, value))}{',' if len(value) == 1 else ''})"


def key_text(code: Code, key: Any) -> str:
    """Writes the key of an item: as it is, or where that cannot be read back, by a name."""
    # Not of a subclass, such as an enumeration of strings, which is written in its own way.
    return repr(key) if type(key) in (str, int, bool, type(None)) else code.model.name_of(key)


def terminals(value: Any) -> list[str]:
    """Lists the variables of a value."""
    if isinstance(value, str):
        return [value]
    return [name for item in value for name in terminals(item)]


def drive(function: Callable[[Any], Any], argument: Any) -> Any:
    """Runs a generator function that yields calls of others, without recursion."""
    waiting: list[Any] = []
    running = function(argument)
    value = None
    while True:
        called, value = running.send(value)
        if called is not None:
            waiting.append(running)
            running, value = called(value), None
        elif waiting:
            running = waiting.pop()
        else:
            return value
