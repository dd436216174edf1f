"""Record the run of a fused cell over one shape of levels, and replay it on other batches.

A recorded run owns the tensors that its graphs read: input rows, row numbers, and the gradients of
the states. What a batch brings is copied there, and its results are copied out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.core.padding import PaddedForm, schedule_of_shape
from pyg_dynbatch.nn.cell import RecursiveCell
from pyg_dynbatch.nn.recorder import Recorder


class Mode(NamedTuple):
    """All besides the shape that a recorded run depends on.

    Args:
        dtype: That of the input rows.
        width: That of the input rows.
        with_gradient: Whether there is a way back.
        rows_want_gradient: Whether the input rows want a gradient.
        precision: Type in which to multiply (autocast); None without.
        dropout: Recurrent dropout of the cell as things stand.
    """

    dtype: torch.dtype
    width: int
    with_gradient: bool
    rows_want_gradient: bool
    precision: torch.dtype | None
    dropout: float


class RecordedRun:
    """The forward and the backward run over levels of one shape, recorded.

    Args:
        cell: A cell that runs a whole schedule in one go.
        form: The first batch, padded; later ones have the same shape.
        rows: Its input rows.
        mode: What else matters.
        recorder: What records.
        totals: Where the gradients of the parameters that want one go; shared by all runs of
            a cell.
    """

    def __init__(
        self,
        cell: RecursiveCell,
        form: PaddedForm,
        rows: Tensor,
        mode: Mode,
        recorder: Recorder,
        totals: Sequence[Tensor],
    ) -> None:
        self.cell, self.mode, self.totals = cell, mode, totals
        self.wanted = [each for each in cell.parameters() if each.requires_grad]
        self.states: tuple[Tensor, ...] | None = None
        self.grads: tuple[Tensor, ...] = ()
        with _as_in(mode, rows.device.type):
            self.wiring = torch.empty_like(form.schedule.wiring)
            self.schedule = schedule_of_shape(form.shape, self.wiring)
            self.rows = rows.new_zeros(form.input_row.size(0), mode.width)
            self.inputs = self.rows.detach().requires_grad_(mode.rows_want_gradient)
            self.load(form, rows)
            if mode.with_gradient:
                self.grads = tuple(torch.zeros_like(part) for part in self._forward())
            recorder.warm_up(self._both)
            self.there = recorder.record(self._forward)
            self.back = recorder.record(self._backward) if mode.with_gradient else None

    def load(self, form: PaddedForm, rows: Tensor) -> None:
        """Copies a batch to where the graphs read it."""
        self.wiring.copy_(form.schedule.wiring)
        if rows.size(0):
            # Without an input there is nothing to read, and the rows stay zeros.
            torch.index_select(rows.detach(), 0, form.input_row, out=self.rows)
        else:
            self.rows.zero_()

    def forwards(
        self, form: PaddedForm, rows: Tensor, place: Tensor, parts: int
    ) -> tuple[Tensor, ...]:
        """Replays the way there.

        Args:
            form: The batch, padded.
            rows: Its input rows.
            place: Which rows of the states to give.
            parts: How many parts of the states to give.

        Returns:
            Copies of these rows.
        """
        self.load(form, rows)
        self.there.replay()
        return tuple(part.index_select(0, place) for part in self.there.results[:parts])

    def backwards(
        self, form: PaddedForm, grads: Sequence[Tensor | None], place: Tensor
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Replays the way back.

        Args:
            form: The same batch.
            grads: Gradients of what :meth:`forwards` gave.
            place: As there.

        Returns:
            Copies of the gradients of the input rows, if they want one, and of the parameters.
        """
        for kept, given in zip_longest(self.grads, grads):
            # Nothing comes from the rows of padding.
            kept.zero_()
            if given is not None:
                kept.index_copy_(0, place, given)
        if self.back is None:
            return None, []
        self.back.replay()
        of_rows = None
        if self.mode.rows_want_gradient:
            of_rows = self.back.results[0].index_select(0, form.input_place)
        # Copies, as the next replay of any run writes there.
        return of_rows, [total.clone() for total in self.totals]

    def _both(self) -> None:
        self._forward()
        if self.mode.with_gradient:
            self._backward()

    def _forward(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(self.mode.with_gradient):
            self.states = self.cell.run_schedule(self.schedule, self.inputs, level_order=True)
        return tuple(part.detach() for part in self.states or ())

    def _backward(self) -> tuple[Tensor, ...]:
        # Taken away, so that the memory of the way back goes to the pool.
        states, self.states = self.states, None
        leaves = [*self.wanted, *([self.inputs] if self.mode.rows_want_gradient else [])]
        found = torch.autograd.grad(states or (), leaves, self.grads)
        for total, grad in zip(self.totals, found, strict=False):
            total.copy_(grad)
        return found[len(self.wanted) :]


@contextmanager
def _as_in(mode: Mode, device: str) -> Iterator[None]:
    """Sets autocast as a mode says, and leaves inference mode, which graphs outlive."""
    dtype, enabled = mode.precision, mode.precision is not None
    with torch.inference_mode(False), torch.autocast(device, dtype, enabled, cache_enabled=False):
        yield
