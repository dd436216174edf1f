"""Every cell that must keep the laws; a new one joins by one line in :data:`CELLS`."""

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
    NaryTreeLSTMCell,
    RecursiveCell,
    TreeGRUCell,
    TreeRNNCell,
)
from tests.strategies import Dag

IN, OUT = 4, 3


@dataclass(frozen=True)
class CellCase:
    """How to make a cell, and the form of its state."""

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
    """The smallest cell with two places and a tuple as its state."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(IN, OUT), nn.Linear(2 * OUT, OUT)

    def forward(self, x: Tensor, left: Any, right: Any) -> tuple[Tensor, Tensor]:
        c = torch.sigmoid(left[1] - 2 * right[1] + x.sum(-1))
        return torch.tanh(self.x(x) + self.h(torch.cat([left[0], right[0]], -1)) * c[:, None]), c


def recursive(make: Callable[[], RecursiveCell]) -> CellCase:
    """A cell of ``pyg_dynbatch.nn``, which says itself what its state is."""
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
}


def structure_of(dag: Dag, has_input: Tensor | None = None) -> Data:
    """A structure of the strategies as the public laws take it."""
    edges, slots = dag.edge_index, dag.child_slot
    return Data(edge_index=edges, num_nodes=dag.num_nodes, child_slot=slots, has_input=has_input)


def parts_of(rows: Any) -> tuple[Tensor, ...]:
    """The tensors of a state."""
    return rows if isinstance(rows, tuple) else (rows,)


def plain_recursion(case: CellCase, cell: nn.Module, dag: Dag, x: Tensor) -> tuple[Tensor, ...]:
    """Calls the cell node by node on single rows: no schedule, no engine, no program."""
    types = case.state if isinstance(case.state, tuple) else (case.state,)
    states: dict[int, tuple[Tensor, ...]] = {}

    def rows_of(nodes: list[int]) -> Any:
        parts = tuple(
            torch.cat([x.new_zeros(0, *t.shape), *(states[node][n] for node in nodes)])
            for n, t in enumerate(types)
        )
        return parts if isinstance(case.state, tuple) else parts[0]

    def missing() -> Any:
        parts = tuple(x.new_zeros(1, *t.shape) for t in types)
        return parts if isinstance(case.state, tuple) else parts[0]

    for node in dag.order:
        children = list(dag.children[node])
        if case.arity is None:
            segment_ids = torch.zeros(len(children), dtype=torch.int64)
            arguments = [RaggedRows(rows_of(children), segment_ids, 1)]
        else:
            arguments = [rows_of([child]) for child in children]
            arguments += [missing() for _ in range(case.arity - len(children))]
        states[node] = parts_of(cell(x[node : node + 1], *arguments))
    return tuple(
        torch.cat([states[node][n] for node in range(dag.num_nodes)]) for n in range(len(types))
    )
