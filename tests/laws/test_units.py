"""Law of units: scaled and shifted targets change only numbers that have the unit."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.datasets import SplitOptions
from pyg_dynbatch.lightning import MoleculeFileData
from pyg_dynbatch.metrics import average_precision, pearson, r2, roc_auc, spearman
from pyg_dynbatch.models import MoleculeModel, MoleculeSchema, predict, write_table
from pyg_dynbatch.molecules.models import TargetScale
from tests.console import rows_of
from tests.molecules.molecules import EVEN, SMALL, SMILES, property_task
from tests.strategies import few
from tests.training.helpers import bare_trainer

UNITS = [(1e-9, 0.0), (1e9, 0.0), (1.0, 1e6), (1e-9, 1e6), (1e9, -1e6)]
"""Pairs: factor, and what is added before, where the deviation of the targets is about 1."""
unit = st.sampled_from(UNITS)


def converted(values: Any, factor: float, shift: float) -> Any:
    return (values + shift) * factor


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def assert_in_unit(name: str, found: Any, expected: Any, factor: float, shift: float) -> None:
    """Compare a column by its name, which says whether it has the unit, and its zero."""
    if name.startswith(("prediction", "target")):
        found = np.asarray(found) / factor - shift
    elif name.startswith(("rmse", "mae", "deviation")):
        found = np.asarray(found) / factor
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=name)


def drawn(seed: int, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw predictions and targets of two properties, of which some are unknown."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(count, 2, generator=generator, dtype=torch.double)
    guess = target + torch.randn(count, 2, generator=generator, dtype=torch.double)
    target[::7, 0] = math.nan
    return guess, target


@few(20)
@given(unit=unit, seed=st.integers(0, 9))
def test_metrics_of_a_model_have_the_unit_of_its_targets(
    unit: tuple[float, float], seed: int
) -> None:
    tables = []
    for factor, shift in ((1.0, 0.0), unit):
        model = MoleculeModel(MoleculeSchema(("y_1", "y_2")), **SMALL)
        guess, target = (converted(each, factor, shift).numpy() for each in drawn(seed))
        model.start_from(SimpleNamespace(targets=target))
        columns = {f"prediction_y_{n}": guess[:, n - 1] for n in (1, 2)}
        columns |= {f"target_y_{n}": target[:, n - 1] for n in (1, 2)}
        tables.append(model.metrics(columns))
    expected, found = tables
    assert len(found) == len(expected) == 7
    for name, value in found.items():
        assert_in_unit(name, value, expected[name], *unit)


@few(20)
@given(unit=unit, seed=st.integers(0, 9))
def test_scaled_targets_have_no_unit(unit: tuple[float, float], seed: int) -> None:
    guess, target = drawn(seed)
    factor, shift = unit
    plain = TargetScale(2)
    plain.fit(target, ("y_1", "y_2"))
    scale = TargetScale(2).half()  # which leaves its numbers in double precision
    scale.fit(converted(target, factor, shift), ("y_1", "y_2"))
    scaled = scale.scaled(converted(guess, factor, shift))
    close(scaled, plain.scaled(guess))
    close(scale.restored(scaled.float()) / factor - shift, guess)


def test_a_constant_alone_is_not_scaled() -> None:
    target = torch.tensor([[0.1, 1e-30], [0.1, 2e-30], [0.1, 3e-30]], dtype=torch.double)
    scale = TargetScale(2)
    scale.fit(target, ("y_1", "y_2"))
    assert scale.deviation[0] == 1
    close(scale.scaled(target)[:, 1], [-(1.5**0.5), 0, 1.5**0.5])


@few(20)
@given(seed=st.integers(0, 9), factor=st.sampled_from([1e-9, 1e-4, 1.0, 1e9]))
def test_metrics_of_nearly_equal_values_keep_their_digits(seed: int, factor: float) -> None:
    guess, gold = (each[:, 1].numpy() for each in drawn(seed))
    for metric in (pearson, spearman, r2):
        close(metric(5 + factor * guess, 5 + factor * gold), metric(guess, gold))
    close(pearson(5 + factor * guess, gold), pearson(guess, gold))
    score = 5 + factor * guess
    close(roc_auc(score, gold > 0), roc_auc(guess, gold > 0))
    close(average_precision(score, gold > 0), average_precision(guess, gold > 0))


numbers = st.floats(allow_nan=False, allow_infinity=False)


@few(30)
@given(values=st.lists(numbers, min_size=1, max_size=5), single=st.booleans())
def test_a_table_gives_all_digits_back(
    values: list[float], single: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with np.errstate(over="ignore"):
        column = np.array(values, np.float32 if single else np.float64)
    path = tmp_path_factory.getbasetemp() / "table.csv"
    faults = np.full(len(column), "", object)
    table = {"example": np.arange(len(column)), "one": column, "two": column[:, None]}
    table["fault"] = faults
    assert write_table(path, [table]) == (len(column), 0)
    rows = rows_of(path)
    for name in ("one", "two_0"):
        assert np.array_equal(np.array([row[name] for row in rows], column.dtype), column)


def molecule_file(folder: Path, factor: float, shift: float) -> Path:
    """Write molecules with two targets in a unit."""
    generator = np.random.default_rng(0)
    lines = ["smiles,y_1,y_2"]
    for number, text in enumerate(SMILES):
        values = np.array([len(text) / 4 + generator.normal(), number % 7])
        lines.append(",".join([text, *map(repr, converted(values, factor, shift).tolist())]))
    path = folder / "regression.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run_in(folder: Path, unit: tuple[float, float]) -> dict[str, Any]:
    """Return all numbers of a run of training, test and prediction by two models."""
    path = str(molecule_file(folder, *unit))
    options = {"split": SplitOptions(fractions=EVEN), "batch_size": 8}
    models = []
    found: dict[str, Any] = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = MoleculeFileData(path, ["y_1", "y_2"], "regression", **options)
        task = property_task(data, dropout=0.2)
        run = bare_trainer(folder, max_epochs=3)
        run.fit(task, datamodule=data)
        found |= {f"{name}_{seed}": value for name, value in run.callback_metrics.items()}
        (tested,) = run.test(task, datamodule=data, verbose=False)
        found |= {f"{name}_{seed}": value for name, value in tested.items()}
        models.append(task.model)
    table = predict(models, path)
    return found | {name: column for name, column in table.items() if column.dtype != object}


@pytest.mark.parametrize("unit", [(1e-9, 0.0), (1e9, -1e6)])
def test_a_run_in_another_unit_is_the_same_run(tmp_path: Path, unit: tuple[float, float]) -> None:
    expected = run_in(tmp_path, (1.0, 0.0))
    found = run_in(tmp_path, unit)
    assert found.keys() == expected.keys() and "deviation_y_1" in found
    for name, value in found.items():
        assert_in_unit(name.rpartition("/")[2], value, expected[name], *unit)
