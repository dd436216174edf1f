"""Molecules as PyG ``Data``, collated with the plan of their atom pairs."""

from collections.abc import Sequence
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, UInt8
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_undirected

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.structure import array_of, checksum
from pyg_dynbatch.loading import PlanningCollater, PlanningLoader, allow_batches, slices_of
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.nn.pairs import Pairs

_NEVER_ROWS = ("pair_code", "descriptor", "y")


class MoleculeArrays(NamedTuple):
    """The fields of a molecule without ``Data``, which takes a tenth of the time of featurizing."""

    x: Float32[np.ndarray, "atom feature"]
    pair_code: UInt8[np.ndarray, " pair"]
    descriptor: Float32[np.ndarray, " descriptor"] | None = None
    smiles: str | None = None
    row: int | None = None
    y: Sequence[float | None] = ()

    def data(self) -> "MoleculeData":
        """Return the molecule."""
        y = torch.from_numpy(np.array([self.y], dtype=np.float64))
        return MoleculeData(
            torch.from_numpy(self.x),
            torch.from_numpy(self.pair_code),
            y if self.y else None,
            smiles=self.smiles,
            row=self.row,
            descriptor=None if self.descriptor is None else torch.from_numpy(self.descriptor)[None],
        )


class MoleculeData(Data):
    """One molecule: features of its atoms, a code for every pair of them, and its targets.

    Pairs are unordered and include each atom with itself; their codes, rows of a pair table, form
    the upper triangle row by row, (0, 0), (0, 1), …, (0, N-1), (1, 1), …. All pairs are stored;
    the collater chooses which of them are used.

    ============== ================== ======== ============================= ============
    field          shape              dtype    meaning                       collated by
    ============== ================== ======== ============================= ============
    ``x``          [atom, feature]    float32  features of the atoms         dim 0
    ``pair_code``  [N (N + 1) / 2]    uint8    row of the pair table         dim 0
    ``descriptor`` [1, descriptor],   float32  descriptors of the whole      dim 0
                   optional                    molecule, NaN where unknown
    ``y``          [1, task],         float64, targets, NaN where missing    dim 0
                   optional           float32
    ``smiles``     str, optional      str      as it was given               list
    ``row``        int, optional      int      number of the record in its   [molecule]
                                               source, from 0
    ``num_nodes``  int                int      number of atoms, may be 0     sum
    ============== ================== ======== ============================= ============

    Args:
        x: Features of the atoms.
        pair_code: Code of every pair.
        y: Targets.
        smiles: The SMILES of the molecule, as given.
        row: Number of the record in its source.
        num_nodes: Number of atoms; by default that of `x` or `pair_code`.
        descriptor: Descriptors of the whole molecule.
        **kwargs: Further fields. None is not stored; all molecules of a data set have equal fields.

    Example:
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> oxygen.num_nodes
        2
    """

    # No argument is required: PyG calls the class without any when it splits a batch.
    def __init__(
        self,
        x: Tensor | None = None,
        pair_code: Tensor | None = None,
        y: Tensor | None = None,
        smiles: str | None = None,
        row: int | None = None,
        num_nodes: int | None = None,
        descriptor: Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if num_nodes is None and x is not None:
            num_nodes = x.size(0)
        elif num_nodes is None and pair_code is not None:
            num_nodes = atoms_of_pairs(pair_code.numel())
        fields = {
            "x": x,
            "pair_code": pair_code,
            "descriptor": descriptor,
            "y": y,
            "smiles": smiles,
            "row": row,
            "num_nodes": num_nodes,
        }
        stored = {key: value for key, value in fields.items() if value is not None}
        self.stores[0]._mapping.update(stored)  # by PyG's own way a microsecond per field

    def is_node_attr(self, key: str) -> bool:
        """Return whether a field has one row per atom."""
        # PyG guesses by length, and a molecule of one atom has one pair and one row of targets.
        return key == "x" or (key not in _NEVER_ROWS and super().is_node_attr(key))

    def is_edge_attr(self, key: str) -> bool:
        """Return whether a field has one row per bond and direction."""
        return key not in ("x", *_NEVER_ROWS) and super().is_edge_attr(key)

    def with_bonds(self, table: PairTable) -> "MoleculeData":
        """Return a copy with ``edge_index`` and ``edge_attr``: the bonds, for layers of PyG.

        Every bond is there in both directions, with its row of the table.

        Args:
            table: What the codes mean.

        Raises:
            IndexError: If a code is not in the table.

        Example:
            >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
            >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
            >>> with_bonds = oxygen.with_bonds(table)
            >>> with_bonds.edge_index.tolist(), with_bonds.edge_attr.tolist()
            ([[0, 1], [1, 0]], [[1.0], [1.0]])
        """
        codes = self.pair_code.long()
        is_bond = table.distance.to(codes.device)[codes] == 1
        pair_index = torch.triu_indices(self.num_nodes, self.num_nodes, device=codes.device)
        copied = self.clone()
        features = table.features.to(codes.device)[codes[is_bond]]
        copied.edge_index, copied.edge_attr = to_undirected(
            pair_index[:, is_bond], features, num_nodes=self.num_nodes
        )
        return copied


def atoms_of_pairs(num_pairs: int) -> int:
    """Return the number of atoms that have this many unordered pairs, N (N + 1) / 2."""
    num_atoms = (isqrt(8 * num_pairs + 1) - 1) // 2
    if num_atoms * (num_atoms + 1) // 2 != num_pairs:
        raise mismatch(
            ValueError,
            "pair_code: the length matches no number of atoms",
            "N (N + 1) / 2 pairs of N atoms: 0, 1, 3, 6, 10, …",
            num_pairs,
            hint="store all pairs, each atom with itself included",
        )
    return num_atoms


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([MoleculeData])


allow_batches(MoleculeData)


class MoleculeCollater(PlanningCollater):
    """Merges molecules as PyG does, and attaches ``pairs``, the plan of their atom pairs.

    Args:
        pair_table: What the codes mean: the table of the featurizer that made the molecules.
        pair_set: Which pairs are used: ``"all"``, ``"connected"`` (within a fragment), ``"bonds"``,
            or the largest number of bonds between two atoms, 1 to 7.
        self_pairs: Whether each atom is also paired with itself.
        follow_batch: Fields that get a vector of molecule numbers, as in PyG.
        exclude_keys: Fields to omit, as in PyG.

    Raises:
        ValueError: If the set of pairs is unknown; on calling, if the list is empty, the
            molecules differ in their fields, or a molecule has a wrong number of pairs or a code
            outside the table.

    Example:
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> batch = MoleculeCollater(table, self_pairs=False)([oxygen, oxygen])
        >>> batch.pairs.first.tolist(), batch.pairs.second.tolist(), batch.num_graphs
        ([0, 2], [1, 3], 2)
    """

    needed = "pair_code"

    def __init__(
        self,
        pair_table: PairTable,
        pair_set: str | int = "all",
        self_pairs: bool = True,
        *,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(None, follow_batch, exclude_keys)
        if not isinstance(pair_table, PairTable):
            problem = "MoleculeCollater: pair_table is of another class"
            hint = "the pair_table of a data set or featurizer"
            raise mismatch(TypeError, problem, "a PairTable", type(pair_table).__name__, hint=hint)
        self.pair_table = pair_table
        self.pair_set = pair_set
        self.self_pairs = self_pairs
        self._kept = pair_table.kept(pair_set, self_pairs)

    def _attach(self, merged: Batch) -> None:
        fields = merged.stores[0]
        atoms = np.diff(array_of(fields["ptr"]))
        pairs_found = np.diff(array_of(slices_of(merged)["pair_code"]))
        pairs_expected = atoms * (atoms + 1) // 2
        if (pairs_expected != pairs_found).any():
            molecule = int(np.argmax(pairs_expected != pairs_found))
            raise mismatch(
                ValueError,
                "MoleculeCollater: a molecule has a wrong number of pairs",
                f"{pairs_expected[molecule]} codes for {atoms[molecule]} atoms, with self pairs",
                int(pairs_found[molecule]),
                where=f"molecule {molecule} of the batch",
            )
        pairs = Pairs.from_codes(fields["pair_code"], torch.from_numpy(atoms), self._kept)
        pairs.checksum = checksum(fields["pair_code"])
        fields._mapping["pairs"] = pairs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pair_set={self.pair_set!r}, self_pairs={self.self_pairs})"


class MoleculeLoader(PlanningLoader):
    """Loads mini-batches whose ``pairs`` were attached in the worker process.

    The cost of a weave layer depends on the number of pairs, which a sampler can limit::

        order = RandomSampler(dataset)
        sampler = NodeBudgetBatchSampler(order, pair_counts(dataset), max_nodes=20_000)
        MoleculeLoader(dataset, dataset.pair_table, batch_sampler=sampler)

    Args:
        dataset: Data set or list of ``MoleculeData``.
        pair_table: What the pair codes mean.
        batch_size: Molecules per batch; omitted with ``batch_sampler``. Pass it by name inside a
            Lightning hook: Lightning cannot rebuild a loader that has it by position.
        shuffle: Whether to shuffle, differently in every pass, as torch's ``DataLoader`` does.
        pair_set: As in :class:`MoleculeCollater`.
        self_pairs: As in :class:`MoleculeCollater`.
        follow_batch: Fields that get a vector of molecule numbers, as in PyG.
        exclude_keys: Fields to omit, as in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``.

    Raises:
        TypeError: If ``collate_fn`` is not a :class:`MoleculeCollater`, whose options then hold.
        ValueError: If the set of pairs is unknown, or the sampler belongs to a different data set.

    Example:
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> loader = MoleculeLoader([oxygen] * 3, table, batch_size=2)
        >>> [batch.pairs.num_pairs for batch in loader]
        [6, 3]
    """

    # Lightning rebuilds loaders from attributes of the same names: every option is kept.
    def __init__(
        self,
        dataset: Any,
        pair_table: PairTable,
        batch_size: int | None = 1,
        shuffle: bool | None = False,
        *,
        pair_set: str | int = "all",
        self_pairs: bool = True,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.pair_table = pair_table
        self.pair_set = pair_set
        self.self_pairs = self_pairs
        collater = MoleculeCollater(
            pair_table, pair_set, self_pairs, follow_batch=follow_batch, exclude_keys=exclude_keys
        )
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            collater,
            follow_batch=follow_batch,
            exclude_keys=exclude_keys,
            **kwargs,
        )
