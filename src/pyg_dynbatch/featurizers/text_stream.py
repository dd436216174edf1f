"""Read a text file line by line, compressed or from standard input, naming the line of a fault."""

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import cast

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.featurizers.files import existing

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Lines:
    r"""Gives the lines of an open file as text and knows how many it has given.

    Args:
        stream: The file, opened for bytes.
        path: Its path, or ``"-"``.

    Example:
        >>> import io
        >>> lines = Lines(io.BytesIO("é\nb".encode()), "a.txt")
        >>> list(lines), lines.number
        (['é\n', 'b'], 2)
    """

    def __init__(self, stream: BufferedIOBase, path: str) -> None:
        self.path = "standard input" if path == "-" else path
        self.name = "standard input" if path == "-" else Path(path).name
        self.number = 0
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        while raw := self._next():
            yield raw

    def _next(self) -> str:
        try:
            raw = self._stream.readline()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(
                mismatch(
                    f"{self.name}: the compressed file is damaged",
                    expected="a complete gzip file",
                    got=f"{type(error).__name__}: {error}",
                    where=f"{self.path}, after line {self.number}",
                )
            ) from error
        self.number += bool(raw)
        if self.number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK) or (b"\n" if raw else b"")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                mismatch(
                    f"{self.name}: the text is not UTF-8",
                    expected="UTF-8",
                    got=f"byte 0x{raw[error.start]:02x} ({error.reason})",
                    where=f"{self.path}:{self.number}:{error.start + 1}",
                    mend=f"iconv -f <its encoding> -t utf-8 {self.name}",
                )
            ) from error


@contextmanager
def open_lines(path: str | Path) -> Iterator[Lines]:
    r"""Opens a text file, compressed if its name ends in ``.gz``, or standard input.

    Args:
        path: The file, or ``"-"`` for standard input, which is left open.

    Yields:
        Its lines.

    Raises:
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt.gz"
        >>> _ = path.write_bytes(gzip.compress(b"one\ntwo\n"))
        >>> with open_lines(path) as lines:
        ...     print(list(lines))
        ['one\n', 'two\n']
    """
    if str(path) == "-":
        yield Lines(cast(BufferedIOBase, sys.stdin.buffer), "-")
        return
    path = existing(path, "a file")
    is_gzip = path.suffix.lower() == ".gz"
    with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
        yield Lines(cast(BufferedIOBase, stream), str(path))
