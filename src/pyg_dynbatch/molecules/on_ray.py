"""Run the shards of a job on a Ray cluster, in a pool of actors."""

from functools import cache
from socket import gethostname
from traceback import format_exc
from typing import Any

from pyg_dynbatch.core.errors import mismatch


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
