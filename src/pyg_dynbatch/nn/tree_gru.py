"""A Tree-GRU cell with ordered children."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.nn.cell import RecursiveCell, States, checked_probability, dropped
from pyg_dynbatch.nn.tree_lstm import glorot_joint


class TreeGRUCell(RecursiveCell):
    r"""Computes one Tree-GRU step: a reset gate and an update gate for every child place.

    .. math::
        r_k &= \sigma(W^{(r)} x + \textstyle\sum_l U^{(r)}_{kl} h_l + b^{(r)}), \qquad
        z_k = \sigma(W^{(z)} x + \textstyle\sum_l U^{(z)}_{kl} h_l + b^{(z)}) \\
        u &= \tanh(W^{(u)} x + \textstyle\sum_k U^{(u)}_k (r_k \odot h_k) + b^{(u)}) \\
        h &= \Big(1 - \tfrac1N \textstyle\sum_k z_k\Big) \odot u
             + \tfrac1N \textstyle\sum_k z_k \odot h_k

    With one child place this is the GRU. A missing child is a row of zeros.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number N of child places.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training, drawn for
            every node.

    Shape:
        - x: ``[row, in_channels]``; each child: ``[row, out_channels]``
        - returns: ``[row, out_channels]``

    Raises:
        ValueError: If a width or the arity is below 1, or the probability outside [0, 1).

    Reference:
        GRU: Cho et al. (2014), arXiv:1406.1078, equations 5-8. Differs: gates for every child
        place as the N-ary Tree-LSTM has them (Tai et al. 2015, arXiv:1503.00075, equation 10),
        and the update averages over the places, so that the state stays within [-1, 1].

    Example:
        >>> cell, zeros = TreeGRUCell(4, 3), torch.zeros(2, 3)
        >>> cell(torch.zeros(2, 4), zeros, zeros).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int = 2,
        *,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(in_channels, out_channels, arity)
        self.state_channels = (out_channels,)
        self.recurrent_dropout = checked_probability(
            type(self).__name__, "recurrent_dropout", recurrent_dropout
        )
        # Rows of the input weight in the order r, z, u.
        self.weight_input = nn.Parameter(torch.empty(3 * out_channels, in_channels))
        self.weight_gates = nn.Parameter(
            torch.empty(2 * arity * out_channels, arity * out_channels)
        )
        self.weight_update = nn.Parameter(torch.empty(out_channels, arity * out_channels))
        self.bias = nn.Parameter(torch.empty(3 * out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws Glorot-uniform weights; biases start at 0."""
        width = self.out_channels
        glorot_joint([self.weight_input, self.weight_gates], self.weight_gates.size(0))
        glorot_joint([self.weight_update], width)
        nn.init.zeros_(self.bias)

    def project(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row projected"]:
        """Computes ``W x + b`` of r, z, u, ``[row, 3 * out_channels]``."""
        return nn.functional.linear(x, self.weight_input, self.bias)

    def no_input(self, like: Tensor) -> Float[Tensor, "one projected"]:
        """Gives the bias."""
        return self.bias[None]

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Computes the gates and the new state; see the class."""
        width = self.out_channels
        own_r, own_z, candidate = projected.split(width, 1)
        if children is None:
            # Without children the sums over z do not vanish: z depends on the input too.
            share = torch.sigmoid(own_z)
            u = dropped(candidate.tanh(), self.recurrent_dropout, self.training)
            return ((1 - share) * u,)
        (h,) = children
        gates = nn.functional.linear(h.flatten(1), self.weight_gates)
        r, z = gates.unflatten(1, (2, h.size(1), width)).unbind(1)
        r, z = torch.sigmoid(r + own_r[:, None]), torch.sigmoid(z + own_z[:, None])
        candidate = candidate + nn.functional.linear((r * h).flatten(1), self.weight_update)
        u = dropped(candidate.tanh(), self.recurrent_dropout, self.training)
        return ((1 - z.mean(1)) * u + (z * h).mean(1),)
