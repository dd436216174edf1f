"""Turn examples into integers that name their calls, and merge those of a mini-batch."""

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.blocks.code import (
    CallSite,
    CompiledSource,
    TraceError,
    UnknownKey,
    flattened,
    run_trampoline,
)
from pyg_dynbatch.blocks.types import ResultType, TensorType
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.merge import schedule_recordings
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.policy import Policy, policy_of
from pyg_dynbatch.core.program import INPUT, RESULT, Program, number_arguments
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import TensorType as RowTensorType
from pyg_dynbatch.core.types import constant_dtype, overflowing_value, range_of


class Traced(NamedTuple):
    """One traced example, as integers.

    A record is the number of a call site in the model, followed by the arguments of the call; a
    value is named by the position of its record.

    Args:
        code: All records, one after another.
        starts: Where each record begins.
        data: Constants of each call site that reads the example, one per record.
        outputs: The values of each output.
        labels: The labels of the values of each metric.
        model: Fingerprint of the model that traced it; others refuse it.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer([1.0, 2.0]).code.tolist()  # zero, two constants, one call that reads both
        [2, 0, 0, 1, 1, 2]
    """

    code: np.ndarray
    starts: np.ndarray
    data: dict[int, np.ndarray]
    outputs: dict[str, np.ndarray]
    labels: dict[str, list[Any]]
    model: str


def check_model(source: CompiledSource, model: str, what: str) -> None:
    """Raise an error for traces of a different model."""
    if model != source.fingerprint:
        names = ", ".join(signature.name for signature in source.signatures) or "none"
        expected = f"a trace by this model, {source.fingerprint} (operations: {names})"
        got, hint = f"a trace by model {model}", "trace the examples again"
        raise mismatch(
            ValueError, f"Compiler: {what} of a different model", expected, got, hint=hint
        )


def merge_traced(source: CompiledSource, traced: Sequence[Traced]) -> tuple[Program, np.ndarray]:
    """Merge traced examples into what the core schedules; also return the site of each call."""
    for n, one in enumerate(traced):
        check_model(source, one.model, f"example {n} is a trace")
    # Positions are those in the joined code.
    sizes = np.array([one.code.size for one in traced], dtype=np.int64)
    # Small, since an example can have millions of records; what is not needed is freed.
    dtype = np.promote_types(np.int32, np.min_scalar_type(-int(sizes.sum()) - 1))
    offset = (np.cumsum(sizes) - sizes).astype(dtype)
    code = np.concatenate([one.code for one in traced], dtype=dtype)
    start = np.concatenate([one.starts for one in traced], dtype=dtype)
    start += np.repeat(offset, [one.starts.size for one in traced])
    site = code[start]
    is_read = code >= 0
    is_read[start] = False
    code += np.repeat(offset, sizes)
    position = np.flatnonzero(is_read).astype(dtype)
    # The record of each read.
    reader = np.arange(start.size, dtype=dtype)
    reader = np.repeat(reader, np.add.reduceat(is_read, start, dtype=dtype))
    tables, read, size = source.tables, code[is_read], code.size
    facts = (tables[name][site[reader]] for name in ("fixed", "ragged"))
    argument = number_arguments(position - start[reader] - 1, *facts)
    del code, is_read, position
    outputs, examples = _outputs(traced, offset)
    kind, width = tables["kind"][site], tables["width"][site]
    used = np.zeros(size, dtype=bool)
    used[np.concatenate([read, *outputs.values()])] = True
    leader = _merge_free(source, start, site, width, used[start])
    is_call = (kind == RESULT) & (width > 0)
    first_value = np.cumsum(width, dtype=dtype) - width
    number = np.zeros(size + tables["type"].shape[1], dtype=dtype)
    for slot in range(tables["type"].shape[1]):
        has = width > slot
        number[start[has] + slot] = first_value[has] + slot
    number[start] = number[leader]
    read_value = number[read]
    output_values = {name: number[values] for name, values in outputs.items()}
    del read, used, leader, number
    call_number = np.cumsum(is_call, dtype=dtype) - 1
    constants, num_inputs, place = _constants(source, traced, site)
    place[is_call] = call_number[is_call]
    slot_of = np.arange(int(width.sum()), dtype=dtype) - np.repeat(first_value, width)
    merged = Program(
        source.signatures,
        source.row_types,
        num_inputs,
        [len(rows[0]) if rows else 0 for rows in constants],
        [[rows] if rows else [] for rows in constants],
        value_type=tables["type"][np.repeat(site, width), slot_of],
        value_kind=np.repeat(kind, width),
        value_index=np.repeat(place, width),
        value_slot=slot_of,
        call_signature=tables["signature"][site[is_call]],
        read_value=read_value,
        read_call=call_number[reader],
        read_argument=argument,
        outputs=output_values,
        output_example=examples,
        num_examples=len(traced),
    )
    return merged, site[is_call]


def _outputs(
    traced: Sequence[Traced], offset: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The values of each output, and the example of each."""
    values, examples = {}, {}
    for name in dict.fromkeys(name for one in traced for name in one.outputs):
        found = [(n, one.outputs[name]) for n, one in enumerate(traced) if name in one.outputs]
        values[name] = np.concatenate([own + offset[n] for n, own in found])
        examples[name] = np.concatenate([np.full(own.size, n) for n, own in found])
    return values, examples


def _merge_free(
    source: CompiledSource, start: np.ndarray, site: np.ndarray, width: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """For each record the start of the one that replaces it.

    Values that are the same in all examples are computed once, and only if they are used: the
    widths of the other records become 0.
    """
    leader = start.copy()
    for free in source.free:
        mine = np.flatnonzero(site == free)
        width[mine] = 0
        if used[mine].any():
            width[mine[0]] = 1
            leader[mine] = start[mine[0]]
    return leader


def _constants(
    source: CompiledSource, traced: Sequence[Traced], site: np.ndarray
) -> tuple[list[tuple[np.ndarray, ...]], list[int], np.ndarray]:
    """Stack the constants of each row type; also count input rows and number what records read."""
    stacks: list[list[np.ndarray]] = [[] for _ in source.row_types]
    counts = [0] * len(source.row_types)
    place = np.zeros(site.size, dtype=site.dtype)
    # The number of external rows, ``[row type, example]``.
    rows = np.zeros((len(counts), len(traced)), dtype=np.int64)
    inputs: list[tuple[int, list[tuple[int, np.ndarray]]]] = []
    for number, where in enumerate(source.sites):
        if where.kind == RESULT:
            continue
        found = [(n, one.data[number]) for n, one in enumerate(traced) if number in one.data]
        row_type = where.types[0]
        if where.kind == INPUT and found:
            inputs.append((number, found))
            for n, part in found:
                rows[row_type, n] = max(rows[row_type, n], part[:, 1].max())
        elif found:
            stack = np.concatenate([part for _, part in found])
            place[site == number] = counts[row_type] + np.arange(len(stack))
            counts[row_type] += len(stack)
            stacks[row_type].append(stack)
    before = np.cumsum(rows, axis=1) - rows
    for number, found in inputs:
        first = before[source.sites[number].types[0]]
        place[site == number] = np.concatenate([part[:, 0] + first[n] for n, part in found])
    joined: list[tuple[np.ndarray, ...]] = [
        (np.concatenate(stack),) if stack else () for stack in stacks
    ]
    return joined, rows.sum(axis=1).tolist(), place


# Kinds of numbers (numpy's letters) that each kind can hold.
_KINDS = {"f": "fiub", "i": "iub", "c": "cfiub"}
# What strings are parsed as.
_WIDEST = {"f": np.float64, "i": np.int64, "c": np.complex128}
_NOT_A_NUMBER = (ValueError, TypeError, RuntimeError, OverflowError)


def _rows_of(site: CallSite, wanted: Any, items: Sequence[Any]) -> np.ndarray:
    """Stack the constants of one site; raise an error for an invalid shape or dtype."""
    if site.kind == INPUT:
        return _input_rows(site, items)
    if site.table is not None:
        rows: np.ndarray = site.table[np.asarray(items, dtype=np.int64)]
        return rows
    kind: type[Exception] | None = None
    try:
        rows = _stacked(items, wanted)
        if rows.shape[1:] != wanted.shape:
            kind = ValueError
        elif rows.dtype.kind not in _KINDS[_kind(wanted)]:
            kind = TypeError
    except _NOT_A_NUMBER as reason:
        kind, got = TypeError, f"{items[0]!r}: {reason}"
    else:
        if kind is not None:
            got = f"{rows.dtype}[{', '.join(map(str, rows.shape[1:]))}], {items[0]!r}"
    if kind is not None:
        # The message is about the first of several items that does not fit.
        for item in items if len(items) > 1 else ():
            _rows_of(site, wanted, [item])
        what = "dtype differs" if kind is TypeError else "shape differs"
        got = got if len(got) < 200 else got[:200] + " …"
        raise TraceError(kind, what, str(wanted), got, site.path)
    dtype = wanted.dtype or torch.float32
    if (wrong := overflowing_value(rows, dtype)) is not None:
        what, expected = "a number is out of range", f"{wanted}, {range_of(dtype)}"
        raise TraceError(ValueError, what, expected, wrong, site.path)
    if site.bound is not None:
        size, path = site.bound
        if (wrong := rows[(rows < 0) | (rows >= size)]).size:
            what, expected = "the index of a vector is out of range", f"from 0 to {size - 1}"
            raise TraceError(IndexError, what, expected, wrong[0], path)
    return rows.astype(constant_dtype(rows.dtype, dtype), copy=False)


def _kind(wanted: RowTensorType) -> str:
    if wanted.dtype is None or wanted.dtype.is_complex:
        return "c"
    return "f" if wanted.dtype.is_floating_point else "i"


def _stacked(items: Any, wanted: RowTensorType) -> np.ndarray:
    """One array of all items; strings are parsed as numbers, and whole floats are integers."""
    if isinstance(items[0], torch.Tensor):
        rows = torch.stack([torch.as_tensor(item).detach() for item in items]).cpu()
        items = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    if _is_masked(items):
        raise TypeError("a masked array has missing entries")
    found, kind = np.asarray(items), _kind(wanted)
    if found.dtype.kind == "U":
        # One by one, since numpy converts numbers to strings if there is a string among them.
        more = len(items) > 1
        parts = [_stacked([item], wanted) for item in items] if more else []
        if more:
            return np.concatenate(parts)
        parsed: np.ndarray = found.astype(_WIDEST[kind])
        if (
            kind != "i"
            and (np.isinf(parsed) & (np.char.find(np.char.lower(found), "inf") < 0)).any()
        ):
            raise OverflowError("a number is out of range")
        return parsed
    if found.dtype.kind == "f" and kind == "i":
        with np.errstate(invalid="ignore"):
            # From the items, since large integers among floats have lost digits by now.
            whole = np.asarray(items, np.int64)
        return whole if (whole == found).all() else found
    return found


_SCALARS = {int, float, bool, str}


def _is_masked(value: Any) -> bool:
    """Whether entries are missing, which numpy would replace by what is in memory."""
    if isinstance(value, np.ma.MaskedArray):
        return bool(np.ma.is_masked(value))
    is_nested = isinstance(value, list | tuple) and not set(map(type, value)) <= _SCALARS
    return is_nested and any(map(_is_masked, value))


def _input_rows(site: CallSite, items: Sequence[Any]) -> np.ndarray:
    """For each item the row it names and the least number of rows of its example."""
    pairs = [item if isinstance(item, tuple) else (item, item + 1) for item in items]
    for row, rows in pairs:
        if not 0 <= row < rows:
            what, expected = "the row does not exist", f"a row from 0 to {rows - 1}"
            raise TraceError(IndexError, what, expected, row, site.path)
    return np.array(pairs, dtype=np.int64)


_FILENAME = "<blocks>"
_Arrays = tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]  # code, starts, data


class Tracer:
    """Record the calls of one example; it has no parameters, so loader workers can hold it.

    A :class:`Compiler` creates it; call it on an example.

    Args:
        source: The written code and its tables.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer.program(tracer([1.0, 2.0]))
        Program(1 calls, depth 1, outputs ['output_0'])
    """

    def __init__(self, source: CompiledSource) -> None:
        self.source = source
        names = dict(source.names)
        exec(compile(source.source, _FILENAME, "exec"), names)  # noqa: S102 - our own text
        self._begin = names["begin"]

    def __call__(
        self, example: Any, number: int | None = None, max_depth: int | None = None
    ) -> Traced:
        """Record the calls of one example; its number is for messages."""
        return self.trace(example, number, max_depth)[0]

    def trace(
        self, example: Any, number: int | None = None, max_depth: int | None = None
    ) -> tuple[Traced, Any]:
        """Record the calls of one example; also return the output, with positions of values."""
        source = self.source
        code, starts, data, metrics, labels, root, cut = self._begin()
        parts: list[_Arrays] = []

        def pack() -> None:
            parts.append(self._packed(code, starts, data))
            cut()

        try:
            result = run_trampoline(root, example, max_depth, code, pack)
            arrays = self._packed(code, starts, data)
            outputs: dict[str, list[int]] = {}
            for name, value in named_terminals(source.result_type, result):
                if name:
                    outputs.setdefault(name, []).append(value)
            for name, rows in metrics.items():
                if rows:
                    outputs[f"metric:{name}"] = rows
        except Exception as error:
            self._explain(error, number)
        records, begins, constants = _joined([*parts, arrays]) if parts else arrays
        traced = Traced(
            records,
            begins,
            constants,
            {name: np.array(values, dtype=np.int32) for name, values in outputs.items()},
            labels,
            source.fingerprint,
        )
        return traced, result

    def _packed(self, code: list[int], starts: list[int], data: dict[int, list[Any]]) -> _Arrays:
        source, constants = self.source, {}
        for number, items in data.items():
            if items:
                site = source.sites[number]
                constants[number] = _rows_of(site, source.row_types[site.types[0]], items)
        return np.array(code, dtype=np.int32), np.array(starts, dtype=np.int32), constants

    def program(self, traced: Traced) -> Program:
        """Return the program of a traced example, for schedules and for the reference."""
        return merge_traced(self.source, [traced])[0]

    def _explain(self, error: Exception, number: int | None) -> NoReturn:
        """Raise the error again, with the block and the example."""
        path, users_own = self._origin(error)
        if isinstance(error, TraceError):
            path = error.path or path
        where = f"block {path}" if number is None else f"example {number}, block {path}"
        label = path.rpartition(".")[2]
        if isinstance(error, TraceError):
            facts = f"{label}: {error.what}", error.expected, error.got
            raise mismatch(error.kind, *facts, where=where) from error.__cause__
        if users_own or not isinstance(error, KeyError | IndexError | TypeError | ValueError):
            error.add_note(f"  where:    {where}")
            raise error
        kind = UnknownKey if isinstance(error, KeyError) else type(error)
        what, got = f"{label}: the input does not fit", f"{type(error).__name__}: {error}"
        raise mismatch(kind, what, "an input of the stated form", got, where=where) from error

    def _origin(self, error: BaseException) -> tuple[str, bool]:
        """Path of the block that failed, and whether the user's function did."""
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _FILENAME:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.source.origin[line - 1] if line else ("Root", False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tracer, (self.source,)

    def __repr__(self) -> str:
        return f"Tracer({len(self.source.origin)} lines, {len(self.source.signatures)} operations)"


def _joined(parts: list[_Arrays]) -> _Arrays:
    codes, starts, rows = zip(*parts, strict=True)
    sites = dict.fromkeys(site for some in rows for site in some)
    constants = {n: np.concatenate([some[n] for some in rows if n in some]) for n in sites}
    return np.concatenate(codes), np.concatenate(starts), constants


def named_terminals(result_type: ResultType, result: Any) -> list[tuple[str, Any]]:
    """List the terminals in the root's output with the outputs they belong to; "" for objects."""
    found: list[tuple[str, Any]] = []
    numbers = count()

    def add(terminal: ResultType, value: Any) -> None:
        name = ""
        if isinstance(terminal, TensorType):
            name = f"output_{next(numbers)}" if result_type.size else f"output:{terminal}"
        found.append((name, value))

    result_type.for_each_terminal(add, result)
    return found


@dataclass(frozen=True, eq=False)
class TracedBatch(MovablePlan):
    """The schedule of a mini-batch; a loader worker creates it, the compiled module computes it.

    Args:
        schedule: Integers and constants.
        labels: For each metric the labels of its values, one example after another.
        model: Fingerprint of the model that made it; others refuse it.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> compiler.collate([[1.0, 2.0], [3.0]])
        TracedBatch(2 examples, 1 steps)
    """

    schedule: Steps
    labels: dict[str, list[Any]]
    model: str

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.schedule._tensors()

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "TracedBatch":
        return replace(self, schedule=self.schedule._apply(fn))

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return self.schedule.num_examples

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return f"TracedBatch({self.num_examples} examples, {len(self.schedule.steps)} steps)"


@dataclass(frozen=True, eq=False)
class BlockResult:
    """The output of a compiled block for a mini-batch.

    Args:
        output: The root's output, nested as its type, each tensor ``[example, …]``.
        metric_tensors: For each metric its values, ``[value, …]``: any number per example.
        metric_labels: For each metric the label of each value (``None`` where none was given).
        metric_examples: For each metric the example of each value, ``[value]``.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> model = td.Compiler.create(td.AllOf(td.Scalar(), td.Scalar() >> td.Metric("m")))
        >>> result = model([1.0, 2.0])
        >>> result.output_tensors, result.metric_tensors["m"]
        ([tensor([1., 2.])], tensor([1., 2.]))
    """

    output: Any
    metric_tensors: dict[str, Tensor]
    metric_labels: dict[str, list[Any]]
    metric_examples: dict[str, Tensor]

    @property
    def output_tensors(self) -> list[Tensor]:
        """The tensors of the output, one after another."""
        return [tensor for tensor in flattened(self.output) if tensor is not None]


def list_of_examples(examples: Any) -> list[Any]:
    """List any iterable of examples."""
    try:
        return list(examples)
    except TypeError as error:
        what, got = "Compiler: the examples cannot be iterated over", type(examples).__name__
        hint = "[example], if this is a single one"
        raise mismatch(TypeError, what, "a list of examples", got, hint=hint) from error


class Collater:
    """Trace examples and merge them into a mini-batch; the ``collate_fn`` of a loader.

    Args:
        tracer: From a compiler.
        policy: ``"depth"``, ``"agenda"``, a ``LearnedPolicy`` or a function.
        merge_equal: Compute equal calls on equal constants once.
        max_depth: Raise an ``AssertionError`` for examples with more calls one after another. An
            example nested ten times as deep in declared blocks is not traced to its end.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> loader = DataLoader([[1.0, 2.0], [3.0]], batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self,
        tracer: Tracer,
        policy: str | Policy = "depth",
        merge_equal: bool = True,
        max_depth: int | None = None,
    ) -> None:
        # This raises an error if the name is unknown.
        policy_of(policy)
        self.tracer, self.policy = tracer, policy
        self.merge_equal, self.max_depth = merge_equal, max_depth

    def __call__(self, examples: Iterable[Any]) -> TracedBatch:
        """Return the mini-batch of some examples, traced or not."""
        traced = [
            one if isinstance(one, Traced) else self.tracer(one, number, self.max_depth)
            for number, one in enumerate(list_of_examples(examples))
        ]
        if not traced:
            raise mismatch(ValueError, "Compiler: the list of examples is empty", "at least one", 0)
        for number, one in enumerate(traced if self.max_depth is not None else ()):
            if (depth := self.tracer.program(one).depth) > self.max_depth:  # type: ignore[operator]
                what, where = "Compiler: an example is deeper than max_depth", f"example {number}"
                expected = f"at most {self.max_depth} calls one after another"
                raise mismatch(AssertionError, what, expected, depth, where=where)
        source = self.tracer.source
        merged, _ = merge_traced(source, traced)
        schedule = schedule_recordings([merged], self.policy, merge_equal=self.merge_equal)
        labels = {
            name: [label for one in traced for label in one.labels[name]]
            for name in source.metric_types
        }
        return TracedBatch(schedule, labels, source.fingerprint)


def pool_of(tracer: Tracer, processes: int | None) -> Any:
    """Start processes that hold a tracer."""
    method = "spawn"
    try:
        pickle.dumps(tracer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        method = "fork"
        if method not in multiprocessing.get_all_start_methods():
            what = "Compiler.multiprocessing_pool: a function cannot be sent to other processes"
            hint = "a def at the top of a module instead of a lambda or an inner function"
            expected = "host functions that can be pickled"
            raise mismatch(TypeError, what, expected, str(error), hint=hint) from error
    return multiprocessing.get_context(method).Pool(processes, _set_tracer, (tracer,))


def traced_in(pool: Any, examples: Iterable[Any], chunk_size: int, ordered: bool) -> Iterator[Any]:
    """Trace examples in a pool, in their order or as they are finished."""
    trace = pool.imap if ordered else pool.imap_unordered
    return trace(_trace, enumerate(examples), chunk_size)


_worker: list[Tracer] = []


def _set_tracer(tracer: Tracer) -> None:
    _worker[:] = [tracer]


def _trace(numbered: tuple[int, Any]) -> Traced:
    number, example = numbered
    return _worker[0](example, number)
