"""Bracketed text and vocabularies; text that is not a tree."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import BracketedTree, Vocabulary, parse_bracketed
from pyg_dynbatch.trees.words import unescape
from tests.trees.helpers import assert_same, bracketed

Nested = tuple[int, str | None, list["Nested"]]

WORDS = ("good", "it's", "-LRB-", "8\u00a01\\/2", "7", "caf\u00e9", "\u2028", "...")


def nested_trees() -> st.SearchStrategy[Nested]:
    labels, words = st.integers(0, 4), st.sampled_from(WORDS)

    def node(below: st.SearchStrategy[Nested]) -> st.SearchStrategy[Nested]:
        return st.tuples(labels, st.none() | words, st.lists(below, min_size=1, max_size=4))

    return st.recursive(st.tuples(labels, words, st.just([])), node, max_leaves=12)


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
    for node, (_, _, below) in enumerate(nodes):
        slots = [parsed.slots[i] for i, parent in enumerate(parsed.parents) if parent == node]
        assert slots == list(range(len(below)))
    assert parse_bracketed(written(tree).replace(" ", "\t"), num_classes=5) == parsed
    vocabulary = Vocabulary(WORDS)
    data = BracketedTree(vocabulary, num_classes=5)(written(tree))
    data.validate(require_tree=True)
    assert data.y.max() < 5 and data.token.max() < len(vocabulary)
    assert bracketed(data, vocabulary) == written(tree)


def test_keeps_the_no_break_space_and_other_separators() -> None:
    line = "(2 (3 8\u00a01\\/2)(1 a\u2028b))"
    assert parse_bracketed(line).words == ["8\u00a01\\/2", "a\u2028b"]


def test_a_deep_chain_needs_no_recursion() -> None:
    levels = 5_000
    text = "(1 " * levels + "(0 x)" + ")" * levels
    vocabulary = Vocabulary(["x"])
    data = BracketedTree(vocabulary)(text)
    assert int(data.depth[0]) == levels
    assert bracketed(data, vocabulary).replace(" (", "(") == text.replace(" (", "(")


UNLABELLED = [
    ("((2 a) (b) (-1 c) (7))", "optional", [-1, 2, -1, -1, -1], [None, "a", "b", "c", "7"]),
    ("(+ (3) (4))", "none", None, ["+", "3", "4"]),
    ("((3) ((4)))", "none", None, [None, "3", None, "4"]),
]


@pytest.mark.parametrize(("text", "labels", "y", "tokens"), UNLABELLED)
def test_unlabelled_nodes(text: str, labels: str, y: list[int] | None, tokens: list) -> None:
    assert parse_bracketed(text, labels=labels).tokens == tokens
    vocabulary = Vocabulary(["a", "b", "c", "7", "+", "3", "4"])
    read = BracketedTree(vocabulary, labels=labels)
    data = read(text)
    assert data.token.tolist() == [-1 if word is None else vocabulary.row(word) for word in tokens]
    assert (data.y.tolist() if "y" in data else None) == y
    assert_same(data, read(bracketed(data, vocabulary)))


BAD_TEXTS = [
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
]


@pytest.mark.parametrize(("line", "problem", "column"), BAD_TEXTS)
def test_says_what_is_wrong_and_where(line: str, problem: str, column: int) -> None:
    match = f"bracketed tree: {problem}[.][\\s\\S]*where:    trees.txt:7:{column}$"
    with pytest.raises(ValueError, match=match):
        parse_bracketed(line, "trees.txt:7", num_classes=5)


BAD_LABELS = [
    # Without a file, the error names the column alone.
    ("(99999999999999999999 a)", "required", r"label is out of range[\s\S]*where:    column 2"),
    ("(1 a)", "maybe", r"unknown labels[\s\S]*'required', 'optional' or 'none'"),
]


@pytest.mark.parametrize(("line", "labels", "words"), BAD_LABELS)
def test_labels_that_cannot_be(line: str, labels: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_bracketed(line, labels=labels)


def test_vocabularies() -> None:
    vocabulary = Vocabulary.from_words(["b", "a", "b", "<unk>"])
    assert vocabulary.words == ("<unk>", "b", "a")
    assert [vocabulary[row] for row in vocabulary.rows(["a", "b", "c"])] == ["a", "b", "<unk>"]
    assert "a" in vocabulary and "c" not in vocabulary and 3 not in vocabulary
    assert repr(vocabulary) == "Vocabulary(3 rows, row 0 = '<unk>')"
    lower = Vocabulary.from_words(["The", "the", "film"], lower_case=True)
    assert lower.words == ("<unk>", "the", "film") and lower.row("FILM") == 2
    counts = {"a": 2, "b": 5, "c": 2, "d": 1, "<unk>": 9}
    assert Vocabulary.from_counts(counts).words == ("<unk>", "b", "a", "c", "d")
    assert Vocabulary.from_counts(counts, min_count=2, max_words=2).words == ("<unk>", "b", "a")
    assert Vocabulary.from_counts({"A": 1, "a": 1, "b": 1}, lower_case=True).words[1] == "a"
    with pytest.raises(ValueError, match=r"the word 'a' has two rows[\s\S]*rows 1 and 3"):
        Vocabulary(["a", "b", "a"])


def test_a_vocabulary_is_kept_whole() -> None:
    vocabulary = Vocabulary(["8\u00a01\\/2", "caf\u00e9"], lower_case=True)
    content = json.loads(json.dumps(vocabulary.as_dict()))
    for again in (Vocabulary.from_dict(content), pickle.loads(pickle.dumps(vocabulary))):
        assert again == vocabulary and hash(again) == hash(vocabulary)
        assert again.digest() == vocabulary.digest()
    assert vocabulary.digest() != Vocabulary(vocabulary.words[1:]).digest()
    assert vocabulary != "something else"


@pytest.mark.parametrize(
    ("token", "text"),
    [("-LRB-", "("), ("-RCB-", "}"), ("1\\/2", "1/2"), ("\\*", "*"), ("\\", "\\"), ("a", "a")],
)
def test_unescape(token: str, text: str) -> None:
    assert unescape(token) == text
