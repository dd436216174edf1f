"""Law of units: scaled and shifted targets change only numbers that have the unit."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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


class Unit(NamedTuple):
    """A factor, and what is added before, where the deviation of the targets is about 1."""

    factor: float
    shift: float

    def convert(self, values: Any) -> Any:
        return (values + self.shift) * self.factor

    def convert_back(self, values: Any) -> Any:
        return values / self.factor - self.shift


NO_UNIT = Unit(1.0, 0.0)
UNITS = st.sampled_from(
    [Unit(1e-9, 0.0), Unit(1e9, 0.0), Unit(1.0, 1e6), Unit(1e-9, 1e6), Unit(1e9, -1e6)]
)


def close(got: Any, expected: Any, name: str = "") -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=name)


def without_unit(name: str, values: Any, unit: Unit) -> Any:
    """Convert a column back by its name, which says whether it has the unit, and its zero."""
    if name.startswith(("prediction", "target")):
        return unit.convert_back(np.asarray(values))
    if name.startswith(("rmse", "mae", "deviation")):
        return np.asarray(values) / unit.factor
    return values


def drawn(seed: int, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw predictions and targets of two properties, of which some are unknown."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(count, 2, generator=generator, dtype=torch.double)
    guess = target + torch.randn(count, 2, generator=generator, dtype=torch.double)
    target[::7, 0] = math.nan
    return guess, target


def metrics_in(unit: Unit, seed: int) -> dict[str, float]:
    guess, target = (unit.convert(rows).numpy() for rows in drawn(seed))
    model = MoleculeModel(MoleculeSchema(("y_1", "y_2")), **SMALL)
    model.start_from(SimpleNamespace(targets=target))
    columns = {
        "prediction_y_1": guess[:, 0],
        "prediction_y_2": guess[:, 1],
        "target_y_1": target[:, 0],
        "target_y_2": target[:, 1],
    }
    return model.metrics(columns)


@few(20)
@given(unit=UNITS, seed=st.integers(0, 9))
def test_metrics_of_a_model_have_the_unit_of_its_targets(unit: Unit, seed: int) -> None:
    expected = metrics_in(NO_UNIT, seed)
    got = metrics_in(unit, seed)
    assert len(got) == len(expected) == 7
    for name, value in got.items():
        close(without_unit(name, value, unit), expected[name], name)


@few(20)
@given(unit=UNITS, seed=st.integers(0, 9))
def test_scaled_targets_have_no_unit(unit: Unit, seed: int) -> None:
    guess, target = drawn(seed)
    plain = TargetScale(2)
    plain.fit(target, ("y_1", "y_2"))
    scale = TargetScale(2).half()  # which leaves its numbers in double precision
    scale.fit(unit.convert(target), ("y_1", "y_2"))
    scaled = scale.scaled(unit.convert(guess))
    close(scaled, plain.scaled(guess))
    close(unit.convert_back(scale.restored(scaled.float())), guess)


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
    table = {
        "example": np.arange(len(column)),
        "one": column,
        "two": column[:, None],
        "fault": np.full(len(column), "", object),
    }
    assert write_table(path, [table]) == (len(column), 0)
    rows = rows_of(path)
    for name in ("one", "two_0"):
        assert np.array_equal(np.array([row[name] for row in rows], column.dtype), column)


def molecule_file(folder: Path, unit: Unit) -> Path:
    """Write molecules with two targets in a unit."""
    generator = np.random.default_rng(0)
    lines = ["smiles,y_1,y_2"]
    for number, text in enumerate(SMILES):
        values = np.array([len(text) / 4 + generator.normal(), number % 7])
        cells = [repr(value) for value in unit.convert(values).tolist()]
        lines.append(",".join([text, *cells]))
    path = folder / "regression.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def numbers_of_a_run(folder: Path, unit: Unit) -> dict[str, Any]:
    """Return all numbers of a run of training, test and prediction by two models."""
    path = str(molecule_file(folder, unit))
    split = SplitOptions(fractions=EVEN)
    models = []
    numbers: dict[str, Any] = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        data = MoleculeFileData(path, ["y_1", "y_2"], "regression", split=split, batch_size=8)
        task = property_task(data, dropout=0.2)
        run = bare_trainer(folder, max_epochs=3)
        run.fit(task, datamodule=data)
        for name, value in run.callback_metrics.items():
            numbers[f"{name}_{seed}"] = value
        (tested,) = run.test(task, datamodule=data, verbose=False)
        for name, value in tested.items():
            numbers[f"{name}_{seed}"] = value
        models.append(task.model)
    for name, column in predict(models, path).items():
        if column.dtype != object:
            numbers[name] = column
    return numbers


@pytest.mark.parametrize("unit", [Unit(1e-9, 0.0), Unit(1e9, -1e6)], ids=str)
def test_a_run_in_another_unit_is_the_same_run(tmp_path: Path, unit: Unit) -> None:
    expected = numbers_of_a_run(tmp_path, NO_UNIT)
    got = numbers_of_a_run(tmp_path, unit)
    assert got.keys() == expected.keys()
    assert "deviation_y_1" in got
    for name, value in got.items():
        _, _, metric = name.rpartition("/")
        close(without_unit(metric, value, unit), expected[name], name)
