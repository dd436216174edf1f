"""Predicting with one model or several: the rows, their order, and what cannot be predicted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch.models import TreeClassifier, TreeSchema, load, predict, predictions
from tests.training.conftest import Fitted
from tests.training.helpers import SIZES

TEXTS = ["(2 (0 good) (1 fun))", "(good)", "(2 (0 good", "((dull) ((good) (new)))", 7, "(1 bad)"]


def assert_same_tables(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, column in expected.items():
        if column.dtype == object:
            assert found[name].tolist() == column.tolist()
        else:
            np.testing.assert_allclose(found[name], column, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nodes", [False, True])
def test_predictions_are_those_of_the_model(fitted: Fitted, nodes: bool) -> None:
    trees = list(fitted.data.dataset("test"))
    model = fitted.task.model
    model.train()
    table = predict(model, trees, nodes=nodes)
    assert all(part.training for part in model.modules()), "the modes are restored"
    expected = model.predict(model.collater()(trees))
    chosen = slice(None) if nodes else expected.pop("is_root").numpy()
    expected.pop("is_root", None)
    if not nodes:
        expected.pop("node")
    assert set(table) == {*expected, "fault"} and not any(table["fault"])
    for name, column in expected.items():
        np.testing.assert_array_equal(table[name], column.numpy()[chosen])


@pytest.mark.parametrize("nodes", [False, True])
def test_a_faulty_record_keeps_its_row_whatever_the_batches(fitted: Fitted, nodes: bool) -> None:
    model = load(fitted.checkpoint)
    whole = predict(model, TEXTS, nodes=nodes)
    for size in (1, 2, 3):
        assert_same_tables(predict(model, TEXTS, batch_size=size, nodes=nodes), whole)
    counts = [3, 1, 1, 5, 1, 1] if nodes else [1] * 6
    assert whole["example"].tolist() == np.arange(6).repeat(counts).tolist()
    is_faulty = np.isin(whole["example"], [2, 4])
    assert np.isnan(whole["prediction"]).tolist() == is_faulty.tolist()
    assert np.isnan(whole["probability"]).any(1).tolist() == is_faulty.tolist()
    assert [fault != "" for fault in whole["fault"]] == is_faulty.tolist()
    assert "never closed" in whole["fault"][is_faulty][0]
    # Labels come along, -1 where there are none.
    targets = whole["target"][np.searchsorted(whole["example"], [0, 1, 5])]
    np.testing.assert_array_equal(targets, [2, -1, 1])


def test_a_file_is_its_lines(fitted: Fitted, tmp_path: Path) -> None:
    path = tmp_path / "new.txt"
    path.write_text("\n".join(["(good)", "", "(2 (0 good"]))
    model = load(fitted.checkpoint)
    with pytest.warns(UserWarning, match="1 of 3 lines are blank"):
        table = predict(model, path)
    assert_same_tables(
        {name: column for name, column in table.items() if name != "fault"},
        {
            name: column
            for name, column in predict(model, ["(good)", "(2 (0 good"]).items()
            if name != "fault"
        },
    )
    assert f"{path}:3" in table["fault"][1]


@pytest.mark.parametrize("text", ["((good) (film))", "(good) " * 100])
def test_a_text_is_no_path(fitted: Fitted, text: str) -> None:
    model = load(fitted.checkpoint)
    with pytest.raises(OSError, match="a list of texts, to predict texts"):
        predict(model, text)
    with pytest.raises(FileNotFoundError) as caught:
        predict(model, Path("none.txt"))
    assert "list of texts" not in str(caught.value)


def test_several_models_are_averaged(fitted: Fitted) -> None:
    models = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        model = TreeClassifier(fitted.data.schema, **SIZES, cell="child_sum")
        torch.nn.init.normal_(model.classifier.weight)
        models.append(model)
    trees = fitted.data.dataset("test")
    alone = np.stack([predict(model, trees)["probability"] for model in models])
    together = predict(models, trees, batch_size=2)
    np.testing.assert_allclose(together["probability"], alone.mean(0), rtol=1e-5)
    np.testing.assert_allclose(together["deviation"], alone.std(0), rtol=1e-4, atol=1e-7)
    assert together["prediction"].tolist() == alone.mean(0).argmax(-1).tolist()
    assert "deviation" not in predict(models[:1], trees)


def test_models_of_other_data_are_refused(fitted: Fitted) -> None:
    other = TreeClassifier(TreeSchema(9, 5), **SIZES)
    with pytest.raises(ValueError, match="different num_tokens"):
        predict([fitted.task.model, other], ["(good)"])
    with pytest.raises(ValueError, match="no model"):
        predict([], ["(good)"])


def test_predictions_come_batch_by_batch(fitted: Fitted) -> None:
    def endless() -> Any:
        while True:
            yield "(good)"

    tables = predictions(fitted.task.model, endless(), batch_size=3)
    assert [next(tables)["example"].tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert predict(fitted.task.model, []) == {}
