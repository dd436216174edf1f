"""Two processes take the step that one takes, where nothing is normalised over a batch."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from pyg_dynbatch.training import OptimizerOptions
from tests.molecules.molecules import molecule_data, property_task
from tests.training.helpers import FORKS, bare_trainer

pytestmark = FORKS

TRAIN = 16


class OneStep(pl.Callback):
    """Fails unless all processes together take one step over all molecules."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert batch_idx == 0
        shares = trainer.strategy.reduce(torch.tensor(batch.num_graphs), reduce_op="sum")
        assert int(shares) == TRAIN


def weights_after_a_step(
    folder: Path, ranks: int, kind: str, norm: str | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gives the weights before and after one step of plain descent over all molecules."""
    data = molecule_data(folder, kind, batch_size=TRAIN // ranks)
    torch.manual_seed(3)
    task = property_task(data, optimizer=OptimizerOptions("sgd", lr=0.5), norm=norm, atom_norm=norm)
    before = {name: weight.clone() for name, weight in task.network.named_parameters()}
    run = bare_trainer(folder, ranks, limit_val_batches=0, callbacks=[OneStep()])
    run.fit(task, datamodule=data)
    return before, dict(task.network.named_parameters())


@pytest.mark.parametrize(("kind", "norm"), [("regression", None), ("binary", "layer")])
def test_two_processes_take_the_step_of_one(tmp_path: Path, kind: str, norm: str | None) -> None:
    # Every fifth target is unknown, so that the processes differ in the number of their terms.
    before, alone = weights_after_a_step(tmp_path, 1, kind, norm)
    _, both = weights_after_a_step(tmp_path, 2, kind, norm)
    moved = 0.0
    for name, weight in alone.items():
        step = weight - before[name]
        torch.testing.assert_close(both[name] - before[name], step, rtol=1e-4, atol=1e-6)
        moved = max(moved, float(step.detach().abs().max()))
    assert moved > 1e-3, "the step is big enough to differ"
