"""Every example runs, and what it prints is worth showing."""

import contextlib
import io
import logging
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"

# What stands before each figure, and the least that it must be.
LEAST = {
    "sentiment_plain_pytorch": {"roots": 0.9, "nodes": 0.9},
    "tree_lstm_in_pyg_model": {r"SAGEConv \+ Tree-LSTM: test accuracy": 0.9},
    "any_conv_over_dag": {r"GINEConv: .* topological order": 0.95},
    "own_cell": {r"batching agrees: Schedule\(": 5},
    "python_ast": {"test accuracy": 0.7, "positive": 0.5},
    "weave_in_pyg_model": {r"three SAGEConv: test error": 0.5},
    "molecule_pair_feature": {"without the feature:": 0.6},
    "molecule_predict_and_draw": {"pictures:": 10, "atom is polar in": 8},
    "weave_with_engine": {"": 100, "ms, layer": 0},
    "dynamic_batching_in_one_page": {r"as fast; test accuracy": 0.9},
}


@cache
def printed_by(name: str) -> str:
    out, log = io.StringIO(), logging.getLogger("lightning.pytorch")
    level = log.level
    with contextlib.redirect_stdout(out):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    log.setLevel(level)
    return out.getvalue()


def test_every_example_is_tested() -> None:
    others = [path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("blocks_")]
    assert sorted(others) == sorted(LEAST)


@pytest.mark.parametrize("name", LEAST)
def test_example_is_short(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (150 if "one_page" in name else 80)


@pytest.mark.parametrize("name", LEAST)
def test_example_runs_and_learns(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = printed_by(name)
    for before, least in LEAST[name].items():
        found = re.search(rf"{before} ?(\d+(?:\.\d+)?)", printed)
        assert found is not None, printed
        assert float(found.group(1)) >= least
    assert list(tmp_path.iterdir()) == [], "an example leaves files behind"


def test_the_layers_of_the_library_make_the_difference() -> None:
    plain, recursive = re.findall(r"accuracy (\d\.\d+)", printed_by("tree_lstm_in_pyg_model"))
    assert float(recursive) > float(plain) + 0.05
    lines = re.findall(r"stacked (\d\.\d+), .* order (\d\.\d+)", printed_by("any_conv_over_dag"))
    assert len(lines) == 2
    assert all(float(ordered) > float(stacked) for stacked, ordered in lines)
    far, woven = re.findall(r"test error (\d\.\d+)", printed_by("weave_in_pyg_model"))
    assert float(woven) < 0.5 * float(far)


def test_a_feature_of_your_own_makes_the_difference() -> None:
    found = re.search(r"feature: (\d\.\d+), with it (\d\.\d+)", printed_by("molecule_pair_feature"))
    assert found is not None
    assert float(found.group(2)) < float(found.group(1)) / 2
