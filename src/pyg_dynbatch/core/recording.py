"""Recorded calls: the integers that blocks, autobatch and recordings write, and schedules read.

A record is the number of a site, followed by what the call reads, and a value is named by where
its record begins. With a site 0 for constants and a site 1 for ``add``, ``add(add(a, b), b)`` is::

    0   0   1 0 1   1 2 1     two constants, a + b, and the sum with b
    ^0  ^1  ^2      ^5        their values

- A constant is its site alone; the k-th record of a site is the k-th row of the site's data.
- An input is its site and the number of an input row.
- A call is its site and its arguments: a value, or for a ragged argument the number of values and
  these. Its results are the value at its site and those that follow, so the record is at least as
  long as there are results, filled up with -1.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import index
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.types import (
    RowType,
    TensorType,
    constant_dtype,
    describe,
    has_gradient,
    is_row_type,
    numpy_dtype_of,
    overflowing_value,
    parts_of,
    range_of,
)

CONSTANT = 0
INPUT = 1
CALL = 2
"""Kinds of sites."""

Integers = Sequence[int] | np.ndarray
"""Records, one after another."""

ConstantRows = tuple[np.ndarray, ...]
"""Constants of one row type, one array ``[row, ...]`` per part."""


class Site(NamedTuple):
    """What records of one number have in common."""

    kind: int
    results: tuple[RowType, ...]
    signature: Signature | None = None  # of calls

    @property
    def arguments(self) -> tuple[RowType | Ragged, ...]:
        """What follows the site in a record: the arguments of a call, the row of an input."""
        if self.signature is not None:
            return self.signature.inputs
        return self.results if self.kind == INPUT else ()

    @property
    def is_valid(self) -> bool:
        """Whether the fields are as the kind requires."""
        signature = self.signature
        if self.kind in (CONSTANT, INPUT):
            return signature is None and len(self.results) == 1 and is_row_type(self.results[0])
        if self.kind != CALL or not isinstance(signature, Signature) or not signature.outputs:
            return False
        types = (*signature.outputs, *map(row_type_of, signature.inputs))
        return self.results == signature.outputs and all(map(is_row_type, types))


class Sites(list[Site]):
    """The table of the sites that the records of a model name by number; it only grows.

    Its properties are derived from all sites when they are first read, and again after a change.
    """

    def append(self, site: Site) -> None:
        """Add a site; raise an error for a second signature of one name."""
        by_name = self._by_name
        _add_signature(by_name, site)
        super().append(site)
        vars(self).clear()  # of what was derived from fewer sites
        self._by_name = by_name

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Sites, (list(self),)

    @cached_property
    def _by_name(self) -> dict[str, Signature]:
        by_name: dict[str, Signature] = {}
        for site in self:
            _add_signature(by_name, site)
        return by_name

    @cached_property
    def are_valid(self) -> bool:
        """Whether all sites are as their kinds require."""
        return all(isinstance(site, Site) and site.is_valid for site in self)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """All signatures; an error if two have the same name."""
        return tuple(self._by_name.values())

    @cached_property
    def row_types(self) -> tuple[RowType, ...]:
        """All row types of results and arguments."""
        results = chain.from_iterable(site.results for site in self)
        arguments = chain.from_iterable(signature.inputs for signature in self.signatures)
        return tuple(dict.fromkeys(chain(results, map(row_type_of, arguments))))

    @cached_property
    def number_of_type(self) -> dict[RowType, int]:
        """The number of each row type."""
        return {row_type: number for number, row_type in enumerate(self.row_types)}

    @cached_property
    def fused(self) -> dict[bytes, Any]:
        """The programs of fused steps by how C describes them, which scheduling fills in."""
        return {}

    @cached_property
    def argument_types(self) -> list[list[int]]:
        """The row type of each argument of each signature."""
        number_of = self.number_of_type
        return [
            [number_of[row_type_of(argument)] for argument in signature.inputs]
            for signature in self.signatures
        ]

    @cached_property
    def result_types(self) -> list[list[int]]:
        """The row type of each result of each signature."""
        number_of = self.number_of_type
        return [
            [number_of[result] for result in signature.outputs] for signature in self.signatures
        ]

    @cached_property
    def most_results(self) -> int:
        """Largest number of results of a site, at least 1."""
        return max((len(site.results) for site in self), default=1)

    @cached_property
    def most_arguments(self) -> int:
        """Largest number of arguments of a signature."""
        return max((len(signature.inputs) for signature in self.signatures), default=0)

    @cached_property
    def types(self) -> np.ndarray:
        """Row type of each result of each site."""
        types = np.zeros((len(self), self.most_results), np.int32)
        for row, site in zip(types, self, strict=True):
            row[: len(site.results)] = [self.number_of_type[each] for each in site.results]
        return types

    @property
    def signature_numbers(self) -> np.ndarray:
        """The number of the signature of each site, -1 for none."""
        _, _, numbers, *_ = self.table
        return numbers

    @cached_property
    def table(self) -> tuple[np.ndarray, ...]:
        """Struct ``sites`` of ``native/recordings.h``, and the arrays in it, in its order."""
        number_of_name = {signature.name: n for n, signature in enumerate(self.signatures)}
        ragged = [[isinstance(i, Ragged) for i in s.inputs] for s in self.signatures]
        columns: list[Any] = [
            [site.kind for site in self],
            [
                -1 if site.signature is None else number_of_name[site.signature.name]
                for site in self
            ],
            [len(site.results) for site in self],
            self.types,
            [len(s.inputs) for s in self.signatures],
            [own + [False] * (self.most_arguments - len(own)) for own in ragged],
            [not s.random for s in self.signatures],
            [own + [0] * (self.most_arguments - len(own)) for own in self.argument_types],
        ]
        arrays = [np.array(column, dtype=np.int32) for column in columns]

        addresses = [each.ctypes.data for each in arrays]
        struct = np.array([*addresses, self.most_results, self.most_arguments], dtype=np.int64)
        return struct, *arrays

    @cached_property
    def _address(self) -> int:
        return self.table[0].ctypes.data

    def data_ptr(self) -> int:
        """Return the address of the table, for C."""
        return self._address


def _add_signature(by_name: dict[str, Signature], site: Site) -> None:
    """Add the signature of a site to those known by name, unless its name is taken."""
    if (signature := site.signature) is None:
        return
    known = by_name.setdefault(signature.name, signature)
    if known is not signature and known != signature:
        problem = f"Recording: two signatures are called {known.name!r}"
        hint = "take all signatures from one Operations object"
        raise mismatch(TypeError, problem, expected=known, got=signature, hint=hint)


class DecodedRecord(NamedTuple):
    """One record, decoded."""

    begin: int
    number: int  # of its site
    arguments: list[list[int]]  # the values of each argument; of an input, the number of its row
    end: int


def record_at(sites: Sequence[Site], code: Integers, begin: int) -> DecodedRecord:
    """Decode one record."""
    number = int(code[begin])
    site = sites[number]
    arguments: list[list[int]] = []
    end = begin + 1
    for argument in site.arguments:
        size = 1
        if isinstance(argument, Ragged):
            size = int(code[end])
            end += 1
        arguments.append([int(value) for value in code[end : end + size]])
        end += size
    return DecodedRecord(begin, number, arguments, max(end, begin + len(site.results)))


def records_of(sites: Sequence[Site], code: Integers, begin: int = 0) -> Iterator[DecodedRecord]:
    """Decode records one by one."""
    while begin < len(code):
        record = record_at(sites, code, begin)
        yield record
        begin = record.end


@dataclass(frozen=True, eq=False)
class Value:
    """One value of a recording: a constant, an input row, or a result of a call.

    Args:
        recording: The recording it belongs to.
        number: Where it is in the recording.
        row_type: Type of one row of it.
        depth: Longest path to it, counted in calls that read something.
    """

    recording: "Recording"
    number: int
    row_type: RowType
    depth: int

    def __repr__(self) -> str:
        """Read like ``Value(3, float32[150], depth 2)``."""
        return f"Value({self.number}, {describe(self.row_type)}, depth {self.depth})"

    def __bool__(self) -> bool:
        """Raise an error: a value is only recorded, and computed later."""
        problem = "Value: used as a truth value while calls are recorded"
        expected = "a condition known on the host, such as the shape of the tree"
        hint = "`value is not None` for its presence; torch.where in an operation for its content"
        raise mismatch(TypeError, problem, expected, repr(self), hint=hint)

    def __reduce__(self) -> NoReturn:
        """Raise an error: a value is meaningless without its recording."""
        problem = "Value: a value cannot be pickled or copied"
        hint = "pickle the recording, after recording.output(value)"
        raise mismatch(TypeError, problem, "the recording it belongs to", repr(self), hint=hint)


@dataclass(eq=False, repr=False)
class Recording:
    """Recorded calls of one example, as integers and constants without parameters.

    Build one by hand with :meth:`constant`, :meth:`input`, :meth:`call` and :meth:`output`;
    compiled blocks and ``autobatch`` write others. It can be pickled. A value is recorded before
    the calls that read it, so a recording is always acyclic.

    Args:
        sites: Table of the sites that records name by number.
        code: Records, one after another; see :mod:`pyg_dynbatch.core.recording`.
        data: Constants of each site, as a list of arrays with any number of rows.
        num_inputs: Number of input rows of each row type.
        outputs: Values of each named output.
        model: Fingerprint of the model that wrote it; others refuse it.
        result: What the writer needs to rebuild the result of the example.

    Example:
        >>> from pyg_dynbatch.core.types import TensorType
        >>> scalar = TensorType(())
        >>> add = Signature("add", (scalar, scalar), (scalar,))
        >>> recording = Recording()
        >>> one, two = recording.constant(scalar, 1.0), recording.constant(scalar, 2.0)
        >>> three = recording.call(add, one, two)
        >>> recording.output(recording.call(add, three, two))
        >>> recording.depth, list(recording.code)
        (2, [0, 0, 1, 0, 1, 1, 2, 1])
    """

    sites: Sites = Sites()
    code: Any = field(default_factory=lambda: array("i"))
    data: dict[int, list[ConstantRows]] = field(default_factory=dict)
    num_inputs: dict[RowType, int] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    result: Any = None

    @cached_property
    def _number_of_site(self) -> dict[Site, int]:
        # Copied before the first call is recorded, since a table grows and others may share it.
        self.sites = Sites(self.sites)
        return {site: number for number, site in enumerate(self.sites)}

    @property
    def num_calls(self) -> int:
        """Number of calls recorded so far."""
        return sum(self.sites[record.number].kind == CALL for record in self.records())

    @property
    def depth(self) -> int:
        """Longest chain of calls that read something; 0 for a recording without calls."""
        depth: dict[int, int] = {}  # of each value
        for record in self.records():
            site = self.sites[record.number]
            reads = chain(*record.arguments) if site.kind == CALL else ()
            # A call that reads nothing, such as a learned start state, does not count.
            longest = max((1 + depth[value] for value in reads), default=0)
            results = range(record.begin, record.begin + len(site.results))
            depth.update(dict.fromkeys(results, longest))
        return max(depth.values(), default=0)

    def records(self) -> Iterator[DecodedRecord]:
        """Decode the records one by one."""
        return records_of(self.sites, self.code)

    def constants_of(self, site: int) -> ConstantRows:
        """Return all constants of a site."""
        pieces = self.data[site]
        if len(pieces) > 1:
            pieces[:] = [tuple(np.concatenate(part) for part in zip(*pieces, strict=True))]
        return pieces[0]

    def constant(self, row_type: RowType, data: object) -> Value:
        """Add one constant row.

        Args:
            row_type: Type of the row, with shape and dtype.
            data: Number, nested list, array or tensor of that shape; a tuple for a tuple type.

        Raises:
            ValueError: If the shape differs, or an integer is beyond the range of the dtype.
            TypeError: If the dtype cannot hold data of this kind.
        """
        _check_row_type("constant", row_type)
        parts = parts_of(row_type)
        pieces = data if isinstance(row_type, tuple) else (data,)
        if not isinstance(pieces, Sequence) or len(pieces) != len(parts):
            problem = "Recording.constant: wrong number of parts"
            got = f"{len(pieces)} parts" if isinstance(pieces, Sequence) else repr(data)
            raise mismatch(ValueError, problem, describe(row_type), got)

        pairs = zip(parts, pieces, strict=True)
        rows = tuple(_constant_row(part, piece)[None] for part, piece in pairs)
        site = self._site(CONSTANT, (row_type,))
        self.data.setdefault(site, []).append(rows)
        return self._values(site, (), 0)[0]

    def input(self, row_type: RowType, row: int) -> Value:
        """Add an input row, such as one row of an encoder's result.

        The engine takes the rows of all examples, one example after another, like ``x`` in PyG;
        gradients flow back into them.

        Args:
            row_type: Type of the row.
            row: Its number within this example, from 0.
        """
        _check_row_type("input", row_type)
        if not is_count(row):
            expected = "an integer from 0 to 2 ** 31 - 1"
            raise mismatch(ValueError, "Recording.input: invalid row", expected, repr(row))
        self.num_inputs[row_type] = max(self.num_inputs.get(row_type, 0), row + 1)
        return self._values(self._site(INPUT, (row_type,)), (row,), 0)[0]

    def declare_inputs(self, row_type: RowType, rows: int) -> None:
        """Set the number of input rows of a type, if the example does not read all of them.

        Args:
            row_type: Type of the rows.
            rows: Number of rows, at least as many as are read.
        """
        _check_row_type("declare_inputs", row_type)
        least = self.num_inputs.get(row_type, 0)
        if not is_count(rows) or rows < least:
            problem = "Recording.declare_inputs: fewer rows than are read, or no number"
            raise mismatch(ValueError, problem, f"an integer, at least {least}", repr(rows))
        self._site(INPUT, (row_type,))
        self.num_inputs[row_type] = rows

    def call(self, signature: Signature, *arguments: Value | Sequence[Value]) -> Any:
        """Record one call.

        Args:
            signature: Signature of the operation.
            *arguments: One value per input; a sequence of values for a ragged one.

        Returns:
            The result, or a tuple of results if the signature has several outputs.

        Raises:
            TypeError: If the number or a type of the arguments differs from the signature.
            ValueError: If a value belongs to another recording.
        """
        if not isinstance(signature, Signature):
            problem = "Recording.call: not a signature"
            expected = "operations.add(module, inputs, outputs)"
            got = type(signature).__name__
            raise mismatch(TypeError, problem, expected, got, where=f"call {self.num_calls}")
        if len(arguments) != len(signature.inputs):
            problem = f"Operation {signature.name!r}: wrong number of arguments"
            expected = f"{len(signature.inputs)}: {signature}"
            where = f"call {self.num_calls}"
            raise mismatch(TypeError, problem, expected, len(arguments), where=where)

        reads: list[int] = []
        depth = 0  # also of a call that reads nothing, such as a learned start state
        for position, argument in enumerate(arguments):
            values = self._checked_argument(signature, position, argument)
            if isinstance(signature.inputs[position], Ragged):
                reads.append(len(values))
            reads += [value.number for value in values]
            depth = max([depth, *(value.depth + 1 for value in values)])
        site = self._site(CALL, signature.outputs, signature)
        results = self._values(site, reads, depth)
        return results if len(results) > 1 else results[0]

    def output(self, value: Value, name: str = "output") -> None:
        """Mark a value as a result of the example.

        Args:
            value: The value.
            name: Name under which the engine returns it. Values of one name are returned as rows,
                example after example, in the order marked.

        Raises:
            ValueError: If the value belongs to another recording.
            TypeError: If values of two types are marked under one name.
        """
        self._check_value(value, f"output {name!r}")
        if not isinstance(name, str):
            problem = "Recording.output: the name is not a string"
            raise mismatch(TypeError, problem, "a name", repr(name))
        first = self._output_types.setdefault(name, value.row_type)
        if first != value.row_type:
            problem = f"Recording.output: {name!r} mixes two types"
            got = describe(value.row_type)
            hint = "use a separate name for each type"
            raise mismatch(TypeError, problem, describe(first), got, hint=hint)
        self.outputs.setdefault(name, array("i")).append(value.number)

    @cached_property
    def _output_types(self) -> dict[str, RowType]:
        return {}

    def _checked_argument(
        self, signature: Signature, position: int, argument: object
    ) -> list[Value]:
        """Return the values of one argument of a call."""
        input_type = signature.inputs[position]
        row_type = row_type_of(input_type)
        values: list[Any] = [argument]
        if isinstance(input_type, Ragged) and isinstance(argument, Iterable):
            values = list(argument)
        for value in values:
            if not isinstance(value, Value) or value.recording is not self:
                self._check_value(value, f"call {self.num_calls}, argument {position}")
            if value.row_type != row_type:
                problem = f"Operation {signature.name!r}: argument types differ"
                got = describe(value.row_type)
                where = f"call {self.num_calls}, argument {position}"
                raise mismatch(TypeError, problem, describe(row_type), got, where=where)
        return values

    def _check_value(self, value: object, where: str) -> None:
        if not isinstance(value, Value):
            problem = "Recording: not a value of a recording"
            expected = "the result of constant() or call()"
            got = type(value).__name__
            hint = "wrap data: recording.constant(row_type, data)"
            raise mismatch(TypeError, problem, expected, got, where=where, hint=hint)
        if value.recording is not self:
            problem = "Recording: a value of a different recording"
            raise mismatch(ValueError, problem, "values of this one", repr(value), where=where)

    def _values(self, site: int, reads: Sequence[int], depth: int) -> tuple[Value, ...]:
        """Append a record and return its values."""
        begin = len(self.code)
        results = self.sites[site].results
        self.code.append(site)
        self.code.extend(reads)
        self.code.extend([-1] * (begin + len(results) - len(self.code)))
        return tuple(
            Value(self, number, row_type, depth) for number, row_type in enumerate(results, begin)
        )

    def _site(self, *fields: Any) -> int:
        """Return the number of a site, which is added if it is new."""
        site = Site(*fields)
        number = self._number_of_site.get(site)
        if number is None:
            self.sites.append(site)
            number = self._number_of_site[site] = len(self.sites) - 1
        return number

    def __getstate__(self) -> dict[str, Any]:
        """Concatenate the constants of each site: many small arrays take more memory."""
        for site in self.data:
            self.constants_of(site)
        return {name: value for name, value in vars(self).items() if name[0] != "_"}

    def __repr__(self) -> str:
        size = f"{self.num_calls} calls, depth {self.depth}"
        return f"Recording({size}, outputs {list(self.outputs)})"


def _constant_row(part: TensorType, data: object) -> np.ndarray:
    """Convert a constant to an array of the shape and dtype of its type."""
    if np.ma.is_masked(data):
        raise mismatch(TypeError, "Recording.constant: an entry is masked", part, repr(data))
    try:
        # numpy reads Python floats in double precision, torch in single precision.
        tensor = torch.as_tensor(data if isinstance(data, torch.Tensor) else np.asarray(data))
        tensor = tensor.detach().cpu()
        # numpy has no bfloat16; float32 represents it exactly.
        rows = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        problem = "Recording.constant: not a number or array of numbers"
        got = f"{describe_value(data)}: {repr(data)[:100]}"
        raise mismatch(TypeError, problem, part, got) from error

    own = TensorType(tuple(tensor.shape), tensor.dtype)
    if own.shape != part.shape:
        raise mismatch(ValueError, "Recording.constant: shape differs", part, own)
    is_lost = own.dtype.is_complex and not part.dtype.is_complex
    if is_lost or (has_gradient(own.dtype) and not has_gradient(part.dtype)):
        raise mismatch(TypeError, "Recording.constant: dtype differs", part, own)
    if (wrong := overflowing_value(rows, part.dtype)) is not None:
        problem = "Recording.constant: a number is beyond the range of its dtype"
        raise mismatch(ValueError, problem, f"{part}, {range_of(part.dtype)}", wrong)

    # A copy: the recording must not change when the caller's array does.
    return rows.astype(constant_dtype(rows.dtype, part.dtype))


# Checks.


def checked_recordings(recordings: Iterable[Recording], owner: str) -> list[Recording]:
    """List recordings; raise an error for other objects, and if they are not of one model."""
    try:
        checked = list(recordings)
    except TypeError as error:
        problem = f"{owner}: not a list of recordings"
        hint = "[recording], if this is a single one"
        got = type(recordings).__name__
        raise mismatch(TypeError, problem, "one recording per example", got, hint=hint) from error
    for number, recording in enumerate(checked):
        where = f"example {number}"
        if not isinstance(recording, Recording):
            got = type(recording).__name__
            raise mismatch(TypeError, f"{owner}: not a recording", "a Recording", got, where=where)
        if recording.model != checked[0].model:
            problem = f"{owner}: recordings of different models"
            expected = f"all of one model, such as {checked[0].model or 'none'} (example 0)"
            got = f"model {recording.model or 'none'}"
            hint = "one mini-batch per model"
            raise mismatch(ValueError, problem, expected, got, where=where, hint=hint)
    return checked


def _check_row_type(method: str, row_type: object) -> None:
    if not is_row_type(row_type):
        problem = f"Recording.{method}: not a row type"
        raise mismatch(TypeError, problem, "a TensorType, or a tuple of some", repr(row_type))


def holds_rows_of(array: np.ndarray, part: TensorType) -> bool:
    """Return whether an array holds constants of a type without loss."""
    stored = np.float64 if part.dtype == torch.float32 else numpy_dtype_of(part.dtype)
    return np.can_cast(array.dtype, stored) and part.shape == array.shape[1:]


def is_count(number: object) -> bool:
    """Return whether a number of rows is a whole number that row numbers of 32 bits can reach."""
    return hasattr(number, "__index__") and 0 <= index(number) <= np.iinfo(np.int32).max
