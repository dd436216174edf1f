"""What fused runs know beforehand: the blocks of every level, and the way back to the children."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.nn.fused_products import BLOCK


@dataclass(frozen=True)
class FusedRun:
    """What a fused Tree-LSTM is told besides its weights.

    Args:
        schedule: Made by ``Schedule.from_structure``, with one step or more.
        keep: Factors of the candidate u in level order, ``[node, out_channels]`` (recurrent
            dropout); none where left out.
        leaf_row: Which of the first input rows each leaf with an input reads. The input rows
            then begin with the different rows of leaves instead of one row a leaf; not together
            with ``keep``.
        level_order: Whether to give the states in level order, which saves a copy, instead of
            node order.
        precision: Type in which to multiply (autocast).
    """

    schedule: Schedule
    keep: Tensor | None = None
    leaf_row: Tensor | None = None
    level_order: bool = False
    precision: torch.dtype | None = None


class Block(NamedTuple):
    """Some nodes of one level, side by side in level order.

    ``first`` counts from the first inner node, ``input`` from the first input row of an inner
    node, ``edge`` from the first child, ``start`` from the first node of the level; the first
    ``filled`` nodes have an input.
    """

    first: int
    size: int
    input: int
    filled: int
    edge: int
    edges: int
    start: int


def differentiated(*tensors: Tensor) -> bool:
    """Tells whether autograd records what is computed from some tensors.

    Example:
        >>> differentiated(torch.ones(1)), differentiated(torch.ones(1, requires_grad=True))
        (False, True)
    """
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class FusedPlan:
    """Sizes as plain numbers, and index vectors on the device.

    Args:
        run: The run.
        num_inputs: Number of input rows.
        device: On CPUs levels are cut into blocks that stay in the cache.
        keep: Whether gates are kept for a backward pass.
    """

    def __init__(
        self, run: FusedRun, num_inputs: int, device: torch.device, keep: bool = True
    ) -> None:
        self.run, self.keep = run, keep
        # Of C, where it runs all levels by one call; the forward pass settles it.
        self.library: ctypes.CDLL | None = None
        schedule = self.schedule = run.schedule
        steps = schedule.steps
        self.arity = schedule.arity
        self.nodes = schedule.num_nodes
        self.leaves = steps[0].size
        self.inner = self.nodes - self.leaves
        # Leaves with an input are computed once for each of these rows, the others one by one.
        self.leaf_inputs = num_inputs - sum(schedule.level_inputs[1:])
        self.leaf_cells = self.leaf_inputs + self.leaves - schedule.level_inputs[0]
        self._check(device)
        self.single_parent: bool = schedule.facts["single_parent"]
        self.block = BLOCK if device.type == "cpu" else max(self.nodes, 1)
        children = steps[0].arguments[1]
        skipped = self.leaves * (self.arity or 0)
        self.places = schedule.num_edges if self.arity is None else self.inner * self.arity
        start = children.offset + skipped
        self.children = schedule.wiring[start : start + self.places]
        if self.arity is None:
            self.owners = schedule.wiring[children.owner : children.owner + self.places]
            begin = schedule.facts["child_start"]
            self.child_start = schedule.wiring[begin + self.leaves : begin + self.nodes]
        self.blocks = list(self._blocks())

    def _check(self, device: torch.device) -> None:
        """Refuses what would be read or written beyond the rows there are."""
        wanted, leaf_row = self.schedule.level_inputs[0], self.run.leaf_row
        given = self.leaf_inputs if leaf_row is None else leaf_row.size(0)
        if given != wanted or self.leaf_inputs < 0 or self.schedule.device != device:
            raise ValueError(
                mismatch(
                    "FusedRun: the schedule does not fit the input rows",
                    expected=f"{wanted} leaves with an input, on {self.schedule.device}",
                    got=f"{given} leaves, on {device}",
                    mend="rows in the order of schedule.input_node; batch.to(device)",
                )
            )

    def _blocks(self) -> Iterator[Block]:
        first = seen = edge = 0
        steps, inputs = self.schedule.steps[1:], self.schedule.level_inputs[1:]
        for step, filled in zip(steps, inputs, strict=True):
            stops = [*range(0, step.size, self.block), step.size]
            edges = self._edges(step, first, stops)
            for start, stop, (edge_start, edge_stop) in zip(stops, stops[1:], edges, strict=False):
                mine = min(max(filled - start, 0), stop - start)
                yield Block(
                    first + start,
                    stop - start,
                    seen,
                    mine,
                    edge + edge_start,
                    edge_stop - edge_start,
                    start,
                )
                seen += mine
            first += step.size
            edge += edges[-1][1]

    def _edges(self, step: object, first: int, stops: list[int]) -> list[tuple[int, int]]:
        """Where the children of the blocks of one level lie, from the level's first child on."""
        if self.arity is not None:
            bounds = [stop * self.arity for stop in stops]
        else:
            total = step.arguments[1].length  # type: ignore[attr-defined]
            inside = [first + stop for stop in stops[:-1]]
            # Only CPUs have more than one block a level, so this waits for no other device.
            found = self.child_start[inside].tolist() if len(inside) > 1 else [0]
            bounds = [each - found[0] for each in found] + [total]
        return list(zip(bounds, bounds[1:], strict=False))

    @cached_property
    def table(self) -> "ctypes.Array[ctypes.c_int64]":
        """The blocks of all levels, as C reads them."""
        numbers = list(chain.from_iterable(self.blocks))
        return (ctypes.c_int64 * len(numbers))(*numbers)

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers of all argument places."""
        return torch.arange(self.places, device=self.children.device)

    def owner(self, block: Block) -> Tensor:
        """Tells the node within the block that each child belongs to."""
        within_level = self.owners[block.edge : block.edge + block.edges]
        return within_level if not block.start else within_level - block.start

    def leaf_blocks(self) -> Iterator[Block]:
        """Cuts the leaves that are computed into blocks, with input and without apart."""
        stretches = (0, self.leaf_inputs, True), (self.leaf_inputs, self.leaf_cells, False)
        for start, stop, filled in stretches:
            for first in range(start, stop, self.block):
                size = min(self.block, stop - first)
                yield Block(first, size, first, size if filled else 0, 0, 0, first)

    def spread_leaves(self) -> Tensor:
        """Which of the computed rows each leaf takes, where equal leaves are computed once."""
        leaf_row = self.run.leaf_row
        if leaf_row is None:
            return torch.arange(self.leaves, device=self.children.device)
        others = torch.arange(self.leaf_inputs, self.leaf_cells, device=leaf_row.device)
        return torch.cat([leaf_row, others])

    def in_order(self, rows: Tensor) -> Tensor:
        """Brings state rows into the order that is asked for."""
        if self.run.level_order:
            return rows[1:]
        return rows.index_select(0, self._row_of_node())

    def in_level_order(self, rows: Tensor | None) -> Tensor | None:
        """Brings the gradients of the results into level order."""
        if rows is None or self.run.level_order:
            return rows
        row = self._row_of_node()
        node = torch.empty_like(row).index_copy_(
            0, row - 1, torch.arange(self.nodes, device=row.device)
        )
        return rows.index_select(0, node)

    def _row_of_node(self) -> Tensor:
        return self.schedule.rows_of(self.schedule.outputs["node"].wiring)

    def place_of_row(self) -> Tensor:
        """For every state row the argument place that reads it, from 1 on; 0 for none.

        Only where every node has one parent at most.
        """
        place = self.children.new_zeros(self.nodes + 1)
        numbers = torch.arange(1, self.places + 1, device=place.device)
        # Row 0, the missing child, gets any of its many places; nobody asks for it.
        return place.index_copy_(0, self.children, numbers)[1:]
