"""Merge molecules into one batch and attach the pairs of atoms that the model shall see."""

from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pair_table import PairTable
from pyg_dynbatch.core.pairs import Pairs
from pyg_dynbatch.data.collate import PlanningCollater
from pyg_dynbatch.data.molecule import MoleculeData
from pyg_dynbatch.data.molecule_columns import MoleculeColumns


class MoleculeCollater(PlanningCollater):
    """Merges molecules as PyG does and attaches ``pairs``, the plan of their atom pairs.

    All pairs of a molecule are stored; which of them the model sees is chosen here, by their
    codes, so that one file on disk serves every choice.

    Args:
        pair_table: What the codes mean; of the featurizer that made the molecules.
        pairs: ``"all"``; ``"connected"``: within a fragment; ``"bonds"``; or a number from 1 to
            7: at most so many bonds apart.
        self_pairs: Whether each atom is paired with itself too.
        follow_batch: Fields that get a vector of molecule numbers, as in PyG.
        exclude_keys: Fields to leave out, as in PyG.

    Raises:
        ValueError: If there is no such set of pairs; on calling, if there is no molecule, if the
            molecules differ in their fields, or if a molecule has a wrong number of pairs or a
            code outside the table.

    Example:
        >>> from pyg_dynbatch.data.molecule import MoleculeData
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> batch = MoleculeCollater(table, self_pairs=False)([oxygen, oxygen])
        >>> batch.pairs.first.tolist(), batch.pairs.second.tolist(), batch.num_graphs
        ([0, 2], [1, 3], 2)
    """

    def __init__(
        self,
        pair_table: PairTable,
        pairs: str | int = "all",
        self_pairs: bool = True,
        *,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(None, follow_batch, exclude_keys, needed="pair_code")
        self.pair_table = pair_table
        self.pairs = pairs
        self.self_pairs = self_pairs
        self._kept = pair_table.kept(pairs, self_pairs)

    def _merge(self, examples: Sequence[Any], excluded: set[str]) -> Batch | None:
        if isinstance(examples, MoleculeColumns):
            return examples.merged(excluded)
        if not isinstance(examples[0], MoleculeData):
            return None
        columns = MoleculeColumns.of(examples, {*excluded, "pairs"})
        return None if columns is None else columns.merged()

    def _attach(self, merged: Batch, quick: bool) -> None:
        sizes = merged.ptr.diff()
        self._check_codes(merged, sizes)
        merged.pairs = Pairs.from_codes(merged.pair_code, sizes, self._kept)

    def _check_codes(self, merged: Batch, sizes: torch.Tensor) -> None:
        wanted, found = sizes * (sizes + 1) // 2, merged._slice_dict["pair_code"].diff()
        if not torch.equal(wanted, found):
            number = int((wanted != found).nonzero()[0])
            raise ValueError(
                mismatch(
                    "MoleculeCollater: a molecule has a wrong number of pairs",
                    expected=f"{int(wanted[number])} codes for {int(sizes[number])} atoms, each "
                    "with itself included",
                    got=int(found[number]),
                    where=f"molecule {number} of the batch",
                )
            )
        code = merged.pair_code
        if code.numel() and int(code.max()) >= len(self.pair_table):
            number = int(
                torch.bucketize(code.argmax(), merged._slice_dict["pair_code"], right=True)
            )
            raise ValueError(
                mismatch(
                    "MoleculeCollater: a code is not in the pair table",
                    expected=f"codes from 0 to {len(self.pair_table) - 1}",
                    got=int(code.max()),
                    where=f"molecule {number - 1} of the batch",
                    mend="the table of the featurizer that made the molecules",
                )
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pairs={self.pairs!r}, self_pairs={self.self_pairs})"
