"""The load test of the server, for a moment."""

from typing import Any

import pytest

from benchmarks import serving


@pytest.mark.long
def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--units", "8", "--clients", "1", "3", "--seconds", "0.2", "--repeats", "1"]
    records = run(serving, *options)
    cases = ["trees, 8 units", "molecules"]
    found = [(record["case"], record["batch"], record["mode"]) for record in records]
    modes = (serving.ONE, serving.BATCHES)
    assert found == [(case, n, mode) for case in cases for n in (1, 3) for mode in modes]
    for record in records:
        assert 0 < record["median_seconds"] <= record["p99_seconds"]
        assert record["requests"] >= record["batch"]
        assert (record["ratio"] is None) == (record["mode"] == serving.ONE)
    assert "requests/s" in capsys.readouterr().out
