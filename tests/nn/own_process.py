"""Run the checks of a module in a separate process, and report the outcome of each."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def print_outcomes(names: Mapping[str, object], prefix: str) -> None:
    """Runs the functions that begin so, and prints None or a traceback for each, as JSON."""
    found = {}
    for name, check in sorted(names.items()):
        if name.startswith(prefix) and callable(check):
            try:
                check()
                found[name] = None
            except Exception:  # each check reports what went wrong
                found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


def outcomes(module: ModuleType, **environment: str) -> dict[str, str | None]:
    """Runs ``python -m module`` with more in its environment."""
    run = subprocess.run(
        [sys.executable, "-m", module.__name__],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
