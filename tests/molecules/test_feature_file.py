"""Features of molecules from a file: found by the SMILES, and refused where they do not match."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rdkit import Chem

from pyg_dynbatch.data import FeatureFile, MoleculeError, MoleculeFeaturizer, parse_smiles
from pyg_dynbatch.molecules.features.rdkit_access import parse_mol_block
from tests.console import complaint, fit_small, prepare, rows_of, run
from tests.molecules.molecules import SMILES, molecule_csv, molecule_data, trained
from tests.molecules.test_predict_files import kill
from tests.test_cli_molecules import CONFIG


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_numbers_are_found_by_the_smiles(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "pKa,smiles,logP\n1.5,CO,-2\n,c1ccccc1,2.1\n3,[Na+].CO,0\n")
    # Standardising does not change under which SMILES the numbers are found.
    made = MoleculeFeaturizer(descriptors=[FeatureFile(file), "morgan"], fragments="largest")
    assert made.descriptor_names[:3] == ("pKa", "logP", "morgan_0")
    assert made("[Na+].CO").descriptor[0, :2].tolist() == [3.0, 0.0]
    assert made("CO ").descriptor[0, :2].tolist() == [1.5, -2.0]
    ring = made("c1ccccc1").descriptor[0, :2]
    assert ring.isnan().tolist() == [True, False]
    assert torch.equal(made(parse_smiles("CO")).descriptor, made("CO").descriptor)
    with pytest.raises(MoleculeError, match=r"not in the file of features .*a\.csv"):
        made("CCO")
    again = MoleculeFeaturizer.from_spec(json.loads(json.dumps(made.spec)))
    assert again.digest == made.digest


def test_rows_of_an_array_belong_to_the_records_of_a_file(tmp_path: Path) -> None:
    records = write(tmp_path / "mine.smi", "CO methanol\nC( broken\nCCO ethanol\n")
    file = str(tmp_path / "prints.npy")
    np.save(file, np.array([[1, 2], [np.nan, np.nan], [3, 4]]))
    made = MoleculeFeaturizer(descriptors=FeatureFile(file, records))
    assert made.descriptor_names == ("feature_0", "feature_1")
    assert made("CCO").descriptor.tolist() == [[3.0, 4.0]]
    digest, spec = made.digest, made.spec
    write(tmp_path / "mine.smi", "CCO ethanol\nC( broken\nCO methanol\n")
    assert MoleculeFeaturizer(descriptors=FeatureFile(file, records)).digest != digest
    with pytest.raises(ValueError, match="sha256 of FeatureFile are not those of the saved spec"):
        MoleculeFeaturizer.from_spec(spec)
    write(tmp_path / "mine.smi", "CCO ethanol\nCO methanol\n")
    with pytest.raises(ValueError, match=r"rows do not match[\s\S]*\[2, columns\][\s\S]*\[3, 2\]"):
        FeatureFile(file, records)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for low, high in ((1, 2), (1e-9, 2e-9)):
        file = write(tmp_path / "twice.csv", f"smiles,a\nCO,{low}\nCO,{high}\n")
        with pytest.raises(ValueError, match=r"twice with different numbers[\s\S]*records 0 and 1"):
            FeatureFile(file)
    with pytest.raises(ValueError, match="records do not fit"):
        FeatureFile(file, records=file)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        FeatureFile(str(tmp_path / "none.csv"))
    with pytest.raises(ValueError, match="twice.*|not a number|label"):
        FeatureFile(write(tmp_path / "text.csv", "smiles,a\nCO,high\n"))


def test_records_of_an_sdf_are_found_after_standardizing(tmp_path: Path) -> None:
    block = Chem.MolToMolBlock(Chem.MolFromSmiles("[Na+].CC(=O)[O-]"))
    file = write(tmp_path / "salt.sdf", f"{block}>  <pKa>\n4.5\n\n$$$$\n")
    options = {"fragments": "largest", "standardize": ["neutral"]}
    made = MoleculeFeaturizer(descriptors=FeatureFile(file), **options)
    found = made(parse_mol_block(block))
    assert found.descriptor.tolist() == [[4.5]]
    assert len(found.x) == 4
    kekulized = Chem.MolFromSmiles("C1=CC=CC=C1.[Na+]", sanitize=False)
    file = write(tmp_path / "ring.csv", "smiles,a\n[Na+].c1ccccc1,7\n")
    assert MoleculeFeaturizer(descriptors=FeatureFile(file), **options)(
        kekulized
    ).descriptor.tolist() == [[7.0]]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with numbers from a file, in a folder that does not have it any more."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{text},{number}" for number, text in enumerate(SMILES)]
    write(tmp_path / "given.csv", "\n".join(["smiles,number", *lines]) + "\n")
    featurizer = MoleculeFeaturizer(descriptors=FeatureFile("given.csv"))
    path = trained(tmp_path, make=partial(molecule_data, featurizer=featurizer))
    Path("given.csv").unlink()
    return path


def test_a_killed_prediction_does_not_continue_with_other_features(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write(tmp_path / "many.smi", "CCO ethanol\n" * 300)
    write(tmp_path / "more.csv", "smiles,number\nCCO,1\n")
    argv = ["predict", "--checkpoint", checkpoint, "--input", "many.smi", "--output", "out.csv"]
    argv += ["--features", "more.csv"]
    kill(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(*argv)
    write(tmp_path / "more.csv", "smiles,number\nCCO,2\n")
    assert "a different --features" in complaint(capsys, *argv)
    write(tmp_path / "more.csv", "smiles,number\nCCO,1\n")
    assert run(*argv) == 0
    assert {row["status"] for row in rows_of("out.csv")} == {"ok"}


@pytest.mark.long
def test_fit_and_predict_with_features_of_a_file(tmp_path, monkeypatch, capsys):
    prepare(tmp_path, monkeypatch, CONFIG)
    molecule_csv(tmp_path)
    texts = [row["smiles"] for row in rows_of("regression.csv")]
    lines = [f"{text},{number}" for number, text in enumerate(texts[:-1])]
    write(tmp_path / "given.csv", "\n".join(["smiles,number", *lines]) + "\n")
    part = {"class_path": "FeatureFile", "init_args": {"file": "given.csv"}}
    given = CONFIG["data"]["init_args"]
    featurizer = {
        "class_path": "MoleculeFeaturizer",
        "init_args": {"descriptors": [part, "morgan"]},
    }
    data = {**CONFIG["data"], "init_args": {**given, "featurizer": featurizer}}
    data["init_args"]["reading"] = {"bad": "skip", "progress": False}
    prepare(tmp_path, monkeypatch, {**CONFIG, "data": data})
    said = fit_small(tmp_path) / "output.txt"
    assert "test/scaled_rmse" in said.read_text(encoding="utf-8")
    best = "runs/small/version_0/best.ckpt"
    argv = ["predict", "--checkpoint", best, "--input", "new.csv", "--output", "out.csv"]
    write(tmp_path / "new.csv", f"smiles\n{texts[0]}\nOCCCCCO\n")
    assert run(*argv) == 0
    rows = rows_of("out.csv")
    assert rows[0]["status"] == "ok" and "not in the file of features" in rows[1]["status"]
    write(tmp_path / "more.csv", f"smiles,number\n{texts[0]},0\nOCCCCCO,40\n")
    assert run(*argv, "--features", "more.csv") == 0
    again = rows_of("out.csv")
    assert [row["status"] for row in again] == ["ok", "ok"]
    assert again[0]["prediction_first"] == rows[0]["prediction_first"]
    np.save("more.npy", np.array([[0.0], [40.0]]))
    said = complaint(capsys, *argv, "--features", "more.npy")
    assert "has other columns" in said and "feature_0" in said
