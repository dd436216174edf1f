"""Run a schedule with modules: gather, call and write, step by step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.operation import (
    Function,
    Operation,
    Operations,
    Ragged,
    Signature,
    calls_only,
    row_type_of,
)
from pyg_dynbatch.core.row_buffer import (
    Pick,
    Read,
    RowBuffer,
    Rows,
    Write,
    check_no_transforms,
    exchange,
    new_token,
    outside_graphs,
    unsupported,
)
from pyg_dynbatch.core.steps import BufferSpec, Chain, IndexSlice, Step, Steps, packed
from pyg_dynbatch.core.types import RaggedRows, RowType, TensorType, describe, parts_of


class Engine(nn.Module):
    """Run schedules, with one batched call of a module per step and one row buffer per row type.

    Args:
        operations: The operations that recordings may call.

    Raises:
        TypeError: If ``operations`` is not an :class:`Operations`.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2. Differs: values are read from any
        earlier step, so nothing is copied forward.

    Example:
        >>> from pyg_dynbatch.core.scheduling import schedule_recordings
        >>> from pyg_dynbatch.core.recording import Recording
        >>> scalar, operations = TensorType(()), Operations()
        >>> add = operations.add(torch.add, [scalar, scalar], [scalar], name="add")
        >>> recording = Recording()
        >>> one, two = (recording.constant(scalar, x) for x in (1.0, 2.0))
        >>> recording.output(recording.call(add, one, two))
        >>> Engine(operations)(schedule_recordings([recording, recording]))["output"]
        tensor([3., 3.])
    """

    _precision: Tensor

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        if not isinstance(operations, Operations):
            got = type(operations).__name__
            raise mismatch(TypeError, "Engine: not Operations", "Operations", got)
        self.operations = operations
        # Follows .to() and .double(): gives the working precision and the device of constants.
        self.register_buffer("_precision", torch.empty(0), persistent=False)

    @outside_graphs
    def forward(
        self, schedule: Steps, inputs: Mapping[RowType | str, Any] | None = None
    ) -> dict[str, Any]:
        """Run a schedule.

        Args:
            schedule: On the device of the modules.
            inputs: For every row type of input rows, or for its tag, the rows of all examples,
                one example after another, ``[row, …]``; gradients flow into them.

        Returns:
            For every output name its rows ``[row, …]`` (a tuple of tensors for a tuple type),
            ordered by example; ``schedule.example_of(name)`` gives each row's example.

        Raises:
            LookupError: If the schedule names an operation the engine does not have.
            TypeError: If signatures, results of operations or input rows have a wrong type.
            ValueError: If the number of input rows is not that of the schedule.
            RuntimeError: If an operation changes an argument in place.
        """
        check_no_transforms("Engine")
        run = Run(self)
        run.extend(schedule, inputs or {})
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if torch.is_grad_enabled() and distributed:
            run.touch_unused()
        return run.outputs()

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported("Engine", "torch.jit.script (TorchScript)")

    def operation_of(self, signature: Signature) -> Operation:
        """Return the operation of a signature; raise an error if none has its name and types."""
        name = signature.name
        if name not in self.operations:
            known = ", ".join(s.name for s in self.operations.signatures) or "none"
            what, hint = f"Engine: no operation is called {name!r}", "use this engine's signatures"
            raise mismatch(LookupError, what, f"one of {known}", signature, hint=hint)
        operation = self.operations[name]
        own = operation.signature
        if (own.inputs, own.outputs) != (signature.inputs, signature.outputs):
            what = f"Engine: operation {name!r} has a different signature"
            raise mismatch(TypeError, what, own, signature)
        return operation

    def no_rows(self, row_type: RowType) -> Rows:
        """Return zero rows of a row type, one tensor per part."""
        like = self._precision
        return tuple(
            like.new_zeros(0, *part.shape, dtype=self.working_dtype(part.dtype))
            for part in parts_of(row_type)
        )

    @property
    def device(self) -> torch.device:
        """Device of the engine, which follows ``.to()``."""
        return self._precision.device

    def working_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Replace float32 by the working precision of the engine."""
        return self._precision.dtype if dtype == torch.float32 else dtype

    def __repr__(self) -> str:
        """List the operations."""
        return f"Engine({', '.join(s.name for s in self.operations.signatures)})"


class _Known(NamedTuple):
    """What is called for a signature."""

    operation: Operation
    run: Callable[..., Any]
    results: list[tuple[tuple[int, ...], torch.dtype]]  # empty if rows have several parts
    is_function: bool  # whose arguments and results need not be checked


class Run:
    """One run of an engine: its row buffers, and the token that orders reads and writes.

    A run may be extended: a further schedule finds the rows of the earlier ones as its first
    inputs, and gradients flow through all of them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # Rows to be written before the next read: one call of autograd per step does both.
        self.pending: list[Write] = []
        self.buffers: list[RowBuffer] = []
        self.called: Operation | None = None  # the last one, which errors are about
        self._by_signature: dict[int, tuple[Signature, _Known]] = {}
        # What steps share: per weight, for the layers that use it; per type, rows on stacks.
        self.shared: dict[Any, Any] = {}

    def extend(self, schedule: Steps, inputs: Mapping[RowType | str, Any]) -> None:
        """Run a schedule; of inputs with rows in a buffer already, only the others are given."""
        if not self.buffers:
            self.token = new_token(schedule.index)
        self.schedule = schedule
        num_open = len(self.buffers)
        # Those that are called: the steps of a flush are few, its signatures may be many.
        self.operations = {
            number: self._known_call(schedule.signatures[number]) for number in schedule.operations
        }
        for number, buffer in enumerate(self.buffers):
            spec = schedule.buffers[number]
            if inputs and (given := inputs.get(spec.row_type)) is not None:
                self.pending.append(Write(buffer, buffer.rows, given))
            buffer.grow(spec.rows)
        columns = zip(schedule.buffers[num_open:], schedule.constants[num_open:], strict=True)
        for spec, constants in columns:
            self._open_buffer(spec, constants, _input_rows(inputs, spec))
        outer = current_run.set(self)
        try:
            for number, step in enumerate(schedule.steps):
                self.make(number, step)
        finally:
            current_run.reset(outer)

    def _known_call(self, signature: Signature) -> _Known:
        """Return what is called for a signature; it is looked up once per run."""
        known = self._by_signature.get(id(signature))
        if known is None or known[0] is not signature:
            operation = self.engine.operation_of(signature)
            is_called = calls_only(operation, forward=Operation.forward)
            call = operation.module if is_called else operation
            results, function = list[Any](), None
            if operation.is_plain:
                own: Any = operation.signature.outputs
                results = [(part.shape, self.engine.working_dtype(part.dtype)) for part in own]
                owner = getattr(call, "__self__", call)
                is_kept = [dtype for _, dtype in results] == [part.dtype for part in own]
                function = owner.of_run(call) if is_kept and isinstance(owner, Function) else None
            is_function = function is not None
            known = signature, _Known(operation, function or call, results, is_function)
            self._by_signature[id(signature)] = known
        return known[1]

    def _open_buffer(self, spec: BufferSpec, constants: Rows | None, given: Rows | None) -> None:
        """Allocate a row buffer and fill in its constants and inputs."""
        buffer = RowBuffer(spec.rows)
        self.buffers.append(buffer)
        parts = parts_of(spec.row_type)
        device = self.schedule.device
        like = given or tuple(torch.empty((0, *part.shape), device=device) for part in parts)
        buffer.allocate(like, self._dtypes(parts))
        if constants is not None:
            buffer.put(0, constants)
        if given is not None:
            self.pending.append(Write(buffer, spec.constants, given))

    def make(self, number: int, step: Step) -> None:
        """Run one step."""
        where = f"step {number}"
        given = zip(step.arguments, self._exchange(self._reads(step.arguments)), strict=True)
        results = self.results_of(self.schedule.chain_of(step), given, step.size, where)
        for (kind, start), rows in zip(step.results, results, strict=True):
            self.pending.append(Write(self.buffers[kind], start, rows))

    def results_of(
        self, chain: Chain, given: Iterator[tuple[IndexSlice, Rows]], size: int, where: str
    ) -> list[Rows]:
        """Call the operations of a step on rows that were read; return what is written."""
        made, arguments = list[Rows](), list[Any]()
        for number, numbers in chain.calls:
            self.called, run, results, is_function = self.operations[number]
            if is_function:
                arguments = [(next(given)[1] if n < 0 else made[n])[0] for n in numbers]
                found = _call(self.called, run, arguments, (), where)
                made += [(row,) for row in found] if len(results) > 1 else [(found,)]
                continue
            if results:  # arguments and results are single tensors
                used = [next(given)[1] if n < 0 else made[n] for n in numbers]
                arguments = [rows[0] for rows in used]
            else:
                used, arguments = [], []
                for wanted, n in zip(self.called.signature.inputs, numbers, strict=True):
                    read, rows = next(given) if n < 0 else (None, made[n])
                    used.append(rows)
                    argument = _argument(row_type_of(wanted), rows)
                    if isinstance(wanted, Ragged) and read is not None:
                        calls = read.calls_in(self.schedule.index)
                        argument = RaggedRows(argument, calls, size)
                    arguments.append(argument)
            found = _call(self.called, run, arguments, used, where)
            several = found if len(results) > 1 else (found,)
            if (
                results
                and type(several) is tuple
                and len(several) == len(results)
                and all(
                    type(row) is Tensor and row.dtype == dtype and row.shape == (size, *shape)
                    for row, (shape, dtype) in zip(several, results, strict=True)
                )
            ):
                made += [(row,) for row in several]
            else:
                made += self._checked(found, size, where)
        return [made[number] for number in chain.outputs]

    def _checked(self, results: Any, size: int, where: str) -> list[Rows]:
        """Check results, and convert them to the working precision."""
        signature = self.called.signature  # type: ignore[union-attr]
        checked = _checked_results(signature, results, size, where)
        for number, row_type in enumerate(signature.outputs):
            checked[number] = self._in_working_precision(checked[number], row_type, where)
        return checked

    def _in_working_precision(self, rows: Rows, row_type: RowType, where: str) -> Rows:
        dtypes = self._dtypes(parts_of(row_type))
        _check_precision(dtypes, rows, self.called.signature, where)  # type: ignore[union-attr]
        return tuple(row.to(dtype) for row, dtype in zip(rows, dtypes, strict=True))

    def _dtypes(self, parts: tuple[TensorType, ...]) -> tuple[torch.dtype, ...]:
        """Return the dtypes in which rows of a type are kept."""
        return tuple(self.engine.working_dtype(part.dtype) for part in parts)

    def _exchange(self, reads: Sequence[Read], copy: bool = False) -> list[Rows]:
        """Write the pending rows, then read."""
        self.token, found = exchange(self.token, self.pending, reads, copy)
        self.pending = []
        return found

    def _reads(self, slices: Sequence[IndexSlice]) -> list[Read]:
        """List what to read; arguments with adjacent row numbers share a gather."""
        reads, flat = [], self.schedule.index
        number = 0
        while number < len(slices):
            first = slices[number]
            buffer, num_arguments = self.buffers[first.buffer], packed(slices, number)
            if num_arguments == 1:
                reads.append(Read(buffer, self._pick(first)))
            else:
                index = flat[first.offset : first.offset + num_arguments * first.length]
                reads.append(Read(buffer, index, num_arguments))
            number += num_arguments
        return reads

    def _pick(self, read: IndexSlice) -> Pick:
        return (read.start, read.length) if read.start >= 0 else read.rows_in(self.schedule.index)

    def touch_unused(self) -> None:
        """Call unused operations on zero rows: other ranks wait for all their gradients."""
        used = {self.operations[number].operation for number in self.schedule.operations}
        no_row = self.schedule.index[:0]
        for operation in self.engine.operations:
            signature = operation.signature
            if operation in used:
                continue
            arguments: list[Any] = []
            for wanted in signature.inputs:
                row_type = row_type_of(wanted)
                rows = _argument(row_type, self.engine.no_rows(row_type))
                is_ragged = isinstance(wanted, Ragged)
                arguments.append(RaggedRows(rows, no_row, 0) if is_ragged else rows)
            results = operation(*arguments)
            # A module without arguments always returns its one row.
            size = 0 if signature.inputs else 1
            for found in _checked_results(signature, results, size, "the call on zero rows"):
                none = tuple(part[:0] for part in found)
                buffer = RowBuffer(0)
                buffer.allocate(none, tuple(part.dtype for part in none))
                self.token = buffer.write(self.token, 0, none)

    def read(self, picks: Sequence[tuple[int, Pick]]) -> list[Rows]:
        """Read copies of rows of buffers, with their gradients."""
        return self._exchange([Read(self.buffers[n], pick) for n, pick in picks], copy=True)

    def append(self, number: int, rows: Tensor) -> None:
        """Add rows to a buffer, after those that it has."""
        buffer = self.buffers[number]
        self.pending.append(Write(buffer, buffer.rows, (rows,)))
        buffer.grow(buffer.rows + rows.size(0))

    def peek(self, number: int, rows: Pick) -> Tensor:
        """Return rows of a buffer without gradients."""
        if self.pending:
            self._exchange([])
        return self.buffers[number].take(rows)[0]

    def outputs(self) -> dict[str, Any]:
        """Read all outputs."""
        found = self.schedule.outputs
        reads = [Read(self.buffers[o.rows.buffer], self._pick(o.rows)) for o in found.values()]
        results = self._exchange(reads, copy=True)
        return {
            name: rows[0] if len(rows) == 1 else rows
            for name, rows in zip(found, results, strict=True)
        }


current_run: ContextVar[Run | None] = ContextVar("current_run", default=None)
"""The run whose step is being computed."""


def _argument(row_type: RowType, rows: Rows) -> Any:
    """Return rows as a module takes them: a tensor or a tuple of tensors."""
    return rows if isinstance(row_type, tuple) else rows[0]


def _input_rows(inputs: Mapping[RowType | str, Any], spec: BufferSpec) -> Rows | None:
    """Return the checked input rows of one buffer; None if it has none."""
    kind, parts = describe(spec.row_type), parts_of(spec.row_type)
    tag = parts[0].tag if len(parts) == 1 else ""
    given = inputs.get(spec.row_type, inputs.get(tag) if tag else None)
    if given is None:
        if not spec.inputs:
            return None
        what = f"Engine: the inputs of type {kind} are missing"
        got = f"inputs for {', '.join(map(str, inputs)) or 'nothing'}"
        hint = f"engine(schedule, inputs={{{tag or '<row type>'!r}: rows}})"
        raise mismatch(ValueError, what, f"{spec.inputs} rows", got, hint=hint)
    rows = given if isinstance(given, tuple) else (given,)
    if all(isinstance(part, Tensor) and part.dim() > 0 for part in rows) and any(
        part.size(0) != spec.inputs for part in rows
    ):
        what = f"Engine: wrong number of input rows of type {kind}"
        raise mismatch(ValueError, what, spec.inputs, ", ".join(map(describe_value, rows)))
    _check_rows(rows, parts, spec.inputs, f"Engine: input rows of type {kind} do not fit")
    return rows


def _call(
    operation: Operation, run: Callable[..., Any], arguments: Sequence[Any], rows: Sequence[Rows],
    where: str,
) -> Any:  # fmt: skip
    """Call an operation; raise an error if it changes its rows, which other calls also read."""
    # In inference mode tensors do not count in-place changes.
    counted = [] if torch.is_inference_mode_enabled() else [p for parts in rows for p in parts]
    before = [part._version for part in counted]
    try:
        results = run(*arguments)
    except Exception as error:
        error.add_note(f"  where:    operation {operation.signature.name!r}, {where}")
        raise
    if [part._version for part in counted] != before:
        what = f"Operation {operation.signature.name!r}: its module changed an argument in place"
        got = "a layer with inplace=True, or a method such as add_()"
        hint = "inplace=False, or a clone: other calls read these rows too"
        raise mismatch(RuntimeError, what, "unchanged rows", got, where=where, hint=hint)
    return results


def _checked_results(signature: Signature, results: Any, size: int, where: str) -> list[Rows]:
    """Check the results of a module against its signature."""
    what = f"Operation {signature.name!r}: invalid results of its module"
    if len(signature.outputs) == 1:
        results = (results,)
    if not isinstance(results, tuple) or len(results) != len(signature.outputs):
        wanted = f"{len(signature.outputs)} results: {signature}"
        got = ", ".join(map(describe_value, results if isinstance(results, tuple) else (results,)))
        raise mismatch(TypeError, what, wanted, got, where=where)
    checked = [result if isinstance(result, tuple) else (result,) for result in results]
    for rows, row_type in zip(checked, signature.outputs, strict=True):
        _check_rows(rows, parts_of(row_type), size, what, where)
    return checked


def _check_rows(
    rows: tuple[Any, ...], parts: tuple[TensorType, ...], size: int, what: str, where: str = ""
) -> None:
    if len(rows) != len(parts) or not all(
        _fits(row, part, size) for row, part in zip(rows, parts, strict=True)
    ):
        wanted = f"{size} rows of {describe(parts if len(parts) > 1 else parts[0])}"
        got, hint = ", ".join(map(describe_value, rows)), "one row per call, along the first axis"
        raise mismatch(TypeError, what, wanted, got, where=where, hint=hint)


def _check_precision(
    dtypes: Sequence[torch.dtype], rows: Rows, signature: Signature, where: str
) -> None:
    """Raise an error for results in double precision that would be rounded."""
    for row, kept in zip(rows, dtypes, strict=True):
        if row.dtype == torch.float64 != kept:
            what = f"Operation {signature.name!r}: its results would be rounded"
            hint = "float64 as the type of the result, or engine.double()"
            raise mismatch(TypeError, what, kept, row.dtype, where=where, hint=hint)


def _fits(row: Any, part: TensorType, size: int) -> bool:
    if not isinstance(row, Tensor):
        return False
    # Half, single and double precision mix (autocast, .double()); other dtypes do not.
    return row.shape == (size, *part.shape) and (
        row.dtype == part.dtype or (row.dtype.is_floating_point and part.dtype.is_floating_point)
    )
