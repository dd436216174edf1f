"""The console script on molecules: train, average, predict, featurize, complain."""

import csv
import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from pyg_dynbatch.datasets import PackedMolecules
from pyg_dynbatch.molecules.datamodules import MoleculeDataModule
from pyg_dynbatch.prediction import read_checkpoint
from tests.console import TRAINER, complaint, fit_small, prepare, rows_of, run
from tests.molecules.molecules import molecule_csv, trained
from tests.test_files import files_of_at_most

CONFIG = {
    "trainer": {**TRAINER, "max_epochs": 1},
    "checkpoint": {"monitor": "val/scaled_rmse", "mode": "min"},
    "model": {
        "class_path": "MoleculeProperty",
        "init_args": {"hidden": 6, "atom_out": 8, "readout": "sum", "head": [8], "dropout": 0.2},
    },
    "data": {
        "class_path": "MoleculeFileData",
        "init_args": {
            "file": "regression.csv",
            "targets": ["first", "second"],
            "split": {"fractions": [0.5, 0.25, 0.25]},
            "featurizer": {"atoms": "deepchem"},
            "batch_size": 8,
        },
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run in, with a configuration, data and several lists of molecules."""
    prepare(tmp_path, monkeypatch, CONFIG)
    molecule_csv(tmp_path)
    text = "smiles,name\nCCO,ethanol\nC1CC,broken\nCC(=O)O,acid\n"
    (tmp_path / "some.csv").write_text(text, encoding="utf-8")
    (tmp_path / "bad.csv").write_text("smiles\nC1CC\n\nxyz\n", encoding="utf-8")

    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        prepare(folder := tmp_path_factory.mktemp("fitted"), patch, CONFIG)
        molecule_csv(folder)
        return fit_small(folder)


def test_fit_then_both_ways_to_predict(folder: Path, fitted: Path) -> None:
    shutil.copytree(fitted, folder, dirs_exist_ok=True)
    said = Path("output.txt").read_text(encoding="utf-8")
    assert re.search(r"^test/scaled_rmse: \d+\.\d+$", said, re.MULTILINE)
    written = dict(re.findall(r"^([a-z ]+): +(runs/\S+)$", said, re.MULTILINE))
    assert list(written) == [
        *("checkpoint", "metrics", "predictions", "split"),
        *("learning curve", "task table", "parity plot"),
    ]
    assert all(Path(path).is_file() for path in written.values())

    # Lightning's own way, with the saved configuration.
    best, saved = written["checkpoint"], "runs/small/version_0/config.yaml"
    again = ["predict", "--config", saved, "--ckpt_path", best, "--predictions.folder", "again"]
    assert run(*again) == 0
    tables = [Path(written["predictions"]), Path("again/predictions.csv")]
    assert len({table.read_text() for table in tables}) == 1

    # From the checkpoint alone: the same molecules, the same numbers.
    argv = ["predict", "--checkpoint", best, "--input", "regression.csv", "--output", "o.csv"]
    assert run(*argv) == 0
    streamed = {row["row"]: row for row in rows_of("o.csv")}
    for row in rows_of("again/predictions.csv"):
        for task in ("first", "second"):
            found = float(streamed[row["row"]][f"prediction_{task}"])
            assert found == pytest.approx(float(row[f"prediction_{task}"]), rel=1e-3, abs=1e-4)


def test_the_best_is_chosen_by_a_metric_that_is_logged(folder: Path, capsys) -> None:
    settings = {name: part for name, part in CONFIG.items() if name != "checkpoint"}
    (folder / "plain.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    said = complaint(capsys, "fit", "--config", "plain.yaml")
    assert "expected: val/scaled_rmse" in said
    assert "or one of train/loss, val/loss, val/r2" in said and "val/rmse_first" in said
    assert "try: --checkpoint.monitor val/scaled_rmse --checkpoint.mode min" in said
    stopping = ["--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "val/los"]
    said = complaint(capsys, "fit", "--config", "small.yaml", *stopping)
    assert "EarlyStopping cannot choose" in said
    assert not Path("runs").exists()


MAIN_METRICS = [
    ({"class_path": "MoleculeNetData", "init_args": {"name": "bbbp"}}, "val/roc_auc"),
    ({"class_path": "MoleculeNetData", "init_args": {"name": "qm8"}}, "val/scaled_rmse"),
    ({"class_path": "NCIData"}, "val/rmse"),
    ({"class_path": "PackedMoleculeData", "init_args": {"root": "packed"}}, "val/rmse"),
]


@pytest.mark.parametrize(("data", "main"), MAIN_METRICS)
def test_a_metric_is_checked_before_data_is_processed(folder, data, main, capsys, monkeypatch):
    argv = ["featurize", "--input", "regression.csv", "--output", "packed"]
    assert run(*argv, "--targets", "first") == 0
    monkeypatch.setattr(MoleculeDataModule, "molecules", None)
    settings = {name: part for name, part in CONFIG.items() if name != "checkpoint"}
    Path("other.yaml").write_text(yaml.safe_dump({**settings, "data": data}), encoding="utf-8")
    assert f"expected: {main}, the main metric" in complaint(
        capsys, "fit", "--config", "other.yaml"
    )


def test_without_a_metric_the_last_epoch_is_kept(folder: Path) -> None:
    """Also if it was not validated; of one target that is named as a word."""
    for path in (Path(__file__).parents[1] / "configs").glob("*.yaml"):
        options = yaml.safe_load(path.read_text(encoding="utf-8")).get("checkpoint", {})
        if options.get("monitor", "") is None:
            assert options["save_on_train_epoch_end"] is True, path
    words = "--data.init_args.targets first --checkpoint.monitor null"
    words += " --checkpoint.save_on_train_epoch_end true --trainer.check_val_every_n_epoch 2"
    assert run("fit", "--config", "small.yaml", *words.split(), "--trainer.max_epochs", "3") == 0
    kept = read_checkpoint("runs/small/version_0/best.ckpt")
    assert kept["epoch"] == 2 and kept["hyper_parameters"]["schema"]["task_names"] == ["first"]


def test_predict_reads_and_writes_standard_streams(folder, checkpoint, capsys, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(b"CCO ethanol\nC1CC broken\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run("predict", "--checkpoint", checkpoint, checkpoint, "--input", "-") == 0
    said = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [row["name"] for row in rows] == ["ethanol", "broken"]
    assert float(rows[0]["deviation_first"]) == pytest.approx(0.0, abs=1e-5)
    assert rows[1]["prediction_first"] == ""
    assert (
        "predicted 1 of 2 records; the first bad one is row 1: it is not a well-formed" in said.err
    )


def test_the_largest_molecule_can_be_chosen_again(folder: Path, checkpoint: str) -> None:
    argv = ["predict", "--checkpoint", checkpoint, "--input", "some.csv", "--output", "out.csv"]
    assert run(*argv, "--max-atoms", "3") == 0
    assert "4 atoms, 10 pairs: more than max_atoms=3" in rows_of("out.csv")[2]["status"]
    assert run(*argv, "--max-atoms", "4") == 0
    assert rows_of("out.csv")[2]["status"] == "ok"


def test_no_molecule_at_all_still_writes_the_reasons(folder: Path, checkpoint: str, capsys) -> None:
    argv = ["--checkpoint", checkpoint, "--input", "bad.csv", "--output", "out.csv"]
    said = complaint(capsys, "predict", *argv)
    assert "predict: no record is a molecule" in said
    assert all(row["status"].startswith("it is not a well-formed") for row in rows_of("out.csv"))


@pytest.mark.long
def test_processes_change_no_row(folder: Path, checkpoint: str) -> None:
    for workers in ("0", "2"):
        given = ["--input", "some.csv", "--workers", workers]
        argv = ["predict", "--checkpoint", checkpoint, *given, "--output", f"{workers}.csv"]
        assert run(*argv) == 0
        given = ["--input", "regression.csv", "--workers", workers, "--targets", "first"]
        assert run("featurize", *given, "--block-size", "8", "--output", f"packed{workers}") == 0
    assert Path("0.csv").read_bytes() == Path("2.csv").read_bytes()
    contents = [
        {path.name: path.read_bytes() for path in Path(f"packed{workers}").iterdir()}
        for workers in ("0", "2")
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 12


@pytest.mark.long
def test_fit_from_a_packed_folder_alone(folder: Path, capsys) -> None:
    argv = ["featurize", "--input", "regression.csv", "--output", "packed"]
    assert run(*argv, "--targets", "first", "second") == 0
    Path("regression.csv").unlink()
    data = {"root": "packed", "split": {"fractions": [0.5, 0.25, 0.25]}, "batch_size": 8}
    settings = {**CONFIG, "data": {"class_path": "PackedMoleculeData", "init_args": data}}
    Path("packed.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    capsys.readouterr()
    assert run("fit", "--config", "packed.yaml") == 0
    said = capsys.readouterr().out
    assert re.search(r"^test/scaled_rmse: \d+\.\d+$", said, re.MULTILINE)
    best = re.findall(r"^checkpoint: +(\S+)$", said, re.MULTILINE)[0]
    argv = ["predict", "--checkpoint", best, "--input", "some.csv", "--output", "o.csv"]
    assert run(*argv) == 0
    assert [row["status"][:6] for row in rows_of("o.csv")] == ["ok", "it is ", "ok"]


def test_featurize_and_go_on(folder: Path, capsys) -> None:
    argv = ["featurize", "--input", "regression.csv", "--output", "packed", "--block-size", "8"]
    assert run(*argv, "--targets", "first") == 0
    said = capsys.readouterr().out
    assert re.search(r"^32 molecules, 0 bad rows, \d+ bytes each$", said, re.MULTILINE)
    times = {path.name: path.stat().st_mtime_ns for path in Path("packed").glob("*.npy")}
    assert run(*argv, "--targets", "first") == 0
    again = {path.name: path.stat().st_mtime_ns for path in Path("packed").glob("*.npy")}
    assert len(times) == 10 and times == again

    assert PackedMolecules("packed").task_names == ("first",)
    assert run("featurize", "--input", "some.csv", "--output", "some") == 0
    assert "bad rows: some/errors.csv" in capsys.readouterr().out


def test_featurize_with_texts_that_mean_a_missing_label(folder: Path) -> None:
    (folder / "marked.csv").write_text("smiles,y\nCO,?\nC,1\n", encoding="utf-8")
    argv = ["featurize", "--input", "marked.csv", "--output", "packed", "--targets", "y"]
    assert run(*argv) == 2
    assert run(*argv, "--missing", "?", "-999") == 0
    assert PackedMolecules("packed").targets[1].tolist() == [1.0]


@pytest.mark.long
def test_descriptors_from_the_command_line(folder: Path, capsys) -> None:
    """Fit, go on, predict a stream and pack; the YAML may choose descriptors too."""
    base = yaml.safe_load(Path("small.yaml").read_text(encoding="utf-8"))
    base["data"]["init_args"] |= {"reading": {"bad": "blank"}, "root": "cache"}
    del base["data"]["init_args"]["featurizer"]
    Path("plain.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    featurizer = "--data.init_args.featurizer"
    words = [featurizer, "MoleculeFeaturizer", f"{featurizer}.init_args.descriptors", "rdkit"]
    assert run("fit", "--config", "plain.yaml", *words) == 0
    said = capsys.readouterr()
    assert "nan" not in said.out.lower()
    best = re.findall(r"^checkpoint: +(\S+)$", said.out, re.MULTILINE)[0]
    saved = "runs/small/version_0/config.yaml"
    chosen = yaml.safe_load(Path(saved).read_text(encoding="utf-8"))["data"]["init_args"]
    assert chosen["featurizer"]["init_args"]["descriptors"] == "rdkit"
    weights = torch.load(best, weights_only=True)["state_dict"]
    assert len(weights["model.network.descriptors.mean"]) > 200

    argv = ["predict", "--checkpoint", best, "--input"]
    assert run(*argv, "some.csv", "--output", "o.csv", "--fingerprints", "f.npy") == 0
    rows = rows_of("o.csv")
    assert [row["status"] == "ok" for row in rows] == [True, False, True]
    assert all(float(rows[k]["prediction_first"]) < 1e6 for k in (0, 2))

    more = ["--ckpt_path", "runs/small/version_0/last.ckpt"]
    assert run("fit", "--config", saved, *more, "--trainer.max_epochs", "2") == 0

    chosen = {"class_path": "RDKitDescriptors", "init_args": {"names": ["TPSA"]}}
    given = {"class_path": "MoleculeFeaturizer", "init_args": {"descriptors": chosen}}
    base["data"]["init_args"] |= {"featurizer": given, "root": None}
    Path("chosen.yaml").write_text(yaml.safe_dump(base), encoding="utf-8")
    assert run("fit", "--config", "chosen.yaml", "--trainer.fast_dev_run", "true") == 0
    capsys.readouterr()
    argv = ["featurize", "--input", "some.csv", "--output", "packed", "--bad", "blank"]
    assert run(*argv, "--descriptors", "rdkit", "morgan") == 0
    packed = PackedMolecules("packed")
    assert packed.descriptors.shape == (3, len(packed.descriptor_names))
    known = ~torch.from_numpy(packed.descriptors).isnan()
    assert known.any(1).tolist() == [True, False, True]
    assert run(*argv, "--descriptors", "mordred") == 2


@pytest.mark.long
def test_averaged_weights_predict_alike_everywhere(folder: Path, capsys) -> None:
    molecule_csv(folder, "binary")
    settings = CONFIG | {"checkpoint": {"monitor": "val/loss", "mode": "min"}}
    (folder / "binary.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    argv = ["fit", "--config", "binary.yaml", "--data.init_args.file", "binary.csv"]
    argv += ["--data.init_args.kind", "binary"]
    argv += ["--data.init_args.split.seed", "3", "--trainer.max_epochs", "2"]
    average = ["--trainer.callbacks+", "EMAWeightAveraging", "--trainer.callbacks.decay", "0.9"]
    assert run(*argv, *average) == 0
    best = re.findall(r"^checkpoint: +(\S+)$", capsys.readouterr().out, re.MULTILINE)[0]
    argv = ["predict", "--checkpoint", best, "--input", "binary.csv", "--output", "o.csv"]
    assert run(*argv) == 0
    streamed = {row["row"]: row for row in rows_of("o.csv")}
    for row in rows_of("runs/small/version_0/predictions.csv"):
        found = float(streamed[row["row"]]["probability_first"])
        assert found == pytest.approx(float(row["probability_first"]), rel=1e-3)


def test_null_switches_descriptors_off(folder: Path, capsys) -> None:
    key = "--data.init_args.featurizer.init_args"
    argv = ["fit", "--config", "small.yaml", f"{key}.descriptors", "rdkit"]
    for value in ("rdkit", "[rdkit, morgan]", "null"):
        given = [f"{key}.descriptors={value}", f"{key}.chirality=null"]
        assert run(*argv, *given, "--print_config") == 0
        settings = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["featurizer"]
        assert settings["init_args"]["descriptors"] == yaml.safe_load(value)
        assert settings["init_args"]["chirality"] is None


def test_a_checkpoint_that_does_not_fit_on_the_disk(folder: Path, capsys) -> None:
    with files_of_at_most(16_000):
        said = complaint(capsys, "fit", "--config", "small.yaml", "--trainer.logger", "false")
    assert re.search(r"best.ckpt: the file cannot be written.*File too large", said)
    assert not list(folder.rglob("*.ckpt.*"))
    assert not list(folder.rglob("best*"))


# Complaints ---------------------------------------------------------------------------------------

PREDICT = "predict --checkpoint CKPT --input"
FEATURIZE = "featurize --output o --input"


WRONG_OPTIONS = [
    (f"{PREDICT} none.csv", "none.csv"),
    (f"{PREDICT} some.csv --smiles-column nope", "nope"),
    (f"{PREDICT} some.csv --workers -1", "--workers: expected at least 0"),
    (f"{PREDICT} some.csv --max-pairs 0", "--max-pairs: expected at least 1"),
    (f"{PREDICT} some.csv --dropout 5", "no dropout to switch on"),
    (f"{PREDICT} some.csv --device nowhere", "the device cannot be used"),
    (f"{PREDICT} some.csv --fingerprints a.txt", "unknown kind of file"),
    (f"{PREDICT} some.csv --features some.csv", "was not trained with a FeatureFile"),
    (f"{PREDICT} some.csv --features none --output o", "none: there is no such file"),
    ("predict --input some.csv", "required: --checkpoint"),
    (f"{FEATURIZE} some.csv --atoms x", "x"),
    (f"{FEATURIZE} some.csv --bad x", "x"),
    (f"{FEATURIZE} some.csv --bad raise", "some.csv:3"),
    (f"{FEATURIZE} bad.csv", "bad"),
    (f"{FEATURIZE} some.csv --targets y", "y"),
    (f"{FEATURIZE} some.csv --targets name name", "a target is named twice"),
]


@pytest.mark.parametrize(("argv", "said"), WRONG_OPTIONS)
def test_wrong_options_and_input(folder, checkpoint, argv, said, capsys):
    given = [checkpoint if word == "CKPT" else word for word in argv.split()]
    assert said in complaint(capsys, *given)


WRONG_SETTINGS = [
    ("--data.init_args.targets [nope]", "nope"),
    ("--data.init_args.file none.csv", "none.csv"),
    ("--data.init_args.kind binary", "by this metric. expected: val/roc_auc"),
    ("--data.init_args.kind binary --checkpoint.monitor val/loss", "a label is out of range"),
    ("--data.init_args.pairs 9", "pairs"),
    ("--data.init_args.split.method nope", "method"),
    ("--model.init_args.readout nope", "readout"),
    ("--model.init_args.optimizer.name nope", "name"),
]


@pytest.mark.parametrize(("options", "said"), WRONG_SETTINGS)
def test_wrong_settings_of_a_run(folder: Path, options: str, said: str, capsys) -> None:
    assert said in complaint(capsys, "fit", "--config", "small.yaml", *options.split())
