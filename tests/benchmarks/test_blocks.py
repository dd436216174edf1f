"""The benchmark of blocks runs on tiny sizes; its two models are one."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import blocks, trees
from benchmarks.blocks import LOSS, MODELS, Sentiment, nested_tree
from pyg_dynbatch import blocks as td

SMALL = ["--trees", "8", "--units", "4", "--embedding", "5", "--width", "4", "--repeats", "1"]
STEP = ["forward", "backward", "optimizer", "train", "step", "collate", "collate and step"]


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(blocks, *SMALL, "--batch-sizes", "3", "--batches", "1")
    speeds = {(r["mode"], r["phase"]): r for r in records if r["case"] == "4 units"}
    ways = [("fused", phase) for phase in STEP]
    ways += [("blocks", phase) for phase in [*STEP, "trace", "trace, collate and step"]]
    ways += [("host", "compile"), ("host", "read")]
    assert set(speeds) == set(ways)
    traced = speeds["blocks", "trace, collate and step"]
    assert traced["ratio_to"] == "fused, collate and step"
    assert traced["file_bytes"] > 0 and traced["nodes"] > 3
    assert 0 < speeds["blocks", "trace"]["ratio"] < 1
    assert speeds["blocks", "step"]["ratio_to"] == "fused"
    policies = [r for r in records if r["mode"] in ("depth", "agenda", "learned")]
    assert {(r["case"], r["mode"], r["phase"]) for r in policies} == {
        (case, mode, phase)
        for case in ("calculator", "language")
        for mode in ("depth", "agenda", "learned")
        for phase in ("collate", "train")
    }
    for record in policies:
        least = max(record["lower_bound"], record["critical_path"])
        assert least <= record["steps"] <= record["fold_steps"]
    shown = capsys.readouterr().out
    assert "us per tree" in shown and "lower bound" in shown and "compiling" in shown


@pytest.mark.long
def test_files_of_the_treebank(run: Any, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "SST", partial(trees.SST, verify=False))
    options = ["--models", "--batch-sizes", "5", "--batches", "2"]
    records = run(blocks, *SMALL, "--raw-dir", str(samples / "sst"), *options)
    assert {r["batch"] for r in records} == {5}, "more trees wanted than there are"
    assert {r["data"] for r in records} == {"sst"}
    assert "depth" not in {r["mode"] for r in records}


def test_the_models_are_equal_to_the_bit_of_float64() -> None:
    both = Sentiment(30, 5, 4, torch.device("cpu"))
    both.model.double()
    both.compiler.double()
    drawn = trees.sentiment_like_trees(5, num_tokens=30)
    batch = both.collate(drawn)
    wanted = both.ways.loss(both.model(batch), batch.y)
    found = both.loss([nested_tree(tree) for tree in drawn])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_written_models(name: str) -> None:
    block, examples = MODELS[name](6, width=4, seed=1)
    again = MODELS[name](6, width=4, seed=1).examples
    assert examples == again != MODELS[name](6, width=4, seed=2).examples
    model = td.Compiler.create(block)
    one_by_one = [model([example]).metric_tensors[LOSS] for example in examples]
    torch.testing.assert_close(model(examples).metric_tensors[LOSS], torch.cat(one_by_one))
    model(examples).metric_tensors[LOSS].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_signs_of_expressions() -> None:
    def value_of(part: Any) -> float:
        if isinstance(part, int):
            return float(part)
        left, right = value_of(part[1]), value_of(part[2])
        if part[0] == "/":
            return left / right if right else 0
        return eval(f"({left}) {part[0]} ({right})")

    examples = MODELS["calculator"](200, width=4).examples
    assert {sign for _, sign in examples} == {0, 1, 2}
    for expression, sign in examples:
        assert np.sign(value_of(expression)) == sign - 1
