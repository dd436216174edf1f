"""Scaffolds and canonical SMILES."""

import pytest
from rdkit import Chem

from pyg_dynbatch.data import MoleculeError, canonical_smiles, murcko_scaffold
from tests.molecules.writings import ODD, fingerprint


@pytest.mark.parametrize(
    ("smiles", "scaffold"),
    [
        ("CCO", ""),
        ("[Na+]", ""),
        ("Cc1ccccc1", "c1ccccc1"),
        (" CCc1ccccc1CCC1CC1O", "c1ccc(CCC2CC2)cc1"),
        ("C[C@H]1CC[C@@H](C)CC1", "C1CCCCC1"),
    ],
)
def test_scaffolds(smiles: str, scaffold: str) -> None:
    assert murcko_scaffold(smiles) == scaffold
    assert murcko_scaffold(Chem.MolFromSmiles(smiles.strip())) == scaffold


def test_chirality_is_left_out_unless_wanted() -> None:
    one, other = "O[C@@H]1CN1c1ccccc1", "O[C@H]1CN1c1ccccc1"
    assert murcko_scaffold(one) == murcko_scaffold(other)
    one, other = "C1C[C@@H]2CC[C@H]2C1", "C1C[C@@H]2CC[C@@H]2C1"
    assert murcko_scaffold(one) == murcko_scaffold(other)
    assert murcko_scaffold(one, chirality=True) != murcko_scaffold(other, chirality=True)


@pytest.mark.parametrize("name", ODD)
def test_odd_molecules_have_both(name: str) -> None:
    mol = Chem.MolFromSmiles(ODD[name])
    before = fingerprint(mol)
    assert isinstance(murcko_scaffold(mol), str)
    assert canonical_smiles(ODD[name]) == canonical_smiles(mol) == Chem.MolToSmiles(mol)
    assert fingerprint(mol)[1] == before[1]


def test_bad_smiles_are_refused() -> None:
    for find in (murcko_scaffold, canonical_smiles):
        with pytest.raises(MoleculeError, match="Explicit valence for atom # 1 C"):
            find("CC(C)(C)(C)C")
