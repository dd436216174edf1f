"""Keep a few named arrays in one checked file that is mapped into memory, never read whole."""

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically

_MAGIC = b"PYGDBMOL"
_VERSION = 1
# Magic, version, checksum of the header, length of the header, length of the arrays.
_PREAMBLE = struct.Struct("<8sIIQQ")
_ALIGN = 64
_CHECKED_AT_ONCE = 1 << 22


def write_shard(
    path: str | Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]
) -> Path:
    """Writes arrays and facts into one file, whole or not at all.

    Args:
        path: The file.
        arrays: The arrays by name.
        facts: Plain values to be kept in the header.

    Returns:
        The path.

    Raises:
        OSError: If the file cannot be written.
    """
    content = shard_bytes(arrays, facts)
    return write_atomically(path, lambda temporary: temporary.write_bytes(content))


def shard_bytes(arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> bytes:
    """Builds what `write_shard` writes, for a shard that stays in memory.

    Args:
        arrays: The arrays by name.
        facts: Plain values to be kept in the header.

    Returns:
        The bytes.

    Example:
        >>> shard = Shard(shard_bytes({"row": np.arange(3)}, {"records": 3}))
        >>> shard["row"].tolist(), shard.facts
        ([0, 1, 2], {'records': 3})
    """
    parts, sections, offset = [], {}, 0
    for name, array in arrays.items():
        array = np.ascontiguousarray(array)
        sections[name] = [offset, array.dtype.str, list(array.shape)]
        padding = -array.nbytes % _ALIGN
        parts += [array.tobytes(), b"\0" * padding]
        offset += array.nbytes + padding
    body = b"".join(parts)
    header = {"sections": sections, "checksum": zlib.crc32(body), "facts": dict(facts)}
    head = json.dumps(header).encode()
    head += b" " * (-(_PREAMBLE.size + len(head)) % _ALIGN)
    start = _PREAMBLE.pack(_MAGIC, _VERSION, zlib.crc32(head), len(head), len(body))
    return start + head + body


class Shard:
    """Reads a file of `write_shard`, mapped into memory when the first array is asked for.

    The header is checked when it is read, the arrays once before the first of them is used; both
    cost memory for the header alone. Each process maps the file itself: what travels to a loader
    worker is the name.

    Args:
        source: The file, or the bytes of one.

    Raises:
        ValueError: When something is asked for and the file is damaged or cut short.

    Example:
        >>> Shard(b"no shard").facts
        Traceback (most recent call last):
        ...
        ValueError: packed molecules: a shard is damaged.
          expected: a whole shard
          got:      8 bytes
          where:    memory
          try:      delete the file; the data set makes it again
    """

    def __init__(self, source: str | Path | bytes) -> None:
        self.source = source if isinstance(source, bytes) else Path(source)
        self._header: dict[str, Any] | None = None
        self._body: np.ndarray | None = None
        self._start = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Gives the plain values of the header."""
        return self._read_header()["facts"]

    def __getitem__(self, name: str) -> np.ndarray:
        """Gives one array, read-only."""
        header = self._read_header()
        if self._body is None:
            self._body = self._map(header)
        offset, dtype, shape = header["sections"][name]
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, dtype)
        part = self._body[offset : offset + count * np.dtype(dtype).itemsize]
        return part.view(dtype).reshape(shape)

    def check(self) -> "Shard":
        """Reads the whole shard once and compares checksums, if that was not yet done.

        Returns:
            The shard itself.

        Raises:
            ValueError: If it is damaged.
        """
        header = self._read_header()
        if self._body is None:
            self._body = self._map(header)
        return self

    def _map(self, header: Mapping[str, Any]) -> np.ndarray:
        if isinstance(self.source, bytes):
            whole = np.frombuffer(self.source, np.uint8)
        else:
            # As a plain array: each slice of a memmap costs several times as much.
            whole = np.asarray(np.memmap(self.source, np.uint8, mode="r"))
        body = whole[self._start :]
        checksum = 0
        for first in range(0, len(body), _CHECKED_AT_ONCE):
            checksum = zlib.crc32(body[first : first + _CHECKED_AT_ONCE].data, checksum)
        if checksum != header["checksum"]:
            got = f"checksum {checksum:08x}"
            raise self._damaged(f"checksum {header['checksum']:08x}", got)
        return body

    def _read_header(self) -> dict[str, Any]:
        if self._header is not None:
            return self._header
        if isinstance(self.source, bytes):
            size, start = len(self.source), self.source
        else:
            size = self.source.stat().st_size
            with self.source.open("rb") as handle:
                start = handle.read(_PREAMBLE.size)
                if len(start) == _PREAMBLE.size:
                    start += handle.read(min(_PREAMBLE.unpack(start)[3], size))
        if len(start) < _PREAMBLE.size or not start.startswith(_MAGIC):
            raise self._damaged("a whole shard", f"{size:,} bytes")
        _, version, checksum, head_size, body_size = _PREAMBLE.unpack(start[: _PREAMBLE.size])
        if version != _VERSION:
            raise self._damaged(f"version {_VERSION} of the format", f"version {version}")
        wanted = _PREAMBLE.size + head_size + body_size
        if size != wanted:
            raise self._damaged(f"{wanted:,} bytes", f"{size:,} bytes")
        head = start[_PREAMBLE.size : _PREAMBLE.size + head_size]
        if zlib.crc32(head) != checksum:
            raise self._damaged(f"header {checksum:08x}", f"header {zlib.crc32(head):08x}")
        self._start = _PREAMBLE.size + head_size
        self._header = json.loads(head)
        return self._header

    def _damaged(self, expected: str, got: str) -> ValueError:
        return ValueError(
            mismatch(
                "packed molecules: a shard is damaged",
                expected=expected,
                got=got,
                where="memory" if isinstance(self.source, bytes) else self.source,
                mend="delete the file; the data set makes it again",
            )
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the mapping behind: pickled, it would be the whole content."""
        return {"source": self.source, "_header": None, "_body": None, "_start": 0}
