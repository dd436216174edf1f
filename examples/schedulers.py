"""Run the pretrained policy of Decima, a scheduler of cluster jobs, and measure its latency.

    python examples/schedulers.py FOLDER

A job is a DAG of stages. Decima (Mao et al., SIGCOMM 2019) walks it against its edges, so that a
stage knows the work that waits for it, and scores the stages that may start. The recursion is a
cell; what is pretrained are the weights of spark-sched-sim
(https://github.com/ArchieGertsman/spark-sched-sim, MIT). FOLDER holds them as arrays
(``decima_model.npz``), and 969 states of one simulated episode with the scores that the published
implementation gives (``episode.npz``). The loop beside it computes the equations of that
implementation in plain PyTorch, with masks of the whole graph for each level. Times are processor
times, schedules and masks included. Figures, and how to make both files: docs/examples.md.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyg_dynbatch import RaggedRows, schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer


class State(NamedTuple):
    """What a scheduler sees: the unfinished stages of all jobs.

    Args:
        x: Features of the stages, ``[stage, 5]``.
        edges: Which stage must finish before which, ``[edge, 2]``.
        jobs: Number of stages of each job, ``[job]``.
        ready: Which stages may start, ``[stage]``.
    """

    x: np.ndarray
    edges: np.ndarray
    jobs: np.ndarray
    ready: np.ndarray


def read_episode(path: Path) -> tuple[list[State], list[np.ndarray]]:
    """Read the states of an episode, and for each the published scores of its ready stages."""
    arrays = np.load(path)
    first_nodes = np.cumsum(arrays["nodes_per_state"])[:-1]
    columns = (
        np.split(arrays["x"], first_nodes),
        np.split(arrays["edges"].astype(np.int64), np.cumsum(arrays["edges_per_state"])[:-1]),
        np.split(
            arrays["nodes_per_dag"].astype(np.int64), np.cumsum(arrays["dags_per_state"])[:-1]
        ),
        np.split(arrays["stage_mask"], first_nodes),
    )
    states = [State(*row) for row in zip(*columns, strict=True)]
    ends = np.cumsum([state.ready.sum() for state in states])
    return states, np.split(arrays["stage_scores"], ends[:-1])


class Batch:
    """States side by side.

    Attributes:
        x: Features of the stages.
        job: Job of each stage.
        state: State of each job.
        ready: Numbers of the stages that may start.
        alone: Numbers of the stages of states without any edge.
        edge_index: From the stage that waits to the one that it waits for, ``[2, edge]``.
        sizes: Number of stages of each state.
    """

    def __init__(self, states: Sequence[State]) -> None:
        self.sizes = [len(state.x) for state in states]
        self.x = torch.from_numpy(np.concatenate([state.x for state in states]))
        first = np.cumsum([0, *self.sizes[:-1]])
        edges = [state.edges + start for state, start in zip(states, first, strict=True)]
        self.edge_index = torch.from_numpy(np.concatenate(edges)[:, ::-1].T.copy())
        lengths = torch.from_numpy(np.concatenate([state.jobs for state in states]))
        self.job = torch.repeat_interleave(lengths)
        self.state = torch.repeat_interleave(torch.tensor([len(state.jobs) for state in states]))
        self.ready = torch.from_numpy(np.concatenate([state.ready for state in states])).nonzero()[
            :, 0
        ]
        no_edges = torch.tensor([len(state.edges) == 0 for state in states])
        self.alone = no_edges.repeat_interleave(torch.tensor(self.sizes)).nonzero()[:, 0]


def mlp(in_channels: int, hidden: Sequence[int], out: int, activation: nn.Module) -> nn.Sequential:
    """Create linear layers with an activation between them."""
    widths = [in_channels, *hidden, out]
    layers: list[nn.Module] = []
    for narrow, wide in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(narrow, wide), activation]
    return nn.Sequential(*layers[:-1])


def encoder(in_channels: int) -> nn.Sequential:
    """Create one of the five networks that encode stages, messages, jobs and the state."""
    return mlp(in_channels, [32, 16], 16, nn.LeakyReLU(0.2))


class StageCell(RecursiveCell):
    """Compute ``p + update(sum of msg(h) over the successors)``, or ``update(p)`` without any."""

    def __init__(self) -> None:
        super().__init__(5, 16, arity=None)
        self.mlp_prep = encoder(5)
        self.mlp_msg = encoder(16)
        self.mlp_update = encoder(16)

    def project(self, x: Tensor) -> Tensor:
        """Compute p for all stages at once."""
        return self.mlp_prep(x)

    def step(self, prepared: Tensor, successors: RaggedRows | None) -> tuple[Tensor]:
        """Compute the states of the stages of a level."""
        if successors is None:
            return (self.mlp_update(prepared),)
        messages = self.mlp_msg(successors.rows[0])
        total = torch.zeros_like(prepared).index_add(0, successors.segment_ids, messages)
        return (prepared + self.mlp_update(total),)


class Scheduler(nn.Module):
    """Score the stages that may start."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = RecursiveLayer(StageCell())
        self.dag = encoder(5 + 16)
        self.glob = encoder(16)
        self.stage = mlp(5 + 3 * 16, [64, 64], 1, nn.Tanh())

    @classmethod
    def pretrained(cls, arrays: Mapping[str, np.ndarray]) -> "Scheduler":
        """Create the network with the weights of ``DecimaScheduler`` of that simulator.

        The part that chooses how many executors a job is given is left out.
        """
        names = {
            "encoder.node_encoder.": "layer.cell.",
            "encoder.dag_encoder.mlp": "dag",
            "encoder.global_encoder.mlp": "glob",
            "stage_policy_network.mlp_score": "stage",
        }
        weights = {
            name.replace(theirs, ours): torch.from_numpy(array)
            for name, array in arrays.items()
            for theirs, ours in names.items()
            if name.startswith(theirs)
        }
        model = cls()
        model.load_state_dict(weights)
        return model

    def embed(self, batch: Batch) -> Tensor:
        """Embed the stages, level by level."""
        schedule = schedule_structure(batch.edge_index, len(batch.x), example_sizes=batch.sizes)
        return self.layer(batch.x, None, schedule)

    def forward(self, batch: Batch, embed: Callable[[Batch], Tensor] | None = None) -> Tensor:
        """Score the ready stages of all states."""
        h = (embed or self.embed)(batch)
        # As published, a state without edges is not passed through the update.
        h = h.index_copy(0, batch.alone, self.layer.cell.mlp_prep(batch.x[batch.alone]))
        jobs = h.new_zeros(len(batch.state), 16)
        jobs = jobs.index_add(0, batch.job, self.dag(torch.cat([batch.x, h], 1)))
        states = h.new_zeros(len(batch.sizes), 16).index_add(0, batch.state, self.glob(jobs))
        job = batch.job[batch.ready]
        rows = [batch.x[batch.ready], h[batch.ready], jobs[job], states[batch.state[job]]]
        return self.stage(torch.cat(rows, 1))[:, 0]

    def embed_by_masks(self, batch: Batch) -> Tensor:
        """Embed the stages as the published implementation does."""
        cell = self.layer.cell
        waiting, awaited = batch.edge_index
        prepared = cell.mlp_prep(batch.x)
        is_last = batch.x.new_ones(len(batch.x), dtype=torch.bool)
        is_last[awaited] = False
        h = torch.zeros_like(prepared)
        h[is_last] = cell.mlp_update(prepared[is_last])
        for mask in edge_masks(awaited.numpy(), waiting.numpy(), len(batch.x)):
            sends = torch.zeros_like(is_last)
            sends[waiting[mask]] = True
            receives = torch.zeros_like(is_last)
            receives[awaited[mask]] = True
            message = torch.zeros_like(h)
            message[sends] = cell.mlp_msg(h[sends])
            total = torch.zeros_like(h).index_add(0, awaited[mask], message[waiting[mask]])
            h = h.clone()
            h[receives] = prepared[receives] + cell.mlp_update(total[receives])
        return h


def edge_masks(source: np.ndarray, target: np.ndarray, num_stages: int) -> list[Tensor]:
    """Return the edges among each level and its successors, as masks; the last level first."""
    depth = np.zeros(num_stages, dtype=np.int64)
    while (late := depth[target] <= depth[source]).any():
        np.maximum.at(depth, target[late], depth[source[late]] + 1)
    masks = []
    for level in range(depth.max(initial=0)):
        inside = depth == level
        inside[target[inside[source]]] = True
        masks.append(torch.from_numpy(inside[source] & inside[target]))
    return masks[::-1]


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Return the median processor time of a call."""
    times = []
    for _ in range(rounds + 1):
        start = time.process_time()
        run()
        times.append(1e3 * (time.process_time() - start))
    return median(times[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare decisions and scores with the published ones, and print times."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    states, published = read_episode(options.folder / "episode.npz")
    model = Scheduler.pretrained(np.load(options.folder / "decima_model.npz"))
    sizes = [len(scores) for scores in published]
    with torch.no_grad():
        scores = [each.numpy() for each in model(Batch(states)).split(sizes)]
    pairs = list(zip(scores, published, strict=True))
    same = sum(ours.argmax() == theirs.argmax() for ours, theirs in pairs)
    difference = max(abs(ours - theirs).max() for ours, theirs in pairs)
    print(f"{same} of {len(states)} decisions the same; scores differ by {difference:.1e}")
    some = states[::10]
    weights = list(model.layer.parameters())

    def decide(batches: list[list[State]], embed: Callable[[Batch], Tensor]) -> None:
        with torch.no_grad():
            for part in batches:
                model(Batch(part), embed)

    def differentiate(batches: list[list[State]], embed: Callable[[Batch], Tensor]) -> None:
        for part in batches:
            torch.autograd.grad(embed(Batch(part)).sum(), weights, allow_unused=True)

    for title, batches in {"one by one": [[each] for each in some], "one batch": [some]}.items():
        for run in (decide, differentiate):
            loop = milliseconds(partial(run, batches, model.embed_by_masks), options.rounds)
            ours = milliseconds(partial(run, batches, model.embed), options.rounds)
            text = f"loop {loop / len(some):.3f} ms per state, ours {ours / len(some):.3f} ms"
            print(f"{len(some)} states, {title}, {run.__name__}: {text}", flush=True)


if __name__ == "__main__":
    main()
