"""Choose a few shapes of levels that hold most mini-batches, so that their plans can be alike."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.level_shape import LevelShape, shape_of
from pyg_dynbatch.core.padding import padded_schedule
from pyg_dynbatch.core.schedule import Schedule

_QUANTILES = (0.25, 0.5, 0.75, 0.9)


class Padding(NamedTuple):
    """How much larger padded schedules are than the schedules themselves.

    Args:
        fitting: Share of the schedules that some shape holds; the rest is counted nowhere else.
        nodes: Nodes with padding for each node without.
        levels: Levels with padding for each level without.
        shapes: How many shapes were used.

    Example:
        >>> Padding(fitting=1.0, nodes=1.25, levels=1.0, shapes=3).nodes
        1.25
    """

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
            raise ValueError(
                mismatch(
                    "LevelBuckets: nothing to pad to",
                    expected="one shape or more, and level_rows of 0 or more",
                    got=f"{len(shapes)} shapes, level_rows={level_rows}",
                    mend="LevelBuckets.fit(schedules)",
                )
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
            raise ValueError(
                mismatch(
                    "LevelBuckets.fit: no sample of schedules of one kind, or no size",
                    expected="schedules of one arity and direction, number >= 1, margin >= 0",
                    got=f"{len(shapes)} schedules of {len(kinds)} kinds, number={number}, "
                    f"margin={margin}",
                )
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
    """Shapes of a sample as one array ``[schedule, level, (inputs, others, edges)]``.

    Args:
        shapes: The shapes.
        margin: By which part every level is made larger.
        level_rows: What a level costs.
    """

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
