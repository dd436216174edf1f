import copy
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch
from torch_geometric.io import fs
from torch_geometric.transforms import LargestConnectedComponents, RemoveIsolatedNodes

from pyg_dynbatch.data import DynTreeData
from tests.strategies import SHAPES, Dag, deep, structures
from tests.trees.helpers import assert_same

EDGES = torch.tensor([[0, 1], [2, 2]])


def tree_of(dag: Dag, **fields) -> DynTreeData:
    return DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, **fields)


@given(structures())
def test_depth_slots_and_roots_are_computed(dag):
    data = DynTreeData(dag.edge_index, num_nodes=dag.num_nodes)
    assert data.depth.tolist() == dag.depth
    assert data.root_index.tolist() == dag.roots
    assert data.validate() is data
    order = data.child_slot.argsort(stable=True)
    for parent in range(dag.num_nodes):
        mine = order[data.edge_index[1, order] == parent]
        assert data.child_slot[mine].tolist() == list(range(mine.numel()))
        assert mine.tolist() == sorted(mine.tolist()), "the order of the edges"


@pytest.mark.parametrize("shape", [*SHAPES, "deep chain"])
def test_special_shapes(shape):
    dag = deep(5_000) if shape == "deep chain" else SHAPES[shape]()
    data = tree_of(dag).validate(require_tree=shape != "diamond")
    assert data.depth.tolist() == dag.depth


def test_only_given_fields_are_stored():
    data = DynTreeData(EDGES, num_nodes=3)
    assert set(data.keys()) == {"edge_index", "child_slot", "depth", "root_index", "num_nodes"}
    assert DynTreeData().keys() == []
    assert DynTreeData(EDGES, y=torch.tensor([0, 1, 2])).num_nodes == 3
    assert DynTreeData(EDGES, num_nodes=3, name="a tree").name == "a tree"


def test_fields_collate_as_the_table_says():
    fields = {
        "token": torch.tensor([4, 5, -1]),
        "y": torch.tensor([0, 1, 2]),
        "x": torch.ones(3, 2),
    }
    first = DynTreeData(EDGES, **fields, target=torch.ones(1, 2), has_input=fields["token"] > 0)
    leaf = first.subgraph(torch.tensor([0]))
    batch = Batch.from_data_list([first, leaf, first])
    assert batch.edge_index.tolist() == [[0, 1, 4, 5], [2, 2, 6, 6]]
    assert batch.child_slot.tolist() == [0, 1, 0, 1]
    assert batch.depth.tolist() == [0, 0, 1, 0, 0, 0, 1]
    assert batch.token.tolist() == [4, 5, -1, 4, 4, 5, -1]
    assert batch.root_index.tolist() == [2, 3, 6]
    assert batch.target.shape == (3, 2)
    assert batch.ptr.tolist() == [0, 3, 4, 7]
    assert batch.num_nodes == 7
    for before, after in zip([first, leaf, first], batch.to_data_list(), strict=True):
        assert_same(before, after.validate())


def test_copies_pickles_and_loads_without_a_warning(tmp_path):
    data = DynTreeData(EDGES, num_nodes=3, y=torch.tensor([0, 1, 2]))
    for again in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert again.validate().to_dict().keys() == data.to_dict().keys()
    torch.save([data], tmp_path / "trees.pt")
    assert torch.load(tmp_path / "trees.pt", weights_only=True)[0].validate().num_nodes == 3
    assert fs.torch_load(str(tmp_path / "trees.pt"))[0].validate().num_nodes == 3


def test_node_and_edge_fields_are_told_apart_in_a_dag_with_as_many_of_both():
    data = DynTreeData(torch.tensor([[0, 0, 1], [1, 2, 2]]), num_nodes=3)
    assert data.is_node_attr("depth")
    assert not data.is_edge_attr("depth")
    assert data.is_edge_attr("child_slot")
    assert not data.is_node_attr("child_slot")
    assert not data.is_node_attr("root_index")


@given(structures(), st.data())
def test_parts_have_their_own_depths_and_roots(dag: Dag, draw: st.DataObject) -> None:
    nodes = torch.arange(dag.num_nodes)
    whole = tree_of(dag, token=nodes)
    kept = draw.draw(st.permutations(range(dag.num_nodes)))
    kept = torch.tensor(kept[: draw.draw(st.integers(1, dag.num_nodes))])
    edges = torch.tensor(
        draw.draw(st.lists(st.booleans(), min_size=whole.num_edges, max_size=whole.num_edges)),
        dtype=torch.bool,
    )
    mask = torch.zeros(dag.num_nodes, dtype=torch.bool).index_fill(0, kept, True)
    inside = mask[whole.edge_index].all(0)
    everything = torch.ones_like(edges)
    for part, chosen in (
        (whole.subgraph(kept), inside),
        (whole.subgraph(mask), inside),
        (whole.edge_subgraph(edges), edges),
        (LargestConnectedComponents()(whole), None),
        (whole.sort(), everything),
        (whole.sort(sort_by_row=False), everything),
        (whole.coalesce(), everything),
    ):
        part.validate()
        if chosen is not None:
            child, parent = part.token[part.edge_index]
            found = zip(child.tolist(), parent.tolist(), part.child_slot.tolist(), strict=True)
            rows = [*whole.edge_index[:, chosen].tolist(), whole.child_slot[chosen].tolist()]
            assert sorted(found) == sorted(zip(*rows, strict=True))
    assert whole.coalesce().is_sorted() and whole.sort(sort_by_row=False).is_sorted(False)
    whole.validate()


def test_roots_that_a_transform_leaves_behind_are_named() -> None:
    data = RemoveIsolatedNodes()(DynTreeData(torch.tensor([[1], [2]]), num_nodes=4))
    with pytest.raises(ValueError, match="leave root_index out"):
        data.validate()


NONE = torch.empty(2, 0, dtype=torch.long)
CYCLE, FAR = torch.tensor([[0, 1, 2], [1, 2, 0]]), torch.tensor([[0, 5], [2, 2]])
TWO_PARENTS, THREE_PARENTS = torch.tensor([[0, 0], [1, 2]]), torch.tensor([[0, 0, 0], [1, 2, 3]])
TREE = {"require_tree": True}
GIVEN = {"depth": torch.zeros(3).long(), "root_index": torch.tensor([2])}  # not to be computed
FORM = "has an invalid shape or dtype.\n  expected: "


FAULTS = [
    ({"edge_index": NONE, "num_nodes": 0}, {}, "the tree is empty"),
    ({"edge_index": TWO_PARENTS}, TREE, "node 0 has two parents"),
    ({"edge_index": THREE_PARENTS, "num_nodes": 4}, TREE, "node 0 has 3 parents"),
    ({"num_nodes": 4}, TREE, "number of roots.\n  expected: 1\n  got:      2: nodes [2, 3]"),
    ({"edge_index": FAR, **GIVEN}, {}, "got:      5 -> 2\n  where:    edge 1"),
    ({"edge_index": CYCLE, **GIVEN}, {}, "has a cycle.\n  expected: edges from child to"),
    ({"edge_index": CYCLE, **GIVEN}, {}, "  got:      0 -> 1 -> 2 -> 0"),
    ({"depth": [0, 0, 2]}, {}, "edge_index.\n  expected: depth 1 at node 2\n  got:      2"),
    ({"root_index": [0]}, {}, "to edge_index.\n  expected: [2]\n  got:      [0]"),
    ({"child_slot": [1, 1]}, {}, "two children of node 2 have the same slot.\n  expected: one"),
    ({"child_slot": [1, 1]}, {}, "got:      nodes [0, 1] in slot 1"),
    ({"child_slot": [0, -1]}, {}, "child_slot is negative"),
    ({"token": torch.zeros(3)}, {}, f"token {FORM}int64 tensor [3], one per node\n  got: "),
    ({"token": [0, 0]}, {}, "got:      int64 tensor [2]"),
    ({"depth": [0] * 5}, {}, "tensor [5]\n  try:      leave depth"),
    ({"child_slot": [0] * 5}, {}, "try:      leave child_slot out"),
    ({"token": [0, -2, -1]}, {}, "at node 1.\n  expected: -1 (none) or 0 upwards\n  got:      -2"),
    ({"y": [0, 1, -5]}, {}, "y is out of range at node 2"),
    ({"y": torch.zeros(4)}, {}, f"y {FORM}"),
    ({"y": (1, 2, 3)}, {}, "got:      tuple"),
    ({"x": torch.zeros(3, 2).long()}, {}, f"x {FORM}"),
    ({"x": torch.zeros(4, 2)}, {}, "float32 tensor [4, 2]"),
    ({"x": torch.zeros(3)}, {}, "floating-point tensor [3, feature], one per node"),
    ({"has_input": torch.ones(3)}, {}, f"has_input {FORM}"),
    ({"target": torch.zeros(5)}, {}, f"target {FORM}tensor [1] or [1, value], one row per"),
]


@pytest.mark.parametrize(("fields", "demands", "words"), FAULTS)
def test_faults_are_named(fields: dict, demands: dict, words: str) -> None:
    fields = {"edge_index": EDGES, "num_nodes": 3, **fields}
    nodes = max(fields["num_nodes"], 1)
    if GIVEN.keys() <= fields.keys():  # set one by one: the constructor would refuse the edges
        data = DynTreeData()
        data.child_slot = torch.zeros(fields["edge_index"].size(1)).long()
    else:
        data = DynTreeData(fields["edge_index"], num_nodes=nodes)
    for key, value in fields.items():
        data[key] = torch.tensor(value) if isinstance(value, list) else value
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        data.validate(**demands)
    assert str(caught.value).startswith("DynTreeData: ")


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match="the tree is empty"):
        DynTreeData().validate()
    data = DynTreeData(EDGES, num_nodes=3)
    del data.depth
    with pytest.raises(ValueError, match="got:      nothing"):
        data.validate()
    with pytest.raises(ValueError, match="edge_index has a cycle"):
        DynTreeData(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    with pytest.raises(ValueError, match=r"the number of nodes is unknown[\s\S]*pass num_nodes="):
        DynTreeData(EDGES)


def test_good_values_pass():
    data = DynTreeData(
        EDGES,
        token=torch.tensor([0, 8, -1]),
        y=torch.tensor([0.5, float("nan"), 2.0]),
        x=torch.zeros(3, 4, dtype=torch.float64),
    )
    data.validate(require_tree=True)
    forest = DynTreeData(EDGES, num_nodes=4)
    forest.validate()
    gap = DynTreeData(EDGES, torch.tensor([0, 2]), num_nodes=3)
    gap.validate(require_tree=True)
    twice = DynTreeData(torch.tensor([[0, 0], [1, 1]]), num_nodes=2)
    twice.validate()
