"""Data modules: three splits of any data set."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch_geometric.data import Data

from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch
from pyg_dynbatch.loading import PlanningLoader
from pyg_dynbatch.model import differences
from pyg_dynbatch.samplers import NodeBudgetBatchSampler, node_counts

SplitName = Literal["train", "val", "test"]


@runtime_checkable
class Examples(Protocol):
    """Examples by number, in a data set or a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> object: ...


class DataModule(pl.LightningDataModule, ABC):
    """Build the loaders of three splits, with batches of a fixed number or total size of examples.

    Only the training split is shuffled, by torch's ``DistributedSampler``: under a Trainer, a seed
    and the epoch decide its order, on one rank too, so that a run which is resumed at the end of
    an epoch goes on as if it had never stopped. The seed is that of ``seed_everything``, or else
    torch's initial one, and is kept in checkpoints. Without a Trainer, every pass draws an order.

    On several ranks, no example of the other splits is counted twice. Of the training split,
    ``DistributedSampler`` repeats a few if their number is not a multiple of the number of ranks.

    A subclass opens the splits. A data set has ``len``, examples by number, and a ``schema``, which
    says how they are collated; ``sizes`` if ``max_size`` is given.

    Args:
        batch_size: Examples in a batch.
        max_size: If given, the largest sum of the ``sizes`` in a batch (nodes of trees, pairs of
            atoms of molecules), with any number of examples; a larger example becomes a separate
            batch, with a warning.
        num_workers: Loader processes; 0 loads in the training process.
    """

    splits: tuple[SplitName, ...] = ("train", "val", "test")
    """The splits that there are. Without ``test``, nothing is tested after ``fit``."""

    def __init__(
        self, batch_size: int = 100, max_size: int | None = None, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = checked_count(f"{type(self).__name__}: batch_size", batch_size)
        self.max_size = max_size
        self.num_workers = num_workers
        self._opened: dict[str, Any] = {}
        self._order_seed: int | None = None

    @abstractmethod
    def open(self, split: SplitName) -> Any:
        """Return one split."""

    def dataset(self, split: SplitName) -> Any:
        """Return one split, opened once."""
        checked_choice(f"{type(self).__name__}: there is no such split", split, self.splits)
        if split not in self._opened:
            self._opened[split] = self.open(split)
        return self._opened[split]

    @property
    def schema(self) -> Any:
        """What a model needs to know about the data."""
        return self.dataset("train").schema

    def collater(self) -> Callable[..., Any]:
        """Return what merges examples: that of the model under a Trainer, or of the schema."""
        model = getattr(getattr(self.trainer, "lightning_module", None), "model", None)
        if model is not None and hasattr(model, "collater"):
            return model.collater()
        return self.schema.collater()

    def prepare_data(self) -> None:
        """Process the data in one process, before others open them."""
        for split in self.splits:
            self.dataset(split)

    def setup(self, stage: str) -> None:
        """Open all splits, so that faults come before training.

        Forget the seed of an earlier run; Lightning restores that of a checkpoint after this.
        """
        if stage != "fit":
            return
        self._order_seed = None
        for split in self.splits:
            if not len(self.dataset(split)):
                problem = f"{type(self).__name__}: the {split} split is empty"
                hint = "another method or other fractions of the split, if there is one"
                raise mismatch(ValueError, problem, "at least one example", hint=hint)
            self._check_schema(split)

    def _check_schema(self, split: SplitName) -> None:
        """Raise an error if a split was made in another way than the training split."""
        ours = _facts_of(self.dataset("train"))
        theirs = _facts_of(self.dataset(split))
        if ours is None or theirs is None:
            return
        for name, (own, other) in differences(ours, theirs).items():
            problem = f"{type(self).__name__}: the {split} split has a different {name} than train"
            hint = "for trees, pass vocabulary= and num_classes= of the training file"
            raise mismatch(ValueError, problem, f"{own!s:.80}", f"{other!s:.80}", hint=hint)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader that shuffles the training split, differently in every epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the validation split, in order."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the test split, in order."""
        return self._loader("test", shuffle=False)

    def _loader(self, split: SplitName, shuffle: bool) -> DataLoader[Any]:
        """Return a loader whose sampler decides the order, and the examples of this rank."""
        dataset = self.dataset(split)
        sampler = self._sampler(dataset, shuffle)
        collater = self.collater()
        options = self._loader_options()

        if self.max_size is not None:
            sizes = dataset.sizes if hasattr(dataset, "sizes") else node_counts(dataset)
            batches = NodeBudgetBatchSampler(sampler, sizes, self.max_size)
        elif shuffle:
            return PlanningLoader(
                dataset,
                batch_size=self.batch_size,
                shuffle=None,
                collater=collater,
                sampler=sampler,
                **options,
            )
        else:
            # A budget of examples instead of a batch size: no example is repeated to make the
            # shares of the ranks equal, as DistributedSampler does.
            batches = NodeBudgetBatchSampler(sampler, [1] * len(dataset), self.batch_size)

        # All by name: Lightning rebuilds loaders with other samplers (overfit_batches).
        return PlanningLoader(
            dataset, batch_size=1, shuffle=None, collater=collater, batch_sampler=batches, **options
        )

    def _sampler(self, dataset: Any, shuffle: bool) -> Sampler[int]:
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

    def _loader_options(self) -> dict[str, Any]:
        """Return what loaders of all splits have in common."""
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

    def _seed(self, trainer: pl.Trainer) -> int:
        """Return one seed for all ranks: of the checkpoint, of ``seed_everything``, or drawn."""
        if self._order_seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
            # All ranks build their loaders in the same order, so each of them calls this.
            self._order_seed = int(trainer.strategy.broadcast(own))
        return self._order_seed

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order."""
        return {"order_seed": self._order_seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the order of the run that is resumed."""
        self._order_seed = state_dict["order_seed"]

    def transfer_batch_to_device(
        self, batch: Data, device: torch.device, dataloader_idx: int
    ) -> Data:
        """Move a batch without waiting for the copy, which pinned memory makes asynchronous."""
        return batch.to(device, non_blocking=True)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer, as Lightning's modules do."""
        return {**self.__dict__, "trainer": None}


def _facts_of(dataset: object) -> Mapping[str, Any] | None:
    """Return what the schema of a data set holds; None if it does not say."""
    as_dict = getattr(getattr(dataset, "schema", None), "as_dict", None)
    return None if as_dict is None else as_dict()


class DatasetData(DataModule):
    """Splits that are given.

    Args:
        train: Data set to train on.
        val: Data set to choose the best checkpoint by.
        test: Data set to test; None for no test.
        schema: What collates the examples; None for that of the training set.
        **loading: Options of :class:`~pyg_dynbatch.lightning.DataModule`.

    Example:
        >>> from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
        >>> recipe = ListOpsRecipe(train=8, val=2, test=0)
        >>> train, val = ListOps(None, "train", recipe=recipe), ListOps(None, "val", recipe=recipe)
        >>> DatasetData(train, val, batch_size=4).schema.num_classes
        10
    """

    def __init__(
        self,
        train: Examples,
        val: Examples,
        test: Examples | None = None,
        *,
        schema: object = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self._examples = {"train": train, "val": val, "test": test}
        self._schema = schema
        if test is None:
            self.splits = ("train", "val")

    @property
    def schema(self) -> Any:
        """What a model needs to know about the data."""
        return super().schema if self._schema is None else self._schema

    def open(self, split: SplitName) -> Any:
        """Return one split."""
        return self._examples[split]
