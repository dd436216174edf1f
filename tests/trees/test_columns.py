"""Columns of trees are the list of these trees, and make the same batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, InMemoryDataset
from torch_geometric.data.collate import collate

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.trees.columns import TreeColumns, TreeTable
from tests.strategies import Dag, structures
from tests.trees.test_columns_merge import assert_same_batch


def tree_of(dag: Dag, rich: bool) -> DynTreeData:
    number = torch.arange(dag.num_nodes)
    fields: dict[str, Any] = {"token": number - 1}
    if rich:
        fields |= {"x": number[:, None] * torch.ones(2), "y": number / 2, "has_input": number > 0}
        fields["target"] = torch.tensor([[1.0 * dag.num_nodes]])
    return DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, **fields)


def side_by_side(trees: list[DynTreeData]) -> tuple[DynTreeData, dict[str, torch.Tensor]]:
    """Puts trees side by side as ``InMemoryDataset`` does, each counting its nodes from 0."""
    data, slices, _ = collate(DynTreeData, trees, increment=False, add_batch=False)
    return data, slices


def columns_of(trees: list[DynTreeData], rows: list[int]) -> TreeColumns:
    data, slices = side_by_side(trees)
    found = TreeTable(slices).take(data, rows)
    assert found is not None
    return found


def assert_same_tree(wanted: DynTreeData, found: DynTreeData) -> None:
    assert type(found) is DynTreeData
    assert set(found.keys()) == set(wanted.keys())
    for key, value in wanted.to_dict().items():
        assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key
        assert type(found[key]) is type(value)


@given(st.lists(structures(), min_size=1, max_size=4), st.booleans(), st.data())
def test_same_as_the_list(dags: list[Dag], rich: bool, data: st.DataObject) -> None:
    trees = [tree_of(dag, rich) for dag in dags]
    # One tree alone has no slices.
    trees = trees * 2
    rows = data.draw(st.lists(st.integers(0, len(trees) - 1), min_size=1, max_size=6))
    columns, chosen = columns_of(trees, rows), [trees[row] for row in rows]
    assert len(columns) == len(list(columns)) == len(rows)
    for wanted, found in zip(chosen, columns, strict=True):
        assert_same_tree(wanted, found)
    # Twice: the columns are not used up.
    for _ in range(2):
        found = columns.merged()
        assert found is not None
        assert_same_batch(Batch.from_data_list(list(columns)), found)
    for arity in (None, 3):
        one, other = (Collater(arity=arity)(each) for each in (columns, chosen))
        assert one.schedule == other.schedule
        assert one.schedule.structure == other.schedule.structure


def small() -> list[DynTreeData]:
    edges = torch.tensor([[0, 1], [2, 2]])
    return [DynTreeData(edges, token=torch.tensor([5 + n, 6, -1])) for n in range(3)]


def test_is_a_sequence() -> None:
    columns = columns_of(small(), [2, 0])
    assert [tree.token[0].item() for tree in columns[:]] == [7, 5]
    assert columns[-1].token.tolist() == [5, 6, -1]
    assert repr(columns) == "TreeColumns(2 trees, 6 nodes)"
    with pytest.raises(IndexError):
        columns[2]


def test_the_collater_leaves_fields_out_and_follows_others() -> None:
    columns = columns_of(small(), [1, 1, 0])
    assert "token" not in Collater(exclude_keys=["token"])(columns)
    followed = Collater(follow_batch=["token"])(columns)
    assert followed.token_batch.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert followed.schedule == Collater()(columns).schedule


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("edge_index", torch.tensor([[0, 3], [2, 2]]), "got:      3 -> 2\n  where:    example 1"),
        ("edge_index", torch.tensor([[0, -1], [2, 2]]), "got:      -1 -> 2\n  where:    example 1"),
        ("edge_index", torch.tensor([[0, 1], [2, 2]]).int(), "got:      int32 tensor"),
        ("token", torch.tensor([1]), "token has the wrong length"),
        ("child_slot", torch.tensor([1]), "child_slot has the wrong length"),
        (
            "depth",
            torch.tensor([0, 0, 0]),
            "example 1 of the batch: Schedule.from_structure: depth",
        ),
    ],
)
def test_broken_trees_are_named(key: str, value: torch.Tensor, told: str) -> None:
    trees = small()
    if value.dtype == torch.int32:
        for tree in trees:
            tree[key] = value
    trees[1][key] = value
    with pytest.raises(ValueError) as caught:
        Collater()(columns_of(trees, [0, 1, 2]))
    with pytest.raises(ValueError) as of_list:
        Collater()(trees)
    assert told in str(caught.value)
    assert str(caught.value) == str(of_list.value)


def test_steps_aside() -> None:
    data, slices = side_by_side(small())
    assert TreeTable(slices | {"name": slices["token"]}).take(data, [0]) is not None
    for key, value in {
        "name": ["a", "b", "c"],
        "mark": torch.zeros(9),
        "token": torch.zeros(9, device="meta"),
        "x": torch.zeros(9, 2).to_sparse(),
    }.items():
        other = data.clone()
        other[key] = value
        assert TreeTable(slices | {key: slices["token"]}).take(other, [0]) is None
    del data.stores[0]._num_nodes
    assert TreeTable(slices).take(data, [0]) is None


class Trees(InMemoryDataset):
    """Shows that the columns agree with what PyG cuts out of the same tensors."""

    def __init__(self, trees: list[DynTreeData]) -> None:
        super().__init__(None)
        self.data, self.slices = self.collate(trees)


@given(structures(), structures())
def test_trees_are_those_of_pyg(first: Dag, second: Dag) -> None:
    dataset = Trees([tree_of(first, True), tree_of(second, True)])
    found = TreeTable(dataset.slices).take(dataset._data, [1, 0])
    assert found is not None
    for row, tree in zip((1, 0), found, strict=True):
        assert list(tree.stores[0].keys()) == list(dataset[row].stores[0].keys())
        assert_same_tree(dataset[row], tree)
