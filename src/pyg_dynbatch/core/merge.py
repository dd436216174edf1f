"""Merge the programs of a mini-batch into one schedule, by offsets and sorts alone."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.learned_policy import named_policy
from pyg_dynbatch.core.operation import Ragged, row_type_of
from pyg_dynbatch.core.policy import DependencyGraph, Policy, order_calls
from pyg_dynbatch.core.program import (
    CONSTANT,
    INPUT,
    RESULT,
    AnyProgram,
    MergedPrograms,
    side_by_side,
)
from pyg_dynbatch.core.schedule import IndexSlice, Output, Schedule, Step, Store, first_rows
from pyg_dynbatch.core.types import RowType, describe, parts_of


def schedule_programs(
    programs: Sequence[AnyProgram], policy: str | Policy, merge_equal: bool = True
) -> Schedule:
    """Merges programs into a schedule; see :meth:`Schedule.from_programs`."""
    programs = list(programs)
    if not programs:
        raise mismatch(
            ValueError,
            "Schedule.from_programs: the list of programs is empty",
            "one program or more",
            0,
        )
    return schedule_merged(side_by_side(programs), policy, merge_equal, len(programs))


def schedule_merged(
    merged: MergedPrograms, policy: str | Policy, merge_equal: bool, num_examples: int
) -> Schedule:
    """Schedules programs that lie side by side already."""
    policy = named_policy(policy, [signature.name for signature in merged.signatures])
    constant_row = _merge_equal_constants(merged)
    if merge_equal:
        value, alive = _merge_equal_calls(merged, constant_row)
    else:
        value = np.arange(merged.value_type.size)
        alive = np.ones(merged.call_signature.size, dtype=bool)
    return _lay_out(merged, value, alive, constant_row, policy, num_examples)


def _merge_equal_constants(merged: MergedPrograms) -> list[np.ndarray]:
    """Keeps one of each group of equal constants; returns the row of every constant."""
    rows = []
    for number, parts in enumerate(merged.constants):
        if not parts:
            rows.append(np.zeros(0, dtype=np.int64))
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
        # In the order of first appearance, whatever the bytes are.
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        merged.constants[number] = tuple(part[first[order]] for part in parts)
        rows.append(rank[group.reshape(-1)])
    return rows


def _merge_equal_calls(
    merged: MergedPrograms, constant_row: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Finds calls that repeat another one on equal constants."""
    value = np.arange(merged.value_type.size)
    for number, rows in enumerate(constant_row):
        mine = np.flatnonzero((merged.value_type == number) & (merged.value_kind == CONSTANT))
        first = np.full(int(rows.max(initial=-1)) + 1, -1, dtype=np.int64)
        row = rows[merged.value_place[mine]]
        first[row[::-1]] = mine[::-1]
        value[mine] = first[row]
    alive = np.ones(merged.call_signature.size, dtype=bool)
    fixed = merged.value_kind == CONSTANT
    results = _results_of(merged)
    for kind in _mergeable_kinds(merged):
        calls = np.flatnonzero(merged.call_signature == kind)
        table = _argument_table(merged, calls, len(merged.signatures[kind].inputs), value)
        mergeable = fixed[table].all(1)
        calls, table = calls[mergeable], table[mergeable]
        if not calls.size:
            continue
        leader = calls[_first_equal(table)]
        repeated = leader != calls
        alive[calls[repeated]] = False
        for slot_values in results[kind]:
            value[slot_values[calls]] = slot_values[leader]
            fixed[slot_values[calls]] = True
    merged.merged_calls = int((~alive).sum())
    return value[value], alive


def _first_equal(table: np.ndarray) -> np.ndarray:
    """The first row of the table, ``[row, column]``, that equals each row."""
    if not table.shape[1]:
        return np.zeros(len(table), dtype=np.int64)
    key, base = table[:, 0], int(table.max(initial=0)) + 1
    for column in table.T[1:]:
        # Ranks stay below the number of rows, so that the key never overflows.
        key = np.unique(key, return_inverse=True)[1] * base + column
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return first[group]


def _results_of(merged: MergedPrograms) -> list[list[np.ndarray]]:
    """For each kind and output slot: the value of every call (an array over all calls)."""
    table: list[list[np.ndarray]] = []
    made = np.flatnonzero(merged.value_kind == RESULT)
    for signature in merged.signatures:
        table.append([np.full(merged.call_signature.size, -1) for _ in signature.outputs])
    kind = merged.call_signature[merged.value_place[made]]
    for number, slots in enumerate(table):
        for slot, by_call in enumerate(slots):
            mine = made[(kind == number) & (merged.value_slot[made] == slot)]
            by_call[merged.value_place[mine]] = mine
    return table


def _mergeable_kinds(merged: MergedPrograms) -> list[int]:
    """Kinds whose calls may be merged, those that hang on constants alone first and in order."""
    source = merged.value_kind[merged.read_value] == RESULT
    user = merged.call_signature[merged.read_call[source]]
    made = merged.call_signature[merged.value_place[merged.read_value[source]]]
    pairs = np.unique(user * len(merged.signatures) + made)
    waits = [divmod(int(pair), len(merged.signatures)) for pair in pairs]
    found: list[int] = []
    candidates = [
        number
        for number, signature in enumerate(merged.signatures)
        if not signature.random
        and not any(isinstance(wanted, Ragged) for wanted in signature.inputs)
    ]
    changed = True
    while changed:
        changed = False
        for kind in candidates:
            needed = {m for u, m in waits if u == kind}
            if kind not in found and needed <= set(found):
                found.append(kind)
                changed = True
    return found + [kind for kind in candidates if kind not in found]


def _argument_table(
    merged: MergedPrograms, calls: np.ndarray, arguments: int, value: np.ndarray
) -> np.ndarray:
    """The (merged) value of each fixed argument of each call, ``[call, argument]``."""
    row = np.full(merged.call_signature.size, -1)
    row[calls] = np.arange(calls.size)
    mine = row[merged.read_call] >= 0
    table = np.zeros((calls.size, arguments), dtype=np.int64)
    table[row[merged.read_call[mine]], merged.read_argument[mine]] = value[merged.read_value[mine]]
    return table


def _lay_out(
    merged: MergedPrograms,
    value: np.ndarray,
    alive: np.ndarray,
    constant_row: list[np.ndarray],
    policy: str | Policy,
    num_examples: int,
) -> Schedule:
    made = np.flatnonzero(alive)
    new_number = np.cumsum(alive) - 1
    kept = alive[merged.read_call]
    read_value, read_argument = value[merged.read_value[kept]], merged.read_argument[kept]
    read_call = new_number[merged.read_call[kept]]
    inner = merged.value_kind[read_value] == RESULT
    kind = merged.call_signature[made]
    graph = DependencyGraph(
        kind, new_number[merged.value_place[read_value[inner]]], read_call[inner]
    )
    step_of_call = order_calls(graph, policy) if made.size else np.zeros(0, dtype=np.int64)
    order = np.argsort(step_of_call, kind="stable")
    sizes = np.bincount(step_of_call)
    position = np.empty(made.size, dtype=np.int64)
    position[order] = np.arange(made.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kind_of_step = np.zeros(sizes.size, dtype=np.int64)
    kind_of_step[step_of_call] = kind

    stores, results, first_row = _place_results(merged, kind_of_step, sizes)
    row = _rows_of_values(merged, stores, constant_row)
    results_made = np.flatnonzero(merged.value_kind == RESULT)
    results_made = results_made[alive[merged.value_place[results_made]]]
    call = new_number[merged.value_place[results_made]]
    slot = merged.value_slot[results_made]
    row[results_made] = first_row[step_of_call[call], slot] + position[call]
    row = row[value]

    flat, arguments = _wire(
        merged, kind_of_step, row[read_value], step_of_call[read_call], read_argument,
        position[read_call], sizes,
    )  # fmt: skip
    steps = tuple(
        Step(int(kind_of_step[number]), int(size), arguments[number], results[number])
        for number, size in enumerate(sizes)
    )
    outputs = _wire_outputs(merged, flat, row)
    return Schedule(
        signatures=tuple(merged.signatures),
        stores=tuple(stores),
        steps=steps,
        wiring=torch.from_numpy(np.concatenate(flat).astype(np.int64, copy=False)),
        constants=tuple(
            _as_tensors(row_type, rows)
            for row_type, rows in zip(merged.row_types, merged.constants, strict=True)
        ),
        outputs=outputs,
        num_examples=num_examples,
        facts={"merged_calls": merged.merged_calls},
    )


def _as_tensors(row_type: RowType, rows: tuple[np.ndarray, ...]) -> tuple[Tensor, ...] | None:
    if not rows:
        return None
    parts = parts_of(row_type)
    return tuple(
        torch.from_numpy(part).to(wanted.dtype) for part, wanted in zip(rows, parts, strict=True)
    )


def _place_results(
    merged: MergedPrograms, kind_of_step: np.ndarray, sizes: np.ndarray
) -> tuple[list[Store], list[tuple[tuple[int, int], ...]], np.ndarray]:
    """Gives the results of every step the next free rows of their stores."""
    number_of_type = {row_type: number for number, row_type in enumerate(merged.row_types)}
    constants = [len(rows[0]) if rows else 0 for rows in merged.constants]
    free = [c + i for c, i in zip(constants, merged.num_inputs, strict=True)]
    slots = max((len(s.outputs) for s in merged.signatures), default=1)
    first_row = np.zeros((sizes.size, slots), dtype=np.int64)
    results = []
    for step, (kind, size) in enumerate(zip(kind_of_step, sizes, strict=True)):
        placed = []
        for slot, row_type in enumerate(merged.signatures[kind].outputs):
            store = number_of_type[row_type]
            placed.append((store, free[store]))
            first_row[step, slot] = free[store]
            free[store] += int(size)
        results.append(tuple(placed))
    stores = [
        Store(row_type, constants[number], merged.num_inputs[number], free[number])
        for number, row_type in enumerate(merged.row_types)
    ]
    return stores, results, first_row


def _rows_of_values(
    merged: MergedPrograms, stores: list[Store], constant_row: list[np.ndarray]
) -> np.ndarray:
    """The row of every constant and input in its store; 0 for results, filled in later."""
    row = np.zeros(merged.value_type.size, dtype=np.int64)
    for number, store in enumerate(stores):
        mine = merged.value_type == number
        constants = mine & (merged.value_kind == CONSTANT)
        row[constants] = constant_row[number][merged.value_place[constants]]
        inputs = mine & (merged.value_kind == INPUT)
        row[inputs] = store.constants + merged.value_place[inputs]
    return row


def _wire(
    merged: MergedPrograms,
    kind_of_step: np.ndarray,
    rows: np.ndarray,
    steps: np.ndarray,
    arguments: np.ndarray,
    positions: np.ndarray,
    sizes: np.ndarray,
) -> tuple[list[np.ndarray], list[tuple[IndexSlice, ...]]]:
    """Sorts all reads by step, argument and call, and cuts them into wirings."""
    order = np.lexsort((positions, arguments, steps))
    index, owners = rows[order], positions[order]
    most = max((len(s.inputs) for s in merged.signatures), default=0) or 1
    lengths = np.bincount(steps * most + arguments, minlength=sizes.size * most)
    starts = np.cumsum(lengths) - lengths
    first = first_rows(index, starts, lengths)
    number_of_type = {row_type: number for number, row_type in enumerate(merged.row_types)}
    wirings = []
    for step, kind in enumerate(kind_of_step):
        found = []
        for position, wanted in enumerate(merged.signatures[kind].inputs):
            place = step * most + position
            begin = int(starts[place])
            found.append(
                IndexSlice(
                    number_of_type[row_type_of(wanted)],
                    begin,
                    int(lengths[place]),
                    int(first[place]),
                    index.size + begin if isinstance(wanted, Ragged) else -1,
                )
            )
        wirings.append(tuple(found))
    return [index, owners], wirings


def _wire_outputs(
    merged: MergedPrograms, flat: list[np.ndarray], row: np.ndarray
) -> dict[str, Output]:
    outputs = {}
    offset = sum(part.size for part in flat)
    for name, values in merged.output_value.items():
        types = np.unique(merged.value_type[values])
        if types.size > 1:
            raise mismatch(
                TypeError,
                f"Schedule.from_programs: output {name!r} has two types",
                describe(merged.row_types[types[0]]),
                describe(merged.row_types[types[1]]),
                hint="give each type an output name of its own",
            )
        rows = row[values]
        length = np.array([rows.size])
        start = int(first_rows(rows, np.zeros(1, dtype=np.int64), length)[0])
        wiring = IndexSlice(int(types[0]) if types.size else 0, offset, rows.size, start)
        outputs[name] = Output(wiring, offset + rows.size)
        flat += [rows, merged.output_example[name]]
        offset += 2 * rows.size
    return outputs
