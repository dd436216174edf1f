"""The models of Fold's Table 1, batched dynamically and by hand."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from benchmarks.table1_trees import Shape
from benchmarks.tree_lstm import Weights
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.nn.cell import RecursiveCell, States
from pyg_dynbatch.nn.recursive import NaryTreeLSTM, RecursiveLayer
from pyg_dynbatch.nn.tree_cells import NaryTreeLSTMCell


class FoldCell(RecursiveCell):
    r"""Computes one step of the cell of Fold's Table 1, for two children.

    With the rows :math:`l, r` of the children and one hidden layer,

    .. math::
        f_l, f_r, i, g = \sigma, \sigma, \sigma, \tanh\,(V\,\mathrm{relu}(W [l; r] + b) + d),
        \qquad h = f_l \odot l + f_r \odot r + i \odot g

    A leaf is its input row; inner nodes have no input. Written as a user would write it: one
    method a case, nothing about levels or batches.

    Args:
        width: Width of a row.

    Shape:
        - x: ``[row, width]``; each child: ``[row, width]``
        - returns: ``[row, width]``

    Raises:
        ValueError: If the width is below 1.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, section 3.1; its published benchmark program for
        the initial weights.

    Example:
        >>> layer = RecursiveLayer(FoldCell(3))
        >>> layer(torch.randn(3, 3), torch.tensor([[0, 1], [2, 2]])).shape
        torch.Size([3, 3])
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, width, 2)
        self.state_channels = (width,)
        self.hidden = nn.Linear(2 * width, width)
        self.gates = nn.Linear(width, 4 * width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights uniformly, scaled by the width of what they multiply; no bias."""
        for layer, factor in ((self.hidden, 1.43), (self.gates, 1.0)):
            bound = factor * (3.0 / layer.in_features) ** 0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)

    def project(self, x: Float[Tensor, "row feature"]) -> Float[Tensor, "row projected"]:
        """Gives rows of width 0: inner nodes have no input."""
        return x[:, :0]

    def leaf(self, x: Float[Tensor, "row feature"]) -> States:
        """Gives the input rows."""
        return (x,)

    def step(self, projected: Float[Tensor, "row projected"], children: Any) -> States:
        """Computes the gates and the new state; see the class."""
        (rows,) = children
        gates = self.gates(torch.relu(self.hidden(rows.flatten(1))))
        f_left, f_right, i, g = gates.chunk(4, 1)
        left, right = rows.unbind(1)
        kept = torch.sigmoid(f_left) * left + torch.sigmoid(f_right) * right
        return (kept + torch.sigmoid(i) * torch.tanh(g),)


class Table1Model(nn.Module):
    """Looks leaves up in a table and carries a cell to the root of every tree.

    Args:
        cell: ``"fold"`` or ``"tai"``, the N-ary Tree-LSTM.
        width: Width of a row of the table and of a state.
        rows: Rows of the table.

    Example:
        >>> import numpy as np
        >>> model = Table1Model("fold", 3, 8)
        >>> shape = Shape.draw("random", 4, np.random.default_rng(0))
        >>> model.by_hand(shape, torch.zeros(4, 2, dtype=torch.int64)).shape
        torch.Size([2, 3])
    """

    def __init__(self, cell: str, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        nn.init.uniform_(self.table.weight)
        self.layer = (
            RecursiveLayer(FoldCell(width)) if cell == "fold" else NaryTreeLSTM(width, width)
        )

    def dynamic(self, batch: Any) -> Float[Tensor, "tree width"]:
        """Computes the roots of trees of any shapes.

        Args:
            batch: From the collater, with its schedule.
        """
        schedule = batch.schedule
        inputs = self.table(batch.token.index_select(0, schedule.input_node))
        return self.layer(inputs, batch.edge_index, schedule, nodes=batch.root_index)

    def by_hand(self, shape: Shape, token: Int[Tensor, "leaf tree"]) -> Float[Tensor, "tree width"]:
        """Computes the roots of trees that all have one shape, node by node, trees at once.

        Written out in plain torch, with the weights of the layer but none of its code. All
        leaves are looked up at once, and their gates are one product, to its advantage.

        Args:
            shape: The shape.
            token: Row of the table of each leaf.
        """
        cell, rows = self.layer.cell, self.table(token)
        if isinstance(cell, FoldCell):
            return _fold_by_hand(cell, shape, rows)
        if isinstance(cell, NaryTreeLSTMCell):
            return _tai_by_hand(cell, shape, rows)
        raise mismatch(
            TypeError,
            "Table1Model: nobody wrote this cell out by hand",
            "FoldCell or NaryTreeLSTMCell",
            type(cell).__name__,
        )


def _fold_by_hand(cell: FoldCell, shape: Shape, rows: Tensor) -> Tensor:
    states = dict(zip(shape.leaves, rows.unbind(0), strict=True))
    for node in reversed(range(len(shape.below))):
        if not shape.below[node]:
            continue
        left, right = (states.pop(child) for child in shape.below[node])
        joint = torch.cat([left, right], 1)
        hidden = torch.relu(linear(joint, cell.hidden.weight, cell.hidden.bias))
        gates = linear(hidden, cell.gates.weight, cell.gates.bias)
        f_left, f_right, i, g = gates.chunk(4, 1)
        kept = torch.sigmoid(f_left) * left + torch.sigmoid(f_right) * right
        states[node] = kept + torch.sigmoid(i) * torch.tanh(g)
    return states[0]


def _tai_by_hand(cell: NaryTreeLSTMCell, shape: Shape, rows: Tensor) -> Tensor:
    weights = Weights.of(cell)
    parts = zip(*(part.unbind(0) for part in weights.leaves(rows)), strict=True)
    states = dict(zip(shape.leaves, parts, strict=True))
    for node in reversed(range(len(shape.below))):
        if not shape.below[node]:
            continue
        (h_left, c_left), (h_right, c_right) = (states.pop(k) for k in shape.below[node])
        states[node] = weights.inner(torch.cat([h_left, h_right], 1), c_left, c_right)
    return states[0][0]
