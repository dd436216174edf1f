"""Write the Python function that records the calls of one example.

For ``Map(Scalar()) >> Sum()`` it is this one, with comments added::

    def begin():
        C = [2]  # all records, one after another
        L = C.__len__; E = C.extend; A = C.append
        z2 = 0  # the zeros of call site 2, the same in every example: record 0 of each
        D0 = []; d0 = D0.append  # the constants of call site 0
        h0 = {}  # the iterators that were read
        def root(x1):
            s2 = [*g0(x1, h0)]  # g0 is read_once
            s3 = [*range(L(), L() + len(s2))]
            C.extend([0] * len(s2)); D0.extend(s2)  # records of call site 0: constants
            s4 = s3
            if len(s4) > 1:
                v7 = L(); E((1, len(s4), *s4,))  # a record of call site 1: sum(*s4)
                v5 = v7
            elif s4:
                v5 = s4[0]
            else:
                v5 = z2
            yield None, v5  # the result
        def cut():  # called where the lists are long, and copied elsewhere
            nonlocal L
            n = L(); L = lambda: n + len(C); C.clear(); D0.clear()
        return C, {0: D0}, {}, {}, root, cut

Records are those of :mod:`pyg_dynbatch.core.recording`: a value is named by the position of its
record in ``C``, so ``[1.0, 2.0]`` becomes ``C = [2, 0, 0, 1, 2, 1, 2]``. Other names:
``A(0); d0(x1)`` record a single constant; ``M0`` and ``N0`` hold values and labels of metric 0;
``f0`` is the function of a declared block, called by ``v2 = yield f0, x1``; ``g0`` is a host
object, and ``h0`` a dictionary.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from itertools import repeat
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

import numpy as np

import pyg_dynbatch
from pyg_dynbatch.blocks.block import Block
from pyg_dynbatch.blocks.types import (
    BroadcastSequenceType,
    PyObjectType,
    ResultType,
    TensorType,
    TupleType,
)
from pyg_dynbatch.core.operation import Operations, Ragged, Signature
from pyg_dynbatch.core.recording import CALL, CONSTANT, INPUT, Site, Sites
from pyg_dynbatch.core.types import RowType, parts_of
from pyg_dynbatch.core.types import TensorType as RowTensorType

T = TypeVar("T")

Expression = str | tuple["Expression", ...]
"""A value in the written code; a tuple of values where the type is a tuple."""


class UnknownKey(KeyError):
    """A ``KeyError`` that prints its message without quotes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class TraceError(Exception):
    """An error while an example is traced; the tracer adds the block and the example."""

    def __init__(
        self, kind: type[Exception], problem: str, expected: str, got: object, path: str = ""
    ) -> None:
        super().__init__(problem)
        self.kind = kind
        self.problem = problem
        self.expected = expected
        self.got = got
        self.path = path


class CallSite(NamedTuple):
    """A position in the written code at which values are created."""

    site: Site
    path: str  # of the block, for messages
    # Of constants that are looked up: the rows to choose from.
    table: np.ndarray | None = None
    # Of constants that are indices: the number of rows they choose from, and the reader's path.
    bound: tuple[int, str] | None = None

    @property
    def row_type(self) -> RowTensorType:
        """Type of the rows of a constant or an input: one tensor."""
        (row_type,) = parts_of(self.site.results[0])
        return row_type


class Origin(NamedTuple):
    """Where a line of the written code comes from."""

    path: str  # of the block
    is_users_own: bool = False  # whether the line calls the user's function


@dataclass
class CompiledSource:
    """Everything that a tracer needs; it can be pickled if the user's functions can."""

    source: str
    origins: list[Origin]  # of each line
    names: dict[str, Any]  # host objects that the source uses
    sites: tuple[CallSite, ...]
    metric_types: dict[str, TensorType]
    result_type: ResultType

    @cached_property
    def site_table(self) -> Sites:
        """The table of sites of recordings."""
        return Sites(call_site.site for call_site in self.sites)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the table of sites and of the types of results; the same in every process."""
        version = pyg_dynbatch.__version__
        model = (version, self.site_table, self.metric_types, self.result_type)
        return sha256(repr(model).encode()).hexdigest()[:16]


# Python allows at most 20 nested loops and 100 indentations.
MAX_NESTING = 12


class ModelCode:
    """What all functions of one model share: operations, call sites, host objects, functions.

    ``Code(model, "root").write(…)`` writes the function of the root; it registers operations and
    sites, and names the functions of declared blocks. ``finish`` writes these.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.sites: list[CallSite] = []
        self.metric_types: dict[str, TensorType] = {}
        self._names: dict[str, Any] = {}
        self._functions: list[tuple[Code, Block]] = []
        self._dictionaries: list[str] = []
        self._numbers: Counter[str] = Counter()  # of the operations of a name
        self._unique: dict[Hashable, Any] = {}

    def unique(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the one object of a key; equal modules are batched together."""
        if key not in self._unique:
            self._unique[key] = make()
        unique: T = self._unique[key]
        return unique

    def name_of(self, value: object) -> str:
        """Name a host object in the written code."""
        name = self.unique(("name", id(value)), lambda: f"g{len(self._names)}")
        self._names[name] = value
        return name

    def dictionary(self) -> str:
        """Name a dictionary that is empty when an example begins."""
        self._dictionaries.append(f"h{len(self._dictionaries)}")
        return self._dictionaries[-1]

    def signature(
        self,
        module: Callable[..., Any],
        inputs: Sequence[RowType | Ragged],
        outputs: Sequence[RowType],
        name: str | None = None,
        random: bool | None = None,
    ) -> Signature:
        """Register an operation and return its signature."""
        stem = (name or "").replace(".", "_") or _name_of(module)
        free_name = stem
        while free_name in self.operations:
            self._numbers[stem] += 1
            free_name = f"{stem}_{self._numbers[stem]}"
        return self.operations.add(module, inputs, outputs, name=free_name, random=random)

    def site(self, site: Site, path: str, table: np.ndarray | None = None) -> int:
        """Add a call site and number it."""
        self.sites.append(CallSite(site, path, table))
        return len(self.sites) - 1

    def function_of(self, block: Block) -> str:
        """Name the separate function of a block."""

        def make() -> Code:
            code = Code(self, f"f{len(self._functions)}")
            self._functions.append((code, block))
            return code

        return self.unique(("function", id(block)), make).function

    def finish(self, root: "Code", result_type: ResultType) -> CompiledSource:
        """Write all functions that are still missing, and put the source together."""
        # More functions are appended while this runs.
        for code, block in self._functions:
            code.path = block._path()
            code.write(block._known("input"), partial(code.inline, block))

        codes = [root, *(code for code, _ in self._functions)]
        first_lines = [WrittenLine(text, Origin("Root")) for text in self._first_lines()]
        lines_of_functions = [line for code in codes for line in code.lines]
        last_lines = [WrittenLine(text, Origin("Root")) for text in self._last_lines()]
        lines = [*first_lines, *lines_of_functions, *last_lines]
        return CompiledSource(
            source="\n".join(line.text for line in lines),
            origins=[line.origin for line in lines],
            names=self._names,
            sites=tuple(self.sites),
            metric_types=self.metric_types,
            result_type=result_type,
        )

    def _first_lines(self) -> list[str]:
        """Write the lists that an example fills, and the records of calls without arguments."""
        free_calls = [
            number
            for number, call_site in enumerate(self.sites)
            if call_site.site.signature is not None and not call_site.site.signature.inputs
        ]
        lines = ["def begin():", f"    C = {free_calls}; L = C.__len__; E = C.extend; A = C.append"]
        lines += [f"    z{number} = {value}" for value, number in enumerate(free_calls)]
        lines += [
            f"    D{number} = []; d{number} = D{number}.append" for number in self._data_sites
        ]
        for n in range(len(self.metric_types)):
            lines.append(f"    M{n} = []; m{n} = M{n}.append; N{n} = []; n{n} = N{n}.append")
        lines += [f"    {name} = {{}}" for name in self._dictionaries]
        return lines

    def _last_lines(self) -> list[str]:
        """Write the function ``cut``, and what ``begin`` returns."""
        constants = [f"{number}: D{number}" for number in self._data_sites]
        values = [f"{name!r}: M{number}" for number, name in enumerate(self.metric_types)]
        labels = [f"{name!r}: N{number}" for number, name in enumerate(self.metric_types)]
        lists = ["C", *(f"D{number}" for number in self._data_sites)]
        clear = "; ".join(f"{name}.clear()" for name in lists)
        dictionaries = ", ".join(f"{{{', '.join(items)}}}" for items in (constants, values, labels))
        return [
            "    def cut():",
            "        nonlocal L",
            f"        n = L(); L = lambda: n + len(C); {clear}",
            f"    return C, {dictionaries}, root, cut\n",
        ]

    @property
    def _data_sites(self) -> list[int]:
        """The sites of constants and of inputs."""
        return [
            number for number, call_site in enumerate(self.sites) if call_site.site.kind != CALL
        ]


class WrittenLine(NamedTuple):
    """One line of the written code."""

    text: str
    origin: Origin


class ZippedItem(NamedTuple):
    """One of the sequences that are zipped."""

    sequence: str | None  # what a loop iterates over; None if one value is repeated
    value: Expression  # the repeated value


class RecordedConstant(NamedTuple):
    """A constant that was recorded, and the number of lines after it."""

    name: str
    site: int
    num_lines: int


class Code:
    """Write the body of one generator function.

    A value is a variable of the written code: one variable per tensor, sequence or host object,
    and a tuple of values where the type is a tuple.
    """

    def __init__(self, model: ModelCode, function: str) -> None:
        self.model = model
        self.function = function
        self.lines: list[WrittenLine] = []
        # The path of the block that is being written.
        self.path = "Root"
        # For the value of a zip, what to loop over instead.
        self.zipped: dict[str, list[ZippedItem]] = {}
        self._indent = 1  # the function is inside of ``begin``
        self._names = 0
        self._last_constant = RecordedConstant("", site=0, num_lines=0)

    def write(self, input_type: ResultType, body: Callable[[Expression], Expression]) -> None:
        """Write the whole function: ``def f(x): … yield None, body(x)``."""
        value = self.new(input_type, "x")
        parameter = value if isinstance(value, str) else "x_"
        with self.inside(f"def {self.function}({parameter}):"):
            if parameter == "x_":
                self.line(f"{packed(value)} = x_")
            self.line(f"yield None, {packed(body(value))}")

    def emit(self, block: Block, value: Expression) -> Expression:
        """Write what a block computes, and return its output value."""
        if self._indent > MAX_NESTING or block._declaration is not None:
            return self.call(block, value)
        return self.inline(block, value)

    def inline(self, block: Block, value: Expression) -> Expression:
        """Write what a block computes into this function."""
        outer = self.path
        self.path = block._path()
        result = block._emit(self, value)
        self.path = outer
        return result

    def call(self, block: Block, value: Expression) -> Expression:
        """Write a call of a block that has its own function."""
        result = self.new(block._known("output"))
        self.line(f"{packed(result)} = yield {self.model.function_of(block)}, {packed(value)}")
        return result

    def line(self, text: str, *, users_own: bool = False) -> None:
        """Add a line; with ``users_own``, errors in it come from the user's function."""
        self.lines.append(WrittenLine("    " * self._indent + text, Origin(self.path, users_own)))

    def assign(self, target: Expression, value: Expression) -> None:
        """Write the assignment of a value to variables."""
        self.line(f"{packed(target)} = {packed(value)}")

    def branches(
        self, kind: ResultType, *cases: tuple[str, Callable[[], Expression]]
    ) -> Expression:
        """Write ``if``, ``elif`` and ``else`` with what each case computes; return the value."""
        result = self.new(kind)
        for header, write in cases:
            with self.inside(header):
                self.assign(result, write())
        return result

    def fresh(self, stem: str = "v", expression: str = "") -> str:
        """Create a variable, and assign an expression to it if there is one."""
        self._names += 1
        name = f"{stem}{self._names}"
        if expression:
            self.line(f"{name} = {expression}")
        return name

    def new(self, result_type: ResultType | None, stem: str = "v") -> Expression:
        """Create variables for a value of a type; one if the type is unknown."""
        if isinstance(result_type, TupleType):
            return tuple(self.new(item, stem) for item in result_type)
        if isinstance(result_type, BroadcastSequenceType):
            return self.new(result_type.element_type, stem)
        return self.fresh(stem)

    def reading(self, value: Expression) -> str:
        """Write an expression for a host object that is read as a sequence."""
        seen = self.model.unique("read", self.model.dictionary)
        return f"{self.model.name_of(read_once)}({packed(value)}, {seen})"

    @contextmanager
    def inside(self, header: str) -> Iterator[None]:
        """Write an indented part under a header."""
        self.line(header)
        self._indent += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self.line("pass")
        self._indent -= 1

    # Recording.

    def record_data(
        self, kind: int, row_type: RowType, data: Expression, table: np.ndarray | None = None
    ) -> str:
        """Write lines that record a constant, or the reading of an external row."""
        site = self.model.site(Site(kind, (row_type,)), self.path, table)
        name = self.fresh("c")
        item = packed(data)
        row = f"; A({self.model.name_of(row_of)}({item}))" if kind == INPUT else ""
        self.line(f"{name} = L(); A({site}){row}; d{site}({item})")
        self._last_constant = RecordedConstant(name, site, len(self.lines))
        return name

    def bound_data(self, value: Expression, size: int) -> None:
        """Let a constant be an index below a size, if it was recorded just now, to be read here."""
        last = self._last_constant
        if last.name == value and last.num_lines == len(self.lines):
            sites = self.model.sites
            sites[last.site] = sites[last.site]._replace(bound=(size, self.path))

    def record_all_data(self, row_type: RowType, data: Expression, path: str) -> str:
        """Write lines that record a constant for each element of a sequence."""
        site = self.model.site(Site(CONSTANT, (row_type,)), path)
        rows = self.fresh("s", f"[*{self.reading(data)}]")
        values = self.fresh("s")
        self.line(f"{values} = [*range(L(), L() + len({rows}))]")
        self.line(f"C.extend([{site}] * len({rows})); D{site}.extend({rows})")
        return values

    def record_free(self, signature: Signature) -> str:
        """Name the value of an operation without arguments: it is the same everywhere."""
        site = Site(CALL, signature.outputs, signature)
        key = ("free", signature)
        return f"z{self.model.unique(key, lambda: self.model.site(site, self.path))}"

    def record_call(self, signature: Signature, arguments: Sequence[str]) -> tuple[str, ...]:
        """Write lines that record one call."""
        site = self.model.site(Site(CALL, signature.outputs, signature), self.path)
        results = [self.fresh() for _ in signature.outputs]
        first = results[0]
        # Every result is named by a position in the record, so that must be long enough.
        padding = ["-1"] * max(0, len(results) - 1 - len(arguments))
        record = ", ".join([str(site), *arguments, *padding])
        self.line(f"{first} = L(); E(({record},))")
        for slot, name in enumerate(results[1:], start=1):
            self.line(f"{name} = {first} + {slot}")
        return tuple(results)


def _name_of(module: object) -> str:
    """Name an operation by its layer, function or class."""
    module = getattr(module, "called", module)
    if not getattr(module, "name", None):
        # A layer around a module has the name of the module.
        module = getattr(module, "layer_fn", module)

    name = getattr(module, "name", None) or getattr(module, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier():
        name = type(module).__name__
    return name.lower().strip("_")


def packed(value: Expression) -> str:
    """Write a value as one Python expression."""
    if isinstance(value, str):
        return value
    comma = "," if len(value) == 1 else ""
    return f"({', '.join(map(packed, value))}{comma})"


def items_of(value: Expression, size: int) -> tuple[Expression, ...]:
    """Write each item of a tuple, which may be one host object."""
    if isinstance(value, tuple):
        return value
    return tuple(f"{value}[{number}]" for number in range(size))


def packed_if_object(
    code: Code, items: tuple[Expression, ...], result_type: ResultType | None
) -> Expression:
    """Write a tuple as one host object if that is its type."""
    is_object = isinstance(result_type, PyObjectType)
    return code.fresh(expression=packed(items)) if is_object else items


def row_of(item: object) -> object:
    """Return the number of an external row, which may come with the number of rows."""
    return item[0] if isinstance(item, tuple) else item


def key_text(code: Code, key: object) -> str:
    """Write the key of an item: its text, or a name if the text does not evaluate to the key."""
    # Not of a subclass, such as an enumeration of strings, whose text differs.
    return repr(key) if type(key) in (str, int, bool, type(None)) else code.model.name_of(key)


def flattened(value: object) -> list[Any]:
    """List what nested tuples and lists hold."""
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in flattened(item)]
    return [value]


def read_once(value: T, seen: dict[int, object] | None = None) -> T:
    """Return what is about to be read; raise an error for an iterator that was read before."""
    if not hasattr(type(value), "__next__"):
        return value

    is_exhausted = isinstance(value, GeneratorType) and value.gi_frame is None
    if is_exhausted or (seen is not None and id(value) in seen):
        problem = "an iterator is read twice"
        expected = "a list, or an iterator read once"
        raise TraceError(ValueError, problem, expected, type(value).__name__)
    if seen is not None:
        # The iterator is kept, so that no other object gets its identity.
        seen[id(value)] = value
    return value


# Calls of declared blocks, after which lists are looked at, and nested ones, after which their
# arguments are compared.
_NESTING = 1000
# Entries of a list of Python integers, after which it is replaced by an array.
_LONG = 100_000


def run_trampoline(
    function: Callable[[Any], Any],
    argument: object,
    max_depth: int | None,
    code: list[int],
    pack: Callable[[], None],
) -> object:
    """Run a generator function that yields calls of others; the depth is not limited.

    A function yields ``(function, argument)`` to call another one, whose result is sent to it, and
    last ``(None, result)``. The records are packed whenever there are many.
    """
    callers: list[Any] = []
    running = function(argument)
    value = None
    check_at = _NESTING
    while True:
        for _ in repeat(None, _NESTING):
            called, value = running.send(value)
            if called is not None:
                callers.append(running)
                running = called(value)
                value = None
            elif callers:
                running = callers.pop()
            else:
                return value
        if len(code) > _LONG:
            pack()
        if len(callers) >= check_at:
            check_at *= 2
            _check_ends(callers, max_depth)


def _check_ends(callers: list[Any], max_depth: int | None) -> None:
    """Raise an error if calls that have not returned repeat, or go far beyond a depth."""
    if max_depth is not None and len(callers) > 10 * max_depth:
        problem = "an example is deeper than max_depth"
        expected = f"a depth of {max_depth}"
        got = f"{len(callers)} nested calls of declared blocks"
        raise TraceError(AssertionError, problem, expected, got)

    seen = set()
    for caller in callers:
        frame = caller.gi_frame
        name = frame.f_code.co_varnames[0]
        argument = frame.f_locals[name]
        # Several values are a new tuple every time; positions of tensors are integers.
        values = argument if name == "x_" else (argument,)
        identities = [(type(v), v if type(v) is int else id(v)) for v in values]
        call = (frame.f_code, *identities)
        # What reads an iterator changes it.
        if call in seen and not hasattr(type(argument), "__next__"):
            expected = "a tree or an acyclic graph"
            got = type(argument).__name__
            raise TraceError(ValueError, "an object contains itself", expected, got)
        seen.add(call)
