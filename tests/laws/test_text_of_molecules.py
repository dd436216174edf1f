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
    FeatureFile,
    MoleculeDescriptors,
    MoleculeFeaturizer,
    MorganCounts,
    PairFeatures,
    PairTable,
    RDKitDescriptors,
    TableOptions,
)
from pyg_dynbatch.datasets import FeaturizeOptions
from pyg_dynbatch.lightning import (
    MoleculeDataModule,
    MoleculeFileData,
    MoleculeNetData,
    PackedMoleculeData,
    SplitOptions,
)
from pyg_dynbatch.models import MoleculePredictor
from pyg_dynbatch.molecules.features.kearnes import KearnesAtoms
from pyg_dynbatch.molecules.work.commands import run_featurize, run_molecule_predict
from pyg_dynbatch.prediction import read_checkpoint
from tests.molecules.molecules import property_task
from tests.training.helpers import bare_trainer

SMILES = [
    "[Na+].CC(=O)[O-]", "C[C@H](F)O", "C[C@@H](F)O", "F/C=C/Cl", "F/C=C\\Cl", "Oc1cccc[nH+]1",
    "[CH3:2][OH:1]", "C[C@H](O)Cl |&1:1|", "[H]OC([H])([H])C", "CC(=O)C=C(O)CC(C)C",
    "c1ccccc1CCCCCCC", "CO", "CC#N", "NCCO", "C(", "", "C=F", "C[C@](F)(Cl)Br",
]  # fmt: skip
BAD = {14, 15, 16}  # rows


class Heavy(AtomFeatures):
    """A user's feature of atoms, with an option."""

    def __init__(self, least: float = 2.0) -> None:
        super().__init__(["heavy"], ["bit"])
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
    """A file, a data module that reads it, and what ``predict`` is told about the file."""

    data: Callable[[], MoleculeDataModule]
    file: str = "a.csv"
    told: tuple[str, ...] = ()


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


def write_features() -> None:
    """Write numbers for all molecules."""
    good = [text for row, text in enumerate(SMILES) if row not in BAD]
    lines = [f'"{text}",{len(text)},{text.count("C")}' for text in good]
    Path("numbers.csv").write_text("\n".join(["mol,length,carbons", *lines]))
    Path("good.csv").write_text("\n".join(["smiles", *(f'"{text}"' for text in good)]))
    np.save("numbers.npy", np.array([[len(text), text.count("C")] for text in good], dtype=float))


def files(file: str = "a.csv", table: TableOptions = TableOptions(), **options: Any) -> Any:  # noqa: B008
    targets = options.pop("targets", ["first"])
    reading = options.pop("reading", FeaturizeOptions(progress=False))
    split = SplitOptions("random", fractions=(0.6, 0.2, 0.2), seed=0, leakage=False)
    return MoleculeFileData(
        file, targets, table=table, split=split, reading=reading, batch_size=4, **options
    )


def featurized(**options: Any) -> Case:
    return Case(lambda: files(featurizer=MoleculeFeaturizer(**options)))


def from_features(*arguments: str) -> Case:
    return Case(lambda: files(featurizer=MoleculeFeaturizer(descriptors=FeatureFile(*arguments))))


def packed(*options: str) -> PackedMoleculeData:
    told = ["--input", "a.csv", "--output", "packed", "--targets", "first"]
    assert run_featurize([*told, *options]) == 0
    split = SplitOptions("random", fractions=(0.6, 0.2, 0.2), seed=0, leakage=False)
    return PackedMoleculeData("packed", split=split, batch_size=4, pairs=3)


def molecule_net() -> MoleculeNetData:
    """A data set whose SMILES are in the column mol."""
    lines = [f'"{text}",{row % 2}' for row, text in enumerate(SMILES)]
    Path("bace.csv").write_text("\n".join(["mol,Class", *lines]))
    split = SplitOptions("random", fractions=(0.6, 0.2, 0.2), seed=0, leakage=False)
    reading = FeaturizeOptions(progress=False)
    return MoleculeNetData("BACE", ".", ".", False, split=split, reading=reading)


def kept(policy: str) -> Case:
    return Case(lambda: files(reading=FeaturizeOptions(policy, progress=False)))


GERMAN = TableOptions("mol", ";", ",", ("unknown",))
RDKIT = RDKitDescriptors(["MolWt", "MaxPartialCharge", "NumRadicalElectrons"])
FEATURES: dict[str, Case] = {
    "deepchem": featurized(atoms="deepchem", pairs="deepchem"),
    "deepchem, stereo": featurized(atoms="deepchem", pairs="deepchem", chirality=True),
    "no stereo": featurized(chirality=False),
    "stereo of double bonds": featurized(extra_pairs=[DoubleBondStereo()]),
    "no bit for missing charges": featurized(atoms=KearnesAtoms(missing_bit=False)),
    "hydrogens": featurized(explicit_hydrogens=True),
    "hydrogens, deepchem": featurized(atoms="deepchem", explicit_hydrogens=True),
    "largest fragment": featurized(fragments="largest"),
    "neutral": featurized(standardize=["neutral"]),
    "tautomer": featurized(standardize=["tautomer"]),
    "largest, neutral, tautomer": featurized(
        fragments="largest", standardize=["neutral", "tautomer"]
    ),
    "small": featurized(max_atoms=8),
    "rdkit": featurized(descriptors=RDKIT),
    "morgan": featurized(descriptors=[RDKIT, MorganCounts(1, 16, chirality=True)]),
    "numbers of a table": from_features("numbers.csv", None, "mol"),
    "numbers of an array": from_features("numbers.npy", "good.csv"),
    "own atoms": featurized(extra_atoms=[Heavy(13.0)]),
    "own pairs": featurized(extra_pairs=[BothHeavy(13.0)]),
    "own descriptor": featurized(descriptors=Count(8)),
    "only own": featurized(atoms=Heavy(least=13.0), pairs=BothHeavy(least=13.0)),
}
CASES: dict[str, Case] = {
    **FEATURES,
    "connected pairs": Case(lambda: files(pairs="connected")),
    "bonds": Case(lambda: files(pairs="bonds")),
    "pairs up to two bonds": Case(lambda: files(pairs=2)),
    "no pair with itself": Case(lambda: files(self_pairs=False)),
    "few pairs in a batch": Case(lambda: files(max_pairs=100)),
    "bad rows kept": kept("blank"),
    "several properties": Case(lambda: files(targets=["first", "label"], kind="regression")),
    "classes": Case(lambda: files(targets=["label"], kind="multiclass", classes=3)),
    "other table": Case(
        lambda: files("b.csv", GERMAN), "b.csv", ("--sep", ";", "--smiles-column", "mol")
    ),
    "tabs": Case(lambda: files("a.tsv"), "a.tsv"),
    "mol blocks": Case(lambda: files("a.sdf"), "a.sdf"),
    "mol blocks, hydrogens": Case(
        lambda: files("a.sdf", featurizer=MoleculeFeaturizer(explicit_hydrogens=True)), "a.sdf"
    ),
    "packed": Case(
        lambda: packed("--fragments", "largest", "--standardize", "neutral", "--atoms", "deepchem")
    ),
    "of MoleculeNet": Case(molecule_net, "bace.csv", ("--smiles-column", "mol")),
}


# Options that others combine, or that concern the same code.
SLOW = {
    "deepchem", "no stereo", "no bit for missing charges", "hydrogens", "largest fragment",
    "neutral", "tautomer", "rdkit", "numbers of an array", "only own", "connected pairs", "bonds",
    "few pairs in a batch", "several properties", "tabs", "mol blocks, hydrogens",
}  # fmt: skip


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in names]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_table("a.csv")
    write_table("a.tsv", sep="\t")
    write_table("b.csv", sep=";", decimal=",", column="mol", missing="unknown")
    write_sdf("a.sdf")
    write_features()
    return tmp_path


def checkpoint_of(data: MoleculeDataModule, path: Path, is_fitted: bool) -> Any:
    """Save a checkpoint of random weights, or of one step of training."""
    torch.manual_seed(0)
    module = property_task(data)  # type: ignore[arg-type]
    run = bare_trainer(path.parent, limit_train_batches=1, limit_val_batches=0)
    if is_fitted:
        run.fit(module, datamodule=data)
    else:
        module.start_from(data)
        module.model(whole(data))  # the statistics of batch normalization
        run.strategy.connect(module)
    run.save_checkpoint(path)
    return module


def whole(data: MoleculeDataModule) -> Any:
    """Return all molecules of a data module in one batch."""
    (batch,) = data.make_loader(data.molecules, batch_size=len(data.molecules))
    return batch


def columns_of(table: list[dict[str, str]], data: MoleculeDataModule) -> np.ndarray:
    """Return the values or probabilities in a table of predictions."""
    start = "prediction" if data.kind == "regression" else "probability"
    names = [name for name in table[0] if name.startswith(f"{start}_")]
    return np.array([[float(row[name] or "nan") for name in names] for row in table])


def check(case: Case, folder: Path, is_fitted: bool) -> None:
    data = case.data()
    path = folder / "a.ckpt"
    model = checkpoint_of(data, path, is_fitted).model.eval()
    expected = np.full((len(SMILES), model.schema.num_outputs), np.nan)
    with torch.no_grad():
        expected[data.molecules.rows] = model.predicted(model(whole(data))).numpy()
    is_bad = np.isin(np.arange(len(SMILES)), [error.row for error in data.molecules.errors])
    expected[is_bad] = np.nan

    told = ["--checkpoint", str(path), "--input", case.file, *case.told]
    assert run_molecule_predict([*told, "--output", "out.csv"], read_checkpoint(path)) == 0
    with Path("out.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    np.testing.assert_allclose(columns_of(table, data), expected, rtol=1e-5, atol=1e-6)
    assert [row["status"] != "ok" for row in table] == is_bad.tolist()

    if not case.file.endswith("sdf"):
        predictor = MoleculePredictor([path])
        good = np.flatnonzero(~is_bad)
        molecules = [predictor.featurizer(SMILES[row]) for row in good]
        values = predictor.predict(molecules).values
        np.testing.assert_allclose(values, expected[good], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", marked(CASES))
def test_a_raw_file_is_predicted_as_the_data_set(name: str, folder: Path) -> None:
    check(CASES[name], folder, is_fitted=False)


FITTED = ["morgan", *(pytest.param(name, marks=pytest.mark.long) for name in CASES)]


@pytest.mark.filterwarnings("ignore:.*(num_workers|look like classes)")
@pytest.mark.parametrize("name", FITTED)
def test_a_raw_file_is_predicted_as_in_training(name: str, folder: Path) -> None:
    check(CASES[name], folder, is_fitted=True)


def test_the_column_of_molecules_is_that_of_the_training(folder: Path) -> None:
    """The file has another column with the usual name, too."""
    check(Case(lambda: files("b.csv", GERMAN), "b.csv", ("--sep", ";")), folder, is_fitted=True)


def described(data: MoleculeDataModule) -> list[Any]:
    """Return which rows a data module keeps, and their tensors as lists."""
    fields = whole(data).to_dict()
    names = sorted(name for name in fields if isinstance(fields[name], torch.Tensor))
    return [data.molecules.rows.tolist(), *(fields[name].tolist() for name in names)]


@pytest.mark.parametrize("name", marked(FEATURES))
def test_every_option_changes_these_molecules(name: str, folder: Path) -> None:
    assert described(FEATURES[name].data()) != described(files())
