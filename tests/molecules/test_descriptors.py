"""Descriptors of whole molecules: RDKit's own values, NaN where there is none, and nothing said."""

import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from rdkit import Chem, rdBase
from rdkit.Chem import Descriptors, rdFingerprintGenerator

from pyg_dynbatch.molecules import descriptors
from pyg_dynbatch.molecules.descriptors import MorganCounts, RDKitDescriptors
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
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


def test_undefined_and_too_large_is_nan() -> None:
    partial = RDKitDescriptors(["MaxPartialCharge", "MolWt"]).row(Chem.MolFromSmiles("[Na+]C"))
    assert np.isnan(partial[0]) and partial[1] > 30
    chain = Chem.MolFromSmiles("C" * 200)
    assert dict(Descriptors.descList)["Ipc"](chain) > 1e40
    found = RDKitDescriptors(["Ipc", "HeavyAtomCount"]).row(chain)
    assert np.isnan(found[0]) and found[1] == 200
    for given, expected in ((7, 7.0), (1e39, -1.0), (-np.inf, -1.0)):
        row = MoleculeFeaturizer(descriptors=GivenRow(np.array([given])))("CO").descriptor
        assert row.dtype == torch.float32 and row.nan_to_num(-1.0).tolist() == [[expected]]


def raising(kind: type[BaseException]) -> Any:
    def fail(mol: Chem.Mol) -> float:
        raise kind("no")

    return fail


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Descriptors of one's own making in the place of RDKit's."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(descriptors, "_rdkit_functions", lambda: found)
    return found


def test_only_errors_of_rdkit_are_caught(functions: dict[str, Any]) -> None:
    caught = (ValueError, ZeroDivisionError, OverflowError, RuntimeError, np.linalg.LinAlgError)
    functions.update({kind.__name__: raising(kind) for kind in caught})
    functions |= {"inf": lambda mol: -np.inf, "large": lambda mol: 10**400, "one": lambda mol: 1}
    row = RDKitDescriptors().row(Chem.MolFromSmiles("C"))
    assert np.isnan(row[:-1]).all() and row[-1] == 1
    for kind in (TypeError, AttributeError, KeyError, KeyboardInterrupt):
        functions["broken"] = raising(kind)
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
    part = RDKitDescriptors(FEW)
    for mol in (smiles, Chem.MolFromSmiles(smiles)):
        plain = MoleculeFeaturizer(descriptors=part, fragments="largest")(mol)
        explicit = MoleculeFeaturizer(
            descriptors=part, fragments="largest", explicit_hydrogens=True
        )(mol)
        assert plain.num_nodes < explicit.num_nodes
        assert torch.equal(plain.descriptor, explicit.descriptor)


def test_the_chosen_fragment_is_described() -> None:
    part = MoleculeFeaturizer(descriptors="rdkit", fragments="largest")
    acid = "O=C(O)c1ccc(CC(C)C)cc1"
    found = part(f"[Na+].[Cl-].{acid}").descriptor
    expected = MoleculeFeaturizer(descriptors="rdkit")(acid).descriptor
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


class MarkedDescriptor(GivenRow):
    """Counts the atoms that some feature has marked."""

    def __init__(self) -> None:
        super().__init__(None)

    def row(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([sum(atom.HasProp("mark") for atom in mol.GetAtoms())])


def test_molecules_are_not_changed_and_features_do_not_interfere() -> None:
    """Descriptors read no property that atom features have left on the molecule."""
    mol = Chem.MolFromSmiles(ODD["steroid"])
    before = fingerprint(mol)
    plain = MoleculeFeaturizer(descriptors="rdkit")(mol)
    assert fingerprint(mol) == before
    marked = MoleculeFeaturizer(extra_atoms=[MarkedCharge()], descriptors=MarkedDescriptor())
    assert marked("CCO").descriptor.tolist() == [[0.0]]
    assert torch.equal(plain.x, MoleculeFeaturizer()(mol).x)
    assert "descriptor" not in MoleculeFeaturizer()(mol)


def test_all_descriptors_are_saved_by_name() -> None:
    # So that a later RDKit with more of them gives the same.
    (whole,) = MoleculeFeaturizer(descriptors="rdkit").spec()["init_args"]["descriptors"]
    assert whole["init_args"]["names"] == list(RDKitDescriptors().names)


def test_morgan_counts_beside_other_descriptors() -> None:
    both = MoleculeFeaturizer(descriptors=["rdkit", "morgan"])
    first = len(RDKitDescriptors().names)
    assert len(both.descriptor_names) == first + 2048
    generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=2048)
    smiles = "CC(=O)Oc1ccccc1C(=O)O"
    row = both(smiles).descriptor[0]
    assert row[first:].tolist() == list(generator.GetCountFingerprint(Chem.MolFromSmiles(smiles)))
    assert row[first:].max() > 1
    pickled = pickle.loads(pickle.dumps(both))
    assert torch.equal(pickled("CCO").descriptor[0, first:], both("CCO").descriptor[0, first:])


def test_morgan_counts_have_options() -> None:
    for chirality in (False, True):
        part = MorganCounts(radius=2, size=64, chirality=chirality)
        one, other = (
            part.row(Chem.MolFromSmiles(text)).tolist() for text in ("C[C@H](N)O", "C[C@@H](N)O")
        )
        assert (one != other) is chirality


REFUSED = [
    (lambda: RDKitDescriptors(["TPSA", "molwt"]), "'molwt'"),
    (lambda: RDKitDescriptors(["TPSA", "MolWeight"]), "MolWt"),
    (lambda: RDKitDescriptors(["TPSA", "TPSA"]), "same name"),
    (lambda: MoleculeFeaturizer(descriptors="mordred"), "'mordred'"),
    (lambda: MoleculeFeaturizer(descriptors=[MorganCounts(1, 8), MorganCounts(2, 8)]), "same name"),
]


@pytest.mark.parametrize(("call", "word"), REFUSED)
def test_what_cannot_be_is_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
