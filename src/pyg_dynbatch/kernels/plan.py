"""How a Tree-LSTM runs over a schedule: the leaves, then the inner nodes, in blocks of rows.

Nodes are in level order: first all leaves, then the inner nodes, level by level. Each level is
split into blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.structure import array_of
from pyg_dynbatch.kernels.products import HEIGHTS

BLOCK = HEIGHTS[-1]
"""Rows of one block on CPUs: their gates stay in the second-level cache."""


class Block(NamedTuple):
    """Consecutive nodes of one level, in level order."""

    first: int  # first node, counted among the leaves or among the inner nodes
    size: int
    edge: int  # first child, counted among the children of all inner nodes
    edges: int
    input: int  # input row of the first node, counted among those of inner nodes
    filled: int  # number of nodes with an input, which come first
    start: int  # first node, counted within the level

    @property
    def nodes(self) -> slice:
        """The rows of the nodes."""
        return slice(self.first, self.first + self.size)

    @property
    def children(self) -> slice:
        """The rows of the children."""
        return slice(self.edge, self.edge + self.edges)


@dataclass(eq=False, repr=False)
class Plan:
    """A schedule and the options of one run; sizes are Python ints, indices are on the device."""

    schedule: Levels
    leaf_inputs: int  # input rows of leaves; leaves that share one are computed once
    block: int  # largest number of nodes per block
    leaf_inverse: Tensor | None = None  # the input row of each leaf with an input
    dropout_mask: Tensor | None = None  # factors of u, one row per node
    precision: torch.dtype | None = None  # of products, under autocast
    level_order: bool = False  # whether results are in level order
    keeps: bool = False  # whether a backward pass may follow

    def __post_init__(self) -> None:
        schedule = self.schedule
        # Whether nodes have any number of children, each with a forget gate in its own row.
        self.ragged = schedule.arity is None
        self.arity = schedule.arity or 0  # child slots of a node; 0 for any number
        self.leaves = schedule.level_sizes[0]
        # Computed leaves: those without an input are computed one by one.
        self.leaf_cells = self.leaf_inputs + self.leaves - schedule.level_inputs[0]
        self.inner = schedule.num_nodes - self.leaves  # nodes that are no leaves
        self.slots = schedule.num_edges if self.ragged else self.inner * self.arity

    @classmethod
    def of(
        cls,
        schedule: Levels,
        inputs: Tensor,
        *,
        leaf_inverse: Tensor | None = None,
        dropout_mask: Tensor | None = None,
        precision: torch.dtype | None = None,
        level_order: bool = False,
        keeps: bool = False,
    ) -> "Plan":
        """Check that input rows fit a schedule; kernels do not check their indices."""
        schedule.check()
        leaf_inputs = inputs.size(0) - sum(schedule.level_inputs[1:])
        given = leaf_inputs if leaf_inverse is None else leaf_inverse.size(0)
        fits = given == schedule.level_inputs[0] and leaf_inputs >= 0
        if not fits or schedule.device != inputs.device:
            raise mismatch(
                ValueError,
                "tree_lstm: the schedule does not fit the input rows",
                f"{schedule.level_inputs[0]} leaves with an input, on {schedule.device}",
                f"{given} leaves, on {inputs.device}",
                hint="rows in the order of schedule.input_node; batch.to(device)",
            )
        if leaf_inverse is not None and type(leaf_inverse) is Tensor and leaf_inverse.is_cpu:
            rows = array_of(leaf_inverse)
            if rows.size and not 0 <= rows.min() <= rows.max() < leaf_inputs:
                what, wanted = (
                    "tree_lstm: leaf_inverse is out of range",
                    f"rows below {leaf_inputs}",
                )
                raise mismatch(ValueError, what, wanted, f"{rows.min()} to {rows.max()}")
        block = BLOCK if inputs.device.type == "cpu" else max(schedule.num_nodes, 1)
        options = leaf_inverse, dropout_mask, precision, level_order, keeps
        return cls(schedule, leaf_inputs, block, *options)

    # Indices.

    @cached_property
    def children(self) -> Tensor:
        """For every child slot of the inner nodes the row of the child; 0 if there is none."""
        return self.schedule.children[0 if self.ragged else self.leaves * self.arity :]

    @cached_property
    def child_start(self) -> Tensor:
        """Where the children of each inner node begin, for any number of children."""
        return self.schedule.child_start[self.leaves :]

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers of all child slots."""
        return torch.arange(self.slots, device=self.children.device)

    @cached_property
    def cell_of_leaf(self) -> Tensor:
        """The computed row of each leaf: equal leaves are computed once."""
        if self.leaf_inverse is None:
            return torch.arange(self.leaves, device=self.children.device)
        others = torch.arange(self.leaf_inputs, self.leaf_cells, device=self.leaf_inverse.device)
        return torch.cat([self.leaf_inverse, others])

    def slot_of_node(self) -> Tensor:
        """For every node the child slot that reads it, counted from 1; 0 for none."""
        place = self.children.new_zeros(self.schedule.num_nodes + 1)
        # Row 0, the missing child, gets any of its many slots and is dropped.
        return place.index_copy_(0, self.children, self.numbers + 1)[1:]

    def segment_ids_of(self, block: Block) -> Tensor:
        """The node within the block that each child belongs to."""
        within_level = self.schedule.child_segment[block.children]
        return within_level if not block.start else within_level - block.start

    # Blocks.

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of all levels above the leaves."""
        return list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        first = seen = edge = 0
        of_levels = (
            self.schedule.level_sizes, self.schedule.level_inputs, self.schedule.level_children
        )  # fmt: skip
        for level_size, filled, children in list(zip(*of_levels, strict=True))[1:]:
            stops = [*range(0, level_size, self.block), level_size]
            edges = self._first_edges(children, first, stops)
            for number, start in enumerate(stops[:-1]):
                size = stops[number + 1] - start
                mine = min(max(filled - start, 0), size)
                own, end = edges[number], edges[number + 1]
                yield Block(first + start, size, edge + own, end - own, seen, mine, start)
                seen += mine
            first += level_size
            edge += edges[-1]

    def _first_edges(self, children: int, first: int, stops: list[int]) -> list[int]:
        """Where the children of the blocks of one level begin, counted within the level."""
        if not self.ragged:
            return [stop * self.arity for stop in stops]
        inside = [first + stop for stop in stops[:-1]]
        # Only CPUs have more than one block per level, so there is no device to wait for.
        found = self.child_start[inside].tolist() if len(inside) > 1 else [0]
        return [*(each - found[0] for each in found), children]

    def leaf_blocks(self) -> Iterator[Block]:
        """Split the computed leaves into blocks, those with and without an input separately."""
        segments = (0, self.leaf_inputs, True), (self.leaf_inputs, self.leaf_cells, False)
        for start, stop, filled in segments:
            for first in range(start, stop, self.block):
                size = min(self.block, stop - first)
                yield Block(first, size, 0, 0, first, size if filled else 0, first)

    def rows_of_gates(self) -> tuple[int, int, int]:
        """Count the rows to keep, or of one block: of leaves, inner nodes, and their children."""
        if self.keeps:
            return self.leaf_cells, self.inner, self.slots
        children = self.slots
        if self.ragged and self.inner > self.block:
            starts = np.append(self.child_start.numpy(), self.slots)
            children = int((starts[self.block :] - starts[: -self.block]).max())
        rows = min(max(self.schedule.level_sizes[1:], default=0), self.block)
        return min(self.leaf_cells, self.block), rows, children

    # Orders of results.

    def in_order(self, rows: Tensor) -> Tensor:
        """Bring state rows into the requested order."""
        return rows[1:] if self.level_order else rows.index_select(0, self.schedule.row)

    def in_level_order(self, rows: Tensor | None) -> Tensor | None:
        """Bring the gradients of the results into level order."""
        if rows is None or self.level_order:
            return rows
        row = self.schedule.row
        node = torch.empty_like(row).index_copy_(
            0, row - 1, torch.arange(row.numel(), device=row.device)
        )
        return rows.index_select(0, node)
