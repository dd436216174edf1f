"""Load batches that carry their schedule, and know where in the epoch they are."""

from collections.abc import Sequence
from typing import Any

from pyg_dynbatch.data.collate import Collater
from pyg_dynbatch.data.resumable import ResumableLoader


class DataLoader(ResumableLoader):
    """Loads mini-batches whose schedule was attached in the worker process.

    It is PyG's loader with three additions: the ``Collater`` of this package, a shuffle that
    depends on ``seed`` and the epoch alone, and ``state_dict``/``load_state_dict``, which
    Lightning keeps in its checkpoints, so that a run stopped in the middle of an epoch goes on
    with the batch that would have come next.

    Args:
        dataset: Data set or list of ``Data``.
        batch_size: Examples a batch; left out with ``batch_sampler``. Give it by name inside a
            Lightning hook: Lightning cannot build any loader again that has it by position.
        shuffle: Whether to shuffle, differently in every epoch.
        arity: Argument places of the cell; None for any number of children.
        direction: ``"bottom_up"``, ``"top_down"`` or ``"both"``.
        seed: Seed of the shuffle; None takes torch's initial seed (``seed_everything``).
        follow_batch: As in PyG.
        exclude_keys: As in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``: ``batch_sampler``, ``num_workers``, …

    Raises:
        TypeError: If ``collate_fn`` is given, which PyG would drop without a word.
        ValueError: If the sizes of a ``NodeBudgetBatchSampler`` belong to another data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.data.tree import DynTreeData
        >>> tree = DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> [batch.schedule.num_nodes for batch in DataLoader([tree] * 5, batch_size=2)]
        [6, 6, 3]
    """

    # Lightning builds loaders again from attributes of the same names: every option is kept.
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        *,
        arity: int | None = None,
        direction: str = "bottom_up",
        seed: int | None = None,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.arity = arity
        self.direction = direction
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            Collater(dataset, follow_batch, exclude_keys, arity=arity, direction=direction),
            seed=seed,
            follow_batch=follow_batch,
            exclude_keys=exclude_keys,
            **kwargs,
        )
