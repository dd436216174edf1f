"""Law of models: targets that do not fit are refused, and predictions have no gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pyg_dynbatch.lightning import Task
from tests.molecules.molecules import molecule_data, property_task
from tests.training.helpers import bare_trainer, task, tree_files

Made = tuple[Task, Any]


def values(folder: Path) -> Made:
    data = molecule_data(folder)
    return property_task(data), data


def labels(folder: Path) -> Made:
    data = molecule_data(folder, "binary")
    return property_task(data), data


def trees(folder: Path) -> Made:
    data = tree_files(folder)
    return task(data), data


def first_rows(y: Tensor) -> Tensor:
    return y[:1]


def columns(y: Tensor) -> Tensor:
    return y.reshape(-1, 1) if y.dim() == 1 else y.unsqueeze(-1)


def repeated(y: Tensor) -> Tensor:
    return y.repeat(2, *[1] * (y.dim() - 1))


def a_list(y: Tensor) -> list[float]:
    return y.tolist()


def nothing(y: Tensor) -> None:
    return None


MAKES = [values, labels, trees]


@pytest.mark.parametrize("make", MAKES)
def test_predictions_have_no_gradients(make: Callable[[Path], Made], tmp_path: Path) -> None:
    task, data = make(tmp_path)
    table = task.model.predict(next(iter(data.train_dataloader())))
    assert table and not any(column.requires_grad for column in table.values())


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("spoil", [first_rows, columns, repeated, a_list, nothing])
def test_targets_of_a_different_shape_are_refused(
    make: Callable[[Path], Made], spoil: Callable, tmp_path: Path
) -> None:
    task, data = make(tmp_path)
    task.trainer = bare_trainer(tmp_path)
    batch = next(iter(data.train_dataloader()))
    batch.y = spoil(batch.y)
    with pytest.raises(ValueError, match=r"batch\.y"):
        task.training_step(batch)
