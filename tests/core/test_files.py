"""Files are written whole, in one piece or piece by piece."""

from pathlib import Path

import pytest

from pyg_dynbatch.core.files import whole_file, write_atomically


def test_nothing_is_left_of_an_interrupted_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def interrupted(temporary: Path) -> None:
        temporary.write_text("ha")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, interrupted)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file where a folder should be")
    with pytest.raises(OSError) as caught:
        write_atomically(tmp_path / "occupied" / "file", lambda p: p.write_text("x"))
    assert "file: the file cannot be written" in str(caught.value)
    assert f"where:    {tmp_path / 'occupied'}" in str(caught.value)


def test_a_file_written_piece_by_piece_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with whole_file(path, "wb") as file:
        file.write(b"one")
        assert not path.exists()
    with pytest.raises(FileNotFoundError, match="another file"), whole_file(path) as file:
        file.write("tw")
        raise FileNotFoundError("another file")
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"one"


def test_a_folder_for_pieces_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file where a folder should be")
    with (
        pytest.raises(OSError, match="file: the file cannot be written"),
        whole_file(tmp_path / "occupied" / "file"),
    ):
        pytest.fail("nothing can be written")
