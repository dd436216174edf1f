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
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyg_dynbatch.autobatch.forms import Examined
from pyg_dynbatch.autobatch.lazy import ACTIVE, Lazy, NeedsPython
from pyg_dynbatch.autobatch.ragged import as_row
from pyg_dynbatch.autobatch.recorder import Recorder
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import Own, SignatureSite, SignatureTable, Spec
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.operation import Ragged
from pyg_dynbatch.core.program import BatchedCall, Call, Program
from pyg_dynbatch.core.recording import DecodedRecord, records_of
from pyg_dynbatch.core.types import RaggedRows, TensorType, has_gradient


class Operands:
    """What the bodies of one loop or one choice read: values of the session that records it."""

    def __init__(self, session: Session, values: Sequence[Lazy], state: int = 0) -> None:
        self.session = session
        self.values = [*values]
        self.state = state  # how many of them change from one iteration to the next
        self.captured: dict[Any, tuple[int, Any]] = {}  # positions, and what is kept alive

    def position_of(self, value: Lazy, source: Tensor | None = None) -> int:
        """Return the position of a value that stays the same, and that of its tensor if it has one.

        Not by the value alone: a number that happens to equal another would change the program.
        """
        key = value._number if source is None else (id(source),)
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
        for name in ("table", "shared", "trained", "device", "inference", "can_run", "example"):
            setattr(self, name, getattr(outer, name))
        self.operands = operands
        self.owner = owner
        self.code = list[int]()  # when the function has been recorded
        self.inputs: dict[int, Lazy] = {}

    @classmethod
    def of(
        cls, operands: Operands, owner: str, function: Callable[..., Any],
        arguments: Callable[["Body"], Sequence[Any]], leaves: Callable[[Any], Sequence[Any]],
    ) -> "tuple[Body, tuple[int, ...]]":  # fmt: skip
        """Record a function; also return the numbers of its results.

        Args:
            operands: What it may read.
            owner: Names it in messages.
            function: Called once.
            arguments: Makes its arguments.
            leaves: Checks its result, and lists the tensors in it.
        """
        body = cls(operands, owner)
        ACTIVE.session = body
        try:
            with body.table.state.unchanged():
                found = leaves(function(*arguments(body)))
                numbers = tuple(as_row(body, leaf)._number for leaf in found)
        except NeedsPython as error:
            what = f"autobatch: {owner} {str(error).removeprefix('it ')}"
            hint = "carry it in the state; the function is called once, not once per iteration"
            raise mismatch(RuntimeError, what, where=body.where(), hint=hint) from None
        finally:
            ACTIVE.session = operands.session
            body.inputs.clear()  # which refer to the session
        body.code = body.new_code().tolist()
        return body, numbers

    def operand(self, position: int) -> Lazy:
        """Return the value of an operand."""
        if position not in self.inputs:
            given = self.operands.values[position]
            site = self.table.outside_of(self.table.row_types[given._kind])
            value = self.inputs[position] = self.record(site, (), (position,))
            varies = position < self.operands.state and has_gradient(value.dtype)
            if self.grad and (varies or given.requires_grad):
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
        what = f"autobatch: {self.owner} reads a value"
        wanted = "decisions by autobatch.while_loop or cond, inside of it too"
        hint = "torch.where or cond in place of `if`; or Python's `while` in place of the loop"
        raise mismatch(RuntimeError, what, wanted, repr(value), where=self.where(), hint=hint)

    def emit(self, name: str, value: Any) -> NoReturn:
        """Raise an error: how often the function runs is not known."""
        what = f"autobatch.emit: {self.owner} emits {name!r}"
        hint = "carry it in the state, such as on an autobatch.Stack, and emit it afterwards"
        raise mismatch(RuntimeError, what, where=self.where(), hint=hint)


def type_of(value: Any) -> TensorType | None:
    """Return the type of a tensor or recorded value; ``None`` for anything else."""
    if type(value) is Lazy:
        row_type: TensorType = value._session.table.row_types[value._kind]
        return row_type
    return TensorType(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


_LEAF = tree_flatten(0)[1]


NODES: dict[type, Callable[[Any], Any]] = {}
"""Of classes of objects with one leaf, such as stacks: returns the form of an object, whose
``leaf_of`` returns its leaf, and which makes an object when it is called with a leaf."""
_STRUCTURES: dict[Any, Any] = {}  # by their forms
_NESTED: dict[int, Any] = {}  # the form and the structure itself, by its identity
_OTHER = object()


def flattened(value: Any) -> tuple[list[Any], Any]:
    """List the tensors in a value; also return its structure."""
    form = _form_of(value)
    leaves = list[Any]()
    if form is None:
        return [value], _LEAF
    if form is _OTHER:
        return tree_flatten(value)
    _list_leaves(value, form, leaves)
    structure = _STRUCTURES.get(form)
    if structure is None:
        if len(_STRUCTURES) > 1000:
            _STRUCTURES.clear()
            _NESTED.clear()
        structure = tree_flatten(_filled(form, iter(leaves)))[1]
        structure = _STRUCTURES.setdefault(form, structure)
        _NESTED[id(structure)] = form, structure
    return leaves, structure


def _form_of(value: Any) -> Any:
    """Return how tuples of tensors and objects with one leaf are nested."""
    kind = type(value)
    if kind is Lazy or kind is Tensor:
        return None
    if kind is tuple:
        form = tuple(map(_form_of, value))
        return _OTHER if _OTHER in form else form
    return NODES[kind](value) if kind in NODES else _OTHER


def _list_leaves(value: Any, form: Any, leaves: list[Any]) -> None:
    if type(form) is tuple:
        for item, part in zip(value, form, strict=True):
            _list_leaves(item, part, leaves)
    else:
        leaves.append(value if form is None else form.leaf_of(value))


def unflattened(leaves: Sequence[Any], structure: Any) -> Any:
    """Return the value of a structure."""
    if structure is _LEAF:
        return leaves[0]
    form, known = _NESTED.get(id(structure), (None, None))
    if known is not structure:
        return tree_unflatten(leaves, structure)
    return _filled(form, iter(leaves))


def _filled(form: Any, leaves: Iterator[Any]) -> Any:
    if form is None:
        return next(leaves)
    if type(form) is tuple:
        return tuple([_filled(part, leaves) for part in form])
    return form(next(leaves))


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
        lengths = tuple(size for record in group for size in record.lengths)
        arguments = [number_of_value[value] for record in group for value in record.reads]
        calls.append(Call(Inner(_joined(spec, len(group)), lengths), tuple(arguments)))
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
) -> Callable[[Sequence[Any], int], list[Tensor]]:
    """Return a function of the rows of all operands, and their number."""
    calls = [Call(_batched_call(inner, table), reads) for inner, reads in program.calls]
    prepared = Program(program.num_operands, tuple(calls), program.outputs)
    return partial(prepared.run, _itself)


def _itself(call: BatchedCall) -> BatchedCall:
    return call


def _batched_call(inner: Inner, table: SignatureTable) -> BatchedCall:
    """Return what makes a call inside of a program."""
    site = table.by_spec[inner.spec]
    form: Any = table.engine.operations[site.signature.name].module  # type: ignore[union-attr]
    has_one_result = len(site.kinds) == 1
    device = table.engine.device

    def call(arguments: Sequence[Tensor], size: int) -> Sequence[Tensor]:
        results = form(*arguments)
        return (results,) if has_one_result else results

    def call_with_ragged(arguments: Sequence[Tensor], size: int) -> Sequence[Tensor]:
        lengths = iter(inner.lengths)
        rest = iter(arguments)
        filled = list[Any]()
        for expected in inner.spec.inputs:
            if isinstance(expected, Ragged):
                rows = list(islice(rest, next(lengths)))
                filled.append(_ragged_rows(rows, expected, size, device))
            else:
                filled.append(next(rest))
        return call(filled, size)

    has_ragged = any(isinstance(expected, Ragged) for expected in inner.spec.inputs)
    return call_with_ragged if has_ragged else call


def _ragged_rows(
    values: Sequence[Tensor], argument: Ragged, size: int, device: torch.device
) -> RaggedRows:
    """Give every call of a step one row of each value."""
    row_type: Any = argument.row_type
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
        target = self.site.spec.target if self.site.spec else None
        self.may_join = isinstance(target, Own) and target.joined(2) is not None
        self.reads = [] if self.site.spec is None else list(chain(*record.arguments))
        inputs = self.site.spec.inputs if self.site.spec else ()
        self.lengths = [
            len(values)
            for values, expected in zip(record.arguments, inputs, strict=False)
            if isinstance(expected, Ragged)
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
    made = set[int]()
    while waiting:
        blocked = list[_BodyRecord]()
        for each in waiting:
            if each.may_join or not made.issuperset(each.reads):
                blocked.append(each)
            else:
                yield [each]
                made.update(each.results)
        ready = [each for each in blocked if made.issuperset(each.reads)]
        if chosen := [each for each in ready if each.site is ready[0].site]:
            yield chosen
            made.update(value for each in chosen for value in each.results)
        waiting = [each for each in blocked if each not in chosen]


def _joined(spec: Spec, calls: int) -> Spec:
    """Return the signature of several calls at once."""
    target = spec.target.joined(calls) if calls > 1 else None
    if target is None:
        return spec
    inputs = spec.inputs * calls
    return Spec((target, *inputs), target, (), inputs, no_grad=False)


class _Split(torch.autograd.Function):
    """Rows of tensors, part by part; no row is in two parts."""

    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Tensor], wanted: Sequence[Sequence[int]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.wanted = wanted
        ctx.shapes = [(tensor.shape, tensor.requires_grad) for tensor in tensors]
        ctx.set_materialize_grads(False)
        found = _taken(parts, wanted, tensors)
        if plain := [rows for rows in found if not has_gradient(rows.dtype)]:
            ctx.mark_non_differentiable(*plain)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        mine: dict[int, list[tuple[Tensor, Tensor]]] = {}
        given = iter(gradients)
        for part, wanted in zip(ctx.parts, ctx.wanted, strict=True):
            for number in wanted:
                if (gradient := next(given)) is not None:
                    mine.setdefault(number, []).append((part, gradient))
        found: list[Tensor | None] = []
        for number, (shape, needed) in enumerate(ctx.shapes):
            pairs = mine.get(number) if needed else None
            if pairs is None:
                found.append(None)
                continue
            whole = sum(part.numel() for part, _ in pairs) == shape[0]
            like = pairs[0][1]
            total = like.new_empty(shape) if whole else like.new_zeros(shape)
            for part, gradient in pairs:
                total.index_copy_(0, part, gradient)
            found.append(total)
        return None, None, *found


def _taken(
    parts: Sequence[Tensor], wanted: Sequence[Sequence[int]], tensors: Sequence[Tensor]
) -> list[Tensor]:
    return [
        tensors[number].index_select(0, part)
        for part, numbers in zip(parts, wanted, strict=True)
        for number in numbers
    ]


class _Merge(torch.autograd.Function):
    """Sequence[Tensor] whose rows were split, from those of all parts."""

    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Tensor], width: int, *pieces: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.parts = parts
        ctx.width = width
        ctx.set_materialize_grads(False)
        found = _merged(parts, width, pieces)
        if plain := [rows for rows in found if not has_gradient(rows.dtype)]:
            ctx.mark_non_differentiable(*plain)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found = [
            None if gradient is None or not needed else gradient.index_select(0, part)
            for part, needed_of in zip(
                ctx.parts, _chunks(ctx.needs_input_grad[2:], ctx.width), strict=True
            )
            for gradient, needed in zip(gradients, needed_of, strict=True)
        ]
        return None, None, *found


def _chunks(values: Sequence[Any], width: int) -> list[Sequence[Any]]:
    return [values[n : n + width] for n in range(0, len(values), width)]


def _merged(parts: Sequence[Tensor], width: int, pieces: Sequence[Tensor]) -> list[Tensor]:
    order = torch.cat(list(parts))
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    return [torch.cat(list(pieces[n::width])).index_select(0, place) for n in range(width)]


def split(
    parts: Sequence[Tensor], wanted: Sequence[Sequence[int]], tensors: Sequence[Any]
) -> list[list[Any]]:
    """Return for each part the rows of all tensors; ``None`` in place of those not wanted."""
    used = sorted({number for numbers in wanted for number in numbers})
    given = [tensors[number] for number in used]
    places = [[used.index(number) for number in numbers] for numbers in wanted]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        rows = iter(_Split.apply(parts, places, *given))
    else:
        rows = iter(_taken(parts, places, given))
    found = [[None] * len(tensors) for _ in parts]
    for row, numbers in zip(found, wanted, strict=True):
        for number in numbers:
            row[number] = next(rows)
    return found


def merge(parts: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """Put the rows of all parts back in order; for each part, as many tensors."""
    flat = [tensor for piece in pieces for tensor in piece]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat):
        merged: tuple[Tensor, ...] = _Merge.apply(parts, len(pieces[0]), *flat)
        return merged
    return _merged(parts, len(pieces[0]), flat)


def own_form(form: Callable[..., Any], types: Sequence[TensorType]) -> Examined:
    """Describe a form that returns a tensor of a type, or a tuple of tensors of several."""
    structure = _LEAF if len(types) == 1 else tree_flatten(tuple(types))[1]
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
        used = {*self.condition.operands_read, *self.body.operands_read}
        kept = [*range(self.width), *(n for n in range(self.width, len(spec.inputs)) if n in used)]
        sides = [kept, range(self.width)]
        width = self.width
        most = self.most

        def form(*rows: Tensor) -> Any:
            operands = [*rows]
            size = rows[0].size(0)
            rows_of: Tensor | None = None  # numbers of the rows that run; None for all
            places = list[Tensor]()
            pieces = list[Sequence[Tensor]]()
            for _ in range(most + 1):
                going = condition(operands, size)[0].reshape(-1)
                alive = going.nonzero().squeeze(1)
                if not alive.numel():
                    break
                if alive.numel() < size:
                    stopped = going.logical_not().nonzero().squeeze(1)
                    operands, ended = split([alive, stopped], sides, operands)
                    pieces.append(ended[:width])
                    places.append(stopped if rows_of is None else rows_of[stopped])
                    rows_of = alive if rows_of is None else rows_of[alive]
                    size = alive.numel()
                operands[:width] = body(operands, size)
            else:
                raise endless(most, size)
            found: Sequence[Tensor] = operands[:width]
            if rows_of is not None:
                found = merge([*places, rows_of], [*pieces, found])
            return tuple(found) if width > 1 else found[0]

        types: Any = spec.inputs[: self.width]
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
        used = [self.if_true.operands_read, self.if_false.operands_read]
        several = len(self.types) > 1

        def form(choice: Tensor, *operands: Tensor) -> Any:
            choice, size = choice.reshape(-1), choice.size(0)
            chosen = choice.nonzero().squeeze(1)
            others = choice.logical_not().nonzero().squeeze(1)
            results: Sequence[Tensor]
            if not others.numel():
                results = if_true(operands, size)
            elif not chosen.numel():
                results = if_false(operands, size)
            else:
                rows = [chosen, others]
                of_chosen, of_others = split(rows, used, operands)
                pieces = [if_true(of_chosen, chosen.numel()), if_false(of_others, others.numel())]
                results = merge(rows, pieces)
            return tuple(results) if several else results[0]

        return own_form(form, self.types)


def endless(most: int, rows: int) -> RuntimeError:
    """Create the error for a loop that does not end."""
    what = f"autobatch.while_loop: not finished after {most} iterations"
    got = f"{rows} examples that go on"
    hint = "max_iterations=, if so many are meant; else a condition that becomes false"
    return mismatch(RuntimeError, what, got=got, hint=hint)
