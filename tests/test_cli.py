"""The console script: train, test and predict small data, and complain in a few lines."""

import logging
import sys
from pathlib import Path
from unittest import TestCase

import pytest
import torch
import yaml

from pyg_dynbatch import cli
from pyg_dynbatch.cli import main
from pyg_dynbatch.models import load
from tests.console import TRAINER, complaint, rows_of, run

TREES = "(3 (2 good) (1 fun))\n(0 bad)\n(1 (0 (1 a) (1 bad)) (2 film))\n(2 (2 good) (1 film))\n"
TREE_RUN = {
    "trainer": TRAINER | {"max_epochs": 2},
    "model": {
        "class_path": "TreeClassifier",
        "init_args": {"embedding_channels": 4, "hidden_channels": 3, "cell": "child_sum"},
    },
    "data": {
        "class_path": "TreeFileData",
        "init_args": {"train_file": "trees.txt", "val_file": "trees.txt", "batch_size": 2},
    },
}
MOLECULES = "name,smiles,melts\n" + "".join(
    f"m{count},{'C' * count}O,{-100.5 + 3 * count}\n" for count in range(1, 21)
)
MOLECULE_RUN = {
    "trainer": TRAINER | {"max_epochs": 2},
    "model": {
        "class_path": "MoleculeModel",
        "init_args": {"hidden": 4, "atom_out": 4, "readout": "sum", "head": [4]},
    },
    "task": {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        "rate": "one_cycle",
    },
    "data": {
        "class_path": "MoleculeFileData",
        "init_args": {"file": "mine.csv", "targets": "melts", "batch_size": 4},
    },
}
RUN = Path("runs/small/version_0")


def write(folder: Path) -> Path:
    (folder / "trees.txt").write_text(TREES)
    (folder / "mine.csv").write_text(MOLECULES)
    (folder / "tree.yaml").write_text(yaml.safe_dump(TREE_RUN))
    (folder / "molecules.yaml").write_text(yaml.safe_dump(MOLECULE_RUN))
    return folder


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind in ("tree", "molecules"):
        folder = folders[kind] = write(tmp_path_factory.mktemp(kind))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            test = ["--data.test_file", "trees.txt"] if kind == "tree" else []
            assert run("fit", "--config", f"{kind}.yaml", *test) == 0
    return folders


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path)


@pytest.mark.parametrize("kind", ["tree", "molecules"])
def test_fit_tests_the_best_checkpoint_and_draws(fitted: dict[str, Path], kind: str) -> None:
    written = fitted[kind] / RUN
    picture = "trees.png" if kind == "tree" else "parity.png"
    for name in ("config.yaml", "learning_curve.png", "checkpoints/last.ckpt", picture):
        assert (written / name).is_file(), name
    logged = rows_of(written / "metrics.csv")
    assert [row for row in logged if row.get("test/loss")]
    model = load(written / "checkpoints/best.ckpt")
    assert bool(model.is_started) and not model.training


def test_test_measures_what_fit_did(fitted: dict[str, Path], monkeypatch, capsys) -> None:
    monkeypatch.chdir(fitted["tree"])
    config = str(RUN / "config.yaml")
    checkpoint = str(RUN / "checkpoints/best.ckpt")
    for command in ("test", "validate"):
        assert run(command, "--config", config, "--ckpt_path", checkpoint) == 0
    tested = [row for row in rows_of(RUN / "metrics.csv") if row.get("test/accuracy")]
    again = sorted(Path("runs/small").glob("version_*"))[1]
    accuracy = rows_of(again / "metrics.csv")[0]["test/accuracy"]
    assert accuracy == tested[-1]["test/accuracy"]


def test_a_run_without_a_test_part_prints_no_test_figure(folder: Path, capsys) -> None:
    assert run("fit", "--config", "tree.yaml") == 0
    assert "test/" not in capsys.readouterr().out


def test_the_log_of_a_run_has_no_adverts(folder: Path, capsys) -> None:
    log = "lightning.pytorch.utilities.rank_zero"
    with TestCase().assertLogs(log) as logs:
        assert run("fit", "--config", "tree.yaml", "--trainer.max_epochs", "1") == 0
    said = [record.getMessage() for record in logs.records]
    assert any(line.startswith("GPU available") for line in said)
    assert not any(line.startswith(("TPU", "💡")) for line in said)
    assert "model: TreeClassifier, " in capsys.readouterr().out
    with TestCase().assertLogs(log):
        logging.getLogger(log).info("TPU available: for others")


def test_fit_goes_on_from_a_checkpoint(folder: Path, capsys) -> None:
    options = ("fit", "--config", "tree.yaml", "--trainer.max_epochs")
    assert run(*options, "3") == 0
    assert run(*options, "1") == 0
    checkpoints = Path("runs/small/version_1/checkpoints")
    assert run(*options, "3", "--ckpt_path", str(checkpoints / "last.ckpt")) == 0
    assert capsys.readouterr().out.rstrip().endswith("version_1/checkpoints/best.ckpt")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["best.ckpt", "last.ckpt"]
    for name in ("best.ckpt", "last.ckpt"):
        straight = load(RUN / "checkpoints" / name).state_dict()
        resumed = load(checkpoints / name).state_dict()
        assert all(torch.equal(resumed[key], straight[key]) for key in straight), name


def test_predict_molecules(fitted: dict[str, Path], folder: Path) -> None:
    checkpoint = str(fitted["molecules"] / RUN / "checkpoints/best.ckpt")
    Path("new.csv").write_text("id,smiles\na,CCO\nb,C(\nc,CCCO\n")
    assert (
        run("predict", "--checkpoint", checkpoint, "--input", "new.csv", "--output", "t.csv") == 0
    )
    table = rows_of("t.csv")
    assert [row["id"] for row in table] == ["a", "b", "c"]
    assert [bool(row["prediction_melts"]) for row in table] == [True, False, True]
    assert "new.csv:3" in table[1]["fault"]
    twice = ("--checkpoint", checkpoint, checkpoint, "--batch-size", "1")
    assert run("predict", *twice, "--input", "new.csv", "--output", "u.csv") == 0
    averaged = rows_of("u.csv")
    assert [row["deviation_melts"] for row in averaged] == ["0", "", "0"]
    pairs = zip(table[::2], averaged[::2], strict=True)
    assert all(
        float(one["prediction_melts"]) == pytest.approx(float(other["prediction_melts"]), rel=1e-5)
        for one, other in pairs
    )


def test_predict_when_the_first_records_are_bad(
    fitted: dict[str, Path], folder: Path, capsys
) -> None:
    checkpoint = str(fitted["molecules"] / RUN / "checkpoints/best.ckpt")
    Path("bad.smi").write_text("C(\nC(\nCCO\n")
    options = ("--checkpoint", checkpoint, "--batch-size", "1", "--output", "t.csv")
    assert run("predict", *options, "--input", "bad.smi") == 0
    assert [bool(row["prediction_melts"]) for row in rows_of("t.csv")] == [False, False, True]
    Path("all.smi").write_text("C(\n")
    assert run("predict", *options, "--input", "all.smi") == 2
    assert "every row has a fault" in capsys.readouterr().err
    assert rows_of("t.csv")[0]["fault"]


def test_predict_trees(fitted: dict[str, Path], folder: Path, capsys) -> None:
    checkpoint = str(fitted["tree"] / RUN / "checkpoints/best.ckpt")
    Path("new.txt").write_text("((good) (new))\n(bad\n")
    assert run("predict", "--checkpoint", checkpoint, "--input", "new.txt") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[2].startswith("1,,")
    assert "predicted 2 rows, 1 of them with a fault\n" in shown.err
    Path("good.txt").write_text("((good) (new))\n")
    assert run("predict", "--checkpoint", checkpoint, "--input", "good.txt") == 0
    assert "predicted 1 rows\n" in capsys.readouterr().err
    options = ("--nodes", "--output", "nodes.csv", "--input", "new.txt")
    assert run("predict", "--checkpoint", checkpoint, *options) == 0
    assert [row["node"] for row in rows_of("nodes.csv")] == ["0", "1", "2", ""]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("fit", "required"),
        ("fitt", "'fit', 'validate', 'test', 'predict'"),
        ("fit --config none.yaml", "none.yaml"),
        ("fit --config tree.yaml --model.hiden_channels 3", "allowed: embedding_channels"),
        ("fit --config molecules.yaml --model.hiden 3", "num_modules"),
        ("fit --config tree.yaml --model.hidden_channels abc", "Expected int. Got value: abc"),
        ("fit --config tree.yaml --model TreeClasifier", "allowed: MoleculeModel, TreeClassifier"),
        ("fit --config tree.yaml --data TreeData1", "TreeFileData"),
        ("fit --config tree.yaml --data.labels all", "one of 'required', 'optional'"),
        ("fit --config tree.yaml --task.rate linear", "'one_cycle'"),
        ("fit --config tree.yaml --task.optimizer Adamm", "torch.optim.Adam"),
        ("fit --config tree.yaml --trainer.max_epoch 1", "--trainer.max_epoch 1"),
        ("fit --config tree.yaml --data.train_file none.txt", "none.txt"),
        ("test --config tree.yaml", "--ckpt_path FILE"),
        ("validate --config tree.yaml", "--ckpt_path FILE"),
        ("test --config tree.yaml --ckpt_path none.ckpt", "none.ckpt"),
        ("predict --checkpoint none.ckpt --input trees.txt", "none.ckpt"),
        ("predict --checkpoint trees.txt --input trees.txt", "not a checkpoint"),
    ],
)
def test_a_complaint_has_at_most_five_lines(folder: Path, argv: str, said: str, capsys) -> None:
    assert said in complaint(capsys, *argv.split())


def test_a_checkpoint_of_another_model_is_refused(fitted, monkeypatch, capsys) -> None:
    monkeypatch.chdir(fitted["tree"])
    options = ("test", "--config", str(RUN / "config.yaml"), "--data.test_file", "trees.txt")
    checkpoint = str(RUN / "checkpoints/best.ckpt")
    said = complaint(capsys, *options, "--model.hidden_channels", "5", "--ckpt_path", checkpoint)
    assert "hidden_channels: 5" in said and "hidden_channels: 3" in said
    other = str(fitted["molecules"] / RUN / "checkpoints/best.ckpt")
    assert "MoleculeModel" in complaint(capsys, *options, "--ckpt_path", other)


def test_a_packaged_configuration_is_found_by_its_name(folder: Path, capsys) -> None:
    for name in ("listops.yaml", "configs/listops.yaml"):
        assert run("fit", "--config", name, "--print_config") == 0
        assert "ListOpsData" in capsys.readouterr().out


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyg_dynbatch.cli.predict", lambda words: [][0])
    with pytest.raises(IndexError):
        main(["predict"])


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DYNBATCH_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        main(["predict", "--checkpoint", "none.ckpt", "--input", "none.txt"])


def test_fast_dev_run_writes_nothing(folder: Path) -> None:
    assert run("fit", "--config", "tree.yaml", "--trainer.fast_dev_run", "true") == 0
    assert not Path("runs").exists()


def test_only_the_console_script_keeps_freed_memory(monkeypatch, capsys) -> None:
    kept = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: kept.append(True))
    assert main(["--version"]) == 0
    assert not kept
    monkeypatch.setattr(sys, "argv", ["pyg-dynbatch", "--version"])
    assert main() == 0
    assert kept == [True]


def test_version_and_help(capsys) -> None:
    assert main(["--version"]) == 0
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "fit" in shown and "predict" in shown
    assert sys.argv[0] != "pyg-dynbatch"
