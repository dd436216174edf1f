"""The random structures have the properties that the laws rely on."""

from hypothesis import given

from tests.strategies import Dag, batches, dags, forests, full_trees, trees


def assert_consistent(dag: Dag) -> None:
    assert sorted(dag.order) == list(range(dag.num_nodes))
    assert dag.edge_index.shape == (2, dag.num_edges)
    for child, parent, slot in zip(*dag.edge_index.tolist(), dag.child_slot.tolist(), strict=True):
        assert dag.children[parent][slot] == child
        assert dag.depth[child] < dag.depth[parent]


@given(
    trees(max_arity=2), full_trees(arity=3), forests(max_trees=3), dags(repeats=True),
    batches(max_examples=2),
)  # fmt: skip
def test_random_structures(tree: Dag, full: Dag, forest: Dag, dag: Dag, batch: list[Dag]) -> None:
    for structure in (tree, full, forest, dag, *batch):
        assert_consistent(structure)
    assert len(tree.roots) == 1 and max(map(len, tree.children)) <= 2
    assert {len(children) for children in full.children} <= {0, 3}
    assert forest.num_nodes - forest.num_edges == len(forest.roots) <= 3
    assert 1 <= len(batch) <= 2
