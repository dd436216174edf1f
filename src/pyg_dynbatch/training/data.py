"""Base of all data modules: three splits, their loaders, one seed for all ranks."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from pyg_dynbatch.core.errors import checked_count
from pyg_dynbatch.samplers import NodeBudgetBatchSampler

SplitName = Literal["train", "val", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "val", "test")


class SplitDataModule(pl.LightningDataModule, ABC):
    """Build the loaders of three splits, with batches of a fixed number or total size of examples.

    Only the training split is shuffled, by torch's ``DistributedSampler``: under a Trainer, a seed
    and the epoch decide its order, on one rank too, so that a run which is resumed at the end of
    an epoch goes on as if it had never stopped. The seed is that of ``seed_everything``, or else
    torch's initial one, and is kept in checkpoints. Without a Trainer, every pass draws an order.

    On several ranks, no example of the other splits is counted twice. Of the training split,
    ``DistributedSampler`` repeats a few if their number is not a multiple of the number of ranks.

    Args:
        batch_size: Examples in a batch.
        budget: If given, the largest sum of :meth:`sizes` in a batch, with any number of examples;
            a larger example becomes a separate batch, with a warning.
        num_workers: Loader processes; 0 loads in the training process.
        predict_split: The split that ``predict`` runs over.
    """

    splits: tuple[SplitName, ...] = SPLITS
    """The splits that there are. Without ``test``, nothing is tested after ``fit``."""

    def __init__(
        self,
        batch_size: int = 100,
        budget: int | None = None,
        num_workers: int = 0,
        predict_split: SplitName = "test",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.batch_size = checked_count(f"{name}: batch_size", batch_size)
        self.budget, self.num_workers = budget, num_workers
        self.predict_split: SplitName = predict_split
        self._order_seed: int | None = None

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

    def setup(self, stage: str) -> None:
        """Forget the seed of an earlier run; Lightning restores that of a checkpoint after this."""
        if stage == "fit":
            self._order_seed = None

    def splits_of(self, stage: str) -> tuple[SplitName, ...]:
        """List the splits that a stage of Lightning needs."""
        fixed: dict[str, tuple[SplitName, ...]] = {"fit": ("train", "val"), "validate": ("val",)}
        return {**fixed, "test": ("test",), "predict": (self.predict_split,)}[stage]

    def train_dataloader(self) -> Any:
        """Return a loader that shuffles the training split, differently in every epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        """Return a loader of the validation split, in order."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> Any:
        """Return a loader of the test split, in order."""
        return self._loader("test", shuffle=False)

    def predict_dataloader(self) -> Any:
        """Return a loader of the split to predict, in order."""
        return self._loader(self.predict_split, shuffle=False)

    def _loader(self, split: SplitName, shuffle: bool) -> Any:
        dataset = self.dataset(split)
        sampler = self._sampler(dataset, shuffle)
        options = self._loader_options()
        if self.budget is not None:
            batches = self._budgeted(sampler, self.sizes(split), self.budget)
        elif shuffle:
            return self.make_loader(dataset, self.batch_size, sampler=sampler, **options)
        else:
            # A budget of examples, as Lightning's own sampler would repeat some of them to make
            # the shares of the ranks equal.
            batches = NodeBudgetBatchSampler(sampler, [1] * len(dataset), self.batch_size)
        return self.make_loader(dataset, batch_sampler=batches, **options)

    def _sampler(self, dataset: Any, shuffle: bool) -> Any:
        """Return what decides the order of a split and the share of this rank."""
        if self.trainer is None:
            return RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
        return DistributedSampler(
            dataset,
            num_replicas=self.trainer.world_size,
            rank=self.trainer.global_rank,
            shuffle=shuffle,
            seed=self._seed(self.trainer),
        )

    def _budgeted(self, sampler: Any, sizes: Sequence[int], budget: int) -> NodeBudgetBatchSampler:
        larger = [size for size in sizes if size > budget]
        if larger:
            rank_zero_warn(
                f"{type(self).__name__}: {len(larger):,} of {len(sizes):,} examples are larger "
                f"than the budget of {budget:,} (the largest {max(larger):,}): a batch for each"
            )
        return NodeBudgetBatchSampler(sampler, sizes, budget, oversize="alone")

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order."""
        return {"order_seed": self._order_seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the order of the run that is resumed."""
        self._order_seed = state_dict.get("order_seed")

    def _seed(self, trainer: pl.Trainer) -> int:
        """Return one seed for all ranks: of the checkpoint, of ``seed_everything``, or drawn."""
        if self._order_seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
            # All ranks build their loaders in the same order, so each of them calls this.
            self._order_seed = int(trainer.strategy.broadcast(own))
        return self._order_seed

    def _loader_options(self) -> dict[str, Any]:
        accelerator = getattr(self.trainer, "accelerator", None)
        generator = None
        if self.trainer is not None:
            # Seeding the workers from the global generator would change the numbers that dropout
            # draws, differently in a resumed run.
            generator = torch.Generator().manual_seed(self._seed(self.trainer))
        return {
            "num_workers": self.num_workers,
            "generator": generator,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": isinstance(accelerator, CUDAAccelerator),
        }

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch without waiting for the copy, which pinned memory makes asynchronous."""
        return batch.to(device, non_blocking=True)
