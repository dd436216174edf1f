"""Train for a fixed number of virtual ranks on any number of ranks that divides it.

A run is resumed in this order: ``Task.on_load_checkpoint`` calls ``continue_plan``, which hands
the plan of the checkpoint to the data module; ``train_dataloader`` of the data module builds the
sampler and calls ``accumulate``; in ``Task.on_train_start`` the loader and its sampler compare
their plan with that of the checkpoint and take over the position; before every batch,
``Task.on_train_batch_start`` calls ``seed_batch``.
"""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.samplers import NodeBudgetBatchSampler


def accumulate(trainer: pl.Trainer, batches: int, steps: int) -> None:
    """Accumulate gradients over several batches; let options of the trainer count steps."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    if batches > 1 and any(isinstance(c, GradientAccumulationScheduler) for c in callbacks):
        what = "Trainer: a GradientAccumulationScheduler would override that over virtual ranks"
        hint = "Trainer(accumulate_grad_batches=N), or one rank per virtual rank"
        raise mismatch(ValueError, what, "no such callback", f"{batches} batches", hint=hint)
    names = ("accumulate_grad_batches", "limit_train_batches", "val_check_interval")
    # Kept at the trainer: its options are those of the user in the first call only.
    given = trainer.__dict__.setdefault("options_in_steps", {n: getattr(trainer, n) for n in names})
    for name, value in given.items():
        if isinstance(value, float) and 0 < value < 1:
            # A fraction of the steps: one of the batches would depend on the number of ranks.
            value = max(1, int(steps * value))
            steps = value if name == "limit_train_batches" else steps
        setattr(trainer, name, value * batches if isinstance(value, int) else value)


def continue_plan(checkpoint: Mapping[str, Any], trainer: pl.Trainer) -> Mapping[str, Any] | None:
    """Take over the plan of a checkpoint, and count batches as this run does.

    Returns the state of the loader, if the checkpoint has one with a plan.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    states = loops.get("state_dict", {}).get("combined_loader") or [{}]
    virtual = states[0].get("virtual_ranks")
    if trainer.state.fn != TrainerFn.FITTING or virtual is None:
        return None
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None:
        data.resumed = states[0]
    # If the number of ranks does not fit, or the plan is different, the loader raises an error.
    before, now = states[0]["batches_per_step"], max(1, virtual // trainer.world_size)
    progress, state = loops["epoch_loop.batch_progress"], dict(states[0])
    # Of a step of the optimiser that was not finished, the gradients are lost: it is repeated.
    whole = checkpoint.get("pyg_dynbatch_accumulated", before)
    lost = 0 if progress["is_last_batch"] else progress["current"]["ready"] % whole
    if lost:
        state["position"] = (progress["current"]["ready"] - lost) // before
    for counts in (progress["current"], progress["total"]):
        shift = (counts["ready"] - lost) // before * now - counts["ready"]
        counts.update({name: count + shift for name, count in counts.items()})
    states[0] = state
    return state


def sampler_of(trainer: pl.Trainer) -> NodeBudgetBatchSampler | None:
    """Return the sampler of the training batches if it plans for several ranks."""
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    several = isinstance(sampler, NodeBudgetBatchSampler) and sampler.ranks().virtual > 1
    return sampler if several else None


def check_accumulation(trainer: pl.Trainer) -> None:
    """Raise an error if the trainer makes a step before all virtual ranks have had their batch."""
    sampler = sampler_of(trainer)
    each = 1 if sampler is None else sampler.batches_per_step
    found = trainer.accumulate_grad_batches
    if found % each:
        what = "Trainer: gradients are not accumulated over the virtual ranks"
        hint = f"Trainer(accumulate_grad_batches={each}), which data modules of ours set"
        raise mismatch(ValueError, what, f"a multiple of {each} batches per step", found, hint=hint)


def seed_batch(sampler: NodeBudgetBatchSampler, epoch: int, number: int) -> None:
    """Seed torch for a batch of this rank, such that the number of ranks makes no difference."""
    _, real, own = sampler.ranks()
    step, part = divmod(number, sampler.batches_per_step)
    sequence = np.random.SeedSequence([sampler.seed, epoch, step, part * real + own])
    torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))
