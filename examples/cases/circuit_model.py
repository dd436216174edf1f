"""A recursive cell that estimates signal probabilities, and its training on small circuits.

The state of a gate holds its estimated probability, 64 simulated patterns, which show how far two
signals are correlated, and 16 learned numbers. The estimate stays within the bounds of Frechet,
which hold for any dependence of the two signals.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from circuit_data import Circuit, shared_inputs
from torch import Tensor, nn

from pyg_dynbatch import Schedule
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

INPUTS = 6  # width of an input row, see GateCell


class GateCell(RecursiveCell):
    """Estimate p(a AND b) for many gates at once, from estimates and patterns of a and b.

    Input rows: for a gate, whether each of its two signals is inverted, and how they are related
    (:func:`shared_inputs`); for an input of the circuit its probability, twice, and zeros.
    """

    def __init__(self, width: int = 16, patterns: int = 64) -> None:
        super().__init__(INPUTS, width, arity=2)
        self.state_channels = (width, 1, patterns)
        self.start = nn.Parameter(torch.zeros(width))
        self.hidden = nn.Linear(3 * width + 11 + INPUTS - 2, 64)
        self.out = nn.Linear(64, width + 1)

    def leaf(self, x: Tensor) -> tuple[Tensor, ...]:
        """Draw the patterns of the circuit's inputs."""
        bits = torch.rand(x.size(0), self.state_channels[2], device=x.device) < x[:, :1]
        return self.start.expand(x.size(0), -1), x[:, :1], bits.to(x.dtype)

    def step(self, x: Tensor, children: Any) -> tuple[Tensor, ...]:
        """Correct the formula of independent signals, within what any dependence allows."""
        if children is None:
            return self.leaf(x)
        inverted, (h, p, bits) = x[:, :2, None], children
        p, bits = (inverted - p).abs(), (inverted - bits).abs()
        # Inverting a signal changes the sign of half of its learned numbers.
        even, odd = h.chunk(2, dim=2)
        a, b = torch.cat([even, odd * (1 - 2 * inverted)], 2).unbind(1)
        (u, v), both = p.unbind(1), bits.prod(1)
        counted = both.mean(1, keepdim=True)
        covariance = counted - bits.mean(2).prod(1, keepdim=True)
        low, high = (u + v - 1).clamp(min=0), torch.minimum(u, v)
        share = ((u * v - low) / (high - low + 1e-6)).clamp(0.02, 0.98).logit()
        known = [u + v, u * v, (u - v).abs(), low, high, high - low, share, counted, covariance]
        known += [(u * v + covariance - low) / (high - low + 1e-2), inverted.sum(1), x[:, 2:]]
        found = self.out(self.hidden(torch.cat([a + b, a * b, (a - b).abs(), *known], 1)).relu())
        learned, change = found[:, 1:].tanh(), found[:, :1]
        return learned, low + (high - low) * torch.sigmoid(share + change), both


@dataclass(eq=False)
class Batch:
    """Some circuits as one graph, with a label for every node."""

    x: Tensor
    edge_index: Tensor
    schedule: Schedule
    label: Tensor
    is_gate: Tensor


def batch_of(circuits: list[Circuit], labels: list[np.ndarray]) -> Batch:
    """Put circuits side by side."""
    rows, edges, first = [], [], 0
    for circuit in circuits:
        x = np.zeros((circuit.num_nodes, INPUTS), dtype=np.float32)
        x[1 : circuit.first_gate, :2] = 0.5
        x[circuit.first_gate :] = np.hstack([circuit.inverted, shared_inputs(circuit)])
        rows.append(torch.from_numpy(x))
        edges.append(circuit.edge_index + first)
        first += circuit.num_nodes
    gates = [torch.arange(each.num_nodes) >= each.first_gate for each in circuits]
    edge_index, label = torch.cat(edges, 1), torch.from_numpy(np.concatenate(labels)).float()
    schedule = Schedule.from_structure(edge_index, first, arity=2)
    return Batch(torch.cat(rows), edge_index, schedule, label, torch.cat(gates))


def estimate(layer: RecursiveLayer, batch: Batch) -> Tensor:
    """Return the estimated probabilities of all gates."""
    state = layer(batch.x, batch.edge_index, batch.schedule, return_state=True)
    return state[1][batch.is_gate, 0]


def train(layer: RecursiveLayer, batches: list[Batch], epochs: int) -> None:
    """Minimise the mean absolute error on cones."""
    optimizer = torch.optim.Adam(layer.parameters())
    steps = epochs * len(batches)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    for epoch in range(epochs):
        for batch in random.Random(epoch).sample(batches, len(batches)):
            loss = (estimate(layer, batch) - batch.label[batch.is_gate]).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            rate.step()
        print(f"epoch {epoch}, mean absolute error of the last {len(batch.label)} nodes {loss:.4f}")
