"""Read text, write files atomically, lock folders, download with checksums."""

import gzip
import hashlib
import io
import os
import socket
import sys
import urllib.request
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError, URLError
from zipfile import BadZipFile, ZipFile

import torch
from filelock import lock_descriptor

from pyg_dynbatch.console import Progress
from pyg_dynbatch.core.errors import mismatch


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a temporary name and rename it when it is complete."""
    path = Path(path)
    temporary = _temporary(path)
    with _renamed_at_the_end(temporary, path), _blamed_on_the_folder(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as handle:
            # Without this, a power failure may keep the new name and lose the content.
            os.fsync(handle.fileno())
    return path


@contextmanager
def atomic_file(
    path: str | Path, mode: str = "w", *, resume_at: int | None = None, **options: Any
) -> Iterator[Any]:
    """Open a file to be written piece by piece; it is renamed when the block ends without error."""
    path, resumable = Path(path), resume_at is not None
    temporary = part_of(path) if resumable else _temporary(path)
    with _blamed_on_the_folder(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _WatchedFile(temporary, path, resume_at)
    with _renamed_at_the_end(temporary, path, resumable):
        binary = io.BufferedWriter(raw)
        with binary if "b" in mode else io.TextIOWrapper(binary, **options) as file:
            yield file
            file.flush()
            with _blamed_on_the_folder(path):
                os.fsync(file.fileno())


def part_of(path: str | Path) -> Path:
    """Return the path of the unfinished file that :func:`atomic_file` can resume."""
    return Path(f"{path}.part")


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def _renamed_at_the_end(temporary: Path, path: Path, resumable: bool = False) -> Iterator[None]:
    """Rename a file after the block; remove it on an error, unless it can be resumed."""
    try:
        yield
        with _blamed_on_the_folder(path):
            temporary.replace(path)
    except BaseException as error:
        # An interruption is not an Exception: a resumable file stays. If the file does not exist,
        # the folder may be what is wrong, and that error is already being raised.
        if (not resumable or isinstance(error, Exception)) and os.path.lexists(temporary):
            temporary.unlink()
        raise


@contextmanager
def _blamed_on_the_folder(path: Path) -> Iterator[None]:
    """Add the file and its folder to an OSError."""
    try:
        yield
    except (BlockingIOError, ConnectionError):
        raise  # in use, or the content could not be fetched: the folder is not to blame
    except OSError as error:
        what, wanted = f"{path.name}: the file cannot be written", "a folder that can be written"
        got = f"{type(error).__name__}: {error.strerror or error}"
        hint = "another folder; or check its permissions and the free space"
        raise mismatch(OSError, what, wanted, got, where=path.parent, hint=hint) from error


class _WatchedFile(io.FileIO):
    """File whose write errors contain its name, which the error of a full disk does not."""

    def __init__(self, temporary: Path, path: Path, resume_at: int | None) -> None:
        self.path = path
        if resume_at is None:
            super().__init__(temporary, "w")
            return
        temporary.touch()
        super().__init__(temporary, "r+")
        try:
            if not _locked(self.fileno(), temporary):
                raise _in_use(f"{path.name}: the file", "another process", path.parent, "file")
            if os.fstat(self.fileno()).st_size < resume_at:
                raise OSError("the unfinished file is shorter than noted")
            self.truncate(resume_at)
            self.seek(resume_at)
        except OSError:
            self.close()
            raise

    def write(self, content: Any) -> int:
        """Write as much as the system accepts."""
        with _blamed_on_the_folder(self.path):
            return super().write(content)


@contextmanager
def locked_folder(folder: str | Path, wait: bool = False, name: str = ".lock") -> Iterator[None]:
    """Keep other processes that use this name from writing to a folder at the same time."""
    path = Path(folder) / name
    while True:
        with _blamed_on_the_folder(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        with file:
            if not _locked(file.fileno(), path.parent):
                file.seek(1)  # elsewhere than on Unix, the first byte cannot be read
                holder = file.read() or "another process"
                if not wait:
                    raise _in_use("the folder", holder, path.parent, "folder")
                print(f"{path.parent}: waiting for {holder}, which writes to it", file=sys.stderr)
                lock_descriptor(file.fileno())
            if os.fstat(file.fileno()).st_nlink == 0:
                continue  # the process that had the lock has removed the file since it was opened
            file.truncate(0)
            file.write(f" process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                if os.name == "posix":
                    path.unlink(missing_ok=True)  # while it is locked, so no other process has it
            return


def _locked(descriptor: int, what: Path) -> bool:
    """Lock an open file unless another process has; warn if files cannot be locked."""
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        text = f"{what} cannot be locked ({error.strerror or error})"
        warnings.warn(f"{text}; let no other process write to it", stacklevel=5)
        return True


def _in_use(what: str, holder: str, folder: Path, kind: str) -> BlockingIOError:
    wanted, got = "one process that writes to it", f"{holder}, which has not finished"
    hint = f"wait, or use another {kind}"
    return mismatch(BlockingIOError, f"{what} is in use", wanted, got, where=folder, hint=hint)


def existing(path: str | Path, what: str) -> Path:
    """Return the path of a file, or raise if it does not exist or cannot be read."""
    path = Path(path)
    try:
        if path.is_file():
            path.open("rb").close()
            return path
    except OSError as error:
        found, got = f"{path.name}: the file cannot be read", error.strerror or error
        raise mismatch(type(error), found, what, got, where=path) from error
    found, got = f"{path.name or path}: there is no such file", "a folder" if path.is_dir() else ""
    raise mismatch(FileNotFoundError, found, what, got, where=path)


class Lines:
    r"""Lines of an open file as text, with the number of lines read so far.

    Every line end, ``\n``, ``\r\n`` or ``\r``, becomes ``\n``, as in Python's own text files.
    """

    def __init__(self, stream: io.BufferedIOBase, path: str) -> None:
        self.path = "standard input" if path == "-" else path
        self.name = Path(self.path).name
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
    """Open a text file, which may be compressed with gzip, or standard input for ``-``."""
    with ExitStack() as stack:
        if str(path) == "-":
            stream = cast(io.BufferedIOBase, sys.stdin.buffer)
        else:
            path = existing(path, "a file")
            stream = stack.enter_context(path.open("rb"))
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
        what = f"{Path(path).name}: the file is empty"
        raise mismatch(ValueError, what, "at least one line", 0, where=path)
    return lines


def check_checksums(path: str | Path) -> None:
    """Compare the checksums in a file that torch has written, which ``torch.load`` does not."""
    with ZipFile(path) as archive:
        if (part := archive.testzip()) is not None:
            raise BadZipFile(f"{part} does not match its checksum")


def load_tensors(path: str | Path, kind: str, what: str) -> dict[str, Any]:
    """Load a dictionary that was saved with its kind under ``"format"``."""
    hint = "delete the file and create it again"
    try:
        check_checksums(path)
        content = torch.load(path, weights_only=True, map_location="cpu")
        found = content["format"]
    except FileNotFoundError:
        raise
    except Exception as error:  # torch and pickle raise many classes for a corrupt file
        what, got = f"{what}: the file cannot be read", f"{type(error).__name__}: {error}"
        got = got.partition("\n")[0]
        raise mismatch(ValueError, what, kind, got, where=path, hint=hint) from error
    if found != kind:
        what = f"{what}: the file is of a different kind"
        raise mismatch(ValueError, what, kind, found, where=path, hint=hint)
    return dict(content)


def sha256_of(path: str | Path) -> str:
    """Compute the checksum of a file."""
    with existing(path, "a file").open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_sha256(path: str | Path, sha256: str, what: str, hint: str = "") -> None:
    """Raise an error if the content of a file is not the expected one."""
    if (found := sha256_of(path)) != sha256:
        what = f"{what}: {Path(path).name} has a wrong checksum"
        got = f"sha256 {found}, {Path(path).stat().st_size:,} bytes"
        hint = hint or "delete the file and download it again"
        raise mismatch(ValueError, what, f"sha256 {sha256}", got, where=path, hint=hint)


def download_verified(
    url: str, folder: str | Path, sha256: str | None, what: str, *, hint: str = ""
) -> Path:
    """Download a file unless it exists, and keep it only if its checksum is right.

    Args:
        url: Address of the file.
        folder: Folder of the download, which is named after the last part of the address.
        sha256: Its checksum; if None, the checksum of the first download is saved in
            ``<file>.sha256``, and later downloads must have the same one.
        what: Name of the data set, for messages and the progress bar.
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
    noted = path.with_name(f"{path.name}.sha256")
    if sha256 is None and noted.is_file():
        sha256 = noted.read_text(encoding="utf-8").strip()
    if path.is_file():
        if sha256 is not None:
            check_sha256(path, sha256, what)
        return path

    def fetch(temporary: Path) -> None:
        try:
            _download(url, temporary, what)
        except (URLError, ConnectionError, TimeoutError, HTTPException) as error:
            failed, got = f"{what}: the download failed", f"{type(error).__name__}: {error}"
            wanted = "a network connection, or a copy of the file in the folder"
            if isinstance(error, HTTPError):
                error.close()
            raise mismatch(ConnectionError, failed, wanted, got, where=url, hint=hint) from error
        if sha256 is not None:
            check_sha256(temporary, sha256, what, hint)

    write_atomically(path, fetch)
    if sha256 is None:
        write_atomically(noted, lambda temporary: temporary.write_text(sha256_of(path) + "\n"))
    return path


def _download(url: str, target: Path, what: str) -> None:
    # torch.hub.download_url_to_file has no timeout, and accepts a truncated file.
    with urllib.request.urlopen(url, timeout=30.0) as response, target.open("wb") as handle:
        promised = int(response.headers.get("Content-Length") or 0)
        with Progress(f"{what}: {url}", "bytes", promised or None) as progress:
            while chunk := response.read(1 << 16):
                handle.write(chunk)
                progress.update(len(chunk))
    if progress.done < promised:
        raise ConnectionError(f"it ended after {progress.done:,} of {promised:,} bytes")
