"""Read text, write files atomically, download with checksums."""

import gzip
import hashlib
import io
import os
import pickle
import struct
import urllib.request
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError, URLError

from tqdm import tqdm

from pyg_dynbatch.core.errors import mismatch

UNREADABLE = (
    EOFError,
    IndexError,
    KeyError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
"""What ``torch.load`` and a look into its result raise for a damaged or foreign file."""


# Reading ------------------------------------------------------------------------------------------


def existing(path: str | Path, expected: str, hint: str = "") -> Path:
    """Return the path of a file, or raise if it does not exist or cannot be read."""
    path = Path(path)
    try:
        if path.is_file():
            path.open("rb").close()
            return path
    except OSError as error:
        problem = f"{path.name}: the file cannot be read"
        reason = error.strerror or error
        raise mismatch(type(error), problem, expected, reason, where=path, hint=hint) from error
    problem = f"{path.name or path}: there is no such file"
    got = "a folder" if path.is_dir() else ""
    raise mismatch(FileNotFoundError, problem, expected, got, where=path, hint=hint)


class Lines:
    r"""Lines of an open file as text, with the number of lines read so far.

    Every line end, ``\n``, ``\r\n`` or ``\r``, becomes ``\n``, as in Python's own text files.
    """

    def __init__(self, stream: io.BufferedIOBase, path: str) -> None:
        self.path = path
        self.name = Path(path).name
        self.number = 0
        self._stream = stream
        # A strict codec would name a position in a block of the file instead of one in a line.
        self._text = io.TextIOWrapper(cast(Any, stream), "utf-8-sig", "surrogateescape")

    def raw(self) -> Iterator[bytes]:
        r"""Read the lines as bytes, which end only with ``\n``."""
        with self._naming_a_corrupt_file():
            for line in self._stream:
                self.number += 1
                yield line

    def __iter__(self) -> Iterator[str]:
        with self._naming_a_corrupt_file():
            for line in self._text:
                self.number += 1
                if not line.isascii():
                    self._check_encoding(line)
                yield line

    @contextmanager
    def _naming_a_corrupt_file(self) -> Iterator[None]:
        try:
            yield
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise mismatch(
                ValueError,
                f"{self.name}: the compressed file is corrupt or truncated",
                "a complete gzip file",
                f"{type(error).__name__}: {error}",
                where=f"{self.path}, after line {self.number}",
            ) from error

    def _check_encoding(self, line: str) -> None:
        encoded = line.encode("utf-8", "surrogateescape")
        try:
            encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise mismatch(
                ValueError,
                f"{self.name}: the text is not UTF-8",
                "UTF-8",
                f"byte 0x{encoded[error.start]:02x} ({error.reason})",
                where=f"{self.path}:{self.number}:{error.start + 1}",
                hint=f"iconv -f <its encoding> -t utf-8 {self.name}",
            ) from error

    def detach(self) -> None:
        """Leave the file to who has opened it."""
        self._text.detach()


@contextmanager
def open_lines(path: str | Path) -> Iterator[Lines]:
    """Open a text file, which may be compressed with gzip."""
    path = existing(path, "a file")
    with ExitStack() as stack:
        stream: io.BufferedIOBase = stack.enter_context(path.open("rb"))
        is_gzip = path.suffix.lower() == ".gz" or stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        stream = gzip.GzipFile(fileobj=stream) if is_gzip else stream
        lines = Lines(stream, str(path))
        stack.callback(lines.detach)
        yield lines


def read_lines(path: str | Path) -> list[str]:
    """Read the lines of a text file as :func:`open_lines` does, without empty lines at its end."""
    with open_lines(existing(path, "a text file")) as opened:
        lines = [line.removesuffix("\n") for line in opened]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        problem = f"{Path(path).name}: the file is empty"
        raise mismatch(ValueError, problem, "at least one line", 0, where=path)
    return lines


# Writing ------------------------------------------------------------------------------------------


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a temporary name and rename it when it is complete."""
    path = Path(path)
    temporary = _temporary(path)
    with _renamed_at_the_end(temporary, path):
        write(temporary)
        with temporary.open("rb+") as handle:
            # Without this, a power failure may keep the new name and lose the content.
            os.fsync(handle.fileno())
    return path


@contextmanager
def atomic_file(path: str | Path, mode: str = "w", **options: Any) -> Iterator[Any]:
    """Open a file to be written piece by piece; it is renamed when the block ends without error."""
    path = Path(path)
    temporary = _temporary(path)
    with _renamed_at_the_end(temporary, path), temporary.open(mode, **options) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def _renamed_at_the_end(temporary: Path, path: Path) -> Iterator[None]:
    """Rename a file after the block, or remove it on an error, in which the folder is named."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
        temporary.replace(path)
    except OSError as error:
        own_paths = [str(temporary), *map(str, path.parents)]
        is_of_another_file = error.filename is not None and str(error.filename) not in own_paths
        if isinstance(error, ConnectionError) or error.errno is None or is_of_another_file:
            raise  # the content could not be read or fetched: the folder is not to blame
        raise mismatch(
            OSError,
            f"{path.name}: the file cannot be written",
            "a folder that can be written",
            f"{type(error).__name__}: {error.strerror or error}",
            where=path.parent,
            hint="another folder; or check its permissions and the free space",
        ) from error
    finally:
        with suppress(OSError):  # of the folder, which is being reported
            temporary.unlink(missing_ok=True)


# Downloading --------------------------------------------------------------------------------------


def sha256_of(path: str | Path) -> str:
    """Compute the checksum of a file."""
    with existing(path, "a file").open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_sha256(path: str | Path, sha256: str, title: str, hint: str = "") -> None:
    """Raise an error if the content of a file of a data set is not the expected one."""
    own_sha256 = sha256_of(path)
    if own_sha256 != sha256:
        raise mismatch(
            ValueError,
            f"{title}: {Path(path).name} has a wrong checksum",
            f"sha256 {sha256}",
            f"sha256 {own_sha256}, {Path(path).stat().st_size:,} bytes",
            where=path,
            hint=hint or "delete the file and download it again",
        )


def download_verified(
    url: str, folder: str | Path, sha256: str | None, title: str, *, hint: str = ""
) -> Path:
    """Download a file unless it exists, and keep it only if its checksum is right.

    Args:
        url: Address of the file.
        folder: Folder of the download, which is named after the last part of the address.
        sha256: Its checksum; if None, the checksum of the first download is saved in
            ``<file>.sha256``, and later downloads must have the same one.
        title: Name of the data set, for messages and the progress bar.
        hint: What to do by hand when the download fails.

    Raises:
        ConnectionError: If the address cannot be reached, or the download is incomplete.
        OSError: If the folder cannot be written.
        ValueError: If the checksum is wrong.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> size = (folder / "words.txt").write_text("a film")
        >>> sha256 = sha256_of(folder / "words.txt")
        >>> download_verified("https://example.org/words.txt", folder, sha256, "Words").name
        'words.txt'
    """
    path = Path(folder) / url.rpartition("/")[2]
    checksum_path = path.with_name(f"{path.name}.sha256")
    if sha256 is None and checksum_path.is_file():
        sha256 = checksum_path.read_text(encoding="utf-8").strip()
    if path.is_file():
        if sha256 is not None:
            check_sha256(path, sha256, title)
        return path

    def fetch(temporary: Path) -> None:
        _download(url, temporary, title, hint)
        if sha256 is not None:
            check_sha256(temporary, sha256, title, hint)

    write_atomically(path, fetch)
    if sha256 is None:
        checksum_line = sha256_of(path) + "\n"
        write_atomically(checksum_path, lambda temporary: temporary.write_text(checksum_line))
    return path


def _download(url: str, target: Path, title: str, hint: str) -> None:
    """Download a file; any failure of the network is a ConnectionError with the address."""
    try:
        _copy_response(url, target, title)
    except (URLError, ConnectionError, TimeoutError, HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise mismatch(
            ConnectionError,
            f"{title}: the download failed",
            "a network connection, or a copy of the file in the folder",
            f"{type(error).__name__}: {error}",
            where=url,
            hint=hint,
        ) from error


def _copy_response(url: str, target: Path, title: str) -> None:
    # torch.hub.download_url_to_file has no timeout, and accepts a truncated file.
    with urllib.request.urlopen(url, timeout=30.0) as response, target.open("wb") as handle:
        size = int(response.headers.get("Content-Length") or 0)
        written = 0
        with tqdm(desc=f"{title}: {url}", unit="B", unit_scale=True, total=size or None) as bar:
            while chunk := response.read(1 << 16):
                written += handle.write(chunk)
                bar.update(len(chunk))
    if written < size:
        raise ConnectionError(f"it ended after {written:,} of {size:,} bytes")
