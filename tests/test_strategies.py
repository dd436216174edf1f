"""The random structures are what their names say."""

import pytest
from hypothesis import given

from tests.strategies import SHAPES, Dag, batches, dags, deep, forests, full_trees, trees


def assert_sound(dag: Dag) -> None:
    assert sorted(dag.order) == list(range(dag.num_nodes))
    assert dag.edge_index.shape == (2, dag.num_edges)
    for child, parent, slot in zip(*dag.edge_index.tolist(), dag.child_slot.tolist(), strict=True):
        assert dag.children[parent][slot] == child
        assert dag.depth[child] < dag.depth[parent]


@given(trees(max_arity=2))
def test_trees_have_one_root_and_bounded_arity(tree: Dag) -> None:
    assert_sound(tree)
    assert len(tree.roots) == 1
    assert tree.num_edges == tree.num_nodes - 1
    assert max(map(len, tree.children)) <= 2


@given(full_trees(arity=3))
def test_full_trees_have_no_missing_child(tree: Dag) -> None:
    assert_sound(tree)
    assert {len(children) for children in tree.children} <= {0, 3}


@given(forests(max_trees=3))
def test_forests_have_few_roots(forest: Dag) -> None:
    assert_sound(forest)
    assert forest.num_nodes - forest.num_edges == len(forest.roots) <= 3


@given(dags(repeats=True))
def test_dags_are_acyclic(dag: Dag) -> None:
    assert_sound(dag)


@given(batches(max_examples=2))
def test_batches_are_never_empty(batch: list[Dag]) -> None:
    assert 1 <= len(batch) <= 2


@pytest.mark.parametrize("name", SHAPES)
def test_special_shapes(name: str) -> None:
    assert_sound(SHAPES[name]())


def test_deep_needs_no_recursion() -> None:
    assert max(deep().depth) == 9_999
