"""Round subnormal numbers to zero, with which some processors compute many times slower."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyg_dynbatch.core.native import extension


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """Round subnormal numbers to zero until the block ends, in this thread and in torch's pool.

    Where gates saturate, as in deep trees, some gradients become subnormal (below 1.2e-38 in
    float32); Intel's processors then compute products many times slower. The modes of all
    threads are put back when the block ends or fails, which ``torch.set_flush_denormal`` cannot
    do: it sets the mode of one thread, and cannot be asked for it.

    Only x86 processors have this mode, and only the C extension sets it; elsewhere nothing changes.

    Reference:
        Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, section 10.2.3
        (MXCSR: flush-to-zero, denormals-are-zeros).

    Example:
        >>> with flushed_subnormals():
        ...     total = (torch.full((3,), 1e-30) * 1e-10).sum()
        >>> bool(total < 1e-37)
        True
    """
    native = extension()
    if native is None:
        yield
        return
    before = native.flush_subnormals(torch.get_num_threads())
    try:
        yield
    finally:
        native.restore_subnormals(before)
