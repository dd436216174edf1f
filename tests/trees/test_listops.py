"""ListOps: values, parses and shapes of expressions, and how they are generated."""

import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
from pyg_dynbatch.trees.listops import (
    END,
    format_listops,
    listops_tree,
    listops_values,
    listops_vocabulary,
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


@given(expressions(), st.sampled_from(["operator", "binary"]))
def test_agrees_with_a_recursive_reading(expression: Expression, form: str) -> None:
    pieces = flat(expression)
    assert listops_values(pieces)[0] == value(expression)
    assert format_listops(pieces) == published(expression)
    tree = listops_tree(pieces, form)
    data = tree.to_data(listops_vocabulary())
    data.validate(require_tree=True)
    assert data.y.max() < 10 and data.token.max() < 16
    assert int(data.y[data.root_index]) == value(expression)
    assert int((data.y >= 0).sum()) == 1
    if form == "operator":
        assert len(tree) == len([p for p in pieces if p != END]) == len(tree.words)
    else:
        assert len(tree) == 2 * len(pieces) - 1
        assert tree.words == pieces


def test_the_forms_of_an_expression() -> None:
    tree = listops_tree(["[MAX", "2", "[MIN", "4", "7", "]", "]"], labels="all")
    assert tree.labels == [4, 2, 4, 4, 7]
    assert tree.parents == [-1, 0, 0, 2, 2]
    assert tree.slots == [0, 0, 1, 0, 1]
    assert tree.depths == [2, 0, 1, 0, 0]
    binary = listops_tree(["[SM", "5", "8", "]"], "binary")
    assert binary.tokens == [None, None, None, "[SM", "5", "8", "]"]
    assert binary.parents == [-1, 0, 1, 2, 2, 1, 0]
    assert binary.slots == [0, 0, 0, 0, 1, 1, 1]
    assert binary.labels == [3, *[-1] * 6]


UNKNOWN_OPTIONS = [
    ("round", "root", r"unknown form[\s\S]*'operator' or 'binary'"),
    ("binary", "all", "form 'binary': unknown labels"),
    ("operator", "leaves", "form 'operator': unknown labels"),
]


@pytest.mark.parametrize(("form", "labels", "text"), UNKNOWN_OPTIONS)
def test_unknown_options(form: str, labels: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        listops_tree(["3"], form, labels)


EXPECTED = [
    "[MED 3 9 [MIN 1 1 2 8 9 ] [MAX 2 2 ] ]",
    "[MED [SM 3 7 ] 9 ]",
    "[MED [SM 8 1 1 ] 0 ]",
    "[MAX [MAX 1 5 2 9 8 ] 0 5 1 7 ]",
    "[MAX 3 3 ]",
    "[MED [MED 3 2 5 4 1 ] 4 5 3 2 ]",
    "[MED 0 8 8 9 ]",
    "[MED 6 2 0 5 [MIN 8 2 9 1 ] ]",
    "[MED 7 4 4 ]",
    "[MAX 3 5 ]",
]
SMALL = ListOpsRecipe(train=300, val=40, test=50, seed=3)


def test_the_same_recipe_gives_the_same_distinct_expressions() -> None:
    first = SMALL.generate()
    assert first == SMALL.generate() != replace(SMALL, seed=4).generate()
    sizes = {split: len(drawn) for split, drawn in first.items()}
    assert sizes == {"train": 300, "val": 40, "test": 50}
    assert len({tuple(pieces) for part in first.values() for pieces in part}) == 390
    # Written down once: another result on another machine or version would be a fault.
    drawn = ListOpsRecipe(train=20, val=0, test=0, seed=0, max_depth=3).generate()["train"]
    assert [" ".join(pieces) for pieces in drawn if len(pieces) > 1] == EXPECTED


def test_limits_hold() -> None:
    recipe = ListOpsRecipe(train=500, val=0, test=0, max_depth=4, max_args=3, max_length=30)
    assert max(map(len, recipe.generate()["train"])) <= 30
    dataset = ListOps(None, "train", recipe=recipe)
    assert int(dataset.columns.fields["depth"].max()) == 3  # four nodes on the longest path
    assert int(dataset.columns.fields["child_slot"].max()) == 2


def test_pieces_are_distributed_as_published() -> None:
    drawn = ListOpsRecipe(train=3000, val=0, test=0, max_length=1000).generate()["train"]
    pieces = Counter(piece for one in drawn for piece in one)
    operators = [pieces[operator] for operator in OPERATIONS]
    digits = [pieces[digit] for digit in "0123456789"]
    for each in (operators, digits):
        assert max(each) / min(each) < 1.1
    # Every operator has 3.5 arguments on average, each piece but the first is an argument.
    arguments = (sum(digits) + sum(operators) - len(drawn)) / sum(operators)
    assert arguments == pytest.approx(3.5, abs=0.1)
    assert (ListOpsRecipe().max_depth, ListOpsRecipe().max_args) == (20, 5)
    dataset = ListOps(None, "train", recipe=ListOpsRecipe(train=2000, val=0, test=0))
    values = dataset.columns.fields["y"]
    assert float(torch.bincount(values[values >= 0]).max()) / 2000 < 0.2  # labels of the roots


def test_the_cache_knows_form_and_recipe(tmp_path: Path) -> None:
    ListOps(tmp_path, "train", recipe=SMALL)
    files = {path.name for path in (tmp_path / "processed").glob("*.*.pt")}
    assert {name.partition(".")[0] for name in files} == {"train", "val", "test"}
    binary = ListOps(tmp_path, "dev", "binary", SMALL)
    assert (len(binary), binary.num_classes, binary.num_tokens) == (40, 10, 16)
    ListOps(tmp_path, "train", recipe=ListOpsRecipe(train=10, val=0, test=0))
    assert len(list((tmp_path / "processed").glob("*.*.pt"))) == 7


BAD_RECIPES = [
    ({"max_args": 1}, r"ListOpsRecipe: max_args is too small[\s\S]*2 or more"),
    ({"val": 20, "max_depth": 1}, "there are not enough distinct expressions"),
    ({"train": 5}, r"ListOps: the split 'val' is empty"),
]


@pytest.mark.parametrize(("recipe", "words"), BAD_RECIPES)
def test_recipes_are_checked(recipe: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ListOps(None, "val", recipe=ListOpsRecipe(**{"train": 0, "val": 0, "test": 0, **recipe}))


def test_a_recipe_may_label_all_nodes() -> None:
    recipe = ListOpsRecipe(train=5, val=0, test=0, labels="all")
    everywhere = ListOps(None, "train", recipe=recipe)
    at_roots = ListOps(None, "train", recipe=replace(recipe, labels="root"))
    for labelled, plain in zip(everywhere, at_roots, strict=True):
        assert (labelled.y >= 0).all()
        assert labelled.y[labelled.root_index] == plain.y[plain.root_index]
