"""The benchmark of pytorch-tree-lstm runs on tiny sizes, with and without that package."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import compat
from pyg_dynbatch.compat import tree_lstm

SIZES = ["--batch-sizes", "1", "3", "--nodes", "4", "--units", "2", "--repeats", "1"]


def test_both_packages(run: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, compat.THEIRS, tree_lstm)
    records = run(compat, *SIZES)
    found = {(r["mode"], r["batch"], r["phase"]) for r in records}
    modes = (compat.OURS, compat.THEIRS)
    assert found == {(mode, size, p) for mode in modes for size in (1, 3) for p in compat.PHASES}
    assert {r["ratio_to"] for r in records if r["mode"] == compat.THEIRS} == {compat.OURS}
    assert "train x" in capsys.readouterr().out


def test_without_the_package(run: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, compat.THEIRS, None)
    (left_out,) = [r for r in run(compat, *SIZES) if r["mode"] == compat.THEIRS]
    assert "pip install --no-deps pytorch-tree-lstm==0.1.3" in left_out["reason"]
    assert "treelstm is left out: " in capsys.readouterr().out


def test_another_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*size: int) -> torch.nn.Module:
        layer = tree_lstm.TreeLSTM(*size)
        layer.register_forward_hook(lambda layer, given, states: (2 * states[0], states[1]))
        return layer

    wrong = SimpleNamespace(**{**vars(tree_lstm), "TreeLSTM": other})
    monkeypatch.setitem(sys.modules, compat.THEIRS, wrong)
    options = SimpleNamespace(nodes=[3], units=[2], batch_sizes=[2], seed=0, repeats=1, budget=9.0)
    with pytest.raises(RuntimeError, match="computes something different"):
        compat.run(options, torch.device("cpu"))


def test_trees_are_numbered_depth_first() -> None:
    tree = compat.draw_tree(30, 2, np.random.default_rng(0))
    parent, child = tree["adjacency_list"].t()
    assert sorted(child.tolist()) == list(range(1, 30))
    assert (parent[1:] >= parent[:-1]).all()
    for node in range(1, 30):
        above = {node - 1}
        while 0 not in above:
            above |= {int(parent[child == each]) for each in above if each}
        assert int(parent[child == node]) in above
