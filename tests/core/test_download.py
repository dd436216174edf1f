"""Downloads with checksums, and their error messages."""

import hashlib
import io
import urllib.request
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from pyg_dynbatch.core.files import download_verified, extract_member, sha256_of

CONTENT = b"a film " * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Response(io.BytesIO):
    """Sends bytes and promises a length; may break in the middle."""

    def __init__(self, content: bytes, promised: int, broken: bool = False) -> None:
        super().__init__(content)
        self.headers = Message()
        self.headers["Content-Length"] = str(promised)
        self.broken = broken

    def read(self, size: int | None = -1) -> bytes:
        if self.broken and self.tell() > 0:
            raise ConnectionResetError("reset by peer")
        return super().read(size)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "there" / "words.txt"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    return path


def test_downloads_once(source: Path, tmp_path: Path, capsys) -> None:
    path = download_verified(source.as_uri(), tmp_path / "here", SHA256, "Words")
    assert path == tmp_path / "here" / "words.txt"
    assert path.read_bytes() == CONTENT
    said = f"Words: {source.as_uri()}: 140,000 of 140,000 bytes in 0 s\n"
    assert capsys.readouterr() == ("", said)
    source.unlink()
    assert download_verified(source.as_uri(), tmp_path / "here", SHA256, "Words") == path


def test_a_wrong_checksum_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        download_verified(source.as_uri(), tmp_path / "here", "0" * 64, "Words")
    message = str(caught.value)
    assert "has a wrong checksum" in message
    assert f"expected: sha256 {'0' * 64}" in message
    assert f"got:      sha256 {SHA256}, 140,000 bytes" in message
    assert list((tmp_path / "here").iterdir()) == []


def test_a_wrong_file_in_place_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("something else")
    with pytest.raises(ValueError, match=r"Words: words.txt has a wrong checksum[\s\S]*delete"):
        download_verified(source.as_uri(), tmp_path, SHA256, "Words")


def test_offline_says_what_to_do(tmp_path: Path) -> None:
    # Nothing listens on port 9 of this machine, so no packet leaves it.
    url = "http://127.0.0.1:9/words.txt"
    with pytest.raises(ConnectionError) as caught:
        download_verified(url, tmp_path / "here", SHA256, "Words", hint="put it there by hand")
    message = str(caught.value)
    assert "Words: the download failed" in message
    assert f"where:    {url}" in message
    assert "try:      put it there by hand" in message
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("broken", [False, True])
def test_a_connection_that_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    response = Response(CONTENT[:100_000], len(CONTENT), broken)
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: response)
    with pytest.raises(ConnectionError) as caught:
        download_verified("http://example.org/words.txt", tmp_path, SHA256, "Words")
    reason = "reset by peer" if broken else "ended after 100,000 of 140,000 bytes"
    assert reason in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "here").write_text("a file where a folder should be")
    with pytest.raises(OSError, match="words.txt: the file cannot be written"):
        download_verified(source.as_uri(), tmp_path / "here", SHA256, "Words")


def test_extracts_one_member(tmp_path: Path) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("trees/a.txt", "one")
    assert extract_member(archive, "trees/a.txt", tmp_path / "a.txt", "Words").read_text() == "one"
    with pytest.raises(ValueError, match=r"corrupt or truncated[\s\S]*trees/b.txt"):
        extract_member(archive, "trees/b.txt", tmp_path / "b.txt", "Words")


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_corrupt_archive_raises(tmp_path: Path, damage: str) -> None:
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        opened.writestr("a.txt", CONTENT)
    whole = archive.read_bytes()
    archive.write_bytes(
        whole[: len(whole) // 2] if damage == "cut" else whole[:60] + b"x" * 20 + whole[80:]
    )
    with pytest.raises(ValueError, match=r"Words: the archive is corrupt or truncated"):
        extract_member(archive, "a.txt", tmp_path / "a.txt", "Words")
    assert not (tmp_path / "a.txt").exists()


def test_an_unknown_checksum_is_noted_and_then_holds(tmp_path):
    source = tmp_path / "words.txt"
    source.write_text("a film")
    folder = tmp_path / "raw"
    path = download_verified(source.as_uri(), folder, None, "Words")
    noted = folder / "words.txt.sha256"
    assert noted.read_text().strip() == sha256_of(source)
    assert download_verified(source.as_uri(), folder, None, "Words") == path
    path.write_text("another film")
    with pytest.raises(ValueError, match="words.txt has a wrong checksum"):
        download_verified(source.as_uri(), folder, None, "Words")
    path.unlink()
    source.write_text("something else")
    with pytest.raises(ValueError, match="words.txt.* has a wrong checksum"):
        download_verified(source.as_uri(), folder, None, "Words")
    noted.unlink()
    assert download_verified(source.as_uri(), folder, None, "Words").read_text() == "something else"


def test_a_file_put_in_place_needs_no_noted_checksum(tmp_path):
    (tmp_path / "words.txt").write_text("mine")
    path = download_verified("https://nowhere.invalid/words.txt", tmp_path, None, "Words")
    assert path.read_text() == "mine"
