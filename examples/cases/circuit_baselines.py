"""Estimates of signal probabilities without a network; the blends are fitted on cones."""

from collections.abc import Callable

import numpy as np
from circuit_data import Circuit, independent, levels_of, simulated

Guess = Callable[[Circuit], np.ndarray]  # one probability per gate


def formula(circuit: Circuit) -> np.ndarray:
    """Estimate by p(a AND b) = p(a) p(b)."""
    return independent(circuit)[circuit.first_gate :]


def patterns(circuit: Circuit, words: int = 1) -> np.ndarray:
    """Count the ones among 64 random patterns per word."""
    return simulated(circuit, words, 1)[circuit.first_gate :]


def level_range(circuit: Circuit, count: int) -> np.ndarray:
    """Return the range of levels that each gate is in: 0, 1, 2-3, 4-7, …, and all further ones."""
    found = np.zeros(len(circuit.sources), dtype=np.int64)
    for level, gates in enumerate(levels_of(circuit)):
        found[gates] = min(level.bit_length(), count - 1)
    return found


def fit_blend(cones: list[Circuit], labels: list[np.ndarray], ranges: int) -> Guess:
    """Fit a weighted mean of formula and 64 patterns, with a weight per range of levels."""
    kinds = (lambda cone: level_range(cone, ranges)), formula, patterns
    place, f, p = (np.concatenate(list(map(kind, cones))) for kind in kinds)
    pairs = zip(cones, labels, strict=True)
    label = np.concatenate([values[cone.first_gate :] for cone, values in pairs])
    tried = np.linspace(0, 1, 51)
    totals = [np.bincount(place, np.abs(w * f + (1 - w) * p - label), ranges) for w in tried]
    weights = tried[np.argmin(totals, 0)]

    def blend(circuit: Circuit) -> np.ndarray:
        weight = weights[level_range(circuit, ranges)]
        return weight * formula(circuit) + (1 - weight) * patterns(circuit)

    return blend
