"""Keep all rows of one type in one buffer, and their gradients in one other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from pyg_dynbatch.core.errors import mismatch

Rows = tuple[Tensor, ...]
Pick = Tensor | tuple[int, int]
"""Which rows to read: an index vector, or (first row, number of rows) side by side."""


def has_gradient(dtype: torch.dtype) -> bool:
    """Tells whether autograd differentiates numbers of a dtype."""
    return dtype.is_floating_point or dtype.is_complex


class GradientStore:
    """Adds up the gradients of one state store, in one buffer a backward pass.

    A graph may be left half-way (``autograd.grad`` of some inputs), entered half-way (a loss on
    what a hook captured) and used again (``retain_graph``), so whoever comes first in a pass
    begins with zeros, and the end of the pass lets the buffer go.
    """

    def __init__(self) -> None:
        self.forms: tuple[tuple[torch.Size, torch.dtype, torch.device], ...] = ()
        self.totals: Rows = ()
        self.backward_pass: int | None = None

    def _begin(self) -> None:
        current = torch._C._current_graph_task_id()
        if current == self.backward_pass:
            return
        self.backward_pass = current
        self.totals = tuple(
            torch.zeros(shape if has_gradient(dtype) else 0, dtype=dtype, device=device)
            for shape, dtype, device in self.forms
        )
        # The graph outlives the pass as long as somebody holds the loss; the buffer need not.
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.totals, self.backward_pass = (), None

    def add(self, pick: Pick, gradients: tuple[Tensor | None, ...]) -> None:
        """Adds the gradients of rows that were read."""
        self._begin()
        for total, gradient in zip(self.totals, gradients, strict=True):
            if gradient is None:
                continue
            if isinstance(pick, tuple):
                total[pick[0] : pick[0] + pick[1]] += gradient
            else:
                gradient = gradient.to(total.dtype)
                # An addition hands on the very slice of the buffer that `take` gave it.
                if gradient.untyped_storage().data_ptr() == total.untyped_storage().data_ptr():
                    gradient = gradient.clone()
                total.index_add_(0, pick, gradient)

    def take(self, start: int, size: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
        """Gives the finished gradients of rows that were written."""
        self._begin()
        return tuple(
            total[start : start + size].to(dtype) if has_gradient(dtype) else None
            for total, dtype in zip(self.totals, dtypes, strict=True)
        )


class StateStore:
    """Holds the rows of one row type for one run, written once each and read any number of times.

    Reading is a gather and writing is a copy into the buffer. Backwards, every read adds its
    gradient into one gradient buffer, and every write takes its slice out of it; a token that
    runs from write to write makes sure that all later reads come first. So the time and memory
    of a run and of its backward pass grow with the rows, never with rows times steps, and inside
    the operations ordinary autograd goes on undisturbed.

    Args:
        rows: Number of rows.
        zero_rows: How many of the first rows are zeros that nobody writes.
    """

    def __init__(self, rows: int, zero_rows: int = 0) -> None:
        self.rows = rows
        self.zero_rows = zero_rows
        self.buffers: Rows = ()
        # Autograd keeps only this part: the buffer of the forward pass may go before backward.
        self.gradients = GradientStore()

    def allocate(self, like: Rows, dtypes: tuple[torch.dtype, ...]) -> None:
        """Makes room for all rows; ``like`` gives the shape and device of one row."""
        self.buffers = tuple(
            part.new_empty((self.rows, *part.shape[1:]), dtype=dtype)
            for part, dtype in zip(like, dtypes, strict=True)
        )
        for buffer in self.buffers:
            buffer[: self.zero_rows] = 0
        self.gradients.forms = tuple((b.shape, b.dtype, b.device) for b in self.buffers)

    def put(self, start: int, rows: Rows) -> None:
        """Copies rows into the buffer."""
        for buffer, part in zip(self.buffers, rows, strict=True):
            buffer[start : start + part.size(0)].copy_(part)

    def take(self, pick: Pick) -> Rows:
        """Gives rows: an alias of the buffer where they lie side by side, a gather otherwise."""
        if isinstance(pick, tuple):
            return tuple(_alias(buffer, *pick) for buffer in self.buffers)
        return tuple(buffer.index_select(0, pick) for buffer in self.buffers)

    def copy(self, pick: Pick) -> Rows:
        """Gives rows of their own: they may be changed, and keep no buffer alive."""
        rows = self.take(pick)
        return tuple(part.clone() for part in rows) if isinstance(pick, tuple) else rows

    def read(self, token: Tensor, pick: Pick) -> Rows:
        """Reads rows; gradients that come back are added up in the gradient buffer."""
        return read_rows(token, [Read(self, pick)])[0]

    def write(self, token: Tensor, start: int, rows: Rows) -> Tensor:
        """Writes rows side by side from ``start`` on; returns the token of all that follows."""
        return write_rows(token, [(self, start)], [rows])


class Read(NamedTuple):
    """Says which rows of a store to read, for one argument or for several in one gather.

    Args:
        store: The store.
        pick: The rows.
        places: How many arguments the rows are for, as many rows each.
        stacked: Whether the rows of all arguments of one call stand together; otherwise those of
            one argument do.
    """

    store: StateStore
    pick: Pick
    places: int = 1
    stacked: bool = False

    def taken(self, own: bool) -> list[Tensor]:
        """Takes the rows: the parts of the first argument, then those of the next."""
        rows = self.store.copy(self.pick) if own else self.store.take(self.pick)
        if self.places == 1:
            return list(rows)
        split = [self._split(part) for part in rows]
        return [parts[place] for place in range(self.places) for parts in split]

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return _split(rows, self.places, self.stacked)


def _split(rows: Tensor, places: int, stacked: bool) -> tuple[Tensor, ...]:
    """Gives each argument its rows, or its row numbers."""
    if stacked:
        return rows.unflatten(0, (-1, places)).unbind(1)
    return rows.chunk(places) if rows.size(0) else (rows,) * places


def read_rows(token: Tensor, reads: Sequence[Read], own: bool = False) -> list[Rows]:
    """Reads the rows of several arguments in one call of autograd.

    Args:
        token: Token after the last write.
        reads: What to read.
        own: Whether the rows may be changed and must keep no buffer alive.

    Returns:
        For every argument its parts.
    """
    if token.requires_grad and torch.is_grad_enabled() and reads:
        flat = _Read.apply(token, reads, own)
    else:
        flat = tuple(part for read in reads for part in read.taken(own))
    found, first = [], 0
    for read in reads:
        parts = len(read.store.buffers)
        for _ in range(read.places):
            found.append(flat[first : first + parts])
            first += parts
    return found


def write_rows(
    token: Tensor, places: Sequence[tuple[StateStore, int]], rows: Sequence[Rows]
) -> Tensor:
    """Writes the rows of several results in one call of autograd.

    Args:
        token: Token after the last write.
        places: For every result its store and the first row there.
        rows: For every result its parts.

    Returns:
        The token of all that follows.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for parts in rows for part in parts):
        return _Write.apply(token, places, *(part for parts in rows for part in parts))
    for (store, start), parts in zip(places, rows, strict=True):
        store.put(start, parts)
    return token


def _alias(buffer: Tensor, start: int, length: int) -> Tensor:
    """A tensor on the same memory that is no view of it.

    Rows are written before they are read and never again, so autograd must not take a later
    write to other rows for a change of these.
    """
    shape = (length, *buffer.shape[1:])
    offset = buffer.storage_offset() + start * buffer.stride(0)
    return buffer.new_empty(0).set_(buffer.untyped_storage(), offset, shape, buffer.stride())


def new_token(like: Tensor) -> Tensor:
    """Makes the token that begins a run."""
    return torch.empty(0, device=like.device)


def refuse_second_derivative() -> None:
    """Raises if a backward pass is itself being recorded.

    Raises:
        RuntimeError: Under ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            mismatch(
                "Engine: second derivatives through a schedule are not available",
                expected="backward() or autograd.grad() without create_graph",
                got="create_graph=True",
                mend="evaluate with core.reference.run_one_by_one, which plain autograd "
                "differentiates twice",
            )
        )


class _Write(Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, places: Sequence[tuple[StateStore, int]], *rows: Tensor
    ) -> Tensor:
        first, ctx.written = 0, []
        for store, start in places:
            parts = rows[first : first + len(store.buffers)]
            first += len(parts)
            store.put(start, parts)
            dtypes = tuple(part.dtype for part in parts)
            ctx.written.append((store.gradients, start, parts[0].size(0), dtypes))
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=token.device)

    @staticmethod
    def backward(ctx: Any, token_gradient: Tensor | None) -> Any:
        refuse_second_derivative()
        found = [part for gradients, *what in ctx.written for part in gradients.take(*what)]
        token = token_gradient if ctx.needs_input_grad[0] else None
        return token, None, *found


class _Read(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, reads: Sequence[Read], own: bool) -> Rows:
        rows = tuple(part for read in reads for part in read.taken(own))
        # Not the stores: their buffers may go before the backward pass.
        ctx.reads = [(read.store.gradients, len(read.store.buffers), *read[1:]) for read in reads]
        ctx.device = token.device
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(part for part in rows if not has_gradient(part.dtype)))
        return rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()
        first = 0
        for store, parts, pick, places, stacked in ctx.reads:
            for mine in (pick,) if places == 1 else _split(pick, places, stacked):
                store.add(mine, gradients[first : first + parts])
                first += parts
        return torch.empty(0, device=ctx.device), None, None


def finish(
    token: Tensor, stores: list[StateStore], picks: list[tuple[StateStore, Pick]]
) -> list[Rows]:
    """Reads the results of a run, as rows of their own.

    Args:
        token: Token after the last write.
        stores: All stores of the run.
        picks: For every result its store and rows.

    Returns:
        For every result its parts.
    """
    return read_rows(token, [Read(store, pick) for store, pick in picks], own=True)
