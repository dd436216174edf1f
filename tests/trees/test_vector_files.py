"""Word vectors from text: lookup, initial values of missing words, damaged files."""

import gzip
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.data import Vocabulary, read_word_vectors
from pyg_dynbatch.trees.vectors import MISSING


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(["The", "film", "-LRB-", ".", "dull", "Caf\u00e9"])


@pytest.mark.parametrize("name", ["glove.txt", "word2vec.txt", "glove.txt.gz"])
def test_reads_every_format(
    samples: Path, tmp_path: Path, vocabulary: Vocabulary, name: str
) -> None:
    path = samples / name
    if name.endswith(".gz"):
        path = tmp_path / name
        path.write_bytes(gzip.compress((samples / "glove.txt").read_bytes()))
    vectors = read_word_vectors(path, vocabulary, missing="zeros")
    assert vectors.found.tolist() == [False, False, True, True, True, False, False]
    assert vectors.matrix[2:5].tolist() == [[1, 2, 3], [4, 5, 6], [-1, -2, -3]]
    assert int(vectors.matrix[~vectors.found].count_nonzero()) == 0
    assert vectors.width == 3


def test_lower_case_comes_last(samples: Path) -> None:
    vocabulary = Vocabulary(["The", "Caf\u00e9"])
    vectors = read_word_vectors(samples / "glove.txt", vocabulary, lower_case=True)
    assert vectors.found.tolist() == [False, True, True]
    torch.testing.assert_close(vectors.matrix[1], torch.tensor([0.1, 0.2, 0.3]))


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
    assert float(drawn("normal").std()) == pytest.approx(1.0, rel=0.15)  # film is 1 2 3
    assert not drawn("zeros").any()


def test_missing_must_be_a_known_option(samples: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError, match="missing is unknown") as caught:
        read_word_vectors(samples / "glove.txt", vocabulary, missing="ones")
    assert all(option in str(caught.value) for option in MISSING)


def test_strict_names_a_token_without_vector(samples: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(ValueError) as caught:
        read_word_vectors(samples / "glove.txt", vocabulary, strict=True)
    message = str(caught.value)
    assert "WordVectors: token 'The' has no vector" in message
    assert "3 words without: 'The', 'dull', 'Caf\u00e9'" in message
    assert "glove.txt" in message


@pytest.mark.parametrize(
    ("text", "line", "got"),
    [
        ("the 1 2 3\nfilm 1 2\n", 2, "2 values"),
        ("the 1 2 3\nother 1 2\n", 2, "2 values"),
        ("the 1 2 3\nfilm 1 2 3 4\n", 2, "4 values"),
        ("2 3\nthe 1 2 3\nfilm 1 2 x\n", 3, "3 values, among them 'x'"),
        ("the 1 2 3\nfilm 1 nan 3\n", 2, "nan or infinite values"),
        ("the 1 2 3\n\nfilm 1 2 3\n", 2, "0 values"),
    ],
)
def test_a_bad_line_is_named(
    tmp_path: Path, vocabulary: Vocabulary, text: str, line: int, got: str
) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_word_vectors(path, vocabulary)
    assert "is not 3 numbers" in str(caught.value)
    assert f"got:      {got}" in str(caught.value)
    assert f"where:    {path}:{line}" in str(caught.value)


def test_a_cut_archive_is_refused(tmp_path: Path, vocabulary: Vocabulary) -> None:
    whole = gzip.compress(b"\n".join(b"word%d 0.25 0.5" % i for i in range(1000)))
    path = tmp_path / "vectors.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="the compressed file is damaged or cut short"):
        read_word_vectors(path, vocabulary)
    path.write_bytes(whole[:12] + bytes(50) + whole[62:])
    with pytest.raises(ValueError, match="the compressed file is damaged or cut short"):
        read_word_vectors(path, vocabulary)


@pytest.mark.parametrize("text", ["", "one\ntwo\n"])
def test_a_file_without_vectors_is_refused(
    tmp_path: Path, vocabulary: Vocabulary, text: str
) -> None:
    path = tmp_path / "vectors.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match="there are no vectors in the file"):
        read_word_vectors(path, vocabulary)


def test_a_missing_file_is_named(tmp_path: Path, vocabulary: Vocabulary) -> None:
    with pytest.raises(FileNotFoundError, match="none.txt: there is no such file"):
        read_word_vectors(tmp_path / "none.txt", vocabulary)
