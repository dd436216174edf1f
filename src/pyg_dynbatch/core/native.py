"""Build small pieces of C with the compiler of the machine, load them, and keep freed memory."""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pyg_dynbatch.core.files import locked_folder, write_atomically

FOLDER = "PYG_DYNBATCH_CACHE"
"""Environment variable: the folder of compiled libraries."""

NATIVE_SWITCH = "PYG_DYNBATCH_NATIVE"
"""The environment variable that switches compiled C off where it is 0."""

_FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c11",
    # Not -ffast-math, which would change rounding for the whole process.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast",
)  # fmt: skip

_ROUNDS = 20
"""Runs of each way in a race."""

_CLEARLY = 0.9
"""Times of the first way below which another wins, as a busy machine must not decide."""

_MISSING = (
    "pyg_dynbatch runs without its C extension (%s): fused Tree-LSTMs on CPUs take about 1.9 times"
    " as long. To build it, install a C compiler (GCC or Clang) and reinstall pyg_dynbatch."
)

_log = logging.getLogger(__name__)


@cache
def _loaded_extension() -> Any:
    """Import the extension; warn in one line, once, where that fails."""
    try:
        # OpenMP's symbols are found in the runtime that torch has loaded.
        return import_module("pyg_dynbatch._native")
    except ImportError as error:
        if multiprocessing.parent_process() is None:  # workers stay silent
            _log.warning(_MISSING, error)
        return None


def extension() -> Any:
    """Return the extension module ``pyg_dynbatch._native``; None if missing or switched off."""
    return None if os.environ.get(NATIVE_SWITCH) == "0" else _loaded_extension()


def native_library(source: Path) -> ctypes.CDLL | None:
    """Compile a C file unless its library exists, and load it; None if that fails."""
    given = os.environ.get("CC") or "cc"
    try:
        command = shlex.split(given)
        compiler = shutil.which(command[0]) if command else None
        if compiler is None:
            _log.info("%s: no C compiler found (cc, or $CC)", source.name)
            return None
        return _loaded(source, [compiler, *command[1:]])
    # ValueError: CC cannot be parsed.
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        _log.warning("%s: could not be built or loaded with %s: %s", source.name, given, reason)
        return None


def _cache_folder() -> Path:
    given, cache = os.environ.get(FOLDER), os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(given or Path(cache or Path.home() / ".cache", "pyg_dynbatch"))
    except RuntimeError as error:  # there is no home folder, as in some containers
        raise FileNotFoundError(str(error)) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _loaded(source: Path, compiler: list[str]) -> ctypes.CDLL:
    folder, name = _cache_folder(), f"{source.stem}-{_key(source, compiler)}"
    for kept in sorted(folder.glob(f"{name}-*.so")) if _is_trusted(folder) else ():
        # The name ends with the checksum of the content.
        if _is_trusted(kept) and kept.stem == f"{name}-{_digest(kept.read_bytes())}":
            return ctypes.CDLL(str(kept.resolve()))
        _log.warning("%s: changed since it was built, or writable by others; built again", kept)
        kept.unlink(missing_ok=True)
    # No other user can write to a temporary folder, and it is removed if the build is killed.
    with tempfile.TemporaryDirectory(prefix="pyg_dynbatch-") as room:
        built = _build(compiler, source, Path(room))
        if not _is_trusted(folder):
            text = "%s: built for this process alone, as other users own or can write to %s"
            _log.warning(f"{text} (chmod go-w, or another {FOLDER})", source.name, folder)
            return ctypes.CDLL(str(built))
        content = built.read_bytes()

        def write(path: Path) -> None:
            path.write_bytes(content)
            path.chmod(0o755)

        kept = write_atomically(folder / f"{name}-{_digest(content)}.so", write)
    return ctypes.CDLL(str(kept.resolve()))


def _is_trusted(path: Path) -> bool:
    """Return whether only this user and root can write to a file or folder."""
    if not hasattr(os, "geteuid"):
        return True
    found = path.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _key(source: Path, compiler: list[str]) -> str:
    # Home folders are shared between machines, whose processors differ in their instructions.
    found = Path(compiler[0]).stat()
    made_by = (*compiler, found.st_size, found.st_mtime_ns, _processor())
    return _digest(repr([*_texts(source), *_FLAGS, *made_by]).encode())


def _texts(source: Path) -> list[str]:
    """Return the text of a file and of those it includes from its folder."""
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


def _build(compiler: list[str], source: Path, folder: Path) -> Path:
    # Linked without OpenMP, to use the runtime that torch has loaded: two thread pools would
    # compete for the cores.
    compiled, linked = folder / "built.o", folder / "built.so"
    for command in (
        [*compiler, *_FLAGS, "-c", str(source), "-o", str(compiled)],
        [*compiler, "-shared", str(compiled), "-o", str(linked)],
    ):
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    return linked


RACE = "PYG_DYNBATCH_RACE"
"""Environment variable: 0 disables races, and the first way is taken."""


def fastest(name: str, ways: Mapping[str, Callable[[], object]]) -> str:
    """Return the first way, or the one that is clearly faster, by a race.

    There is one race per kind of processor, torch version and number of threads. The winner is
    kept in a file, so that later processes compute the same numbers. Where nothing can be kept,
    the first way is taken, as a choice that changed between runs would change them.
    """
    first = next(iter(ways))
    if os.environ.get(RACE) == "0":
        return first
    try:
        folder = _cache_folder()
        if not _is_trusted(folder):
            return first
        made_for = f"{_processor()} {torch.__version__} {torch.get_num_threads()}"
        path = folder / f"fastest-{name}-{_digest(made_for.encode())}.txt"
        if not path.exists():
            # Of several processes one races, which also leaves the cores to it.
            with locked_folder(folder, wait=True):
                if not path.exists():
                    write_atomically(path, lambda draft: draft.write_text(_race(ways), "utf-8"))
        winner = path.read_text("utf-8", "replace")
    except OSError as error:
        _log.info("%s: the winner of a race cannot be kept: %s", name, error)
        return first
    if winner not in ways:
        _log.warning("%s: %r is not one of %s; delete the file", path, winner, ", ".join(ways))
        return first
    return winner


def _race(ways: Mapping[str, Callable[[], object]]) -> str:
    """Run all ways alternately, and compare the shortest times."""
    best = dict.fromkeys(ways, float("inf"))
    for number in range(_ROUNDS):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if number:  # the first run may build kernels
                best[name] = min(best[name], time.perf_counter() - start)
    _log.info("race: %s", ", ".join(f"{name} {1e6 * least:.0f} us" for name, least in best.items()))
    first, winner = next(iter(best)), min(best, key=best.__getitem__)
    return winner if best[winner] < _CLEARLY * best[first] else first


SWITCH = "PYG_DYNBATCH_KEEP_MEMORY"
"""Environment variable: 0 disables :func:`keep_freed_memory`."""


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory instead of returning it to the system.

    glibc returns every block above 32 MB and allocates it again in the next step, page by page
    and filled with zeros: writing a tensor of 64 MB then takes five times as long. As the process
    never shrinks below its peak afterwards, only the console script calls this by itself;
    ``PYG_DYNBATCH_KEEP_MEMORY=0`` in the environment disables it.

    Returns:
        Whether it had an effect; only glibc, on Linux, has these options.

    Reference:
        mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mmap_max, trim_threshold, never = -4, -1, -1  # numbers of malloc.h
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, never))
