"""Base of all data modules: three splits, their loaders, one seed for all ranks.

A run with a fixed number of virtual ranks can be trained on any number of ranks that divides it. It
is resumed in this order: ``Task.on_load_checkpoint`` calls ``continue_plan``, which hands the plan
of the checkpoint to the data module; ``train_dataloader`` of the data module builds the sampler and
calls ``accumulate``; in ``Task.on_train_start`` the loader and its sampler compare their plan with
that of the checkpoint and take over the position; before every batch, ``Task.on_train_batch_start``
calls ``seed_batch``.
"""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from pyg_dynbatch.core.errors import checked_count, count_or_none, mismatch
from pyg_dynbatch.samplers import NodeBudgetBatchSampler, digest_of_sizes

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")


class SplitDataModule(pl.LightningDataModule, ABC):
    """Build the loaders of three splits, with batches of a fixed number or total size of examples.

    Only the training split is shuffled. On several devices batches are assigned to ranks without
    padding, so no example is counted twice.

    Args:
        batch_size: Examples in a batch.
        budget: If given, the largest sum of :meth:`sizes` in a batch, with any number of examples;
            a larger example becomes a separate batch, with a warning.
        num_workers: Loader processes; 0 loads in the training process.
        predict_split: The split that ``predict`` runs over.
        virtual_ranks: Batches of a training step on all ranks together; each rank accumulates the
            gradients of its share, so the number of ranks can be any divisor, and change when the
            run is resumed. By default the number of ranks of the first run.
    """

    size_name: ClassVar[str] = "nodes"
    """What :meth:`sizes` counts, for logs."""

    def __init__(
        self,
        batch_size: int = 100,
        budget: int | None = None,
        num_workers: int = 0,
        predict_split: SplitName = "test",
        virtual_ranks: int | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.batch_size = checked_count(f"{name}: batch_size", batch_size)
        self.budget, self.num_workers = budget, num_workers
        self.predict_split: SplitName = predict_split
        self.virtual_ranks = count_or_none(f"{name}: virtual_ranks", virtual_ranks)
        self.resumed: Mapping[str, Any] = {}
        """Plan of the run that is continued: its ``virtual_ranks`` and ``seed``."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer, as Lightning's modules do."""
        return {**self.__dict__, "trainer": None}

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``kind`` and ``targets`` of the data, if the options contain them."""
        return {name: options[name] for name in ("kind", "targets") if name in options}

    @abstractmethod
    def dataset(self, split: SplitName) -> Any:
        """Return one split; it is loaded once."""

    @abstractmethod
    def sizes(self, split: SplitName) -> Sequence[int]:
        """Count, for every example of a split, what the budget bounds."""

    @abstractmethod
    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> Any:
        """Return a loader whose batches have what the model needs."""

    def splits_of(self, stage: str) -> tuple[SplitName, ...]:
        """List the splits that a stage of Lightning needs."""
        fixed: dict[str, tuple[SplitName, ...]] = {"fit": ("train", "val"), "validate": ("val",)}
        return {**fixed, "test": ("test",), "predict": (self.predict_split,)}[stage]

    def train_dataloader(self) -> Any:
        """Return a loader that shuffles the training split in every epoch."""
        world = 1 if self.trainer is None else self.trainer.world_size
        virtual = self.virtual_ranks or self.resumed.get("virtual_ranks", world)
        if self.budget is None and virtual == world == 1:
            seed = self._seed()
            options = {"shuffle": True, "seed": seed, **self._loader_options(seed)}
            return self.make_loader(self.dataset("train"), self.batch_size, **options)
        loader = self._budgeted("train", shuffle=True, virtual_ranks=virtual)
        if self.trainer is not None:
            sampler = loader.batch_sampler
            accumulate(self.trainer, sampler.batches_per_step, sampler.plan()["steps"])
        return loader

    def val_dataloader(self) -> Any:
        """Return a loader of the validation split, in order."""
        return self._budgeted("val")

    def test_dataloader(self) -> Any:
        """Return a loader of the test split, in order."""
        return self._budgeted("test")

    def predict_dataloader(self) -> Any:
        """Return a loader of the split to predict, in order."""
        return self._budgeted(self.predict_split)

    def _budgeted(
        self, split: SplitName, shuffle: bool = False, virtual_ranks: int | None = None
    ) -> Any:
        dataset = self.dataset(split)
        # Without a budget of sizes, one of examples: the sampler assigns batches to ranks without
        # repeating an example; Lightning's own repeats some to make the shares equal.
        sizes = [1] * len(dataset) if self.budget is None else self.sizes(split)
        budget = self.batch_size if self.budget is None else self.budget
        larger = [size for size in sizes if size > budget]
        if larger:
            rank_zero_warn(
                f"{type(self).__name__}: {len(larger):,} of {len(sizes):,} examples are larger "
                f"than the budget of {budget:,} (the largest {max(larger):,}): a batch for each"
            )
        seed = self._seed()
        options: Any = {"shuffle": shuffle, "seed": seed, "virtual_ranks": virtual_ranks}
        if shuffle and self.budget is None:
            options["weights"] = self.sizes(split)
        sampler = NodeBudgetBatchSampler(None, sizes, budget, oversize="alone", **options)
        sampler.compare_ranks()
        return self.make_loader(dataset, batch_sampler=sampler, **self._loader_options(seed))

    def state_dict(self) -> dict[str, Any]:
        """Return a hash of the training split, so that no run goes on with different data."""
        return {"train_digest": self._train_digest}

    @cached_property
    def _train_digest(self) -> str:
        digest = hashlib.sha256(digest_of_sizes(self.sizes("train")).encode())
        for part in self.contents("train"):
            digest.update(part.tobytes())
        return digest.hexdigest()[:16]

    def contents(self, split: SplitName) -> Iterable[np.ndarray]:
        """Return what a resumed run may not have changed in a split, besides its sizes."""
        return ()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise an error if training would continue with different data."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return
        own = self._train_digest
        if (noted := state_dict.get("train_digest", own)) != own:
            what = f"{type(self).__name__}: cannot resume, the training data have changed"
            got = f"{own} ({len(self.sizes('train')):,} examples)"
            hint = "the data the run was started with, in the same order"
            raise mismatch(ValueError, what, f"data with hash {noted}", got, hint=hint)

    def _seed(self) -> int:
        """Return one seed for all ranks, so that they plan the same epochs."""
        common = os.environ.get("PL_GLOBAL_SEED")
        if common is not None:
            return int(common)
        if self.resumed.get("seed") is not None:
            return int(self.resumed["seed"])
        if self.trainer is None:
            return 0
        # All ranks build their loaders in the same order, so each of them calls this.
        return int(self.trainer.strategy.broadcast(torch.initial_seed() % 2**32))

    def _loader_options(self, seed: int) -> dict[str, Any]:
        accelerator = getattr(self.trainer, "accelerator", None)
        return {
            "num_workers": self.num_workers,
            # A separate generator: seeding the workers from the global one would change the
            # numbers that dropout draws, differently in a resumed run.
            "generator": torch.Generator().manual_seed(seed),
            "persistent_workers": self.num_workers > 0,
            "pin_memory": isinstance(accelerator, CUDAAccelerator),
        }

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch without waiting for the copy, which pinned memory makes asynchronous."""
        return batch.to(device, non_blocking=True)


# Virtual ranks ------------------------------------------------------------------------------------


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
    # Of a step of the optimizer that was not finished, the gradients are lost: it is repeated.
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
