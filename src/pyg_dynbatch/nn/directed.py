"""Messages along both directions of each bond: the layer of D-MPNN."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch_geometric.nn.inits import reset

from pyg_dynbatch.core.errors import checked_count, count_or_none
from pyg_dynbatch.nn.pairs import Pairs, check_rows, code_rows, order_rows, order_sum


class DirectedStack(nn.Module):
    r"""Pass messages along directed pairs of atoms, and sum those that arrive at each atom.

    .. math::
        h_{ij}^0 &= \mathrm{ReLU}(W_x x_i + W_e e_{ij} + b) \\
        h_{ij}^{t+1} &= \mathrm{ReLU}\big(W_x x_i + W_e e_{ij} + b +
            W_h \textstyle\sum_{k \neq j} h_{ki}^t\big) \\
        x_i' &= \mathrm{ReLU}\big(W_o [x_i, \textstyle\sum_k h_{ki}^T] + b_o\big)

    The sums run over the atoms k that are paired with i; e are the rows of pairs. All T steps share
    weights. A message does not return at once to where it came from. Self pairs carry no messages.

    Args:
        atom_in: Width of an atom row.
        pair_in: Width of a pair row.
        channels: Width of a message.
        num_modules: Number of steps T, at least 1.
        atom_out: Width of an updated atom row; ``channels`` by default.
        dropout: Probability of dropping an entry of a message while training.

    Shape:
        - x: ``[atom, atom_in]``; table: ``[code, pair_in]``, if not ``coded`` ``[pair, pair_in]``
        - returns: ``[atom, atom_out]``

    Raises:
        ValueError: If ``num_modules`` is below 1, or the rows do not fit the pairs.

    Reference:
        Yang et al. (2019), arXiv:1904.01561, equations 3-6, where the pairs are the bonds of a
        molecule. Differs: each step adds the input of the first ReLU, as in chemprop, and
        :math:`W_x` has a bias.

    Example:
        >>> stack = DirectedStack(3, 2, channels=8)
        >>> pairs = Pairs.from_codes(torch.tensor([0, 1, 0]), [2])
        >>> stack(torch.randn(2, 3), torch.eye(2), pairs).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        atom_in: int,
        pair_in: int,
        channels: int = 50,
        num_modules: int = 2,
        *,
        atom_out: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_modules = checked_count("DirectedStack: num_modules", num_modules)
        checked_count("DirectedStack: channels", channels)
        atom_out = count_or_none("DirectedStack: atom_out", atom_out) or channels
        self.lin_atom = nn.Linear(atom_in, channels)
        self.lin_pair = nn.Linear(pair_in, channels, bias=False)
        self.lin_message = nn.Linear(channels, channels, bias=False)
        self.lin_out = nn.Linear(atom_in + channels, atom_out)
        self.drop = nn.Dropout(dropout)

    def reset_parameters(self) -> None:
        """Reset all learnable parameters."""
        for child in self.children():
            reset(child)

    def forward(
        self,
        x: Float[Tensor, "atom feature"],
        table: Float[Tensor, "row channel"],
        pairs: Pairs,
        *,
        coded: bool = True,
    ) -> Float[Tensor, "atom out"]:
        """Compute the updated atom rows.

        Args:
            x: Atom rows.
            table: Features of every code of ``pairs``; of every pair if not ``coded``.
            pairs: Which atoms are paired.
            coded: Whether ``table`` has one row per code.
        """
        widths = self.lin_atom.in_features, self.lin_pair.in_features
        check_rows("DirectedStack", x, table, widths, pairs, coded)
        of_pair = self.lin_pair(table)
        of_pair = code_rows(of_pair, pairs) if coded else of_pair
        # One row per direction of each pair, [two, pair, width]; flip(0) reverses the directions.
        start = order_rows(self.lin_atom(x), pairs) + of_pair
        messages = self._sent(start, pairs)
        for _ in range(self.num_modules):
            reverse = self.lin_message(messages).flip(0)
            others = order_rows(order_sum(reverse, pairs), pairs) - reverse
            messages = self._sent(start + others.to(start.dtype), pairs)
        arrived = order_sum(messages.flip(0), pairs)
        return self.lin_out(torch.cat([x, arrived.to(x.dtype)], 1)).relu()

    def _sent(self, rows: Tensor, pairs: Pairs) -> Tensor:
        rows = self.drop(rows.relu())
        if pairs.num_entries < 2 * pairs.num_pairs:  # there are self pairs
            rows = rows.masked_fill(pairs.is_self[:, None], 0)
        return rows
