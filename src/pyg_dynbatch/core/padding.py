"""Pad the schedule of a structure to a given shape, with nodes that no other node reads.

All plain numbers of a padded schedule depend on the shape alone; the batch decides nothing but
the row numbers. So a model does the same calls on tensors of the same sizes for every
batch of one shape, as CUDA graphs require.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.layout import GATHER, LevelShape, StructureInfo
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import concatenated_ranges


class PaddedForm(NamedTuple):
    """A padded schedule, and how to get the rows of a batch into it and out of it."""

    shape: LevelShape
    schedule: Schedule
    input_row: Int[Tensor, " padded_input"]  # input row of each padded input; 0 for padding
    input_place: Int[Tensor, " input"]  # padded input of each input
    level_place: Int[Tensor, " node"]  # padded place of each node in level order
    node_place: Int[Tensor, " node"]  # padded place of each node in node order


def shape_of(schedule: Schedule) -> LevelShape:
    """Return the sizes of a schedule's levels."""
    arity, inputs, steps = schedule.arity, schedule.level_inputs, schedule.steps
    if arity == 0:
        raise mismatch(ValueError, "LevelShape: nodes without argument places", "arity >= 1", 0)
    return LevelShape(
        arity,
        schedule.direction,
        inputs,
        tuple(step.size - read for step, read in zip(steps, inputs, strict=True)),
        None if arity is not None else tuple(step.arguments[1].length for step in steps),
        schedule.single_parent,
    )


def padded_schedule(schedule: Schedule, shape: LevelShape) -> Schedule:
    """Append the row numbers of the padded form of a schedule to its own."""
    mine, info = shape_of(schedule), schedule.structure
    if not shape.holds(mine) or schedule.device.type != "cpu" or info is None:
        what = "padded_schedule: the schedule cannot be padded to this shape"
        wanted, got = f"one on the CPU that fits into {shape}", f"{mine} on {schedule.device}"
        hint = "LevelBuckets.fit(schedules).pad(schedule)"
        raise mismatch(ValueError, what, wanted, got, hint=hint)
    own = schedule.wiring if info.padded is None else schedule.wiring[: info.padded[1]]
    padded, nodes = _padded(schedule, mine, shape), info.num_nodes
    input_node = padded.input_node
    (input_place,) = (input_node < nodes).nonzero(as_tuple=True)
    input_row = torch.zeros_like(input_node)
    input_row[input_place] = torch.arange(input_place.numel())
    level_place = padded.rows_of(padded.outputs["node"].wiring)[:nodes] - 1
    node_place = level_place[schedule.rows_of(schedule.outputs["node"].wiring) - 1]
    parts = (own, padded.wiring, input_row, input_place, level_place, node_place)
    structure = info._replace(padded=(shape, own.numel()))
    return replace(schedule, wiring=torch.cat(parts), structure=structure)


def _padded(schedule: Schedule, mine: LevelShape, shape: LevelShape) -> Schedule:
    """Schedule the nodes in level order, followed by the nodes of padding."""
    sizes, read = np.array(mine.sizes, dtype=np.int64), np.array(mine.inputs, dtype=np.int64)
    *spare_nodes, spare_edges = shape.spare(mine)
    levels = np.arange(len(shape.inputs))
    padding = np.concatenate([levels.repeat(count) for count in spare_nodes])
    level = np.concatenate([levels[: sizes.size].repeat(sizes), padding])
    within = concatenated_ranges(np.zeros_like(sizes), sizes)
    with_input = np.arange(padding.size) < spare_nodes[0].sum()
    filled = np.concatenate([within < read.repeat(sizes), with_input])
    child, parent, slot = _edges_in_level_order(schedule)
    if slot is None:
        more = _parents_of_padding(padding, spare_edges) + sizes.sum()
        first = sizes.sum() + int((padding == 0).argmax()) if more.size else 0
        child = np.concatenate([child, np.full_like(more, first)])
        parent = np.concatenate([parent, more])
    return Schedule.from_structure(
        torch.from_numpy(np.stack([child, parent])),
        level.size,
        depth=torch.from_numpy(level),
        child_slot=None if slot is None else torch.from_numpy(slot),
        arity=shape.arity,
        has_input=torch.from_numpy(filled),
    )


def _edges_in_level_order(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return child, parent and slot of all edges, with nodes numbered in level order."""
    arity, steps = schedule.arity, schedule.steps
    if not steps:
        none = np.zeros(0, dtype=np.int64)
        return none, none, None if arity is None else none
    first, wiring = steps[0].arguments[1], schedule.wiring.numpy()
    if arity is None:
        edges = schedule.num_edges
        counts = [step.arguments[1].length for step in steps]
        starts = np.array([step.results[0][1] - 1 for step in steps]).repeat(counts)
        children = wiring[first.offset : first.offset + edges] - 1
        return children, wiring[first.segment_ids : first.segment_ids + edges] + starts, None
    nodes = schedule.num_nodes
    places = wiring[first.offset : first.offset + nodes * arity].reshape(nodes, arity)
    parent, slot = places.nonzero()
    return places[parent, slot] - 1, parent, slot


def _parents_of_padding(level: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Spread the edges of padding evenly over the nodes of padding of their levels."""
    nodes = level.argsort(kind="stable")
    room = np.bincount(level, minlength=edges.size)
    number = concatenated_ranges(np.zeros_like(edges), edges)
    within = number * room.repeat(edges) // np.maximum(edges, 1).repeat(edges)
    return nodes[(room.cumsum() - room).repeat(edges) + within]


@lru_cache(maxsize=256)
def _frame(shape: LevelShape) -> Schedule:
    """Schedule nothing but padding: its plain numbers are those of all batches of a shape."""
    none = torch.zeros(2, 0, dtype=torch.int64)
    empty = Schedule.from_structure(none, 0, arity=shape.arity)
    frame = _padded(empty, shape_of(empty), shape)
    steps = []
    for step in frame.steps:
        inputs, *children = step.arguments
        # Children that lie side by side here do not do so in other batches: all are gathered.
        children = [c._replace(start=min(c.start, GATHER)) if c.length else c for c in children]
        steps.append(step._replace(arguments=(inputs, *children)))
    info: StructureInfo | None = frame.structure
    if info is not None:
        info = info._replace(direction=shape.direction, single_parent=shape.single_parent)
    return replace(frame, steps=tuple(steps), structure=info)


def padded_form(schedule: Schedule) -> PaddedForm | None:
    """Return the padded form of a schedule, on the device of the schedule."""
    if schedule.structure is None or schedule.structure.padded is None:
        return None
    shape, first = schedule.structure.padded
    nodes, inputs = schedule.num_nodes, schedule.stores[0].inputs
    lengths = (_frame(shape).wiring.numel(), sum(shape.inputs), inputs, nodes, nodes)
    wiring, *places = schedule.wiring[first:].split(lengths)
    return PaddedForm(shape, schedule_of_shape(shape, wiring), *places)


def schedule_of_shape(shape: LevelShape, wiring: Int[Tensor, " entry"]) -> Schedule:
    """Make a padded schedule of given row numbers."""
    return replace(_frame(shape), wiring=wiring)


class Padding(NamedTuple):
    """How much larger padded schedules are than the schedules themselves."""

    fitting: float
    nodes: float
    levels: float
    shapes: int


class LevelBuckets:
    """Pads schedules to a few shapes: so many levels, each with so many nodes.

    Rounding the size of every level on its own leaves nearly as many shapes as batches. Here a
    sample of schedules is repeatedly split where it saves most, by number of levels or of nodes;
    each part has one shape, in every level as large as the largest of its schedules.

    Args:
        shapes: The shapes, at least one; see :meth:`fit`.
        level_rows: Cost of one more level, counted in nodes. On a GPU small levels take about
            as long as large ones.

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
            wanted, hint = "at least one shape, level_rows >= 0", "LevelBuckets.fit(schedules)"
            got = f"{len(shapes)} shapes, level_rows={level_rows}"
            raise mismatch(ValueError, "LevelBuckets: nothing to pad to", wanted, got, hint=hint)
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
        """Find shapes that hold all of some schedules.

        Args:
            schedules: A sample, such as those of one epoch, for layers of one kind.
            number: Largest number of shapes, at least 1.
            margin: Fraction by which every level is made larger than in the sample, rounded up;
                0 for a sample of all batches there are.
            level_rows: See the class.
        """
        shapes = [shape_of(schedule) for schedule in schedules]
        kinds = {(shape.arity, shape.direction) for shape in shapes}
        if len(kinds) != 1 or number < 1 or margin < 0:
            what = "LevelBuckets.fit: no sample of schedules of one kind, or no size"
            wanted = "schedules of one arity and direction, number >= 1, margin >= 0"
            got = f"{len(shapes)} schedules of {len(kinds)} kinds, number={number}, margin={margin}"
            raise mismatch(ValueError, what, wanted, got)
        return cls(_Sample(shapes, margin, level_rows).parted(number), level_rows=level_rows)

    def _cost(self, shape: LevelShape) -> int:
        return shape.nodes + self.level_rows * len(shape.sizes)

    def shape_for(self, schedule: Schedule) -> LevelShape | None:
        """Find the cheapest shape that holds a schedule; None where none does."""
        mine = shape_of(schedule)
        # They are sorted by cost.
        return next((shape for shape in self.shapes if shape.holds(mine)), None)

    def pad(self, schedule: Schedule) -> Schedule:
        """Append the padded form of a schedule to its row numbers.

        The result is used like the schedule itself, and
        :func:`~pyg_dynbatch.core.padding.padded_form` returns the padded form. It is made on the
        host, so preferably in a worker process of a loader.

        Args:
            schedule: Made by ``Schedule.from_structure``, on the CPU.

        Returns:
            A schedule that holds both; the same as before if no shape holds it.
        """
        shape = self.shape_for(schedule)
        return schedule if shape is None else padded_schedule(schedule, shape)

    def padding(self, schedules: Iterable[Schedule]) -> Padding:
        """Count how much of padded schedules is padding."""
        used, rows, total = set(), [], 0
        for schedule in schedules:
            total += 1
            if shape := self.shape_for(schedule):
                used.add(shape)
                sizes = (shape.nodes, len(shape.sizes))
                rows.append((*sizes, schedule.num_nodes, len(schedule.steps)))
        if not rows:
            return Padding(0.0, 1.0, 1.0, 0)
        nodes, levels, own_nodes, own_levels = np.array(rows).sum(0).tolist()
        larger = nodes / max(own_nodes, 1), levels / max(own_levels, 1)
        return Padding(len(rows) / total, *larger, len(used))

    def __repr__(self) -> str:
        nodes = [shape.nodes for shape in self.shapes]
        return f"{type(self).__name__}({len(nodes)} shapes of {min(nodes)} to {max(nodes)} nodes)"


class _Sample:
    """Shapes of a sample as one array ``[schedule, (inputs, others, edges), level]``."""

    def __init__(self, shapes: Sequence[LevelShape], margin: float, level_rows: int) -> None:
        self.first, self.margin, self.level_rows = shapes[0], margin, level_rows
        self.single_parent = np.array([shape.single_parent for shape in shapes])
        self.levels = np.array([len(shape.sizes) for shape in shapes])
        self.counts = np.zeros((len(shapes), 3, int(self.levels.max())), dtype=np.int64)
        for counts, shape in zip(self.counts, shapes, strict=True):
            counts[:, : len(shape.sizes)] = shape.counts()
        self.keys = (self.levels, self.counts[:, :2].sum((1, 2)))

    def parted(self, number: int) -> list[LevelShape]:
        """Split the sample into parts, and find the shape of each."""
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
        """Return how much the best split of a part saves, and its two sides."""
        best, whole = (0, part, part), self._cost(part)
        for key in self.keys:
            values = key[part]
            for bound in np.unique(np.quantile(values, (0.25, 0.5, 0.75, 0.9), method="lower")):
                low, high = part[values <= bound], part[values > bound]
                if high.size:
                    saved = whole - self._cost(low) - self._cost(high)
                    best = max(best, (saved, low, high), key=lambda split: split[0])
        return best

    def _cost(self, part: np.ndarray) -> int:
        nodes = int(self.counts[part, :2].max(0).sum())
        return part.size * (nodes + self.level_rows * int(self.levels[part].max()))

    def _shape(self, part: np.ndarray) -> LevelShape:
        largest = self.counts[part, :, : self.levels[part].max()].max(0)
        largest = np.ceil(largest * (1 + self.margin)).astype(np.int64)
        arity, direction = self.first.arity, self.first.direction
        if arity is None:
            # Edges of padding lead from a leaf of padding to nodes of padding.
            largest[1] += 1
        inputs, others, edges = map(tuple, largest.tolist())
        single_parent = bool(self.single_parent[part].all())
        return LevelShape(
            arity, direction, inputs, others, edges if arity is None else None, single_parent
        )
