"""Run a schedule with real modules: gather, call, write, step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.layout import ZEROS, IndexSlice, Step, packed
from pyg_dynbatch.core.operation import (
    Operation,
    Operations,
    Ragged,
    Signature,
    any_type,
    is_open,
    row_type_of,
)
from pyg_dynbatch.core.row_buffer import (
    Pick,
    Read,
    RowBuffer,
    Rows,
    Write,
    checked_call,
    checked_results,
    exchange,
    inputs_of,
    new_token,
    refuse_transforms,
    unsupported,
)
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.types import RaggedRows, RowType, TensorType, describe, parts_of


class Engine(nn.Module):
    """Runs schedules: one batched call of a module per step, rows kept in one buffer per type.

    Args:
        operations: The operations that programs may call. For schedules made by
            :meth:`Schedule.from_structure` it needs one operation called ``"node"``, see
            :meth:`of_cell`.

    Raises:
        TypeError: If ``operations`` is not an :class:`Operations`.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 2. Differs: values are read from any
        earlier step, so nothing is copied forward.

    Example:
        >>> from pyg_dynbatch.core.program import Program
        >>> scalar, operations = TensorType(()), Operations()
        >>> add = operations.add(torch.add, [scalar, scalar], [scalar], name="add")
        >>> program = Program()
        >>> program.output(program.call(add, *(program.constant(scalar, x) for x in (1.0, 2.0))))
        >>> Engine(operations)(Schedule.from_programs([program, program]))["output"]
        tensor([3., 3.])
    """

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        if not isinstance(operations, Operations):
            what, got = "Engine: not Operations", type(operations).__name__
            raise mismatch(TypeError, what, "Operations", got)
        self.operations = operations
        self._leaf: Signature | None = None
        # Follows .to() and .double(): gives the working precision and the device of constants.
        self.register_buffer("_precision", torch.empty(0), persistent=False)

    @classmethod
    def of_cell(
        cls,
        cell: nn.Module,
        state: RowType,
        arity: int | None = None,
        input_type: RowType | None = None,
        leaf: nn.Module | None = None,
    ) -> "Engine":
        """Make an engine for schedules of structures from one recurrent cell.

        Args:
            cell: Called as ``cell(x, *children)`` with the input rows ``[row, …]`` and either
                ``arity`` child states or one :class:`RaggedRows`; a missing input or child is a
                row of zeros. It returns the new state, a tensor or a tuple of tensors.
            state: Type of the state of one node.
            arity: As given to :meth:`Schedule.from_structure`.
            input_type: Type of an input row; taken from the inputs by default.
            leaf: Called as ``leaf(x)`` in place of the cell for the nodes of the first level,
                which have no children. In sentiment trees, where only leaves have words, this
                saves half of the work, and the cell need not look at ``x``.

        Returns:
            The engine; its operations are called ``"node"`` and, with a leaf module, ``"leaf"``.

        Example:
            >>> class Height(nn.Module):
            ...     def forward(self, x, left, right):
            ...         return 1 + torch.maximum(left, right) + 0 * x
            >>> schedule = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
            >>> engine = Engine.of_cell(Height(), TensorType(()), arity=2)
            >>> engine(schedule, {"input": torch.zeros(3)})["node"]
            tensor([1., 1., 2.])
        """
        children = [Ragged(state)] if arity is None else [state] * arity
        operations = Operations()
        inputs = any_type("input") if input_type is None else input_type
        operations.add(cell, [inputs, *children], [state], name="node", random=True)
        engine = cls(operations)
        if leaf is not None:
            engine._leaf = operations.add(leaf, [inputs], [state], name="leaf", random=True)
        return engine

    def forward(
        self, schedule: Schedule, inputs: Mapping[RowType | str, Any] | None = None
    ) -> dict[str, Any]:
        """Run a schedule.

        Args:
            schedule: On the device of the modules.
            inputs: For every row type that programs read from outside (or its tag): the rows of
                all examples, one after another, ``[row, …]``; gradients flow into them. Schedules
                of structures read ``"input"``, in the order of ``schedule.input_node``.

        Returns:
            For every output name its rows ``[row, …]`` (a tuple of tensors for a tuple type),
            ordered by example; ``schedule.example_of(name)`` gives each row's example.

        Raises:
            LookupError: If the schedule names an operation the engine does not have.
            TypeError: If signatures, results of operations or input rows are of another type.
            ValueError: If the number of input rows is not that of the schedule.
            RuntimeError: If an operation changes an argument in place.
        """
        refuse_transforms("Engine")
        if self._leaf is not None and schedule.structure is not None and schedule.steps:
            # The leaf operation, which reads no children, makes the first step.
            number, (first, *others) = len(schedule.signatures), schedule.steps
            step = Step(number, first.size, first.arguments[:1], first.results)
            signatures = (*schedule.signatures, self._leaf)
            schedule = replace(schedule, signatures=signatures, steps=(step, *others))
        run = Run(self)
        run.extend(schedule, inputs or {})
        if torch.is_grad_enabled() and torch.distributed.is_available():
            if torch.distributed.is_initialized():
                run.touch_unused()
        return run.outputs()

    def __prepare_scriptable__(self) -> NoReturn:
        raise unsupported("Engine", "torch.jit.script (TorchScript)")

    def operation_of(self, signature: Signature) -> Operation:
        """Find the operation of a signature; raise if there is none, or one of other types."""
        name = signature.name
        if name not in self.operations:
            known = ", ".join(s.name for s in self.operations.signatures) or "none"
            what, wanted = f"Engine: no operation is called {name!r}", f"one of {known}"
            hint = "record programs with signatures of this engine's operations"
            raise mismatch(LookupError, what, wanted, str(signature), hint=hint)
        operation = self.operations[name]
        mine = operation.signature
        if not mine.fits(signature):
            what = f"Engine: operation {name!r} has another signature"
            hint = "schedules of structures: give both the same arity"
            raise mismatch(TypeError, what, str(mine), str(signature), hint=hint)
        return operation

    def no_rows(self, row_type: RowType, given: Mapping[RowType, Rows] | None = None) -> Any:
        """Make zero rows of a row type; ``given`` has rows for the types that are left open."""
        if given and is_open([row_type]):
            rows = tuple(part.new_zeros((0, *part.shape[1:])) for part in given[row_type])
        else:
            rows = tuple(
                torch.zeros(
                    (0, *(part.shape or ())),
                    dtype=self.working_dtype(part.dtype or torch.float32),
                    device=self.device,
                )
                for part in parts_of(row_type)
            )
        return rows if isinstance(row_type, tuple) or len(rows) > 1 else rows[0]

    @property
    def device(self) -> torch.device:
        """Device of the engine, as ``.to()`` left it."""
        return self._precision.device  # type: ignore[return-value]

    def working_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Turn the stated float32 into the precision the engine works in."""
        return self._precision.dtype if dtype == torch.float32 else dtype  # type: ignore[return-value]

    def __repr__(self) -> str:
        """List the operations."""
        return f"Engine({', '.join(s.name for s in self.operations.signatures)})"


class Run:
    """One run of an engine: its stores, and the token that orders reads and writes.

    A run may be extended: each further schedule reads the rows of the earlier ones as its first
    inputs, and gradients flow through all of them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pending: list[Write] = []
        self.stores: list[RowBuffer] = []

    def extend(self, schedule: Schedule, inputs: Mapping[RowType | str, Any]) -> None:
        """Run a schedule; of inputs whose first rows are in a store, only the others are given."""
        if not self.stores:
            self.token = new_token(schedule.wiring)
        self.schedule = schedule
        self.operations = [self.engine.operation_of(s) for s in schedule.signatures]
        self.known: dict[RowType, Rows] = {}
        row_types, before = self._row_types(), [store.rows for store in self.stores]
        for number, (store, constants) in enumerate(
            zip(schedule.stores, schedule.constants, strict=True)
        ):
            if number < len(before):
                given = inputs.get(store.row_type)
                self.stores[number].grow(store.rows)
                if given is not None:
                    self.pending.append(Write(self.stores[number], before[number], given))
                continue
            self.stores.append(RowBuffer(store.rows, store.constants if constants is None else 0))
            given = inputs_of(inputs, store)
            self._open(number, parts_of(row_types[number]), constants, given)
            if given is not None:
                self.known[store.row_type] = self.stores[number].buffers
        for number, step in enumerate(schedule.steps):
            self.make(number, step)

    def _row_types(self) -> list[RowType]:
        """Row type of every store; what the schedule leaves open the operations decide."""
        decided: dict[RowType, RowType] = {}
        for called, operation in zip(self.schedule.signatures, self.operations, strict=True):
            mine = operation.signature
            theirs, ours = (map(row_type_of, (*s.inputs, *s.outputs)) for s in (called, mine))
            decided.update(zip(theirs, ours, strict=True))
        return [decided.get(store.row_type, store.row_type) for store in self.schedule.stores]

    def _open(
        self, number: int, parts: tuple[TensorType, ...], constants: Rows | None, given: Rows | None
    ) -> None:
        """Allocate a store and fill in its constants and inputs."""
        store, first = self.stores[number], self.schedule.stores[number].constants
        # Without a step the width of rows does not matter.
        wanted = store.rows > 0 and len(self.schedule.steps) > 0
        if wanted and given is None and any(part.shape is None for part in parts):
            what = f"Engine: the width of the rows of {describe(parts[0])} is not known"
            hint = "pass inputs={...} or Engine.of_cell(..., input_type=TensorType(...))"
            raise mismatch(TypeError, what, "input rows, or a row type with a shape", hint=hint)
        device = self.schedule.device
        like = given or tuple(torch.empty((0, *(p.shape or ())), device=device) for p in parts)
        if given is not None and len(parts) != len(given):
            parts = parts * len(given)
        dtypes = (
            row.dtype if part.dtype is None else self.engine.working_dtype(part.dtype)
            for part, row in zip(parts, like, strict=True)
        )
        store.allocate(like, tuple(dtypes))
        if constants is not None:
            store.put(0, constants)
        if given is not None:
            self.pending.append(Write(store, first, given))

    def make(self, number: int, step: Step) -> None:
        """Make one step."""
        operation = self.operations[step.operation]
        signature = operation.signature
        rows = self._read(step.arguments)
        arguments = self._arguments(signature.inputs, step, rows)
        results = checked_call(operation, arguments, rows, f"step {number}")
        checked = checked_results(signature, results, step.size, f"step {number}")
        # The next step writes them before it reads: one call of autograd per step.
        for (store, start), parts in zip(step.results, checked, strict=True):
            self.pending.append(Write(self.stores[store], start, parts))

    def _exchange(self, reads: Sequence[Read], own: bool = False) -> list[Rows]:
        """Write the pending rows, then read."""
        self.token, found = exchange(self.token, self.pending, reads, own)
        self.pending = []
        return found

    def _read(self, wirings: Sequence[IndexSlice]) -> list[Rows]:
        """Read the rows of all arguments of a step at once."""
        found = iter(self._exchange(self._reads([w for w in wirings if w.start != ZEROS])))
        return [
            self.stores[w.store].zeros(w.length) if w.start == ZEROS else next(found)
            for w in wirings
        ]

    def _arguments(
        self, inputs: Sequence[RowType | Ragged], step: Step, rows_of_all: Sequence[Rows]
    ) -> list[Any]:
        """Make arguments of rows as the module takes them."""
        found: list[Any] = []
        for wanted, wiring, rows in zip(inputs, step.arguments, rows_of_all, strict=True):
            one = len(rows) == 1 and not isinstance(row_type_of(wanted), tuple)
            argument: Any = rows[0] if one else rows
            if isinstance(wanted, Ragged):
                argument = RaggedRows(argument, self.schedule.segment_ids_of(wiring), step.size)
            found.append(argument)
        return found

    def _reads(self, wirings: Sequence[IndexSlice]) -> list[Read]:
        """List what to read; arguments whose row numbers lie side by side share a gather."""
        reads, flat = [], self.schedule.wiring
        number = 0
        while number < len(wirings):
            first = wirings[number]
            store, places = self.stores[first.store], packed(wirings, number)
            if places == 1:
                reads.append(Read(store, self._pick(first)))
            else:
                index = flat[first.offset : first.offset + places * first.length]
                reads.append(Read(store, index, places, first.stride > 1))
            number += places
        return reads

    def _pick(self, wiring: IndexSlice) -> Pick:
        if wiring.start >= 0:
            return wiring.start, wiring.length
        return self.schedule.rows_of(wiring)

    def touch_unused(self) -> None:
        """Call unused operations on zero rows: other ranks wait for all their gradients."""
        given = self.known
        used = {self.operations[step.operation] for step in self.schedule.steps}
        no_row = self.schedule.wiring[:0]
        for operation in self.engine.operations:
            signature = operation.signature
            row_types = [row_type_of(wanted) for wanted in signature.inputs]
            if operation in used or any(is_open([t]) and t not in given for t in row_types):
                continue
            arguments = [self.engine.no_rows(row_type, given) for row_type in row_types]
            results = operation(
                *(
                    RaggedRows(rows, no_row, 0) if isinstance(wanted, Ragged) else rows
                    for wanted, rows in zip(signature.inputs, arguments, strict=True)
                )
            )
            # A module without arguments always returns its one row.
            size = 0 if signature.inputs else 1
            for found in checked_results(signature, results, size, "the call on zero rows"):
                rows = tuple(part[:0] for part in found)
                store = RowBuffer(0)
                store.allocate(rows, tuple(part.dtype for part in rows))
                self.token = store.write(self.token, 0, rows)

    def read(self, picks: Sequence[tuple[int, Pick]]) -> list[Rows]:
        """Read copies of rows of stores, with their gradients."""
        return self._exchange([Read(self.stores[store], pick) for store, pick in picks], own=True)

    def peek(self, store: int, rows: Tensor) -> Tensor:
        """Return rows of a store without gradients."""
        self._exchange([])
        return self.stores[store].take(rows)[0]

    def outputs(self) -> dict[str, Any]:
        """Read all outputs."""
        found = self.schedule.outputs
        reads = [Read(self.stores[o.wiring.store], self._pick(o.wiring)) for o in found.values()]
        results = self._exchange(reads, own=True)
        return {
            name: rows[0] if len(rows) == 1 else rows
            for name, rows in zip(found, results, strict=True)
        }
