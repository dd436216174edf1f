"""Build small pieces of C with the compiler of the machine, once, and load them."""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from pyg_dynbatch.core.files import write_atomically

FOLDER = "PYG_DYNBATCH_CACHE"
"""The environment variable that names the folder of what was built."""

_FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c11",
    # Not -ffast-math: linked into a library, it would change rounding for the whole process.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast",
)  # fmt: skip

_log = logging.getLogger(__name__)


def native_library(source: Path) -> ctypes.CDLL | None:
    """Builds a C file unless that was done before, and loads it.

    What was built is kept in ``$PYG_DYNBATCH_CACHE``, or in ``pyg_dynbatch`` in the user's cache
    folder, under a name made of the source, what it includes from its own folder, the flags, the
    compiler and the processor. Threads are those of the OpenMP library that torch has brought
    along.

    Args:
        source: The C file.

    Returns:
        The library; None where there is no C compiler, it fails, or torch has brought no OpenMP
        library that fits. Why is logged.

    Example:
        >>> import tempfile
        >>> source = Path(tempfile.mkdtemp()) / "one.c"
        >>> _ = source.write_text("int one(void) { return 1; }")
        >>> library = native_library(source)
        >>> library is None or library.one() == 1
        True
    """
    name, *options = shlex.split(os.environ.get("CC") or "cc")
    compiler = shutil.which(name)
    if compiler is None:
        _log.info("%s: no C compiler found (cc, or $CC)", source.name)
        return None
    try:
        built = _folder() / f"{source.stem}-{_key(source, compiler, options)}.so"
        if not built.exists():
            write_atomically(built, lambda path: _build([compiler, *options], source, path))
        return ctypes.CDLL(str(built.resolve()))
    # RuntimeError: there is no home folder, as in some containers.
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("%s: could not be built with %s: %s", source.name, compiler, reason)
        return None


def _folder() -> Path:
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pyg_dynbatch"


def _key(source: Path, compiler: str, options: list[str]) -> str:
    # Processors differ in their instructions, and home folders are shared between machines.
    found = Path(compiler).stat()
    made_by = (compiler, *options, found.st_size, found.st_mtime_ns)
    parts = [*_texts(source), *_FLAGS, *made_by, _processor()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _texts(source: Path) -> list[str]:
    """The text of a file and of those it includes from its own folder."""
    text = source.read_text()
    included = re.findall(r'^#include "(.+)"$', text, re.MULTILINE)
    return [text, *(part for name in included for part in _texts(source.with_name(name)))]


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return f"{platform.machine()} {platform.processor()}"
    lines = described.read_text().splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return repr(sorted({line for line in lines if line.startswith(wanted)}))


def _build(compiler: list[str], source: Path, path: Path) -> None:
    # Linked without OpenMP: its functions are to be those that torch has loaded already, as two
    # pools of threads would fight for the cores.
    compiled = path.with_suffix(".o")
    try:
        _run(*compiler, *_FLAGS, "-c", str(source), "-o", str(compiled))
        _run(*compiler, "-shared", str(compiled), "-o", str(path))
    finally:
        compiled.unlink(missing_ok=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
