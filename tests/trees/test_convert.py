"""Trees of nested objects and of networkx are read and written; faults are named."""

import re
import sys
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import DynTreeData, from_nested, from_networkx, to_nested, to_networkx
from pyg_dynbatch.loader import Collater
from tests.strategies import dags, deep

nested = st.recursive(
    st.integers(0, 9), lambda parts: st.lists(parts, min_size=1, max_size=3).map(tuple)
)


@given(nested)
def test_nested_there_and_back(value: Any) -> None:
    tree = from_nested(value).validate(require_tree=True)
    assert to_nested(tree) == value
    assert tree.root_index.tolist() == [0]


def test_lists_dicts_and_missing_children() -> None:
    tree = from_nested({"left": [1, None, 2], "right": 3})
    assert tree.edge_index.tolist() == [[1, 2, 3, 4], [0, 1, 1, 0]]
    assert tree.child_slot.tolist() == [0, 0, 2, 1]
    assert tree.token.tolist() == [-1, -1, 1, 2, 3]
    assert to_nested(tree) == ((1, None, 2), 3)


def test_own_objects() -> None:
    tree = from_nested(
        ("S", [("NP", ["it"]), ("VP", ["works"])]),
        children=lambda node: None if isinstance(node, str) else node[1],
        token=lambda node: len(node) if isinstance(node, str) else None,
        label=lambda node: None if isinstance(node, str) else len(node[0]),
        features=lambda node: [1.0, 2.0] if isinstance(node, str) else None,
    ).validate(require_tree=True)
    assert tree.token.tolist() == [-1, -1, 2, -1, 5]
    assert tree.y.tolist() == [1, 2, -1, 2, -1]
    assert tree.has_input.tolist() == [False, False, True, False, True]
    assert tree.x.sum(1).tolist() == [0, 0, 3, 0, 3]
    floats = from_nested((1, 2), label=lambda node: 0.5 if node == 1 else None)
    assert floats.y.dtype == torch.float32 and floats.y.isnan().tolist() == [True, False, True]
    found = from_nested((1, 2), token=lambda _: torch.tensor(3), label=lambda _: np.bool_(1))
    assert found.token.tolist() == [3] * 3 and found.y.tolist() == [1] * 3


def test_shared_parts_become_one_node_on_request() -> None:
    part = (1, 2)
    value: Any = (part, (part, 3))
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

    def made_on_the_fly(n: list[int]) -> list[list[int]]:
        return [[n[0] - 1], [n[0] - 1]] if n[0] else []

    tree = from_nested([6], made_on_the_fly, token=lambda n: None, share=True)
    assert tree.num_nodes == 127


@given(dags(repeats=True))
def test_networkx_there_and_back(dag) -> None:
    number = torch.arange(dag.num_nodes)
    data = DynTreeData(dag.edge_index, dag.child_slot, token=number % 3 - 1, y=number % 4 - 1)
    graph = to_networkx(data)
    assert networkx.is_directed_acyclic_graph(graph)
    again = from_networkx(graph, token="token", label="y", slot="child_slot")

    def edges(data: DynTreeData) -> list[tuple[int, ...]]:
        return sorted(zip(*data.edge_index.tolist(), data.child_slot.tolist(), strict=True))

    assert set(again.keys()) == {*data.keys(), "has_input"} and edges(again) == edges(data)
    for key in ("token", "y", "depth", "root_index"):
        assert torch.equal(again[key], data[key])
    assert torch.equal(again.has_input, data.token >= 0)


def test_attributes_of_networkx() -> None:
    graph = networkx.DiGraph([("+", "b"), ("+", "a"), ("a", "c")])
    data = from_networkx(graph).validate(require_tree=True)
    assert data.edge_index.tolist() == [[1, 2, 3], [0, 0, 2]]
    assert data.child_slot.tolist() == [0, 1, 0], "the order of the edges"
    assert "token" not in data
    data = DynTreeData(
        torch.tensor([[0, 1], [2, 2]]),
        x=torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]),
        y=torch.tensor([float("nan"), 0.5, -1.0]),
        has_input=torch.tensor([True, False, False]),
    )
    graph = to_networkx(data)
    # Among floats, -1 is a label like others.
    assert dict(graph.nodes(data=True)) == {0: {"x": [1.0, 2.0]}, 1: {"y": 0.5}, 2: {"y": -1.0}}
    again = from_networkx(graph, label="y", features="x")
    assert torch.equal(again.x, data.x) and torch.equal(again.has_input, data.has_input)
    assert torch.equal(again.y.nan_to_num(7), data.y.nan_to_num(7))
    single = networkx.DiGraph()
    single.add_node("only")
    assert from_networkx(single).edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    ("there", "back"), [(to_nested, from_nested), (to_networkx, from_networkx)]
)
def test_deep_trees_need_no_recursion(there, back) -> None:
    dag = deep(5_000)
    tree = DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes)
    assert int(back(there(tree)).depth.max()) == int(tree.depth.max()) > 4_000


LOOP: list = [1]
LOOP.append([2, LOOP])
FOREST = DynTreeData(torch.empty(2, 0, dtype=torch.long), num_nodes=2)
NO_FEATURES = {"features": lambda n: None}
TWO_WIDTHS = {"features": lambda n: [0.0] * (n if n == 1 else 2)}


FAULTS = [
    (ValueError, lambda: from_nested(None), "from_nested: the tree is empty"),
    (ValueError, lambda: from_nested((1, "a")), "a leaf is not a token.\n  expected: an int"),
    (ValueError, lambda: from_nested((1, ())), "a leaf is not a token"),
    (ValueError, lambda: from_nested((1, True)), "a leaf is not a token"),
    (ValueError, lambda: from_nested((1, 2), **NO_FEATURES), "got:      no features at all"),
    (ValueError, lambda: from_nested((1, 2), **TWO_WIDTHS), "1 at node 1"),
    (ValueError, lambda: from_nested(LOOP), "an object contains itself"),
    (ValueError, lambda: from_nested(LOOP, share=True), "list at node 0\n  where:    slot 1 of"),
    (TypeError, lambda: from_nested(1, token=lambda _: "plus"), "the token of node 0 is not a"),
    (TypeError, lambda: from_nested(1, token=lambda _: 1.5), "the token of node 0 is not a"),
    (TypeError, lambda: from_nested(1, label=lambda _: "good"), "the label of node 0 is not a"),
    (ValueError, lambda: to_nested(FOREST), "the example is not a single tree or DAG"),
    (ValueError, lambda: from_networkx(networkx.path_graph(3)), "the graph is undirected"),
    (ValueError, lambda: from_networkx(networkx.DiGraph()), "the graph is empty"),
    (ValueError, lambda: from_networkx(networkx.DiGraph([(0, 1), (1, 0)])), "has a cycle"),
    (
        ValueError,
        lambda: from_networkx(networkx.DiGraph([(0, 1)]), slot="place"),
        "an edge has no attribute 'place'",
    ),
]


@pytest.mark.parametrize(("kind", "call", "words"), FAULTS)
def test_faults(kind: type[Exception], call: Any, words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "networkx", None)
    match = r"networkx is not installed[\s\S]*pip install 'pyg_dynbatch\[trees\]'"
    with pytest.raises(ImportError, match=match):
        to_networkx(FOREST)


def test_features_decide_which_nodes_read_an_input() -> None:
    rows = {"and": [1.0], "or": None, "a": None}
    nested = from_nested(
        ("and", [("a", []), ("or", [("a", [])])]),
        lambda node: node[1],
        token=lambda node: 3 if node[0] == "a" else None,
        features=lambda node: rows[node[0]],
    )
    graph = networkx.DiGraph([(0, 1), (0, 2), (2, 3)])
    graph.nodes[0]["vector"] = [1.0]
    graph.nodes[1]["word"] = graph.nodes[3]["word"] = 3
    for tree in (nested, from_networkx(graph, token="word", features="vector")):
        assert tree.token.tolist() == [-1, 3, -1, 3]
        assert Collater()([tree]).schedule.input_node.tolist() == [0]
    words = from_networkx(graph, token="word")
    assert Collater()([words]).schedule.input_node.tolist() == [1, 3]
