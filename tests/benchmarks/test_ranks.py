"""The simulation of ranks on few trees."""

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from benchmarks import ranks

SMALL = ["--trees", "40", "--units", "3", "--batch-sizes", "1", "4", "--batches", "2"]


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ranks", "1", "2", "4", "--per-rank", "3", "--in-all", "8", "--repeats", "1"]
    records = run(ranks, *SMALL, *sizes, "--latency", "1", "--bandwidth", "1e99")
    found = {(r["case"], r["ranks"], r["mode"]): r for r in records}
    assert len(found) == 2 * 3 * 2 == len(records)
    for (case, number, _), record in found.items():
        assert record["all_reduce_seconds"] == pytest.approx(2 * (number - 1))
        assert record["imbalance"] >= 1 and 0 < record["efficiency"] <= 1
        assert number > 1 or record["imbalance"] == record["efficiency"] == 1
        plan = found[case, number, ranks.PLAN]
        assert record["ratio"] == pytest.approx(record["step_seconds"] / plan["step_seconds"])
        assert plan["steps"] <= record["steps"]
        assert plan["imbalance"] <= record["imbalance"]
    assert found[ranks.WEAK, 4, ranks.PLAIN]["steps"] >= ranks.LEAST_STEPS
    shown = capsys.readouterr().out
    assert "random trees" in shown and "strong scaling" in shown and "s/node" in shown


def test_steps_are_those_of_the_samplers() -> None:
    sizes = [1 + 2 * (number % 7) for number in range(50)]
    plain = ranks.plain_steps(sizes, 4, 3, seed=1)
    for rank in range(4):
        share = [example for step in plain for example in step[rank]]
        assert share == list(DistributedSampler(range(50), 4, rank, seed=1))
    planned = ranks.planned_steps(sizes, 4, len(plain), seed=1)
    assert len(planned) <= len(plain)
    assert sorted(e for step in planned for batch in step for e in batch) == list(range(50))


def test_a_step_is_as_long_as_on_its_slowest_rank() -> None:
    sizes, levels = np.array([10, 30, 20]), np.array([4, 5, 9])
    steps = [[[0], [1]], [[2], [0, 1]]]
    found = ranks.simulate(steps, sizes, levels, np.array([1.0, 0.1, 1.0]))
    # Seconds of the two ranks: 1 + 1 + 4 and 1 + 3 + 5; 1 + 2 + 9 and 1 + 4 + 5.
    assert found["step_seconds"] == pytest.approx((9 + 12) / 2)
    assert found["efficiency"] == pytest.approx((6 + 9 + 12 + 10) / 4 / 10.5)
    assert found["imbalance"] == pytest.approx((30 / 20 + 40 / 30) / 2)
