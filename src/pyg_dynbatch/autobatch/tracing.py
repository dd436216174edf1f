"""Picklable traces of examples and schedules of mini-batches, made before they are run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from pyg_dynbatch.autobatch.lazy import ACTIVE, METADATA, Lazy
from pyg_dynbatch.autobatch.operations import named
from pyg_dynbatch.autobatch.session import Session, Stacked
from pyg_dynbatch.autobatch.signatures import Spec, Table
from pyg_dynbatch.autobatch.state import Fingerprint, holds_values
from pyg_dynbatch.core.engine import Run
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.recording import Recording, Site, Sites
from pyg_dynbatch.core.row_buffer import Rows
from pyg_dynbatch.core.scheduling import Joined, begins_of, join, move
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import RowType, TensorType

ResultColumn = tuple[int, list[int]] | list[Any]
"""One leaf of all results: a row type and the value of each example, or other objects."""


class _Fields:
    """A dataclass that holds tensors, as a structure."""

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


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
            what = "autobatch: a result holds tensors in an object that cannot be stacked"
            wanted = "tuples, lists, dicts and dataclasses of tensors"
            raise mismatch(TypeError, what, wanted, type(leaf).__name__, where=where)
        return leaf

    return result if type(result) is Lazy else tree_map(opened, result)


def _placed(leaves: Sequence[Any], numbered: Any) -> Any:
    return tree_map(leaves.__getitem__, structured(numbered, numbered=True))


class _Value(NamedTuple):
    """A value in the result of an example."""

    number: int
    row_type: TensorType


class _Result(NamedTuple):
    """What a recording of an example holds beside its calls."""

    sites: tuple[Spec | TensorType, ...]  # signature of each site; a row type for rows from outside
    outside: dict[TensorType, Tensor]  # rows from outside
    leaves: list[Any]  # of the result
    structure: Any  # the result, with the number of each leaf in its place
    emitted: list[tuple[str, _Value]]


# Functions that read only the shape, dtype or device of an argument, and its position.
_LIKE = dict.fromkeys(
    named("zeros_like ones_like empty_like rand_like randn_like new_zeros new_ones new_empty"), 0
) | dict.fromkeys(named("to type_as expand_as view_as reshape_as"), 1)


class Ahead(TorchFunctionMode):
    """Raises an error for what is computed at once from parameters or buffers in a trace.

    The trace would keep it as data, although it is run with other weights. Views are arguments of
    recorded calls, as parameters are.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function; raise an error if its result depends on the content of the model."""
        if Lazy in types:
            return Lazy.__torch_function__(func, types, args, kwargs)
        kwargs, session = kwargs or {}, self.session
        if ACTIVE.session is None or func in METADATA:
            return func(*args, **kwargs)
        given = [x for n, x in enumerate(args) if n != _LIKE.get(func)]
        tensors = [x for x in tree_leaves((given, kwargs)) if isinstance(x, Tensor)]
        owned = [x for x in tensors if session.owned(x) is not None]
        name = func.__name__
        may_write = name.endswith("_") and name not in ("__getitem__", "__get__")
        # Not run, since it may change a buffer.
        result = None if owned and (may_write or "out" in kwargs) else func(*args, **kwargs)
        leaves = tree_leaves(result) if owned else ()
        if not all(isinstance(x, Tensor) and session.owned(x) is not None for x in leaves):
            session.check_ahead(owned[0], resolve_name(func) or name)
        return result


def recording_of(session: Session, result: Any) -> Recording:
    """Freeze what a session has recorded."""
    table = session.table

    def marked(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not isinstance(leaf, Lazy):
            leaf = session.outside_row(leaf)
        is_value = isinstance(leaf, Lazy)
        return _Value(leaf._number, table.row_types[leaf._kind]) if is_value else leaf

    session.check_state()
    leaves, structure = tree_flatten(structured(result))
    leaves = list(map(marked, leaves))
    emitted = [(n, marked(v)) for n, (found, _) in session.emitted.items() for v in found]
    code = session.new_code().copy()
    begins = begins_of(table.recorded, code)
    used, code[begins] = np.unique(code[begins], return_inverse=True)
    sites = [table.sites[number] for number in used.tolist()]
    specs = tuple(table.row_types[s.kinds[0]] if s.spec is None else s.spec for s in sites)
    outside = _plain(session)
    numbered = tree_unflatten(range(len(leaves)), structure)
    return Recording(
        Sites(table.recorded[number] for number in used.tolist()),
        code,
        num_inputs={row_type: len(rows) for row_type, rows in outside.items()},
        model=table.fingerprint,
        result=_Result(specs, outside, leaves, numbered, emitted),
    )


def _plain(session: Session) -> dict[TensorType, Tensor]:
    """Stack the rows from outside; traces hold no graph."""
    outside = session.outside_tensors()
    for row_type, rows in outside.items():
        if rows.requires_grad:
            what = "autobatch: a tensor that is recorded ahead requires gradients"
            got = f"{row_type}, of an example or computed from parameters"
            hint = "call the model on the example itself, or compute it in a submodule"
            raise mismatch(ValueError, what, "plain data", got, hint=hint)
    return outside


def replay(session: Session, recording: Recording) -> Any:
    """Append a recorded example to a session and return its result."""
    table, own = session.table, recording.result
    if not isinstance(own, _Result):
        what, wanted = "autobatch: not a recording of this model", "that of model.trace(example)"
        raise mismatch(ValueError, what, wanted, repr(recording), where=session.where())
    table.fingerprint.check(recording.model, session.where())
    joined, first = join([recording], "autobatch"), session.base + session.num_new
    sites, code, types = joined.sites, joined.code, cast(Any, joined.sites.row_types)
    numbers = np.array([_site_number(session, site) for site in own.sites], dtype=np.int32)
    if not _fits(recording, joined, [table.recorded[number] for number in numbers.tolist()]):
        what, wanted = "autobatch: a recording's result does not fit its calls", "both as recorded"
        raise mismatch(ValueError, what, wanted, repr(recording), where=session.where())
    kinds = [table.outside_of(row_type).kinds[0] for row_type in types]
    inputs = np.array([[session.reserve(kind, 0) for kind in kinds]], dtype=np.int64)
    move(sites, code, [code.size], first, [0], inputs)
    code[joined.begins] = numbers[code[joined.begins]]
    session.extend(code)  # nothing asks whether results need gradients
    for row_type, rows in own.outside.items():
        source = table.outside_of(row_type)
        session.reserve(source.kinds[0], len(rows))
        session.outside.setdefault(source, []).append(Stacked(rows.to(session.device)))

    def value(marked: _Value) -> Lazy:
        return Lazy(session, first + marked.number, table.outside_of(marked.row_type).kinds[0])

    for name, marked in own.emitted:
        session.emit(name, value(marked))
    leaves = [value(leaf) if isinstance(leaf, _Value) else leaf for leaf in own.leaves]
    return _placed(leaves, own.structure)


def _fits(recording: Recording, joined: Joined, made: Sequence[Site]) -> bool:
    """Whether the result of a recording is about its calls, which are made of other sites here."""
    own, types = recording.result, joined.sites.row_types

    def of_types(site: Site) -> Any:
        return site.kind, site.results, site.signature and site.signature.inputs

    def is_made(value: _Value) -> bool:
        inside = 0 <= value.number < joined.types.size
        kind = joined.types[value.number] if inside else -1
        return bool(kind >= 0) and types[kind] == value.row_type

    values = [each for each in (*own.leaves, *(v for _, v in own.emitted)) if type(each) is _Value]
    return (
        [*map(of_types, made)] == [*map(of_types, joined.sites)]
        and {row_type: len(rows) for row_type, rows in own.outside.items()} == recording.num_inputs
        and all((r.shape[1:], r.dtype) == (t.shape, t.dtype) for t, r in own.outside.items())
        and all(map(is_made, values))
    )


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
        model: The model that they were recorded with.
    """

    steps: Steps
    specs: tuple[Spec, ...]
    outside: dict[TensorType, Tensor]
    columns: list[PickedRows | list[Any]]
    structure: Any
    emitted: dict[str, tuple[PickedRows, Tensor]]
    num_examples: int
    model: Fingerprint

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


def wanted_values(
    columns: Sequence[ResultColumn], emitted: Mapping[str, tuple[ResultColumn, list[int]]]
) -> list[int]:
    """List the values that the results and the emitted values read."""
    read = [column for column in columns if isinstance(column, tuple)]
    read += [column for column, _ in emitted.values() if isinstance(column, tuple)]
    return [number for _, numbers in read for number in numbers]


def schedule_batch(
    session: Session, columns: Sequence[ResultColumn], structure: Any,
    emitted: Mapping[str, tuple[ResultColumn, list[int]]], num_examples: int,
) -> Schedule:  # fmt: skip
    """Schedule what a session has recorded."""
    session.check_state()
    steps = session.plan(wanted=wanted_values(columns, emitted))
    outside = _plain(session)

    def rows_of(column: Any) -> PickedRows:
        rows = session.values.rows_of(np.array(column[1], dtype=np.int64))
        return column[0], torch.from_numpy(rows)

    return Schedule(
        steps,
        tuple(site.spec for site in session.table.sites if site.spec is not None),
        outside,
        [rows_of(column) if isinstance(column, tuple) else column for column in columns],
        tree_unflatten(range(len(columns)), structure),
        {name: (rows_of(found), torch.tensor(of)) for name, (found, of) in emitted.items()},
        num_examples,
        session.table.fingerprint,
    )


def run_batch(table: Table, batch: Schedule, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Run a scheduled mini-batch; return its result, and what it emitted."""
    table.fingerprint.check(batch.model)
    batch = batch.to(device)
    sites = [table.site_of(spec, device, "a traced batch") for spec in batch.specs]
    signatures = tuple(site.signature for site in sites if site.signature is not None)
    table.engine.to(device)
    run = Run(table.engine)
    inputs: dict[RowType | str, Rows] = {
        row_type: (rows,) for row_type, rows in batch.outside.items()
    }
    run.extend(replace(batch.steps, signatures=signatures), inputs)
    wanted = [c for c in batch.columns if isinstance(c, tuple)]
    wanted += [rows for rows, _ in batch.emitted.values()]
    found = iter(run.read(wanted) if wanted else ())
    leaves = [next(found)[0] if isinstance(c, tuple) else c for c in batch.columns]
    emitted = {name: (next(found)[0], example) for name, (_, example) in batch.emitted.items()}
    return _placed(leaves, batch.structure), emitted


def _site_number(session: Session, site: Spec | TensorType) -> int:
    if isinstance(site, TensorType):
        return session.table.outside_of(site).number
    return session.table.site_of(site, session.device, "a trace").number
