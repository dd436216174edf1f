"""Laws of changed cells: hooks, reparametrised weights and overrides count in every batched run.

A changed cell gives what a plain recursion through its ``__call__`` gives, while it is trained.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import prune
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.core import Engine, RaggedRows, Schedule, TensorType
from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.nn import GraphedTreeLSTM, RecursiveCell, RecursiveLayer
from pyg_dynbatch.nn.tree_cells import _TreeLSTMCell
from tests.laws.cells import CELLS, IN, OUT, parts_of
from tests.nn.recursion import refused
from tests.strategies import Dag, chain

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


class Parts(RecursiveCell):
    """A cell whose weights are in submodules."""

    def __init__(self) -> None:
        super().__init__(IN, OUT, None)
        self.input, self.hidden = nn.Linear(IN, OUT), nn.Linear(OUT, OUT)

    def project(self, x: Tensor) -> Tensor:
        return self.input(x)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor, ...]:
        if children is None:
            return (projected.tanh(),)
        total = children._replace(rows=children.rows[0]).sum()
        return ((projected + self.hidden(total)).tanh(),)


MAKERS: dict[str, Callable[[], Any]] = {"parts": Parts}
MAKERS |= {n: c.make for n, c in CELLS.items() if isinstance(c.make(), RecursiveCell)}
MOST = ("parts", "nary_tree_lstm", "child_sum_tree_lstm", "dagnn", "tree_gru")


def scaled(found: Any) -> Any:
    return tree_map_only(Tensor, lambda part: 0.7 * part, found)


class Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return scaled(weight)


def to_weights(change: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module], None]:
    """Change every matrix of a cell and its submodules."""

    def apply(cell: nn.Module) -> None:
        for module in list(cell.modules()):
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight.dim() == 2:
                    change(module, name)

    return apply


def to_modules(register: str, hook: Callable[..., Any]) -> Callable[[nn.Module], None]:
    def apply(cell: nn.Module) -> None:
        for module in cell.modules():
            getattr(module, register)(hook)

    return apply


def in_class(name: str) -> Callable[[nn.Module], None]:
    def apply(cell: nn.Module) -> None:
        kind = type(cell)
        method = {name: lambda self, *given: scaled(getattr(kind, name)(self, *given))}
        cell.__class__ = type("Changed", (kind,), method)

    return apply


def on_instance(name: str) -> Callable[[nn.Module], None]:
    def apply(cell: nn.Module) -> None:
        method = getattr(cell, name)
        setattr(cell, name, lambda *given: scaled(method(*given)))

    return apply


METHODS = ("step", "project", "leaf", "no_input", "drop_candidate", "forward")
# With so many iterations, the norm does not depend on the number of calls.
SPECTRAL = {"n_power_iterations": 20}
CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "prune": to_weights(lambda m, name: prune.l1_unstructured(m, name, 0.4)),
    "old weight_norm": to_weights(lambda m, name: utils.weight_norm(m, name)),
    "weight_norm": to_weights(lambda m, name: utils.parametrizations.weight_norm(m, name)),
    "old spectral_norm": to_weights(lambda m, name: utils.spectral_norm(m, name, **SPECTRAL)),
    "spectral_norm": to_weights(
        lambda m, name: utils.parametrizations.spectral_norm(m, name, **SPECTRAL)
    ),
    "parametrize": to_weights(
        lambda m, name: utils.parametrize.register_parametrization(m, name, Scale())
    ),
    "forward hook": to_modules("register_forward_hook", lambda m, x, found: scaled(found)),
    "pre-hook": to_modules("register_forward_pre_hook", lambda m, x: (scaled(x[0]), *x[1:])),
    "backward hook": to_modules("register_full_backward_pre_hook", lambda m, grads: scaled(grads)),
    **{f"{name} in a subclass": in_class(name) for name in METHODS},
    **{f"{name} of the object": on_instance(name) for name in METHODS},
    "global hook": lambda cell: None,
}


@contextmanager
def changed(kind: str, change: str) -> Iterator[list[Any]]:
    """Two equal cells with the same change."""
    cells = []
    with ExitStack() as stack:
        if change == "global hook":
            hook: Any = lambda m, x, found: scaled(found) if m in cells else None  # noqa: E731
            stack.enter_context(register_module_forward_hook(hook))
        for _ in range(2):
            torch.manual_seed(0)
            cell = MAKERS[kind]().double()
            with torch.no_grad():
                for parameter in cell.parameters():
                    parameter.normal_(0.4, 0.15)
            CHANGES[change](cell)
            cells.append(cell)
        yield cells


def recursion(cell: Any, dag: Dag, x: Tensor, has_input: list[bool], none: Any) -> Tensor:
    """Call the cell node by node; ``none`` is the input of a node without one."""
    states: list[Any] = [None] * dag.num_nodes
    for node in dag.order:
        below = [states[child] for child in dag.children[node]]
        row = x[node][None] if has_input[node] else none if below else x.new_zeros(1, IN)
        if below and cell.arity is None:
            parts = tuple(map(torch.cat, zip(*map(parts_of, below), strict=True)))
            ids = torch.zeros(len(below), dtype=torch.long)
            below = [RaggedRows(parts if len(parts) > 1 else parts[0], ids, 1)]
        elif below:
            below += [tree_map_only(Tensor, torch.zeros_like, below[0])] * (cell.arity - len(below))
        states[node] = cell(row, *below)
    return torch.cat([parts_of(state)[0] for state in states])


def by_layer(cell: Any, dag: Dag, x: Tensor, has_input: list[bool]) -> Tensor:
    return RecursiveLayer(cell)(x, schedule=schedule_of(cell, dag, has_input))


def by_graphs(cell: Any, dag: Dag, x: Tensor, has_input: list[bool]) -> Tensor:
    schedule = schedule_of(cell, dag, has_input)
    padded = LevelBuckets.fit([schedule]).pad(schedule)
    return GraphedTreeLSTM(RecursiveLayer(cell))(x, schedule=padded)


def schedule_of(cell: Any, dag: Dag, has_input: list[bool]) -> Schedule:
    given = torch.tensor(has_input)
    return Schedule.from_structure(dag.edge_index, dag.num_nodes, arity=cell.arity, has_input=given)


def train(kind: str, change: str, run: Callable[..., Tensor]) -> None:
    """Train both cells, and compare values and gradients at every step."""
    is_chain = MAKERS[kind]().arity == 1
    dag = chain(3) if is_chain else Dag(((), (), (0, 1), (2,), (), (2, 4)))
    with changed(kind, change) as (alone, batched):
        zeros = None if "no_input" in change else torch.zeros(1, IN, dtype=torch.float64)
        optimizers = [torch.optim.SGD(cell.parameters(), 0.1) for cell in (alone, batched)]
        for number in range(3):
            has_input = [number < 2 or node % 2 == 0 for node in range(dag.num_nodes)]
            x = torch.randn(dag.num_nodes, IN, dtype=torch.float64, requires_grad=True)
            results = []
            for cell, optimizer in zip((alone, batched), optimizers, strict=True):
                optimizer.zero_grad()
                x.grad = None
                given = dag, x, has_input
                h = recursion(cell, *given, zeros) if cell is alone else run(cell, *given)
                (h * torch.linspace(-1, 2, h.numel()).view_as(h)).sum().backward()
                named = [("x", x), *cell.named_parameters()]
                grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
                results.append((h, grads))
            torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-8)
            for optimizer in optimizers:
                optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "kind", [n if n in MOST else pytest.param(n, marks=pytest.mark.long) for n in MAKERS]
)
def test_layers_are_the_recursion(kind: str, change: str) -> None:
    train(kind, change, by_layer)
    if isinstance(MAKERS[kind](), _TreeLSTMCell):
        train(kind, change, by_graphs)
