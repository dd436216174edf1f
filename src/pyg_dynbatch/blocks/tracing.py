"""Turn examples into integers that name their calls, and merge those of a mini-batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.blocks.code import (
    CallSite,
    CompiledSource,
    Origin,
    TraceError,
    UnknownKey,
    flattened,
    run_trampoline,
)
from pyg_dynbatch.blocks.types import ResultType, TensorType
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.policy import Policy, checked_policy
from pyg_dynbatch.core.recording import INPUT, Recording
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import TensorType as RowTensorType
from pyg_dynbatch.core.types import constant_dtype, overflowing_value, range_of

_FILENAME = "<blocks>"


class Tracer:
    """Record the calls of one example; it has no parameters, so loader workers can hold it.

    A :class:`Compiler` creates it; call it on an example.

    Args:
        source: The written code and its tables.

    Example:
        >>> from pyg_dynbatch import blocks as td
        >>> tracer = td.Compiler(td.Map(td.Scalar()) >> td.Sum()).tracer
        >>> tracer([1.0, 2.0])
        Recording(2 calls, depth 1, outputs ['output_0'])
    """

    def __init__(self, source: CompiledSource) -> None:
        names = dict(source.names)
        exec(compile(source.source, _FILENAME, "exec"), names)  # noqa: S102 - our own text
        self.source = source
        self._begin: Callable[[], Any] = names["begin"]

    def __call__(
        self, example: object, number: int | None = None, max_depth: int | None = None
    ) -> Recording:
        """Record the calls of one example; its number is for messages."""
        return self.trace(example, number, max_depth)[0]

    def trace(
        self, example: object, number: int | None = None, max_depth: int | None = None
    ) -> tuple[Recording, Any]:
        """Record the calls of one example; also return the output, with numbers of values."""
        source = self.source
        # Lists and dictionaries that the written code fills; cut() empties the lists of records.
        code, data, metrics, labels, root, cut = self._begin()
        recording = Recording(
            source.site_table, np.zeros(0, np.int32), model=source.fingerprint, result=labels
        )
        packed_code: list[np.ndarray] = []

        def pack() -> None:
            packed_code.append(np.array(code, dtype=np.int32))
            self._add_data(recording, data)
            cut()

        try:
            result = run_trampoline(root, example, max_depth, code, pack)
            pack()
            outputs: dict[str, list[int]] = {}
            for name, value in named_terminals(source.result_type, result):
                if name:
                    outputs.setdefault(name, []).append(value)
            outputs |= {f"metric:{name}": values for name, values in metrics.items() if values}
        except Exception as error:
            self._raise_with_place(error, number)

        recording.code = np.concatenate(packed_code)
        recording.outputs = {name: np.array(values, np.int32) for name, values in outputs.items()}
        return recording, result

    def _add_data(self, recording: Recording, data: dict[int, list[Any]]) -> None:
        """Add the constants, and the numbers of inputs, that were read at each site."""
        for number, items in data.items():
            if not items:
                continue
            site = self.source.sites[number]
            if site.site.kind == INPUT:
                row_type = site.row_type
                before = recording.num_inputs.get(row_type, 0)
                recording.num_inputs[row_type] = max(before, _num_rows(site, items))
            else:
                rows = _constants(site, items)
                recording.data.setdefault(number, []).append((rows,))

    def _raise_with_place(self, error: Exception, number: int | None) -> NoReturn:
        """Raise an error again, with the block and the example."""
        origin = self._origin(error)
        path = origin.path
        if isinstance(error, TraceError) and error.path:
            path = error.path
        label = path.rpartition(".")[2]
        where = f"block {path}" if number is None else f"example {number}, block {path}"

        if isinstance(error, TraceError):
            problem = f"{label}: {error.problem}"
            mismatched = mismatch(error.kind, problem, error.expected, error.got, where=where)
            raise mismatched from error.__cause__
        is_of_input = isinstance(error, KeyError | IndexError | TypeError | ValueError)
        if origin.is_users_own or not is_of_input:
            error.add_note(f"  where:    {where}")
            raise error

        kind = UnknownKey if isinstance(error, KeyError) else type(error)
        problem = f"{label}: the input does not fit"
        got = f"{type(error).__name__}: {error}"
        raise mismatch(kind, problem, "an input of the stated form", got, where=where) from error

    def _origin(self, error: BaseException) -> Origin:
        """Find the line of the written code that failed."""
        trace = error.__traceback__
        line = 0
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _FILENAME:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.source.origins[line - 1] if line else Origin("Root")

    def __reduce__(self) -> tuple[Any, ...]:
        return Tracer, (self.source,)

    def __repr__(self) -> str:
        operations = len(self.source.site_table.signatures)
        return f"Tracer({len(self.source.origins)} lines, {operations} operations)"


class Collater:
    """Trace examples and merge them into a mini-batch; the ``collate_fn`` of a loader.

    Args:
        tracer: From a compiler.
        policy: Order of the steps: ``"depth"`` or ``"agenda"``.
        max_depth: Raise an ``AssertionError`` for examples with more calls one after another. An
            example nested ten times as deep in declared blocks is not traced to its end.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from pyg_dynbatch import blocks as td
        >>> compiler = td.Compiler(td.Map(td.Scalar()) >> td.Sum())
        >>> loader = DataLoader([[1.0, 2.0], [3.0]], batch_size=2, collate_fn=compiler.collate)
        >>> [compiler(batch).output.tolist() for batch in loader]
        [[3.0, 3.0]]
    """

    def __init__(
        self, tracer: Tracer, policy: Policy = "depth", max_depth: int | None = None
    ) -> None:
        self.tracer = tracer
        self.policy = checked_policy(policy)
        self.max_depth = max_depth

    def __call__(self, examples: Iterable[Any]) -> Steps:
        """Return the schedule of some examples, recorded or not, with the labels of metrics."""
        source = self.tracer.source
        recordings = [
            self._recorded(example, number) for number, example in enumerate(_listed(examples))
        ]
        if not recordings:
            raise mismatch(ValueError, "Compiler: the list of examples is empty", "at least one", 0)
        for number, recording in enumerate(recordings):
            check_model(source, recording.model, f"example {number} is a recording")
            self._check_depth(recording, number)

        steps = schedule_recordings(recordings, self.policy)
        labels = {
            name: [label for recording in recordings for label in recording.result[name]]
            for name in source.metric_types
        }
        return replace(steps, result=labels, model=source.fingerprint)

    def _recorded(self, example: object, number: int) -> Recording:
        if isinstance(example, Recording):
            return example
        return self.tracer(example, number, self.max_depth)

    def _check_depth(self, recording: Recording, number: int) -> None:
        if self.max_depth is None or recording.depth <= self.max_depth:
            return
        problem = "Compiler: an example is deeper than max_depth"
        expected = f"at most {self.max_depth} calls one after another"
        where = f"example {number}"
        raise mismatch(AssertionError, problem, expected, recording.depth, where=where)


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
        >>> model = td.Compiler(td.AllOf(td.Scalar(), td.Scalar() >> td.Metric("m")))
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


def named_terminals(result_type: ResultType, result: object) -> list[tuple[str, Any]]:
    """List the terminals in the root's output with the outputs they belong to; "" for objects.

    Each tensor is an output of its own, ``output_0``; where their number differs, as in a sequence,
    those of one type are one output, ``output:float32[3]``.
    """
    terminals: list[tuple[str, Any]] = []
    numbers = count()

    def add(terminal: ResultType, value: object) -> None:
        if not isinstance(terminal, TensorType):
            name = ""
        elif result_type.size:
            name = f"output_{next(numbers)}"
        else:
            name = f"output:{terminal}"
        terminals.append((name, value))

    result_type.for_each_terminal(add, result)
    return terminals


# Constants ----------------------------------------------------------------------------------------

# Kinds of numbers (numpy's letters) that each kind can hold.
_KINDS = {"f": "fiub", "i": "iub", "c": "cfiub"}
# What strings are parsed as.
_WIDEST = {"f": np.float64, "i": np.int64, "c": np.complex128}
_NOT_A_NUMBER = (ValueError, TypeError, RuntimeError, OverflowError)
_SCALARS = {int, float, bool, str}


def _constants(site: CallSite, items: Sequence[Any]) -> np.ndarray:
    """Stack the constants of one site; raise an error for an invalid shape or dtype."""
    if site.table is not None:
        chosen: np.ndarray = site.table[np.asarray(items, dtype=np.int64)]
        return chosen

    row_type = site.row_type
    try:
        rows = _stacked(items, row_type)
    except _NOT_A_NUMBER as reason:
        _refuse(site, items, TypeError, f"{items[0]!r}: {reason}")
    if rows.shape[1:] != row_type.shape:
        _refuse(site, items, ValueError, _described(rows, items))
    if rows.dtype.kind not in _KINDS[_kind(row_type)]:
        _refuse(site, items, TypeError, _described(rows, items))

    dtype = row_type.dtype
    overflowing = overflowing_value(rows, dtype)
    if overflowing is not None:
        expected = f"{row_type}, {range_of(dtype)}"
        raise TraceError(ValueError, "a number is out of range", expected, overflowing, site.path)
    if site.bound is not None:
        size, path = site.bound
        beyond = rows[(rows < 0) | (rows >= size)]
        if beyond.size:
            problem = "the index of a vector is out of range"
            raise TraceError(IndexError, problem, f"from 0 to {size - 1}", beyond[0], path)
    return rows.astype(constant_dtype(rows.dtype, dtype), copy=False)


def _refuse(site: CallSite, items: Sequence[Any], kind: type[Exception], got: str) -> NoReturn:
    """Raise an error about the first of several items that does not fit."""
    if len(items) > 1:
        for item in items:
            _constants(site, [item])
    problem = "dtype differs" if kind is TypeError else "shape differs"
    shortened = got if len(got) < 200 else got[:200] + " …"
    raise TraceError(kind, problem, str(site.row_type), shortened, site.path)


def _described(rows: np.ndarray, items: Sequence[Any]) -> str:
    return f"{rows.dtype}[{', '.join(map(str, rows.shape[1:]))}], {items[0]!r}"


def _kind(row_type: RowTensorType) -> str:
    if row_type.dtype.is_complex:
        return "c"
    return "f" if row_type.dtype.is_floating_point else "i"


def _stacked(items: Sequence[Any] | np.ndarray, row_type: RowTensorType) -> np.ndarray:
    """One array of all items; strings are parsed as numbers, and whole floats are integers."""
    if isinstance(items[0], torch.Tensor):
        tensors = torch.stack([torch.as_tensor(item).detach() for item in items]).cpu()
        if tensors.dtype == torch.bfloat16:
            tensors = tensors.float()
        items = tensors.numpy()
    if _is_masked(items):
        raise TypeError("a masked array has missing entries")

    rows = np.asarray(items)
    kind = _kind(row_type)
    if rows.dtype.kind == "U":
        if len(items) == 1:
            return _parsed(rows, kind)
        # One by one, since numpy converts numbers to strings if there is a string among them.
        return np.concatenate([_stacked([item], row_type) for item in items])
    if rows.dtype.kind == "f" and kind == "i":
        with np.errstate(invalid="ignore"):
            # From the items, since large integers among floats have lost digits by now.
            whole = np.asarray(items, np.int64)
        return whole if (whole == rows).all() else rows
    return rows


def _parsed(texts: np.ndarray, kind: str) -> np.ndarray:
    """Parse strings as numbers."""
    numbers: np.ndarray = texts.astype(_WIDEST[kind])
    if kind != "i":
        is_infinity = np.char.find(np.char.lower(texts), "inf") >= 0
        if (np.isinf(numbers) & ~is_infinity).any():
            raise OverflowError("a number is out of range")
    return numbers


def _is_masked(value: object) -> bool:
    """Whether entries are missing, which numpy would replace by what is in memory."""
    if isinstance(value, np.ma.MaskedArray):
        return bool(np.ma.is_masked(value))
    if not isinstance(value, list | tuple) or set(map(type, value)) <= _SCALARS:
        return False
    return any(map(_is_masked, value))


def _num_rows(site: CallSite, items: Sequence[Any]) -> int:
    """Check the external rows that are named; return the least number of rows of the example."""
    most = 0
    for item in items:
        row, rows = item if isinstance(item, tuple) else (item, item + 1)
        if not 0 <= row < rows:
            expected = f"a row from 0 to {rows - 1}"
            raise TraceError(IndexError, "the row does not exist", expected, row, site.path)
        most = max(most, rows)
    return most


# Checks -------------------------------------------------------------------------------------------


def check_model(source: CompiledSource, model: str, subject: str) -> None:
    """Raise an error for recordings of a different model."""
    if model != source.fingerprint:
        names = ", ".join(signature.name for signature in source.site_table.signatures) or "none"
        problem = f"Compiler: {subject} of a different model"
        expected = f"a recording by this model, {source.fingerprint} (operations: {names})"
        got = f"a recording by model {model}"
        raise mismatch(ValueError, problem, expected, got, hint="record the examples again")


def _listed(examples: Iterable[Any]) -> list[Any]:
    try:
        return list(examples)
    except TypeError as error:
        problem = "Compiler: the examples cannot be iterated over"
        got = type(examples).__name__
        hint = "[example], if this is a single one"
        raise mismatch(TypeError, problem, "a list of examples", got, hint=hint) from error
