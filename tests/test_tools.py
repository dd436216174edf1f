"""Formatters, linter, type checker and import contracts pass."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
C_SOURCES = sorted(map(str, (ROOT / "src" / "pyg_dynbatch" / "native").iterdir()))

TOOLS = [
    [sys.executable, "-m", "ruff", "format", "--check", "."],
    [str(SCRIPTS / "clang-format"), "--dry-run", "-Werror", *C_SOURCES],
    [sys.executable, "-m", "ruff", "check", "."],
    [str(SCRIPTS / "lint-imports")],
    pytest.param([sys.executable, "-m", "mypy"], marks=pytest.mark.long),
]


@pytest.mark.parametrize("command", TOOLS, ids=["format", "format C", "lint", "imports", "types"])
def test_tool_passes(command: list[str]) -> None:
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
