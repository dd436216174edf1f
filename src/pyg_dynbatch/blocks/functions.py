"""Blocks that call batched functions, and the inference of result types by calling them."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyg_dynbatch.blocks.block import Block, conversion
from pyg_dynbatch.blocks.code import Code, Expression, flattened, packed
from pyg_dynbatch.blocks.layers import type_of_rows
from pyg_dynbatch.blocks.types import IOBase, ResultType, SequenceType, TensorType, TupleType
from pyg_dynbatch.core.errors import mismatch_text
from pyg_dynbatch.core.modules import batch_norm_in, copy_of, module_of, set_mode, tensors_of
from pyg_dynbatch.core.operation import Ragged, draws_random_numbers, row_type_of
from pyg_dynbatch.core.types import RaggedRows, has_gradient, parts_of
from pyg_dynbatch.core.types import TensorType as RowTensorType


class Function(Block):
    """Call a batched function on tensors; only functions compute on the device.

    A Function takes stacked rows and must treat each by itself; it is tried on three rows.

    Args:
        tf_fn: A function or module on batched tensors, one row per example. It takes a tensor, or
            the items of a tuple as separate arguments, and returns a tensor or a tuple of tensors.
            The module of a method is trained and moved, modules in a closure are not.
        infer_output_type: Find the output type by calling it on a few rows of zeros.

    Raises:
        TypeError: If it cannot be called; and, as soon as types are known, if the input holds
            anything but tensors, or the result is not a tensor, has no batch axis or a fixed one;
            and, when it is first compiled, if it mixes rows or has a batch normalization.

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

    def __init__(
        self, tf_fn: Callable[..., Any], name: str | None = None, infer_output_type: bool = True
    ) -> None:
        super().__init__(name=name)
        self._check_callable("tf_fn", tf_fn, "a function or module on batched tensors")
        self.tf_fn = tf_fn
        self._infers = infer_output_type
        self._is_checked = False

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

    def _emit(self, code: Code, value: Expression) -> Expression:
        input_type = self._known("input")
        output_type = self._known("output")
        if not self._is_checked:
            check_rows(self, self.tf_fn, input_type)
            self._is_checked = True

        index_size = getattr(self._layer, "index_size", None)
        if index_size:
            code.bound_data(value, index_size)
        random = draws_random_numbers(self.tf_fn) is not False
        return emit_call(
            code, self.tf_fn, input_type, output_type, value, name=self.name, random=random
        )


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

    def __init__(self, tf_fn: Callable[..., Any], name: str | None = None) -> None:
        super().__init__(tf_fn, name)


# Calls in the written code ------------------------------------------------------------------------


def emit_call(
    code: Code,
    called: Callable[..., Any],
    input_type: ResultType,
    output_type: ResultType,
    value: Expression,
    *,
    name: str | None = None,
    random: bool = False,
) -> Expression:
    """Write a call of a function, and return its output value."""
    is_plain = isinstance(input_type, TensorType) and isinstance(output_type, TensorType)
    module = called
    if not (is_plain and isinstance(called, nn.Module)):
        # A method is a new object each time, but equal.
        identity = called if hasattr(called, "__self__") else id(called)
        key = (identity, input_type, output_type)
        module = code.model.unique(key, lambda: NestedCall(called, input_type))

    inputs = argument_types(input_type)
    signature = code.model.signature(module, inputs, _row_types(output_type), name, random)
    arguments = _arguments(code, input_type, value)
    return output_type.unflatten(code.record_call(signature, arguments), None)


def _arguments(code: Code, kind: ResultType, value: Expression) -> list[str]:
    """Write each argument as in a record: a value, or the number of values and these."""
    if isinstance(kind, TupleType):
        items = zip(kind, value, strict=True)
        return [argument for item in items for argument in _arguments(code, *item)]
    if not isinstance(kind, SequenceType):
        return [packed(value)]

    sequence = packed(value)
    lists = [sequence]
    element = code.new(kind.element_type, "e")
    if isinstance(element, tuple):
        lists = [
            code.fresh("s", f"[{variable} for {packed(element)} in {sequence}]")
            for variable in flattened(element)
        ]
    return [f"len({rows}), *{rows}" for rows in lists]


def argument_types(kind: ResultType, ragged: bool = False) -> list[RowTensorType | Ragged]:
    """Row types of all tensors in an input type; those in sequences are ragged."""
    if isinstance(kind, TensorType):
        return [Ragged(kind.row_type) if ragged else kind.row_type]
    ragged = ragged or isinstance(kind, SequenceType)
    return [argument for item in kind._inside() for argument in argument_types(item, ragged)]


def _row_types(kind: ResultType) -> list[RowTensorType]:
    """Row types of all tensors in an output type."""
    return [inner.row_type for inner in kind.walk() if isinstance(inner, TensorType)]


class NestedCall(nn.Module):
    """Call a function with arguments nested as in the input type of its block."""

    def __init__(self, called: Callable[..., Any], input_type: ResultType) -> None:
        super().__init__()
        self.called = called
        self.input_type = input_type
        owner = module_of(called)
        if owner is not called:
            # The module of a method is trained and moved.
            self.owner = owner

    def nested(self, *rows: Tensor | RaggedRows) -> object:
        """Nest the rows, and call the function."""
        kind = self.input_type
        rows_left = iter(rows)
        if isinstance(kind, TupleType):
            return self.called(*[nest_rows(item, rows_left) for item in kind])
        return self.called(nest_rows(kind, rows_left))

    def forward(self, *rows: Tensor | RaggedRows) -> object:
        """Nest the rows, call the function, and flatten its results."""
        results = tuple(flattened(self.nested(*rows)))
        return results if len(results) > 1 else results[0]


def nest_rows(result_type: ResultType, rows: Iterator[Any]) -> object:
    """Nest rows as in a type; a sequence of tuples becomes one ``RaggedRows`` of a tuple."""
    if isinstance(result_type, TupleType):
        return tuple(nest_rows(item, rows) for item in result_type)
    if isinstance(result_type, SequenceType):
        ragged = [next(rows) for _ in result_type.terminal_types()]
        elements = iter([argument.rows for argument in ragged])
        return ragged[0]._replace(rows=nest_rows(result_type.element_type, elements))
    return next(rows)


# Output types -------------------------------------------------------------------------------------


def infer_output_type(
    block: Block, called: Callable[..., Any], input_type: ResultType
) -> ResultType:
    """Call a function on two and on three rows, and return the type of the results."""
    build = getattr(called, "build", None)
    if callable(build):
        # Parameters use the user's random state, which the calls below do not change.
        build(input_type)

    owner = module_of(called) or nn.Module()
    device = next(owner.parameters(), torch.empty(0)).device
    results = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for size in (2, 3):
            zeros = [_zeros(kind, size, device) for kind in argument_types(input_type)]
            try:
                if any(map(is_lazy, tensors_of(owner))):
                    NestedCall(called, input_type).nested(*zeros)  # which gives it parameters
                copied = set_mode(copy_of(called), False)
                results.append(NestedCall(copied, input_type).nested(*zeros))
            except Exception as error:
                _fail_to_infer(block, input_type, f"{type(error).__name__}: {error}")

    two, three = map(flattened, results)
    if not two or not three:
        _fail_to_infer(block, input_type, "nothing, where tensors were expected")
    for result_of_two, result_of_three in zip(two, three, strict=False):
        problem = _problem_with(result_of_two, result_of_three)
        if problem:
            _fail_to_infer(block, input_type, problem)
    return type_of_rows(results[0])


def _fail_to_infer(block: Block, input_type: ResultType, got: str) -> NoReturn:
    expected = "a function on batched tensors: first axis one row per example"
    block._fail(f"its function cannot be called with {input_type}", expected, got)


def _problem_with(two: object, three: Tensor) -> str:
    """Describe why results for two and for three rows are no batches of rows of one type."""
    if not isinstance(two, Tensor):
        return f"{type(two).__name__}, which is not a tensor"
    if two.dim() == 0:
        return "a scalar, without a batch axis"
    if (two.size(0), three.size(0)) != (2, 3):
        return f"{two.size(0)} and {three.size(0)} rows for 2 and 3 rows"
    if two.shape[1:] != three.shape[1:]:
        return f"rows of {list(two.shape[1:])} and of {list(three.shape[1:])}"
    return ""


def _zeros(
    kind: RowTensorType | Ragged, num_calls: int, device: torch.device
) -> Tensor | RaggedRows:
    """An argument of zeros for some calls, with two rows per call if it is ragged."""
    (row,) = parts_of(row_type_of(kind))
    size = 2 * num_calls if isinstance(kind, Ragged) else num_calls
    rows = torch.zeros((size, *row.shape), dtype=row.dtype, device=device)
    return _argument(kind, rows, [2] * num_calls)


def _argument(
    kind: RowTensorType | Ragged, rows: Tensor, lengths: Sequence[int]
) -> Tensor | RaggedRows:
    """Rows as an argument of some calls; a ragged one has this many rows per call."""
    if not isinstance(kind, Ragged):
        return rows
    calls = torch.arange(len(lengths), device=rows.device)
    counts = torch.tensor(lengths, device=rows.device)
    return RaggedRows(rows, calls.repeat_interleave(counts), len(lengths))


# Checks -------------------------------------------------------------------------------------------


def _check_input(block: Block, input_type: ResultType, *, sequences: bool = False) -> None:
    """Raise an error if an input does not consist of tensors (and one sequence, if allowed)."""
    kinds = list(input_type.walk())
    valid: set[type[ResultType]] = {TensorType, TupleType}
    expected = "a tensor or a tuple of tensors"
    if sequences:
        valid.add(SequenceType)
        expected += ", and a sequence"
    if not {type(kind) for kind in kinds} <= valid:
        hint = "td.Scalar(), td.Vector(n) or td.Tensor(shape) in front of it"
        block._fail("the input does not consist of tensors", expected, input_type, hint=hint)
    if not input_type.terminal_types():
        block._fail("the input contains no tensors", "at least one tensor", input_type)
    if sum(isinstance(kind, SequenceType) for kind in kinds) > 1:
        block._fail("the input has two sequences", "one sequence", input_type)


def check_rows(block: Block, called: Callable[..., Any], input_type: ResultType) -> None:
    """Raise an error if a function mixes rows: it is tried on three, in evaluation mode.

    A function that draws random numbers in this mode is not tried.
    """
    norm = batch_norm_in(called)
    if norm:
        problem = "normalizes over the batch, so its rows are not independent"
        block._fail(problem, got=norm, hint="nn.LayerNorm or nn.GroupNorm")

    tried = _ThreeCalls(set_mode(copy_of(called), False), input_type)
    devices = [tried.device] if tried.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            together = tried.run_together()
            again = tried.run_together()
        except Exception as error:  # noqa: BLE001 - part of the warning
            _warn_of_error(block, error)
            return
        if not all(map(_are_close, together, again)):
            return  # it draws random numbers

        for number in range(3):
            try:
                alone = tried.run_alone(number)
            except Exception as error:  # noqa: BLE001 - part of the message
                _fail_as_mixing(block, f"an error for one row, not for three: {error}")
            rows = [result[number : number + 1] if result.dim() else result for result in together]
            if not all(map(_are_close, rows, alone)):
                _fail_as_mixing(block, "other results for three rows than for each of them")


_INDEPENDENT = "a function of each row by itself"


def _fail_as_mixing(block: Block, got: str) -> NoReturn:
    hint = "dim=-1 in place of dim=0; nn.LayerNorm in place of nn.BatchNorm1d"
    block._fail("its function mixes the rows of a batch", _INDEPENDENT, got, hint=hint)


def _warn_of_error(block: Block, error: Exception) -> None:
    problem = "Function: whether rows depend on each other cannot be checked"
    got = f"an error on random rows: {error}"
    text = mismatch_text(problem, _INDEPENDENT, got, where=f"block {block._path()}")
    warnings.warn(text, stacklevel=2)


class _ThreeCalls:
    """Run a function on random rows of three calls, of one of them, or of all together.

    Ragged arguments have several rows per call.
    """

    def __init__(self, called: Callable[..., Any], input_type: ResultType) -> None:
        self.function = NestedCall(called, input_type)
        self.kinds = argument_types(input_type)
        is_ragged = any(isinstance(kind, Ragged) for kind in self.kinds)
        self.lengths = (2, 1, 3) if is_ragged else (1, 1, 1)
        weight = next(self.function.parameters(), torch.empty(0, dtype=torch.float32))
        self.device = weight.device
        # That of the model, for which float32 stands in types; it may have been converted.
        self.precision = weight.dtype
        self.rows = self._draw(2)

    def _draw(self, num_integers: int) -> list[list[Tensor]]:
        """Draw the rows of each call for each argument; integers may be indices."""
        generator = torch.Generator().manual_seed(0)
        drawn = []
        for kind in self.kinds:
            (row,) = parts_of(row_type_of(kind))
            lengths = self.lengths if isinstance(kind, Ragged) else (1, 1, 1)
            shapes = [(length, *row.shape) for length in lengths]
            if has_gradient(row.dtype):
                rows = [torch.randn(shape, generator=generator) for shape in shapes]
            else:
                rows = [torch.randint(num_integers, shape, generator=generator) for shape in shapes]
            dtype = self.precision if row.dtype == torch.float32 else row.dtype
            drawn.append([tensor.to(self.device, dtype) for tensor in rows])
        return drawn

    def run_together(self) -> list[Tensor]:
        """Return the results of all calls; integers become zeros if others are out of range."""
        try:
            return self._run((0, 1, 2))
        except IndexError:
            self.rows = self._draw(1)
            return self._run((0, 1, 2))

    def run_alone(self, number: int) -> list[Tensor]:
        """Return the results of one call."""
        return self._run((number,))

    def _run(self, calls: Sequence[int]) -> list[Tensor]:
        lengths = [self.lengths[number] for number in calls]
        arguments = []
        for kind, rows in zip(self.kinds, self.rows, strict=True):
            stacked = torch.cat([rows[number] for number in calls])
            arguments.append(_argument(kind, stacked, lengths))
        # Results of a wrong type are refused when they are used.
        results = flattened(self.function(*arguments))
        return [result for result in results if isinstance(result, Tensor)]


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return whether results are equal up to rounding: products may add up in another order."""
    if a.shape != b.shape or not has_gradient(a.dtype):
        return torch.equal(a, b)
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    finite = b.abs().nan_to_num(0, 0, 0)
    largest = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
