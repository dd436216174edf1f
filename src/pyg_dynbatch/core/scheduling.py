"""Schedule recorded calls: which run together, in which order, and which rows they read.

join (``joining.py``) → merge → choose, in autobatch alone → fuse → place

From merge on, each phase takes the :class:`Calls` of the one before it. What becomes known of the
values on the way, such as their rows, is written into one object, :class:`Values`.
"""

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import torch

from pyg_dynbatch.core import definitions
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.joining import NO_NUMBERS, Constants, Joined, check_size, join, scheduler
from pyg_dynbatch.core.policy import Policy, checked_policy
from pyg_dynbatch.core.program import Call, Program
from pyg_dynbatch.core.recording import Integers, Recording, Sites, checked_recordings
from pyg_dynbatch.core.steps import BufferSpec, IndexSlice, Output, Step, Steps, contiguous
from pyg_dynbatch.core.types import describe


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
        problem = "schedule_recordings: the list of recordings is empty"
        raise mismatch(ValueError, problem, "at least one recording", 0)

    joined = join(recordings)
    sites = joined.sites
    constants = joined.constants
    num_inputs = joined.first_input[-1]  # of each row type
    num_rows = np.array(constants.counts, dtype=np.int64) + num_inputs
    check_size("rows", int(num_rows.max(initial=0)) + joined.code.size)

    values = Values(joined.code.size)
    records = Records(sites, joined.code, joined.begins, values)
    calls, num_merged = merge(records, constants, joined.outputs.values)

    # A fused step must still write what outputs read.
    kept = np.zeros(joined.code.size, dtype=np.uint8)
    kept[values.value[joined.outputs.values]] = 1
    calls = fuse(calls, kept)

    # This adds the rows of results to `num_rows`.
    steps, rows_read = place(calls, policy, num_rows)
    index, outputs = _place_outputs(joined, values, rows_read)
    columns = zip(
        sites.row_types, constants.counts, num_inputs.tolist(), num_rows.tolist(), strict=True
    )
    return Steps(
        signatures=sites.signatures,
        buffers=tuple(BufferSpec(*column) for column in columns),
        steps=steps,
        index=torch.from_numpy(index),
        constants=tuple(constants.rows),
        outputs=outputs,
        num_examples=len(recordings),
        merged_calls=num_merged,
        fused=calls.programs,
    )


class Values:
    """What scheduling finds out about the values of a code: arrays with an entry per integer.

    Values(size) → merge writes all four, but no rows of results → fuse renumbers ``call`` → place
    writes the rows of results → rows_of(numbers)
    """

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
    first_chain: np.ndarray = NO_NUMBERS  # of each fused program, and the end
    chain: np.ndarray = NO_NUMBERS  # as C describes fused programs
    most_outputs: int = 1

    @property
    def programs(self) -> tuple[Program, ...]:
        """The fused programs."""
        return tuple(each.program for each in self.fused)


def merge(
    records: Records,
    constants: Constants,
    outputs: np.ndarray = NO_NUMBERS,
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
        kind=sites.signature_numbers[code[member]],
        first_member=np.arange(count + 1, dtype=np.int32),
        member=member,
        first_read=first_read,
        read=read,
        num_entries=num_reads + num_ragged,
        most_outputs=sites.most_results,
    )
    return calls, num_merged


def choose(calls: Calls, needed: Integers, kept: np.ndarray, *, joins: bool) -> np.ndarray:
    """Choose the calls that some values depend on; return which calls are left to wait.

    Args:
        calls: Merged calls.
        needed: These values.
        kept: Which values are read later; what waiting calls read is marked here.
        joins: Whether to choose also other calls that can run now, if a chosen one is of the same
            site.
    """
    sites, code, _, values = calls.records
    waits = np.empty(calls.num_calls, dtype=np.uint8)
    # An equal value may stand for each.
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
    num_reads_before = int(calls.first_read[calls.num_calls])

    # C writes the new calls into these, and into the arrays of the old ones.
    kind, member, first_chain = np.empty((3, calls.num_calls + 1), dtype=np.int32)
    most_entries = 3 + sites.most_arguments + 2 * sites.most_results  # of a program, per call
    chain = np.empty(most_entries * calls.num_calls, dtype=np.int32)
    counts = np.zeros(2, dtype=np.int64)
    num_calls = native.fuse(
        sites=sites, code=code, calls=calls.num_calls, num_signatures=len(sites.signatures),
        kept=kept, place=places, value=values.value, row=values.row, call=values.call,
        begin=calls.member, first_read=calls.first_read, read=calls.read, kind=kind,
        first_member=calls.first_member, member=member, first_chain=first_chain,
        chain=chain, counts=counts,
    )  # fmt: skip

    num_programs, most_outputs = counts.tolist()
    bounds = first_chain[: num_programs + 1].tolist() if num_programs else []
    programs = [_fused_program(sites, chain[begin:end]) for begin, end in pairwise(bounds)]
    num_reads = int(calls.first_read[num_calls])
    return calls._replace(
        num_calls=num_calls,
        kind=kind,
        member=member,
        num_entries=calls.num_entries + num_reads - num_reads_before,
        fused=tuple(programs),
        first_chain=first_chain,
        chain=chain,
        most_outputs=most_outputs,
    )


def _fused_program(sites: Sites, code: np.ndarray) -> FusedProgram:
    """Decode a program that C describes; each is decoded once."""
    written = code.tobytes()
    if written not in sites.fused:
        sites.fused[written] = _decoded_program(sites, code.tolist())
    fused: FusedProgram = sites.fused[written]
    return fused


def _decoded_program(sites: Sites, code: Sequence[int]) -> FusedProgram:
    """Decode a program that ``write_chain`` of ``native/fuse.c`` has written.

    It refers to result ``r`` of call ``c`` by ``c * most_results + r``, and by -1 to the next
    operand. With signatures 0, 1 and 2 for ``left``, ``right`` and ``add``, of one result each,
    ``add(left(a), right(b))`` is::

        3 1     0 -1   1 -1   2 0 1     2 0
        calls,  left   right  add       the outputs: result 0
        outputs of a   of b   of both   of call 2
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
        arguments = list[int]()
        for reference in own:
            if reference < 0:
                arguments.append(next(operands))
            else:
                call, result = divmod(reference, sites.most_results)
                arguments.append(first_result[call] + result)
        calls.append(Call(operation, tuple(arguments)))
        for value, row_type in zip(arguments, sites.argument_types[operation], strict=True):
            types[value] = row_type
        first_result.append(len(types))
        types += sites.result_types[operation]

    pairs = code[place : place + 2 * num_outputs]
    outputs = [
        first_result[call] + result for call, result in zip(pairs[::2], pairs[1::2], strict=True)
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
    return tuple(_decoded_steps(argument_types, result_types, of_steps.tolist(), slices)), index


def _decoded_steps(
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


def _place_outputs(
    joined: Joined, values: Values, rows_read: np.ndarray
) -> tuple[np.ndarray, dict[str, Output]]:
    """Append the rows of the outputs, and the example of each, to the rows that steps read."""
    index = [rows_read]
    size = rows_read.size
    begin = 0
    outputs = dict[str, Output]()
    for name, end in joined.outputs.ends.items():
        numbers = joined.outputs.values[begin:end]
        example = joined.outputs.example[begin:end]
        types = joined.types[numbers]
        other_types = types[types != types[:1]]
        if other_types.size:
            problem = f"schedule_recordings: output {name!r} has two types"
            both = sorted((types[0], other_types[0]))
            expected, got = (describe(joined.sites.row_types[number]) for number in both)
            hint = "use a separate name for each type"
            raise mismatch(TypeError, problem, expected, got, hint=hint)
        rows = values.rows_of(numbers)
        row_type = int(types[0]) if types.size else 0
        output_rows = IndexSlice(row_type, size, rows.size, contiguous(rows))
        outputs[name] = Output(output_rows, size + rows.size)
        index += [rows, example]
        size += 2 * rows.size
        begin = end
    return np.concatenate(index, dtype=np.int64), outputs
