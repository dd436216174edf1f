"""Run the console script in a test."""

import contextlib
import csv
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import pytest
import yaml

from pyg_dynbatch.cli import main

TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "small"}},
}


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    """Change to a folder, and write a small configuration there."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["pyg-dynbatch"])
    (folder / "small.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


def fit_small(folder: Path) -> Path:
    """Run the small configuration of the current folder; its output is in ``output.txt``."""
    with (folder / "output.txt").open("w") as output, contextlib.redirect_stdout(output):
        assert run("fit", "--config", "small.yaml") == 0
    return folder


def run(*argv: str) -> int:
    """Run a command, and return its exit code."""
    return main(argv)


def complaint(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """Run a command that fails, and return the line that it prints."""
    assert run(*argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("pyg-dynbatch: error: ")
    assert not [line for line in lines if "Traceback" in line]
    return lines[-1]


def rows_of(path: str | Path) -> list[dict[str, str]]:
    """Read a table."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
