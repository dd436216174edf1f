"""Write files so that nothing is left half-done."""

import os
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pyg_dynbatch.core.errors import mismatch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


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
def whole_file(path: str | Path, mode: str = "w", **options: Any) -> Iterator[Any]:
    """Opens a file to be written piece by piece; it gets its own name when the block has ended.

    If the block fails, what stood under the name before stays.

    Args:
        path: The file to end with; its folder is made when missing.
        mode: ``"w"`` or ``"wb"``.
        **options: Everything else goes to :meth:`pathlib.Path.open`.

    Yields:
        The open file.

    Raises:
        OSError: If the folder cannot be made or written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with whole_file(path) as file:
        ...     written = file.write("whole")
        ...     path.exists()
        False
        >>> path.read_text()
        'whole'
    """
    path = Path(path)
    temporary = _temporary(path)
    try:
        with _blamed_on_the_folder(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = temporary.open(mode, **options)
        with file:
            yield file
            with _blamed_on_the_folder(path):
                file.flush()
                os.fsync(file.fileno())
        with _blamed_on_the_folder(path):
            temporary.replace(path)
    finally:
        _remove_quietly(temporary)


@contextmanager
def locked_folder(folder: str | Path, wait: bool = False) -> Iterator[None]:
    """Keeps other processes from writing to a folder at the same time.

    The lock is the system's, on a file ``.lock``: it ends with the process, however that ends.

    Args:
        folder: The folder; it is made when missing.
        wait: Whether to wait for a process that has the folder, rather than to refuse.

    Yields:
        Nothing, while the folder is locked. Where files cannot be locked, there is a warning.

    Raises:
        OSError: If another process is writing to the folder, or it cannot be made or written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked_folder(folder):
        ...     [path.name for path in folder.iterdir()]
        ['.lock']
    """
    path = Path(folder) / ".lock"
    while True:
        with _blamed_on_the_folder(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a+")
        with file:
            _lock(file, path, wait)
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


def _lock(file: IO[str], path: Path, wait: bool) -> None:
    try:
        if fcntl is None:
            raise OSError("this system has no such locks")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read() or "another process"
        if wait:
            print(f"{path.parent}: waiting for {holder}, which writes to it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
            return
        raise OSError(
            mismatch(
                "the folder is in use",
                expected="one process that writes to it",
                got=f"{holder}, which has not finished",
                where=path.parent,
                mend="wait for it, or choose another folder",
            )
        ) from error
    except OSError as error:
        reason = error.strerror or error
        warnings.warn(
            f"{path.parent} cannot be locked ({reason}); let no other process write to it",
            stacklevel=5,
        )


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
        raise OSError(
            mismatch(
                f"{path.name}: the file cannot be written",
                expected="a folder that can be made and written",
                got=f"{type(error).__name__}: {error.strerror or error}",
                where=path.parent,
                mend="another folder, or mend its permissions or the free space",
            )
        ) from error


def _remove_quietly(path: Path) -> None:
    # The folder itself may be what is wrong; that error is already on its way to the user.
    if os.path.lexists(path):
        path.unlink()
