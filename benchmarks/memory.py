"""Measure how much memory a run needs at its peak."""

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

MEANING = {
    "cpu": "highest resident memory of the process during the run above that before it: tensors, "
    "autograd's records and Python objects alike, in whole pages",
    "cuda": "highest memory in tensors on the device during the run above that before it",
}
"""What the figure means, by type of device."""


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Runs something and gives the memory it needed at its peak.

    On the CPU it is the resident memory of the whole process that is read: tensors, the records
    of autograd and Python objects count alike. Free memory is given back to the system before, so
    that what earlier runs left cannot hide what this one needs.

    Args:
        run: What to run; what it returns is kept until the end.
        device: Where it runs.

    Returns:
        Bytes; None where the system does not tell (CPU on other systems than Linux).

    Example:
        >>> peak = peak_bytes(lambda: torch.ones(2_000_000), torch.device("cpu"))
        >>> peak is None or peak > 7_000_000
        True
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = run()
        torch.cuda.synchronize(device)
        del kept
        return torch.cuda.max_memory_allocated(device) - before
    if not _begin():
        run()
        return None
    before = _status("VmRSS")
    kept = run()
    peak = _status("VmHWM")
    del kept
    return max(peak - before, 0)


def _begin() -> bool:
    """Gives free memory back and sets the peak to the present; False where that cannot be done."""
    if sys.platform != "linux" or not _STATUS.is_file():
        return False
    try:
        # Not every C library has it; without it the figure may come out too low.
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5", encoding="ascii")
    except (AttributeError, OSError):
        return False
    return True


def _status(name: str) -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS}: no line {name}")
