"""Conformal intervals and sets: exact margins, and the promised coverage on new data."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.nets.properties import ConformalSets
from pyg_dynbatch.molecules.schema import MoleculeSchema
from tests.console import complaint, fit_small, prepare, rows_of, run
from tests.molecules.molecules import molecule_csv
from tests.test_cli_molecules import CONFIG

TABLE = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))


def schema(kind: str) -> MoleculeSchema:
    return MoleculeSchema({}, 3, TABLE, ("a", "b"), kind, 3)  # type: ignore[arg-type]


def drawn(kind: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and targets, of which some are unknown."""
    torch.manual_seed(seed)
    if kind == "regression":
        values = torch.randn(count, 2)
        target = values + torch.randn(count, 2) * torch.tensor([1.0, 5.0])
    elif kind == "binary":
        values = torch.rand(count, 2)
        target = (torch.rand(count, 2) < values).float()
    else:
        chance = (2 * torch.randn(count, 2, 3)).softmax(-1)
        target = torch.stack([row.multinomial(1)[:, 0] for row in chance.unbind(1)], 1).float()
        values = chance.flatten(1)
    target[::7, 0] = math.nan
    return values, target


@pytest.mark.parametrize("kind", ["regression", "binary", "multiclass"])
@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_new_targets_are_covered_as_promised(kind: str, coverage: float) -> None:
    shares, sizes = [], []
    for seed in range(30):
        sets = ConformalSets(schema(kind), coverage)
        assert not sets.fitted
        sets.fit(*drawn(kind, 200, seed))
        assert sets.fitted
        found = sets.measured(*drawn(kind, 1000, 1000 + seed))
        shares.append([each["coverage"] for each in found])
        sizes.append([each["width" if kind == "regression" else "set_size"] for each in found])
    # The expected coverage is between c and c + 1 / (n + 1), with n at least 171.
    low, high = np.mean(shares, 0) - coverage, np.mean(shares, 0) - coverage - 1 / 171
    assert (low > -0.012).all() and (high < 0.012).all()
    assert np.ptp(shares) > 0
    if kind == "regression":  # the second property has five times the noise
        assert 4 < np.mean(sizes, 0)[1] / np.mean(sizes, 0)[0] < 6


def test_the_margin_is_the_rank_with_one_more() -> None:
    sets = ConformalSets(schema("regression"), 0.8)
    target = torch.tensor([[1.0, 0], [-4, 0], [2, 0], [math.nan, 0], [3, 0]])
    sets.fit(torch.zeros(5, 2), target)
    # Of 4 scores 1, 2, 3, 4: rank ceil(5 * 0.8) = 4.
    assert sets.margin.tolist() == [4.0, 0.0]
    columns = sets.columns(torch.tensor([[10.0, 1.0]]))
    assert {name: column.tolist() for name, column in columns.items()} == {
        **{"low_a": [6.0], "high_a": [14.0]},
        **{"low_b": [1.0], "high_b": [1.0]},
    }
    sets.fit(torch.zeros(3, 2), target[:3])  # rank 4 of 3: nothing can be promised
    assert sets.margin.tolist() == [math.inf, math.inf]


def test_sets_of_classes() -> None:
    sets = ConformalSets(schema("binary"), 0.5)
    sets.margin.copy_(torch.tensor([0.3, 0.6]))
    columns = sets.columns(torch.tensor([[0.9, 0.5], [0.5, 0.2]]))
    assert columns["set_a"].tolist() == [[0, 1], [0, 0]]  # of two unlikely classes, none
    assert columns["set_b"].tolist() == [[1, 1], [1, 0]]


def test_what_cannot_be_promised_is_refused() -> None:
    for coverage in (0.0, 1.0, 90.0):
        with pytest.raises(ValueError, match="coverage is out of range"):
            ConformalSets(schema("binary"), coverage)
    sets = ConformalSets(schema("binary"), 0.9)
    enough = torch.zeros(9, 2)
    sets.check(enough, ("a", "b"))
    enough[0, 1] = math.nan
    with pytest.raises(ValueError, match=r"too few validation targets of b[\s\S]*at least 9"):
        sets.check(enough, ("a", "b"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_intervals_in_tables_and_in_predictions(tmp_path, monkeypatch, kind, capsys):
    base = CONFIG["data"]["init_args"]
    data = {**CONFIG["data"], "init_args": {**base, "file": f"{kind}.csv", "kind": kind}}
    model = {**CONFIG["model"], "init_args": {**CONFIG["model"]["init_args"], "coverage": 0.6}}
    best = {"monitor": "val/loss", "mode": "min"}
    prepare(tmp_path, monkeypatch, {**CONFIG, "data": data, "model": model, "checkpoint": best})
    molecule_csv(tmp_path, kind)
    fit_small(tmp_path)
    said = Path("output.txt").read_text(encoding="utf-8")
    assert (found := re.search(r"^coverage, calibrated for 0.6: first (\S+), second", said, re.M))
    folder = Path("runs/small/version_0")
    table = {row["task"]: row for row in rows_of(folder / "task_metrics.csv")}
    assert float(table["first"]["coverage"]) == pytest.approx(float(found[1]), abs=1e-3)
    assert float(table["first"]["width" if kind == "regression" else "set_size"]) > 0

    rows = [row for row in rows_of(folder / "predictions.csv") if row["target_first"]]
    if kind == "regression":
        inside = [
            float(r["low_first"]) <= float(r["target_first"]) <= float(r["high_first"])
            for r in rows
        ]
    else:
        inside = [r[f"set_first_{float(r['target_first']):.0f}"] == "1" for r in rows]
    assert np.mean(inside) == pytest.approx(float(found[1]), abs=1e-3)

    # From the checkpoint alone the intervals are the same; an average has none.
    argv = ["predict", "--input", f"{kind}.csv", "--output", "o.csv", "--checkpoint"]
    assert run(*argv, str(folder / "best.ckpt")) == 0
    streamed = {row["row"]: row for row in rows_of("o.csv")}
    columns = [name for name in rows[0] if name.startswith(("low_", "high_", "set_"))]
    assert len(columns) == 4
    for row in rows:
        for name in columns:
            assert float(streamed[row["row"]][name]) == pytest.approx(
                float(row[name]), rel=1e-3, abs=1e-3
            )
    assert run(*argv, str(folder / "best.ckpt"), str(folder / "last.ckpt")) == 0
    assert not set(columns) & set(rows_of("o.csv")[0])
    said = complaint(capsys, "fit", "--config", "small.yaml", "--model.init_args.coverage", "0.95")
    assert "too few validation targets of first" in said
