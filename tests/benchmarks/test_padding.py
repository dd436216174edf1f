"""The padding benchmark counts nodes and levels right, on tiny sizes."""

from typing import Any

import pytest

from benchmarks import padding


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--trees", "30", "--batch-sizes", "1", "4", "--shapes", "1", "8", "--margin", "0"]
    records = run(padding, *sizes)
    found = {(record["batch"], record["mode"]): record for record in records}
    assert len(found) == len(records) == 4
    for record in records:
        assert record["ratio"] >= 1 and record["levels"] >= 1 and 0 < record["fitting"] <= 1
    # The same single trees in both epochs: they all fit, and more shapes pad less.
    assert found[1, "1 shapes"]["fitting"] == found[1, "8 shapes"]["fitting"] == 1
    assert found[1, "8 shapes"]["ratio"] < found[1, "1 shapes"]["ratio"]
    shown = capsys.readouterr().out
    assert "trees per batch" in shown and "% that fit" in shown
