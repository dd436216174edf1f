import re
import sys
from functools import partial
from typing import Any

import networkx
import nltk
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import (
    DynTreeData,
    from_edge_index,
    from_nested,
    from_networkx,
    from_nltk,
    from_parents,
    to_nested,
    to_networkx,
    to_nltk,
    to_parents,
)
from tests.strategies import dags, forests, trees

nested = st.recursive(
    st.integers(0, 9), lambda parts: st.lists(parts, min_size=1, max_size=3).map(tuple)
)


def same(first: DynTreeData, second: DynTreeData) -> bool:
    """Equal up to the order of edges."""

    def edges(data):
        return sorted(zip(*data.edge_index.tolist(), data.child_slot.tolist(), strict=True))

    others = set(first.keys()) - {"edge_index", "child_slot", "num_nodes"}
    return (
        set(first.keys()) == set(second.keys())
        and first.num_nodes == second.num_nodes
        and edges(first) == edges(second)
        and all(torch.equal(first[key], second[key]) for key in others)
    )


class TestNested:
    @given(nested)
    def test_there_and_back(self, value):
        tree = from_nested(value).validate(require_tree=True)
        assert to_nested(tree) == value
        assert tree.root_index.tolist() == [0]

    def test_lists_dicts_and_missing_children(self):
        tree = from_nested({"left": [1, None, 2], "right": 3})
        assert tree.edge_index.tolist() == [[1, 2, 3, 4], [0, 1, 1, 0]]
        assert tree.child_slot.tolist() == [0, 0, 2, 1]
        assert tree.token.tolist() == [-1, -1, 1, 2, 3]
        assert to_nested(tree) == ((1, None, 2), 3)

    def test_own_objects(self):
        class Word(str):
            pass

        value = ("S", [("NP", [Word("it")]), ("VP", [Word("works")])])
        tree = from_nested(
            value,
            children=lambda node: None if isinstance(node, Word) else node[1],
            token=lambda node: len(node) if isinstance(node, Word) else None,
            label=lambda node: None if isinstance(node, Word) else len(node[0]),
            features=lambda node: [1.0, 2.0] if isinstance(node, Word) else None,
        ).validate(require_tree=True)
        assert tree.token.tolist() == [-1, -1, 2, -1, 5]
        assert tree.y.tolist() == [1, 2, -1, 2, -1]
        assert tree.has_input.tolist() == [False, False, True, False, True]
        assert tree.x.sum(1).tolist() == [0, 0, 3, 0, 3]

    def test_float_labels(self):
        tree = from_nested((1, 2), label=lambda node: 0.5 if node == 1 else None)
        assert tree.y.dtype == torch.float32
        assert tree.y.isnan().tolist() == [True, False, True]

    def test_shared_parts_become_one_node_on_request(self):
        part = (1, 2)
        value = (part, (part, 3))
        assert from_nested(value).num_nodes == 9
        dag = from_nested(value, share=True)
        assert dag.num_nodes == 6
        assert sorted(dag.edge_index[0].tolist()).count(1) == 2
        again = to_nested(dag)
        assert again == value and again[0] is again[1][0]
        assert from_nested((1, 1, (1, 1)), share=True).num_nodes == 6, "leaves are never shared"
        for _ in range(200):  # a chain is not unfolded
            value = (value, value)
        assert from_nested(value, share=True).num_nodes == 206

    def test_objects_made_on_the_fly_are_not_confused(self):
        def below(n):
            return [[n[0] - 1], [n[0] - 1]] if n[0] else []

        assert from_nested([6], below, token=lambda n: None, share=True).num_nodes == 127

    def test_an_object_that_contains_itself(self):
        value: list = [1]
        value.append([2, value])
        match = r"an object contains itself\.\n.*list at node 0\n.*slot 1 of node 2"
        for share in (False, True):
            with pytest.raises(ValueError, match=match):
                from_nested(value, share=share)

    @pytest.mark.parametrize(
        ("value", "options", "message"),
        [
            (None, {}, "from_nested: the tree is empty"),
            ((1, "a"), {}, "a leaf is not a token.\n  expected: an int, the row of the vocabulary"),
            ((1, ()), {}, "a leaf is not a token"),
            ((1, True), {}, "a leaf is not a token"),
            ((1, 2), {"features": lambda n: None}, "got:      no features at all"),
            ((1, 2), {"features": lambda n: [0.0] * (n if n == 1 else 2)}, "1 at node 1"),
        ],
    )
    def test_faults(self, value, options, message):
        with pytest.raises(ValueError, match=message):
            from_nested(value, **options)

    def test_back_from_a_forest_and_without_tokens(self):
        assert to_nested(from_parents([-1, 0, 0])) == (1, 2)
        with pytest.raises(ValueError, match="the example is not a single tree or DAG"):
            to_nested(from_parents([-1, -1]))


class TestParents:
    @given(st.one_of(trees(), forests()), st.sampled_from([0, 1]))
    def test_there_and_back(self, dag, base):
        pointers = [(users[0] if users else -1) + base for users in dag.parents]
        data = from_parents(pointers, base=base).validate(require_tree=True, roots=len(dag.roots))
        assert data.depth.tolist() == dag.depth
        assert to_parents(data, base=base).tolist() == pointers

    def test_fields_and_order(self):
        data = from_parents(torch.tensor([2, 0, 2]), base=1, token=torch.tensor([3, -1, 4]))
        assert data.child_slot.tolist() == [0, 1]
        assert data.token.tolist() == [3, -1, 4]

    def test_the_wrong_base_is_named(self):
        match = r"0 to 2, or -1 for a root\n.*got: +3\n.*pointer 0 \(from 0\)\n.*try: +base=1"
        with pytest.raises(ValueError, match=match):
            from_parents([3, 3, 0])


class TestEdgeIndex:
    def test_both_arrows(self):
        edges = torch.tensor([[1, 2], [0, 0]])
        up = from_edge_index(edges, 3)
        down = from_edge_index(edges.flip(0), 3, arrows="parent_to_child")
        assert same(up, down)
        assert up.root_index.tolist() == [0]


class TestNetworkx:
    @given(dags(repeats=True), st.sampled_from(["child_to_parent", "parent_to_child"]))
    def test_there_and_back(self, dag, arrows):
        token = torch.arange(dag.num_nodes) % 3 - 1
        y = torch.arange(dag.num_nodes) % 4 - 1
        data = DynTreeData(dag.edge_index, dag.child_slot, token=token, y=y)
        graph = to_networkx(data, arrows=arrows)
        assert networkx.is_directed_acyclic_graph(graph)
        again = from_networkx(graph, arrows=arrows, token="token", label="y", slot="child_slot")
        assert same(data, again)

    def test_children_stand_in_the_order_of_their_edges(self):
        graph = networkx.DiGraph([("+", "b"), ("+", "a"), ("a", "c")])
        data = from_networkx(graph).validate(require_tree=True)
        assert data.edge_index.tolist() == [[1, 2, 3], [0, 0, 2]]
        assert data.child_slot.tolist() == [0, 1, 0]
        assert "token" not in data

    def test_features_and_floats(self):
        data = DynTreeData(
            torch.tensor([[0], [1]]),
            x=torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
            y=torch.tensor([float("nan"), 0.5]),
            has_input=torch.tensor([True, False]),
        )
        graph = to_networkx(data)
        assert dict(graph.nodes(data=True)) == {0: {"x": [1.0, 2.0]}, 1: {"y": 0.5}}
        again = from_networkx(graph, label="y", features="x")
        assert torch.equal(again.x, data.x)
        assert torch.equal(again.has_input, data.has_input)
        assert again.y.isnan().tolist() == [True, False]

    def test_a_float_label_of_minus_one_is_a_label(self):
        data = from_parents([-1, 0], y=torch.tensor([-1.0, float("nan")]))
        assert dict(to_networkx(data).nodes(data="y")) == {0: -1.0, 1: None}

    def test_one_node_without_edges(self):
        graph = networkx.DiGraph()
        graph.add_node("only")
        assert from_networkx(graph).edge_index.shape == (2, 0)


class TestNLTK:
    TEXT = "(3 (2 It) (4 (2 really) (4 works)))"
    WORDS = ("It", "really", "works")

    def test_there_and_back(self):
        parsed = nltk.Tree.fromstring(self.TEXT)
        data = from_nltk(parsed, self.WORDS.index).validate(require_tree=True)
        assert data.y.tolist() == [3, 2, 4, 2, 4]
        assert data.token.tolist() == [-1, 0, -1, 1, 2]
        assert to_nltk(data, self.WORDS.__getitem__) == parsed

    def test_words_beside_trees_and_named_labels(self):
        parsed = nltk.Tree("S", ["It", nltk.Tree("VP", ["really", "works"])])
        names = ["S", "VP"]
        data = from_nltk(parsed, self.WORDS.index, names.index)
        assert data.y.tolist() == [0, -1, 1, -1, -1]
        again = to_nltk(data, self.WORDS.__getitem__, names.__getitem__)
        assert again == parsed

    def test_float_labels(self):
        y = torch.tensor([-0.5, float("nan"), 1.5])
        data = from_parents([-1, 0, 0], token=torch.tensor([-1, 0, 1]), y=y)
        tree = to_nltk(data, self.WORDS.__getitem__)
        assert tree == nltk.Tree("-0.5", ["It", nltk.Tree("1.5", ["really"])])


@pytest.mark.parametrize(
    ("there", "back"),
    [
        (to_nested, from_nested),
        (to_parents, from_parents),
        (to_networkx, from_networkx),
        (lambda data: to_nltk(data, str), lambda tree: from_nltk(tree, int)),
    ],
)
def test_deep_trees_need_no_recursion(there, back):
    token = torch.full((5_000,), -1)
    token[-1] = 7
    tree = from_parents(range(-1, 4_999), token=token, y=torch.zeros(5_000).long())
    assert torch.equal(back(there(tree)).depth, tree.depth)


EDGES = torch.tensor([[1, 2], [0, 0]])
DIAMOND = torch.tensor([[0, 0, 1, 2], [1, 2, 3, 3]])


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: from_parents([]), "one integer per node, at least one"),
        (lambda: from_parents([1, 0]), "has a cycle"),
        (lambda: from_parents([0], base=2), "unknown base"),
        (lambda: from_parents(torch.tensor([-1.0, 0.5])), "got:      float32 tensor [2]"),
        (lambda: from_parents(torch.tensor([[-1, 0]])), "got:      int64 tensor [1, 2]"),
        (lambda: to_parents(from_edge_index(DIAMOND, 4)), "node 0 has two parents"),
        (lambda: from_edge_index(EDGES, 3, arrows="up"), "unknown direction of arrows"),
        (lambda: from_edge_index(EDGES, 3, y=torch.zeros(2)), "y has an invalid shape or dtype"),
        (lambda: from_edge_index(EDGES, 2), "a node that does not exist"),
        (lambda: from_edge_index(EDGES.float(), 3), "edge_index has an invalid shape or dtype"),
        (
            lambda: from_edge_index(EDGES.int(), 3, arrows="parent_to_child"),
            "from_edge_index: edge_index has an invalid shape or dtype",
        ),
        (lambda: from_networkx(networkx.path_graph(3)), "the graph is undirected"),
        (lambda: from_networkx(networkx.DiGraph()), "the graph is empty"),
        (lambda: from_networkx(networkx.DiGraph([(0, 1), (1, 0)])), "has a cycle"),
        (
            lambda: from_networkx(networkx.DiGraph([(0, 1)]), slot="place"),
            "an edge has no attribute 'place'",
        ),
        (
            lambda: from_nltk(nltk.Tree.fromstring("(NP (2 It))"), ["It"].index),
            "from_nltk: a label is not a number.\n  expected: labels 0, 1, …\n  got:      'NP'",
        ),
        (lambda: to_nltk(from_edge_index(DIAMOND, 4), str), "has two parents"),
    ],
)
def test_faults(convert, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert()


@pytest.mark.parametrize(
    ("package", "convert"), [("networkx", to_networkx), ("nltk", partial(to_nltk, word=str))]
)
def test_a_missing_package_is_named(package, convert, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    match = rf"{package} is not installed[\s\S]*pip install 'pyg_dynbatch\[trees\]'"
    with pytest.raises(ImportError, match=match):
        convert(from_parents([-1, 0]))


@pytest.mark.parametrize(
    "getter, value, said",
    [
        ("token", "plus", "the token of node 0 is not a number"),
        ("token", 1.5, "the token of node 0 is not a number"),
        ("label", "positive", "the label of node 0 is not a number"),
    ],
)
def test_tokens_and_labels_are_numbers(getter: str, value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        from_nested((1, 2), **{getter: lambda _: value})  # type: ignore[arg-type]
    found = from_nested((1, 2), token=lambda _: torch.tensor(3), label=lambda _: np.bool_(1))
    assert found.token.tolist() == [3] * 3 and found.y.tolist() == [1] * 3
