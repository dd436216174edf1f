"""The atom pairs of a mini-batch as integers, and the sums and gathers that they define.

:class:`Pairs` is computed once for all layers. The functions below it gather rows of atoms to their
pairs and sum rows of pairs per atom; each is the other's adjoint: it multiplies rows with a sparse
matrix of zeros and ones that the pairs define, and its backward pass multiplies with the transposed
matrix, which is a second function of this file. Sums are in the order in which the pairs list them,
so results are bitwise reproducible on CPUs and GPUs, and all functions can be differentiated any
number of times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from pyg_dynbatch.core.errors import checked_shape, mismatch
from pyg_dynbatch.core.movable import MovablePlan, plan_part
from pyg_dynbatch.core.native import extension, is_native, loaded_extension
from pyg_dynbatch.core.structure import concatenated_ranges


class UpperPairs(NamedTuple):
    """Unordered pairs, sorted by first and then by second atom."""

    first: np.ndarray
    second: np.ndarray
    column: np.ndarray  # index of each pair in what it was built from
    code: np.ndarray = np.zeros(0, dtype=np.int64)  # may be left out

    def filtered(self, mask: np.ndarray) -> "UpperPairs":
        """Keep some of the pairs."""
        chosen = np.flatnonzero(mask)
        return UpperPairs(*(part[chosen] if part.size else part for part in self))


def checked_sizes(name: str, sizes: Sequence[int] | Tensor) -> np.ndarray:
    """Convert numbers of atoms to an array and check them."""
    atoms = np.asarray(sizes.cpu() if isinstance(sizes, Tensor) else sizes, dtype=np.int64)
    if atoms.ndim != 1:
        wanted, found = "the number of atoms of each molecule", f"shape {list(atoms.shape)}"
        raise mismatch(ValueError, f"{name}: sizes are not a flat list", wanted, found)
    if atoms.size and atoms.min() < 0:
        example = int(np.argmax(atoms < 0))
        what, where = f"{name}: a molecule has a negative number of atoms", f"example {example}"
        raise mismatch(ValueError, what, "at least 0", int(atoms[example]), where=where)
    return atoms


def checked_codes(
    pair_code: Tensor, atoms: np.ndarray, kept: Tensor | None, num_codes: int | None
) -> tuple[np.ndarray, int]:
    """Convert codes to an array and check them; return the number of codes too."""
    stored = atoms * (atoms + 1) // 2
    code = pair_code.detach().cpu().numpy().astype(np.int64)
    if code.size != stored.sum():
        what = "Pairs.from_codes: the number of codes does not fit the atoms"
        wanted = f"{int(stored.sum())} codes, N (N + 1) / 2 for N atoms"
        where = f"a batch of {atoms.size} molecules with {int(atoms.sum())} atoms"
        hint = "codes of all pairs i <= j with self pairs, even of pairs that are not used"
        raise mismatch(ValueError, what, wanted, f"{code.size} codes", where=where, hint=hint)
    if num_codes is None:
        num_codes = int(code.max(initial=0)) + 1
    outside = (code < 0) | (code >= num_codes)
    what, wanted = "Pairs.from_codes: a code is not in the table", f"codes 0 to {num_codes - 1}"
    hint = "the table that the codes were created with"
    if outside.any():
        wrong = int(np.argmax(outside))
        where = f"example {int(np.searchsorted(np.cumsum(stored), wrong, side='right'))}"
        raise mismatch(ValueError, what, wanted, int(code[wrong]), where=where, hint=hint)
    if kept is not None and kept.numel() != num_codes:
        raise mismatch(ValueError, what, wanted, f"{kept.numel()} in kept", where="kept", hint=hint)
    return code, num_codes


def triangles(atoms: np.ndarray) -> UpperPairs:
    """List all pairs i <= j of each molecule, row by row."""
    number = np.arange(atoms.sum())
    left = np.repeat(np.cumsum(atoms), atoms) - number  # atoms from each one to its last
    first, second = np.repeat(number, left), concatenated_ranges(number, left)
    return UpperPairs(first, second, np.arange(first.size))


def of_pair_index(pair_index: np.ndarray, num_atoms: int, atoms: np.ndarray) -> UpperPairs:
    """Sort a list of pairs and drop duplicates."""
    if pair_index.ndim != 2 or len(pair_index) != 2 or atoms.sum() != num_atoms:
        what = "Pairs.from_pair_index: pair_index and sizes do not match num_atoms"
        wanted = f"pair_index [2, pair], sizes of {num_atoms} atoms in total"
        found = f"pair_index {list(pair_index.shape)}, sizes of {int(atoms.sum())} atoms"
        raise mismatch(ValueError, what, wanted, found)
    outside = np.any((pair_index < 0) | (pair_index >= num_atoms), axis=0)
    _check_columns("an atom is out of range", f"atoms 0 to {num_atoms - 1}", pair_index, outside)
    molecule = np.repeat(np.arange(atoms.size), atoms)[pair_index]
    strange = molecule[0] != molecule[1]
    _check_columns("a pair joins two molecules", "two atoms of one molecule", pair_index, strange)
    low, high = pair_index.min(0), pair_index.max(0)
    key, column = np.unique(low.astype(np.int64) * num_atoms + high, return_index=True)
    first, second = np.divmod(key, max(num_atoms, 1))
    return UpperPairs(first, second, column)


def incidence_of(half: UpperPairs, num_atoms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List for every atom the pairs that contain it: ``ptr``, ``entry`` and ``other``."""
    number = np.arange(half.first.size)
    proper = np.flatnonzero(half.first != half.second)
    # The pairs in which an atom is second come before those in which it is first.
    segment_ids = np.concatenate([half.second[proper], half.first])
    order = np.argsort(segment_ids, kind="stable")
    entry = np.concatenate([number[proper], number])[order]
    other = np.concatenate([half.first[proper], half.second])[order]
    count = np.bincount(segment_ids, minlength=num_atoms)
    return np.concatenate([[0], np.cumsum(count)]), entry, other


def ends_of(half: UpperPairs) -> tuple[np.ndarray, np.ndarray]:
    """List the atoms of each pair, that of a self pair once, and where each pair begins."""
    ptr = np.concatenate([[0], np.cumsum(2 - (half.first == half.second))])
    end = np.empty(ptr[-1], dtype=np.int64)
    end[ptr[:-1]] = half.first
    end[ptr[1:] - 1] = half.second
    return end, ptr


def orders_of(
    num_pairs: int, ptr: np.ndarray, entry: np.ndarray, other: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """List for each atom the ordered pairs that begin there, both orders of a self pair."""
    segment_ids = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    alone = other == segment_ids
    end = np.cumsum(1 + alone)
    order = np.repeat(entry + num_pairs * (other <= segment_ids), 1 + alone)
    order[end[alone] - 1] -= num_pairs
    return order, np.concatenate([[0], end])[ptr]


def counts_of(
    code: np.ndarray, incidence: tuple[np.ndarray, np.ndarray, np.ndarray], num_codes: int
) -> list[np.ndarray]:
    """Count codes per atom, and list the pairs of each code and where each code begins."""
    ptr, entry, _ = incidence
    segment_ids = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    cells = (ptr.size - 1) * num_codes
    count = np.bincount(segment_ids * num_codes + code[entry], minlength=cells)
    # NumPy sorts narrow integers by counting.
    order = np.argsort(code.astype(np.uint16) if num_codes <= 2**16 else code, kind="stable")
    by_code = np.cumsum(np.bincount(code, minlength=num_codes))
    return [count, order, np.concatenate([[0], by_code])]


def _check_columns(what: str, expected: str, pair_index: np.ndarray, wrong: np.ndarray) -> None:
    """Raise an error that names the first wrong column."""
    if wrong.any():
        column, what = int(np.argmax(wrong)), f"Pairs.from_pair_index: {what}"
        got = f"atoms {pair_index[0, column]} and {pair_index[1, column]}"
        raise mismatch(ValueError, what, expected, got, where=f"column {column}")


# Molecules of one size have one layout.
@lru_cache(maxsize=1024)
def _layout(
    atoms: int, pairs: int, molecules: int, entries: int, codes: int
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return where the parts of a plan begin and their lengths, and the length of the plan."""
    coded, starts = (pairs, codes + 1) if codes else (0, 0)
    lengths = {"first": pairs, "second": pairs, "code": coded, "column": pairs, "ptr": atoms + 1}
    lengths |= {"entry": entries, "other": entries, "atom_ptr": molecules + 1, "end": entries}
    lengths |= {"end_ptr": pairs + 1, "order_entry": 2 * pairs, "order_ptr": atoms + 1}
    lengths |= {"code_count": atoms * codes, "code_order": coded, "code_ptr": starts}
    parts, start = {}, 0
    for name, length in lengths.items():
        parts[name] = start, length
        start += length
    return parts, start


@dataclass(eq=False, repr=False)
class Pairs(MovablePlan):
    """The pairs of atoms of a mini-batch, each unordered pair once, in one int32 tensor.

    Built in loader workers by :meth:`all_pairs`, :meth:`from_codes` or :meth:`from_pair_index`, and
    moved to the device in one copy. Pairs are sorted by ``first`` and then by ``second``, with
    ``first <= second``; an atom may be paired with itself. The pairs of one atom are in ascending
    order, so that sums over them are bitwise reproducible.

    Args:
        plan: All numbers, int32, flat.
        num_atoms: Number of atoms of the mini-batch.
        num_pairs: Number of unordered pairs that are used.
        num_molecules: Number of molecules, some of which may have no pairs or no atoms.
        num_entries: Number of ordered pairs; a self pair counts once, any other pair twice.
        num_codes: Number of different pair codes; 0 for pairs without codes.
        checksum: Of the codes of the batch that a loader made the pairs from.

    Example:
        >>> pairs = Pairs.all_pairs([2, 1])
        >>> pairs.first.tolist(), pairs.second.tolist()
        ([0, 0, 1, 2], [0, 1, 1, 2])
        >>> pairs
        Pairs(2 molecules, 3 atoms, 4 pairs)
    """

    plan: Int[Tensor, " number"]
    num_atoms: int
    num_pairs: int
    num_molecules: int
    num_entries: int
    num_codes: int = 0
    checksum: int | None = None

    def __post_init__(self) -> None:
        """Locate the parts of the plan."""
        self._parts, length = _layout(*self._counts())
        if self.plan.numel() != length:
            raise mismatch(ValueError, "Pairs: wrong length of the plan", length, self.plan.numel())
        self._remembered: dict[Any, Any] = {}

    # Building.

    @classmethod
    def all_pairs(cls, sizes: Sequence[int] | Tensor, self_pairs: bool = True) -> "Pairs":
        """Pair all atoms of each molecule with each other, without codes.

        Args:
            sizes: Number of atoms of each molecule.
            self_pairs: Whether each atom is paired with itself too.

        Example:
            >>> Pairs.all_pairs([3], self_pairs=False).second.tolist()
            [1, 2, 2]
        """
        atoms = checked_sizes("Pairs.all_pairs", sizes)
        half = triangles(atoms)
        if not self_pairs:
            half = half.filtered(half.first != half.second)
        return cls._of_half(half, atoms, 0)

    @classmethod
    def from_codes(
        cls,
        pair_code: Integer[Tensor, " stored"],
        sizes: Sequence[int] | Tensor,
        kept: Bool[Tensor, " code"] | None = None,
        num_codes: int | None = None,
    ) -> "Pairs":
        """Pair atoms according to the codes of all their pairs.

        Args:
            pair_code: Codes of all pairs i <= j, self pairs included, row by row of the upper
                triangle, ``N (N + 1) / 2`` per molecule, one molecule after another.
            sizes: Number of atoms N of each molecule.
            kept: For every code whether its pairs are used; all by default.
            num_codes: Number of codes; the length of ``kept``, else one more than the largest.

        Returns:
            The pairs with their codes; ``column`` is each pair's index in ``pair_code``.

        Example:
            >>> code = torch.tensor([0, 1, 2, 0, 1, 0])  # one molecule of three atoms
            >>> pairs = Pairs.from_codes(code, [3], kept=torch.tensor([True, True, False]))
            >>> pairs.code.tolist(), pairs.code_count.tolist()
            ([0, 1, 0, 1, 0], [[1, 1, 0], [1, 2, 0], [1, 1, 0]])
        """
        atoms = checked_sizes("Pairs.from_codes", sizes)
        if num_codes is None and kept is not None:
            num_codes = kept.numel()
        if num_codes and (planned := cls._planned(pair_code, atoms, kept, num_codes)):
            return planned
        code, num_codes = checked_codes(pair_code, atoms, kept, num_codes)
        half = triangles(atoms)._replace(code=code)
        if kept is not None:
            half = half.filtered(kept.cpu().numpy()[code])
        return cls._of_half(half, atoms, num_codes)

    @classmethod
    def _planned(
        cls, pair_code: Tensor, atoms: np.ndarray, kept: Tensor | None, num_codes: int
    ) -> "Pairs | None":
        """Plan bytes in C; None where that is not possible or something is wrong."""
        native, code = extension(), pair_code.contiguous()
        used = None if kept is None else kept.cpu().bool().contiguous()
        plain = code.is_cpu and code.dtype == torch.uint8
        if native is None or not plain or (used is not None and used.numel() != num_codes):
            return None
        counts, atoms = np.zeros(3, dtype=np.int64), np.ascontiguousarray(atoms)
        fields: dict[str, Any] = {"molecules": atoms.size, "codes": num_codes, "sizes": atoms}
        fields |= {"stored": code.numel(), "code": code, "kept": used, "counts": counts}
        if native.pairs(**fields):
            return None
        num_atoms, num_pairs, num_entries = counts.tolist()
        found = num_atoms, num_pairs, atoms.size, num_entries, num_codes
        plan = torch.empty(_layout(*found)[1], dtype=torch.int32)
        native.pairs(**fields, plan=plan)
        return cls(plan, *found)

    @classmethod
    def from_pair_index(
        cls,
        pair_index: Integer[Tensor, "two column"],
        num_atoms: int,
        sizes: Sequence[int] | Tensor | None = None,
    ) -> "Pairs":
        """Pair atoms according to a list of pairs, such as the ``edge_index`` of any PyG batch.

        Args:
            pair_index: Two atoms per column; each pair once, or in both directions.
            num_atoms: Number of atoms of the mini-batch.
            sizes: Number of atoms of each molecule; one molecule by default.

        Returns:
            The pairs, without codes; ``column`` is the first column that holds each pair, so
            ``edge_attr[pairs.column]`` are the rows of the pairs.

        Example:
            >>> pairs = Pairs.from_pair_index(torch.tensor([[1, 0, 1], [0, 1, 2]]), 3)
            >>> pairs.first.tolist(), pairs.second.tolist(), pairs.column.tolist()
            ([0, 1], [1, 2], [0, 2])
        """
        atoms = checked_sizes("Pairs.from_pair_index", [num_atoms] if sizes is None else sizes)
        half = of_pair_index(pair_index.detach().cpu().numpy(), num_atoms, atoms)
        return cls._of_half(half, atoms, 0).to(pair_index.device)

    @classmethod
    def _of_half(cls, half: UpperPairs, atoms: np.ndarray, num_codes: int) -> "Pairs":
        num_atoms, num_pairs = int(atoms.sum()), half.first.size
        incidence = incidence_of(half, num_atoms)
        atom_ptr = np.concatenate([[0], np.cumsum(atoms)])
        code = [half.code] if num_codes else []
        parts = [half.first, half.second, *code, half.column, *incidence, atom_ptr]
        parts += [*ends_of(half), *orders_of(num_pairs, *incidence)]
        if num_codes:
            parts += counts_of(half.code, incidence, num_codes)
        plan = torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind"))
        return cls(plan, num_atoms, num_pairs, atoms.size, incidence[1].size, num_codes)

    def split(self, max_pairs: int) -> "list[Pairs]":
        """Split the pairs into blocks, each over all atoms of the mini-batch.

        The sum over the pairs of an atom is the sum over the blocks.

        Args:
            max_pairs: Number of pairs per block, at least 1; the last block may be smaller.

        Returns:
            The blocks in order; ``column`` of a block holds the indices of its pairs here.

        Example:
            >>> [block.num_pairs for block in Pairs.all_pairs([3]).split(4)]
            [4, 2]
        """
        atoms = self.atom_ptr.cpu().numpy().astype(np.int64)
        atoms = atoms[1:] - atoms[:-1]
        names = ("first", "second", "code") if self.num_codes else ("first", "second")
        found = [self._read(name).cpu().numpy().astype(np.int64) for name in names]
        blocks = []
        for start in range(0, self.num_pairs, max_pairs):
            chosen = slice(start, min(start + max_pairs, self.num_pairs))
            column = np.arange(chosen.start, chosen.stop)
            half = UpperPairs(found[0][chosen], found[1][chosen], column, found[-1][chosen])
            blocks.append(Pairs._of_half(half, atoms, self.num_codes).to(self.device))
        return blocks

    # Reading.

    def _read(self, name: str) -> Tensor:
        if name.startswith("code") and not self.num_codes:
            what, wanted = "Pairs: these pairs have no codes", "Pairs.from_codes(...)"
            found = "Pairs.all_pairs(...) or Pairs.from_pair_index(...)"
            raise mismatch(AttributeError, what, wanted, found)
        return self.plan.narrow(0, *self._parts[name])

    first = plan_part("first", "The first atom of each pair: the lower number.")
    second = plan_part("second", "The second atom; of a self pair the same one.")
    code = plan_part("code", "Code of each pair.")
    column = plan_part("column", "Index of each pair in its source.")
    ptr = plan_part("ptr", "First entry of each atom, then their total.")
    entry = plan_part("entry", "The pairs of each atom; a self pair once.")
    other = plan_part("other", "The other atom of each entry's pair.")
    atom_ptr = plan_part("atom_ptr", "First atom of each molecule, then their total.")

    @property
    def begins(self) -> Int[Tensor, " order"]:
        """The first atom of every ordered pair: those of all pairs, then of their reverses."""
        return self.plan.narrow(0, 0, 2 * self.num_pairs)  # first and second

    @property
    def ends(self) -> tuple[Int[Tensor, " entry"], Int[Tensor, " pair_1"]]:
        """The atoms of each pair, of a self pair once, and where those of each pair begin."""
        return self._read("end"), self._read("end_ptr")

    @property
    def orders(self) -> tuple[Int[Tensor, " order"], Int[Tensor, " atom_1"]]:
        """The ordered pairs that begin at each atom, and where those of each atom begin."""
        # Pair k of P is listed as k (first, second) and P + k (second, first); a self pair twice.
        return self._read("order_entry"), self._read("order_ptr")

    @property
    def by_code(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " code_1"]]:
        """The pairs of each code, in ascending order, and where those of each code begin."""
        return self._read("code_order"), self._read("code_ptr")

    @property
    def code_count(self) -> Int[Tensor, "atom code"]:
        """Number of entries of each atom with each code."""
        return self._read("code_count").view(self.num_atoms, self.num_codes)

    @property
    def is_self(self) -> Bool[Tensor, " pair"]:
        """Which pairs are of an atom with itself."""
        return self.first == self.second

    @property
    def weight(self) -> Float[Tensor, " pair"]:
        """Number of ordered pairs that each pair represents: 2, and 1 for a self pair."""
        return 2.0 - self.is_self.to(torch.get_default_dtype())

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Cache what layers derive from the plan; dropped when pairs are moved or copied."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.plan,)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Pairs":
        return replace(self, plan=fn(self.plan))

    def _counts(self) -> tuple[int, ...]:
        counts = (self.num_atoms, self.num_pairs, self.num_molecules)
        return (*counts, self.num_entries, self.num_codes)

    def __reduce__(self) -> Any:
        """Pickle the plan and the counts."""
        return Pairs, (self.plan, *self._counts(), self.checksum)

    def __eq__(self, other: object) -> bool:
        """Compare contents: the same pairs of the same molecules, in the same order."""
        if not isinstance(other, Pairs):
            return NotImplemented
        return self._counts() == other._counts() and torch.equal(self.plan, other.plan)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Number of pairs."""
        return self.num_pairs

    def __repr__(self) -> str:
        """Show the size of the mini-batch."""
        codes = f", {self.num_codes} codes" if self.num_codes else ""
        counts = f"{self.num_molecules} molecules, {self.num_atoms} atoms, {self.num_pairs} pairs"
        return f"Pairs({counts}{codes})"


torch.serialization.add_safe_globals([Pairs])


def check_rows(
    owner: str, x: Tensor, rows: Tensor, widths: tuple[int, int], pairs: Pairs, coded: bool
) -> None:
    """Check that there is a row per atom, and per code or per pair, of these widths."""
    checked_shape(f"{owner}: x has the wrong shape", x, (pairs.num_atoms, widths[0]))
    of, count = ("code", pairs.num_codes) if coded else ("pair", pairs.num_pairs)
    what = f"{owner}: wrong shape of the rows per {of}"
    checked_shape(what, rows, (count, widths[1]), hint="coded says whether rows are per code")


# Sums and gathers.

_Map = Callable[[Tensor, Pairs], Tensor]


def _add_up(rows: Tensor, listed: Tensor, starts: Tensor) -> Tensor:
    """Sum the listed rows of each list; zeros for an empty list."""
    if listed.numel() == 0 or rows.numel() == 0:
        return rows.new_zeros(starts.numel() - 1, rows.size(1))
    return functional.embedding_bag(listed, rows, starts, mode="sum", include_last_offset=True)


class _Linear(Function):
    """A linear map of rows that the pairs define, and its adjoint."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs, run: _Map, adjoint: _Map) -> Tensor:
        ctx.pairs, ctx.run, ctx.adjoint = pairs, run, adjoint
        return run(rows, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given = gradient.contiguous(), ctx.pairs, ctx.adjoint, ctx.run
        return _Linear.apply(*given), None, None, None


def _is_recorded(rows: Tensor) -> bool:
    return torch.is_grad_enabled() and rows.requires_grad


def _linear(rows: Tensor, pairs: Pairs, run: _Map, adjoint: _Map) -> Tensor:
    # The maps alone are faster, and refuse forward derivatives by themselves.
    return _Linear.apply(rows, pairs, run, adjoint) if _is_recorded(rows) else run(rows, pairs)


def in_single(rows: Tensor) -> Tensor:
    """Convert half to single precision, which sums over thousands of rows require."""
    return rows if rows.dtype == torch.float64 else rows.float()


def _sum_entries(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, pairs.entry, pairs.ptr)


def _sum_ends(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, *pairs.ends)


def pair_sum(rows: Float[Tensor, "pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all pairs it is in, a self pair once.

    Half precision is summed in single precision.

    Example:
        >>> pairs = Pairs.all_pairs([2])
        >>> pair_sum(torch.tensor([[1.0], [10.0], [100.0]]), pairs).flatten().tolist()
        [11.0, 110.0]
    """
    return _linear(in_single(rows).contiguous(), pairs, _sum_entries, _sum_ends)


def _sum_neighbors(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, pairs.other, pairs.ptr)


def neighbor_sum(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all atoms that it is paired with; its own adjoint."""
    return _linear(rows.contiguous(), pairs, _sum_neighbors, _sum_neighbors)


def _order_index(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """For each ordered pair its two half rows: u of its first atom and v of its second.

    Half rows are numbered 2 i (u of atom i) and 2 i + 1 (v of atom i).
    """

    def build() -> tuple[Tensor, Tensor]:
        first, second = (2 * pairs.begins).view(2, -1)
        reverse = torch.stack([second, first + 1], 1)
        index = torch.cat([torch.stack([first, second + 1], 1), reverse]).flatten()
        return index, torch.arange(0, index.numel() + 1, 2, dtype=index.dtype, device=index.device)

    return pairs.remember("order_index", build)


def _half_row_index(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """For each half of an atom's row the ordered pairs that read it."""

    def build() -> tuple[Tensor, Tensor]:
        order, ptr = pairs.orders
        length, count = ptr.diff(), pairs.num_pairs
        # v of an atom is in the reverses of the ordered pairs that its u is in. Both lists of an
        # atom have the same length, so the second one begins one length later.
        start = torch.arange(order.numel(), dtype=ptr.dtype, device=ptr.device)
        segment_ids = torch.repeat_interleave(length, output_size=order.numel())
        place = start + ptr[:-1].index_select(0, segment_ids)
        index = order.new_empty(2 * order.numel())
        index[place] = order
        reverse = torch.where(order < count, order + count, order - count)
        index[place + length.index_select(0, segment_ids)] = reverse
        twice = 2 * ptr
        starts = torch.stack([twice[:-1], twice[:-1] + length], 1).flatten()
        return index, torch.cat([starts, twice[-1:]])

    return pairs.remember("half_row_index", build)


def _gather_orders(parts: Tensor, pairs: Pairs) -> Tensor:
    width = parts.size(1) // 2
    halves = parts.contiguous().view(-1, width)
    return _add_up(halves, *_order_index(pairs)).view(2, -1, width)


def _sum_orders(rows: Tensor, pairs: Pairs) -> Tensor:
    width = rows.size(2)
    return _add_up(rows.reshape(-1, width), *_half_row_index(pairs)).view(-1, 2 * width)


def _prepare_orders(parts: Tensor, pairs: Pairs) -> None:
    # torch.compile does not support a cache that is filled within an autograd function.
    _order_index(pairs)
    if _is_recorded(parts):
        _half_row_index(pairs)


def order_gather(
    parts: Float[Tensor, "atom parts"], pairs: Pairs
) -> Float[Tensor, "two pair width"]:
    """Add, for both orders of each pair, one atom's first part and the other's second part."""
    _prepare_orders(parts, pairs)
    return _linear(parts, pairs, _gather_orders, _sum_orders)


def _begin_rows(rows: Tensor, pairs: Pairs) -> Tensor:
    return rows.index_select(0, pairs.begins).view(2, -1, rows.size(1))


def _sum_begins(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows.reshape(2 * pairs.num_pairs, rows.size(2)), *pairs.orders)


def order_rows(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "two pair width"]:
    """Look up the first atom of both orders of each pair."""
    return _linear(rows, pairs, _begin_rows, _sum_begins)


def order_sum(rows: Float[Tensor, "two pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of the ordered pairs that begin with it."""
    return _linear(in_single(rows).contiguous(), pairs, _sum_begins, _begin_rows)


class _OrderReLU(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, pairs: Pairs, native: bool) -> Tensor:
        ctx.pairs, width, count = pairs, parts.size(1) // 2, pairs.num_pairs
        if native:  # and no backward pass follows
            found = parts.new_empty(count, width)
            given = parts, parts.size(0), width, pairs.begins, count, found
            loaded_extension().order_relu(*given, torch.get_num_threads())
            return found
        both = _gather_orders(parts, pairs).relu_()
        ctx.save_for_backward(both)
        return both[0] + both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        passed = torch.ops.aten.threshold_backward(gradient.expand_as(both), both, 0)
        return _Linear.apply(passed, ctx.pairs, _sum_orders, _gather_orders), None, None


def order_relu(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Compute max(u_i + v_j, 0) + max(u_j + v_i, 0) for each pair."""
    native = not (torch.compiler.is_compiling() or _is_recorded(parts)) and is_native(parts)
    native = native and pairs.plan.is_cpu
    if not native:
        _prepare_orders(parts, pairs)
    return _OrderReLU.apply(parts.resolve_neg().contiguous(), pairs, native)


_WIDEST = 1024  # C keeps some rows on the stack


class _PairLayers(Function):
    """Only in inference; a function, so that forward derivatives and transforms are refused."""

    @staticmethod
    def forward(ctx: Any, pairs: Pairs, coded: bool, *given: Tensor) -> Tensor:
        parts, own, weight, following, bias = given
        # Whole vectors of any processor; a thread has molecules of its own.
        room = [-rows.size(0) % 16 for rows in (weight, following)]
        weights = [
            functional.pad(rows.t(), (0, more))
            for rows, more in zip((weight, following), room, strict=True)
        ]
        (middle, inner), padded = (weight.size(0), weights[0].size(1)), weights[1].size(1)
        threads = torch.get_num_threads()
        share = torch.arange(threads + 1) * pairs.num_molecules // threads
        first = pairs.atom_ptr.index_select(0, share)
        fields: dict[str, Any] = {"atoms": pairs.num_atoms, "width": weight.size(1)}
        fields |= {"pairs": pairs.num_pairs, "codes": own.size(0), "threads": threads}
        fields |= {"middle": middle, "inner": inner, "padded": padded, "begins": pairs.begins}
        fields |= {"code": pairs.code if coded else None, "parts": parts.contiguous()}
        fields |= {"starts": torch.searchsorted(pairs.first, first)}
        fields |= {"own": functional.pad(own, (0, room[0])), "weight": weights[0].contiguous()}
        fields |= {"next": weights[1].contiguous(), "bias": functional.pad(bias, (0, room[1]))}
        sums = parts.new_zeros(pairs.num_atoms, padded)
        if loaded_extension().pair_layers(**fields, sums=sums):
            what, wanted = "Pairs: an atom or code is out of range", f"{pairs.num_atoms} atoms"
            raise mismatch(IndexError, what, f"{wanted}, {own.size(0)} rows", "others")
        return sums[:, : following.size(0)]


def computes_layers(*given: Tensor, pairs: Pairs) -> bool:
    """Whether `pair_layers` computes on tensors like these: in inference on CPUs."""
    training = torch.is_grad_enabled() or torch.compiler.is_compiling()
    narrow = max(each.size(1) for each in given) <= _WIDEST
    return not training and narrow and pairs.plan.is_cpu and is_native(*given)


def pair_layers(*given: Tensor, pairs: Pairs, coded: bool) -> Tensor:
    """Sum, for each atom, max(V max(W f + own, 0) + b, 0) of its pairs, f that of `order_relu`.

    Given u and v of the atoms, ``own`` of the pairs or codes, W, V and b. C computes it without
    keeping a row per pair.
    """
    found: Tensor = _PairLayers.apply(pairs, coded, *given)
    return found


def _look_up(table: Tensor, pairs: Pairs) -> Tensor:
    return table.index_select(0, pairs.code)


def _sum_codes(rows: Tensor, pairs: Pairs) -> Tensor:
    if not rows.is_cuda:
        return _add_up(rows, *pairs.by_code)
    # Summing a few long lists would use only a few processors.
    codes = torch.arange(pairs.num_codes, device=rows.device)
    return (codes[:, None] == pairs.code).to(rows.dtype) @ rows


def code_rows(table: Float[Tensor, "code width"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Look up each pair's code in a table."""
    return _linear(table, pairs, _look_up, _sum_codes)
