"""What the scheduler in C computes, in plain Python: for tests, and where there is no C.

The functions have the names and arguments of those of ``pyg_dynbatch._native``; see the structs of
``native/recordings.c`` and ``native/steps.c`` for what the arguments are.
"""

from typing import Any

import numpy as np

from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.policy import Policy, order_calls
from pyg_dynbatch.core.recording import (
    CONSTANT,
    INPUT,
    Sites,
    checked_records,
    record_at,
    records_of,
)

INVALID = -2
"""What :func:`check` returns for invalid records."""


def check(
    *, sites: Sites, code: Any, ends: Any, examples: int, first_site: Any, last_site: Any,
    num_inputs: Any, constants: Any, last_constant: Any, outputs: Any, output_example: Any,
    begins: Any, type: Any, **sizes: int,
) -> int:  # fmt: skip
    """Check records, and list where they begin."""
    records, pairs = 0, constants.reshape(-1, 2).tolist()
    firsts, lasts = np.append(0, ends).tolist(), np.append(0, last_constant).tolist()
    type[:] = -1
    for example in range(examples):
        own = Sites(sites[first_site[example] : last_site[example]])
        rows = dict(zip(sites.row_types, num_inputs[example].tolist(), strict=True))
        given = dict(pairs[lasts[example] : lasts[example + 1]])
        first, mine = firsts[example], code[firsts[example] : firsts[example + 1]].tolist()
        try:
            for record in checked_records(own, mine, rows, given):
                begins[records] = first + record.begin
                for slot, row_type in enumerate(own[record.number].results, first + record.begin):
                    type[slot] = sites.number_of_type[row_type]
                records += 1
        except ValueError:
            return INVALID
    is_inside = (outputs >= 0) & (outputs < np.diff(firsts)[output_example])
    is_value = type[np.array(firsts)[output_example[is_inside]] + outputs[is_inside]] >= 0
    return records if is_inside.all() and is_value.all() else INVALID


def move(
    *, sites: Sites, code: Any, ends: Any, examples: int, base: int, first_site: Any,
    first_input: Any, types: int,
) -> int:  # fmt: skip
    """Renumber the records of examples that have been copied one after another."""
    records = begin = 0
    for example, end in enumerate(ends.tolist()):
        before, first, rows = base + begin, int(first_site[example]), first_input[example]
        while begin < end:
            code[begin] += first
            record = record_at(sites, code, begin)
            kind, results, signature = sites[record.number]
            place = begin + 1
            for wanted in (None,) if kind == INPUT else signature.inputs if signature else ():
                size = int(code[place]) if isinstance(wanted, Ragged) else 1
                place += isinstance(wanted, Ragged)
                added = rows[sites.number_of_type[results[0]]] if kind == INPUT else before
                code[place : place + size] += added
                place += size
            begin, records = record.end, records + 1
    return records


def scan(*, sites: Sites, code: Any, first: int, size: int, begins: Any) -> int:
    """List where records begin."""
    found = [record.begin for record in records_of(sites, code[:size], first)]
    begins[: len(found)] = found
    return len(found)


def distinct(*, rows: Any, count: int, width: int, number: Any, first: Any) -> int:
    """Number the different ones of rows of bytes in the order in which they appear."""
    numbers: dict[bytes, int] = {}
    for each, row in enumerate(rows.reshape(count, width)):
        if (key := row.tobytes()) not in numbers:
            first[len(numbers)] = each
        number[each] = numbers.setdefault(key, len(numbers))
    return len(numbers)


def merge(
    *, sites: Sites, code: Any, begins: Any, outputs: Any, merge_equal: int, first_constant: Any,
    constant: Any, constant_row: Any, first_input: Any, value: Any, row: Any, call: Any, owner: Any,
    begin: Any, first_read: Any, read: Any, counts: Any, **sizes: int,
) -> int:  # fmt: skip
    """Merge equal calls, and number the others."""
    made: list[tuple[int, list[int]]] = []  # of each call: where it begins, what it reads
    unused: dict[int, int] = {}  # results of calls without arguments that nobody has read
    equal: dict[Any, int] = {}  # where the first of equal constants and calls begins
    fixed: set[int] = set()  # values that depend on constants alone
    places, ragged, merged = first_constant.tolist(), 0, 0

    def add(start: int, reads: list[int]) -> None:
        for slot in range(len(sites[code[start]].results)):
            call[start + slot] = len(made)
            unused.pop(start + slot, None)
        made.append((start, reads))

    for start in begins.tolist():
        record = record_at(sites, code, start)
        kind, results, called = sites[record.number]
        signature: Any = called
        slots = np.arange(start, start + len(results))
        value[slots], owner[slots], row[slots] = slots, start, -1
        if kind == CONSTANT:
            which = int(constant[places[record.number]])
            places[record.number] += 1
            value[start], row[start] = equal.setdefault(which, start), constant_row[which]
            fixed.add(start)
        elif kind == INPUT:
            row[start] = record.arguments[0][0] + first_input[sites.number_of_type[results[0]]]
        else:
            reads = [int(value[each]) for values in record.arguments for each in values]
            sizes_of = tuple(map(len, record.arguments))
            for each in reads:
                if each in unused:
                    add(unused[each], [])
            key, first = (signature, sizes_of, *reads), start
            is_mergeable = merge_equal and not signature.random and fixed.issuperset(reads)
            if not signature.inputs or is_mergeable:
                first = equal.setdefault(key, start)
                fixed.update(slots.tolist())
            if first != start:
                value[slots], merged = slots - start + first, merged + 1
            elif not signature.inputs:
                unused.update(dict.fromkeys(slots.tolist(), start))
            else:
                add(start, reads)
                lengths = zip(signature.inputs, sizes_of, strict=True)
                ragged += sum(size for wanted, size in lengths if isinstance(wanted, Ragged))
    for each in value[outputs].tolist():
        if each in unused:
            add(unused[each], [])
    flat = [each for _, reads in made for each in reads]
    begin[: len(made)], read[: len(flat)] = [start for start, _ in made], flat
    first_read[: len(made) + 1] = np.cumsum([0, *(len(reads) for _, reads in made)])
    counts[:] = len(made), len(flat), ragged, merged
    return len(made)


def choose(
    *, code: Any, calls: int, begin: Any, first_read: Any, read: Any, row: Any, call: Any,
    needed: Any, joins: int, waits: Any, kept: Any, **_: Any,
) -> int:  # fmt: skip
    """Choose calls that values depend on, and perhaps calls of their sites that can run as well."""
    reads = [read[first_read[each] : first_read[each + 1]].tolist() for each in range(calls)]
    makers = [{int(call[each]) for each in own if row[each] < 0} for own in reads]
    latest = {int(call[each]) for each in needed.tolist() if row[each] < 0}
    chosen: set[int] = set()
    while latest:
        chosen |= latest
        latest = set().union(*(makers[each] for each in latest)) - chosen
    sites = {int(code[begin[each]]) for each in chosen}
    if joins:
        chosen |= {n for n in range(calls) if not makers[n] and int(code[begin[n]]) in sites}
    for number in range(calls):
        waits[number] = number not in chosen
        if waits[number]:
            kept[reads[number]] = 1
    return calls - len(chosen)


def order(
    *, calls: int, kinds: int, agenda: int, kind: Any, row: Any, call: Any, first_read: Any,
    read: Any, step: Any,
) -> int:  # fmt: skip
    """Assign calls to steps."""
    values = read[: first_read[calls]]
    readers = np.arange(calls).repeat(np.diff(first_read[: calls + 1]))
    is_result = row[values] < 0
    source = call[values[is_result]].astype(np.int64)
    target = readers[is_result]
    policy: Policy = "agenda" if agenda else "depth"
    step[:calls] = order_calls(kind[:calls].astype(np.int64), source, target, policy)
    return int(step[:calls].max(initial=-1)) + 1


def place(
    *, sites: Sites, code: Any, calls: int, steps: int, first_read: Any, read: Any, step: Any,
    member: Any, row: Any, free: Any, index: Any, call: Any, slices: Any, **_: Any,
) -> int:  # fmt: skip
    """Give the results of every step rows, and list the rows that it reads; nothing is fused."""
    members: list[list[int]] = [[] for _ in range(steps)]
    for number, own in enumerate(step[:calls].tolist()):
        members[own].append(number)
    entry = slice_ = 0
    for own, numbers in enumerate(members):
        site = sites[code[member[numbers[0]]]]
        firsts = []
        for slot, row_type in enumerate(site.results):
            kind = sites.number_of_type[row_type]
            firsts.append(int(free[kind]))
            row[member[numbers] + slot] = free[kind] + np.arange(len(numbers))
            free[kind] += len(numbers)
        signature: Any = site.signature
        number = sites.signatures.index(signature)
        call[own] = number, len(numbers), *firsts, *[0] * (call.shape[1] - 2 - len(firsts))
    for numbers in members:
        signature = sites[code[member[numbers[0]]]].signature
        reads = [record_at(sites, code, int(member[each])).arguments for each in numbers]
        flat = [iter(read[first_read[number] :]) for number in numbers]
        found = [[[row[next(rest)] for _ in values] for values in own]
                 for own, rest in zip(reads, flat, strict=True)]  # fmt: skip
        for argument, wanted in enumerate(signature.inputs):
            is_ragged = isinstance(wanted, Ragged)
            rows = [each for own in found for each in own[argument]]
            owners = [position for position, own in enumerate(found) for _ in own[argument]]
            first = rows[0] if rows else 0
            is_range = rows == list(range(first, first + len(rows)))
            begins = entry + len(rows) if is_ragged else -1
            slices[slice_] = entry, len(rows), first if is_range else -1, begins
            written = [*rows, *owners] if is_ragged else rows
            index[entry : entry + len(written)] = written
            entry, slice_ = entry + len(written), slice_ + 1
    return slice_
