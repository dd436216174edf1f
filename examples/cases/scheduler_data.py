"""States of a cluster as a scheduler sees them, read or drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class State(NamedTuple):
    """What a scheduler sees: the unfinished stages of all jobs.

    Args:
        x: Features of the stages, ``[stage, 5]``.
        edges: Which stage must finish before which, ``[edge, 2]``.
        ptr: First stage of each job, and the number of stages.
        ready: Which stages may start, ``[stage]``.
    """

    x: np.ndarray
    edges: np.ndarray
    ptr: np.ndarray
    ready: np.ndarray


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
        x, ready = data["x"][stages], data["stage_mask"][stages]
        states.append(State(x, data["edges"][edges].astype(np.int64), ptr, ready))
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
    return State(rows, np.concatenate(edges), np.array(ptr), np.concatenate(ready))


def joined_edges(states: Sequence[State]) -> np.ndarray:
    """Return the edges of states side by side, ``[edge, 2]``; refuse what does not fit."""
    for number, state in enumerate(states):
        stages, jobs = len(state.x), np.diff(state.ptr)
        if state.ptr[0] != 0 or state.ptr[-1] != stages or (jobs < 0).any():
            raise ValueError(f"state {number}: ptr {state.ptr.tolist()} for {stages} stages")
        if state.ready.dtype != bool or state.ready.shape != (stages,):
            raise ValueError(f"state {number}: ready is no mask of its {stages} stages")
    own = np.concatenate([state.edges.reshape(-1, 2) for state in states])
    of = np.repeat(np.arange(len(states)), [len(state.edges) for state in states])
    sizes = np.array([len(state.x) for state in states])
    edges = own + (sizes.cumsum() - sizes)[of, None]
    missing = ((own < 0) | (own >= sizes[of, None])).any(1)
    twice = np.ones(len(edges), dtype=bool)
    twice[np.unique(edges @ [sizes.sum(), 1], return_index=True)[1]] = False
    for what, wrong in {"refers to a missing stage": missing, "is listed twice": twice}.items():
        if wrong.any():
            edge = int(wrong.argmax())
            raise ValueError(f"state {of[edge]}: edge {own[edge].tolist()} {what}")
    return edges
