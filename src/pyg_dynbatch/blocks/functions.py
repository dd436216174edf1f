"""Blocks that call batched functions, and the inference of result types by calling them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from pyg_dynbatch.blocks.block import Block, conversion
from pyg_dynbatch.blocks.code import Code, flattened, packed
from pyg_dynbatch.blocks.layers import type_of_rows
from pyg_dynbatch.blocks.types import IOBase, ResultType, SequenceType, TensorType, TupleType
from pyg_dynbatch.core import row_law
from pyg_dynbatch.core.errors import mismatch_text
from pyg_dynbatch.core.listing import ChangesArgument, ChangesState, Listing, NeedsPython, listed
from pyg_dynbatch.core.operation import Ragged, row_type_of
from pyg_dynbatch.core.shadow import (
    draw,
    draws_on_host,
    make_extreme,
    module_of,
    set_mode,
    shadow,
    tensors_of,
    undisturbed,
)
from pyg_dynbatch.core.types import RaggedRows, has_gradient


def nest_rows(result_type: ResultType, rows: Iterator[Any]) -> Any:
    """Nest rows as in a type; a sequence of tuples becomes one ``RaggedRows`` of a tuple."""
    if isinstance(result_type, TupleType):
        return tuple(nest_rows(item, rows) for item in result_type)
    if isinstance(result_type, SequenceType):
        ragged = [next(rows) for _ in result_type.terminal_types()]
        inside = nest_rows(result_type.element_type, iter([each.rows for each in ragged]))
        return ragged[0]._replace(rows=inside)
    return next(rows)


def infer_output_type(block: Block, called: Callable[..., Any], input_type: Any) -> ResultType:
    """Call a function on two and on three rows, and return the type of the results."""
    if callable(build := getattr(called, "build", None)):
        # Parameters use the user's random state, which the calls below do not change.
        build(input_type)
    owner, found = module_of(called) or nn.Module(), []
    like = next(owner.parameters(), torch.empty(0))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for size in (2, 3):
            zeros = [_zeros(kind, size, like.device) for kind in tensors_in(input_type)]
            try:
                if any(map(is_lazy, tensors_of(owner))):
                    NestedCall(called, input_type).nested(*zeros)  # which gives it parameters
                copied = set_mode(shadow(called), False)
                found.append(NestedCall(copied, input_type).nested(*zeros))
            except Exception as error:
                _fail_to_infer(block, input_type, f"{type(error).__name__}: {error}")
    problems = list(map(_problem_with, *map(flattened, found)))
    if any(problems) or not problems:
        got = next(filter(None, problems), "nothing, where tensors were expected")
        _fail_to_infer(block, input_type, got)
    return type_of_rows(found[0])


def _fail_to_infer(block: Block, input_type: ResultType, got: str) -> NoReturn:
    expected = "a function on batched tensors: first axis one row per example"
    block._fail(f"its function cannot be called with {input_type}", expected, got)


def _zeros(kind: Any, num_calls: int, device: torch.device) -> Any:
    """An argument of zeros for some calls, with two rows per call if it is ragged."""
    row: Any = row_type_of(kind)
    size = 2 * num_calls if isinstance(kind, Ragged) else num_calls
    rows = torch.zeros((size, *row.shape), dtype=row.dtype, device=device)
    return _argument(kind, rows, [2] * num_calls)


def _argument(kind: Any, rows: Tensor, lengths: Sequence[int]) -> Any:
    """Rows as an argument of some calls; a ragged one has this many rows per call."""
    if not isinstance(kind, Ragged):
        return rows
    calls = torch.arange(len(lengths), device=rows.device)
    counts = torch.tensor(lengths, device=rows.device)
    return RaggedRows(rows, calls.repeat_interleave(counts), len(lengths))


def _problem_with(two: Any, three: Any) -> str:
    """Describe why results for two and for three rows are no batches of rows of one type."""
    if not isinstance(two, Tensor):
        return f"{type(two).__name__}, which is not a tensor"
    if two.dim() == 0:
        return "a scalar, without a batch axis"
    if (two.size(0), three.size(0)) != (2, 3):
        return f"{two.size(0)} and {three.size(0)} rows for 2 and 3 rows"
    is_equal = two.shape[1:] == three.shape[1:]
    return "" if is_equal else f"rows of {list(two.shape[1:])} and of {list(three.shape[1:])}"


def judge_rows(block: Block, called: Callable[..., Any], input_type: ResultType) -> bool:
    """Raise an error if a function mixes rows; return whether it draws random numbers."""
    owner, random = module_of(called), row_law.draws_random_numbers(called)
    device = next(owner.parameters(), torch.empty(0)).device if owner else torch.device("cpu")
    failed: list[Exception] = []
    with undisturbed(device):
        for training in (True, False) if owner else (False,):

            def function(fresh: bool, single: bool = False, training: bool = training) -> nn.Module:
                copied = set_mode(shadow(called, fresh), training)
                whole = NestedCall(copied, input_type)
                return whole.float() if single else whole

            if got := row_law.normalizes_over_rows(function(False)):
                block._fail(row_law.NORMALIZES, got=got, hint=row_law.OTHER_NORMS)
            try:
                given = input_type, device, random and training, failed
                draws, is_right = _judge(function, *given)
                if failed and owner:  # perhaps converted to double precision since it got a type
                    failed.clear()
                    draws, is_right = _judge(partial(function, single=True), *given)
            except NeedsPython as error:
                expected = "functions of torch that return tensors"
                hint = "torch.where(condition, a, b) or torch.rand; td.OneOf to decide by the input"
                does = str(error).removeprefix("it ") or "reads values of its rows"
                block._fail(f"its function {does}", expected, hint=hint)
            except ChangesState:
                expected = "the same result every time"
                hint = "keep no state between calls; weight_norm in place of spectral_norm"
                block._fail("its function changes its state when it is called", expected, hint=hint)
            random |= draws
            if not is_right:
                expected = "a function of each row by itself"
                got = f"an error for one row, not for three: {failed[0]}" if failed else ""
                hint = "dim=-1 in place of dim=0; nn.LayerNorm in place of nn.BatchNorm1d"
                block._fail("its function mixes the rows of a batch", expected, got, hint=hint)
    if failed:
        what = "Function: whether rows depend on each other cannot be checked"
        expected, got = "a function of each row by itself", f"an error on random rows: {failed[0]}"
        text = mismatch_text(what, expected, got, where=f"block {block._path()}")
        warnings.warn(text, stacklevel=2)
    return random


class _ThreeCalls:
    """Run a function on random rows of some of three calls; ragged arguments have several each."""

    def __init__(self, function: Callable[..., Any], kinds: list[Any], device: Any) -> None:
        self.kinds = kinds
        self.is_ragged = any(isinstance(kind, Ragged) for kind in kinds)
        self.lengths = (2, 1, 3) if self.is_ragged else (1, 1, 1)
        self.function, self.device = function, device

    def draw(self, attempt: int, most: int) -> list[list[Tensor]]:
        """Draw the rows of each call for each argument; integers can be small indices."""
        values = []
        for kind in self.kinds:
            row: Any = row_type_of(kind)
            lengths = self.lengths if isinstance(kind, Ragged) else (1, 1, 1)
            number = attempt if has_gradient(row.dtype) else 1
            drawn = [draw((n, *row.shape), row.dtype, self.device, number, most) for n in lengths]
            values.append(drawn)
        return values

    def __call__(self, values: list[list[Tensor]], calls: Sequence[int] = (0, 1, 2)) -> Any:
        """Run the function on the rows of some calls."""
        rows = [torch.cat([value[n] for n in calls]) for value in values]
        lengths = [self.lengths[n] for n in calls]
        pairs = zip(self.kinds, rows, strict=True)
        return self.function(*(_argument(kind, row, lengths) for kind, row in pairs))


# The distribution of rows, by what a call is multiplied, and the bound of integers, which can be
# indices of a small table. The rows of one call are beyond all numbers with which the function may
# compare them, first by far, then by so little that a result of one more is seen: the last call,
# since running sums lose the digits of what follows huge rows.
_DRAWS = (0, 0.0, 3), (3, 0.0, 3), (0, 1e4, 2), (0, -1e4, 1), (0, 3.0, 1), (0, -3.0, 1), (0, 0.0, 1)


def _judge(
    make: Any, input_type: ResultType, device: torch.device, draws: bool, failed: list[Exception]
) -> tuple[bool, bool]:
    """Return whether a function draws random numbers, and whether it obeys the row law."""
    # With parameters drawn anew.
    run, errors, scale = _ThreeCalls(make(True), tensors_in(input_type), device), [], 0.0
    for attempt, factor, most in _DRAWS:
        values, others = run.draw(attempt, most), run.draw(attempt, most)
        for value in values if scale else ():
            if has_gradient(value[-1].dtype):
                value[-1].copy_(1 + value[-1].abs())
            make_extreme(value[-1], factor * scale)
        try:
            whole = run(values)
        except Exception as error:  # noqa: BLE001 - part of the warning
            errors.append(error)
            continue
        try:
            ones = [run(values, [n]) for n in range(3)]
        except Exception as error:  # noqa: BLE001 - part of the message
            failed.append(error)
            return draws, False
        if not scale:
            if draws_on_host(partial(run, values)):
                raise NeedsPython("it draws numbers of Python or NumPy, or seeds a generator")
            with suppress(Exception), Listing([]) as listing:  # it may read values
                run(values)
            scale = row_law.largest(listing.calls)
            if not run.is_ragged:
                draws, verdict = _judge_by_listing(make, run, values, draws)
                if verdict is not None:
                    return draws, verdict
        draws |= not row_law.agree(whole, run(values))
        parts = [tree_map_only(Tensor, itemgetter(slice(n, n + 1)), whole) for n in range(3)]
        if not (_is_independent(run, values, others) if draws else row_law.agree(ones, parts)):
            return draws, False
    failed += errors[:1] if len(errors) == len(_DRAWS) else []
    return draws, True


def _judge_by_listing(
    make: Any, run: _ThreeCalls, values: list[list[Tensor]], draws: bool
) -> tuple[bool, bool | None]:
    """Judge a function of plain rows by the functions of torch that it calls; None if it draws."""
    rows, function, verdict = [torch.cat(value) for value in values], make(False), None
    try:
        draws |= any(call.random for call in listed(function, rows)[0].calls)
        verdict = row_law.judge(function, rows, batched=True)
    except ChangesArgument:
        return draws, True  # refused when it is run
    except NeedsPython:
        if not draws:  # else it may read what it draws
            raise
    if verdict is None and not draws:
        operands = [row_law.Operand(kind.shape, kind.dtype, True) for kind in run.kinds]
        check = row_law.Check(operands, run.device, batched=True, in_python=True)
        fresh = row_law.flat(run.function)
        verdict = row_law.obeys(fresh, fresh, 3, check) != []
    return draws, verdict


def _is_independent(run: _ThreeCalls, values: list[Any], others: list[Any]) -> bool:
    """Return whether, with the same random numbers, no call depends on the first or the last."""
    for changed, kept in ((0, 2), (2, 0)):
        mixed = [list(column) for column in values]
        for column, other in zip(mixed, others, strict=True):
            column[changed] = other[changed]
        found = []
        for given in (values, mixed):
            torch.manual_seed(0)
            found.append(tree_map_only(Tensor, itemgetter([kept]), run(given)))
        if not row_law.agree(*found):
            return False
    return True


class NestedCall(nn.Module):
    """Call a function with arguments nested as in the input type of its block."""

    def __init__(self, called: Callable[..., Any], input_type: ResultType) -> None:
        super().__init__()
        self.called, self.input_type = called, input_type
        if (owner := module_of(called)) is not called:
            # The module of a method is trained and moved.
            self.owner = owner

    def nested(self, *rows: Any) -> Any:
        """Nest the rows, and call the function."""
        nested = nest_rows(self.input_type, iter(rows))
        several = isinstance(self.input_type, TupleType)
        return self.called(*nested) if several else self.called(nested)

    def forward(self, *rows: Any) -> Any:
        """Nest the rows, call the function, and flatten its results."""
        found = tuple(flattened(self.nested(*rows)))
        return found if len(found) > 1 else found[0]


def tensors_in(kind: ResultType, ragged: bool = False) -> list[Any]:
    """Row types of all tensors in a type; those in sequences are ragged."""
    if isinstance(kind, TensorType):
        return [Ragged(kind.row_type) if ragged else kind.row_type]
    ragged = ragged or isinstance(kind, SequenceType)
    return [found for part in kind._inside() for found in tensors_in(part, ragged)]


def emit_call(
    code: Code,
    called: Callable[..., Any],
    input_type: ResultType,
    output_type: ResultType,
    value: Any,
    *,
    name: str | None = None,
    random: bool | None = False,
) -> Any:
    """Write a call of a function, and return its output value."""
    plain = isinstance(input_type, TensorType) and isinstance(output_type, TensorType)
    module: Any = called
    if not (plain and isinstance(called, nn.Module)):
        identity = called if hasattr(called, "__self__") else id(called)
        key = (identity, input_type, output_type)
        module = code.model.unique(key, lambda: NestedCall(called, input_type))
    ins, outs = map(tensors_in, (input_type, output_type))
    signature = code.model.signature(module, ins, outs, name, random)
    arguments = _arguments(code, input_type, value)
    return output_type.unflatten(code.record_call(signature, arguments), None)


def _arguments(code: Code, kind: Any, value: Any) -> list[str]:
    """Write each argument as in a record: a value, or the number of values and these."""
    if isinstance(kind, TensorType):
        return [value]
    if isinstance(kind, TupleType):
        parts = zip(kind, value, strict=True)
        return [found for part in parts for found in _arguments(code, *part)]
    lists, element = [value], code.new(kind.element_type, "e")
    if not isinstance(element, str):
        written = (f"[{part} for {packed(element)} in {value}]" for part in flattened(element))
        lists = [code.fresh("s", each) for each in written]
    return [f"len({rows}), *{rows}" for rows in lists]


def _check_input(block: Block, input_type: ResultType, *, sequences: bool = False) -> None:
    """Raise an error if an input does not consist of tensors (and one sequence, if allowed)."""
    kinds = list(input_type.walk())
    allowed = {TensorType, TupleType, *([SequenceType] if sequences else [])}
    if not {type(kind) for kind in kinds} <= allowed:
        expected = "a tensor or a tuple of tensors" + ", and a sequence" * sequences
        hint = "td.Scalar(), td.Vector(n) or td.Tensor(shape) in front of it"
        block._fail("the input does not consist of tensors", expected, input_type, hint=hint)
    if not input_type.terminal_types():
        block._fail("the input contains no tensors", "at least one tensor", input_type)
    if sum(isinstance(kind, SequenceType) for kind in kinds) > 1:
        block._fail("the input has two sequences", "one sequence", input_type)


class Function(Block):
    """Call a batched function on tensors; only functions compute on the device.

    Args:
        tf_fn: A function or module on batched tensors, one row per example. It takes a tensor, or
            the items of a tuple as separate arguments, and returns a tensor or a tuple of tensors.
            The module of a method is trained and moved, modules in a closure are not.
        infer_output_type: Find the output type by calling it on a few rows of zeros.

    Raises:
        TypeError: If it cannot be called; and, as soon as types are known, if the input holds
            anything but tensors, or the result is not a tensor, has no batch axis or a fixed one.

    Example:
        >>> import torch
        >>> from pyg_dynbatch import blocks as td
        >>> td.Function(torch.add)
        Function(add)
        >>> (td.AllOf(td.Scalar(), td.Scalar()) >> td.Function(torch.add)).eval(2.0)
        tensor(4.)
    """

    _takes_sequence = False
    _output_kinds = (TensorType, TupleType)

    def __init__(self, tf_fn: Any, name: Any = None, infer_output_type: bool = True) -> None:
        super().__init__(name=name)
        self._check_callable("tf_fn", tf_fn, "a function or module on batched tensors")
        self.tf_fn, self._infers = tf_fn, infer_output_type
        self._draws: bool | None = None  # random numbers; found out when it is compiled
        # A layer has an input and an output type, too.
        self._layer = tf_fn if isinstance(tf_fn, IOBase) else None
        if self._layer is not None:
            self._layer._dependents.append(self)

    def _infer(self) -> None:
        if self._layer is not None:
            self.set_io_types(self._layer)
        if self.input_type is None:
            return
        _check_input(self, self.input_type, sequences=self._takes_sequence)
        if self._layer is not None:
            self._layer.set_input_type(self.input_type)
        if self._infers and not getattr(self._layer, "has_types", False):
            self._infers = False
            self.set_output_type(infer_output_type(self, self.tf_fn, self.input_type))
        if self._layer is not None:
            self._layer.set_output_type(self.output_type)

    def _emit(self, code: Code, value: Any) -> Any:
        types = self._known("input"), self._known("output")
        if self._draws is None:
            self._draws = judge_rows(self, self.tf_fn, types[0])
        if size := getattr(self._layer, "index_size", None):
            code.bound_data(value, size)
        random = self._draws or None  # also if an attribute says so
        return emit_call(code, self.tf_fn, *types, value, name=self.name, random=random)


conversion.register(nn.Module, Function)


class Segment(Function):
    """Call a function once on all elements of a sequence: child-sum, attention, pooling.

    The sequence, alone or as one item of a tuple, is passed as
    :class:`~pyg_dynbatch.core.types.RaggedRows`; for a sequence of tuples, its ``rows`` are a
    tuple. A sequence of any length is a single call.

    Args:
        tf_fn: Takes batched rows and ``RaggedRows``; a call may have no rows.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> add_up = td.Segment(lambda ragged: ragged.sum())
        >>> (td.Map(td.Vector(2)) >> add_up).eval([[1, 2], [3, 4]])
        tensor([4., 6.])
    """

    _takes_sequence = True

    def __init__(self, tf_fn: Any, name: Any = None) -> None:
        super().__init__(tf_fn, name)
