"""Molecules as PyG ``Data``, collated with the plan of their atom pairs."""

from collections.abc import Sequence
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int, UInt8
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_undirected

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.structure import array_of, checksum
from pyg_dynbatch.loading import PlanningCollater, PlanningLoader, allow_batches, slices_of
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.nn.pairs import Pairs

_NEVER_ROWS = ("pair_code", "descriptor", "y", "y_mask")


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
    ``y_mask``     [1, task], with    bool     where a target is known       dim 0
                   ``y``
    ``smiles``     str, optional      str      as it was given               list
    ``row``        int, optional      int      number of the record in its   [molecule]
                                               source, from 0
    ``num_nodes``  int                int      number of atoms, may be 0     sum
    ============== ================== ======== ============================= ============

    Args:
        x: Features of the atoms.
        pair_code: Code of every pair.
        y: Targets.
        y_mask: Where a target is known; by default where `y` is not NaN.
        smiles: The SMILES of the molecule, as given.
        row: Number of the record in its source.
        num_nodes: Number of atoms; by default that of `x` or `pair_code`.
        descriptor: Descriptors of the whole molecule.
        **kwargs: Further fields. None is not stored; all molecules of a data set have equal fields.

    Example:
        >>> oxygen = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8))
        >>> oxygen.num_nodes, oxygen.validate() is oxygen
        (2, True)
    """

    # No argument is required: PyG calls the class without any when it splits a batch.
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
        given = {"x": x, "pair_code": pair_code, "descriptor": descriptor, "y": y}
        own = {"y_mask": y_mask, "smiles": smiles, "row": row, "num_nodes": num_nodes}
        found = {key: value for key, value in (given | own).items() if value is not None}
        self.stores[0]._mapping.update(found)  # by PyG's own way a microsecond per field

    def is_node_attr(self, key: str) -> bool:
        """Return whether a field has one row per atom."""
        # PyG guesses by length, and a molecule of one atom has one pair and one row of targets.
        return key == "x" or (key not in _NEVER_ROWS and super().is_node_attr(key))

    def is_edge_attr(self, key: str) -> bool:
        """Return whether a field has one row per bond and direction."""
        return key not in ("x", *_NEVER_ROWS) and super().is_edge_attr(key)

    def with_bonds(self, table: PairTable) -> "MoleculeData":
        """Return a copy with ``edge_index``, every bond in both directions, for layers of PyG.

        Args:
            table: What the codes mean.

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
        """Check every field; return the molecule itself.

        Args:
            num_codes: Number of rows of the pair table; None for any.
            where: File and line, or number of the molecule, for messages.

        Raises:
            ValueError: If a field is missing or invalid, a feature is not finite, a code
                is outside the table, a descriptor infinite, or a target masked in is not finite.

        Example:
            >>> MoleculeData(torch.ones(2, 3), torch.zeros(2, dtype=torch.uint8)).validate()
            Traceback (most recent call last):
            ...
            ValueError: MoleculeData: pair_code is missing or invalid.
              expected: uint8 [3], one for every pair of 2 atoms, each with itself included
              got:      uint8 tensor [2]
        """
        self._check_form("x", torch.float32, (None, None), "float32 [atom, feature]", where)
        x, atoms = self.x, self.x.size(0)
        if self.get("num_nodes") != atoms:
            raise _invalid("num_nodes", f"{atoms}, the rows of x", self.get("num_nodes"), where)
        texts = ("a feature is not finite", "finite numbers")
        _check_values(*texts, ~torch.isfinite(x), x, "at atom {}, feature {}", where)
        pairs = pairs_of_atoms(atoms)
        form = f"uint8 [{pairs}], one for every pair of {atoms} atoms, each with itself included"
        self._check_form("pair_code", torch.uint8, (pairs,), form, where)
        if num_codes is not None and pairs and (code := int(self.pair_code.max())) >= num_codes:
            what = "MoleculeData: a code is not in the pair table"
            raise mismatch(ValueError, what, f"codes from 0 to {num_codes - 1}", code, where=where)
        if "descriptor" in self:
            form = "float32 [1, descriptor]"
            self._check_form("descriptor", torch.float32, (1, None), form, where)
            texts = ("a descriptor is infinite", "finite numbers, or NaN where unknown")
            row = self.descriptor
            _check_values(*texts, torch.isinf(row), row, "for descriptor {1}", where)
        if "y" in self or "y_mask" in self:
            single = getattr(self.get("y"), "dtype", None) == torch.float32
            kind = torch.float32 if single else torch.float64
            self._check_form("y", kind, (1, None), "float64 or float32 [1, task]", where)
            form = f"bool {list(self.y.shape)}, the shape of y"
            self._check_form("y_mask", torch.bool, self.y.shape, form, where)
            wrong = self.y_mask & ~torch.isfinite(self.y)
            texts = ("a known target is not finite", "a finite number, or False in y_mask")
            _check_values(*texts, wrong, self.y, "for task {1}", where)
        return self

    def _check_form(
        self, key: str, dtype: torch.dtype, shape: Sequence[int | None], form: str, where: str
    ) -> None:
        value = self.get(key)
        fits = isinstance(value, Tensor) and value.dtype == dtype and value.dim() == len(shape)
        if not fits or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True)):
            raise _invalid(key, form, value, where)


def _invalid(key: str, form: str, value: Any, where: str) -> ValueError:
    got = f"no {key}" if value is None else describe_value(value)
    what = f"MoleculeData: {key} is missing or invalid"
    return mismatch(ValueError, what, form, got, where=where)


def _check_values(
    what: str, expected: str, wrong: Tensor, values: Tensor, place: str, where: str
) -> None:
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        got = f"{float(values[tuple(first)])} {place.format(*first)}"
        raise mismatch(ValueError, f"MoleculeData: {what}", expected, got, where=where)


def pairs_of_atoms(num_atoms: int) -> int:
    """Return the number of unordered pairs of atoms, each atom with itself included."""
    return num_atoms * (num_atoms + 1) // 2


def atoms_of_pairs(num_pairs: int) -> int:
    """Return the number of atoms that have this many unordered pairs."""
    num_atoms = (isqrt(8 * num_pairs + 1) - 1) // 2
    if pairs_of_atoms(num_atoms) != num_pairs:
        what = "pair_code: the length matches no number of atoms"
        expected = "N (N + 1) / 2 pairs of N atoms: 0, 1, 3, 6, 10, …"
        hint = "store all pairs, each atom with itself included"
        raise mismatch(ValueError, what, expected, num_pairs, hint=hint)
    return num_atoms


def bonds_of(pair_code: UInt8[Tensor, " pair"], table: PairTable) -> Int[Tensor, "two bond"]:
    """Return the bonds among the pairs, in both directions, sorted by first, then second atom.

    Args:
        pair_code: Codes of all pairs of one molecule.
        table: What the codes mean.

    Raises:
        ValueError: If a code is not in the table, or the length is not a number of pairs.

    Example:
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> bonds_of(torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.uint8), table).tolist()
        [[0, 1, 1, 2], [1, 0, 2, 1]]
    """
    num_atoms = atoms_of_pairs(pair_code.numel())
    codes, last = pair_code.cpu().long(), len(table) - 1
    if codes.numel() and int(codes.max()) > last:
        what, hint = "bonds_of: a code is not in the table", "the table of the featurizer"
        raise mismatch(ValueError, what, f"codes from 0 to {last}", int(codes.max()), hint=hint)
    bonded = table.distance.cpu()[codes] == 1
    return to_undirected(torch.triu_indices(num_atoms, num_atoms)[:, bonded], num_nodes=num_atoms)


# Without this PyG warns and falls back to an unsafe load when it reads a saved example.
torch.serialization.add_safe_globals([MoleculeData])


allow_batches(MoleculeData)


class MoleculeCollater(PlanningCollater):
    """Merges molecules as PyG does, and attaches ``pairs``, the plan of their atom pairs.

    Args:
        pair_table: What the codes mean: the table of the featurizer that made the molecules.
        pairs: ``"all"``, ``"connected"`` (within a fragment), ``"bonds"``, or the largest number of
            bonds between two atoms, 1 to 7.
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
        pairs: str | int = "all",
        self_pairs: bool = True,
        *,
        follow_batch: Sequence[str] | None = None,
        exclude_keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__(None, follow_batch, exclude_keys)
        self.pair_table, self.pairs, self.self_pairs = pair_table, pairs, self_pairs
        self._kept = pair_table.kept(pairs, self_pairs)

    def _attach(self, merged: Batch) -> None:
        fields = merged.stores[0]
        code, starts = fields["pair_code"], (fields["ptr"], slices_of(merged)["pair_code"])
        sizes, found = (part[1:] - part[:-1] for part in map(array_of, starts))
        wanted = sizes * (sizes + 1) // 2
        if (wanted != found).any():
            number = int(np.argmax(wanted != found))
            what = "MoleculeCollater: a molecule has a wrong number of pairs"
            expected = f"{wanted[number]} codes for {sizes[number]} atoms, with self pairs"
            where = f"molecule {number} of the batch"
            raise mismatch(ValueError, what, expected, int(found[number]), where=where)
        pairs = Pairs.from_codes(code, torch.from_numpy(sizes), self._kept)
        pairs.checksum = checksum(code)
        fields._mapping["pairs"] = pairs

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pairs={self.pairs!r}, self_pairs={self.self_pairs})"


class MoleculeLoader(PlanningLoader):
    """Loads mini-batches whose ``pairs`` were attached in the worker process.

    The cost of a weave layer depends on the number of pairs, which a sampler can limit::

        order = RandomSampler(dataset)
        sampler = NodeBudgetBatchSampler(order, pair_counts(dataset), 20_000, oversize="alone")
        MoleculeLoader(dataset, dataset.pair_table, batch_sampler=sampler)

    Args:
        dataset: Data set or list of ``MoleculeData``.
        pair_table: What the pair codes mean.
        batch_size: Molecules per batch; omitted with ``batch_sampler``. Pass it by name inside a
            Lightning hook: Lightning cannot rebuild a loader that has it by position.
        shuffle: Whether to shuffle, differently in every pass, as torch's ``DataLoader`` does.
        pairs: As in :class:`MoleculeCollater`.
        self_pairs: As in :class:`MoleculeCollater`.
        exclude_keys: Fields to omit, as in PyG.
        **kwargs: As in ``torch.utils.data.DataLoader``, and ``follow_batch`` as in PyG.

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
        pairs: str | int = "all",
        self_pairs: bool = True,
        exclude_keys: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.pair_table, self.pairs, self.self_pairs = pair_table, pairs, self_pairs
        fields = {"follow_batch": kwargs.pop("follow_batch", None), "exclude_keys": exclude_keys}
        collater = MoleculeCollater(pair_table, pairs, self_pairs, **fields)
        super().__init__(dataset, batch_size, shuffle, collater, **fields, **kwargs)
