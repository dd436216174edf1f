"""Load the C extension, and keep freed memory."""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

NATIVE_SWITCH = "PYG_DYNBATCH_NATIVE"
"""The environment variable that switches the C extension off where it is 0."""

# The figure: "without the extension" in benchmarks/RESULTS.md.
_MISSING = (
    "pyg_dynbatch runs without its C extension (%s): fused Tree-LSTMs on CPUs take 1.5 to 1.9"
    " times as long, mini-batches of blocks and autobatch 5 to 100 times. To build it, install a C"
    " compiler (GCC or Clang) and reinstall pyg_dynbatch."
)

_log = logging.getLogger(__name__)


@cache
def loaded_extension() -> Any:
    """Import the extension even if it is switched off; warn in one line, once, if that fails."""
    try:
        # OpenMP's symbols are found in the runtime that torch has loaded.
        native = import_module("pyg_dynbatch._native")
        sources = Path(__file__).parents[1] / "native"
        if sources.is_dir() and _digest_of(sources) != native.SOURCES:
            raise ImportError("it was built from other sources")
    except ImportError as error:
        if multiprocessing.parent_process() is None:  # workers stay silent
            _log.warning(_MISSING, error)
        return None
    return native


def _digest_of(folder: Path) -> str:
    """Return the checksum of C sources, as setup.py computes it."""
    content = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    return hashlib.sha256(content).hexdigest()[:16]


def extension() -> ModuleType | None:
    """Return the extension module ``pyg_dynbatch._native``; None if missing or switched off."""
    return None if os.environ.get(NATIVE_SWITCH) == "0" else loaded_extension()


def is_native(*given: Tensor) -> bool:
    """Whether C computes on tensors like these."""
    for like in given:
        # Tensors of a tracer have no values that C could read.
        plain = type(like) in (Tensor, Parameter) and like.is_cpu
        if not plain or like.dtype != torch.float32:
            return False
    # A dispatch mode would miss what C computes. On Windows there are no kernels.
    return hasattr(extension(), "tree_lstm_nodes") and not is_in_torch_dispatch_mode()


def describe_native() -> str:
    """Describe the native code in use: the extension, its variant, threads and OpenMP."""
    native = loaded_extension()
    if native is None:
        return "extension  none: plain torch and NumPy compute the same results more slowly"
    variant = "none: this platform has no kernels in C"
    if hasattr(native, "variants"):
        variant = f"{native.variant()} (this processor runs {', '.join(native.variants())})"
    is_off = os.environ.get(NATIVE_SWITCH) == "0"
    lines = {
        "extension": f"{native.__file__}" + (f", off: {NATIVE_SWITCH}=0" if is_off else ""),
        "variant": variant,
        "threads": f"{torch.get_num_threads() if native.OPENMP else 1}",
        "OpenMP": ", ".join(_openmp_libraries()) if native.OPENMP else "not used",
    }
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def _openmp_libraries() -> list[str]:
    """List the OpenMP runtimes that this process has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return ["that of torch"]
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if ".so" in line}
    names = ("libgomp", "libiomp", "libomp")
    return sorted(each for each in paths if Path(each).name.startswith(names))


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
    mmap_max = -4  # numbers of malloc.h
    trim_threshold = -1
    never = -1
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, never))
