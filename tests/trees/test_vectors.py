"""Vectors of a vocabulary: coverage and text files."""

import gzip
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.data import Vocabulary, read_word_vectors
from pyg_dynbatch.trees.words import MISSING, WordVectors


@pytest.fixture
def vectors() -> WordVectors:
    matrix = torch.arange(8.0).reshape(4, 2)
    found = torch.tensor([False, True, False, True])
    return WordVectors(Vocabulary(["a", "b", "c"]), matrix, found, "here")


def test_coverage_by_split(vectors: WordVectors) -> None:
    counts = {"train": torch.tensor([0, 6, 3, 1]), "dev": torch.tensor([1, 0, 0, 1])}
    assert vectors.coverage(counts) == [
        "train: 70.0% of 10 tokens, 66.7% of 3 distinct words",
        "dev: 50.0% of 2 tokens, 50.0% of 2 distinct words",
    ]


def test_vectors_of_a_vocabulary(vectors: WordVectors) -> None:
    smaller = vectors.only_found()
    assert smaller.vocabulary.words == ("<unk>", "a", "c")
    assert smaller.matrix.tolist() == [[0, 1], [2, 3], [6, 7]]
    assert smaller.found.tolist() == [False, True, True]
    assert repr(vectors) == "WordVectors(4 rows x 2, 2 from here)"
    assert torch.equal(vectors.scaled(6.0).matrix, 6.0 * vectors.matrix)
    with pytest.raises(ValueError, match=r"rows and words differ in number[\s\S]*3 rows"):
        WordVectors(Vocabulary(["a", "b"]), vectors.matrix, vectors.found)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(["The", "film", "-LRB-", ".", "dull", "Caf\u00e9"])


@pytest.mark.parametrize("name", ["glove.txt", "word2vec.txt", "glove.txt.gz"])
def test_reads_every_format(samples, tmp_path, vocabulary, name):
    path = samples / name
    if name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress((samples / "glove.txt").read_bytes()))
    vectors = read_word_vectors(path, vocabulary)
    assert vectors.found.tolist() == [False, False, True, True, True, False, False]
    assert vectors.matrix[2:5].tolist() == [[1, 2, 3], [4, 5, 6], [-1, -2, -3]]
    assert float(vectors.matrix[~vectors.found].abs().max()) <= 0.05 and vectors.width == 3
    lower = read_word_vectors(samples / "glove.txt", vocabulary, lower_case=True)
    assert lower.found.tolist() == [False, True, True, True, True, False, True]
    torch.testing.assert_close(lower.matrix[1], torch.tensor([0.1, 0.2, 0.3]))


def test_missing_words_begin_as_the_protocol_says(samples: Path) -> None:
    vocabulary = Vocabulary(["film", *(f"none{i}" for i in range(200))])

    def drawn(missing: str, seed: int = 0) -> torch.Tensor:
        vectors = read_word_vectors(samples / "glove.txt", vocabulary, missing=missing, seed=seed)
        return vectors.matrix[~vectors.found]

    own, shared = drawn("uniform"), drawn("shared_uniform")
    assert own.shape == shared.shape == (201, 3)
    assert float(own.abs().max()) <= 0.05 < 2 * float(own.abs().max())
    assert own.unique(dim=0).size(0) == 201 and shared.unique(dim=0).size(0) == 1
    assert 0 < float(shared.abs().max()) <= 0.05
    assert torch.equal(own, drawn("uniform")) and not torch.equal(own, drawn("uniform", 1))


def test_options_of_missing_words(samples: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="unknown missing") as caught:
        read_word_vectors(samples / "glove.txt", vocabulary, missing="ones")
    assert all(option in str(caught.value) for option in MISSING)


BAD_LINES = [
    ("the 1 2 3\nfilm 1 2\n", 2, "2 values"),
    ("the 1 2 3\nother 1 2\n", 2, "2 values"),
    ("the 1 2 3\nfilm 1 2 3 4\n", 2, "4 values"),
    ("2 3\nthe 1 2 3\nfilm 1 2 x\n", 3, "3 values, among them 'x'"),
    ("the 1 2 3\nfilm 1 nan 3\n", 2, "3 values, among them 'nan'"),
    ("the 1 2 3\n\nfilm 1 2 3\n", 2, "0 values"),
]


@pytest.mark.parametrize(("text", "line", "got"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path, vocabulary, text, line, got):
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    match = rf"is not 3 numbers[\s\S]*got:      {got}\n[\s\S]*where:    {path}:{line}"
    with pytest.raises(ValueError, match=match):
        read_word_vectors(path, vocabulary)


WHOLE = gzip.compress(b"\n".join(b"word%d 0.25 0.5" % i for i in range(1000)))


BAD_FILES = [
    (WHOLE[: len(WHOLE) // 2], "the compressed file is corrupt or truncated"),
    (WHOLE[:12] + bytes(50) + WHOLE[62:], "the compressed file is corrupt or truncated"),
    (b"", "no vectors in the file"),
    (b"one\ntwo\n", "no vectors in the file"),
    (None, "vectors.gz: there is no such file"),
]


@pytest.mark.parametrize(("content", "words"), BAD_FILES)
def test_files_that_cannot_be_read(tmp_path, vocabulary, content, words):
    path = tmp_path / ("vectors.gz" if content is None or content[:1] == WHOLE[:1] else "a.txt")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileNotFoundError if content is None else ValueError, match=words):
        read_word_vectors(path, vocabulary)
