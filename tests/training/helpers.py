"""Small data and quiet trainers for tests."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pyg_dynbatch.datasets import ListOpsRecipe
from pyg_dynbatch.lightning import (
    LastCheckpoint,
    ListOpsData,
    OptimizerOptions,
    RandomState,
    TreeClassification,
    TreeFileData,
)

# A process that has computed gradients on a machine with a GPU must not be forked.
FORKS = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="forks processes, on the CPU alone"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|DistributedSampler|fork)"),
]

RECIPE = ListOpsRecipe(train=60, val=21, test=17, max_depth=4, max_length=30)
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


def task(data: Any, **options: Any) -> TreeClassification:
    """A small classifier for a data module."""
    given = {
        "cell": "child_sum",
        "optimizer": OptimizerOptions("adam", lr=0.01),
        **SIZES,
        **options,
    }
    return TreeClassification(data.num_tokens, data.num_classes, **given)


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
        "callbacks": [RandomState(), checkpointing(), LastCheckpoint()],
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


def checkpointing() -> ModelCheckpoint:
    """Keeps the best checkpoint."""
    return ModelCheckpoint(
        monitor="val/accuracy",
        mode="max",
        filename="best",
        auto_insert_metric_name=False,
        enable_version_counter=False,
    )


def last_of(run: pl.Trainer) -> str:
    """Path of the last checkpoint of a run."""
    return str(Path(run.log_dir or "") / "checkpoints" / "last.ckpt")
