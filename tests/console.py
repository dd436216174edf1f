"""Run the console script in a test."""

import csv
from pathlib import Path

import pytest

from pyg_dynbatch.cli import main


def run(*argv: str) -> int:
    """Run a command, and return its exit code."""
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


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
