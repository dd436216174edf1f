"""Read text and write files so that a fault is named by place and nothing is left half-done."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pyg_dynbatch.core.errors import mismatch


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Writes a file under a temporary name and gives it its own name only when it is complete.

    A reader sees the old file or the whole new one. A process that is killed leaves at most a
    hidden ``.tmp`` file, which nobody reads.

    Args:
        path: The file to end with; its folder is made when missing.
        write: Is called with the temporary path and writes the content there.

    Returns:
        The path written.

    Raises:
        ConnectionError: If `write` raises it.
        OSError: If the folder cannot be made or written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> write_atomically(f"{folder}/a.txt", lambda p: p.write_text("whole")).read_text()
        'whole'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as handle:
            # Without this a power cut may keep the new name and lose the content.
            os.fsync(handle.fileno())
        temporary.replace(path)
    except ConnectionError:  # the content could not be fetched; the folder is not to blame
        raise
    except OSError as error:
        raise OSError(
            mismatch(
                f"{path.name}: the file cannot be written",
                expected="a folder that can be made and written",
                got=f"{type(error).__name__}: {error.strerror or error}",
                where=path.parent,
                mend="another folder, or mend its permissions or the free space",
            )
        ) from error
    finally:
        _remove_quietly(temporary)
    return path


def _remove_quietly(path: Path) -> None:
    # The folder itself may be what is wrong; that error is already on its way to the user.
    if os.path.lexists(path):
        path.unlink()


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
    r"""Reads the lines of a UTF-8 text file.

    Only ``\n`` (with an optional ``\r`` before it) ends a line: other line separators of Unicode
    are part of the text. Blank lines at the end are dropped, those in between are kept so that
    the position in the list, counted from 1, is the line number.

    Args:
        path: The file, with or without byte order mark.

    Returns:
        The lines, at least one, without their ends.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty or not UTF-8; says where.
    """
    path = existing(path, "a text file")
    raw = path.read_bytes()
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


def load_tensors(path: str | Path, kind: str, what: str) -> dict[str, Any]:
    """Reads a dictionary that was saved with its kind under ``"format"``.

    Args:
        path: The file.
        kind: What must stand under ``"format"``.
        what: Who reads, for messages.

    Returns:
        The dictionary; nothing but tensors and plain values is ever unpickled.

    Raises:
        ValueError: If the file cannot be read, or is of another kind.
    """
    try:
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
