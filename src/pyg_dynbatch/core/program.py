"""Record the calls of one example without running them; frozen forms and their concatenation."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.structure import longest_paths
from pyg_dynbatch.core.types import RowType, constant_row, describe, parts_of

CONSTANT, INPUT, RESULT = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Value:
    """One value of a program: a constant, an input row, or a result of a call.

    Args:
        program: The program it belongs to.
        number: Its position in the program.
        row_type: What one row of it looks like.
        depth: Longest way to it, counted in calls that read something.
    """

    program: "Program"
    number: int
    row_type: RowType
    depth: int

    def __repr__(self) -> str:
        """Reads like ``Value(3, float32[150], depth 2)``."""
        return f"Value({self.number}, {describe(self.row_type)}, depth {self.depth})"

    def __bool__(self) -> bool:
        """Refuses to decide anything: a value is only recorded, and computed later."""
        raise mismatch(
            TypeError,
            "Value: used as a truth value while calls are recorded",
            "a decision by what the host knows, such as the shape of the tree",
            repr(self),
            hint="`value is not None` for its presence; torch.where inside an operation for "
            "its content",
        )

    def __reduce__(self) -> Any:
        """Refuses to be pickled alone: a value means nothing without its program."""
        raise mismatch(
            TypeError,
            "Value: a value cannot be pickled or copied",
            "the program that recorded it",
            repr(self),
            hint="pickle the program; mark what you need with program.output(value)",
        )


@dataclass(frozen=True, eq=False)
class ProgramArrays:
    """The fields of a program as arrays, made once and merged into every mini-batch it is in."""

    value_type: np.ndarray
    value_kind: np.ndarray
    value_place: np.ndarray
    value_slot: np.ndarray
    call_signature: np.ndarray
    read_value: np.ndarray
    read_call: np.ndarray
    read_argument: np.ndarray
    constants: tuple[tuple[np.ndarray, ...], ...]
    outputs: dict[str, np.ndarray]


class Program:
    """Records the calls of one example as integers and constants; holds no parameters.

    Values are numbered in the order they are made, so a program is always acyclic. Programs are
    cheap to pickle and to keep; many are merged into a :class:`Schedule` by adding offsets.

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

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self.row_types: list[RowType] = []
        self.constants: list[list[tuple[np.ndarray, ...]]] = []
        self.num_inputs: list[int] = []
        self.outputs: dict[str, list[int]] = {}
        self._signature_number: dict[Signature, int] = {}
        self._type_number: dict[RowType, int] = {}
        # One entry a value: its row type, where it comes from, and its place there (the number
        # of the constant, the input row, or the call); for results also the output slot.
        self.value_type: list[int] = []
        self.value_kind: list[int] = []
        self.value_place: list[int] = []
        self.value_slot: list[int] = []
        self.value_depth: list[int] = []
        self.call_signature: list[int] = []
        # One entry an argument row: the value, its call, and which argument of the call it is.
        self.read_value: list[int] = []
        self.read_call: list[int] = []
        self.read_argument: list[int] = []
        self._arrays: tuple[tuple[int, ...], ProgramArrays] | None = None

    def arrays(self) -> ProgramArrays:
        """Gives the fields as arrays; they are kept until the program grows."""
        marked = sum(len(values) for values in self.outputs.values())
        size = (len(self.value_type), len(self.read_value), len(self.outputs), marked)
        if self._arrays is None or self._arrays[0] != size:
            self._arrays = (size, self._as_arrays())
        return self._arrays[1]

    def _as_arrays(self) -> ProgramArrays:
        names = [field.name for field in fields(ProgramArrays)][:8]
        integers: dict[str, Any] = {
            name: np.asarray(getattr(self, name), dtype=np.int64) for name in names
        }
        return ProgramArrays(
            **integers,
            constants=tuple(
                tuple(np.stack(part) for part in zip(*rows, strict=True)) for rows in self.constants
            ),
            outputs={
                name: np.asarray(values, dtype=np.int64) for name, values in self.outputs.items()
            },
        )

    @property
    def num_calls(self) -> int:
        """Number of calls recorded so far."""
        return len(self.call_signature)

    @property
    def depth(self) -> int:
        """Longest chain of calls that read something; 0 for a program without calls."""
        return max(self.value_depth, default=0)

    def constant(self, row_type: RowType, data: Any) -> Value:
        """Adds one constant row.

        Args:
            row_type: Type of the row; its shape and dtype must be stated.
            data: Number, nested list, array or tensor of exactly that shape; for a tuple type a
                tuple of them.

        Returns:
            The value, at depth 0.

        Raises:
            ValueError: If the shape is another one, or an integer is beyond the range of the dtype.
            TypeError: If the data cannot be turned into the dtype without loss of kind.
        """
        parts = parts_of(row_type)
        pieces = data if isinstance(row_type, tuple) else (data,)
        if len(pieces) != len(parts):
            raise mismatch(
                ValueError,
                "Program.constant: wrong number of parts",
                describe(row_type),
                f"{len(pieces)} parts",
            )
        rows = tuple(constant_row(p, d) for p, d in zip(parts, pieces, strict=True))
        kept = self.constants[self._number_of_type(row_type)]
        kept.append(rows)
        return self._value(row_type, CONSTANT, len(kept) - 1, 0, 0)

    def input(self, row_type: RowType, row: int) -> Value:
        """Adds a row that comes from outside, such as one row of an encoder's result.

        The rows of all examples lie one after another in the tensor handed to the engine, as
        PyG lays out ``x``; gradients flow back into it.

        Args:
            row_type: Type of the row.
            row: Which row of this example's part of the tensor.

        Returns:
            The value, at depth 0.

        Raises:
            ValueError: If the row is negative.
        """
        if row < 0:
            raise mismatch(ValueError, "Program.input: negative row", "0 or more", row)
        number = self._number_of_type(row_type)
        self.num_inputs[number] = max(self.num_inputs[number], row + 1)
        return self._value(row_type, INPUT, row, 0, 0)

    def declare_inputs(self, row_type: RowType, rows: int) -> None:
        """States how many input rows of a type the example has, if not all of them are read.

        Args:
            row_type: Type of the rows.
            rows: Their number.

        Raises:
            ValueError: If a row beyond that number is read already.
        """
        number = self._number_of_type(row_type)
        if rows < self.num_inputs[number]:
            raise mismatch(
                ValueError,
                "Program.declare_inputs: fewer rows than are read",
                f"{self.num_inputs[number]} or more",
                rows,
            )
        self.num_inputs[number] = rows

    def call(self, signature: Signature, *arguments: Value | Sequence[Value]) -> Any:
        """Records one call.

        Args:
            signature: What to call.
            *arguments: One value per input; a sequence of values for a ragged one.

        Returns:
            The result, or a tuple of results if the signature has several outputs.

        Raises:
            TypeError: If the number or a type of the arguments differs from the signature.
            ValueError: If a value belongs to another program.
        """
        if not isinstance(signature, Signature):
            raise mismatch(
                TypeError,
                "Program.call: not a signature",
                "a Signature",
                type(signature).__name__,
                where=f"call {self.num_calls}",
                hint="what operations.add(module, inputs, outputs) gives back",
            )
        if len(arguments) != len(signature.inputs):
            raise mismatch(
                TypeError,
                f"Operation {signature.name!r}: wrong number of arguments",
                f"{len(signature.inputs)}: {signature}",
                len(arguments),
                where=f"call {self.num_calls}",
            )
        rows = [
            self._rows(signature, position, wanted, argument)
            for position, (wanted, argument) in enumerate(
                zip(signature.inputs, arguments, strict=True)
            )
        ]
        # A call that reads nothing (a learned start state) waits for nothing and counts nothing.
        call, depth = self.num_calls, 0
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
        """Marks a value as a result of the example.

        Args:
            value: The value.
            name: Under which name the engine gives it back. Any number of values may share a
                name; they come back as rows, example after example, in the order marked.

        Raises:
            ValueError: If the value belongs to another program.
            TypeError: If values of two types are marked under one name.
        """
        self._own(value, f"output {name!r}")
        marked = self.outputs.setdefault(name, [])
        if marked:
            first = self.row_types[self.value_type[marked[0]]]
            if first != value.row_type:
                raise mismatch(
                    TypeError,
                    f"Program.output: {name!r} mixes two types",
                    describe(first),
                    describe(value.row_type),
                    hint="give the second one a name of its own",
                )
        marked.append(value.number)

    def _rows(
        self, signature: Signature, position: int, wanted: RowType | Ragged, argument: Any
    ) -> list[Value]:
        where = f"call {self.num_calls}, argument {position}"
        ragged = isinstance(wanted, Ragged)
        row_type = wanted.row_type if isinstance(wanted, Ragged) else wanted
        values = list(argument) if ragged and not isinstance(argument, Value) else [argument]
        for value in values:
            self._own(value, where)
            if value.row_type != row_type:
                raise mismatch(
                    TypeError,
                    f"Operation {signature.name!r}: argument types differ",
                    describe(row_type),
                    describe(value.row_type),
                    where=where,
                )
        return values

    def _own(self, value: Any, where: str) -> None:
        if not isinstance(value, Value):
            raise mismatch(
                TypeError,
                "Program: not a value of a program",
                "what constant(), input() or call() gave back",
                type(value).__name__,
                where=where,
                hint="wrap data with program.constant(row_type, data)",
            )
        if value.program is not self:
            raise mismatch(
                ValueError,
                "Program: a value of another program",
                "values of this program",
                repr(value),
                where=where,
            )

    def _value(self, row_type: RowType, kind: int, place: int, slot: int, depth: int) -> Value:
        self.value_type.append(self._number_of_type(row_type))
        self.value_kind.append(kind)
        self.value_place.append(place)
        self.value_slot.append(slot)
        self.value_depth.append(depth)
        return Value(self, len(self.value_type) - 1, row_type, depth)

    def _number_of_type(self, row_type: RowType) -> int:
        number = self._type_number.get(row_type)
        if number is None:
            number = self._type_number[row_type] = len(self.row_types)
            self.row_types.append(row_type)
            self.constants.append([])
            self.num_inputs.append(0)
        return number

    def _number_of_signature(self, signature: Signature) -> int:
        number = self._signature_number.get(signature)
        if number is None:
            number = self._signature_number[signature] = len(self.signatures)
            self.signatures.append(signature)
        return number

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the arrays, which repeat the fields."""
        return {**self.__dict__, "_arrays": None}

    def __repr__(self) -> str:
        """Says how large the program is."""
        return f"Program({self.num_calls} calls, depth {self.depth}, outputs {list(self.outputs)})"


@dataclass(frozen=True, eq=False)
class CompactProgram:
    """Holds what a :class:`Program` holds, without the lists that are only needed to record it.

    Schedules and the one-by-one reference take either. Programs of one model share their tables
    of signatures and row types, so that an example costs its integers and constants alone.

    Args:
        signatures: What calls name by number; some may not be called.
        row_types: What values name by number; of some there may be no value.
        num_inputs: Input rows of each row type.
        fields: The calls, values, reads, constants and outputs.

    Example:
        >>> from pyg_dynbatch.core.types import TensorType
        >>> scalar, program = TensorType(()), Program()
        >>> add = Signature("add", (scalar, scalar), (scalar,))
        >>> one = program.constant(scalar, 1.0)
        >>> program.output(program.call(add, one, one))
        >>> compact = CompactProgram((add,), (scalar,), (0,), program.arrays())
        >>> compact
        CompactProgram(1 calls, depth 1, outputs ['output'])
    """

    signatures: tuple[Signature, ...]
    row_types: tuple[RowType, ...]
    num_inputs: tuple[int, ...]
    fields: ProgramArrays

    def arrays(self) -> ProgramArrays:
        """Gives the fields."""
        return self.fields

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return len(self.fields.call_signature)

    @property
    def depth(self) -> int:
        """Longest chain of calls that read something; 0 for a program without calls."""
        f = self.fields
        # A call that reads nothing (a learned start state) waits for nothing and counts nothing.
        reads = np.zeros(self.num_calls, dtype=bool)
        reads[f.read_call] = True
        inner = np.flatnonzero(f.value_kind[f.read_value] == RESULT)
        source, target = f.value_place[f.read_value[inner]], f.read_call[inner]
        kept = reads[source]
        depth = longest_paths(source[kept], target[kept], self.num_calls) + 1
        return int(depth[reads].max(initial=0))

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """Values of each named output."""
        return self.fields.outputs

    def __repr__(self) -> str:
        """Says how large the program is."""
        outputs = list(self.outputs)
        return f"CompactProgram({self.num_calls} calls, depth {self.depth}, outputs {outputs})"


AnyProgram = Program | CompactProgram
"""The calls of one example, while they are recorded or afterwards."""


@dataclass
class MergedPrograms:
    """All programs side by side: the fields of Program as arrays, numbers shifted by offsets."""

    signatures: list[Signature]
    row_types: list[RowType]
    constants: list[tuple[np.ndarray, ...]]
    num_inputs: list[int]
    value_type: np.ndarray
    value_kind: np.ndarray
    value_place: np.ndarray
    value_slot: np.ndarray
    call_signature: np.ndarray
    read_value: np.ndarray
    read_call: np.ndarray
    read_argument: np.ndarray
    output_value: dict[str, np.ndarray]
    output_example: dict[str, np.ndarray]
    merged_calls: int = 0


# The fields of a program that are plain arrays, in their order.
_ARRAYS = tuple(field.name for field in fields(ProgramArrays))[:8]


def _number(table: dict[Any, int], items: list[Any], item: Any) -> int:
    number = table.get(item)
    if number is None:
        number = table[item] = len(items)
        items.append(item)
    return number


def side_by_side(programs: Sequence[AnyProgram]) -> MergedPrograms:
    """Joins the fields of all programs, with one list of signatures and one of row types."""
    signatures: list[Signature] = []
    row_types: list[RowType] = []
    signature_table: dict[Any, int] = {}
    type_table: dict[Any, int] = {}
    _number_all(programs, signature_table, signatures, type_table, row_types)
    stacks: list[list[tuple[np.ndarray, ...]]] = [[] for _ in row_types]
    num_constants, num_inputs = [0] * len(row_types), [0] * len(row_types)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in _ARRAYS}
    output_value: dict[str, list[np.ndarray]] = {}
    output_example: dict[str, list[np.ndarray]] = {}
    values = calls = 0
    for number, program in enumerate(programs):
        types = np.array([type_table[t] for t in program.row_types], dtype=np.int64)
        kinds = [signature_table[s] for s in program.signatures]
        own = program.arrays()
        place, kind, local = own.value_place.copy(), own.value_kind, own.value_type
        shift = np.array([num_constants[t] for t in types], dtype=np.int64)
        place[kind == CONSTANT] += shift[local[kind == CONSTANT]]
        shift = np.array([num_inputs[t] for t in types], dtype=np.int64)
        place[kind == INPUT] += shift[local[kind == INPUT]]
        place[kind == RESULT] += calls
        parts["value_type"].append(types[local])
        parts["value_kind"].append(kind)
        parts["value_place"].append(place)
        parts["value_slot"].append(own.value_slot)
        parts["call_signature"].append(np.array(kinds, dtype=np.int64)[own.call_signature])
        parts["read_value"].append(own.read_value + values)
        parts["read_call"].append(own.read_call + calls)
        parts["read_argument"].append(own.read_argument)
        for local_type, stack in enumerate(own.constants):
            if stack:
                stacks[types[local_type]].append(stack)
                num_constants[types[local_type]] += len(stack[0])
            num_inputs[types[local_type]] += program.num_inputs[local_type]
        for name, marked in own.outputs.items():
            output_value.setdefault(name, []).append(marked + values)
            output_example.setdefault(name, []).append(np.full(len(marked), number))
        values += own.value_type.size
        calls += own.call_signature.size
    joined: dict[str, Any] = {name: np.concatenate(found) for name, found in parts.items()}
    return MergedPrograms(
        signatures,
        row_types,
        [tuple(np.concatenate(part) for part in zip(*stack, strict=True)) for stack in stacks],
        num_inputs,
        output_value={name: np.concatenate(found) for name, found in output_value.items()},
        output_example={name: np.concatenate(found) for name, found in output_example.items()},
        **joined,
    )


def _number_all(
    programs: Sequence[AnyProgram],
    signature_table: dict[Any, int],
    signatures: list[Signature],
    type_table: dict[Any, int],
    row_types: list[RowType],
) -> None:
    """Numbers all signatures and row types of a mini-batch in the order they are met."""
    for program in programs:
        for signature in program.signatures:
            _number(signature_table, signatures, signature)
        for row_type in program.row_types:
            _number(type_table, row_types, row_type)
    _refuse_one_name_twice(signatures)
    for wanted in (wanted for signature in signatures for wanted in signature.inputs):
        # A ragged argument may name a type of which no value exists.
        _number(type_table, row_types, row_type_of(wanted))


def _refuse_one_name_twice(signatures: list[Signature]) -> None:
    first: dict[str, Signature] = {}
    for signature in signatures:
        known = first.setdefault(signature.name, signature)
        if known != signature:
            raise mismatch(
                TypeError,
                f"Schedule.from_programs: two signatures are called {signature.name!r}",
                str(known),
                str(signature),
                hint="take every signature from one Operations object",
            )
