"""Make a resumed run continue exactly where the checkpoint was taken."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch


class RandomState(Callback):
    """Saves torch's random state in every checkpoint and puts it back on resuming.

    Lightning restores weights, optimisers, schedules and loops, but dropout would draw other
    numbers. Every rank has a state of its own; they are all kept, and put back if the run has as
    many ranks as before. Exact for checkpoints taken at the end of an epoch, on one device.

    Example:
        >>> RandomState().state_key
        'RandomState'
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] | None = None

    @property
    def state_key(self) -> str:
        """Name of the callback's entry in a checkpoint."""
        return "RandomState"

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds the states of all ranks to the checkpoint."""
        checkpoint["random_state"] = {
            name: _of_all_ranks(state, trainer) for name, state in _states(pl_module).items()
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keeps the states until training starts."""
        self._waiting = checkpoint.get("random_state")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Puts the state back, as the last thing before the first resumed batch."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or waiting["cpu"].size(0) != trainer.world_size:
            return
        # Copies: torch reads a state from the start of its storage, so a row would be misread.
        own = {name: states[trainer.global_rank].cpu().clone() for name, states in waiting.items()}
        torch.set_rng_state(own["cpu"])
        if "cuda" in own and pl_module.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], pl_module.device)


def last_checkpoint() -> ModelCheckpoint:
    """Makes the callback that keeps ``last.ckpt``, written at the end of every epoch.

    ``ModelCheckpoint(monitor=..., save_last=True)`` writes its ``last.ckpt`` only together with a
    new best one, so a run resumed from it would repeat epochs.

    Returns:
        A checkpoint callback without a monitored metric.

    Example:
        >>> last_checkpoint().monitor is None
        True
    """
    return ModelCheckpoint(
        filename="last",
        monitor=None,
        save_top_k=1,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint onto the CPU without running code from it.

    Args:
        path: The file.

    Returns:
        What it holds.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no checkpoint, or is cut short.
    """
    check_is_checkpoint(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def share_split(checkpoint: dict[str, Any], datamodule: Any) -> None:
    """Shows the split of a checkpoint to a data module of another class, which Lightning would not.

    Args:
        checkpoint: What was read; gets an entry for the data module if it notes a split.
        datamodule: The data module in use.
    """
    for entry in list(checkpoint.values()):
        if isinstance(entry, Mapping) and "split_options" in entry:
            checkpoint.setdefault(type(datamodule).__qualname__, entry)


def check_is_checkpoint(path: str | Path) -> None:
    """Tells a checkpoint from a missing, foreign or truncated file, without reading all of it.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no checkpoint, or is cut short.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            mismatch("the checkpoint is missing", expected="a file written by fit", got=path)
        )
    # torch writes zip archives, whose table of contents stands at the end.
    if not zipfile.is_zipfile(path):
        raise ValueError(
            mismatch(
                "the file is no checkpoint, or is cut short",
                expected="a file written by fit, such as last.ckpt",
                got=f"{Path(path).stat().st_size:,} bytes of something else",
                where=path,
            )
        )


def _states(pl_module: pl.LightningModule) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if pl_module.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(pl_module.device)
    return states


def _of_all_ranks(state: Tensor, trainer: pl.Trainer) -> Tensor:
    if trainer.world_size == 1:
        return state[None]
    own = state.to(trainer.strategy.root_device)
    gathered = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(gathered, own)
    return torch.stack(gathered).cpu()
