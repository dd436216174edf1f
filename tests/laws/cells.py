"""Every cell that must keep the laws; add a new one with one line in :data:`CELLS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch.core import RaggedRows, TensorType
from pyg_dynbatch.core.types import RowType
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


@dataclass(frozen=True)
class CellCase:
    """How to create a cell, and the type of its state."""

    make: Callable[[], nn.Module]
    state: RowType
    arity: int | None


class Ragged(nn.Module):
    """The smallest cell with any number of children."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN, OUT)

    def forward(self, x: Tensor, children: RaggedRows) -> Tensor:
        return torch.tanh(self.linear(x) + children.sum())


class Pair(nn.Module):
    """The smallest cell with two child slots and a tuple as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(IN, OUT), nn.Linear(2 * OUT, OUT)

    def forward(self, x: Tensor, left: Any, right: Any) -> tuple[Tensor, Tensor]:
        c = torch.sigmoid(left[1] - 2 * right[1] + x.sum(-1))
        return torch.tanh(self.x(x) + self.h(torch.cat([left[0], right[0]], -1)) * c[:, None]), c


def recursive(make: Callable[[], RecursiveCell]) -> CellCase:
    """Return the case of a cell of ``pyg_dynbatch.nn``, which knows the type of its state."""
    cell = make()
    parts = cell.state_type
    return CellCase(make, parts if len(parts) > 1 else parts[0], cell.arity)


CELLS: dict[str, CellCase] = {
    "ragged": CellCase(Ragged, TensorType((OUT,)), None),
    "pair": CellCase(Pair, (TensorType((OUT,)), TensorType(())), 2),
    "tree_rnn": recursive(lambda: TreeRNNCell(IN, OUT)),
    "tree_gru": recursive(lambda: TreeGRUCell(IN, OUT)),
    "tree_gru_3": recursive(lambda: TreeGRUCell(IN, OUT, 3)),
    "nary_tree_lstm": recursive(lambda: NaryTreeLSTMCell(IN, OUT)),
    "nary_tree_lstm_1": recursive(lambda: NaryTreeLSTMCell(IN, OUT, 1)),
    "nary_tree_lstm_3": recursive(lambda: NaryTreeLSTMCell(IN, OUT, 3)),
    "child_sum_tree_lstm": recursive(lambda: ChildSumTreeLSTMCell(IN, OUT)),
    "dagnn": recursive(lambda: DAGNNCell(IN, OUT)),
}


def structure_of(dag: Dag, has_input: Tensor | None = None) -> Data:
    """Convert a structure of the strategies to PyG data, as the public laws take it."""
    edges, slots = dag.edge_index, dag.child_slot
    return Data(edge_index=edges, num_nodes=dag.num_nodes, child_slot=slots, has_input=has_input)


def parts_of(state: Any) -> tuple[Any, ...]:
    """Return the parts of a state, or of its type, as a tuple."""
    return state if isinstance(state, tuple) else (state,)


def plain_recursion(case: CellCase, cell: nn.Module, dag: Dag, x: Tensor) -> tuple[Tensor, ...]:
    """Call the cell node by node on single rows, without schedule, engine or recording."""
    types = parts_of(case.state)
    states: dict[int, tuple[Tensor, ...]] = {}

    def rows_of(nodes: list[int], missing: int = 0) -> Any:
        parts = tuple(
            torch.cat([x.new_zeros(missing, *t.shape), *(states[node][n] for node in nodes)])
            for n, t in enumerate(types)
        )
        return parts if isinstance(case.state, tuple) else parts[0]

    for node in dag.order:
        children = list(dag.children[node])
        if case.arity is None:
            segment_ids = torch.zeros(len(children), dtype=torch.int64)
            arguments = [RaggedRows(rows_of(children), segment_ids, 1)]
        else:
            arguments = [rows_of([child]) for child in children]
            arguments += [rows_of([], missing=1)] * (case.arity - len(children))
        states[node] = parts_of(cell(x[node : node + 1], *arguments))
    return tuple(
        torch.cat([states[node][n] for node in range(dag.num_nodes)]) for n in range(len(types))
    )
