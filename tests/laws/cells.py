"""Every cell that must keep the laws; add a new one with one line in :data:`CELLS`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch.core import RaggedRows
from pyg_dynbatch.nn import (
    ChildSumTreeLSTMCell,
    DAGNNCell,
    NaryTreeLSTMCell,
    RecursiveCell,
    TreeGRUCell,
    TreeRNNCell,
)
from tests.strategies import Dag

IN, OUT = 4, 3


class Ragged(RecursiveCell):
    """The smallest cell with any number of children."""

    def __init__(self) -> None:
        super().__init__(IN, OUT, arity=None)
        self.linear = nn.Linear(IN, OUT)

    def project(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor]:
        if children is None:
            return (torch.tanh(projected),)
        (total,) = children.sum()
        return (torch.tanh(projected + total),)


class Pair(RecursiveCell):
    """The smallest cell with two child slots and a state of several parts."""

    def __init__(self) -> None:
        super().__init__(IN, OUT, arity=2)
        self.state_channels = (OUT, 1)
        self.x = nn.Linear(IN, OUT)
        self.h = nn.Linear(2 * OUT, OUT)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor, Tensor]:
        if children is None:
            rows = projected.size(0)
            children = projected.new_zeros(rows, 2, OUT), projected.new_zeros(rows, 2, 1)
        h, c = children
        gate = torch.sigmoid(c[:, 0] - 2 * c[:, 1] + projected.sum(-1, keepdim=True))
        return torch.tanh(self.x(projected) + self.h(h.flatten(1)) * gate), gate


CELLS: dict[str, Callable[[], RecursiveCell]] = {
    "ragged": Ragged,
    "pair": Pair,
    "tree_rnn": lambda: TreeRNNCell(IN, OUT),
    "tree_gru": lambda: TreeGRUCell(IN, OUT),
    "tree_gru_3": lambda: TreeGRUCell(IN, OUT, 3),
    "nary_tree_lstm": lambda: NaryTreeLSTMCell(IN, OUT),
    "nary_tree_lstm_1": lambda: NaryTreeLSTMCell(IN, OUT, 1),
    "nary_tree_lstm_3": lambda: NaryTreeLSTMCell(IN, OUT, 3),
    "child_sum_tree_lstm": lambda: ChildSumTreeLSTMCell(IN, OUT),
    "dagnn": lambda: DAGNNCell(IN, OUT),
}


def structure_of(dag: Dag, has_input: Tensor | None = None) -> Data:
    """Convert a structure of the strategies to PyG data, as the public laws take it."""
    edges, slots = dag.edge_index, dag.child_slot
    return Data(edge_index=edges, num_nodes=dag.num_nodes, child_slot=slots, has_input=has_input)


def parts_of(state: Any) -> tuple[Any, ...]:
    """Return the parts of a state as a tuple."""
    return state if isinstance(state, tuple) else (state,)


def plain_recursion(cell: RecursiveCell, dag: Dag, x: Tensor) -> tuple[Tensor, ...]:
    """Call the cell node by node on single rows, without schedule, engine or recording."""
    zeros = tuple(x.new_zeros(1, width) for width in cell.state_channels)
    states: dict[int, tuple[Tensor, ...]] = {}
    for node in dag.order:
        children = [states[child] for child in dag.children[node]]
        if cell.arity is None:
            arguments: list[Any] = [ragged(children, zeros)]
        else:
            arguments = [*children, *[zeros] * (cell.arity - len(children))]
        states[node] = parts_of(cell(x[node : node + 1], *arguments))
    in_order = [states[node] for node in range(dag.num_nodes)]
    return tuple(torch.cat(part) for part in zip(*in_order, strict=True))


def ragged(children: list[tuple[Tensor, ...]], zeros: tuple[Tensor, ...]) -> RaggedRows:
    """Pass all children, of which there may be none, in one argument."""
    no_rows = tuple(part[:0] for part in zeros)
    rows = tuple(torch.cat(part) for part in zip(no_rows, *children, strict=True))
    return RaggedRows(rows, torch.zeros(len(children), dtype=torch.int64), num_calls=1)
