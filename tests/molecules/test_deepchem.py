"""DeepChem's 75 and 14 numbers: by their definition, and as DeepChem itself computed them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from rdkit import Chem

from pyg_dynbatch.data import DeepChemAtoms, DeepChemPairs, parse_smiles
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from tests.console import rows_of
from tests.molecules.writings import ODD, distances

SYMBOLS = [
    "C", "N", "O", "S", "F", "Si", "P", "Cl", "Br", "Mg", "Na", "Ca", "Fe", "As", "Al", "I", "B",
    "V", "K", "Tl", "Yb", "Sb", "Sn", "Ag", "Pd", "Co", "Se", "Ti", "Zn", "H", "Li", "Ge", "Cu",
    "Au", "Ni", "Cd", "In", "Mn", "Zr", "Cr", "Pt", "Hg", "Pb", "Unknown",
]  # fmt: skip


def one_hot(value: object, allowed: list) -> list[bool]:
    """What is not allowed counts as the last that is."""
    return (
        [value == other for other in allowed] if value in allowed else one_hot(allowed[-1], allowed)
    )


def naive_atom(atom: Chem.Atom, hydrogens: bool = True, chirality: bool = False) -> list:
    row = one_hot(atom.GetSymbol(), SYMBOLS)
    row += [atom.GetDegree() == degree for degree in range(11)]
    row += one_hot(atom.GetValence(Chem.ValenceType.IMPLICIT), list(range(7)))
    row += [atom.GetFormalCharge(), atom.GetNumRadicalElectrons()]
    row += one_hot(str(atom.GetHybridization()), ["SP", "SP2", "SP3", "SP3D", "SP3D2"])
    row += [atom.GetIsAromatic()]
    row += one_hot(atom.GetTotalNumHs(), list(range(5))) if hydrogens else []
    if chirality:
        label = atom.GetProp("_CIPCode") if atom.HasProp("_CIPCode") else None
        row += one_hot(label, ["R", "S"]) if label else [False, False]
        row += [atom.HasProp("_ChiralityPossible")]
    return row


def naive_pair(mol: Chem.Mol, first: int, second: int, steps: int, chirality: bool) -> list:
    bond = mol.GetBondBetweenAtoms(first, second) if first != second else None
    row: list = [0] * (10 if chirality else 6)
    if bond is not None:
        row = [
            str(bond.GetBondType()) == name for name in ["SINGLE", "DOUBLE", "TRIPLE", "AROMATIC"]
        ]
        row += [bond.GetIsConjugated(), bond.IsInRing()]
        kinds = ["STEREONONE", "STEREOANY", "STEREOZ", "STEREOE"]
        row += one_hot(str(bond.GetStereo()), kinds) if chirality else []
    rings = mol.GetRingInfo().AtomRings()
    row += [first != second and any(first in ring and second in ring for ring in rings)]
    return row + [steps == distance for distance in range(1, 8)]


def check_pairs(mol: Chem.Mol, chirality: bool) -> None:
    pairs = DeepChemPairs(chirality)
    codes = pairs.codes(mol)
    found = pairs.table.features.numpy()[codes]
    distance = pairs.table.distance.numpy()[codes]
    steps = distances(mol)
    atoms = range(mol.GetNumAtoms())
    for first, second in ((i, j) for i in atoms for j in atoms):
        if (first, second) in steps:
            apart = steps[first, second]
            wanted = naive_pair(mol, first, second, apart, chirality)
            assert distance[first, second] == min(apart, 8)
        else:
            wanted = [0] * len(pairs.table.names)
            assert distance[first, second] == -1
        assert found[first, second].tolist() == wanted, (first, second)


# DeepChem refuses more than ten neighbours.
BEYOND = {"twelve neighbours": "[U]" + "(F)" * 12, "six hydrogens": "[UH6]"}


@pytest.mark.parametrize("chirality", [False, True])
@pytest.mark.parametrize("name", ODD | BEYOND)
def test_odd_molecules_as_defined(name: str, chirality: bool) -> None:
    mol = parse_smiles((ODD | BEYOND)[name])
    atoms = DeepChemAtoms(chirality=chirality)
    wanted = [naive_atom(atom, chirality=chirality) for atom in mol.GetAtoms()]
    assert atoms.rows(mol).tolist() == wanted
    check_pairs(mol, chirality)


def test_added_hydrogens_as_defined() -> None:
    for smiles in ODD.values():
        mol = Chem.AddHs(parse_smiles(smiles))
        wanted = [naive_atom(atom, hydrogens=False) for atom in mol.GetAtoms()]
        assert DeepChemAtoms(hydrogens=False).rows(mol).tolist() == wanted
        check_pairs(mol, False)


@pytest.mark.parametrize("name", ["esol", "tox21", "bbbp"])
def test_real_molecules_as_defined(name: str, shared_data: Callable[[str], Path]) -> None:
    for row in rows_of(shared_data(f"molecules/{name}.csv"))[:: 40 if name == "esol" else 250]:
        mol = parse_smiles(row["smiles"])
        wanted = [naive_atom(atom, chirality=True) for atom in mol.GetAtoms()]
        assert DeepChemAtoms(chirality=True).rows(mol).tolist() == wanted
        check_pairs(mol, True)


def test_no_pair_of_a_big_molecule_is_lost() -> None:
    # Powers of the adjacency matrix of 100 atoms overflow; the last ones lose pairs in DeepChem.
    peptide = parse_smiles("NCC(=O)" * 24 + "O")
    codes = DeepChemPairs().codes(peptide)
    assert DeepChemPairs().table.kept("connected").numpy()[codes].all()
    adjacency = Chem.GetAdjacencyMatrix(peptide)
    with np.errstate(over="ignore"):
        powers = [np.linalg.matrix_power(adjacency, k) for k in range(1, len(adjacency) + 1)]
    assert any((power < 0).any() for power in powers), "this molecule shows the overflow"


# In a cage DeepChem loses a ring, and which one depends on its numbering of the atoms: RDKit finds
# the rings anew, without the symmetric ones, when a renumbered molecule is asked for a bond's ring.
LOST_RINGS = {"C12C3C4C1C5C2C3C45": 1}


class Golden(NamedTuple):
    """What DeepChem gave for one molecule, brought into the order of the input."""

    smiles: str
    atom: np.ndarray
    pair_ends: np.ndarray
    pair: np.ndarray


def golden(samples: Path, chirality: bool) -> Iterator[Golden]:
    kind = "_chiral" if chirality else ""
    with np.load(samples / "deepchem" / "golden.npz", allow_pickle=False) as file:
        atoms, pairs = np.cumsum(file["num_atoms"])[:-1], np.cumsum(file["num_pairs"])[:-1]
        parts = zip(
            file["smiles"].tolist(),
            np.split(file["order"], atoms),
            np.split(file[f"atom{kind}"], atoms),
            np.split(file["pair_ends"], pairs),
            np.split(file[f"pair{kind}"], pairs),
            strict=True,
        )
        for smiles, order, atom, ends, pair in parts:
            # Row k is atom order[k] of the input.
            yield Golden(smiles, atom[np.argsort(order)], order[ends], pair)


@pytest.mark.parametrize("chirality", [False, True])
def test_equal_to_deepchem(samples: Path, chirality: bool) -> None:
    featurizer = MoleculeFeaturizer("deepchem", "deepchem", chirality=chirality)
    features = featurizer.pair_table.features.numpy()
    names = featurizer.pair_table.names
    disconnected = (featurizer.pair_table.distance == -1).numpy()
    num_molecules = 0
    for wanted in golden(samples, chirality):
        mol = featurizer.prepare(wanted.smiles)
        assert np.array_equal(featurizer.atom_rows(mol), wanted.atom), wanted.smiles
        codes = featurizer.pair_codes(mol)
        first, second = wanted.pair_ends.T
        wrong = np.argwhere(features[codes[first, second]] != wanted.pair)
        # A lost ring of four has two diagonals, each in both directions.
        assert len(wrong) == 4 * LOST_RINGS.get(wanted.smiles, 0), wanted.smiles
        assert {names[column] for _, column in wrong.tolist()} <= {"same_ring"}
        # DeepChem has no pairs across fragments; here they are, with a code of their own.
        absent = np.ones_like(codes, dtype=bool)
        absent[first, second] = False
        assert np.array_equal(disconnected[codes], absent), wanted.smiles
        num_molecules += 1
    assert num_molecules == 32


def test_widths_and_kinds(samples: Path) -> None:
    widths = {one.atom.shape[1] for one in golden(samples, False)}
    assert widths == {75}
    plain = MoleculeFeaturizer("deepchem", "deepchem")
    chiral = MoleculeFeaturizer("deepchem", "deepchem", chirality=True)
    for made, atoms, pairs, codes in ((plain, 75, 14, 46), (chiral, 78, 18, 136)):
        table = made.pair_table
        assert (len(made.atom_names), len(table.names), len(table)) == (atoms, pairs, codes)
        kinds = dict(zip(made.atom_names, made.atom_kinds, strict=True))
        counts = [name for name, kind in kinds.items() if kind == "count"]
        assert counts == ["formal_charge", "radical_electrons"]
        assert set(kinds.values()) == {"bit", "count"}
    # The samples must tell the two apart, or the comparison proves nothing about stereo.
    last = np.concatenate([one.atom[:, 75:] for one in golden(samples, True)])
    assert (last.sum(0) > 0).all()
    stereo = np.concatenate([one.pair[:, 6:10] for one in golden(samples, True)])
    assert (stereo.sum(0) > 0).sum() >= 3
