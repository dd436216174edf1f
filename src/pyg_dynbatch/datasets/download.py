"""Fetch a file that is known by its checksum, or say what to put where."""

import hashlib
import http.client
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.core.progress import Progress

_CHUNK = 1 << 16
_TIMEOUT = 30.0  # seconds without a byte


def sha256_of(path: str | Path) -> str:
    """Computes the checksum of a file.

    Args:
        path: The file.

    Returns:
        SHA-256 in hexadecimal digits.
    """
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def check_sha256(path: str | Path, sha256: str, what: str, mend: str = "") -> None:
    """Refuses a file whose content is not the expected one.

    Args:
        path: The file.
        sha256: The checksum wanted.
        what: Name of the data set, for messages.
        mend: What to try.

    Raises:
        ValueError: If the checksum differs.
    """
    got = sha256_of(path)
    if got != sha256:
        raise ValueError(
            mismatch(
                f"{what}: {Path(path).name} has a wrong checksum",
                expected=f"sha256 {sha256}",
                got=f"sha256 {got}, {Path(path).stat().st_size:,} bytes",
                where=path,
                mend=mend or "delete the file and fetch it again",
            )
        )


def download_verified(
    url: str, folder: str | Path, sha256: str | None, what: str, *, mend: str = ""
) -> Path:
    """Downloads a file unless it is there, and keeps it only if its checksum is right.

    Args:
        url: Where the file is.
        folder: Where it goes, under the last part of the address.
        sha256: Its checksum. Where it is not known, None: what was downloaded first is noted
            beside the file, in ``<file>.sha256``, and must stay the same.
        what: Name of the data set, for messages and the progress bar.
        mend: What to do by hand when the download fails.

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
            for chunk in _chunks(url, what, mend):
                handle.write(chunk)
        if sha256 is not None:
            check_sha256(temporary, sha256, what, mend)

    write_atomically(path, fetch)
    if sha256 is None:
        write_atomically(noted, lambda temporary: temporary.write_text(sha256_of(path) + "\n"))
    return path


def _chunks(url: str, what: str, mend: str) -> Iterator[bytes]:
    try:
        response = urllib.request.urlopen(url, timeout=_TIMEOUT)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(what, url, error, mend) from error
    promised = int(response.headers.get("Content-Length") or 0)
    with response, Progress(f"{what}: {url}", "bytes", promised or None) as progress:
        while True:
            try:
                chunk = response.read(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _failed(what, url, error, mend) from error
            if not chunk:
                break
            progress.update(len(chunk))
            yield chunk
        if progress.done < promised:
            cut = f"the connection ended after {progress.done:,} of {promised:,} bytes"
            raise _failed(what, url, cut, mend)


def _failed(what: str, url: str, reason: Exception | str, mend: str) -> ConnectionError:
    got = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
    return ConnectionError(
        mismatch(
            f"{what}: the download failed",
            expected="a network connection, or the files put in place by hand",
            got=got,
            where=url,
            mend=mend,
        )
    )


def extract_member(archive: str | Path, member: str, target: str | Path, what: str) -> Path:
    """Takes one file out of a zip archive, whole or not at all.

    Args:
        archive: The archive.
        member: The name inside.
        target: The file to write.
        what: Name of the data set, for messages.

    Returns:
        The target.

    Raises:
        OSError: If the target cannot be written.
        ValueError: If the archive is damaged or cut short, or has no such member.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            content = opened.read(member)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(
            mismatch(
                f"{what}: the archive is damaged or cut short",
                expected=f"a zip archive with {member}",
                got=f"{type(error).__name__}: {error}, {Path(archive).stat().st_size:,} bytes",
                where=archive,
                mend="delete it and fetch it again",
            )
        ) from error
    return write_atomically(target, lambda temporary: temporary.write_bytes(content))
