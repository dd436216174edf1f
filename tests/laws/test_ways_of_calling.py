"""Law: which nodes read a row and in which slot a child is does not depend on the way of calling.

``has_input`` decides which rows are read, ``child_slot`` the slots; without them all rows are read
and slots are in the order of the edges. ``token`` decides nothing. The results are those of a
recursion node by node in float64.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

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
        first_of_node = torch.searchsorted(ids, ids)
        number = 1 + torch.arange(ids.numel()) - first_of_node
        weighted = children.rows[0] * number[:, None]
        total = torch.zeros_like(projected).index_add(0, ids, weighted)
        return (torch.tanh(projected + total),)


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
        with_all_inputs = Placed(graph.places, (True,) * graph.num_nodes)
        rows = x * structure.filled[:, None]
        columns.append(rows)
        for layer in layers:
            names = SimpleNamespace(cell=layer.cell, direction="bottom_up", out_channels=OUT)
            (rows,) = recurse(names, dagnn_step, with_all_inputs, rows)
            columns.append(rows)
    return torch.cat(columns, 1)


def dagnn_step(layer: Any, x: Tensor, children: list, keep: Tensor) -> tuple[Tensor]:
    cell = layer.cell
    message = x.new_zeros(OUT)
    if children:
        h = torch.stack([row for (row,) in children])
        message = torch.softmax(h @ cell.attention, 0) @ h
    weights = cell.weight_input, cell.weight_hidden, cell.bias, cell.bias_hidden
    return (torch.gru_cell(x[None], message[None], *weights)[0],)


def arity_of(layer: Any) -> int | None:
    return getattr(layer, "arity", None)


class Kind(NamedTuple):
    """How a layer is made for a direction, and the recursion that it must equal."""

    make: Callable[..., Any]
    reference: Reference


KINDS = {
    name: Kind(partial(recursion.make, name), of_equation(equation))
    for name, (_, equation) in recursion.KINDS.items()
    if name in recursion.SMALL
}
KINDS["own cell"] = Kind(
    lambda direction: RecursiveLayer(NumberedSum(), direction=direction), of_equation(numbered_sum)
)
KINDS["TopologicalConv"] = Kind(
    lambda direction: TopologicalConv(GraphConv((OUT, IN), OUT), direction=direction),
    of_equation(graph_conv),
)
KINDS["DAGNN"] = Kind(lambda direction: DAGNN(IN, OUT, 2), dagnn)
DIRECTIONS = [
    *[(kind, "bottom_up") for kind in KINDS if kind != "DAGNN"],
    *[(kind, "top_down") for kind in KINDS if kind != "DAGNN"],
    ("DAGNN", "both"),
]


def call(layer: Any, x: Tensor, batch: Any, fields: tuple[str, ...]) -> Tensor:
    """Call a layer with some fields of a batch."""
    given = {name: batch[name] for name in fields if name in batch}
    edge_index = given.pop("edge_index", None)
    if isinstance(layer, DAGNN):
        given.pop("child_slot", None)
        return layer.embed(x, edge_index, **given)
    given.pop("schedule_down", None)
    return layer(x, edge_index, **given)


class Way(NamedTuple):
    """Fields of a batch that a layer is called with, and those that say what is meant."""

    fields: tuple[str, ...]
    meaning: tuple[str, ...]


EDGES_AND_FIELDS = ("edge_index", "child_slot", "has_input")
SCHEDULES = ("schedule", "schedule_down")
WAYS = {
    "edges and fields": Way(EDGES_AND_FIELDS, EDGES_AND_FIELDS),
    "schedule": Way(("edge_index", *SCHEDULES), EDGES_AND_FIELDS),
    "schedule alone": Way(SCHEDULES, EDGES_AND_FIELDS),
    "everything": Way((*EDGES_AND_FIELDS, *SCHEDULES), EDGES_AND_FIELDS),
    "edges": Way(("edge_index",), ("edge_index",)),
}


def ways_of(kind: str) -> list[Way]:
    """List the ways to call a layer; DAGNN reads the edges."""
    return [way for name, way in WAYS.items() if (kind, name) != ("DAGNN", "schedule alone")]


@st.composite
def examples(draw: st.DrawFn, arity: int | None, only_trees: bool) -> list[Any]:
    """Draw the examples of a batch, all with the same fields."""
    structures = draw(st.lists(placed(arity, only_trees), min_size=1, max_size=3))
    kind = draw(st.sampled_from((Data, DynTreeData)))
    has_input = draw(st.sampled_from((None, torch.bool, torch.long, torch.uint8)))
    has_slots = draw(st.booleans())
    has_tokens = draw(st.booleans())
    listed = []
    for number, structure in enumerate(structures):
        nodes = structure.num_nodes
        order = torch.tensor(draw(st.permutations(range(len(structure.edges)))), dtype=torch.long)
        fields = {"x": recursion.features(nodes, number), "num_nodes": nodes}
        if has_slots:
            fields["child_slot"] = structure.child_slot[order]
        if has_input is not None:
            fields["has_input"] = structure.filled.to(has_input)
        if has_tokens:
            fields["token"] = torch.arange(nodes) % 3 - 1
        listed.append(kind(edge_index=structure.edge_index[:, order], **fields))
    return listed


def meant(example: Any, fields: tuple[str, ...], arity: int | None) -> Placed:
    """Return the structure that some fields of an example say, edge by edge."""
    nodes = example.num_nodes
    edges = list(zip(*example.edge_index.tolist(), strict=True))
    if "child_slot" in fields and "child_slot" in example:
        slots = example.child_slot.tolist()
    else:
        parents = [parent for _, parent in edges]
        slots = [parents[:edge].count(parent) for edge, parent in enumerate(parents)]
    places: list[list[int | None]] = [[None] * (arity or 0) for _ in range(nodes)]
    for slot, (child, parent) in sorted(zip(slots, edges, strict=True), key=lambda pair: pair[0]):
        if arity is None:
            places[parent].append(child)
        else:
            places[parent][slot] = child
    reads = [True] * nodes
    if "has_input" in fields and "has_input" in example:
        reads = [bool(flag) for flag in example.has_input]
    return Placed(tuple(map(tuple, places)), tuple(reads))


def by_recursion(kind: str, layer: Any, listed: list[Any], x: Tensor, way: Way) -> Tensor:
    """Return the rows of all examples, whose inputs follow each other in x."""
    rows = []
    inputs = x.split([example.num_nodes for example in listed])
    for example, own in zip(listed, inputs, strict=True):
        structure = meant(example, way.meaning, arity_of(layer))
        rows.append(KINDS[kind].reference(layer, structure, own))
    return torch.cat(rows)


def layer_of(kind: str, direction: str) -> Any:
    torch.manual_seed(0)
    return KINDS[kind].make(direction=direction).double()


@pytest.mark.parametrize(("kind", "direction"), DIRECTIONS)
@few(6)
@given(data=st.data())
def test_ways_of_calling_a_batch_are_the_recursion(
    kind: str, direction: str, data: st.DataObject
) -> None:
    layer = layer_of(kind, direction)
    arity = arity_of(layer)
    listed = data.draw(examples(arity, only_trees=direction == "top_down"))
    batch = Collater(arity=arity, direction=direction)(listed)
    for way in ways_of(kind):
        x = batch.x.clone().requires_grad_()
        expected = by_recursion(kind, layer, listed, x, way)
        got = call(layer, x, batch, way.fields)
        assert_equal([got], [expected])
        assert_equal(gradients(layer, x, [got]), gradients(layer, x, [expected]))


@pytest.mark.parametrize(("kind", "direction"), DIRECTIONS)
@few(6)
@given(data=st.data())
def test_a_call_of_one_example_is_the_recursion(
    kind: str, direction: str, data: st.DataObject
) -> None:
    layer = layer_of(kind, direction)
    way = WAYS["edges and fields"]
    for example in data.draw(examples(arity_of(layer), only_trees=direction == "top_down")):
        expected = by_recursion(kind, layer, [example], example.x, way)
        got = call(layer, example.x, example, way.fields)
        assert_equal([got], [expected])


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
    layer = layer_of(kind, "bottom_up")
    edges, x = torch.tensor([[0, 1], [2, 2]]), recursion.features(3)
    batch = Collater(arity=arity_of(layer))([Data(edge_index=edges, num_nodes=3)])
    batch.has_input = torch.tensor(mask)
    for fields in (("edge_index", "has_input"), ("edge_index", "schedule", "has_input")):
        with pytest.raises(ValueError, match="has_input is not a mask"):
            call(layer, x, batch, fields)


@pytest.mark.parametrize("kind", ["nary-2", "TopologicalConv", "DAGNN"])
def test_a_schedule_of_other_inputs_is_refused(kind: str) -> None:
    layer = layer_of(kind, "bottom_up")
    edges, x = torch.tensor([[0, 1], [2, 2]]), recursion.features(3)
    some = torch.tensor([True, False, True])
    example = Data(edge_index=edges, num_nodes=3, has_input=some)
    batch = Collater(arity=arity_of(layer))([example])
    batch.has_input = ~some
    with pytest.raises(ValueError, match="belongs to a different graph"):
        call(layer, x, batch, ("edge_index", "schedule", "has_input"))
