"""The batched calls of recordings, step by step: which rows each call reads and writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.program import Call, Program, program_of_call
from pyg_dynbatch.core.row_buffer import Pick
from pyg_dynbatch.core.types import RowType, TensorType, describe

GATHER = -1
"""Value of ``IndexSlice.start`` for rows that are not contiguous."""


class IndexSlice(NamedTuple):
    """The rows of a buffer that one argument or output reads: a slice of the flat index."""

    buffer: int  # its number
    offset: int  # where its row numbers begin in the flat index
    length: int
    start: int  # first row if the rows are contiguous, otherwise GATHER
    segments: int = -1  # ragged arguments: where the call of each row is in the flat index

    def rows_in(self, index: Tensor) -> Int[Tensor, " row"]:
        """Return the row numbers, from the flat index of the schedule."""
        return index[self.offset : self.offset + self.length]

    def pick_from(self, index: Tensor) -> Pick:
        """Return what a buffer reads: a range of rows if they are contiguous."""
        if self.start == GATHER:
            return self.rows_in(index)
        return self.start, self.length

    def calls_in(self, index: Tensor) -> Int[Tensor, " row"]:
        """Return, for a ragged argument, the call within the step that each row belongs to."""
        return index[self.segments : self.segments + self.length]


class Step(NamedTuple):
    """One batched call: an operation, the number of calls, the rows read and written."""

    operation: int  # number of a signature, or after all of these that of a fused program
    size: int
    arguments: tuple[IndexSlice, ...]
    results: tuple[tuple[int, int], ...]  # (buffer, first row)


class BufferSpec(NamedTuple):
    """Size of the row buffer of one row type: constants first, then inputs, then results."""

    row_type: RowType
    constants: int
    inputs: int
    rows: int  # of all three kinds


class Output(NamedTuple):
    """Rows of one named output."""

    rows: IndexSlice
    example: int  # where the example of each row is in the flat index


@dataclass(eq=False, repr=False)
class Steps(MovablePlan):
    """The batched calls of a mini-batch, with all row numbers in one flat int64 tensor.

    It holds no parameters and no modules: it is created in a loader worker, is moved to the device
    in one copy, and the loop over steps reads only Python integers on the host. Made by
    :func:`schedule_recordings`.

    Args:
        signatures: Operations, to which the steps refer by number.
        buffers: Sizes of the row buffers, to which index slices refer by number.
        steps: The batched calls in order.
        index: All row numbers, int64, flat.
        constants: Constant rows of each buffer, one tensor per part; ``None`` if it has none.
        outputs: Named outputs.
        num_examples: Number of examples.
        merged_calls: Calls saved because they repeat an earlier call on equal constants.
        model: Fingerprint of the model that recorded the calls; others refuse them.
        result: What the model needs to rebuild its results, such as the labels of metrics.
        fused: Programs of calls that always come together and run in one step, to which steps
            refer by the numbers after those of the signatures.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2. Differs: rows are gathered from any
        earlier step; nothing is copied forward level by level.

    Example:
        >>> from pyg_dynbatch.core import Recording, schedule_recordings
        >>> scalar, recording = TensorType(()), Recording()
        >>> add = Signature("add", (scalar, scalar), (scalar,))
        >>> one, two = (recording.constant(scalar, number) for number in (1.0, 2.0))
        >>> sums = recording.call(add, one, two), recording.call(add, two, one)
        >>> recording.output(recording.call(add, *sums))
        >>> [step.size for step in schedule_recordings([recording]).steps]
        [2, 1]
    """

    signatures: tuple[Signature, ...]
    buffers: tuple[BufferSpec, ...]
    steps: tuple[Step, ...]
    index: Int[Tensor, " entry"]
    constants: tuple[tuple[Tensor, ...] | None, ...]
    outputs: dict[str, Output]
    num_examples: int
    merged_calls: int = 0
    model: str = ""
    result: Any = None
    fused: tuple[Program, ...] = ()

    def __len__(self) -> int:
        return self.num_examples

    def example_of(self, name: str) -> Int[Tensor, " row"]:
        """Return the example of every row of a named output."""
        output = self.outputs[name]
        return self.index[output.example : output.example + output.rows.length]

    def program_of(self, step: Step) -> Program:
        """Return the calls that a step makes, of operations by number."""
        number = step.operation - len(self.signatures)
        if number >= 0:
            return self.fused[number]
        signature = self.signatures[step.operation]
        return program_of_call(step.operation, len(signature.inputs), len(signature.outputs))

    @property
    def operations(self) -> list[int]:
        """All operations that steps run, each once."""
        kinds = {step.operation: step for step in self.steps}
        programs = map(self.program_of, kinds.values())
        return list(dict.fromkeys(chain(*(program.operations for program in programs))))

    def name_of(self, step: Step) -> str:
        """Return the names of the operations of a step, in the order in which they run."""
        return "+".join(self.signatures[each].name for each in self.program_of(step).operations)

    def stats(self) -> "ScheduleStats":
        """Count steps, rows, the critical path, the lower bound, and the steps Fold would make."""
        schedule = self.cpu()
        num_kinds = len(schedule.signatures) + len(schedule.fused)
        # Of each row: the longest path of steps of each kind that leads to it, and of any kind.
        paths = [np.zeros((spec.rows, num_kinds + 1), np.int64) for spec in schedule.buffers]
        depths = [np.zeros(spec.rows, np.int64) for spec in schedule.buffers]  # in calls
        # Over all steps, also those whose results nobody reads.
        longest = np.zeros(num_kinds + 1, np.int64)
        deepest_call = 0
        gathered_rows = 0
        rows = 0
        for step in schedule.steps:
            program = schedule.program_of(step)
            path = np.zeros((step.size, num_kinds + 1), np.int64)
            depths_read = list[np.ndarray]()
            for read in step.arguments:
                picked = read.rows_in(schedule.index).numpy()
                call = np.arange(step.size)
                if read.segments >= 0:
                    call = read.calls_in(schedule.index).numpy()
                np.maximum.at(path, call, paths[read.buffer][picked])
                depth = np.zeros(step.size, np.int64)
                np.maximum.at(depth, call, depths[read.buffer][picked])
                depths_read.append(depth)
                gathered_rows += read.length if read.start == GATHER else 0
            path[:, [step.operation, -1]] += 1
            longest = np.maximum(longest, path.max(0, initial=0))
            depth_of_values = schedule._depths(program, step.size, depths_read)
            for depth in depth_of_values[program.num_operands :]:
                deepest_call = max(deepest_call, int(depth.max(initial=0)))
            rows += step.size * len(program.calls)
            for (buffer, start), number in zip(step.results, program.outputs, strict=True):
                paths[buffer][start : start + step.size] = path
                depths[buffer][start : start + step.size] = depth_of_values[number]
        *of_operations, of_steps = longest.tolist()
        return ScheduleStats(
            examples=schedule.num_examples,
            steps=len(schedule.steps),
            rows=rows,
            merged_calls=schedule.merged_calls,
            critical_path=of_steps,
            lower_bound=sum(of_operations),
            widths=tuple(step.size for step in schedule.steps),
            operations=tuple(map(schedule.name_of, schedule.steps)),
            gathered_rows=gathered_rows,
            fold_steps=len(schedule.operations) * deepest_call,
        )

    def _depths(
        self, program: Program, size: int, operands: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the depth of each value of a program."""
        depths = list(operands)
        for operation, arguments in program.calls:
            depth = np.zeros(size, np.int64)
            for number in arguments:
                depth = np.maximum(depth, depths[number])
            depths += [depth + 1] * len(self.signatures[operation].outputs)
        return depths

    # Moving to a device, comparing, printing.

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.index, *(part for parts in self.constants for part in parts or ()))

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Steps":
        constants = (None if parts is None else tuple(map(fn, parts)) for parts in self.constants)
        return replace(self, index=fn(self.index), constants=tuple(constants))

    def __eq__(self, other: object) -> bool:
        """Compare contents: the same steps, the same row numbers, the same constants."""
        if not isinstance(other, Steps):
            return NotImplemented
        fields = attrgetter("signatures", "buffers", "steps", "fused", "outputs", "num_examples")
        if fields(self) != fields(other) or self._num_parts() != other._num_parts():
            return False
        return all(map(torch.equal, self._tensors(), other._tensors()))

    __hash__ = None  # type: ignore[assignment]

    def _num_parts(self) -> list[int | None]:
        """Return how many tensors hold the constants of each buffer."""
        return [None if parts is None else len(parts) for parts in self.constants]

    def __repr__(self) -> str:
        rows = sum(step.size * len(self.program_of(step).calls) for step in self.steps)
        return f"Steps({self.num_examples} examples, {len(self.steps)} steps, {rows} rows)"

    def __str__(self) -> str:
        """Print one line per step."""
        lines = [repr(self)]
        for number, step in enumerate(self.steps):
            reads = ", ".join(map(_shown, step.arguments))
            writes = ", ".join(f"buffer {b}[{a}:{a + step.size}]" for b, a in step.results)
            called = f"{self.name_of(step)} x {step.size}"
            lines.append(f"  {number:>4} {called}: {reads or 'nothing'} -> {writes}")
        for number, buffer in enumerate(self.buffers):
            lines.append(f"  buffer {number}: {describe(buffer.row_type)}, {buffer.rows} rows")
        return "\n".join(lines)


def _shown(read: IndexSlice) -> str:
    if read.start >= 0:
        return f"buffer {read.buffer}[{read.start}:{read.start + read.length}]"
    return f"gather {read.length} of buffer {read.buffer}"


@dataclass(frozen=True)
class ScheduleStats:
    """Statistics of one schedule.

    Args:
        examples: Number of examples.
        steps: Batched calls made.
        rows: Calls made, after equal calls were merged; a fused step makes several per row.
        merged_calls: Calls saved because they repeat an earlier call on equal constants.
        critical_path: Longest path of calls, fused calls counted once: no schedule has fewer steps.
        lower_bound: Sum over operations of the longest path through their calls, fused operations
            counted once: no schedule has fewer steps that call these one at a time.
        widths: Rows of each step.
        operations: Name of each step's operation; fused ones joined by ``+``.
        gathered_rows: Rows read through an index; the others are contiguous.
        fold_steps: Batched calls that Fold's loop makes: every operation at every depth.

    Reference:
        Lower bound: Chen et al. (2023), arXiv:2302.03851. Fold: Looks et al. (2017).
    """

    examples: int
    steps: int
    rows: int
    merged_calls: int
    critical_path: int
    lower_bound: int
    widths: tuple[int, ...]
    operations: tuple[str, ...]
    gathered_rows: int
    fold_steps: int


def contiguous(rows: np.ndarray) -> int:
    """Return the first of rows that are contiguous, 0 if there are none, GATHER otherwise."""
    if not rows.size:
        return 0
    first = int(rows[0])
    # Rows whose ends fit by chance mostly fail here, which is cheap to check.
    if int(rows[-1]) - first != rows.size - 1 or (rows.size > 1 and int(rows[1]) != first + 1):
        return GATHER
    return first if rows.size < 3 or bool((rows[1:] - rows[:-1] == 1).all()) else GATHER


def packed(slices: Sequence[IndexSlice], number: int) -> int:
    """Return how many consecutive arguments, from ``number`` on, one gather can read together."""
    first = slices[number]
    is_single_row = first.length == 1
    if first.segments >= 0 or not (is_single_row or first.start == GATHER):
        return 1
    count = 1
    for other in islice(slices, number + 1, None):
        is_behind = other.offset == first.offset + count * first.length
        is_alike = other.buffer == first.buffer and other.length == first.length
        is_gathered = is_single_row or other.start == GATHER
        if not (is_behind and is_alike and is_gathered) or other.segments >= 0:
            break
        count += 1
    # Views of a few single rows take less time than a gather, those of many more.
    return 1 if is_single_row and count <= 3 else count


torch.serialization.add_safe_globals(
    [Signature, Ragged, TensorType, Output, Step, Call, Program, BufferSpec, IndexSlice, Steps]
)
