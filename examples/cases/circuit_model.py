"""A recursive cell that estimates signal probabilities, and its training on cones.

The state of a gate holds 16 learned numbers, its estimated probability, and 64 simulated patterns,
which show how far two signals are correlated. The estimate is a weighted mean of two: the formula
p(a) p(b), corrected within the bounds of Frechet, and the share of the patterns.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from circuit_data import Circuit, shared_inputs
from torch import Tensor, nn

from pyg_dynbatch import Levels, schedule_structure
from pyg_dynbatch.nn import RecursiveCell, RecursiveLayer

INPUTS = 6  # width of an input row, see GateCell


class GateCell(RecursiveCell):
    """Estimate p(a AND b) for many gates at once.

    Input rows: for a gate, whether each of its two signals is inverted, and how they are related
    (:func:`shared_inputs`); for an input of the circuit its probability, twice, and zeros.
    """

    def __init__(self, width: int = 16, patterns: int = 64) -> None:
        super().__init__(INPUTS, width, arity=2)
        self.state_channels = (width, 1, patterns)
        self.start = nn.Parameter(torch.zeros(width))
        self.hidden = nn.Linear(3 * width + 11 + INPUTS - 2, 64)
        self.out = nn.Linear(64, width + 2)

    def leaf(self, x: Tensor) -> tuple[Tensor, ...]:
        """Draw the patterns of the circuit's inputs."""
        bits = torch.rand(x.size(0), self.state_channels[2], device=x.device) < x[:, :1]
        return self.start.expand(x.size(0), -1), x[:, :1], bits

    def step(self, x: Tensor, children: Any) -> tuple[Tensor, ...]:
        """Compute the states of gates; see the head of this file."""
        if children is None:
            return self.leaf(x)
        inverted, (h, p, bits) = x[:, :2, None], children
        # Inverting a signal changes the sign of half of its learned numbers.
        even, odd = h.chunk(2, dim=2)
        a, b = torch.cat([even, odd * (1 - 2 * inverted)], 2).unbind(1)
        (u, v), bits = (inverted - p).abs().unbind(1), bits ^ (inverted > 0)
        both = bits[:, 0] & bits[:, 1]
        counted, (left, right) = mean(both), mean(bits).unbind(1)
        product, covariance = u * v, counted - left * right
        low, high = (u + v - 1).clamp(min=0), torch.minimum(u, v)
        share = ((product - low) / (high - low + 1e-6)).clamp(0.02, 0.98).logit()
        known = [u + v, product, (u - v).abs(), low, high, high - low, share, counted, covariance]
        known += [(product + covariance - low) / (high - low + 1e-2), inverted.sum(1), x[:, 2:]]
        found = self.out(self.hidden(torch.cat([a + b, a * b, (a - b).abs(), *known], 1)).relu())
        change, weight, learned = found.split([1, 1, found.size(1) - 2], 1)
        corrected = low + (high - low) * torch.sigmoid(share + change)
        # Without learning, the patterns have a twentieth of the weight.
        weight = torch.sigmoid(weight - 3)
        return learned.tanh(), corrected + weight * (counted - corrected), both


def mean(bits: Tensor) -> Tensor:
    """Return the share of ones along the last axis, which is kept."""
    return bits.float().mean(-1, keepdim=True)


@dataclass(eq=False)
class Batch:
    """Some circuits as one graph, with a label for every node."""

    x: Tensor
    edge_index: Tensor
    schedule: Levels
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
    schedule = schedule_structure(edge_index, first, arity=2)
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
        total = 0.0
        for batch in random.Random(epoch).sample(batches, len(batches)):
            loss = (estimate(layer, batch) - batch.label[batch.is_gate]).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            rate.step()
            total += float(loss.detach())
        print(f"epoch {epoch}: mean absolute error {total / len(batches):.4f}", flush=True)
