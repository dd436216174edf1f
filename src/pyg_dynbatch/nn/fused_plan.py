"""What fused Tree-LSTMs share: blocks of levels, rows of gates, gradients of children, products."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.schedule import Schedule

# A plain number for every device and dtype; written as a tensor so that -1 + 2x is one pass.
_MINUS_ONE = torch.tensor(-1.0)


def finish_candidate(squashed: Tensor) -> None:
    """Makes tanh(x) of sigmoid(2x), in place."""
    torch.add(_MINUS_ONE, squashed, alpha=2, out=squashed)


def new_states(
    gates: Sequence[Tensor],
    memory: Tensor,
    squashed: Tensor,
    hidden: Tensor,
    keep: Tensor | None,
    carried: bool,
) -> None:
    """Writes ``c = i * u (+ what is carried)``, ``tanh(c)`` and ``h = o * tanh(c)``."""
    u, i, o = gates
    candidate = u if keep is None else u * keep
    if carried:
        memory.addcmul_(i, candidate)
    else:
        torch.mul(i, candidate, out=memory)
    torch.mul(memory, 2, out=squashed)
    finish_candidate(squashed.sigmoid_())
    torch.mul(o, squashed, out=hidden)


def gate_gradients(
    gates: Sequence[Tensor],
    grads: Tensor,
    totals: tuple[Tensor, Tensor],
    squashed: Tensor,
    keep: Tensor | None,
) -> Tensor:
    """Writes the gradients of u, i, o after activation; gives that of the memory."""
    u, i, o = gates
    hidden, memory = totals
    width = u.size(1)
    torch.mul(hidden, squashed, out=grads[:, 2 * width : 3 * width])
    hidden.mul_(o)
    memory += torch.ops.aten.tanh_backward.grad_input(hidden, squashed, grad_input=hidden)
    candidate = memory if keep is None else memory * keep
    torch.mul(candidate, i, out=grads[:, :width])
    torch.mul(candidate, u, out=grads[:, width : 2 * width])
    return memory


def through_activations(gates: Tensor, grads: Tensor, width: int) -> None:
    """Takes gradients of u and of all other gates back through tanh and the logistic function."""
    through_tanh, u = grads[:, :width], gates[:, :width]
    torch.ops.aten.tanh_backward.grad_input(through_tanh, u, grad_input=through_tanh)
    through_logistic(gates[:, width:], grads[:, width:])


def through_logistic(gates: Tensor, grads: Tensor) -> None:
    """Takes gradients back through the logistic function, in place."""
    torch.ops.aten.sigmoid_backward.grad_input(grads, gates, grad_input=grads)


_HEIGHTS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
"""Numbers of rows for which oneDNN makes kernels; one for every width of a level would cost more
than the product itself, as a kernel takes a millisecond to make."""

BLOCK = _HEIGHTS[-1]
"""Rows of one block on CPUs: their gates stay in the second-level cache."""

# From here on packing a matrix costs less than it saves.
_LARGE_MATRIX, _MANY_ROWS = 2**17, 1024


def _has_onednn() -> bool:
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in names
    )


class RowProduct:
    """Multiplies rows with one matrix, block by block: ``rows @ weight.t() + bias``."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        candidate: int = 0,
        precision: torch.dtype | None = None,
        rows: int = 0,
    ) -> None:
        self.bias, self.result, self.precision = bias, weight.dtype, precision
        self.candidate, self.doubled = candidate, False
        self.weight = weight if precision is None else weight.to(precision)
        on_cpu = weight.device.type == "cpu"
        self.packed: Tensor | None = None
        if packs(self.weight, rows):
            if candidate and bias is not None:
                self.weight, self.bias = _doubled(weight, candidate), _doubled(bias, candidate)
                self.doubled = True
            weight = self.weight.contiguous()
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK)
        # Products of low precision are made by oneDNN anyway, so they want the same heights.
        low = self.weight.dtype in (torch.bfloat16, torch.float16)
        self.padded = self.packed is not None or (on_cpu and low)

    def __call__(self, rows: Tensor, first: int, size: int, *, squash: bool = False) -> Tensor:
        """Multiplies ``rows[first : first + size]``."""
        taken = self._taken(rows, first, size)
        if self.packed is not None and taken.size(0) in _HEIGHTS and taken.dtype == self.result:
            kind = "sigmoid" if squash else "none"
            found = torch.ops.mkldnn._linear_pointwise(taken, self.packed, self.bias, kind, [], "")
            if squash and self.candidate:
                finish_candidate(found[:, : self.candidate])
            return found if taken.size(0) == size else found[:size]
        if self.precision is not None:
            found = torch.mm(taken.to(self.precision), self.weight.t()).to(self.result)
            if self.bias is not None:
                found += self.bias
        elif self.bias is not None:
            found = torch.addmm(self.bias, taken, self.weight.t())
        else:
            found = torch.mm(taken, self.weight.t())
        found = found if taken.size(0) == size else found[:size]
        if squash:
            self.squash(found)
        return found

    def squash(self, gates: Tensor) -> None:
        """Squashes products in place: the first columns by tanh, the others logistically."""
        first = gates[:, : self.candidate]
        if self.candidate and not self.doubled:
            first *= 2
        gates.sigmoid_()
        if self.candidate:
            finish_candidate(first)

    def into(self, out: Tensor, rows: Tensor, first: int, size: int) -> None:
        """Writes the product without bias into rows that are there already."""
        if self.padded or self.precision is not None:
            out.copy_(self(rows, first, size))
        else:
            torch.mm(rows[first : first + size], self.weight.t(), out=out)

    def _taken(self, rows: Tensor, first: int, size: int) -> Tensor:
        """The rows, and as many behind them as the next height has and there are."""
        if self.padded:
            height = _height(size)
            if first + height <= rows.size(0):
                size = height
        return rows[first : first + size]


def packs(weight: Tensor, rows: int) -> bool:
    """Tells whether packing a matrix pays for about so many rows."""
    large = weight.numel() >= _LARGE_MATRIX and rows >= _MANY_ROWS
    single = weight.device.type == "cpu" and weight.dtype == torch.float32
    return large and single and _use_onednn()


def _doubled(rows: Tensor, first: int) -> Tensor:
    rows = rows.clone()
    rows[:first] *= 2
    return rows


def _use_onednn() -> bool:
    enabled: bool = torch.backends.mkldnn.enabled  # type: ignore[assignment]
    return enabled and _has_onednn()


def _height(size: int) -> int:
    """The next height, or the size itself beyond all of them."""
    return next((height for height in _HEIGHTS if height >= size), size)


def weight_gradient(
    grads: Tensor, rows: Tensor, precision: torch.dtype | None, out: Tensor | None = None
) -> Tensor:
    """Computes ``grads.t() @ rows``, the gradient of a matrix over all rows it was used on."""
    if precision is None:
        return torch.mm(grads.t(), rows, out=out)
    found = (grads.to(precision).t() @ rows.to(precision)).to(grads.dtype)
    return found if out is None else out.copy_(found)


def sum_rows(rows: Tensor) -> Tensor:
    """Adds up rows by a product with ones, on CPUs twice as fast as ``sum``."""
    return torch.mv(rows.t(), rows.new_ones(rows.size(0)))


@dataclass(frozen=True)
class FusedRun:
    """What a fused Tree-LSTM is told besides its weights."""

    schedule: Schedule
    keep: Tensor | None = None
    leaf_row: Tensor | None = None
    level_order: bool = False
    precision: torch.dtype | None = None


class Block(NamedTuple):
    """Some nodes of one level, side by side in level order."""

    first: int
    size: int
    input: int
    filled: int
    edge: int
    edges: int
    start: int


def differentiated(*tensors: Tensor) -> bool:
    """Tells whether autograd records what is computed from some tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class FusedPlan:
    """Sizes as plain numbers, and index vectors on the device."""

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
        self.single_parent = schedule.single_parent
        self.block = BLOCK if device.type == "cpu" else max(self.nodes, 1)
        children = steps[0].arguments[1]
        skipped = self.leaves * (self.arity or 0)
        self.places = schedule.num_edges if self.arity is None else self.inner * self.arity
        start = children.offset + skipped
        self.children = schedule.wiring[start : start + self.places]
        if self.arity is None:
            self.owners = schedule.wiring[children.owner : children.owner + self.places]
            self.child_start = schedule.child_start[self.leaves :]
        self.blocks = list(self._blocks())

    def _check(self, device: torch.device) -> None:
        """Refuses what would be read or written beyond the rows there are."""
        wanted, leaf_row = self.schedule.level_inputs[0], self.run.leaf_row
        given = self.leaf_inputs if leaf_row is None else leaf_row.size(0)
        if given != wanted or self.leaf_inputs < 0 or self.schedule.device != device:
            raise mismatch(
                ValueError,
                "FusedRun: the schedule does not fit the input rows",
                f"{wanted} leaves with an input, on {self.schedule.device}",
                f"{given} leaves, on {device}",
                hint="rows in the order of schedule.input_node; batch.to(device)",
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
        """For every state row the argument place that reads it, from 1 on; 0 for none."""
        place = self.children.new_zeros(self.nodes + 1)
        numbers = torch.arange(1, self.places + 1, device=place.device)
        # Row 0, the missing child, gets any of its many places; nobody asks for it.
        return place.index_copy_(0, self.children, numbers)[1:]


class Incoming(NamedTuple):
    """The gradients of h and c of the nodes of one pass, whose parents are done."""

    hidden: Tensor
    memory: Tensor
    place: Tensor | None = None
    outside: tuple[Tensor | None, Tensor | None] = (None, None)

    def take(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Gives the gradients of h and c of some nodes; they may be changed."""
        rows = slice(first, first + size)
        if self.place is None:
            return self.hidden[rows], self.memory[rows]
        place = self.place[rows]
        hidden = torch.index_select(self.hidden, 0, place)
        found = hidden, torch.index_select(self.memory, 0, place)
        for part, given in zip(found, self.outside, strict=True):
            if given is not None:
                part += given[rows]
        return found


class Downward:
    """Hands the gradients of states down, from the argument places of parents to the children."""

    def __init__(
        self, plan: FusedPlan, hidden: Tensor | None, memory: Tensor | None, like: Tensor
    ) -> None:
        self.plan, self.outside = plan, (hidden, memory)
        self.single = plan.single_parent
        rows = 1 + (plan.places if self.single else plan.nodes)
        shape = (rows, like.size(1))
        if self.single:
            self.hidden, self.memory = like.new_empty(shape), like.new_empty(shape)
            self.hidden[0], self.memory[0] = 0, 0
            self.place = plan.place_of_row()
            return
        self.hidden, self.memory = like.new_zeros(shape), like.new_zeros(shape)
        for total, given in zip((self.hidden, self.memory), self.outside, strict=True):
            if given is not None:
                total[1:] += given

    def incoming(self, first: int, size: int) -> Incoming:
        """Gives the gradients of nodes in level order, to be read when their parents are done."""
        rows = slice(first, first + size)
        if not self.single:
            return Incoming(self.hidden[1:][rows], self.memory[1:][rows])
        of_h, of_c = (None if given is None else given[rows] for given in self.outside)
        return Incoming(self.hidden, self.memory, self.place[rows], (of_h, of_c))

    def room(self, edge: int, edges: int) -> tuple[Tensor, Tensor]:
        """Gives room for the gradients that go to some argument places."""
        if self.single:
            rows = slice(1 + edge, 1 + edge + edges)
            return self.hidden[rows], self.memory[rows]
        shape = (edges, self.hidden.size(1))
        return self.hidden.new_empty(shape), self.memory.new_empty(shape)

    def give(self, edge: int, hidden: Tensor, memory: Tensor) -> None:
        """Hands on what was written into the room."""
        if not self.single:
            index = self.plan.children[edge : edge + hidden.size(0)]
            self.hidden.index_add_(0, index, hidden)
            self.memory.index_add_(0, index, memory)


class ChildRows(NamedTuple):
    """The children of inner nodes."""

    plan: FusedPlan
    hidden: Tensor
    memory: Tensor
    gathered: Tensor | None = None
    sums: Tensor | None = None

    def state_row(self, block: Block) -> Tensor:
        """Tells the state row of each child of a block."""
        return self.plan.children[block.edge : block.edge + block.edges]

    def starts(self, block: Block) -> Tensor:
        """Tells where the children of each node begin, from the block's first child on."""
        return self.plan.child_start[block.first : block.first + block.size] - block.edge

    def memory_of(self, block: Block) -> Tensor:
        """Gathers the memory of each child of a block."""
        return torch.index_select(self.memory, 0, self.state_row(block))

    def forget_of(self, rows: Tensor, forget: Tensor | None) -> Tensor:
        """The forget gates, ``[node, arity, width]`` or ``[child, width]``."""
        if forget is not None:
            return forget
        width = self.memory.size(1)
        return rows[:, 3 * width :].view(rows.size(0), -1, width)

    def sum(self, block: Block, rows: Tensor) -> Tensor:
        """Adds up the rows of the children of each node, always in the same order."""
        return sum_stretches(rows, self.plan.numbers[: rows.size(0)], self.starts(block))


def sum_stretches(rows: Tensor, index: Tensor, starts: Tensor) -> Tensor:
    """Sums ``rows[index]`` over stretches of the index, always in the same order."""
    return torch.embedding_bag(rows, index, starts, False, 0)[0]


class NodeRows(NamedTuple):
    """The states of the nodes of one pass; ``first`` of a block counts these rows."""

    hidden: Tensor
    memory: Tensor
    squashed: Tensor
    keep: Tensor | None = None
    children: ChildRows | None = None

    def keep_of(self, block: Block) -> Tensor | None:
        """The factors of the candidate for the nodes of a block."""
        return None if self.keep is None else self.keep[block.first : block.first + block.size]


def inner_rows(
    plan: FusedPlan,
    states: Sequence[Tensor],
    gathered: Tensor | None = None,
    sums: Tensor | None = None,
) -> NodeRows:
    """Cuts the rows of inner nodes out of those of all nodes."""
    hidden, memory, squashed = (state[1 + plan.leaves :] for state in states)
    keep = None if plan.run.keep is None else plan.run.keep[plan.leaves :]
    children = ChildRows(plan, states[0], states[1], gathered, sums)
    return NodeRows(hidden, memory, squashed, keep, children)


class Gates(NamedTuple):
    """The gates of the nodes of one block: products at first, activated afterwards."""

    rows: Tensor
    forget: Tensor | None = None
    own: Tensor | None = None
    product: RowProduct | None = None


class Outgoing(NamedTuple):
    """Where the gradients of products go, and those of the children's memory."""

    rows: Tensor
    forget: Tensor | None = None
    memory: Tensor | None = None


@runtime_checkable
class GateKernels(Protocol):
    """Computes the gates of the nodes of one pass, block by block."""

    squashes: ClassVar[bool]
    """Whether products are to squash already, where nothing is added to them."""

    def __init__(self, nodes: NodeRows) -> None: ...

    def gather(self, block: Block) -> None:
        """Gathers h of the children of a block, and sums it up where that is wanted."""

    def forward(self, block: Block, gates: Gates) -> None:
        """Activates the gates in place, and writes the states."""

    def backward(self, block: Block, gates: Gates, given: Incoming, wanted: Outgoing) -> None:
        """Writes gradients, from the activated gates."""

    def sum_equal(self, given: Incoming, cell: Tensor, cells: int) -> Incoming:
        """Adds up the gradients of equal leaves, which were computed once."""
