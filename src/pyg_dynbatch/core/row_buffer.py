"""Keep all rows of one type in one buffer, and their gradients in another.

Autograd does not know that rows written to a buffer are read from it. The *token*, an empty tensor,
links reads and writes: a write takes and returns it, and a read takes it. For example, after ::

    token = buffer.write(token, 0, a)
    b = buffer.read(token, rows)

the backward pass reaches the read first, so that the gradient of ``a`` is complete at the write.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable, forward_ad

from pyg_dynbatch.core.errors import check_first_derivative, mismatch
from pyg_dynbatch.core.types import dtype_of_sums, has_gradient

_Function = TypeVar("_Function", bound=Callable[..., Any])
Rows = tuple[Tensor, ...]
"""Rows of one row type: one tensor ``[row, ...]`` per part of the type."""

Pick = Tensor | tuple[int, int]
"""Rows to read: an index vector, or (first row, number of rows) if they are contiguous."""


class RowBuffer:
    """Rows of one row type during one run; each is written once and read any number of times.

    allocate(like, dtypes) → put(start, constants) → write(token, start, rows), read(token, pick), …
    → grow(rows), if more are written later → …

    The first ``zero_rows`` hold zeros from the start, such as the state of a missing child.
    """

    def __init__(self, rows: int, zero_rows: int = 0) -> None:
        self.rows = rows
        self.zero_rows = zero_rows
        self.parts: Rows = ()  # one tensor per part of the row type
        # Autograd keeps only this part: the rows may be freed before the backward pass.
        self.gradients = GradientBuffer()

    def allocate(self, like: Rows, dtypes: tuple[torch.dtype, ...]) -> None:
        """Allocate all rows on the device of other rows, ``like``, and in their shape."""
        self.parts = tuple(
            part.new_empty((self.rows, *part.shape[1:]), dtype=dtype)
            for part, dtype in zip(like, dtypes, strict=True)
        )
        for part in self.parts:
            part[: self.zero_rows] = 0
        self.gradients.sum_for(self.parts)

    def grow(self, rows: int) -> None:
        """Make room for more rows; those that were written stay."""
        self.rows = max(rows, self.rows)
        if self.parts and self.parts[0].size(0) >= rows:
            return
        old = self.parts
        room = max(rows, 2 * old[0].size(0))
        self.parts = tuple(part.new_empty((room, *part.shape[1:])) for part in old)
        self.put(0, old)
        self.gradients.sum_for(self.parts)

    def put(self, start: int, rows: Rows) -> None:
        """Copy rows into the buffer, without gradients."""
        for own, part in zip(self.parts, rows, strict=True):
            own[start : start + part.size(0)].copy_(part)

    def take(self, pick: Pick, copy: bool = False) -> Rows:
        """Return rows: without ``copy``, contiguous ones share the memory of the buffer."""
        if isinstance(pick, tuple):
            start, length = pick
            # No views of the buffer: autograd would count in-place changes against them.
            rows = tuple(part[start : start + length].data for part in self.parts)
            return tuple(part.clone() for part in rows) if copy else rows
        return tuple(part.index_select(0, pick) for part in self.parts)

    def read(self, token: Tensor, pick: Pick, copy: bool = False) -> Rows:
        """Read rows; their gradients are summed in the gradient buffer."""
        return exchange(token, (), [Read(self, pick)], copy)[1][0]

    def write(self, token: Tensor, start: int, rows: Rows) -> Tensor:
        """Write contiguous rows from ``start`` on; return the token for the next read or write."""
        return exchange(token, [Write(self, start, rows)], ())[0]


class Read(NamedTuple):
    """Rows of a buffer to read, for one argument or for several in one gather."""

    buffer: RowBuffer
    pick: Pick
    num_arguments: int = 1

    def taken(self, copy: bool) -> Sequence[Tensor]:
        """Return the rows: the parts of the first argument, then those of the next."""
        rows = self.buffer.take(self.pick, copy)
        if self.num_arguments == 1:
            return rows
        split = [_split(part, self.num_arguments) for part in rows]
        # No views: torch would raise its own error for an in-place change before the engine does.
        return [part.data for parts in zip(*split, strict=True) for part in parts]


class Write(NamedTuple):
    """Contiguous rows to write into a buffer."""

    buffer: RowBuffer
    start: int
    rows: Rows


def _split(rows: Tensor, num_arguments: int) -> tuple[Tensor, ...]:
    """Split rows, or row numbers, by argument."""
    return rows.chunk(num_arguments) if rows.size(0) else (rows,) * num_arguments


def new_token(like: Tensor) -> Tensor:
    """Create the token of a new run."""
    return torch.empty(0, device=like.device)


def exchange(
    token: Tensor, writes: Sequence[Write], reads: Sequence[Read], copy: bool = False
) -> tuple[Tensor, list[Rows]]:
    """Write the results of a step and read the arguments of the next in one autograd call.

    Returns the token for the next call, and the rows of each argument. They may share the memory of
    the buffers, unless ``copy`` is true.
    """
    written = [part for write in writes for part in write.rows]
    if torch.is_grad_enabled() and (
        (token.requires_grad and len(reads) > 0) or any(part.requires_grad for part in written)
    ):
        token, *flat = _Exchange.apply(token, writes, reads, copy, *written)
    else:
        flat = _exchanged(writes, reads, copy)
    rest = iter(flat)
    return token, [
        tuple(islice(rest, len(read.buffer.parts)))
        for read in reads
        for _ in range(read.num_arguments)
    ]


def _exchanged(writes: Sequence[Write], reads: Sequence[Read], copy: bool) -> list[Tensor]:
    for buffer, start, rows in writes:
        buffer.put(start, rows)
    return [part for read in reads for part in read.taken(copy)]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        writes: Sequence[Write],
        reads: Sequence[Read],
        copy: bool,
        *written: Tensor,
    ) -> tuple[Tensor, ...]:
        rows = _exchanged(writes, reads, copy)
        # Not the buffers themselves, which may be freed before the backward pass.
        ctx.written = [
            (buffer.gradients, start, parts[0].size(0), [part.dtype for part in parts])
            for buffer, start, parts in writes
        ]
        ctx.reads = [(read.buffer.gradients, len(read.buffer.parts), *read[1:]) for read in reads]
        ctx.device = token.device
        ctx.set_materialize_grads(False)
        if plain := [part for part in rows if not has_gradient(part.dtype)]:
            ctx.mark_non_differentiable(*plain)
        return token.new_empty(0), *rows

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> Any:
        first = 0
        for total, parts, pick, num_arguments in ctx.reads:
            last = first + num_arguments * parts
            total.add(pick, num_arguments, gradients[first:last])
            first = last
        of_written = [
            part
            for total, start, size, dtypes in ctx.written
            for part in total.take(start, size, dtypes)
        ]
        token = torch.empty(0, device=ctx.device) if ctx.needs_input_grad[0] else None
        return token, None, None, None, *of_written


# Gradients.


class GradientBuffer:
    """Sums of the gradients of one row buffer, in one buffer per backward pass.

    sum_for(parts) → in each backward pass: add(…) for each read, take(…) for each write

    The first call of a backward pass makes room for the sums, and the end of the pass frees them.
    """

    def __init__(self) -> None:
        # Shape, dtype and device of each sum: one per part of the row type.
        self.forms: tuple[tuple[torch.Size, torch.dtype, torch.device], ...] = ()
        self.totals: dict[int, Rows] = {}  # by the number of the pass: one may run within another

    def sum_for(self, parts: Rows) -> None:
        """Keep in which shapes and dtypes gradients of rows are summed."""
        self.forms = tuple((p.shape, dtype_of_sums(p.dtype), p.device) for p in parts)

    def _totals_of_this_pass(self, gradients: Sequence[Tensor | None] = ()) -> Rows:
        """Return the sums, which are zeros at first."""
        backward_pass = torch._C._current_graph_task_id()
        totals = self.totals.get(backward_pass)
        if totals is not None:
            return totals
        check_backward(gradients)
        totals = tuple(
            torch.zeros(shape if has_gradient(dtype) else 0, dtype=dtype, device=device)
            for shape, dtype, device in self.forms
        )
        self.totals[backward_pass] = totals

        def forget() -> None:  # the graph lives as long as the loss is kept
            del self.totals[backward_pass]

        Variable._execution_engine.queue_callback(forget)
        return totals

    def add(self, pick: Pick, num_arguments: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of rows that were read, for one argument or several."""
        totals = self._totals_of_this_pass(gradients)
        # There are the gradients of all parts of the first argument, then those of the next.
        parts = len(totals)
        picks = (pick,) if num_arguments == 1 else _split(pick, num_arguments)  # type: ignore[arg-type]
        for number, total in enumerate(totals):
            for rows, gradient in zip(picks, gradients[number::parts], strict=True):
                if gradient is not None:
                    _add_rows(total, rows, gradient)

    def take(self, start: int, size: int, dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
        """Return the complete gradients of rows that were written."""
        gradients: list[Tensor | None] = []
        for total, dtype in zip(self._totals_of_this_pass(), dtypes, strict=True):
            part = total[start : start + size].to(dtype) if has_gradient(dtype) else None
            gradients.append(part)
        return gradients


def _add_rows(total: Tensor, pick: Pick, gradient: Tensor) -> None:
    if isinstance(pick, tuple):
        total[pick[0] : pick[0] + pick[1]].add_(gradient)
        return
    gradient = gradient.to(total.dtype)
    # The gradient of an addition may be the slice that `take` returned.
    if _share_memory(gradient, total):
        gradient = gradient.clone()
    elif gradient.is_cpu:
        # On a CPU, adding rows that are not contiguous takes several times as long.
        gradient = gradient.contiguous()
    total.index_add_(0, pick, gradient)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]


# Checks.


def check_no_transforms(owner: str) -> None:
    """Raise an error under transforms and tracing: rows are written in place."""
    if torch._C._are_functorch_transforms_active():
        raise unsupported(owner, "a transform of torch.func (grad, vjp, jvp, vmap, ...)")
    if forward_ad._current_level >= 0:
        raise unsupported(owner, "forward-mode derivatives (torch.autograd.forward_ad)")
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise unsupported(owner, "torch.jit.trace (TorchScript, ONNX)")
    # Newer than the oldest supported torch.
    if getattr(torch.compiler, "is_exporting", lambda: False)():
        raise unsupported(owner, "torch.export (ONNX)")


def unsupported(owner: str, way: str, hint: str = "") -> RuntimeError:
    """Return the error for a way to run that schedules do not support."""
    problem = f"{owner}: {way} does not work through a schedule, which differs from batch to batch"
    expected = "a plain call, and backward() or autograd.grad()"
    hint = hint or "the cell or the operation alone, which is plain torch"
    return mismatch(RuntimeError, problem, expected, hint=hint)


def outside_graphs(forward: _Function) -> _Function:
    """Let ``torch.compile`` call a function as it is: for each batch it would be compiled again."""
    reason = (
        "a schedule differs from batch to batch, so its steps are not compiled; "
        "use fullgraph=False, or compile the cell or the operation alone"
    )
    # The argument is newer than the oldest supported torch.
    named = "reason" in signature(torch.compiler.disable).parameters
    return torch.compiler.disable(forward, **{"reason": reason} if named else {})


def check_backward(gradients: Sequence[Tensor | None]) -> None:
    """Raise an error if a backward pass is itself recorded, transformed or batched."""
    check_no_transforms("Engine")
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients):
        way = "a batch of gradients (is_grads_batched=True, jacobian(..., vectorize=True))"
        hint = "is_grads_batched=False or vectorize=False, which makes one backward pass per row"
        raise unsupported("Engine", way, hint)
    hint = "a loop: model(examples, batch=False) of autobatch, run_one_by_one of recordings"
    check_first_derivative("Engine, through a schedule", hint)


def check_precision(owner: str, rows: Tensor, module: nn.Module) -> None:
    """Check that the parameters of a module have the dtype of rows, or autocast is enabled."""
    # Those of the module itself come first; listing all takes longer than all other checks.
    own: Any = (each for each in module._parameters.values() if each is not None)
    weight = next(own, None)
    weight = next(module.parameters(), rows) if weight is None else weight
    if rows.dtype == weight.dtype or not weight.is_floating_point():
        return
    # Autocast does not change double precision.
    double = torch.float64 in (rows.dtype, weight.dtype)
    if double or not torch.is_autocast_enabled(rows.device.type):
        problem = f"{owner}: input rows and parameters differ in dtype"
        hint = f"rows.to({weight.dtype}), or layer.to({rows.dtype})"
        raise mismatch(TypeError, problem, weight.dtype, rows.dtype, hint=hint)
