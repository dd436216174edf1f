"""Compute a function of many items: in this process, or on a cluster of Dask or Ray."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from socket import gethostname
from threading import RLock
from time import monotonic
from typing import Any
from uuid import uuid4

from pyg_dynbatch.core.errors import mismatch

Work = Callable[[Any], Any]
Items = Sequence[Any]

_ONE_AT_A_TIME = RLock()  # threads share seeds, sys.argv and the working folder

PATIENCE = 300.0  # seconds without any worker, in total between two finished items
RETRIES = 1  # after an error; shared folders fail now and then


def compute(
    work: Work, items: Items, client: Any, what: str, gpu: bool | None = False, num_workers: int = 0
) -> Iterator[Any]:
    """Yield the results of a function for all items as they are ready, in any order.

    The items of a worker that dies are moved to others. An error is raised with a note that names
    the item and the machine; items that have not begun are then dropped.

    Args:
        work: A function that can be pickled.
        items: What it is called with, one at a time per process; their texts name them.
        client: A ``dask.distributed.Client``, or the module ``ray``; None for this process.
        what: What an item is, for messages.
        gpu: Whether an item needs a GPU of Ray; None if it uses one where the cluster has some.
        num_workers: Processes that the function starts, which workers of Dask cannot do.

    Raises:
        TimeoutError: If a cluster of Dask has lost its workers for long.
        TypeError: If the client is unknown.
        ValueError: If the cluster cannot run the function.

    Example:
        >>> list(compute("run {}".format, [1, 2], client=None, what="run"))
        ['run 1', 'run 2']
    """
    # The owner of a client has imported its package.
    distributed, ray = map(sys.modules.get, ("distributed", "ray"))
    if client is None:
        yield from map(partial(_named, work, what), items)
    elif distributed is not None and isinstance(client, distributed.Client):
        if num_workers:
            fault, hint = "Dask: its workers cannot start processes", "more workers of Dask instead"
            raise mismatch(ValueError, fault, "num_workers=0", num_workers, hint=hint)
        yield from _on_dask(work, items, client, what)
    elif client is ray:
        yield from _on_ray(work, items, client, what, gpu)
    else:
        wanted = "None, a dask.distributed.Client, or the module ray"
        hint = 'pip install "pyg_dynbatch[dask]" or "pyg_dynbatch[ray]"'
        raise mismatch(TypeError, "the client is unknown", wanted, repr(client), hint=hint)


def _named(work: Work, what: str, item: Any) -> Any:
    """Compute one item at a time; name it and the machine in errors."""
    with _ONE_AT_A_TIME:
        try:
            return work(item)
        except Exception as error:
            error.add_note(f"{what} {item} on {gethostname()}")
            raise


def _on_dask(work: Work, items: Items, client: Any, what: str) -> Iterator[Any]:
    """Let Dask assign the items; raise if workers are missing for long.

    Dask counts the deaths of workers that hold a task, and then raises ``KilledWorker``. But a task
    that waits for a worker waits forever, and a cluster gives up workers that do not come back.
    """
    from distributed import wait

    # Unique, since Dask does not run a task again whose result it has; progress is shown by item.
    keys = [f"{what} {item}-{uuid4().hex}" for item in items]
    pending = client.map(partial(_named, work, what), items, key=keys, retries=RETRIES)
    if not (seen := bool(client.nthreads())):
        print("Dask: the cluster has no workers; waiting for the first one", file=sys.stderr)
    absent, before = 0.0, monotonic()
    while pending:
        now = monotonic()
        if client.nthreads():
            seen = True
        elif seen:
            absent += now - before
        before = now
        if absent > PATIENCE:
            client.cancel(pending)
            fault = "Dask: the cluster has lost all of its workers"
            got = f"none for {PATIENCE:g} s in total, and no {what} was finished"
            hint = "start workers and repeat the call, which continues after what is saved"
            raise mismatch(TimeoutError, fault, "at least one worker", got, hint=hint)
        with suppress(TimeoutError):
            wait(pending, timeout=1, return_when="FIRST_COMPLETED")
        done = [future for future in pending if future.status != "pending"]
        pending = [future for future in pending if future not in done]
        # A worker that comes and goes again does not set the clock back; a finished item does.
        absent = 0.0 if done else absent
        yield from (future.result() for future in done)


def _on_ray(work: Work, items: Items, ray: Any, what: str, gpu: bool | None) -> Iterator[Any]:
    """Let Ray assign the items to CPUs or GPUs; it moves those of dead workers to others."""
    resources = ray.cluster_resources()
    kind = "GPU" if gpu or (gpu is None and resources.get("GPU")) else "CPU"
    if resources.get(kind, 0) < 1:  # tasks would wait forever
        hint = "a GPU, or the CPU as device" if gpu else "ray.init(num_cpus=…) with at least 1"
        fault, got = f"Ray: the cluster has no {kind} for a {what}", resources.get(kind, 0)
        raise mismatch(ValueError, fault, "at least one", got, hint=hint)
    task, shared = ray.remote(num_gpus=int(kind == "GPU"))(_named), ray.put(work)
    pending = {task.remote(shared, what, item): item for item in items}
    try:
        while pending:
            (done,), _ = ray.wait(list(pending))
            item = pending.pop(done)
            yield ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.WorkerCrashedError as error:
        error.add_note(f"{what} {item}, again and again")
        raise
    finally:
        for each in pending:
            ray.cancel(each)
