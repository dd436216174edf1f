"""Molecules from text, and why some texts are none."""

import math
import pickle

import pytest
from rdkit import Chem

from pyg_dynbatch.data import MoleculeError, parse_smiles
from pyg_dynbatch.molecules.features.rdkit_access import molecule_of, parse_mol_block
from tests.molecules.writings import ODD

MALFORMED = ["C1CC(C", "CC)C", "C[NH", "C1CCC", "CC©", "C\u200b", "C\0C", "CXx"]


@pytest.mark.parametrize(
    "text", ["CCO", " CCO", "CCO ", "\tCCO\r\n", "CCO |$a;;$|", "CCO\t|$é b;;$| "]
)
def test_blanks_and_extensions(text: str) -> None:
    assert parse_smiles(text).GetNumAtoms() == 3


SEPARATORS = [";", ",", "|", " ", "\t", "\n", " ; "]
BAD_SMILES = [
    ("", "the SMILES is empty", None),
    (" \t", "the SMILES is empty", None),
    (None, "the SMILES is missing: None", None),
    (math.nan, "the SMILES is missing: nan", None),
    ("CC(C)(C)(C)C", "Explicit valence for atom # 1 C, 5, is greater than permitted", 1),
    ("CN(=O)(=O)=O", "Explicit valence for atom # 1 N, 7, is greater than permitted", 1),
    ("Cc1cccc1", "Can't kekulize mol.  Unkekulized atoms: 1 2 3 4 5", 1),
    ("Ccc", "non-ring atom 1 marked aromatic", 1),
    *((text, "it is not a well-formed SMILES", None) for text in MALFORMED),
    ("CC (=O)O", "syntax: the blank at character 3 is followed by '(=O)O', not |…|", None),
    ("CC\tethane", "syntax: the blank at character 3 is followed by 'ethane', not |…|", None),
    ("CC |a| b", "syntax: the blank at character 3 is followed by '|a| b', not |…|", None),
    ("CC\u00a0O", "several molecules in one row: 'CC', 'O'", None),
    *((f"CCO{mark}CCN", "several molecules in one row: 'CCO', 'CCN'", None) for mark in SEPARATORS),
    ("CCO>>CC=O", "a reaction, not a molecule: '>' at character 4", None),
    ("CCO.[Na]>[Pd]>CC=O", "a reaction, not a molecule: '>' at character 9", None),
    ("C[C,N]", "query atom", None),
    ("CC~C", "query bond", 1),
    ("CO.C1=CC=CC=C1 |m:1:2.3.4|", "a bond to any of several atoms", 0),
    ("CCCC |Sg:n:1,2::ht|", "a polymer or mixture, not one molecule", None),
]


@pytest.mark.parametrize(("smiles", "reason", "atom"), BAD_SMILES)
def test_bad_smiles_give_a_reason(smiles: object, reason: str, atom: int | None) -> None:
    with pytest.raises(MoleculeError) as caught:
        parse_smiles(smiles)
    error = caught.value
    assert error.reason == reason
    assert error.atom == atom
    assert error.smiles == (smiles if isinstance(smiles, str) else None)
    assert reason in str(error)
    assert (f"atom {atom}, counted from 0" in str(error)) == (atom is not None)
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.atom, again.smiles) == (reason, atom, error.smiles)
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", [5, 6, 7, 8])
def test_query_bonds_of_mol_blocks_are_refused(kind: int) -> None:
    block = Chem.MolToMolBlock(Chem.MolFromSmiles("CCO"))
    with pytest.raises(MoleculeError, match="query bond"):
        parse_mol_block(block.replace("  1  2  1  0", f"  1  2  {kind}  0"))
    with pytest.raises(MoleculeError, match="query bond"):
        parse_mol_block(block.replace("  1  2  1  0", "  1  2  1  0  0  1"))  # in a ring


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(MoleculeError, match=r"C…\ \(5001 characters\) cannot be used") as caught:
        parse_smiles("C" * 5000 + "(")
    assert len(str(caught.value)) < 400


def test_logging_of_rdkit_stays_as_it_was(capfd: pytest.CaptureFixture) -> None:
    for smiles in ("C(C)(C)(C)(C)C", "C1CC("):
        with pytest.raises(MoleculeError):
            parse_smiles(smiles)
    assert capfd.readouterr().err == ""
    Chem.MolFromSmiles("N(C)(C)(C)(C)C")
    assert "atom # 0 N, 5" in capfd.readouterr().err, "what the user does is still logged"


def test_mol_blocks() -> None:
    for smiles in ("CCO", "C[C@H](N)O", "[Na+].[Cl-]"):
        mol = Chem.MolFromSmiles(smiles)
        for text in (Chem.MolToMolBlock(mol), Chem.MolToV3KMolBlock(mol)):
            assert Chem.MolToSmiles(parse_mol_block(text)) == Chem.MolToSmiles(mol)


def test_bad_mol_blocks_give_a_reason() -> None:
    with pytest.raises(MoleculeError, match="a reaction, not a molecule"):
        parse_mol_block("$RXN\n\n\n\n  1  1\n")
    raw = Chem.MolFromSmiles("CC(C)(C)(C)C", sanitize=False)
    block = Chem.MolToMolBlock(raw, kekulize=False)
    with pytest.raises(MoleculeError, match="the molecule cannot be used") as caught:
        parse_mol_block(block)
    assert caught.value.atom == 1
    assert caught.value.reason.startswith("Explicit valence for atom # 1 C, 5")
    assert caught.value.smiles is None
    for text in ("", "nonsense", "\n\n\n  9  9  0  0  0 V2000\nM  END\n", block[:90]):
        with pytest.raises(MoleculeError, match="the mol block is not well-formed"):
            parse_mol_block(text)
    with pytest.raises(MoleculeError, match="Explicit valence for atom # 1 C, 5") as caught:
        molecule_of(raw)
    assert caught.value.atom == 1


def test_rings_of_a_plain_smallest_set_are_symmetrised() -> None:
    mol = Chem.MolFromSmiles(ODD["cubane"])
    Chem.GetSSSR(mol)
    assert mol.GetRingInfo().NumRings() == 5
    copied = molecule_of(mol)
    assert copied.GetRingInfo().NumRings() == 6
    assert mol.GetRingInfo().NumRings() == 5


WRITTEN_HYDROGENS = {
    "[H]C([H])([H])O[H]": [1, 4],
    "[H]/C(F)=C(F)/[H]": [1, 2, 3, 4],
    "[H][C@](F)(Cl)Br.[2H]O[H]": [1, 2, 3, 4, 5, 6],
    "[Na+].[H]O |$a;b;c$|": [0, 2],
    "[H:1]C": [1],
}


@pytest.mark.parametrize("smiles", WRITTEN_HYDROGENS)
def test_atoms_keep_their_index_when_hydrogens_are_removed(smiles: str) -> None:
    mol = parse_smiles(smiles)
    places = [atom.GetIntProp("input_atom") for atom in mol.GetAtoms()]
    assert places == WRITTEN_HYDROGENS[smiles]
    assert Chem.MolToSmiles(mol) == Chem.MolToSmiles(Chem.MolFromSmiles(smiles))
    again = molecule_of(mol)
    assert [atom.GetIntProp("input_atom") for atom in again.GetAtoms()] == places


@pytest.mark.parametrize("smiles", ["[H][H]", "[H+]", "CCO", "[2H]C"])
def test_without_removed_hydrogens_no_index_is_set(smiles: str) -> None:
    assert not any(atom.HasProp("input_atom") for atom in parse_smiles(smiles).GetAtoms())


def test_atoms_are_numbered_as_in_the_mol_block() -> None:
    options = Chem.SmilesParserParams()
    options.removeHs = False
    whole = Chem.MolFromSmiles("[H]OC([H])([H])[H].[Na+]", options)
    mol = parse_mol_block(Chem.MolToMolBlock(whole))
    assert [atom.GetIntProp("input_atom") for atom in mol.GetAtoms()] == [1, 2, 6]
