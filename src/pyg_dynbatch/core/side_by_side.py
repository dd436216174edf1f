"""Put the programs of a mini-batch side by side, every number shifted by an offset."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pyg_dynbatch.core.compact import AnyProgram
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Signature, row_type_of
from pyg_dynbatch.core.program import CONSTANT, INPUT, RESULT, ProgramArrays
from pyg_dynbatch.core.tensor_type import RowType


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
    """Joins the fields of all programs, with one list of signatures and one of row types.

    Raises:
        TypeError: If one name stands for two signatures.
    """
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
            raise TypeError(
                mismatch(
                    f"Schedule.from_programs: two signatures are called {signature.name!r}",
                    expected=str(known),
                    got=str(signature),
                    mend="take every signature from one Operations object",
                )
            )
