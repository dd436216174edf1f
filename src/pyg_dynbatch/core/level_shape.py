"""Say how large the levels of a schedule are, and whether one schedule fits into another."""

from typing import NamedTuple

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.schedule import Schedule


class LevelShape(NamedTuple):
    """Sizes of all levels of a schedule: all that its plain numbers depend on.

    Args:
        arity: Argument places a node; None for any number of children.
        direction: ``"bottom_up"`` or ``"top_down"``.
        inputs: Nodes of each level that read an input.
        others: Nodes of each level that read none.
        edges: Children of each level, only without an arity.
        single_parent: Whether every node has one parent at most.

    Example:
        >>> import torch
        >>> shape_of(Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2))
        LevelShape(arity=2, direction='bottom_up', inputs=(2, 1), others=(0, 0), edges=None,
                   single_parent=True)
    """

    arity: int | None
    direction: str
    inputs: tuple[int, ...]
    others: tuple[int, ...]
    edges: tuple[int, ...] | None
    single_parent: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes of each level."""
        return tuple(map(sum, zip(self.inputs, self.others, strict=True)))

    @property
    def nodes(self) -> int:
        """Nodes of all levels."""
        return sum(self.inputs) + sum(self.others)

    def holds(self, other: "LevelShape") -> bool:
        """Tells whether a schedule of another shape can be padded to this one."""
        kind = (self.arity, self.direction) == (other.arity, other.direction)
        if not kind or len(self.inputs) < len(other.inputs):
            return False
        if self.single_parent and not other.single_parent:
            return False
        wide = all(
            mine >= theirs
            for ours, others in ((self.inputs, other.inputs), (self.others, other.others))
            for mine, theirs in zip(ours, others, strict=False)
        )
        if not wide or self.edges is None:
            return wide
        spare = [mine - theirs for mine, theirs in zip(self.edges, other.edges or (), strict=False)]
        room = [mine > theirs for mine, theirs in zip(self.sizes, other.sizes, strict=False)]
        return all(more == 0 or (more > 0 and free) for more, free in zip(spare, room, strict=True))


def shape_of(schedule: Schedule) -> LevelShape:
    """Reads the sizes of a schedule's levels off its plain numbers.

    Args:
        schedule: Made by ``Schedule.from_structure``.

    Raises:
        ValueError: If its nodes have no argument places.

    Example:
        >>> import torch
        >>> shape_of(Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3)).edges
        (0, 2)
    """
    arity, inputs = schedule.arity, schedule.level_inputs
    if arity == 0:
        raise ValueError(
            mismatch("LevelShape: nodes without argument places", expected="arity >= 1", got=0)
        )
    steps = schedule.steps
    return LevelShape(
        arity,
        schedule.direction,
        inputs,
        tuple(step.size - read for step, read in zip(steps, inputs, strict=True)),
        None if arity is not None else tuple(step.arguments[1].length for step in steps),
        schedule.facts["single_parent"],
    )
