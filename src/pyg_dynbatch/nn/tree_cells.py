"""Cells: N-ary and child-sum Tree-LSTM, Tree-GRU and Tree-RNN."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from pyg_dynbatch.core.errors import checked_count
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.kernels.tree_lstm import tree_lstm
from pyg_dynbatch.nn.cell import RecursiveCell, States, spread_rows


def _glorot_joint(weights: list[Tensor], fan_out: int) -> None:
    """Fill weights as slices of one matrix with Glorot's uniform bound."""
    bound = math.sqrt(6.0 / (sum(weight.size(1) for weight in weights) + fan_out))
    for weight in weights:
        nn.init.uniform_(weight, -bound, bound)


class _TreeLSTMCell(RecursiveCell):
    """What both Tree-LSTM cells share; gates are in the order u, i, o, f."""

    def __init__(
        self, width_in: int, width: int, arity: int | None, forget_bias: float, dropout: float
    ) -> None:
        super().__init__(width_in, width, arity, gates=4, recurrent_dropout=dropout)
        self.state_channels, self.forget_bias = (width, width), forget_bias
        # Rows for u, i, o and one forget gate per slot; columns for the child in each slot.
        slots = 1 if arity is None else arity
        self.weight_hidden = nn.Parameter(torch.empty((3 + slots) * width, slots * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as one Glorot-uniform matrix; biases start at 0 and forget_bias."""
        _glorot_joint([self.weight_input, self.weight_hidden], self.weight_hidden.size(0))
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.bias[3 * self.out_channels :], self.forget_bias)

    @property
    def shares_leaves(self) -> bool:
        """Whether equal leaves are computed once: unless each draws its own dropout."""
        return not (self.training and self.recurrent_dropout)

    def run_schedule(
        self,
        schedule: Levels,
        inputs: Tensor,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
    ) -> States | None:
        """Run a whole schedule in one autograd function; autocast applies to its products only."""
        if not schedule.level_sizes:
            return None
        mask = precision = None
        if not self.shares_leaves:
            mask = self.bias.new_empty(schedule.num_nodes, self.out_channels)
            mask.bernoulli_(1 - self.recurrent_dropout).div_(1 - self.recurrent_dropout)
            # Each leaf draws its own factors, so equal leaves differ.
            inputs, leaf_inverse = spread_rows(inputs, leaf_inverse, schedule), None
        device = inputs.device.type
        if torch.is_autocast_enabled(device) and self.bias.dtype != torch.float64:
            precision = torch.get_autocast_dtype(device)
        weights = self.weight_input, self.weight_hidden, self.bias
        options = {"leaf_inverse": leaf_inverse, "level_order": level_order, "precision": precision}
        return tree_lstm(schedule, inputs, weights, dropout_mask=mask, **options)


class NaryTreeLSTMCell(_TreeLSTMCell):
    r"""Compute one N-ary Tree-LSTM step: every child slot has weights and a forget gate.

    .. math::
        i &= \sigma(W^{(i)} x + \textstyle\sum_l U^{(i)}_l h_l + b^{(i)}), \quad
        o = \sigma(W^{(o)} x + \sum_l U^{(o)}_l h_l + b^{(o)}) \\
        f_k &= \sigma(W^{(f)} x + \textstyle\sum_l U^{(f)}_{kl} h_l + b^{(f)}), \quad
        u = \tanh(W^{(u)} x + \sum_l U^{(u)}_l h_l + b^{(u)}) \\
        c &= i \odot u + \textstyle\sum_k f_k \odot c_k, \qquad h = o \odot \tanh(c)

    A missing child is a state of zeros, so nodes without children need no special case.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden and of the memory row.
        arity: Number N of child slots.
        forget_bias: Initial value of the bias of the forget gates.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training.

    Shape:
        - x: ``[row, in_channels]``; each child: a pair ``(h, c)`` of ``[row, out_channels]``
        - returns: a pair ``(h, c)``, each ``[row, out_channels]``

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 9-14. Recurrent dropout:
        Semeniuta, Severyn, Barth (2016), arXiv:1603.05118, equation 8.

    Example:
        >>> cell, zeros = NaryTreeLSTMCell(4, 3), torch.zeros(2, 3)
        >>> h, c = cell(torch.zeros(2, 4), (zeros, zeros), (zeros, zeros))
        >>> h.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        arity: int = 2,
        *,
        forget_bias: float = 1.0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        checked_count(f"{type(self).__name__}: arity", arity)
        super().__init__(in_channels, out_channels, arity, forget_bias, recurrent_dropout)

    run_schedule = _TreeLSTMCell.run_schedule  # repeats the step below

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state; see the class."""
        width = self.out_channels
        gates = projected[:, : 3 * width]
        if children is not None:
            h, c = children
            hidden = functional.linear(h.flatten(1), self.weight_hidden)
            gates = gates + hidden[:, : 3 * width]
        u, i, o = gates.split(width, 1)
        memory = torch.sigmoid(i) * self.drop_candidate(u.tanh())
        if children is not None:
            forget = hidden[:, 3 * width :].unflatten(1, (h.size(1), width))
            forget = torch.sigmoid(forget + projected[:, None, 3 * width :])
            memory = memory + (forget * c).sum(1)
        return torch.sigmoid(o) * memory.tanh(), memory


class ChildSumTreeLSTMCell(_TreeLSTMCell):
    r"""Compute one child-sum Tree-LSTM step, for any number of unordered children.

    The hidden rows of the children are summed; every child has a separate forget gate:

    .. math::
        \tilde h &= \textstyle\sum_k h_k, \qquad
        i, o, u = \sigma, \sigma, \tanh\,(W x + U \tilde h + b) \\
        f_k &= \sigma(W^{(f)} x + U^{(f)} h_k + b^{(f)}), \quad
        c = i \odot u + \textstyle\sum_k f_k \odot c_k, \quad h = o \odot \tanh(c)

    A node without children sums over nothing, so leaves need no special case.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden and of the memory row.
        forget_bias: Initial value of the bias of the forget gates.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training.

    Shape:
        - x: ``[row, in_channels]``
        - children: :class:`~pyg_dynbatch.RaggedRows` of pairs ``(h, c)``,
          ``[child, out_channels]``
        - returns: a pair ``(h, c)``, each ``[row, out_channels]``

    Reference:
        Tai, Socher, Manning (2015), arXiv:1503.00075, equations 2-8. Recurrent dropout:
        Semeniuta, Severyn, Barth (2016), arXiv:1603.05118, equation 8.

    Example:
        >>> from pyg_dynbatch.core import RaggedRows
        >>> cell, rows = ChildSumTreeLSTMCell(4, 3), torch.zeros(3, 3)
        >>> children = RaggedRows((rows, rows), torch.tensor([0, 0, 1]), 2)
        >>> h, c = cell(torch.zeros(2, 4), children)
        >>> h.shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        forget_bias: float = 0.0,
        recurrent_dropout: float = 0.0,
    ) -> None:
        super().__init__(in_channels, out_channels, None, forget_bias, recurrent_dropout)

    run_schedule = _TreeLSTMCell.run_schedule  # repeats the step below

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state; see the class."""
        width = self.out_channels
        gates = projected[:, : 3 * width]
        if children is not None:
            (h, c), segment_ids = children.rows, children.segment_ids
            total = h.new_zeros(projected.size(0), width).index_add(0, segment_ids, h)
            gates = gates + functional.linear(total, self.weight_hidden[: 3 * width])
        u, i, o = gates.split(width, 1)
        memory = torch.sigmoid(i) * self.drop_candidate(u.tanh())
        if children is not None:
            own = projected[:, 3 * width :].index_select(0, segment_ids)
            forget = own + functional.linear(h, self.weight_hidden[3 * width :])
            kept = torch.sigmoid(forget) * c
            memory = memory.to(kept.dtype).index_add(0, segment_ids, kept)
        return torch.sigmoid(o) * memory.tanh(), memory


class TreeRNNCell(RecursiveCell):
    r"""Compute :math:`h = \tanh(W x + \sum_k U_k h_k + b)`.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number of child slots; a missing child is a row of zeros.

    Shape:
        - x: ``[row, in_channels]``; each child: ``[row, out_channels]``
        - returns: ``[row, out_channels]``

    Reference:
        Socher, Lin, Ng, Manning (2011), "Parsing natural scenes and natural language with
        recursive neural networks", equation 2. Differs: inner nodes may have an input too.

    Example:
        >>> cell, zeros = TreeRNNCell(4, 3), torch.zeros(2, 3)
        >>> cell(torch.zeros(2, 4), zeros, zeros).shape
        torch.Size([2, 3])
    """

    def __init__(self, in_channels: int, out_channels: int, arity: int = 2) -> None:
        checked_count(f"{type(self).__name__}: arity", arity)
        super().__init__(in_channels, out_channels, arity, gates=1)
        self.weight_hidden = nn.Parameter(torch.empty(out_channels, arity * out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as one Glorot-uniform matrix; the bias starts at 0."""
        _glorot_joint([self.weight_input, self.weight_hidden], self.out_channels)
        nn.init.zeros_(self.bias)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Add the children and apply tanh; see the class."""
        if children is not None:
            (h,) = children
            projected = projected + functional.linear(h.flatten(1), self.weight_hidden)
        return (torch.tanh(projected),)


class TreeGRUCell(RecursiveCell):
    r"""Compute one Tree-GRU step: a reset gate and an update gate for every child slot.

    .. math::
        r_k &= \sigma(W^{(r)} x + \textstyle\sum_l U^{(r)}_{kl} h_l + b^{(r)}), \qquad
        z_k = \sigma(W^{(z)} x + \textstyle\sum_l U^{(z)}_{kl} h_l + b^{(z)}) \\
        u &= \tanh(W^{(u)} x + \textstyle\sum_k U^{(u)}_k (r_k \odot h_k) + b^{(u)}) \\
        h &= \Big(1 - \tfrac1N \textstyle\sum_k z_k\Big) \odot u
             + \tfrac1N \textstyle\sum_k z_k \odot h_k

    With one child slot this is the GRU. A missing child is a row of zeros.

    Args:
        in_channels: Width of an input row.
        out_channels: Width of the hidden row.
        arity: Number N of child slots.
        recurrent_dropout: Probability of dropping an entry of ``u`` while training.

    Shape:
        - x: ``[row, in_channels]``; each child: ``[row, out_channels]``
        - returns: ``[row, out_channels]``

    Reference:
        GRU: Cho et al. (2014), arXiv:1406.1078, equations 5-8. Differs: gates for every child
        slot as the N-ary Tree-LSTM has them (Tai et al. 2015, arXiv:1503.00075, equation 10),
        and the update averages over the slots, so that the state stays within [-1, 1].

    Example:
        >>> cell, zeros = TreeGRUCell(4, 3), torch.zeros(2, 3)
        >>> cell(torch.zeros(2, 4), zeros, zeros).shape
        torch.Size([2, 3])
    """

    def __init__(
        self, in_channels: int, out_channels: int, arity: int = 2, *, recurrent_dropout: float = 0.0
    ) -> None:
        checked_count(f"{type(self).__name__}: arity", arity)
        # W x + b in the order r, z, u.
        super().__init__(
            in_channels, out_channels, arity, gates=3, recurrent_dropout=recurrent_dropout
        )
        width = arity * out_channels
        self.weight_gates = nn.Parameter(torch.empty(2 * width, width))
        self.weight_update = nn.Parameter(torch.empty(out_channels, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw Glorot-uniform weights; biases start at 0."""
        width = self.out_channels
        _glorot_joint([self.weight_input, self.weight_gates], self.weight_gates.size(0))
        _glorot_joint([self.weight_update], width)
        nn.init.zeros_(self.bias)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Compute the gates and the new state; see the class."""
        width = self.out_channels
        own_r, own_z, candidate = projected.split(width, 1)
        if children is None:
            # Without children the sums over z do not vanish: z depends on the input too.
            share = torch.sigmoid(own_z)
            u = self.drop_candidate(candidate.tanh())
            return ((1 - share) * u,)
        (h,) = children
        gates = functional.linear(h.flatten(1), self.weight_gates)
        r, z = gates.unflatten(1, (2, h.size(1), width)).unbind(1)
        r, z = torch.sigmoid(r + own_r[:, None]), torch.sigmoid(z + own_z[:, None])
        candidate = candidate + functional.linear((r * h).flatten(1), self.weight_update)
        u = self.drop_candidate(candidate.tanh())
        return ((1 - z.mean(1)) * u + (z * h).mean(1),)
