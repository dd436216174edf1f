"""Run the pretrained policy of Decima, a scheduler of cluster jobs, and measure its latency.

    python examples/cases/schedulers.py [--folder FOLDER] [--json FILE]

Data: weights of spark-sched-sim (https://github.com/ArchieGertsman/spark-sched-sim, MIT) as arrays
(``decima_model.npz``), 969 states of one simulated episode with the scores that the published
implementation gives (``episode.npz``), and the job DAGs of TPC-H (``tpch_dags.json``) in FOLDER
(default: ``schedulers`` below ``$PYG_DYNBATCH_DATA``). The loop beside it computes the equations of
that implementation in plain PyTorch: for each level masks of edges and nodes of the whole graph.
Times are processor times, schedules and masks included. Results: ``docs/cases/schedulers.md``.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import data_folder, write_rows
from scheduler_data import State, draw, read_episode
from scheduler_model import Batch, Scheduler
from torch import Tensor


def masks_of(edges: np.ndarray, stages: int) -> list[Tensor]:
    """Return the edges among each level and its successors, as masks; the last level first."""
    depth, (a, b) = np.zeros(stages, dtype=np.int64), edges
    while (late := depth[b] <= depth[a]).any():
        np.maximum.at(depth, b[late], depth[a[late]] + 1)
    masks = list[Tensor]()
    for level in range(depth.max(initial=0)):
        inside = depth == level
        inside[b[inside[a]]] = True
        masks.append(torch.from_numpy(inside[a] & inside[b]))
    return masks[::-1]


def by_masks(model: Scheduler, batch: Batch) -> Tensor:
    """Embed the stages of a graph, level by level, as the published implementation does."""
    cell, x, (target, source) = model.layer.cell, batch.x, batch.edges
    masks, prepared = masks_of(batch.edges.flip(0).numpy(), len(x)), cell.mlp_prep(x)
    if not masks:
        return prepared
    last = x.new_ones(len(x), dtype=torch.bool)
    last[source] = False
    h = torch.zeros_like(prepared)
    h[last] = cell.mlp_update(prepared[last])
    for mask in masks:
        sends, receives = torch.zeros_like(last), torch.zeros_like(last)
        sends[target[mask]], receives[source[mask]] = True, True
        message = torch.zeros_like(h)
        message[sends] = cell.mlp_msg(h[sends])
        total = torch.zeros_like(h).index_add(0, source[mask], message[target[mask]])
        h = h.clone()
        h[receives] = prepared[receives] + cell.mlp_update(total[receives])
    return h


def decisions(scores: np.ndarray, states: Sequence[State]) -> list[int]:
    """Return which of its ready stages each state starts, by the highest score."""
    ends = np.cumsum([state.ready.sum() for state in states])
    return [int(each.argmax()) for each in np.split(scores, ends[:-1])]


def ways(model: Scheduler, states: Sequence[State]) -> dict[str, Callable[[], Any]]:
    """Return embeddings, their gradients and decisions, by masks and by a schedule."""
    weights = list(model.layer.parameters())

    def embed(masks: bool) -> tuple[Batch, Tensor]:
        batch = Batch.of(states)
        if masks:
            return batch, by_masks(model, batch)
        return batch, model.layer(batch.x, None, batch.schedule)

    def differentiate(masks: bool) -> Any:
        return torch.autograd.grad(embed(masks)[1].sum(), weights, allow_unused=True)

    def decide(masks: bool) -> Tensor:
        return model.score(*embed(masks)).stage_scores.argmax()

    no_grad = torch.no_grad()
    each = {"embedding": no_grad(embed), "gradients": differentiate, "decision": no_grad(decide)}
    pairs = [(f"{kind}, {way}", run) for kind, run in each.items() for way in ("loop", "ours")]
    return {name: partial(run, name.endswith("loop")) for name, run in pairs}


def measure(each: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median processor time of each way in ms, in interleaved rounds."""
    found: dict[str, list[float]] = {name: [] for name in each}
    for _ in range(rounds + 1):
        for name, run in each.items():
            start = time.process_time()
            run()
            found[name].append(1e3 * (time.process_time() - start))
    return {name: median(times[1:]) for name, times in found.items()}


def latency(
    model: Scheduler, title: str, parts: list[list[State]], rounds: int
) -> dict[str, float]:
    """Print and return the time per state, the mean over parts, and the ratios."""
    number = sum(map(len, parts))
    every = [measure(ways(model, part), rounds) for part in parts]
    rows = {name: sum(each[name] for each in every) / number for name in every[0]}
    for kind in ("embedding", "gradients", "decision"):
        slow, fast = rows[f"{kind}, loop"], rows[f"{kind}, ours"]
        rows[f"{kind}: ratio"] = slow / fast
        text = f"loop {slow:.3f} ms per state, ours {fast:.3f} ms, ratio {slow / fast:.2f}"
        print(f"{title:30} {kind}: {text}", flush=True)
    return rows


def main() -> None:
    """Compare decisions and scores with the published ones, and print times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=data_folder("schedulers"))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="of the episode's states, for times")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    states, published = read_episode(options.folder / "episode.npz")
    model = Scheduler.of_spark_sched_sim(np.load(options.folder / "decima_model.npz"))
    with torch.no_grad():
        together = model(Batch.of(states)).stage_scores.numpy()
        single = [model(Batch.of([state])).stage_scores.numpy() for state in states]
    wanted, rows = decisions(published, states), dict[str, dict[str, float]]()
    for title, found in {"one batch": together, "one by one": np.concatenate(single)}.items():
        same = sum(a == b for a, b in zip(decisions(found, states), wanted, strict=True))
        worst = float(abs(found - published).max())
        rows[title] = {"same decisions": same, "largest difference": worst}
        print(f"{title}: {same} of {len(states)} decisions the same; scores differ by {worst:.1e}")
    tpch = json.loads((options.folder / "tpch_dags.json").read_text())
    rng = np.random.default_rng(0)
    part = states[:: options.every]
    times = {"episode, one state": [[state] for state in part], "episode, batch": [part]}
    for jobs in (1, 10, 50):
        drawn = [draw(tpch["jobs"], tpch["queries"], jobs, rng) for _ in range(32)]
        times[f"{jobs} jobs of TPC-H, one state"] = [[state] for state in drawn[:4]]
        times[f"{jobs} jobs of TPC-H, batch of 32"] = [drawn]
    rows |= {name: latency(model, name, each, options.rounds) for name, each in times.items()}
    write_rows(options.json, rows, (time.perf_counter() - start) / 60)


if __name__ == "__main__":
    main()
