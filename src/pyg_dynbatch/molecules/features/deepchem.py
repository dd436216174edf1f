"""Atom and pair features of DeepChem's ``WeaveFeaturizer``, oddities included."""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from pyg_dynbatch.molecules.features.base import AtomFeatures, PairFeatures, RowTable
from pyg_dynbatch.molecules.features.kearnes import (
    BONDS,
    FIRST_BOND,
    LONGEST,
    NO_BOND,
    bond_matrix,
    coded_pairs,
)
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.features.rdkit_access import Mol, atoms_of, bonds_of, chem, columns_of

ELEMENTS = (
    *("C", "N", "O", "S", "F", "Si", "P", "Cl", "Br", "Mg", "Na", "Ca", "Fe", "As", "Al", "I"),
    *("B", "V", "K", "Tl", "Yb", "Sb", "Sn", "Ag", "Pd", "Co", "Se", "Ti", "Zn", "H", "Li", "Ge"),
    *("Cu", "Au", "Ni", "Cd", "In", "Mn", "Zr", "Cr", "Pt", "Hg", "Pb"),
)
HYBRIDIZATIONS = ("SP", "SP2", "SP3", "SP3D", "SP3D2")
STEREO = ("STEREONONE", "STEREOANY", "STEREOZ", "STEREOE")
_HIGHEST_DEGREE, _HIGHEST_VALENCE, _MOST_HYDROGENS = 10, 6, 4


class DeepChemAtoms(AtomFeatures):
    """Atom features: the 75 numbers of DeepChem's weave and graph convolution models.

    ======= =============================== ===== ============================================
    columns feature                         kind  oddities of DeepChem that are kept
    ======= =============================== ===== ============================================
    44      43 elements, unknown            bit
    11      number of neighbors 0 to 10     bit   (more raise there; here none of the bits)
    7       implicit valence 0 to 6         bit   more than 6 counts as 6; an atom written in
                                                  brackets has 0: ``[NH3]`` is not ``N``
    1       formal charge                   count
    1       radical electrons               count
    5       sp sp2 sp3 sp3d sp3d2           bit   anything else (s in Na+ and H2, sp2d in square
                                                  Pt, none in added hydrogens) counts as sp3d2
    1       aromatic                        bit
    5       hydrogens 0 to 4                bit   more than 4 count as 4; left out with
                                                  ``hydrogens=False``
    3       R, S, chirality possible        bit   only with `chirality`; the older labels that
                                                  RDKit leaves on atoms; any but R counts as S
    ======= =============================== ===== ============================================

    Differs: rows keep the order of the input (DeepChem renumbers the atoms of a SMILES, in a way
    that depends on how it is written), and are float32.

    Args:
        hydrogens: Whether hydrogens are counted; DeepChem does not when they are atoms.
        chirality: Whether there are columns for stereo centers.

    Reference:
        DeepChem, ``deepchem/feat/graph_features.py``, function ``atom_features``.

    Example:
        >>> from rdkit import Chem
        >>> atoms = DeepChemAtoms()
        >>> row = atoms.rows(Chem.MolFromSmiles("[Na+].[Cl-]"))[0]
        >>> [name for name, x in zip(atoms.names, row) if x]
        ['Na', 'degree_0', 'implicit_valence_0', 'formal_charge', 'sp3d2', 'hydrogens_0']
    """

    def __init__(self, hydrogens: bool = True, chirality: bool = False) -> None:
        self.hydrogens = hydrogens
        self.chirality = chirality
        counts = ("formal_charge", "radical_electrons")
        names = [*ELEMENTS, "unknown", *(f"degree_{k}" for k in range(_HIGHEST_DEGREE + 1))]
        names += [f"implicit_valence_{k}" for k in range(_HIGHEST_VALENCE + 1)]
        names += [*counts, *(name.lower() for name in HYBRIDIZATIONS), "aromatic"]
        names += [f"hydrogens_{k}" for k in range(_MOST_HYDROGENS + 1)] if hydrogens else []
        names += ["cip_R", "cip_S", "chirality_possible"] if chirality else []
        kinds = ["count" if name in counts else "bit" for name in names]
        super().__init__(names, kinds)
        self._table = RowTable(len(names))

    def rows(self, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
        """Return one row per atom."""
        atoms = atoms_of(mol)
        keys: list[Any] = [
            (
                atom.GetAtomicNum(),
                atom.GetDegree(),
                # The implicit valence under a name that all versions of RDKit have.
                atom.GetNumImplicitHs(),
                atom.GetFormalCharge(),
                atom.GetNumRadicalElectrons(),
                atom.GetHybridization(),
                atom.GetIsAromatic(),
                atom.GetTotalNumHs(),
            )
            for atom in atoms
        ]
        if self.chirality:
            stereo = [_stereo(atom) for atom in atoms]
            keys = [(*key, *more) for key, more in zip(keys, stereo, strict=True)]
        return self._table.rows(keys, self._make_row)

    def _make_row(self, key: tuple[Any, ...]) -> list[float]:
        number, degree, valence, charge, radicals, hybridization, aromatic, hydrogens, *more = key
        hybridizations = columns_of("HybridizationType", HYBRIDIZATIONS)
        row = [
            *_one_hot(_element_columns().get(number, len(ELEMENTS)), len(ELEMENTS) + 1),
            *_one_hot(degree, _HIGHEST_DEGREE + 1),
            *_one_hot(min(valence, _HIGHEST_VALENCE), _HIGHEST_VALENCE + 1),
            *(float(charge), float(radicals)),
            *_one_hot(hybridizations.get(hybridization, 4), len(HYBRIDIZATIONS)),
            float(aromatic),
        ]
        if self.hydrogens:
            row += _one_hot(min(hydrogens, _MOST_HYDROGENS), _MOST_HYDROGENS + 1)
        if self.chirality:
            label, possible = more
            row += [float(label == "R"), float(label not in ("", "R")), float(possible)]
        return row


class DeepChemPairs(PairFeatures):
    """Pair features: the 14 numbers of DeepChem's weave model; 46 codes.

    ======= ======================= ==== =======================================================
    columns feature                 kind oddities of DeepChem that are kept
    ======= ======================= ==== =======================================================
    4       single, double, triple, bit  other bonds, dative ones among them, have none
            aromatic
    1       conjugated bond         bit
    1       bond in a ring          bit
    4       no stereo, any, Z, E    bit  only with `chirality`; other stereo (cis, trans,
                                         atropisomers) counts as E
    1       same ring               bit  0 for an atom with itself
    7       1, …, 7 bonds apart     bit  one-hot; farther pairs have none
    ======= ======================= ==== =======================================================

    Differs: pairs of different fragments exist, as zeros with a separate code, and no pair is
    lost (DeepChem's powers of an adjacency matrix overflow in big molecules). For the pairs that
    DeepChem means to have, use ``PairTable.kept("connected")``.

    Args:
        chirality: Whether there are columns for the stereo of double bonds.

    Reference:
        DeepChem, ``deepchem/feat/graph_features.py``: ``bond_features``, ``pair_features``.

    Example:
        >>> from rdkit import Chem
        >>> pairs = DeepChemPairs()
        >>> code = int(pairs.codes(Chem.MolFromSmiles("C1CC1"))[0, 1])
        >>> pairs.table.features[code].int().tolist()
        [1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    """

    def __init__(self, chirality: bool = False) -> None:
        self.chirality = chirality
        stereo = STEREO if chirality else ()
        names = [name.lower() for name in (*BONDS, "conjugated", "bond_in_ring", *stereo)]
        no_bond = [0.0] * len(names)
        rows = [[*no_bond, ring, *_one_hot(distance - 1, LONGEST)] for distance, ring in NO_BOND]
        rings = ((False, False), (False, True), (True, True))
        kinds = product(range(len(BONDS) + 1), (False, True), range(max(1, len(stereo))), rings)
        for bond, conjugated, kind, (in_ring, same) in kinds:
            bond_row = [*_one_hot(bond, len(BONDS)), conjugated, in_ring]
            rows.append([*bond_row, *_one_hot(kind, len(stereo)), same, *_one_hot(0, LONGEST)])
        names += ["same_ring", *(f"distance_{k}" for k in range(1, LONGEST + 1))]
        distance = [distance for distance, _ in NO_BOND] + [1] * (len(rows) - FIRST_BOND)
        features = torch.tensor(rows, dtype=torch.float32)
        table = PairTable(features, tuple(names), torch.tensor(distance))
        super().__init__(table)

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return a symmetric matrix of codes: rows of the table."""
        kinds = columns_of("BondType", BONDS)
        known = columns_of("BondStereo", STEREO) if self.chirality else {}
        # Type, conjugation, stereo and, of 3, ring: not in one, atoms in one, bond in one. The
        # atoms of a bond in a ring share that ring, so that the common ring adds the last step.
        width = 3 * max(1, len(known))
        bonds = []
        for bond in bonds_of(mol):
            kind = 2 * kinds.get(bond.GetBondType(), 4) + bond.GetIsConjugated()
            code = FIRST_BOND + width * kind + bond.IsInRing()
            code += 3 * known.get(bond.GetStereo(), 3) if known else 0
            bonds.append((bond, code))
        return coded_pairs(mol, bond_matrix(mol, bonds))


def _one_hot(index: int, length: int) -> list[float]:
    return [float(index == k) for k in range(length)]


def _stereo(atom: Any) -> tuple[str, bool]:
    label = atom.GetProp("_CIPCode") if atom.HasProp("_CIPCode") else ""
    return label, bool(atom.HasProp("_ChiralityPossible"))


@cache
def _element_columns() -> dict[int, int]:
    number = chem().GetPeriodicTable().GetAtomicNumber
    return {number(symbol): column for column, symbol in enumerate(ELEMENTS)}
