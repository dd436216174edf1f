"""Write files so that nothing is left half-done."""

import io
import os
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
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
def whole_file(
    path: str | Path, mode: str = "w", *, resume_at: int | None = None, **options: Any
) -> Iterator[Any]:
    """Opens a file to be written piece by piece; it gets its own name when the block has ended.

    If the block fails, what stood under the name before stays.

    Args:
        path: The file to end with; its folder is made when missing.
        mode: ``"w"`` or ``"wb"``.
        resume_at: If given, the file is called ``NAME.part`` until it is whole, a killed process
            leaves it behind, and this one goes on after so many bytes of it.
        **options: Encoding and line ends of a text.

    Yields:
        The open file.

    Raises:
        OSError: If the folder cannot be made or written, or another process writes the same
            ``NAME.part``.

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
    """Refuses an output that is one of the inputs, whatever links lead to it, or another output.

    Args:
        command: Who asks.
        outputs: Files to be written; ``None`` and ``-`` are passed over.
        inputs: Files that are read; ``-`` is standard input.

    Raises:
        ValueError: If an output is an input, or two outputs are one file.

    Example:
        >>> refuse_overwriting("predict", ["out.csv", "-"], ["in.csv"])
    """
    named = [("an input", "/dev/stdin" if path == "-" else path) for path in inputs if path]
    for output in outputs:
        if output in (None, "-"):
            continue
        same = next((what for what, path in named if _same_file(str(output), str(path))), None)
        if same is not None:
            raise ValueError(
                mismatch(
                    f"{command}: an output is also {same}",
                    expected="a file of its own for each output",
                    got=output,
                    mend="another name",
                )
            )
        named.append(("another output", output))


def _same_file(first: str, second: str) -> bool:
    try:
        return Path(first).samefile(second)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(first) == os.path.realpath(second)


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
    raise OSError(
        mismatch(
            "the folder is in use",
            expected="one process that writes to it",
            got=f"{holder}, which has not finished",
            where=path.parent,
            mend="wait for it, or choose another folder",
        )
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
            f"{what} cannot be locked ({reason}); let no other process write to it",
            stacklevel=6,
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
