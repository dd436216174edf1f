"""A user's own files of bracketed trees."""

import gzip
from pathlib import Path

import pytest

from pyg_dynbatch.data import Vocabulary
from pyg_dynbatch.datasets import TreeFile


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_labels_and_words_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "(3 (2 good) (7 fun))", "(0 bad)", "")
    dataset = TreeFile(path)
    assert (len(dataset), dataset.num_classes) == (2, 8)
    assert dataset.vocabulary.words == ("<unk>", "good", "fun", "bad")
    other = TreeFile(str(path), vocabulary=Vocabulary(["bad"]), num_classes=9)
    assert other.num_classes == 9 and other[1].token.tolist() == [1]


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.txt", "(1 a)"), write(tmp_path / "b.txt", "(2 b)", "(0 a)")]
    dataset = TreeFile(paths)
    assert [data.y.tolist() for data in dataset] == [[1], [2], [0]]


def test_unlabelled_nodes_and_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "(1 (good) (-1 fun))", "((2 a) (b))")
    dataset = TreeFile(path, labels="optional")
    assert [data.y.tolist() for data in dataset] == [[1, -1, -1], [-1, 2, -1]]
    assert dataset.num_classes == 3
    with pytest.raises(ValueError, match="a label is missing"):
        TreeFile(path)
    bare = TreeFile(write(tmp_path / "b.txt", "(+ (3) (4))"), labels="none")
    assert "y" not in bare[0] and bare.num_classes == 0
    assert bare[0].token.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "problem", "column"),
    [
        ("(3 (2 a) (2 b)", "1 bracket is never closed", 15),
        ("(x a)", "a label is not an integer", 2),
        ("(a)", "a label is missing", 2),
        ("(3 (4 a) (2 b))", "a label is out of range", 5),
        ("", "there is an empty tree", 1),
        ("()", "there is an empty tree", 2),
    ],
)
def test_faults_are_named_by_place(tmp_path: Path, line: str, problem: str, column: int) -> None:
    path = write(tmp_path / "a.txt", "(1 good)", line, "(1 good)")
    with pytest.raises(ValueError) as caught:
        TreeFile(path, num_classes=4)
    assert problem in str(caught.value)
    assert f"where:    {path}:2:{column}" in str(caught.value)


def test_empty_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TreeFile: there are no files"):
        TreeFile([])
    with pytest.raises(ValueError, match="a.txt: the file is empty"):
        TreeFile(write(tmp_path / "a.txt", ""))
    with pytest.raises(FileNotFoundError, match="none.txt: there is no such file"):
        TreeFile(tmp_path / "none.txt")
    (tmp_path / "b.txt").write_bytes("(1 caf\u00e9)".encode("utf-16"))
    with pytest.raises(ValueError, match=r"the text is not UTF-8[\s\S]*b.txt:1:1"):
        TreeFile(tmp_path / "b.txt")


def test_compressed_files(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.txt", "(3 (2 good) (1 fun))", "(0 bad)")
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for one, other in zip(TreeFile(plain), TreeFile(packed, tmp_path), strict=True):
        assert one.token.tolist() == other.token.tolist() and one.y.tolist() == other.y.tolist()
    packed.write_bytes(gzip.compress(b"(1 (0 a)\n"))
    with pytest.raises(ValueError, match=r"a\.txt\.gz:1"):
        TreeFile(packed)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="damaged or cut short") as caught:
        TreeFile(packed)
    assert f"where:    {packed}" in str(caught.value)
