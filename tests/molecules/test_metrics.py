"""Metrics of partly known properties, and the table with its bootstrap intervals."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from pyg_dynbatch.models import MoleculeSchema
from pyg_dynbatch.molecules.task import (
    ScoredSplit,
    property_scores,
    report_test,
    task_table,
    weighted_area,
)
from tests.molecules.batches import TABLE

NAN = float("nan")


def scored(prediction: torch.Tensor, target: torch.Tensor, kind: str) -> ScoredSplit:
    names = tuple("abcdefghi"[: target.size(1)])
    return ScoredSplit(prediction, target, MoleculeSchema({}, 1, TABLE, names, kind))


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
    found = property_scores(torch.ones(3, 1), torch.tensor([1.0, 2.0, 3.0]), "regression")
    assert np.isnan(found["spearman"]) and found["mae"] == 1.0


def test_single_class_is_left_out_of_the_mean_and_named() -> None:
    prediction = torch.tensor([[0.9, 0.2], [0.1, 0.7]])
    split = scored(prediction, torch.tensor([[1.0, 1.0], [0.0, 1.0]]), "binary")
    assert np.isnan(split.scores[1]["roc_auc"])
    assert split.scores[1]["accuracy"] == 0.5
    assert split.mean["roc_auc"] == 1.0
    table = task_table(split, resamples=10)
    assert table["status"].tolist() == ["counted", "single class", "counted"]
    assert split.left_out == ["b (single class)"]
    split = scored(prediction, torch.tensor([[1.0, NAN], [0.0, NAN]]), "binary")
    table = task_table(split, resamples=10)
    assert table["status"].tolist() == ["counted", "no target", "counted"]
    assert split.left_out == ["b (no target)"]
    alone = scored(prediction[:, 1:], torch.tensor([[1.0], [1.0]]), "binary")
    assert np.isnan(alone.mean["roc_auc"])


def test_a_single_class_of_several_has_an_accuracy_and_is_counted() -> None:
    prediction = torch.tensor([[0.8, 0.2, 0.1, 0.9], [0.6, 0.4, 0.7, 0.3]])
    split = scored(prediction, torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "multiclass")
    assert task_table(split, resamples=10)["status"].tolist() == ["counted"] * 3
    assert split.scores[0]["accuracy"] == 1.0
    assert split.left_out == []


def test_several_classes() -> None:
    chance = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.4, 0.5, 0.1]])
    found = property_scores(chance, torch.tensor([0.0, 1.0, 0.0]), "multiclass")
    assert found["accuracy"] == pytest.approx(2 / 3)
    # Class 2 never occurs: the mean is over the two others.
    assert found["roc_auc"] == pytest.approx((1.0 + 0.75) / 2)


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


def test_intervals_contain_the_metric_and_narrow_with_the_data(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = []
    for count in (40, 640):
        target = torch.randn(count, 2, generator=generator)
        prediction = target + 0.5 * torch.randn(count, 2, generator=generator)
        split = scored(prediction, target, "regression")
        table = task_table(split, resamples=300)
        assert table["task"].tolist() == ["a", "b", "mean"]
        low, metric, high = (table[name][:2] for name in ("rmse_low", "rmse", "rmse_high"))
        assert ((low < metric) & (metric < high)).all()
        widths.append(high[0] - low[0])
    assert widths[1] < widths[0] / 2.5
    report_test(tmp_path / "deep", split, 300)
    with (tmp_path / "deep" / "task_metrics.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["molecules"] for row in written] == ["640", "640", "1280"]
    assert float(written[0]["rmse_low"]) == pytest.approx(low[0], rel=1e-4)
    assert [row["positives"] for row in written] == [""] * 3
    assert [written[2][name] for name in ("rmse", "rmse_low", "rmse_high")] == [""] * 3
    names = {path.name for path in (tmp_path / "deep").iterdir()}
    assert names == {"task_metrics.csv", "parity.png"}


def test_no_resamples_no_interval(tmp_path: Path) -> None:
    split = scored(torch.ones(2, 1), torch.ones(2, 1), "regression")
    report_test(tmp_path, split, 0)
    text = (tmp_path / "task_metrics.csv").read_text(encoding="utf-8")
    assert text.splitlines()[1] == "a,2,,counted,0,0,,,0,,"
