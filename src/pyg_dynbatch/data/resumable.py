"""Load batches whose order can be repeated, and know where in the epoch they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch_geometric.loader import DataLoader as PyGDataLoader

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.data.collate import PlanningCollater
from pyg_dynbatch.data.epoch_sampler import EpochSampler
from pyg_dynbatch.data.sampler import NodeBudgetBatchSampler


class ResumableLoader(PyGDataLoader):
    """Shuffles by seed and epoch alone, and goes on in the middle of an epoch.

    Args:
        dataset: Data set or list of ``Data``.
        batch_size: Examples a batch; left out with ``batch_sampler``.
        shuffle: Whether to shuffle, differently in every epoch.
        collater: Makes the batches.
        seed: Seed of the shuffle; None takes torch's initial seed (``seed_everything``).
        **kwargs: As in ``torch.utils.data.DataLoader``: ``batch_sampler``, ``num_workers``, …

    Raises:
        TypeError: If ``collate_fn`` is given, which PyG would drop without a word.
        ValueError: If the sizes of a ``NodeBudgetBatchSampler`` belong to another data set.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        shuffle: bool | None,
        collater: PlanningCollater,
        *,
        seed: int | None,
        follow_batch: Sequence[str] | None,
        exclude_keys: Sequence[str] | None,
        **kwargs: Any,
    ) -> None:
        name = type(self).__name__
        collate_fn = kwargs.pop("collate_fn", None)
        # Lightning hands the collater on when it builds a loader again.
        if collate_fn is not None and not isinstance(collate_fn, type(collater)):
            raise TypeError(
                mismatch(
                    f"{name}: collate_fn is given",
                    expected=f"no collate_fn: this loader collates with {type(collater).__name__}",
                    got=collate_fn,
                    mend="torch.utils.data.DataLoader(dataset, collate_fn=…)",
                )
            )
        _check_sizes(kwargs.get("batch_sampler"), dataset, name)
        self.seed = seed
        self.shuffle = shuffle
        self._taken = 0
        self._taken_epoch: int | None = None
        self._resume: dict[str, int | None] | None = None
        if shuffle and kwargs.get("sampler") is None and kwargs.get("batch_sampler") is None:
            kwargs["sampler"], shuffle = EpochSampler(dataset, seed), False
        super().__init__(dataset, batch_size, shuffle, follow_batch, exclude_keys, **kwargs)
        self.collate_fn = collater

    def __iter__(self) -> Iterator[Any]:
        # Nothing is fetched before the first `next`: Lightning sets the epoch after `iter`.
        epoch, start = self._epoch(), self._start()
        budget = isinstance(self.batch_sampler, NodeBudgetBatchSampler)
        if start and budget:
            self.batch_sampler.load_state_dict({"epoch": epoch, "position": start})
        self._taken, self._taken_epoch = start, epoch
        for number, batch in enumerate(super().__iter__(), start if budget else 0):
            # Other samplers begin at the front; what was taken before the stop is passed over.
            if number < start:
                continue
            self._taken = number + 1
            yield batch

    def state_dict(self) -> dict[str, int | None]:
        """Gives the epoch and the number of its batches taken so far."""
        return {"epoch": self._taken_epoch, "position": self._taken}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Makes the next pass go on where the state was taken.

        Args:
            state: What ``state_dict`` returned.
        """
        epoch, position = state["epoch"], state["position"] or 0
        if position >= len(self):
            epoch, position = None if epoch is None else epoch + 1, 0
        if epoch is not None and (source := self._epoch_source()) is not None:
            source.set_epoch(epoch)
        self._resume = {"epoch": epoch, "position": position}

    def __getstate__(self) -> dict[str, Any]:
        """Leaves worker processes behind, and copies the state of the generator.

        A generator pickles itself as a tensor that is freed before another process can read it.
        """
        generator = self.generator
        numbers = None if generator is None else generator.get_state().numpy().tobytes()
        return {**self.__dict__, "_iterator": None, "generator": numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the generator again."""
        self.__dict__.update(state)
        if state["generator"] is not None:
            numbers = torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8)
            self.generator = torch.Generator()
            self.generator.set_state(numbers)

    def _start(self) -> int:
        resume, self._resume = self._resume, None
        if resume is None or resume["epoch"] != self._epoch():
            return 0
        return resume["position"] or 0

    def _epoch(self) -> int | None:
        source = self._epoch_source()
        return None if source is None else source.epoch

    def _epoch_source(self) -> Any:
        """Finds what keeps the number of the epoch; None where the order never changes."""
        for source in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if hasattr(source, "epoch") and hasattr(source, "set_epoch"):
                return source
        return None


def _check_sizes(batch_sampler: Any, dataset: Any, name: str) -> None:
    sizes = getattr(batch_sampler, "sizes", None)
    if sizes is not None and hasattr(dataset, "__len__") and len(sizes) != len(dataset):
        raise ValueError(
            mismatch(
                f"{name}: the sizes of the batch sampler belong to another data set",
                expected=f"{len(dataset)} sizes, one an example",
                got=len(sizes),
                mend="sizes=node_counts(dataset), or pair_counts(dataset) for molecules",
            )
        )
