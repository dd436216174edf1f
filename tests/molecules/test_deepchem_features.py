"""The example of own features gives the numbers that DeepChem itself computed."""

from pathlib import Path

import numpy as np
import pytest
from rdkit import Chem

from pyg_dynbatch.molecules.chemistry import parse_smiles
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from tests.example_files import defined_in
from tests.molecules.writings import ODD, distances

# In a cage DeepChem loses a ring, and which one depends on its numbering of the atoms.
CUBANE = "C12C3C4C1C5C2C3C45"


@pytest.fixture(scope="module")
def featurizer() -> MoleculeFeaturizer:
    names = defined_in("deepchem_features")
    return MoleculeFeaturizer(names["DeepChemAtoms"](), names["DeepChemPairs"]())


def test_equal_to_deepchem(featurizer: MoleculeFeaturizer, samples: Path) -> None:
    table = featurizer.pair_table
    with np.load(samples / "deepchem" / "golden.npz", allow_pickle=False) as file:
        atom_starts = np.cumsum(file["num_atoms"])[:-1]
        pair_starts = np.cumsum(file["num_pairs"])[:-1]
        orders = np.split(file["order"], atom_starts)
        atoms = np.split(file["atom"], atom_starts)
        ends = np.split(file["pair_ends"], pair_starts)
        pairs = np.split(file["pair"], pair_starts)
        for number, smiles in enumerate(file["smiles"].tolist()):
            mol = featurizer.prepare(smiles)
            order = orders[number]  # of DeepChem's atoms in the text
            assert np.array_equal(featurizer.atom_rows(mol)[order], atoms[number]), smiles
            codes = featurizer.pair_codes(mol)
            first, second = order[ends[number]].T
            wrong = np.argwhere(table.features.numpy()[codes[first, second]] != pairs[number])
            # A lost ring of four has two diagonals, each in both directions.
            assert len(wrong) == (4 if smiles == CUBANE else 0), smiles
            # DeepChem has no pairs of two fragments.
            is_absent = np.ones_like(codes, dtype=bool)
            is_absent[first, second] = False
            assert np.array_equal(table.distance.numpy()[codes] == -1, is_absent), smiles
    assert number == 31


@pytest.mark.parametrize("name", ODD)
def test_distances_of_odd_molecules(featurizer: MoleculeFeaturizer, name: str) -> None:
    mol = parse_smiles(ODD[name])
    found = featurizer.pair_table.distance.numpy()[featurizer.pair_codes(mol)]
    expected = np.full_like(found, -1)
    for pair, steps in distances(mol).items():
        expected[pair] = min(steps, 8)
    assert np.array_equal(found, expected)
    assert featurizer(ODD[name]).x.shape == (Chem.MolFromSmiles(ODD[name]).GetNumAtoms(), 75)


def test_added_hydrogens_are_not_counted() -> None:
    atoms = defined_in("deepchem_features")["DeepChemAtoms"](count_hydrogens=False)
    featurizer = MoleculeFeaturizer(atoms, explicit_hydrogens=True)
    assert featurizer("CO").x.shape == (6, 70)
