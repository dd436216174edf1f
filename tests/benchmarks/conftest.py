"""Run a benchmark on tiny sizes and check what every record and figure has."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import bench

FIELDS = {"bench", "case", "batch", "mode", "phase", "median_seconds", "ratio", "ratio_to"}
MACHINE = {"threads", "device", "processor", "pyg_dynbatch", "torch", "python", "date"}

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip garbage collections, which take longer here than what is timed."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(benchmark: ModuleType, *argv: str, code: int = 0) -> list[dict[str, Any]]:
        file = tmp_path / "records.json"
        figure = tmp_path / "figure.svg"
        output = ["--threads", "1", "--json", str(file), "--figure", str(figure)]
        assert bench.main(benchmark, [*argv, *output]) == code
        assert figure.read_text(encoding="utf-8").lstrip().startswith("<?xml")
        records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        for record in records:
            assert set(record) >= FIELDS | MACHINE
            assert not any(isinstance(value, list | dict) for value in record.values())
            assert record["bench"] == benchmark.__name__.removeprefix("benchmarks.")
            assert record["median_seconds"] is None or record["median_seconds"] > 0
            assert (record["ratio"] is None) == (record["ratio_to"] is None)
        return records

    return run
