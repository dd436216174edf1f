"""Parent pointers to trees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.data import Vocabulary, parse_parents


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
        ("0 3", "a parent pointer names none of the 2 nodes", "3"),
        ("0 -2", "a parent pointer names none of the 2 nodes", "-2"),
        ("0 0", "there is not exactly one root", "2 zeros"),
        ("-1 1", "the parent of node 2 is outside the tree", "1"),
        ("0 3 2", "the parent pointers run in a circle", "nodes [2, 3]"),
    ],
)
def test_says_what_is_wrong(pointers: str, problem: str, got: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_parents(pointers, ["a", "b"], "a.parents:4")
    assert str(caught.value).startswith(f"parent pointers: {problem}.")
    assert got in str(caught.value)
    assert "where:    a.parents:4" in str(caught.value)
