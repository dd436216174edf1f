"""Functions recorded once, as straight-line programs, which loops and branches run on rows.

The body of a loop is recorded in a session of its own, a :class:`Body`. Its operands, which are the
state of the loop and values of enclosing sessions that it uses, are recorded as rows from outside,
so that what it recorded is a code like all others. Its :class:`~pyg_dynbatch.core.program.Program`
is that code without numbers of a table, and without calls on which no result depends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_flatten

from pyg_dynbatch.autobatch.forms import Examined
from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, NeedsPython, TensorOrLazy
from pyg_dynbatch.autobatch.nesting import LEAF
from pyg_dynbatch.autobatch.ragged import as_row
from pyg_dynbatch.autobatch.recorder import Recorder
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import NO_TEMPLATE, Own, SignatureSite, SignatureTable, Spec
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.program import BatchedCall, Call, Program
from pyg_dynbatch.core.recording import DecodedRecord, records_of
from pyg_dynbatch.core.types import RaggedRows, TensorType, has_gradient, parts_of


class Operands:
    """What the bodies of one loop or one choice read: values of the session that records it."""

    def __init__(self, session: Session, values: Sequence[Lazy], state: int = 0) -> None:
        self.session = session
        self.values = [*values]
        self.state = state  # how many of them change from one iteration to the next
        # Positions by values, or by the identity of tensors, which are kept alive.
        self.captured: dict[int | tuple[int], tuple[int, Tensor | None]] = {}

    def position_of(self, value: Lazy, source: Tensor | None = None) -> int:
        """Return the position of a value that stays the same, and that of its tensor if it has one.

        Not by the value alone: a number that happens to equal another would change the program.
        """
        key: int | tuple[int] = value._number if source is None else (id(source),)
        if key not in self.captured:
            self.captured[key] = len(self.values), source
            self.values.append(value)
        return self.captured[key][0]


class Body(Session):
    """Records a function that a loop or a choice will run."""

    ended = "the body of a loop or branch", "return what is used later from the function"

    def __init__(self, operands: Operands, owner: str) -> None:
        outer = operands.session
        Recorder.__init__(self, outer.table.lookup, outer.root, outer.grad, outer.autocast)
        # Not Session.__init__: a body is neither planned nor run, and has no rows of its own.
        self.table = outer.table
        self.device = outer.device
        self.shared = outer.shared
        self.trained = outer.trained
        self.inference = outer.inference
        self.can_run = outer.can_run
        self.example = outer.example
        self.operands = operands
        self.owner = owner
        self.code = list[int]()  # when the function has been recorded
        self.inputs: dict[int, Lazy] = {}

    @classmethod
    def of(
        cls,
        operands: Operands,
        owner: str,
        function: Callable[..., Any],
        arguments: Callable[["Body"], Sequence[object]],
        tensors_in: Callable[[Any], Sequence[TensorOrLazy]],
    ) -> "tuple[Body, tuple[int, ...]]":
        """Record a function; also return the numbers of its results.

        While the function runs, the body is the active session; it asks ``operand`` for what it
        reads. Then only ``code`` is read, from which :func:`program_of` makes a program.

        Args:
            operands: What it may read.
            owner: Names it in messages.
            function: Called once.
            arguments: Makes its arguments.
            tensors_in: Checks its result, and lists the tensors in it.
        """
        body = cls(operands, owner)
        ACTIVE.session = body
        try:
            with body.table.state.unchanged():
                results = tensors_in(function(*arguments(body)))
                numbers = tuple(as_row(body, result)._number for result in results)
        except NeedsPython as error:
            problem = f"autobatch: {owner} {str(error).removeprefix('it ')}"
            hint = "carry it in the state; the function is called once, not once per iteration"
            raise mismatch(RuntimeError, problem, where=body.where(), hint=hint) from None
        finally:
            ACTIVE.session = operands.session
            body.inputs.clear()  # its values refer to it: a cycle would keep both alive
        body.code = body.new_code().tolist()
        return body, numbers

    def operand(self, position: int) -> Lazy:
        """Return the value of an operand."""
        if position not in self.inputs:
            outer_value = self.operands.values[position]
            site = self.table.outside_of(self.table.row_types[outer_value._kind])
            value = self.inputs[position] = self.record(site, (), (position,))
            varies = position < self.operands.state and has_gradient(value.dtype)
            if self.grad and (varies or outer_value.requires_grad):
                self.set_needs_grad(value._number)
        return self.inputs[position]

    def foreign(self, value: Lazy) -> Lazy:
        """Capture a value of an enclosing session."""
        outer = self.operands.session
        if value._session is not outer:
            value = outer.foreign(value)
        return self.operand(self.operands.position_of(value))

    def outside_row(self, tensor: Tensor) -> Lazy:
        """Capture a tensor that the model did not compute."""
        value = self.operands.session.outside_row(tensor)
        return self.operand(self.operands.position_of(value, tensor))

    def number_row(self, number: float, kinds: Sequence[int]) -> Lazy:
        """Capture a Python number."""
        return self.foreign(self.operands.session.number_row(number, kinds))

    def outside_rows(self, rows: Tensor) -> list[Lazy]:
        """Capture the rows of a tensor that the model did not compute."""
        return [self.foreign(row) for row in self.operands.session.outside_rows(rows)]

    def value_of(self, value: Lazy) -> NoReturn:
        """Raise an error: the function is recorded once, for all values."""
        problem = f"autobatch: {self.owner} reads a value"
        expected = "decisions by autobatch.while_loop or cond, inside of it too"
        hint = "torch.where or cond in place of `if`; or Python's `while` in place of the loop"
        raise mismatch(RuntimeError, problem, expected, repr(value), where=self.where(), hint=hint)

    def emit(self, name: str, value: TensorOrLazy) -> NoReturn:
        """Raise an error: how often the function runs is not known."""
        problem = f"autobatch.emit: {self.owner} emits {name!r}"
        hint = "carry it in the state, such as on an autobatch.Stack, and emit it afterwards"
        raise mismatch(RuntimeError, problem, where=self.where(), hint=hint)


class Inner(NamedTuple):
    """What a call of a program does: a signature, and how many rows each ragged argument has."""

    spec: Spec
    lengths: tuple[int, ...] = ()


def program_of(body: Body, outputs: Sequence[int]) -> Program:
    """Return what a body has recorded and these values depend on.

    The operands of the program are those of the body.
    """
    number_of_value = dict[int, int]()
    num_operands = len(body.operands.values)
    num_values = num_operands
    calls = list[Call]()
    for group in _grouped(_needed(body, outputs)):
        spec = group[0].site.spec
        if spec is None:  # an operand, which its record names
            begin = group[0].results[0]
            number_of_value[begin] = body.code[begin + 1]
            continue
        lengths = list[int]()
        arguments = list[int]()
        for record in group:
            lengths += record.lengths
            arguments += [number_of_value[value] for value in record.reads]
        inner = Inner(_joined(spec, len(group)), tuple(lengths))
        calls.append(Call(inner, tuple(arguments)))
        for record in group:
            for value in record.results:
                number_of_value[value] = num_values
                num_values += 1
    return Program(num_operands, tuple(calls), tuple(number_of_value[each] for each in outputs))


def specs_of(*programs: Program) -> tuple[Spec, ...]:
    """Return the signatures of the calls of programs."""
    return tuple(inner.spec for program in programs for inner in program.operations)


def runner_of(
    program: Program, table: SignatureTable
) -> Callable[[Sequence[Tensor | None], int], list[Tensor]]:
    """Return a function of the rows of all operands that it reads, and their number."""
    calls = [Call(_batched_call(inner, table), reads) for inner, reads in program.calls]
    prepared = Program(program.num_operands, tuple(calls), program.outputs)
    return partial(prepared.run, _itself)


def _itself(call: BatchedCall) -> BatchedCall:
    return call


def _batched_call(inner: Inner, table: SignatureTable) -> BatchedCall:
    """Return the function that makes one call of a program, on ``size`` rows of each value.

    A program lists the values of a ragged argument one by one; they are joined for the call.
    """
    site = table.by_spec[inner.spec]
    form = table.form_of(site)
    has_one_result = len(site.kinds) == 1
    device = table.engine.device

    def call(arguments: Sequence[Tensor | RaggedRows], size: int) -> Sequence[Tensor]:
        results = form(*arguments)
        return (results,) if has_one_result else results

    def call_with_ragged(values: Sequence[Tensor], size: int) -> Sequence[Tensor]:
        values_left = iter(values)
        lengths_left = iter(inner.lengths)
        arguments = list[Tensor | RaggedRows]()
        for input_type in inner.spec.inputs:
            if isinstance(input_type, Ragged):
                own_values = list(islice(values_left, next(lengths_left)))
                arguments.append(_ragged_rows(own_values, input_type, size, device))
            else:
                arguments.append(next(values_left))
        return call(arguments, size)

    has_ragged = any(isinstance(input_type, Ragged) for input_type in inner.spec.inputs)
    return call_with_ragged if has_ragged else call


def _ragged_rows(
    values: Sequence[Tensor], argument: Ragged, size: int, device: torch.device
) -> RaggedRows:
    """Give every call of a step one row of each value."""
    (row_type,) = parts_of(argument.row_type)
    calls = torch.arange(size, device=device).repeat_interleave(len(values))
    if values:
        rows = torch.stack(list(values), 1).flatten(0, 1)
    else:
        rows = torch.empty((0, *row_type.shape), dtype=row_type.dtype, device=device)
    return RaggedRows(rows, calls, size)


class _BodyRecord:
    """One record of a body: its site, what it reads, and the numbers of its results."""

    def __init__(self, table: SignatureTable, record: DecodedRecord) -> None:
        self.site: SignatureSite = table.sites[record.number]
        self.results = range(record.begin, record.begin + len(self.site.kinds))
        self.may_join = False  # with others of its site, as reads of stacks do
        self.reads = list[int]()
        self.lengths = list[int]()  # of its ragged arguments
        if (spec := self.site.spec) is not None:
            self.may_join = isinstance(spec.target, Own) and spec.target.joined(2) is not None
            self.reads += chain(*record.arguments)
            self.lengths += [
                len(values)
                for values, input_type in zip(record.arguments, spec.inputs, strict=False)
                if isinstance(input_type, Ragged)
            ]


def _needed(body: Body, outputs: Sequence[int]) -> list[_BodyRecord]:
    """List the records of a body that make operands, or values on which the outputs depend."""
    records = [_BodyRecord(body.table, each) for each in records_of(body.table.recorded, body.code)]
    needed = set(outputs)
    kept = list[_BodyRecord]()
    for record in reversed(records):
        if record.site.spec is None or not needed.isdisjoint(record.results):
            needed.update(record.reads)
            kept.append(record)
    return kept[::-1]


def _grouped(records: Sequence[_BodyRecord]) -> Iterator[list[_BodyRecord]]:
    """Order records so that calls which can be made at once are together: they wait for others."""
    waiting = [*records]
    computed = set[int]()  # values
    while waiting:
        blocked = list[_BodyRecord]()
        for record in waiting:
            if record.may_join or not computed.issuperset(record.reads):
                blocked.append(record)
            else:
                yield [record]
                computed.update(record.results)

        ready = [record for record in blocked if computed.issuperset(record.reads)]
        joined = [record for record in ready if record.site is ready[0].site]
        if joined:
            yield joined
        for record in joined:
            computed.update(record.results)
        waiting = [record for record in blocked if record not in joined]


def _joined(spec: Spec, calls: int) -> Spec:
    """Return the signature of several calls at once."""
    target = None
    if calls > 1 and isinstance(spec.target, Own):
        target = spec.target.joined(calls)
    if target is None:
        return spec
    inputs = spec.inputs * calls
    return Spec((target, *inputs), target, NO_TEMPLATE, inputs, no_grad=False)


# Loops and branches.


def own_form(form: Callable[..., Any], types: Sequence[TensorType]) -> Examined:
    """Describe a form that returns a tensor of a type, or a tuple of tensors of several."""
    structure = LEAF if len(types) == 1 else tree_flatten(tuple(types))[1]
    # A loop of no iterations returns its state, and a stack what was pushed.
    return Examined(form, "rows", [*types], structure, is_view=True)


@dataclass(frozen=True)
class Loop(Own):
    """A loop: the rows whose condition holds run the body, the others are set aside."""

    condition: Program
    body: Program
    width: int  # number of operands that are the state
    most: int  # iterations
    __name__ = "while_loop"

    @property
    def specs(self) -> tuple[Spec, ...]:  # type: ignore[override]
        """Signatures of the calls inside."""
        return specs_of(self.condition, self.body)

    def examined(self, table: SignatureTable, spec: Spec) -> Examined:
        """Return the form on stacked rows."""
        condition = runner_of(self.condition, table)
        body = runner_of(self.body, table)
        width = self.width
        most = self.most
        used = {*self.condition.operands_read, *self.body.operands_read}
        captured = [number for number in range(width, len(spec.inputs)) if number in used]
        columns = [[*range(width), *captured], range(width)]  # of rows that go on, and that end

        def form(*rows: Tensor) -> Tensor | tuple[Tensor, ...]:
            operands: list[Any] = [*rows]
            size = rows[0].size(0)
            rows_running: Tensor | None = None  # numbers of the rows that go on; None for all
            places = list[Tensor]()  # of rows that have ended
            pieces = list[Sequence[Tensor]]()  # their states
            for _ in range(most + 1):
                goes_on = condition(operands, size)[0].reshape(-1)
                running = goes_on.nonzero().squeeze(1)
                if not running.numel():
                    break
                if running.numel() < size:
                    ended = goes_on.logical_not().nonzero().squeeze(1)
                    operands, state_of_ended = split([running, ended], columns, operands)
                    pieces.append(state_of_ended[:width])  # type: ignore[arg-type]
                    places.append(ended if rows_running is None else rows_running[ended])
                    rows_running = running if rows_running is None else rows_running[running]
                    size = running.numel()
                operands[:width] = body(operands, size)
            else:
                raise endless(most, size)

            state: Sequence[Tensor] = operands[:width]
            if rows_running is not None:
                state = merge([*places, rows_running], [*pieces, state])
            return tuple(state) if width > 1 else state[0]

        types = [row_type for row_type in spec.inputs[:width] if isinstance(row_type, TensorType)]
        return own_form(form, types)


@dataclass(frozen=True)
class Choice(Own):
    """Two branches, each of which runs on the rows that chose it."""

    if_true: Program
    if_false: Program
    types: tuple[TensorType, ...]  # of the results
    __name__ = "cond"

    @property
    def specs(self) -> tuple[Spec, ...]:  # type: ignore[override]
        """Signatures of the calls inside."""
        return specs_of(self.if_true, self.if_false)

    def examined(self, table: SignatureTable, spec: Spec) -> Examined:
        """Return the form on stacked rows."""
        if_true = runner_of(self.if_true, table)
        if_false = runner_of(self.if_false, table)
        columns = [self.if_true.operands_read, self.if_false.operands_read]
        has_several = len(self.types) > 1

        def form(choice: Tensor, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
            size = choice.size(0)
            is_true = choice.reshape(-1)
            chosen = is_true.nonzero().squeeze(1)
            others = is_true.logical_not().nonzero().squeeze(1)
            results: Sequence[Tensor]
            if not others.numel():
                results = if_true(operands, size)
            elif not chosen.numel():
                results = if_false(operands, size)
            else:
                of_chosen, of_others = split([chosen, others], columns, operands)
                results_of_chosen = if_true(of_chosen, chosen.numel())
                results_of_others = if_false(of_others, others.numel())
                results = merge([chosen, others], [results_of_chosen, results_of_others])
            return tuple(results) if has_several else results[0]

        return own_form(form, self.types)


def endless(most: int, rows: int) -> RuntimeError:
    """Create the error for a loop that does not end."""
    problem = f"autobatch.while_loop: not finished after {most} iterations"
    got = f"{rows} examples that go on"
    hint = "max_iterations=, if so many are meant; else a condition that becomes false"
    return mismatch(RuntimeError, problem, got=got, hint=hint)


# Parts of rows that go different ways: each part is an index vector, and no row is in two parts.


def split(
    parts: Sequence[Tensor], columns: Sequence[Sequence[int]], tensors: Sequence[Tensor | None]
) -> list[list[Tensor | None]]:
    """Take the rows of each part.

    Args:
        parts: The rows of each part.
        columns: The numbers of the tensors of which each part takes rows.
        tensors: Stacked rows ``[row, ...]``.

    Returns:
        For each part its rows of all tensors, ``None`` in place of those that it does not take.
    """
    used = sorted({number for numbers in columns for number in numbers})
    place_of_number = {number: place for place, number in enumerate(used)}
    places = [[place_of_number[number] for number in numbers] for numbers in columns]
    tensors_used: list[Tensor] = [tensors[number] for number in used]  # type: ignore[misc]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_used):
        taken = iter(_Split.apply(parts, places, *tensors_used))
    else:
        taken = iter(_taken(parts, places, tensors_used))

    rows_of_parts = list[list[Tensor | None]]()
    for numbers in columns:
        rows: list[Tensor | None] = [None] * len(tensors)
        for number in numbers:
            rows[number] = next(taken)
        rows_of_parts.append(rows)
    return rows_of_parts


def merge(parts: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Put the rows of all parts back in order; for each part, as many tensors."""
    flat = [tensor for piece in pieces for tensor in piece]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat):
        merged: tuple[Tensor, ...] = _Merge.apply(parts, len(pieces[0]), *flat)
        return merged
    return _merged(parts, len(pieces[0]), flat)


class _SplitContext(FunctionCtx):
    """What the backward pass of a split needs."""

    parts: Sequence[Tensor]
    columns: Sequence[Sequence[int]]
    shapes: list[torch.Size]
    are_needed: list[bool]  # of each tensor, whether it has a gradient


class _Split(torch.autograd.Function):
    """Rows of tensors, part by part."""

    @staticmethod
    def forward(
        ctx: _SplitContext,
        parts: Sequence[Tensor],
        columns: Sequence[Sequence[int]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.columns = columns
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.are_needed = [tensor.requires_grad for tensor in tensors]
        return _returned(ctx, _taken(parts, columns, tensors))

    @staticmethod
    def backward(ctx: _SplitContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of each tensor, with their rows
        rest = iter(gradients)
        for part, numbers in zip(ctx.parts, ctx.columns, strict=True):
            for number in numbers:
                if (gradient := next(rest)) is not None:
                    pieces.setdefault(number, []).append((part, gradient))

        totals = list[Tensor | None]()
        for number, (shape, is_needed) in enumerate(zip(ctx.shapes, ctx.are_needed, strict=True)):
            if is_needed and number in pieces:
                totals.append(_joined_gradient(pieces[number], shape))
            else:
                totals.append(None)
        return None, None, *totals


def _joined_gradient(pieces: Sequence[tuple[Tensor, Tensor]], shape: torch.Size) -> Tensor:
    _, like = pieces[0]
    is_whole = sum(part.numel() for part, _ in pieces) == shape[0]
    total = like.new_empty(shape) if is_whole else like.new_zeros(shape)
    for part, gradient in pieces:
        total.index_copy_(0, part, gradient)
    return total


def _returned(ctx: FunctionCtx, results: list[Tensor]) -> tuple[Tensor, ...]:
    """Say how gradients of the results are passed to the backward pass."""
    ctx.set_materialize_grads(False)
    if plain := [rows for rows in results if not has_gradient(rows.dtype)]:
        ctx.mark_non_differentiable(*plain)
    return tuple(results)


def _taken(
    parts: Sequence[Tensor], columns: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    return [
        tensors[number].index_select(0, part)
        for part, numbers in zip(parts, columns, strict=True)
        for number in numbers
    ]


class _MergeContext(FunctionCtx):
    """What the backward pass of a merge needs."""

    parts: Sequence[Tensor]
    width: int
    needs_input_grad: tuple[bool, ...]  # which torch sets


class _Merge(torch.autograd.Function):
    """Tensors whose rows were split, from those of all parts."""

    @staticmethod
    def forward(
        ctx: _MergeContext, parts: Sequence[Tensor], width: int, *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.width = width
        return _returned(ctx, _merged(parts, width, pieces))

    @staticmethod
    def backward(ctx: _MergeContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients_of_pieces = list[Tensor | None]()
        are_needed = iter(ctx.needs_input_grad[2:])
        for part in ctx.parts:
            for gradient in gradients:
                is_needed = next(are_needed)
                rows = None if gradient is None or not is_needed else gradient.index_select(0, part)
                gradients_of_pieces.append(rows)
        return None, None, *gradients_of_pieces


def _merged(parts: Sequence[Tensor], width: int, pieces: Sequence[Tensor]) -> list[Tensor]:
    order = torch.cat(list(parts))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return [torch.cat(list(pieces[n::width])).index_select(0, place) for n in range(width)]
