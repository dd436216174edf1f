"""Molecules from text, and why some texts are none."""

import math
import pickle

import pytest
from rdkit import Chem

from pyg_dynbatch.molecules.chemistry import (
    MoleculeError,
    molecule_of,
    parse_smiles,
    smiles_of_block,
)
from tests.molecules.writings import ODD


@pytest.mark.parametrize(
    "text", ["CCO", " CCO", "CCO ", "\tCCO\r\n", "CCO |$a;;$|", "CCO\t|$é b;;$| "]
)
def test_blanks_and_extensions(text: str) -> None:
    assert parse_smiles(text).GetNumAtoms() == 3


MALFORMED = ["C1CC(C", "CC)C", "C[NH", "C1CCC", "CC©", "C\u200b", "C\0C", "CXx", "C[C,N]"]
MALFORMED += ["CCO>>CC=O", "CCO;CCN", "CCO,CCN"]
BAD_SMILES = [
    ("", "empty", None),
    (" \t", "empty", None),
    (None, "missing", None),
    (math.nan, "missing", None),
    ("CC(C)(C)(C)C", "Explicit valence for atom # 1 C, 5", 1),
    ("CN(=O)(=O)=O", "Explicit valence for atom # 1 N, 7", 1),
    ("Cc1cccc1", "kekulize", 1),
    ("Ccc", "non-ring atom 1", 1),
    *((text, "well-formed", None) for text in MALFORMED),
    *((text, "after a blank", None) for text in ("CC (=O)O", "CC\tethane", "CC |a| b", "C\u00a0O")),
    ("CC~C", "query bond", 1),
    ("CO.C1=CC=CC=C1 |m:1:2.3.4|", "any of several atoms", 0),
    ("CCCC |Sg:n:1,2::ht|", "polymer", None),
]


@pytest.mark.parametrize(("smiles", "reason", "atom"), BAD_SMILES)
def test_bad_smiles_give_a_reason(smiles: object, reason: str, atom: int | None) -> None:
    with pytest.raises(MoleculeError) as caught:
        parse_smiles(smiles)
    error = caught.value
    assert reason in error.reason and error.reason in str(error)
    assert error.atom == atom
    assert error.smiles == (smiles if isinstance(smiles, str) else None)
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.atom, again.smiles) == (error.reason, atom, error.smiles)
    assert str(again) == str(error)


@pytest.mark.parametrize("kind", [5, 6, 7, 8])
def test_query_bonds_of_mol_blocks_are_refused(kind: int) -> None:
    block = Chem.MolToMolBlock(Chem.MolFromSmiles("CCO"))
    with pytest.raises(MoleculeError, match="query bond"):
        smiles_of_block(block.replace("  1  2  1  0", f"  1  2  {kind}  0"))
    with pytest.raises(MoleculeError, match="query bond"):
        smiles_of_block(block.replace("  1  2  1  0", "  1  2  1  0  0  1"))  # in a ring


def test_bonds_to_several_atoms_are_refused_however_they_come() -> None:
    mol = Chem.MolFromSmiles("CO.C1=CC=CC=C1 |m:1:2.3.4|")
    with pytest.raises(MoleculeError, match="any of several atoms"):
        molecule_of(mol)
    block = Chem.MolToV3KMolBlock(mol)
    assert "ENDPTS" in block
    with pytest.raises(MoleculeError, match="any of several atoms"):
        smiles_of_block(block)


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(MoleculeError, match="5001 characters") as caught:
        parse_smiles("C" * 5000 + "(")
    assert len(str(caught.value)) < 400


def test_logging_of_rdkit_stays_as_it_was(capfd: pytest.CaptureFixture) -> None:
    for smiles in ("C(C)(C)(C)(C)C", "C1CC("):
        with pytest.raises(MoleculeError):
            parse_smiles(smiles)
    assert capfd.readouterr().err == ""
    Chem.MolFromSmiles("N(C)(C)(C)(C)C")
    assert "atom # 0 N, 5" in capfd.readouterr().err, "what the user does is still logged"


def test_bad_mol_blocks_give_a_reason() -> None:
    with pytest.raises(MoleculeError, match="reaction"):
        smiles_of_block("$RXN\n\n\n\n  1  1\n")
    raw = Chem.MolFromSmiles("CC(C)(C)(C)C", sanitize=False)
    block = Chem.MolToMolBlock(raw, kekulize=False)
    for call in (lambda: smiles_of_block(block), lambda: molecule_of(raw)):
        with pytest.raises(MoleculeError, match="Explicit valence for atom # 1 C, 5") as caught:
            call()
        assert caught.value.atom == 1
        assert caught.value.smiles is None
    for text in ("", "nonsense", "\n\n\n  9  9  0  0  0 V2000\nM  END\n", block[:90]):
        with pytest.raises(MoleculeError, match="well-formed"):
            smiles_of_block(text)


def test_rings_of_a_plain_smallest_set_are_symmetrised() -> None:
    mol = Chem.MolFromSmiles(ODD["cubane"])
    Chem.GetSSSR(mol)
    assert mol.GetRingInfo().NumRings() == 5
    copied = molecule_of(mol)
    assert copied.GetRingInfo().NumRings() == 6
    assert mol.GetRingInfo().NumRings() == 5


WRITTEN_HYDROGENS = {
    "[H]C([H])([H])O[H]": "CO",
    "[H]/C(F)=C(F)/[H]": "CFCF",
    "[H][C@](F)(Cl)Br.[2H]O[H]": "CFClBrHO",
    "[Na+].[H]O |$a;b;c$|": "NaO",
}


@pytest.mark.parametrize("smiles", WRITTEN_HYDROGENS)
def test_atoms_keep_their_order_when_hydrogens_are_removed(smiles: str) -> None:
    mol = parse_smiles(smiles)
    assert "".join(atom.GetSymbol() for atom in mol.GetAtoms()) == WRITTEN_HYDROGENS[smiles]
    assert Chem.MolToSmiles(mol) == Chem.MolToSmiles(Chem.MolFromSmiles(smiles))
