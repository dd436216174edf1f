"""Bracketed text, parent pointers and vocabularies; text that is not a tree."""

import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import (
    BracketedTree,
    Vocabulary,
    forest_to_data,
    parse_bracketed,
    to_bracketed,
)
from pyg_dynbatch.trees.text import parse_parents
from pyg_dynbatch.trees.vocabulary import unescape

Nested = tuple[int, str | None, list["Nested"]]

WORDS = ("good", "it's", "-LRB-", "8\u00a01\\/2", "7", "caf\u00e9", "\u2028", "...")


def nested_trees() -> st.SearchStrategy[Nested]:
    labels = st.integers(0, 4)
    leaves = st.tuples(labels, st.sampled_from(WORDS), st.just([]))
    return st.recursive(
        leaves,
        lambda below: st.tuples(
            labels, st.none() | st.sampled_from(WORDS), st.lists(below, min_size=1, max_size=4)
        ),
        max_leaves=12,
    )


def written(tree: Nested) -> str:
    label, token, children = tree
    parts = [str(label), *([token] if token is not None else []), *map(written, children)]
    return f"({' '.join(parts)})"


def depth(tree: Nested) -> int:
    return 1 + max(map(depth, tree[2])) if tree[2] else 0


def preorder(tree: Nested) -> list[Nested]:
    return [tree, *(below for child in tree[2] for below in preorder(child))]


@given(nested_trees())
def test_agrees_with_a_recursive_reading(tree: Nested) -> None:
    nodes = preorder(tree)
    parsed = parse_bracketed(written(tree), num_classes=5)
    assert parsed.labels == [label for label, _, _ in nodes]
    assert parsed.tokens == [token for _, token, _ in nodes]
    assert parsed.depths == [depth(node) for node in nodes]
    children = [
        [i for i, p in enumerate(parsed.parents) if p == node] for node in range(len(nodes))
    ]
    assert [len(c) for c in children] == [len(below) for _, _, below in nodes]
    assert all(parsed.slots[c] == slot for below in children for slot, c in enumerate(below))
    assert parse_bracketed(written(tree).replace(" ", "\t"), num_classes=5) == parsed


@given(nested_trees())
def test_writing_is_the_inverse_of_reading(tree: Nested) -> None:
    vocabulary = Vocabulary(WORDS)
    data = BracketedTree(vocabulary, num_classes=5)(written(tree))
    data.validate(require_tree=True, num_classes=5, num_tokens=len(vocabulary))
    assert to_bracketed(data, vocabulary) == written(tree)


def test_keeps_the_no_break_space_and_other_separators() -> None:
    line = "(2 (3 8\u00a01\\/2)(1 a\u2028b))"
    assert parse_bracketed(line).words == ["8\u00a01\\/2", "a\u2028b"]


def test_a_deep_chain_needs_no_recursion() -> None:
    levels = 20_000
    text = "(1 " * levels + "(0 x)" + ")" * levels
    vocabulary = Vocabulary(["x"])
    data = BracketedTree(vocabulary)(text)
    assert int(data.depth[0]) == levels
    assert to_bracketed(data, vocabulary).replace(" (", "(") == text.replace(" (", "(")


def test_unlabelled_nodes() -> None:
    tree = parse_bracketed("((2 a) (b) (-1 c) (7))", labels="optional")
    assert tree.labels == [-1, 2, -1, -1, -1]
    assert tree.tokens == [None, "a", "b", "c", "7"]
    vocabulary = Vocabulary(["a", "b", "c", "7"])
    featurize = BracketedTree(vocabulary, labels="optional")
    data = featurize("((2 a) (b) (-1 c) (7))")
    again = featurize(to_bracketed(data, vocabulary))
    assert torch.equal(again.y, data.y) and torch.equal(again.token, data.token)


def test_without_labels_the_head_is_a_token() -> None:
    vocabulary = Vocabulary(["+", "3", "4"])
    data = BracketedTree(vocabulary, labels="none")("(+ (3) (4))")
    assert data.token.tolist() == [1, 2, 3]
    assert "y" not in data
    assert to_bracketed(data, vocabulary) == "(+ (3) (4))"
    assert to_bracketed(BracketedTree(vocabulary, labels="none")("((3) ((4)))"), vocabulary) == (
        "((3) ((4)))"
    )


@pytest.mark.parametrize(
    ("line", "problem", "column"),
    [
        ("(3 (2 a) (2 b)", "1 bracket is never closed", 15),
        ("(3 (2 a", "2 brackets are never closed", 8),
        ("(3 (2 a)) )", "a bracket is closed that was never opened", 11),
        (")", "a bracket is closed that was never opened", 1),
        ("(3 (2 a)) (2 b)", "there is text after the tree", 11),
        ("(2 a) b", "there is text outside the brackets", 7),
        ("hello", "there is text outside the brackets", 1),
        ("(3 (good) (2 b))", "a label is missing", 5),
        ("((2 a) (2 b))", "a label is missing", 2),
        ("(3 (x good) (2 b))", "a label is not an integer", 5),
        ("(3.5 good)", "a label is not an integer", 2),
        ("(3 (5 a) (2 b))", "a label is out of range", 5),
        ("(-1 a)", "a label is out of range", 2),
        ("", "there is an empty tree", 1),
        ("   ", "there is an empty tree", 4),
        ("()", "there is an empty tree", 2),
        ("(3 (2) (2 b))", "there is an empty tree", 6),
        ("(", "1 bracket is never closed", 2),
        ("(3 a b)", "a second token follows the token 'a' in one node", 6),
        ("(3 (2 a) b)", "a second token follows a child in one node", 10),
    ],
)
def test_says_what_is_wrong_and_where(line: str, problem: str, column: int) -> None:
    match = f"bracketed tree: {problem}[.][\\s\\S]*where:    trees.txt:7:{column}$"
    with pytest.raises(ValueError, match=match):
        parse_bracketed(line, "trees.txt:7", num_classes=5)


def test_a_label_must_fit_into_a_tensor_without_a_number_of_classes() -> None:
    # Without a file, the error names the column alone.
    with pytest.raises(ValueError, match=r"a label is out of range[\s\S]*where:    column 2"):
        parse_bracketed("(99999999999999999999 a)")


def test_labels_must_be_a_known_option() -> None:
    with pytest.raises(ValueError, match=r"unknown labels[\s\S]*'required', 'optional' or 'none'"):
        parse_bracketed("(1 a)", labels="maybe")


def test_forests_and_words_with_brackets_are_not_written() -> None:
    vocabulary = Vocabulary(["a", "("])
    tree = parse_bracketed("(1 a)")
    with pytest.raises(ValueError, match=r"wrong number of roots[\s\S]*got: +2"):
        to_bracketed(forest_to_data([tree, tree], vocabulary), vocabulary)
    data = BracketedTree(vocabulary)("(1 (1 a) (1 a))")
    data.token[2] = 2
    with pytest.raises(ValueError, match=r"cannot be put in brackets[\s\S]*node 2"):
        to_bracketed(data, vocabulary)


def test_what_cannot_be_read_back_is_not_written() -> None:
    vocabulary = Vocabulary(["a", "b"])
    data = BracketedTree(vocabulary)("(1 (1 a) (1 b))")
    data.y = torch.tensor([0.5, float("nan"), 1.0])
    with pytest.raises(ValueError, match=r"labels are not integers[\s\S]*got: +float32"):
        to_bracketed(data, vocabulary)
    del data.y, data.token
    with pytest.raises(ValueError, match=r"no field token[\s\S]*got: +child_slot"):
        to_bracketed(data, vocabulary)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 2], r"a node has an empty slot[\s\S]*got: +slots \[0, 2\][\s\S]*node 1"),
        ([1, 1], r"two children of node 1 have the same slot[\s\S]*got: +nodes \[2, 3\] in slot 1"),
    ],
)
def test_an_empty_slot_is_not_written(slots: list[int], message: str) -> None:
    vocabulary = Vocabulary(["a", "b"])
    data = BracketedTree(vocabulary)("(1 (1 (1 a) (1 b)))")
    data.child_slot[data.edge_index[1] == 1] = torch.tensor(slots)
    with pytest.raises(ValueError, match=message):
        to_bracketed(data, vocabulary)


@given(st.integers(1, 15).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.data())))
def test_random_dependency_trees(drawn: tuple[list[int], st.DataObject]) -> None:
    order, data = drawn
    above = {order[0]: -1}
    for i, node in enumerate(order[1:], start=1):
        above[node] = order[data.draw(st.integers(0, i - 1))]
    pointers = " ".join(str(above[node] + 1) for node in range(len(order)))
    tree = parse_parents(pointers, [str(node) for node in range(len(order))])
    assert tree.parents == [above[node] for node in range(len(order))]
    tree.to_data(Vocabulary(["0"]), labelled=False).validate(require_tree=True)
    for parent in range(len(order)):
        children = [node for node in range(len(order)) if above[node] == parent]
        assert [tree.slots[child] for child in children] == list(range(len(children)))


def test_constituents_are_ordered_by_their_first_word() -> None:
    # ((A man) (sings (a song))) with the right constituent numbered before the left one
    tree = parse_parents("8 8 6 7 7 9 6 9 0", ["A", "man", "sings", "a", "song"])
    assert tree.tokens == ["A", "man", "sings", "a", "song", None, None, None, None]
    assert tree.slots == [0, 1, 0, 0, 1, 1, 1, 0, 0]
    assert tree.depths == [0, 0, 0, 0, 0, 2, 1, 1, 3]


def test_words_outside_the_tree_are_left_out() -> None:
    tree = parse_parents("2 0 -1 2", ["Dogs", "run", ",", "fast"])
    assert tree.words == ["Dogs", "run", "fast"]
    assert tree.parents == [1, -1, 1]


@pytest.mark.parametrize(
    ("pointers", "problem", "got"),
    [
        ("2 x", "a parent pointer is not an integer", "'x'"),
        ("0", "there are fewer parent pointers than words", "1 pointers for 2 words"),
        ("0 3", "the parent of node 2 is not in the tree", "3"),
        ("0 -2", "the parent of node 2 is not in the tree", "-2"),
        ("0 0", "there is not exactly one root", "2 zeros"),
        ("-1 1", "the parent of node 2 is not in the tree", "1"),
        ("0 3 2", "the parent pointers form a cycle", "nodes [2, 3]"),
    ],
)
def test_says_what_is_wrong(pointers: str, problem: str, got: str) -> None:
    match = rf"parent pointers: {problem}[.][\s\S]*{re.escape(got)}[\s\S]*where:    a.parents:4"
    with pytest.raises(ValueError, match=match):
        parse_parents(pointers, ["a", "b"], "a.parents:4")


def test_rows_and_words_are_inverse() -> None:
    vocabulary = Vocabulary.from_words(["b", "a", "b", "<unk>"])
    assert vocabulary.words == ("<unk>", "b", "a")
    assert [vocabulary[row] for row in vocabulary.rows(["a", "b", "c"])] == ["a", "b", "<unk>"]
    assert "a" in vocabulary and "c" not in vocabulary and 3 not in vocabulary
    assert repr(vocabulary) == "Vocabulary(3 rows, row 0 = '<unk>')"


def test_lower_case() -> None:
    vocabulary = Vocabulary.from_words(["The", "the", "film"], lower_case=True)
    assert vocabulary.words == ("<unk>", "the", "film")
    assert vocabulary.row("FILM") == 2


def test_counts_order_and_limits() -> None:
    counts = {"a": 2, "b": 5, "c": 2, "d": 1, "<unk>": 9}
    assert Vocabulary.from_counts(counts).words == ("<unk>", "b", "a", "c", "d")
    assert Vocabulary.from_counts(counts, min_count=2, max_words=2).words == ("<unk>", "b", "a")
    assert Vocabulary.from_counts({"A": 1, "a": 1, "b": 1}, lower_case=True).words[1] == "a"


def test_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the word 'a' has two rows[\s\S]*rows 1 and 3"):
        Vocabulary(["a", "b", "a"])


def test_saves_loads_pickles(tmp_path: Path) -> None:
    vocabulary = Vocabulary(["8\u00a01\\/2", "caf\u00e9"], lower_case=True)
    vocabulary.save(tmp_path / "deep" / "words.json")
    for again in (
        Vocabulary.load(tmp_path / "deep" / "words.json"),
        pickle.loads(pickle.dumps(vocabulary)),
    ):
        assert again == vocabulary
        assert hash(again) == hash(vocabulary)
        assert again.digest() == vocabulary.digest()
    assert vocabulary.digest() != Vocabulary(vocabulary.words[1:]).digest()
    assert vocabulary != "something else"


def test_loading_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a saved vocabulary"):
        Vocabulary.load(path)


@pytest.mark.parametrize(
    ("token", "text"),
    [("-LRB-", "("), ("-RCB-", "}"), ("1\\/2", "1/2"), ("\\*", "*"), ("\\", "\\"), ("a", "a")],
)
def test_unescape(token: str, text: str) -> None:
    assert unescape(token) == text
