"""Open text, write and lock files so that nothing is left half-done, download with checksums."""

import gzip
import hashlib
import http.client
import io
import os
import socket
import sys
import urllib.request
import uuid
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

import torch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.progress import Progress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Writes a file under a temporary name and gives it its own name only when it is complete."""
    path = Path(path)
    temporary = _temporary(path)
    try:
        with _blamed_on_the_folder(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with temporary.open("rb+") as handle:
                # Without this a power cut may keep the new name and lose the content.
                os.fsync(handle.fileno())
            temporary.replace(path)
    finally:
        _remove_quietly(temporary)
    return path


@contextmanager
def whole_file(
    path: str | Path, mode: str = "w", *, resume_at: int | None = None, **options: Any
) -> Iterator[Any]:
    """Opens a file to be written piece by piece; it gets its own name when the block has ended."""
    path = Path(path)
    temporary = _temporary(path) if resume_at is None else part_of(path)
    with _blamed_on_the_folder(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = _WatchedFile(temporary, path, resume_at)
    try:
        binary = io.BufferedWriter(raw)
        with binary if "b" in mode else io.TextIOWrapper(binary, **options) as file:
            yield file
            file.flush()
            with _blamed_on_the_folder(path):
                os.fsync(file.fileno())
        with _blamed_on_the_folder(path):
            temporary.replace(path)
    except BaseException as error:
        if resume_at is None or isinstance(error, Exception):
            _remove_quietly(temporary)
        raise


def part_of(path: str | Path) -> Path:
    """Names the unfinished file that :func:`whole_file` can resume."""
    return Path(f"{path}.part")


class _WatchedFile(io.FileIO):
    """Names the file when a write fails, which the error of a full disk does not."""

    def __init__(self, temporary: Path, path: Path, resume_at: int | None) -> None:
        if resume_at is not None:
            temporary.touch()
        super().__init__(temporary, "w" if resume_at is None else "r+")
        self.path = path
        if resume_at is not None:
            try:
                self._go_on(resume_at)
            except OSError:
                self.close()
                raise

    def _go_on(self, size: int) -> None:
        if not _locked(self, str(self.name)):
            raise OSError("another process is writing it")
        if os.fstat(self.fileno()).st_size < size:
            raise OSError("the unfinished file is shorter than noted")
        self.truncate(size)
        self.seek(size)

    def write(self, content: Any) -> int:
        """Writes as much as the system takes."""
        with _blamed_on_the_folder(self.path):
            return super().write(content)


def refuse_overwriting(
    command: str, outputs: Iterable[str | Path | None], inputs: Iterable[str | Path | None]
) -> None:
    """Refuses an output that is one of the inputs, whatever links lead to it, or another output."""
    named = [("an input", "/dev/stdin" if path == "-" else path) for path in inputs if path]
    for output in outputs:
        if output in (None, "-"):
            continue
        same = next((what for what, path in named if _same_file(str(output), str(path))), None)
        if same is not None:
            raise mismatch(
                ValueError,
                f"{command}: an output is also {same}",
                "a file of its own for each output",
                output,
                hint="another name",
            )
        named.append(("another output", output))


def _same_file(first: str, second: str) -> bool:
    try:
        return Path(first).samefile(second)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(first) == os.path.realpath(second)


@contextmanager
def locked_folder(folder: str | Path, wait: bool = False) -> Iterator[None]:
    """Keeps other processes from writing to a folder at the same time."""
    path = Path(folder) / ".lock"
    while True:
        with _blamed_on_the_folder(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        with file:
            _lock_folder(file, path, wait)
            if not _is_at(path, file):
                continue  # whoever had the lock has removed the file since it was opened
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                if fcntl is not None:
                    path.unlink(missing_ok=True)  # while it is locked, so it is nobody else's
            return


def _lock_folder(file: IO[str], path: Path, wait: bool) -> None:
    if _locked(file, str(path.parent)):
        return
    file.seek(0)
    holder = file.read() or "another process"
    if wait:
        print(f"{path.parent}: waiting for {holder}, which writes to it", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)
        return
    raise mismatch(
        OSError,
        "the folder is in use",
        "one process that writes to it",
        f"{holder}, which has not finished",
        where=path.parent,
        hint="wait for it, or choose another folder",
    )


def _locked(file: IO[Any] | io.FileIO, what: str) -> bool:
    """Locks an open file unless another process has it; warns where files cannot be locked."""
    try:
        if fcntl is None:
            raise OSError("this system has no such locks")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(
            f"{what} cannot be locked ({reason}); let no other process write to it", stacklevel=6
        )
    return True


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


@contextmanager
def _blamed_on_the_folder(path: Path) -> Iterator[None]:
    try:
        yield
    except ConnectionError:  # the content could not be fetched; the folder is not to blame
        raise
    except OSError as error:
        raise mismatch(
            OSError,
            f"{path.name}: the file cannot be written",
            "a folder that can be made and written",
            f"{type(error).__name__}: {error.strerror or error}",
            where=path.parent,
            hint="another folder, or hint its permissions or the free space",
        ) from error


def _remove_quietly(path: Path) -> None:
    # The folder itself may be what is wrong; that error is already on its way to the user.
    if os.path.lexists(path):
        path.unlink()


def existing(path: str | Path, what: str) -> Path:
    """Refuses a path where there is no file."""
    path = Path(path)
    if not path.is_file():
        raise mismatch(FileNotFoundError, f"{path.name}: there is no such file", what, where=path)
    return path


def read_lines(path: str | Path) -> list[str]:
    r"""Reads the lines of a UTF-8 text file, which may be compressed by gzip."""
    path = existing(path, "a text file")
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        raw = _unpacked(raw, path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        raise mismatch(
            ValueError,
            f"{path.name}: the text is not UTF-8",
            "UTF-8",
            f"byte 0x{raw[error.start]:02x} ({error.reason})",
            where=f"{path}:{line}:{column}",
            hint=f"iconv -f <its encoding> -t utf-8 {path.name}",
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise mismatch(
            ValueError, f"{path.name}: the file is empty", "one line or more", 0, where=path
        )
    return lines


def _unpacked(raw: bytes, path: Path) -> bytes:
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise mismatch(
            ValueError,
            f"{path.name}: the compressed file is damaged or cut short",
            "a complete .gz file",
            f"{type(error).__name__}: {error}",
            where=path,
        ) from error


def load_tensors(path: str | Path, kind: str, what: str) -> dict[str, Any]:
    """Reads a dictionary that was saved with its kind under ``"format"``."""
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
        raise mismatch(
            ValueError,
            f"{what}: the file cannot be read",
            f"a file of the kind {kind}",
            f"{type(error).__name__}: {first}",
            where=path,
            hint="delete the file and make it again",
        ) from error
    if found != kind:
        raise mismatch(
            ValueError,
            f"{what}: the file is of another kind",
            kind,
            found,
            where=path,
            hint="delete the file and make it again",
        )
    return dict(content)


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Lines:
    r"""Gives the lines of an open file as text and knows how many it has given."""

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
            raise mismatch(
                ValueError,
                f"{self.name}: the compressed file is damaged",
                "a complete gzip file",
                f"{type(error).__name__}: {error}",
                where=f"{self.path}, after line {self.number}",
            ) from error
        self.number += bool(raw)
        if self.number == 1:
            raw = raw.removeprefix(_BYTE_ORDER_MARK) or (b"\n" if raw else b"")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise mismatch(
                ValueError,
                f"{self.name}: the text is not UTF-8",
                "UTF-8",
                f"byte 0x{raw[error.start]:02x} ({error.reason})",
                where=f"{self.path}:{self.number}:{error.start + 1}",
                hint=f"iconv -f <its encoding> -t utf-8 {self.name}",
            ) from error


@contextmanager
def open_lines(path: str | Path) -> Iterator[Lines]:
    r"""Opens a text file, compressed if its name ends in ``.gz``, or standard input."""
    if str(path) == "-":
        yield Lines(cast(BufferedIOBase, sys.stdin.buffer), "-")
        return
    path = existing(path, "a file")
    is_gzip = path.suffix.lower() == ".gz"
    with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
        yield Lines(cast(BufferedIOBase, stream), str(path))


_CHUNK = 1 << 16
_TIMEOUT = 30.0  # seconds without a byte


def sha256_of(path: str | Path) -> str:
    """Computes the checksum of a file."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_sha256(path: str | Path, sha256: str, what: str, hint: str = "") -> None:
    """Refuses a file whose content is not the expected one."""
    got = sha256_of(path)
    if got != sha256:
        raise mismatch(
            ValueError,
            f"{what}: {Path(path).name} has a wrong checksum",
            f"sha256 {sha256}",
            f"sha256 {got}, {Path(path).stat().st_size:,} bytes",
            where=path,
            hint=hint or "delete the file and fetch it again",
        )


def download_verified(
    url: str, folder: str | Path, sha256: str | None, what: str, *, hint: str = ""
) -> Path:
    """Downloads a file unless it is there, and keeps it only if its checksum is right.

    Args:
        url: Where the file is.
        folder: Where it goes, under the last part of the address.
        sha256: Its checksum. Where it is not known, None: what was downloaded first is noted
            beside the file, in ``<file>.sha256``, and must stay the same.
        what: Name of the data set, for messages and the progress bar.
        hint: What to do by hand when the download fails.

    Returns:
        The path of the file.

    Raises:
        ConnectionError: If the address cannot be reached, or if it sends less than it promised.
        OSError: If the folder cannot be written.
        ValueError: If the checksum is wrong.

    Example:
        >>> import tempfile
        >>> source = Path(tempfile.mkdtemp()) / "words.txt"
        >>> size = source.write_text("a film")
        >>> folder = tempfile.mkdtemp()
        >>> path = download_verified(source.as_uri(), folder, sha256_of(source), "Words")
        >>> path.read_text()
        'a film'
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
        with temporary.open("wb") as handle:
            for chunk in _chunks(url, what, hint):
                handle.write(chunk)
        if sha256 is not None:
            check_sha256(temporary, sha256, what, hint)

    write_atomically(path, fetch)
    if sha256 is None:
        write_atomically(noted, lambda temporary: temporary.write_text(sha256_of(path) + "\n"))
    return path


def _chunks(url: str, what: str, hint: str) -> Iterator[bytes]:
    try:
        response = urllib.request.urlopen(url, timeout=_TIMEOUT)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(what, url, error, hint) from error
    promised = int(response.headers.get("Content-Length") or 0)
    with response, Progress(f"{what}: {url}", "bytes", promised or None) as progress:
        while True:
            try:
                chunk = response.read(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _failed(what, url, error, hint) from error
            if not chunk:
                break
            progress.update(len(chunk))
            yield chunk
        if progress.done < promised:
            cut = f"the connection ended after {progress.done:,} of {promised:,} bytes"
            raise _failed(what, url, cut, hint)


def _failed(what: str, url: str, reason: Exception | str, hint: str) -> ConnectionError:
    got = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    return mismatch(
        ConnectionError,
        f"{what}: the download failed",
        "a network connection, or the files put in place by hand",
        got,
        where=url,
        hint=hint,
    )


def extract_member(archive: str | Path, member: str, target: str | Path, what: str) -> Path:
    """Takes one file out of a zip archive, whole or not at all."""
    try:
        with zipfile.ZipFile(archive) as opened:
            content = opened.read(member)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise mismatch(
            ValueError,
            f"{what}: the archive is damaged or cut short",
            f"a zip archive with {member}",
            f"{type(error).__name__}: {error}, {Path(archive).stat().st_size:,} bytes",
            where=archive,
            hint="delete it and fetch it again",
        ) from error
    return write_atomically(target, lambda temporary: temporary.write_bytes(content))
