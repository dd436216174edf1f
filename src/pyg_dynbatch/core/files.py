"""Write files so that nothing is left half-done."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
