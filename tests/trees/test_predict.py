"""The schema of trees: text and nested lists become trees, and what is none is a fault."""

import pytest

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.models import TreeSchema
from tests.trees.helpers import WORDS, assert_same

SCHEMA = TreeSchema(len(WORDS) + 1, 3, Vocabulary(WORDS))


def test_text_and_nested_lists_are_the_same_trees() -> None:
    tree = SCHEMA.entry("((not) ((very) (new)))").data
    row = Vocabulary(WORDS).row
    assert tree.token.tolist() == [-1, row("not"), -1, row("very"), 0]
    labelled = SCHEMA.entry("(2 (0 not) (1 (2 very) (1 new)))").data
    assert labelled.y.tolist() == [2, 0, 1, 2, 1]
    nested = SCHEMA.entry(["not", ["very", "new"]]).data
    for other in (labelled, nested):
        assert_same(tree.update({"y": 0}), other.update({"y": 0}))


def test_some_nodes_have_labels() -> None:
    tree = SCHEMA.entry("(1 (not) (2 good))").data
    row = Vocabulary(WORDS).row
    assert tree.token.tolist() == [-1, row("not"), row("good")]
    assert tree.y.tolist() == [1, -1, 2]


NO_TREES = [
    ("(3 (not) (good))", "a label in -1..2"),
    ("((not) (good)", "1 bracket is never closed"),
    ("(3 good)", "a label in -1..2"),
    (["not", 7], "not a word"),
    (["not", []], "not a word"),
    (None, "expected"),
]


@pytest.mark.parametrize(("tree", "said"), NO_TREES)
def test_what_is_not_a_tree_of_words_is_a_fault_in_one_line(tree, said):
    entry = SCHEMA.entry(tree, "new.txt:7")
    assert entry.data is None
    assert said in entry.fault and "\n" not in entry.fault


def test_a_schema_is_plain_values_and_back() -> None:
    assert TreeSchema.of(SCHEMA.as_dict()) == SCHEMA == TreeSchema.of(SCHEMA)
    with pytest.raises(ValueError, match="vocabulary"):
        TreeSchema(7, 3, Vocabulary(WORDS))
    with pytest.raises(ValueError, match="words are not known"):
        TreeSchema(4, 3).entry("(good)")
