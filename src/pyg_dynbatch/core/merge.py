"""Merge the programs of a mini-batch into one schedule, with offsets and sorts only."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged, row_type_of
from pyg_dynbatch.core.policy import DependencyGraph, Policy, order_calls
from pyg_dynbatch.core.program import CONSTANT, INPUT, RESULT, Program, concatenate
from pyg_dynbatch.core.steps import (
    BufferSpec,
    IndexBuilder,
    IndexSlice,
    Output,
    Step,
    Steps,
    contiguous,
    first_rows,
)
from pyg_dynbatch.core.structure import numbers_among_equals
from pyg_dynbatch.core.types import describe

Constants = list[tuple[Tensor, ...] | None]
"""The constant rows of each row type, one tensor per part; None if there are none."""


def schedule_recordings(
    programs: Sequence[Program], policy: str | Policy = "depth", *, merge_equal: bool = True
) -> Steps:
    """Merge the programs of a mini-batch into batched steps.

    Args:
        programs: One program per example; empty programs are allowed.
        policy: ``"depth"``, ``"agenda"``, a :class:`LearnedPolicy`, or a function (see
            :mod:`pyg_dynbatch.core.policy`).
        merge_equal: Whether equal calls on equal constants are made only once.

    Returns:
        The steps; outputs are in the order of ``programs``.

    Raises:
        ValueError: If ``programs`` is empty, or the policy is unknown.
        TypeError: If one name has two signatures, or one output two types.

    Example:
        >>> from pyg_dynbatch.core import Signature, TensorType
        >>> program, scalar = Program(), TensorType(())
        >>> double = Signature("double", (scalar,), (scalar,))
        >>> program.output(program.call(double, program.constant(scalar, 1.0)))
        >>> schedule_recordings([program, program])
        Steps(2 examples, 1 steps, 1 rows)
    """
    if not programs:
        what = "schedule_recordings: the list of programs is empty"
        raise mismatch(ValueError, what, "at least one program", 0)
    program = concatenate(programs)
    dtype = program.value_type.dtype
    constants, constant_row = _distinct_constants(program)
    if merge_equal:
        value, alive = _merge_equal_calls(program, constant_row)
    else:
        value, alive = np.arange(program.value_type.size), np.ones(program.num_calls, dtype=bool)

    # The remaining calls and their reads, numbered without gaps.
    made, new_number = np.flatnonzero(alive), np.cumsum(alive, dtype=dtype) - 1
    kept = alive[program.read_call]
    read_value, read_argument = value[program.read_value[kept]], program.read_argument[kept]
    read_call = new_number[program.read_call[kept]]
    inner = program.value_kind[read_value] == RESULT
    kind = program.call_signature[made]
    source = new_number[program.value_index[read_value[inner]]]
    names = tuple(signature.name for signature in program.signatures)
    graph = DependencyGraph(kind, source, read_call[inner], names)
    step_of_call = order_calls(graph, policy) if made.size else np.zeros(0, dtype=np.int64)
    sizes = np.bincount(step_of_call)
    position = numbers_among_equals(step_of_call, sizes.size)
    kind_of_step = np.zeros(sizes.size, dtype=np.int64)
    kind_of_step[step_of_call] = kind

    # The row of every value in the buffer of its type.
    buffers, results, first_row = _place_results(program, constants, kind_of_step, sizes)
    row = np.zeros_like(program.value_type)
    for number, buffer in enumerate(buffers):
        mine = program.value_type == number
        fixed = mine & (program.value_kind == CONSTANT)
        row[fixed] = constant_row[number][program.value_index[fixed]]
        inputs = mine & (program.value_kind == INPUT)
        row[inputs] = buffer.constants + program.value_index[inputs]
    result = np.flatnonzero(program.value_kind == RESULT)
    result = result[alive[program.value_index[result]]]
    call = new_number[program.value_index[result]]
    row[result] = first_row[step_of_call[call], program.value_slot[result]] + position[call]
    row = row[value]

    flat = IndexBuilder()
    position, step = position.astype(dtype), step_of_call.astype(dtype)
    reads = [row[read_value], position[read_call], read_argument, step[read_call]]
    del value, kept, read_value, read_argument, read_call, inner, source, graph, result, call
    arguments = _index_arguments(program, flat, kind_of_step, reads)
    steps = zip(kind_of_step.tolist(), sizes.tolist(), arguments, results, strict=True)
    outputs = _index_outputs(program, flat, row)
    return Steps(
        signatures=program.signatures,
        buffers=tuple(buffers),
        steps=tuple(Step(*step) for step in steps),
        index=flat.tensor(),
        constants=tuple(constants),
        outputs=outputs,
        num_examples=program.num_examples,
        merged_calls=int((~alive).sum()),
    )


def _distinct_constants(program: Program) -> tuple[Constants, list[np.ndarray]]:
    """Keep one of each group of equal constants; also return the row of every constant."""
    distinct: Constants = []
    row_of_constant = []
    for number in range(len(program.row_types)):
        parts = program.constant_rows(number)
        if not parts:
            distinct.append(None)
            row_of_constant.append(np.zeros(0, dtype=np.int64))
            continue
        # Compared byte by byte, so that nan equals itself and -0.0 differs from 0.0. One byte is
        # added, so that rows without entries have a key as well.
        columns = [np.zeros((len(parts[0]), 1), np.uint8)]
        for part in parts:
            rows = np.ascontiguousarray(part).reshape(len(part), part[0].size)
            columns.append(rows.view(np.uint8))
        joined = np.hstack(columns)
        key = joined.view(np.dtype((np.void, joined.shape[1]))).reshape(-1)
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)  # of first appearance, whatever the bytes are
        # In the precision given: the engine converts them to its working precision.
        distinct.append(tuple(torch.from_numpy(part[first[order]]) for part in parts))
        row_of_constant.append(np.argsort(order)[group.reshape(-1)])
    return distinct, row_of_constant


def _merge_equal_calls(
    program: Program, constant_row: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the value that replaces each value, and which calls remain.

    Calls that repeat an earlier call on equal constants are left out.
    """
    value = np.arange(program.value_type.size, dtype=program.value_type.dtype)
    for number, rows in enumerate(constant_row):
        mine = np.flatnonzero((program.value_type == number) & (program.value_kind == CONSTANT))
        first = np.full(int(rows.max(initial=-1)) + 1, -1, dtype=np.int64)
        row = rows[program.value_index[mine]]
        first[row[::-1]] = mine[::-1]
        value[mine] = first[row]
    alive = np.ones(program.num_calls, dtype=bool)
    fixed = program.value_kind == CONSTANT
    made = np.flatnonzero(program.value_kind == RESULT)
    # The values of the results and of the arguments of every call.
    result = np.zeros((program.num_calls, int(program.value_slot.max(initial=0)) + 1), np.int64)
    result[program.value_index[made], program.value_slot[made]] = made
    most = max((len(signature.inputs) for signature in program.signatures), default=0)
    table = np.zeros((program.num_calls, most), dtype=np.int64)
    for kind in _mergeable_kinds(program):
        arity, slots = len(program.signatures[kind].inputs), len(program.signatures[kind].outputs)
        calls = np.flatnonzero(program.call_signature == kind)
        mine = np.flatnonzero(program.call_signature[program.read_call] == kind)
        where = program.read_call[mine], program.read_argument[mine]
        table[where] = value[program.read_value[mine]]
        calls = calls[fixed[table[calls, :arity]].all(1)]
        if calls.size:
            leader = calls[_first_equal(table[calls, :arity])]
            alive[calls[leader != calls]] = False
            value[result[calls, :slots]] = result[leader, :slots]
            fixed[result[calls, :slots]] = True
    return value[value], alive


def _first_equal(table: np.ndarray) -> np.ndarray:
    """Return for each row of a table the first row that is equal to it."""
    if not table.shape[1]:
        return np.zeros(len(table), dtype=np.int64)
    key, base = table[:, 0], int(table.max(initial=0)) + 1
    for column in table.T[1:]:
        # Ranks are below the number of rows, so the key never overflows.
        key = np.unique(key, return_inverse=True)[1] * base + column
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first[group]


def _mergeable_kinds(program: Program) -> list[int]:
    """List the signatures whose calls may be merged, each after those whose results it reads."""
    source = program.value_kind[program.read_value] == RESULT
    user = program.call_signature[program.read_call[source]]
    made = program.call_signature[program.value_index[program.read_value[source]]]
    needed: dict[int, set[int]] = {}
    for kind, read in set(zip(user.tolist(), made.tolist(), strict=True)):
        needed.setdefault(kind, set()).add(read)
    waiting = [
        number
        for number, signature in enumerate(program.signatures)
        if not signature.random
        and not any(isinstance(wanted, Ragged) for wanted in signature.inputs)
    ]
    found: list[int] = []
    while ready := [kind for kind in waiting if needed.get(kind, set()) <= set(found)]:
        found += ready
        waiting = [kind for kind in waiting if kind not in found]
    return found + waiting


def _place_results(
    program: Program, constants: Constants, kind_of_step: np.ndarray, sizes: np.ndarray
) -> tuple[list[BufferSpec], list[tuple[tuple[int, int], ...]], np.ndarray]:
    """Assign the next free rows of their buffers to the results of every step."""
    number_of_type = {row_type: number for number, row_type in enumerate(program.row_types)}
    counts = [len(rows[0]) if rows else 0 for rows in constants]
    free = [c + i for c, i in zip(counts, program.num_inputs, strict=True)]
    most = max((len(signature.outputs) for signature in program.signatures), default=1)
    first_row = np.zeros((sizes.size, most), dtype=np.int64)
    results = []
    for step, (kind, size) in enumerate(zip(kind_of_step, sizes, strict=True)):
        placed = []
        for slot, row_type in enumerate(program.signatures[kind].outputs):
            buffer = number_of_type[row_type]
            placed.append((buffer, free[buffer]))
            first_row[step, slot] = free[buffer]
            free[buffer] += int(size)
        results.append(tuple(placed))
    columns = zip(program.row_types, counts, program.num_inputs, free, strict=True)
    return [BufferSpec(*column) for column in columns], results, first_row


def _index_arguments(
    program: Program, flat: IndexBuilder, kind_of_step: np.ndarray, reads: list[np.ndarray]
) -> list[tuple[IndexSlice, ...]]:
    """Sort reads, ``[(row, call, argument, step)]``, and split them into arguments."""
    order = np.lexsort(reads[1:])
    step, argument, call, row = (reads.pop()[order] for _ in range(4))
    first_read, first_segment = flat.add(row), flat.add(call)
    most = max((len(s.inputs) for s in program.signatures), default=0) or 1
    lengths = np.bincount(step * most + argument, minlength=kind_of_step.size * most)
    starts = np.cumsum(lengths) - lengths
    columns = (starts, lengths, first_rows(row, starts, lengths))
    slices = list(zip(*(column.tolist() for column in columns), strict=True))
    number_of_type = {row_type: number for number, row_type in enumerate(program.row_types)}
    arguments = []
    for number, kind in enumerate(kind_of_step):
        found = []
        for position, wanted in enumerate(program.signatures[kind].inputs, number * most):
            begin, length, first = slices[position]
            buffer = number_of_type[row_type_of(wanted)]
            segment_ids = first_segment + begin if isinstance(wanted, Ragged) else -1
            found.append(IndexSlice(buffer, first_read + begin, length, first, segment_ids))
        arguments.append(tuple(found))
    return arguments


def _index_outputs(program: Program, flat: IndexBuilder, row: np.ndarray) -> dict[str, Output]:
    outputs = {}
    for name, values in program.outputs.items():
        types = np.unique(program.value_type[values])
        if types.size > 1:
            what = f"schedule_recordings: output {name!r} has two types"
            wanted, got = (describe(program.row_types[number]) for number in types[:2])
            raise mismatch(TypeError, what, wanted, got, hint="use a separate name for each type")
        rows, buffer = row[values], int(types[0]) if types.size else 0
        read = IndexSlice(buffer, flat.add(rows), rows.size, contiguous(rows))
        outputs[name] = Output(read, flat.add(program.output_example[name]))
    return outputs
