"""Law of changed cells: hooks, reparametrised weights and overrides count in every batched run.

A changed cell gives what a plain recursion through its ``__call__`` gives, while it is trained.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch_geometric.nn import MessagePassing

from pyg_dynbatch import blocks as td
from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer
from tests.laws.cells import CELLS, IN, OUT, parts_of
from tests.laws.changes import CHANGES, OVERRIDES, scaled
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
        self.input = nn.Linear(IN, OUT)
        self.hidden = nn.Linear(OUT, OUT)

    def project(self, x: Tensor) -> Tensor:
        return self.input(x)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor, ...]:
        if children is None:
            return (projected.tanh(),)
        total = children._replace(rows=children.rows[0]).sum()
        return ((projected + self.hidden(total)).tanh(),)


MAKERS: dict[str, Callable[[], RecursiveCell]] = {"parts": Parts}
MAKERS |= {name: make for name, make in CELLS.items() if name not in ("ragged", "pair")}


def cell_with(kind: str, change: str) -> RecursiveCell:
    torch.manual_seed(0)
    cell = MAKERS[kind]().double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(0.4, 0.15)
    CHANGES[change](cell)
    return cell


@contextmanager
def equal_cells(kind: str, change: str) -> Iterator[list[RecursiveCell]]:
    """Two equal cells with the same change, which ends with the context if it is of all modules."""
    cells = [cell_with(kind, change) for _ in range(2)]
    if change != "global hook":
        yield cells
        return
    handle = register_module_forward_hook(
        lambda module, arguments, result: scaled(result) if module in cells else None
    )
    try:
        yield cells
    finally:
        handle.remove()


class Example(NamedTuple):
    """A structure, its rows, and which nodes have one of their own."""

    dag: Dag
    x: Tensor
    has_input: list[bool]


class Recursion(nn.Module):
    """Call a cell node by node; ``none`` is the input of an inner node without one."""

    def __init__(self, cell: Any, none: Tensor | None) -> None:
        super().__init__()
        self.cell, self.none = cell, none

    def forward(self, example: Example) -> Tensor:
        dag = example.dag
        states: dict[int, Any] = {}
        for node in dag.order:
            children = [states[child] for child in dag.children[node]]
            row = self._row(example, node, is_leaf=not children)
            states[node] = self.cell(row, *self._arguments(children))
        return torch.stack([parts_of(states[node])[0] for node in range(dag.num_nodes)])

    def _row(self, example: Example, node: int, is_leaf: bool) -> Tensor | None:
        if example.has_input[node]:
            return example.x[node]
        return example.x.new_zeros(IN) if is_leaf else self.none

    def _arguments(self, children: list[Any]) -> list[Any]:
        if not children:
            return []
        if self.cell.arity is None:
            return [children]
        return children + [None] * (self.cell.arity - len(children))


Run = Callable[[Example], Tensor]


def by_layer(plain: Recursion) -> Run:
    layer = RecursiveLayer(plain.cell)
    return lambda example: layer(example.x, schedule=schedule_of(plain.cell, example))


def by_autobatch(plain: Recursion) -> Run:
    batched = autobatch(plain)
    return lambda example: batched([example])[0]


def schedule_of(cell: RecursiveCell, example: Example) -> Levels:
    return schedule_structure(
        example.dag.edge_index,
        example.dag.num_nodes,
        arity=cell.arity,
        has_input=torch.tensor(example.has_input),
    )


def values_and_gradients(
    model: Recursion, run: Run, example: Example
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a model in some way, and leave the gradients of a weighted sum of its states."""
    model.zero_grad()
    example.x.grad = None
    states = run(example)
    (states * torch.linspace(-1, 2, states.numel()).view_as(states)).sum().backward()
    leaves = {"x": example.x, **dict(model.named_parameters())}
    gradients = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    return states, gradients


def check_training(kind: str, change: str, batched_by: Callable[[Recursion], Run]) -> None:
    """Train two equal models, and compare values and gradients at every step."""
    is_chain = MAKERS[kind]().arity == 1
    dag = chain(3) if is_chain else Dag(((), (), (0, 1), (2,), (), (2, 4)))
    none = None if "no_input" in change else torch.zeros(IN, dtype=torch.float64)
    with equal_cells(kind, change) as cells:
        plain, model = [Recursion(cell, none) for cell in cells]
        batched = batched_by(model)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, model)]
        for step in range(3):
            has_input = [step < 2 or node % 2 == 0 for node in range(dag.num_nodes)]
            x = torch.randn(dag.num_nodes, IN, dtype=torch.float64, requires_grad=True)
            example = Example(dag, x, has_input)
            expected = values_and_gradients(plain, plain, example)
            got = values_and_gradients(model, batched, example)
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)
            for optimizer in optimizers:
                optimizer.step()


# Of most cells, a few changes run every time; of one cell, all.
MOST = ("parts", "nary_tree_lstm", "dagnn", "tree_gru")
FEW = ("old weight_norm", "forward hook", "step of the object")


def changes_of(kind: str) -> list[str]:
    """List the changes that a cell can have: it may have no such method to override."""
    cell = MAKERS[kind]()
    return [name for name in CHANGES if name not in OVERRIDES or hasattr(cell, name.split()[0])]


def cases(kinds: Iterable[str], whole: str | None = None) -> list[Any]:
    """List cells with their changes; all of the cell ``whole`` run every time."""
    found = []
    for kind in kinds:
        for change in changes_of(kind):
            is_quick = kind == whole or (kind in MOST and change in FEW)
            found.append(pytest.param(kind, change, marks=[] if is_quick else pytest.mark.long))
    return found


@pytest.mark.parametrize(("kind", "change"), cases(MAKERS, whole="child_sum_tree_lstm"))
def test_layers_are_the_recursion(kind: str, change: str) -> None:
    check_training(kind, change, by_layer)


@pytest.mark.parametrize(("kind", "change"), cases(["parts", "nary_tree_lstm"]))
def test_autobatch_is_the_recursion(kind: str, change: str) -> None:
    check_training(kind, change, by_autobatch)


def test_hooks_and_a_different_start_row_are_refused() -> None:
    """A call cannot pass the row of a node without an input."""
    cell = cell_with("child_sum_tree_lstm", "no_input of the object")
    cell.register_forward_hook(lambda *_: None)
    x = torch.randn(3, IN, dtype=torch.float64)
    schedule = schedule_of(cell, Example(chain(3), x, [True, False, True]))
    layer = RecursiveLayer(cell)
    refused(ValueError, lambda: layer(x, schedule=schedule), "overrides no_input", "has hooks")


OF_PYG = sorted(set(dir(MessagePassing)) - set(dir(nn.Module)))


@pytest.mark.parametrize("method", [name for name in OF_PYG if name.startswith("register")])
@pytest.mark.parametrize("kind", MAKERS)
def test_hooks_of_message_passing_are_refused(kind: str, method: str) -> None:
    layer = RecursiveLayer(MAKERS[kind]())
    x = torch.randn(3, IN)
    schedule = schedule_of(layer.cell, Example(chain(3), x, [True] * 3))
    before = layer(x, schedule=schedule)
    handle = getattr(layer, method)(lambda *_: None)
    refused(ValueError, lambda: layer(x, schedule=schedule), method)
    handle.remove()
    torch.testing.assert_close(layer(x, schedule=schedule), before)


def test_hooks_of_layers_in_blocks_count_when_they_come_after_compiling() -> None:
    layer = nn.Linear(5, 4)
    rows = {"a": td.Vector(3) >> td.Broadcast(), "k": td.Map(td.Vector(2))}
    model = td.Compiler(rows >> td.ZipWith(td.Concat() >> layer) >> td.Sum())
    query = {"a": [1, 2, 3], "k": [[1, 2], [3, 4]]}
    before = model([query]).output
    layer.register_forward_hook(lambda module, arguments, found: 2 * found)
    torch.testing.assert_close(model([query]).output, 2 * before)
