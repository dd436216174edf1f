"""Use your own features of atoms and pairs: those of DeepChem's ``WeaveFeaturizer``.

    python examples/deepchem_features.py

A part names its columns, and returns one row per atom, or one code per pair. Both must not depend
on the order of the atoms. Each part keeps its arguments as attributes, so that a checkpoint can
build it again. Import this module before you load such a checkpoint.
"""

from itertools import product

import numpy as np
import torch
from rdkit import Chem

from pyg_dynbatch.data import AtomFeatures, MoleculeFeaturizer, PairFeatures, PairTable

ELEMENTS = [
    "C", "N", "O", "S", "F", "Si", "P", "Cl", "Br", "Mg", "Na", "Ca", "Fe", "As", "Al", "I", "B",
    "V", "K", "Tl", "Yb", "Sb", "Sn", "Ag", "Pd", "Co", "Se", "Ti", "Zn", "H", "Li", "Ge", "Cu",
    "Au", "Ni", "Cd", "In", "Mn", "Zr", "Cr", "Pt", "Hg", "Pb",
]  # fmt: skip
HYBRIDIZATIONS = ["SP", "SP2", "SP3", "SP3D", "SP3D2"]
BONDS = ["SINGLE", "DOUBLE", "TRIPLE", "AROMATIC"]
FARTHEST = 7  # bonds between the two atoms of a pair that has a distance


def one_hot(value: object, choices: list) -> list[float]:
    """Return one number per choice; a value that is none of them has zeros."""
    return [float(value == choice) for choice in choices]


class DeepChemAtoms(AtomFeatures):
    """The 75 numbers of an atom, the oddities of DeepChem included.

    Anything but sp to sp3d, also the s of Na+ and H2, counts as sp3d2. The implicit valence of an
    atom in brackets is 0: ``[NH3]`` is not ``N``. More than ten neighbors have none of the bits.

    Args:
        count_hydrogens: Whether there are columns for hydrogens, as where they are not atoms.
    """

    def __init__(self, count_hydrogens: bool = True) -> None:
        self.count_hydrogens = count_hydrogens
        names = [*ELEMENTS, "unknown"]
        names += [f"degree_{k}" for k in range(11)]
        names += [f"implicit_valence_{k}" for k in range(7)]
        names += ["formal_charge", "radical_electrons"]
        names += [name.lower() for name in HYBRIDIZATIONS]
        names += ["aromatic"]
        if count_hydrogens:
            names += [f"hydrogens_{k}" for k in range(5)]
        super().__init__(names)

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        """Return one row per atom."""
        rows = [self._row(atom) for atom in mol.GetAtoms()]
        return np.array(rows, dtype=np.float32).reshape(len(rows), len(self.names))

    def _row(self, atom: Chem.Atom) -> list[float]:
        element = atom.GetSymbol() if atom.GetSymbol() in ELEMENTS else "unknown"
        hybridization = str(atom.GetHybridization())
        if hybridization not in HYBRIDIZATIONS:
            hybridization = "SP3D2"
        row = one_hot(element, [*ELEMENTS, "unknown"])
        row += one_hot(atom.GetDegree(), list(range(11)))
        row += one_hot(min(atom.GetNumImplicitHs(), 6), list(range(7)))
        row += [atom.GetFormalCharge(), atom.GetNumRadicalElectrons()]
        row += one_hot(hybridization, HYBRIDIZATIONS)
        row += [float(atom.GetIsAromatic())]
        if self.count_hydrogens:
            row += one_hot(min(atom.GetTotalNumHs(), 4), list(range(5)))
        return row


class DeepChemPairs(PairFeatures):
    """The 14 numbers of a pair: bond, conjugation, ring of the bond, same ring, distance.

    DeepChem's powers of an adjacency matrix overflow in big molecules; here no pair is lost. Pairs
    of two fragments, which DeepChem does not have, have zeros and a code of their own.
    """

    def __init__(self) -> None:
        names = [bond.lower() for bond in BONDS]
        names += ["conjugated", "bond_in_ring", "same_ring"]
        names += [f"distance_{k}" for k in range(1, FARTHEST + 1)]
        no_bond = [0.0] * 6
        distances = list(range(FARTHEST + 2))  # an atom with itself has 0, farther pairs have 8
        rows = [
            [*no_bond, float(ring), *one_hot(distance, list(range(1, FARTHEST + 1)))]
            for ring in (False, True)
            for distance in distances
        ]
        rows += [[0.0] * len(names)]
        for bond, conjugated, in_ring, ring in product([*BONDS, "OTHER"], *[(False, True)] * 3):
            of_bond = [*one_hot(bond, BONDS), float(conjugated), float(in_ring)]
            rows += [[*of_bond, float(ring), *one_hot(1, list(range(1, FARTHEST + 1)))]]
        distance = [*distances, *distances, -1] + [1] * 40
        super().__init__(PairTable(torch.tensor(rows), names, torch.tensor(distance)))

    def codes(self, mol: Chem.Mol) -> np.ndarray:
        """Return a symmetric matrix of codes: rows of the table."""
        atoms = mol.GetNumAtoms()
        same_ring = np.zeros((atoms, atoms), dtype=bool)
        for ring in mol.GetRingInfo().AtomRings():
            same_ring[np.ix_(ring, ring)] = True
        np.fill_diagonal(same_ring, False)
        distance = Chem.GetDistanceMatrix(mol) if atoms else np.zeros((0, 0))
        is_connected = distance < atoms  # RDKit gives 1e8 for two fragments
        codes = np.minimum(distance, FARTHEST + 1).astype(int) + same_ring * (FARTHEST + 2)
        codes[~is_connected] = 2 * (FARTHEST + 2)
        for bond in mol.GetBonds():
            ends = (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx())
            code = self._code_of(bond) + int(same_ring[ends])
            codes[ends] = code
            codes[ends[::-1]] = code
        return codes

    @staticmethod
    def _code_of(bond: Chem.Bond) -> int:
        kind = str(bond.GetBondType())
        number = BONDS.index(kind) if kind in BONDS else len(BONDS)
        first_bond = 2 * (FARTHEST + 2) + 1
        return first_bond + 8 * number + 4 * bond.GetIsConjugated() + 2 * bond.IsInRing()


if __name__ == "__main__":
    featurizer = MoleculeFeaturizer(DeepChemAtoms(), DeepChemPairs())
    acetamide = featurizer("CC(N)=O")
    for row in acetamide.x:
        print([name for name, value in zip(featurizer.atom_names, row, strict=True) if value])
    table = featurizer.pair_table
    print("features of the bond C=O:", table.features[int(acetamide.pair_code[6])].int().tolist())
    again = MoleculeFeaturizer.from_spec(featurizer.spec())
    print("the same from its spec:", torch.equal(again("CC(N)=O").x, acetamide.x))
