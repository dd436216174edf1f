"""Laws of units: scaled and shifted targets change only numbers that have the unit."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401 - else its log holds on to the stream of the first test
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.molecules.nets.properties import AveragedProperties, TargetScale
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.task import ScoredSplit, task_table
from pyg_dynbatch.prediction import write_table
from pyg_dynbatch.training.task import Agreement, average_precision, pearson, r2, spearman
from tests.console import TRAINER, prepare, rows_of, run
from tests.molecules.batches import TABLE
from tests.molecules.molecules import SMILES
from tests.strategies import few

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*(jsonargparse|deprecated in v4)")

UNITS = [(1e-9, 0.0), (1e9, 0.0), (1.0, 1e6), (1e-9, 1e6), (1e9, -1e6)]
"""Pairs: factor, and what is added before, where the deviation of the targets is about 1."""
unit = st.sampled_from(UNITS)


def converted(values: Any, factor: float, shift: float) -> Any:
    return (values + shift) * factor


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def assert_in_unit(name: str, found: Any, wanted: Any, factor: float, shift: float) -> None:
    """Compare a column by its name, which says whether it has the unit, and its zero."""
    base = name.rpartition("/")[2]
    if base.startswith(("prediction", "target")):
        found = np.asarray(found) / factor - shift
    elif base.startswith(("rmse", "mae", "deviation")):
        found = np.asarray(found) / factor
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=name)


def drawn(seed: int, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions and targets of two properties, of which some are unknown."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(count, 2, generator=generator, dtype=torch.double)
    guess = target + torch.randn(count, 2, generator=generator, dtype=torch.double)
    target[::7, 0] = math.nan
    return guess, target


@few(20)
@given(unit=unit, seed=st.integers(0, 9))
def test_reports(unit: tuple[float, float], seed: int) -> None:
    schema = MoleculeSchema({}, 1, TABLE, ("y_1", "y_2"))
    tables = []
    for factor, shift in ((1.0, 0.0), unit):
        guess, target = (converted(each, factor, shift) for each in drawn(seed))
        scale = TargetScale(2)
        scale.fit(target)
        tables.append(task_table(ScoredSplit(guess, target, schema, scale.deviation)))
    for name in ("r2", "spearman", "rmse", "mae", "scaled_rmse"):
        wanted, found = (table[name][:2].astype(float) for table in tables)
        assert_in_unit(name, found, wanted, *unit)


@few(20)
@given(unit=unit, seed=st.integers(0, 9))
def test_scale_and_average(unit: tuple[float, float], seed: int) -> None:
    guess, target = drawn(seed)
    scaled = []
    for factor, shift in ((1.0, 0.0), unit):
        scale = TargetScale(2).half()
        scale.fit(converted(target, factor, shift))
        scaled.append(scale.scaled(converted(guess, factor, shift)))
        members = [(torch.nn.Identity(), scale)] * 2
        average = AveragedProperties(members, scale, "regression", 2)
        restored = scale.restored(average(scaled[0].float()))
        close(restored / factor - shift, guess)
    close(*scaled)


def test_a_constant_alone_is_not_scaled() -> None:
    target = torch.tensor([[0.1, 1e-30], [0.1, 2e-30], [0.1, 3e-30]], dtype=torch.double)
    scale = TargetScale(2)
    scale.fit(target)
    assert scale.deviation[0] == 1
    close(scale.scaled(target)[:, 1], [-(1.5**0.5), 0, 1.5**0.5])


@few(20)
@given(seed=st.integers(0, 9), factor=st.sampled_from([1e-9, 1e-4, 1.0, 1e9]))
def test_metrics_of_nearly_equal_values(seed: int, factor: float) -> None:
    guess, gold = (each[:, 1].numpy() for each in drawn(seed))
    for formula, guessed in ((pearson, 5 + factor * guess), (r2, guess), (spearman, guess)):
        metric = Agreement(formula)
        for part in range(0, 40, 7):
            pair = guessed[part : part + 7], gold[part : part + 7]
            metric.update(*map(torch.from_numpy, pair))
        close(metric.compute(), formula(guess, gold))
    rank = np.argsort(np.argsort(guess)), np.argsort(np.argsort(gold))
    close(spearman(guess, gold), np.corrcoef(*rank)[0, 1])
    order = np.argsort(-guess)
    hits = (gold > 0)[order]
    precision = np.cumsum(hits) / np.arange(1, 41)
    close(average_precision(guess, gold > 0), precision[hits].mean())
    ties = np.array([2.0, 2.0, 1.0]), np.array([True, False, True])
    close(average_precision(*ties), 0.5 * 1 / 2 + 0.5 * 2 / 3)


numbers = st.floats(allow_nan=False, allow_infinity=False)


@few(30)
@given(values=st.lists(numbers, min_size=1, max_size=5), single=st.booleans())
def test_a_table_gives_all_digits_back(
    values: list[float], single: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with np.errstate(over="ignore"):
        column = np.array(values, np.float32 if single else np.float64)
    columns = {"target": column, "number": column.astype(object)}
    path = write_table(tmp_path_factory.getbasetemp() / "table.csv", columns)
    rows = rows_of(path)
    for name in columns:
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


def assert_same_in_units(plain: Path, other: Path, unit: tuple[float, float]) -> None:
    """Compare all tables of two folders, cell by cell."""
    paths = sorted(path.relative_to(plain) for path in plain.rglob("*.csv"))
    for path in paths:
        if path.name == "regression.csv":
            continue
        for found, wanted in zip(rows_of(other / path), rows_of(plain / path), strict=True):
            for name, text in wanted.items():
                try:
                    numbers = float(found[name]), float(text)
                except ValueError:
                    assert found[name] == text, (path, name)
                    continue
                assert_in_unit(name, *numbers, *unit)


SMALL_RUN = {
    "model": {
        "class_path": "MoleculeProperty",
        "init_args": {"hidden": 6, "atom_out": 8, "readout": "sum", "head": [8], "dropout": 0.2},
    },
    "checkpoint": {"monitor": "val/rmse_y_1", "mode": "min"},
    "data": {
        "class_path": "MoleculeFileData",
        "init_args": {
            "file": "regression.csv",
            "targets": ["y_1", "y_2"],
            "split": {"fractions": [0.5, 0.25, 0.25]},
            "batch_size": 8,
        },
    },
}
STOPPING = {"class_path": "EarlyStopping", "init_args": {"monitor": "val/rmse_y_2", "patience": 1}}


def commands_in(folder: Path, unit: tuple[float, float], patch: pytest.MonkeyPatch) -> Path:
    """Run all commands that write numbers in the unit of the targets."""
    settings = {**TRAINER, "max_epochs": 3, "callbacks": [STOPPING]}
    prepare(folder, patch, {"trainer": settings, **SMALL_RUN})
    molecule_file(folder, *unit)
    for seed in "12":
        split = ["--data.init_args.split.seed", "1"]
        assert run("fit", "--config", "small.yaml", "--seed_everything", seed, *split) == 0
    best = [f"runs/small/version_{number}/best.ckpt" for number in range(2)]
    predict = ["predict", "--input", "regression.csv", "--checkpoint"]
    assert run(*predict, best[0], "--output", "one.csv", "--narrow") == 0
    assert run(*predict, *best, "--output", "two.csv", "--narrow", "--dropout", "2") == 0
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        return commands_in(tmp_path_factory.mktemp("plain"), (1.0, 0.0), patch)


@pytest.mark.long
@pytest.mark.parametrize("unit", [(1e-9, 0.0), (1e9, -1e6)])
def test_commands(
    plain: Path, tmp_path: Path, unit: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same_in_units(plain, commands_in(tmp_path, unit, monkeypatch), unit)
    assert len(list(plain.rglob("*.csv"))) > 8
