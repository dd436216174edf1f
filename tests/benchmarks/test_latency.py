"""The benchmark of latency on tiny cases; times themselves are not checked."""

from typing import Any

import pytest

from benchmarks import latency

TINY = ("--leaves", "3", "--units", "4", "--words", "9", "--calls", "2", "--repeats", "1")


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    small = (
        "--peers",
        "autobatch",
        "recursive loop",
        "--batch-sizes",
        "1",
        "2",
        "--molecules",
        "4",
    )
    records = run(latency, *TINY, *small, "--molecules", "4")
    contenders: dict[tuple[str, int], set[str]] = {}
    for record in records:
        contenders.setdefault((record["case"], record["batch"]), set()).add(record["mode"])
        assert record["median_seconds"] <= record["p95_seconds"] <= record["p99_seconds"]
    trees = {"ready batch", "from Data", "from objects", "autobatch", "recursive loop"}
    assert contenders == {
        ("3 leaves, 4 units", 1): trees | {"alone, from Data"},
        ("3 leaves, 4 units", 2): trees,
        ("molecules, nci", 1): {"ready batch", "from Data", "from SMILES", "alone, from Data"},
        ("molecules, nci", 2): {"ready batch", "from Data", "from SMILES"},
    }
    assert {record["calls"] for record in records if record["batch"] == 2} == {1}
    assert "inference p99" in capsys.readouterr().out
