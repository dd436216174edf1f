"""Metrics of partly known properties, and their table."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from pyg_dynbatch.models import MoleculeSchema
from pyg_dynbatch.molecules.task import ScoredSplit, property_scores, report_test, task_table
from tests.console import rows_of
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
    table = task_table(split)
    assert table["status"].tolist() == ["counted", "single class", "counted"]
    assert split.left_out == ["b (single class)"]
    split = scored(prediction, torch.tensor([[1.0, NAN], [0.0, NAN]]), "binary")
    table = task_table(split)
    assert table["status"].tolist() == ["counted", "no target", "counted"]
    assert split.left_out == ["b (no target)"]
    alone = scored(prediction[:, 1:], torch.tensor([[1.0], [1.0]]), "binary")
    assert np.isnan(alone.mean["roc_auc"])


def test_a_single_class_of_several_has_an_accuracy_and_is_counted() -> None:
    prediction = torch.tensor([[0.8, 0.2, 0.1, 0.9], [0.6, 0.4, 0.7, 0.3]])
    split = scored(prediction, torch.tensor([[0.0, 1.0], [0.0, 0.0]]), "multiclass")
    assert task_table(split)["status"].tolist() == ["counted"] * 3
    assert split.scores[0]["accuracy"] == 1.0
    assert split.left_out == []


def test_several_classes() -> None:
    chance = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.4, 0.5, 0.1]])
    found = property_scores(chance, torch.tensor([0.0, 1.0, 0.0]), "multiclass")
    assert found["accuracy"] == pytest.approx(2 / 3)
    # Class 2 never occurs: the mean is over the two others.
    assert found["roc_auc"] == pytest.approx((1.0 + 0.75) / 2)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=9))
def test_the_area_is_that_of_torchmetrics(cells) -> None:
    score, label = (np.array(part) for part in zip(*cells, strict=True))
    guess = torch.from_numpy(score / 4)[:, None]
    gold = torch.from_numpy(label.astype(float))
    found = property_scores(guess, gold, "binary")["roc_auc"]
    if gold.unique().numel() < 2:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(binary_auroc(guess[:, 0], gold.long()).item())


def test_the_table_and_the_picture_of_a_test(tmp_path: Path) -> None:
    target = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    report_test(tmp_path / "deep", scored(target + 0.5, target, "regression"))
    written = rows_of(tmp_path / "deep" / "task_metrics.csv")
    assert [row["task"] for row in written] == ["a", "b", "mean"]
    assert [row["molecules"] for row in written] == ["40", "40", "80"]
    assert [row["positives"] for row in written] == [""] * 3
    assert float(written[0]["rmse"]) == pytest.approx(0.5, rel=1e-5)
    assert written[2]["rmse"] == "" and written[2]["r2"] != ""
    names = {path.name for path in (tmp_path / "deep").iterdir()}
    assert names == {"task_metrics.csv", "parity.png"}
