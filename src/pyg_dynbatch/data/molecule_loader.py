"""Load batches of molecules that carry the plan of their atom pairs."""

from collections.abc import Sequence
from typing import Any

from pyg_dynbatch.core.pair_table import PairTable
from pyg_dynbatch.data.molecule_collate import MoleculeCollater
from pyg_dynbatch.data.resumable import ResumableLoader


class MoleculeLoader(ResumableLoader):
    """Loads mini-batches whose ``pairs`` were attached in the worker process.

    Shuffling by seed and epoch, going on in the middle of an epoch, and batch samplers are those
    of ``DataLoader``. Batches bounded by the number of pairs, which is what the cost of a weave
    layer goes with::

        sampler = NodeBudgetBatchSampler(None, pair_counts(dataset), 20_000, oversize="alone")
        MoleculeLoader(dataset, dataset.pair_table, batch_sampler=sampler)

    Args:
        dataset: Data set or list of ``MoleculeData``.
        pair_table: What the pair codes mean.
        batch_size: Molecules a batch; left out with ``batch_sampler``. Give it by name inside a
            Lightning hook: Lightning cannot build any loader again that has it by position.
        shuffle: Whether to shuffle, differently in every epoch.
        pairs: ``"all"``, ``"connected"``, ``"bonds"``, or the largest number of bonds.
        self_pairs: Whether each atom is paired with itself too.
        seed: Seed of the shuffle; None takes torch's initial seed (``seed_everything``).
        exclude_keys: Fields to leave out, as in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``, and ``follow_batch`` as in PyG.

    Raises:
        TypeError: If ``collate_fn`` is given, which PyG would drop without a word.
        ValueError: If there is no such set of pairs, or the sizes of a
            ``NodeBudgetBatchSampler`` belong to another data set.

    Example:
        >>> import torch
        >>> from pyg_dynbatch.data.molecule import MoleculeData
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> loader = MoleculeLoader([oxygen] * 3, table, batch_size=2)
        >>> [batch.pairs.num_pairs for batch in loader]
        [6, 3]
    """

    # Lightning builds loaders again from attributes of the same names: every option is kept.
    def __init__(
        self,
        dataset: Any,
        pair_table: PairTable,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        *,
        pairs: str | int = "all",
        self_pairs: bool = True,
        seed: int | None = None,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.pair_table = pair_table
        self.pairs = pairs
        self.self_pairs = self_pairs
        follow_batch = kwargs.pop("follow_batch", None)
        collater = MoleculeCollater(
            pair_table, pairs, self_pairs, follow_batch=follow_batch, exclude_keys=exclude_keys
        )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            collater,
            seed=seed,
            follow_batch=follow_batch,
            exclude_keys=exclude_keys,
            **kwargs,
        )
