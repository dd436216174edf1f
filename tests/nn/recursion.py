"""Plain recursions over nodes, written from the equations of the papers, and what they need.

One matrix and one node at a time; nothing here comes from the package but the layout of the
parameters, which its comments state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer, TreeGRU, TreeRNN
from tests.core.helpers import message
from tests.strategies import Dag, trees
from tests.strategies import structures as dags_and_trees

IN, OUT = 3, 2
State = tuple[Tensor, ...]
Equation = Callable[..., State]


@dataclass(frozen=True)
class Placed:
    """A structure whose nodes have child places, some of them empty."""

    places: tuple[tuple[int | None, ...], ...]
    has_input: tuple[bool, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.places)

    @property
    def edges(self) -> list[tuple[int, int, int]]:
        """Child, parent, slot."""
        return [
            (child, parent, slot)
            for parent, below in enumerate(self.places)
            for slot, child in enumerate(below)
            if child is not None
        ]

    @property
    def edge_index(self) -> Tensor:
        pairs = [edge[:2] for edge in self.edges]
        return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).t().contiguous()

    @property
    def child_slot(self) -> Tensor:
        return torch.tensor([edge[2] for edge in self.edges], dtype=torch.long)

    @property
    def filled(self) -> Tensor:
        return torch.tensor(self.has_input)

    def schedule(self, layer: RecursiveLayer, all_inputs: bool = False) -> Levels:
        return schedule_structure(
            self.edge_index,
            self.num_nodes,
            child_slot=self.child_slot,
            arity=layer.arity,
            has_input=None if all_inputs else self.filled,
            direction=layer.direction,
        )

    def turned(self, arity: int | None) -> "Placed":
        """Parents in the places of children: what a top-down layer sees."""
        places: list[list[int | None]] = [[None] * (arity or 0) for _ in self.places]
        for child, parent, slot in self.edges:
            if arity is None:
                places[child].append(parent)
            else:
                assert places[child][slot] is None
                places[child][slot] = parent
        return Placed(tuple(map(tuple, places)), self.has_input)


def batched(structures: Sequence[Placed], layer: RecursiveLayer) -> Levels:
    """The schedule of several structures."""
    sizes = [each.num_nodes for each in structures]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return schedule_structure(
        torch.cat([s.edge_index + f for s, f in zip(structures, firsts, strict=True)], 1),
        sum(sizes),
        child_slot=torch.cat([s.child_slot for s in structures]),
        arity=layer.arity,
        has_input=torch.cat([s.filled for s in structures]),
        direction=layer.direction,
    )


@st.composite
def placed(draw: st.DrawFn, arity: int | None, only_trees: bool = False) -> Placed:
    """A structure with empty places and nodes without an input."""
    wide = arity or 3
    dag: Dag = draw(trees(8, wide) if only_trees else dags_and_trees(8, wide))
    rows: list[tuple[int | None, ...]] = []
    for children in dag.children:
        row: list[int | None] = [*children]
        if arity is not None:
            row += [None] * (arity - len(children))
            row = draw(st.permutations(row))
        rows.append(tuple(row))
    flags = draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    return Placed(tuple(rows), tuple(flags))


def whole(dag: Dag, arity: int | None = None) -> Placed:
    """A structure with inputs everywhere."""
    rows = [
        (*children, *([None] * (0 if arity is None else arity - len(children))))
        for children in dag.children
    ]
    return Placed(tuple(rows), (True,) * dag.num_nodes)


def blocks(matrix: Tensor, number: int) -> list[Tensor]:
    return list(matrix.chunk(number, 0))


def nary_lstm(layer: RecursiveLayer, x: Tensor, children: Sequence, keep: Tensor) -> State:
    """Tai et al. (2015), equations 9-14; W_f x is the same for all children."""
    cell, arity, width = layer.cell, layer.arity, layer.out_channels
    w_u, w_i, w_o, w_f = blocks(cell.weight_input, 4)
    b_u, b_i, b_o, b_f = cell.bias.chunk(4)
    rows = blocks(cell.weight_hidden, 3 + arity)
    u_of = [[block[:, width * k : width * (k + 1)] for k in range(arity)] for block in rows]
    zero = x.new_zeros(width)
    states = [(zero, zero) if child is None else child for child in children]

    def summed(gate: int) -> Tensor:
        return sum((u_of[gate][k] @ h for k, (h, _) in enumerate(states)), zero)

    i = torch.sigmoid(w_i @ x + summed(1) + b_i)
    forget = [torch.sigmoid(w_f @ x + summed(3 + k) + b_f) for k in range(arity)]
    o = torch.sigmoid(w_o @ x + summed(2) + b_o)
    u = torch.tanh(w_u @ x + summed(0) + b_u) * keep
    c = i * u + sum((f * c_k for f, (_, c_k) in zip(forget, states, strict=True)), zero)
    return o * torch.tanh(c), c


def child_sum_lstm(layer: RecursiveLayer, x: Tensor, children: Sequence, keep: Tensor) -> State:
    """Tai et al. (2015), equations 2-8."""
    cell, zero = layer.cell, x.new_zeros(layer.out_channels)
    w_u, w_i, w_o, w_f = blocks(cell.weight_input, 4)
    u_u, u_i, u_o, u_f = blocks(cell.weight_hidden, 4)
    b_u, b_i, b_o, b_f = cell.bias.chunk(4)
    total = sum((h for h, _ in children), zero)
    i = torch.sigmoid(w_i @ x + u_i @ total + b_i)
    forget = [torch.sigmoid(w_f @ x + u_f @ h + b_f) for h, _ in children]
    o = torch.sigmoid(w_o @ x + u_o @ total + b_o)
    u = torch.tanh(w_u @ x + u_u @ total + b_u) * keep
    c = i * u + sum((f * c_k for f, (_, c_k) in zip(forget, children, strict=True)), zero)
    return o * torch.tanh(c), c


def tree_gru(layer: RecursiveLayer, x: Tensor, children: Sequence, keep: Tensor) -> State:
    """The equations in the docstring of TreeGRUCell."""
    cell, arity, width = layer.cell, layer.arity, layer.out_channels
    w_r, w_z, w_u = blocks(cell.weight_input, 3)
    b_r, b_z, b_u = cell.bias.chunk(3)
    zero = x.new_zeros(width)
    states = [zero if child is None else child[0] for child in children]
    rows = blocks(cell.weight_gates, 2 * arity)

    def summed(block: Tensor, hidden: list[Tensor]) -> Tensor:
        parts = block.chunk(arity, 1)
        return sum((part @ h for part, h in zip(parts, hidden, strict=True)), zero)

    r = [torch.sigmoid(w_r @ x + summed(rows[k], states) + b_r) for k in range(arity)]
    z = [torch.sigmoid(w_z @ x + summed(rows[arity + k], states) + b_z) for k in range(arity)]
    reset = [r_k * h for r_k, h in zip(r, states, strict=True)]
    u = torch.tanh(w_u @ x + summed(cell.weight_update, reset) + b_u) * keep
    kept = sum((z_k * h for z_k, h in zip(z, states, strict=True)), zero) / arity
    return ((1 - sum(z, zero) / arity) * u + kept,)


def tree_rnn(layer: RecursiveLayer, x: Tensor, children: Sequence, keep: Tensor) -> State:
    """The equation in the docstring of TreeRNNCell."""
    cell, zero = layer.cell, x.new_zeros(layer.out_channels)
    parts = cell.weight_hidden.chunk(layer.arity, 1)
    states = [zero if child is None else child[0] for child in children]
    below = sum((part @ h for part, h in zip(parts, states, strict=True)), zero)
    return (torch.tanh(cell.weight_input @ x + below + cell.bias),)


def recurse(
    layer: RecursiveLayer,
    equation: Equation,
    structure: Placed,
    x: Tensor,
    keep: Tensor | None = None,
    weight: Tensor | None = None,
) -> State:
    """Computes node by node; a node without an input has an input of zeros.

    The state of a child, as its parent reads it, is multiplied by ``weight[child, parent]``.
    """
    if layer.direction == "top_down":
        structure = structure.turned(layer.arity)
    states: dict[int, State] = {}
    for start in range(structure.num_nodes):
        waiting = [start]
        while waiting:
            node = waiting[-1]
            below = structure.places[node]
            missing = [c for c in below if c is not None and c not in states]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if node in states:
                continue
            own = x[node] * float(structure.has_input[node])
            children = [
                None
                if child is None
                else tuple(p if weight is None else p * weight[child, node] for p in states[child])
                for child in below
            ]
            factor = x.new_ones(layer.out_channels) if keep is None else keep[node]
            states[node] = equation(layer, own, children, factor)
    in_order = [states[node] for node in range(structure.num_nodes)]
    return tuple(torch.stack(part) for part in zip(*in_order, strict=True))


KINDS: dict[str, tuple[Callable[..., RecursiveLayer], Equation]] = {
    "nary-1": (lambda **k: NaryTreeLSTM(IN, OUT, 1, **k), nary_lstm),
    "nary-2": (lambda **k: NaryTreeLSTM(IN, OUT, 2, **k), nary_lstm),
    "nary-4": (lambda **k: NaryTreeLSTM(IN, OUT, 4, **k), nary_lstm),
    "child-sum": (lambda **k: ChildSumTreeLSTM(IN, OUT, **k), child_sum_lstm),
    "gru-1": (lambda **k: TreeGRU(IN, OUT, 1, **k), tree_gru),
    "gru-3": (lambda **k: TreeGRU(IN, OUT, 3, **k), tree_gru),
    "rnn-2": (lambda **k: TreeRNN(IN, OUT, 2, **k), tree_rnn),
}
SMALL = ("nary-2", "child-sum", "gru-3", "rnn-2")


def make(kind: str, **options: object) -> RecursiveLayer:
    """Makes a layer in float64 whose biases are not zero."""
    layer = KINDS[kind][0](**options).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.7 * noise)
    return layer


def features(num_nodes: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_nodes, IN, generator=generator, dtype=torch.float64)


def gradients(layer: torch.nn.Module, x: Tensor, states: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a fixed weighting of all states, for all parameters and x; zeros if unused."""
    generator = torch.Generator().manual_seed(3)
    loss = sum(
        (torch.randn(part.shape, generator=generator, dtype=part.dtype) * part).sum()
        for part in states
    )
    leaves = [*layer.parameters(), x]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-10)


def refused(error: type[Exception], call: Callable[[], object], *parts: str) -> None:
    """The call raises an error, and its text has all of these parts."""
    text = message(error, call)
    assert all(part in text for part in parts), text
