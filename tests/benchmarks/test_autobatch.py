"""The benchmark of autobatch runs on tiny sizes; nothing here is timed."""

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import autobatch, bench
from benchmarks.autobatch import (
    AHEAD,
    BARE,
    CELL,
    CELL_AHEAD,
    CELL_TRACES,
    EAGER,
    KINDS,
    PADDED,
    READ,
    TRACES,
    WORKER,
)
from benchmarks.dynamic_models import DYNAMIC, decisions, losses
from benchmarks.peers import AUTOBATCH, DYNET, EVERY_LEAF
from pyg_dynbatch.autobatch import autobatch as batched

SMALL = ["--repeats", "1", "--trees", "4", "--width", "4", "--sentences", "3"]


@pytest.mark.long
def test_trees(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dynet_config", None)
    sizes = ["--leaves", "4", "--units", "3", "--words", "9", "--batch-sizes", "1", "3"]
    records = run(autobatch, *SMALL, *sizes, "--models", "trees", "--profile")
    found = {(r["batch"], r["mode"], r["phase"]): r for r in records}
    modes = {EVERY_LEAF, AUTOBATCH, TRACES, AHEAD, CELL, CELL_TRACES, CELL_AHEAD, BARE}
    passes = ("forward", "backward", "train", "inference")
    parts = ("record", "schedule")
    assert set(found) == {
        *((size, mode, phase) for size in (1, 3) for mode in modes for phase in passes),
        *((3, WORKER, phase) for phase in passes),
        *((n, mode, phase) for n in (1, 3) for mode in (AUTOBATCH, CELL) for phase in parts),
        *((size, DYNET, "left out") for size in (1, 3)),
    }
    assert all(record["ratio"] is None for record in records)
    train = found[3, AUTOBATCH, "train"]
    assert train["trees_per_second"] == pytest.approx(3 / train["median_seconds"])
    assert train["flops_forward"] == 2 * 3 * (4 * 3 * 9 + 3 * 6 * 15)
    assert train["to_bare"] > found[3, BARE, "train"]["to_bare"] == 1
    shown = capsys.readouterr().out
    for text in ("DyNet is left out: ModuleNotFoundError", "Self CPU", "tottime", "0.000 GFLOP"):
        assert text in shown


@pytest.mark.filterwarnings("ignore")
def test_dynet_is_the_base(run: Any) -> None:
    if find_spec("dynet") is None:
        pytest.skip("DyNet is not installed")
    sizes = ["--leaves", "4", "--units", "3", "--words", "9", "--batch-sizes", "3"]
    records = run(autobatch, *SMALL, *sizes, "--models", "trees")
    train = {r["mode"]: r["ratio_to"] for r in records if r["phase"] == "train"}
    assert train.pop(DYNET) is None
    assert set(train.values()) == {DYNET}


@pytest.mark.long
def test_other_models(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    models = ["calls", "spinn", "symbolic", "translation"]
    sizes = ["--expressions", "20", "--loop-examples", "5", "--calls", "50", "--longest", "6"]
    records = run(autobatch, *SMALL, *sizes, "--models", *models)
    calls = [r for r in records if r["model"] == "calls"]
    assert [(r["mode"], r["phase"]) for r in calls] == [
        *((kind, phase) for kind in KINDS for phase in ("record", "plan")),
        (READ, "flush"),
    ]
    assert {r["batch"] for r in calls} == {50}
    ratios = {
        (r["model"], r["mode"], r["phase"]): r["ratio_to"]
        for r in records
        if r["phase"] in ("train", "step", "inference")
    }
    own = {"spinn": [EAGER, AUTOBATCH], "symbolic": [EAGER, AUTOBATCH, AHEAD]}
    own["translation"] = [PADDED, AUTOBATCH, AHEAD]
    assert ratios == {
        (model, mode, phase): None if mode == modes[0] else modes[0]
        for model, modes in own.items()
        for mode in modes
        for phase in ("train", "step", "inference")
        if phase != "step" or model == "symbolic"
    }
    spinn = bench.find(records, model="spinn", mode=AUTOBATCH)
    assert spinn["flushes"] <= spinn["longest"]
    shown = capsys.readouterr().out
    for text in ("flushes: ", "longest sentence: ", "cell with two states"):
        assert text in shown


@pytest.mark.parametrize(
    "models",
    [["grown-tree", "module-network"], pytest.param([*DYNAMIC], marks=pytest.mark.long)],
    ids=["two", "all"],
)
def test_dynamic_models(models: list[str], run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--repeats", "1", "--examples", "2", "3", "--channels", "4"]
    records = run(autobatch, *sizes, "--models", *models)
    shares = ("record", "plan", "run", "train record", "train plan", "train run")
    passes = ("forward", "backward", "train", "inference")
    assert {(r["model"], r["batch"], r["mode"], r["phase"]) for r in records} == {
        (model, size, mode, phase)
        for model in models
        for size in (2, 3)
        for mode in (EAGER, AUTOBATCH)
        for phase in (*passes, *(shares if mode == AUTOBATCH else ()))
    }
    for record in records:
        assert record["ratio_to"] == (EAGER if record["mode"] == AUTOBATCH else None) or (
            record["phase"] in shares
        )
        assert record["calls"] >= record["operations"] >= record["steps"] >= record["flushes"]
        assert (record["flushes"] == 1) == (not DYNAMIC[record["model"]].decides)
    for batch in (2, 3):
        found = bench.by_phase(
            [r for r in records if (r["batch"], r["mode"]) == (batch, AUTOBATCH)]
        )
        for prefix, whole in (("", "inference"), ("train ", "forward")):
            parts = (found[prefix + part]["median_seconds"] for part in ("record", "plan", "run"))
            assert 0 < sum(parts) <= found[whole]["median_seconds"]
    shown = capsys.readouterr().out
    assert shown.count(f"geometric mean of {len(models)}") == 2
    for text in ("3 examples, 4 units", "record us / call", "backward %"):
        assert text in shown


@pytest.mark.parametrize("name", DYNAMIC)
def test_what_is_drawn(name: str) -> None:
    dynamic = DYNAMIC[name]
    examples, again = (dynamic.examples(12, 8, seed=1) for _ in range(2))
    results = [dynamic.build(8, seed=0)(example) for example in examples]
    repeated = [dynamic.build(8, seed=0)(example) for example in again]
    if dynamic.decides:
        assert len(set(map(decisions, results))) > 4, "examples decide differently"
        assert list(map(decisions, results)) == list(map(decisions, repeated))
    assert str(results) == str(repeated)
    others = [dynamic.build(8, seed=0)(one) for one in dynamic.examples(12, 8, seed=2)]
    assert str(results) != str(others)


def test_models_that_decide_differently_are_not_timed(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(("left", "right"))
    monkeypatch.setattr(autobatch, "decisions", lambda results: next(answers))
    with pytest.raises(RuntimeError, match="pointers: autobatch decides differently"):
        run(autobatch, "--models", "pointers", "--examples", "2", "--channels", "4")


def doubled(value: Any) -> Any:
    """Return an example in double precision."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(doubled, value)) if isinstance(value, list | tuple) else value


@pytest.mark.long
@pytest.mark.parametrize("name", DYNAMIC)
def test_twenty_steps_are_those_of_the_plain_loop(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        models = [DYNAMIC[name].build(8, seed=1).train() for _ in range(2)]
        given = doubled(DYNAMIC[name].examples(6, 8, seed=3))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]
        for _ in range(20):
            found = [batched(m)(given, batch=m is models[0]) for m in models]
            assert decisions(found[0]) == decisions(found[1])
            for optimizer, result in zip(optimizers, found, strict=True):
                optimizer.zero_grad()
                losses(result).sum().backward()
                optimizer.step()
            for mine, theirs in zip(*(m.parameters() for m in models), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(torch.float32)
