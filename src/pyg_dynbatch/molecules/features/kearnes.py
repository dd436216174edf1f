"""Atom and pair features of Kearnes et al. (2016), and the stereo of double bonds."""

from array import array
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import chain, repeat
from math import isfinite
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, UInt8

from pyg_dynbatch.core.native import extension
from pyg_dynbatch.molecules.features.base import AtomFeatures, PairFeatures, RowTable
from pyg_dynbatch.molecules.features.pair_table import DISCONNECTED, FAR, PairTable
from pyg_dynbatch.molecules.features.rdkit_access import (
    Mol,
    MoleculeError,
    atoms_of,
    bonds_of,
    chem,
    columns_of,
    rdkit_data_folder,
    rdkit_module,
    rings_of,
)

ELEMENTS = ("H", "C", "N", "O", "F", "P", "S", "Cl", "Br", "I")
_ATOMIC_NUMBERS = (1, 6, 7, 8, 9, 15, 16, 17, 35, 53)
_METAL_COLUMN = len(ELEMENTS)
# Dummy atoms (0), noble gases and the metalloids B, Si, Ge, As, Sb, Te are not metals either.
_NO_METALS = {0, 1, 2, *range(5, 11), *range(14, 19), *range(32, 37), *range(51, 55)}
_NO_METALS |= {85, 86, 117, 118}
_LABELS = ("R", "S")
RING_SIZES = (3, 4, 5, 6, 7, 8)
# A few symmetric cages take exponential time; this many steps take about a second.
_MOST_LABEL_STEPS = 1_250_000


class KearnesAtoms(AtomFeatures):
    """Atom features of Kearnes: type, stereo, charges, rings, bonding.

    ======= ========================= ===== ==================================================
    columns feature                   kind  of RDKit
    ======= ========================= ===== ==================================================
    11      H C N O F P S Cl Br I,    bit   element; metalloids, noble gases and dummy atoms
            metal                           have none of the bits
    2       R, S                      bit   CIP label of `rdCIPLabeler`, r and s counted with
                                            them: the same however the SMILES is written
    1       formal charge             count
    1       partial charge            real  Gasteiger; 0 where RDKit has no parameters
    6       rings of 3 to 8 atoms     count number of symmetrized smallest rings with the atom
    3       sp, sp2, sp3              bit   hybridization; sp2d, sp3d, sp3d2, s: none of the bits
    2       donor, acceptor           bit   the definitions of ``BaseFeatures.fdef``
    1       aromatic                  bit
    1       partial charge missing    bit   not in the paper: metals, hypervalent P, …
    ======= ========================= ===== ==================================================

    Args:
        chirality: Whether there are columns for R and S.
        missing_bit: Whether the last column is there.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856, table 1. Differs: the missing bit.

    Example:
        >>> from rdkit import Chem
        >>> atoms = KearnesAtoms(missing_bit=False)
        >>> rows = atoms.rows(Chem.MolFromSmiles("C[C@H](N)O"))
        >>> rows.shape, [name for name, x in zip(atoms.names, rows[1]) if x == 1]
        ((4, 27), ['C', 'cip_R', 'sp3'])
    """

    def __init__(self, chirality: bool = True, missing_bit: bool = True) -> None:
        self.chirality = chirality
        self.missing_bit = missing_bit
        rings = [f"rings_of_{n}" for n in RING_SIZES]
        names = [*ELEMENTS, "metal", *(("cip_R", "cip_S") if chirality else ())]
        self._charge = len(names)
        names += ["formal_charge", "partial_charge", *rings]
        self._hybridization = len(names)
        names += ["sp", "sp2", "sp3", "donor", "acceptor", "aromatic"]
        names += ["partial_charge_missing"] if missing_bit else []
        other = dict.fromkeys(["formal_charge", *rings], "count") | {"partial_charge": "real"}
        kinds = [other.get(name, "bit") for name in names]
        super().__init__(names, kinds)
        self._table = RowTable(len(names))

    def rows(self, mol: Mol) -> Float32[np.ndarray, "atom feature"]:
        """Return one row per atom; set its Gasteiger charge as a property.

        Raises:
            MoleculeError: If no CIP labels are found in reasonable time.
        """
        atoms, kind = atoms_of(mol), chem().Atom
        rings: list[tuple[int, ...]] = [()] * len(atoms)
        for ring in rings_of(mol):
            if len(ring) <= RING_SIZES[-1]:
                for atom in ring:
                    rings[atom] += (len(ring),)
        bonding = [0] * len(atoms)
        for bit, family in ((1, "Donor"), (2, "Acceptor")):
            for atom in hydrogen_bonding_atoms(mol, family):
                bonding[atom] |= bit
        # All of an atom but its stereo and partial charge: a few hundred different keys.
        own = (kind.GetAtomicNum, kind.GetFormalCharge, kind.GetHybridization, kind.GetIsAromatic)
        keys: Any = zip(*(map(get, atoms) for get in own), rings, bonding, strict=True)
        rows = self._table.rows(list(keys), self._make_row)
        if not atoms:
            return rows
        tagged = rdkit_module("Chem.rdqueries").HasChiralTagQueryAtom()
        if self.chirality and mol.GetAtomsMatchingQuery(tagged):
            for atom, label in cip_labels(mol):
                if label in _LABELS:
                    rows[atom, _METAL_COLUMN + 1 + _LABELS.index(label)] = 1
        rdkit_module("Chem.rdPartialCharges").ComputeGasteigerCharges(mol)
        charges = list(map(kind.GetDoubleProp, atoms, repeat("_GasteigerCharge")))
        rows[:, self._charge + 1] = charges
        if not isfinite(sum(charges)):
            missing = [atom for atom, charge in enumerate(charges) if not isfinite(charge)]
            rows[missing, self._charge + 1] = 0
            if self.missing_bit:
                rows[missing, -1] = 1
        return rows

    def _make_row(self, key: tuple[int, int, Any, bool, tuple[int, ...], int]) -> list[float]:
        number, charge, hybridization, aromatic, rings, bonding = key
        row = [0.0] * len(self.names)
        if number in _ATOMIC_NUMBERS:
            row[_ATOMIC_NUMBERS.index(number)] = 1.0
        elif number not in _NO_METALS:
            row[_METAL_COLUMN] = 1.0
        row[self._charge] = float(charge)
        for size in rings:
            row[self._charge + size - 1] += 1.0
        place = columns_of("HybridizationType", ("SP", "SP2", "SP3")).get(hybridization)
        if place is not None:
            row[self._hybridization + place] = 1.0
        last = (bonding & 1, bonding >> 1, aromatic)
        row[self._hybridization + 3 : self._hybridization + 6] = map(float, last)
        return row


def cip_labels(mol: Mol) -> list[tuple[int, str]]:
    """Label stereo centers by the rules of Cahn, Ingold and Prelog; r and s become R and S."""
    # RDKit's own tags (clockwise or not) depend on the order of the neighbors; labels do not.
    labelled, labeler = chem().Mol(mol), rdkit_module("Chem.rdCIPLabeler")
    try:
        labeler.AssignCIPLabels(labelled, maxRecursiveIterations=_MOST_LABEL_STEPS)
    except RuntimeError as error:
        reason = f"its stereo labels are not found within {_MOST_LABEL_STEPS:,} steps"
        raise MoleculeError(f"{reason}; chirality=False omits them") from error
    centers = [atom for atom in atoms_of(labelled) if atom.HasProp("_CIPCode")]
    return [(atom.GetIdx(), atom.GetProp("_CIPCode").upper()) for atom in centers]


@cache
def bonding_patterns(family: str) -> list[Any]:
    """Return the patterns of a family of ``BaseFeatures.fdef``."""
    # The factory itself is the slowest part of all features; matching its patterns directly finds
    # the same atoms in a third of the time.
    path = str(rdkit_data_folder() / "BaseFeatures.fdef")
    factory = rdkit_module("Chem.ChemicalFeatures").BuildFeatureFactory(path)
    definitions = factory.GetFeatureDefs().items()
    named = [smarts for name, smarts in definitions if name.partition(".")[0] == family]
    return list(map(chem().MolFromSmarts, named))


def hydrogen_bonding_atoms(mol: Mol, family: str) -> list[int]:
    """Return the atoms of a family (Donor, Acceptor) of RDKit's ``BaseFeatures.fdef``."""
    found = (
        mol.GetSubstructMatches(pattern, maxMatches=mol.GetNumAtoms())
        for pattern in bonding_patterns(family)
    )
    return sorted({atom for matches in found for match in matches for atom in match})


LONGEST = FAR - 1
BONDS = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
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


# By twice the order: 1.5 is an aromatic bond.
_CODES_BY_ORDER = np.full(13, FIRST_BOND + 2 * len(BONDS), dtype=np.uint8)
_CODES_BY_ORDER[[0, 2, 4, 6, 3]] = [0, *(FIRST_BOND + 2 * kind for kind in range(len(BONDS)))]


class KearnesPairs(PairFeatures):
    """Pair features of Kearnes: bond, distance and ring; 12 numbers, 26 codes.

    ======= ========================= ==== ==================================================
    columns feature                   kind of RDKit
    ======= ========================= ==== ==================================================
    4       single, double, triple,   bit  bond between the two; a dative or other bond and no
            aromatic                       bond have none of the bits; order 1.5 is aromatic
    7       within 1, …, 7 bonds      bit  shortest path, as a thermometer: 3 bonds apart is
                                           within 3, 4, … 7
    1       same ring                 bit  some symmetrized smallest ring holds both
    ======= ========================= ==== ==================================================

    The pair of an atom with itself is all zeros, as are pairs of different fragments and pairs
    more than 7 bonds apart without a common ring; their codes differ.

    Reference:
        Kearnes et al. (2016), arXiv:1603.00856, table 2.

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
        kinds: list[tuple[str, int, bool]] = [("", distance, ring) for distance, ring in NO_BOND]
        kinds += [(bond, 1, ring) for bond in (*BONDS, "other") for ring in (False, True)]
        near = range(1, LONGEST + 1)
        rows = [
            [*(bond == name for name in BONDS), *(0 < distance <= k for k in near), ring]
            for bond, distance, ring in kinds
        ]
        names = [*(bond.lower() for bond in BONDS), *(f"within_{k}" for k in near), "same_ring"]
        distances = torch.tensor([distance for _, distance, _ in kinds])
        features = torch.tensor(rows, dtype=torch.float32)
        super().__init__(PairTable(features, tuple(names), distances))

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return a symmetric matrix of codes: rows of the table."""
        # All orders at once; a dative bond has one in one direction only, others have none.
        orders = chem().GetAdjacencyMatrix(mol, useBO=True, force=True)
        if np.count_nonzero(orders) == 2 * mol.GetNumBonds():
            return coded_pairs(mol, _CODES_BY_ORDER.take((2 * orders).astype(np.intp)))
        kinds = columns_of("BondType", BONDS)
        found = (
            (bond, FIRST_BOND + 2 * kinds.get(bond.GetBondType(), 4)) for bond in bonds_of(mol)
        )
        return coded_pairs(mol, bond_matrix(mol, found))


class DoubleBondStereo(PairFeatures):
    """Extra pair features that distinguish E and Z double bonds; 2 numbers, 3 codes.

    A double bond without stereo, or with unknown stereo, has neither bit.

    Example:
        >>> from rdkit import Chem
        >>> DoubleBondStereo().codes(Chem.MolFromSmiles("F/C=C/F"))[1].tolist()
        [0, 0, 1, 0]
    """

    def __init__(self) -> None:
        features, distances = torch.eye(3)[:, 1:], torch.tensor([0, 1, 1])
        super().__init__(PairTable(features, ("bond_E", "bond_Z"), distances))

    def codes(self, mol: Mol) -> UInt8[np.ndarray, "atom atom"]:
        """Return a symmetric matrix: 1 for an E bond, 2 for a Z bond, else 0."""
        known = columns_of("BondStereo", ("STEREOE", "STEREOZ"))
        found = ((bond, 1 + known.get(bond.GetStereo(), -1)) for bond in bonds_of(mol))
        return bond_matrix(mol, found)


def bond_matrix(mol: Mol, codes: Iterable[tuple[Any, int]]) -> UInt8[np.ndarray, "atom atom"]:
    """Return a symmetric matrix of the codes of bonds, with 0 elsewhere."""
    matrix = np.zeros((mol.GetNumAtoms(),) * 2, dtype=np.uint8)
    for bond, code in codes:
        first, second = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
        matrix[first, second] = matrix[second, first] = code
    return matrix


def coded_pairs(mol: Mol, bonds: UInt8[np.ndarray, "atom atom"]) -> UInt8[np.ndarray, "atom atom"]:
    """Return the codes of all pairs from the rings and a matrix of bonds.

    A common ring adds 1 to the code of a bond, too.
    """
    atoms, rings = len(bonds), rings_of(mol)
    codes = np.empty_like(bonds)
    if (native := extension()) is not None:
        listed = array("q", chain.from_iterable((len(ring), *ring) for ring in rings))
        given = {"atoms": atoms, "bonds": bonds, "rings": listed, "end": len(listed)}
        native.pair_codes(**given, codes=codes)
        return codes
    if not atoms:
        return codes
    # Atoms of different fragments are 1e8 bonds apart, all others fewer than there are atoms.
    steps = chem().GetDistanceMatrix(mol, force=True).astype(np.intp)
    codes = np.where(bonds, bonds, _codes_by_distance(atoms).take(steps, mode="clip"))
    member = np.zeros((len(rings), atoms), dtype=np.float32)
    for row, ring in enumerate(rings):
        member[row, list(ring)] = 1
    codes += (member.T @ member) > 0
    np.fill_diagonal(codes, 0)
    return codes


@lru_cache(maxsize=2048)
def _codes_by_distance(atoms: int) -> UInt8[np.ndarray, " distance"]:
    distance = np.arange(atoms + 1)
    codes = (2 * np.minimum(distance, FAR) - 3).clip(0).astype(np.uint8)
    codes[atoms] = _DISCONNECTED_CODE
    return codes
