"""Plan what was recorded: schedules of calls and, between them, whole runs of recurrent cells.

Calls of a recurrent cell whose children are calls of the same cell form trees. If no input of them
depends on their states, the cell computes all of them at once, as a layer would do, rather than one
level per step of the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch.sequences import SameLength, SequenceRun
from pyg_dynbatch.autobatch.signatures import CellCall, Site, Table
from pyg_dynbatch.core.engine import Run
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.merge import schedule_recordings
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.operation import calls_only
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.program import INPUT, RESULT, Program, number_arguments
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.structure import TopologicalOrder, concatenated_ranges
from pyg_dynbatch.core.types import TensorType


class Values:
    """Where the values of a session are: the row type and the row of each, and rows per type."""

    def __init__(self) -> None:
        self.kind, self.row = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.num_rows: list[int] = []

    def extend(self, kind: np.ndarray) -> None:
        """Add values that have not been computed."""
        self.kind = np.concatenate([self.kind, kind])
        self.row = np.concatenate([self.row, np.full_like(kind, -1)])

    def has_row(self, number: int) -> bool:
        """Return whether a value has been computed."""
        return number < self.row.size and bool(self.row[number] >= 0)


class Records(NamedTuple):
    """Calls that have been recorded, as arrays with an entry per call."""

    site: np.ndarray
    width: np.ndarray  # number of results
    first: np.ndarray  # value of the first result
    lengths: np.ndarray  # number of values that are read
    read: np.ndarray  # these values, call by call

    @classmethod
    def decode(
        cls, code: Sequence[int], starts: Sequence[int], base: int, table: Table
    ) -> "Records":
        """Decode what a session records; ``base`` is the first value."""
        flat, start = np.array(code, dtype=np.int64), np.array(starts, dtype=np.int64)
        site = flat[start]
        width = table.arrays()["width"][site]
        is_read = np.ones(flat.size, dtype=bool)
        is_read[start] = False
        lengths = np.diff(start, append=flat.size) - 1
        return cls(site, width, base + np.cumsum(width) - width, lengths, flat[is_read])

    def kinds(self, table: Table) -> np.ndarray:
        """Return the row type of each value."""
        slot = concatenated_ranges(np.zeros_like(self.width), self.width)
        return table.arrays()["kind"][np.repeat(self.site, self.width), slot]

    def owners(self, num_values: int) -> np.ndarray:
        """Return the call of each value of the session, or -1."""
        owner = np.full(num_values, -1)
        values = concatenated_ranges(self.first, self.width)
        owner[values] = np.repeat(np.arange(self.site.size), self.width)
        return owner

    def take(self, chosen: np.ndarray) -> "Records":
        """Return the calls of a mask."""
        read = self.read[np.repeat(chosen, self.lengths)]
        site, width, first, lengths = (column[chosen] for column in self[:4])
        return Records(site, width, first, lengths, read)

    def split(
        self, values: Sequence[int], table: Table, known: Values
    ) -> tuple["Records", "Records"]:
        """Split off the calls on which values depend, and all rows from outside."""
        owner, first_read = self.owners(known.row.size), np.cumsum(self.lengths) - self.lengths
        chosen = table.arrays()["signature"][self.site] < 0
        latest = np.unique(owner[np.array(values, dtype=np.int64)])
        latest = latest[latest >= 0]
        while latest.size:
            chosen[latest] = True
            reads = concatenated_ranges(first_read[latest], self.lengths[latest])
            found = owner[self.read[reads]]
            latest = np.unique(found[(found >= 0) & ~chosen[found]])
        # Calls that can run now join calls of the same kind.
        blocked = np.zeros(chosen.size, dtype=bool)
        made = owner[self.read]
        waits = (made >= 0) & (table.arrays()["signature"][self.site[made]] >= 0)
        blocked[np.repeat(np.arange(chosen.size), self.lengths)[waits]] = True
        chosen |= ~blocked & np.isin(self.site, self.site[chosen])
        return self.take(chosen), self.take(~chosen)

    def join(self, later: "Records") -> "Records":
        """Append calls."""
        return Records(*map(np.concatenate, zip(self, later, strict=True)))


NO_RECORDS = Records(*[np.zeros(0, dtype=np.int64)] * 5)


@dataclass(eq=False)
class CellRun(MovablePlan):
    """All calls of one recurrent cell.

    Args:
        cell: Path of the cell in the model.
        schedule: Made by :func:`schedule_structure`; one node per call.
        inputs: Rows of the inputs, in the order of ``schedule.input_node``.
        input_kind: Row type of the inputs; ``None`` if no call has an input.
        kept: For each part of a state that others read, its position in a state, its row type, and
            the calls in level order; an empty vector for all of them.
    """

    cell: str
    schedule: Levels
    inputs: Tensor
    input_kind: int | None
    kept: tuple[tuple[int, int, Tensor], ...]

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, *self.schedule._tensors(), *(picked for _, _, picked in self.kept)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "CellRun":
        kept = tuple((part, kind, fn(picked)) for part, kind, picked in self.kept)
        schedule = self.schedule._apply(fn)
        return replace(self, inputs=fn(self.inputs), schedule=schedule, kept=kept)


Part = Steps | CellRun | SequenceRun


def run_plan(
    parts: Sequence[Part],
    run: Run,
    modules: Mapping[str, nn.Module],
    outside: Mapping[TensorType, Tensor],
) -> None:
    """Run all parts of a plan; the rows from outside belong to the first."""
    given: dict[Any, Any] = {row_type: (rows,) for row_type, rows in outside.items()}
    for part in parts:
        if isinstance(part, Steps):
            run.extend(part, given)
            given = {}
            continue
        if isinstance(part, SequenceRun):
            part.extend(run, modules)
            continue
        cell: Any = modules[part.cell]
        if part.input_kind is None:
            like = next(cell.parameters(), run.token)
            inputs = like.new_empty(0, cell.in_channels)
        else:
            ((inputs,),) = run.read([(part.input_kind, part.inputs)])
        states = cell.run_recorded(part.schedule, inputs)
        for number, kind, picked in part.kept:
            rows = states[number]
            run.append(kind, rows.index_select(0, picked) if picked.numel() else rows)


class Planner:
    """Plan a number of calls.

    Args:
        table: The sites.
        records: The calls.
        values: Where values are; those of the calls get rows.
        outside: Sites of the rows from outside.
    """

    def __init__(
        self, table: Table, records: Records, values: Values, outside: Sequence[Site]
    ) -> None:
        self.table, self.values, self.outside = table, values, outside
        self.tables = table.arrays()
        self.site, self.width, self.first, lengths, self.read = records
        self.owner = records.owners(values.row.size)
        self.reader = np.repeat(np.arange(self.site.size), lengths)
        self.first_read = np.cumsum(lengths) - lengths

    def parts(self, policy: str | Policy, wanted: Sequence[int] | None) -> list[Part]:
        """Schedule all records; the rows of their values are known afterwards.

        Of a cell's states, those that no other call reads get rows only if they are ``wanted``;
        ``None`` for all.
        """
        cells = [site for site in self.table.sites if site.cell or site.layer]
        runs, phase = self._cell_runs(cells)
        parts: list[Part] = []
        for number in range(len(runs) + 1):
            chosen = np.flatnonzero(phase == number)
            if chosen.size or not number:
                parts.append(self._schedule(chosen, policy))
            if number < len(runs):
                parts.append(self._run_of(runs[number], wanted))
        return parts

    # Calls that the engine runs.

    def _schedule(self, chosen: np.ndarray, policy: str | Policy) -> Steps:
        program, values = self._program(chosen)
        # Numbers that were met before are one value already.
        schedule = schedule_recordings([program], policy, merge_equal=False)
        flat, row = schedule.index.numpy(), self.values.row
        for name, output in schedule.outputs.items():
            rows = flat[output.rows.offset : output.rows.offset + output.rows.length]
            row[values[program.outputs[name]]] = rows
        self.values.num_rows = [store.rows for store in schedule.buffers]
        return schedule

    def _program(self, chosen: np.ndarray) -> tuple[Program, np.ndarray]:
        """Return the program of some records, and the value of each of its values."""
        # `old` values, made by others, are inputs and come first; `new` ones are made here; `local`
        # is the number of a record among the chosen ones.
        tables, types, known = self.tables, self.table.row_types, self.values
        local = np.full(self.site.size, -1)
        local[chosen] = np.arange(chosen.size)
        site, width = self.site[chosen], self.width[chosen]
        signature = tables["signature"][site]
        is_call = signature >= 0
        call_number = np.cumsum(is_call) - 1
        kept = local[self.reader] >= 0
        read, reader = self.read[kept], self.reader[kept]
        position = np.flatnonzero(kept) - self.first_read[reader]
        owner = np.repeat(np.arange(chosen.size), width)
        slot = concatenated_ranges(np.zeros_like(width), width)
        new = self.first[chosen][owner] + slot
        made_here = np.zeros(known.kind.size, dtype=bool)
        made_here[new] = True
        old = np.unique(read[~made_here[read]])
        values = np.concatenate([old, new])
        number = np.zeros(known.kind.size, dtype=np.int64)
        number[values] = np.arange(values.size)

        kind, place = known.kind[new], np.where(is_call, call_number, 0)[owner]
        num_inputs = [*known.num_rows, *[0] * (len(types) - len(known.num_rows))]
        first = np.cumsum(width) - width
        for source in self.outside:
            rows, of_type = np.flatnonzero(site == source.number), source.kinds[0]
            place[first[rows]] = num_inputs[of_type] + np.arange(rows.size)
            num_inputs[of_type] += rows.size
        outputs = {str(n): np.flatnonzero(kind == n) + old.size for n in np.unique(kind)}
        zeros = np.zeros(old.size, dtype=np.int64)
        calls = tables["fixed"][site], tables["ragged"][site]
        program = Program(
            tuple(site.signature for site in self.table.sites if site.signature is not None),
            tuple(types), num_inputs, [0] * len(types), [[] for _ in types],
            value_type=known.kind[values],
            value_kind=np.concatenate([zeros + INPUT, np.where(is_call, RESULT, INPUT)[owner]]),
            value_index=np.concatenate([known.row[old], place]),
            value_slot=np.concatenate([zeros, slot]),
            call_signature=signature[is_call],
            read_value=number[read],
            read_call=call_number[local[reader]],
            read_argument=number_arguments(position, *(c[local[reader]] for c in calls)),
            outputs=outputs,
            output_example={name: 0 * marked for name, marked in outputs.items()},
        )  # fmt: skip
        return program, values

    # Calls that cells run.

    def _cell_runs(self, sites: Sequence[Site]) -> tuple[list["_Forest"], np.ndarray]:
        """Find the calls that cells run, in order; also the phase of each record: n after run n."""
        phase, forests = np.zeros(self.site.size, dtype=np.int64), list["_Forest"]()
        if not sites:
            return forests, phase
        made = self.owner[self.read]
        inner = made >= 0
        graph = TopologicalOrder(made[inner], self.reader[inner], self.site.size)
        by_cell: dict[Any, list[Site]] = {}
        for site in sites:
            by_cell.setdefault(site.layer or site.spec.target, []).append(site)  # type: ignore[union-attr]
        for mine in by_cell.values():
            cell: Any = self.table.modules[mine[0].spec.target]  # type: ignore[union-attr]
            if mine[0].layer:
                plain = calls_only(cell, forward=type(cell).forward)
                forest = self._sequences(mine) if plain else None
            else:
                forest = self._forest(mine) if cell.is_recordable else None
            if forest is None:
                continue
            inputs = self.owner[forest.inputs[forest.inputs >= 0]]
            if not _reached(graph, forest, forests)[inputs[inputs >= 0]].any():
                forests.append(forest)
        reached = [_reached(graph, forest, forests) for forest in forests]
        # A run comes after those that it depends on, and so do calls.
        before = [sum(int(r[f.records[0]]) for r in reached) for f in forests]
        order = sorted(range(len(forests)), key=before.__getitem__)
        for number, each in enumerate(order):
            phase[reached[each]] = number + 1
        for forest in forests:
            phase[forest.records] = -1
        return [forests[each] for each in order], phase

    def _forest(self, sites: Sequence[Site]) -> "_Forest | None":
        """Return the calls of a cell as a forest, unless some child is not a call of the cell."""
        of_cell = np.zeros(len(self.table.sites), dtype=bool)
        of_cell[[site.number for site in sites]] = True
        mine = of_cell[self.site]
        records, node = np.flatnonzero(mine), np.cumsum(mine) - 1
        inputs, edges = np.full(records.size, -1), []
        for site in sites:
            form: CellCall = site.cell  # type: ignore[assignment]
            calls = np.flatnonzero(self.site == site.number)
            width, parts = len(site.spec.inputs), len(site.kinds)  # type: ignore[union-attr]
            read = self.read[self.first_read[calls, None] + np.arange(width)]
            if form.has_input:
                inputs[node[calls]], read = read[:, 0], read[:, 1:]
            states = read.reshape(calls.size, len(form.slots), parts)
            made = self.owner[states[:, :, 0]]
            whole = self.first[made][:, :, None] + np.arange(parts) == states
            if not ((made >= 0).all() and mine[made].all() and whole.all()):
                return None
            slots = np.tile(np.array(form.slots, dtype=np.int64), calls.size)
            parents = node[calls].repeat(len(form.slots))
            edges.append(np.stack([node[made].reshape(-1), parents, slots]))
        joined = np.concatenate(edges, 1)
        called = [site for site in sites if (self.site == site.number).any()]
        types = {site.kinds for site in called}  # under autocast they may differ
        if not joined.size or len(types) > 1:
            return None
        if np.unique(self.values.kind[inputs[inputs >= 0]]).size > 1:
            return None
        return _Forest(called[0], records, inputs, joined)

    def _sequences(self, sites: Sequence[Site]) -> "_Forest | None":
        """Return the calls of a recurrent layer, unless all sequences have one length."""
        called = [site for site in sites if (self.site == site.number).any()]
        if len(called) < 2:
            return None
        records = np.flatnonzero(np.isin(self.site, [site.number for site in called]))
        read = self.read[np.isin(self.reader, records)]
        return _Forest(called[0], records, read, np.empty((3, 0), dtype=np.int64), called)

    def _layer_run(self, forest: "_Forest") -> SequenceRun:
        """Give the results of a recurrent layer rows."""
        values, runs = self.values, []
        layer: Any = self.table.modules[forest.site.spec.target]  # type: ignore[union-attr]

        def length(site: Site) -> int:
            shape = self.table.samples[site.kinds[0]].shape
            return shape[1 if layer.batch_first and len(shape) == 3 else 0]

        for site in sorted(forest.layer_sites, key=length, reverse=True):
            calls = np.flatnonzero(self.site == site.number)
            width = len(site.spec.inputs)  # type: ignore[union-attr]
            read = self.read[self.first_read[calls, None] + np.arange(width)].T
            reads = [(int(values.kind[r[0]]), torch.from_numpy(values.row[r])) for r in read]
            for part, kind in enumerate(site.kinds):
                first = values.num_rows[kind]
                values.row[self.first[calls] + part] = first + np.arange(calls.size)
                values.num_rows[kind] += calls.size
            name = site.signature.name  # type: ignore[union-attr]
            runs.append(SameLength(name, tuple(reads), site.kinds))
        return SequenceRun(forest.site.spec.target, tuple(runs))  # type: ignore[union-attr]

    def _run_of(self, forest: "_Forest", wanted: Sequence[int] | None) -> Part:
        """Schedule the calls of a cell, and give their states rows."""
        if forest.layer_sites:
            return self._layer_run(forest)
        site, values, edges = forest.site, self.values, forest.edges
        path: str = site.spec.target  # type: ignore[union-attr]
        cell: Any = self.table.modules[path]
        schedule = schedule_structure(
            torch.from_numpy(edges[:2]),
            forest.records.size,
            child_slot=None if cell.arity is None else torch.from_numpy(edges[2]),
            arity=cell.arity,
            has_input=torch.from_numpy(forest.inputs >= 0),
        )
        read = forest.inputs[schedule.input_node.numpy()]
        inputs = torch.from_numpy(values.row[read])
        in_levels = np.empty(forest.records.size, dtype=np.int64)
        in_levels[schedule.row.numpy() - 1] = forest.records
        used = np.ones(values.row.size, dtype=bool)
        if wanted is not None:
            inside = np.zeros(self.site.size, dtype=bool)
            inside[forest.records] = True
            used[:] = False
            used[self.read[~inside[self.reader]]] = True
            used[np.array(wanted, dtype=np.int64)] = True
        kept = []
        for part, kind in enumerate(site.kinds):
            numbers = self.first[in_levels] + part
            picked = np.flatnonzero(used[numbers])
            if picked.size:
                first = values.num_rows[kind]
                values.row[numbers[picked]] = first + np.arange(picked.size)
                values.num_rows[kind] += picked.size
                every = picked.size == numbers.size
                kept.append((part, kind, torch.from_numpy(picked[:0] if every else picked)))
        input_kind = int(values.kind[read[0]]) if read.size else None
        return CellRun(path, schedule, inputs, input_kind, tuple(kept))


@dataclass(eq=False)
class _Forest:
    """Calls of one cell, numbered as nodes: their records, inputs (-1 for none), and edges."""

    site: Site
    records: np.ndarray
    inputs: np.ndarray
    edges: np.ndarray  # child, parent, slot
    layer_sites: Sequence[Site] = ()  # of a recurrent layer: one for each length


def _reached(graph: TopologicalOrder, forest: _Forest, others: Sequence[_Forest]) -> np.ndarray:
    """Return which records depend on a forest; each forest runs as a whole."""
    reached, last = np.zeros(graph.count.size, dtype=bool), np.zeros(graph.count.size, np.int64)
    reached[forest.records] = True
    latest = forest.records
    while latest.size:
        users = graph.users_of(latest)
        users = users[~reached[users]]
        last[users] = position = np.arange(users.size)
        users = users[last[users] == position]  # each once
        reached[users] = True
        for other in others:
            touched = reached[other.records]
            if touched.any() and not touched.all():
                users = np.concatenate([users, other.records[~touched]])
                reached[other.records] = True
        latest = users
    return reached
