"""Run what a session has recorded: with rows of any lengths, and errors that name the example."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pyg_dynbatch.autobatch.families import AnyRows, Family
from pyg_dynbatch.autobatch.sequences import Groups, SequenceRows, Sequences, of_any_length
from pyg_dynbatch.autobatch.signatures import NOTE
from pyg_dynbatch.core.engine import Run, StepCall, as_value
from pyg_dynbatch.core.linear import RunProducts
from pyg_dynbatch.core.operation import Operation
from pyg_dynbatch.core.row_buffer import RowBuffer, Rows
from pyg_dynbatch.core.steps import BufferSpec, Step, Steps
from pyg_dynbatch.core.types import RaggedRows

if TYPE_CHECKING:
    from pyg_dynbatch.autobatch.session import Session


class FamilyCall(StepCall):
    """Makes the calls of a step on rows of any lengths."""

    def __call__(self, arguments: Sequence[Any], size: int) -> Sequence[Any]:
        """Make the calls, and return all results."""
        return self.operation.module(*arguments)


class _Elsewhere(RowBuffer):
    """Stands for the buffer of rows of any lengths, which the run keeps itself."""

    def grow(self, rows: int) -> None:
        """Do nothing."""


class SessionRun(Run):
    """The run of a session, which knows the examples of its rows."""

    def __init__(self, session: "Session") -> None:
        super().__init__(session.table.engine)
        self.products = RunProducts(session.root)
        self.session = session
        self.sequences = defaultdict[int, SequenceRows](SequenceRows)  # by row type
        self.index = torch.empty(0, dtype=torch.int64)  # of the schedule that runs, on the host

    def take_sequences(
        self, outside: Mapping[int, Sequence[tuple[int, Sequences | Groups]]]
    ) -> None:
        """Keep rows of any lengths from outside, by row type, with the number of the first."""
        for kind, numbered_rows in outside.items():
            for first, rows in numbered_rows:
                self.sequences[kind].append(first, rows)

    def _open_buffer(self, spec: BufferSpec, *inputs: Any) -> None:
        kind = len(self.buffers)
        lengths = self.session.table.lengths
        if lengths.types and (kind in lengths.buffers or lengths.type_of(kind) is not None):
            self.buffers.append(_Elsewhere(0))
        else:
            super()._open_buffer(spec, *inputs)

    def operands_of(self, schedule: Steps, step: Step) -> list[Any]:
        """Read the arguments of a step."""
        kinds = self.session.table.lengths.buffers
        plain = [read for read in step.arguments if read.buffer not in kinds]
        if len(plain) == len(step.arguments):
            return super().operands_of(schedule, step)
        plain_rows = iter(self._exchange(self._reads(schedule.index, plain)))
        operands = list[Any]()
        for read in step.arguments:
            if read.buffer in kinds:
                numbers = read.rows_in(self.index).numpy()
                operands.append(self.sequences[read.buffer].take(numbers))
            else:
                row_type = schedule.buffers[read.buffer].row_type
                operands.append(as_value(next(plain_rows), row_type))
            if read.segments >= 0:
                rows = operands.pop()
                if of_any_length(rows):
                    rows = rows.stacked()
                operands.append(RaggedRows(rows, read.calls_in(schedule.index), step.size))
        return operands

    def write(self, buffer: int, first: int, rows: AnyRows | Rows) -> None:
        """Keep the results of a step."""
        if isinstance(rows, Sequences | Groups):
            self.sequences[buffer].append(first, rows)
        else:
            super().write(buffer, first, rows)

    def step_call(self, operation: Operation) -> StepCall:
        """Choose how the calls of an operation are made."""
        if isinstance(operation.module, Family):
            return FamilyCall(self.engine, operation)
        return super().step_call(operation)

    def make(self, schedule: Steps, number: int, step: Step) -> None:
        """Run one step; name the example and the line if it fails."""
        try:
            super().make(schedule, number, step)
        except Exception as error:
            if self.called is None:  # before the first call
                raise
            name = self.called.signature.name
            sites = self.session.table.sites
            site = next(each for each in sites if each.signature and each.signature.name == name)
            where = [name]
            if (row := self._failing_row(schedule, step)) is not None:
                buffer, first = step.results[0]
                where.append(f"example {self.session.example_with(buffer, first + row)}")
            _, _, line = site.where.rpartition(", ")
            where.append(line)
            error.add_note(NOTE + ", ".join(where))
            raise

    def _failing_row(self, schedule: Steps, step: Step) -> int | None:
        """Return the first row on which a step fails alone; ``None`` if that is not known."""
        if any(read.segments >= 0 for read in step.arguments) or self.session.device.type != "cpu":
            return None
        operands = self.operands_of(schedule, step)
        for row in range(step.size):
            alone = [
                rows.pick(np.array([row])) if of_any_length(rows) else rows[row : row + 1]
                for rows in operands
            ]
            try:
                self.results_of(schedule, step, alone, 1)
            except Exception:  # noqa: BLE001 - the caller raises the error of all rows
                return row
        return None
