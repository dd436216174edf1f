"""The padding benchmark counts what it says, on tiny sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import main
from benchmarks.records import FIELDS


def test_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figure = tmp_path / "records.json", tmp_path / "figure.svg"
    argv = ["padding", "--trees", "30", "--batch-sizes", "1", "4", "--shapes", "1", "8"]
    assert main([*argv, "--margin", "0", "--json", str(file), "--figure", str(figure)]) == 0
    assert figure.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    found = {(record["batch"], record["mode"]): record for record in records}
    assert len(found) == len(records) == 4
    for record in records:
        assert set(FIELDS) <= set(record)
        assert record["ratio"] >= 1 and record["levels"] >= 1 and 0 < record["fitting"] <= 1
    # The same single trees in both epochs: they all fit, and more shapes pad less.
    assert found[1, "1 shapes"]["fitting"] == found[1, "8 shapes"]["fitting"] == 1
    assert found[1, "8 shapes"]["ratio"] < found[1, "1 shapes"]["ratio"]
    shown = capsys.readouterr().out
    assert "trees a batch" in shown and "% that fit" in shown
