"""The console script: help, one-line complaints, and every sub-command on small data."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from pyg_dynbatch import __version__, cli
from pyg_dynbatch.cli import main, one_line
from pyg_dynbatch.core.errors import mismatch_text
from pyg_dynbatch.training import command as command_file
from tests.console import TRAINER, complaint, fit_small, prepare, rows_of, run
from tests.training.helpers import tree_files

CONFIGS = Path(__file__).parents[1] / "configs"
OURS = mismatch_text("Layer: rows of the wrong form", "[row, 3]", "[row, 4]")


CONFIG = {
    "trainer": {**TRAINER, "max_epochs": 2},
    "model": {
        "class_path": "TreeClassification",
        "init_args": {
            "embedding_channels": 6,
            "hidden_channels": 8,
            "cell": "child_sum",
            "output_dropout": 0.1,
            "optimizer": {"name": "adam", "lr": 0.01},
        },
    },
    "data": {
        "class_path": "ListOpsData",
        "init_args": {
            "batch_size": 16,
            "recipe": {"train": 60, "val": 20, "test": 17, "max_depth": 4, "max_length": 30},
        },
    },
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch, CONFIG)

    return tmp_path


# Help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_help_names_every_command(argv: list[str], capsys) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == __version__
    assert run(*argv) == 0
    said = capsys.readouterr().out
    for command in ("fit", "predict", "featurize", "inspect"):
        assert re.search(rf"^    {command} ", said, re.MULTILINE)
    assert max(map(len, said.splitlines())) <= 100


def test_help_does_not_wait_for_torch() -> None:
    code = """
import sys
from pyg_dynbatch.cli import main
assert main(["--help"]) == 0
assert "torch" not in sys.modules and "lightning" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["inspect", "featurize", "predict --checkpoint x"])
def test_help_of_a_command(folder: Path, command: str, capsys) -> None:
    assert run(*command.split(), "--help") == 0
    assert "--output" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_short_help_names_only_options_that_exist(folder: Path, command: str, capsys) -> None:
    assert run(command, "--help") == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 50
    assert max(map(len, short.splitlines())) <= 100
    assert run(command, "--help_all") == 0
    full = capsys.readouterr().out
    own = {"--help_all", "--run", "--select", "--folds"}
    named = set(re.findall(r"--[a-z_.+]+", short)) - own
    assert len(named) > 15
    for option in named:
        stem = re.sub(r"\.init_args.*|\.$|\+$", "", option)
        assert stem in full, option


# Complaints ---------------------------------------------------------------------------------------


WRONG_OPTIONS = [
    ("fti", "unknown command 'fti'"),
    ("fti", "did you mean 'fit'?"),
    ("fit --config none.yaml", "none.yaml"),
    ("fit --config nowhere/listops.yaml", "nowhere/listops.yaml"),
    ("fit --config listop.yaml", "listops.yaml, listops_long.yaml"),
    ("fit", "model"),
    ("fit --config small.yaml --trainer.devices 3x", "Trainer: an option"),
    ("inspect listops --batches 0", "--batches"),
    ("inspect small.txt --labels all", "argument --labels"),
]


@pytest.mark.parametrize(("argv", "said"), WRONG_OPTIONS)
def test_wrong_options_and_missing_files(folder: Path, argv: str, said: str, capsys) -> None:

    assert said in complaint(capsys, *argv.split())


@pytest.mark.parametrize("form", [["--config", "listops.yaml"], ["--config=configs/listops.yaml"]])
def test_a_configuration_of_the_package_is_found_by_its_name(folder, capsys, form, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(command_file, "rank_zero_info", lines.append)
    assert run("fit", *form, "--print_config") == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["data"]["class_path"].endswith("ListOpsData")
    (line,) = lines  # so that nobody takes it for a file of this folder
    assert Path(line.removeprefix("settings of the package: ")).samefile(CONFIGS / "listops.yaml")


def test_a_file_with_the_name_of_a_packaged_configuration_wins(folder: Path, capsys) -> None:
    shutil.copy("small.yaml", "listops.yaml")
    assert run("fit", "--config", "listops.yaml", "--print_config") == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["data"]["init_args"]["recipe"]["train"] == 60


def _stopping(monitor: str) -> str:
    return f"{{class_path: EarlyStopping, init_args: {{monitor: {monitor}}}}}"


WRONG_SETTINGS = [
    ("--trainer.max_epoch", "2", "did you mean '--trainer.max_epochs'?"),
    ("--trainer.max_epochs", "two", '"trainer.max_epochs": Does not validate'),
    ("--model", "TreeClasification", "did you mean 'TreeClassification'?"),
    ("--model.init_args.hidden_channel", "2", "did you mean '--model.init_args.hidden_channels'?"),
    ("--model.init_args.optimizer.lrr", "2", "did you mean '--model.init_args.optimizer.lr'?"),
    ("--model.init_args.optimizer.name", "x", '"optimizer.name": Expected a typing.Literal'),
    ("--model.init_args.optimizer.lr", "-1", "OptimizerOptions: lr is out of range"),
    ("--model.init_args.rate.gamma", "-1", "RateOptions: gamma is out of range"),
    ("--model.init_args.output_dropout", "1.5", "dropout"),
    ("--model.init_args.cell", "foo", "no layer for cell 'foo'"),
    ("--checkpoint.monitor", "val/acuracy", "did you mean 'val/accuracy'?"),
    ("--checkpoint.mode", "mx", "mx"),
    ("--trainer.callbacks", "EarlyStopping", "are required: monitor"),
    ("--trainer.callbacks", _stopping("val/acuracy"), "did you mean 'val/accuracy'?"),
    ("--trainer.callbacks", f"[{_stopping('val/los')}]", "callbacks.monitor val/loss"),
    ("--data.init_args.batch_size", "0", "batch_size"),
    ("--data.init_args.form", "x", '"form": Expected a typing.Literal'),
    ("--data.init_args.vectors", "{source: glove, file: none.txt}", "none.txt"),
    ("--config", "empty.yaml", "got: an empty file; where: empty.yaml"),
    ("--config", "broken.yaml", "where: broken.yaml:2"),
    ("--config", "mistyped.yaml", "data.init_arg. expected"),
]


@pytest.mark.parametrize(("option", "value", "said"), WRONG_SETTINGS)
def test_wrong_settings_are_found_before_data_is_processed(folder, option, value, said, capsys):
    Path("empty.yaml").touch()
    Path("broken.yaml").write_text("model:\n  [", encoding="utf-8")
    mistyped = yaml.safe_dump(CONFIG).replace("init_args", "init_arg")
    Path("mistyped.yaml").write_text(mistyped, encoding="utf-8")
    found = complaint(capsys, "fit", "--config", "small.yaml", option, value)
    assert said in found
    assert not Path("data").exists()


def test_a_foreign_file_is_no_checkpoint(folder: Path, capsys) -> None:
    predict = ["predict", "--checkpoint", "foreign.ckpt", "--input", "test.txt"]
    for contents, said in (
        ({"pytorch-lightning_version": "2.6"}, "without state_dict"),
        ({"state_dict": {}}, "without pytorch-lightning_version"),
        ({"weight": torch.zeros(1)}, "without state_dict and pytorch-lightning_version"),
    ):
        torch.save(contents, "foreign.ckpt")
        assert said in complaint(capsys, *predict)
    settings = ["--config", "small.yaml"]
    for argv in (
        *([command, *settings, "--ckpt_path", "foreign.ckpt"] for command in ("fit", "test")),
        predict,
    ):
        assert "the file is not a checkpoint" in complaint(capsys, *argv)


def test_a_checkpoint_without_options_or_other_weights_does_not_predict(folder, capsys):
    contents: dict = {"state_dict": {}, "pytorch-lightning_version": "2.6"}
    contents["pyg_dynbatch_task"] = "TreeClassification"
    alone = ["predict", "--checkpoint", "odd.ckpt", "--input", "test.txt"]
    torch.save(contents, "odd.ckpt")
    assert "got: no hyper_parameters; where: odd.ckpt" in complaint(capsys, *alone)
    contents["hyper_parameters"] = {"num_tokens": 3, "num_classes": 2, "hidden_channels": 4}
    torch.save(contents, "odd.ckpt")
    assert "the checkpoint belongs to a different model" in complaint(capsys, *alone)


def test_missing_raw_files_say_what_to_put_where(folder: Path, capsys) -> None:
    settings = ["--data", "SSTData", "--data.raw_dir", "nowhere"]
    model = ["--model", "TreeClassification", "--trainer.accelerator", "cpu"]
    said = complaint(capsys, "fit", *model, *settings)
    assert "train.txt, dev.txt and test.txt" in said
    assert "nowhere" in said


def test_traceback_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DYNBATCH_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown command"):
        main(["fti"])


def test_one_line_joins_notes_and_names_silent_errors() -> None:
    error = ValueError("What: wrong.\n  expected: a\n  got:      b")
    error.add_note("  file:     c.ckpt")
    assert one_line(error) == "What: wrong. expected: a; got: b; file: c.ckpt"
    assert one_line(KeyError) == "<class 'KeyError'>"
    assert one_line(ValueError()) == "ValueError"


MISTAKES = [
    TypeError(OURS),
    RuntimeError(OURS),
    ValueError("a plain error"),
    FileNotFoundError("no such file"),
    MisconfigurationException("no GPU here"),
]


@pytest.mark.parametrize("error", MISTAKES)
def test_an_error_of_the_user_is_one_line(error: Exception, monkeypatch, capsys) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["fit"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pyg-dynbatch: error: ")
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [TypeError("int + str"), RuntimeError(f"not ours: {OURS}"), KeyError("x"), AssertionError()],
)
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(type(error)):
        cli.main(["fit"])


MISSING_ARGUMENTS = [
    (["inspect", "file.txt", "--foo"], "unrecognized arguments: --foo"),
    (["inspect"], "the following arguments are required: DATA"),
]


@pytest.mark.parametrize(("argv", "text"), MISSING_ARGUMENTS)
def test_wrong_options_are_reported_on_one_line(argv, text: str, capsys) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


# Runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        prepare(folder := tmp_path_factory.mktemp("trained"), patch, CONFIG)
        return fit_small(folder)


@pytest.fixture
def fitted(folder: Path, trained: Path) -> str:
    """The folder of a run, which a test may change."""
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    return "runs/small/version_0"


def test_fit_tests_predicts_draws_and_lists_its_files(fitted: str, capsys) -> None:
    lines = Path("output.txt").read_text(encoding="utf-8").splitlines()
    wanted = re.compile(r"test/accuracy: 0\.\d\d+")
    where = next(i for i, line in enumerate(lines) if wanted.fullmatch(line))
    written = dict(re.split(r":\s+", line, maxsplit=1) for line in lines[where + 1 :])
    names = ["checkpoint", "metrics", "predictions", "learning curve", "predicted trees"]
    assert list(written) == names
    version = Path(fitted)
    for path in map(Path, written.values()):
        assert path.is_file()
        assert version in path.parents
    assert (version / "config.yaml").is_file()
    assert len((version / "predictions.csv").read_text().splitlines()) == 18

    # The saved configuration runs again, with any sub-command.
    saved, best = str(version / "config.yaml"), written["checkpoint"]
    settings = ["--config", saved, "--ckpt_path", best]
    assert run("test", *settings) == 0
    assert lines[where] in capsys.readouterr().out
    assert run("validate", *settings) == 0
    assert run("predict", *settings, "--predictions.folder", "out") == 0
    assert "predictions:      out/predictions.csv" in capsys.readouterr().out
    tables = [version / "predictions.csv", Path("out/predictions.csv")]
    assert len({table.read_text() for table in tables}) == 1


KILLED = """
import os, signal, sys
from pyg_dynbatch.cli import main
from pyg_dynbatch.lightning import TreeClassification

step = TreeClassification.training_step

def dies(self, batch, batch_idx=0):
    if self.trainer.global_step == 10:  # in the middle of the third epoch
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, batch_idx)

TreeClassification.training_step = dies
main(["fit", "--config", "small.yaml", "--trainer.max_epochs", "4"])
"""


def fit_in_a_process(*options: str) -> str:
    argv = ["-m", "pyg_dynbatch", "fit", "--config", "small.yaml", *options]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "stopped", ["by max_epochs", pytest.param("by a kill", marks=pytest.mark.long)]
)
def test_resumed_run_leaves_the_files_of_the_straight_one(
    folder: Path, trained: Path, stopped: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    written = Path("runs/small/version_0")

    def fit(*options: str) -> str:
        if stopped == "by a kill":  # this process might compute with different kernels
            return fit_in_a_process(*options)
        assert run("fit", "--config", "small.yaml", *options) == 0
        return caplog.text

    for name in ("straight", "cut"):
        Path(name).mkdir()
        Path(name, "small.yaml").write_text(Path("small.yaml").read_text())
    monkeypatch.chdir(folder / "straight")
    fit("--trainer.max_epochs", "4")
    monkeypatch.chdir(folder / "cut")
    if stopped == "by a kill":
        died = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, timeout=300)
        assert died.returncode == -9, died.stderr
    else:
        shutil.copytree(trained, folder / "cut", dirs_exist_ok=True)  # two epochs
    resume = ["--ckpt_path", str(written / "last.ckpt"), "--trainer.max_epochs", "4"]
    assert f"continuing in {written} after epoch 2" in fit(*resume)

    straight, cut = folder / "straight" / written, folder / "cut" / written
    names = sorted(path.name for path in straight.iterdir())
    assert names == sorted(path.name for path in cut.iterdir())
    assert sorted(path.name for path in cut.parent.iterdir()) == ["version_0"]
    for name in names:
        if name.endswith(".ckpt"):
            # The file of a run that was killed may arrange equal content differently.
            one, other = (torch.load(f / name, weights_only=True) for f in (straight, cut))
            assert one["epoch"] == other["epoch"]
            for key, weight in one["state_dict"].items():
                assert torch.equal(weight, other["state_dict"][key]), key
        else:
            assert (straight / name).read_bytes() == (cut / name).read_bytes(), name


@pytest.mark.long
def test_forked_ranks_keep_one_table_of_metrics(folder: Path) -> None:
    fork = ["--trainer.devices", "2", "--trainer.strategy", "ddp_fork"]
    assert run("fit", "--config", "small.yaml", *fork) == 0
    assert run("fit", "--run", "runs/small/version_0", *fork, "--trainer.max_epochs", "3") == 0
    rows = rows_of("runs/small/version_0/metrics.csv")
    assert [row["epoch"] for row in rows if row["train/loss"]] == ["0", "1", "2"]
    assert [row["epoch"] for row in rows if row["val/loss"]] == ["0", "1", "2"]
    assert len([row for row in rows if row["test/loss"]]) == 1


def test_best_and_last_checkpoint_of_a_run(fitted: str, capsys) -> None:
    saved = ["--config", f"{fitted}/config.yaml"]
    best, last = f"{fitted}/best.ckpt", f"{fitted}/last.ckpt"
    for given, used in (
        (["--run", fitted], best),
        (["--run", fitted, "--ckpt_path", "last"], last),
        ([*saved, "--ckpt_path", "best.ckpt"], best),
        ([*saved, "--ckpt_path=last"], last),
    ):
        assert run("predict", *given) == 0
        assert re.search(rf"^checkpoint: +{used}$", capsys.readouterr().out, re.MULTILINE)


def test_without_a_test_part_there_is_no_test_figure(folder: Path, capsys) -> None:
    tree_files(folder)
    files = {"train_file": "train.txt", "val_file": "val.txt", "batch_size": 8}
    settings = {**CONFIG, "data": {"class_path": "TreeFileData", "init_args": files}}
    Path("trees.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert run("fit", "--config", "trees.yaml", "--trainer.max_epochs", "1") == 0
    said = capsys.readouterr().out
    assert "there is no test part" in said and re.search(r"^val/accuracy: 0\.\d+$", said, re.M)
    assert "test/" not in said
    version = Path("runs/small/version_0")
    assert "test/" not in (version / "metrics.csv").read_text()
    assert len((version / "predictions.csv").read_text().splitlines()) == 1 + 9
    best = str(version / "best.ckpt")
    found = complaint(capsys, "test", "--config", "trees.yaml", "--ckpt_path", best)
    assert "there is no such part" in found and "test_file" in found


def test_trees_are_predicted_from_the_checkpoint_alone(folder: Path, capsys) -> None:
    tree_files(folder)
    settings = {**CONFIG, "data": {"class_path": "TreeFileData", "init_args": {"batch_size": 8}}}
    for split in ("train", "val", "test"):
        settings["data"]["init_args"][f"{split}_file"] = f"{split}.txt"
    Path("trees.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    options = ["--predictions.node_name", "nodes.csv", "--trainer.max_epochs", "1"]
    assert run("fit", "--config", "trees.yaml", *options) == 0
    written = Path("runs/small/version_0")
    best = str(written / "best.ckpt")
    alone = ["predict", "--checkpoint", best, "--input"]
    more = ["--nodes", "n.csv", "--batch-size", "3"]
    assert run(*alone, "test.txt", "--output", "o.csv", *more) == 0
    for mine, other in (("o.csv", "predictions.csv"), ("n.csv", "nodes.csv")):
        # Batches of other sizes round differently.
        tables = [np.genfromtxt(p, delimiter=",") for p in (mine, written / other)]
        np.testing.assert_allclose(*tables, rtol=1e-5)

    Path("new.txt").write_text("((good) (never-seen))\n", encoding="utf-8")
    capsys.readouterr()
    assert run(*alone, "new.txt") == 0
    said = capsys.readouterr()
    assert "\npredicting: 1 of 1 trees in " in said.err
    header, row = said.out.splitlines()
    assert header.endswith("probability_4,target")
    assert row.endswith(",")
    assert run("predict", "--checkpoint", best, best, "--input", "new.txt") == 0
    first, mean = capsys.readouterr().out.splitlines()
    assert first == header
    values = [[float(cell) for cell in line[:-1].split(",")] for line in (mean, row)]
    assert values[0] == pytest.approx(values[1])
    for options, said in (
        (["--output", "new.txt"], "an output is also an input"),
        (["--fingerprints", "f.npy"], "unrecognized arguments: --fingerprints"),
    ):
        assert said in complaint(capsys, *alone, "new.txt", *options)


def test_moved_run_keeps_its_best_checkpoint(fitted: str, capsys) -> None:
    Path(fitted).rename("moved")
    before = Path("moved/best.ckpt").read_bytes()
    scores = ["--trainer.max_epochs", "3", "--model.init_args.optimizer.lr", "0"]
    assert run("fit", "--run", "moved", *scores) == 0
    assert "checkpoint:       moved/best.ckpt" in capsys.readouterr().out
    assert Path("moved/best.ckpt").read_bytes() == before
    Path("moved/best.ckpt").unlink()
    assert "the best checkpoint of the run is missing" in complaint(capsys, "fit", "--run", "moved")


def test_commands_that_need_a_checkpoint_refuse_to_run_without(fitted: str, capsys) -> None:
    for command in ("predict", "test", "validate"):
        said = complaint(capsys, command, "--config", "small.yaml")
        assert f"{command}: no checkpoint is given" in said
        assert "--run FOLDER" in said
    for command in ("fit", "test"):
        said = complaint(capsys, command, "--config", "small.yaml", "--ckpt_path", "last")
        assert "checkpoint 'last' not found" in said
    Path("elsewhere").mkdir()
    Path(f"{fitted}/last.ckpt").rename("elsewhere/last.ckpt")
    said = complaint(capsys, "fit", "--config", "small.yaml", "--ckpt_path", "elsewhere/last.ckpt")
    assert "training can only continue in the folder of its run" in said


@pytest.mark.long
def test_options_beside_a_checkpoint_hold_or_are_refused(fitted: str, capsys, caplog) -> None:
    def refused(command: str, *options: str) -> str:
        return complaint(capsys, command, "--run", fitted, *options)

    said = refused("test", "--model.init_args.cell", "gru")
    assert "model.cell: child_sum in the checkpoint, gru given" in said
    assert "data.form: operator" in refused("fit", "--data.init_args.form", "binary")
    assert "optimizer.name" in refused("fit", "--model.init_args.optimizer.name", "sgd")
    assert "does not use file" in refused("fit", "--data.init_args.vectors.file", "none.txt")
    said = refused("fit", "--seed_everything", "9")
    assert "seed_everything: 1 in the checkpoint, 9 given" in said
    assert "chosen in a different way" in refused("fit", "--checkpoint.monitor", "val/loss")

    changed = ["--model.init_args.optimizer.lr", "0.5", "--model.init_args.output_dropout", "0.2"]
    changed += ["--data.init_args.num_workers", "1", "--trainer.max_epochs", "3"]
    assert run("fit", "--run", fitted, *changed) == 0
    assert "changed: model.optimizer.lr: 0.01 in the checkpoint, 0.5 given" in caplog.text
    assert "num_workers" not in caplog.text
    found = torch.load(f"{fitted}/last.ckpt", weights_only=True)
    assert {group["lr"] for group in found["optimizer_states"][0]["param_groups"]} == {0.5}
    assert found["hyper_parameters"]["output_dropout"] == 0.2


def test_fast_dev_run(folder: Path, capsys) -> None:
    assert run("fit", "--config", "small.yaml", "--trainer.fast_dev_run", "true") == 0
    assert re.search(r"^test/accuracy: \d\.\d\d+$", capsys.readouterr().out, re.MULTILINE)
    assert not Path("runs").exists()


def test_inspect(folder: Path, samples: Path, capsys) -> None:
    assert run("inspect", str(samples / "sst" / "train.txt"), "--batches", "1") == 0
    assert Path("schedule.png").stat().st_size > 5000
    assert "agenda" in capsys.readouterr().out
