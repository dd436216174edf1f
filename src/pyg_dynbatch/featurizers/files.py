"""Read text and tensors so that a fault is named by place."""

import gzip
import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from pyg_dynbatch.core.errors import mismatch


def existing(path: str | Path, what: str) -> Path:
    """Refuses a path where there is no file.

    Args:
        path: The path.
        what: What is looked for, for the message.

    Returns:
        The path.

    Raises:
        FileNotFoundError: If there is no such file.

    Example:
        >>> existing("nowhere.txt", "a text file")
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere.txt: there is no such file.
          expected: a text file
          where:    nowhere.txt
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            mismatch(f"{path.name}: there is no such file", expected=what, where=path)
        )
    return path


def read_lines(path: str | Path) -> list[str]:
    r"""Reads the lines of a UTF-8 text file, which may be compressed by gzip.

    Only ``\n`` (with an optional ``\r`` before it) ends a line: other line separators of Unicode
    are part of the text. Blank lines at the end are dropped, those in between are kept so that
    the position in the list, counted from 1, is the line number.

    Args:
        path: The file, with or without byte order mark.

    Returns:
        The lines, at least one, without their ends.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty, not UTF-8, or damaged; says where.
    """
    path = existing(path, "a text file")
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        raw = _unpacked(raw, path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise ValueError(
            mismatch(
                f"{path.name}: the text is not UTF-8",
                expected="UTF-8",
                got=f"byte 0x{raw[error.start]:02x} ({error.reason})",
                where=f"{path}:{line}:{column}",
                mend=f"iconv -f <its encoding> -t utf-8 {path.name}",
            )
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError(
            mismatch(
                f"{path.name}: the file is empty", expected="one line or more", got=0, where=path
            )
        )
    return lines


def _unpacked(raw: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            mismatch(
                f"{path.name}: the compressed file is damaged or cut short",
                expected="a complete .gz file",
                got=f"{type(error).__name__}: {error}",
                where=path,
            )
        ) from error


def load_tensors(path: str | Path, kind: str, what: str) -> dict[str, Any]:
    """Reads a dictionary that was saved with its kind under ``"format"``.

    Args:
        path: The file.
        kind: What must stand under ``"format"``.
        what: Who reads, for messages.

    Returns:
        The dictionary; nothing but tensors and plain values is ever unpickled.

    Raises:
        ValueError: If the file cannot be read, is damaged, or is of another kind.
    """
    try:
        # torch writes a checksum of every part, which torch.load does not compare.
        with ZipFile(path) as archive:
            part = archive.testzip()
        if part is not None:
            raise BadZipFile(f"{part} does not match its checksum")
        content = torch.load(path, weights_only=True, map_location="cpu")
        found = content["format"]
    except FileNotFoundError:
        raise
    except Exception as error:  # torch and pickle raise many classes for a damaged file
        first = str(error).partition("\n")[0]
        raise ValueError(
            mismatch(
                f"{what}: the file cannot be read",
                expected=f"a file of the kind {kind}",
                got=f"{type(error).__name__}: {first}",
                where=path,
                mend="delete the file and make it again",
            )
        ) from error
    if found != kind:
        raise ValueError(
            mismatch(
                f"{what}: the file is of another kind",
                expected=kind,
                got=found,
                where=path,
                mend="delete the file and make it again",
            )
        )
    return dict(content)
