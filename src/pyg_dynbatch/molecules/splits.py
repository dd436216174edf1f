"""TEMPORARY."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Split:
    train: object
    val: object
    test: object


@dataclass(frozen=True)
class SplitOptions:
    method: str = "random"
    seed: int | None = None
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)


def make_split(options, seed, *, smiles, targets, target_names, kind, column):
    n = len(smiles)
    order = np.random.default_rng(seed).permutation(n)
    a = int(0.8 * n)
    b = int(0.9 * n)
    return Split(np.sort(order[:a]), np.sort(order[a:b]), np.sort(order[b:]))


def describe_leakage(split, smiles):
    return "leakage"
