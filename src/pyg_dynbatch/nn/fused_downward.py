"""How gradients of states come down from parents to children in a fused run."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_plan import FusedPlan


class Incoming(NamedTuple):
    """The gradients of h and c of the nodes of one pass, whose parents are done.

    Args:
        hidden: Gradients of h; the row of a node has its own number, or that of ``place``.
        memory: Gradients of c, likewise.
        place: Which of these rows each node reads; its own where left out.
        outside: Gradients of h and c to be added, one row a node.
    """

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
    """Hands the gradients of states down, from the argument places of parents to the children.

    Where every node has one parent at most, each place has a row of its own, written once and
    gathered by the child: nothing is added up, and nothing has to be filled with zeros before.
    Otherwise the rows of a child are added up, in the order of its parents.

    Args:
        plan: The plan.
        hidden: Gradients of the resulting h in level order.
        memory: Gradients of the resulting c in level order.
        like: A state row, for dtype and device.
    """

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
