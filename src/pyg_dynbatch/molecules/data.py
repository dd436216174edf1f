"""Describe molecules as PyG ``Data``, and collate them with the plan of their atom pairs."""

from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.errors import described, mismatch
from pyg_dynbatch.loading import (
    PlanningCollater,
    RaggedColumns,
    ResumableLoader,
    Segments,
    allow_batches,
    slices_of,
)
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.nn.pairs import Pairs

_NEVER_ROWS = ("pair_code", "descriptor", "y", "y_mask")


class MoleculeData(Data):
    """Stores one molecule: its atoms, a code for every pair of them, and what is known of it.

    Pairs are unordered and include each atom with itself. Their codes form the upper triangle
    row by row, (0, 0), (0, 1), …, (0, N-1), (1, 1), …; what a code means stands in a pair table,
    once for all molecules. All pairs are stored always: which of them are used is chosen when
    molecules are put into a batch. The order of the atoms is that of the input.

    ============== ================== ======== ============================= ============
    field          shape              dtype    meaning                       collated by
    ============== ================== ======== ============================= ============
    ``x``          [atom, feature]    float32  features of the atoms         dim 0
    ``pair_code``  [N (N + 1) / 2]    uint8    row of the pair table         dim 0
    ``descriptor`` [1, descriptor],   float32  numbers of the whole          dim 0
                   optional                    molecule, NaN where unknown
    ``y``          [1, task],         float32  targets, NaN where missing    dim 0
                   optional
    ``y_mask``     [1, task], with    bool     where a target is known       dim 0
                   ``y``
    ``smiles``     str, optional      str      as it was given               list
    ``row``        int, optional      int      number of the record in its   [molecule]
                                               source, from 0
    ``num_nodes``  int                int      number of atoms, may be 0     sum
    ============== ================== ======== ============================= ============

    Fields that are None are not stored at all, and all molecules of one data set must hold the
    same fields.

    Args:
        x: Features of the atoms.
        pair_code: Code of every pair.
        y: Targets.
        y_mask: Where a target is known; found from the NaNs of `y` when left out.
        smiles: The text the molecule was made from.
        row: Number of the record in its source.
        num_nodes: Number of atoms; read off `x` or `pair_code` when left out.
        descriptor: Descriptors of the whole molecule.
        **kwargs: Further fields.

    Example:
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> oxygen.num_nodes, oxygen.validate() is oxygen
        (2, True)
    """

    # No argument is required: PyG calls the class without any when it takes a batch apart.
    def __init__(
        self,
        x: Tensor | None = None,
        pair_code: Tensor | None = None,
        y: Tensor | None = None,
        y_mask: Tensor | None = None,
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
        if y is not None and y_mask is None:
            y_mask = ~torch.isnan(y)
        given = {
            "x": x,
            "pair_code": pair_code,
            "descriptor": descriptor,
            "y": y,
            "y_mask": y_mask,
            "smiles": smiles,
            "row": row,
            "num_nodes": num_nodes,
        }
        for key, value in given.items():
            if value is not None:
                setattr(self, key, value)

    def is_node_attr(self, key: str) -> bool:
        """Says whether a field has one row an atom."""
        # PyG guesses by length, and a molecule of one atom has one pair and one row of targets.
        return key == "x" or (key not in _NEVER_ROWS and super().is_node_attr(key))

    def is_edge_attr(self, key: str) -> bool:
        """Says whether a field has one row a bond and direction."""
        return key not in ("x", *_NEVER_ROWS) and super().is_edge_attr(key)

    def with_bonds(self, table: PairTable) -> "MoleculeData":
        """Gives a copy with ``edge_index``, so that any layer of PyG can be used on it.

        Args:
            table: What the codes mean.

        Returns:
            The copy, every bond in both directions.

        Raises:
            ValueError: If a code is not in the table.

        Example:
            >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
            >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
            >>> oxygen.with_bonds(table).edge_index
            tensor([[0, 1],
                    [1, 0]])
        """
        copied = self.clone()
        copied.edge_index = bonds_of(self.pair_code, table)
        return copied

    def validate(self, *, num_codes: int | None = None, where: str = "") -> "MoleculeData":
        """Checks every field and says what is wrong.

        Args:
            num_codes: Number of rows of the pair table; None for any.
            where: File and line, or number of the molecule, to be named in a message.

        Returns:
            The molecule itself.

        Raises:
            ValueError: At the first fault: a field missing or of the wrong form, a number of
                pairs that does not belong to the number of atoms, a feature that is not finite,
                a code outside the table, an infinite descriptor, a mask that is not where ``y``
                is known.

        Example:
            >>> MoleculeData(torch.ones(2, 3), torch.zeros(2, dtype=torch.uint8)).validate()
            Traceback (most recent call last):
            ...
            ValueError: MoleculeData: pair_code has the wrong form.
              expected: uint8 [3], one for every pair of 2 atoms, each with itself included
              got:      uint8 tensor [2]
        """
        _check_atoms(self, where)
        _check_pairs(self, num_codes, where)
        _check_descriptor(self, where)
        _check_targets(self, where)
        return self


def pairs_of_atoms(num_atoms: int) -> int:
    """Counts the unordered pairs of atoms, each atom with itself included."""
    return num_atoms * (num_atoms + 1) // 2


def atoms_of_pairs(num_pairs: int) -> int:
    """Finds the number of atoms that have so many unordered pairs."""
    num_atoms = (isqrt(8 * num_pairs + 1) - 1) // 2
    if pairs_of_atoms(num_atoms) != num_pairs:
        raise mismatch(
            ValueError,
            "pair_code: the length belongs to no number of atoms",
            "N (N + 1) / 2 pairs of N atoms: 0, 1, 3, 6, 10, …",
            num_pairs,
            hint="store all pairs, each atom with itself included",
        )
    return num_atoms


def bonds_of(pair_code: UInt8[Tensor, " pair"], table: PairTable) -> Int[Tensor, "two bond"]:
    """Finds the bonds among the pairs: those whose graph distance is one.

    Args:
        pair_code: Codes of all pairs of one molecule.
        table: What the codes mean.

    Returns:
        Every bond in both directions, sorted by the first atom and then by the second.

    Raises:
        ValueError: If a code is not in the table, or the length is no number of pairs.

    Example:
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> bonds_of(torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.uint8), table).tolist()
        [[0, 1, 1, 2], [1, 0, 2, 1]]
    """
    num_atoms = atoms_of_pairs(pair_code.numel())
    codes = pair_code.cpu().numpy()
    distance = table.distance.cpu().numpy()
    if codes.size and int(codes.max()) >= len(distance):
        raise mismatch(
            ValueError,
            "bonds_of: a code is not in the table",
            f"codes from 0 to {len(distance) - 1}",
            int(codes.max()),
            hint="the table of the featurizer that made the molecule",
        )
    first, second = np.triu_indices(num_atoms)
    bonded = distance[codes] == 1
    first, second = first[bonded], second[bonded]
    both = np.stack([np.concatenate([first, second]), np.concatenate([second, first])])
    order = np.lexsort((both[1], both[0]))
    return torch.from_numpy(both[:, order].astype(np.int64))


def _check_atoms(data: MoleculeData, where: str) -> None:
    x, atoms = data.get("x"), data.get("num_nodes")
    if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype != torch.float32:
        raise _misformed("x", "float32 [atom, feature]", x, where)
    if atoms != x.size(0):
        raise _misformed("num_nodes", f"{x.size(0)}, the rows of x", atoms, where)
    if not bool(torch.isfinite(x).all()):
        atom, feature = (int(i) for i in (~torch.isfinite(x)).nonzero()[0])
        raise mismatch(
            ValueError,
            "MoleculeData: a feature is not finite",
            "finite numbers",
            f"{float(x[atom, feature])} at atom {atom}, feature {feature}",
            where=where,
        )


def _check_pairs(data: MoleculeData, num_codes: int | None, where: str) -> None:
    code, atoms = data.get("pair_code"), data.x.size(0)
    wanted = pairs_of_atoms(atoms)
    fits = isinstance(code, Tensor) and code.dtype == torch.uint8 and code.shape == (wanted,)
    if not fits:
        form = f"uint8 [{wanted}], one for every pair of {atoms} atoms, each with itself included"
        raise _misformed("pair_code", form, code, where)
    if num_codes is not None and wanted and int(code.max()) >= num_codes:
        raise mismatch(
            ValueError,
            "MoleculeData: a code is not in the pair table",
            f"codes from 0 to {num_codes - 1}",
            int(code.max()),
            where=where,
        )


def _check_descriptor(data: MoleculeData, where: str) -> None:
    row = data.get("descriptor")
    if row is None:
        return
    fits = isinstance(row, Tensor) and row.dtype == torch.float32 and row.dim() == 2
    if not fits or row.size(0) != 1:
        raise _misformed("descriptor", "float32 [1, descriptor]", row, where)
    if bool(torch.isinf(row).any()):
        number = int(torch.isinf(row).nonzero()[0, 1])
        raise mismatch(
            ValueError,
            "MoleculeData: a descriptor is infinite",
            "finite numbers, or NaN where unknown",
            f"{float(row[0, number])} for descriptor {number}",
            where=where,
        )


def _check_targets(data: MoleculeData, where: str) -> None:
    y, mask = data.get("y"), data.get("y_mask")
    if y is None and mask is None:
        return
    if not isinstance(y, Tensor) or y.dtype != torch.float32 or y.dim() != 2 or y.size(0) != 1:
        raise _misformed("y", "float32 [1, task]", y, where)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != y.shape:
        raise _misformed("y_mask", f"bool {list(y.shape)}, the shape of y", mask, where)
    if bool((mask & ~torch.isfinite(y)).any()):
        task = int((mask & ~torch.isfinite(y)).nonzero()[0, 1])
        raise mismatch(
            ValueError,
            "MoleculeData: a target that counts as known is not finite",
            "a finite number, or False in y_mask",
            f"{float(y[0, task])} for task {task}",
            where=where,
        )


def _misformed(key: str, expected: str, value: Any, where: str) -> ValueError:
    return mismatch(
        ValueError,
        f"MoleculeData: {key} has the wrong form",
        expected,
        f"no {key}" if value is None else described(value),
        where=where,
    )


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([MoleculeData])


class MoleculeColumns(RaggedColumns):
    """Hold molecules as one long column per field; ``columns[rows]`` takes several.

    A packed data set returns the molecules of a batch in this form, and the collater makes the
    batch of it without ever building one object per molecule. To everything else it is a list of
    ``MoleculeData``.

    Args:
        num_atoms: Number of atoms of each molecule.
        fields: The columns: tensors, or a list of strings for ``smiles``.
        segments: Where the rows of each molecule are; computed where left out.

    Example:
        >>> code = torch.tensor([0, 1, 0, 0], dtype=torch.uint8)
        >>> pair = MoleculeColumns([2, 1], {"x": torch.ones(3, 4), "pair_code": code})
        >>> len(pair), pair[0].pair_code.tolist(), pair.merged().ptr.tolist()
        (2, [0, 1, 0], [0, 2, 3])
    """

    kind = MoleculeData
    named = frozenset({"x", "pair_code", "descriptor", "y", "y_mask", "smiles", "row"})
    numbers = frozenset({"row"})

    def __init__(
        self,
        num_atoms: Sequence[int] | Segments,
        fields: Mapping[str, Any],
        segments: Mapping[str, Segments] | None = None,
    ) -> None:
        nodes = num_atoms if isinstance(num_atoms, Segments) else Segments(num_atoms)
        if segments is None:
            pairs = Segments(nodes.sizes * (nodes.sizes + 1) // 2)
            once = Segments(np.ones_like(nodes.sizes))
            segments = dict.fromkeys(fields, once) | {"x": nodes, "pair_code": pairs}
        super().__init__(nodes, fields, segments)

    @property
    def num_atoms(self) -> list[int]:
        """Number of atoms of each molecule."""
        return self.nodes.sizes.tolist()


allow_batches(MoleculeData)


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
        >>> from pyg_dynbatch.molecules.data import MoleculeData
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> batch = MoleculeCollater(table, self_pairs=False)([oxygen, oxygen])
        >>> batch.pairs.first.tolist(), batch.pairs.second.tolist(), batch.num_graphs
        ([0, 2], [1, 3], 2)
    """

    columns = MoleculeColumns
    needed = "pair_code"

    def __init__(
        self,
        pair_table: PairTable,
        pairs: str | int = "all",
        self_pairs: bool = True,
        *,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(None, follow_batch, exclude_keys)
        self.pair_table = pair_table
        self.pairs = pairs
        self.self_pairs = self_pairs
        self._kept = pair_table.kept(pairs, self_pairs)

    def _attach(self, merged: Batch, quick: bool) -> None:
        sizes = merged.ptr.diff()
        self._check_codes(merged, sizes)
        merged.pairs = Pairs.from_codes(merged.pair_code, sizes, self._kept)

    def _check_codes(self, merged: Batch, sizes: torch.Tensor) -> None:
        starts = slices_of(merged)["pair_code"]
        wanted, found = sizes * (sizes + 1) // 2, starts.diff()
        if not torch.equal(wanted, found):
            number = int((wanted != found).nonzero()[0])
            raise mismatch(
                ValueError,
                "MoleculeCollater: a molecule has a wrong number of pairs",
                f"{int(wanted[number])} codes for {int(sizes[number])} atoms, each "
                "with itself included",
                int(found[number]),
                where=f"molecule {number} of the batch",
            )
        code = merged.pair_code
        if code.numel() and int(code.max()) >= len(self.pair_table):
            number = int(torch.bucketize(code.argmax(), starts, right=True))
            raise mismatch(
                ValueError,
                "MoleculeCollater: a code is not in the pair table",
                f"codes from 0 to {len(self.pair_table) - 1}",
                int(code.max()),
                where=f"molecule {number - 1} of the batch",
                hint="the table of the featurizer that made the molecules",
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pairs={self.pairs!r}, self_pairs={self.self_pairs})"


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
        >>> from pyg_dynbatch.molecules.data import MoleculeData
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
