"""Columns of trees are the list of these trees, and merge as PyG does or step aside."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from pyg_dynbatch.data import DynTreeData, Vocabulary
from pyg_dynbatch.datasets import TreeDataset
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.trees.columns import TreeColumns
from pyg_dynbatch.trees.datasets import Content
from tests.strategies import Dag, structures
from tests.trees.helpers import assert_same


def tree_of(dag: Dag, rich: bool) -> DynTreeData:
    number = torch.arange(dag.num_nodes)
    fields: dict[str, Any] = {"token": number - 1}
    if rich:
        fields |= {"x": number[:, None] * torch.ones(2), "y": number / 2, "has_input": number > 0}
        fields["target"] = torch.tensor([[1.0 * dag.num_nodes]])
    return DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes, **fields)


def chain(nodes: int, **fields: Any) -> DynTreeData:
    edges = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
    return DynTreeData(edges, num_nodes=nodes, **fields)


def full(nodes: int) -> DynTreeData:
    return chain(
        nodes,
        token=torch.arange(nodes) - 1,
        x=torch.randn(nodes, 2),
        y=torch.randn(nodes),
        has_input=torch.arange(nodes) > 0,
        target=torch.randn(1, 3),
    )


def small() -> list[DynTreeData]:
    edges = torch.tensor([[0, 1], [2, 2]])
    return [DynTreeData(edges, token=torch.tensor([5 + n, 6, -1])) for n in range(3)]


def dataset_of(trees: list[DynTreeData]) -> TreeDataset:
    content = Content({"all": trees}, lambda tree, _: tree, 1)
    return TreeDataset(None, "all", {}, lambda: content, Vocabulary([]))


def columns_of(trees: list[DynTreeData], rows: Sequence[int]) -> TreeColumns:
    columns = dataset_of(trees).__getitems__(rows)
    assert isinstance(columns, TreeColumns)
    return columns


def assert_same_batch(wanted: Batch, found: Batch | None) -> None:
    assert found is not None
    # Data.keys makes a list of a set; the order of the fields counts.
    assert list(found.stores[0].keys()) == list(wanted.stores[0].keys())
    assert_same(wanted, found)


@given(st.lists(structures(), min_size=1, max_size=4), st.booleans(), st.data())
def test_same_as_the_list(dags: list[Dag], rich: bool, data: st.DataObject) -> None:
    trees = [tree_of(dag, rich) for dag in dags] * 2  # one tree alone has no slices
    rows = data.draw(st.lists(st.integers(0, len(trees) - 1), min_size=1, max_size=6))
    dataset, chosen = dataset_of(trees), [trees[row] for row in rows]
    joined = TreeColumns.of(trees)
    assert joined is not None
    for columns in (dataset.__getitems__(rows), joined[rows]):
        assert len(columns) == len(list(columns)) == len(rows)
        for wanted, found in zip(chosen, columns, strict=True):
            assert_same(wanted, found)
        for _ in range(2):  # the columns are not used up
            assert_same_batch(Batch.from_data_list(list(columns)), columns.merged())
        for arity in (None, 3):
            one, other = (Collater(arity=arity)(each) for each in (columns, chosen))
            assert one.schedule == other.schedule
            assert one.schedule.checksums == other.schedule.checksums
    for row, tree in enumerate(dataset.__getitems__(range(len(dataset)))):
        assert_same(dataset[row], tree)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.booleans())
def test_merging_is_that_of_pyg(sizes: list[int], rich: bool) -> None:
    trees = [full(n) if rich else chain(n) for n in sizes]
    columns = TreeColumns.of(trees)
    assert columns is not None
    assert_same_batch(Batch.from_data_list(trees), columns.merged())


def test_excluded_fields() -> None:
    trees = [full(2), full(3)]
    wanted = Batch.from_data_list(trees, exclude_keys=["x", "y"])
    for columns, excluded in (
        (TreeColumns.of(trees, ["x", "y"]), ()),
        (TreeColumns.of(trees), "xy"),
    ):
        assert columns is not None
        assert_same_batch(wanted, columns.merged(excluded))
        assert columns.merged(["num_nodes"]) is None


def test_examples_stay_as_they_were() -> None:
    tree = full(3)
    Collater()([tree, tree])
    assert torch.equal(tree.edge_index, chain(3).edge_index)
    Collater()([tree]).edge_index.add_(7)
    assert torch.equal(tree.edge_index, chain(3).edge_index)


def test_is_a_sequence() -> None:
    columns = columns_of(small(), [2, 0])
    assert [tree.token[0].item() for tree in columns[:]] == [7, 5]
    last = columns[-1].token.tolist()
    assert (
        last
        == columns[[-1]][0].token.tolist()
        == columns[np.array([False, True])][0].token.tolist()
    )
    assert last == [5, 6, -1] and len(columns[[]]) == len(columns[2:]) == 0
    assert repr(columns) == "TreeColumns(2 examples, 6 nodes)"
    for wrong in (2, [0, 2]):
        with pytest.raises(IndexError):
            columns[wrong]


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
        ("edge_index", torch.tensor([[0, 1], [2, 2]]).int(), "int32 tensor"),
        ("token", torch.tensor([1]), "token has the wrong length"),
        ("child_slot", torch.tensor([1]), "child_slot has the wrong length"),
    ],
)
def test_broken_trees_are_named(key: str, value: torch.Tensor, told: str) -> None:
    trees = small()
    if value.dtype == torch.int32:
        for tree in trees:
            tree[key] = value
    trees[1][key] = value
    for examples in (trees, TreeColumns.of(trees)):
        with pytest.raises(ValueError, match=told):
            Collater()(examples)


class OwnTree(DynTreeData):
    pass


@pytest.mark.parametrize(
    "examples",
    [
        [Data(num_nodes=1)],
        [OwnTree(torch.empty(2, 0, dtype=torch.int64), num_nodes=1)],
        [chain(2, mark=torch.zeros(1))],
        [chain(2, name="a")],
        [chain(2, target=torch.tensor(1.0))],
        [chain(2), full(2)],
        [chain(2, y=torch.zeros(2)), chain(2, y=torch.zeros(2, dtype=torch.int64))],
        [chain(2, x=torch.zeros(2, 1)), chain(2, x=torch.zeros(2, 3))],
        [chain(2, x=torch.zeros(2, 1).to_sparse())],
        [chain(2, x=torch.zeros(2, 1, device="meta"))],
    ],
)
def test_steps_aside_for_examples(examples: list[Data]) -> None:
    assert TreeColumns.of(examples) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", ["a", "b", "c"]),
        ("mark", torch.zeros(9)),
        ("token", torch.zeros(9, device="meta")),
        ("x", torch.zeros(9, 2).to_sparse()),
    ],
)
def test_steps_aside_for_data_sets(key: str, value: Any) -> None:
    dataset = dataset_of(small())
    assert isinstance(dataset.__getitems__([0]), TreeColumns)
    dataset._data[key] = value
    dataset.slices = {**dataset.slices, key: dataset.slices["token"]}
    assert isinstance(dataset.__getitems__([0]), list)
