"""Read and-inverter graphs, cut cones out of them, and compute signal probabilities.

In an and-inverter graph every gate is an AND of two signals, each of which may be inverted. The
signal probability of a gate is the share of input patterns for which it is 1. Two ways to compute
it: simulation, and the formula p(a AND b) = p(a) p(b), which is exact if the two signals of every
gate are independent, as in trees.
"""

import random
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(eq=False)
class Circuit:
    """Nodes in topological order: the constant 0, the inputs, the gates.

    Args:
        name: Name of the circuit.
        num_inputs: Number of inputs.
        sources: The two nodes that each gate reads, ``[gate, 2]``.
        inverted: Whether it reads them inverted, ``[gate, 2]``.
    """

    name: str
    num_inputs: int
    sources: np.ndarray
    inverted: np.ndarray

    @property
    def first_gate(self) -> int:
        """Number of the first gate."""
        return 1 + self.num_inputs

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.first_gate + len(self.sources)

    @property
    def edge_index(self) -> Tensor:
        """Edges from the signals to the gates that read them, ``[2, 2 * gate]``."""
        gates = np.arange(self.first_gate, self.num_nodes).repeat(2)
        return torch.from_numpy(np.stack([self.sources.ravel(), gates]))


def read_circuit(path: Path) -> Circuit:
    """Read a binary AIGER file without latches."""
    from aigverse.io import read_aiger_into_aig

    graph = read_aiger_into_aig(path)
    tensors = graph.to_graph_tensors(levels=False)
    # Edges come gate by gate; those to the outputs are the last.
    gates = graph.num_gates
    source = torch.from_dlpack(tensors["edge_index"])[0, : 2 * gates].view(gates, 2).numpy()
    inverted = torch.from_dlpack(tensors["edge_attr"])[: 2 * gates].view(gates, 2).numpy() > 0
    return Circuit(path.stem, graph.num_pis, source, inverted)


def cut_cone(circuit: Circuit, root: int, size: int) -> Circuit:
    """Return up to ``size`` gates that a gate depends on, the nearest; what they read is input."""
    waiting, inside, first = [-root], [], circuit.first_gate
    seen = {0, root}
    while waiting and len(inside) < size and -waiting[0] >= first:
        gate = -heappop(waiting)
        inside.append(gate)
        for source in circuit.sources[gate - first].tolist():
            if source not in seen:
                seen.add(source)
                heappush(waiting, -source)
    order = np.array([0, *sorted(-each for each in waiting), *reversed(inside)])
    number = dict(zip(order.tolist(), range(len(order)), strict=True))
    gates = order[len(order) - len(inside) :] - first
    sources = [[number[s] for s in pair] for pair in circuit.sources[gates].tolist()]
    inverted = circuit.inverted[gates]
    return Circuit(circuit.name, len(waiting), np.array(sources).reshape(-1, 2), inverted)


def draw_cones(circuits: list[Circuit], count: int, seed: int = 0) -> list[Circuit]:
    """Cut cones of up to 30, 150 or 750 gates at random gates, as many from each circuit."""
    rng, cones = random.Random(seed), []
    for circuit in (circuits[number % len(circuits)] for number in range(count)):
        root = rng.randrange(circuit.first_gate, circuit.num_nodes)
        cones.append(cut_cone(circuit, root, rng.choice([30, 150, 750])))
    return cones


def shared_inputs(circuit: Circuit) -> np.ndarray:
    """Count how the two signals of each gate are related, ``[gate, 4]``.

    The signals that both are made of directly, equal and inverted; and whether one is among those
    that the other is made of, equal and inverted. This shows an exclusive or and a multiplexer.
    """
    signal = 2 * circuit.sources + circuit.inverted
    made_of = np.full((circuit.num_nodes, 2), -2)
    made_of[circuit.first_gate :] = signal
    a, b = made_of[circuit.sources].swapaxes(0, 1)[:, :, :, None]  # [gate, 2, 1] each
    counts = []
    for flip in (0, 1):
        both = ((a ^ flip) == b.swapaxes(1, 2)) & (a >= 0)
        inside = (a == signal[:, 1:, None] ^ flip) | (b == signal[:, :1, None] ^ flip)
        counts += [both.sum((1, 2)), inside.sum((1, 2))]
    return np.stack(counts, 1)


def levels_of(circuit: Circuit) -> list[np.ndarray]:
    """List the gates level by level, numbered from 0."""
    level = [0] * circuit.num_nodes
    for gate, (a, b) in enumerate(circuit.sources.tolist(), circuit.first_gate):
        level[gate] = 1 + max(level[a], level[b])
    of_gate = np.array(level[circuit.first_gate :])
    order = of_gate.argsort(kind="stable")
    return np.split(order, np.bincount(of_gate)[1:].cumsum()[:-1])


def simulated(circuit: Circuit, words: int = 64, rounds: int = 16, seed: int = 0) -> np.ndarray:
    """Return the share of random patterns for which each node is 1; 64 patterns per word."""
    rng, levels = np.random.default_rng(seed), levels_of(circuit)
    flip = np.where(circuit.inverted, np.uint64(2**64 - 1), np.uint64(0))[:, :, None]
    ones, bits = np.zeros(circuit.num_nodes), np.zeros((circuit.num_nodes, words), np.uint64)
    inputs = slice(1, circuit.first_gate)
    for _ in range(rounds):
        bits[inputs] = rng.integers(0, 2**64, (circuit.num_inputs, words), np.uint64)
        for gates in levels:
            a, b = circuit.sources[gates].T
            left, right = bits[a] ^ flip[gates, 0], bits[b] ^ flip[gates, 1]
            bits[gates + circuit.first_gate] = left & right
        ones += np.bitwise_count(bits).sum(1)
    return ones / (64 * words * rounds)


def independent(circuit: Circuit) -> np.ndarray:
    """Return the probabilities by the formula p(a AND b) = p(a) p(b)."""
    p = np.full(circuit.num_nodes, 0.5)
    p[0] = 0
    for gates in levels_of(circuit):
        each = np.abs(circuit.inverted[gates] - p[circuit.sources[gates]])
        p[gates + circuit.first_gate] = each.prod(1)
    return p
