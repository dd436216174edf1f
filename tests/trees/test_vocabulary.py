"""Words and rows."""

import pickle
from pathlib import Path

import pytest

from pyg_dynbatch.data import Vocabulary, unescape


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
