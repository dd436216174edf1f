"""Run the console script in a test."""

import csv
from pathlib import Path

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import pytest

from pyg_dynbatch.cli import main

TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "small"}},
}


def run(*argv: str) -> int:
    """Run a command, and return its exit code."""
    return main(argv)


def complaint(capsys: pytest.CaptureFixture, *argv: str) -> str:
    """Run a command that fails, and return the few lines that it prints."""
    assert run(*argv) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    found = said[said.index("pyg-dynbatch: error: ") :].strip()
    assert len(found.splitlines()) <= 5, found
    return found


def rows_of(path: str | Path) -> list[dict[str, str]]:
    """Read a table."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
