"""Law: the molecules of a raw file are predicted as the data module of the training has them."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rdkit import Chem

from pyg_dynbatch.data import (
    AtomFeatures,
    DoubleBondStereo,
    KearnesAtoms,
    MoleculeDescriptors,
    MoleculeFeaturizer,
    MorganCounts,
    PairFeatures,
    PairTable,
    RDKitDescriptors,
    TableOptions,
)
from pyg_dynbatch.datasets import SplitOptions
from pyg_dynbatch.lightning import MoleculeDataModule, MoleculeFileData, MoleculeNetData
from pyg_dynbatch.models import load, predict
from tests.molecules.molecules import property_task
from tests.training.helpers import bare_trainer

SMILES = [
    "[Na+].CC(=O)[O-]", "C[C@H](F)O", "C[C@@H](F)O", "F/C=C/Cl", "F/C=C\\Cl", "Oc1cccc[nH+]1",
    "[CH3:2][OH:1]", "C[C@H](O)Cl |&1:1|", "[H]OC([H])([H])C", "CC(=O)C=C(O)CC(C)C",
    "c1ccccc1CCCCCCC", "CO", "CC#N", "NCCO", "C(", "", "C=F", "C[C@](F)(Cl)Br",
]  # fmt: skip
BAD = [14, 15, 16]  # rows


class Heavy(AtomFeatures):
    """A user's feature of atoms, with an option."""

    def __init__(self, least: float = 2.0) -> None:
        super().__init__(["heavy"])
        self.least = least

    def rows(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([[atom.GetMass() >= self.least] for atom in mol.GetAtoms()], dtype=float)


class BothHeavy(PairFeatures):
    """A user's feature of pairs, with an option."""

    def __init__(self, least: float = 2.0) -> None:
        super().__init__(PairTable(torch.eye(2)[:, 1:], ("both_heavy",), torch.tensor([0, 8])))
        self.least = least

    def codes(self, mol: Chem.Mol) -> np.ndarray:
        heavy = np.array([atom.GetMass() >= self.least for atom in mol.GetAtoms()], dtype=bool)
        return (heavy[:, None] & heavy).astype(np.uint8)


class Count(MoleculeDescriptors):
    """A user's descriptor, with an option."""

    def __init__(self, element: int = 6) -> None:
        super().__init__(["count"])
        self.element = element

    def row(self, mol: Chem.Mol) -> np.ndarray:
        return np.array([sum(atom.GetAtomicNum() == self.element for atom in mol.GetAtoms())])


class Case(NamedTuple):
    """How a data module is made, and the file that it reads."""

    data: Callable[[], MoleculeDataModule]
    file: str = "a.csv"


def write_table(
    path: str, sep: str = ",", decimal: str = ".", column: str = "smiles", missing: str = ""
) -> None:
    """Write the molecules with two properties; another column of SMILES holds only methane."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=sep)
        other = "drawn" if column == "smiles" else "smiles"
        writer.writerow(["id", column, "first", "label", other])
        for row, text in enumerate(SMILES):
            first = missing if row % 5 == 4 else str(row / 4).replace(".", decimal)
            writer.writerow([f"m{row}", text, first, row % 3, "C"])


def write_sdf(path: str) -> None:
    """Write the molecules as mol blocks, with empty ones for those that are none."""
    records = []
    for row, text in enumerate(SMILES):
        mol = Chem.MolFromSmiles(text) if text else None
        block = "\n\n\nnone\nM  END\n" if mol is None else Chem.MolToMolBlock(mol)
        records.append(f"{block}>  <first>\n{row / 4}\n\n>  <label>\n{row % 3}\n\n$$$$\n")
    Path(path).write_text("".join(records), encoding="utf-8")


SPLIT = SplitOptions("random", fractions=(0.6, 0.2, 0.2), seed=0)


def files(file: str = "a.csv", targets: tuple[str, ...] = ("first",), **options: Any) -> Any:
    defaults: dict[str, Any] = {"kind": "regression", "split": SPLIT, "batch_size": 4}
    return MoleculeFileData(file, list(targets), **{**defaults, **options})


def molecule_net() -> MoleculeNetData:
    """A data set whose SMILES are in the column mol."""
    lines = [f'"{text}",,{row % 2}' for row, text in enumerate(SMILES)]
    Path("bace.csv").write_text("\n".join(["mol,CID,Class", *lines]))
    return MoleculeNetData("BACE", ".", ".", False, split=SPLIT)


def featurized(**options: Any) -> Case:
    return Case(lambda: files(featurizer=MoleculeFeaturizer(**options)))


GERMAN = TableOptions("mol", ";", ",", ("unknown",))
RDKIT = RDKitDescriptors(["MolWt", "MaxPartialCharge", "NumRadicalElectrons"])
STANDARD = {"fragments": "largest", "standardize": ["neutral", "tautomer"]}
FEATURES: dict[str, Case] = {
    "no stereo": featurized(atoms=KearnesAtoms(chirality=False)),
    "stereo of double bonds": featurized(extra_pairs=[DoubleBondStereo()]),
    "no bit for missing charges": featurized(atoms=KearnesAtoms(missing_bit=False)),
    "hydrogens": featurized(explicit_hydrogens=True),
    "largest fragment": featurized(fragments="largest"),
    "neutral": featurized(standardize=["neutral"]),
    "tautomer": featurized(standardize=["tautomer"]),
    "largest, neutral, tautomer": featurized(**STANDARD),
    "small": featurized(max_atoms=8),
    "rdkit": featurized(descriptors=RDKIT),
    "morgan": featurized(descriptors=[RDKIT, MorganCounts(1, 16, chirality=True)]),
    "own atoms": featurized(extra_atoms=[Heavy(13.0)]),
    "own pairs": featurized(extra_pairs=[BothHeavy(13.0)]),
    "own descriptor": featurized(descriptors=Count(8)),
    "only own": featurized(atoms=Heavy(least=13.0), pairs=BothHeavy(least=13.0)),
}
CASES: dict[str, Case] = {
    **FEATURES,
    "connected pairs": Case(lambda: files(pair_set="connected")),
    "bonds": Case(lambda: files(pair_set="bonds")),
    "pairs up to two bonds": Case(lambda: files(pair_set=2)),
    "no pair with itself": Case(lambda: files(self_pairs=False)),
    "few pairs in a batch": Case(lambda: files(max_size=100)),
    "several properties": Case(lambda: files(targets=("first", "label"))),
    "classes": Case(lambda: files(targets=("label",), kind="multiclass", num_classes=3)),
    "other table": Case(lambda: files("b.csv", table=GERMAN), "b.csv"),
    "tabs": Case(lambda: files("a.tsv"), "a.tsv"),
    "mol blocks": Case(lambda: files("a.sdf"), "a.sdf"),
    "mol blocks, standardized": Case(
        lambda: files("a.sdf", featurizer=MoleculeFeaturizer(explicit_hydrogens=True, **STANDARD)),
        "a.sdf",
    ),
    "of MoleculeNet": Case(molecule_net, "bace.csv"),
}
# Options that others combine, or that concern the same code.
SLOW = {
    "no stereo", "no bit for missing charges", "largest fragment", "neutral", "tautomer", "rdkit",
    "only own", "connected pairs", "bonds", "several properties", "tabs", "mol blocks",
}  # fmt: skip


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in names]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table("a.csv")
    write_table("a.tsv", sep="\t")
    write_table("b.csv", sep=";", decimal=",", column="mol", missing="unknown")
    write_sdf("a.sdf")


def predicted(table: Any) -> dict[str, np.ndarray]:
    """Return the columns of a table that a model computes."""
    columns = {
        name: values
        for name, values in table.items()
        if name.startswith(("prediction", "probability"))
    }
    assert columns
    return columns


def check_rows(table: Any, expected: dict[str, np.ndarray], rows: list[int]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(table[name][rows], values, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*(records are not molecules|num_workers)")
@pytest.mark.parametrize("name", marked(CASES))
def test_a_raw_file_is_predicted_as_in_training(name: str, tmp_path: Path) -> None:
    make, file = CASES[name]
    data = make()
    task = property_task(data)
    bare_trainer(tmp_path, limit_val_batches=0).fit(task, datamodule=data)
    task.model.save("a.ckpt")
    model = load("a.ckpt")

    expected = predicted(predict(task.model, data.molecules))
    rows = [molecule.row for molecule in data.molecules]
    bad = [error.row for error in data.molecules.errors]
    assert set(BAD) <= set(bad)

    table = predict(model, file, batch_size=5)
    check_rows(table, expected, rows)
    assert np.flatnonzero(table["fault"] != "").tolist() == sorted(bad)
    for column in expected:
        assert np.isnan(table[column][bad]).all()
    if file.endswith(".csv"):
        check_rows(predict(model, SMILES), expected, rows)


def described(data: MoleculeDataModule) -> list[Any]:
    """Return which rows a data module keeps, and their tensors as lists."""
    batch = data.collater()(list(data.molecules)).to_dict()
    fields = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    return [fields[name].tolist() for name in sorted(fields)]


@pytest.mark.parametrize("name", marked(FEATURES))
def test_every_option_changes_these_molecules(name: str) -> None:
    assert described(FEATURES[name].data()) != described(files())
