"""Plan what was recorded: schedules of calls and, between them, whole runs of recurrent cells.

Calls of a recurrent cell whose children are calls of the same cell form trees. If no input of them
depends on their states, the cell computes all of them at once, as a layer would do, rather than one
level per step of the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyg_dynbatch.autobatch.signatures import CellCall, Site, Table
from pyg_dynbatch.core import scheduling
from pyg_dynbatch.core.engine import Run
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.movable import MovablePlan
from pyg_dynbatch.core.policy import Policy
from pyg_dynbatch.core.scheduling import Calls, Constants, Records, Values
from pyg_dynbatch.core.steps import BufferSpec, Steps
from pyg_dynbatch.core.structure import TopologicalOrder
from pyg_dynbatch.core.types import TensorType


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


Part = Steps | CellRun


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
    """Plan recorded calls.

    Args:
        table: The sites.
        code: All that was recorded.
        begins: Where the records begin that have not been run.
        values: What is known of values; those of the calls get rows.
        rows: Number of rows of each row type, which becomes larger by those of results.
        alive: Of each value, whether the model may read it later.
        places: Of each value, where in the user's code it was made.
    """

    def __init__(
        self, table: Table, code: np.ndarray, begins: np.ndarray, values: Values,
        rows: np.ndarray, alive: np.ndarray, places: np.ndarray,
    ) -> None:  # fmt: skip
        self.table, self.code, self.values, self.rows = table, code, values, rows
        self.alive, self.places = alive, places
        self.sites = table.recorded
        self.calls = self._merged(begins)
        self.begin = self.calls.member

    def _merged(self, begins: np.ndarray) -> Calls:
        records = Records(self.sites, self.code, begins, self.values)
        # Numbers that were met before are one value already.
        calls, _ = scheduling.merge(records, Constants.none(self.sites), merge_equal=False)
        return calls

    def makers_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the calls that make values; -1 for values that have rows."""
        call = self.values.call[numbers]
        return np.where(self.values.row[numbers] >= 0, -1, call)

    def parts(
        self, policy: Policy, needed: Sequence[int] | None, wanted: Sequence[int] | None
    ) -> tuple[list[Part], np.ndarray]:
        """Schedule calls; the rows of their values are known afterwards.

        Returns the parts, and where the calls begin that can wait: those on which no ``needed``
        value depends; by default none. Values that no later part reads get rows only if they are
        ``wanted``, and calls on which none of these depend are left out; by default all that the
        model may read are kept.
        """
        self.kept = self.alive.copy()
        if wanted is not None:
            self.kept[:] = 0
            self.kept[np.array(wanted, dtype=np.int64)] = 1
        waiting, waits = 0, np.zeros(self.begin.size, dtype=bool)
        if needed is not None:
            waiting, waits = scheduling.choose(self.calls, needed, self.kept, joins=True)
        elif wanted is not None:  # the derivative of what nobody reads could be infinite
            waiting, waits = scheduling.choose(self.calls, wanted, self.kept.copy(), joins=False)
        cells = [site for site in self.table.sites if site.cell]
        if not cells:
            calls = self._merged(self.begin[~waits]) if waiting else self.calls
            return [self._steps(calls, policy, self.kept)], self.begin[waits]
        self._list_reads()
        runs, phase = self._cell_runs(cells, waits)
        phase[waits] = -1
        parts: list[Part] = []
        for number in range(len(runs) + 1):
            chosen = np.flatnonzero(phase == number)
            if chosen.size or not number:
                parts.append(self._schedule(chosen, policy))
            if number < len(runs):
                parts.append(self._run_of(runs[number], wanted))
        return parts, self.begin[waits]

    def _list_reads(self) -> None:
        count = self.calls.num_calls
        self.site = self.code[self.begin]
        # Copies, since calls that are fused overwrite them.
        self.first_read = self.calls.first_read.copy()
        self.read = self.calls.read[: self.first_read[count]].copy()
        self.reader = np.repeat(np.arange(count), np.diff(self.first_read[: count + 1]))
        self.maker = self.makers_of(self.read)  # of each read

    # Calls that the engine runs.

    def _schedule(self, chosen: np.ndarray, policy: Policy) -> Steps:
        everything = chosen.size == self.begin.size
        calls = self.calls if everything else self._merged(self.begin[chosen])
        outside, kept = np.ones(self.begin.size, dtype=bool), self.kept.copy()
        outside[chosen] = False
        kept[self.read[outside[self.reader]]] = 1
        return self._steps(calls, policy, kept)

    def _steps(self, calls: Calls, policy: Policy, kept: np.ndarray) -> Steps:
        fused = scheduling.fuse(calls, kept, self.places)
        before = self.rows.tolist()
        steps, index = scheduling.place(fused, policy, self.rows)
        columns = zip(self.sites.row_types, before, self.rows.tolist(), strict=True)
        return Steps(
            signatures=self.sites.signatures,
            buffers=tuple(BufferSpec(kind, 0, inputs, rows) for kind, inputs, rows in columns),
            steps=steps,
            index=torch.from_numpy(index),
            constants=(None,) * len(before),
            outputs={},
            num_examples=1,
            fused=fused.programs,
        )

    # Calls that cells run.

    def _cell_runs(
        self, sites: Sequence[Site], waits: np.ndarray
    ) -> tuple[list["_Forest"], np.ndarray]:
        """Find the calls that cells run, in order; also the phase of each call: n after run n."""
        phase, forests = np.zeros(self.site.size, dtype=np.int64), list["_Forest"]()
        if not sites:
            return forests, phase
        inner = self.maker >= 0
        graph = TopologicalOrder(self.maker[inner], self.reader[inner], self.site.size)
        by_cell: dict[Any, list[Site]] = {}
        for site in sites:
            by_cell.setdefault(site.spec.target, []).append(site)  # type: ignore[union-attr]
        for mine in by_cell.values():
            cell: Any = self.table.modules[mine[0].spec.target]  # type: ignore[union-attr]
            forest = self._forest(mine, waits) if cell.is_recordable else None
            if forest is None:
                continue
            inputs = self.makers_of(forest.inputs[forest.inputs >= 0])
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

    def _forest(self, sites: Sequence[Site], waits: np.ndarray) -> "_Forest | None":
        """Return the calls of a cell as a forest, unless some child is not a call of the cell."""
        of_cell = np.zeros(len(self.table.sites), dtype=bool)
        of_cell[[site.number for site in sites]] = True
        mine = of_cell[self.site] & ~waits
        records, node = np.flatnonzero(mine), np.cumsum(mine) - 1
        inputs, edges = np.full(records.size, -1), []
        for site in sites:
            form: CellCall = site.cell  # type: ignore[assignment]
            calls = np.flatnonzero((self.site == site.number) & mine)
            width, parts = len(site.spec.inputs), len(site.kinds)  # type: ignore[union-attr]
            read = self.read[self.first_read[calls, None] + np.arange(width)]
            if form.has_input:
                inputs[node[calls]], read = read[:, 0], read[:, 1:]
            states = read.reshape(calls.size, len(form.slots), parts)
            made = self.makers_of(states[:, :, 0])
            whole = self.begin[made][:, :, None] + np.arange(parts) == states
            if not ((made >= 0).all() and mine[made].all() and whole.all()):
                return None
            slots = np.tile(np.array(form.slots, dtype=np.int64), calls.size)
            parents = node[calls].repeat(len(form.slots))
            edges.append(np.stack([node[made].reshape(-1), parents, slots]))
        joined = np.concatenate(edges, 1)
        called = [site for site in sites if (self.site[mine] == site.number).any()]
        types = {site.kinds for site in called}  # under autocast they may differ
        if not joined.size or len(types) > 1:
            return None
        if np.unique(self._types_of(inputs[inputs >= 0])).size > 1:
            return None
        return _Forest(called[0], records, inputs, joined)

    def _types_of(self, numbers: np.ndarray) -> np.ndarray:
        return self.values.types_of(numbers, self.sites, self.code)

    def _run_of(self, forest: "_Forest", wanted: Sequence[int] | None) -> CellRun:
        """Schedule the calls of a cell, and give their states rows."""
        site, values, edges = forest.site, self.values, forest.edges
        path: str = site.spec.target  # type: ignore[union-attr]
        cell: Any = self.table.modules[path]
        options: Any = {"arity": cell.arity, "has_input": torch.from_numpy(forest.inputs >= 0)}
        if cell.arity is not None:
            options["child_slot"] = torch.from_numpy(edges[2])
        size = forest.records.size
        schedule = schedule_structure(torch.from_numpy(edges[:2]), size, **options)
        read = forest.inputs[schedule.input_node.numpy()]
        inputs = torch.from_numpy(values.row[read].astype(np.int64))
        in_levels = np.empty(forest.records.size, dtype=np.int64)
        in_levels[schedule.row.numpy() - 1] = forest.records
        used = np.ones(self.code.size, dtype=bool)
        if wanted is not None:
            inside = np.zeros(self.site.size, dtype=bool)
            inside[forest.records] = True
            used[:] = False
            used[self.read[~inside[self.reader]]] = True
            used[np.array(wanted, dtype=np.int64)] = True
        kept = []
        for part, kind in enumerate(site.kinds):
            numbers = self.begin[in_levels] + part
            picked = np.flatnonzero(used[numbers])
            if picked.size:
                values.row[numbers[picked]] = self.rows[kind] + np.arange(picked.size)
                self.rows[kind] += picked.size
                every = picked.size == numbers.size
                kept.append((part, kind, torch.from_numpy(picked[:0] if every else picked)))
        input_kind = int(self._types_of(read[:1])[0]) if read.size else None
        return CellRun(path, schedule, inputs, input_kind, tuple(kept))


@dataclass(eq=False)
class _Forest:
    """Calls of one cell, numbered as nodes: their records, inputs (-1 for none), and edges."""

    site: Site
    records: np.ndarray
    inputs: np.ndarray
    edges: np.ndarray  # child, parent, slot


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
