"""Law: which nodes read a row and in which slot a child is does not depend on the way of calling.

``has_input`` decides which rows are read, ``child_slot`` the slots; without them all rows are read
and slots are in the order of the edges. ``token`` decides nothing. The results are those of a
recursion node by node in float64.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.models import TreeClassifier, TreeSchema
from pyg_dynbatch.nn import DAGNN, RecursiveCell, RecursiveLayer, TopologicalConv
from tests.nn import recursion
from tests.nn.recursion import IN, OUT, Placed, assert_equal, gradients, placed, recurse
from tests.strategies import few

Reference = Callable[[Any, Placed, Tensor], Tensor]


class NumberedSum(RecursiveCell):
    """h = tanh(W x + b + 1 h_1 + 2 h_2 + ...), which depends on the order of the children."""

    def __init__(self) -> None:
        super().__init__(IN, OUT, arity=None)
        self.state_channels = (OUT,)
        self.input = nn.Linear(IN, OUT)

    def project(self, x: Tensor) -> Tensor:
        return self.input(x)

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor]:
        if children is None:
            return (projected.tanh(),)
        ids = children.segment_ids
        first = torch.searchsorted(ids, ids)
        number = 1 + torch.arange(ids.numel()) - first
        weighted = children.rows[0] * number[:, None]
        return (torch.tanh(projected + torch.zeros_like(projected).index_add(0, ids, weighted)),)


def numbered_sum(layer: RecursiveLayer, x: Tensor, children: list, keep: Tensor) -> tuple[Tensor]:
    total = sum((number * h for number, (h,) in enumerate(children, 1)), layer.cell.input(x))
    return (total.tanh(),)


def graph_conv(layer: TopologicalConv, x: Tensor, children: list, keep: Tensor) -> tuple[Tensor]:
    """Morris et al. (2019): W_1 x_i + W_2 (sum of the rows of the sources)."""
    total = sum((h for (h,) in children), x.new_zeros(OUT))
    return (layer.conv.lin_root(x) + layer.conv.lin_rel(total),)


def of_equation(equation: Callable[..., tuple[Tensor, ...]]) -> Reference:
    def hidden(layer: Any, structure: Placed, x: Tensor) -> Tensor:
        names = {"direction": layer.direction, "arity": arity_of(layer), "out_channels": OUT}
        parts = vars(layer)["_modules"] | names
        return recurse(SimpleNamespace(**parts), equation, structure, x)[0]

    return hidden


def dagnn(model: DAGNN, structure: Placed, x: Tensor) -> Tensor:
    """Attention over the predecessors, then torch's GRU cell; every layer reads the one before."""
    columns = []
    for layers, graph in zip(model.layers, (structure, structure.turned(None)), strict=True):
        rows = [x * structure.filled[:, None]]
        for layer in layers:
            everywhere = Placed(graph.places, (True,) * graph.num_nodes)
            names = SimpleNamespace(cell=layer.cell, direction="bottom_up", out_channels=OUT)
            rows.append(recurse(names, dagnn_step, everywhere, rows[-1])[0])
        columns += rows
    return torch.cat(columns, 1)


def dagnn_step(layer: Any, x: Tensor, children: list, keep: Tensor) -> tuple[Tensor]:
    cell, message = layer.cell, x.new_zeros(OUT)
    if children:
        h = torch.stack([row for (row,) in children])
        message = torch.softmax(h @ cell.attention, 0) @ h
    weights = cell.weight_input, cell.weight_hidden, cell.bias, cell.bias_hidden
    return (torch.gru_cell(x[None], message[None], *weights)[0],)


def arity_of(layer: Any) -> int | None:
    return getattr(layer, "arity", None)


KINDS: dict[str, tuple[Callable[..., Any], Reference]] = {
    name: (lambda name=name, **options: recursion.make(name, **options), of_equation(equation))
    for name, (_, equation) in recursion.KINDS.items()
    if name in recursion.SMALL
}
KINDS["own cell"] = (
    lambda **options: RecursiveLayer(NumberedSum(), **options),
    of_equation(numbered_sum),
)
KINDS["TopologicalConv"] = (
    lambda **options: TopologicalConv(GraphConv((OUT, IN), OUT), **options),
    of_equation(graph_conv),
)
LAYERS = [(kind, direction) for kind in KINDS for direction in ("bottom_up", "top_down")]
KINDS["DAGNN"] = (lambda direction: DAGNN(IN, OUT, 2), dagnn)


def call(layer: Any, x: Tensor, batch: Any, fields: tuple[str, ...]) -> Tensor:
    """Call a layer with some fields of a batch."""
    given = {name: batch[name] for name in fields if name in batch}
    edge_index = given.pop("edge_index", None)
    if isinstance(layer, DAGNN):
        given.pop("child_slot", None)
        return layer.embed(x, edge_index, **given)
    given.pop("schedule_down", None)
    return layer(x, edge_index, **given)


SCHEDULES = ("schedule", "schedule_down")
EDGES_AND_FIELDS = ("edge_index", "child_slot", "has_input")
WAYS = {
    "edges and fields": EDGES_AND_FIELDS,
    "schedule": ("edge_index", *SCHEDULES),
    "schedule alone": SCHEDULES,
    "everything": (*EDGES_AND_FIELDS, *SCHEDULES),
    "edges": ("edge_index",),
}


@st.composite
def examples(draw: st.DrawFn, arity: int | None, only_trees: bool) -> Iterator[Any]:
    """A batch's examples, all with the same fields, and the structures that these mean."""
    structures = draw(st.lists(placed(arity, only_trees), min_size=1, max_size=3))
    kind = draw(st.sampled_from((Data, DynTreeData)))
    has_input = draw(st.sampled_from((None, torch.bool, torch.long, torch.uint8)))
    has_slots, has_tokens = draw(st.booleans()), draw(st.booleans())
    data = []
    for number, each in enumerate(structures):
        order = torch.tensor(draw(st.permutations(range(len(each.edges)))), dtype=torch.long)
        fields = {"x": recursion.features(each.num_nodes, number), "num_nodes": each.num_nodes}
        if has_slots:
            fields["child_slot"] = each.child_slot[order]
        if has_input is not None:
            fields["has_input"] = each.filled.to(has_input)
        if has_tokens:
            fields["token"] = torch.arange(each.num_nodes) % 3 - 1
        data.append(kind(edge_index=each.edge_index[:, order], **fields))
    return data


def meant(example: Any, fields: tuple[str, ...], arity: int | None) -> Placed:
    """The structure that some fields of an example say, edge by edge."""
    nodes = example.num_nodes
    places: list[list[int | None]] = [[None] * (arity or 0) for _ in range(nodes)]
    edges = list(enumerate(zip(*example.edge_index.tolist(), strict=True)))
    if "child_slot" in fields and "child_slot" in example:
        edges.sort(key=lambda edge: int(example.child_slot[edge[0]]))
    taken = [0] * nodes
    for edge, (child, parent) in edges:
        slot, taken[parent] = taken[parent], taken[parent] + 1
        if arity is None:
            places[parent].append(child)
            continue
        if "child_slot" in fields and "child_slot" in example:
            slot = int(example.child_slot[edge])
        places[parent][slot] = child
    reads = [True] * nodes
    if "has_input" in fields and "has_input" in example:
        reads = [bool(each) for each in example.has_input]
    return Placed(tuple(map(tuple, places)), tuple(reads))


@pytest.mark.parametrize(("kind", "direction"), [*LAYERS, ("DAGNN", "both")])
@few(6)
@given(data=st.data())
def test_ways_of_calling_agree(kind: str, direction: str, data: st.DataObject) -> None:
    make, reference = KINDS[kind]
    torch.manual_seed(0)
    layer = make(direction=direction).double()
    arity = arity_of(layer)
    listed = data.draw(examples(arity, only_trees=direction == "top_down"))
    batch = Collater(arity=arity, direction=direction)(listed)
    for way, fields in WAYS.items():
        if kind == "DAGNN" and way == "schedule alone":
            continue  # it reads the edges
        x = batch.x.clone().requires_grad_()
        told = ("edge_index",) if way == "edges" else EDGES_AND_FIELDS
        rows = x.split([each.num_nodes for each in listed])
        wanted = torch.cat([
            reference(layer, meant(each, told, arity), own)
            for each, own in zip(listed, rows, strict=True)
        ])  # fmt: skip
        wanted_gradients = gradients(layer, x, [wanted])
        together = call(layer, x, batch, fields)
        assert_equal([together, *gradients(layer, x, [together])], [wanted, *wanted_gradients])
        if way == "edges and fields":
            alone = [call(layer, own, each, fields) for each, own in zip(listed, rows, strict=True)]
            assert_equal(alone, wanted.split([each.num_nodes for each in listed]))


@few(10)
@given(data=st.data(), stock=st.booleans())
def test_a_model_of_features_reads_the_rows_that_its_layer_reads(
    data: st.DataObject, stock: bool
) -> None:
    model = TreeClassifier(TreeSchema(0, 3), IN, OUT).double()
    listed = data.draw(examples(2, only_trees=False))
    batch = Batch.from_data_list(listed) if stock else Collater(arity=2)(listed)
    told = {name: batch[name] for name in ("child_slot", "has_input") if name in batch}
    hidden = model.encoder.layer(batch.x, batch.edge_index, **told)
    assert_equal([model(batch)], [model.classifier(hidden)])


@pytest.mark.parametrize("mask", [[1.0, 0.0, 1.0], [0, 2, 1], [0, -1, 1]])
@pytest.mark.parametrize("kind", ["nary-2", "TopologicalConv", "DAGNN"])
def test_other_numbers_are_no_mask(kind: str, mask: list[float]) -> None:
    layer = KINDS[kind][0](direction="bottom_up").double()
    edges, x = torch.tensor([[0, 1], [2, 2]]), recursion.features(3)
    batch = Collater(arity=arity_of(layer))([Data(edge_index=edges, num_nodes=3)])
    batch.has_input = torch.tensor(mask)
    for fields in (("edge_index", "has_input"), ("edge_index", "schedule", "has_input")):
        with pytest.raises(ValueError, match="has_input is not a mask"):
            call(layer, x, batch, fields)


@pytest.mark.parametrize("kind", ["nary-2", "TopologicalConv", "DAGNN"])
def test_a_schedule_of_other_inputs_is_refused(kind: str) -> None:
    layer = KINDS[kind][0](direction="bottom_up").double()
    edges, x = torch.tensor([[0, 1], [2, 2]]), recursion.features(3)
    some = torch.tensor([True, False, True])
    example = Data(edge_index=edges, num_nodes=3, has_input=some)
    batch = Collater(arity=arity_of(layer))([example])
    batch.has_input = ~some
    with pytest.raises(ValueError, match="belongs to a different graph"):
        call(layer, x, batch, ("edge_index", "schedule", "has_input"))
