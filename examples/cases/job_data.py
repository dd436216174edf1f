"""Jobs of a cluster as DAGs of stages: draw them, read those of TPC-H, compute their times.

A stage starts when all stages that it reads from have finished, so a job takes as long as its
longest path. All times of a job are divided by the mean time of its stages.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyg_dynbatch.data import DynTreeData

EXECUTORS = 50


def draw(levels: int, rng: random.Random) -> tuple[list[tuple[int, int]], list[float]]:
    """Draw the edges and times of a job with one to three stages per level."""
    edges: set[tuple[int, int]] = set()
    before: list[int] = []
    last: list[int] = []
    for _ in range(levels):
        first = len(before)
        stages = list(range(first, first + rng.randint(1, 3)))
        for stage in stages:
            if last:
                edges.add((rng.choice(last), stage))
                edges |= {(rng.choice(before), stage) for _ in range(rng.randint(0, 2))}
        before, last = before + stages, stages
    return sorted(edges), [rng.lognormvariate(0, 1) for _ in before]


def read_tpch(path: Path) -> list[DynTreeData]:
    """Read the jobs of TPC-H; a stage runs its tasks in waves of as many as there are executors."""
    given = json.loads(path.read_text("utf-8"))
    edges = {query["query"]: query["edges"] for query in given["queries"]}
    jobs = []
    for job in given["jobs"]:
        waves = np.ceil(np.array(job["num_tasks"]) / EXECUTORS)
        times = waves * np.array(job["rough_task_duration_ms"])
        jobs.append(graph(edges[job["query"]], times.tolist()))
    return jobs


def graph(edges: Any, times: list[float]) -> DynTreeData:
    """Create the graph of a job, whose edges lead to higher numbers, with its time as target."""
    own = np.array(times) / np.mean(times)
    finish, level = own.copy(), np.zeros(len(own), dtype=np.int64)
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        finish[target] = max(finish[target], finish[source] + own[target])
        level[target] = max(level[target], level[source] + 1)
    levels = [own[level == number] for number in range(level.max() + 1)]
    bound, means = sum(map(np.max, levels)), sum(map(np.mean, levels))
    summary = [len(own), len(edges), len(levels), own.std(), own.max(), bound, means]
    ratios = [len(own) / len(levels), len(edges) / len(own), bound / len(own), means / len(own)]
    return DynTreeData(
        torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous(),
        x=torch.from_numpy(own).float()[:, None],
        level=torch.from_numpy(level),
        summary=torch.tensor([summary + ratios]).float(),
        bound=torch.tensor([bound]).float(),
        target=torch.tensor([finish.max()]).float(),
    )
