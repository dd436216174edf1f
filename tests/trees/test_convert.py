"""Trees of nested objects are read and written; faults are named."""

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import DynTreeData, from_nested, to_nested
from pyg_dynbatch.loader import Collater
from tests.strategies import deep

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
    assert floats.y.isnan().tolist() == [True, False, True]
    found = from_nested((1, 2), token=lambda _: torch.tensor(3), label=lambda _: np.bool_(1))
    assert found.token.tolist() == [3] * 3 and found.y.tolist() == [1] * 3


def parts_of(value: Any) -> list[Any]:
    below = value if isinstance(value, tuple) else ()
    return [value, *(each for part in below for each in parts_of(part))]


def copy_of(value: Any) -> Any:
    """Copy tuples, so that no two are the same object."""
    return tuple([copy_of(part) for part in value]) if isinstance(value, tuple) else value


@given(nested)
def test_objects_with_equal_keys_are_one_node(value: Any) -> None:
    whole = (copy_of(value), copy_of(value), 3)
    dag = from_nested(whole, share=lambda part: part).validate()
    assert dag.num_nodes == len(set(parts_of(whole)))
    assert to_nested(dag) == whole
    identities = from_nested(whole, share=id)
    assert identities.num_nodes == len(set(map(id, parts_of(whole))))
    assert from_nested(whole).num_nodes == len(parts_of(whole))


class Add(NamedTuple):
    left: Any
    right: Any


class Mul(NamedTuple):
    left: Any
    right: Any


GRAPH = {"want": ["boy", "go"], "go": ["boy"], "boy": ["tall"], "tall": []}
FRAMES = {"want": ["boy", "".join("go")], "go": ["".join(["bo", "y"])], "boy": []}
SUMS = (Add(1, 2), Mul(1, 2), Add(1, 2), (1, 2))


def fresh(n: list[int]) -> list[list[int]]:
    return [[n[0] - 1], [n[0] - 1]] if n[0] else []


def no_token(value: Any) -> None:
    return None


def word(value: str) -> str:
    return value


def class_and_value(value: Any) -> Any:
    return type(value), value


SHARED = [
    ("words of a graph", "want", GRAPH.get, word, 4),
    ("words made anew, one a leaf", "want", FRAMES.get, word, 3),
    ("numbers above 256", 900, lambda n: [n // 2, n // 3] if n > 1 else [], lambda n: n, 29),
    ("tuples of two classes", SUMS, None, class_and_value, 6),
    ("the same list", [[1, 2]] * 3, None, id, 4),
    ("equal lists", [[1, 2], [1, 2]], None, id, 5),
    ("fresh lists", [6], fresh, id, 127),
    ("fresh lists with a key", [6], fresh, lambda n: n[0], 7),
    ("only some", (1, 1, 2, 2), None, lambda n: n if n == 1 else None, 4),
    ("one and True", (1, True, 1.0), None, class_and_value, 4),
]


@pytest.mark.parametrize(("root", "children", "share", "count"), [each[1:] for each in SHARED])
def test_shared_objects(root: Any, children: Any, share: Any, count: int) -> None:
    dag = from_nested(root, children, token=no_token, share=share).validate()
    assert dag.num_nodes == count


def test_two_children_in_one_slot_are_refused() -> None:
    edges, slots = torch.tensor([[0, 1], [2, 2]]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="two children are in one slot[\\s\\S]*node 2"):
        to_nested(DynTreeData(edges, slots, token=torch.tensor([5, 6, -1])))


def test_what_is_shared_is_not_unfolded() -> None:
    value: Any = (1, 2)
    for _ in range(200):
        value = (value, value)
    assert from_nested(value, share=id).num_nodes == 203


F16, F32, F64, DEFAULT = torch.float16, torch.float32, torch.float64, None
ROWS = [
    ("Python's floats", [0.1, 0.2], DEFAULT),
    ("whole numbers", [1, 2**24], DEFAULT),
    ("an array", np.array([0.1, 0.2]), F64),
    ("single precision", np.float32([0.1, 0.2]), F32),
    ("a tensor", torch.tensor([0.1, 0.2], dtype=F16), F16),
]


@pytest.mark.parametrize(("row", "expected"), [each[1:] for each in ROWS])
@pytest.mark.parametrize("default", [F32, F64])
def test_the_dtype_is_that_which_torch_chooses(row: Any, expected: Any, default: Any) -> None:
    """Features and labels, with gaps."""
    torch.set_default_dtype(default)
    try:
        tree = from_nested(
            (1, 2),
            token=no_token,
            features=lambda n: None if n == (1, 2) else row,
            label=lambda n: None if n == (1, 2) else row[n % 2],
        )
    finally:
        torch.set_default_dtype(F32)
    expected = expected or default
    values = torch.as_tensor(row, dtype=expected)
    is_whole = all(isinstance(each, int) for each in row)
    assert tree.x.dtype == expected and tree.x.tolist() == [[0, 0], *[values.tolist()] * 2]
    labels = torch.as_tensor(row) if is_whole else values
    assert tree.y.dtype == labels.dtype and tree.y[1:].tolist() == labels.flip(0).tolist()
    assert tree.y[0] == -1 if is_whole else tree.y[0].isnan()


def test_numbers_of_several_kinds_are_promoted() -> None:
    labels = {1: 3, 2: np.float64(0.5), 3: torch.tensor(2.0, dtype=F16), 4: np.int32(1)}
    rows = {1: [1, 2], 2: np.array([0.5, 0.1]), 3: torch.ones(2, dtype=F16), 4: [True, False]}
    tree = from_nested((1, 2, 3, 4), token=no_token, label=labels.get, features=rows.get)
    assert tree.y.dtype == tree.x.dtype == F64
    assert tree.y[1:].tolist() == [3, 0.5, 2, 1]
    assert tree.x.tolist() == [[0, 0], [1, 2], [0.5, 0.1], [1, 1], [1, 0]]
    unlabelled = from_nested((1, 2), label=lambda _: None)
    assert unlabelled.y.tolist() == [-1, -1, -1] and unlabelled.y.dtype == torch.int64


ARRAYS = [np.array, torch.tensor, list, iter]


@pytest.mark.parametrize("make", ARRAYS)
def test_children_in_arrays(make: Any) -> None:
    below = {9: [7, 8], 7: [0], 0: []}
    tree = from_nested(9, lambda n: make(below.get(int(n), [])), token=lambda n: n)
    assert tree.token.tolist() == [9, 7, 0, 8] and tree.edge_index[1].tolist() == [0, 1, 0]
    assert from_nested([*make([3, 4])]).token.tolist() == [-1, 3, 4]


def test_deep_trees_need_no_recursion() -> None:
    dag = deep(5_000)
    tree = DynTreeData(dag.edge_index, dag.child_slot, num_nodes=dag.num_nodes)
    assert int(from_nested(to_nested(tree)).depth.max()) == int(tree.depth.max()) > 4_000


LOOP: list = [1]
LOOP.append([2, LOOP])
FOREST = DynTreeData(torch.empty(2, 0, dtype=torch.long), num_nodes=2)
BY_WORD = {"share": word}
NO_FEATURES = {"features": lambda n: None}
TWO_WIDTHS = {"features": lambda n: [0.0] * (n if n == 1 else 2)}


FAULTS = [
    (ValueError, lambda: from_nested(None), "from_nested: the tree is empty"),
    (ValueError, lambda: from_nested((1, "a")), "a leaf is not a token.\n  expected: an int"),
    (ValueError, lambda: from_nested((1, ())), "a leaf is not a token"),
    (ValueError, lambda: from_nested((7, -3)), "a token is negative"),
    (ValueError, lambda: from_nested((1, True)), "a leaf is not a token"),
    (ValueError, lambda: from_nested((1, 2), **NO_FEATURES), "got:      no features at all"),
    (ValueError, lambda: from_nested((1, 2), **TWO_WIDTHS), "1 at node 1"),
    (ValueError, lambda: from_nested(LOOP), "an object contains itself"),
    (ValueError, lambda: from_nested("a", {"a": "b", "b": "a"}.get, **BY_WORD), "contains itself"),
    (ValueError, lambda: from_nested([0], lambda n: [[1 - n[0]]], max_nodes=99), "99 nodes"),
    (TypeError, lambda: from_nested(1, label=lambda _: [0.5]), "is not a number"),
    (ValueError, lambda: from_nested((1, np.float64(2))), "a leaf is not a token"),
    (ValueError, lambda: from_nested((1, np.bool_(True))), "a leaf is not a token"),
    (ValueError, lambda: from_nested((1, np.array([2]))), "a leaf is not a token"),
    (ValueError, lambda: from_nested(LOOP, share=id), "list at node 0\n  where:    slot 1 of"),
    (TypeError, lambda: from_nested(1, token=lambda _: "plus"), "the token of node 0 is not a"),
    (TypeError, lambda: from_nested(1, token=lambda _: 1.5), "the token of node 0 is not a"),
    (TypeError, lambda: from_nested(1, label=lambda _: "good"), "the label of node 0 is not a"),
    (
        TypeError,
        lambda: from_nested(1, label=lambda _: np.array(2)),
        "the label of node 0 is not a",
    ),
    (ValueError, lambda: to_nested(FOREST), "the example is not a single tree or DAG"),
]


@pytest.mark.parametrize(("kind", "call", "words"), FAULTS)
def test_faults(kind: type[Exception], call: Any, words: str) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        call()


def test_features_decide_which_nodes_read_an_input() -> None:
    rows = {"and": [1.0], "or": None, "a": None}
    tree = from_nested(
        ("and", [("a", []), ("or", [("a", [])])]),
        lambda node: node[1],
        token=lambda node: 3 if node[0] == "a" else None,
        features=lambda node: rows[node[0]],
    )
    assert tree.token.tolist() == [-1, 3, -1, 3]
    assert Collater()([tree]).schedule.input_node.tolist() == [0]
