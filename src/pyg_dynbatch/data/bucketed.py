"""Collate batches whose schedules carry a padded form, for layers that run by CUDA graphs."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch_geometric.data import Data

from pyg_dynbatch.core.buckets import LevelBuckets
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.data.collate import Collater


class BucketedCollater:
    """Merges examples as :class:`Collater` does, and pads the schedule of the batch.

    It goes to ``torch.utils.data.DataLoader(dataset, collate_fn=...)``.

    Padding costs the loader's worker a fraction of a millisecond, and the model nothing: the
    padded form lies in the one tensor of the schedule and is moved with it. Batches that no shape
    holds have an ordinary schedule.

    Args:
        buckets: The shapes, such as ``LevelBuckets.fit`` of the schedules of an epoch.
        follow_batch: As in :class:`Collater`.
        exclude_keys: As in :class:`Collater`.
        arity: As in :class:`Collater`.
        direction: ``"bottom_up"`` or ``"top_down"``.

    Raises:
        ValueError: If the buckets are for another arity or direction.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.core.padding import padded_form
        >>> from pyg_dynbatch.data import DynTreeData
        >>> trees = [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 6
        >>> sample = [Collater(arity=2)(trees[:k]).schedule for k in (2, 4)]
        >>> collate = BucketedCollater(LevelBuckets.fit(sample, margin=0.0), arity=2)
        >>> loader = torch.utils.data.DataLoader(trees, 3, collate_fn=collate)
        >>> [padded_form(batch.schedule).schedule.num_nodes for batch in loader]
        [12, 12]
    """

    def __init__(
        self,
        buckets: LevelBuckets,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
    ) -> None:
        self.collate = Collater(None, follow_batch, exclude_keys, arity=arity, direction=direction)
        wanted, first = (arity, direction), buckets.shapes[0]
        if wanted != (first.arity, first.direction):
            raise ValueError(
                mismatch(
                    "BucketedCollater: the buckets are for other schedules",
                    expected="arity {}, {}".format(*wanted),
                    got=f"arity {first.arity}, {first.direction}",
                    mend="LevelBuckets.fit of schedules made with the same arity and direction",
                )
            )
        self.buckets = buckets

    def __call__(self, batch: Sequence[Any]) -> Any:
        """Merges a list of examples, see :class:`Collater`, and pads."""
        merged = self.collate(batch)
        self._pad(merged)
        return merged

    def _pad(self, merged: Any) -> None:
        if isinstance(merged, Data):
            schedule = getattr(merged, "schedule", None)
            if isinstance(schedule, Schedule):
                merged.schedule = self.buckets.pad(schedule)
        elif isinstance(merged, Mapping):
            self._pad(list(merged.values()))
        elif isinstance(merged, list | tuple):
            for each in merged:
                self._pad(each)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buckets}, {self.collate})"
