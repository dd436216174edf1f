"""Files are written whole, in one piece or piece by piece."""

import errno
import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyg_dynbatch.core.files import locked_folder, whole_file, write_atomically


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Lets every file end at so many bytes, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_full_disk_names_the_file_that_did_not_fit(tmp_path: Path, mode: str) -> None:
    content = "x" * 9000 if mode == "w" else b"x" * 9000
    with (
        files_of_at_most(8192),
        pytest.raises(OSError, match=r"inner: the file cannot be written(?s:.)*File too large"),
        whole_file(tmp_path / "outer"),
        whole_file(tmp_path / "inner", mode) as file,
    ):
        file.write(content)
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_one_unfinished_file(tmp_path: Path) -> None:
    with whole_file(tmp_path / "file", resume_at=0) as file:
        file.write("one")
        with (
            pytest.raises(OSError, match="another process is writing it"),
            whole_file(tmp_path / "file", resume_at=0),
        ):
            pytest.fail("it is being written")
    assert (tmp_path / "file").read_text() == "one"


@pytest.mark.parametrize("lock", [locked_folder, lambda path: whole_file(path, resume_at=0)])
def test_where_files_cannot_be_locked_there_is_a_warning(
    tmp_path: Path, lock: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refused)
    path = tmp_path / "new"
    with pytest.warns(UserWarning, match="new.* cannot be locked .No locks"), lock(path):
        pass
    assert path.exists()
