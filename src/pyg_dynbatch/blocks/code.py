"""Write the Python function that records the calls of one example."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    TensorType,
    TupleType,
)
from pyg_dynbatch.core.operation import Operations, Ragged, Signature, row_type_of
from pyg_dynbatch.core.program import CONSTANT, INPUT, RESULT
from pyg_dynbatch.core.types import RowType


class UnknownKey(KeyError):
    """A ``KeyError`` that prints its message as it is, not quoted."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class Complaint(Exception):
    """An error in written code, before the tracer has added the block and the example."""

    def __init__(self, error: type[Exception], what: str, **facts: Any) -> None:
        super().__init__(what)
        self.error, self.what, self.facts = error, what, facts


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
    # For each line of the source the path of its block, and whether it calls the user's function.
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
        """Tabulate all sites, so that finishing an example is a few array operations."""
        kinds = {"constant": CONSTANT, "input": INPUT, "free": RESULT, "call": RESULT}
        types = [
            [site.number]
            if site.kind in ("constant", "input")
            else [self.row_types.index(t) for t in self.signatures[site.number].outputs]
            for site in self.sites
        ]
        columns = {
            "kind": [kinds[site.kind] for site in self.sites],
            "number": [site.number for site in self.sites],
            "fixed": [site.fixed for site in self.sites],
            "ragged": [site.ragged for site in self.sites],
            "width": [len(found) for found in types],
        }
        self.tables = {name: np.array(found, dtype=np.int64) for name, found in columns.items()}
        slots = max(self.tables["width"].max(initial=1), 1)
        self.tables["type"] = np.zeros((len(self.sites), slots), dtype=np.int64)
        for row, found in enumerate(types):
            self.tables["type"][row, : len(found)] = found
        # Their records come first, in this order, in every example.
        self.free = tuple(n for n, site in enumerate(self.sites) if site.kind == "free")


# Python refuses more than 20 loops and 100 indentations inside one another.
MAX_NESTING = 12


class Model:
    """What all functions of one model share: operations, sites, host objects, functions."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.signatures: list[Signature] = []
        self.row_types: list[RowType] = []
        self.sites: list[Site] = []
        self.named: dict[str, Any] = {}
        self.metric_types: dict[str, ResultType] = {}
        self.functions: dict[int, Code] = {}
        self.free: dict[int, int] = {}
        self.dictionaries: list[str] = []
        # What rewrites write in place of a block, by its id.
        self.rewritten: dict[int, Callable[[Code, Any], Any]] = {}
        self._waiting: list[Callable[[], None]] = []
        self._unique: dict[Any, Any] = {}

    def unique(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the one object of a key; equal modules are batched together."""
        if key not in self._unique:
            self._unique[key] = make()
        return self._unique[key]

    def name_of(self, value: Any) -> str:
        """Name a host object in the written code."""
        for name, known in self.named.items():
            if known is value:
                return name
        name = f"g{len(self.named)}"
        self.named[name] = value
        return name

    def dictionary(self) -> str:
        """Name a dictionary that is empty when an example begins."""
        name = f"h{len(self.dictionaries)}"
        self.dictionaries.append(name)
        return name

    def number_of_type(self, row_type: RowType) -> int:
        """Number a row type."""
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
        """Register an operation and number its signature."""
        clean = (name or "").replace(".", "_")
        if not clean or clean in self.operations:
            stem, number = _name_of(module), 0
            while (clean := f"{stem}_{number}" if number else stem) in self.operations:
                number += 1
        found = self.operations.add(module, inputs, outputs, name=clean)
        if found not in self.signatures:
            self.signatures.append(found)
            for wanted in [*outputs, *inputs]:
                self.number_of_type(row_type_of(wanted))
        return self.signatures.index(found)

    def site(self, *fields: Any, **more: Any) -> int:
        """Add a site and number it."""
        self.sites.append(Site(*fields, **more))
        return len(self.sites) - 1

    def function_of(self, block: Block) -> str:
        """Name the function of a block that is written apart."""
        if id(block) not in self.functions:
            code = Code(self, f"f{len(self.functions)}")
            self.functions[id(block)] = code
            self._waiting.append(lambda: code.write(block))
        return self.functions[id(block)].function

    def finish(self) -> None:
        """Write all functions that are still waiting."""
        while self._waiting:
            self._waiting.pop()()


class Code:
    """Write the body of one generator function.

    A value is a variable of the written code: one variable per tensor, sequence or host object,
    and a tuple of values where the type is a tuple.
    """

    def __init__(self, model: Model, function: str) -> None:
        self.model = model
        self.function = function
        # Each with its origin, see :class:`Recipe`.
        self.lines: list[tuple[str, tuple[str, bool]]] = []
        # The path of the block that is written.
        self.path = "Root"
        self._indent, self._names, self._level = 2, 0, 0
        self._levels: dict[str, int] = {}

    def write(self, block: Block) -> None:
        """Write the whole function of a block: ``def f(x): … yield None, result``."""
        self.path = block._path()
        value = self.new(block._known("input"), "x")
        result = self.inline(block, value)
        self.line(f"yield None, {packed(result)}")
        head = [f"    def {self.function}({packed(value)}):"]
        if isinstance(value, tuple):
            unpack = f"{packed(value)} = x_" if value else "pass"
            head = [f"    def {self.function}(x_):", f"        {unpack}"]
        self.lines[:0] = [(line, (self.path, False)) for line in head]

    def emit(self, block: Block, value: Any) -> Any:
        """Write what a block computes, and return its output value."""
        if self._indent > MAX_NESTING or block._declaration is not None:
            return self.call(block, value)
        return self.inline(block, value)

    def inline(self, block: Block, value: Any) -> Any:
        """Write what a block computes right here."""
        outer, self.path = self.path, block._path()
        rewritten = self.model.rewritten.get(id(block))
        result = rewritten(self, value) if rewritten else block._emit(self, value)
        self.path = outer
        return result

    def call(self, block: Block, value: Any) -> Any:
        """Write a call of a block that has a function of its own."""
        function = self.model.function_of(block)
        result = self.new(block._known("output"))
        self.line(f"{packed(result)} = yield {function}, {packed(value)}")
        return result

    def line(self, text: str, *, users_own: bool = False) -> None:
        """Add a line; with ``users_own``, errors in it come from the user's function."""
        self.lines.append(("    " * self._indent + text, (self.path, users_own)))

    def assign(self, target: Any, value: Any) -> None:
        """Write the assignment of a value to variables."""
        if target != ():
            self.line(f"{packed(target)} = {packed(value)}")

    def fresh(self, stem: str = "v", *, varying: bool = False) -> str:
        """Make a new variable; a varying one changes from round to round of the next loop."""
        self._names += 1
        name = f"{stem}{self._names}"
        self._levels[name] = self._level + varying
        return name

    def new(self, result_type: ResultType, stem: str = "v", *, varying: bool = False) -> Any:
        """Make new variables for a value of a type."""
        if isinstance(result_type, TupleType):
            return tuple(self.new(item, stem, varying=varying) for item in result_type)
        if isinstance(result_type, BroadcastSequenceType):
            return self.new(result_type.element_type, stem, varying=varying)
        return self.fresh(stem, varying=varying)

    def is_broadcast(self, value: str) -> bool:
        """Whether a tensor was made outside the current loop."""
        return self._levels.get(value, 0) < self._level

    @contextmanager
    def inside(self, header: str, *, loop: bool = False) -> Iterator[None]:
        """Write an indented part under a header."""
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
        """Write a ``for`` loop whose target is a value."""
        with self.inside(f"for {packed(target) or '_'} in {source}:", loop=True):
            yield

    # Recording.

    def record_constant(self, wanted: TensorType, data: str, table: Any = None) -> str:
        """Write lines that record a constant of one example."""
        return self.record_data("constant", wanted.row_type, data, table)

    def record_data(self, kind: str, row_type: RowType, data: str, table: Any = None) -> str:
        """Write lines that record a constant, or the reading of a row from outside."""
        number = self.model.number_of_type(row_type)
        site = self.model.site(kind, number, self.path, table=table)
        name = self.fresh("c")
        self.line(f"{name} = L(); S({name}); A({site}); d{site}({data})")
        return name

    def record_free(self, signature: int) -> str:
        """Name the value of an operation without arguments: it is the same everywhere."""
        if signature not in self.model.free:
            self.model.free[signature] = self.model.site("free", signature, self.path)
        return f"z{self.model.free[signature]}"

    def record_call(
        self, signature: int, arguments: Sequence[str], rows: str = "", *, once: bool = False
    ) -> tuple[str, ...]:
        """Write lines that record one call."""
        called = self.model.signatures[signature]
        ragged = sum(isinstance(wanted, Ragged) for wanted in called.inputs)
        site = self.model.site("call", signature, self.path, len(arguments), ragged)
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


def _name_of(module: Any) -> str:
    module = getattr(module, "called", module)
    if not getattr(module, "name", None):
        # A layer made of a module is known by the module.
        module = getattr(module, "layer_fn", module)
    name = getattr(module, "name", None) or getattr(module, "__name__", None)
    name = name if isinstance(name, str) and name.isidentifier() else type(module).__name__
    return name.lower().strip("_")


def packed(value: Any) -> str:
    """Write a value as one Python expression."""
    if isinstance(value, str):
        return value
    return f"({', '.join(map(packed, value))}{',' if len(value) == 1 else ''})"


def packed_if_object(code: Code, items: tuple[Any, ...], result_type: ResultType | None) -> Any:
    """Write one host object made of several, where the type of their tuple is a host object."""
    if not isinstance(result_type, PyObjectType):
        return items
    name = code.fresh()
    code.line(f"{name} = {packed(items)}")
    return name


def key_text(code: Code, key: Any) -> str:
    """Write the key of an item: as it is, or where that cannot be read back, by a name."""
    # Not of a subclass, such as an enumeration of strings, which is written in its own way.
    return repr(key) if type(key) in (str, int, bool, type(None)) else code.model.name_of(key)


def flattened(value: Any) -> list[Any]:
    """List the parts of nested tuples and lists."""
    if isinstance(value, tuple | list):
        return [part for item in value for part in flattened(item)]
    return [value]


def drive(function: Callable[[Any], Any], argument: Any) -> Any:
    """Run a generator function that yields calls of others, without recursion."""
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
