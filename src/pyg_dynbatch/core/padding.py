"""Pad the schedule of a structure to a given shape, with nodes that no other node reads.

A padded schedule depends on the shape alone, except for its row numbers. So for all batches of
one shape, a model makes the same calls on tensors of the same sizes, as CUDA graphs require.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.layout import GATHER, LevelShape, StructureInfo
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.core.structure import concatenated_ranges


class PaddedForm(NamedTuple):
    """A padded schedule, and where it holds the rows of the batch."""

    shape: LevelShape
    schedule: Schedule
    input_row: Int[Tensor, " padded_input"]  # input row of each padded input; 0 for padding
    node_position: Int[Tensor, " node"]  # of each node, its place in level order of the padded form


def shape_of(schedule: Schedule) -> LevelShape:
    """Return the sizes of a schedule's levels."""
    arity, inputs, steps = schedule.arity, schedule.level_inputs, schedule.steps
    if arity == 0:
        raise mismatch(ValueError, "LevelShape: nodes without child slots", "arity >= 1", 0)
    others = tuple(step.size - read for step, read in zip(steps, inputs, strict=True))
    edges = tuple(step.arguments[1].length if arity is None else 0 for step in steps)
    return LevelShape(arity, schedule.direction, inputs, others, edges, schedule.single_parent)


def padded_schedule(schedule: Schedule, shape: LevelShape) -> Schedule:
    """Append the row numbers of the padded form to those of a schedule."""
    mine, info = shape_of(schedule), schedule.structure
    if not shape.holds(mine) or schedule.device.type != "cpu" or info is None:
        what = "padded_schedule: the schedule cannot be padded to this shape"
        wanted, got = f"one on the CPU that fits into {shape}", f"{mine} on {schedule.device}"
        hint = "LevelBuckets.fit(schedules).pad(schedule)"
        raise mismatch(ValueError, what, wanted, got, hint=hint)
    own = schedule.index if info.padded is None else schedule.index[: info.padded[1]]
    padded, nodes = _padded(schedule, mine, shape), info.num_nodes
    input_node = padded.input_node
    (input_position,) = (input_node < nodes).nonzero(as_tuple=True)
    input_row = torch.zeros_like(input_node)
    input_row[input_position] = torch.arange(input_position.numel())
    level_position = padded.rows_of(padded.outputs["node"].rows)[:nodes] - 1
    node_position = level_position[schedule.rows_of(schedule.outputs["node"].rows) - 1]
    parts = (own, padded.index, input_row, node_position)
    structure = info._replace(padded=(shape, own.numel()))
    return replace(schedule, index=torch.cat(parts), structure=structure)


def _padded(schedule: Schedule, mine: LevelShape, shape: LevelShape) -> Schedule:
    """Schedule the nodes in level order, followed by the padding nodes."""
    sizes, read = np.array(mine.sizes, dtype=np.int64), np.array(mine.inputs, dtype=np.int64)
    more_inputs, more_others, more_edges = shape.spare(mine)
    levels = np.arange(len(shape.inputs))
    padding = levels.repeat(more_inputs), levels.repeat(more_others)
    level = np.concatenate([levels[: sizes.size].repeat(sizes), *padding])
    reads = concatenated_ranges(np.zeros_like(sizes), sizes) < read.repeat(sizes)
    filled = np.concatenate(
        [reads, np.ones(padding[0].size, bool), np.zeros(padding[1].size, bool)]
    )
    child, parent, slot = _edges_in_level_order(schedule)
    if slot is None:
        nodes = np.concatenate(padding)
        more = _parents_of_padding(nodes, more_edges) + sizes.sum()
        first = sizes.sum() + int((nodes == 0).argmax()) if more.size else 0
        child = np.concatenate([child, np.full_like(more, first)])
        parent = np.concatenate([parent, more])
    fields = schedule_structure(
        torch.from_numpy(np.stack([child, parent])),
        level.size,
        child_slot=None if slot is None else torch.from_numpy(slot),
        arity=shape.arity,
        has_input=torch.from_numpy(filled),
        example_sizes=None,
        direction="bottom_up",
        level=torch.from_numpy(level),
    )
    return Schedule(**fields)


def _edges_in_level_order(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return child, parent and slot of all edges, with nodes numbered in level order."""
    arity, steps = schedule.arity, schedule.steps
    if not steps:
        none = np.zeros(0, dtype=np.int64)
        return none, none, None if arity is None else none
    first, index = steps[0].arguments[1], schedule.index.numpy()
    if arity is None:
        edges = schedule.num_edges
        counts = [step.arguments[1].length for step in steps]
        starts = np.array([step.results[0][1] - 1 for step in steps]).repeat(counts)
        children = index[first.offset : first.offset + edges] - 1
        return children, index[first.segment_ids : first.segment_ids + edges] + starts, None
    nodes = schedule.num_nodes
    table = index[first.offset : first.offset + nodes * arity].reshape(nodes, arity)
    parent, slot = table.nonzero()
    return table[parent, slot] - 1, parent, slot


def _parents_of_padding(level: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Distribute the padding edges evenly over the padding nodes of their levels."""
    nodes = level.argsort(kind="stable")
    room = np.bincount(level, minlength=edges.size)
    number = concatenated_ranges(np.zeros_like(edges), edges)
    within = number * room.repeat(edges) // np.maximum(edges, 1).repeat(edges)
    return nodes[(room.cumsum() - room).repeat(edges) + within]


@lru_cache(maxsize=256)
def _frame(shape: LevelShape) -> Schedule:
    """Schedule padding only: except for row numbers, this is the padded form of every batch."""
    none = torch.zeros(2, 0, dtype=torch.int64)
    empty = Schedule.from_structure(none, 0, arity=shape.arity)
    frame = _padded(empty, shape_of(empty), shape)
    steps = []
    for step in frame.steps:
        inputs, *children = step.arguments
        # Children that are contiguous here may not be in other batches: all are gathered.
        children = [c._replace(start=min(c.start, GATHER)) if c.length else c for c in children]
        steps.append(step._replace(arguments=(inputs, *children)))
    info: StructureInfo | None = frame.structure
    if info is not None:
        info = info._replace(direction=shape.direction, single_parent=shape.single_parent)
    return replace(frame, listed_steps=tuple(steps), structure=info)


def padded_form(schedule: Schedule) -> PaddedForm | None:
    """Return the padded form of a schedule, on the device of the schedule."""
    if schedule.structure is None or schedule.structure.padded is None:
        return None
    shape, first = schedule.structure.padded
    lengths = (_frame(shape).index.numel(), sum(shape.inputs), schedule.num_nodes)
    index, *places = schedule.index[first:].split(lengths)
    return PaddedForm(shape, schedule_of_shape(shape, index), *places)


def schedule_of_shape(shape: LevelShape, index: Int[Tensor, " entry"]) -> Schedule:
    """Return a padded schedule with the given row numbers."""
    return replace(_frame(shape), index=index)


class Padding(NamedTuple):
    """How much larger padded schedules are than the schedules themselves."""

    fitting: float  # fraction of the schedules that fit into a shape
    nodes: float  # nodes of the padded schedules, per node
    levels: float  # levels of the padded schedules, per level
    shapes: int  # number of shapes used


class LevelBuckets:
    """A few shapes to which schedules are padded; a shape has a size for each of its levels.

    Rounding the size of each level separately would leave nearly as many shapes as batches.
    Instead, a sample of schedules is repeatedly split where that saves most, by the number of
    levels or nodes; each part has one shape, in which each level is as large as in any schedule.

    Args:
        shapes: The shapes, at least one; see :meth:`fit`.
        level_rows: Cost of one more level, in nodes. On a GPU, small levels take about as long as
            large ones.

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
            what, wanted = "LevelBuckets: invalid arguments", "at least one shape, level_rows >= 0"
            got, hint = f"{len(shapes)} shapes, {level_rows=}", "LevelBuckets.fit(schedules)"
            raise mismatch(ValueError, what, wanted, got, hint=hint)
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
        """Find shapes that hold all schedules of a sample.

        Args:
            schedules: The sample, such as one epoch, of one arity and direction.
            number: Largest number of shapes, at least 1.
            margin: Fraction by which every level is larger than in the sample, rounded up; 0 if
                the sample contains all batches.
            level_rows: See the class.
        """
        shapes = [shape_of(schedule) for schedule in schedules]
        kinds = {(shape.arity, shape.direction) for shape in shapes}
        if len(kinds) != 1 or number < 1 or margin < 0:
            wanted = "schedules of one arity and direction, number >= 1, margin >= 0"
            got = f"{len(shapes)} schedules of {len(kinds)} kinds, {number=}, {margin=}"
            raise mismatch(ValueError, "LevelBuckets.fit: invalid arguments", wanted, got)
        return cls(_fitted(shapes, number, margin, level_rows), level_rows=level_rows)

    def _cost(self, shape: LevelShape) -> int:
        return shape.nodes + self.level_rows * len(shape.sizes)

    def shape_for(self, schedule: Schedule) -> LevelShape | None:
        """Return the cheapest shape that holds a schedule, or None."""
        mine = shape_of(schedule)
        # The shapes are sorted by cost.
        return next((shape for shape in self.shapes if shape.holds(mine)), None)

    def pad(self, schedule: Schedule) -> Schedule:
        """Append the padded form of a schedule to its row numbers.

        The result can be used like the schedule itself, and
        :func:`~pyg_dynbatch.core.padding.padded_form` returns the padded form. Padding runs on
        the host, so preferably in a worker process of a loader.

        Args:
            schedule: The result of ``Schedule.from_structure``, on the CPU.

        Returns:
            A schedule with both forms; the given schedule if no shape holds it.
        """
        shape = self.shape_for(schedule)
        return schedule if shape is None else padded_schedule(schedule, shape)

    def padding(self, schedules: Iterable[Schedule]) -> Padding:
        """Count how much of padded schedules is padding."""
        found = [(schedule, self.shape_for(schedule)) for schedule in schedules]
        fitting = [(schedule, shape) for schedule, shape in found if shape is not None]
        if not fitting:
            return Padding(0.0, 1.0, 1.0, 0)
        rows = [(s.nodes, len(s.sizes), own.num_nodes, len(own.steps)) for own, s in fitting]
        nodes, levels, own_nodes, own_levels = np.array(rows).sum(0).tolist()
        larger = nodes / max(own_nodes, 1), levels / max(own_levels, 1)
        return Padding(len(fitting) / len(found), *larger, len({shape for _, shape in fitting}))

    def __repr__(self) -> str:
        nodes = [shape.nodes for shape in self.shapes]
        return f"{type(self).__name__}({len(nodes)} shapes of {min(nodes)} to {max(nodes)} nodes)"


def _fitted(
    shapes: Sequence[LevelShape], number: int, margin: float, level_rows: int
) -> list[LevelShape]:
    """Split a sample where that saves most; return a shape for each of at most ``number`` parts."""
    levels = np.array([len(shape.sizes) for shape in shapes])
    counts = np.zeros((levels.size, 3, int(levels.max())), dtype=np.int64)
    for own, shape in zip(counts, shapes, strict=True):
        own[:, : len(shape.sizes)] = shape.counts()
    nodes = counts[:, :2].sum((1, 2))

    def cost(part: np.ndarray) -> int:
        padded_nodes = int(counts[part, :2].max(0).sum())
        return part.size * (padded_nodes + level_rows * int(levels[part].max()))

    def best_split(part: np.ndarray) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        best = (0, part, part, part)
        for values in (levels[part], nodes[part]):
            for bound in np.unique(np.quantile(values, (0.25, 0.5, 0.75, 0.9), method="lower")):
                low, high = part[values <= bound], part[values > bound]
                if high.size:
                    saved = cost(part) - cost(low) - cost(high)
                    best = max(best, (saved, part, low, high), key=itemgetter(0))
        return best

    splits = [best_split(np.arange(levels.size))]
    while len(splits) < number:
        most = max(range(len(splits)), key=lambda k: splits[k][0])
        saved, _, low, high = splits[most]
        if saved <= 0:
            break
        splits[most : most + 1] = [best_split(low), best_split(high)]
    found, (arity, direction) = [], shapes[0][:2]
    for _, part, _, _ in splits:
        largest = counts[part, :, : levels[part].max()].max(0) * (1 + margin)
        # Padding edges lead from a padding leaf to padding nodes.
        largest[1] += arity is None
        inputs, others, edges = map(tuple, np.ceil(largest).astype(np.int64).tolist())
        single_parent = all(shapes[k].single_parent for k in part)
        found.append(LevelShape(arity, direction, inputs, others, edges, single_parent))
    return found
