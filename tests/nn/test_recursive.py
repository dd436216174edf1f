"""How the recursive layers behave as torch and PyG modules, and what they refuse."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import set_masks
from torch_geometric.nn import GCNConv, SAGEConv, Sequential, to_captum_model

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.loader import Collater, DataLoader
from pyg_dynbatch.nn import (
    ChildSumTreeLSTM,
    ChildSumTreeLSTMCell,
    NaryTreeLSTM,
    NaryTreeLSTMCell,
    RecursiveCell,
    RecursiveLayer,
    TopologicalConv,
    TreeGRU,
    TreeGRUCell,
    TreeRNN,
    TreeRNNCell,
)
from pyg_dynbatch.nn import cell as levels
from tests.core.helpers import refuses
from tests.nn.recursion import IN, OUT, SMALL, features, make, refused, whole
from tests.strategies import balanced, chain, diamond

TREE = balanced(2)


def grads(layer: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("every", (1, 2, 100))
def test_rows_of_the_nodes_with_input_alone(kind: str, every: int) -> None:
    layer, dag = make(kind), whole(TREE, make(kind).arity)
    has_input = torch.arange(1, dag.num_nodes + 1) % every == 0  # every second node, or no node
    schedule = schedule_structure(
        dag.edge_index, dag.num_nodes, arity=layer.arity, has_input=has_input
    )
    x = features(dag.num_nodes)
    few = layer(x.index_select(0, schedule.input_node), schedule=schedule, inputs_only=True)
    torch.testing.assert_close(layer(x, schedule=schedule), few)
    if few.size(0) != schedule.num_inputs:
        with pytest.raises(ValueError, match="wrong number of input rows[\\s\\S]*inputs_only"):
            layer(x.index_select(0, schedule.input_node), schedule=schedule)
    torch.testing.assert_close(layer(x * has_input[:, None], dag.edge_index), few)
    few.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("kind", SMALL)
def test_backward_twice_in_part_and_with_checkpointing(kind: str) -> None:
    layer, x = make(kind), features(TREE.num_nodes).requires_grad_()
    h = layer(x, TREE.edge_index)
    h.sum().backward(retain_graph=True)
    first = grads(layer)
    layer.zero_grad()
    h.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(first, grads(layer), strict=True))
    layer.zero_grad()
    checkpoint(layer, x, TREE.edge_index, use_reentrant=False).sum().backward()
    torch.testing.assert_close(grads(layer), first)
    root = layer(x, TREE.edge_index)[TREE.roots]
    (only,) = torch.autograd.grad(root.sum(), layer.cell.bias, retain_graph=True)
    (again, of_x) = torch.autograd.grad(root.sum(), (layer.cell.bias, x))
    torch.testing.assert_close(only, again)
    assert (of_x != 0).any(1).all()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ("nary-2", "child-sum"))
def test_inside_a_compiled_model(kind: str) -> None:
    model = nn.Sequential(nn.Linear(IN, IN), nn.ReLU()).double()
    layer = make(kind)

    def run(x: Tensor) -> Tensor:
        return layer(model(x), TREE.edge_index).relu()

    x = features(TREE.num_nodes)
    found = torch.compile(run, backend="eager")(x)
    torch.testing.assert_close(found, run(x))
    found.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_repr() -> None:
    assert repr(NaryTreeLSTM(4, 3, 5)) == "NaryTreeLSTM(4, 3, arity=5)"
    assert repr(ChildSumTreeLSTM(4, 3)) == "ChildSumTreeLSTM(4, 3)"
    assert repr(TreeGRU(4, 3)) == "TreeGRU(4, 3, arity=2)"
    assert repr(TreeRNN(4, 3)) == "TreeRNN(4, 3, arity=2)"
    assert repr(NaryTreeLSTMCell(4, 3, 5)) == "NaryTreeLSTMCell(4, 3, arity=5)"
    assert repr(ChildSumTreeLSTMCell(4, 3)) == "ChildSumTreeLSTMCell(4, 3)"


def test_where_biases_start() -> None:
    bias = NaryTreeLSTM(4, 3).cell.bias
    assert bias.tolist() == [0.0] * 9 + [1.0] * 3
    assert NaryTreeLSTM(4, 3, forget_bias=0.5).cell.bias[9:].tolist() == [0.5] * 3
    assert ChildSumTreeLSTM(4, 3).cell.bias.tolist() == [0.0] * 12


def test_in_sequential_of_pyg() -> None:
    given = "x, edge_index -> x"
    layers = [(GCNConv(IN, 4), given), nn.ReLU(), (NaryTreeLSTM(4, 5), given)]
    model = Sequential("x, edge_index", [*layers, (ChildSumTreeLSTM(5, 2), given)])
    h = model(features(TREE.num_nodes).float(), TREE.edge_index)
    assert h.shape == (TREE.num_nodes, 2)
    h.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = NaryTreeLSTM(IN, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, edge_index: Tensor, **options: Any) -> Tensor:
        return self.head(self.layer(x, edge_index, **options))


def explainer(model: nn.Module, **masks: Any) -> Explainer:
    config = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
    algorithm = GNNExplainer(epochs=3)
    return Explainer(model, algorithm, explanation_type="model", model_config=config, **masks)


@pytest.mark.parametrize("with_schedule", (False, True))
def test_explainer_with_masks_of_features(with_schedule: bool) -> None:
    explain = explainer(Model(), node_mask_type="attributes")
    schedule = schedule_structure(TREE.edge_index, TREE.num_nodes, arity=2)
    options = {"schedule": schedule} if with_schedule else {}
    explanation = explain(features(TREE.num_nodes).float(), TREE.edge_index, index=0, **options)
    assert explanation.node_mask.shape == (TREE.num_nodes, IN)
    assert (explanation.node_mask > 0).any()


def test_masks_of_explainers_are_in_single_precision() -> None:
    layer, x = NaryTreeLSTM(IN, OUT).double(), features(TREE.num_nodes)
    expected = layer(x, TREE.edge_index)
    set_masks(layer, nn.Parameter(torch.ones(TREE.edge_index.size(1))), TREE.edge_index, False)
    torch.testing.assert_close(layer(x, TREE.edge_index), expected)


def decisive(kind: str) -> tuple[Sequential, Tensor, list[int]]:
    """A model, and a tree of which one leaf alone has an input; the edges from it to the root."""
    layer = make(kind).float()
    torch.nn.init.zeros_(layer.cell.bias)
    x, way, (root,) = torch.zeros(TREE.num_nodes, IN), [], TREE.roots
    node = int(TREE.edge_index[0, 3])
    x[node] = 1.0
    while node != root:
        way.append(int((TREE.edge_index[0] == node).nonzero()))
        node = int(TREE.edge_index[1, way[-1]])
    given = "x, edge_index, schedule"
    model = Sequential(given, [(layer, f"{given} -> x"), nn.Linear(OUT, 2, bias=False)])
    return model, x, way


@pytest.mark.parametrize("kind", SMALL)
def test_explainers_find_the_decisive_edges(kind: str) -> None:
    model, x, way = decisive(kind)
    edges, (root,) = TREE.edge_index, TREE.roots
    schedule = schedule_structure(edges, TREE.num_nodes, arity=model[0].arity)
    before = model(x, edges, schedule)
    explain = explainer(model, edge_mask_type="object")
    explanation = explain(x, edges, index=root, schedule=schedule)
    assert explanation.edge_mask.nonzero().flatten().tolist() == sorted(way)
    assert torch.equal(model(x, edges, schedule), before)
    # The model that CaptumExplainer differentiates, from one that no explainer has changed.
    model, _, _ = decisive(kind)
    mask = torch.ones(1, edges.size(1), requires_grad=True)
    found = to_captum_model(model, "edge", root)(mask, x, edges, schedule)
    (saliency,) = torch.autograd.grad(found[:, 0].sum(), mask)
    assert saliency[0].nonzero().flatten().tolist() == sorted(way)


def test_refuses_explainers_without_one_mask_per_edge() -> None:
    layer, x = NaryTreeLSTM(IN, OUT), features(TREE.num_nodes).float()
    schedule = schedule_structure(TREE.edge_index, TREE.num_nodes, arity=2)
    layer.explain = True  # and no mask, as GraphMaskExplainer does
    parts = "NaryTreeLSTM: the explainer does not set one mask value per edge", "no edge mask"
    parts += ("clear_masks(model)",)
    refused(ValueError, lambda: layer(x, TREE.edge_index), *parts)
    set_masks(layer, torch.ones(3), TREE.edge_index)
    refused(ValueError, lambda: layer(x, TREE.edge_index), "float32 tensor [3]")
    set_masks(layer, torch.ones(6), TREE.edge_index)
    refused(ValueError, lambda: layer(x, schedule=schedule), "needs the edges")


class Height(RecursiveCell):
    """A cell that leaves every default of the interface alone."""

    def __init__(self) -> None:
        super().__init__(IN, 1, None)
        self.state_channels = (1,)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor, ...]:
        height = 0 * projected[:, :1]
        if children is None:
            return (height,)
        (h,), segment_ids = children.rows, children.segment_ids
        return (1 + height.scatter_reduce(0, segment_ids[:, None], h, "amax"),)


def test_a_cell_of_your_own() -> None:
    dag = diamond()
    layer = RecursiveLayer(Height())
    assert layer(features(4).float(), dag.edge_index)[:, 0].tolist() == dag.depth
    schedule = schedule_structure(
        dag.edge_index, 4, has_input=torch.tensor([True, False, True, False])
    )
    assert layer(features(4).float(), schedule=schedule)[:, 0].tolist() == dag.depth
    assert repr(layer) == "RecursiveLayer(3, 1)"
    layer.reset_parameters()


# Errors and their texts.

X, EDGES = features(TREE.num_nodes).float(), TREE.edge_index
RAGGED, FIXED = (schedule_structure(EDGES, TREE.num_nodes, arity=arity) for arity in (None, 2))
DOWN = schedule_structure(EDGES, TREE.num_nodes, arity=2, direction="top_down")
FIVE_EDGES = schedule_structure(chain(7).edge_index[:, :5], TREE.num_nodes, arity=2)
FOUR_CHILDREN = torch.tensor([[0, 1, 2, 3], [4, 4, 4, 4]])
SHARED = torch.tensor([[0, 0], [1, 2]])
ONE_SLOT = {"edge_index": SHARED, "child_slot": torch.tensor([0, 0]), "direction": "top_down"}
HALF: Any = 2.5
TEXT: Any = "2"


def layer(*given: Any, direction: str = "bottom_up", **options: Any) -> Tensor:
    return NaryTreeLSTM(IN, OUT, direction=direction)(*given, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: layer(X, direction="up"), "ValueError: NaryTreeLSTM: unknown direction … 'up'"),
        (lambda: layer(X, direction="up"), "expected: 'bottom_up' or 'top_down'"),
        (lambda: TreeGRU(0, 2), "ValueError … in_channels is too small"),
        (lambda: ChildSumTreeLSTM(2, 0), "ValueError … out_channels is too small"),
        (lambda: NaryTreeLSTM(2, 2, 0), "ValueError … arity is too small"),
        (lambda: NaryTreeLSTM(2, 2, TEXT), "TypeError … arity is not a whole number … '2'"),
        (lambda: TreeGRU(2, 2, TEXT), "TypeError … arity is not a whole number"),
        (lambda: TreeRNN(2, 2, TEXT), "TypeError … arity is not a whole number"),
        (lambda: Collater(arity=TEXT), "TypeError … arity is not a whole number"),
        (lambda: ChildSumTreeLSTM(HALF, 2), "TypeError … in_channels is not a whole"),
        (lambda: schedule_structure(EDGES, 7, arity=TEXT), "ValueError … invalid arity"),
        (
            lambda: NaryTreeLSTM(2, 2, recurrent_dropout=1.0),
            "ValueError … recurrent_dropout … a number in [0, 1)",
        ),
        (
            lambda: ChildSumTreeLSTM(2, 2, recurrent_dropout=1.0),
            "ValueError … recurrent_dropout is out of range",
        ),
        (
            lambda: TreeGRU(2, 2, recurrent_dropout=1.0),
            "ValueError … recurrent_dropout is out of range",
        ),
        (lambda: layer(X[:, :2], EDGES), "TypeError: NaryTreeLSTM: invalid input rows … [row, 3]"),
        (
            lambda: layer(X[:, :2], EDGES),
            "expected: a dense tensor, floating … float32 tensor [7, 2]",
        ),
        (lambda: layer(X.long(), EDGES), "TypeError … got:      int64 tensor [7, 3]"),
        (
            lambda: layer(X[:3], schedule=FIXED),
            "ValueError … input rows … 7 (all nodes) … got:      3",
        ),
        (lambda: layer(X, EDGES, RAGGED), "ValueError: NaryTreeLSTM: … made for a different layer"),
        (lambda: layer(X, EDGES, RAGGED), "expected: arity 2, bottom_up … arity None, bottom_up"),
        (lambda: layer(X, EDGES, RAGGED), "DataLoader(..., arity=2, direction='bottom_up')"),
        (lambda: layer(X, EDGES, DOWN), "ValueError … got:      arity 2, top_down"),
        (lambda: layer(X, EDGES, FIVE_EDGES), "ValueError … to a different graph … its 5 edges"),
        (lambda: layer(X, EDGES, FIVE_EDGES), "got:      int64 tensor [2, 6]"),
        (lambda: layer(X, EDGES.to_sparse(), RAGGED), "ValueError … made for a different layer"),
        (lambda: layer(X, EDGES.to_sparse(), FIXED), "TypeError … dense edges"),
        (lambda: layer(X), "TypeError … neither a schedule nor dense edges"),
        (lambda: layer(X, torch.tensor([[0, 1], [1, 0]])), "ValueError … has a cycle"),
        (lambda: layer(X[:3], torch.tensor([[0], [5]])), "ValueError … a node that does not exist"),
        (lambda: layer(X[:5], FOUR_CHILDREN), "ValueError … a child beyond the arity"),
        (lambda: layer(X[:5], FOUR_CHILDREN), "arity=4; or … arity=None … cell='child_sum'"),
        (lambda: layer(X[:3], **ONE_SLOT), "ValueError … two arguments in one slot"),
    ],
)
def test_refuses(call: Callable[[], object], words: str) -> None:
    refuses(call, words)


def saved(batch: Any) -> Any:
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "as collated": lambda batch: batch,
    "moved": lambda batch: batch.to("cpu"),
    "cloned": lambda batch: batch.clone(),
    "pickled": lambda batch: pickle.loads(pickle.dumps(batch)),
    "saved": saved,
    "shared": lambda batch: batch.share_memory_(),
    "by rows": lambda batch: batch.update({"edge_index": batch.edge_index.t().contiguous().t()}),
}


def batch_of_trees(arity: int | None, **options: Any) -> Any:
    examples = [Data(edge_index=TREE.edge_index, x=features(TREE.num_nodes).float())] * 2
    return next(iter(DataLoader(examples, batch_size=2, arity=arity, **options)))


def layers_that_take_schedules() -> dict[str, Callable[[Any], Tensor]]:
    nary, convolution = NaryTreeLSTM(IN, OUT), TopologicalConv(SAGEConv(IN, IN))
    compiled = torch.compile(nary, backend="eager")
    return {
        "layer": lambda batch: nary(batch.x, batch.edge_index, batch.schedule),
        "compiled": lambda batch: compiled(batch.x, batch.edge_index, batch.schedule),
        "topological": lambda batch: convolution(
            batch.x, batch.edge_index, schedule=batch.schedule
        ),
    }


@pytest.mark.parametrize("kind", layers_that_take_schedules())
@pytest.mark.parametrize("way", WAYS)
def test_edges_edited_after_collating_are_refused(kind: str, way: str) -> None:
    layer = layers_that_take_schedules()[kind]
    batch = WAYS[way](batch_of_trees(None if kind == "topological" else 2))
    layer(batch)
    batch.edge_index[0, :2] = batch.edge_index[0, :2].flip(0)
    parts = "the schedule belongs to a different graph", "as many edges with other values"
    refused(ValueError, lambda: layer(batch), *parts)
    batch.edge_index[0, :2] = batch.edge_index[0, :2].flip(0)
    layer(batch)
    batch.edge_index = batch.edge_index.flip(1)
    refused(ValueError, lambda: layer(batch), *parts)


def test_edges_of_other_devices_are_not_read() -> None:
    schedule = schedule_structure(TREE.edge_index, TREE.num_nodes)
    edges = TREE.edge_index.to("meta")
    assert schedule.belongs_to(edge_index=edges) and schedule.belongs_to(edge_index=edges)
    with torch.inference_mode():
        assert schedule.clone().belongs_to(edge_index=torch.empty_like(edges))


class Elsewhere(Tensor):
    """Stands for a tensor on a device, whose values are read only when it has changed."""


def test_edges_of_other_devices_are_compared_after_a_change() -> None:
    schedule = schedule_structure(TREE.edge_index, TREE.num_nodes)
    edges, others = (
        each.clone().as_subclass(Elsewhere) for each in (TREE.edge_index, TREE.edge_index.flip(1))
    )
    assert schedule.belongs_to(edge_index=edges)
    for _ in range(2):
        assert not schedule.belongs_to(edge_index=others)
    assert schedule.belongs_to(edge_index=edges) and schedule.belongs_to(edge_index=edges.clone())
    edges.zero_()
    for _ in range(2):
        assert not schedule.belongs_to(edge_index=edges)
    assert not schedule.belongs_to(child_slot=TREE.child_slot), "made without slots"


def results(cell: RecursiveCell, schedule: Levels, x: Tensor) -> list[Tensor]:
    """States and all gradients."""
    x = x.clone().requires_grad_()
    states = levels.run_levels(cell, schedule, x)
    total = sum((part * torch.arange(1.0, 1 + part.size(1))).sum() for part in states)
    return [*states, *torch.autograd.grad(total, [x, *cell.parameters()])]


@pytest.mark.parametrize("make", (NaryTreeLSTMCell, TreeGRUCell, TreeRNNCell))
def test_blocks(make: type[RecursiveCell], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cell = make(3, 4, arity=2).double()
    child = torch.arange(1, 60)
    edges, has_input = torch.stack([child, (child - 1) // 2]), torch.rand(60) < 0.6
    schedule = schedule_structure(edges, 60, arity=2, has_input=has_input)
    x = torch.randn(sum(schedule.level_inputs), 3, dtype=torch.float64)
    right = results(cell, schedule, x)
    calls, step = [], cell.step

    def counted(projected: Tensor, children: object) -> object:
        if children is not None:
            calls.append(projected.size(0))
        return step(projected, children)

    monkeypatch.setattr(cell, "step", counted)
    state_bytes = sum(part[:1].nbytes for part in right[: len(cell.state_channels)])
    monkeypatch.setattr(levels, "_BLOCK_BYTES", 5 * state_bytes)
    for mine, wanted in zip(results(cell, schedule, x), right, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    sizes = list(schedule.level_sizes[1:])
    assert max(calls) == 5 < max(sizes) and sum(calls) == sum(sizes)
    assert len(calls) == sum(-(-size // 5) for size in sizes)
