"""What the cases share: training that keeps the best epoch, and the file of results."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from common import data_folder, fit, write_rows
from torch import Tensor, nn


def test_the_best_epoch_is_kept_and_both_modes_are_set() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer, modes = torch.optim.SGD(model.parameters(), 1.0), list[bool]()
    nn.init.zeros_(model.weight)
    rates = iter([1.0, 2.0, 4.0, 8.0, 16.0])

    def losses() -> Iterator[Tensor]:
        modes.append(model.training)
        yield -model.weight.sum()  # adds the rate to the weight
        optimizer.param_groups[0]["lr"] = next(rates)

    def error() -> float:
        modes.append(model.training)
        assert not torch.is_grad_enabled()
        return abs(float(model.weight) - 3)

    assert fit(model, optimizer, losses, error, 5) == 1
    assert float(model.weight.detach()) == 2  # of 1, 2, 4, 8, 16
    assert modes == [True, False] * 5 and not model.training


def test_training_that_fails_is_said() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(SystemExit, match="no finite error on validation in 2 epochs"):
        fit(model, optimizer, lambda: [], lambda: float("nan"), 2)


def test_rows_are_written_as_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DYNBATCH_DATA", str(tmp_path))
    write_rows(None, {})
    write_rows(data_folder("x.json"), {"ours": {"a": 1.5, "b": [1.0, 2.0]}})
    found = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert found == {"rows": {"ours": {"a": [1.5], "b": [1.0, 2.0]}}}
