"""The policy of Decima (Mao et al. 2019): a network that scores the stages of jobs on a cluster.

A job is a DAG of stages. Messages go against its edges, from the stages that wait to those that
they wait for, so that a stage knows the work behind it; sums over the stages of a job and over all
jobs follow. The weights are those of ``models/decima/model.pt`` of spark-sched-sim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional

from pyg_dynbatch import Levels, RaggedRows, schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

EXECUTORS, SLOPE = 50, 0.2


def mlp(width: int, hidden: Sequence[int], out: int, activation: nn.Module) -> nn.Sequential:
    """Create layers with an activation between them."""
    widths, layers = [width, *hidden, out], list[nn.Module]()
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b), activation]
    return nn.Sequential(*layers[:-1])


def encoder(width: int) -> nn.Sequential:
    """Create one of the five networks that encode stages, messages, jobs and the state."""
    return mlp(width, [32, 16], 16, nn.LeakyReLU(SLOPE))


class StageCell(RecursiveCell):
    """Compute ``p + update(sum of msg(h) over the successors)``, or ``update(p)`` without any."""

    def __init__(self) -> None:
        super().__init__(5, 16, arity=None)
        self.mlp_prep, self.mlp_msg, self.mlp_update = encoder(5), encoder(16), encoder(16)

    def project(self, x: Tensor) -> Tensor:
        """Compute p for all stages at once."""
        return self.mlp_prep(x)

    def step(self, projected: Tensor, children: RaggedRows | None) -> tuple[Tensor]:
        """Compute the states of many stages; see the class."""
        if children is None:
            return (self.mlp_update(projected),)
        messages = self.mlp_msg(children.rows[0])
        total = torch.zeros_like(projected).index_add(0, children.segment_ids, messages)
        return (projected + self.mlp_update(total),)

    def run_schedule(
        self,
        schedule: Levels,
        inputs: Tensor,
        leaf_inverse: Tensor | None = None,
        level_order: bool = False,
    ) -> tuple[Tensor] | None:
        """Run all levels in one autograd function, which a single small state needs to be fast."""
        if leaf_inverse is not None or not 0 < schedule.num_nodes == schedule.num_inputs:
            return None
        weights = *self.mlp_msg.parameters(), *self.mlp_update.parameters()
        h = _Levels.apply(schedule, self.project(inputs), *weights)
        return (h if level_order else h.index_select(0, schedule.row - 1),)


class _Levels(Function):
    """Compute all states, and their derivatives; those of the weights once for all levels."""

    @staticmethod
    def forward(ctx: Any, schedule: Levels, prepared: Tensor, *weights: Tensor) -> Tensor:
        h, counts = torch.empty_like(prepared), schedule.level_children
        edges = (schedule.children - 1).split(counts), schedule.child_segment.split(counts)
        nodes = prepared.split(schedule.level_sizes), h.split(schedule.level_sizes)
        kept = list[tuple[list[Tensor], list[Tensor]]]()
        for own, out, index, ids in zip(*nodes, *edges, strict=True):
            sent = layers(h.index_select(0, index), weights[:6]) if kept else []
            total = torch.zeros_like(own).index_add_(0, ids, sent[-1]) if sent else own
            found = layers(total, weights[6:])
            torch.add(own, found[-1], out=out) if sent else out.copy_(found[-1])
            kept.append((sent, found))
        ctx.kept, ctx.edges, ctx.sizes = kept, edges, schedule.level_sizes
        ctx.save_for_backward(*weights)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, to_h = ctx.saved_tensors, gradient.clone()
        of_sent, of_found = list[list[Tensor]](), list[list[Tensor]]()
        levels = zip(to_h.split(ctx.sizes), *ctx.edges, ctx.kept, strict=True)
        for own, index, ids, (sent, found) in reversed([*levels]):
            # The parents of a level are above it, so its gradients are complete.
            of_found.append(derivatives(found, weights[6:], own))
            if sent:
                messages = of_found[-1][0].index_select(0, ids)
                of_sent.append(derivatives(sent, weights[:6], messages))
                to_h.index_add_(0, index, of_sent[-1][0])
        of_update = of_weights([found for _, found in ctx.kept], of_found[::-1])
        of_msg = list(map(torch.zeros_like, weights[:6]))
        if of_sent:
            of_msg = of_weights([sent for sent, _ in ctx.kept[1:]], of_sent[::-1])
        to_h[: ctx.sizes[0]] = of_found[-1][0]  # now those of the prepared inputs
        return None, to_h, *of_msg, *of_update


def layers(rows: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs of the three linear layers of an encoder, and the result."""
    found = [rows]
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        if len(found) > 1:
            functional.leaky_relu_(found[-1], SLOPE)
        found.append(torch.addmm(bias, found[-1], weight.t()))
    return found


def derivatives(found: list[Tensor], weights: Sequence[Tensor], own: Tensor) -> list[Tensor]:
    """Return the derivatives by the input of an encoder, and by the results of its layers."""
    by = [own]
    for number in (2, 1, 0):
        own = own @ weights[2 * number]
        if number:
            own = torch.ops.aten.leaky_relu_backward(own, found[number], SLOPE, True)
        by.insert(0, own)
    return by


def of_weights(found: list[list[Tensor]], by: list[list[Tensor]]) -> list[Tensor]:
    """Return the derivatives by the weights of an encoder, of all levels at once."""
    rows, grads = (list(map(torch.cat, zip(*each, strict=True))) for each in (found, by))
    parts = ([g.t() @ x, g.sum(0)] for x, g in zip(rows[:3], grads[1:], strict=True))
    return [part for pair in parts for part in pair]


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


@dataclass(eq=False)
class Batch:
    """States side by side.

    Args:
        x: Features of the stages.
        job: Job of each stage.
        first: First stage of each job.
        state: State of each job.
        ready: Stages that may start.
        caps: How many executors each job may still be given.
        unconnected: Stages of states without any edge.
        edges: From the stage that waits to the one that it waits for, ``[2, edge]``.
        sizes: Number of stages of each state.
    """

    x: Tensor
    job: Tensor
    first: Tensor
    state: Tensor
    ready: Tensor
    caps: Tensor
    unconnected: Tensor
    edges: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, states: Sequence[State], dtype: torch.dtype = torch.float32) -> "Batch":
        """Put states side by side."""
        sizes = [len(state.x) for state in states]
        start = np.cumsum([0, *sizes])
        edges = [state.edges + first for state, first in zip(states, start, strict=False)]
        # From the child, the stage that waits, to its parent.
        edge_index = np.ascontiguousarray(np.concatenate(edges)[:, ::-1].T)
        lengths = np.concatenate([np.diff(state.ptr) for state in states])
        jobs = [len(state.caps) for state in states]
        empty = np.repeat([not len(state.edges) for state in states], sizes)
        arrays = [
            np.repeat(np.arange(len(lengths)), lengths),
            np.cumsum(lengths) - lengths,
            np.repeat(np.arange(len(states)), jobs),
            np.flatnonzero(np.concatenate([state.ready for state in states])),
            np.concatenate([state.caps for state in states]),
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
    """Score stages, and numbers of executors; see the head of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = RecursiveLayer(StageCell())
        self.dag, self.glob = encoder(5 + 16), encoder(16)
        self.stage = mlp(5 + 3 * 16, [64, 64], 1, nn.Tanh())
        self.exec = mlp(3 + 2 * 16 + 1, [64, 64], 1, nn.Tanh())

    @classmethod
    def of_spark_sched_sim(cls, arrays: Mapping[str, Any]) -> "Scheduler":
        """Create the network with the weights of ``DecimaScheduler`` of that simulator."""
        names = {
            "encoder.node_encoder.": "layer.cell.",
            "encoder.dag_encoder.mlp": "dag",
            "encoder.global_encoder.mlp": "glob",
            "stage_policy_network.mlp_score": "stage",
            "exec_policy_network.mlp_score": "exec",
        }
        found = dict[str, Tensor]()
        for name, array in arrays.items():
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
        dags = h.new_zeros(len(batch.first), 16).index_add(0, job, self.dag(torch.cat([x, h], 1)))
        states = h.new_zeros(len(batch.sizes), 16).index_add(0, batch.state, self.glob(dags))
        ready = batch.ready
        of_job = job.index_select(0, ready)
        of_state = batch.state.index_select(0, of_job)
        rows = [x[ready], h[ready], dags[of_job], states[of_state]]
        return Found(h, dags, states, self.stage(torch.cat(rows, 1))[:, 0])

    def executors(self, batch: Batch, found: Found, jobs: Tensor) -> Tensor:
        """Score how many executors jobs are given: ``caps`` scores per job, one after another."""
        caps = batch.caps.index_select(0, jobs)
        row = jobs.repeat_interleave(caps)
        number = torch.arange(len(row)) - (caps.cumsum(0) - caps).repeat_interleave(caps)
        x = batch.x[batch.first[row], :3]
        share = (number / EXECUTORS).to(x)[:, None]
        rows = [x, found.h_dag[row], found.h_glob[batch.state[row]], share]
        return self.exec(torch.cat(rows, 1))[:, 0]
