"""Whatever continues earlier work notices that its data have changed, and loses nothing of it."""

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import pytest
import yaml
from lightning.pytorch.trainer.states import TrainerFn

from pyg_dynbatch.molecules.datamodules import MoleculeFileData
from pyg_dynbatch.molecules.splits import SplitOptions
from pyg_dynbatch.training import experiments
from pyg_dynbatch.training.command import Run
from pyg_dynbatch.trees.task import TreeFileData
from tests.console import complaint, prepare, rows_of, run
from tests.molecules.molecules import QUIET, molecule_csv
from tests.test_cli_molecules import CONFIG as MOLECULES

pytestmark = [
    pytest.mark.filterwarnings("ignore:(?s).*(jsonargparse|deprecated in v4)"),
    pytest.mark.filterwarnings("ignore:The variance of predictions or target is close to zero"),
]

COMMANDS = {
    "fit": ["fit", "--config", "small.yaml"],
    "repeat": ["repeat", "--config", "small.yaml", "--times", "2", "--output", "table.csv"],
    "tune": ["tune", "--config", "small.yaml", "--space", "space.yaml", "--trials", "1"],
}
SAID = {
    "fit": "cannot resume, the training data have changed",
    "repeat": "the table was made with other settings or other data",
    "tune": "the study was made with other settings, another space or other data",
}


def change_targets(folder: Path) -> None:
    """Multiply the targets, as a change of their unit does; all sizes stay the same."""
    path = folder / "regression.csv"
    lines = [line.split(",") for line in path.read_text().splitlines()]
    for cells in lines[1:]:
        cells[1:3] = [cell and str(float(cell) * 1000) for cell in cells[1:3]]
    path.write_text("".join(",".join(cells) + "\n" for cells in lines))


def contents(folder: Path) -> dict[str, bytes]:
    """Read the files that a command has written, without logs that say when."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.*"))
        if path.suffix in (".csv", ".ckpt", ".png", ".json", ".yaml")
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch, MOLECULES)
    molecule_csv(tmp_path)
    Path("space.yaml").write_text(yaml.safe_dump({"model.init_args.hidden": [4, 6]}))
    return tmp_path


def check_changed_data_are_refused(command: str, folder: Path, capsys) -> None:
    assert run(*COMMANDS[command]) == 0
    change_targets(folder)
    before = contents(folder)
    more = {"fit": ["--run", "runs/small/version_0", "--trainer.max_epochs", "2"]}
    said = complaint(capsys, *(["fit", *more["fit"]] if command == "fit" else COMMANDS[command]))
    assert SAID[command] in said and "expected:" in said and "got:" in said
    assert contents(folder) == before


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_changed_data_are_refused(command: str, folder: Path, capsys) -> None:
    if command == "tune":
        pytest.importorskip("optuna")
    check_changed_data_are_refused(command, folder, capsys)


@pytest.mark.parametrize("command", ["repeat", "tune"])
def test_changed_data_are_refused_without_training(
    command: str, folder: Path, monkeypatch, capsys
) -> None:
    if command == "tune":
        pytest.importorskip("optuna")
    best = SimpleNamespace(best_model_path="", best_model_score=1.0)
    done = SimpleNamespace(trainer=None, train=lambda: None)
    done.start = lambda: done
    monkeypatch.setattr(
        experiments, "Run", lambda *given, build=True: done if build else Run(*given, build=False)
    )
    monkeypatch.setattr(experiments, "best_checkpoint", lambda trainer: best)
    monkeypatch.setattr(experiments, "_folder", lambda done: folder)
    Path("metrics.csv").write_text("test/rmse\n1.5\n")
    check_changed_data_are_refused(command, folder, capsys)


def test_packed_data_are_hashed(tmp_path: Path) -> None:
    (packed := tmp_path / "packed").mkdir()
    (packed / "store.json").write_text("{}")
    (column := packed / "y.bin").write_bytes(b"1")
    options = {"data": {"init_args": {"root": str(packed)}}, "model": {}}
    before = experiments._digest(options, None)
    column.write_bytes(b"2")
    assert experiments._digest(options, None) != before


@pytest.mark.long
def test_data_that_change_between_two_runs_are_refused(folder: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(experiments, "_folder", lambda done: folder)

    def trained(*given, build=True):
        if not build:
            return Run(*given, build=False)
        return SimpleNamespace(start=lambda: change_targets(folder))

    monkeypatch.setattr(experiments, "Run", trained)
    Path("metrics.csv").write_text("test/rmse\n1.5\n")
    assert SAID["repeat"] in complaint(capsys, *COMMANDS["repeat"])
    assert [row["run_1"] for row in rows_of("table.csv")] == ["1.5"]


def molecules(folder: Path, changed: bool) -> MoleculeFileData:
    molecule_csv(folder)
    if changed:
        change_targets(folder)
    options = {"split": SplitOptions(fractions=(0.5, 0.25, 0.25), leakage=False), "reading": QUIET}
    return MoleculeFileData("regression.csv", ["first", "second"], "regression", **options)


def trees(folder: Path, changed: bool) -> TreeFileData:
    lines = ["(1 (0 a) (0 b))", "(0 (1 a) (1 c))"]
    Path("train.txt").write_text("\n".join(lines))
    if changed:
        Path("train.txt").write_text("\n".join(["(0 (0 a) (0 b))", lines[1]]))
    return TreeFileData("train.txt", "train.txt")


@pytest.mark.parametrize("make", [molecules, trees])
def test_a_run_goes_on_with_the_same_data_only(make, folder: Path) -> None:
    state = make(folder, changed=False).state_dict()
    for changed in (False, True):
        module = make(folder, changed)
        module.trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
        module.trainer.lightning_module = None
        if not changed:
            module.load_state_dict(state)
            continue
        with pytest.raises(ValueError, match=SAID["fit"]):
            module.load_state_dict(state)
        module.trainer.state.fn = TrainerFn.TESTING
        module.load_state_dict(state)
