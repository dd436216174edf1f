"""States of a cluster as a scheduler sees them, read or drawn."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

EXECUTORS = 50


class State(NamedTuple):
    """What a scheduler sees: the unfinished stages of all jobs.

    Args:
        x: Features of the stages, ``[stage, 5]``.
        edges: Which stage must finish before which, ``[edge, 2]``.
        ptr: First stage of each job, and the number of stages.
        ready: Which stages may start.
        caps: How many executors each job may still be given.
    """

    x: np.ndarray
    edges: np.ndarray
    ptr: np.ndarray
    ready: np.ndarray
    caps: np.ndarray


def read_episode(path: Path) -> tuple[list[State], np.ndarray]:
    """Read the states of an episode, and the published scores of all their ready stages."""
    if not path.is_file():
        raise SystemExit(f"{path} is missing; set PYG_DYNBATCH_DATA or --folder")
    data, places = dict(np.load(path)), {"nodes": 0, "edges": 0, "dags": 0}
    sizes = data["nodes_per_dag"].astype(np.int64)
    states = list[State]()
    for counts in zip(*(data[f"{name}_per_state"].tolist() for name in places), strict=True):
        last = {name: places[name] + n for name, n in zip(places, counts, strict=True)}
        stages, edges, jobs = (slice(places[name], last[name]) for name in places)
        places, ptr = last, np.cumsum([0, *sizes[jobs]])
        caps = data["exec_caps"][jobs].astype(np.int64)
        x, ready = data["x"][stages], data["stage_mask"][stages]
        states.append(State(x, data["edges"][edges].astype(np.int64), ptr, ready, caps))
    return states, data["stage_scores"]


def draw(jobs: list[Any], queries: list[Any], count: int, rng: np.random.Generator) -> State:
    """Draw a state of jobs that have not started, with free executors only."""
    x, edges, ptr, ready = list[np.ndarray](), list[np.ndarray](), [0], list[np.ndarray]()
    dags = {each["query"]: np.array(each["edges"]).reshape(-1, 2) for each in queries}
    for job in rng.choice(np.array(jobs, dtype=object), count):
        tasks = np.array(job["num_tasks"])
        work = tasks * np.array(job["rough_task_duration_ms"]) / 1e5
        ones = np.ones(len(tasks))
        x.append(np.stack([ones, -ones, 0 * ones, tasks / 200, work], 1))
        edges.append(dags[job["query"]] + ptr[-1])
        ready.append(~np.isin(np.arange(len(tasks)), dags[job["query"]][:, 1]))
        ptr.append(ptr[-1] + len(tasks))
    rows = np.concatenate(x).astype(np.float32)
    caps = np.full(count, EXECUTORS)
    return State(rows, np.concatenate(edges), np.array(ptr), np.concatenate(ready), caps)
