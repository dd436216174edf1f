"""Formatter, linter, type checker and import contracts pass."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))


TOOLS = [
    [sys.executable, "-m", "ruff", "format", "--check", "."],
    [sys.executable, "-m", "ruff", "check", "."],
    [str(SCRIPTS / "lint-imports")],
    pytest.param([sys.executable, "-m", "mypy"], marks=pytest.mark.long),
]


@pytest.mark.parametrize("command", TOOLS, ids=["format", "lint", "imports", "types"])
def test_tool_passes(command: list[str]) -> None:
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
