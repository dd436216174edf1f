"""Every command, called wrongly: one line, no traceback, options as typed, hints that work."""

import contextlib
import io
import re
import sys
from functools import cache
from pathlib import Path

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import pytest
import torch

from pyg_dynbatch.cli import _COMMANDS
from pyg_dynbatch.kernels.products import describe_products
from tests.console import complaint, prepare, run
from tests.molecules.molecules import trained
from tests.test_cli import CONFIG
from tests.trees.helpers import tree_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore:(?s).*(jsonargparse|deprecated in v4)")]

FOREIGN = {"state_dict": {}, "pytorch-lightning_version": "2.6"}
RUNS = ("fit", "validate", "test", "predict")
# What each command needs; then one of its words is replaced.
RIGHT = {
    **{name: f"{name} --config small.yaml" for name in RUNS},
    "featurize": "featurize --input some.csv --output packed",
    "inspect": "inspect trees.txt",
}
# The others share the parser of fit.
COMMANDS = [pytest.param(name, marks=[pytest.mark.long] * (name in RUNS[1:])) for name in _COMMANDS]
NOTHING = {**dict.fromkeys(RUNS, "--config"), "featurize": "--input, --output", "inspect": "DATA"}


@cache
def help_of(command: str) -> str:
    """Return the long help of a command."""
    calls = [["--help_all"], ["--help"]] if command in RUNS else [["--help"]]
    if command == "predict":
        calls += [["--checkpoint", name, "--help"] for name in ("tree.ckpt", "molecule.ckpt")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert not any(run(command, *options) for options in calls)
    return said.getvalue()


def check_hints(line: str) -> None:
    """Check that the commands and options that an error names exist."""
    for command, words in re.findall(r"pyg-dynbatch (\w+)((?: [^ ;\']+)*)", line):
        assert command in _COMMANDS, line
        for option in re.findall(r"--[a-z_-]+", words):
            assert option in help_of(command), (option, line)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return str(tree_checkpoint(folder / "tree.ckpt")), trained(folder)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: tuple[str, str]) -> None:
    prepare(tmp_path, monkeypatch, CONFIG)
    for name, path in zip(("tree.ckpt", "molecule.ckpt"), checkpoints, strict=True):
        Path(name).symlink_to(path)
    torch.save({**FOREIGN, "pyg_dynbatch_task": "TreeRelatedness"}, "pair.ckpt")
    Path("text.ckpt").write_text("no checkpoint", encoding="utf-8")
    Path("some.csv").write_text("smiles\nCCO\n", encoding="utf-8")
    Path("trees.txt").write_text("(1 (2 a) (0 b))\n", encoding="utf-8")


@pytest.mark.parametrize("command", COMMANDS)
def test_without_arguments(command: str, capsys) -> None:
    line = complaint(capsys, command)
    assert NOTHING[command] in line
    check_hints(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option(command: str, capsys) -> None:
    line = complaint(capsys, *RIGHT[command].split(), "--nosuch", "1")
    assert "--nosuch" in line
    check_hints(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file(command: str, capsys) -> None:
    words = RIGHT[command].split()
    for number in range(1, len(words)):
        is_input = words[number - 1] != "--output" and Path(words[number]).suffix
        if is_input:
            wrong = [*words[:number], f"nosuch{Path(words[number]).suffix}", *words[number + 1 :]]
            line = complaint(capsys, *wrong)
            assert "nosuch" in line
            check_hints(line)


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize("run_folder", ["nosuch", "."])
def test_not_a_run(command: str, run_folder: str, capsys) -> None:
    line = complaint(capsys, command, "--run", run_folder)
    assert "--run is not the folder of a run" in line
    check_hints(line)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("test --config small.yaml --ckpt_path molecule.ckpt", "different model"),
        ("fit --config small.yaml --ckpt_path molecule.ckpt", "in the folder of its run"),
        ("predict --checkpoint pair.ckpt --input trees.txt", "predict --run FOLDER"),
        ("predict --checkpoint text.ckpt --input trees.txt", "not a checkpoint"),
        ("predict --checkpoint tree.ckpt molecule.ckpt --input trees.txt", "TreeClassification"),
    ],
)  # fmt: skip
def test_the_wrong_kind_of_checkpoint(argv: str, said: str, capsys) -> None:
    line = complaint(capsys, *argv.split())
    assert said in line
    check_hints(line)


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--model", "Tree", "expected one of "),
        ("--model", "nosuch.py", "there is no class 'nosuch.py'"),
        ("--model", "a.b.Nosuch", "there is no class 'a.b.Nosuch'"),
        ("--data", "Tree", "TreeFileData"),
        ("--data", "ListOpData", "did you mean 'ListOpsData'?"),
    ],
)
def test_classes_that_do_not_exist(option: str, given: str, said: str, capsys) -> None:
    line = complaint(capsys, "fit", "--config", "small.yaml", option, given)
    assert f"argument {option}: there is no class" in line
    assert said in line
    assert "TreeTask" not in line
    check_hints(line)


def test_featurize_names_its_options(capsys) -> None:
    Path("bad.csv").write_text("smiles\nC1CC\n", encoding="utf-8")
    featurize = ("featurize", "--output", "packed", "--input")
    assert "--bad skip" in complaint(capsys, *featurize, "bad.csv", "--bad", "raise")
    assert "argument --bad" in complaint(capsys, *featurize, "some.csv", "--bad", "nosuch")
    assert "--format csv" in complaint(capsys, *featurize, "tree.ckpt")
    assert run(*featurize, "some.csv") == 0
    line = complaint(capsys, *featurize, "some.csv", "--max-atoms", "7")
    assert "options.max_atoms 7; got: featurizer" in line
    assert "{" not in line


def test_inspect_explains_native(capsys) -> None:
    assert run("inspect", "--native") == 0
    assert capsys.readouterr().out.endswith(f"\n{describe_products()}\n")
    assert "--native" in help_of("inspect")
    for others in (["trees.txt"], ["--batch-size", "3"]):
        assert "argument --native" in complaint(capsys, "inspect", "--native", *others)


def test_training_without_lightning_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "pyg_dynbatch.lightning", raising=False)
    monkeypatch.setitem(sys.modules, "pyg_dynbatch.training.task", None)
    line = complaint(capsys, "fit", "--config", "small.yaml")
    assert "pip install 'pyg_dynbatch[cli]'" in line
