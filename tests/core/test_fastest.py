"""Races between ways to compute: run once per kind of processor, and kept for later processes."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.core import native
from pyg_dynbatch.core.native import fastest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(native.FOLDER, str(tmp_path))
    monkeypatch.delenv(native.RACE, raising=False)
    return tmp_path


def ways(runs: list[str], slow: str = "first") -> dict[str, Callable[[], object]]:
    def run(name: str) -> None:
        runs.append(name)
        time.sleep(0.002 if name == slow else 0)

    return {name: lambda name=name: run(name) for name in ("first", "second")}  # type: ignore[misc]


def test_the_winner_is_kept(folder: Path) -> None:
    runs: list[str] = []
    assert fastest("race", ways(runs)) == "second"
    assert set(runs) == {"first", "second"}
    runs.clear()
    assert fastest("race", ways(runs, slow="second")) == "second"
    assert not runs
    assert len(list(folder.iterdir())) == 1
    assert fastest("other", ways(runs, slow="second")) == "first"


@pytest.mark.long
def test_a_later_process_takes_the_same(folder: Path) -> None:
    assert fastest("race", ways([])) == "second"
    code = "from pyg_dynbatch.core.native import fastest; print(fastest('race', dict.fromkeys("
    code += "['first', 'second'], None)))"
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # each number has its own race
    command, environment = [sys.executable, "-c", code], os.environ | threads
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "second\n"


@pytest.mark.long
def test_of_two_processes_one_races(folder: Path) -> None:
    code = """
import sys, time
from pyg_dynbatch.core.native import fastest
mine = sys.argv[1]
def run(name):
    print(mine, "runs", name, flush=True)
    time.sleep(0.01 if name != mine else 0)
print("winner", fastest("race", {name: lambda name=name: run(name) for name in "ab"}))
"""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", code, each], **options) for each in "ab"]
    found = [process.communicate(timeout=60)[0].splitlines() for process in started]
    assert found[0][-1] == found[1][-1]
    assert sorted(len(lines) for lines in found) == [1, 1 + 2 * native._ROUNDS]


def test_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.RACE, "0")
    runs: list[str] = []
    assert fastest("race", ways(runs)) == "first"
    assert not runs and not list(folder.iterdir())


def test_a_folder_that_cannot_be_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, native.__name__)
    (folder / "file").touch()
    monkeypatch.setenv(native.FOLDER, str(folder / "file" / "cache"))
    assert fastest("race", ways([])) == "first"
    assert "race: the winner of a race cannot be kept" in caplog.text


def test_a_file_with_another_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fastest("race", ways([]))
    (kept,) = folder.iterdir()
    kept.write_bytes(b"\xff")
    assert fastest("race", ways([])) == "first"
    assert "is not one of first, second" in caplog.text
    kept.write_text("third")
    assert fastest("race", ways([])) == "first"
    assert "'third' is not one of first, second; delete the file" in caplog.text
