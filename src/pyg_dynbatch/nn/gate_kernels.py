"""Choose what computes the gates of fused Tree-LSTMs: plain torch, or one Triton kernel a level.

Both do the same to the nodes of one block: forwards from products with weights to states,
backwards from the gradients of states to those of the products and of the children's memory.
"""

import os
from functools import cache, cached_property
from importlib.util import find_spec
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyg_dynbatch.nn.fused_gates import (
    gate_gradients,
    new_states,
    through_activations,
    through_logistic,
)
from pyg_dynbatch.nn.fused_plan import Block, FusedPlan
from pyg_dynbatch.nn.fused_products import RowProduct

SWITCH = "PYG_DYNBATCH_TRITON"
"""The environment variable that keeps Triton away where it is 0."""

_IN_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


class Children:
    """The children of the nodes of one block, and their forget gates.

    Args:
        plan: The plan.
        block: The block.
        cells: Memory rows of all nodes.
        forget: ``[node, arity, width]``, or ``[child, width]`` where nodes have any number.
    """

    def __init__(self, plan: FusedPlan, block: Block, cells: Tensor, forget: Tensor) -> None:
        self.plan, self.block, self.cells, self.forget = plan, block, cells, forget
        self.ragged = plan.arity is None

    @property
    def index(self) -> Tensor:
        """The memory row of each child."""
        return self.plan.children[self.block.edge : self.block.edge + self.block.edges]

    @cached_property
    def starts(self) -> Tensor:
        """Where the children of each node begin, from the block's first child on."""
        first, size = self.block.first, self.block.size
        return self.plan.child_start[first : first + size] - self.block.edge

    @cached_property
    def owner(self) -> Tensor:
        """The node within the block that each child belongs to."""
        edge, start = self.block.edge, self.block.start
        within_level = self.plan.owners[edge : edge + self.block.edges]
        return within_level if not start else within_level - start

    def memory(self) -> Tensor:
        """Gathers the memory of each child."""
        return torch.index_select(self.cells, 0, self.index)

    def sum(self, rows: Tensor) -> Tensor:
        """Adds up the rows of the children of each node, always in the same order."""
        return sum_stretches(rows, self.plan.numbers[: rows.size(0)], self.starts)


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


class Gates(NamedTuple):
    """The gates of the nodes of one block: products at first, activated afterwards.

    Args:
        rows: u, i, o side by side, and the forget gates of all child places behind them where
            there is a fixed number.
        own: Products of the inputs of the first nodes, to be added; u, i, o, f.
        product: What made the rows, and squashes what is added up.
    """

    rows: Tensor
    own: Tensor | None
    product: RowProduct


class States(NamedTuple):
    """Where the states of the nodes of one block go, and what u is multiplied with."""

    memory: Tensor
    squashed: Tensor
    hidden: Tensor
    keep: Tensor | None


class Incoming(NamedTuple):
    """Gradients of h and c, which may be used up; tanh(c), and what u was multiplied with."""

    hidden: Tensor
    memory: Tensor
    squashed: Tensor
    keep: Tensor | None


class Outgoing(NamedTuple):
    """Where the gradients of products go, and those of the children's memory.

    Args:
        rows: Like the rows of the gates.
        forget: Like the forget gates of the children; a part of ``rows`` where they are.
        memory: ``[child, width]``.
    """

    rows: Tensor
    forget: Tensor | None = None
    memory: Tensor | None = None


@runtime_checkable
class GateKernels(Protocol):
    """Computes gates; see the module."""

    def squashed(self, width: int) -> int:
        """Gives the ``candidate`` of products that are to squash already; 0 if they are not."""

    def forward(self, gates: Gates, children: Children | None, states: States) -> None:
        """Activates the gates in place, and writes the states."""

    def backward(
        self, rows: Tensor, children: Children | None, given: Incoming, wanted: Outgoing
    ) -> None:
        """Writes gradients, from the activated gates."""


class PlainGates:
    """Computes gates by calls of torch, on every device and in every dtype."""

    def squashed(self, width: int) -> int:
        """Lets products squash: oneDNN does it on the way."""
        return width

    def forward(self, gates: Gates, children: Children | None, states: States) -> None:
        """Activates the gates in place, and writes the states."""
        rows, own, product = gates
        memory, squashed, hidden, keep = states
        width = memory.size(1)
        if own is not None and children is not None:
            _add_inputs(rows, own, children)
            product.squash(rows)
            if children.ragged:
                children.forget.sigmoid_()
        if children is not None:
            _carry(children, memory)
        uio = rows[:, : 3 * width].chunk(3, 1)
        new_states(uio, memory, squashed, hidden, keep, carried=children is not None)

    def backward(
        self, rows: Tensor, children: Children | None, given: Incoming, wanted: Outgoing
    ) -> None:
        """Writes gradients, from the activated gates."""
        width = given.squashed.size(1)
        uio = rows[:, : 3 * width].chunk(3, 1)
        totals = given.hidden, given.memory
        memory = gate_gradients(uio, wanted.rows, totals, given.squashed, given.keep)
        if children is None or wanted.forget is None or wanted.memory is None:
            through_activations(rows, wanted.rows, width)
            return
        before, forget = children.memory(), children.forget
        if children.ragged:
            memory = torch.index_select(memory, 0, children.owner)
        else:
            memory, before = memory[:, None], before.view(forget.shape)
        torch.mul(memory, before, out=wanted.forget)
        torch.mul(memory, forget, out=wanted.memory.view(forget.shape))
        through_activations(rows, wanted.rows, width)
        if children.ragged:
            through_logistic(forget, wanted.forget)


def _add_inputs(rows: Tensor, own: Tensor, children: Children) -> None:
    filled, forget = own.size(0), children.forget
    last = own.size(1) - forget.size(-1)
    rows[:filled, :last] += own[:, :last]
    if not children.ragged:
        given = forget[:filled]
        given += own[:, None, last:]
        return
    if filled < children.block.size:
        # Nodes without an input come last; their children take a row of zeros.
        own = torch.cat([own, own.new_zeros(1, own.size(1))])
    forget += own[:, last:].index_select(0, children.owner.clamp(max=filled))


def _carry(children: Children, memory: Tensor) -> None:
    """Writes what the forget gates let through, added up over the children of each node."""
    before, forget = children.memory(), children.forget
    if children.ragged:
        memory.copy_(children.sum(before.mul_(forget)))
        return
    gates, cells = forget.unbind(1), before.view(forget.shape).unbind(1)
    torch.mul(gates[0], cells[0], out=memory)
    for gate, cell in zip(gates[1:], cells[1:], strict=True):
        memory.addcmul_(gate, cell)


_PLAIN = PlainGates()


def gate_kernels(like: Tensor) -> GateKernels:
    """Chooses what computes the gates of states like this one.

    Triton's kernels where the tensor is on a CUDA device, in float32, bfloat16 or float16, Triton
    can be imported, and the environment variable ``PYG_DYNBATCH_TRITON`` is not 0; plain torch
    otherwise.

    Args:
        like: A state row or more, for dtype and device.

    Example:
        >>> type(gate_kernels(torch.zeros(1, 2, dtype=torch.float64))).__name__
        'PlainGates'
    """
    if _on_gpu(like) and like.dtype in _IN_SINGLE and os.environ.get(SWITCH) != "0":
        return _triton_gates() or _PLAIN
    return _PLAIN


def _on_gpu(like: Tensor) -> bool:
    return like.is_cuda


@cache
def _triton_gates() -> GateKernels | None:
    if find_spec("triton") is None:
        return None
    # Importing Triton takes a while, and most machines with a CPU alone have none.
    from pyg_dynbatch.nn.triton_gates import TritonGates

    return TritonGates()
