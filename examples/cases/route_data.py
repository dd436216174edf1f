"""Synthesis routes: read them from AiZynthFinder, draw new ones, and compute edit distances.

The distance is that of ordered trees whose children are sorted by SMILES: to add or remove a
molecule costs 1, to change one the Jaccard distance of its Morgan fingerprint.
"""

import random
from functools import cache, lru_cache
from itertools import combinations
from typing import Any

import numpy as np
import torch
from rdkit import Chem, DataStructs
from rdkit.Chem import BRICS, rdFingerprintGenerator
from torch import Tensor

from pyg_dynbatch.data import DynTreeData

BITS = 1024
Pairs = tuple[Tensor, Tensor]  # two routes each, [2, pair], and their distances
Route = tuple[str, tuple["Route", ...]]  # a molecule, and the routes to what it is made from
Part = tuple[list[Route], Pairs]  # of the data: some routes, and pairs of them


def of_planner(node: dict[str, Any]) -> Route:
    """Read a route of AiZynthFinder; reactions are left out."""
    below = [m for reaction in node.get("children", []) for m in reaction["children"]]
    return Chem.CanonSmiles(node["smiles"]), tuple(sorted(map(of_planner, below)))


@cache
def cuts(smiles: str) -> list[tuple[str, ...]]:
    """List the pairs of molecules that a molecule can be cut into."""
    mol, found = Chem.MolFromSmiles(smiles), []
    for (first, second), _ in BRICS.FindBRICSBonds(mol) if mol.GetNumHeavyAtoms() > 8 else ():
        bond = mol.GetBondBetweenAtoms(first, second).GetIdx()
        parts = Chem.MolToSmiles(Chem.FragmentOnBonds(mol, [bond], addDummies=False)).split(".")
        if len(parts) == 2 and all(Chem.MolFromSmiles(part) for part in parts):
            found.append(tuple(map(Chem.CanonSmiles, parts)))
    return found


def draw(smiles: str, rng: random.Random, depth: int = 0) -> Route:
    """Draw a route; molecules that cannot be cut, and some others, are starting materials."""
    if not (found := cuts(smiles)) or depth == 4 or (depth and rng.random() < 0.3):
        return smiles, ()
    return smiles, tuple(sorted(draw(part, rng, depth + 1) for part in rng.choice(found)))


@cache
def fingerprint(smiles: str, bits: int = BITS) -> Any:
    """Compute a Morgan fingerprint of radius 2."""
    generator = rdFingerprintGenerator.GetMorganGenerator(2, fpSize=bits, includeChirality=True)
    return generator.GetFingerprint(Chem.MolFromSmiles(smiles))


def jaccard(one: str, other: str) -> float:
    """Return the Jaccard distance of two molecules."""
    return 1 - DataStructs.TanimotoSimilarity(fingerprint(one), fingerprint(other))


@lru_cache(100_000)
def edits(one: tuple[Route, ...], other: tuple[Route, ...]) -> float:
    """Compute the edit distance of two ordered forests by their last trees."""
    if not one or not other:
        return float(sum(map(size, one + other)))
    (a, below_a), (b, below_b) = one[-1], other[-1]
    deleted, inserted = one[:-1] + below_a, other[:-1] + below_b
    changed = edits(one[:-1], other[:-1]) + edits(below_a, below_b) + jaccard(a, b)
    return min(edits(deleted, other) + 1, edits(one, inserted) + 1, changed)


def molecules(route: Route) -> list[str]:
    """List the molecules of a route, the target first."""
    return [route[0], *(m for below in route[1] for m in molecules(below))]


def size(route: Route) -> int:
    """Count the molecules of a route."""
    return len(molecules(route))


def depth(route: Route) -> int:
    """Count the longest sequence of reactions."""
    return max((1 + depth(below) for below in route[1]), default=0)


def starting_materials(route: Route) -> list[str]:
    """List the molecules that are not made from others."""
    return [m for below in route[1] for m in starting_materials(below)] or [route[0]]


def tree(route: Route, bits: int = BITS) -> DynTreeData:
    """Create a tree with a fingerprint per molecule, the target first."""
    edges: list[tuple[int, int]] = []

    def add(node: Route, number: int) -> int:
        child = number + 1
        for below in node[1]:
            edges.append((child, number))
            child = add(below, child)
        return child

    add(route, 0)
    rows = [np.array(fingerprint(m, bits), dtype=np.float32) for m in molecules(route)]
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous()
    return DynTreeData(edge_index, x=torch.from_numpy(np.stack(rows)))


def pairs_of(routes: list[Route]) -> Pairs:
    """Compute the distances of all pairs of different routes to the same target."""
    groups: dict[str, list[int]] = {}
    for number, route in enumerate(routes):
        groups.setdefault(route[0], []).append(number)
    pairs = [pair for group in groups.values() for pair in combinations(group, 2)]
    return torch.tensor(pairs).t(), torch.tensor(
        [edits((routes[a],), (routes[b],)) for a, b in pairs]
    )


def features(routes: list[Route], pairs: Tensor) -> Tensor:
    """Compare the sizes and depths of routes, and their sets of molecules; for the baseline."""
    rows = []
    for a, b in pairs.t().tolist():
        one, other = routes[a], routes[b]
        row = [abs(len(molecules(one)) - len(molecules(other))), abs(depth(one) - depth(other))]
        for part in (molecules, starting_materials):
            mine, theirs = set(part(one)), set(part(other))
            row += [len(mine ^ theirs), 1 - len(mine & theirs) / len(mine | theirs)]
        rows.append([*row, 1.0])
    return torch.tensor(rows)
