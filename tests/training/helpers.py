"""Small data, tasks over them, and quiet trainers."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pyg_dynbatch.datasets import ListOpsRecipe
from pyg_dynbatch.lightning import DataModule, ListOpsData, RandomState, Task, TreeFileData
from pyg_dynbatch.models import TreeClassifier

# A process that has computed gradients on a machine with a GPU must not be forked.
FORKS = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="forks processes, on the CPU alone"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|DistributedSampler|fork)"),
]

RECIPE = ListOpsRecipe(train=60, val=21, test=17, max_depth=4, max_length=30)
ADAM = partial(torch.optim.Adam, lr=0.01)
SIZES = {"embedding_channels": 6, "hidden_channels": 8}


def listops(folder: Path, **options: Any) -> ListOpsData:
    """ListOps, small, cached in a folder."""
    return ListOpsData(str(folder), recipe=RECIPE, **{"batch_size": 16, **options})


def tree_files(folder: Path, **options: Any) -> TreeFileData:
    """Three files with labels on all nodes, five classes."""
    words = ["good", "bad", "film", "dull", "fun"]
    for name, count in (("train", 24), ("val", 9), ("test", 7)):
        lines = []
        for number in range(count):
            leaves = [f"({(number + k) % 5} {words[(number * k) % 5]})" for k in range(3)]
            lines.append(f"({number % 5} {leaves[0]} ({(number + 2) % 5} {leaves[1]} {leaves[2]}))")
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    paths = [str(folder / f"{name}.txt") for name in ("train", "val", "test")]
    return TreeFileData(*paths, **{"batch_size": 8, **options})


def task(data: DataModule, optimizer: Any = ADAM, rate: Any = "constant", **options: Any) -> Task:
    """A small classifier for a data module."""
    model = TreeClassifier(data.schema, **{"cell": "child_sum", **SIZES, **options})
    return Task(model, optimizer, rate)


def trainer(folder: Path, epochs: int = 1, **options: Any) -> pl.Trainer:
    """A trainer without a progress bar that writes below a folder."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "default_root_dir": folder,
        "logger": CSVLogger(folder / "runs", name="test"),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "callbacks": [RandomState(), *checkpointing()],
    }
    run = pl.Trainer(**{**defaults, **options})
    if run.logger is not None:
        # Chooses the folder before ranks are forked.
        _ = run.logger.version
    return run


def bare_trainer(folder: Path, ranks: int = 1, **options: Any) -> pl.Trainer:
    """A trainer that writes nothing, in this process or in several forked ones."""
    given = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    given |= {"callbacks": [], "strategy": "ddp_fork" if ranks > 1 else "auto"}
    return trainer(folder, devices=ranks, **{**given, **options})


def checkpointing() -> list[ModelCheckpoint]:
    """Keep the checkpoints of the best epoch and of the last, as the command line does."""
    best = ModelCheckpoint(monitor="val/accuracy", mode="max", filename="best")
    return [best, ModelCheckpoint(filename="last", save_on_train_epoch_end=True)]


def last_of(run: pl.Trainer) -> str:
    """Path of the last checkpoint of a run."""
    return str(Path(run.log_dir or "") / "checkpoints" / "last.ckpt")


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy all weights."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_equal_weights(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """Assert that all weights are equal bit by bit."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
