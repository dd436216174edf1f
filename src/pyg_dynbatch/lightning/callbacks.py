"""Callbacks of runs."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor


class RandomState(Callback):
    """Save torch's random state in every checkpoint and restore it when a run is resumed.

    Otherwise a resumed run would draw different numbers for dropout. The states of all ranks are
    saved, and restored before the first batch if the number of ranks is the same.

    Example:
        >>> RandomState().state_key
        'RandomState'
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of all ranks to the checkpoint."""
        states = {"cpu": torch.get_rng_state()}
        if pl_module.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(pl_module.device)
        generator = _loader_generator(trainer)
        if generator is not None:
            states["loader"] = generator.get_state()
        checkpoint["random_state"] = {
            name: _of_all_ranks(state, trainer) for name, state in states.items()
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the states until training starts."""
        self._waiting = checkpoint.get("random_state")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the states before the first resumed batch is loaded."""
        waiting = self._waiting
        self._waiting = None
        if waiting is None or len(waiting["cpu"]) != trainer.world_size:
            return

        # Copies: torch reads a state from the start of its storage, so a row would be misread.
        own = {name: states[trainer.global_rank].cpu().clone() for name, states in waiting.items()}
        torch.set_rng_state(own["cpu"])
        if "cuda" in own and pl_module.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], pl_module.device)
        generator = _loader_generator(trainer)
        if "loader" in own and generator is not None:
            generator.set_state(own["loader"])


def _loader_generator(trainer: pl.Trainer) -> torch.Generator | None:
    """Return the generator from which the training loader seeds its workers."""
    return getattr(trainer.train_dataloader, "generator", None)


def _of_all_ranks(state: Tensor, trainer: pl.Trainer) -> Tensor:
    # Not strategy.all_gather, which calls a function that torch has deprecated.
    if trainer.world_size == 1:
        return state[None]
    own = state.to(trainer.strategy.root_device)
    gathered = [torch.empty_like(own) for _ in range(trainer.world_size)]
    torch.distributed.all_gather(gathered, own)
    return torch.stack(gathered).cpu()
