"""The benchmark of growth on tiny forests; nothing here is timed."""

from typing import Any

import pytest

from benchmarks import scaling

SMALL = ["--sizes", "7", "14", "--tree-nodes", "7", "--units", "3", "--repeats", "1"]


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(scaling, *SMALL, "--shapes", "chain")
    measured = [r for r in records if "fitted" not in r]
    assert {(r["case"], r["mode"], r["nodes"], r["phase"]) for r in measured} == {
        ("chain", mode, nodes, phase)
        for mode in scaling.MODES
        for nodes in (7, 14)
        for phase in (*scaling.PHASES, "memory")
    }
    assert {r["steps"] for r in measured} == {7}
    assert {r["ratio"] for r in measured if r["nodes"] == 7 and r["phase"] != "memory"} == {1.0}
    growth = [r for r in records if "fitted" in r]
    assert {r["fitted"] for r in growth} == {"all sizes", "the two largest"}
    assert {(r["nodes_from"], r["nodes_to"]) for r in growth} == {(7, 14)}
    shown = capsys.readouterr().out
    assert "us/node" in shown and "growth" in shown


def test_several_numbers_of_threads(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shapes", "random", "--modes", "fused", "--thread-counts", "1", "2"]
    records = run(scaling, *SMALL, *options)
    by_key = {(r["threads"], r["nodes"], r["phase"]): r for r in records if "fitted" not in r}
    first, small, large = (
        by_key[key] for key in ((1, 14, "train"), (2, 7, "train"), (2, 14, "train"))
    )
    assert large["ratio"] == pytest.approx(large["seconds_per_node"] / small["seconds_per_node"])
    assert large["gain"] == first["median_seconds"] / large["median_seconds"]
    assert large["gain_over_threads"] == 1 and "gain" not in first
    shown = capsys.readouterr().out
    assert "1 threads" in shown and "2 threads" in shown
    assert shown.count("train gain of threads") == 1
