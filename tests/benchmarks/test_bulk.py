"""The benchmark of bulk work on a few molecules; nothing here is timed."""

from typing import Any

import pytest

from benchmarks import bulk


@pytest.mark.long
def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(bulk, "--records", "130", "--shards", "2", "--block-size", "128")
    phases = ["featurize", "merge featurize", "predict", "merge predict"]
    assert [record["phase"] for record in records] == phases
    for record in records:
        assert record["batch"] == 130 and record["shards"] == 2
        assert record["molecules_per_second"] == pytest.approx(130 / record["median_seconds"])
        assert 10e6 < record["anonymous_bytes"] <= record["peak_bytes"]
    assert "predict in shards" in capsys.readouterr().out
