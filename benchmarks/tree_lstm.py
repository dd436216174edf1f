"""The equations of a binary Tree-LSTM in plain torch, for all contenders that write them out."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from pyg_dynbatch.nn.tree_cells import NaryTreeLSTMCell

State = tuple[Tensor, Tensor]
"""Hidden and memory rows."""


class Weights(NamedTuple):
    """Holds the matrices of a binary Tree-LSTM without inputs at inner nodes.

    Args:
        leaf: Of u, i, o, for an input row.
        leaf_bias: Their bias.
        hidden: Of u, i, o and both forget gates, for the hidden rows of both children.
        bias: Their bias; both forget gates have the same.

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14.

    Example:
        >>> weights = Weights.of(NaryTreeLSTMCell(4, 3))
        >>> h, c = weights.leaves(torch.randn(2, 4))
        >>> weights.inner(torch.cat([h[:1], h[1:]], 1), c[:1], c[1:])[0].shape
        torch.Size([1, 3])
    """

    leaf: Tensor
    leaf_bias: Tensor
    hidden: Tensor
    bias: Tensor

    @classmethod
    def of(cls, cell: NaryTreeLSTMCell) -> "Weights":
        """Takes the weights of a cell; gradients reach them."""
        own = 3 * cell.out_channels
        both = torch.cat([cell.bias, cell.bias[own:]])
        return cls(cell.weight_input[:own], cell.bias[:own], cell.weight_hidden, both)

    def leaves(self, rows: Tensor) -> State:
        """Computes the states of leaves, whatever stands before the last axis."""
        u, gates = linear(rows, self.leaf, self.leaf_bias).split([self.width, 2 * self.width], -1)
        i, o = gates.sigmoid().chunk(2, -1)
        memory = i * u.tanh()
        return o * memory.tanh(), memory

    def inner(self, hidden: Tensor, left: Tensor, right: Tensor) -> State:
        """Computes the states of inner nodes.

        Args:
            hidden: Hidden rows of both children, side by side.
            left: Memory rows of the first child.
            right: Memory rows of the second child.
        """
        u, gates = linear(hidden, self.hidden, self.bias).split([self.width, 4 * self.width], -1)
        i, o, f_left, f_right = gates.sigmoid().chunk(4, -1)
        memory = i * u.tanh() + f_left * left + f_right * right
        return o * memory.tanh(), memory

    @property
    def width(self) -> int:
        """Width of a state."""
        return self.bias.size(0) // 5


class Leaf(nn.Module):
    """Computes the state of a word, with the weights of a Tree-LSTM cell.

    Args:
        cell: The cell.

    Shape:
        ``[row, in] -> (h, c)``, each ``[row, out]``.
    """

    def __init__(self, cell: NaryTreeLSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(
        self, x: Float[Tensor, "row feature"]
    ) -> tuple[Float[Tensor, "row hidden"], Float[Tensor, "row hidden"]]:
        """Computes batched rows."""
        return Weights.of(self.cell).leaves(x)


class Pair(nn.Module):
    """Computes the state of a phrase from those of its two parts.

    Args:
        cell: The cell whose weights are used.

    Shape:
        ``((h, c), (h, c)) -> (h, c)``, each ``[row, out]``.
    """

    def __init__(self, cell: NaryTreeLSTMCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, left: State, right: State) -> State:
        """Computes batched rows."""
        both = torch.cat([left[0], right[0]], 1)
        return Weights.of(self.cell).inner(both, left[1], right[1])
