"""Compute a function of many items: in this process, or on a cluster of Dask or Ray."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from socket import gethostname
from threading import RLock
from time import monotonic
from traceback import format_exc
from typing import Any
from uuid import uuid4

from pyg_dynbatch.console import optional
from pyg_dynbatch.core.errors import mismatch

_ONE_AT_A_TIME = RLock()  # threads share seeds, sys.argv and the working folder

PATIENCE = 300.0  # seconds without any worker, in total between two finished items
RETRIES = 1  # after an error; shared folders fail now and then


def compute(
    work: Callable[[Any], Any],
    items: Sequence[Any],
    client: Any = None,
    *,
    what: str = "item",
    gpu: bool | None = False,
    num_workers: int = 0,
) -> Iterator[Any]:
    """Yield the results of a function for all items as they are ready, in any order.

    The items of a worker that dies are moved to others. An error is raised with a note that names
    the item and the machine; items that have not begun are then dropped.

    Args:
        work: A function that can be pickled. A process that unpickles it uses it for many items,
            so it may keep what it loads.
        items: What it is called with, one at a time per process; their texts name them.
        client: A ``dask.distributed.Client``, or the module ``ray``; None for this process.
        what: What an item is, for messages.
        gpu: Whether an item needs a GPU of Ray; None if it uses one where the cluster has some.
        num_workers: Processes that the function starts, which workers of Dask cannot do.

    Raises:
        ImportError: If Ray Data is not installed.
        TimeoutError: If a cluster of Dask has lost its workers for long.
        TypeError: If the client is unknown.
        ValueError: If the cluster cannot run the function.

    Example:
        >>> list(compute("run {}".format, [1, 2]))
        ['run 1', 'run 2']
    """
    named = _Named(work, what)
    # The owner of a client has imported its package.
    distributed, ray = map(sys.modules.get, ("distributed", "ray"))
    if client is None:
        yield from map(named, items)
    elif distributed is not None and isinstance(client, distributed.Client):
        if num_workers:
            wanted, hint = "num_workers=0", "more workers of Dask instead"
            what = "Dask: its workers cannot start processes"
            raise mismatch(ValueError, what, wanted, num_workers, hint=hint)
        yield from _on_dask(named, items, client)
    elif client is ray:
        yield from _on_ray(named, items, client, gpu)
    else:
        wanted = "None, a dask.distributed.Client, or the module ray"
        hint = 'pip install "pyg_dynbatch[dask]" or "pyg_dynbatch[ray]"'
        raise mismatch(TypeError, "the client is unknown", wanted, repr(client), hint=hint)


@dataclass(frozen=True)
class _Named:
    """Compute one item at a time; name it and the machine in errors."""

    work: Callable[[Any], Any]
    what: str

    def __call__(self, item: Any) -> Any:
        with _ONE_AT_A_TIME:
            try:
                return self.work(item)
            except Exception as error:
                error.add_note(f"{self.what} {item} on {gethostname()}")
                raise


def _on_dask(work: _Named, items: Sequence[Any], client: Any) -> Iterator[Any]:
    """Let Dask assign the items; raise if workers are missing for long.

    Dask counts the deaths of workers that hold a task, and then raises ``KilledWorker``. But a task
    that waits for a worker waits forever, and a cluster gives up workers that do not come back.
    """
    from distributed import wait

    # Unique, since Dask does not run a task again whose result it has; progress is shown by item.
    keys = [f"{work.what} {item}-{uuid4().hex}" for item in items]
    pending = client.map(work, items, key=keys, retries=RETRIES)
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
            what = "Dask: the cluster has lost all of its workers"
            got = f"none for {PATIENCE:g} s in total, and no {work.what} was finished"
            hint = "start workers and repeat the call, which continues after what is saved"
            raise mismatch(TimeoutError, what, "at least one worker", got, hint=hint)
        with suppress(TimeoutError):
            wait(pending, timeout=1, return_when="FIRST_COMPLETED")
        done = [future for future in pending if future.status != "pending"]
        pending = [future for future in pending if future not in done]
        # A worker that comes and goes again does not set the clock back; a finished item does.
        absent = 0.0 if done else absent
        yield from (future.result() for future in done)


@dataclass
class _Outcome:
    result: Any = None
    error: Exception | None = None


class _Actor:
    def __init__(self, work: _Named, items: Sequence[Any]) -> None:
        self.work, self.items = work, items

    def __call__(self, batch: Any) -> dict[str, list[_Outcome]]:
        try:
            outcome = _Outcome(self.work(self.items[batch["item"].item()]))
        except Exception as error:  # which Ray would wrap
            error.__notes__[-1] += f":\n{format_exc()}"
            outcome = _Outcome(error=error)
        return {"outcome": [outcome]}


def _on_ray(work: _Named, items: Sequence[Any], ray: Any, gpu: bool | None) -> Iterator[Any]:
    """Let Ray Data map the items over actors, each of which has a CPU or, if needed, a GPU."""
    data = optional("ray.data", "no Ray Data", "ray")
    resources = ray.cluster_resources()
    kind = "GPU" if gpu or (gpu is None and resources.get("GPU")) else "CPU"
    if not (found := int(resources.get(kind, 0))):
        hint = "a GPU, or the CPU as device" if gpu else "ray.init(num_cpus=…) with at least 1"
        what, got = f"Ray: the cluster has no {kind} for a {work.what}", f"{kind} {found}"
        raise mismatch(ValueError, what, f"at least one {kind}", got, hint=hint)
    if not items:
        return
    # Numbers need no pickling. In memory: tasks that read them would wait for the actors' CPUs.
    numbers = data.from_items(list(range(len(items))), override_num_blocks=len(items))
    pool = data.ActorPoolStrategy(size=min(len(items), found), max_tasks_in_flight_per_actor=1)
    given: dict[str, Any] = {"fn_constructor_args": [work, items], "num_gpus": int(kind == "GPU")}
    for row in numbers.map_batches(_Actor, batch_size=1, compute=pool, **given).iter_rows():
        if row["outcome"].error is not None:
            raise row["outcome"].error
        yield row["outcome"].result
