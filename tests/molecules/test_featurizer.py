"""From a molecule to its data."""

import json
import math
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rdkit import Chem

from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.molecules.chemistry import MoleculeError, rdkit_module
from pyg_dynbatch.molecules.descriptors import MorganCounts, RDKitDescriptors
from pyg_dynbatch.molecules.features import (
    AtomFeatures,
    DoubleBondStereo,
    KearnesAtoms,
    KearnesPairs,
    PairFeatures,
)
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer, upper_triangle
from tests.molecules.own_features import BothHetero, Given, GivenRow, GivenRows, Mass
from tests.molecules.writings import ODD, fingerprint, reordered

KEARNES = MoleculeFeaturizer()


@pytest.mark.parametrize("name", ODD)
def test_every_molecule_becomes_valid_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = KEARNES(f" {ODD[name]} ")
    assert data.smiles == ODD[name]
    assert data.num_nodes == Chem.MolFromSmiles(ODD[name]).GetNumAtoms()
    assert data.x.shape[1] == len(KEARNES.atom_names)
    codes = KEARNES.pair_codes(KEARNES.prepare(ODD[name]))
    upper = codes[np.triu_indices(len(codes))]
    assert data.pair_code.tolist() == upper.tolist()
    assert "y" not in data and "row" not in data
    monkeypatch.setenv(NATIVE_SWITCH, "0")  # pair codes by their definition
    assert torch.equal(KEARNES(ODD[name]).pair_code, data.pair_code)


@given(name=st.sampled_from(sorted(ODD)), random=st.randoms())
def test_features_follow_the_atoms(name: str, random: Any) -> None:
    mol = Chem.MolFromSmiles(ODD[name])
    order = list(range(mol.GetNumAtoms()))
    random.shuffle(order)
    text, order = reordered(mol, order)
    one = KEARNES.prepare(ODD[name])
    other = KEARNES.prepare(text)
    rows = KEARNES.atom_rows(one)
    np.testing.assert_allclose(KEARNES.atom_rows(other), rows[order], rtol=0, atol=2e-5)
    codes = KEARNES.pair_codes(one)
    np.testing.assert_array_equal(KEARNES.pair_codes(other), codes[np.ix_(order, order)])


@pytest.mark.parametrize("options", [{}, {"explicit_hydrogens": True}, {"fragments": "largest"}])
@pytest.mark.parametrize("name", ["salt", "stereo", "steroid", "cisplatin", "cubane"])
def test_the_molecule_of_the_caller_is_never_changed(name: str, options: dict[str, Any]) -> None:
    mol = Chem.MolFromSmiles(ODD[name])
    before = fingerprint(mol)
    featurizer = MoleculeFeaturizer(**options)
    data = featurizer(mol)
    assert fingerprint(mol) == before
    assert torch.equal(data.x, featurizer(ODD[name]).x)
    assert "smiles" not in data


def test_a_molecule_that_was_never_sanitised() -> None:
    for name in ("stereo", "caffeine", "salt"):
        raw = Chem.MolFromSmiles(ODD[name], sanitize=False)
        data = KEARNES(raw)
        assert torch.equal(data.x, KEARNES(ODD[name]).x)
        assert torch.equal(data.pair_code, KEARNES(ODD[name]).pair_code)
        assert raw.NeedsUpdatePropertyCache()


def test_a_molecule_without_atoms_is_empty_data() -> None:
    own = MoleculeFeaturizer(
        extra_atoms=[Mass()], extra_pairs=[BothHetero()], descriptors=RDKitDescriptors(["TPSA"])
    )
    for featurizer in (KEARNES, own):
        data = featurizer(Chem.Mol())
        assert data.x.shape == (0, len(featurizer.atom_names))
        assert data.pair_code.shape == (0,) and data.num_nodes == 0
    assert data.descriptor.isnan().all()


def test_a_graph_has_the_bonds_of_rdkit_with_their_features() -> None:
    text = "C1=CC=CC1C(=O)Nc1ccc(C#N)cc1"
    graph = KEARNES.graph(text)
    mol = Chem.MolFromSmiles(text)
    assert graph.num_edges == 2 * mol.GetNumBonds()
    orders = ["SINGLE", "DOUBLE", "TRIPLE", "AROMATIC"]  # the first columns of the table
    edges = zip(graph.edge_index.T.tolist(), graph.edge_attr, strict=True)
    for (first, second), features in edges:
        bond = mol.GetBondBetweenAtoms(first, second)
        assert features[:4].argmax() == orders.index(bond.GetBondType().name)
        assert features[-1] == bond.IsInRing()


def test_hydrogens_become_atoms_after_the_others() -> None:
    data = MoleculeFeaturizer(explicit_hydrogens=True)("C[C@H](N)O")
    assert data.num_nodes == 11 and data.x.shape[1] == 28
    assert torch.equal(data.x[:4, :13], KEARNES("C[C@H](N)O").x[:, :13])
    assert data.x[4:, 0].tolist() == [1.0] * 7


def test_standardising_makes_writings_of_one_compound_equal() -> None:
    featurizer = MoleculeFeaturizer(
        fragments="largest", standardize=["tautomer", "neutral"], descriptors="morgan"
    )
    salt = featurizer("[Na+].[O-]C(=O)c1cccc(O)n1")
    neutral = featurizer("OC(=O)c1cccc(=O)[nH]1")
    assert torch.equal(salt.descriptor, neutral.descriptor)
    assert salt.x.sum(0).tolist() == neutral.x.sum(0).tolist()
    raw = MoleculeFeaturizer(fragments="largest", descriptors="morgan")
    assert not torch.equal(raw("Oc1ccccn1").descriptor, raw("O=c1cccc[nH]1").descriptor)
    # Atoms stay in the order of the input.
    mol = featurizer.prepare("[Na+].[O-]c1cccc[nH+]1")
    assert [atom.GetSymbol() for atom in mol.GetAtoms()] == [*"OCCCCCN"]
    assert Chem.MolToSmiles(mol) == "O=c1cccc[nH]1"


@pytest.mark.parametrize("part", ["CCO", "C1CC1[C@H](N)O"])
def test_the_largest_fragment(part: str) -> None:
    assert KEARNES(f"[Na+].{part}").num_nodes == KEARNES(part).num_nodes + 1
    data = MoleculeFeaturizer(fragments="largest")(f"[Na+].{part}")
    torch.testing.assert_close(data.x, KEARNES(part).x)
    assert torch.equal(data.pair_code, KEARNES(part).pair_code)
    assert data.smiles == f"[Na+].{part}"


def test_too_many_atoms() -> None:
    featurizer = MoleculeFeaturizer(max_atoms=10)
    assert featurizer("C" * 10).num_nodes == 10
    for bad in ("C" * 11, Chem.MolFromSmiles("C" * 11)):
        with pytest.raises(MoleculeError, match="11 atoms, 66 pairs"):
            featurizer(bad)
    with pytest.raises(MoleculeError, match="14 atoms"):
        MoleculeFeaturizer(max_atoms=10, explicit_hydrogens=True)("CCCC")
    assert MoleculeFeaturizer(max_atoms=3, fragments="largest")("C.CCC").num_nodes == 3


def test_indices_of_the_pairs_of_large_molecules_are_not_cached() -> None:
    for atoms in (128, 129):
        first, second = np.triu_indices(atoms)
        assert np.array_equal(upper_triangle(atoms), first * atoms + second)
    assert upper_triangle(128) is upper_triangle(128)
    assert upper_triangle(129) is not upper_triangle(129)


def test_own_features() -> None:
    featurizer = MoleculeFeaturizer(extra_atoms=[Mass(12.0)], extra_pairs=[BothHetero()])
    data = featurizer("OCN")
    plain = KEARNES("OCN")
    assert featurizer.atom_names == (*KEARNES.atom_names, "mass")
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
    data = MoleculeFeaturizer(GivenRows(np.array([[1], [2], [3]])), BothHetero())("OCN")
    assert data.pair_code.tolist() == [0, 0, 1, 0, 0, 0]
    assert data.x.tolist() == [[1], [2], [3]]


def test_stereo_of_double_bonds() -> None:
    table = MoleculeFeaturizer(extra_pairs=[DoubleBondStereo()]).pair_table
    codes = MoleculeFeaturizer(extra_pairs=[DoubleBondStereo()])("F/C=C\\F").pair_code.long()
    assert table.names[-2:] == ("bond_E", "bond_Z")
    assert table.features[codes][:, -2:].sum(0).tolist() == [0, 1]


REFUSED = [
    *(
        (MoleculeError, lambda bad=bad: KEARNES(bad), "cannot be used")
        for bad in ("", "C1CC", None, math.nan)
    ),
    *((TypeError, lambda v=v: KEARNES(v), type(v).__name__) for v in (3, b"CCO", ["CCO"])),
    (ValueError, lambda: MoleculeFeaturizer(atoms="weave"), "'weave'"),
    (ValueError, lambda: MoleculeFeaturizer(pairs="weave"), "'weave'"),
    (ValueError, lambda: MoleculeFeaturizer(fragments="some"), "'some'"),
    (ValueError, lambda: MoleculeFeaturizer(standardize=["salts"]), "'salts'"),
    (ValueError, lambda: MoleculeFeaturizer(max_atoms=0), "max_atoms"),
    (ValueError, lambda: MoleculeFeaturizer(extra_atoms=[KearnesAtoms()]), "same name"),
    (ValueError, lambda: MoleculeFeaturizer(extra_pairs=[Given(None, 10)]), "one byte"),
    (ValueError, lambda: Mass(names=("a", "a")), "same name"),
]


@pytest.mark.parametrize(("kind", "call", "word"), REFUSED)
def test_what_cannot_be_is_refused(kind, call, word):
    with pytest.raises(kind, match=word):
        call()


INVALID_FEATURES = [
    ("pairs", np.array([[0, 1], [0, 0]]), "symmetric"),
    ("pairs", np.array([[0, 2], [2, 0]]), "table"),
    ("pairs", np.array([[0, -1], [-1, 0]]), "table"),
    ("pairs", np.zeros((2, 2)), "float64"),
    ("pairs", np.zeros((3, 3), int), "shape"),
    ("pairs", [[0, 0], [0, 0]], "list"),
    ("atoms", np.zeros((2, 2)), "shape"),
    ("atoms", np.array([["a"], ["b"]]), "<U1"),
    ("atoms", [[0.0], [0.0]], "list"),
    ("atoms", np.array([[0.0], [np.nan]]), "not finite"),
    ("descriptors", np.zeros((1, 1)), "shape"),
    ("descriptors", np.array(["a"]), "<U1"),
    ("descriptors", [0.0], "list"),
]


@pytest.mark.parametrize(("kind", "given", "word"), INVALID_FEATURES)
def test_own_features_of_invalid_form_are_refused(kind: str, given: object, word: str) -> None:
    part = {"pairs": Given, "atoms": GivenRows, "descriptors": GivenRow}[kind](given)
    with pytest.raises(ValueError, match=word):
        MoleculeFeaturizer(**{kind: part})("CO")


MANY = [
    MoleculeFeaturizer(),
    MoleculeFeaturizer(KearnesAtoms(missing_bit=False), fragments="largest", max_atoms=50),
    MoleculeFeaturizer(
        Mass(2.0, ("m", "n")),
        BothHetero(),
        extra_atoms=[KearnesAtoms(chirality=False)],
        extra_pairs=[DoubleBondStereo()],
        standardize=["neutral"],
    ),
    MoleculeFeaturizer(
        descriptors=[RDKitDescriptors(["TPSA", "MolWt"]), MorganCounts(1, 16, True)],
        explicit_hydrogens=True,
    ),
]


@pytest.mark.parametrize("featurizer", MANY, ids=repr)
def test_is_rebuilt_from_its_spec(featurizer: MoleculeFeaturizer) -> None:
    spec = featurizer.spec()
    rebuilt = MoleculeFeaturizer.from_spec(json.loads(json.dumps(spec)))
    for again in (rebuilt, pickle.loads(pickle.dumps(featurizer))):
        assert again.spec() == spec
        assert again.atom_names == featurizer.atom_names
        assert again.pair_table == featurizer.pair_table
        for smiles in ("C[C@H](N)O", "[Na+].c1ccccc1[O-]"):
            one = featurizer(smiles)
            other = again(smiles)
            assert one.keys() == other.keys()
            assert torch.equal(one.x, other.x)
            assert torch.equal(one.pair_code, other.pair_code)
            assert torch.equal(one.get("descriptor", one.x), other.get("descriptor", other.x))


class Forgetful(Mass):
    """Does not keep its argument."""

    def __init__(self, scale: float) -> None:
        super().__init__(unit=scale)


def test_a_spec_needs_kept_plain_arguments() -> None:
    with pytest.raises(ValueError, match="'scale'"):
        MoleculeFeaturizer(Forgetful(2.0)).spec()
    with pytest.raises(ValueError, match="Tensor"):
        MoleculeFeaturizer(Mass(torch.ones(()))).spec()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "path"),
    [
        (AtomFeatures, "no_such_module.Mass"),
        (AtomFeatures, "tests.molecules.own_features.BothHetero"),
        (PairFeatures, "os.system"),
        (MoleculeFeaturizer, None),
    ],
)
def test_no_class_is_imported_because_a_spec_names_it(base: Any, path: str | None) -> None:
    with pytest.raises(ValueError, match="import the module"):
        base.from_spec({"class_path": path, "init_args": {}})


def test_its_repr_names_its_parts() -> None:
    assert repr(MANY[2]).count(",") == 3
    assert KearnesPairs().table == KEARNES.pair_table


def test_without_rdkit_one_clear_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit.Chem", None)
    rdkit_module.cache_clear()
    with pytest.raises(ImportError, match="RDKit") as caught:
        MoleculeFeaturizer()("CCO")
    assert "pip install -e '.[chem]'" in str(caught.value)
