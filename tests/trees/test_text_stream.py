"""Lines of text from files, compressed files and standard input."""

import gzip
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyg_dynbatch.core.files import open_lines


def read(path: Path | str) -> list[str]:
    with open_lines(path) as lines:
        found = list(lines)
        assert lines.number == len(found)
        return found


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".TXT.GZ"])
@pytest.mark.parametrize(
    "text", ["", "a\n", "a", "a\r\nb\n\nc", "\ufeffa\nb", "\ufeff", "é\u2028x\nb"]
)
def test_lines(tmp_path: Path, suffix: str, text: str) -> None:
    raw = text.encode()
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.lower().endswith("gz") else raw)
    found = "".join(read(path))
    assert found == text.removeprefix("\ufeff") or (text, found) == ("\ufeff", "\n")


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO(b"a\nb\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    assert read("-") == ["a\n", "b\n"]
    assert not stream.closed


def test_lines_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO(b"a\nb\nc\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stream))
    with open_lines("-") as lines:
        assert next(iter(lines)) == "a\n"
        assert stream.tell() == 2


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "a.csv", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            read(path)


def test_another_encoding_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes("name\nok\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"not UTF-8[\s\S]*byte 0xe9[\s\S]*a\.csv:3:4[\s\S]*iconv"):
        read(path)
    path.write_bytes("name\n".encode("utf-16"))
    with pytest.raises(ValueError, match=r"byte 0xff[\s\S]*a\.csv:1:1"):
        read(path)


def test_damaged_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    whole = gzip.compress(b"one\n" * 100_000)
    broken = bytearray(whole)
    broken[20:60] = b"x" * 40
    for content in (b"no archive", whole[:-20], bytes(broken)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"corrupt[\s\S]*a complete gzip[\s\S]*after line \d+"):
            read(path)
