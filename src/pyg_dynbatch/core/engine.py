"""Run a schedule with modules: gather, call and write, step by step."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.linear import RunProducts
from pyg_dynbatch.core.operation import (
    Operation,
    Operations,
    Ragged,
    Signature,
    TorchFunction,
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
from pyg_dynbatch.core.steps import BufferSpec, IndexSlice, Step, Steps, packed
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
        if torch.is_inference_mode_enabled():
            # Tensors of inference mode do not count the in-place changes that a run refuses.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(schedule, inputs)
        run = Run(self)
        run.extend(schedule, inputs or {})
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if torch.is_grad_enabled() and distributed:
            run.touch_unused(schedule)
        return run.outputs(schedule)

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported("Engine", "torch.jit.script (TorchScript)")

    def operation_of(self, signature: Signature) -> Operation:
        """Return the operation of a signature; raise an error if none has its name and types."""
        name = signature.name
        if name not in self.operations:
            known = ", ".join(s.name for s in self.operations.signatures) or "none"
            problem = f"Engine: no operation is called {name!r}"
            hint = "use this engine's signatures"
            raise mismatch(LookupError, problem, f"one of {known}", signature, hint=hint)
        operation = self.operations[name]
        own = operation.signature
        if (own.inputs, own.outputs) != (signature.inputs, signature.outputs):
            problem = f"Engine: operation {name!r} has a different signature"
            raise mismatch(TypeError, problem, own, signature)
        return operation

    def no_rows(self, row_type: RowType) -> Rows:
        """Return zero rows of a row type, one tensor per part."""
        return tuple(
            self._precision.new_zeros(0, *part.shape, dtype=self.working_dtype(part.dtype))
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


Operand = Tensor | Rows | RaggedRows
"""A value as modules take it: rows, those of each part of a tuple type, or all of many calls."""


class StepCall:
    """Makes the calls of an operation within a step, and checks what it returns.

    Arguments and results are as a module takes and returns them: a tensor, a tuple of tensors for
    a tuple type, ``RaggedRows`` for a ragged argument.
    """

    def __init__(self, engine: Engine, operation: Operation) -> None:
        self.engine = engine
        self.operation = operation
        self.signature = operation.signature
        # Past the operation, unless it has hooks: it would only call its module.
        is_plain = calls_only(operation, forward=Operation.forward)
        self.function: Callable[..., Any] = operation.module if is_plain else operation

    def __call__(self, arguments: Sequence[Operand], size: int) -> Sequence[Any]:
        """Make as many calls as ``size`` says, and return all results."""
        return self._checked(self._called(arguments), size)

    def _called(self, arguments: Sequence[Operand]) -> object:
        """Call the operation; raise an error if it changes rows, which other calls also read."""
        # Tensors of inference mode, as a user's own may be, do not count in-place changes.
        counted = [] if torch.is_inference_mode_enabled() else self._tensors_in(arguments)
        versions = [tensor._version for tensor in counted]
        results = self.function(*arguments)
        if [tensor._version for tensor in counted] != versions:
            problem = f"Operation {self.signature.name!r}: its module changed an argument in place"
            got = "a layer with inplace=True, or a method such as add_()"
            hint = "inplace=False, or a clone: other calls read these rows too"
            raise mismatch(RuntimeError, problem, "unchanged rows", got, hint=hint)
        return results

    def _tensors_in(self, arguments: Sequence[Operand]) -> Sequence[Tensor]:
        tensors = list[Tensor]()
        for argument in arguments:
            rows = argument.rows if isinstance(argument, RaggedRows) else argument
            tensors += as_parts(rows)
        return tensors

    def _checked(self, results: object, size: int) -> Sequence[Operand]:
        """Check results against the signature, and convert them to the working precision."""
        outputs = self.signature.outputs
        problem = f"Operation {self.signature.name!r}: invalid results of its module"
        values = (results,) if len(outputs) == 1 else results
        if not isinstance(values, tuple) or len(values) != len(outputs):
            expected = f"{len(outputs)} results: {self.signature}"
            listed = values if isinstance(values, tuple) else (values,)
            raise mismatch(TypeError, problem, expected, ", ".join(map(describe_value, listed)))
        checked = []
        for value, row_type in zip(values, outputs, strict=True):
            _check_rows(as_parts(value), parts_of(row_type), size, problem)
            rows = self._in_working_precision(as_parts(value), row_type)
            checked.append(as_value(rows, row_type))
        return checked

    def _in_working_precision(self, rows: Rows, row_type: RowType) -> Rows:
        converted = []
        for row, part in zip(rows, parts_of(row_type), strict=True):
            dtype = self.engine.working_dtype(part.dtype)
            if row.dtype == torch.float64 != dtype:
                problem = f"Operation {self.signature.name!r}: its results would be rounded"
                hint = "float64 as the type of the result, or engine.double()"
                raise mismatch(TypeError, problem, dtype, row.dtype, hint=hint)
            converted.append(row.to(dtype))
        return tuple(converted)


class PlainCall(StepCall):
    """Of an operation whose arguments and results are single tensors."""

    def __init__(self, engine: Engine, operation: Operation) -> None:
        super().__init__(engine, operation)
        outputs: Sequence[Any] = self.signature.outputs
        self.expected = [(part.shape, engine.working_dtype(part.dtype)) for part in outputs]

    def __call__(self, arguments: Sequence[Operand], size: int) -> Sequence[Any]:
        """Make as many calls as ``size`` says, and return all results."""
        results = self._called(arguments)
        values = (results,) if len(self.expected) == 1 else results
        if type(values) is tuple and self._are_as_expected(values, size):
            return values
        return self._checked(results, size)

    def _tensors_in(self, arguments: Sequence[Any]) -> Sequence[Tensor]:
        return arguments

    def _are_as_expected(self, values: tuple[object, ...], size: int) -> bool:
        if len(values) != len(self.expected):
            return False
        for value, (shape, dtype) in zip(values, self.expected, strict=True):
            if type(value) is not Tensor or value.dtype != dtype or value.shape != (size, *shape):
                return False
        return True


class FunctionCall(StepCall):
    """Of a function that changes no argument, and returns what the signature says."""

    def __init__(self, engine: Engine, operation: Operation, function: Callable[..., Any]) -> None:
        super().__init__(engine, operation)
        self.function = function
        self.has_one_result = len(self.signature.outputs) == 1

    def __call__(self, arguments: Sequence[Operand], size: int) -> Sequence[Any]:
        """Make as many calls as ``size`` says, and return all results."""
        results = self.function(*arguments)
        return (results,) if self.has_one_result else results


def step_call(engine: Engine, operation: Operation) -> StepCall:
    """Choose how the calls of an operation are made, for one run.

    What is known of a function of torch need not be checked; single tensors are checked quickly.
    """
    if not operation.is_plain:
        return StepCall(engine, operation)
    call = PlainCall(engine, operation)
    owner = getattr(call.function, "__self__", call.function)  # of a method, its object
    outputs: Sequence[Any] = operation.signature.outputs
    keeps_dtypes = [dtype for _, dtype in call.expected] == [part.dtype for part in outputs]
    if isinstance(owner, TorchFunction) and keeps_dtypes:
        function = owner.of_run(call.function)
        if function is not None:
            return FunctionCall(engine, operation, function)
    return call


class Run:
    """One run of an engine: its row buffers, and the token that orders reads and writes.

    extend(schedule, inputs) → make(schedule, …) for each step → outputs(schedule)

    A run may be extended: a further schedule finds the rows of the earlier ones as its first
    inputs, and gradients flow through all of them. A step is operands_of → results_of → write.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffers: list[RowBuffer] = []
        # Rows to be written before the next read: one call of autograd per step does both.
        self.pending: list[Write] = []
        self.token = torch.empty(0)  # on the device of the schedules, from the first on
        self.called: Operation | None = None  # by the current step, which errors are about
        self.products = RunProducts(engine)
        # What operations of several steps share, by a name that they choose, such as all rows on
        # stacks of one type.
        self.shared: dict[Any, Any] = {}
        # By the identity of a signature, which is kept, so that no other gets the same identity.
        self._calls: dict[int, tuple[Signature, StepCall]] = {}

    def extend(self, schedule: Steps, inputs: Mapping[RowType | str, Any]) -> None:
        """Run a schedule; ``inputs`` leaves out what earlier schedules of the run were given."""
        if not self.buffers:
            self.token = new_token(schedule.index)

        # Buffers of earlier schedules: new inputs follow the rows that are there.
        num_open = len(self.buffers)
        for buffer, spec in zip(self.buffers, schedule.buffers, strict=False):
            if (rows := inputs.get(spec.row_type)) is not None:
                self.pending.append(Write(buffer, buffer.rows, rows))
            buffer.grow(spec.rows)

        unopened = zip(schedule.buffers[num_open:], schedule.constants[num_open:], strict=True)
        device = schedule.device
        for spec, constants in unopened:
            self._open_buffer(spec, constants, inputs, device)

        outer = current_run.set(self)
        try:
            for number, step in enumerate(schedule.steps):
                self.make(schedule, number, step)
        finally:
            current_run.reset(outer)

    def _open_buffer(
        self,
        spec: BufferSpec,
        constants: Rows | None,
        given: Mapping[RowType | str, Any],
        device: torch.device,
    ) -> None:
        """Allocate a row buffer, and write its constants and inputs."""
        inputs = _input_rows(given, spec)
        buffer = RowBuffer(spec.rows)
        self.buffers.append(buffer)
        types = parts_of(spec.row_type)
        like = inputs or tuple(torch.empty((0, *part.shape), device=device) for part in types)
        buffer.allocate(like, tuple(self.engine.working_dtype(part.dtype) for part in types))
        if constants is not None:
            buffer.put(0, constants)
        if inputs is not None:
            self.pending.append(Write(buffer, spec.constants, inputs))

    def make(self, schedule: Steps, number: int, step: Step) -> None:
        """Run one step."""
        self.called = None
        try:
            operands = self.operands_of(schedule, step)
            results = self.results_of(schedule, step, operands, step.size)
        except Exception as error:
            if self.called is not None:
                name = self.called.signature.name
                error.add_note(f"  where:    operation {name!r}, step {number}")
            raise
        for (buffer, first), rows in zip(step.results, results, strict=True):
            self.write(buffer, first, rows)

    def write(self, buffer: int, first: int, rows: Tensor | Rows) -> None:
        """Keep the results of a step from a row of a buffer on."""
        self.pending.append(Write(self.buffers[buffer], first, as_parts(rows)))

    def operands_of(self, schedule: Steps, step: Step) -> list[Operand]:
        """Read the arguments of a step, as modules take them."""
        operands = list[Operand]()
        rows_read = self._exchange(self._reads(schedule.index, step.arguments))
        for read, rows in zip(step.arguments, rows_read, strict=True):
            argument = as_value(rows, schedule.buffers[read.buffer].row_type)
            if read.segments >= 0:
                calls = read.calls_in(schedule.index)
                operands.append(RaggedRows(argument, calls, step.size))
            else:
                operands.append(argument)
        return operands

    def results_of(
        self, schedule: Steps, step: Step, operands: Sequence[Any], size: int
    ) -> list[Any]:
        """Call the operations of a step on rows that were read; return what is written."""
        call_of = partial(self._call_of, schedule.signatures)
        with self.products.of_step(self.token.device, size):
            return schedule.program_of(step).run(call_of, operands, size)

    def _call_of(self, signatures: Sequence[Signature], number: int) -> StepCall:
        """Return what makes the calls of an operation; it is chosen once per run."""
        signature = signatures[number]
        known = self._calls.get(id(signature))
        if known is None or known[0] is not signature:
            call = self.step_call(self.engine.operation_of(signature))
            known = self._calls[id(signature)] = signature, call
        self.called = known[1].operation
        return known[1]

    def step_call(self, operation: Operation) -> StepCall:
        """Choose how the calls of an operation are made."""
        return step_call(self.engine, operation)

    def _exchange(self, reads: Sequence[Read], copy: bool = False) -> list[Rows]:
        """Write the pending rows, then read."""
        self.token, rows = exchange(self.token, self.pending, reads, copy)
        self.pending = []
        return rows

    def _reads(self, index: Tensor, slices: Sequence[IndexSlice]) -> list[Read]:
        """List what to read; arguments with adjacent row numbers share a gather."""
        reads = []
        number = 0
        while number < len(slices):
            first = slices[number]
            num_arguments = packed(slices, number)
            pick = first.pick_from(index)
            if num_arguments > 1:
                pick = index[first.offset : first.offset + num_arguments * first.length]
            reads.append(Read(self.buffers[first.buffer], pick, num_arguments))
            number += num_arguments
        return reads

    def touch_unused(self, schedule: Steps) -> None:
        """Call unused operations on no rows: other ranks wait for the gradients of all weights.

        What they return is written, so that the token leads back to them.
        """
        names = {schedule.signatures[number].name for number in schedule.operations}
        for operation in self.engine.operations:
            signature = operation.signature
            if signature.name in names:
                continue
            arguments = []
            for expected in signature.inputs:
                row_type = row_type_of(expected)
                rows = as_value(self.engine.no_rows(row_type), row_type)
                is_ragged = isinstance(expected, Ragged)
                arguments.append(RaggedRows(rows, schedule.index[:0], 0) if is_ragged else rows)
            # A module without arguments always returns its one row.
            size = 0 if signature.inputs else 1
            for value in StepCall(self.engine, operation)(arguments, size):
                no_rows = tuple(part[:0] for part in as_parts(value))
                buffer = RowBuffer(0)
                buffer.allocate(no_rows, tuple(part.dtype for part in no_rows))
                self.token = buffer.write(self.token, 0, no_rows)

    def read(self, picks: Sequence[tuple[int, Pick]]) -> list[Rows]:
        """Read copies of rows of buffers, with their gradients."""
        return self._exchange([Read(self.buffers[n], pick) for n, pick in picks], copy=True)

    def peek(self, number: int, rows: Pick) -> Tensor:
        """Return rows of a buffer without gradients."""
        if self.pending:
            self._exchange([])
        return self.buffers[number].take(rows)[0]

    def outputs(self, schedule: Steps) -> dict[str, Any]:
        """Read all outputs."""
        outputs = schedule.outputs.values()
        picks = [(each.rows.buffer, each.rows.pick_from(schedule.index)) for each in outputs]
        return {
            name: rows[0] if len(rows) == 1 else rows
            for name, rows in zip(schedule.outputs, self.read(picks), strict=True)
        }


current_run: ContextVar[Run | None] = ContextVar("current_run", default=None)
"""The run whose step is being computed."""


def as_value(rows: Rows, row_type: RowType) -> Tensor | Rows:
    """Return rows as a module takes them: a tuple of tensors for a tuple type, else a tensor."""
    return rows if isinstance(row_type, tuple) else rows[0]


def as_parts(value: Tensor | Rows) -> Rows:
    """Return rows as buffers keep them: one tensor per part of their type."""
    return value if isinstance(value, tuple) else (value,)


def _input_rows(inputs: Mapping[RowType | str, Any], spec: BufferSpec) -> Rows | None:
    """Return the checked input rows of one buffer; None if it has none."""
    types = parts_of(spec.row_type)
    tag = types[0].tag if len(types) == 1 else ""
    rows = inputs.get(spec.row_type)
    if rows is None and tag:
        rows = inputs.get(tag)
    if rows is None and not spec.inputs:
        return None
    kind = describe(spec.row_type)
    if rows is None:
        problem = f"Engine: the inputs of type {kind} are missing"
        got = f"inputs for {', '.join(map(str, inputs)) or 'nothing'}"
        hint = f"engine(schedule, inputs={{{tag or '<row type>'!r}: rows}})"
        raise mismatch(ValueError, problem, f"{spec.inputs} rows", got, hint=hint)
    parts = as_parts(rows)
    are_rows = all(isinstance(part, Tensor) and part.dim() > 0 for part in parts)
    if are_rows and any(part.size(0) != spec.inputs for part in parts):
        problem = f"Engine: wrong number of input rows of type {kind}"
        raise mismatch(ValueError, problem, spec.inputs, ", ".join(map(describe_value, parts)))
    _check_rows(parts, types, spec.inputs, f"Engine: input rows of type {kind} do not fit")
    return parts


def _check_rows(
    rows: Sequence[object], types: Sequence[TensorType], size: int, problem: str
) -> None:
    if len(rows) == len(types) and all(
        _fits(row, part, size) for row, part in zip(rows, types, strict=True)
    ):
        return
    expected = f"{size} rows of {describe(types[0] if len(types) == 1 else tuple(types))}"
    got = ", ".join(map(describe_value, rows))
    raise mismatch(TypeError, problem, expected, got, hint="one row per call, along the first axis")


def _fits(row: object, part: TensorType, size: int) -> bool:
    if not isinstance(row, Tensor) or row.shape != (size, *part.shape):
        return False
    # Half, single and double precision mix (autocast, .double()); other dtypes do not.
    are_floats = row.dtype.is_floating_point and part.dtype.is_floating_point
    return row.dtype == part.dtype or are_floats
