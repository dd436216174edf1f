"""Expressions of ListOps: values, parses, shapes."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.trees.listops import (
    END,
    evaluate_listops,
    format_listops,
    listops_tree,
    listops_vocabulary,
    read_listops,
)

Expression = int | tuple[str, list["Expression"]]

OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def expressions() -> st.SearchStrategy[Expression]:
    return st.recursive(
        st.integers(0, 9),
        lambda below: st.tuples(
            st.sampled_from(sorted(OPERATIONS)), st.lists(below, min_size=1, max_size=5)
        ),
        max_leaves=20,
    )


def value(expression: Expression) -> int:
    if isinstance(expression, int):
        return expression
    return OPERATIONS[expression[0]]([value(argument) for argument in expression[1]])


def flat(expression: Expression) -> list[str]:
    if isinstance(expression, int):
        return [str(expression)]
    return [expression[0], *(piece for part in expression[1] for piece in flat(part)), END]


def published(expression: Expression) -> str:
    if isinstance(expression, int):
        return str(expression)
    text = expression[0]
    for argument in expression[1]:
        text = f"( {text} {published(argument)} )"
    return f"( {text} {END} )"


@given(expressions())
def test_agrees_with_a_recursive_reading(expression: Expression) -> None:
    pieces = flat(expression)
    assert evaluate_listops(pieces) == value(expression)
    assert format_listops(pieces) == published(expression)
    assert read_listops(published(expression)) == read_listops(" ".join(pieces)) == pieces


@given(expressions(), st.sampled_from(["operator", "binary"]))
def test_trees_are_sound(expression: Expression, form: str) -> None:
    pieces = flat(expression)
    tree = listops_tree(pieces, form)
    data = tree.to_data(listops_vocabulary())
    data.validate(require_tree=True, num_classes=10, num_tokens=16)
    assert int(data.y[data.root_index]) == value(expression)
    assert int((data.y >= 0).sum()) == 1
    if form == "operator":
        assert len(tree) == len([p for p in pieces if p != END]) == len(tree.words)
    else:
        assert len(tree) == 2 * len(pieces) - 1
        assert tree.words == pieces


def test_the_two_forms_of_one_expression() -> None:
    pieces = ["[MAX", "2", "[MIN", "4", "7", "]", "]"]
    tree = listops_tree(pieces)
    assert tree.parents == [-1, 0, 0, 2, 2]
    assert tree.slots == [0, 0, 1, 0, 1]
    assert tree.depths == [2, 0, 1, 0, 0]
    binary = listops_tree(["[SM", "5", "8", "]"], "binary")
    assert binary.tokens == [None, None, None, "[SM", "5", "8", "]"]
    assert binary.parents == [-1, 0, 1, 2, 2, 1, 0]
    assert binary.slots == [0, 0, 0, 0, 1, 1, 1]
    assert binary.labels[0] == 3


@pytest.mark.parametrize(
    ("text", "problem", "column"),
    [
        ("[MIN 3 x ]", "a piece is neither digit nor operator nor ]", 10),
        ("[MIN 3 10 ]", "a piece is neither digit nor operator nor ]", 10),
        ("[MIN ]", "a list is empty, or closed but never opened", 8),
        ("]", "a list is empty, or closed but never opened", 3),
        ("[MIN 3 [MAX 1 ]", "1 lists are never closed", 18),
        ("", "it is empty", 3),
        ("3 4", "something follows the end of the expression", 5),
        ("( ( [MIN 3 ) ) ]", "the parentheses are not the left-branching parse", 16),
        ("( [MIN ( 3 ] ) )", "the parentheses are not the left-branching parse", 5),
    ],
)
def test_says_what_is_wrong_and_where(text: str, problem: str, column: int) -> None:
    with pytest.raises(ValueError) as caught:
        read_listops(text, "listops.tsv:5", column=3)
    assert str(caught.value).startswith(f"ListOps expression: {problem}.")
    assert f"where:    listops.tsv:5:{column}" in str(caught.value)


def test_form_must_be_a_known_option() -> None:
    with pytest.raises(ValueError, match=r"form is unknown[\s\S]*operator, binary"):
        listops_tree(["3"], "round")


PIECES = ["[MAX", "2", "[SM", "4", "7", "]", "[MED", "1", "[MIN", "9", "8", "]", "5", "]", "]"]


def test_all_nodes_carry_the_value_of_their_part() -> None:
    tree = listops_tree(PIECES, labels="all")
    assert tree.labels == [5, 2, 1, 4, 7, 5, 1, 8, 9, 8, 5]


@pytest.mark.parametrize(("form", "labels"), [("binary", "all"), ("operator", "leaves")])
def test_labels_must_go_with_the_form(form: str, labels: str) -> None:
    with pytest.raises(ValueError, match="labels do not go with the form") as caught:
        listops_tree(["3"], form, labels)
    assert f"got:      {labels!r} with the form {form!r}" in str(caught.value)
