import os
import pickle
import warnings
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.transforms import ToSparseTensor

from pyg_dynbatch.core.errors import describe_value
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.data import DynTreeData, from_nested
from pyg_dynbatch.loader import Collater, DataLoader
from pyg_dynbatch.models import TreeClassifier, TreeSchema
from tests.strategies import Dag, batches, dags, diamond, trees

TREE = from_nested((4, (5, 6)))
LEAF = from_nested(3)


def example(dag, token: bool = True) -> DynTreeData:
    rows = torch.tensor([-1 if below else node for node, below in enumerate(dag.children)])
    fields = {"token": rows, "has_input": rows >= 0} if token else {}
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


TOKEN = torch.tensor([7, -1, -1])
INPUTS = [
    ({}, [0, 1, 2, 3, 4, 5]),
    ({"has_input": torch.tensor([False, True, True])}, [1, 2, 4, 5]),
    ({"has_input": torch.tensor([0, 1, 1])}, [1, 2, 4, 5]),
    ({"has_input": torch.tensor([False, True, True]), "token": TOKEN}, [1, 2, 4, 5]),
    ({"token": TOKEN}, [0, 1, 2, 3, 4, 5]),
]


@pytest.mark.parametrize(("fields", "inputs"), INPUTS)
def test_which_nodes_read_an_input(fields: dict, inputs: list[int]) -> None:
    tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3, **fields)
    assert Collater()([tree, tree]).schedule.input_node.sort().values.tolist() == inputs


def test_both_directions():
    batch = Collater(direction="both")([TREE, LEAF])
    assert batch.schedule.direction == "bottom_up"
    assert batch.schedule_down.direction == "top_down"
    only = Collater(direction="top_down", exclude_keys=["y"])([TREE, LEAF])
    assert "schedule_down" not in only and only.schedule == batch.schedule_down
    shared = Collater()([example(diamond())] * 2)
    assert shared.schedule.level_sizes == (2, 4, 2)


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


WITH_Y = broken(y=torch.zeros(5).long())
NARROW, WIDE = broken(x=torch.zeros(5, 2)), broken(x=torch.zeros(5, 3))
FLOATS, WIDER = broken(token=TREE.token.float()), from_nested((1, 2, 3))


FAULTS = [
    ([], {}, "Collater: the batch is empty.\n  expected: at least one example"),
    ([TREE, TREE, WITH_Y], {}, "other fields than the first .*\n.*\n.* also y\n.*example 2"),
    ([WITH_Y, TREE], {}, "got:      no y"),
    ([WITH_Y, WIDE], {"exclude_keys": ["y"]}, "got:      also x"),
    ([TREE, FLOATS], {}, "token has a different dtype or .*\n.*int64.*\n.*float32.*\n.*1 of"),
    ([NARROW, NARROW, WIDE], {}, "float32 tensor .5, 2.\n.* tensor .5, 3.\n.*example 2"),
    ([LEAF, TREE, WIDER], {"arity": 2}, "Collater: example 2 of the"),
    ([TREE], {"arity": 0}, "Collater: arity is too small"),
    ([TREE], {"direction": "up"}, "Collater: unknown direction"),
    ([TREE], {"exclude_keys": ["edge_index"]}, "exclude_keys holds what the plan is made from"),
]


@pytest.mark.parametrize(("examples", "options", "words"), FAULTS)
def test_faults_are_named(examples: list, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Collater(**options)(examples)


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
    fine, wrong = (tree_with(has_input=torch.tensor([1, 0, n]), **more) for n in (1, 2))
    text = r"example 1[\s\S]*has_input is not a mask\.\n.*bool, or of the integers 0 and 1"
    with pytest.raises(ValueError, match=text):
        collate([fine, wrong])
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


BAD_TOKENS = [
    ["a", "b", "c"],
    np.array([1, 2, 3]),
    torch.tensor([[1], [2], [3]]),
    torch.tensor([1.0, 2.0, 3.0]),
]
DOORS = {
    "collater": Collater(),
    "collater, one example": lambda examples: Collater()(examples[:1]),
    "model": lambda examples: TreeClassifier(TreeSchema(5, 2), hidden_channels=4)(
        Batch.from_data_list(examples)
    ),
}


@pytest.mark.parametrize("token", BAD_TOKENS, ids=describe_value)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", [Data, DynTreeData])
def test_tokens_are_whole_numbers_in_one_vector(token: Any, door: str, kind: type) -> None:
    examples = [kind(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3, token=token)] * 2
    with pytest.raises(ValueError, match=r"token has [\s\S]*expected"):
        DOORS[door](examples)


def test_data_of_several_kinds_of_nodes_are_refused() -> None:
    hetero = HeteroData()
    hetero["word"].x = torch.zeros(3, 1)
    hetero["word", "below", "word"].edge_index = torch.tensor([[0, 1], [2, 2]])
    temporal = TemporalData(src=torch.tensor([0]), dst=torch.tensor([1]), t=torch.tensor([0]))
    for kind, example in (("HeteroData", hetero), ("TemporalData", temporal)):
        for several in ([example], [example, example], [(TREE, example)] * 2):
            with pytest.raises(TypeError, match=f"examples are not Data[\\s\\S]*got: *{kind}"):
                Collater()(several)
    with pytest.raises(TypeError, match="got one example"):
        Collater()(hetero)


def warnings_of(examples: list, direction: str) -> list[str]:
    collate = Collater(direction=direction)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            collate(examples)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("direction", ["bottom_up", "top_down", "both"])
@hypothesis.example([Dag(((1, 2), (), ()))])
@given(st.lists(trees() | dags(), min_size=1, max_size=3))
def test_trees_that_stand_on_their_heads_are_warned_of_once(direction: str, graphs: list) -> None:
    def batch(is_reversed: bool) -> list[Data]:
        edges = [graph.edge_index.flip(0) if is_reversed else graph.edge_index for graph in graphs]
        pairs = zip(edges, graphs, strict=True)
        return [Data(edge_index=index, num_nodes=graph.num_nodes) for index, graph in pairs]

    users = max(len(above) for graph in graphs for above in graph.parents)
    below = max(len(each) for graph in graphs for each in graph.children)
    for is_reversed, is_upside_down in ((False, users > 1 >= below), (True, below > 1 >= users)):
        said = warnings_of(batch(is_reversed), direction)
        assert len(said) == is_upside_down
        assert all("edge_index.flip(0)" in each for each in said)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_warn_once_in_all_passes(persistent: bool, capfd, monkeypatch) -> None:
    monkeypatch.setattr(warnings, "showwarning", lambda text, *_: os.write(2, str(text).encode()))
    data = Data(edge_index=torch.tensor([[2, 2], [0, 1]]), num_nodes=3)
    loader = DataLoader([data] * 8, batch_size=1, num_workers=2, persistent_workers=persistent)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for _ in range(2):
            list(loader)
    assert capfd.readouterr().err.count("point from parent to child") == 1


@pytest.mark.parametrize("mask", [[True, False, True], np.array([True, False, True])])
def test_an_input_mask_is_a_tensor(mask: object) -> None:
    data = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3, has_input=mask)
    with pytest.raises(ValueError, match="has_input is not a mask"):
        Collater()([data, data])
