"""Metrics of partly known properties, and the table with its bootstrap intervals."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from pyg_dynbatch.molecules.metrics import (
    PredictionBuffer,
    left_out,
    mean_scores,
    property_scores,
    scores_by_task,
    task_table,
    weighted_area,
    write_task_table,
)

NAN = float("nan")


def test_values_are_measured_where_known() -> None:
    guess = torch.tensor([[1.0], [2.0], [9.0], [4.0]])
    found = property_scores(guess, torch.tensor([1.0, 3.0, NAN, 4.5]), "regression")
    assert found["rmse"] == pytest.approx(((0 + 1 + 0.25) / 3) ** 0.5)
    assert found["mae"] == pytest.approx(0.5)
    assert found["spearman"] == pytest.approx(1.0, abs=1e-5)
    assert found["r2"] == pytest.approx(1 - 1.25 / np.square([1 - 17 / 6, 3 - 17 / 6, 5 / 3]).sum())


@pytest.mark.parametrize("target", [[NAN, NAN], [2.0, NAN], [2.0, 2.0]])
def test_what_is_not_defined_is_no_number(target: list[float]) -> None:
    found = property_scores(torch.tensor([[1.0], [2.0]]), torch.tensor(target), "regression")
    assert np.isnan(found["r2"])
    assert np.isnan(found["spearman"])
    assert np.isnan(found["rmse"]) == all(np.isnan(target))


def test_constant_predictions_have_no_rank_correlation() -> None:
    found = property_scores(torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0]), "regression")
    assert np.isnan(found["spearman"])
    assert found["mae"] == 1.0


def test_single_class_is_left_out_of_the_mean_and_named() -> None:
    prediction = torch.tensor([[0.9, 0.2], [0.1, 0.7]])
    target = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    scores = scores_by_task(prediction, target, "binary")
    assert np.isnan(scores[1]["roc_auc"])
    assert scores[1]["accuracy"] == 0.5
    assert mean_scores(scores, "binary")["roc_auc"] == 1.0
    rows = task_table(prediction, target, ["a", "b"], "binary", resamples=10)
    assert [row.status for row in rows] == ["counted", "single class", "counted"]
    assert left_out(target, ["a", "b"], "binary") == ["b (single class)"]
    unknown = torch.tensor([[1.0, NAN], [0.0, NAN]])
    rows = task_table(prediction, unknown, ["a", "b"], "binary", resamples=10)
    assert [row.status for row in rows] == ["counted", "no target", "counted"]
    assert left_out(unknown, ["a", "b"], "binary") == ["b (no target)"]
    assert np.isnan(mean_scores([scores[1]], "binary")["roc_auc"])


def test_a_single_class_of_several_has_an_accuracy_and_is_counted() -> None:
    prediction = torch.tensor([[0.8, 0.2, 0.1, 0.9], [0.6, 0.4, 0.7, 0.3]])
    target = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    rows = task_table(prediction, target, ["a", "b"], "multiclass", resamples=10)
    assert [row.status for row in rows] == ["counted"] * 3
    assert rows[0].scores["accuracy"] == 1.0
    assert left_out(target, ["a", "b"], "multiclass") == []


def test_several_classes() -> None:
    chance = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.4, 0.5, 0.1]])
    found = property_scores(chance, torch.tensor([0.0, 1.0, 0.0]), "multiclass")
    assert found["accuracy"] == pytest.approx(2 / 3)
    # Class 2 never occurs: the mean is over the two others.
    assert found["roc_auc"] == pytest.approx((1.0 + 0.75) / 2)


def test_table_joins_batches() -> None:
    cells = PredictionBuffer()
    cells.update(torch.ones(2, 3), torch.zeros(2, 1))
    cells.update(torch.zeros(1, 3), torch.ones(1, 1))
    prediction, target = cells.table(1)
    assert prediction.shape == (3, 3)
    assert target.tolist() == [[0.0], [0.0], [1.0]]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 3)), min_size=2, max_size=9)
)
def test_weighted_area_is_that_of_repeated_molecules(cells) -> None:
    score, label, times = (np.array(part) for part in zip(*cells, strict=True))
    found = weighted_area(score / 4, label.astype(bool), times[None].astype(float))[0]
    scores = torch.from_numpy(np.repeat(score, times) / 4)
    labels = torch.from_numpy(np.repeat(label, times)).long()
    if labels.unique().numel() < 2:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(binary_auroc(scores, labels).item())


def test_intervals_hold_the_figure_and_narrow_with_the_data(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = []
    for count in (40, 640):
        target = torch.randn(count, 2, generator=generator)
        prediction = target + 0.5 * torch.randn(count, 2, generator=generator)
        rows = task_table(prediction, target, ["a", "b"], "regression", resamples=300)
        assert [row.name for row in rows] == ["a", "b", "mean"]
        for row in rows:
            low, high = row.interval
            assert row.name == "mean" or low < row.scores["rmse"] < high
        widths.append(rows[0].interval[1] - rows[0].interval[0])
    assert widths[1] < widths[0] / 2.5
    path = write_task_table(tmp_path / "deep" / "table.csv", rows, "regression")
    with path.open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["molecules"] for row in written] == ["640", "640", "1280"]
    assert float(written[0]["rmse_low"]) == pytest.approx(rows[0].interval[0], rel=1e-4)
    assert written[0]["positives"] == ""
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["table.csv"]


def test_no_resamples_no_interval(tmp_path: Path) -> None:
    rows = task_table(torch.ones(2, 1), torch.ones(2, 1), ["a"], "regression", resamples=0)
    assert np.isnan(rows[0].interval).all()
    text = write_task_table(tmp_path / "table.csv", rows, "regression").read_text()
    assert text.splitlines()[1] == "a,2,,counted,0,0,,,0,,"
