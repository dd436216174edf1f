"""Keep freed memory with the process, so that large tensors of the next step find it there."""

import ctypes
import os
import sys

SWITCH = "PYG_DYNBATCH_KEEP_MEMORY"
"""The environment variable that leaves the C library as it is where it is 0."""

# Numbers of malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER = -1


def keep_freed_memory() -> bool:
    """Tells the C library to keep freed memory instead of handing it back to the system.

    glibc gets every piece above 32 MB from the system and hands it back when it is freed. The
    next step gets it again, page by page and filled with zeros: writing a tensor of 64 MB on a CPU
    then takes five times as long as writing into one that is there. Afterwards freed memory stays
    with the process, which therefore never shrinks below its peak. It holds for the
    whole process, so a library does not do it unasked; the console script does.
    ``PYG_DYNBATCH_KEEP_MEMORY=0`` in the environment leaves all as it is.

    Returns:
        Whether that was done; only glibc, on Linux, can be told.

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
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
