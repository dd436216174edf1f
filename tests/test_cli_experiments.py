"""The console script runs many times: over seeds and folds, and to choose options."""

import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import yaml

from pyg_dynbatch.cli import main
from pyg_dynbatch.files import locked_folder
from pyg_dynbatch.training.experiments import read_space, summary
from tests.console import complaint, prepare, rows_of, run
from tests.molecules.molecules import molecule_csv
from tests.test_cli import CONFIG as TREES
from tests.test_cli_molecules import CONFIG


def test_a_mean_that_is_not_defined_is_not_shown() -> None:
    """As of errors in the units of several properties."""
    runs = {("network", task, "rmse"): [1.0, 2.0] for task in ("a", "b")}
    runs["network", "mean", "rmse"] = [float("nan")] * 2
    runs["forest", "b", "rmse"] = [float("nan")] * 2
    assert [line.split()[1] for line in summary(runs, "rmse")] == ["a", "b", "b"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch, CONFIG)
    molecule_csv(tmp_path)
    return tmp_path


@pytest.mark.long
def test_runs_over_seeds(folder: Path, capsys) -> None:
    assert run("repeat", "--config", "small.yaml", "--times", "2") == 0
    said = capsys.readouterr().out
    rows = {
        (r["model"], r["task"], r["metric"]): r
        for r in rows_of("runs/small/version_0/repeated.csv")
    }
    assert {key[0] for key in rows} == {"network"}
    assert {key[1] for key in rows} == {"first", "second", "mean"}
    splits = [Path(f"runs/small/version_{number}/split.json").read_text() for number in (0, 1)]
    assert splits[0] != splits[1]
    for number, version in ((1, 0), (2, 1)):
        (table,) = [
            r
            for r in rows_of(f"runs/small/version_{version}/task_metrics.csv")
            if r["task"] == "first"
        ]
        assert rows["network", "first", "rmse"][f"run_{number}"] == table["rmse"]
    row = rows["network", "mean", "scaled_rmse"]
    values = [float(row["run_1"]), float(row["run_2"])]
    assert float(row["mean"]) == pytest.approx(statistics.mean(values), rel=1e-4)
    assert float(row["deviation"]) == pytest.approx(statistics.stdev(values), rel=1e-4)
    assert f"network   mean                 scaled_rmse {float(row['mean']):.4g} ± " in said
    assert Path("runs/small/version_0/repeated.png").read_bytes().startswith(b"\x89PNG")

    # The same command adds runs to a table, and no others.
    table = "runs/small/version_0/repeated.csv"
    more = ["repeat", "--config", "small.yaml", "--output", table, "--times"]
    assert run(*more, "2") == 0
    assert capsys.readouterr().out.count("done before") == 2
    assert len(list(Path("runs/small").iterdir())) == 2
    said = complaint(capsys, *more, "2", "--trainer.max_epochs", "1")
    assert "the table was made with other settings" in said


@pytest.mark.long
def test_runs_over_folds(folder: Path) -> None:
    split = ["--data.init_args.split.method", "kfold", "--data.init_args.split.folds", "3"]
    assert run("repeat", "--config", "small.yaml", *split, "--output", "folds.csv") == 0
    rows = rows_of("folds.csv")
    assert all(row["runs"] == "3" for row in rows)
    tested = [
        {row["row"] for row in rows_of(f"runs/small/version_{fold}/predictions.csv")}
        for fold in range(3)
    ]
    assert len(set.union(*tested)) == sum(map(len, tested)) == 32


def test_a_wrong_number_of_runs_is_refused(folder: Path, capsys) -> None:
    argv = ["repeat", "--config", "small.yaml", "--times"]
    assert "expected at least 2, got 1" in complaint(capsys, *argv, "1")
    split = ["--data.init_args.split.method", "kfold", "--data.init_args.split.folds", "3"]
    assert "repeat: too few folds" in complaint(capsys, *argv, "4", *split)
    said = complaint(capsys, *argv, "2", "--model.init_args.hiden", "3")
    assert "did you mean '--model.init_args.hidden'?" in said
    assert not Path("runs").exists()


SPACE = {
    "model.init_args.hidden": {"low": 4, "high": 8, "step": 2},
    "model.init_args.optimizer.lr": {"low": 1e-3, "high": 0.1, "log": True},
    "model.init_args.head": [[], [8], [8, 4]],
    "data.init_args.pairs": ["all", 2],
}


@pytest.mark.long
def test_a_study_goes_on_and_its_best_settings_can_be_trained(folder: Path, capsys) -> None:
    optuna = pytest.importorskip("optuna")
    Path("space.yaml").write_text(yaml.safe_dump(SPACE), encoding="utf-8")
    argv = ["tune", "--config", "small.yaml", "--space", "space.yaml", "--trials"]
    assert run(*argv, "2") == 0
    assert run(*argv, "3") == 0
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend("study.log")
    )
    study = optuna.load_study(study_name="tune", storage=storage)
    assert len(study.trials) == len({json.dumps(trial.params) for trial in study.trials}) == 3
    assert not list(Path("runs").rglob("predictions.csv")), "a trial has looked at the test split"
    said = capsys.readouterr().out
    best = min(trial.value for trial in study.trials)
    assert f"best of 3 trials: val/scaled_rmse {best:.6g}" in said
    chosen = yaml.safe_load(Path("best.yaml").read_text(encoding="utf-8"))
    hidden, head = (chosen["model"]["init_args"][name] for name in ("hidden", "head"))
    assert hidden == study.best_params["model.init_args.hidden"]
    assert head == json.loads(study.best_params["model.init_args.head"])
    # The same seed and the same settings give the same validation as in the trial.
    assert run("fit", "--config", "best.yaml") == 0
    metrics = [row["val/scaled_rmse"] for row in rows_of("runs/small/version_3/metrics.csv")]
    assert min(float(value) for value in metrics if value) == pytest.approx(best, rel=1e-4)
    said = complaint(capsys, *argv, "9", "--trainer.max_epochs", "2")
    assert "the study was made with other settings" in said
    study.ask()  # by a process that is stopped before it has a result
    assert run(*argv, "3") == 0
    assert "trials [3]: failed, stopped" in capsys.readouterr().out


@pytest.mark.parametrize("space", ["", "model.init_args.hidden: 3", "a: {low: 1}", "a: []"])
def test_a_space_that_cannot_be_searched(folder: Path, capsys, space: str) -> None:
    Path("space.yaml").write_text(space, encoding="utf-8")
    said = complaint(capsys, "tune", "--config", "small.yaml", "--space", "space.yaml")
    assert "the search space cannot be used" in said and "space.yaml" in said


def together(argv: list[str]) -> list[int]:
    """Start a command in two processes, as a user of Dask or Ray would."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(main, [argv] * 2))


@pytest.mark.long
def test_processes_share_the_runs_of_a_table(folder: Path, capfd) -> None:
    Path("trees.yaml").write_text(yaml.safe_dump(TREES), encoding="utf-8")
    argv = ["repeat", "--config", "trees.yaml", "--times", "3", "--output"]
    assert run(*argv, "alone.csv") == 0
    assert "network   all                  accuracy" in capfd.readouterr().out

    # One is killed in its first run, which another process begins anew.
    killed = subprocess.Popen([sys.executable, "-m", "pyg_dynbatch", *argv, "shared.csv"])
    while not Path(".shared.csv.run_1.lock").exists():
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    capfd.readouterr()
    assert together([*argv, "shared.csv"]) == [0, 0]
    said = capfd.readouterr().out
    assert [said.count(f"run {n} of 3: --seed_everything {n}\n") for n in (1, 2, 3)] == [1] * 3
    assert Path("shared.csv").read_bytes() == Path("alone.csv").read_bytes()
    assert not list(Path().glob(".shared.csv*"))
    assert run(*argv, "shared.csv") == 0
    assert capfd.readouterr().out.count("done before") == 3
    fewer = ["repeat", "--config", "trees.yaml", "--output", "shared.csv", "--times", "2"]
    assert "the table has more runs" in complaint(capfd, *fewer)


@pytest.mark.long
def test_processes_share_the_trials_of_a_study(folder: Path, capfd) -> None:
    optuna = pytest.importorskip("optuna")
    Path("space.yaml").write_text(yaml.safe_dump(SPACE), encoding="utf-8")
    argv = ["tune", "--config", "small.yaml", "--space", "space.yaml", "--trials", "3"]
    assert together(argv) == [0, 0]
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend("study.log")
    )
    study = optuna.load_study(study_name="tune", storage=storage)
    assert len(study.trials) == len({json.dumps(trial.params) for trial in study.trials})
    assert 3 <= len(study.trials) <= 4  # both may have begun the last one
    assert len(list(Path("runs/small").iterdir())) == len(study.trials)
    best = f"# val/scaled_rmse {study.best_value:.6g}: trial {study.best_trial.number} of study.log"
    assert Path("best.yaml").read_text(encoding="utf-8").startswith(best)


@pytest.mark.long
def test_a_run_of_another_process_is_missing_until_it_is_done(folder: Path, capsys) -> None:
    Path("trees.yaml").write_text(yaml.safe_dump(TREES), encoding="utf-8")
    argv = ["repeat", "--config", "trees.yaml", "--output", "o.csv", "--times"]
    with locked_folder(".", name=".o.csv.run_1.lock"):
        assert run(*argv, "2") == 0
    said = capsys.readouterr().out
    assert "run 1 of 2: in another process\n" in said
    assert "missing:          runs [1]" in said
    assert {(row["runs"], row["run_1"], row["run_2"] != "") for row in rows_of("o.csv")} == {
        ("1", "", True)
    }
    assert run(*argv, "2") == 0
    said = capsys.readouterr().out
    assert "run 2 of 2: done before" in said and "missing" not in said
    assert all(row["runs"] == "2" and row["run_1"] for row in rows_of("o.csv"))


def test_the_shipped_space_has_options_of_the_shipped_settings(capsys) -> None:
    configs = Path(__file__).parents[1] / "configs"
    space = read_space(str(configs / "spaces" / "molecules.yaml"))
    # As a study writes them: texts, or JSON.
    ends = {name: c["high"] if isinstance(c, dict) else c[-1] for name, c in space.items()}
    texts = {n: end if isinstance(end, str) else json.dumps(end) for n, end in ends.items()}
    words = [word for name, text in texts.items() for word in (f"--{name}", text)]
    assert run("fit", "--config", str(configs / "esol.yaml"), *words, "--print_config") == 0
    settings = yaml.safe_load(capsys.readouterr().out)
    assert settings["model"]["init_args"]["readout"] == ["sum", "max"]
    assert settings["model"]["init_args"]["hidden"] == 160
