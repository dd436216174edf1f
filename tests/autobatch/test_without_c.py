"""Without the C extension, which is looked up on import, models give the same results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_dynbatch.core.native import NATIVE_SWITCH

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    "files",
    [
        ("test_control.py", "test_state.py"),
        pytest.param(("test_law.py", "test_ordinary_code.py"), marks=pytest.mark.long),
    ],
)
def test_the_tests_of_values_pass(files: tuple[str, ...]) -> None:
    options = "-q", "-m", "long or not long", "-p", "no:cacheprovider", "-p", "no:xdist"
    paths = [str(FOLDER / file) for file in files]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        env=os.environ | {NATIVE_SWITCH: "0"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
