"""A recursive cell of a single layer with ordered children."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.nn.cell import RecursiveCell, States
from pyg_dynbatch.nn.tree_lstm import glorot_joint


class TreeRNNCell(RecursiveCell):
    r"""Computes :math:`h = \tanh(W x + \sum_k U_k h_k + b)`.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child places; a missing child is a row of zeros.

    Shape:
        - x: ``[row, in_channels]``; each child: ``[row, out_channels]``
        - returns: ``[row, out_channels]``

    Raises:
        ValueError: If a width or the arity is below 1.

    Reference:
        Socher, Lin, Ng, Manning (2011), "Parsing natural scenes and natural language with
        recursive neural networks", equation 2. Differs: a node may have an input of its own.

    Example:
        >>> cell, zeros = TreeRNNCell(4, 3), torch.zeros(2, 3)
        >>> cell(torch.zeros(2, 4), zeros, zeros).shape
        torch.Size([2, 3])
    """

    def __init__(self, in_channels: int, out_channels: int, arity: int = 2) -> None:
        super().__init__(in_channels, out_channels, arity)
        self.state_channels = (out_channels,)
        self.weight_input = nn.Parameter(torch.empty(out_channels, in_channels))
        self.weight_hidden = nn.Parameter(torch.empty(out_channels, arity * out_channels))
        self.bias = nn.Parameter(torch.empty(out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights as one Glorot-uniform matrix; the bias starts at 0."""
        glorot_joint([self.weight_input, self.weight_hidden], self.out_channels)
        nn.init.zeros_(self.bias)

    def project(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row projected"]:
        """Computes ``W x + b``."""
        return nn.functional.linear(x, self.weight_input, self.bias)

    def no_input(self, like: Tensor) -> Float[Tensor, "one projected"]:
        """Gives the bias."""
        return self.bias[None]

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Adds the children and squashes; see the class."""
        if children is not None:
            (h,) = children
            projected = projected + nn.functional.linear(h.flatten(1), self.weight_hidden)
        return (torch.tanh(projected),)
