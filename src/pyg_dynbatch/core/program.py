"""Record the calls of one example without running them; concatenate the programs of a batch."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.structure import longest_paths
from pyg_dynbatch.core.types import (
    RowType,
    TensorType,
    constant_dtype,
    describe,
    has_gradient,
    overflowing_value,
    parts_of,
    range_of,
)

CONSTANT, INPUT, RESULT = 0, 1, 2
"""Kinds of values: constants, input rows, results of calls."""

Numbers = Any
"""Integers: a growing ``array`` while calls are recorded, a numpy array afterwards."""

Rows = tuple[np.ndarray, ...]
"""Constants of one row type, one array ``[row, ...]`` per part."""


def _growing() -> Numbers:
    return array("i")


@dataclass(frozen=True, eq=False)
class Value:
    """One value of a program: a constant, an input row, or a result of a call.

    Args:
        program: The program it belongs to.
        number: Its position in the program.
        row_type: Type of one row of it.
        depth: Longest path to it, counted in calls that read something.
    """

    program: "Program"
    number: int
    row_type: RowType
    depth: int

    def __repr__(self) -> str:
        """Read like ``Value(3, float32[150], depth 2)``."""
        return f"Value({self.number}, {describe(self.row_type)}, depth {self.depth})"

    def __bool__(self) -> bool:
        """Raise an error: a value is only recorded, and computed later."""
        what = "Value: used as a truth value while calls are recorded"
        wanted = "a condition known on the host, such as the shape of the tree"
        hint = "`value is not None` for its presence; torch.where in an operation for its content"
        raise mismatch(TypeError, what, wanted, repr(self), hint=hint)

    def __reduce__(self) -> Any:
        """Raise an error: a value is meaningless without its program."""
        what, wanted = "Value: a value cannot be pickled or copied", "the program that recorded it"
        hint = "pickle the program, after program.output(value)"
        raise mismatch(TypeError, what, wanted, repr(self), hint=hint)


@dataclass(eq=False, repr=False)
class Program:
    """Recorded calls of one example, as integers and constants without parameters.

    Values are numbered in the order they are recorded, so a program is always acyclic. A program
    can also be created from arrays, and :func:`concatenate` joins the programs of many examples.

    Args:
        signatures: Signatures, to which calls refer by number.
        row_types: Row types, to which values refer by number.
        num_inputs: Number of input rows of each row type.
        num_constants: Number of constants of each row type.
        constants: Constants of each row type, as a list of arrays with any number of rows.
        value_type: Row type of each value.
        value_kind: Whether it is a constant, an input row or a result.
        value_index: Number of the constant, of the input row, or of the call.
        value_slot: For results, which output of the call.
        call_signature: Signature of each call.
        read_value: For each row that is read, its value.
        read_call: The call that reads it.
        read_argument: Which argument of the call it belongs to.
        outputs: Values of each named output.
        output_example: Example of each of these values (:func:`concatenate`).
        num_examples: Number of examples.

    Example:
        >>> from pyg_dynbatch.core.types import TensorType
        >>> scalar = TensorType(())
        >>> add = Signature("add", (scalar, scalar), (scalar,))
        >>> program = Program()
        >>> one, two = program.constant(scalar, 1.0), program.constant(scalar, 2.0)
        >>> three = program.call(add, one, two)
        >>> program.output(program.call(add, three, two))
        >>> program.depth
        2
    """

    signatures: tuple[Signature, ...] = ()
    row_types: tuple[RowType, ...] = ()
    num_inputs: list[int] = field(default_factory=list)
    num_constants: list[int] = field(default_factory=list)
    constants: list[list[Rows]] = field(default_factory=list)
    value_type: Numbers = field(default_factory=_growing)
    value_kind: Numbers = field(default_factory=_growing)
    value_index: Numbers = field(default_factory=_growing)
    value_slot: Numbers = field(default_factory=_growing)
    call_signature: Numbers = field(default_factory=_growing)
    read_value: Numbers = field(default_factory=_growing)
    read_call: Numbers = field(default_factory=_growing)
    read_argument: Numbers = field(default_factory=_growing)
    outputs: dict[str, Numbers] = field(default_factory=dict)
    output_example: dict[str, np.ndarray] = field(default_factory=dict)
    num_examples: int = 1

    @cached_property
    def _signature_number(self) -> dict[Signature, int]:
        return {each: number for number, each in enumerate(self.signatures)}

    @cached_property
    def _type_number(self) -> dict[RowType, int]:
        return {each: number for number, each in enumerate(self.row_types)}

    @property
    def num_calls(self) -> int:
        """Number of calls recorded so far."""
        return len(self.call_signature)

    @property
    def depth(self) -> int:
        """Longest chain of calls that read something; 0 for a program without calls."""
        # Copies: an array that is being viewed cannot grow.
        value, call = np.array(self.read_value), np.array(self.read_call)
        # A call that reads nothing, such as a learned start state, does not count.
        reads = np.zeros(self.num_calls, dtype=bool)
        reads[call] = True
        inner = np.flatnonzero(np.array(self.value_kind)[value] == RESULT)
        source, target = np.array(self.value_index)[value[inner]], call[inner]
        kept = reads[source]
        depth = longest_paths(source[kept], target[kept], self.num_calls) + 1
        return int(depth[reads].max(initial=0))

    def constant_rows(self, number: int) -> Rows:
        """Return all constants of a row type by its number; an empty tuple if it has none."""
        pieces = self.constants[number]
        if len(pieces) > 1:
            pieces[:] = [tuple(np.concatenate(part) for part in zip(*pieces, strict=True))]
        return pieces[0] if pieces else ()

    def constant(self, row_type: RowType, data: Any) -> Value:
        """Add one constant row.

        Args:
            row_type: Type of the row, with shape and dtype.
            data: Number, nested list, array or tensor of that shape; a tuple for a tuple type.

        Raises:
            ValueError: If the shape differs, or an integer is beyond the range of the dtype.
            TypeError: If the dtype cannot hold data of this kind.
        """
        parts = parts_of(row_type)
        pieces = data if isinstance(row_type, tuple) else (data,)
        if len(pieces) != len(parts):
            what = "Program.constant: wrong number of parts"
            raise mismatch(ValueError, what, describe(row_type), f"{len(pieces)} parts")
        rows = tuple(_constant_row(p, d)[None] for p, d in zip(parts, pieces, strict=True))
        number = self._number_of_type(row_type)
        self.constants[number].append(rows)
        self.num_constants[number] += 1
        return self._value(row_type, CONSTANT, self.num_constants[number] - 1, 0, 0)

    def input(self, row_type: RowType, row: int) -> Value:
        """Add an input row, such as one row of an encoder's result.

        The engine takes the rows of all examples, one example after another, like ``x`` in PyG;
        gradients flow back into them.

        Args:
            row_type: Type of the row.
            row: Its number within this example, from 0.
        """
        if row < 0:
            raise mismatch(ValueError, "Program.input: negative row", "row >= 0", row)
        number = self._number_of_type(row_type)
        self.num_inputs[number] = max(self.num_inputs[number], row + 1)
        return self._value(row_type, INPUT, row, 0, 0)

    def declare_inputs(self, row_type: RowType, rows: int) -> None:
        """Set the number of input rows of a type, if the example does not read all of them.

        Args:
            row_type: Type of the rows.
            rows: Number of rows, at least as many as are read.
        """
        number = self._number_of_type(row_type)
        if rows < self.num_inputs[number]:
            what = "Program.declare_inputs: fewer rows than are read"
            raise mismatch(ValueError, what, f"at least {self.num_inputs[number]}", rows)
        self.num_inputs[number] = rows

    def call(self, signature: Signature, *arguments: Value | Sequence[Value]) -> Any:
        """Record one call.

        Args:
            signature: Signature of the operation.
            *arguments: One value per input; a sequence of values for a ragged one.

        Returns:
            The result, or a tuple of results if the signature has several outputs.

        Raises:
            TypeError: If the number or a type of the arguments differs from the signature.
            ValueError: If a value belongs to another program.
        """
        call = self.num_calls
        if not isinstance(signature, Signature):
            what, wanted = (
                "Program.call: not a signature",
                "operations.add(module, inputs, outputs)",
            )
            raise mismatch(TypeError, what, wanted, type(signature).__name__, where=f"call {call}")
        if len(arguments) != len(signature.inputs):
            what = f"Operation {signature.name!r}: wrong number of arguments"
            wanted = f"{len(signature.inputs)}: {signature}"
            raise mismatch(TypeError, what, wanted, len(arguments), where=f"call {call}")
        rows = [self._checked_argument(signature, *each) for each in enumerate(arguments)]
        depth = 0  # also of a call that reads nothing, such as a learned start state
        for position, values in enumerate(rows):
            for value in values:
                self.read_value.append(value.number)
                self.read_call.append(call)
                self.read_argument.append(position)
                depth = max(depth, value.depth + 1)
        self.call_signature.append(self._number_of_signature(signature))
        results = tuple(
            self._value(row_type, RESULT, call, slot, depth)
            for slot, row_type in enumerate(signature.outputs)
        )
        return results if len(results) > 1 else results[0]

    def output(self, value: Value, name: str = "output") -> None:
        """Mark a value as a result of the example.

        Args:
            value: The value.
            name: Name under which the engine returns it. Values of one name are returned as rows,
                example after example, in the order marked.

        Raises:
            ValueError: If the value belongs to another program.
            TypeError: If values of two types are marked under one name.
        """
        self._check_value(value, f"output {name!r}")
        marked: Numbers = self.outputs.setdefault(name, _growing())
        if marked:
            first = self.row_types[self.value_type[marked[0]]]
            if first != value.row_type:
                what, got = f"Program.output: {name!r} mixes two types", describe(value.row_type)
                hint = "use a separate name for each type"
                raise mismatch(TypeError, what, describe(first), got, hint=hint)
        marked.append(value.number)

    def _checked_argument(self, signature: Signature, position: int, argument: Any) -> list[Value]:
        """Return the values of one argument of a call."""
        where = f"call {self.num_calls}, argument {position}"
        wanted = signature.inputs[position]
        row_type, ragged = row_type_of(wanted), isinstance(wanted, Ragged)
        values = list(argument) if ragged and not isinstance(argument, Value) else [argument]
        for value in values:
            self._check_value(value, where)
            if value.row_type != row_type:
                what = f"Operation {signature.name!r}: argument types differ"
                types = describe(row_type), describe(value.row_type)
                raise mismatch(TypeError, what, *types, where=where)
        return values

    def _check_value(self, value: Any, where: str) -> None:
        if not isinstance(value, Value):
            what, wanted = "Program: not a value of a program", "the result of constant() or call()"
            got, hint = type(value).__name__, "wrap data: program.constant(row_type, data)"
            raise mismatch(TypeError, what, wanted, got, where=where, hint=hint)
        if value.program is not self:
            what = "Program: a value of a different program"
            raise mismatch(ValueError, what, "values of this program", repr(value), where=where)

    def _value(self, row_type: RowType, kind: int, place: int, slot: int, depth: int) -> Value:
        self.value_type.append(self._number_of_type(row_type))
        self.value_kind.append(kind)
        self.value_index.append(place)
        self.value_slot.append(slot)
        return Value(self, len(self.value_type) - 1, row_type, depth)

    def _number_of_type(self, row_type: RowType) -> int:
        number = self._type_number.setdefault(row_type, len(self.row_types))
        if number == len(self.row_types):
            self.row_types = (*self.row_types, row_type)
            self.constants.append([])
            self.num_constants.append(0)
            self.num_inputs.append(0)
        return number

    def _number_of_signature(self, signature: Signature) -> int:
        number = self._signature_number.setdefault(signature, len(self.signatures))
        if number == len(self.signatures):
            for known in self.signatures:
                if known.name == signature.name:
                    what = f"Program: two signatures are called {known.name!r}"
                    hint = "take all signatures from one Operations object"
                    raise mismatch(TypeError, what, known, signature, hint=hint)
            self.signatures = (*self.signatures, signature)
            for wanted in signature.inputs:
                # A ragged argument may have no values.
                self._number_of_type(row_type_of(wanted))
        return number

    def __getstate__(self) -> dict[str, Any]:
        """Concatenate the constants of each type: many small arrays take more memory."""
        for number in range(len(self.row_types)):
            self.constant_rows(number)
        return vars(self)

    def __repr__(self) -> str:
        return f"Program({self.num_calls} calls, depth {self.depth}, outputs {list(self.outputs)})"


def _constant_row(part: TensorType, data: Any) -> np.ndarray:
    """Convert a constant to an array of the shape and dtype of its type."""
    if part.shape is None or part.dtype is None:
        what = "Program.constant: the type leaves shape or dtype open"
        raise mismatch(TypeError, what, "a TensorType with shape and dtype", part)
    # numpy reads Python floats in double precision, torch in single precision.
    tensor = torch.as_tensor(data if isinstance(data, torch.Tensor) else np.asarray(data))
    tensor = tensor.detach().cpu()
    shape = tuple(tensor.shape)
    if shape != part.shape:
        got = TensorType(shape, tensor.dtype)
        raise mismatch(ValueError, "Program.constant: shape differs", part, got)
    if has_gradient(tensor.dtype) and not has_gradient(part.dtype):
        got = TensorType(shape, tensor.dtype)
        raise mismatch(TypeError, "Program.constant: dtype differs", part, got)
    # numpy has no bfloat16; float32 represents it exactly.
    rows = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if (wrong := overflowing_value(rows, part.dtype)) is not None:
        what = "Program.constant: a number is beyond the range of its dtype"
        raise mismatch(ValueError, what, f"{part}, {range_of(part.dtype)}", wrong)
    # A copy: the program must not change when the caller's array does.
    return rows.astype(constant_dtype(rows.dtype, part.dtype))


def number_arguments(position: np.ndarray, fixed: np.ndarray, ragged: np.ndarray) -> np.ndarray:
    """Number the argument of each read from its position among the reads of a call.

    ``fixed`` and ``ragged`` count the arguments of both kinds of the call of each read; rows of
    ragged arguments alternate after the fixed ones.
    """
    return np.where(position < fixed, position, fixed + (position - fixed) % np.maximum(ragged, 1))


_INTEGERS = (
    "value_type", "value_kind", "value_index", "value_slot", "call_signature", "read_value",
    "read_call", "read_argument",
)  # fmt: skip


def concatenate(programs: Sequence[Program]) -> Program:
    """Concatenate the programs of a mini-batch, with one list of signatures and row types."""
    if len(programs) == 1 and isinstance(programs[0].value_type, np.ndarray):
        return programs[0]
    joined = Program(num_examples=0)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in _INTEGERS}
    outputs: dict[str, list[np.ndarray]] = {}
    examples: dict[str, list[np.ndarray]] = {}
    values = calls = 0
    for program in programs:
        own = {name: np.array(getattr(program, name), dtype=np.int64) for name in _INTEGERS}
        kinds = np.array([joined._number_of_signature(s) for s in program.signatures], np.int64)
        types = [joined._number_of_type(row_type) for row_type in program.row_types]
        # ``value_index`` is the number of a constant or input row of a type, or of a call.
        constants = [joined.num_constants[number] for number in types]
        inputs = [joined.num_inputs[number] for number in types]
        before = np.array([constants, inputs, [calls] * len(types)], dtype=np.int64)
        own["value_index"] += before[own["value_kind"], own["value_type"]]
        own["value_type"] = np.array(types, dtype=np.int64)[own["value_type"]]
        own["call_signature"] = kinds[own["call_signature"]]
        own["read_value"] += values
        own["read_call"] += calls
        for name in _INTEGERS:
            parts[name].append(own[name])
        for local, number in enumerate(types):
            if rows := program.constant_rows(local):
                joined.constants[number].append(rows)
                joined.num_constants[number] += len(rows[0])
            joined.num_inputs[number] += program.num_inputs[local]
        for name, marked in program.outputs.items():
            example = program.output_example.get(name, np.zeros(len(marked), dtype=np.int64))
            outputs.setdefault(name, []).append(np.array(marked, dtype=np.int64) + values)
            examples.setdefault(name, []).append(example + joined.num_examples)
        values += own["value_type"].size
        calls += own["call_signature"].size
        joined.num_examples += program.num_examples
    for name, found in parts.items():
        setattr(joined, name, np.concatenate(found))
    joined.outputs = {name: np.concatenate(found) for name, found in outputs.items()}
    joined.output_example = {name: np.concatenate(found) for name, found in examples.items()}
    return joined
