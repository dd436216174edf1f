"""What the gates of fused Tree-LSTMs read and write, whatever computes them."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_downward import Incoming
from pyg_dynbatch.nn.fused_plan import Block, FusedPlan
from pyg_dynbatch.nn.fused_products import RowProduct


class ChildRows(NamedTuple):
    """The children of inner nodes.

    Args:
        plan: The plan.
        hidden: h of all nodes, behind a row of zeros for missing children; no rows backwards.
        memory: c of all nodes, behind a row of zeros.
        gathered: h of all argument places side by side, ``[inner, arity * width]``, or
            ``[child, width]`` where nodes have any number of children; None backwards.
        sums: h added up over the children of a node, where they have any number.
    """

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
    """Sums ``rows[index]`` over stretches of the index, always in the same order.

    Args:
        rows: The rows.
        index: Which ones.
        starts: Where each stretch begins.

    Example:
        >>> sum_stretches(torch.eye(2), torch.tensor([0, 1, 1]), torch.tensor([0, 1]))
        tensor([[1., 0.],
                [0., 2.]])
    """
    return torch.embedding_bag(rows, index, starts, False, 0)[0]


class NodeRows(NamedTuple):
    """The states of the nodes of one pass; ``first`` of a block counts these rows.

    Args:
        hidden: h, ``[node, width]``.
        memory: c.
        squashed: tanh(c).
        keep: Factors of the candidate u (recurrent dropout).
        children: The nodes' children; None for leaves.
    """

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
    """Cuts the rows of inner nodes out of those of all nodes.

    Args:
        plan: The plan.
        states: h, c and tanh(c) of all nodes behind a row of zeros; h may have no rows.
        gathered: Room for h of the children.
        sums: Room for its sums.
    """
    hidden, memory, squashed = (state[1 + plan.leaves :] for state in states)
    keep = None if plan.run.keep is None else plan.run.keep[plan.leaves :]
    children = ChildRows(plan, states[0], states[1], gathered, sums)
    return NodeRows(hidden, memory, squashed, keep, children)


class Gates(NamedTuple):
    """The gates of the nodes of one block: products at first, activated afterwards.

    Args:
        rows: u, i, o side by side, and the forget gates of all child places behind them where
            there is a fixed number.
        forget: Those of all children, ``[child, width]``, where they are not part of ``rows``.
        own: Products of the inputs of the first nodes, to be added; u, i, o, f.
        product: What made the rows, and squashes what is added up.
    """

    rows: Tensor
    forget: Tensor | None = None
    own: Tensor | None = None
    product: RowProduct | None = None


class Outgoing(NamedTuple):
    """Where the gradients of products go, and those of the children's memory.

    Args:
        rows: Like the rows of the gates.
        forget: Like those of the gates.
        memory: Gradients of the children's memory, ``[child, width]``; None for leaves.
    """

    rows: Tensor
    forget: Tensor | None = None
    memory: Tensor | None = None


@runtime_checkable
class GateKernels(Protocol):
    """Computes the gates of the nodes of one pass, block by block.

    Made with the :class:`NodeRows` of the pass.
    """

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
        """Adds up the gradients of equal leaves, which were computed once.

        Args:
            given: Gradients, one row a leaf.
            cell: Which of the computed rows each leaf has taken.
            cells: How many were computed.
        """
