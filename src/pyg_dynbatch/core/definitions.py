"""What the scheduler in C computes, in plain Python: for tests, and where there is no C.

The functions have the names and arguments of those of ``pyg_dynbatch._native``; see the structs of
``native/recordings.c`` and ``native/steps.c`` for what the arguments are.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pyg_dynbatch.core.operation import Ragged, Signature, row_type_of
from pyg_dynbatch.core.policy import Policy, order_calls
from pyg_dynbatch.core.recording import (
    CALL,
    CONSTANT,
    INPUT,
    DecodedRecord,
    Site,
    Sites,
    record_at,
    records_of,
)
from pyg_dynbatch.core.types import RowType

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

INVALID = -2
"""What functions that check records return for invalid ones."""


def check(
    *, sites: Sites, code: Int32Array, ends: Int64Array, examples: int, first_site: Int64Array,
    last_site: Int64Array, num_inputs: Int64Array, constants: Int64Array,
    last_constant: Int64Array, outputs: Int32Array, output_example: Int64Array,
    begins: Int32Array, type: Int32Array, **sizes: int,
) -> int:  # fmt: skip
    """Check records, and list where they begin."""
    type[:] = -1
    records = 0
    first_place = np.append(0, ends)
    first_pair = np.append(0, last_constant)
    pairs = constants.reshape(-1, 2)
    for example in range(examples):
        own_sites = Sites(sites[first_site[example] : last_site[example]])
        own_code = code[first_place[example] : first_place[example + 1]].tolist()
        own_inputs = dict(zip(sites.row_types, num_inputs[example].tolist(), strict=True))
        own_constants = dict(pairs[first_pair[example] : first_pair[example + 1]].tolist())
        try:
            for record in _checked_records(own_sites, own_code, own_inputs, own_constants):
                begin = first_place[example] + record.begin
                begins[records] = begin
                records += 1
                for value, row_type in enumerate(own_sites[record.number].results, begin):
                    type[value] = sites.number_of_type[row_type]
        except ValueError:
            return INVALID

    is_inside = (outputs >= 0) & (outputs < np.diff(first_place)[output_example])
    if not is_inside.all() or (type[first_place[output_example] + outputs] < 0).any():
        return INVALID
    return records


def _checked_records(
    sites: Sites,
    code: list[int],
    num_inputs: Mapping[RowType, int],
    num_constants: Mapping[int, int],
) -> Iterator[DecodedRecord]:
    """Decode the records of an example; raise a ValueError for one that nobody has recorded."""
    types: dict[int, RowType] = {}  # of each value
    constants_left = dict(num_constants)  # of each site
    for number in num_constants:
        if not 0 <= number < len(sites) or sites[number].kind != CONSTANT:
            raise ValueError("constants of a site that has none")

    begin = 0
    while begin < len(code):
        number = code[begin]
        if not 0 <= number < len(sites):
            raise ValueError("there is no such site")
        site = sites[number]
        if site.kind == CONSTANT:
            constants_left[number] = constants_left.get(number, 0) - 1
        _check_arguments(site, code, begin + 1, num_inputs, types)

        record = record_at(sites, code, begin)
        if record.end > len(code) or constants_left.get(number, 0) < 0:
            raise ValueError("the code ends within a record, or there are too few constants")
        types.update(enumerate(site.results, begin))
        yield record
        begin = record.end
    if any(constants_left.values()):
        raise ValueError("there are constants without a record")


def _check_arguments(
    site: Site,
    code: list[int],
    place: int,
    num_inputs: Mapping[RowType, int],
    types: Mapping[int, RowType],
) -> None:
    """Check what a record reads, which begins at a place in the code."""
    for argument in site.arguments:
        size = 1
        if isinstance(argument, Ragged):
            size = code[place] if place < len(code) else -1
            place += 1
        if not 0 <= size <= len(code) - place:
            raise ValueError("the code ends within a record")
        for value in code[place : place + size]:
            if site.kind == INPUT:
                exists = 0 <= value < num_inputs.get(site.results[0], 0)
            else:
                exists = types.get(value) == row_type_of(argument)
            if not exists:
                raise ValueError("there is no such value of this type")
        place += size


def move(
    *, sites: Sites, code: Int32Array, ends: Int64Array, examples: int, base: int,
    first_site: Int64Array, first_input: Int64Array, types: int,
) -> int:  # fmt: skip
    """Renumber the records of examples that have been copied one after another.

    Return how many there are, or INVALID as soon as a call reads a value with a negative number.
    """
    records = begin = 0
    for example, end in enumerate(ends.tolist()):
        first_value = base + begin
        while begin < end:
            code[begin] += first_site[example]
            record = record_at(sites, code, begin)
            site = sites[record.number]
            added = first_value
            if site.kind == INPUT:
                added = first_input[example][sites.number_of_type[site.results[0]]]
            place = begin + 1
            for argument, values in zip(site.arguments, record.arguments, strict=True):
                place += isinstance(argument, Ragged)
                code[place : place + len(values)] += added
                if site.kind == CALL and code[place : place + len(values)].min(initial=0) < 0:
                    return INVALID
                place += len(values)
            begin = record.end
            records += 1
    return records


def scan(*, sites: Sites, code: Int32Array, first: int, size: int, begins: Int32Array) -> int:
    """List where records begin."""
    places = [record.begin for record in records_of(sites, code[:size], first)]
    begins[: len(places)] = places
    return len(places)


def distinct(
    *, rows: NDArray[np.uint8], count: int, width: int, number: Int32Array, first: Int32Array
) -> int:
    """Number the different ones of rows of bytes in the order in which they appear."""
    numbers: dict[bytes, int] = {}
    for place, row in enumerate(rows.reshape(count, width)):
        key = row.tobytes()
        if key not in numbers:
            first[len(numbers)] = place
        number[place] = numbers.setdefault(key, len(numbers))
    return len(numbers)


def merge(
    *, sites: Sites, code: Int32Array, begins: Int32Array, outputs: Int32Array, merge_equal: int,
    first_constant: Int64Array, constant: Int32Array, constant_row: Int32Array,
    first_input: Int64Array, value: Int32Array, row: Int32Array, call: Int32Array,
    owner: Int32Array, begin: Int32Array, first_read: Int32Array, read: Int32Array,
    counts: Int64Array, **sizes: int,
) -> int:  # fmt: skip
    """Merge equal calls, and number the others.

    A value is the place in the code where its record begins, plus its place among the results.
    """
    kept = _KeptCalls(sites, code, call)
    equal: dict[Any, int] = {}  # where the first of equal constants and calls begins
    fixed: set[int] = set()  # values that depend on constants alone
    constants = [iter(constant[first:].tolist()) for first in first_constant]  # of each site
    merged = 0

    for start in begins.tolist():
        record = record_at(sites, code, start)
        site = sites[record.number]
        results = np.arange(start, start + len(site.results))
        value[results] = results
        owner[results] = start
        row[results] = -1
        if site.kind == CONSTANT:
            number = next(constants[record.number])
            value[start] = equal.setdefault(number, start)
            row[start] = constant_row[number]
            fixed.add(start)
        elif site.kind == INPUT:
            kind = sites.number_of_type[site.results[0]]
            row[start] = record.arguments[0][0] + first_input[kind]
        else:
            signature = cast(Signature, site.signature)
            reads = value[list(chain.from_iterable(record.arguments))].tolist()
            num_reads = tuple(map(len, record.arguments))
            kept.add_makers_of(reads)

            first_equal = start
            is_mergeable = merge_equal and not signature.random and fixed.issuperset(reads)
            if not signature.inputs or is_mergeable:
                first_equal = equal.setdefault((signature, num_reads, *reads), start)
                fixed.update(results.tolist())

            if first_equal != start:
                value[results] = results - start + first_equal
                merged += 1
            elif not signature.inputs:
                kept.add_when_read(start, results.tolist())
            else:
                kept.add(start, reads)
    kept.add_makers_of(value[outputs].tolist())

    calls = len(kept.begins)
    begin[:calls] = kept.begins
    num_reads_of_calls = _write_reads(kept.reads, first_read, read)
    num_ragged_reads = sum(_ragged_reads(sites, code, start) for start in kept.begins)
    counts[:] = calls, num_reads_of_calls, num_ragged_reads, merged
    return calls


class _KeptCalls:
    """Numbers the calls that are not merged, and writes the numbers into ``call``.

    Calls without arguments get theirs when a result is first read, and none if none is.
    """

    def __init__(self, sites: Sites, code: Int32Array, call: Int32Array) -> None:
        self.begins: list[int] = []  # of each call: where its record begins
        self.reads: list[list[int]] = []  # of each call: the values that it reads
        self._sites = sites
        self._code = code
        self._call = call
        self._unread: dict[int, int] = {}  # where the record of a result begins

    def add(self, start: int, reads: list[int]) -> None:
        """Number the call of a record."""
        site = self._sites[self._code[start]]
        for result in range(start, start + len(site.results)):
            self._call[result] = len(self.begins)
            self._unread.pop(result, None)
        self.begins.append(start)
        self.reads.append(reads)

    def add_when_read(self, start: int, results: list[int]) -> None:
        """Number a call without arguments later."""
        self._unread.update(dict.fromkeys(results, start))

    def add_makers_of(self, values: list[int]) -> None:
        """Number the calls that have waited for a read of these values."""
        for each in values:
            if each in self._unread:
                self.add(self._unread[each], [])


def _write_reads(reads_of_calls: list[list[int]], first_read: Int32Array, read: Int32Array) -> int:
    """List the values that calls read, call by call; return how many there are."""
    ends = np.cumsum([0, *map(len, reads_of_calls)])
    first_read[: len(ends)] = ends
    read[: ends[-1]] = list(chain.from_iterable(reads_of_calls))
    return int(ends[-1])


def _ragged_reads(sites: Sites, code: Int32Array, begin: int) -> int:
    """Count the values that the ragged arguments of a call read."""
    record = record_at(sites, code, begin)
    pairs = zip(sites[record.number].arguments, record.arguments, strict=True)
    return sum(len(values) for argument, values in pairs if isinstance(argument, Ragged))


def choose(
    *, code: Int32Array, calls: int, begin: Int32Array, first_read: Int32Array, read: Int32Array,
    row: Int32Array, call: Int32Array, needed: Int32Array, joins: int, waits: NDArray[np.uint8],
    kept: NDArray[np.uint8], **_: object,
) -> int:  # fmt: skip
    """Choose calls that values depend on, and perhaps calls of their sites that can run as well."""
    reads = [read[first_read[each] : first_read[each + 1]].tolist() for each in range(calls)]
    makers = [{int(call[each]) for each in own if row[each] < 0} for own in reads]

    latest = {int(call[each]) for each in needed.tolist() if row[each] < 0}
    chosen: set[int] = set()
    while latest:
        chosen |= latest
        latest = set().union(*(makers[each] for each in latest)) - chosen

    if joins:
        sites = {int(code[begin[each]]) for each in chosen}
        chosen |= {n for n in range(calls) if not makers[n] and int(code[begin[n]]) in sites}

    for number in range(calls):
        waits[number] = number not in chosen
        if waits[number]:
            kept[reads[number]] = 1

    return calls - len(chosen)


def order(
    *, calls: int, kinds: int, agenda: int, kind: Int32Array, row: Int32Array, call: Int32Array,
    first_read: Int32Array, read: Int32Array, step: Int32Array,
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
    *, sites: Sites, code: Int32Array, calls: int, steps: int, first_read: Int32Array,
    read: Int32Array, step: Int32Array, member: Int32Array, row: Int32Array, free: Int64Array,
    index: Int64Array, call: Int64Array, slices: Int64Array, **_: object,
) -> int:  # fmt: skip
    """Give the results of every step rows, and list the rows that it reads; nothing is fused."""
    members: list[list[int]] = [[] for _ in range(steps)]
    for number, own_step in enumerate(step[:calls].tolist()):
        members[own_step].append(number)

    for own_step, numbers in enumerate(members):
        site = sites[code[member[numbers[0]]]]
        first_rows = []
        for slot, row_type in enumerate(site.results):
            kind = sites.number_of_type[row_type]
            first_rows.append(int(free[kind]))
            row[member[numbers] + slot] = free[kind] + np.arange(len(numbers))
            free[kind] += len(numbers)
        signature = cast(Signature, site.signature)
        unused = [0] * (call.shape[1] - 2 - len(first_rows))
        call[own_step] = sites.signatures.index(signature), len(numbers), *first_rows, *unused

    entry = num_slices = 0
    for numbers in members:
        rows_read = [
            _rows_read(sites, code, int(member[each]), read[first_read[each] :], row)
            for each in numbers
        ]
        signature = cast(Signature, sites[code[member[numbers[0]]]].signature)
        for argument, input_type in enumerate(signature.inputs):
            is_ragged = isinstance(input_type, Ragged)
            rows = [each for own in rows_read for each in own[argument]]
            owners = [position for position, own in enumerate(rows_read) for _ in own[argument]]
            first = rows[0] if rows else 0
            is_range = rows == list(range(first, first + len(rows)))
            segments = entry + len(rows) if is_ragged else -1
            slices[num_slices] = entry, len(rows), first if is_range else -1, segments
            written = [*rows, *owners] if is_ragged else rows
            index[entry : entry + len(written)] = written
            entry += len(written)
            num_slices += 1
    return num_slices


def _rows_read(
    sites: Sites, code: Int32Array, begin: int, reads: Int32Array, row: Int32Array
) -> list[list[int]]:
    """Return the rows of each argument of a call, of which ``reads`` are the values."""
    values = iter(reads)
    return [
        [int(row[next(values)]) for _ in argument]
        for argument in record_at(sites, code, begin).arguments
    ]
