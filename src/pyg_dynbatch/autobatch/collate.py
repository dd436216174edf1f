"""Schedules of mini-batches that loader workers make, and the results of a batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map, tree_unflatten

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

ResultColumn = tuple[int, Sequence[int]] | list[Any]
"""One leaf of all results: a row type and the value of each example, or other objects."""


class _Fields:
    """A dataclass that holds tensors, as a structure."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind = kind
        self.fields = fields


def _built(values: Iterable[Any], context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)  # without its checks, which are for single examples
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


register_pytree_node(
    _Fields, lambda found: ([*found.fields.values()], (found.kind, (*found.fields,))), _built
)


def structured(result: Any, where: str = "", numbered: bool = False) -> Any:
    """Make the dataclasses in a result part of its structure; refuse values in other objects.

    They are those that hold tensors, or all of them where numbers stand for tensors.
    """

    def opened(leaf: Any) -> Any:
        if type(leaf) is Lazy or isinstance(leaf, Tensor | str | int | float | None):
            return leaf
        if is_dataclass(leaf) and not isinstance(leaf, type):
            named = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
            found = _Fields(type(leaf), structured(named, where, numbered))
            if numbered or any(isinstance(part, Lazy | Tensor) for part in tree_leaves(found)):
                return found
        elif holds_values(leaf):
            problem = "autobatch: a result holds tensors in an object that cannot be stacked"
            expected = "tuples, lists, dicts and dataclasses of tensors"
            raise mismatch(TypeError, problem, expected, type(leaf).__name__, where=where)
        return leaf

    return result if type(result) is Lazy else tree_map(opened, result)


def _placed(leaves: Sequence[Any], numbered: Any) -> Any:
    return tree_map(leaves.__getitem__, structured(numbered, numbered=True))


class Outcome(NamedTuple):
    """What the examples of a batch have returned and emitted, as numbers of values."""

    columns: Sequence[ResultColumn]  # the leaves of all results
    structure: Any  # of one result
    emitted: dict[str, tuple[ResultColumn, Sequence[int]]]  # by name, with the example of each

    def values_read(self) -> np.ndarray:
        """List the values that are read at the end."""
        columns = *self.columns, *(column for column, _ in self.emitted.values())
        numbers = [column[1] for column in columns if isinstance(column, tuple)]
        return np.concatenate([np.zeros(0, dtype=np.int64), *numbers], dtype=np.int64)


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


PickedRows = tuple[int, Tensor]
"""Rows of a buffer: its number, and an index vector."""


@dataclass(eq=False, repr=False)
class Schedule(MovablePlan):
    """A scheduled mini-batch, made by :meth:`AutoBatch.collate`; a model takes it as its examples.

    Args:
        steps: What is run.
        specs: Signature of each operation of the schedules.
        outside: Rows from outside, by row type.
        columns: For each leaf of the result the rows of all examples, or a list of other objects.
        structure: The result, with the number of each leaf in its place.
        emitted: The rows of each name, and the example of each.
        num_examples: Number of examples.
        model: What they take for granted of the model.
    """

    steps: Steps
    specs: tuple[Spec, ...]
    outside: dict[TensorType, Tensor]
    columns: list[PickedRows | list[Any]]
    structure: Any
    emitted: dict[str, tuple[PickedRows, Tensor]]
    num_examples: int
    model: Conditions

    def __len__(self) -> int:
        return self.num_examples

    def __repr__(self) -> str:
        return f"Schedule({self.num_examples} examples, {len(self.steps.steps)} steps)"

    def _tensors(self) -> tuple[Tensor, ...]:
        rows = [c[1] for c in self.columns if isinstance(c, tuple)]
        rows += [part for (_, index), example in self.emitted.values() for part in (index, example)]
        return *self.steps._tensors(), *self.outside.values(), *rows

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Schedule":
        def moved(rows: PickedRows) -> PickedRows:
            return rows[0], fn(rows[1])

        return replace(
            self,
            steps=self.steps._apply(fn),
            outside={row_type: fn(rows) for row_type, rows in self.outside.items()},
            columns=[moved(c) if isinstance(c, tuple) else c for c in self.columns],
            emitted={n: (moved(rows), fn(e)) for n, (rows, e) in self.emitted.items()},
        )


def schedule_batch(session: Session, outcome: Outcome, num_examples: int) -> Schedule:
    """Schedule what a session has recorded."""
    session.check_state()
    steps = session.plan(read_later=outcome.values_read())
    outside = plain_rows(session)

    def rows_of(column: Any) -> PickedRows:
        rows = session.values.rows_of(np.array(column[1], dtype=np.int64))
        return column[0], torch.from_numpy(rows)

    return Schedule(
        steps,
        tuple(site.spec for site in session.table.sites if site.spec is not None),
        outside,
        [rows_of(column) if isinstance(column, tuple) else column for column in outcome.columns],
        tree_unflatten(range(len(outcome.columns)), outcome.structure),
        {name: (rows_of(c), torch.tensor(of)) for name, (c, of) in outcome.emitted.items()},
        num_examples,
        session.table.conditions,
    )


def run_batch(
    table: SignatureTable, batch: Schedule, device: torch.device
) -> tuple[Any, dict[str, Any]]:
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
    picks = [c for c in batch.columns if isinstance(c, tuple)]
    picks += [rows for rows, _ in batch.emitted.values()]
    found = iter(run.read(picks) if picks else ())
    leaves = [next(found)[0] if isinstance(c, tuple) else c for c in batch.columns]
    emitted = {name: (next(found)[0], example) for name, (_, example) in batch.emitted.items()}
    return _placed(leaves, batch.structure), emitted
