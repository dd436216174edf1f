"""The gates of fused Tree-LSTMs by calls of torch, on every device and in every dtype."""

from typing import ClassVar

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_plan import (
    Block,
    ChildRows,
    Gates,
    Incoming,
    NodeRows,
    Outgoing,
    gate_gradients,
    new_states,
    sum_stretches,
    through_activations,
    through_logistic,
)


class PlainGates:
    """Computes gates by calls of torch."""

    squashes: ClassVar[bool] = True
    """Products squash: oneDNN does it on the way."""

    def __init__(self, nodes: NodeRows) -> None:
        self.nodes = nodes

    def gather(self, block: Block) -> None:
        """Gathers h of the children of a block, and sums it up where that is wanted."""
        nodes, children = self.nodes, self.nodes.children
        if children is None or children.gathered is None:
            return
        width, here = nodes.hidden.size(1), slice(block.first, block.first + block.size)
        sums = children.sums
        place = here if sums is None else slice(block.edge, block.edge + block.edges)
        gathered = children.gathered[place].view(block.edges, width)
        torch.index_select(children.hidden, 0, children.state_row(block), out=gathered)
        if sums is not None:
            sums[here] = children.sum(block, gathered)

    def forward(self, block: Block, gates: Gates) -> None:
        """Activates the gates in place, and writes the states."""
        rows, forget, own, product = gates
        here, children = slice(block.first, block.first + block.size), self.nodes.children
        hidden, memory, squashed = (state[here] for state in self.nodes[:3])
        width = memory.size(1)
        if children is not None:
            forget = children.forget_of(rows, forget)
            if own is not None and product is not None:
                _add_inputs(rows, own, forget, children, block)
                product.squash(rows)
                if children.plan.arity is None:
                    forget.sigmoid_()
            _carry(forget, children, block, memory)
        uio = rows[:, : 3 * width].chunk(3, 1)
        keep = self.nodes.keep_of(block)
        new_states(uio, memory, squashed, hidden, keep, carried=children is not None)

    def backward(self, block: Block, gates: Gates, given: Incoming, wanted: Outgoing) -> None:
        """Writes gradients, from the activated gates."""
        squashed = self.nodes.squashed[block.first : block.first + block.size]
        width, children = squashed.size(1), self.nodes.children
        uio = gates.rows[:, : 3 * width].chunk(3, 1)
        totals = given.take(block.first, block.size)
        memory = gate_gradients(uio, wanted.rows, totals, squashed, self.nodes.keep_of(block))
        if children is None or wanted.memory is None:
            through_activations(gates.rows, wanted.rows, width)
            return
        forget = children.forget_of(gates.rows, gates.forget)
        to_forget = children.forget_of(wanted.rows, wanted.forget)
        before, ragged = children.memory_of(block), children.plan.arity is None
        if ragged:
            memory = torch.index_select(memory, 0, children.plan.owner(block))
        else:
            memory, before = memory[:, None], before.view(forget.shape)
        torch.mul(memory, before, out=to_forget)
        torch.mul(memory, forget, out=wanted.memory.view(forget.shape))
        through_activations(gates.rows, wanted.rows, width)
        if ragged:
            through_logistic(forget, to_forget)

    def sum_equal(self, given: Incoming, cell: Tensor, cells: int) -> Incoming:
        """Adds up the gradients of equal leaves, always in the same order."""
        hidden, memory = given.take(0, cell.size(0))
        # By sorting, as adding rows to rows in any order would not be the same twice on GPUs.
        order = cell.argsort(stable=True)
        # Not by bincount, which waits for the device to find the largest number.
        counts = cell.new_zeros(cells).index_add_(0, cell, torch.ones_like(cell))
        starts = counts.cumsum(0) - counts
        return Incoming(sum_stretches(hidden, order, starts), sum_stretches(memory, order, starts))


def _add_inputs(
    rows: Tensor, own: Tensor, forget: Tensor, children: ChildRows, block: Block
) -> None:
    filled, last = own.size(0), own.size(1) - forget.size(-1)
    rows[:filled, :last] += own[:, :last]
    if children.plan.arity is not None:
        given = forget[:filled]
        given += own[:, None, last:]
        return
    if filled < block.size:
        # Nodes without an input come last; their children take a row of zeros.
        own = torch.cat([own, own.new_zeros(1, own.size(1))])
    forget += own[:, last:].index_select(0, children.plan.owner(block).clamp(max=filled))


def _carry(forget: Tensor, children: ChildRows, block: Block, memory: Tensor) -> None:
    """Writes what the forget gates let through, added up over the children of each node."""
    before = children.memory_of(block)
    if children.plan.arity is None:
        memory.copy_(children.sum(block, before.mul_(forget)))
        return
    gates, cells = forget.unbind(1), before.view(forget.shape).unbind(1)
    torch.mul(gates[0], cells[0], out=memory)
    for gate, cell in zip(gates[1:], cells[1:], strict=True):
        memory.addcmul_(gate, cell)
