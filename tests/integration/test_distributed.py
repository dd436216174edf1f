"""Runs on two ranks with all callbacks: random states, empty levels, spawned processes."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from pyg_dynbatch.lightning import (
    LastCheckpoint,
    OptimizerOptions,
    PredictionTable,
    RandomState,
    RunReport,
    TreeFileData,
)
from pyg_dynbatch.training.runs import closing_lines
from tests.console import rows_of
from tests.training.helpers import FORKS, checkpointing, last_of, task, trainer, tree_files

pytestmark = [
    *FORKS,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Experiment logs directory"),
]

RANKS: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}


class Draws(pl.Callback):
    """Record the next random number of every rank at the start of every epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        state = torch.get_rng_state()
        name = f"{trainer.current_epoch}_{trainer.global_rank}.txt"
        if not (self.folder / name).exists():
            (self.folder / name).write_text(str(torch.rand(1).item()))
        torch.set_rng_state(state)


@pytest.mark.long
def test_every_rank_resumes_with_its_own_random_numbers(tmp_path: Path) -> None:
    def run(name: str, epochs: int, resume: str | None = None, *state: RandomState) -> str:
        folder = tmp_path / name
        folder.mkdir()
        torch.manual_seed(0)
        data = tree_files(tmp_path, batch_size=4)
        callbacks = [*state, checkpointing(), LastCheckpoint(), Draws(folder)]
        trained = trainer(folder, epochs=epochs, callbacks=callbacks, **RANKS)
        trained.fit(task(data, output_dropout=0.5), datamodule=data, ckpt_path=resume)
        return last_of(trained)

    run("straight", 2, None, RandomState())
    last = run("first", 1, None, RandomState())
    run("second", 2, last, RandomState())
    run("without the state", 2, last)
    assert len(torch.load(last, weights_only=True)["random_state"]["cpu"]) == 2
    for rank in (0, 1):
        straight, second, without = (
            (tmp_path / name / f"1_{rank}.txt").read_text()
            for name in ("straight", "second", "without the state")
        )
        assert straight == second != without


@pytest.mark.parametrize("cell", ["nary", "child_sum", "gru", "rnn"])
def test_a_rank_with_single_nodes_only_takes_part(tmp_path: Path, cell: str) -> None:
    for name in ("train", "val"):
        lines = ["(1 word)", "(2 (0 a) (1 (1 b) (2 c)))"]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = TreeFileData(
        str(tmp_path / "train.txt"), str(tmp_path / "val.txt"), classes=5, batch_size=1
    )
    module = task(data, cell=cell, optimizer=OptimizerOptions("sgd", lr=0.5))
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    run = trainer(tmp_path, epochs=2, **RANKS)
    run.fit(module, datamodule=data)
    for name, weight in module.state_dict().items():
        assert torch.isfinite(weight).all()
        assert not torch.equal(weight, before[name]), name


@pytest.mark.long
def test_spawned_ranks_with_every_callback(tmp_path: Path) -> None:
    """Everything that a run sends to a process can be pickled, and its files are found again."""
    data = tree_files(tmp_path, batch_size=4, num_workers=1)
    module = task(data, optimizer=OptimizerOptions("adagrad", embedding="sgd", embedding_lr=0.1))
    table = PredictionTable()
    callbacks = [RandomState(), checkpointing(), LastCheckpoint(), table, RunReport()]
    run = trainer(tmp_path, callbacks=callbacks, devices=2, strategy="ddp_spawn")
    run.fit(module, datamodule=data)
    run.test(module, datamodule=data, verbose=False)
    run.predict(module, datamodule=data, return_predictions=False)
    rows = rows_of(table.places(run)["predictions"])
    assert [row["example"] for row in rows] == [str(n) for n in range(7)]
    # Lightning's CSVLogger rewrites its table in every set of spawned processes.
    written = [line.split(":")[0] for line in closing_lines(run)]
    expected = ["checkpoint", "predictions", "learning curve", "predicted trees"]
    assert [name for name in written if name != "metrics"] == expected
