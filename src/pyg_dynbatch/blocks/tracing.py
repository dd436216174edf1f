"""Turn examples into integers that name their calls, and merge those of a mini-batch."""

import multiprocessing
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.blocks.code import Complaint, Recipe, Site, UnknownKey, drive, flattened
from pyg_dynbatch.blocks.types import ResultType, TensorType, numpy_dtype_of
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.policy import Policy, policy_of
from pyg_dynbatch.core.program import RESULT, Program
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import RowType, beyond, parts_of, range_of
from pyg_dynbatch.core.types import TensorType as RowTensorType


class Traced(NamedTuple):
    """One traced example, as integers.

    Every record of the code begins with the number of a place in the model, followed by the
    arguments of the call; a value is named by the position of its record.

    Args:
        code: All records, one after another.
        starts: Where each begins.
        data: For each place that reads the host's data the constants, one per record.
        marks: The values of each output.
        labels: The labels of the values of each metric.
        result: The output of the root, where the compiler asks for it.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer([1.0, 2.0]).code.tolist()  # zero, two constants, one call that reads both
        [2, 0, 0, 1, 1, 2]
    """

    code: np.ndarray
    starts: np.ndarray
    data: dict[int, np.ndarray]
    marks: dict[str, np.ndarray]
    labels: dict[str, list[Any]]
    result: Any = None


def merge_traced(recipe: Recipe, traced: Sequence[Traced]) -> tuple[Program, np.ndarray]:
    """Merge traced examples into what the core schedules; also return the site of each call."""
    # Places are those in the joined code.
    sizes = np.array([one.code.size for one in traced], dtype=np.int64)
    offset = np.cumsum(sizes) - sizes
    code = np.concatenate([one.code for one in traced]).astype(np.int64)
    counts = [one.starts.size for one in traced]
    start = np.concatenate([one.starts for one in traced]) + np.repeat(offset, counts)
    site = code[start]
    is_read = code >= 0
    is_read[start] = False
    code[is_read] += np.repeat(offset, sizes)[is_read]
    position = np.flatnonzero(is_read)
    marks, examples = _marks(traced, offset)

    tables = recipe.tables
    kind, width = tables["kind"][site], tables["width"][site]
    used = np.zeros(code.size, dtype=bool)
    for places in (code[position], *marks.values()):
        used[places] = True
    leader = _merge_free(recipe, start, site, width, used[start])
    is_call = (kind == RESULT) & (width > 0)
    first_value = np.cumsum(width) - width
    number = np.zeros(code.size + tables["type"].shape[1], dtype=np.int64)
    for slot in range(tables["type"].shape[1]):
        has = width > slot
        number[start[has] + slot] = first_value[has] + slot
    number[start] = number[leader]
    call_number = np.cumsum(is_call) - 1
    constants, num_inputs, place = _constants(recipe, traced, site)
    place[is_call] = call_number[is_call]
    slot_of = np.arange(int(width.sum())) - np.repeat(first_value, width)
    segment_ids = np.repeat(np.arange(start.size), np.diff(start, append=code.size))[position]
    merged = Program(
        recipe.signatures,
        recipe.row_types,
        num_inputs,
        [len(rows[0]) if rows else 0 for rows in constants],
        [[rows] if rows else [] for rows in constants],
        value_type=tables["type"][np.repeat(site, width), slot_of],
        value_kind=np.repeat(kind, width),
        value_place=np.repeat(place, width),
        value_slot=slot_of,
        call_signature=tables["number"][site[is_call]],
        read_value=number[code[position]],
        read_call=call_number[segment_ids],
        read_argument=_arguments(tables, position - start[segment_ids] - 1, site[segment_ids]),
        outputs={name: number[found] for name, found in marks.items()},
        output_example=examples,
        num_examples=len(traced),
    )
    return merged, site[is_call]


def _marks(
    traced: Sequence[Traced], offset: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The values of each output, and the example of each."""
    names = dict.fromkeys(name for one in traced for name in one.marks)
    values, examples = {}, {}
    for name in names:
        found = [(n, one.marks[name]) for n, one in enumerate(traced) if name in one.marks]
        values[name] = np.concatenate([mark + offset[n] for n, mark in found])
        examples[name] = np.concatenate([np.full(mark.size, n) for n, mark in found])
    return values, examples


def _merge_free(
    recipe: Recipe, start: np.ndarray, site: np.ndarray, width: np.ndarray, used: np.ndarray
) -> np.ndarray:
    """For each record the start of the one that replaces it.

    Values that are the same everywhere are made once, and only if they are used: the widths of
    the other records become 0.
    """
    leader = start.copy()
    for free in recipe.free:
        mine = np.flatnonzero(site == free)
        width[mine] = 0
        if used[mine].any():
            width[mine[0]] = 1
            leader[mine] = start[mine[0]]
    return leader


def _arguments(tables: dict[str, np.ndarray], argument: np.ndarray, site: np.ndarray) -> np.ndarray:
    """Number the argument of each read; rows of ragged arguments alternate after the fixed ones."""
    fixed, ragged = tables["fixed"][site], tables["ragged"][site]
    beyond = np.flatnonzero(argument >= fixed)
    argument[beyond] = fixed[beyond] + (argument[beyond] - fixed[beyond]) % ragged[beyond]
    return argument


def _constants(
    recipe: Recipe, traced: Sequence[Traced], site: np.ndarray
) -> tuple[list[tuple[np.ndarray, ...]], list[int], np.ndarray]:
    """Stack the constants of each row type, and place each record among them."""
    stacks: list[list[np.ndarray]] = [[] for _ in recipe.row_types]
    counts = [0] * len(recipe.row_types)
    place = np.zeros(site.size, dtype=np.int64)
    rows = _count_input_rows(recipe, traced)
    before = np.cumsum(rows, axis=1) - rows
    for number, where in enumerate(recipe.sites):
        if where.kind not in ("constant", "input"):
            continue
        found = [(n, one.data[number]) for n, one in enumerate(traced) if number in one.data]
        if where.kind == "input" and found:
            parts = [part[:, 0] + before[where.number, n] for n, part in found]
            place[site == number] = np.concatenate(parts)
        elif found:
            stack = np.concatenate([part for _, part in found])
            place[site == number] = counts[where.number] + np.arange(len(stack))
            counts[where.number] += len(stack)
            stacks[where.number].append(stack)
    joined: list[tuple[np.ndarray, ...]] = [
        (np.concatenate(stack),) if stack else () for stack in stacks
    ]
    return joined, rows.sum(axis=1).tolist(), place


def _count_input_rows(recipe: Recipe, traced: Sequence[Traced]) -> np.ndarray:
    """Number of rows from outside of each type in each example, ``[type, example]``."""
    rows = np.zeros((len(recipe.row_types), len(traced)), dtype=np.int64)
    for number, where in enumerate(recipe.sites):
        if where.kind == "input":
            for place, one in enumerate(traced):
                if number in one.data:
                    most = int(one.data[number][:, 1].max())
                    rows[where.number, place] = max(rows[where.number, place], most)
    return rows


_SOURCE = "<blocks>"


# Which kinds of numbers go into which without loss of kind.
_KINDS = {"f": "fiub", "i": "iub", "c": "cfiub"}
# What strings are parsed as.
_WIDEST = {"f": np.float64, "i": np.int64, "c": np.complex128}
_NOT_A_NUMBER = (ValueError, TypeError, RuntimeError, OverflowError)


def _rows_of(site: Site, row_type: RowType, items: Sequence[Any]) -> np.ndarray:
    """Stack the constants of one site, and refuse those of another shape or kind."""
    if site.kind == "input":
        return _input_rows(site, items)
    if site.table is not None:
        found: np.ndarray = site.table[np.asarray(items, dtype=np.int64)]
        return found
    (wanted,) = parts_of(row_type)
    try:
        found = _stacked(items, wanted)
        fits = found.shape[1:] == wanted.shape and found.dtype.kind in _KINDS[_kind(wanted)]
    except _NOT_A_NUMBER:
        fits = False
    if not fits:
        raise _wrong_constant(site, wanted, items)
    dtype = wanted.dtype or torch.float32
    if (wrong := beyond(found, dtype)) is not None:
        what = "an integer is beyond the range of its dtype"
        raise _complaint(site, ValueError, what, f"{wanted}, {range_of(dtype)}", wrong)
    return found.astype(numpy_dtype_of(dtype), copy=False)


def _complaint(
    site: Site, error: type[Exception], what: str, expected: object, got: object
) -> Complaint:
    name = site.path.rpartition(".")[2]
    return Complaint(error, f"{name}: {what}", expected=expected, got=got, path=site.path)


def _kind(wanted: RowTensorType) -> str:
    if wanted.dtype is None or wanted.dtype.is_complex:
        return "c"
    return "f" if wanted.dtype.is_floating_point else "i"


def _stacked(items: Any, wanted: RowTensorType) -> np.ndarray:
    """One array of all items; strings are parsed as numbers, and whole floats are integers."""
    if isinstance(items[0], torch.Tensor):
        rows = torch.stack([torch.as_tensor(item).detach() for item in items]).cpu()
        items = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
    found, kind = np.asarray(items), _kind(wanted)
    if found.dtype.kind == "U":
        # One by one, since numpy converts numbers to strings where there is a string among them.
        more = len(items) > 1
        parts = [_stacked([item], wanted) for item in items] if more else []
        return np.concatenate(parts) if more else found.astype(_WIDEST[kind])
    if found.dtype.kind == "f" and kind == "i":
        with np.errstate(invalid="ignore"):
            # From the items, since large integers among floats have lost digits by now.
            whole = np.asarray(items, np.int64)
        return whole if (whole == found).all() else found
    return found


def _wrong_constant(site: Site, wanted: RowTensorType, items: Sequence[Any]) -> Complaint:
    """Find the constant that does not fit."""
    for item in items:
        good_kind, good_shape = False, True
        try:
            row = _stacked([item], wanted)
            good_kind = row.dtype.kind in _KINDS[_kind(wanted)]
            good_shape = row.shape[1:] == wanted.shape
            got = f"{row.dtype}[{', '.join(map(str, row.shape[1:]))}], {item!r}"
        except _NOT_A_NUMBER as reason:
            got = f"{item!r}: {reason}"
        if not (good_kind and good_shape):
            break
    got = got if len(got) < 200 else got[:200] + " …"
    error, what = (TypeError, "dtype differs") if good_shape else (ValueError, "shape differs")
    return _complaint(site, error, what, wanted, got)


def _input_rows(site: Site, items: Sequence[Any]) -> np.ndarray:
    """For each item the row it names and the least number of rows of its example."""
    pairs = [item if isinstance(item, tuple) else (item, item + 1) for item in items]
    for row, rows in pairs:
        if not 0 <= row < rows:
            expected = f"a row from 0 to {rows - 1}"
            raise _complaint(site, IndexError, "the row does not exist", expected, row)
    return np.array(pairs, dtype=np.int64)


class Tracer:
    """Record the calls of one example; without parameters, so that loader workers can have it.

    Made by :class:`Compiler`; call it on an example.

    Args:
        recipe: The written code and its tables.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer.program(tracer([1.0, 2.0]))
        Program(1 calls, depth 1, outputs ['output_0'])
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        names = dict(recipe.names)
        exec(compile(recipe.source, _SOURCE, "exec"), names)  # noqa: S102 - our own text
        self._begin = names["begin"]

    def __call__(self, example: Any, number: int | None = None) -> Traced:
        """Record the calls of one example; its number is for messages."""
        recipe = self.recipe
        code, starts, data, metrics, labels, run = self._begin()
        try:
            result = drive(run, example)
            marks = outputs_in(recipe.result_type, result)
            for name, rows in zip(recipe.metric_types, metrics, strict=True):
                if rows:
                    marks[f"metric:{name}"] = rows
            stacked = {
                number: _rows_of(site := recipe.sites[number], recipe.row_types[site.number], items)
                for number, items in data.items()
                if items
            }
        except Exception as error:
            self._explain(error, number)
        return Traced(
            np.array(code, dtype=np.int32),
            np.array(starts, dtype=np.int32),
            stacked,
            {name: np.array(values, dtype=np.int32) for name, values in marks.items()},
            dict(zip(recipe.metric_types, labels, strict=True)),
            result if recipe.keeps_result else None,
        )

    def program(self, traced: Traced) -> Program:
        """Make the program of a traced example, for schedules and for the reference."""
        return merge_traced(self.recipe, [traced])[0]

    def _explain(self, error: Exception, number: int | None) -> NoReturn:
        """Raise the error again, with the block and the example."""
        path, users_own = self._origin(error)
        example = [f"example {number}"] if number is not None else []
        if isinstance(error, Complaint):
            where = ", ".join([*example, f"block {error.facts.pop('path', path)}"])
            raise mismatch(error.error, error.what, where=where, **error.facts) from error.__cause__
        where = ", ".join([*example, f"block {path}"])
        if users_own or not isinstance(error, KeyError | IndexError | TypeError | ValueError):
            error.add_note(f"  where:    {where}")
            raise error
        kind = UnknownKey if isinstance(error, KeyError) else type(error)
        what = f"{path.rpartition('.')[2]}: the input does not fit"
        got = f"{type(error).__name__}: {error}"
        raise mismatch(kind, what, "an input of the stated form", got, where=where) from error

    def _origin(self, error: BaseException) -> tuple[str, bool]:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _SOURCE:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.recipe.origin[line - 1] if line else ("Root", False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tracer, (self.recipe,)

    def __repr__(self) -> str:
        return f"Tracer({len(self.recipe.origin)} lines, {len(self.recipe.signatures)} operations)"


def outputs_in(result_type: ResultType, result: Any) -> dict[str, list[int]]:
    """Name the values in the output of the root."""
    found: dict[str, list[int]] = {}

    def name(terminal: ResultType, value: Any) -> None:
        if isinstance(terminal, TensorType):
            key = f"output_{len(found)}" if result_type.size else f"output:{terminal}"
            found.setdefault(key, []).append(value)

    result_type.for_each_terminal(name, result)
    return found


@dataclass(frozen=True, eq=False)
class TracedBatch:
    """The schedule of a mini-batch, for the way from a loader worker to the compiled module.

    Args:
        schedule: Integers and constants.
        labels: For each metric the labels of its values, example after example.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler.create(td.Map(td.Scalar()) >> td.Sum())
        >>> compiler.collate([[1.0, 2.0], [3.0]])
        TracedBatch(2 examples, 1 steps)
    """

    schedule: Schedule
    labels: dict[str, list[Any]]

    def to(self, *args: Any, **kwargs: Any) -> "TracedBatch":
        """Move to a device."""
        return replace(self, schedule=self.schedule.to(*args, **kwargs))

    def pin_memory(self) -> "TracedBatch":
        """Copy to page-locked memory, from which the copy to a device is asynchronous."""
        return replace(self, schedule=self.schedule.pin_memory())

    def record_stream(self, stream: Any) -> "TracedBatch":
        """Tell the CUDA allocator that a stream uses the tensors."""
        self.schedule.record_stream(stream)
        return self

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
    """Trace examples and merge them into a mini-batch; fits a loader's ``collate_fn``.

    Args:
        tracer: From a compiler.
        policy: ``"depth"``, ``"agenda"``, ``LearnedPolicy``, a function.
        merge_equal: Make equal calls on equal constants once.
        max_depth: Refuse deeper examples.

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
        # An unknown name is refused here, not with the first mini-batch.
        policy_of(policy)
        self.tracer, self.policy = tracer, policy
        self.merge_equal, self.max_depth = merge_equal, max_depth

    def __call__(self, examples: Iterable[Any]) -> TracedBatch:
        """Make a mini-batch of examples, traced or not."""
        traced = [
            one if isinstance(one, Traced) else self.tracer(one, number)
            for number, one in enumerate(list_of_examples(examples))
        ]
        if not traced:
            raise mismatch(ValueError, "Compiler: the list of examples is empty", "at least one", 0)
        if self.max_depth is not None:
            self._check_depth(traced, self.max_depth)
        recipe = self.tracer.recipe
        merged, _ = merge_traced(recipe, traced)
        schedule = Schedule.from_programs([merged], self.policy, merge_equal=self.merge_equal)
        labels = {
            name: [label for one in traced for label in one.labels[name]]
            for name in recipe.metric_types
        }
        return TracedBatch(schedule, labels)

    def _check_depth(self, traced: Sequence[Traced], most: int) -> None:
        for number, one in enumerate(traced):
            if (depth := self.tracer.program(one).depth) > most:
                what = "Compiler: an example is deeper than max_depth"
                expected = f"at most {most} calls one after another"
                raise mismatch(AssertionError, what, expected, depth, where=f"example {number}")


def pool_of(tracer: Tracer, processes: int | None) -> Any:
    """Start processes that hold a tracer."""
    method = "spawn"
    try:
        pickle.dumps(tracer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        method = "fork"
        if method not in multiprocessing.get_all_start_methods():
            what = "Compiler.multiprocessing_pool: a function cannot be sent to another process"
            hint = "def at the top of a module, in place of a lambda or an inner function"
            expected = "host functions that can be pickled"
            raise mismatch(TypeError, what, expected, str(error), hint=hint) from error
    return multiprocessing.get_context(method).Pool(processes, _set_tracer, (tracer,))


def traced_in(pool: Any, examples: Iterable[Any], chunk_size: int, ordered: bool) -> Iterator[Any]:
    """Trace examples in a pool, in their order or as they are ready."""
    trace = pool.imap if ordered else pool.imap_unordered
    return trace(_trace, enumerate(examples), chunk_size)


_worker: list[Tracer] = []


def _set_tracer(tracer: Tracer) -> None:
    _worker[:] = [tracer]


def _trace(numbered: tuple[int, Any]) -> Traced:
    number, example = numbered
    return _worker[0](example, number)
