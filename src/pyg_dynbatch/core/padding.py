"""Pad the schedule of a structure to a given shape, with nodes that nobody reads.

All plain numbers of a padded schedule depend on the shape alone; the batch decides nothing but
the row numbers. So whatever runs it does the same calls on tensors of the same sizes for every
batch of one shape, which is what a CUDA graph asks for.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import INPUT_STORE, STATE_STORE
from pyg_dynbatch.core.operation import Ragged, Signature, any_type
from pyg_dynbatch.core.schedule import (
    IndexSlice,
    LevelShape,
    Output,
    Schedule,
    Step,
    Store,
    first_rows,
    shape_of,
)
from pyg_dynbatch.core.structure import concatenated_ranges

_FACT = "padded"
_KEPT_FRAMES = 256


class PaddedForm(NamedTuple):
    """A padded schedule, and how to get the rows of a batch into it and out of it."""

    shape: LevelShape
    schedule: Schedule
    input_row: Int[Tensor, " padded_input"]
    input_place: Int[Tensor, " input"]
    level_place: Int[Tensor, " node"]
    node_place: Int[Tensor, " node"]


def padded_schedule(schedule: Schedule, shape: LevelShape) -> Schedule:
    """Puts the padded form of a schedule behind its own numbers, in the same flat tensor."""
    mine = shape_of(schedule)
    if not shape.holds(mine) or schedule.device.type != "cpu":
        raise mismatch(
            ValueError,
            "padded_schedule: the schedule cannot be padded to this shape",
            f"a schedule on the CPU that fits into {shape}",
            f"{mine} on {schedule.device}",
            hint="LevelBuckets.fit(schedules).pad(schedule)",
        )
    own = schedule.wiring[: schedule.facts.get(_FACT, (None, schedule.wiring.numel()))[1]]
    parts = _Padder(schedule, own.numpy(), mine, shape).parts()
    wiring = torch.cat([own, torch.from_numpy(np.concatenate(parts))])
    return _with_wiring(schedule, wiring, {**schedule.facts, _FACT: (shape, own.numel())})


def padded_form(schedule: Schedule) -> PaddedForm | None:
    """Takes the padded form of a schedule, on whatever device it is now."""
    found = schedule.facts.get(_FACT)
    if found is None:
        return None
    shape, first = found
    frame = _frame(shape)
    inputs, nodes = schedule.stores[INPUT_STORE].inputs, schedule.num_nodes
    lengths = (frame.length, sum(shape.inputs), inputs, nodes, nodes)
    parts = schedule.wiring[first:].split(lengths)
    return PaddedForm(shape, schedule_of_shape(shape, parts[0]), *parts[1:])


def schedule_of_shape(shape: LevelShape, wiring: Int[Tensor, " entry"]) -> Schedule:
    """Makes a padded schedule of given row numbers."""
    return _with_wiring(_frame(shape).schedule, wiring)


def _with_wiring(schedule: Schedule, wiring: Tensor, facts: dict[str, Any] | None = None) -> Any:
    return Schedule(
        schedule.signatures,
        schedule.stores,
        schedule.steps,
        wiring,
        schedule.constants,
        schedule.outputs,
        schedule.num_examples,
        schedule.facts if facts is None else facts,
    )


class _Frame(NamedTuple):
    """What all padded schedules of one shape share: a schedule without its row numbers."""

    schedule: Schedule
    length: int
    constant: tuple[np.ndarray, ...]


class _Layout:
    """Hands out stretches of a flat vector."""

    def __init__(self) -> None:
        self.length = 0

    def take(self, length: int) -> int:
        """Gives the place of the next stretch."""
        self.length += length
        return self.length - length


def _before(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


@lru_cache(maxsize=_KEPT_FRAMES)
def _frame(shape: LevelShape) -> _Frame:
    """Lays out the row numbers: those of children first, then those that never change."""
    arity, nodes = shape.arity, shape.nodes
    sizes = np.array(shape.sizes, dtype=np.int64)
    read = np.array(shape.inputs, dtype=np.int64)
    starts, layout = _before(sizes), _Layout()
    read_children, more = _children(shape, layout)
    filled = np.arange(nodes) - np.repeat(starts, sizes) < np.repeat(read, sizes)
    index = np.where(filled, np.cumsum(filled), 0)
    offset, inside = layout.take(nodes), first_rows(index, starts, sizes)
    steps = []
    for level, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
        own = IndexSlice(INPUT_STORE, offset + start, size, int(inside[level]))
        steps.append(
            Step(0, size, (own, *read_children(level, start, size)), ((STATE_STORE, start + 1),))
        )
    total = int(read.sum())
    input_node = layout.take(total), total
    output = IndexSlice(STATE_STORE, layout.take(nodes), nodes, -1 if nodes else 0)
    example, order = layout.take(nodes), sum(shape.edges or ())
    edge_order = None if arity is not None else (layout.take(order), order)
    inputs, state = any_type("input"), any_type("state")
    children = (Ragged(state),) if arity is None else (state,) * arity
    schedule = Schedule(
        signatures=(Signature("node", (inputs, *children), (state,), random=True),),
        stores=(Store(inputs, 1, total, total + 1), Store(state, 1, 0, nodes + 1)),
        steps=tuple(steps),
        wiring=torch.empty(0, dtype=torch.int64),
        constants=(None, None),
        outputs={"node": Output(output, example)},
        num_examples=1,
        facts={
            "num_nodes": nodes,
            "num_edges": order,
            "arity": arity,
            "direction": shape.direction,
            "input_node": input_node,
            "level_inputs": shape.inputs,
            "edge_order": edge_order,
            "single_parent": shape.single_parent,
            **more,
        },
    )
    rows, example_of = np.arange(1, nodes + 1), np.zeros(nodes, dtype=np.int64)
    constant = (index, np.flatnonzero(filled), rows, example_of, np.arange(order))
    return _Frame(schedule, layout.length, constant)


def _children(
    shape: LevelShape, layout: _Layout
) -> tuple[Callable[[int, int, int], list[IndexSlice]], dict[str, Any]]:
    """Says how each level reads its children, which are always gathered, and more facts."""
    nodes = shape.nodes
    if shape.edges is None:
        arity = shape.arity or 0
        first = layout.take(nodes * arity)

        def fixed(level: int, start: int, size: int) -> list[IndexSlice]:
            offset = first + start * arity
            return [
                IndexSlice(STATE_STORE, offset + place, size, -1, stride=arity)
                for place in range(arity)
            ]

        return fixed, {"child_start": None}
    edges = np.array(shape.edges, dtype=np.int64)
    begin, total = _before(edges).tolist(), int(edges.sum())
    first, owner = layout.take(total), layout.take(total)
    child_start = layout.take(nodes)

    def ragged(level: int, start: int, size: int) -> list[IndexSlice]:
        count, at = int(edges[level]), begin[level]
        return [IndexSlice(STATE_STORE, first + at, count, -1 if count else 0, owner + at)]

    return ragged, {"child_start": child_start}


class _Padder:
    """Computes the row numbers of a padded schedule."""

    def __init__(
        self, schedule: Schedule, wiring: np.ndarray, mine: LevelShape, shape: LevelShape
    ) -> None:
        self.schedule, self.wiring, self.mine, self.shape = schedule, wiring, mine, shape
        self.sizes = np.array(shape.sizes, dtype=np.int64)
        self.starts = _before(self.sizes)
        levels = len(mine.sizes)
        own, read = np.array(mine.sizes, dtype=np.int64), np.array(mine.inputs, dtype=np.int64)
        wide = np.array(shape.inputs, dtype=np.int64)
        self.own_starts = _before(own)
        within = concatenated_ranges(np.zeros(levels, dtype=np.int64), own)
        moved = np.repeat(wide[:levels] - read, own)
        # Nodes without an input come last in a level, behind the inputs of padding.
        behind = within >= np.repeat(read, own)
        self.place = np.repeat(self.starts[:levels], own) + within + np.where(behind, moved, 0)
        self.row = np.concatenate([[0], self.place + 1])
        self.input_place = concatenated_ranges(_before(wide)[:levels], read)

    def parts(self) -> list[np.ndarray]:
        """Gives the padded row numbers, and the places of inputs and nodes."""
        input_row = np.zeros(sum(self.shape.inputs), dtype=np.int64)
        input_row[self.input_place] = np.arange(self.input_place.size)
        children = self._fixed() if self.shape.edges is None else self._ragged()
        node = self.schedule.outputs["node"].wiring
        rows = self.wiring[node.offset : node.offset + node.length]
        constant = _frame(self.shape).constant
        return [
            *children, *constant, input_row, self.input_place, self.place, self.place[rows - 1],
        ]  # fmt: skip

    def _taken(self, offset: int, length: int) -> np.ndarray:
        return self.wiring[offset : offset + length]

    def _fixed(self) -> list[np.ndarray]:
        arity, nodes = self.shape.arity or 0, self.schedule.num_nodes
        children = np.zeros((self.shape.nodes, arity), dtype=np.int64)
        if nodes:
            first = self.schedule.steps[0].arguments[1].offset
            own = self._taken(first, nodes * arity).reshape(nodes, arity)
            children[self.place] = self.row[own]
        return [children.reshape(-1)]

    def _ragged(self) -> list[np.ndarray]:
        edges = np.array(self.shape.edges, dtype=np.int64)
        counts = np.zeros_like(edges)
        counts[: len(self.mine.sizes)] = self.mine.edges or ()
        children = parents = np.zeros(0, dtype=np.int64)
        if counts.sum():
            first = self.schedule.steps[0].arguments[1]
            total, levels = int(counts.sum()), len(self.mine.sizes)
            children = self.row[self._taken(first.offset, total)]
            own = self._taken(first.owner, total) + np.repeat(self.own_starts, counts[:levels])
            parents = self.place[own]
        spare = self._spare_parents(edges - counts)
        children = np.concatenate([children, np.zeros_like(spare)])
        parents = np.concatenate([parents, spare])
        order = np.argsort(parents, kind="stable")
        children, parents = children[order], parents[order]
        owners = parents - np.repeat(self.starts, edges)
        child_start = _before(np.bincount(parents, minlength=self.shape.nodes))
        return [children, owners, child_start]

    def _spare_parents(self, spare: np.ndarray) -> np.ndarray:
        """Hangs the edges of padding, which read the row of zeros, on the nodes of padding."""
        free = np.ones(self.shape.nodes, dtype=bool)
        free[self.place] = False
        rows = np.flatnonzero(free)
        level = np.repeat(np.arange(self.sizes.size), self.sizes)[rows]
        room = np.bincount(level, minlength=self.sizes.size)
        number = concatenated_ranges(np.zeros_like(spare), spare)
        # Spread evenly, as one node with all of them would be waited for.
        within = number * np.repeat(room, spare) // np.repeat(np.maximum(spare, 1), spare)
        return rows[np.repeat(_before(room), spare) + within]


# The shape goes with a padded schedule.
torch.serialization.add_safe_globals([LevelShape])


_QUANTILES = (0.25, 0.5, 0.75, 0.9)


class Padding(NamedTuple):
    """How much larger padded schedules are than the schedules themselves."""

    fitting: float
    nodes: float
    levels: float
    shapes: int


class LevelBuckets:
    """Pads schedules to a few shapes: so many levels, each with so many nodes.

    Rounding the size of every level on its own leaves nearly as many shapes as batches. Here the
    shapes come from a sample of schedules instead: the sample is split, again and again where it
    saves most, by number of levels or of nodes, and each part is held by one shape, as large in
    every level as the largest of its schedules.

    Args:
        shapes: The shapes; see :meth:`fit`.
        level_rows: What one more level costs, counted in nodes. On a GPU small levels take about
            as long as large ones.

    Raises:
        ValueError: If there is no shape, or a level costs less than nothing.

    Example:
        >>> import torch
        >>> chain = torch.tensor([[0, 1, 2], [1, 2, 3]])
        >>> many = [Schedule.from_structure(chain[:, :n], n + 1, arity=1) for n in (1, 2, 3, 3)]
        >>> buckets = LevelBuckets.fit(many, number=2, margin=0.0)
        >>> [shape.sizes for shape in buckets.shapes]
        [(1, 1), (1, 1, 1, 1)]
        >>> buckets.padding(many)
        Padding(fitting=1.0, nodes=1.0769230769230769, levels=1.0769230769230769, shapes=2)
    """

    def __init__(self, shapes: Sequence[LevelShape], *, level_rows: int = 64) -> None:
        if not shapes or level_rows < 0:
            raise mismatch(
                ValueError,
                "LevelBuckets: nothing to pad to",
                "one shape or more, and level_rows of 0 or more",
                f"{len(shapes)} shapes, level_rows={level_rows}",
                hint="LevelBuckets.fit(schedules)",
            )
        self.level_rows = level_rows
        self.shapes = tuple(sorted(set(shapes), key=self._cost))

    @classmethod
    def fit(
        cls,
        schedules: Iterable[Schedule],
        number: int = 16,
        *,
        margin: float = 0.1,
        level_rows: int = 64,
    ) -> "LevelBuckets":
        """Finds shapes that hold all of some schedules.

        Args:
            schedules: A sample, such as those of one epoch; of one arity and direction.
            number: How many shapes at most, one or more.
            margin: By which part every level is made larger than in the sample, rounded up, so
                that more of other batches fit; 0 for a sample of all batches there are.
            level_rows: See the class.

        Returns:
            The buckets.

        Raises:
            ValueError: If there is no schedule, or they were made for different layers.
        """
        shapes = [shape_of(schedule) for schedule in schedules]
        kinds = {(shape.arity, shape.direction) for shape in shapes}
        if len(kinds) != 1 or number < 1 or margin < 0:
            raise mismatch(
                ValueError,
                "LevelBuckets.fit: no sample of schedules of one kind, or no size",
                "schedules of one arity and direction, number >= 1, margin >= 0",
                f"{len(shapes)} schedules of {len(kinds)} kinds, number={number}, margin={margin}",
            )
        return cls(_Sample(shapes, margin, level_rows).parted(number), level_rows=level_rows)

    def _cost(self, shape: LevelShape) -> int:
        return shape.nodes + self.level_rows * len(shape.sizes)

    def shape_for(self, schedule: Schedule) -> LevelShape | None:
        """Finds the cheapest shape that holds a schedule; None where none does."""
        mine = shape_of(schedule)
        # They lie in the order of what they cost.
        return next((shape for shape in self.shapes if shape.holds(mine)), None)

    def pad(self, schedule: Schedule) -> Schedule:
        """Puts the padded form of a schedule behind its own numbers.

        The result is used like the schedule itself; whoever wants the padded form asks
        :func:`~pyg_dynbatch.core.padding.padded_form` for it, on any device. It is made on the
        host, so in a worker process of a loader at best.

        Args:
            schedule: Made by ``Schedule.from_structure``, on the CPU.

        Returns:
            A schedule that holds both; the same as before where no shape holds it.
        """
        shape = self.shape_for(schedule)
        return schedule if shape is None else padded_schedule(schedule, shape)

    def padding(self, schedules: Iterable[Schedule]) -> Padding:
        """Counts how much of padded schedules is padding."""
        used, rows = set(), []
        total = 0
        for schedule in schedules:
            total += 1
            shape = self.shape_for(schedule)
            if shape is not None:
                used.add(shape)
                levels = len(schedule.steps)
                rows.append((shape.nodes, schedule.num_nodes, len(shape.sizes), levels))
        if not rows:
            return Padding(0.0, 1.0, 1.0, 0)
        padded, nodes, padded_levels, levels = np.array(rows).sum(0).tolist()
        return Padding(
            len(rows) / total, padded / max(nodes, 1), padded_levels / max(levels, 1), len(used)
        )

    def __repr__(self) -> str:
        nodes = [shape.nodes for shape in self.shapes]
        return f"{type(self).__name__}({len(nodes)} shapes of {min(nodes)} to {max(nodes)} nodes)"


class _Sample:
    """Shapes of a sample as one array ``[schedule, level, (inputs, others, edges)]``."""

    def __init__(self, shapes: Sequence[LevelShape], margin: float, level_rows: int) -> None:
        self.first, self.margin, self.level_rows = shapes[0], margin, level_rows
        self.single_parent = np.array([shape.single_parent for shape in shapes])
        self.levels = np.array([len(shape.sizes) for shape in shapes])
        self.sizes = np.zeros((len(shapes), int(self.levels.max()), 3), dtype=np.int64)
        for number, shape in enumerate(shapes):
            edges = shape.edges or (0,) * len(shape.inputs)
            self.sizes[number, : len(edges)] = np.stack([shape.inputs, shape.others, edges], 1)
        self.keys = (self.levels, self.sizes[:, :, :2].sum((1, 2)))

    def parted(self, number: int) -> list[LevelShape]:
        """Splits the sample into parts, and finds the shape of each."""
        parts = [np.arange(self.levels.size)]
        splits = [self._best_split(parts[0])]
        while len(parts) < number:
            worst = max(range(len(parts)), key=lambda k: splits[k][0])
            saved, low, high = splits[worst]
            if saved <= 0:
                break
            parts[worst : worst + 1] = [low, high]
            splits[worst : worst + 1] = [self._best_split(low), self._best_split(high)]
        return [self._shape(part) for part in parts]

    def _best_split(self, part: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Gives what the best split of a part saves, and its two sides."""
        best, whole = (0, part, part), self._cost(part)
        for key in self.keys:
            values = key[part]
            for bound in np.unique(np.quantile(values, _QUANTILES, method="lower")):
                low, high = part[values <= bound], part[values > bound]
                if high.size:
                    saved = whole - self._cost(low) - self._cost(high)
                    best = max(best, (saved, low, high), key=lambda split: split[0])
        return best

    def _cost(self, part: np.ndarray) -> int:
        nodes = int(self.sizes[part, :, :2].max(0).sum())
        return part.size * (nodes + self.level_rows * int(self.levels[part].max()))

    def _shape(self, part: np.ndarray) -> LevelShape:
        largest = self.sizes[part].max(0)[: self.levels[part].max()]
        largest = np.ceil(largest * (1 + self.margin)).astype(np.int64)
        inputs, others, edges = (tuple(column) for column in largest.T.tolist())
        ragged = self.first.arity is None
        if ragged:
            # Edges of padding hang on nodes of padding; leaves have none.
            others = tuple(count + (level > 0) for level, count in enumerate(others))
        return LevelShape(
            self.first.arity,
            self.first.direction,
            inputs,
            others,
            edges if ragged else None,
            bool(self.single_parent[part].all()),
        )
