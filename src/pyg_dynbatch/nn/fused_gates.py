"""The parts of fused Tree-LSTMs: a plan of blocks, gradients of states, and gates.

Nodes are in level order: first all leaves, then the inner nodes, level by level. Each level is
split into blocks. Per block, products with the weights (``products.py``) become gates, and gates
become states; see :class:`TorchGates`, which ``native_gates.py`` (C) and ``triton_gates.py``
override.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.nn.products import HEIGHTS

BLOCK = HEIGHTS[-1]
"""Rows of one block on CPUs: their gates stay in the second-level cache."""

# As a 0-d tensor, it makes -1 + 2x a single pass, and fits every device and dtype.
_MINUS_ONE = torch.tensor(-1.0)
_NO_ROWS = torch.empty(0)
_TANH_BACKWARD = torch.ops.aten.tanh_backward.grad_input


# The plan.


class Block(NamedTuple):
    """Consecutive nodes of one level, in level order."""

    first: int  # first node, counted among the leaves or among the inner nodes
    size: int
    input: int  # input row of the first node, counted among those of inner nodes
    filled: int  # number of nodes with an input, which come first
    edge: int  # first child, counted among the children of all inner nodes
    edges: int
    start: int  # first node, counted within the level

    @property
    def nodes(self) -> slice:
        """The rows of the nodes."""
        return slice(self.first, self.first + self.size)

    @property
    def children(self) -> slice:
        """The rows of the children."""
        return slice(self.edge, self.edge + self.edges)


class FusedPlan:
    """A schedule split into blocks: sizes as Python ints, and index vectors on the device."""

    def __init__(
        self,
        schedule: Levels,
        inputs: Tensor,
        *,
        dropout_mask: Tensor | None = None,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
        precision: torch.dtype | None = None,
    ) -> None:
        self.schedule, self.dropout_mask, self.leaf_inverse = schedule, dropout_mask, leaf_inverse
        self.level_order, self.precision = level_order, precision
        # Whether a backward pass may follow, and whether C runs the whole schedule in one call.
        self.with_backward = self.at_once = False
        self.arity, self.ragged = schedule.arity or 0, schedule.arity is None
        self.nodes = schedule.num_nodes
        self.sizes = schedule.level_sizes
        self.leaves = self.sizes[0]
        self.inner = self.nodes - self.leaves
        # Leaves that share an input row are computed once, those without an input one by one.
        self.leaf_inputs = inputs.size(0) - sum(schedule.level_inputs[1:])
        self.leaf_cells = self.leaf_inputs + self.leaves - schedule.level_inputs[0]
        # The kernels do not check their indices.
        given = self.leaf_inputs if leaf_inverse is None else leaf_inverse.size(0)
        fits = given == schedule.level_inputs[0] and self.leaf_inputs >= 0
        if not fits or schedule.device != inputs.device:
            what = "FusedPlan: the schedule does not fit the input rows"
            wanted = f"{schedule.level_inputs[0]} leaves with an input, on {schedule.device}"
            got = f"{given} leaves, on {inputs.device}"
            hint = "rows in the order of schedule.input_node; batch.to(device)"
            raise mismatch(ValueError, what, wanted, got, hint=hint)
        self.single_parent = schedule.single_parent
        self.block = BLOCK if inputs.device.type == "cpu" else max(self.nodes, 1)
        self.slots = schedule.num_edges if self.ragged else self.inner * self.arity
        first = 0 if self.ragged else self.leaves * self.arity
        self.children = schedule.children[first:]
        if self.ragged:
            self.segment_ids = schedule.child_segment
            self.child_start = schedule.child_start[self.leaves :]

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of all levels above the leaves."""
        return list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        first = seen = edge = 0
        schedule = self.schedule
        levels = zip(
            schedule.level_sizes, schedule.level_inputs, schedule.level_children, strict=True
        )
        for level_size, filled, children in islice(levels, 1, None):
            stops = [*range(0, level_size, self.block), level_size]
            edges = self._first_edges(children, first, stops)
            for number, start in enumerate(stops[:-1]):
                size = stops[number + 1] - start
                mine = min(max(filled - start, 0), size)
                own, end = edges[number], edges[number + 1]
                yield Block(first + start, size, seen, mine, edge + own, end - own, start)
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

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers of all argument slots."""
        return torch.arange(self.slots, device=self.children.device)

    def segment_ids_of(self, block: Block) -> Tensor:
        """The node within the block that each child belongs to."""
        within_level = self.segment_ids[block.children]
        return within_level if not block.start else within_level - block.start

    def leaf_blocks(self) -> Iterator[Block]:
        """Split the computed leaves into blocks, those with and without an input separately."""
        segments = (0, self.leaf_inputs, True), (self.leaf_inputs, self.leaf_cells, False)
        for start, stop, filled in segments:
            for first in range(start, stop, self.block):
                size = min(self.block, stop - first)
                yield Block(first, size, first, size if filled else 0, 0, 0, first)

    def spread_leaves(self) -> Tensor:
        """The computed row of each leaf: equal leaves are computed once."""
        if self.leaf_inverse is None:
            return torch.arange(self.leaves, device=self.children.device)
        others = torch.arange(self.leaf_inputs, self.leaf_cells, device=self.leaf_inverse.device)
        return torch.cat([self.leaf_inverse, others])

    def in_order(self, rows: Tensor) -> Tensor:
        """Bring state rows into the requested order."""
        return rows[1:] if self.level_order else rows.index_select(0, self._row_of_node())

    def in_level_order(self, rows: Tensor | None) -> Tensor | None:
        """Bring the gradients of the results into level order."""
        if rows is None or self.level_order:
            return rows
        row = self._row_of_node()
        node = torch.empty_like(row).index_copy_(
            0, row - 1, torch.arange(self.nodes, device=row.device)
        )
        return rows.index_select(0, node)

    def _row_of_node(self) -> Tensor:
        return self.schedule.row

    def slot_of_node(self) -> Tensor:
        """For every node the argument slot that reads it, counted from 1; 0 for none."""
        place = self.children.new_zeros(self.nodes + 1)
        numbers = torch.arange(1, self.slots + 1, device=place.device)
        # Row 0, the missing child, gets any of its many slots and is dropped.
        return place.index_copy_(0, self.children, numbers)[1:]


def dense_columns(rows: Tensor | None) -> Tensor | None:
    """The same rows with contiguous columns, for kernels that read memory by address."""
    if rows is None:
        return None
    rows = rows.resolve_neg()  # what is negated lazily is not negated in memory
    return rows if rows.stride(1) == 1 else rows.contiguous()


def sum_segments(rows: Tensor, index: Tensor, starts: Tensor) -> Tensor:
    """Sum ``rows[index]`` over segments of the index, always in the same order."""
    return torch.embedding_bag(rows, index, starts, False, 0)[0]


class Gates(NamedTuple):
    """The gates of a block or of all blocks, before or after activation, or their gradients."""

    rows: Tensor  # u, i, o, and f of a fixed number of children; one row per node
    forget: Tensor | None = None  # f of any number of children, one row per child
    child_memory: Tensor | None = None  # of gradients: those of c of the children

    def forget_of(self, width: int) -> Tensor:
        """The forget gates, ``[node, arity, width]`` or ``[child, width]``."""
        if self.forget is not None:
            return self.forget
        return self.rows[:, 3 * width :].view(self.rows.size(0), -1, width)


class Kept(NamedTuple):
    """What the backward pass reads."""

    gathered: Tensor  # h of the children
    sums: Tensor | None  # sums of h of the children
    memory: Tensor  # c of all nodes, after a row for missing children
    activated: Tensor  # tanh(c) of all nodes
    leaf_activated: Tensor  # tanh(c) of the computed leaves
    aligned_weight: Tensor | None  # a copy of the weight of h
    leaf_gates: Sequence[Tensor]  # one tensor per block, or of all leaves
    gates: Sequence[Gates]

    def tensors(self) -> list[Tensor | None]:
        """List all tensors."""
        rows, forget = [each.rows for each in self.gates], [each.forget for each in self.gates]
        return [*self[:6], *self.leaf_gates, *rows, *forget]

    @classmethod
    def of(cls, tensors: Sequence[Any], leaf_blocks: int, blocks: int) -> "Kept":
        """Convert the list back, given how many blocks there are."""
        leaf_gates, rest = tensors[6 : 6 + leaf_blocks], tensors[6 + leaf_blocks :]
        gathered, sums, memory, activated, of_leaves, weight = tensors[:6]
        gates = [*map(Gates, rest[:blocks], rest[blocks:])]
        return cls(gathered, sums, memory, activated, of_leaves, weight, leaf_gates, gates)


@dataclass
class StateGradients:
    """Gradients of h and c of some nodes; final once the backward pass has visited all parents.

    If no node has several parents, there is one row per argument slot: the parent writes to it,
    and ``place`` is the row of each node's gradient. No gradients need be added up, except those
    of the results (``outside``) when a row is read. Otherwise ``place`` is None and there is one
    row per node, to which all its parents add.
    """

    hidden: Tensor
    memory: Tensor
    place: Tensor | None = None
    outside: tuple[Tensor | None, Tensor | None] = (None, None)

    @classmethod
    def of_results(
        cls, plan: FusedPlan, grad_h: Tensor | None, grad_c: Tensor | None, like: Tensor
    ) -> "StateGradients":
        """Start at the gradients of the results; row 0 is that of the missing child or parent."""
        outside = plan.in_level_order(grad_h), plan.in_level_order(grad_c)
        if plan.single_parent:
            hidden, memory = (like.new_empty(1 + plan.slots, like.size(1)) for _ in outside)
            hidden[0], memory[0] = 0, 0
            return cls(hidden, memory, plan.slot_of_node(), outside)
        hidden, memory = (like.new_zeros(1 + plan.nodes, like.size(1)) for _ in outside)
        for total, given in zip((hidden, memory), outside, strict=True):
            if given is not None:
                total[1:] += given
        return cls(hidden, memory)

    def of_nodes(self, first: int, size: int) -> "StateGradients":
        """Those of some nodes in level order."""
        if self.place is None:
            rows = slice(1 + first, 1 + first + size)
            return StateGradients(self.hidden[rows], self.memory[rows])
        rows = slice(first, first + size)
        of_h, of_c = (None if given is None else given[rows] for given in self.outside)
        return StateGradients(self.hidden, self.memory, self.place[rows], (of_h, of_c))

    def read(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The gradients of h and c in some rows, which may be changed."""
        if self.place is None:
            return self.hidden[rows], self.memory[rows]
        place = self.place[rows]
        hidden = torch.index_select(self.hidden, 0, place)
        found = hidden, torch.index_select(self.memory, 0, place)
        for part, given in zip(found, self.outside, strict=True):
            if given is not None:
                part += given[rows]
        return found

    def buffers(self, edge: int, edges: int) -> tuple[Tensor, Tensor]:
        """Where to write the gradients of the children in some argument slots."""
        if self.place is not None:
            rows = slice(1 + edge, 1 + edge + edges)
            return self.hidden[rows], self.memory[rows]
        shape = (edges, self.hidden.size(1))
        return self.hidden.new_empty(shape), self.memory.new_empty(shape)

    def scatter(self, index: Tensor, hidden: Tensor, memory: Tensor) -> None:
        """Add what was written to :meth:`buffers` to the rows of the children, if it is a copy."""
        if self.place is None:
            self.hidden.index_add_(0, index, hidden)
            self.memory.index_add_(0, index, memory)


# Kernels.


class TorchGates:
    """Compute the gates and states of leaves or of inner nodes with PyTorch operations.

    ``states`` are h, c and tanh(c): those of the leaves, or with ``inner`` those of all nodes, in
    level order after a row for missing children. :meth:`forward` writes them. Of inner nodes
    ``gathered`` is h of the children, one row per child, and ``sums`` the sum of these rows per
    node, for any number of children; :meth:`gather` writes both.
    """

    def __init__(
        self,
        plan: FusedPlan,
        states: Sequence[Tensor],
        gathered: Tensor = _NO_ROWS,
        sums: Tensor | None = None,
        *,
        inner: bool = False,
    ) -> None:
        self.plan, self.inner, self.gathered, self.sums = plan, inner, gathered, sums
        self.all_hidden, self.all_memory = states[0], states[1]
        first = 1 + plan.leaves if inner else 0
        self.hidden, self.memory, self.activated = (state[first:] for state in states)
        self.width = self.activated.size(1)
        mask = plan.dropout_mask  # factors of u
        self.dropout_mask = mask[plan.leaves :] if inner and mask is not None else mask

    def mask_of(self, block: Block) -> Tensor | None:
        """The factors of u of a block."""
        return None if self.dropout_mask is None else self.dropout_mask[block.nodes]

    def child_starts(self, block: Block) -> Tensor:
        """Where the children of each node begin, counted from the block's first child."""
        return self.plan.child_start[block.nodes] - block.edge

    def gather(self, block: Block) -> None:
        """Gather h of the children of a block, and sum it per node if ``sums`` is given."""
        gathered, index = self.gathered[block.children], self.plan.children[block.children]
        torch.index_select(self.all_hidden, 0, index, out=gathered)
        if self.sums is not None:
            self.sums[block.nodes] = self._sum_children(block, gathered)

    def forward(self, block: Block, gates: Gates, own: Tensor | None = None) -> None:
        """Activate products to gates in place, and write the states of a block.

        ``own`` is W x of the nodes with an input, which come first, if it is not yet added.
        """
        here, mask, width = block.nodes, self.mask_of(block), self.width
        memory, activated = self.memory[here], self.activated[here]
        if own is not None:
            self._add_inputs(block, gates, own)
        u, i, o = gates.rows[:, : 3 * width].chunk(3, 1)
        # tanh(x) is 2 sigmoid(2x) - 1, and on CPUs sigmoid is faster.
        u *= 2
        gates.rows.sigmoid_()
        _finish_tanh(u)
        if gates.forget is not None:
            gates.forget.sigmoid_()
        candidate = u if mask is None else u * mask
        if self.inner:
            self._sum_memory(block, gates, memory)
            memory.addcmul_(i, candidate)
        else:
            torch.mul(i, candidate, out=memory)
        torch.mul(memory, 2, out=activated)
        _finish_tanh(activated.sigmoid_())
        torch.mul(o, activated, out=self.hidden[here])

    def _add_inputs(self, block: Block, gates: Gates, own: Tensor) -> None:
        filled, last, forget = own.size(0), 3 * self.width, gates.forget_of(self.width)
        gates.rows[:filled, :last] += own[:, :last]
        if gates.forget is None:
            given = forget[:filled]
            given += own[:, None, last:]
            return
        if filled < block.size:
            # Nodes without an input come last; their children read a row of zeros.
            own = torch.cat([own, own.new_zeros(1, own.size(1))])
        node = self.plan.segment_ids_of(block).clamp(max=filled)
        forget += own[:, last:].index_select(0, node)

    def _sum_memory(self, block: Block, gates: Gates, memory: Tensor) -> None:
        """Write the sum of f * c over the children of each node."""
        forget, before = gates.forget_of(self.width), self._children_memory(block)
        if gates.forget is not None:
            memory.copy_(self._sum_children(block, before.mul_(forget)))
            return
        parts, cells = forget.unbind(1), before.view(forget.shape).unbind(1)
        torch.mul(parts[0], cells[0], out=memory)
        for part, cell in zip(parts[1:], cells[1:], strict=True):
            memory.addcmul_(part, cell)

    def _children_memory(self, block: Block) -> Tensor:
        return torch.index_select(self.all_memory, 0, self.plan.children[block.children])

    def _sum_children(self, block: Block, rows: Tensor) -> Tensor:
        return sum_segments(rows, self.plan.numbers[: rows.size(0)], self.child_starts(block))

    def backward(self, block: Block, gates: Gates, given: StateGradients, grads: Gates) -> None:
        """Write the gradients of products, and for inner nodes those of the children's c."""
        tanh_backward, mask, width = _TANH_BACKWARD, self.mask_of(block), self.width
        activated = self.activated[block.nodes]
        u, i, o = gates.rows[:, : 3 * width].chunk(3, 1)
        to_u, to_i, to_o = grads.rows[:, : 3 * width].chunk(3, 1)
        hidden, memory = given.read(block.nodes)
        torch.mul(hidden, activated, out=to_o)
        hidden.mul_(o)
        memory += tanh_backward(hidden, activated, grad_input=hidden)
        candidate = memory if mask is None else memory * mask
        torch.mul(candidate, i, out=to_u)
        torch.mul(candidate, u, out=to_i)
        if grads.child_memory is not None:
            self._to_children(block, gates, memory, grads, grads.child_memory)
        tanh_backward(to_u, u, grad_input=to_u)
        _through_sigmoid(grads.rows[:, width:], gates.rows[:, width:])
        if grads.forget is not None and gates.forget is not None:
            _through_sigmoid(grads.forget, gates.forget)

    def _to_children(
        self, block: Block, gates: Gates, memory: Tensor, grads: Gates, to_memory: Tensor
    ) -> None:
        """Write the gradients of f after activation, and of the children's c."""
        forget, before = gates.forget_of(self.width), self._children_memory(block)
        if gates.forget is not None:
            memory = torch.index_select(memory, 0, self.plan.segment_ids_of(block))
        else:
            memory, before = memory[:, None], before.view(forget.shape)
        torch.mul(memory, before, out=grads.forget_of(self.width))
        torch.mul(memory, forget, out=to_memory.view(forget.shape))

    def sum_equal(self, given: StateGradients, cell: Tensor, cells: int) -> StateGradients:
        """Sum the gradients of equal leaves, always in the same order."""
        hidden, memory = given.read(slice(0, cell.size(0)))
        # By sorting, as adding rows in any order would not be reproducible on GPUs.
        order = cell.argsort(stable=True)
        # Not with bincount, which waits for the device to find the largest number.
        counts = cell.new_zeros(cells).index_add_(0, cell, torch.ones_like(cell))
        starts = counts.cumsum(0) - counts
        return StateGradients(
            sum_segments(hidden, order, starts), sum_segments(memory, order, starts)
        )


def _finish_tanh(activated: Tensor) -> None:
    """Compute tanh(x) from sigmoid(2x), in place."""
    torch.add(_MINUS_ONE, activated, alpha=2, out=activated)


def _through_sigmoid(grads: Tensor, gates: Tensor) -> None:
    torch.ops.aten.sigmoid_backward.grad_input(grads, gates, grad_input=grads)
