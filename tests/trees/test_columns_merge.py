"""The quick merge is PyG's merge, field for field, or steps aside."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.trees.columns import merge_trees


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


def assert_same_batch(wanted: Batch, found: Batch) -> None:
    assert type(found) is type(wanted)
    # Data.keys makes a list of a set, whose order is that of the hashes; that of the fields counts.
    assert list(found.stores[0].keys()) == list(wanted.stores[0].keys())
    for key in wanted.keys():  # noqa: SIM118 - no dict
        assert type(found[key]) is type(wanted[key])
        if isinstance(wanted[key], torch.Tensor):
            assert found[key].dtype == wanted[key].dtype
            assert torch.equal(found[key], wanted[key])
        else:
            assert found[key] == wanted[key]
    assert found.num_graphs == wanted.num_graphs
    assert found.stores[0]._num_nodes == wanted.stores[0]._num_nodes
    for name in ("_slice_dict", "_inc_dict"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
        assert all(mine[key].dtype == theirs[key].dtype for key in theirs)
    for one, other in zip(found.to_data_list(), wanted.to_data_list(), strict=True):
        assert str(one) == str(other)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True)
                   if isinstance(a, torch.Tensor))  # fmt: skip


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.booleans())
def test_same_as_pyg(sizes: list[int], rich: bool) -> None:
    trees = [full(n) if rich else chain(n) for n in sizes]
    found = merge_trees(trees, ())
    assert found is not None
    assert_same_batch(Batch.from_data_list(trees), found)


def test_excluded_fields() -> None:
    trees = [full(2), full(3)]
    found = merge_trees(trees, {"x", "y"})
    assert found is not None
    assert_same_batch(Batch.from_data_list(trees, exclude_keys=["x", "y"]), found)


def test_examples_stay_as_they_were() -> None:
    tree = full(3)
    merge_trees([tree, tree], ())
    assert torch.equal(tree.edge_index, chain(3).edge_index)
    single = merge_trees([tree], ())
    assert single is not None
    single.edge_index += 7
    assert torch.equal(tree.edge_index, chain(3).edge_index)


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
def test_steps_aside(examples: list[Data]) -> None:
    assert merge_trees(examples, ()) is None


def test_the_collater_uses_it_unless_asked_for_more() -> None:
    trees = [full(3), full(1)]
    quick = Collater(arity=1)(trees)
    slow = Collater(arity=1, follow_batch=["y"])(trees)
    assert "y_batch" in slow
    assert quick.schedule == slow.schedule
    assert torch.equal(quick.batch, slow.batch)
