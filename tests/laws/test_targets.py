"""Every task: targets that do not fit are refused, not broadcast; predictions have no gradients."""

from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
from torch import Tensor

from tests.laws.test_evaluating_first import Made, labels, numbers, pairs, trees, values
from tests.training.helpers import trainer


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


@pytest.mark.parametrize("make", [values, trees, pairs])
def test_predictions_have_no_gradients(
    make: Callable[[Path, Path], Made], tmp_path: Path, samples: Path
) -> None:
    task, data = make(tmp_path, samples)
    data.prepare_data()
    data.setup("fit")
    columns = task.model.predict(next(iter(data.train_dataloader())))
    assert not any(column.requires_grad for column in columns.values())


LONG = [pytest.param(f, marks=pytest.mark.long) for f in (first_rows, repeated, a_list, nothing)]


@pytest.mark.parametrize("make", [values, labels, trees, pairs, numbers])
@pytest.mark.parametrize("spoil", [columns, *LONG])
def test_targets_of_a_different_shape_are_refused(
    make: Callable[[Path, Path], Made], spoil: Callable, tmp_path: Path, samples: Path
) -> None:
    task, data = make(tmp_path, samples)
    name = "target" if make is pairs else "y"

    class Spoil(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
            setattr(batch, name, spoil(batch[name]))

    options = {"logger": False, "callbacks": [Spoil()], "enable_checkpointing": False}
    with pytest.raises(ValueError, match=f"batch.{name} does not fit"):
        trainer(tmp_path, 1, **options).fit(task, datamodule=data)
    if spoil is first_rows:
        batch = next(iter(data.train_dataloader()))
        setattr(batch, name, spoil(batch[name]))
        with pytest.raises(ValueError, match="the targets of the batch do not fit"):
            task.predict_step(batch)
