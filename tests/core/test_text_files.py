"""Lines of text, files of tensors."""

from pathlib import Path

import pytest
import torch

from pyg_dynbatch.core.files import load_tensors, read_lines


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\u2028still\r\n\ntwo\x0bstill\n\n \n".encode())
    assert read_lines(path) == ["one\u2028still", "", "two\x0bstill"]


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"text.txt: the file is empty[\s\S]*where: .*text.txt"):
        read_lines(path)


def test_another_encoding_is_named_by_place(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("(2 ok)\n(2 caf\u00e9)".encode("latin-1"))
    with pytest.raises(ValueError) as caught:
        read_lines(path)
    assert "the text is not UTF-8" in str(caught.value)
    assert "byte 0xe9" in str(caught.value)
    assert f"{path}:2:7" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.txt: there is no such file"):
        read_lines(tmp_path / "none.txt")


def test_loading_refuses_damage_and_other_kinds(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"format": "one", "value": torch.arange(5)}, path)
    assert load_tensors(path, "one", "Reader")["value"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"Reader: the file is of a different kind[\s\S]*two"):
        load_tensors(path, "two", "Reader")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"Reader: the file cannot be read[\s\S]*delete the file"):
        load_tensors(path, "one", "Reader")
    with pytest.raises(FileNotFoundError):
        load_tensors(tmp_path / "none", "one", "Reader")
