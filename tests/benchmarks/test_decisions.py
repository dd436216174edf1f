"""The benchmark of decisions runs on tiny sizes, and compares all ways with the plain loop."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import decisions


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--models", "spinn", "tree", "--sizes", "3", "--width", "4", "--longest", "3"]
    records = run(decisions, *small, "--repeats", "1")
    ways = [decisions.PLAIN, decisions.PYTHON, decisions.TENSORS, decisions.AHEAD]
    found = {(r["case"], r["mode"], r["phase"]): r for r in records}
    assert {*found} == {
        (case, way, phase)
        for case in ("spinn", "tree")
        for way in ways
        for phase in ("train", "inference")
    }
    assert all(bool(r["ratio"]) == (r["mode"] != decisions.PLAIN) for r in records)
    shown = capsys.readouterr().out
    assert "times as fast" in shown and "spinn, 3 examples" in shown


class Wrong(nn.Module):
    """Computes different results in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1)

    def forward(self, word: Any) -> Any:
        return self.part(word)

    def plain(self, word: Any) -> Any:
        return self.part(word) + 1


def test_different_results_are_an_error() -> None:
    options, given = Namespace(width=1, repeats=1), [torch.ones(1), torch.zeros(1)]
    with pytest.raises(RuntimeError, match="while_loop and cond computes something different"):
        list(decisions.race("wrong", Wrong(), given, options, torch.device("cpu")))
