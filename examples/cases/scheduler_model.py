"""The policy of Decima (Mao et al. 2019): a network that scores the stages of jobs on a cluster.

A job is a DAG of stages, which the cell of ``scheduler_cell.py`` embeds; sums over the stages of a
job and over all jobs follow. Weights: ``models/decima/model.pt`` of spark-sched-sim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scheduler_cell import StageCell, encoder, mlp
from scheduler_data import State, joined_edges
from torch import Tensor, nn

from pyg_dynbatch import Levels, schedule_structure
from pyg_dynbatch.nn import RecursiveLayer


@dataclass(eq=False)
class Batch:
    """States side by side.

    Args:
        x: Features of the stages.
        job: Job of each stage.
        state: State of each job.
        ready: Stages that may start.
        unconnected: Stages of states without any edge.
        edges: From the stage that waits to the one that it waits for, ``[2, edge]``.
        sizes: Number of stages of each state.
    """

    x: Tensor
    job: Tensor
    state: Tensor
    ready: Tensor
    unconnected: Tensor
    edges: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, states: Sequence[State], dtype: torch.dtype = torch.float32) -> "Batch":
        """Put states side by side."""
        sizes = [len(state.x) for state in states]
        # From the child, the stage that waits, to its parent.
        edge_index = np.ascontiguousarray(joined_edges(states)[:, ::-1].T)
        lengths = np.concatenate([np.diff(state.ptr) for state in states])
        jobs = [len(state.ptr) - 1 for state in states]
        empty = np.repeat([not len(state.edges) for state in states], sizes)
        arrays = [
            np.repeat(np.arange(len(lengths)), lengths),
            np.repeat(np.arange(len(states)), jobs),
            np.flatnonzero(np.concatenate([state.ready for state in states])),
            np.flatnonzero(empty),
        ]
        x = torch.from_numpy(np.concatenate([state.x for state in states])).to(dtype)
        return cls(x, *map(torch.from_numpy, [*arrays, edge_index]), sizes)

    @cached_property
    def schedule(self) -> Levels:
        """Levels of all states."""
        return schedule_structure(self.edges, len(self.x), example_sizes=self.sizes)


class Found(NamedTuple):
    """Embeddings of stages, jobs and states, and the scores of the ready stages."""

    h_node: Tensor
    h_dag: Tensor
    h_glob: Tensor
    stage_scores: Tensor


class Scheduler(nn.Module):
    """Score stages; see the head of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = RecursiveLayer(StageCell())
        self.dag, self.glob = encoder(5 + 16), encoder(16)
        self.stage = mlp(5 + 3 * 16, [64, 64], 1, nn.Tanh())

    @classmethod
    def of_spark_sched_sim(cls, arrays: Mapping[str, Any]) -> "Scheduler":
        """Create the network with the weights of ``DecimaScheduler`` of that simulator.

        Those of its last part, which chooses how many executors a job is given, are left out.
        """
        names = {
            "encoder.node_encoder.": "layer.cell.",
            "encoder.dag_encoder.mlp": "dag",
            "encoder.global_encoder.mlp": "glob",
            "stage_policy_network.mlp_score": "stage",
        }
        found = dict[str, Tensor]()
        for name, array in arrays.items():
            if name.startswith("exec_policy_network."):
                continue
            prefix = next((each for each in names if name.startswith(each)), "")
            found[names.get(prefix, "") + name[len(prefix) :]] = torch.as_tensor(array)
        model = cls()
        model.load_state_dict(found)
        return model

    def forward(self, batch: Batch) -> Found:
        """Embed states, and score their ready stages."""
        return self.score(batch, self.layer(batch.x, None, batch.schedule))

    def score(self, batch: Batch, h: Tensor) -> Found:
        """Embed jobs and states, given the states of the stages, and score the ready ones."""
        x, job = batch.x, batch.job
        if len(batch.unconnected):
            # A state without edges is not passed through the update, whatever else is in the batch.
            alone = self.layer.cell.mlp_prep(x[batch.unconnected])
            h = h.index_copy(0, batch.unconnected, alone)
        dags = h.new_zeros(len(batch.state), 16).index_add(0, job, self.dag(torch.cat([x, h], 1)))
        states = h.new_zeros(len(batch.sizes), 16).index_add(0, batch.state, self.glob(dags))
        ready = batch.ready
        of_job = job.index_select(0, ready)
        of_state = batch.state.index_select(0, of_job)
        rows = [x[ready], h[ready], dags[of_job], states[of_state]]
        return Found(h, dags, states, self.stage(torch.cat(rows, 1))[:, 0])
