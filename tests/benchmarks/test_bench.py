"""The frame of the benchmarks: order of rounds, medians, ratios, agreement, memory, options."""

import math
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from benchmarks import bench, blocks, peers, policies, scaling, sst, table1, tree_lstm, weave
from pyg_dynbatch.nn import NaryTreeLSTM
from tests.benchmarks.conftest import Run

CPU = torch.device("cpu")


def test_contenders_take_turns() -> None:
    calls: list[str] = []

    def contender(name: str) -> bench.Contender:
        def run(lap: bench.Stopwatch) -> None:
            calls.append(name)
            lap("run")

        return run

    contenders = {name: contender(name) for name in "abc"}
    rounds = bench.interleave(contenders, repeats=2, device=CPU)
    assert calls == list("abc" + "bca" + "cab")
    assert {name: len(each) for name, each in rounds.items()} == {"a": 2, "b": 2, "c": 2}


def test_skipped_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1000.0, 1001.0, 1003.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    watch = bench.Stopwatch(CPU)
    watch.skip()
    watch("run")
    watch("run")
    assert watch.seconds == {"run": 3.0}


def test_ratio_is_of_the_same_round() -> None:
    # The machine is ten times as slow in the second round, for both.
    mine = [{"a": 2.0, "b": 1.0}, {"a": 20.0, "b": 10.0}, {"a": 2.0, "b": 1.0}]
    theirs = [{"a": 1.0, "b": 0.5}, {"a": 10.0, "b": 5.0}, {"a": 1.0, "b": 0.5}]
    assert bench.median_ratio(mine, theirs, ["a", "b"]) == 2.0
    assert bench.median_ratio(mine, mine, ["b"], ["a"]) == 0.5
    assert bench.median_seconds(mine, "a", "b") == 3.0


@pytest.mark.parametrize(
    ("found", "got"),
    [([1.0, 2.1], "off by 0.1"), ([1.0, math.nan], "off by nan"), ([1.0, 2.0, 3.0], r"\[3\]")],
)
def test_disagreement(found: list[float], got: str) -> None:
    text = rf"engine computes something different.*\n.*within 0\.0001.*\n +got: +{got}"
    with pytest.raises(RuntimeError, match=text):
        bench.assert_agreement("engine", [torch.tensor([1.0, 2.0])], [torch.tensor(found)])


RIVALS = [
    (blocks, "--trees 8 --models", blocks.Leaf, "forward", "the model in blocks"),
    (peers, "--peers padded --leaves 4 --words 9", peers.Padded, "roots", "padded"),
    (sst, "--modes engine --trees 6", tree_lstm.Pair, "forward", "engine"),
    (table1, "--cells tai --leaves 5", NaryTreeLSTM, "forward", "dynamic"),
    (weave, "--molecules 5 --batches 1 --modes fused plain", weave, "plain_weave", "plain"),
]


@pytest.mark.long
@pytest.mark.parametrize(("benchmark", "argv", "wrong", "name", "what"), RIVALS)
def test_nothing_is_timed_if_results_differ(benchmark, argv, wrong, name, what, monkeypatch):
    right = getattr(wrong, name)

    def off(*given: Any, **named: Any) -> Any:
        return tree_map(lambda rows: 1.01 * rows, right(*given, **named))

    monkeypatch.setattr(wrong, name, off)
    monkeypatch.setattr(bench, "interleave", None)
    with pytest.raises(RuntimeError, match=f"^{what} computes something different"):
        bench.main(benchmark, [*argv.split(), "--batch-sizes", "2", "--units", "4"])


def test_growth_exponent() -> None:
    assert bench.growth_exponent([(10, 3.0), (100, 300.0)]) == pytest.approx(2.0)
    assert bench.growth_exponent([(10, 3.0)]) is None


def test_table_aligns_numbers_to_the_right_and_leaves_out_empty_rows() -> None:
    rows = [{"mode": "fused", "ms": 1.5, "x": 2}, {"mode": "engine", "x": 3}, {"mode": "host"}]
    columns = {"mode": bench.cell("mode"), "ms": bench.cell("ms", form=".1f"), "x": bench.cell("x")}
    assert bench.table("t", rows, columns).splitlines() == [
        "t", "mode     ms  x", "------  ---  -", "fused   1.5  2", "engine    -  3"
    ]  # fmt: skip


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    few = "--shapes chain --batch-sizes 1 --batches 1 --threads 2"
    bench.main(policies, few.split())
    assert torch.get_num_threads() == before


def test_trees_and_batches_grow_each_on_its_own(run: Run) -> None:
    few = "--modes fused --shapes balanced --units 3 --repeats 1"
    grid = "--sizes 7 14 --batch-sizes 2 1 --most-nodes 14"
    records = run(scaling, *few.split(), *grid.split())
    measured = bench.grouped((r for r in records if "grown" not in r), "tree_nodes", "batch")
    assert list(measured) == [(7, 1), (7, 2), (14, 1)]
    for (tree_nodes, trees), mine in measured.items():
        assert {record["nodes"] for record in mine} == {tree_nodes * trees}
    grown = {record["grown"] for record in records if "grown" in record}
    assert grown == {"trees, 1 in a batch", "batches of trees of 7 nodes"}
    of_time, _ = scaling.panels(records)
    sizes = {curve: x for curve, (x, _) in of_time.curves().items()}
    assert sizes == {"balanced, batches of 1": [7, 14], "balanced, batches of 2": [7]}


WRONG_OPTIONS = [
    (["--sizes", "0"], "expected: an integer of at least 1"),
    (["--sizes", "many"], "got:      many"),
    (["--shapes", "star"], "invalid choice: 'star'"),
    (["--size", "3"], "unrecognized arguments: --size"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG_OPTIONS)
def test_wrong_option(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench.main(scaling, argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["abacus", "cuda"])
def test_device_that_cannot_be_used(name: str) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is available")
    with pytest.raises(ValueError, match=f"the device '{name}' cannot be used"):
        bench.main(scaling, ["--device", name])
