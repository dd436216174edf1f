"""Work in this process at first, and in several where that takes longer."""

import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain
from multiprocessing import current_process, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pyg_dynbatch.core.errors import mismatch_text

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")

SECONDS_ALONE = 2.0
"""Work that takes less starts no process: each imports torch and RDKit, which takes longer."""

_MAIN_GUARD = re.compile(r"""__name__\s*==\s*['"]__main__['"]""")


class Processes:
    """Apply a function to chunks of work, in this process or in several; end them on exit.

    Args:
        count: How many processes; 0 works in this one. None is one per core that may be used, for
            work that takes more than two seconds, unless the script could not be imported by them;
            until the first is ready, this one goes on.
    """

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._works_until_one_is_ready = count is None
        self._seconds_left_alone = SECONDS_ALONE if count is None else 0.0
        self._pool: ProcessPoolExecutor | None = None
        self._first_calls: list[Future[int]] = []  # of every process; the first is done when ready

    def __enter__(self) -> "Processes":
        """Start none yet."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the processes end, after the chunks that they are working on."""
        if self._pool is not None:
            # One that is still starting is not waited for.
            self._pool.shutdown(wait=False, cancel_futures=True)

    def map(self, function: Callable[[Chunk], Result], chunks: Sequence[Chunk]) -> Iterator[Result]:
        """Yield the results of all chunks in order, each as soon as it is there."""
        remaining = iter(chunks)
        for chunk in remaining:
            if self._pool is None and self._seconds_left_alone <= 0:
                self._start()
            if self._pool is not None and self._is_ready():
                yield from self._pool.map(function, chain([chunk], remaining))
                return

            begin = time.monotonic()
            result = function(chunk)
            self._seconds_left_alone -= time.monotonic() - begin
            yield result

    def _start(self) -> None:
        if self._count is None:
            self._count = _usable_processes()
        if self._count:
            # Not forked: a process copied from one that runs threads may hang.
            context = get_context("spawn")
            self._pool = ProcessPoolExecutor(self._count, context, initializer=_end_with_parent)
            # As many calls start as many processes.
            self._first_calls = [self._pool.submit(os.getpid) for _ in range(self._count)]

    def _is_ready(self) -> bool:
        """Return whether to hand over the work: at once, or when a process has started."""
        if not self._works_until_one_is_ready:
            return True
        return any(call.done() for call in self._first_calls)


def _end_with_parent() -> None:
    """Let this process end when the one that started it does, even if that one was killed."""
    # Otherwise it would wait for work for ever.
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _usable_processes() -> int:
    """Return one per core that may be used; 0 where this process must or should work alone."""
    # A process of a loader may start none.
    if current_process().daemon:
        return 0
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if cores == 1:
        return 0
    if _runs_on_import():
        warning = mismatch_text(
            "molecules are featurized in one process",
            'a script with if __name__ == "__main__":, which others can import',
            "one that would run again in every process",
            hint="put what the script does below that line, or processes=0",
        )
        warnings.warn(warning, stacklevel=2)
        return 0
    return cores


def _runs_on_import() -> bool:
    """Return whether the main module does its work when a new process imports it."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None:  # typed at a prompt, or in a notebook: nothing is imported
        return False
    try:
        script = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return _MAIN_GUARD.search(script) is None
