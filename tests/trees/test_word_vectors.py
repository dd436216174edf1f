"""Vectors of a vocabulary: coverage, smaller vocabularies, files."""

import pytest
import torch

from pyg_dynbatch.data import Vocabulary, WordVectors


@pytest.fixture
def vectors() -> WordVectors:
    matrix = torch.arange(8.0).reshape(4, 2)
    found = torch.tensor([False, True, False, True])
    return WordVectors(Vocabulary(["a", "b", "c"]), matrix, found, "here")


def test_coverage_by_split(vectors: WordVectors) -> None:
    train, dev = vectors.coverage(
        {"train": torch.tensor([0, 6, 3, 1]), "dev": torch.tensor([1, 0, 0, 1])}
    )
    assert str(train) == "train: 70.0% of 10 tokens, 66.7% of 3 distinct words"
    assert (dev.tokens, dev.tokens_found, dev.types, dev.types_found) == (2, 1, 2, 1)


def test_words_without_vector_are_named_when_they_occur(vectors: WordVectors) -> None:
    assert vectors.require(torch.tensor([0, 1, 0, 2])) is vectors
    with pytest.raises(ValueError, match=r"token 'b' has no vector[\s\S]*where:    here"):
        vectors.require(torch.tensor([0, 1, 5, 2]))
    with pytest.raises(ValueError, match="token '<unk>' has no vector"):
        vectors.require(torch.tensor([1, 1, 0, 2]))
    with pytest.raises(ValueError, match="a vector for each of 3 words"):
        vectors.require()


def test_words_without_vector_can_share_row_zero(vectors: WordVectors) -> None:
    smaller = vectors.only_found()
    assert smaller.vocabulary.words == ("<unk>", "a", "c")
    assert smaller.matrix.tolist() == [[0, 1], [2, 3], [6, 7]]
    assert smaller.found.tolist() == [False, True, True]


def test_shows_itself(vectors: WordVectors) -> None:
    assert repr(vectors) == "WordVectors(4 rows x 2, 2 from here)"


def test_scales(vectors: WordVectors) -> None:
    assert torch.equal(vectors.scaled(6.0).matrix, 6.0 * vectors.matrix)


def test_rows_must_agree(vectors: WordVectors) -> None:
    with pytest.raises(ValueError, match=r"rows and words differ in number[\s\S]*3 rows"):
        WordVectors(Vocabulary(["a", "b"]), vectors.matrix, vectors.found)
