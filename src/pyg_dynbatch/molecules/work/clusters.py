"""Run the shards of a job on a cluster: Dask tasks, or a pool of Ray actors."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from socket import gethostname
from time import monotonic
from traceback import format_exc
from typing import Any
from uuid import uuid4

from pyg_dynbatch.core.errors import mismatch

PATIENCE = 300.0  # seconds without any worker, in total between two finished shards
RETRIES = 1  # after an error; shared folders fail now and then


def _run(job: Any, shard: Any) -> None:
    try:
        job.run(shard)
    except Exception as error:
        error.add_note(f"shard {shard} on {gethostname()}")
        raise


def run_on_dask(job: Any, shards: Sequence[Any], client: Any) -> None:
    """Run shards by a ``dask.distributed.Client``, which moves those of dead workers to others."""
    if getattr(job, "num_workers", 0) or getattr(getattr(job, "options", None), "num_workers", 0):
        what, hint = "Dask: its workers cannot start processes", "more workers of Dask instead"
        raise mismatch(ValueError, what, "num_workers=0", "more", hint=hint)
    # Unique, since Dask does not run a task again whose result it has; progress is shown by shard.
    keys = [f"{shard.folder}-{uuid4().hex}" for shard in shards]
    futures = client.map(partial(_run, job), shards, key=keys, retries=RETRIES)
    _wait_for(futures, client)
    client.gather(futures)


def _wait_for(futures: Sequence[Any], client: Any) -> None:
    """Return when all tasks are done or one has failed; raise if workers are missing for long.

    Dask counts the deaths of workers that hold a task, and then raises ``KilledWorker``. But a task
    that waits for a worker waits forever, and a cluster gives up workers that do not come back.
    """
    from distributed import wait

    seen = bool(client.nthreads())
    if not seen:
        print("Dask: the cluster has no workers; waiting for the first one", file=sys.stderr)
    finished, absent, before = 0, 0.0, monotonic()
    while {future.status for future in futures} in ({"pending"}, {"pending", "finished"}):
        now, count = monotonic(), sum(future.status == "finished" for future in futures)
        if client.nthreads():
            seen = True
        elif seen:
            absent += now - before
        # A worker that comes and goes again does not set the clock back; a finished shard does.
        absent = absent if count == finished else 0.0
        finished, before = count, now
        if absent > PATIENCE:
            client.cancel(futures)
            what = "Dask: the cluster has lost all of its workers"
            got = f"none for {PATIENCE:g} s in total, and no shard was finished"
            hint = "start workers and repeat the call, which continues after the saved blocks"
            raise mismatch(TimeoutError, what, "at least one worker", got, hint=hint)
        with suppress(TimeoutError):
            wait(futures, timeout=1)


class _Worker:
    def __init__(self, job: Any, shards: Any) -> None:
        self.prepare, self.shards = cache(job.prepare), shards

    def __call__(self, batch: Any) -> dict[str, list[Exception]]:
        shard = self.shards[batch["item"].item()]
        try:
            self.prepare()(shard)  # prepared here, since Ray wraps errors of __init__
        except Exception as error:
            error.add_note(f"shard {shard} on {gethostname()}:\n{format_exc()}")
            return {"error": [error]}
        return {"error": []}


def run_on_ray(job: Any, shards: Any, ray: Any) -> None:
    """Run shards in actors that prepare the job once and have a CPU or, if it uses one, a GPU."""
    try:
        from ray.data import ActorPoolStrategy, from_items
    except ImportError as error:
        what, hint = "no Ray Data", 'pip install "pyg_dynbatch[ray]"'
        raise mismatch(ImportError, what, got=error, hint=hint) from error
    # Numbers need no pickling. In memory: tasks that read them would wait for the actors' CPUs.
    items = from_items(list(range(len(shards))), override_num_blocks=len(shards))
    gpus = int("cuda" in getattr(job, "device", "cpu"))
    kind, resources = "GPU" if gpus else "CPU", ray.cluster_resources()
    if not (found := int(resources.get(kind, 0))):
        hint = 'a GPU, or device="cpu"' if gpus else "ray.init(num_cpus=…) with at least 1"
        what, got = f"Ray: the cluster has no {kind} for the shards", f"{kind} {found}"
        raise mismatch(ValueError, what, f"at least one {kind}", got, hint=hint)
    pool = ActorPoolStrategy(size=min(len(shards), found), max_tasks_in_flight_per_actor=1)
    given: dict[str, Any] = {"fn_constructor_args": [job, shards], "num_gpus": gpus}
    for row in items.map_batches(_Worker, batch_size=1, compute=pool, **given).iter_rows():
        raise row["error"]  # all rows are errors
