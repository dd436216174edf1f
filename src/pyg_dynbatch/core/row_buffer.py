"""Keep all rows of one type in one buffer, their gradients in another; check rows from outside."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable, forward_ad

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.core.layout import Store
from pyg_dynbatch.core.operation import Operation, Signature
from pyg_dynbatch.core.types import RowType, TensorType, describe, parts_of


def inputs_of(inputs: Mapping[RowType | str, Any], store: Store) -> tuple[Tensor, ...] | None:
    """Find and check the input rows of one store."""
    kind, parts = describe(store.row_type), parts_of(store.row_type)
    tag = parts[0].tag if len(parts) == 1 else ""
    given = inputs.get(store.row_type, inputs.get(tag) if tag else None)
    if given is None:
        if not store.inputs:
            return None
        what = f"Engine: the inputs of type {kind} are missing"
        got = f"inputs for {', '.join(map(str, inputs)) or 'nothing'}"
        hint = f"engine(schedule, inputs={{{tag or '<row type>'!r}: rows}})"
        raise mismatch(ValueError, what, f"{store.inputs} rows", got, hint=hint)
    rows = given if isinstance(given, tuple) else (given,)
    if len(parts) == 1 and parts[0].shape is None:
        parts *= len(rows)
    if all(isinstance(part, Tensor) and part.dim() > 0 for part in rows) and any(
        part.size(0) != store.inputs for part in rows
    ):
        what = f"Engine: wrong number of input rows of type {kind}"
        raise mismatch(ValueError, what, store.inputs, ", ".join(map(described, rows)))
    _check_rows(rows, parts, store.inputs, f"Engine: input rows of type {kind} do not fit")
    return rows


def checked_results(
    signature: Signature, results: Any, size: int, where: str
) -> list[tuple[Tensor, ...]]:
    """Check what a module returned against its signature."""
    what = f"Operation {signature.name!r}: its module returned something else"
    if len(signature.outputs) == 1:
        results = (results,)
    if not isinstance(results, tuple) or len(results) != len(signature.outputs):
        wanted = f"{len(signature.outputs)} results: {signature}"
        got = ", ".join(map(described, results if isinstance(results, tuple) else (results,)))
        raise mismatch(TypeError, what, wanted, got, where=where)
    checked = []
    for result, row_type in zip(results, signature.outputs, strict=True):
        rows = result if isinstance(result, tuple) else (result,)
        _check_rows(rows, parts_of(row_type), size, what, where)
        checked.append(rows)
    return checked


def _check_rows(
    rows: tuple[Any, ...], parts: tuple[TensorType, ...], size: int, what: str, where: str = ""
) -> None:
    if len(rows) != len(parts) or not all(
        _fits(row, part, size) for row, part in zip(rows, parts, strict=True)
    ):
        wanted = f"{size} rows of {describe(parts if len(parts) > 1 else parts[0])}"
        got, hint = ", ".join(map(described, rows)), "one row per call, along the first axis"
        raise mismatch(TypeError, what, wanted, got, where=where, hint=hint)


def _fits(row: Any, part: TensorType, size: int) -> bool:
    if not isinstance(row, Tensor):
        return False
    one_row = row.shape[1:] if part.shape is None else part.shape
    # Half, single and double precision mix (autocast, .double()); kinds do not.
    return row.shape == (size, *one_row) and (
        part.dtype is None
        or row.dtype == part.dtype
        or (row.dtype.is_floating_point and part.dtype.is_floating_point)
    )


def checked_call(
    operation: Operation, arguments: Sequence[Any], rows: Sequence[tuple[Tensor, ...]], where: str
) -> Any:
    """Call an operation on rows; raise if it changes them, which other calls read too."""
    # In inference mode tensors have no counter of changes in place.
    counted = [] if torch.is_inference_mode_enabled() else [p for parts in rows for p in parts]
    before = [part._version for part in counted]
    results = operation(*arguments)
    if [part._version for part in counted] != before:
        what = f"Operation {operation.signature.name!r}: its module changed an argument in place"
        got = "a layer with inplace=True, or a method such as add_()"
        hint = "inplace=False, or work on a clone: other calls read these rows too"
        raise mismatch(RuntimeError, what, "rows left as they are", got, where=where, hint=hint)
    return results


def check_precision(owner: str, rows: Tensor, module: nn.Module) -> None:
    """Check that floating parameters of a module have the dtype of rows, or autocast is on."""
    weight = next(module.parameters(), rows)
    if rows.dtype == weight.dtype or not weight.is_floating_point():
        return
    # Autocast leaves double precision alone.
    double = torch.float64 in (rows.dtype, weight.dtype)
    if double or not torch.is_autocast_enabled(rows.device.type):
        what = f"{owner}: input rows have another dtype than the parameters"
        hint = f"rows.to({weight.dtype}), or layer.to({rows.dtype})"
        raise mismatch(TypeError, what, weight.dtype, rows.dtype, hint=hint)


Rows = tuple[Tensor, ...]
Pick = Tensor | tuple[int, int]
"""Which rows to read: an index vector, or (first row, number of rows) side by side."""


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether a dtype has gradients."""
    return dtype.is_floating_point or dtype.is_complex


class GradientStore:
    """Adds up the gradients of one row buffer, in one buffer per backward pass."""

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
        # The graph outlives the pass as long as the loss is kept; the buffer need not.
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.totals, self.backward_pass = (), None

    def add(
        self, pick: Pick, places: int, stacked: bool, gradients: Sequence[Tensor | None]
    ) -> None:
        """Add the gradients of rows that were read, for one argument or for several."""
        self._begin()
        parts = len(self.totals)
        for number, total in enumerate(self.totals):
            mine = gradients[number::parts]
            if stacked and not any(gradient is None for gradient in mine):
                _add_rows(total, pick, _interleaved(mine))
                continue
            picks = (pick,) if places == 1 else _split(pick, places, stacked)  # type: ignore[arg-type]
            for rows, gradient in zip(picks, mine, strict=True):
                if gradient is not None:
                    _add_rows(total, rows, gradient)

    def take(self, start: int, size: int, dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
        """Return the finished gradients of rows that were written."""
        self._begin()
        found: list[Tensor | None] = []
        for total, dtype in zip(self.totals, dtypes, strict=True):
            part = total[start : start + size] if has_gradient(dtype) else None
            found.append(part if part is None or part.dtype == dtype else part.to(dtype))
        return found


def _interleaved(rows: Sequence[Any]) -> Tensor:
    """Interleave tensors: all first rows, then all second rows, and so on."""
    first, places = rows[0], len(rows)
    width = first[0].numel() if first.size(0) else 0
    offset = first.storage_offset()
    if all(
        _share_memory(part, first)
        and part.storage_offset() == offset + place * width
        and part.stride(0) == places * width
        and part[:1].is_contiguous()
        and not (part.is_conj() or part.is_neg())
        for place, part in enumerate(rows)
    ):
        # The gradient of a concatenation: the rows are interleaved already.
        shape = (first.size(0) * places, *first.shape[1:])
        return first.as_strided(shape, (width, *first.stride()[1:]))
    return torch.stack(list(rows), 1).flatten(0, 1)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]


def _add_rows(total: Tensor, pick: Pick, gradient: Tensor) -> None:
    if isinstance(pick, tuple):
        total[pick[0] : pick[0] + pick[1]].add_(gradient)
        return
    gradient = gradient.to(total.dtype)
    # The gradient of an addition may be the very slice that `take` returned.
    if _share_memory(gradient, total):
        gradient = gradient.clone()
    elif gradient.is_cpu:
        # On a CPU rows with gaps between them take several times as long to add.
        gradient = gradient.contiguous()
    total.index_add_(0, pick, gradient)


class RowBuffer:
    """Rows of one row type for one run; each is written once and read any number of times."""

    def __init__(self, rows: int, zero_rows: int = 0) -> None:
        self.rows = rows
        self.zero_rows = zero_rows
        self.buffers: Rows = ()
        self._blank: Rows = ()
        # Autograd keeps only this part: the buffer of the forward pass may go before backward.
        self.gradients = GradientStore()

    def allocate(self, like: Rows, dtypes: tuple[torch.dtype, ...]) -> None:
        """Make room for all rows; ``like`` gives the shape and device of one row."""
        self.buffers = tuple(
            part.new_empty((self.rows, *part.shape[1:]), dtype=dtype)
            for part, dtype in zip(like, dtypes, strict=True)
        )
        for buffer in self.buffers:
            buffer[: self.zero_rows] = 0
        self.gradients.forms = tuple((b.shape, b.dtype, b.device) for b in self.buffers)

    def grow(self, rows: int) -> None:
        """Make room for more rows; those that were written stay."""
        self.rows = max(rows, self.rows)
        if self.buffers and self.buffers[0].size(0) >= rows:
            return
        old, room = self.buffers, max(rows, 2 * self.buffers[0].size(0))
        self.buffers = tuple(part.new_empty((room, *part.shape[1:])) for part in old)
        self.put(0, old)
        self.gradients.forms = tuple((b.shape, b.dtype, b.device) for b in self.buffers)

    def put(self, start: int, rows: Rows) -> None:
        """Copy rows into the buffer."""
        for buffer, part in zip(self.buffers, rows, strict=True):
            buffer[start : start + part.size(0)].copy_(part)

    def take(self, pick: Pick) -> Rows:
        """Return rows: an alias of the buffer where they lie side by side, a gather otherwise."""
        if isinstance(pick, tuple):
            start, length = pick
            # No views of the buffer: autograd would count changes in place against them.
            return tuple(buffer[start : start + length].data for buffer in self.buffers)
        return tuple(buffer.index_select(0, pick) for buffer in self.buffers)

    def zeros(self, size: int) -> Rows:
        """Return rows of zeros; the same memory every time."""
        # In inference mode a change in place would go unnoticed.
        own = torch.is_inference_mode_enabled()
        if own or not self._blank or self._blank[0].size(0) < size:
            self._blank = tuple(part.new_zeros((size, *part.shape[1:])) for part in self.buffers)
        return tuple(part[:size] for part in self._blank)

    def copy(self, pick: Pick) -> Rows:
        """Return copies of rows: they may be changed, and keep no buffer alive."""
        rows = self.take(pick)
        return tuple(part.clone() for part in rows) if isinstance(pick, tuple) else rows

    def read(self, token: Tensor, pick: Pick) -> Rows:
        """Read rows; gradients that come back are added up in the gradient buffer."""
        return exchange(token, (), [Read(self, pick)])[1][0]

    def write(self, token: Tensor, start: int, rows: Rows) -> Tensor:
        """Write rows side by side from ``start`` on; return the token for what follows."""
        return exchange(token, [Write(self, start, rows)], ())[0]


class Read(NamedTuple):
    """Rows of a store to read, for one argument or for several in one gather."""

    store: RowBuffer
    pick: Pick
    places: int = 1
    stacked: bool = False

    def taken(self, own: bool) -> Sequence[Tensor]:
        """Take the rows: the parts of the first argument, then those of the next."""
        rows = self.store.copy(self.pick) if own else self.store.take(self.pick)
        if self.places == 1:
            return rows
        split = [_split(part, self.places, self.stacked) for part in rows]
        # No views, for then torch would complain of a change in place before the engine does.
        return [part.data for parts in zip(*split, strict=True) for part in parts]


class Write(NamedTuple):
    """Rows to write side by side into a store."""

    store: RowBuffer
    start: int
    rows: Rows


def _split(rows: Tensor, places: int, stacked: bool) -> tuple[Tensor, ...]:
    """Split rows, or row numbers, by argument."""
    if stacked:
        return tuple(rows[place::places] for place in range(places))
    return rows.chunk(places) if rows.size(0) else (rows,) * places


def exchange(
    token: Tensor, writes: Sequence[Write], reads: Sequence[Read], own: bool = False
) -> tuple[Tensor, list[Rows]]:
    """Write the results of a step and read the arguments of the next in one autograd call."""
    written = [part for write in writes for part in write.rows]
    if torch.is_grad_enabled() and (
        (token.requires_grad and len(reads) > 0) or any(part.requires_grad for part in written)
    ):
        token, *flat = _Exchange.apply(token, writes, reads, own, *written)
    else:
        flat = _exchanged(writes, reads, own)
    rest = iter(flat)
    return token, [
        tuple(islice(rest, len(read.store.buffers))) for read in reads for _ in range(read.places)
    ]


def _exchanged(writes: Sequence[Write], reads: Sequence[Read], own: bool) -> list[Tensor]:
    for store, start, rows in writes:
        store.put(start, rows)
    return [part for read in reads for part in read.taken(own)]


def new_token(like: Tensor) -> Tensor:
    """Make the token that begins a run."""
    return torch.empty(0, device=like.device)


def refuse_transforms(owner: str) -> None:
    """Raise under transforms that trace torch's operations: rows are written in place."""
    if torch._C._are_functorch_transforms_active():
        raise unsupported(owner, "a transform of torch.func (grad, vjp, jvp, vmap, ...)")
    if forward_ad._current_level >= 0:
        raise unsupported(owner, "forward-mode derivatives (torch.autograd.forward_ad)")
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise unsupported(owner, "torch.jit.trace (TorchScript, ONNX)")
    # Newer than the oldest torch that will do.
    if getattr(torch.compiler, "is_exporting", lambda: False)():
        raise unsupported(owner, "torch.export (ONNX)")


def unsupported(owner: str, way: str) -> RuntimeError:
    """Make the error for a way to run that schedules do not support."""
    what = f"{owner}: {way} does not work through a schedule, which differs from batch to batch"
    hint = "the cell or the operation alone, which is plain torch"
    wanted = "a plain call, and backward() or autograd.grad()"
    return mismatch(RuntimeError, what, wanted, hint=hint)


def refuse_second_derivative() -> None:
    """Raise if a backward pass is itself being recorded or transformed."""
    refuse_transforms("Engine")
    if torch.is_grad_enabled():
        what = "Engine: second derivatives through a schedule are not available"
        wanted = "backward() or autograd.grad() without create_graph"
        hint = "core.reference.run_one_by_one, which plain autograd differentiates twice"
        raise mismatch(RuntimeError, what, wanted, "create_graph=True", hint=hint)


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        writes: Sequence[Write],
        reads: Sequence[Read],
        own: bool,
        *written: Tensor,
    ) -> tuple[Tensor, ...]:
        rows = _exchanged(writes, reads, own)
        # Not the stores: their buffers may go before the backward pass.
        ctx.written = [
            (store.gradients, start, parts[0].size(0), [part.dtype for part in parts])
            for store, start, parts in writes
        ]
        ctx.reads = [(read.store.gradients, len(read.store.buffers), *read[1:]) for read in reads]
        ctx.device = token.device
        ctx.set_materialize_grads(False)
        plain = [part for part in rows if not (part.is_floating_point() or part.is_complex())]
        ctx.mark_non_differentiable(*plain)
        return token.new_empty(0), *rows

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()
        first = 0
        for store, parts, pick, places, stacked in ctx.reads:
            last = first + places * parts
            store.add(pick, places, stacked, gradients[first:last])
            first = last
        found = [part for store, *what in ctx.written for part in store.take(*what)]
        token = torch.empty(0, device=ctx.device) if ctx.needs_input_grad[0] else None
        return token, None, None, None, *found


def finish(
    token: Tensor, stores: list[RowBuffer], picks: list[tuple[RowBuffer, Pick]]
) -> list[Rows]:
    """Read the results of a run, as rows of their own."""
    return exchange(token, (), [Read(store, pick) for store, pick in picks], own=True)[1]
