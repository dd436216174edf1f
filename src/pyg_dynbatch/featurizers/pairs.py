"""Describe pairs of atoms as Kearnes and others (2016) do; and their double bonds' stereo."""

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8

from pyg_dynbatch.core.pair_table import DISCONNECTED, FAR, PairTable
from pyg_dynbatch.featurizers.atom_pair_features import PairFeatures
from pyg_dynbatch.featurizers.rdkit_access import Mol, bonds_of, chem

LONGEST = FAR - 1
BONDS = ("single", "double", "triple", "aromatic")
# Codes: 0 an atom with itself; 2k - 3 and 2k - 2 for a distance of k = 2, …, 8 bonds without and
# with a common ring (8 means farther than 7); 15 two fragments; from 16 on the bonds.
_DISCONNECTED_CODE = 15
FIRST_BOND = 16
NO_BOND = [
    (0, False),
    *((distance, ring) for distance in range(2, FAR + 1) for ring in (False, True)),
    (DISCONNECTED, False),
]
"""Distance and common ring of the codes before the first bond."""


class KearnesPairs(PairFeatures):
    """Describes pairs by the table of Kearnes: bond, distance and ring; 12 numbers, 26 codes.

    ======= ========================= ==== ==================================================
    columns feature                   kind of RDKit
    ======= ========================= ==== ==================================================
    4       single, double, triple,   bit  bond between the two; a dative or other bond and no
            aromatic                       bond have none of the bits
    7       within 1, …, 7 bonds      bit  shortest path, as a thermometer: 3 bonds apart is
                                           within 3, 4, … 7
    1       same ring                 bit  some symmetrised smallest ring holds both
    ======= ========================= ==== ==================================================

    The pair of an atom with itself is all zeros, as are pairs of different fragments and pairs
    more than 7 bonds apart without a common ring; their codes differ.

    Reference:
        Kearnes, McCloskey, Berndl, Pande, Riley (2016), Molecular graph convolutions: moving
        beyond fingerprints, arXiv:1603.00856, table 2.

    Example:
        >>> from rdkit import Chem
        >>> pairs = KearnesPairs()
        >>> codes = pairs.codes(Chem.MolFromSmiles("C=CC"))
        >>> pairs.table.features[int(codes[0, 2])].int().tolist()
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0]
        >>> pairs.table.distance[torch.from_numpy(codes).long()].tolist()
        [[0, 1, 2], [1, 0, 1], [2, 1, 0]]
    """

    def __init__(self) -> None:
        kinds = [(None, distance, ring) for distance, ring in NO_BOND]
        kinds += [
            (bond, 1, ring) for bond in (*range(len(BONDS)), len(BONDS)) for ring in (False, True)
        ]
        rows = [
            [
                *(bond == k for k in range(len(BONDS))),
                *(0 < distance <= k for k in range(1, LONGEST + 1)),
                ring,
            ]
            for bond, distance, ring in kinds
        ]
        names = (*BONDS, *(f"within_{k}" for k in range(1, LONGEST + 1)), "same_ring")
        distances = torch.tensor([distance for _, distance, _ in kinds])
        super().__init__(PairTable(torch.tensor(rows, dtype=torch.float32), names, distances))

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Gives the code of every pair.

        Args:
            mol: A sanitised ``rdkit.Chem.Mol``.

        Returns:
            A symmetric matrix of rows of the table.
        """
        kinds = bond_kinds()
        bonds = [
            (b.GetBeginAtomIdx(), b.GetEndAtomIdx(), FIRST_BOND + 2 * kinds.get(b.GetBondType(), 4))
            for b in bonds_of(mol)
        ]
        return coded_pairs(mol, bonds)


class DoubleBondStereo(PairFeatures):
    """Tells E from Z double bonds; an extra feature beside others, 2 numbers, 3 codes.

    A double bond without stereo, or with stereo not given, has neither bit.

    Example:
        >>> from rdkit import Chem
        >>> DoubleBondStereo().codes(Chem.MolFromSmiles("F/C=C/F"))[1].tolist()
        [0, 0, 1, 0]
    """

    def __init__(self) -> None:
        features, distances = torch.eye(3)[:, 1:], torch.tensor([0, 1, 1])
        super().__init__(PairTable(features, ("bond_E", "bond_Z"), distances))

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Gives the code of every pair.

        Args:
            mol: A sanitised ``rdkit.Chem.Mol``.

        Returns:
            1 for an E bond, 2 for a Z bond, else 0.
        """
        codes = np.zeros((mol.GetNumAtoms(),) * 2, dtype=np.uint8)
        stereo = chem().BondStereo
        for bond in bonds_of(mol):
            kind = bond.GetStereo()
            if kind == stereo.STEREOE or kind == stereo.STEREOZ:
                first, second = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
                codes[first, second] = codes[second, first] = 1 + (kind == stereo.STEREOZ)
        return codes


@cache
def bond_kinds() -> dict[Any, int]:
    """Numbers the four kinds of bonds that have a column; every other kind has none.

    Returns:
        From RDKit's bond type to the column.
    """
    kind = chem().BondType
    return {kind.SINGLE: 0, kind.DOUBLE: 1, kind.TRIPLE: 2, kind.AROMATIC: 3}


def coded_pairs(mol: Mol, bonds: list[tuple[int, int, int]]) -> UInt8[np.ndarray, "atom atom"]:
    """Codes all pairs from one distance matrix, the rings and the bonds.

    Args:
        mol: A sanitised ``rdkit.Chem.Mol``.
        bonds: First atom, second atom and code of every bond; a common ring adds 1 to it.

    Returns:
        A symmetric matrix of codes as described at the top of this file.
    """
    atoms = mol.GetNumAtoms()
    if not atoms:
        return np.zeros((0, 0), dtype=np.uint8)
    # Atoms of different fragments are 1e8 bonds apart, all others fewer than there are atoms.
    steps = np.minimum(chem().GetDistanceMatrix(mol, force=True), atoms).astype(np.intp)
    codes = _codes_by_distance(atoms).take(steps)
    if bonds:
        first, second, code = np.array(bonds, dtype=np.intp).T
        codes[first, second] = code
        codes[second, first] = code
    rings = mol.GetRingInfo().AtomRings()
    if rings:
        member = np.zeros((len(rings), atoms), dtype=np.float32)
        for row, ring in enumerate(rings):
            member[row, list(ring)] = 1
        codes += (member.T @ member) > 0
    codes.ravel()[:: atoms + 1] = 0
    return codes


@lru_cache(maxsize=2048)
def _codes_by_distance(atoms: int) -> UInt8[np.ndarray, " distance"]:
    distance = np.arange(atoms + 1)
    codes = (2 * np.minimum(distance, FAR) - 3).clip(0).astype(np.uint8)
    codes[atoms] = _DISCONNECTED_CODE
    return codes
