"""Descriptors of whole molecules: RDKit's own values, NaN where there is none, and nothing said."""

import json
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from rdkit import Chem, rdBase
from rdkit.Chem import Descriptors, rdFingerprintGenerator

from pyg_dynbatch.data import MoleculeFeaturizer, MorganCounts, RDKitDescriptors
from pyg_dynbatch.molecules.features import descriptors
from tests.molecules.own_features import GivenRow, MarkedCharge
from tests.molecules.writings import ODD, fingerprint

FEW = ("MolWt", "TPSA", "MaxPartialCharge", "NumAtomStereoCenters", "HeavyAtomCount")


def own_value(name: str, smiles: str) -> float:
    """Asks RDKit about a molecule that nothing else has touched."""
    function = dict(Descriptors.descList)[name]
    with rdBase.BlockLogs(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = float(function(Chem.MolFromSmiles(smiles)))
        except (ValueError, ZeroDivisionError):
            return float("nan")
    return value if abs(value) < 3e38 else float("nan")


@pytest.mark.parametrize("name", ["steroid", "salt", "cisplatin", "dummy", "single ion", "nitro"])
def test_values_are_those_of_rdkit(name: str) -> None:
    featurizer = MoleculeFeaturizer(descriptors="rdkit")
    unstable = ("Ipc", "AvgIpc")  # they depend on the order of the atoms
    names = tuple(name for name, _ in Descriptors.descList if name not in unstable)
    assert featurizer.descriptor_names == names
    row = featurizer(ODD[name]).descriptor
    assert row.shape == (1, len(names)) and row.dtype == torch.float32
    expected = [own_value(each, ODD[name]) for each in featurizer.descriptor_names]
    np.testing.assert_allclose(row[0].numpy(), np.array(expected), rtol=1e-4, atol=1e-6)
    assert np.isfinite(expected).sum() > 150


def test_chosen_descriptors_in_the_requested_order() -> None:
    row = RDKitDescriptors(FEW).row(Chem.MolFromSmiles("CCO"))
    np.testing.assert_allclose(row, [own_value(name, "CCO") for name in FEW], rtol=1e-6)
    (number,) = RDKitDescriptors(FEW[-1:]).row(Chem.MolFromSmiles("CCO")).tolist()
    assert number == 3.0


def test_undefined_and_too_large_is_nan() -> None:
    partial = RDKitDescriptors(["MaxPartialCharge", "MolWt"]).row(Chem.MolFromSmiles("[Na+]C"))
    assert np.isnan(partial[0]) and partial[1] > 30
    chain = Chem.MolFromSmiles("C" * 200)
    assert dict(Descriptors.descList)["Ipc"](chain) > 1e40
    found = RDKitDescriptors(["Ipc", "HeavyAtomCount"]).row(chain)
    assert np.isnan(found[0]) and found[1] == 200
    spaceless = RDKitDescriptors(["SPS", "MolWt"]).row(Chem.MolFromSmiles("*"))
    with pytest.raises(ZeroDivisionError):
        dict(Descriptors.descList)["SPS"](Chem.MolFromSmiles("*"))
    assert np.isnan(spaceless[0]) and not np.isnan(spaceless[1])


def raising(kind: type[Exception]) -> Any:
    def fail(mol: Chem.Mol) -> float:
        raise kind("no")

    return fail


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Descriptors of one's own making in the place of RDKit's."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(descriptors, "_functions", lambda: found)
    return found


def test_only_errors_of_rdkit_are_caught(functions: dict[str, Any]) -> None:
    caught = (ValueError, ZeroDivisionError, OverflowError, RuntimeError, np.linalg.LinAlgError)
    functions.update({kind.__name__: raising(kind) for kind in caught})
    functions |= {"inf": lambda mol: -np.inf, "large": lambda mol: 10**400, "one": lambda mol: 1}
    row = RDKitDescriptors().row(Chem.MolFromSmiles("C"))
    assert np.isnan(row[:-1]).all() and row[-1] == 1
    for kind in (TypeError, AttributeError, KeyError, KeyboardInterrupt):
        functions["broken"] = raising(kind)  # type: ignore[arg-type]
        with pytest.raises(kind):
            RDKitDescriptors().row(Chem.MolFromSmiles("C"))


def test_rdkit_is_silenced(functions: dict[str, Any], capfd: pytest.CaptureFixture) -> None:
    def loud(mol: Chem.Mol) -> float:
        warnings.warn("one warning a descriptor", stacklevel=1)
        rdBase.LogErrorMsg("one line a descriptor")
        return float(np.log(np.zeros(1))[0])

    functions["loud"] = loud
    assert np.isnan(RDKitDescriptors().row(Chem.MolFromSmiles("C"))).all()
    assert capfd.readouterr() == ("", "")
    rdBase.LogErrorMsg("heard again")
    assert "heard again" in capfd.readouterr().err


@pytest.mark.parametrize("smiles", [ODD["stereo"], "[Na+].[O-]C(=O)C[C@H](N)O", "[H]OC([H])C"])
def test_hydrogens_that_become_atoms_change_nothing(smiles: str) -> None:
    for mol in (smiles, Chem.MolFromSmiles(smiles)):
        rows = [
            MoleculeFeaturizer(
                descriptors=RDKitDescriptors(FEW), explicit_hydrogens=explicit, fragments="largest"
            )(mol)
            for explicit in (False, True)
        ]
        assert rows[0].num_nodes < rows[1].num_nodes
        assert torch.equal(rows[0].descriptor, rows[1].descriptor)


def test_the_chosen_fragment_is_described() -> None:
    part = MoleculeFeaturizer(descriptors="rdkit", fragments="largest")
    alone = MoleculeFeaturizer(descriptors="rdkit")
    acid = "O=C(O)c1ccc(CC(C)C)cc1"
    found, wanted = part(f"[Na+].[Cl-].{acid}").descriptor, alone(acid).descriptor
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not torch.allclose(alone(f"[Na+].{acid}").descriptor.nan_to_num(), wanted.nan_to_num())


def test_molecules_are_not_changed_and_features_do_not_interfere() -> None:
    """Descriptors read no property that atom features have left on the molecule."""
    mol = Chem.MolFromSmiles(ODD["steroid"])
    before = fingerprint(mol)
    plain = MoleculeFeaturizer(descriptors="rdkit")(mol)
    assert fingerprint(mol) == before
    own = [MarkedCharge()]
    marked = MoleculeFeaturizer(extra_atoms=own, descriptors=MarkedDescriptor())
    assert marked("CCO").descriptor.tolist() == [[0.0]]
    assert torch.equal(plain.x, MoleculeFeaturizer()(mol).x)
    assert "descriptor" not in MoleculeFeaturizer()(mol)


class MarkedDescriptor(GivenRow):
    """Counts the atoms that some feature has marked."""

    def __init__(self) -> None:
        super().__init__(None)

    def row(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([sum(atom.HasProp("mark") for atom in mol.GetAtoms())])


def test_own_rows_are_converted_to_float32() -> None:
    for given, found in ((7, [[7.0]]), (1e39, [[-1.0]]), (-np.inf, [[-1.0]])):
        row = MoleculeFeaturizer(descriptors=GivenRow(np.array([given])))("CO").descriptor
        assert row.dtype == torch.float32 and row.nan_to_num(-1.0).tolist() == found


def test_specs_with_and_without() -> None:
    plain = MoleculeFeaturizer()
    assert "descriptors" not in plain.spec  # else every folder packed before would be stale
    assert plain.descriptor_names == ()
    few = MoleculeFeaturizer(descriptors=RDKitDescriptors(FEW))
    spec = json.loads(json.dumps(few.spec))
    assert spec["descriptors"][0]["names"] == list(FEW)
    again = MoleculeFeaturizer.from_spec(spec)
    assert again.descriptor_names == FEW and again.digest == few.digest != plain.digest
    assert torch.equal(again("CCO").descriptor, few("CCO").descriptor)
    del spec["descriptors"]
    assert MoleculeFeaturizer.from_spec(spec).digest == plain.digest
    # All of them are written out by name, so that a later RDKit with more gives the same.
    (whole,) = MoleculeFeaturizer(descriptors="rdkit").spec["descriptors"]
    assert whole["options"]["names"] == whole["names"] == list(RDKitDescriptors().names)
    pickled = pickle.loads(pickle.dumps(MoleculeFeaturizer(descriptors="rdkit")))
    assert pickled.descriptor_names == RDKitDescriptors().names


def test_a_spec_of_other_descriptors_is_an_error() -> None:
    spec = json.loads(json.dumps(MoleculeFeaturizer(descriptors=RDKitDescriptors(FEW)).spec))
    spec["descriptors"][0]["names"][0] = "something"
    with pytest.raises(ValueError, match="names of RDKitDescriptors are not those"):
        MoleculeFeaturizer.from_spec(spec)
    spec["descriptors"][0]["class"] = "tests.molecules.own_features:Mass"
    with pytest.raises(ValueError, match="a subclass of MoleculeDescriptors"):
        MoleculeFeaturizer.from_spec(spec)


def test_morgan_counts_beside_other_descriptors() -> None:
    both = MoleculeFeaturizer(descriptors=["rdkit", "morgan"])
    first = len(RDKitDescriptors().names)
    assert len(both.descriptor_names) == first + 2048
    assert both.descriptor_names[first] == "morgan_0"
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    mol = Chem.MolFromSmiles("CC(=O)Oc1ccccc1C(=O)O")
    row = both("CC(=O)Oc1ccccc1C(=O)O").descriptor[0]
    assert row[first:].tolist() == list(generator.GetCountFingerprint(mol))
    assert row[first:].max() > 1
    again = MoleculeFeaturizer.from_spec(json.loads(json.dumps(both.spec)))
    assert again.digest == both.digest and again.descriptor_names == both.descriptor_names
    pickled = pickle.loads(pickle.dumps(both))
    assert torch.equal(pickled("CCO").descriptor[0, first:], both("CCO").descriptor[0, first:])


def test_morgan_counts_have_options() -> None:
    isomers = ("C[C@H](N)O", "C[C@@H](N)O")
    for chirality in (False, True):
        part = MorganCounts(radius=2, size=64, chirality=chirality)
        one, other = (part.row(Chem.MolFromSmiles(text)).tolist() for text in isomers)
        assert (one != other) is chirality


SIMILAR = r"RDKitDescriptors: the descriptor is unknown[\s\S]*got: +'molwt'[\s\S]*MolWt"
TWICE = [MorganCounts(1, 8), MorganCounts(2, 8)]


REFUSED = [
    (lambda: RDKitDescriptors(["TPSA", "molwt"]), SIMILAR),
    (lambda: RDKitDescriptors(["TPSA", "molwt"]), "HeavyAtomMolWt"),
    (lambda: RDKitDescriptors(["~~~~~~~~~~"]), r"RDKitDescriptors\(\)\.names"),
    (lambda: RDKitDescriptors(["TPSA", "TPSA"]), "'TPSA' twice"),
    (lambda: RDKitDescriptors([]), r"at least one name, all different\n  got: +none"),
    (
        lambda: MoleculeFeaturizer(descriptors="mordred"),
        r"unknown descriptors[\s\S]*'rdkit'[\s\S]*'mordred'",
    ),
    (lambda: MorganCounts(radius=-1), "an option is out of range"),
    (lambda: MorganCounts(size=0), "an option is out of range"),
    (lambda: MoleculeFeaturizer(descriptors=TWICE), "two descriptors have the same name"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_describes_its_descriptors() -> None:
    featurizer = MoleculeFeaturizer(descriptors=RDKitDescriptors(FEW))
    lines = featurizer.describe().splitlines()
    assert lines[-6] == "descriptors: 5"
    assert lines[-5].split() == ["0", "MolWt", "RDKitDescriptors"]
    assert "RDKitDescriptors: 5 descriptors" in repr(featurizer)
    assert "descriptors" not in MoleculeFeaturizer().describe()
