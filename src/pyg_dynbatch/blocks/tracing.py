"""Turn examples into integers that name their calls, and merge those of a mini-batch."""

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.blocks.code import Recipe, drive
from pyg_dynbatch.blocks.errors import Complaint, UnknownKey
from pyg_dynbatch.blocks.inputs import rows_of
from pyg_dynbatch.blocks.types import ResultType, TensorType
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.program import RESULT, Program
from pyg_dynbatch.core.schedule import Schedule


class Traced(NamedTuple):
    """Holds one traced example, in as few integers as will do.

    Every record of the code begins with the number of a place in the model, followed by the
    arguments of the call; a value is named by the position of its record.

    Args:
        code: All records, one after another.
        starts: Where each begins.
        data: For each place that reads the host's data the constants, one a record.
        marks: The values of each output.
        labels: The labels of the values of each metric.
        result: What the root gave, where the compiler asks for it.

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


class _Records(NamedTuple):
    """All records of a mini-batch; places are those in the joined code."""

    code: np.ndarray
    start: np.ndarray
    site: np.ndarray
    is_read: np.ndarray
    offset: np.ndarray


def _join(traced: Sequence[Traced]) -> _Records:
    sizes = np.array([one.code.size for one in traced], dtype=np.int64)
    offset = np.cumsum(sizes) - sizes
    code = np.concatenate([one.code for one in traced]).astype(np.int64)
    counts = [one.starts.size for one in traced]
    start = np.concatenate([one.starts for one in traced]) + np.repeat(offset, counts)
    site = code[start]
    is_read = code >= 0
    is_read[start] = False
    code[is_read] += np.repeat(offset, sizes)[is_read]
    return _Records(code, start, site, is_read, offset)


def merge_traced(recipe: Recipe, traced: Sequence[Traced]) -> tuple[Program, np.ndarray]:
    """Joins traced examples into what the core schedules."""
    tables, records = recipe.tables, _join(traced)
    start, site = records.start, records.site
    marks, examples = _marks(traced, records.offset)
    width, leader = _kept(recipe, records, marks)
    kind = tables["kind"][site]
    is_call = (kind == RESULT) & (width > 0)
    first_value = np.cumsum(width) - width
    number = np.zeros(records.code.size + tables["type"].shape[1], dtype=np.int64)
    for slot in range(tables["type"].shape[1]):
        has = width > slot
        number[start[has] + slot] = first_value[has] + slot
    number[start] = number[leader]
    call_number = np.cumsum(is_call) - 1
    constants, num_inputs, place = _constants(recipe, traced, site)
    place[is_call] = call_number[is_call]
    slot_of = np.arange(int(width.sum())) - np.repeat(first_value, width)
    position = np.flatnonzero(records.is_read)
    owner = np.repeat(np.arange(start.size), np.diff(start, append=records.code.size))[position]
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
        read_value=number[records.code[position]],
        read_call=call_number[owner],
        read_argument=_arguments(recipe, position - start[owner] - 1, site[owner]),
        outputs={name: number[found] for name, found in marks.items()},
        output_example=examples,
        num_examples=len(traced),
    )
    return merged, site[is_call]


def _marks(
    traced: Sequence[Traced], offset: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The values of each output, and the example of each."""
    values: dict[str, list[np.ndarray]] = {}
    examples: dict[str, list[np.ndarray]] = {}
    for number, one in enumerate(traced):
        for name, found in one.marks.items():
            values.setdefault(name, []).append(found + offset[number])
            examples.setdefault(name, []).append(np.full(found.size, number))
    return (
        {name: np.concatenate(found) for name, found in values.items()},
        {name: np.concatenate(found) for name, found in examples.items()},
    )


def _kept(
    recipe: Recipe, records: _Records, marks: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """How many values each record makes, and where the record begins that stands for it."""
    width = recipe.tables["width"][records.site]
    leader = records.start.copy()
    used = np.zeros(records.code.size, dtype=bool)
    if recipe.free:
        used[records.code[records.is_read]] = True
        for found in marks.values():
            used[found] = True
    for site in recipe.free:
        mine = np.flatnonzero(records.site == site)
        width[mine] = 0
        if used[records.start[mine]].any():
            width[mine[0]] = 1
            leader[mine] = records.start[mine[0]]
    return width, leader


def _arguments(recipe: Recipe, argument: np.ndarray, site: np.ndarray) -> np.ndarray:
    """Which argument each read is: after the fixed ones, the rows of the ragged ones alternate."""
    fixed, ragged = recipe.tables["fixed"][site], recipe.tables["ragged"][site]
    beyond = np.flatnonzero(argument >= fixed)
    argument[beyond] = fixed[beyond] + (argument[beyond] - fixed[beyond]) % ragged[beyond]
    return argument


def _constants(
    recipe: Recipe, traced: Sequence[Traced], site: np.ndarray
) -> tuple[list[tuple[np.ndarray, ...]], list[int], np.ndarray]:
    """Stacks the constants of each row type; gives each record its place among them."""
    stacks: list[list[np.ndarray]] = [[] for _ in recipe.row_types]
    counts, num_inputs = [0] * len(recipe.row_types), [0] * len(recipe.row_types)
    place = np.zeros(site.size, dtype=np.int64)
    rows_of_type = _rows_by_type(recipe, traced)
    for number, where in enumerate(recipe.sites):
        if where.kind not in ("constant", "input"):
            continue
        found = [one.data[number] for one in traced if number in one.data]
        if where.kind == "input" and found:
            place[site == number] = _input_rows(traced, number, rows_of_type[where.number])
        elif found:
            stack = np.concatenate(found)
            place[site == number] = counts[where.number] + np.arange(len(stack))
            counts[where.number] += len(stack)
            stacks[where.number].append(stack)
    for number, rows in enumerate(rows_of_type):
        num_inputs[number] = int(rows.sum())
    joined: list[tuple[np.ndarray, ...]] = [
        (np.concatenate(stack),) if stack else () for stack in stacks
    ]
    return joined, num_inputs, place


def _rows_by_type(recipe: Recipe, traced: Sequence[Traced]) -> np.ndarray:
    """How many rows from outside each example has, of each type, ``[type, example]``."""
    rows = np.zeros((len(recipe.row_types), len(traced)), dtype=np.int64)
    for number, where in enumerate(recipe.sites):
        if where.kind == "input":
            for place, one in enumerate(traced):
                if number in one.data:
                    most = int(one.data[number][:, 1].max())
                    rows[where.number, place] = max(rows[where.number, place], most)
    return rows


def _input_rows(traced: Sequence[Traced], number: int, rows: np.ndarray) -> np.ndarray:
    """The rows that one place reads, counted over all examples, of ``rows`` each."""
    before = np.cumsum(rows) - rows
    found = [
        one.data[number][:, 0] + before[place]
        for place, one in enumerate(traced)
        if number in one.data
    ]
    return np.concatenate(found)


_SOURCE = "<blocks>"


class Tracer:
    """Records the calls of one example; holds no parameters, so loader workers can have it.

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
        """Records the calls of one example."""
        code, starts, data, metrics, labels, run = self._begin()
        try:
            result = drive(run, example)
            return self._finish(code, starts, data, metrics, labels, result)
        except Exception as error:
            self._explain(error, number)

    def _finish(
        self,
        code: list[int],
        starts: list[int],
        data: dict[int, list[Any]],
        metrics: tuple[list[int], ...],
        labels: tuple[list[Any], ...],
        result: Any,
    ) -> Traced:
        recipe = self.recipe
        marks = outputs_in(recipe.result_type, result)
        for name, rows in zip(recipe.metric_types, metrics, strict=True):
            if rows:
                marks[f"metric:{name}"] = rows
        stacked = {}
        for number, items in data.items():
            if items:
                site = recipe.sites[number]
                stacked[number] = rows_of(site, recipe.row_types[site.number], items)
        return Traced(
            np.array(code, dtype=np.int32),
            np.array(starts, dtype=np.int32),
            stacked,
            {name: np.array(values, dtype=np.int32) for name, values in marks.items()},
            dict(zip(recipe.metric_types, labels, strict=True)),
            result if recipe.keeps_result else None,
        )

    def program(self, traced: Traced) -> Program:
        """Spells out the program of a traced example, as the core knows programs."""
        return merge_traced(self.recipe, [traced])[0]

    def _explain(self, error: Exception, number: int | None) -> NoReturn:
        """Raises the error again, with the block and the example."""
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
        raise mismatch(
            kind,
            f"{path.rpartition('.')[2]}: the input does not fit",
            "an input of the stated form",
            f"{type(error).__name__}: {error}",
            where=where,
        ) from error

    def _origin(self, error: BaseException) -> tuple[str, bool]:
        trace, line = error.__traceback__, 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _SOURCE:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.recipe.origin[line - 1] if line else ("Root", False)

    def __getstate__(self) -> dict[str, Any]:
        """Keeps the text; the code is compiled again where it arrives."""
        return {"recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compiles the text."""
        self.__init__(state["recipe"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """Says how large the written code is."""
        return f"Tracer({len(self.recipe.origin)} lines, {len(self.recipe.signatures)} operations)"


def outputs_in(result_type: ResultType, result: Any) -> dict[str, list[int]]:
    """Gives names to the values in the root's result."""
    if not result_type.size:
        if result_type.size == 0:
            return {}
        found: dict[str, list[int]] = {}

        def take(terminal: ResultType, value: Any) -> None:
            if isinstance(terminal, TensorType):
                found.setdefault(f"output:{terminal}", []).append(value)

        result_type.for_each_terminal(take, result)
        return found
    pairs = zip(result_type.terminal_types(), result_type.flatten(result), strict=True)
    tensors = [value for kind, value in pairs if isinstance(kind, TensorType)]
    return {f"output_{number}": [value] for number, value in enumerate(tensors)}


@dataclass(frozen=True, eq=False)
class TracedBatch:
    """Carries the schedule of a mini-batch from a loader worker to the compiled module.

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

    def _with(self, schedule: Schedule) -> "TracedBatch":
        return TracedBatch(schedule, self.labels)

    def to(self, *args: Any, **kwargs: Any) -> "TracedBatch":
        """Moves to a device."""
        return self._with(self.schedule.to(*args, **kwargs))

    def pin_memory(self) -> "TracedBatch":
        """Copies into page-locked memory, from which the copy to a device is asynchronous."""
        return self._with(self.schedule.pin_memory())

    def record_stream(self, stream: Any) -> "TracedBatch":
        """Tells the CUDA allocator that a stream uses the tensors."""
        self.schedule.record_stream(stream)
        return self

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return self.schedule.num_examples

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        """Says how large it is."""
        return f"TracedBatch({self.num_examples} examples, {len(self.schedule.steps)} steps)"


@dataclass(frozen=True, eq=False)
class BlockResult:
    """Gives what a compiled block computed for a mini-batch.

    Args:
        output: The root's output, nested as its type says, each tensor ``[example, …]``.
        metric_tensors: For each metric its values, ``[value, …]``: any number an example.
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
        return _flat(self.output)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return [] if value is None else [value]


def collate_traced(
    recipe: Recipe, traced: Sequence[Traced], policy: Any, merge_equal: bool
) -> TracedBatch:
    """Merges traced examples into the schedule of a mini-batch."""
    if not traced:
        raise mismatch(ValueError, "Compiler: there is no example", "one example or more", 0)
    merged, _ = merge_traced(recipe, traced)
    schedule = Schedule.from_programs([merged], policy, merge_equal=merge_equal)
    labels = {
        name: [label for one in traced for label in one.labels[name]]
        for name in recipe.metric_types
    }
    return TracedBatch(schedule, labels)


def result_of(
    kind: ResultType, found: dict[str, Any], batch: TracedBatch, empty: Callable[[str], Tensor]
) -> BlockResult:
    """Nests the rows that an engine gave."""
    count = sum(name.startswith("output_") for name in found)
    rows: Iterator[Tensor] = (found[f"output_{number}"] for number in range(count))
    metrics, examples = {}, {}
    for name in batch.labels:
        key = f"metric:{name}"
        metrics[name] = found[key] if key in found else empty(name)
        has = key in found
        examples[name] = (
            batch.schedule.example_of(key)
            if has
            else torch.zeros(0, dtype=torch.int64, device=batch.schedule.device)
        )
    output = kind.unflatten(rows, None)
    return BlockResult(output, metrics, batch.labels, examples)


def refuse_one_example(examples: Any) -> list[Any]:
    """Takes any iterable of examples."""
    try:
        return list(examples)
    except TypeError as error:
        raise mismatch(
            TypeError,
            "Compiler: the examples cannot be iterated over",
            "a list of examples",
            type(examples).__name__,
            hint="[example], if this is a single one",
        ) from error


def pool_of(tracer: Tracer, processes: int | None) -> Any:
    """Starts processes that hold a tracer."""
    method = "spawn"
    try:
        pickle.dumps(tracer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        method = "fork"
        if method not in multiprocessing.get_all_start_methods():
            raise mismatch(
                TypeError,
                "Compiler.multiprocessing_pool: a function cannot be sent to another process",
                "host functions that can be pickled",
                str(error),
                hint="def at the top of a module, in place of a lambda or an inner function",
            ) from error
    return multiprocessing.get_context(method).Pool(processes, _begin, (tracer,))


def traced_in(pool: Any, examples: Iterable[Any], chunk_size: int, ordered: bool) -> Iterator[Any]:
    """Traces examples in a pool, in their order or as they are ready."""
    trace = pool.imap if ordered else pool.imap_unordered
    return trace(_trace, enumerate(examples), chunk_size)


_worker: list[Tracer] = []


def _begin(tracer: Tracer) -> None:
    _worker[:] = [tracer]


def _trace(numbered: tuple[int, Any]) -> Traced:
    number, example = numbered
    return _worker[0](example, number)
