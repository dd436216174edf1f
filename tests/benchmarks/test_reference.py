"""The page of reference figures follows from its records, and rows are run once."""

import dataclasses
import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import pyg_dynbatch
from benchmarks import reference
from pyg_dynbatch.cli import main

RESULTS = {"rows": {"net": {"rmse": [1.0, 2.0]}, "forest": {"rmse": [1.8]}}, "minutes": 2.4}
ROW = reference.Row(
    *("training.md", "numbers", "random", "rmse", "RMSE", "net"),
    command="python SCRIPT RESULT",
    published="3.1 (nobody)",
    not_compared=("net, wide",),
    smaller_is_better=True,
)


@pytest.fixture
def options(tmp_path: Path) -> Namespace:
    return Namespace(data=tmp_path / "data", results=tmp_path, checkpoints=tmp_path / "kept")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the rows by one, whose script writes the results and counts its runs."""
    path, counter = tmp_path / "script.py", tmp_path / "runs.txt"
    text = f"import sys; open(sys.argv[1], 'w').write({json.dumps(RESULTS)!r})\n"
    text += "sum(range(3_000_000))\n"  # processor time is counted in hundredths of a second
    path.write_text(f"{text}open({str(counter)!r}, 'a').write('x')\n", encoding="utf-8")
    row = dataclasses.replace(ROW, command=f"python {path} RESULT")
    monkeypatch.setattr(reference, "ROWS", {"one": row})
    return path


def test_the_page_is_written_from_the_figures() -> None:
    figures = json.loads(reference.FIGURES.read_text(encoding="utf-8"))
    assert list(figures) == [name for name in reference.ROWS if name in figures]
    text = reference.PAGE.read_text(encoding="utf-8")
    assert reference.page(text, figures) == text


def test_commands_write_what_is_read() -> None:
    for row in reference.ROWS.values():
        program, *words = shlex.split(row.command)
        assert (reference.ROOT / "docs" / row.page).is_file()
        if program == "python":
            assert words[-2:] == ["--json", "RESULT"]
            assert '"--json"' in (reference.ROOT / words[0]).read_text(encoding="utf-8")
        else:
            assert program == "pyg-dynbatch" and words[0] == "fit" and words[-1] == "SEED"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, row in reference.ROWS.items() if row.fit])
def test_options_of_checkpoints_are_understood(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(reference.ROOT)
    monkeypatch.setattr(sys, "argv", ["pyg-dynbatch"])
    assert main(["fit", *shlex.split(reference.ROWS[name].fit), "--print_config"]) == 0
    assert "class_path" in capsys.readouterr().out


def test_a_row_is_run_once(script: Path, options: Namespace) -> None:
    found = reference.run("one", options)
    assert found["rows"] == RESULTS["rows"] and found["minutes"] > 0
    assert found["processor"] and found["date"]
    assert reference.run("one", options) == found
    assert (options.results / "runs.txt").read_text() == "x"


def test_a_failure_is_not_a_result(script: Path, options: Namespace) -> None:
    script.write_text("raise SystemExit(3)\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="the command has failed: python"):
        reference.run("one", options)
    assert not (options.results / "one.json").exists()


@pytest.mark.long
def test_a_configuration_is_run_with_every_seed(
    options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = " ".join(f"--data.init_args.recipe.{name} 40" for name in ("train", "val", "test"))
    root = f"--data.init_args.root {options.results / 'data'} --trainer.max_epochs 1"
    command = f"{reference.ROWS['listops'].command} {small} {root}"
    row = dataclasses.replace(reference.ROWS["listops"], command=command, baseline=None)
    monkeypatch.setattr(reference, "ROWS", {"small": row})
    monkeypatch.setattr(reference, "SEEDS", (1, 2))
    ((model, found),) = reference.run("small", options)["rows"].items()
    assert model == "network" and len(found["accuracy"]) == 2


def test_the_better_one_is_bold(script: Path) -> None:
    def cells(found: dict[str, Any]) -> tuple[str, str]:
        figures = {"rows": {name: {"rmse": each} for name, each in found.items()}, "minutes": 2.4}
        line = reference._cells("one", figures)
        assert line[4] == "3.1 (nobody)" and line[6] == "2"
        return line[3], line[5]

    wide = {"net, wide": [0.1]}  # a variant of ours is not a baseline
    lost = {"net": [1.0, 2.0], "forest": [1.4], "linear": [1.45], **wide}
    assert cells(lost) == ("1.500 ± 0.707 (2)", "**1.400**: forest")
    won = {"net": [1.0, 2.0], "forest": [1.6], "linear": [12.0], **wide}
    assert cells(won) == ("**1.500 ± 0.707** (2)", "1.600: forest")


def test_a_page_without_marks_is_refused(script: Path) -> None:
    with pytest.raises(SystemExit, match="marks of the part 'table' are missing"):
        reference.page("# Reference figures\n", {"one": RESULTS})


@pytest.mark.long
def test_a_checkpoint_predicts_like_the_one_of_the_run(
    options: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = " ".join(f"--data.init_args.recipe.{name} 40" for name in ("train", "val", "test"))
    root = f"--data.init_args.root {options.results / 'data'} --trainer.max_epochs 1"
    fit = f"{reference.ROWS['listops'].fit} {small} {root}"
    row = dataclasses.replace(reference.ROWS["listops"], fit=fit)
    monkeypatch.setattr(reference, "ROWS", {"small": row})
    kept = reference.save_checkpoint("small", options)
    (made,) = options.results.glob("runs/checkpoints/small/*/best.ckpt")
    assert kept.stat().st_size < made.stat().st_size / 2
    ours, theirs = (pyg_dynbatch.load(path).state_dict() for path in (kept, made))
    assert all(torch.equal(ours[name], theirs[name]) for name in {*ours, *theirs})

    monkeypatch.setattr(reference, "MOST_BYTES", 1000)
    with pytest.raises(SystemExit, match="at most 1,000"):
        reference.save_checkpoint("small", options)
    assert not kept.exists()
