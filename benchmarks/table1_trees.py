"""Binary trees with a given number of leaves: random, balanced, or a sequence."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.trees.collate import Collater
from pyg_dynbatch.trees.data import DynTreeData


class Shape(NamedTuple):
    """Holds the shape of a binary tree, nodes numbered from the root in preorder.

    Children have higher numbers than their parents, so ``reversed(range(len(below)))`` goes up.

    Args:
        below: The two children of every node; nothing for a leaf.
    """

    below: list[tuple[int, ...]]

    @classmethod
    def draw(cls, kind: str, leaves: int, generator: np.random.Generator) -> "Shape":
        """Makes a shape.

        Args:
            kind: ``"random"`` (all splits of the leaves of a node alike likely), ``"balanced"``
                (halves), or ``"sequence"`` (every right child is a leaf).
            leaves: Number of leaves.
            generator: Of the random splits.

        Example:
            >>> Shape.draw("sequence", 3, np.random.default_rng(0)).below
            [(1, 4), (2, 3), (), (), ()]
        """
        below: list[tuple[int, ...]] = []
        waiting = [(leaves, -1)]
        while waiting:
            size, parent = waiting.pop()
            if parent >= 0:
                below[parent] = (*below[parent], len(below))
            if size > 1:
                left = {"balanced": size // 2, "sequence": size - 1}.get(kind, 0)
                left = left or int(generator.integers(1, size))
                waiting += [(size - left, len(below)), (left, len(below))]
            below.append(())
        return cls(below)

    @property
    def leaves(self) -> list[int]:
        """The leaves, from left to right."""
        return [node for node, children in enumerate(self.below) if not children]

    def example(self, token: Tensor, label: Tensor | None = None) -> DynTreeData:
        """Makes an example of the shape.

        Args:
            token: One a leaf, from left to right.
            label: One a node; left out, there are none.

        Example:
            >>> shape = Shape.draw("balanced", 2, np.random.default_rng(0))
            >>> shape.example(torch.tensor([4, 7])).token
            tensor([-1,  4,  7])
        """
        edges = [(c, node) for node, children in enumerate(self.below) for c in children]
        tokens = torch.full((len(self.below),), -1)
        tokens[self.leaves] = token
        edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous()
        return DynTreeData(edge_index, token=tokens, y=label, num_nodes=len(self.below))


def schedule_of(trees: Sequence[DynTreeData]) -> Schedule:
    """Makes the schedule of some trees as one batch.

    Args:
        trees: The trees.

    Example:
        >>> shape = Shape.draw("balanced", 4, np.random.default_rng(0))
        >>> len(schedule_of([shape.example(torch.arange(4))]).steps)
        3
    """
    schedule = Collater(arity=2)(list(trees)).schedule
    if not isinstance(schedule, Schedule):
        raise TypeError("schedule_of: the collater attached no schedule")
    return schedule
