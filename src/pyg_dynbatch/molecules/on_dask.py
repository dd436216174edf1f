"""Run the shards of a job on a Dask cluster, as one task each."""

from collections.abc import Sequence
from functools import partial
from socket import gethostname
from typing import Any
from uuid import uuid4

from pyg_dynbatch.core.errors import mismatch

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
    client.gather(client.map(partial(_run, job), shards, key=keys, retries=RETRIES))
