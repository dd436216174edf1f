"""Trace examples in other processes."""

import multiprocessing
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

from pyg_dynbatch.blocks.decode import Traced
from pyg_dynbatch.blocks.tracer import Tracer
from pyg_dynbatch.core.errors import mismatch


def pool_of(tracer: Tracer, processes: int | None) -> Any:
    """Starts processes that hold a tracer.

    They are started afresh; only where the tracer cannot be sent to such, since the user's
    functions cannot be pickled, they are forked.

    Args:
        tracer: The tracer.
        processes: Their number; one a core where left out.

    Raises:
        TypeError: If the tracer cannot be sent, and this system does not fork.
    """
    method = "spawn"
    try:
        pickle.dumps(tracer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        method = "fork"
        if method not in multiprocessing.get_all_start_methods():
            raise TypeError(
                mismatch(
                    "Compiler.multiprocessing_pool: a function cannot be sent to another process",
                    expected="host functions that can be pickled",
                    got=str(error),
                    mend="def at the top of a module, in place of a lambda or an inner function",
                )
            ) from error
    return multiprocessing.get_context(method).Pool(processes, _begin, (tracer,))


def traced_in(pool: Any, examples: Iterable[Any], chunk_size: int, ordered: bool) -> Iterator[Any]:
    """Traces examples in a pool, in their order or as they are ready."""
    trace = pool.imap if ordered else pool.imap_unordered
    return trace(_trace, enumerate(examples), chunk_size)


_worker: list[Tracer] = []


def _begin(tracer: Tracer) -> None:
    _worker[:] = [tracer]


def _trace(numbered: tuple[int, Any]) -> Traced:
    number, example = numbered
    return _worker[0](example, number)
