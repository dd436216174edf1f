"""The benchmark of blocks runs on tiny sizes; its two models are one."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import blocks_models, main, sentiment
from benchmarks.blocks import Sentiment
from benchmarks.blocks_models import LOSS, nested_tree
from benchmarks.records import FIELDS
from benchmarks.shapes import sentiment_like_trees
from benchmarks.written_models import MODELS, _sign, _value
from pyg_dynbatch import blocks as td

SMALL = ["blocks", "--trees", "8", "--units", "4", "--embedding", "5", "--width", "4"]
SMALL += ["--repeats", "1", "--threads", "1"]
STEP = ["forward", "backward", "optimizer", "train", "step", "collate", "collate and step"]
SST = Path(__file__).parents[1] / "samples" / "sst"


def run(folder: Path, *more: str) -> list[dict[str, Any]]:
    path = folder / "records.json"
    assert main([*SMALL, *more, "--json", str(path)]) == 0
    records: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return records


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figure.svg"
    records = run(tmp_path, "--batch-sizes", "3", "--batches", "1", "--figure", str(figure))
    for record in records:
        assert set(FIELDS) <= set(record) and record["median_seconds"] > 0
        assert (record["ratio"] is None) == (record["ratio_to"] is None)
    speeds = {(r["mode"], r["phase"]): r for r in records if r["case"] == "4 units"}
    ways = [("fused", phase) for phase in STEP]
    ways += [("blocks", phase) for phase in [*STEP, "trace", "trace, collate and step"]]
    ways += [("host", "compile"), ("host", "read")]
    assert set(speeds) == set(ways)
    anew = speeds["blocks", "trace, collate and step"]
    assert anew["ratio_to"] == "fused, collate and step"
    assert anew["file_bytes"] > 0 and anew["nodes"] > 3
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
    assert "us a tree" in shown and "lower bound" in shown and "compiling" in shown
    assert figure.stat().st_size > 0


def test_files_of_the_treebank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "SST", partial(sentiment.SST, verify=False))
    options = [
        "--figure",
        str(tmp_path / "two.svg"),
        "--models",
        "--batch-sizes",
        "5",
        "--batches",
        "2",
    ]
    records = run(tmp_path, "--raw-dir", str(SST), *options)
    assert {r["batch"] for r in records} == {5}, "more trees wanted than there are"
    assert {r["data"] for r in records} == {"sst"}
    assert "depth" not in {r["mode"] for r in records}


def test_models_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = blocks_models.Leaf.forward
    monkeypatch.setattr(
        blocks_models.Leaf, "forward", lambda self, x: tuple(1.01 * y for y in right(self, x))
    )
    with pytest.raises(RuntimeError, match="the model in blocks computes something else"):
        run(tmp_path, "--batch-sizes", "2", "--models")


def test_the_models_are_equal_to_the_bit_of_float64() -> None:
    both = Sentiment(30, 5, 4, torch.device("cpu"))
    both.model.double()
    both.compiler.double()
    trees = sentiment_like_trees(5, num_tokens=30)
    batch = both.collate(trees)
    wanted = both.ways.loss(both.model(batch), batch.y)
    found = both.compiler([nested_tree(tree) for tree in trees]).metric_tensors[LOSS].sum()
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
    six = ("+", ("*", 1, 2), ("-", 5, 1))
    for expression, sign in ((six, 2), (("-", 1, six), 0), (("/", 3, ("-", 1, 1)), 1), (0, 1)):
        assert _sign(_value(expression)) == sign
    signs = {sign for _, sign in MODELS["calculator"](60, width=4).examples}
    assert signs == {0, 1, 2}


def test_other_cells_are_refused() -> None:
    from pyg_dynbatch.trees.models import TreeClassifier

    model = TreeClassifier(9, 5, 4, 3, cell="child_sum")
    with pytest.raises(TypeError, match="wants a Tree-LSTM with ordered children"):
        blocks_models.sentiment(model)
