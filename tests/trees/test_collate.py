import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToSparseTensor

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.data import DynTreeData, from_nested
from pyg_dynbatch.loader import Collater
from tests.strategies import batches, diamond

TREE = from_nested((4, (5, 6)))
LEAF = from_nested(3)


def example(dag, token: bool = True) -> DynTreeData:
    rows = torch.tensor([-1 if below else node for node, below in enumerate(dag.children)])
    fields = {"token": rows} if token else {}
    return DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, **fields)


@given(batches(), st.sampled_from([None, 3]), st.sampled_from(["bottom_up", "top_down"]))
def test_schedule_is_that_of_all_edges_together(dags, arity, direction):
    if direction == "top_down":
        arity = None
    trees = [example(dag) for dag in dags]
    batch = Collater(arity=arity, direction=direction)(trees)
    expected = schedule_structure(
        batch.edge_index,
        batch.num_nodes,
        child_slot=batch.child_slot,
        arity=arity,
        has_input=batch.token >= 0,
        example_sizes=[tree.num_nodes for tree in trees],
        direction=direction,
    )
    assert batch.schedule == expected
    assert batch.schedule.arity == arity
    assert batch.num_graphs == batch.schedule.num_examples == len(dags)
    for before, after in zip(trees, batch.to_data_list(), strict=True):
        assert torch.equal(before.edge_index, after.edge_index)
        assert torch.equal(before.root_index, after.root_index)
        assert "schedule" not in after
        after.validate()


def test_which_nodes_read_an_input():
    def inputs(data):
        return Collater()([data, data]).schedule.input_node.sort().values.tolist()

    tree = {"edge_index": torch.tensor([[0, 1], [2, 2]]), "num_nodes": 3}
    mark = torch.tensor([False, True, True])
    assert inputs(DynTreeData(**tree)) == [0, 1, 2, 3, 4, 5]
    assert inputs(DynTreeData(**tree, has_input=mark)) == [1, 2, 4, 5]
    token = torch.tensor([7, -1, -1])
    assert inputs(DynTreeData(**tree, has_input=mark, token=token)) == [0, 3]


def test_both_directions():
    batch = Collater(direction="both")([TREE, LEAF])
    assert batch.schedule.direction == "bottom_up"
    assert batch.schedule_down.direction == "top_down"
    only = Collater(direction="top_down")([TREE, LEAF])
    assert "schedule_down" not in only
    assert only.schedule == batch.schedule_down


def test_plain_data_and_nested_collections():
    plain = Data(x=torch.ones(3, 2), edge_index=torch.tensor([[0, 1], [2, 2]]))
    batch = Collater()([plain, plain])
    assert batch.schedule.num_nodes == 6
    pair = Collater()([(TREE, 1, {"other": LEAF}), (LEAF, 2, {"other": TREE})])
    assert pair[0].schedule.num_nodes == 6
    assert pair[1].tolist() == [1, 2]
    assert pair[2]["other"].schedule.num_nodes == 6
    bare = Collater()([Data(x=torch.ones(1, 1)), Data(x=torch.ones(1, 1))])
    assert "schedule" not in bare
    mixed = HeteroData()
    mixed["word"].x = torch.ones(2, 1)
    assert Collater()([mixed, mixed])["word"].x.shape == (4, 1)


def test_pyg_options_still_work():
    batch = Collater(follow_batch=["root_index"], exclude_keys=["token"])([TREE, LEAF])
    assert batch.root_index_batch.tolist() == [0, 1]
    assert "token" not in batch
    with pytest.raises(ValueError, match="exclude_keys holds what the plan is made from"):
        Collater(exclude_keys=["edge_index"])


def test_batch_survives_moves_and_pickling():
    batch = Collater(arity=2, direction="both")([TREE, LEAF])
    again = pickle.loads(pickle.dumps(batch))
    assert again.schedule == batch.schedule
    assert again.to_data_list()[0].token.tolist() == TREE.token.tolist()
    meta = Collater(arity=2)([TREE, LEAF]).to("meta")
    assert meta.schedule.device.type == "meta"
    assert meta.schedule.level_sizes == batch.schedule.level_sizes
    for moved in (batch.clone(), batch.cpu(), batch.contiguous(), batch.share_memory_()):
        assert moved.schedule == batch.schedule
        assert isinstance(moved.schedule, Levels)
    assert repr(Collater(arity=2)) == "Collater(arity=2, direction='bottom_up')"


def test_a_schedule_kept_on_an_example_does_not_get_in_the_way():
    kept = TREE.clone()
    kept.schedule = Collater()([TREE, LEAF]).schedule
    for examples in ([kept, TREE], [TREE, kept], [kept, kept]):
        batch = Collater()(examples)
        assert batch.schedule.num_nodes == 2 * TREE.num_nodes


def broken(**fields) -> DynTreeData:
    data = TREE.clone()
    for key, value in fields.items():
        data[key] = value
    return data


FAR = torch.tensor([[5, *TREE.edge_index[0, 1:].tolist()], TREE.edge_index[1].tolist()])
Y = torch.zeros(5).long()
WIDE = torch.zeros(5, 3)
FAULTS = {
    "empty": ([], {}, "Collater: the batch is empty.\n  expected: at least one example"),
    "a further field": (
        [TREE, TREE, broken(y=Y)],
        {},
        "an example has other fields than the first of its batch.\n  .*\n"
        "  got:      also y\n  where:    example 2 of the batch",
    ),
    "a missing field": ([broken(y=Y), TREE], {}, "got:      no y"),
    "a field that is not excluded": (
        [broken(y=Y), broken(x=WIDE)],
        {"exclude_keys": ["y"]},
        "got:      also x",
    ),
    "dtypes": (
        [TREE, broken(token=TREE.token.float())],
        {},
        "token has a different dtype or width than in the first example.\n"
        "  expected: int64 tensor .5.\n"
        "  got:      float32 tensor .5.\n"
        "  where:    example 1 of the batch",
    ),
    "widths": (
        [broken(x=torch.zeros(5, 2)), broken(x=torch.zeros(5, 2)), broken(x=WIDE)],
        {},
        "expected: float32 tensor .5, 2.\n  got:      float32 tensor .5, 3.\n.*example 2",
    ),
    "an edge into the next example": (
        [LEAF, broken(edge_index=FAR), TREE],
        {},
        "Collater: an edge has a node that does not exist.\n"
        "  expected: node numbers from 0 to 4\n"
        "  got:      5 -> 0\n"
        "  where:    example 1 of the batch",
    ),
    "a short field of nodes": (
        [TREE, broken(token=TREE.token[:3])],
        {},
        "Collater: token has the wrong length.\n"
        "  expected: 5 rows\n"
        "  got:      3\n"
        "  where:    example 1 of the batch",
    ),
    "a short field of edges": (
        [LEAF, broken(child_slot=torch.tensor([0]))],
        {},
        r"child_slot has the wrong length[\s\S]*try: +leave child_slot out",
    ),
    "arity": ([LEAF, TREE, from_nested((1, 2, 3))], {"arity": 2}, "Collater: example 2 of the"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str) -> None:
    examples, options, match = FAULTS[fault]
    with pytest.raises(ValueError, match=match):
        Collater(**options)(examples)


def test_options() -> None:
    Collater(exclude_keys=["y"])([TREE, broken(y=Y)])
    with pytest.raises(ValueError, match="Collater: arity is too small"):
        Collater(arity=0)
    with pytest.raises(ValueError, match="Collater: unknown direction"):
        Collater(direction="up")


def test_dag_with_shared_parts():
    batch = Collater()([example(diamond())] * 2)
    assert batch.schedule.level_sizes == (2, 4, 2)


def tree_with(**fields: Any) -> DynTreeData:
    return DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3, **fields)


@pytest.mark.parametrize("direction", ["bottom_up", "top_down"])
@pytest.mark.parametrize("stock", [False, True])
def test_fields_that_contradict_the_tree_are_refused(direction: str, stock: bool) -> None:
    # With a field that DynTreeData does not name, PyG merges.
    more = {"more": torch.zeros(3)} if stock else {}
    collate = Collater(direction=direction)
    token = torch.tensor([4, 7, -1])
    good = tree_with(token=token, **more)
    bad = tree_with(token=torch.tensor([4, -2, 1]), **more)
    text = r"example 1[\s\S]*token is out of range at node 1\.\n.*-1 \(none\) or 0 upwards\n.*-2"
    with pytest.raises(ValueError, match=text):
        collate([good, bad])
    match = r"root_index does not belong[\s\S]*expected: \[2\][\s\S]*example 2"
    for roots in ([1], [1, 2], []):
        wrong = tree_with(token=token, root_index=torch.tensor(roots, dtype=torch.long), **more)
        with pytest.raises(ValueError, match=match):
            collate([good, good, wrong])


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_adjacency_matrices() -> None:
    tree = DynTreeData(torch.tensor([[1, 0], [2, 1]]), num_nodes=3)
    both = ToSparseTensor(remove_edge_index=False)(tree.clone())
    batch = Collater()([both, both])
    plain = DynTreeData(both.edge_index, both.child_slot, num_nodes=3)  # PyG sorts the edges
    assert batch.schedule == Collater()([plain, plain]).schedule
    assert batch.adj_t.shape == (6, 6)
    alone = ToSparseTensor()(tree.clone())
    match = r"no edge_index to make a schedule from[\s\S]*remove_edge_index=False"
    with pytest.raises(ValueError, match=match):
        Collater()([alone, alone])


def trees(count: int) -> list[DynTreeData]:
    return [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * count
