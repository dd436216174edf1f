"""Schedule recorded calls: which run together, in which order, and which rows they read."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from math import prod
from operator import index
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from pyg_dynbatch.core import definitions
from pyg_dynbatch.core.errors import Mismatch, mismatch
from pyg_dynbatch.core.native import extension
from pyg_dynbatch.core.policy import Policy, checked_policy
from pyg_dynbatch.core.program import Call, Program
from pyg_dynbatch.core.recording import (
    CONSTANT,
    ConstantRows,
    Integers,
    Recording,
    Sites,
    checked_recordings,
    holds_rows_of,
    is_count,
)
from pyg_dynbatch.core.steps import BufferSpec, IndexSlice, Output, Step, Steps, contiguous
from pyg_dynbatch.core.types import RowType, describe, parts_of


def schedule_recordings(recordings: Sequence[Recording], policy: Policy = "depth") -> Steps:
    """Merge the recorded calls of a mini-batch into batched steps.

    Equal calls on equal constants are made only once.

    Args:
        recordings: One per example; empty ones are allowed.
        policy: Order of the steps: ``"depth"`` or ``"agenda"``.

    Returns:
        The steps; outputs are in the order of ``recordings``.

    Raises:
        ValueError: If ``recordings`` is empty, or the policy is unknown.
        TypeError: If one name has two signatures, or one output two types.

    Example:
        >>> from pyg_dynbatch.core import Signature, TensorType
        >>> recording, scalar = Recording(), TensorType(())
        >>> double = Signature("double", (scalar,), (scalar,))
        >>> recording.output(recording.call(double, recording.constant(scalar, 1.0)))
        >>> schedule_recordings([recording, recording])
        Steps(2 examples, 1 steps, 1 rows)
    """
    policy = checked_policy(policy)
    recordings = checked_recordings(recordings, "schedule_recordings")
    if not recordings:
        what = "schedule_recordings: the list of recordings is empty"
        raise mismatch(ValueError, what, "at least one recording", 0)
    joined = join(recordings)
    sites = joined.sites
    constants = joined.constants
    inputs = joined.first_input[-1]
    rows = np.array(constants.counts, dtype=np.int64) + inputs
    _check_size("rows", int(rows.max(initial=0)) + joined.code.size)
    values = Values(joined.code.size)
    records = Records(sites, joined.code, joined.begins, values)
    calls, merged = merge(records, constants, joined.outputs.values)
    kept = np.zeros(joined.code.size, dtype=np.uint8)
    kept[values.value[joined.outputs.values]] = 1
    calls = fuse(calls, kept)
    steps, read = place(calls, policy, rows)
    flat, outputs = _place_outputs(joined, values, read)
    columns = zip(sites.row_types, constants.counts, inputs.tolist(), rows.tolist(), strict=True)
    return Steps(
        signatures=sites.signatures,
        buffers=tuple(BufferSpec(*column) for column in columns),
        steps=steps,
        index=torch.from_numpy(flat),
        constants=tuple(constants.rows),
        outputs=outputs,
        num_examples=len(recordings),
        merged_calls=merged,
        fused=calls.programs,
    )


_NOTHING = np.zeros(0, dtype=np.int32)


def scheduler() -> ModuleType:
    """Return the scheduler in C, or its definition in Python where there is no C."""
    return extension() or definitions


class Joined(NamedTuple):
    """The recordings of a mini-batch as one; it is known to be valid."""

    sites: Sites
    code: np.ndarray
    begins: np.ndarray  # where records begin
    types: np.ndarray  # the row type of each value, -1 where there is none
    constants: "Constants"
    first_input: np.ndarray  # of each example and row type; a last line counts all
    outputs: "_Outputs"


def join(recordings: Sequence[Recording]) -> Joined:
    """Join recordings; raise an error if one cannot have been recorded: C trusts their numbers."""
    try:
        return _joined(recordings)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        if error.args and isinstance(error.args[0], Mismatch):
            raise  # of recordings that do not go together
        problem = "schedule_recordings: the fields of a recording do not fit each other"
        hint = "record the example again instead of changing its recording"
        raise mismatch(ValueError, problem, "those that were recorded", hint=hint) from error


def _joined(recordings: Sequence[Recording]) -> Joined:
    """Join recordings; raise an error of any kind if one is invalid."""
    sites, first_site = _joined_sites(recordings)
    codes = [recording.code for recording in recordings]
    outputs = _Outputs.of(recordings)
    code = _joined_integers(codes)
    num_inputs = _num_inputs(recordings, sites)
    _check_size("integers", code.size)
    given = list[int]()
    last_given = list[int]()
    for recording in recordings:
        for site, pieces in recording.data.items():
            given += index(site), sum(len(parts[0]) for parts in pieces)
        last_given.append(len(given) // 2)
    last_site = [n + len(r.sites) for n, r in zip(first_site, recordings, strict=True)]
    per_example = [list(accumulate(map(len, codes))), first_site, last_site, last_given]
    ends, first, last, last_constant = np.array(per_example, dtype=np.int64)
    types = np.empty_like(code)
    begins = np.empty_like(code)
    records = scheduler().check(
        sites=sites, code=code, ends=ends, examples=len(recordings), first_site=first,
        last_site=last, num_sites=len(sites), num_inputs=num_inputs, types=num_inputs.shape[1],
        constants=np.array(given, dtype=np.int64), last_constant=last_constant,
        outputs=outputs.values, output_example=outputs.example, num_outputs=outputs.values.size,
        begins=begins, type=types,
    )  # fmt: skip
    if records < 0:
        raise ValueError("invalid records")
    constants = _distinct_constants(recordings, sites, first_site)
    first_input = np.zeros((1 + len(recordings), len(sites.row_types)), dtype=np.int64)
    num_inputs.cumsum(0, out=first_input[1:])
    _check_size("rows", int(first_input[-1].max(initial=0)))
    if len(recordings) > 1:
        move(sites, code, ends, 0, first, first_input)
        outputs.values[:] += np.append(0, ends)[outputs.example].astype(np.int32)
    return Joined(sites, code, begins[:records], types, constants, first_input, outputs)


def _place_outputs(
    joined: Joined, values: "Values", read: np.ndarray
) -> tuple[np.ndarray, dict[str, Output]]:
    """Append the rows of the outputs, and the example of each, to the flat index."""
    flat = [read]
    size = read.size
    begin = 0
    outputs = dict[str, Output]()
    for name, end in joined.outputs.ends.items():
        numbers = joined.outputs.values[begin:end]
        example = joined.outputs.example[begin:end]
        types = joined.types[numbers]
        if types.size and (other := types[types != types[0]]).size:
            what = f"schedule_recordings: output {name!r} has two types"
            both = sorted((types[0], other[0]))
            wanted, got = (describe(joined.sites.row_types[number]) for number in both)
            raise mismatch(TypeError, what, wanted, got, hint="use a separate name for each type")
        found = values.rows_of(numbers)
        slice_ = IndexSlice(int(types[0]) if types.size else 0, size, found.size, contiguous(found))
        outputs[name] = Output(slice_, size + found.size)
        flat += [found, example]
        size = size + 2 * found.size
        begin = end
    return np.concatenate(flat, dtype=np.int64), outputs


class _Outputs(NamedTuple):
    """The named outputs of all recordings, name by name."""

    values: np.ndarray
    example: np.ndarray  # of each value
    ends: dict[str, int]  # of the values of each name

    @classmethod
    def of(cls, recordings: Sequence[Recording]) -> "_Outputs":
        """Collect the outputs of recordings, as each numbers its values."""
        names = dict.fromkeys(name for recording in recordings for name in recording.outputs)
        found = [_NOTHING]
        ends = dict[str, int]()
        examples = list[int]()
        lengths = list[int]()
        for name in names:
            for number, recording in enumerate(recordings):
                if name in recording.outputs:
                    found.append(recording.outputs[name])
                    examples.append(number)
                    lengths.append(len(found[-1]))
            ends[name] = sum(lengths)
        example = np.array(examples, dtype=np.int64).repeat(lengths)
        return cls(_joined_integers(found), example, ends)


def _num_inputs(recordings: Sequence[Recording], sites: Sites) -> np.ndarray:
    """Count the input rows of each example and row type."""
    counts = np.zeros((len(recordings), len(sites.row_types)), dtype=np.int64)
    for number, recording in enumerate(recordings):
        for row_type, rows in recording.num_inputs.items():
            if row_type not in recording.sites.number_of_type or not is_count(rows):
                raise ValueError("invalid num_inputs")
            counts[number, sites.number_of_type[row_type]] = rows
    return counts


def _joined_integers(vectors: Sequence[Any]) -> np.ndarray:
    """Join vectors of integers; raise an error if one is something else."""
    joined = np.concatenate(vectors, dtype=np.int32, casting="safe")
    if joined.ndim != 1:
        raise ValueError("not a vector")
    return joined


def _check_size(name: str, size: int) -> None:
    if size > np.iinfo(np.int32).max:
        what = f"schedule_recordings: too many {name}"
        wanted = "fewer than 2 ** 31"
        raise mismatch(ValueError, what, wanted, size, hint="smaller mini-batches")


def _joined_sites(recordings: Sequence[Recording]) -> tuple[Sites, list[int]]:
    """Join the tables of recordings; also return where the sites of each recording begin."""
    first: dict[Any, int] = {}
    tables: list[Sites] = []
    for recording in recordings:
        if id(recording.sites) not in first:
            # Of one model, too: each recording of autobatch has the sites that it uses.
            if not recording.sites.are_valid:
                raise ValueError("an invalid site")
            if recording.sites not in first:
                first[recording.sites] = sum(map(len, tables))
                tables.append(recording.sites)
            first[id(recording.sites)] = first[recording.sites]
    sites = tables[0] if len(tables) == 1 else Sites(chain(*tables))
    return sites, [first[id(recording.sites)] for recording in recordings]


def move(
    sites: Sites, code: np.ndarray, ends: np.ndarray | Sequence[int], base: int,
    first_site: np.ndarray | Sequence[int], first_input: np.ndarray,
) -> int:  # fmt: skip
    """Renumber the sites, values and input rows of examples that have been put into one code.

    Args:
        sites: The table of all examples.
        code: The records of all examples, which are changed.
        ends: Where each example ends.
        base: Where the first example begins in the code that values refer to.
        first_site: For each example, where its sites begin in the table.
        first_input: For each example, its first input row of each row type.

    Returns:
        The number of records; negative if a call then reads a value with a negative number.
    """
    places, firsts = (np.array(each, dtype=np.int64) for each in (ends, first_site))
    records: int = scheduler().move(
        sites=sites, code=code, ends=places, examples=len(ends), base=base, first_site=firsts,
        first_input=np.ascontiguousarray(first_input), types=len(sites.row_types),
    )  # fmt: skip
    return records


def begins_of(sites: Sites, code: np.ndarray, first: int = 0) -> np.ndarray:
    """Return where the records begin from a place in the code on."""
    begins = np.empty(code.size - first, dtype=np.int32)
    count = scheduler().scan(sites=sites, code=code, first=first, size=code.size, begins=begins)
    return begins[:count]


class Constants(NamedTuple):
    """The constants of a mini-batch, each different row once."""

    rows: list[tuple[torch.Tensor, ...] | None]  # of each row type
    counts: list[int]  # of each row type
    number: np.ndarray  # for each constant, site by site, which of the different ones it is
    row: np.ndarray  # of each of the different ones, within its row type
    first: np.ndarray  # where the constants of each site begin in ``number``

    @classmethod
    def none(cls, sites: Sites) -> "Constants":
        """Return no constants."""
        types = len(sites.row_types)
        first = np.zeros(len(sites), dtype=np.int64)
        return cls([None] * types, [0] * types, _NOTHING, _NOTHING, first)


def _distinct_constants(
    recordings: Sequence[Recording], sites: Sites, first_site: Sequence[int]
) -> Constants:
    found = Constants.none(sites)
    pieces = dict[int, list[ConstantRows]]()
    for recording, base in zip(recordings, first_site, strict=True):
        for site, parts in recording.data.items():
            pieces.setdefault(base + site, []).extend(parts)
    numbers = [_NOTHING]
    rows = [_NOTHING]
    total = different = 0
    for kind, row_type in enumerate(sites.row_types):
        mine = [n for n in pieces if sites[n] == (CONSTANT, (row_type,), None)]
        for site in mine:
            found.first[site] = total
            total += sum(len(parts[0]) for parts in pieces[site])
        if mine:
            whole = _joined_rows([parts for site in mine for parts in pieces[site]], row_type)
            number, first = _distinct_rows(whole)
            numbers.append(number + np.int32(different))
            rows.append(np.arange(first.size, dtype=np.int32))
            # In the precision given: the engine converts them to its working precision.
            found.rows[kind] = tuple(torch.from_numpy(part[first]) for part in whole)
            found.counts[kind] = first.size
            different += first.size
    return found._replace(number=np.concatenate(numbers), row=np.concatenate(rows))


def _joined_rows(pieces: Sequence[ConstantRows], row_type: RowType) -> ConstantRows:
    """Join constants of one type; raise an error if some are not of the type."""
    types = parts_of(row_type)
    if len(types) > 1 and any(len(set(map(len, piece))) > 1 for piece in pieces):
        raise ValueError("parts with different numbers of rows")
    whole = tuple(np.concatenate(parts) for parts in zip(*pieces, strict=True))
    if not all(map(holds_rows_of, whole, types)) or len(whole) != len(types):
        raise ValueError("constants of other shapes or dtypes")
    return whole


def _distinct_rows(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Number the different rows; also return the first of each."""
    # Compared byte by byte, so that nan equals itself and -0.0 differs from 0.0.
    count = len(parts[0])
    flat = (np.ascontiguousarray(p).reshape(count, prod(p.shape[1:])) for p in parts)
    columns = [part.view(np.uint8) for part in flat]
    rows = columns[0] if len(columns) == 1 else np.hstack(columns)
    number = np.empty(count, dtype=np.int32)
    first = np.empty(count, dtype=np.int32)
    different = scheduler().distinct(
        rows=np.ascontiguousarray(rows),
        count=count,
        width=rows.shape[1],
        number=number,
        first=first,
    )
    return number, first[:different]


class Values:
    """What scheduling finds out about the values of a code: arrays with an entry per integer."""

    def __init__(self, size: int = 0) -> None:
        self.value = np.empty(size, dtype=np.int32)  # the equal value that replaces it
        self.row = np.empty(size, dtype=np.int32)  # its row, or -1
        self.call = np.empty(size, dtype=np.int32)  # number of the call that makes it
        self.owner = np.empty(size, dtype=np.int32)  # where its record begins

    def grow(self, size: int) -> None:
        """Make room for a longer code."""
        if size > self.row.size:
            for name, column in list(vars(self).items()):
                larger = np.empty(max(size, 2 * column.size), dtype=np.int32)
                larger[: column.size] = column
                setattr(self, name, larger)

    def rows_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of values."""
        return self.row[self.value[numbers]].astype(np.int64)


class Records(NamedTuple):
    """Records to be scheduled."""

    sites: Sites
    code: np.ndarray  # all records
    begins: np.ndarray  # where those begin that are scheduled
    values: Values  # what is known of the values, and becomes known


class FusedProgram(NamedTuple):
    """Calls that run in one step, and the row types that they read and write."""

    program: Program
    argument_types: list[int]
    result_types: list[int]


class Calls(NamedTuple):
    """The calls that are scheduled; each makes the calls of one record, or fused, of several.

    The arrays are those of ``native/steps.c``.
    """

    records: Records
    num_calls: int
    kind: np.ndarray  # number of a signature, or after all of these that of a fused program
    first_member: np.ndarray  # of each call, and the end
    member: np.ndarray  # where the records begin that a call makes
    first_read: np.ndarray  # of each call, and the end
    read: np.ndarray  # the values that a call reads
    num_entries: int  # of the flat index
    fused: tuple[FusedProgram, ...] = ()
    first_chain: np.ndarray = _NOTHING  # of each fused program, and the end
    chain: np.ndarray = _NOTHING  # as C describes fused programs
    most_outputs: int = 1

    @property
    def programs(self) -> tuple[Program, ...]:
        """The fused programs."""
        return tuple(each.program for each in self.fused)


def merge(
    records: Records,
    constants: Constants,
    outputs: np.ndarray = _NOTHING,
    *,
    merge_equal: bool = True,
) -> tuple[Calls, int]:
    """Make one call of equal ones on equal constants; also return how many are left out.

    It fills in what ``records.values`` says of every value but the rows of results.

    Args:
        records: What is scheduled.
        constants: Of these records.
        outputs: Values that are read at the end.
        merge_equal: Whether equal calls on equal constants are made only once.
    """
    sites, code, begins, values = records
    begin = np.empty(begins.size, dtype=np.int32)
    first_read = np.empty(begins.size + 1, dtype=np.int32)
    read = np.empty(code.size, dtype=np.int32)
    counts = np.zeros(4, dtype=np.int64)
    count = scheduler().merge(
        sites=sites, code=code, size=code.size, num_sites=len(sites),
        num_signatures=len(sites.signatures), begins=begins, records=begins.size,
        outputs=outputs, num_outputs=outputs.size, merge_equal=int(merge_equal),
        first_constant=constants.first, constant=constants.number, constant_row=constants.row,
        num_constants=constants.row.size,
        first_input=np.array(constants.counts, dtype=np.int64), value=values.value,
        row=values.row, call=values.call, owner=values.owner, begin=begin,
        first_read=first_read, read=read, counts=counts,
    )  # fmt: skip
    _, num_reads, num_ragged, num_merged = counts.tolist()
    member = begin[:count]
    calls = Calls(
        records,
        count,
        kind=sites.table[2][code[member]],
        first_member=np.arange(count + 1, dtype=np.int32),
        member=member,
        first_read=first_read,
        read=read,
        num_entries=num_reads + num_ragged,
        most_outputs=sites.most_results,
    )
    return calls, num_merged


def choose(calls: Calls, needed: Integers, kept: np.ndarray, *, joins: bool) -> np.ndarray:
    """Choose the calls that values depend on; return which wait.

    If ``joins``, others that can run are chosen as well if their sites are called. Values that
    calls which wait read are marked in ``kept``.
    """
    sites, code, _, values = calls.records
    waits = np.empty(calls.num_calls, dtype=np.uint8)
    numbers = values.value[np.array(needed, dtype=np.int64)]
    scheduler().choose(
        sites=sites, code=code, calls=calls.num_calls, num_sites=len(sites), begin=calls.member,
        first_read=calls.first_read, read=calls.read, row=values.row, call=values.call,
        needed=numbers, num_needed=numbers.size, joins=int(joins), waits=waits, kept=kept,
    )  # fmt: skip
    return waits.view(bool)


def fuse(calls: Calls, kept: np.ndarray, places: np.ndarray | None = None) -> Calls:
    """Let calls that always come together run in one step.

    Args:
        calls: Merged calls, whose arrays are overwritten: use the result in their place.
        kept: Which values are read later.
        places: Of each value, where in the user's code it was made.
    """
    native = scheduler()
    if native is definitions or not calls.num_calls:
        return calls  # an optimization that is made in C alone
    sites, code, _, values = calls.records
    entries = 3 + sites.most_arguments + 2 * sites.most_results  # of a program, per call
    kind, member, first_chain = np.empty((3, calls.num_calls + 1), dtype=np.int32)
    chain = np.empty(entries * calls.num_calls, dtype=np.int32)
    num_reads = int(calls.first_read[calls.num_calls])
    counts = np.zeros(2, dtype=np.int64)
    count = native.fuse(
        sites=sites, code=code, calls=calls.num_calls, num_signatures=len(sites.signatures),
        wanted=kept, place=places, value=values.value, row=values.row, call=values.call,
        begin=calls.member, first_read=calls.first_read, read=calls.read, kind=kind,
        first_member=calls.first_member, member=member, first_chain=first_chain,
        chain=chain, counts=counts,
    )  # fmt: skip
    num_fused, most_outputs = counts.tolist()
    ends = first_chain[: num_fused + 1].tolist() if num_fused else []
    programs = [_fused_program(sites, chain[begin:end]) for begin, end in pairwise(ends)]
    return calls._replace(
        num_calls=count,
        kind=kind,
        member=member,
        num_entries=calls.num_entries + int(calls.first_read[count]) - num_reads,
        fused=tuple(programs),
        first_chain=first_chain,
        chain=chain,
        most_outputs=most_outputs,
    )


def _fused_program(sites: Sites, code: np.ndarray) -> FusedProgram:
    """Decode a program that C describes; each is decoded once."""
    written = code.tobytes()
    if written not in sites.fused:
        sites.fused[written] = _decoded(sites, code.tolist())
    fused: FusedProgram = sites.fused[written]
    return fused


def _decoded(sites: Sites, code: Sequence[int]) -> FusedProgram:
    """Decode a program that ``write_chains`` of ``native/fuse.c`` has written.

    It refers to result ``r`` of call ``c`` by ``c * most_results + r``, and by -1 to the next
    operand.
    """
    num_calls, num_outputs = code[:2]
    place = 2
    operations = list[int]()
    references = list[Sequence[int]]()
    for _ in range(num_calls):
        operations.append(code[place])
        end = place + 1 + len(sites.signatures[code[place]].inputs)
        references.append(code[place + 1 : end])
        place = end
    num_operands = sum(own.count(-1) for own in references)
    operands = iter(range(num_operands))
    types = [-1] * num_operands
    first_result = list[int]()
    calls = list[Call]()
    for operation, own in zip(operations, references, strict=True):
        arguments = [
            next(operands)
            if each < 0
            else first_result[each // sites.most_results] + each % sites.most_results
            for each in own
        ]
        calls.append(Call(operation, tuple(arguments)))
        for value, row_type in zip(arguments, sites.argument_types[operation], strict=True):
            types[value] = row_type
        first_result.append(len(types))
        types += sites.result_types[operation]
    ends = code[place : place + 2 * num_outputs]
    outputs = [
        first_result[call] + result for call, result in zip(ends[::2], ends[1::2], strict=True)
    ]
    program = Program(num_operands, tuple(calls), tuple(outputs))
    return FusedProgram(program, types[:num_operands], [types[value] for value in outputs])


def place(calls: Calls, policy: Policy, rows: np.ndarray) -> tuple[tuple[Step, ...], np.ndarray]:
    """Assign the calls to steps; return these, and the row numbers that they refer to.

    It gives the results rows, in ``values`` of the records. ``rows`` counts the rows of each row
    type, and becomes larger by those of the results.
    """
    sites, code, _, values = calls.records
    step = np.empty(calls.num_calls, dtype=np.int32)
    num_steps = scheduler().order(
        calls=calls.num_calls, kinds=len(sites.signatures) + len(calls.fused),
        agenda=int(policy == "agenda"), kind=calls.kind[: calls.num_calls], row=values.row,
        call=values.call, first_read=calls.first_read, read=calls.read, step=step,
    )  # fmt: skip
    index = np.empty(calls.num_entries, dtype=np.int64)
    of_steps = np.empty((num_steps, 2 + calls.most_outputs), dtype=np.int64)
    argument_types = [*sites.argument_types, *(each.argument_types for each in calls.fused)]
    result_types = [*sites.result_types, *(each.result_types for each in calls.fused)]
    most_arguments = max(map(len, argument_types), default=0)
    slices = np.empty((num_steps * most_arguments, 4), dtype=np.int64)
    scheduler().place(
        sites=sites, code=code, calls=calls.num_calls, steps=num_steps,
        num_signatures=len(sites.signatures), most_outputs=calls.most_outputs,
        first_read=calls.first_read, read=calls.read, step=step, kind=calls.kind,
        first_member=calls.first_member, member=calls.member, first_chain=calls.first_chain,
        chain=calls.chain, row=values.row, free=rows, index=index, call=of_steps, slices=slices,
    )  # fmt: skip
    return tuple(_listed(argument_types, result_types, of_steps.tolist(), slices)), index


def _listed(
    argument_types: list[list[int]],
    result_types: list[list[int]],
    of_steps: list[list[int]],
    slices: np.ndarray,
) -> Iterator[Step]:
    """Return the steps that C has written: kinds, sizes, first rows, and slices in their order."""
    rest = iter(slices.tolist())
    for kind, size, *first_rows in of_steps:
        own_slices = islice(rest, len(argument_types[kind]))
        arguments = [
            IndexSlice(buffer, *own)
            for buffer, own in zip(argument_types[kind], own_slices, strict=True)
        ]
        # As many as the step with the most results has; the others are unused.
        results = tuple(zip(result_types[kind], first_rows, strict=False))
        yield Step(kind, size, tuple(arguments), results)
