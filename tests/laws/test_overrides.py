"""Law of changed cells: hooks, reparametrised weights and overrides count in every batched run.

A changed cell gives what a plain recursion through its ``__call__`` gives, while it is trained.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

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
        self.input, self.hidden = nn.Linear(IN, OUT), nn.Linear(OUT, OUT)

    def project(self, x: Tensor) -> Tensor:
        return self.input(x)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor, ...]:
        if children is None:
            return (projected.tanh(),)
        total = children._replace(rows=children.rows[0]).sum()
        return ((projected + self.hidden(total)).tanh(),)


MAKERS: dict[str, Callable[[], RecursiveCell]] = {"parts": Parts}
MAKERS |= {name: make for name, make in CELLS.items() if name not in ("ragged", "pair")}
MOST = ("parts", "nary_tree_lstm", "dagnn", "tree_gru")
FEW = ("old weight_norm", "forward hook", "step of the object")


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


class Recursion(nn.Module):
    """Call a cell node by node; ``none`` is the input of a node without one."""

    def __init__(self, cell: Any, none: Tensor | None) -> None:
        super().__init__()
        self.cell, self.none = cell, none

    def forward(self, given: tuple[Dag, Tensor, list[bool]]) -> Tensor:
        (dag, x, has_input), arity, states = given, self.cell.arity, {}
        for node in dag.order:
            below: list[Any] = [states[child] for child in dag.children[node]]
            row = x[node] if has_input[node] else self.none if below else x.new_zeros(IN)
            if below:
                below = [below] if arity is None else below + [None] * (arity - len(below))
            states[node] = self.cell(row, *below)
        return torch.stack([parts_of(states[node])[0] for node in range(dag.num_nodes)])


def by_layer(plain: Recursion, dag: Dag, x: Tensor, has_input: list[bool]) -> Tensor:
    return RecursiveLayer(plain.cell)(x, schedule=schedule_of(plain.cell, dag, has_input))


def by_autobatch(plain: Recursion, *given: Any) -> Tensor:
    if "batched" not in vars(plain):
        vars(plain)["batched"] = autobatch(plain)
    return vars(plain)["batched"]([given])[0]


def schedule_of(cell: Any, dag: Dag, has_input: list[bool]) -> Levels:
    given = torch.tensor(has_input)
    return schedule_structure(dag.edge_index, dag.num_nodes, arity=cell.arity, has_input=given)


def train(kind: str, change: str, run: Callable[..., Tensor]) -> None:
    """Train two equal models, and compare values and gradients at every step."""
    is_chain = MAKERS[kind]().arity == 1
    dag = chain(3) if is_chain else Dag(((), (), (0, 1), (2,), (), (2, 4)))
    with changed(kind, change) as cells:
        none = None if "no_input" in change else torch.zeros(IN, dtype=torch.float64)
        models = [Recursion(cell, none) for cell in cells]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for number in range(3):
            has_input = [number < 2 or node % 2 == 0 for node in range(dag.num_nodes)]
            x = torch.randn(dag.num_nodes, IN, dtype=torch.float64, requires_grad=True)
            results = []
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                x.grad = None
                given = dag, x, has_input
                h = model(given) if model is models[0] else run(model, *given)
                (h * torch.linspace(-1, 2, h.numel()).view_as(h)).sum().backward()
                named = [("x", x), *model.named_parameters()]
                grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}
                results.append((h, grads))
            torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-8)
            for optimizer in optimizers:
                optimizer.step()


def cases(whole: str, *kinds: str) -> list[Any]:
    """List cells with their changes; all of one cell and a few of most others run every time."""
    return [
        pytest.param(kind, change, marks=[] if is_quick else pytest.mark.long)
        for kind in dict.fromkeys((*filter(None, [whole]), *kinds))
        for change in CHANGES
        if change not in OVERRIDES or hasattr(MAKERS[kind](), change.split()[0])
        for is_quick in [kind == whole or (kind in MOST and change in FEW)]
    ]


@pytest.mark.parametrize(("kind", "change"), cases("child_sum_tree_lstm", *MAKERS))
def test_layers_are_the_recursion(kind: str, change: str) -> None:
    train(kind, change, by_layer)


@pytest.mark.parametrize(("kind", "change"), cases("", "parts", "nary_tree_lstm"))
def test_autobatch_is_the_recursion(kind: str, change: str) -> None:
    train(kind, change, by_autobatch)


def test_hooks_and_a_different_start_row_are_refused() -> None:
    """A call cannot pass the row of a node without an input."""
    with changed("child_sum_tree_lstm", "no_input of the object") as (cell, _):
        cell.register_forward_hook(lambda *_: None)
        schedule = schedule_of(cell, chain(3), [True, False, True])
        x = torch.randn(3, IN, dtype=torch.float64)
        layer = RecursiveLayer(cell)
        refused(ValueError, lambda: layer(x, schedule=schedule), "overrides no_input", "has hooks")


OF_PYG = sorted(set(dir(MessagePassing)) - set(dir(nn.Module)))


@pytest.mark.parametrize("method", [name for name in OF_PYG if name.startswith("register")])
def test_hooks_of_message_passing_are_refused(method: str) -> None:
    dag, x = chain(3), torch.randn(3, IN)
    layers = [RecursiveLayer(MAKERS[kind]()) for kind in MAKERS]
    for layer in layers:
        schedule = schedule_of(layer.cell, dag, [True] * 3)
        before = layer(x, schedule=schedule)
        handle = getattr(layer, method)(lambda *_: None)
        refused(ValueError, lambda: layer(x, schedule=schedule), method)  # noqa: B023
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
