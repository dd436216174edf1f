"""Kearnes's 27 numbers, against a plain reading of their definition, and the table of rows."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rdkit import Chem, RDConfig
from rdkit.Chem import ChemicalFeatures, rdCIPLabeler, rdPartialCharges

from pyg_dynbatch.molecules import features
from pyg_dynbatch.molecules.chemistry import MoleculeError, parse_smiles
from pyg_dynbatch.molecules.features import KearnesAtoms, RowTable, hydrogen_bonding_atoms
from tests.console import rows_of
from tests.molecules.writings import ODD

SYMBOLS = ["H", "C", "N", "O", "F", "P", "S", "Cl", "Br", "I"]
NO_METALS = {"*", "He", "B", "Ne", "Si", "Ar", "Ge", "As", "Se", "Kr", "Sb", "Te", "Xe", "At", "Rn"}


def naive(mol: Chem.Mol) -> list[list[float]]:
    mol = Chem.Mol(mol)
    rdPartialCharges.ComputeGasteigerCharges(mol)
    rdCIPLabeler.AssignCIPLabels(mol)
    rings = mol.GetRingInfo().AtomRings()
    donors, acceptors = by_factory(mol)
    rows = []
    for atom in mol.GetAtoms():
        place, symbol = atom.GetIdx(), atom.GetSymbol()
        label = atom.GetProp("_CIPCode") if atom.HasProp("_CIPCode") else ""
        charge = float(atom.GetProp("_GasteigerCharge"))
        row = [symbol == other for other in SYMBOLS]
        row += [symbol not in SYMBOLS and symbol not in NO_METALS]
        row += [label in ("R", "r"), label in ("S", "s")]
        row += [atom.GetFormalCharge(), charge if math.isfinite(charge) else 0]
        row += [sum(len(ring) == n and place in ring for ring in rings) for n in range(3, 9)]
        row += [str(atom.GetHybridization()) == kind for kind in ("SP", "SP2", "SP3")]
        row += [place in donors, place in acceptors, atom.GetIsAromatic()]
        rows.append([float(value) for value in row] + [float(not math.isfinite(charge))])
    return rows


def by_factory(mol: Chem.Mol) -> tuple[set[int], set[int]]:
    path = str(Path(RDConfig.RDDataDir) / "BaseFeatures.fdef")
    factory = ChemicalFeatures.BuildFeatureFactory(path)
    donors, acceptors = (
        {
            atom
            for feature in factory.GetFeaturesForMol(mol, includeOnly=family)
            for atom in feature.GetAtomIds()
        }
        for family in ("Donor", "Acceptor")
    )
    return donors, acceptors


@pytest.mark.parametrize("name", ODD)
def test_odd_molecules_as_defined(name: str) -> None:
    mol = parse_smiles(ODD[name])
    wanted = np.array(naive(mol))
    rows = KearnesAtoms().rows(mol)
    np.testing.assert_allclose(rows, wanted, rtol=0, atol=1e-6)
    assert rows.dtype == np.float32 and np.isfinite(rows).all()
    np.testing.assert_array_equal(KearnesAtoms(missing_bit=False).rows(mol), rows[:, :27])
    without = np.delete(rows, [11, 12], axis=1)
    np.testing.assert_array_equal(KearnesAtoms(chirality=False).rows(mol), without)


@pytest.mark.parametrize("name", ["esol", "tox21", "bbbp"])
def test_real_molecules_as_defined(name: str, shared_data: Callable[[str], Path]) -> None:
    for row in rows_of(shared_data(f"molecules/{name}.csv"))[:: 40 if name == "esol" else 250]:
        mol = parse_smiles(row["smiles"])
        np.testing.assert_allclose(KearnesAtoms().rows(mol), naive(mol), rtol=0, atol=1e-6)


def test_names() -> None:
    every = KearnesAtoms()
    assert (len(every.names), len(KearnesAtoms(missing_bit=False).names)) == (28, 27)
    assert len(KearnesAtoms(chirality=False, missing_bit=False).names) == 25
    rows = np.concatenate([every.rows(parse_smiles(smiles)) for smiles in ODD.values()])
    assert (rows != 0).any(0).sum() >= 27, "the molecules show all columns but iodine perhaps"
    whole = np.delete(rows, every.names.index("partial_charge"), axis=1)
    assert np.array_equal(whole, whole.round())


def columns(smiles: str, atom: int) -> set[str]:
    every = KearnesAtoms()
    row = every.rows(parse_smiles(smiles))[atom]
    return {name for name, value in zip(every.names, row, strict=True) if value}


STEREO = {"cip_R", "cip_S"}
CHARGES = {"partial_charge", "partial_charge_missing"}
KINDS = {*SYMBOLS, "metal"}
RINGS = {f"rings_of_{size}" for size in range(3, 9)}


ATOMS = [
    ("C[C@H](N)O", 1, STEREO, {"cip_R"}),
    ("C[C@@H](N)O", 1, STEREO, {"cip_S"}),
    ("CC(N)O", 1, STEREO, set()),
    ("CC[Pt](Cl)Cl", 0, CHARGES, {"partial_charge_missing"}),
    ("CCO", 0, CHARGES, {"partial_charge"}),
    ("[Na+]", 0, KINDS, {"metal"}),
    ("N[Pt](N)(Cl)Cl", 1, KINDS, {"metal"}),
    ("[U]", 0, KINDS, {"metal"}),
    *((one, 0, KINDS, set()) for one in ("B", "[SiH4]", "[SeH2]", "[AsH3]", "[He]", "*")),
    ("[TeH2]", 0, KINDS, set()),
    (ODD["macrocycle"], 0, RINGS, set()),
    ("C1CCCCCCC1", 0, RINGS, {"rings_of_8"}),
    ("C1CCCCCCCC1", 0, RINGS, set()),
]


@pytest.mark.parametrize(("smiles", "atom", "group", "found"), ATOMS)
def test_columns_of_one_atom(smiles: str, atom: int, group: set[str], found: set[str]) -> None:
    assert columns(smiles, atom) & group == found


def test_a_label_that_takes_too_long_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(features, "_MOST_LABEL_STEPS", 1)
    with pytest.raises(MoleculeError, match="chirality=False"):
        KearnesAtoms().rows(parse_smiles(ODD["steroid"]))
    assert len(KearnesAtoms(chirality=False).rows(parse_smiles(ODD["steroid"]))) == 21


def test_every_atom_of_cubane_is_in_three_rings() -> None:
    rows = KearnesAtoms().rows(parse_smiles(ODD["cubane"]))
    column = KearnesAtoms().names.index("rings_of_4")
    assert rows[:, column].tolist() == [3] * 8


def test_many_donors_are_all_found() -> None:
    # A search that stops at a thousand matches would lose the last ones.
    chain = parse_smiles("NC" * 1100)
    assert hydrogen_bonding_atoms(chain, "Donor") == list(range(0, 2200, 2))


def test_every_key_is_made_once_and_may_be_written_on() -> None:
    made = []

    def make(key: int) -> list[float]:
        made.append(key)
        return [key, -key]

    table = RowTable(2)
    keys = [*range(300), 5, 5, 299]
    rows = table.rows(keys, make)
    assert rows.tolist() == [[key, -key] for key in keys] and rows.dtype == np.float32
    rows[:] = 9
    assert table.rows([7], make).tolist() == [[7, -7]]
    assert table.rows([], make).shape == (0, 2)
    assert made == list(range(300)) and len(table) == 300
    again = pickle.loads(pickle.dumps(table))
    assert len(again) == 0 and again.width == 2
