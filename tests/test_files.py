"""Files are written atomically, read as lines of text, and downloaded with checksums."""

import gzip
import hashlib
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pyg_dynbatch.files import (
    atomic_file,
    download_verified,
    open_lines,
    read_lines,
    sha256_of,
    write_atomically,
)
from tests.conftest import Server


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files, as a full disk does."""
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


def test_a_file_written_piece_by_piece_is_whole_or_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with atomic_file(path, "wb") as file:
        file.write(b"one")
        assert not path.exists()
    with pytest.raises(FileNotFoundError, match="another file"), atomic_file(path) as file:
        file.write("tw")
        raise FileNotFoundError("another file")
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"one"


def write_piece_by_piece(path: Path) -> None:
    with atomic_file(path) as file:
        file.write("x")


WRITERS = [
    write_piece_by_piece,
    lambda path: write_atomically(path, lambda temporary: temporary.write_text("x")),
    lambda path: download_verified("http://127.0.0.1:9/x", path.parent, None, "Words"),
]


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_that_cannot_be_created(tmp_path: Path, write: Callable) -> None:
    (tmp_path / "occupied").write_text("a file instead of a folder")
    with pytest.raises(OSError, match="the file cannot be written") as caught:
        write(tmp_path / "occupied" / "file")
    assert f"where:    {tmp_path / 'occupied'}" in str(caught.value)


@pytest.mark.parametrize("mode", ["w", "wb"])
def test_a_full_disk_names_the_file_that_did_not_fit(tmp_path: Path, mode: str) -> None:
    content = "x" * 9000 if mode == "w" else b"x" * 9000
    with (
        files_of_at_most(8192),
        pytest.raises(OSError, match=r"inner: the file cannot be written(?s:.)*File too large"),
        atomic_file(tmp_path / "outer"),
        atomic_file(tmp_path / "inner", mode) as file,
    ):
        file.write(content)
    assert not list(tmp_path.iterdir())


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffone\u2028still\r\n\ntwo\x0bstill\n\n \n".encode())
    assert read_lines(path) == ["one\u2028still", "", "two\x0bstill"]


GZIPPED = gzip.compress(b"one\n" * 100_000)
TORN = r"corrupt[\s\S]*a complete gzip[\s\S]*after line \d+"


BAD_TEXTS = [
    ("a.txt", b"", r"a.txt: the file is empty[\s\S]*where: .*a.txt"),
    ("a.txt", b" \n\n", "a.txt: the file is empty"),
    ("a.txt", "(2 ok)\n(2 caf\u00e9)".encode("latin-1"), r"not UTF-8[\s\S]*0xe9[\s\S]*:2:7"),
    ("a.csv", "name\nok\ncafé\n".encode("latin-1"), r"byte 0xe9[\s\S]*a\.csv:3:4[\s\S]*iconv"),
    ("a.csv", "name\n".encode("utf-16"), r"byte 0xff[\s\S]*a\.csv:1:1"),
    ("a.csv.gz", b"no archive", TORN),
    ("a.csv.gz", GZIPPED[:-20], TORN),
    ("a.csv.gz", GZIPPED[:20] + b"x" * 40 + GZIPPED[60:], TORN),
    ("a.txt", None, "^a.txt: there is no such file"),
    ("", None, "^{folder}: there is no such file"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD_TEXTS)
def test_text_that_cannot_be_read(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = FileNotFoundError if content is None else ValueError
    with pytest.raises(error, match=words.replace("{folder}", tmp_path.name)):
        read_lines(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"^\.: there is no such file"):
        read_lines(Path())


CONTENT = b"a film " * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


def test_downloads_once(server: Server, tmp_path: Path, capsys) -> None:
    server.files["words.txt"] = CONTENT
    folder = tmp_path / "here"
    path = download_verified(server.url("words.txt"), folder, SHA256, "Words")
    assert path == folder / "words.txt" and path.read_bytes() == CONTENT
    assert "Words: http" in capsys.readouterr().err
    server.files.clear()
    assert download_verified(server.url("words.txt"), folder, SHA256, "Words") == path


def test_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    server.files["words.txt"] = CONTENT
    with pytest.raises(ValueError) as caught:
        download_verified(server.url("words.txt"), tmp_path, "0" * 64, "Words", hint="by hand")
    message = str(caught.value)
    assert "Words: " in message and "has a wrong checksum" in message
    assert f"expected: sha256 {'0' * 64}" in message
    assert f"got:      sha256 {SHA256}, 140,000 bytes" in message
    assert "try:      by hand" in message
    assert list(tmp_path.iterdir()) == []
    mine = tmp_path / "words.txt"
    mine.write_text("something else")
    with pytest.raises(ValueError, match=r"Words: words.txt has a wrong checksum[\s\S]*delete"):
        download_verified(server.url("words.txt"), tmp_path, SHA256, "Words")
    assert mine.read_text() == "something else"


@pytest.mark.parametrize("fault", ["offline", "missing", "truncated"])
def test_a_failed_download(server: Server, tmp_path: Path, fault: str) -> None:
    server.files["words.txt"] = CONTENT
    server.sent = 100_000 if fault == "truncated" else None
    url = server.url("none.txt" if fault == "missing" else "words.txt")
    if fault == "offline":
        url = "http://127.0.0.1:9/words.txt"  # nothing listens there
    with pytest.raises(ConnectionError) as caught:
        download_verified(url, tmp_path / "here", None, "Words", hint="put it there by hand")
    message = str(caught.value)
    assert "Words: the download failed" in message
    assert {"offline": "refused", "missing": "404", "truncated": "after 100,000 of 140,000 bytes"}[
        fault
    ] in message
    assert f"where:    {url}" in message
    assert "try:      put it there by hand" in message
    assert list((tmp_path / "here").iterdir()) == []


def test_an_unknown_checksum_is_noted_and_then_holds(server: Server, tmp_path: Path) -> None:
    def download() -> str:
        return download_verified(server.url("words.txt"), tmp_path, None, "Words").read_text()

    server.files["words.txt"] = b"a film"
    assert download() == download() == "a film"
    path, noted = tmp_path / "words.txt", tmp_path / "words.txt.sha256"
    assert noted.read_text().strip() == sha256_of(path)
    path.write_text("another film")
    with pytest.raises(ValueError, match="words.txt has a wrong checksum"):
        download()
    path.unlink()
    server.files["words.txt"] = b"something else"
    with pytest.raises(ValueError, match="words.txt.* has a wrong checksum"):
        download()
    noted.unlink()
    assert download() == "something else"
    (tmp_path / "mine.txt").write_text("mine")
    path = download_verified("https://nowhere.invalid/mine.txt", tmp_path, None, "Words")
    assert path.read_text() == "mine"


def read(path: Path | str) -> list[str]:
    with open_lines(path) as lines:
        found = list(lines)
        assert lines.number == len(found)
        return found


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".TXT.GZ"])
@pytest.mark.parametrize(
    "text", ["", "a\n", "a", "a\r\nb\r\rc\n\nd\r", "\ufeffa\nb", "\ufeff", "é\u2028x\nb"]
)
def test_lines(tmp_path: Path, suffix: str, text: str) -> None:
    raw = text.encode()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.lower().endswith("gz") else raw)
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    assert "\0".join(read(path)) == text.replace("\n", "\n\0").removesuffix("\0")
