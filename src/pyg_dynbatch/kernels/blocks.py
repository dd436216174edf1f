"""Run a Tree-LSTM block by block: products by ``products.py``, gates by a class of gates.

Nodes are in level order: first all leaves, then the inner nodes, level by level. Each level is
split into blocks of rows (:class:`RunPlan`).

With a fixed number of children the forget gates are further columns in the row of a node; with any
number of children (child-sum, here called ragged) u, i, o depend on the sum of h, and f has one row
per child.

What products read and write has the dtype of the weights. Under autocast with bfloat16 (``half``)
that is h of the children, the gates, and their gradients; c, all arithmetic on gates, and h as a
result are in single precision.

:class:`TorchGates` computes gates with operations of torch. ``native.py`` overrides its methods in
C, and has a :class:`Kernel` of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.products import BLOCK, RowProduct
from pyg_dynbatch.core.structure import array_of

# As a 0-d tensor, it makes -1 + 2x a single pass, and fits every device and dtype.
_MINUS_ONE = torch.tensor(-1.0)
NO_ROWS = torch.empty(0)
_TANH_BACKWARD = torch.ops.aten.tanh_backward.grad_input


class NodeBlock(NamedTuple):
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
class RunPlan:
    """A schedule and the options of one run; sizes are Python ints, indices are on the device."""

    schedule: Levels
    leaf_inputs: int  # input rows of leaves; leaves that share one are computed once
    block: int = BLOCK  # largest number of nodes per block, on CPUs
    leaf_inverse: Tensor | None = None  # the input row of each leaf with an input
    dropout_mask: Tensor | None = None  # factors of u, one row per node
    half: bool = False  # whether weights and input rows were cast to bfloat16 for autocast
    precision: torch.dtype | None = None  # of products, under autocast with another dtype
    level_order: bool = False  # whether results are in level order
    keeps: bool = False  # whether a backward pass may follow

    def __post_init__(self) -> None:
        schedule = self.schedule
        if schedule.device.type != "cpu":
            self.block = max(schedule.num_nodes, 1)
        # Whether nodes have any number of children, each with a forget gate in its own row.
        self.ragged = schedule.arity is None
        self.arity = schedule.arity or 0  # child slots of a node; 0 for any number
        self.leaves = schedule.level_sizes[0]
        # Computed leaves: those without an input are computed one by one.
        self.leaf_cells = self.leaf_inputs + self.leaves - schedule.level_inputs[0]
        self.inner = schedule.num_nodes - self.leaves  # nodes that are no leaves
        self.slots = schedule.num_edges if self.ragged else self.inner * self.arity

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

    def segment_ids_of(self, block: NodeBlock) -> Tensor:
        """The node within the block that each child belongs to."""
        within_level = self.schedule.child_segment[block.children]
        return within_level if not block.start else within_level - block.start

    # Blocks.

    @cached_property
    def blocks(self) -> list[NodeBlock]:
        """The blocks of all levels above the leaves."""
        return list(self._blocks())

    def _blocks(self) -> Iterator[NodeBlock]:
        schedule = self.schedule
        levels = zip(
            schedule.level_sizes[1:],
            schedule.level_inputs[1:],
            schedule.level_children[1:],
            strict=True,
        )
        first = first_input = first_edge = 0
        for level_size, level_inputs, children in levels:
            starts = range(0, level_size, self.block)
            edges = self._first_edges(children, first, starts)
            for start, edge, end in zip(starts, edges, [*edges[1:], children], strict=True):
                size = min(self.block, level_size - start)
                filled = min(max(level_inputs - start, 0), size)
                yield NodeBlock(
                    first=first + start,
                    size=size,
                    edge=first_edge + edge,
                    edges=end - edge,
                    input=first_input,
                    filled=filled,
                    start=start,
                )
                first_input += filled
            first += level_size
            first_edge += children

    def _first_edges(self, children: int, first: int, starts: Sequence[int]) -> list[int]:
        """Where the children of the blocks of one level begin, counted within the level."""
        if not self.ragged:
            return [start * self.arity for start in starts]
        if len(starts) < 2:
            return [0]
        # Only CPUs have more than one block per level, so there is no device to wait for.
        edges: list[int] = self.child_start[[first + start for start in starts]].tolist()
        return [edge - edges[0] for edge in edges]

    def leaf_blocks(self) -> Iterator[NodeBlock]:
        """Split the computed leaves into blocks, those with and without an input separately."""
        kinds = (0, self.leaf_inputs, True), (self.leaf_inputs, self.leaf_cells, False)
        for start, stop, has_input in kinds:
            for first in range(start, stop, self.block):
                size = min(self.block, stop - first)
                filled = size if has_input else 0
                yield NodeBlock(
                    first, size, edge=0, edges=0, input=first, filled=filled, start=first
                )

    def rows_of_gates(self) -> tuple[int, int, int]:
        """Count the rows of gates to make room for: of leaves, inner nodes, and their children.

        A backward pass reads the gates of all nodes. Without one, every block writes its gates into
        the same rows, of which the largest block needs most.
        """
        if self.keeps:
            return self.leaf_cells, self.inner, self.slots

        leaves = min(self.leaf_cells, self.block)
        widest_level = max(self.schedule.level_sizes[1:], default=0)
        inner = min(widest_level, self.block)
        children = self.slots
        if self.ragged and self.inner > self.block:
            # The most children of so many nodes in a row, wherever blocks begin.
            starts = np.append(self.child_start.numpy(), self.slots)
            children = int((starts[self.block :] - starts[: -self.block]).max())
        return leaves, inner, children

    # Orders of results.

    def in_order(self, rows: Tensor) -> Tensor:
        """Bring state rows into the requested order."""
        return rows[1:] if self.level_order else rows.index_select(0, self.schedule.row)

    def in_level_order(self, rows: Tensor | None) -> Tensor | None:
        """Bring the gradients of the results into level order."""
        if rows is None or self.level_order:
            return rows
        row = self.schedule.row
        number = torch.arange(row.numel(), device=row.device)
        return rows.index_select(0, torch.empty_like(row).index_copy_(0, row - 1, number))


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


class RunRows(NamedTuple):
    """All rows of a run; the backward pass reads those before ``hidden``."""

    memory: Tensor  # c of all nodes, after a row for missing children
    activated: Tensor  # tanh(c) of all nodes, after such a row
    gathered: Tensor  # h of the children
    sums: Tensor | None  # sums of h of the children, for any number of children
    leaf_activated: Tensor  # tanh(c) of the computed leaves
    leaf_gates: Tensor  # of computed leaves, or of one block if nothing is kept
    gates: Tensor  # of inner nodes, as in Gates, or of one block
    forget: Tensor | None
    hidden: Tensor = NO_ROWS  # h of all nodes, after a row for missing children
    leaf_hidden: Tensor = NO_ROWS  # h and c of the computed leaves
    leaf_memory: Tensor = NO_ROWS
    read_hidden: Tensor = NO_ROWS  # h as it is gathered: ``hidden``, or a copy in bfloat16
    leaf_read_hidden: Tensor = NO_ROWS

    @classmethod
    def of(cls, plan: RunPlan, like: Tensor, width: int) -> "RunRows":
        """Make room for the rows of a run."""
        count = plan.schedule.num_nodes + 1
        dtype = torch.bfloat16 if plan.half else like.dtype
        hidden = like.new_empty(count, width)
        memory = like.new_empty(count, width)
        activated = like.new_empty(count, width, dtype=dtype)
        read_hidden = torch.empty_like(activated) if plan.half else hidden
        if plan.leaf_inverse is None:
            leaf_hidden, leaf_memory, leaf_activated, leaf_read_hidden = (
                state[1 : plan.leaves + 1] for state in (hidden, memory, activated, read_hidden)
            )
        else:
            leaf_hidden, leaf_memory, leaf_activated = (
                state.new_empty(plan.leaf_cells, width) for state in (hidden, memory, activated)
            )
            leaf_read_hidden = torch.empty_like(leaf_activated) if plan.half else leaf_hidden

        leaves, inner, children = plan.rows_of_gates()
        return cls(
            memory=memory,
            activated=activated,
            gathered=activated.new_empty(plan.slots, width),
            sums=activated.new_empty(plan.inner, width) if plan.ragged else None,
            leaf_activated=leaf_activated,
            leaf_gates=activated.new_empty(leaves, 3 * width),
            gates=activated.new_empty(inner, (3 + plan.arity) * width),
            forget=activated.new_empty(children, width) if plan.ragged else None,
            hidden=hidden,
            leaf_hidden=leaf_hidden,
            leaf_memory=leaf_memory,
            read_hidden=read_hidden,
            leaf_read_hidden=leaf_read_hidden,
        )

    @property
    def kept(self) -> tuple[Tensor | None, ...]:
        """What the backward pass reads."""
        return self[:8]

    def gates_of(self, block: NodeBlock, keeps: bool) -> Gates:
        """The gates of a block of inner nodes."""
        if not keeps:
            block = block._replace(first=0, edge=0)
        forget = None if self.forget is None else self.forget[block.children]
        return Gates(self.gates[block.nodes], forget)

    def new_gates(self) -> Gates:
        """Room for the gradients of the gates of all inner nodes."""
        forget = None if self.forget is None else torch.empty_like(self.forget)
        return Gates(torch.empty_like(self.gates), forget)


@dataclass
class StateGradients:
    """Gradients of h and c of some nodes; final once the backward pass has visited all parents.

    If no node has several parents, there is one row per argument slot: the parent writes to it,
    and ``place`` is the row of each node's gradient. No gradients need be added up, except those
    of the results (``outside``) when a row is read. Otherwise ``place`` is None and there is one
    row per node, to which all its parents add.
    """

    hidden: Tensor  # with places, in the dtype of the products that write them
    memory: Tensor
    place: Tensor | None = None
    outside: tuple[Tensor | None, Tensor | None] = (None, None)

    @classmethod
    def of_results(
        cls, plan: RunPlan, grad_h: Tensor | None, grad_c: Tensor | None, rows: RunRows
    ) -> "StateGradients":
        """Start at the gradients of the results; row 0 is that of the missing child or parent."""
        of_h = dense_columns(plan.in_level_order(grad_h))
        of_c = dense_columns(plan.in_level_order(grad_c))
        width = rows.memory.size(1)
        if plan.schedule.single_parent:
            hidden, memory = (
                like.new_empty(1 + plan.slots, width) for like in (rows.activated, rows.memory)
            )
            hidden[0] = 0
            memory[0] = 0
            return cls(hidden, memory, plan.slot_of_node(), (of_h, of_c))

        hidden, memory = (torch.zeros_like(rows.memory) for _ in range(2))
        if of_h is not None:
            hidden[1:] += of_h
        if of_c is not None:
            memory[1:] += of_c
        return cls(hidden, memory)

    def of_nodes(self, first: int, size: int) -> "StateGradients":
        """Those of some nodes in level order."""
        if self.place is None:
            rows = slice(1 + first, 1 + first + size)
            return StateGradients(self.hidden[rows], self.memory[rows])
        rows = slice(first, first + size)
        of_h, of_c = self.outside
        outside = (None if of_h is None else of_h[rows], None if of_c is None else of_c[rows])
        return StateGradients(self.hidden, self.memory, self.place[rows], outside)

    def read(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The gradients of h and c in some rows, which may be changed."""
        if self.place is None:
            return self.hidden[rows], self.memory[rows]
        place = self.place[rows]
        hidden = torch.index_select(self.hidden, 0, place).to(self.memory.dtype)
        memory = torch.index_select(self.memory, 0, place)

        of_h, of_c = self.outside
        if of_h is not None:
            hidden += of_h[rows]
        if of_c is not None:
            memory += of_c[rows]
        return hidden, memory

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


class Kernel(ABC):
    """What runs a Tree-LSTM over a whole schedule, each way."""

    @abstractmethod
    def forward(self, plan: RunPlan, inputs: Tensor, weights: Sequence[Tensor]) -> RunRows:
        """Compute all nodes."""

    @abstractmethod
    def backward(
        self, plan: RunPlan, rows: RunRows, weight_hidden: Tensor, incoming: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Return the gradients of the products of inner nodes and of computed leaves."""


@dataclass(frozen=True)
class BlockKernel(Kernel):
    """Run a schedule block by block, with one class of gates."""

    gates: "type[TorchGates]"

    def forward(self, plan: RunPlan, inputs: Tensor, weights: Sequence[Tensor]) -> RunRows:
        """Compute the leaves, and then the inner nodes level by level."""
        bias = weights[2]
        rows = RunRows.of(plan, bias, bias.size(0) // 4)
        rows.memory[0] = 0
        rows.read_hidden[0] = 0
        self._forward_leaves(plan, rows, inputs, weights)
        self._forward_levels(plan, rows, inputs, weights)
        return rows

    def _forward_leaves(
        self, plan: RunPlan, rows: RunRows, inputs: Tensor, weights: Sequence[Tensor]
    ) -> None:
        # Leaves have no forget gates.
        weight = weights[0][: rows.leaf_gates.size(1)]
        bias = weights[2][: rows.leaf_gates.size(1)]
        product = _biased_product(plan, weight, bias, plan.leaf_inputs)
        # A missing input is an input of zeros.
        missing = min(plan.leaf_cells - plan.leaf_inputs, plan.block)
        zeros = inputs.new_zeros(missing, inputs.size(1)) if missing else inputs

        leaf_gates = self.gates(plan, rows, inner=False, bias=bias)
        for block in plan.leaf_blocks():
            gates = rows.leaf_gates[block.nodes] if plan.keeps else rows.leaf_gates[: block.size]
            if block.filled:
                products = product.near(gates, inputs, block.first, block.size)
            else:
                products = product.near(gates, zeros, 0, block.size)
            leaf_gates.forward(block, Gates(products), Gates(gates))

        if plan.leaf_inverse is not None:
            _copy_equal_leaves(plan, rows)

    def _forward_levels(
        self, plan: RunPlan, rows: RunRows, inputs: Tensor, weights: Sequence[Tensor]
    ) -> None:
        """Compute all inner nodes into ``rows``, after the leaves, block by block.

        ``operand`` is a view of what ``gather`` fills, so each block gathers before its products.
        """
        weight_input, weight_hidden, all_bias = weights
        columns = rows.gates.size(1)
        width = all_bias.size(0) // 4
        own_bias, forget_bias = all_bias.split([3 * width, width])
        # All children of a node share the bias of the forget gate.
        bias = torch.cat([own_bias, *[forget_bias] * plan.arity])

        filled = inputs[plan.leaf_inputs :]
        count = filled.size(0)
        input_product = RowProduct(weight_input, None, plan.precision, count) if count else None
        product = _biased_product(plan, weight_hidden[:columns], bias, plan.inner)
        if plan.ragged:
            forget_weight = weight_hidden[columns:]
            forget_product = _biased_product(plan, forget_weight, forget_bias, plan.slots)

        operand = operand_of(plan, rows)
        inner_gates = self.gates(plan, rows, inner=True, bias=bias, forget_bias=forget_bias)
        for block in plan.blocks:
            inner_gates.gather(block)
            gates = rows.gates_of(block, plan.keeps)
            own = None
            if input_product is not None and block.filled:
                own = input_product(filled, block.input, block.filled)
            of_forget = None
            if gates.forget is not None:
                of_forget = forget_product.near(
                    gates.forget, rows.gathered, block.edge, block.edges
                )
            # It also reads a few rows beyond those already filled, whose results are dropped.
            of_rows = product.near(gates.rows, operand, block.first, block.size)
            inner_gates.forward(block, Gates(of_rows, of_forget), gates, own)

    def backward(
        self, plan: RunPlan, rows: RunRows, weight_hidden: Tensor, incoming: StateGradients
    ) -> tuple[Gates, Tensor]:
        """Go from the roots to the leaves; return gradients before activation."""
        inner_gates = self.gates(plan, rows, inner=True)
        grads = _backward_levels(inner_gates, rows, weight_hidden, incoming)
        of_leaves = torch.empty_like(rows.leaf_gates)

        leaf_gates = self.gates(plan, rows, inner=False)
        incoming = incoming.of_nodes(0, plan.leaves)
        if plan.leaf_inverse is not None:
            incoming = leaf_gates.sum_equal(incoming, plan.cell_of_leaf, plan.leaf_cells)
        for block in plan.leaf_blocks():
            here = block.nodes
            leaf_gates.backward(
                block, Gates(rows.leaf_gates[here]), incoming, Gates(of_leaves[here])
            )
        return grads, of_leaves


def _copy_equal_leaves(plan: RunPlan, rows: RunRows) -> None:
    """Copy the states that equal leaves share to each of them."""
    in_schedule = slice(1, plan.leaves + 1)
    cells = plan.cell_of_leaf
    torch.index_select(rows.leaf_hidden, 0, cells, out=rows.hidden[in_schedule])
    torch.index_select(rows.leaf_memory, 0, cells, out=rows.memory[in_schedule])
    if plan.half:
        read_hidden = rows.read_hidden[in_schedule]
        torch.index_select(rows.leaf_read_hidden, 0, cells, out=read_hidden)


def _biased_product(plan: RunPlan, weight: Tensor, bias: Tensor, rows: int) -> RowProduct:
    """A product with a bias, which gates of half precision add themselves in single precision."""
    return RowProduct(weight, None if plan.half else bias, plan.precision, rows)


def operand_of(plan: RunPlan, rows: RunRows) -> Tensor:
    """What the weights of u, i, o multiply: the sums of h, or the h of all children in a row."""
    if rows.sums is not None:
        return rows.sums
    return rows.gathered.view(plan.inner, plan.arity * rows.gathered.size(1))


def _backward_levels(
    inner_gates: "TorchGates", rows: RunRows, weight: Tensor, incoming: StateGradients
) -> Gates:
    """Go from the roots to the lowest inner nodes; return the gradients before activation."""
    plan = inner_gates.plan
    columns = rows.gates.size(1)
    grads = rows.new_gates()
    of_inner = incoming.of_nodes(plan.leaves, plan.inner)
    precision = plan.precision
    product = RowProduct(weight[:columns].t(), precision=precision, rows=plan.inner)
    if plan.ragged:
        forget_product = RowProduct(weight[columns:].t(), precision=precision, rows=plan.slots)

    for block in reversed(plan.blocks):
        to_hidden, to_memory = incoming.buffers(block.edge, block.edges)
        of_forget = None if grads.forget is None else grads.forget[block.children]
        of_block = Gates(grads.rows[block.nodes], of_forget, to_memory)
        inner_gates.backward(block, rows.gates_of(block, keeps=True), of_inner, of_block)
        if grads.forget is None:
            product.into(to_hidden.view(block.size, -1), grads.rows, block.first, block.size)
        else:
            of_sums = product(grads.rows, block.first, block.size)
            of_sums = torch.index_select(of_sums, 0, plan.segment_ids_of(block))
            of_each = forget_product(grads.forget, block.edge, block.edges)
            torch.add(of_sums, of_each, out=to_hidden)
        incoming.scatter(plan.children[block.children], to_hidden, to_memory)
    return grads


class TorchGates:
    """Compute the gates and states of leaves or of inner nodes with PyTorch operations.

    For each block: gather() of inner nodes alone → the products are computed → forward(), which
    writes the states; and backward() for the blocks in reverse.

    ``bias`` and ``forget_bias`` are those that products in half precision lack.
    """

    def __init__(
        self,
        plan: RunPlan,
        rows: RunRows,
        *,
        inner: bool,
        bias: Tensor = NO_ROWS,
        forget_bias: Tensor = NO_ROWS,
    ) -> None:
        self.plan = plan
        self.inner = inner
        self.bias = bias
        self.forget_bias = forget_bias
        self.gathered = rows.gathered
        self.sums = rows.sums
        self.all_hidden = rows.read_hidden
        self.all_memory = rows.memory
        self.width = rows.memory.size(1)

        # Of the nodes that these gates belong to.
        self.dropout_mask = plan.dropout_mask  # factors of u
        if not inner:
            self.hidden = rows.leaf_hidden
            self.memory = rows.leaf_memory
            self.activated = rows.leaf_activated
            self.read_hidden = rows.leaf_read_hidden
            return
        first_inner = 1 + plan.leaves  # after the row for missing children
        self.hidden = rows.hidden[first_inner:]
        self.memory = rows.memory[first_inner:]
        self.activated = rows.activated[first_inner:]
        self.read_hidden = rows.read_hidden[first_inner:]
        if plan.dropout_mask is not None:
            self.dropout_mask = plan.dropout_mask[plan.leaves :]

    def mask_of(self, block: NodeBlock) -> Tensor | None:
        """The factors of u of a block."""
        return None if self.dropout_mask is None else self.dropout_mask[block.nodes]

    def child_starts(self, block: NodeBlock) -> Tensor:
        """Where the children of each node begin, counted from the block's first child."""
        return self.plan.child_start[block.nodes] - block.edge

    def gather(self, block: NodeBlock) -> None:
        """Gather h of the children of a block, and sum it per node if ``sums`` is given."""
        gathered = self.gathered[block.children]
        index = self.plan.children[block.children]
        torch.index_select(self.all_hidden, 0, index, out=gathered)
        if self.sums is not None:
            self.sums[block.nodes] = self._sum_children(block, gathered)

    def forward(
        self, block: NodeBlock, products: Gates, gates: Gates, own: Tensor | None = None
    ) -> None:
        """Activate products to gates, and write the states of a block.

        ``own`` is W x of the nodes with an input, which come first, if it is not yet added.
        """
        if self.plan.half:
            self._forward_half(block, products, gates, own)
        else:
            _write(products, gates)
            self._activate(block, gates, self.activated[block.nodes], own)

    def _forward_half(
        self, block: NodeBlock, products: Gates, gates: Gates, own: Tensor | None
    ) -> None:
        """Compute in single precision what is read and written in half precision."""
        single = _in_single_precision(products)
        single.rows.add_(self.bias)
        if single.forget is not None:
            single.forget.add_(self.forget_bias)
        hidden = self.hidden[block.nodes]
        activated = torch.empty_like(hidden)
        self._activate(block, single, activated, None if own is None else own.float())
        self.activated[block.nodes] = activated
        self.read_hidden[block.nodes] = hidden
        _write(single, gates)

    def _activate(
        self, block: NodeBlock, gates: Gates, activated: Tensor, own: Tensor | None
    ) -> None:
        """Activate products to gates in place, and write the states of a block."""
        mask = self.mask_of(block)
        hidden = self.hidden[block.nodes]
        memory = self.memory[block.nodes]
        if own is not None:
            self._add_inputs(block, gates, own)

        u, i, o = gates.rows[:, : 3 * self.width].chunk(3, 1)
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
        torch.mul(o, activated, out=hidden)

    def _add_inputs(self, block: NodeBlock, gates: Gates, own: Tensor) -> None:
        filled = own.size(0)
        last = 3 * self.width
        forget = gates.forget_of(self.width)
        gates.rows[:filled, :last] += own[:, :last]
        if gates.forget is None:
            of_filled = forget[:filled]
            of_filled += own[:, None, last:]
            return

        if filled < block.size:
            # Nodes without an input come last; their children read a row of zeros.
            own = torch.cat([own, own.new_zeros(1, own.size(1))])
        node = self.plan.segment_ids_of(block).clamp(max=filled)
        forget += own[:, last:].index_select(0, node)

    def _sum_memory(self, block: NodeBlock, gates: Gates, memory: Tensor) -> None:
        """Write the sum of f * c over the children of each node."""
        forget = gates.forget_of(self.width)
        before = self._children_memory(block)
        if gates.forget is not None:
            memory.copy_(self._sum_children(block, before.mul_(forget)))
            return
        of_slots = list(zip(forget.unbind(1), before.view(forget.shape).unbind(1), strict=True))
        torch.mul(*of_slots[0], out=memory)
        for f, c in of_slots[1:]:
            memory.addcmul_(f, c)

    def _children_memory(self, block: NodeBlock) -> Tensor:
        return torch.index_select(self.all_memory, 0, self.plan.children[block.children])

    def _sum_children(self, block: NodeBlock, rows: Tensor) -> Tensor:
        return sum_segments(rows, self.plan.numbers[: rows.size(0)], self.child_starts(block))

    def backward(
        self, block: NodeBlock, gates: Gates, incoming: StateGradients, grads: Gates
    ) -> None:
        """Write the gradients of products, and for inner nodes those of the children's c."""
        activated = self.activated[block.nodes]
        if not self.plan.half:
            self._differentiate(block, gates, activated, incoming, grads)
            return
        single = _in_single_precision(gates)
        single_grads = _in_single_precision(grads)
        self._differentiate(block, single, activated.float(), incoming, single_grads)
        _write(single_grads, grads)

    def _differentiate(
        self,
        block: NodeBlock,
        gates: Gates,
        activated: Tensor,
        incoming: StateGradients,
        grads: Gates,
    ) -> None:
        width = self.width
        mask = self.mask_of(block)
        u, i, o = gates.rows[:, : 3 * width].chunk(3, 1)
        to_u, to_i, to_o = grads.rows[:, : 3 * width].chunk(3, 1)

        hidden, memory = incoming.read(block.nodes)
        torch.mul(hidden, activated, out=to_o)
        hidden.mul_(o)
        memory += _TANH_BACKWARD(hidden, activated, grad_input=hidden)

        candidate = memory if mask is None else memory * mask
        torch.mul(candidate, i, out=to_u)
        torch.mul(candidate, u, out=to_i)
        if grads.child_memory is not None:
            self._to_children(block, gates, memory, grads, grads.child_memory)

        _TANH_BACKWARD(to_u, u, grad_input=to_u)
        _through_sigmoid(grads.rows[:, width:], gates.rows[:, width:])
        if grads.forget is not None and gates.forget is not None:
            _through_sigmoid(grads.forget, gates.forget)

    def _to_children(
        self, block: NodeBlock, gates: Gates, memory: Tensor, grads: Gates, to_memory: Tensor
    ) -> None:
        """Write the gradients of f after activation, and of the children's c."""
        forget = gates.forget_of(self.width)
        before = self._children_memory(block)
        if gates.forget is not None:
            memory = torch.index_select(memory, 0, self.plan.segment_ids_of(block))
        else:
            memory = memory[:, None]
            before = before.view(forget.shape)
        torch.mul(memory, before, out=grads.forget_of(self.width))
        torch.mul(memory, forget, out=to_memory.view(forget.shape))

    def sum_equal(self, incoming: StateGradients, cell: Tensor, cells: int) -> StateGradients:
        """Sum the gradients of equal leaves, always in the same order."""
        # By sorting, as adding rows in any order would not be reproducible on GPUs.
        order = cell.argsort(stable=True)
        # Not with bincount, which waits for the device to find the largest number.
        counts = cell.new_zeros(cells).index_add_(0, cell, torch.ones_like(cell))
        starts = counts.cumsum(0) - counts
        hidden, memory = incoming.read(slice(0, cell.size(0)))
        return StateGradients(
            sum_segments(hidden, order, starts), sum_segments(memory, order, starts)
        )


def _in_single_precision(gates: Gates) -> Gates:
    forget = None if gates.forget is None else gates.forget.float()
    return Gates(gates.rows.float(), forget, gates.child_memory)


def _write(source: Gates, target: Gates) -> None:
    """Copy gates, unless they are the same rows."""
    target.rows.copy_(source.rows)
    if target.forget is not None and source.forget is not None:
        target.forget.copy_(source.forget)


def _finish_tanh(activated: Tensor) -> None:
    """Compute tanh(x) from sigmoid(2x), in place."""
    torch.add(_MINUS_ONE, activated, alpha=2, out=activated)


def _through_sigmoid(grads: Tensor, gates: Tensor) -> None:
    torch.ops.aten.sigmoid_backward.grad_input(grads, gates, grad_input=grads)


def checked_leaf_inputs(schedule: Levels, inputs: Tensor, leaf_inverse: Tensor | None) -> int:
    """Count the input rows of leaves; raise an error unless they fit, as kernels trust indices."""
    schedule.check()
    device = inputs.device
    leaf_inputs = inputs.size(0) - sum(schedule.level_inputs[1:])
    leaves = leaf_inputs if leaf_inverse is None else leaf_inverse.size(0)
    fits = leaves == schedule.level_inputs[0] and leaf_inputs >= 0
    if not fits or schedule.device != device:
        problem = "tree_lstm: the schedule does not fit the input rows"
        expected = f"{schedule.level_inputs[0]} leaves with an input, on {schedule.device}"
        got = f"{leaves} leaves, on {device}"
        hint = "rows in the order of schedule.input_node; batch.to(device)"
        raise mismatch(ValueError, problem, expected, got, hint=hint)
    if leaf_inverse is not None and type(leaf_inverse) is Tensor and leaf_inverse.is_cpu:
        rows = array_of(leaf_inverse)
        if rows.size and not 0 <= rows.min() <= rows.max() < leaf_inputs:
            problem = "tree_lstm: leaf_inverse is out of range"
            got = f"{rows.min()} to {rows.max()}"
            raise mismatch(ValueError, problem, f"below {leaf_inputs}", got)
    return leaf_inputs
