"""Every use runs on a few examples; what it prints of them is checked where it is known."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from tests.example_files import FOLDER


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a use with options, and return what it prints."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run_use(name: str, *options: object) -> str:
        # On a machine with other work, the threads of scikit-learn wait for each other.
        with threadpool_limits(1):
            importlib.import_module(name).main([str(option) for option in options])
        return capsys.readouterr().out

    return run_use


def number_after(text: str, before: str) -> float:
    found = re.search(rf"{re.escape(before)} *(-?\d+(?:\.\d+)?)", text)
    assert found is not None, text
    return float(found[1])


@pytest.mark.long
def test_architectures(run, shared_data):
    path = shared_data("dags/final_structures6.txt.gz")
    printed = run("architectures", path, "--seeds", 1, "--epochs", 1, "--most", 200)
    # In deviations: the mean of the training part has an error of about 1.
    assert 0.2 < number_after(printed, "operations and edges by place, boosting RMSE") < 1
    assert len(printed.splitlines()) == 3


def test_job_times(run, shared_data):
    path = shared_data("schedulers/tpch_dags.json")
    options = ("--seeds", 1, "--epochs", 1, "--train", 128, "--test", 4)
    printed = run("job_times", "--jobs", path, *options)
    exact, bound = printed.splitlines()[:2]
    assert number_after(exact, "64 levels") == number_after(exact, "TPC-H") == 0
    assert number_after(bound, "TPC-H") == 0.030
    assert len(printed.splitlines()) == 5


def test_method_names(run, tmp_path):
    words = [f"{chr(97 + number)}erb" for number in range(20)]
    for number in range(12):
        functions = [
            f"def {word}_{number}(self):\n    value = self.{word}\n    return [value, {number}]\n"
            for word in words
        ]
        (tmp_path / f"module{number}.py").write_text("\n".join(functions), encoding="utf-8")
    printed = run("method_names", "--folder", tmp_path, "--epochs", 8)
    assert number_after(printed, "set of tokens, linear: accuracy") > 0.1  # chance: 0.05
    assert number_after(printed, "DAGNN: accuracy") > 0.1


@pytest.mark.long
def test_molecule_baselines(run, tmp_path):
    lines = ["smiles,oxygens"]
    lines += [
        f"{'C' * (number % 9 + 1)}{'O' * (number % 3)},{1.5 * (number % 3)}" for number in range(60)
    ]
    path = tmp_path / "alcohols.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    options = ("--seeds", 1, "--epochs", 1, "--output", tmp_path)
    printed = run("molecule_baselines", "--file", path, "--targets", "oxygens", *options)
    names = ["network", "forest", "forest of bits", "boosting", "linear", "mean of all"]
    rows = [line for line in printed.splitlines() if " oxygens " in line]
    assert [row.partition(" oxygens ")[0].strip() for row in rows] == names
    assert number_after(printed, "forest of bits oxygens") < 0.7


@pytest.mark.long
def test_phylogeny(run, shared_data):
    folder: Path = shared_data("phylogeny/DS1.fasta.gz").parent
    printed = run("phylogeny", folder, "--repeats", 1, "--draws", 20)
    # Published: -7108.42; few draws are too low by a few units.
    assert -7115 < number_after(printed, "log p(Y), K = 20:") < -7105


@pytest.mark.long
def test_query_plans(run):
    pytest.importorskip("duckdb", reason="the extra of query plans is not installed")
    printed = run("query_plans", "--templates", 10, "--rows", 5000, "--epochs", 1)
    assert "20 test plans" in printed
    assert number_after(printed, "one module per operator q-error 50%, 90%, 99%:") >= 1


@pytest.mark.long
def test_schedulers(run, shared_data):
    printed = run("schedulers", shared_data("schedulers/episode.npz").parent, "--rounds", 1)
    assert "969 of 969 decisions the same" in printed
    assert len(printed.splitlines()) == 5
