"""DAGNN against a recursion written from the equations of its paper, and its laws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from pyg_dynbatch.core import RaggedRows
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import DAGNN, DAGNNCell, RecursiveLayer
from tests.core.helpers import refuses
from tests.strategies import Dag, batches, dags, diamond, few, wide

IN, HIDDEN = 3, 4


def model_of(**options: Any) -> DAGNN:
    torch.manual_seed(0)
    model = DAGNN(IN, HIDDEN, 2, **options).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention"):
                parameter.mul_(4)  # far from the mean of all predecessors
    return model


def inputs_of(dag: Dag, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dag.num_nodes, IN, dtype=torch.float64, generator=generator)


def node_by_node(model: DAGNN, dag: Dag, x: Tensor) -> tuple[Tensor, Tensor]:
    """Embed one graph and its nodes, one node at a time."""
    pooled, of_nodes = [], []
    for number, layers in enumerate(model.layers):
        before = dag.parents if number else dag.children
        order = dag.order[::-1] if number else dag.order
        rows = [list(x)]
        for layer in layers:
            rows.append(one_layer(layer.cell, rows[-1], before, order))
        every = [torch.cat([part[v] for part in rows]) for v in range(dag.num_nodes)]
        used = {u for below in before for u in below}
        last = [every[v] for v in range(dag.num_nodes) if v not in used]
        pooled.append(torch.stack(last).max(0).values)
        of_nodes.append(torch.stack(every))
    return torch.cat(pooled), torch.cat(of_nodes, 1)


def one_layer(cell: DAGNNCell, x: list[Tensor], before: Any, order: list[int]) -> list[Tensor]:
    """The paper's attention and torch's own GRU cell."""
    done: dict[int, Tensor] = {}
    gru = cell.weight_input, cell.weight_hidden, cell.bias, cell.bias_hidden
    for v in order:
        message = cell.bias.new_zeros(cell.out_channels)
        if before[v]:
            h = torch.stack([done[u] for u in before[v]])
            message = torch.softmax(h @ cell.attention, 0) @ h
        done[v] = torch.gru_cell(x[v][None], message[None], *gru)[0]
    return [done[v] for v in range(len(done))]


def gradients(rows: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 2, rows.numel(), dtype=rows.dtype).view_as(rows)
    return list(torch.autograd.grad((rows * weight).sum(), leaves, materialize_grads=True))


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("both", (False, True))
@few(10)
@given(dag=dags(10, 4, repeats=True))
def test_equals_the_recursion_node_by_node(both: bool, dag: Dag) -> None:
    model, x = model_of(bidirectional=both), inputs_of(dag).requires_grad_()
    leaves = [x, *model.parameters()]
    for mine, number in ((model(x, dag.edge_index), 0), (model.embed(x, dag.edge_index), 1)):
        wanted = node_by_node(model, dag, x)[number].view_as(mine)
        same(mine, wanted)
        same(gradients(mine, leaves), gradients(wanted, leaves))
    with torch.no_grad():
        same(model.embed(x, dag.edge_index), mine)


@few(5)
@given(graphs=batches(dags(8, 3), 4))
def test_a_batch_equals_its_graphs_one_by_one(graphs: list[Dag]) -> None:
    model = model_of()
    data = [DynTreeData(g.edge_index, x=inputs_of(g, n)) for n, g in enumerate(graphs)]
    batch = next(iter(DataLoader(data, batch_size=len(data), direction="both")))
    schedules = {"schedule": batch.schedule, "schedule_down": batch.schedule_down}
    together = model(batch.x, batch.edge_index, batch.batch, **schedules)
    alone = torch.cat([model(one.x, one.edge_index) for one in data])
    same(together, alone)
    leaves = list(model.parameters())
    same(gradients(together, leaves), gradients(alone, leaves))
    nodes = model.embed(batch.x, batch.edge_index, **schedules)
    same(nodes, torch.cat([model.embed(one.x, one.edge_index) for one in data]))
    derived = model(batch.x, batch.edge_index, batch.batch, batch_size=len(data) + 1)
    same(derived[:-1], together)


def test_of_scores_a_thousand_apart_the_largest_counts_alone() -> None:
    cell, x = DAGNNCell(IN, 2), torch.randn(1, IN)
    h = torch.tensor([[-1.0, 0.5], [1.0, 0.2], [-0.9, 0.1]])
    with torch.no_grad():
        cell.attention.copy_(torch.tensor([1000.0, 0.0]))
    gru = cell.weight_input, cell.weight_hidden, cell.bias, cell.bias_hidden
    found = cell(x, RaggedRows(h, torch.zeros(3, dtype=torch.long), 1))
    torch.testing.assert_close(found, torch.gru_cell(x, h[1:2], *gru))
    model, dag = model_of(), wide(40)
    x = inputs_of(dag).requires_grad_()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention"):
                parameter.mul_(1e4)
    leaves, mine = [x, *model.parameters()], model.embed(x, dag.edge_index)
    wanted = node_by_node(model, dag, x)[1]
    same(mine, wanted)
    same(gradients(mine, leaves), gradients(wanted, leaves))


def test_half_precision_is_added_up_in_single_precision() -> None:
    torch.manual_seed(0)
    cell, size = DAGNNCell(IN, HIDDEN).bfloat16(), 600
    ids = torch.zeros(size, dtype=torch.long)
    # Each node reads the one before and the first, whose gradient is a sum over all levels.
    dag = Dag(((), (0,), *((0, node - 1) for node in range(2, size))))

    def of_cell(x: Tensor) -> Tensor:
        return cell(x[:1], RaggedRows(x[:, :1].expand(-1, HIDDEN), ids, 1))

    def of_layer(x: Tensor) -> Tensor:
        return RecursiveLayer(cell)(x, dag.edge_index)

    given = inputs_of(dag).bfloat16()
    for function in (of_cell, of_layer):
        results = []
        for dtype in (torch.bfloat16, torch.float32):
            cell.to(dtype)
            x = given.to(dtype, copy=True).requires_grad_()
            found = function(x)
            results.append([found, *torch.autograd.grad(found.sum(), x)])
        for one, other in zip(*results, strict=True):
            assert (one.float() - other).abs().max() < 0.05 * other.abs().max()


MODEL, X, EDGES = DAGNN(IN, HIDDEN, 2), torch.randn(4, IN, requires_grad=True), diamond().edge_index
DOWN = schedule_structure(EDGES, 4, direction="top_down")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MODEL(X, torch.tensor([[0, 1], [1, 0]])), "ValueError … cycle"),
        (lambda: MODEL(X[:, :2], EDGES), "TypeError … floating [row, 3]"),
        (lambda: MODEL(X, EDGES, schedule=DOWN), "ValueError … bottom_up … top_down"),
        (lambda: DAGNN(IN, HIDDEN, 0), "ValueError … num_layers"),
        (lambda: DAGNN(IN, 0), "ValueError … out_channels"),
        (
            lambda: torch.autograd.grad(MODEL(X, EDGES).sum(), X, create_graph=True),
            "RuntimeError … second derivatives",
        ),
    ],
)
def test_refuses(call: Callable[[], object], words: str) -> None:
    refuses(call, words)
