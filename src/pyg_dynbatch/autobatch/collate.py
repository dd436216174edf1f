"""Schedules of mini-batches that loader workers make, and the results of a batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from pyg_dynbatch.autobatch.lazy import Lazy
from pyg_dynbatch.autobatch.session import Session
from pyg_dynbatch.autobatch.signatures import SignatureTable, Spec
from pyg_dynbatch.autobatch.state import Conditions, holds_values
from pyg_dynbatch.core.engine import Run
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.row_buffer import Rows
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import RowType, TensorType


class Emitted(NamedTuple):
    """Values of one name that the examples of a batch emitted.

    Args:
        rows: The values, ``[value, ...]``.
        example: The example of each, int64 ``[value]``.
    """

    rows: Tensor
    example: Tensor


class PickedRows(NamedTuple):
    """Rows of a buffer: its number, and theirs as an index vector."""

    buffer: int
    rows: Tensor


@dataclass(eq=False, repr=False)
class Schedule(MovablePlan):
    """A scheduled mini-batch, made by :meth:`AutoBatch.collate`; a model takes it as its examples.

    Args:
        steps: What is run.
        specs: Signature of each operation of the schedules.
        outside: Rows from outside, by row type.
        columns: For each leaf of the result the rows of all examples, or a list of other objects.
        numbered: The result, with the number of each leaf in its place.
        emitted: The rows of each name, and the example of each.
        num_examples: Number of examples.
        model: What they take for granted of the model.
    """

    steps: Steps
    specs: tuple[Spec, ...]
    outside: dict[TensorType, Tensor]
    columns: list[PickedRows | list[Any]]
    numbered: object
    emitted: dict[str, tuple[PickedRows, Tensor]]
    num_examples: int
    model: Conditions

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return f"Schedule({self.num_examples} examples, {len(self.steps.steps)} steps)"

    @property
    def picks(self) -> list[PickedRows]:
        """The rows that are read, those of results before those that were emitted."""
        of_results = [column for column in self.columns if isinstance(column, PickedRows)]
        return [*of_results, *(pick for pick, _ in self.emitted.values())]

    def _tensors(self) -> tuple[Tensor, ...]:
        picked = [pick.rows for pick in self.picks]
        examples = [example for _, example in self.emitted.values()]
        return *self.steps._tensors(), *self.outside.values(), *picked, *examples

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Schedule":
        def moved(pick: PickedRows) -> PickedRows:
            return PickedRows(pick.buffer, fn(pick.rows))

        return replace(
            self,
            steps=self.steps._apply(fn),
            outside={row_type: fn(rows) for row_type, rows in self.outside.items()},
            columns=[moved(c) if isinstance(c, PickedRows) else c for c in self.columns],
            emitted={
                name: (moved(pick), fn(example)) for name, (pick, example) in self.emitted.items()
            },
        )


class ValueColumn(NamedTuple):
    """One tensor of all results: its row type, and the value of each example."""

    kind: int
    values: Sequence[int]


ResultColumn = ValueColumn | list[Any]
"""One leaf of all results: values, or other objects."""


class Outcome(NamedTuple):
    """What the examples of a batch have returned and emitted, as numbers of values."""

    columns: Sequence[ResultColumn]  # the leaves of all results
    structure: TreeSpec  # of one result
    emitted: Mapping[str, tuple[ValueColumn, Sequence[int]]]  # by name, with the example of each

    @property
    def value_columns(self) -> list[ValueColumn]:
        """The columns of values, those of results before those that were emitted."""
        of_results = [column for column in self.columns if isinstance(column, ValueColumn)]
        return [*of_results, *(column for column, _ in self.emitted.values())]

    def values_read(self) -> np.ndarray:
        """List the values that are read at the end."""
        numbers = [column.values for column in self.value_columns]
        return np.concatenate([np.zeros(0, dtype=np.int64), *numbers], dtype=np.int64)


def schedule_batch(session: Session, outcome: Outcome, num_examples: int) -> Schedule:
    """Schedule what a session has recorded."""
    session.check_state()
    steps = session.plan(read_later=outcome.values_read())
    outside = plain_rows(session)

    def rows_of(column: ValueColumn) -> PickedRows:
        rows = session.values.rows_of(np.array(column.values, dtype=np.int64))
        return PickedRows(column.kind, torch.from_numpy(rows))

    return Schedule(
        steps=steps,
        specs=tuple(site.spec for site in session.table.sites if site.spec is not None),
        outside=outside,
        columns=[rows_of(c) if isinstance(c, ValueColumn) else c for c in outcome.columns],
        numbered=tree_unflatten(range(len(outcome.columns)), outcome.structure),
        emitted={
            name: (rows_of(column), torch.tensor(examples))
            for name, (column, examples) in outcome.emitted.items()
        },
        num_examples=num_examples,
        model=session.table.conditions,
    )


def run_batch(
    table: SignatureTable, batch: Schedule, device: torch.device
) -> tuple[Any, dict[str, Emitted]]:
    """Run a scheduled mini-batch; return its result, and what it emitted."""
    table.conditions.check(batch.model)
    batch = batch.to(device)
    sites = [table.site_of(spec, device, "a scheduled batch") for spec in batch.specs]
    signatures = tuple(site.signature for site in sites if site.signature is not None)
    table.engine.to(device)
    run = Run(table.engine)
    inputs: dict[RowType | str, Rows] = {
        row_type: (rows,) for row_type, rows in batch.outside.items()
    }
    run.extend(replace(batch.steps, signatures=signatures), inputs)
    picks = batch.picks
    rows_read = iter(run.read(picks) if picks else ())
    leaves = [
        next(rows_read)[0] if isinstance(column, PickedRows) else column for column in batch.columns
    ]
    emitted = {
        name: Emitted(next(rows_read)[0], example) for name, (_, example) in batch.emitted.items()
    }
    return _placed(leaves, batch.numbered), emitted


def plain_rows(session: Session) -> dict[TensorType, Tensor]:
    """Stack the rows from outside; a batch holds no graph."""
    outside = session.outside_tensors()
    for row_type, rows in outside.items():
        if rows.requires_grad:
            problem = "autobatch: a tensor that is recorded ahead requires gradients"
            got = f"{row_type}, of an example or computed from parameters"
            hint = "call the model on the example itself, or compute it in a submodule"
            raise mismatch(ValueError, problem, "plain data", got, hint=hint)
    return outside


def structured(result: object, where: str = "", numbered: bool = False) -> Any:
    """Make the dataclasses in a result part of its structure; refuse values in other objects.

    They are those that hold tensors, or all of them where numbers stand for tensors.
    """

    def opened(leaf: object) -> object:
        if type(leaf) is Lazy or isinstance(leaf, Tensor | str | int | float | None):
            return leaf
        if is_dataclass(leaf) and not isinstance(leaf, type):
            by_name = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
            opened_fields = _Fields(type(leaf), structured(by_name, where, numbered))
            leaves = tree_leaves(opened_fields)
            if numbered or any(isinstance(each, Lazy | Tensor) for each in leaves):
                return opened_fields
        elif holds_values(leaf):
            problem = "autobatch: a result holds tensors in an object that cannot be stacked"
            expected = "tuples, lists, dicts and dataclasses of tensors"
            raise mismatch(TypeError, problem, expected, type(leaf).__name__, where=where)
        return leaf

    return result if type(result) is Lazy else tree_map(opened, result)


def _placed(leaves: Sequence[object], numbered: object) -> Any:
    return tree_map(leaves.__getitem__, structured(numbered, numbered=True))


class _Fields:
    """A dataclass that holds tensors, as a structure."""

    def __init__(self, cls: type, fields: dict[str, object]) -> None:
        self.cls = cls
        self.fields = fields

    def flatten(self) -> tuple[list[object], tuple[type, tuple[str, ...]]]:
        """Return the values of the fields, and the class and their names."""
        return [*self.fields.values()], (self.cls, tuple(self.fields))

    @staticmethod
    def unflatten(values: Iterable[object], context: tuple[type, tuple[str, ...]]) -> object:
        """Make the dataclass without its checks, which are for single examples."""
        cls, names = context
        filled: object = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(filled, name, value)
        return filled


register_pytree_node(_Fields, _Fields.flatten, _Fields.unflatten)
