"""Any layer of PyG in topological order, against calls of that layer node by node."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from hypothesis import given
from torch import Tensor, nn
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.nn import TopologicalConv
from tests.core.helpers import refuses
from tests.strategies import SHAPES, Dag, dags, diamond, few, structures

W = 4
FEW = few(6)
EdgeRows = dict[str, Callable[[int], Tensor]]
FEATURES: EdgeRows = {"edge_attr": lambda edges: torch.randn(edges, 3, dtype=torch.float64)}
WEIGHTS: EdgeRows = {"edge_weight": lambda edges: torch.rand(edges, dtype=torch.float64)}
TYPES: EdgeRows = {"edge_type": lambda edges: torch.randint(2, (edges,))}

CONVS: dict[str, tuple[Callable[[], nn.Module], EdgeRows]] = {
    "GCNConv": (lambda: pyg.GCNConv(W, W), {}),
    "GCNConv weighted": (lambda: pyg.GCNConv(W, W), WEIGHTS),
    "GATConv": (lambda: pyg.GATConv(W, W), {}),
    "GATConv heads": (lambda: pyg.GATConv(W, 2, heads=2, edge_dim=3), FEATURES),
    "GATv2Conv pairs": (lambda: pyg.GATv2Conv((3, W), 3, add_self_loops=False), {}),
    "SAGEConv": (lambda: pyg.SAGEConv(W, W), {}),
    "SAGEConv max": (lambda: pyg.SAGEConv(W, W, aggr="max"), {}),
    "SAGEConv pairs": (lambda: pyg.SAGEConv((3, W), 3), {}),
    "GINConv": (lambda: pyg.GINConv(nn.Sequential(nn.Linear(W, W), nn.Tanh())), {}),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(W, W), edge_dim=3), FEATURES),
    "TransformerConv": (lambda: pyg.TransformerConv(W, W, edge_dim=3), FEATURES),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(W, W), {}),
    "GatedGraphConv": (lambda: pyg.GatedGraphConv(W, num_layers=2), WEIGHTS),
    "GraphConv": (lambda: pyg.GraphConv(W, W), WEIGHTS),
    "RGCNConv": (lambda: pyg.RGCNConv(W, W, num_relations=2), TYPES),
    "GENConv": (lambda: pyg.GENConv(W, W, norm=None), {}),
    "EdgeConv": (lambda: pyg.EdgeConv(nn.Linear(2 * W, W)), {}),
    "Sequential": (
        lambda: pyg.Sequential(
            "x, edge_index", [(pyg.GCNConv(W, W), "x, edge_index -> x"), nn.Tanh()]
        ),
        {},
    ),
}


def node_by_node(
    layer: TopologicalConv, dag: Dag, x: Tensor, edge_rows: dict[str, Tensor]
) -> Tensor:
    """Calls the layer on every node alone: itself, and one source for each incoming edge."""
    source, target = dag.edge_index
    order = dag.order
    if layer.direction == "top_down":
        source, target, order = target, source, order[::-1]
    done: dict[int, Tensor] = {}
    for node in order:
        edges = (target == node).nonzero()[:, 0]
        rows = [done[int(source[edge])] for edge in edges]
        own, count = x[node : node + 1], len(rows)
        first = 0 if layer.takes_pairs else 1
        star = torch.stack([torch.arange(count) + first, torch.zeros(count, dtype=torch.long)])
        given = {name: value[edges] for name, value in edge_rows.items()}
        if layer.takes_pairs:
            empty = x.new_empty(0, layer.state_channels or 0)
            below = torch.stack(rows) if rows else empty
            done[node] = layer.conv((below, own), star, **given)[0]
        else:
            both = torch.cat([own, torch.stack(rows)]) if rows else own
            done[node] = layer.conv(both, star, **given)[0]
    return torch.stack([done[node] for node in range(dag.num_nodes)])


def gradients(loss_of: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, loss_of.numel(), dtype=torch.float64).reshape(loss_of.shape)
    return list(torch.autograd.grad((loss_of * weight).sum(), leaves, materialize_grads=True))


def check(name: str, dag: Dag, direction: str) -> None:
    make, kinds = CONVS[name]
    layer = TopologicalConv(make(), direction).double()
    edge_rows = {key: draw(dag.num_edges) for key, draw in kinds.items()}
    x = torch.randn(dag.num_nodes, W, dtype=torch.float64, requires_grad=True)
    leaves = [x, *layer.parameters()]
    for value in edge_rows.values():
        if value.is_floating_point():
            leaves.append(value.requires_grad_())
    wanted = node_by_node(layer, dag, x, edge_rows)
    found = layer(x, dag.edge_index, **edge_rows)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    pairs = zip(gradients(found, leaves), gradients(wanted, leaves), strict=True)
    for mine, right in pairs:
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("direction", ("bottom_up", "top_down"))
@pytest.mark.parametrize("name", CONVS)
@FEW
@given(dag=structures(10, 3))
def test_level_by_level_is_node_by_node(name: str, direction: str, dag: Dag) -> None:
    check(name, dag, direction)


@FEW
@given(dag=dags(10, 3, repeats=True))
def test_repeated_edges(dag: Dag) -> None:
    check("GraphConv", dag, "bottom_up")


def test_with_a_schedule() -> None:
    dag, layer = diamond(), TopologicalConv(pyg.GATConv(W, W, edge_dim=3))
    x, rows = torch.randn(4, W), torch.randn(dag.num_edges, 3)
    wanted = layer(x, dag.edge_index, rows)
    schedule = schedule_structure(dag.edge_index, 4)
    assert torch.equal(layer(x, dag.edge_index, rows, schedule=schedule), wanted)
    assert torch.equal(layer(x, edge_attr=rows, schedule=schedule), wanted)
    assert torch.equal(layer(x, dag.edge_index, None), layer(x, dag.edge_index))


def test_order_of_the_edges_at_a_node() -> None:
    # LSTM aggregation cannot do without edges, so the first level is left out of this one.
    class Numbered(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, rank: Tensor) -> Tensor:
            seen.append(rank.tolist())
            return x

    seen: list[list[int]] = []
    edges, slot = torch.tensor([[0, 1, 2], [3, 3, 3]]), torch.tensor([2, 0, 1])
    TopologicalConv(Numbered())(torch.zeros(4, W), edges, slot, child_slot=slot)
    assert seen == [[], [0, 1, 2]]


def test_repr() -> None:
    assert repr(TopologicalConv(pyg.GCNConv(W, W))) == "TopologicalConv(GCNConv(4, 4))"
    down = TopologicalConv(pyg.GCNConv(W, W), "top_down")
    assert repr(down) == "TopologicalConv(GCNConv(4, 4), direction='top_down')"


def test_in_sequential_of_pyg_and_with_lazy_layers() -> None:
    model = pyg.Sequential(
        "x, edge_index, edge_weight",
        [
            (pyg.GCNConv(3, W), "x, edge_index, edge_weight -> x"),
            nn.ReLU(),
            (TopologicalConv(pyg.GCNConv(W, W)), "x, edge_index, edge_weight -> x"),
            (TopologicalConv(pyg.GATConv(W, W), "top_down"), "x, edge_index -> x"),
            (TopologicalConv(pyg.SAGEConv(-1, W)), "x, edge_index -> x"),
        ],
    )
    dag = diamond()
    model(torch.randn(4, 3), dag.edge_index, torch.rand(dag.num_edges)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# Explainers.


@pytest.mark.parametrize("parameter", (False, True))
def test_edge_masks_are_edge_weights(parameter: bool) -> None:
    dag, layer = SHAPES["diamond"](), TopologicalConv(pyg.GraphConv(W, W))
    x, weight = torch.randn(4, W), torch.rand(dag.num_edges)
    plain = layer(x, dag.edge_index)
    wanted = layer(x, dag.edge_index, weight)
    mask = nn.Parameter(weight) if parameter else weight
    set_masks(layer, mask, dag.edge_index, apply_sigmoid=False)
    found = layer(x, dag.edge_index)
    torch.testing.assert_close(found, wanted)
    assert layer.conv._edge_mask is mask
    if parameter:
        found.sum().backward()
        assert mask.grad is not None
        assert (mask.grad != 0).all()
    clear_masks(layer)
    assert torch.equal(layer(x, dag.edge_index), plain)


class Model(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.first = pyg.GCNConv(3, W)
        self.layer = TopologicalConv(conv)
        self.head = nn.Linear(W, 2)

    def forward(self, x: Tensor, edge_index: Tensor, **options: Any) -> Tensor:
        return self.head(self.layer(self.first(x, edge_index).relu(), edge_index, **options))


@pytest.mark.parametrize("conv", ("GCNConv", "SAGEConv", "GATConv"))
@pytest.mark.parametrize("edge_mask_type", (None, "object"))
def test_gnn_explainer(conv: str, edge_mask_type: str | None) -> None:
    dag = SHAPES["balanced"]()
    model = Model(CONVS[conv][0]())
    explainer = Explainer(
        model,
        algorithm=GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type=edge_mask_type,
        model_config={"mode": "multiclass_classification", "task_level": "node",
                      "return_type": "raw"},
    )  # fmt: skip
    x = torch.randn(dag.num_nodes, 3)
    before = model(x, dag.edge_index)
    schedule = schedule_structure(dag.edge_index, dag.num_nodes)
    explanation = explainer(x, dag.edge_index, index=dag.roots[0], schedule=schedule)
    assert explanation.node_mask.shape == x.shape
    if edge_mask_type is not None:
        assert explanation.edge_mask.shape == (dag.num_edges,)
        assert (explanation.edge_mask > 0).any()
    assert torch.equal(model(x, dag.edge_index), before)


# Errors and their texts.


class Pair(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return x, edge_index


X, EDGES = torch.randn(4, W), diamond().edge_index
FIXED, RAGGED = (schedule_structure(EDGES, 4, arity=arity) for arity in (2, None))


def wrap(conv: nn.Module) -> TopologicalConv:
    return TopologicalConv(conv)


def on_diamond(conv: nn.Module) -> Tensor:
    return TopologicalConv(conv)(X, EDGES)


def attention(*given: Any, **options: Any) -> Tensor:
    return TopologicalConv(pyg.GATConv(W, W, edge_dim=3))(*given, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: wrap(pyg.GCNConv(W, W, flow="target_to_source")), "GCNConv … against the edges"),
        (lambda: wrap(pyg.GCNConv(W, W, flow="target_to_source")), "direction='top_down'"),
        (
            lambda: wrap(pyg.GCNConv(W, W, cached=True)),
            "the graph of its first call … cached=False",
        ),
        (
            lambda: wrap(pyg.GATConv((W, W), W)),
            "self-loops, but takes pairs … add_self_loops=False",
        ),
        (lambda: wrap(pyg.SAGEConv((-1, -1), W)), "not state the width … in_channels=(-1, -1)"),
        (
            lambda: on_diamond(pyg.GCNConv(W, 6)),
            "changes the width … 4 channels … 6 … (out_channels, in",
        ),
        (lambda: on_diamond(pyg.SAGEConv((3, W), 5)), "ValueError … expected: 3 channels"),
        (lambda: on_diamond(Pair()), "TypeError … not return one row per node … tuple"),
        (lambda: TopologicalConv(Pair(), "up"), "ValueError … unknown direction"),
        (lambda: attention(X, EDGES, X[:3]), "TypeError … argument 2 does not have one row per"),
        (lambda: attention(X, EDGES, X[:3]), "a tensor [4, ...] … got:      [3, 4]"),
        (lambda: attention(X, EDGES, RAGGED), "a schedule … schedule=batch.schedule, by name"),
        (lambda: attention(X, EDGES, edge_attr=X[0, 0]), "TypeError … argument edge_attr"),
        (lambda: attention(X), "TypeError … neither a schedule nor dense edges"),
        (lambda: attention(X, torch.tensor([[0], [0]])), "ValueError … has a cycle"),
        (lambda: attention(X, EDGES, schedule=FIXED), "ValueError … arity None, bottom_up"),
        (lambda: attention(X[:3], schedule=RAGGED), "ValueError … wrong number of input rows"),
        (lambda: attention(X, EDGES[:, :3], schedule=RAGGED), "ValueError … a different graph"),
    ],
)
def test_refuses(call: Callable[[], object], words: str) -> None:
    refuses(call, words)
