"""Make a resumed run continue exactly where the checkpoint was taken."""

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import whole_file


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
        """Adds the seed of the run and the states of all ranks to the checkpoint."""
        checkpoint["pyg_dynbatch_seed"] = os.environ.get("PL_GLOBAL_SEED")
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


class RunCheckpoint(ModelCheckpoint):
    """Keeps the best checkpoint as Lightning does, also when the folder of the run was moved.

    Example:
        >>> RunCheckpoint(monitor="val/accuracy", mode="max").monitor
        'val/accuracy'
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores paths and scores; Lightning forgets the scores if the folder has another path.

        Args:
            state_dict: What a checkpoint holds of this callback.
        """

        def moved(path: str) -> str:
            here = Path(self.dirpath or "") / Path(path).name
            return str(here) if path and here.is_file() else path

        scores = {moved(path): score for path, score in state_dict["best_k_models"].items()}
        names = ("best_model_path", "kth_best_model_path", "last_model_path")
        paths = {name: moved(state_dict[name]) for name in names}
        state = {**state_dict, **paths, "best_k_models": scores, "dirpath": self.dirpath}
        super().load_state_dict(state)


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
    return RunCheckpoint(
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
        ValueError: If the file is not a checkpoint, or is cut short.
    """
    check_is_checkpoint(path)
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise _not_a_checkpoint(path, "an object that is not loaded for safety") from error
    if not isinstance(contents, Mapping):
        raise _not_a_checkpoint(path, f"a {type(contents).__name__}")
    missing = [key for key in ("state_dict", "pytorch-lightning_version") if key not in contents]
    if missing:
        raise _not_a_checkpoint(path, f"a dictionary without {' and '.join(missing)}")
    return dict(contents)


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints whole or not at all, and reads them without running code from them.

    Lightning writes them to the folder of temporary files and then copies them. Code is run only
    if ``weights_only=False`` is asked for.

    Example:
        >>> SafeCheckpointIO().load_checkpoint("none.ckpt")
        Traceback (most recent call last):
            ...
        FileNotFoundError: Checkpoint file not found: none.ckpt
    """

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint.

        Args:
            path: The file.
            map_location: As in ``torch.load``; left out, the CPU.
            weights_only: Whether anything but tensors and plain values is refused; left out, it is.

        Returns:
            What the file holds.
        """
        if weights_only is not False and map_location is None and Path(path).is_file():
            return read_checkpoint(path)
        options = {} if map_location is None else {"map_location": map_location}
        return super().load_checkpoint(path, weights_only=weights_only is not False, **options)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Saves a checkpoint; one on a remote file system is left to Lightning.

        Args:
            checkpoint: What to save.
            path: The file.
            storage_options: None; others are refused by Lightning.

        Raises:
            OSError: If the file cannot be written.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        content = BytesIO()  # torch turns an error of the file into one that does not name it
        torch.save(checkpoint, content)
        with whole_file(path, "wb") as file:
            file.write(content.getbuffer())


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
        ValueError: If the file is not a checkpoint, or is cut short.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            mismatch("the checkpoint is missing", expected="a file written by fit", got=path)
        )
    # torch writes zip archives, whose table of contents stands at the end.
    if not zipfile.is_zipfile(path):
        size = f"{Path(path).stat().st_size:,} bytes of something else"
        raise _not_a_checkpoint(path, size)


@contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Adds the path of a checkpoint to a complaint about it.

    Args:
        path: The file.
    """
    try:
        yield
    except ValueError as error:
        error.add_note(f"  file:     {path}")
        raise


def _not_a_checkpoint(path: str | Path, got: str) -> ValueError:
    return ValueError(
        mismatch(
            "the file is not a checkpoint, or is cut short",
            expected="a file written by fit, such as last.ckpt",
            got=got,
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
