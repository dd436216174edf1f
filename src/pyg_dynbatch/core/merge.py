"""Merge the programs of a mini-batch into one schedule, by offsets and sorts alone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.layout import FlatIndex, IndexSlice, Layout, Output, Step, Store, first_rows
from pyg_dynbatch.core.operation import Ragged, row_type_of
from pyg_dynbatch.core.policy import DependencyGraph, Policy, order_calls
from pyg_dynbatch.core.program import CONSTANT, INPUT, RESULT, Program, Rows, concatenate
from pyg_dynbatch.core.types import RowType, describe, parts_of


def schedule_programs(
    programs: Sequence[Program], policy: str | Policy = "depth", merge_equal: bool = True
) -> Layout:
    """Merge programs into the fields of a schedule; see :meth:`Schedule.from_programs`."""
    if not programs:
        what = "Schedule.from_programs: the list of programs is empty"
        raise mismatch(ValueError, what, "at least one program", 0)
    program = concatenate(programs)
    _refuse_one_name_twice(program)
    constants, constant_row = _distinct_constants(program)
    if merge_equal:
        value, alive = _merge_equal_calls(program, constant_row)
    else:
        value, alive = np.arange(program.value_type.size), np.ones(program.num_calls, dtype=bool)

    # Calls and reads that remain, numbered without gaps.
    made, new_number = np.flatnonzero(alive), np.cumsum(alive) - 1
    kept = alive[program.read_call]
    read_value, read_argument = value[program.read_value[kept]], program.read_argument[kept]
    read_call = new_number[program.read_call[kept]]
    inner = program.value_kind[read_value] == RESULT
    kind = program.call_signature[made]
    source = new_number[program.value_place[read_value[inner]]]
    names = tuple(signature.name for signature in program.signatures)
    graph = DependencyGraph(kind, source, read_call[inner], names)
    step_of_call = order_calls(graph, policy) if made.size else np.zeros(0, dtype=np.int64)
    order = np.argsort(step_of_call, kind="stable")
    sizes = np.bincount(step_of_call)
    position = np.empty(made.size, dtype=np.int64)
    position[order] = np.arange(made.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kind_of_step = np.zeros(sizes.size, dtype=np.int64)
    kind_of_step[step_of_call] = kind

    # The row of every value in the store of its type.
    stores, results, first_row = _place_results(program, constants, kind_of_step, sizes)
    row = _rows_of_values(program, stores, constant_row)
    results_made = np.flatnonzero(program.value_kind == RESULT)
    results_made = results_made[alive[program.value_place[results_made]]]
    call = new_number[program.value_place[results_made]]
    slot = program.value_slot[results_made]
    row[results_made] = first_row[step_of_call[call], slot] + position[call]
    row = row[value]

    flat = FlatIndex()
    reads = np.stack([step_of_call[read_call], read_argument, position[read_call], row[read_value]])
    arguments = _wire_arguments(program, flat, kind_of_step, reads)
    steps = zip(kind_of_step.tolist(), sizes.tolist(), arguments, results, strict=True)
    outputs = _wire_outputs(program, flat, row)
    return Layout(
        signatures=program.signatures,
        stores=tuple(stores),
        steps=tuple(Step(*step) for step in steps),
        wiring=flat.tensor(),
        constants=tuple(map(_as_tensors, program.row_types, constants)),
        outputs=outputs,
        num_examples=program.num_examples,
        merged_calls=int((~alive).sum()),
    )


def _refuse_one_name_twice(program: Program) -> None:
    first = {signature.name: signature for signature in reversed(program.signatures)}
    for signature in program.signatures:
        if first[signature.name] != signature:
            what = f"Schedule.from_programs: two signatures are called {signature.name!r}"
            known, hint = first[signature.name], "take every signature from one Operations object"
            raise mismatch(TypeError, what, str(known), str(signature), hint=hint)


def _distinct_constants(program: Program) -> tuple[list[Rows], list[np.ndarray]]:
    """Keep one of each group of equal constants; also return the row of every constant."""
    distinct, row_of_constant = [], []
    for number in range(len(program.row_types)):
        parts = program.constant_rows(number)
        if not parts:
            distinct.append(parts)
            row_of_constant.append(np.zeros(0, dtype=np.int64))
            continue
        # Compared byte by byte, so that nan equals itself and -0.0 differs from 0.0.
        flat = [
            np.ascontiguousarray(part).reshape(len(part), part[0].size).view(np.uint8)
            for part in parts
        ]
        # One byte more, so that rows without any entry have a key too.
        joined = np.hstack([np.zeros((len(flat[0]), 1), np.uint8), *flat])
        key = joined.view(np.dtype((np.void, joined.shape[1]))).reshape(-1)
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)  # of first appearance, whatever the bytes are
        distinct.append(tuple(part[first[order]] for part in parts))
        row_of_constant.append(np.argsort(order)[group.reshape(-1)])
    return distinct, row_of_constant


def _merge_equal_calls(
    program: Program, constant_row: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Find calls that repeat another one on equal constants.

    Returns the value that stands for each value, and which calls remain.
    """
    value = np.arange(program.value_type.size)
    for number, rows in enumerate(constant_row):
        mine = np.flatnonzero((program.value_type == number) & (program.value_kind == CONSTANT))
        first = np.full(int(rows.max(initial=-1)) + 1, -1, dtype=np.int64)
        row = rows[program.value_place[mine]]
        first[row[::-1]] = mine[::-1]
        value[mine] = first[row]
    alive = np.ones(program.num_calls, dtype=bool)
    fixed = program.value_kind == CONSTANT
    made = np.flatnonzero(program.value_kind == RESULT)
    # The value of every output of every call, and the position of every call within its kind.
    result = np.zeros((program.num_calls, int(program.value_slot.max(initial=0)) + 1), np.int64)
    result[program.value_place[made], program.value_slot[made]] = made
    position = np.zeros(program.num_calls, dtype=np.int64)
    for kind in _mergeable_kinds(program):
        signature = program.signatures[kind]
        calls = np.flatnonzero(program.call_signature == kind)
        position[calls] = np.arange(calls.size)
        mine = np.flatnonzero(program.call_signature[program.read_call] == kind)
        table = np.zeros((calls.size, len(signature.inputs)), dtype=np.int64)
        place = position[program.read_call[mine]], program.read_argument[mine]
        table[place] = value[program.read_value[mine]]
        mergeable = fixed[table].all(1)
        calls, table = calls[mergeable], table[mergeable]
        if not calls.size:
            continue
        leader = calls[_first_equal(table)]
        repeated = leader != calls
        alive[calls[repeated]] = False
        slots = len(signature.outputs)
        value[result[calls, :slots]] = result[leader, :slots]
        fixed[result[calls, :slots]] = True
    return value[value], alive


def _first_equal(table: np.ndarray) -> np.ndarray:
    """Return for each row of a table the first row that equals it."""
    if not table.shape[1]:
        return np.zeros(len(table), dtype=np.int64)
    key, base = table[:, 0], int(table.max(initial=0)) + 1
    for column in table.T[1:]:
        # Ranks stay below the number of rows, so that the key never overflows.
        key = np.unique(key, return_inverse=True)[1] * base + column
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first[group]


def _mergeable_kinds(program: Program) -> list[int]:
    """Signatures whose calls may be merged; those that depend on constants alone come first."""
    source = program.value_kind[program.read_value] == RESULT
    user = program.call_signature[program.read_call[source]]
    made = program.call_signature[program.value_place[program.read_value[source]]]
    needed: dict[int, set[int]] = {}
    for kind, other in set(zip(user.tolist(), made.tolist(), strict=True)):
        needed.setdefault(kind, set()).add(other)
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


def _as_tensors(row_type: RowType, rows: Rows) -> tuple[Tensor, ...] | None:
    parts = zip(rows, parts_of(row_type), strict=True) if rows else ()
    return tuple(torch.from_numpy(part).to(wanted.dtype) for part, wanted in parts) or None


def _place_results(
    program: Program, constants: list[Rows], kind_of_step: np.ndarray, sizes: np.ndarray
) -> tuple[list[Store], list[tuple[tuple[int, int], ...]], np.ndarray]:
    """Give the results of every step the next free rows of their stores."""
    number_of_type = {row_type: number for number, row_type in enumerate(program.row_types)}
    counts = [len(rows[0]) if rows else 0 for rows in constants]
    free = [c + i for c, i in zip(counts, program.num_inputs, strict=True)]
    slots = max((len(s.outputs) for s in program.signatures), default=1)
    first_row = np.zeros((sizes.size, slots), dtype=np.int64)
    results = []
    for step, (kind, size) in enumerate(zip(kind_of_step, sizes, strict=True)):
        placed = []
        for slot, row_type in enumerate(program.signatures[kind].outputs):
            store = number_of_type[row_type]
            placed.append((store, free[store]))
            first_row[step, slot] = free[store]
            free[store] += int(size)
        results.append(tuple(placed))
    columns = zip(program.row_types, counts, program.num_inputs, free, strict=True)
    return [Store(*column) for column in columns], results, first_row


def _rows_of_values(
    program: Program, stores: list[Store], constant_row: list[np.ndarray]
) -> np.ndarray:
    """Return the row of every constant and input in its store; 0 for results."""
    row = np.zeros(program.value_type.size, dtype=np.int64)
    for number, store in enumerate(stores):
        mine = program.value_type == number
        constants = mine & (program.value_kind == CONSTANT)
        row[constants] = constant_row[number][program.value_place[constants]]
        inputs = mine & (program.value_kind == INPUT)
        row[inputs] = store.constants + program.value_place[inputs]
    return row


def _wire_arguments(
    program: Program, flat: FlatIndex, kind_of_step: np.ndarray, reads: np.ndarray
) -> list[tuple[IndexSlice, ...]]:
    """Sort reads, ``[(step, argument, call, row), read]``, and cut them into arguments."""
    step, argument, position, row = reads[:, np.lexsort(reads[2::-1])]
    first_read, first_segment = flat.add(row), flat.add(position)
    most = max((len(s.inputs) for s in program.signatures), default=0) or 1
    lengths = np.bincount(step * most + argument, minlength=kind_of_step.size * most)
    starts = np.cumsum(lengths) - lengths
    columns = (starts, lengths, first_rows(row, starts, lengths))
    slices = list(zip(*(column.tolist() for column in columns), strict=True))
    number_of_type = {row_type: number for number, row_type in enumerate(program.row_types)}
    arguments = []
    for number, kind in enumerate(kind_of_step):
        found = []
        for place, wanted in enumerate(program.signatures[kind].inputs, number * most):
            begin, length, first = slices[place]
            store = number_of_type[row_type_of(wanted)]
            segment_ids = first_segment + begin if isinstance(wanted, Ragged) else -1
            found.append(IndexSlice(store, first_read + begin, length, first, segment_ids))
        arguments.append(tuple(found))
    return arguments


def _wire_outputs(program: Program, flat: FlatIndex, row: np.ndarray) -> dict[str, Output]:
    outputs = {}
    for name, values in program.outputs.items():
        types = np.unique(program.value_type[values])
        if types.size > 1:
            wanted, got = (describe(program.row_types[number]) for number in types[:2])
            what = f"Schedule.from_programs: output {name!r} has two types"
            raise mismatch(TypeError, what, wanted, got, hint="give each type a name of its own")
        rows = row[values]
        start = int(first_rows(rows, np.zeros(1, dtype=np.int64), np.array([rows.size]))[0])
        store = int(types[0]) if types.size else 0
        wiring = IndexSlice(store, flat.add(rows), rows.size, start)
        outputs[name] = Output(wiring, flat.add(program.output_example[name]))
    return outputs
