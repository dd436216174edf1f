"""From a molecule to its data."""

import json
import math
import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rdkit import Chem

from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.data import (
    AtomFeatures,
    DoubleBondStereo,
    KearnesAtoms,
    KearnesPairs,
    MoleculeError,
    MoleculeFeaturizer,
    RDKitDescriptors,
)
from pyg_dynbatch.datasets import featurize_record
from pyg_dynbatch.molecules.features.featurizer import upper_triangle
from pyg_dynbatch.molecules.features.rdkit_access import rdkit_module, rdkit_version
from pyg_dynbatch.molecules.files.build import featurize_stream, packing_of
from pyg_dynbatch.molecules.files.read import RawMolecule
from tests.molecules.own_features import BothHetero, Given, GivenRow, GivenRows, Mass
from tests.molecules.packed import assert_same
from tests.molecules.writings import ODD, fingerprint, reordered

KEARNES = MoleculeFeaturizer()
DEEPCHEM = MoleculeFeaturizer("deepchem", "deepchem")
SETS = {"kearnes": KEARNES, "deepchem": DEEPCHEM}


@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("name", ODD)
def test_every_molecule_becomes_valid_data(name: str, which: str) -> None:
    featurizer = SETS[which]
    data = featurizer(f" {ODD[name]} ")
    data.validate(num_codes=len(featurizer.pair_table))
    assert data.smiles == ODD[name]
    assert data.num_nodes == Chem.MolFromSmiles(ODD[name]).GetNumAtoms()
    assert data.x.shape[1] == len(featurizer.atom_names) == len(featurizer.atom_kinds)
    codes = featurizer.pair_codes(featurizer.prepare(ODD[name]))
    upper = codes[np.triu_indices(len(codes))]
    assert data.pair_code.tolist() == upper.tolist()
    assert "y" not in data and "row" not in data


BAD = ["", "C1CC", "C=F", "C" * 61, "CC CC"]
WAYS: dict[str, dict[str, Any]] = {
    "kearnes": {},
    "deepchem": {"atoms": "deepchem", "pairs": "deepchem", "chirality": True},
    "hydrogens": {"explicit_hydrogens": True, "extra_pairs": [DoubleBondStereo()]},
    "largest": {"fragments": "largest", "descriptors": RDKitDescriptors(["MolWt", "TPSA"])},
    "neutral": {"standardize": ["neutral"], "chirality": False, "extra_atoms": [Mass()]},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_has_the_bits_of_single_molecules(way: str, monkeypatch) -> None:
    featurizer = MoleculeFeaturizer(max_atoms=60, **WAYS[way])
    mols = [mol for mol in map(Chem.MolFromSmiles, ODD.values()) if mol.GetNumAtoms() < 40]
    random = [Chem.MolToRandomSmilesVect(mol, 1, randomSeed=1)[0] for mol in mols]
    texts = [*ODD.values(), *BAD, *random, " CO "]
    records = [RawMolecule(row, f"mine:{row}", text) for row, text in enumerate(texts)]
    (piece,) = featurize_stream(records, featurizer)
    found = packing_of(featurizer, 0).unpack(piece.arrays, np.arange(len(records)))
    errors = {error.row: error for error in piece.errors}
    assert {records[row].smiles for row in errors} >= set(BAD)
    monkeypatch.setenv(NATIVE_SWITCH, "0")  # pair codes by their definition
    for record, molecule in zip(records, found, strict=True):
        if record.row not in errors:
            assert_same(molecule, featurize_record(featurizer, record))
            continue
        with pytest.raises(MoleculeError) as caught:
            featurize_record(featurizer, record)
        error = errors[record.row]
        assert (error.reason, error.atom) == (caught.value.reason, caught.value.atom)
        assert (molecule.num_nodes, molecule.smiles) == (0, (record.smiles or "").strip())


@given(name=st.sampled_from(sorted(ODD)), which=st.sampled_from(sorted(SETS)), random=st.randoms())
def test_features_follow_the_atoms(name: str, which: str, random: Any) -> None:
    featurizer = SETS[which]
    mol = Chem.MolFromSmiles(ODD[name])
    order = list(range(mol.GetNumAtoms()))
    random.shuffle(order)
    text, order = reordered(mol, order)
    one, other = featurizer.prepare(ODD[name]), featurizer.prepare(text)
    rows, others = featurizer.atom_rows(one), featurizer.atom_rows(other)
    # An oddity of DeepChem's: the implicit valence depends on the brackets around an atom.
    kept = ["implicit_valence" not in name for name in featurizer.atom_names]
    rows, others = rows[:, kept], others[:, kept]
    np.testing.assert_allclose(others, rows[order], rtol=0, atol=2e-5, err_msg=text)
    codes, other_codes = featurizer.pair_codes(one), featurizer.pair_codes(other)
    np.testing.assert_array_equal(other_codes, codes[np.ix_(order, order)], err_msg=text)


@pytest.mark.parametrize("options", [{}, {"explicit_hydrogens": True}, {"fragments": "largest"}])
@pytest.mark.parametrize("name", ["salt", "stereo", "steroid", "cisplatin", "cubane"])
def test_the_molecule_of_the_caller_is_never_changed(name: str, options: dict[str, Any]) -> None:
    for sets in ("kearnes", "deepchem"):
        mol = Chem.MolFromSmiles(ODD[name])
        before = fingerprint(mol)
        featurizer = MoleculeFeaturizer(sets, sets, **options)
        data = featurizer(mol)
        assert fingerprint(mol) == before
        assert not mol.GetAtomWithIdx(0).HasProp("_GasteigerCharge")
        assert not mol.GetAtomWithIdx(0).HasProp("input_atom")
        # DeepChem's implicit valence depends on brackets, which another text of it may have.
        kept = ["implicit_valence" not in column for column in featurizer.atom_names]
        assert torch.equal(data.x[:, kept], featurizer(ODD[name]).x[:, kept])
        assert "smiles" not in data


def test_a_molecule_that_was_never_sanitised() -> None:
    for name in ("stereo", "caffeine", "salt"):
        raw = Chem.MolFromSmiles(ODD[name], sanitize=False)
        for featurizer in SETS.values():
            data, wanted = featurizer(raw), featurizer(ODD[name])
            assert torch.equal(data.x, wanted.x)
            assert torch.equal(data.pair_code, wanted.pair_code)
        assert raw.NeedsUpdatePropertyCache()


def test_a_molecule_without_atoms_is_empty_data() -> None:
    for featurizer in (
        *SETS.values(),
        MoleculeFeaturizer(extra_atoms=[Mass()], extra_pairs=[BothHetero()], descriptors="rdkit"),
    ):
        data = featurizer(Chem.Mol())
        width = len(featurizer.descriptor_names)
        assert width == 0 or data.descriptor.shape == (1, width) and data.descriptor.isnan().all()
        assert data.x.shape == (0, len(featurizer.atom_names))
        assert data.pair_code.shape == (0,) and data.num_nodes == 0
        data.validate()


def test_hydrogens_become_atoms_after_the_others() -> None:
    featurizer = MoleculeFeaturizer("deepchem", "deepchem", explicit_hydrogens=True)
    assert len(featurizer.atom_names) == 70
    data = featurizer("CO")
    assert data.num_nodes == 6
    symbols = [featurizer.atom_names[int(row[:44].argmax())] for row in data.x]
    assert symbols == ["C", "O", "H", "H", "H", "H"]
    kearnes = MoleculeFeaturizer(explicit_hydrogens=True)("C[C@H](N)O")
    assert kearnes.num_nodes == 11 and kearnes.x.shape[1] == 28
    assert torch.equal(kearnes.x[:4, :13], KEARNES("C[C@H](N)O").x[:, :13])


def test_standardising_makes_writings_of_one_compound_equal() -> None:
    steps = {"fragments": "largest", "standardize": ["tautomer", "neutral"]}
    featurizer = MoleculeFeaturizer(**steps, descriptors="morgan")
    salt, neutral = featurizer("[Na+].[O-]C(=O)c1cccc(O)n1"), featurizer("OC(=O)c1cccc(=O)[nH]1")
    assert torch.equal(salt.descriptor, neutral.descriptor)
    assert salt.x.sum(0).tolist() == neutral.x.sum(0).tolist()
    raw = MoleculeFeaturizer(fragments="largest", descriptors="morgan")
    assert not torch.equal(raw("Oc1ccccn1").descriptor, raw("O=c1cccc[nH]1").descriptor)
    # Atoms stay in the order of the input, also where pictures are drawn.
    mol = featurizer.prepare("[Na+].[O-]c1cccc[nH+]1")
    assert [atom.GetIntProp("input_atom") for atom in mol.GetAtoms()] == [1, 2, 3, 4, 5, 6, 7]
    assert Chem.MolToSmiles(mol) == "O=c1cccc[nH]1"
    again = MoleculeFeaturizer.from_spec(json.loads(json.dumps(featurizer.spec)))
    assert again.digest == featurizer.digest != raw.digest
    assert again.standardize == ("tautomer", "neutral")


def test_fragments() -> None:
    salt = "[Na+].[Cl-].CCO"
    assert KEARNES(salt).num_nodes == 5
    largest = MoleculeFeaturizer(fragments="largest")
    assert torch.equal(largest(salt).pair_code, KEARNES("CCO").pair_code)
    torch.testing.assert_close(largest(salt).x, KEARNES("CCO").x)
    assert largest(salt).smiles == salt
    places = [atom.GetIntProp("input_atom") for atom in largest.prepare(salt).GetAtoms()]
    assert places == [2, 3, 4]
    ring = largest("[Na+].C1CC1[C@H](N)O")
    torch.testing.assert_close(ring.x, KEARNES("C1CC1[C@H](N)O").x)
    assert torch.equal(ring.pair_code, KEARNES("C1CC1[C@H](N)O").pair_code)


def test_chirality_on_and_off() -> None:
    widths = {
        ("kearnes", None): (28, 12),
        ("kearnes", True): (28, 12),
        ("kearnes", False): (26, 12),
        ("deepchem", None): (75, 14),
        ("deepchem", True): (78, 18),
        ("deepchem", False): (75, 14),
    }
    for (sets, chirality), (atoms, pairs) in widths.items():
        featurizer = MoleculeFeaturizer(sets, sets, chirality=chirality)
        assert (len(featurizer.atom_names), len(featurizer.pair_table.names)) == (atoms, pairs)


def test_too_many_atoms() -> None:
    featurizer = MoleculeFeaturizer(max_atoms=10)
    assert featurizer("C" * 10).num_nodes == 10
    for bad in ("C" * 11, Chem.MolFromSmiles("C" * 11)):
        with pytest.raises(MoleculeError, match="11 atoms, 66 pairs: more than max_atoms=10"):
            featurizer(bad)
    with pytest.raises(MoleculeError, match="14 atoms, 105 pairs"):
        MoleculeFeaturizer(max_atoms=10, explicit_hydrogens=True)("CCCC")
    assert MoleculeFeaturizer(max_atoms=3, fragments="largest")("C.CCC").num_nodes == 3


def made(**options: Any) -> Any:
    return lambda: MoleculeFeaturizer(**options)


def features(*given: Any) -> Any:
    return lambda: AtomFeatures.__init__(Mass(), *given)


KINDS = r"unknown kind of feature[\s\S]*'bit', 'count' or 'real'[\s\S]*'bits'"
OWN_SETS = {"atoms": KearnesAtoms(), "pairs": KearnesPairs()}


REFUSED = [
    *(
        (MoleculeError, lambda bad=bad: KEARNES(bad), "cannot be used")
        for bad in ("", "CC(C)(C)(C)C", "C1CC", None, math.nan)
    ),
    *(
        (TypeError, lambda v=v: KEARNES(v), f"is not a molecule(?s:.)*{type(v).__name__}")
        for v in (3, b"CCO", ["CCO"])
    ),
    (ValueError, made(atoms="weave"), r"unknown atoms[\s\S]*'kearnes' or 'deep[\s\S]*'weave'"),
    (ValueError, made(pairs="weave"), "unknown pairs"),
    (ValueError, made(fragments="some"), r"unknown fragments[\s\S]*'all' or 'largest'"),
    (ValueError, made(extra_atoms=[KearnesAtoms()]), r"have the same name[\s\S]*got: +H"),
    (ValueError, made(extra_pairs=[Given(None, 10)]), "must fit in one byte"),
    (ValueError, made(standardize=["salts"]), "unknown standardize"),
    (ValueError, made(max_atoms=0), "max_atoms is too small"),
    (ValueError, made(chirality=True, **OWN_SETS), "chirality has no effect on your own feat"),
    (ValueError, lambda: Mass(names=("a", "a")), "Mass: names and kinds do not match"),
    (ValueError, features(["a"], ["bits"]), KINDS),
    (
        ValueError,
        lambda: MoleculeFeaturizer(Mass(torch.ones(()))).spec,
        r"Mass: an option cannot be saved[\s\S]*not JSON",
    ),
    (TypeError, lambda: type("Own", (MoleculeFeaturizer,), {}), "it is not subclassed"),
    *(
        (ValueError, lambda c=c: MoleculeFeaturizer.from_spec(c), "the spec cannot be read")
        for c in ({}, {"format": "something"}, [], None)
    ),
]


@pytest.mark.parametrize(("kind", "call", "words"), REFUSED)
def test_what_cannot_be_is_refused(kind, call, words):
    with pytest.raises(kind, match=words):
        call()


def test_indices_of_the_pairs_of_large_molecules_are_not_cached() -> None:
    for atoms in (128, 129):
        first, second = np.triu_indices(atoms)
        assert np.array_equal(upper_triangle(atoms), first * atoms + second)
    assert upper_triangle(128) is upper_triangle(128)
    assert upper_triangle(129) is not upper_triangle(129)


def test_own_features() -> None:
    featurizer = MoleculeFeaturizer(extra_atoms=[Mass(12.0)], extra_pairs=[BothHetero()])
    data, plain = featurizer("OCN"), KEARNES("OCN")
    assert featurizer.atom_names == (*KEARNES.atom_names, "mass")
    assert featurizer.atom_kinds[-1] == "real"
    assert torch.equal(data.x[:, :-1], plain.x)
    torch.testing.assert_close(data.x[:, -1], torch.tensor([15.999, 12.011, 14.007]) / 12)
    table = featurizer.pair_table
    assert table.names == (*KEARNES.pair_table.names, "both_hetero") and len(table) == 52
    features = table.features[data.pair_code.long()]
    assert torch.equal(features[:, :-1], KEARNES.pair_table.features[plain.pair_code.long()])
    # What the class says of an atom with itself does not count.
    assert features[:, -1].tolist() == [0, 0, 1, 0, 0, 0]
    distance = KEARNES.pair_table.distance[plain.pair_code.long()]
    assert torch.equal(table.distance[data.pair_code.long()], distance)


def test_only_own_features() -> None:
    featurizer = MoleculeFeaturizer(Mass(), BothHetero())
    assert featurizer("OCN").pair_code.tolist() == [0, 0, 1, 0, 0, 0]
    assert featurizer("OCN").x.shape == (3, 1)
    stereo = MoleculeFeaturizer(extra_pairs=[DoubleBondStereo()])
    names = stereo.pair_table.names
    features = stereo.pair_table.features[stereo("F/C=C\\F").pair_code.long()]
    assert features[:, names.index("bond_Z")].sum() == 1
    assert features[:, names.index("bond_E")].sum() == 0


SHAPE = r"has an invalid shape or dtype[\s\S]*"


INVALID_FEATURES = [
    ("pairs", np.array([[0, 1], [0, 0]]), r"Given: codes\(\) is not symmetric"),
    ("pairs", np.array([[0, 1], [0, 0]]), r"1 for atoms \(0, 1\), 0 for \(1, 0\)"),
    ("pairs", np.array([[0, 2], [2, 0]]), r"in its table[\s\S]*0 to 1[\s\S]*2 for atoms \(0"),
    ("pairs", np.array([[0, -1], [-1, 0]]), "-1 for atoms"),
    ("pairs", np.zeros((2, 2)), SHAPE + r"whole numbers \[2, 2\][\s\S]*float64 \[2, 2\]"),
    ("pairs", np.zeros((3, 3), int), r"int64 \[3, 3\]"),
    ("pairs", [[0, 0], [0, 0]], r"got: +list"),
    ("atoms", np.zeros((2, 2)), rf"GivenRows: rows\(\) {SHAPE}\[2, 1\][\s\S]*\[2, 2\]"),
    ("atoms", np.zeros((3, 1)), r"float64 \[3, 1\]"),
    ("atoms", np.array([["a"], ["b"]]), r"<U1 \[2, 1\]"),
    ("atoms", [[0.0], [0.0]], r"got: +list"),
    ("atoms", np.array([[0.0], [np.nan]]), r"'given_0' is nan, not finite[\s\S]*atom 1"),
    ("descriptors", np.zeros((1, 1)), rf"GivenRow: row\(\) {SHAPE}\[1\][\s\S]*\[1, 1\]"),
    ("descriptors", np.zeros(2), r"float64 \[2\]"),
    ("descriptors", np.array(["a"]), r"<U1 \[1\]"),
    ("descriptors", [0.0], r"got: +list"),
]


@pytest.mark.parametrize(("kind", "given", "words"), INVALID_FEATURES)
def test_own_features_of_invalid_form_are_refused(kind: str, given: object, words: str) -> None:
    part = {"pairs": Given, "atoms": GivenRows, "descriptors": GivenRow}[kind](given)
    with pytest.raises(ValueError, match=words):
        MoleculeFeaturizer(**{kind: part})("CO")


def test_rows_of_whole_numbers_are_taken() -> None:
    assert MoleculeFeaturizer(atoms=GivenRows(np.array([[1], [2]])))("CO").x.tolist() == [[1], [2]]


MANY = (
    MoleculeFeaturizer(),
    MoleculeFeaturizer("deepchem", "deepchem", chirality=True, explicit_hydrogens=True),
    MoleculeFeaturizer(KearnesAtoms(missing_bit=False), fragments="largest", max_atoms=50),
    MoleculeFeaturizer("deepchem", extra_atoms=[Mass(2.0, ("m", "n"))], extra_pairs=[BothHetero()]),
    MoleculeFeaturizer(descriptors=RDKitDescriptors(["TPSA", "MolWt"]), explicit_hydrogens=True),
)


@pytest.mark.parametrize("featurizer", MANY, ids=repr)
def test_is_rebuilt_from_its_spec(featurizer: MoleculeFeaturizer) -> None:
    text = json.dumps(featurizer.spec)
    for again in (
        MoleculeFeaturizer.from_spec(json.loads(text)),
        pickle.loads(pickle.dumps(featurizer)),
    ):
        assert again.spec == featurizer.spec == json.loads(text)
        assert again.digest == featurizer.digest
        assert again.atom_names == featurizer.atom_names
        assert again.pair_table == featurizer.pair_table
        for smiles in ("C[C@H](N)O", "[Na+].c1ccccc1[O-]"):
            assert torch.equal(again(smiles).x, featurizer(smiles).x)
            assert torch.equal(again(smiles).pair_code, featurizer(smiles).pair_code)
            wanted = featurizer(smiles).get("descriptor", torch.zeros(0))
            assert torch.equal(again(smiles).get("descriptor", torch.zeros(0)), wanted)
            assert again.prepare(smiles).GetNumAtoms() == featurizer(smiles).num_nodes


def test_a_release_that_changes_no_feature_leaves_the_digest(monkeypatch):
    before = KEARNES.digest
    monkeypatch.setattr("pyg_dynbatch.__version__", "99.0")
    assert KEARNES.digest == before and KEARNES.spec["pyg_dynbatch"] == "99.0"
    monkeypatch.setattr(
        "pyg_dynbatch.molecules.features.featurizer._FORMAT", "MoleculeFeaturizer 99"
    )
    assert KEARNES.digest != before


def test_digests_differ() -> None:
    assert len({featurizer.digest for featurizer in (*MANY, DEEPCHEM)}) == 6


def test_another_rdkit_is_a_warning() -> None:
    spec = KEARNES.spec | {"rdkit": "1999.01.1"}
    with pytest.warns(
        UserWarning, match=r"a different version of RDKit[\s\S]*1999\.01\.1[\s\S]*got"
    ):
        again = MoleculeFeaturizer.from_spec(spec)
    assert again.digest == KEARNES.digest


@pytest.mark.parametrize("key", ["names", "kinds"])
def test_other_columns_are_an_error(key: str) -> None:
    spec = json.loads(json.dumps(KEARNES.spec))
    spec["atoms"][0][key][3] = "something"
    message = rf"{key} of KearnesAtoms[\s\S]*28 columns, 'something' in column 3"
    with pytest.raises(ValueError, match=message):
        MoleculeFeaturizer.from_spec(spec)
    spec["atoms"][0][key] = KEARNES.spec["atoms"][0][key][:20]
    message = r"expected: +20 columns[\s\S]*28 columns, '\w+' in column 20"
    with pytest.raises(ValueError, match=message):
        MoleculeFeaturizer.from_spec(spec)
    spec = KEARNES.spec
    spec["pairs"][0]["table"] = "0" * 16
    with pytest.raises(ValueError, match="table of KearnesPairs"):
        MoleculeFeaturizer.from_spec(spec)


CLASSES = [
    ("no_such_module:Mass", "No module named 'no_such_module'"),
    ("tests.molecules.own_features:Volume", "has no attribute 'Volume'"),
    ("tests.molecules.own_features:BothHetero", "a subclass of AtomFeatures"),
    ("json:dumps", "a subclass of AtomFeatures"),
    ("tests.a:f.<locals>.Mass", "a class made within a function"),
]


@pytest.mark.parametrize(("path", "message"), CLASSES)
def test_classes_that_cannot_be_imported(path: str, message: str) -> None:
    spec = KEARNES.spec
    spec["atoms"][0]["class"] = path
    words = rf"{re.escape(repr(path))} cannot be imported[\s\S]*{message}"
    with pytest.raises(ValueError, match=words):
        MoleculeFeaturizer.from_spec(spec)


def test_describes_itself() -> None:
    text = MANY[3].describe()
    assert f"RDKit {rdkit_version()}" in text
    assert "atom features: 77" in text and "pair features: 13, in 52 codes" in text
    assert re.search(r"^ 44  degree_0 +bit +DeepChemAtoms$", text, re.M)
    assert re.search(r"^ 76  n +real +Mass$", text, re.M)
    assert re.search(r"^ 12  both_hetero +BothHetero$", text, re.M)
    assert "DeepChemAtoms+Mass: 77 atom features" in repr(MANY[3])


def test_without_rdkit_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit.Chem", None)
    rdkit_module.cache_clear()
    with pytest.raises(ImportError, match="RDKit cannot be imported") as caught:
        MoleculeFeaturizer()("CCO")
    assert 'pip install "pyg_dynbatch[chem]"' in str(caught.value)


def test_a_fragment_keeps_the_numbers_of_the_text() -> None:
    mol = MoleculeFeaturizer(fragments="largest").prepare("[Na+].[H]OC([H])([H])C")
    assert [atom.GetIntProp("input_atom") for atom in mol.GetAtoms()] == [2, 3, 6]
