"""Which atoms of a mini-batch are paired, as integers, and the sums and gathers that this defines.

:class:`Pairs` is computed once for all layers. The functions below it gather rows of atoms to their
pairs and sum rows of pairs per atom; each is the other's adjoint: it multiplies rows with a sparse
matrix of zeros and ones that the pairs define, and its backward pass multiplies with the transposed
matrix, which is a second function of this file. Sums are in the order in which the pairs list them,
so results are bitwise reproducible on CPUs and GPUs, and all functions can be differentiated any
number of times.

Words of this file, and their numbers for atoms 0 and 1 with ``pairs`` (0, 0), (0, 1) and (1, 1):

- A pair is unordered, and listed once, the lower atom first: 3 pairs. ``pairs`` is always a
  :class:`Pairs`, which says only which there are. Features of pairs are ``pair_rows``, one per
  pair, or one per code.
- An entry is a pair as one of its atoms has it, a self pair once: 2 of atom 0 and 2 of atom 1.
- An order is a pair with a first and a second atom, a self pair in both orders: 6 orders.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from pyg_dynbatch.core.errors import checked_shape, mismatch
from pyg_dynbatch.core.movable import MovablePlan, plan_part
from pyg_dynbatch.core.native import extension, is_native, loaded_extension
from pyg_dynbatch.core.structure import concatenated_ranges
from pyg_dynbatch.nn.checks import check_pair_index, checked_codes, checked_sizes, no_codes

T = TypeVar("T")


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
        num_entries: Number of entries: a pair of two atoms is an entry of both, a self pair one.
        num_codes: Number of different pair codes; 0 for pairs without codes.
        checksum: Of the codes of the batch that a loader made the pairs from.

    Example:
        >>> pairs = Pairs.all_pairs([2, 1])
        >>> pairs.first.tolist(), pairs.second.tolist()
        ([0, 0, 1, 2], [0, 1, 1, 2])
        >>> pairs
        Pairs(2 molecules, 3 atoms, 4 pairs)
        >>> pairs.ptr.tolist(), pairs.entry.tolist()  # pairs 0 and 1 of atom 0, 1 and 2 of atom 1
        ([0, 2, 4, 5], [0, 1, 1, 2, 3])
    """

    plan: Int[Tensor, " number"]
    num_atoms: int
    num_pairs: int
    num_molecules: int
    num_entries: int
    num_codes: int = 0
    checksum: int | None = None

    def __post_init__(self) -> None:
        """Locate the vectors of the plan."""
        self._places, length = _layout(self._plan_sizes())
        if self.plan.numel() != length:
            raise mismatch(ValueError, "Pairs: wrong length of the plan", length, self.plan.numel())
        self._remembered: dict[Hashable, Any] = {}

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
        molecule_sizes = checked_sizes("Pairs.all_pairs", sizes)
        pair_list = _triangles(molecule_sizes)
        if not self_pairs:
            pair_list = pair_list.filtered(pair_list.first != pair_list.second)
        return cls._of_list(pair_list, molecule_sizes, 0)

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
        molecule_sizes = checked_sizes("Pairs.from_codes", sizes)
        if num_codes is None and kept is not None:
            num_codes = kept.numel()
        planned = cls._plan_in_c(pair_code, molecule_sizes, kept, num_codes) if num_codes else None
        if planned is not None:
            return planned
        code, num_codes = checked_codes(pair_code, molecule_sizes, kept, num_codes)
        pair_list = _triangles(molecule_sizes)._replace(code=code)
        if kept is not None:
            pair_list = pair_list.filtered(kept.cpu().numpy()[code])
        return cls._of_list(pair_list, molecule_sizes, num_codes)

    @classmethod
    def _plan_in_c(
        cls, pair_code: Tensor, molecule_sizes: np.ndarray, kept: Tensor | None, num_codes: int
    ) -> "Pairs | None":
        """Plan codes of one byte each in C; None where that is not possible or not valid."""
        native = extension()
        code = pair_code.contiguous()
        used = None if kept is None else kept.cpu().bool().contiguous()
        if native is None or not code.is_cpu or code.dtype != torch.uint8:
            return None
        if used is not None and used.numel() != num_codes:
            return None

        counts = np.zeros(3, dtype=np.int64)
        fields = {
            "molecules": molecule_sizes.size,
            "codes": num_codes,
            "stored": code.numel(),
            "sizes": np.ascontiguousarray(molecule_sizes),
            "code": code,
            "kept": used,
            "counts": counts,
        }
        # Without a plan C only checks and counts, from which the length of the plan follows.
        if native.pair_plan(**fields):
            return None
        num_atoms, num_pairs, num_entries = counts.tolist()
        plan_sizes = _PlanSizes(num_atoms, num_pairs, molecule_sizes.size, num_entries, num_codes)
        _, length = _layout(plan_sizes)
        plan = torch.empty(length, dtype=torch.int32)
        native.pair_plan(**fields, plan=plan)
        return cls(plan, *plan_sizes)

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
        sizes = [num_atoms] if sizes is None else sizes
        molecule_sizes = checked_sizes("Pairs.from_pair_index", sizes)
        pair_list = _distinct_pairs(pair_index.detach().cpu().numpy(), num_atoms, molecule_sizes)
        return cls._of_list(pair_list, molecule_sizes, 0).to(pair_index.device)

    @classmethod
    def _of_list(
        cls, pair_list: "_PairList", molecule_sizes: np.ndarray, num_codes: int
    ) -> "Pairs":
        num_atoms = int(molecule_sizes.sum())
        num_pairs = pair_list.first.size
        incidence = _incidence_of(pair_list, num_atoms)
        end, end_ptr = _ends_of(pair_list)
        order_entry, order_ptr = _orders_of(num_pairs, incidence)

        vectors = {
            "first": pair_list.first,
            "second": pair_list.second,
            "column": pair_list.column,
            "ptr": incidence.ptr,
            "entry": incidence.entry,
            "other": incidence.other,
            "atom_ptr": np.concatenate([[0], np.cumsum(molecule_sizes)]),
            "end": end,
            "end_ptr": end_ptr,
            "order_entry": order_entry,
            "order_ptr": order_ptr,
        }
        if num_codes:
            vectors |= {"code": pair_list.code} | _counts_of(pair_list.code, incidence, num_codes)

        num_entries = incidence.entry.size
        plan_sizes = _PlanSizes(num_atoms, num_pairs, molecule_sizes.size, num_entries, num_codes)
        places, _ = _layout(plan_sizes)
        in_order = [vectors[name] for name in places if name in vectors]
        plan = torch.from_numpy(np.concatenate(in_order, dtype=np.int32, casting="same_kind"))
        return cls(plan, *plan_sizes)

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
        molecule_sizes = np.diff(self.atom_ptr.cpu().numpy().astype(np.int64))
        first = self.first.cpu().numpy().astype(np.int64)
        second = self.second.cpu().numpy().astype(np.int64)
        code = self.code.cpu().numpy().astype(np.int64) if self.num_codes else first[:0]
        column = np.arange(self.num_pairs)

        blocks = []
        for start in range(0, self.num_pairs, max_pairs):
            chosen = slice(start, start + max_pairs)
            pair_list = _PairList(first[chosen], second[chosen], column[chosen], code[chosen])
            blocks.append(Pairs._of_list(pair_list, molecule_sizes, self.num_codes).to(self.device))
        return blocks

    # Reading.

    def _read(self, name: str) -> Tensor:
        if name.startswith("code") and not self.num_codes:
            raise no_codes()
        return self.plan.narrow(0, *self._places[name])

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
    def entry_count(self) -> Float[Tensor, " pair"]:
        """Number of entries of each pair: 2, and 1 of a self pair."""
        return 2.0 - self.is_self.to(torch.get_default_dtype())

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """Cache what layers derive from the plan; dropped when pairs are moved or copied."""
        if key not in self._remembered:
            self._remembered[key] = make()
        value: T = self._remembered[key]
        return value

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.plan,)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> "Pairs":
        return replace(self, plan=fn(self.plan))

    def _plan_sizes(self) -> "_PlanSizes":
        return _PlanSizes(
            self.num_atoms, self.num_pairs, self.num_molecules, self.num_entries, self.num_codes
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the plan and its sizes."""
        return Pairs, (self.plan, *self._plan_sizes(), self.checksum)

    def __eq__(self, other: object) -> bool:
        """Compare contents: the same pairs of the same molecules, in the same order."""
        if not isinstance(other, Pairs):
            return NotImplemented
        return self._plan_sizes() == other._plan_sizes() and torch.equal(self.plan, other.plan)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        """Number of pairs."""
        return self.num_pairs

    def __repr__(self) -> str:
        """Show the size of the mini-batch."""
        sizes = f"{self.num_molecules} molecules, {self.num_atoms} atoms, {self.num_pairs} pairs"
        codes = f", {self.num_codes} codes" if self.num_codes else ""
        return f"Pairs({sizes}{codes})"


torch.serialization.add_safe_globals([Pairs])


class _PlanSizes(NamedTuple):
    """What the lengths of the vectors of a plan follow from."""

    num_atoms: int
    num_pairs: int
    num_molecules: int
    num_entries: int
    num_codes: int


# Molecules of one size have one layout.
@lru_cache(maxsize=1024)
def _layout(sizes: _PlanSizes) -> tuple[dict[str, tuple[int, int]], int]:
    """Return where the vectors of a plan begin and their lengths, and the length of the plan."""
    num_atoms, num_pairs, num_molecules, num_entries, num_codes = sizes
    lengths = {
        "first": num_pairs,
        "second": num_pairs,
        "code": num_pairs if num_codes else 0,
        "column": num_pairs,
        "ptr": num_atoms + 1,
        "entry": num_entries,
        "other": num_entries,
        "atom_ptr": num_molecules + 1,
        "end": num_entries,
        "end_ptr": num_pairs + 1,
        "order_entry": 2 * num_pairs,
        "order_ptr": num_atoms + 1,
        "code_count": num_atoms * num_codes,
        "code_order": num_pairs if num_codes else 0,
        "code_ptr": num_codes + 1 if num_codes else 0,
    }

    places = {}
    start = 0
    for name, length in lengths.items():
        places[name] = start, length
        start += length
    return places, start


# Building the plan: the definition of what native/pairs.c computes.


class _PairList(NamedTuple):
    """Unordered pairs, sorted by first and then by second atom."""

    first: np.ndarray
    second: np.ndarray
    column: np.ndarray  # index of each pair in what it was built from
    code: np.ndarray = np.zeros(0, dtype=np.int64)  # may be left out

    def filtered(self, mask: np.ndarray) -> "_PairList":
        """Keep some of the pairs."""
        chosen = np.flatnonzero(mask)
        return _PairList(*(column[chosen] if column.size else column for column in self))


class _Incidence(NamedTuple):
    """The pairs that contain each atom."""

    ptr: np.ndarray  # first entry of each atom, then their total
    entry: np.ndarray  # the pair
    other: np.ndarray  # its other atom

    @property
    def atom(self) -> np.ndarray:
        """The atom of each entry."""
        return np.repeat(np.arange(self.ptr.size - 1), np.diff(self.ptr))


def _triangles(molecule_sizes: np.ndarray) -> _PairList:
    """List all pairs i <= j of each molecule, row by row."""
    number = np.arange(molecule_sizes.sum())
    # How many atoms there are from each one to the last of its molecule.
    left = np.repeat(np.cumsum(molecule_sizes), molecule_sizes) - number
    first = np.repeat(number, left)
    second = concatenated_ranges(number, left)
    return _PairList(first, second, np.arange(first.size))


def _distinct_pairs(
    pair_index: np.ndarray, num_atoms: int, molecule_sizes: np.ndarray
) -> _PairList:
    """Sort a list of pairs and drop duplicates."""
    check_pair_index(pair_index, num_atoms, molecule_sizes)
    low = pair_index.min(0)
    high = pair_index.max(0)
    key, column = np.unique(low.astype(np.int64) * num_atoms + high, return_index=True)
    first, second = np.divmod(key, max(num_atoms, 1))
    return _PairList(first, second, column)


def _incidence_of(pair_list: _PairList, num_atoms: int) -> _Incidence:
    """List for every atom the pairs that contain it."""
    number = np.arange(pair_list.first.size)
    proper = np.flatnonzero(pair_list.first != pair_list.second)
    # The pairs in which an atom is second come before those in which it is first.
    atom = np.concatenate([pair_list.second[proper], pair_list.first])
    entry = np.concatenate([number[proper], number])
    other = np.concatenate([pair_list.first[proper], pair_list.second])
    order = np.argsort(atom, kind="stable")
    count = np.bincount(atom, minlength=num_atoms)
    return _Incidence(np.concatenate([[0], np.cumsum(count)]), entry[order], other[order])


def _ends_of(pair_list: _PairList) -> tuple[np.ndarray, np.ndarray]:
    """List the atoms of each pair, that of a self pair once, and where each pair begins."""
    ptr = np.concatenate([[0], np.cumsum(2 - (pair_list.first == pair_list.second))])
    end = np.empty(ptr[-1], dtype=np.int64)
    end[ptr[:-1]] = pair_list.first
    end[ptr[1:] - 1] = pair_list.second
    return end, ptr


def _orders_of(num_pairs: int, incidence: _Incidence) -> tuple[np.ndarray, np.ndarray]:
    """List for each atom the ordered pairs that begin there, both orders of a self pair.

    Pair k of P in the order (first, second) is k, and in the other order P + k: pairs (0, 0) and
    (0, 1) give 2, 0 and 1 at atom 0, and 3 at atom 1.
    """
    ptr, entry, other = incidence
    atom = incidence.atom
    alone = other == atom
    end = np.cumsum(1 + alone)
    order = np.repeat(entry + num_pairs * (other <= atom), 1 + alone)
    order[end[alone] - 1] -= num_pairs
    return order, np.concatenate([[0], end])[ptr]


def _counts_of(code: np.ndarray, incidence: _Incidence, num_codes: int) -> dict[str, np.ndarray]:
    """Count codes per atom, and list the pairs of each code and where each code begins."""
    cells = (incidence.ptr.size - 1) * num_codes
    cell = incidence.atom * num_codes + code[incidence.entry]
    # NumPy sorts narrow integers by counting.
    key = code.astype(np.uint16) if num_codes <= 2**16 else code
    lengths = np.bincount(code, minlength=num_codes)
    return {
        "code_count": np.bincount(cell, minlength=cells),
        "code_order": np.argsort(key, kind="stable"),
        "code_ptr": np.concatenate([[0], np.cumsum(lengths)]),
    }


# Sums and gathers.

RowMap = Callable[[Tensor, Pairs], Tensor]
"""A linear map of rows that the pairs define."""


def _add_up(rows: Tensor, listed: Tensor, starts: Tensor) -> Tensor:
    """Sum the listed rows of each list; zeros for an empty list."""
    if listed.numel() == 0 or rows.numel() == 0:
        return rows.new_zeros(starts.numel() - 1, rows.size(1))
    return functional.embedding_bag(listed, rows, starts, mode="sum", include_last_offset=True)


class _PairMap(Function):
    """A linear map, and its adjoint in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs, run: RowMap, adjoint: RowMap) -> Tensor:
        ctx.pairs = pairs
        ctx.run = run
        ctx.adjoint = adjoint
        return run(rows, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_rows = _PairMap.apply(gradient.contiguous(), ctx.pairs, ctx.adjoint, ctx.run)
        return of_rows, None, None, None


def _is_recorded(rows: Tensor) -> bool:
    return torch.is_grad_enabled() and rows.requires_grad


def _linear(rows: Tensor, pairs: Pairs, run: RowMap, adjoint: RowMap) -> Tensor:
    # The maps alone are faster, and refuse forward derivatives by themselves.
    return _PairMap.apply(rows, pairs, run, adjoint) if _is_recorded(rows) else run(rows, pairs)


def in_single(rows: Tensor) -> Tensor:
    """Convert half to single precision, which sums over thousands of rows require."""
    return rows if rows.dtype == torch.float64 else rows.float()


# Rows of pairs, summed per atom.


def pair_sum(rows: Float[Tensor, "pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all pairs it is in, a self pair once.

    Half precision is summed in single precision.

    Example:
        >>> pairs = Pairs.all_pairs([2])
        >>> pair_sum(torch.tensor([[1.0], [10.0], [100.0]]), pairs).flatten().tolist()
        [11.0, 110.0]
    """
    return _linear(in_single(rows).contiguous(), pairs, _sum_entries, _sum_ends)


def _sum_entries(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, pairs.entry, pairs.ptr)


def _sum_ends(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, *pairs.ends)


# Rows of atoms, summed over the atoms that each is paired with.


def neighbor_sum(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of all atoms that it is paired with; its own adjoint."""
    return _linear(rows.contiguous(), pairs, _sum_neighbors, _sum_neighbors)


def _sum_neighbors(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows, pairs.other, pairs.ptr)


# Two parts of a row per atom, u and v: u_i + v_j for both orders of each pair.


def order_gather(
    parts: Float[Tensor, "atom parts"], pairs: Pairs
) -> Float[Tensor, "two pair width"]:
    """Add, for both orders of each pair, one atom's first part and the other's second part."""
    _prepare_orders(parts, pairs)
    return _linear(parts, pairs, _gather_orders, _sum_orders)


def order_relu(parts: Float[Tensor, "atom parts"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Compute max(u_i + v_j, 0) + max(u_j + v_i, 0) for each pair."""
    runs_eagerly = not (torch.compiler.is_compiling() or _is_recorded(parts))
    native = runs_eagerly and pairs.plan.is_cpu and is_native(parts)
    if not native:
        _prepare_orders(parts, pairs)
    return _OrderReLU.apply(parts.resolve_neg().contiguous(), pairs, native)


class _OrderReLU(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, pairs: Pairs, native: bool) -> Tensor:
        ctx.pairs = pairs
        if native:  # no backward pass follows
            width = parts.size(1) // 2
            between = parts.new_empty(pairs.num_pairs, width)
            loaded_extension().order_relu(
                parts,
                parts.size(0),
                width,
                pairs.begins,
                pairs.num_pairs,
                between,
                torch.get_num_threads(),
            )
            return between
        both = _gather_orders(parts, pairs).relu_()
        ctx.save_for_backward(both)
        return both[0] + both[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (both,) = ctx.saved_tensors
        passed = torch.ops.aten.threshold_backward(gradient.expand_as(both), both, 0)
        return _PairMap.apply(passed, ctx.pairs, _sum_orders, _gather_orders), None, None


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


def _order_index(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """For each ordered pair its two half rows: u of its first atom and v of its second.

    Half rows are numbered 2 i (u of atom i) and 2 i + 1 (v of atom i): a pair of atoms 0 and 1
    alone gives 0, 3 (u_0 + v_1) and 2, 1 (u_1 + v_0).
    """

    def build() -> tuple[Tensor, Tensor]:
        first, second = (2 * pairs.begins).view(2, -1)
        forward = torch.stack([first, second + 1], 1)
        reverse = torch.stack([second, first + 1], 1)
        index = torch.cat([forward, reverse]).flatten()
        starts = torch.arange(0, index.numel() + 1, 2, dtype=index.dtype, device=index.device)
        return index, starts

    return pairs.remember("order_index", build)


def _half_row_index(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """For each half of an atom's row the ordered pairs that read it.

    A pair of atoms 0 and 1 alone has the orders 0, which reads u_0 and v_1, and 1, which reads u_1
    and v_0: u_0, v_0, u_1 and v_1 are read by 0, 1, 1 and 0.
    """

    def build() -> tuple[Tensor, Tensor]:
        order, ptr = pairs.orders
        length = ptr.diff()
        count = pairs.num_pairs

        # v of an atom is in the reverses of the ordered pairs that its u is in. Both lists of an
        # atom have the same length, so the second one begins one length later.
        number = torch.arange(order.numel(), dtype=ptr.dtype, device=ptr.device)
        atom = torch.repeat_interleave(length, output_size=order.numel())
        place = number + ptr[:-1].index_select(0, atom)
        index = order.new_empty(2 * order.numel())
        index[place] = order
        reverse = torch.where(order < count, order + count, order - count)
        index[place + length.index_select(0, atom)] = reverse

        twice = 2 * ptr
        starts = torch.stack([twice[:-1], twice[:-1] + length], 1).flatten()
        return index, torch.cat([starts, twice[-1:]])

    return pairs.remember("half_row_index", build)


# The sums of layers of pairs, without a row per pair in memory.


class PairWeights(NamedTuple):
    """The layers of :func:`sum_updated_pairs`."""

    between: Float[Tensor, "middle width"]  # W
    following: Float[Tensor, "out middle"]  # V
    bias: Float[Tensor, " out"]  # b


def sum_updated_pairs(
    parts: Float[Tensor, "atom parts"],
    own: Float[Tensor, "row middle"],
    weights: PairWeights,
    pairs: Pairs,
    coded: bool,
) -> Float[Tensor, "atom out"]:
    """Sum, for each atom, max(V max(W f + own, 0) + b, 0) of its pairs, f that of `order_relu`.

    ``own`` has one row per code, or per pair if not ``coded``. In inference alone, by C.
    """
    # Under autocast, linear maps return half precision, and C computes in single precision.
    sums: Tensor = _SumUpdatedPairs.apply(pairs, coded, in_single(parts), in_single(own), *weights)
    return sums


def can_sum_updated_pairs(pairs: Pairs, *matrices: Tensor) -> bool:
    """Whether `sum_updated_pairs` computes on rows and weights like these: in inference on CPUs."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not pairs.plan.is_cpu:
        return False
    # C keeps some rows on the stack.
    is_narrow = max(matrix.size(1) for matrix in matrices) <= 1024
    return is_narrow and is_native(*matrices)


class _SumUpdatedPairs(Function):
    """A function, so that forward derivatives and transforms are refused."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        pairs: Pairs,
        coded: bool,
        parts: Tensor,
        own: Tensor,
        between: Tensor,
        following: Tensor,
        bias: Tensor,
    ) -> Tensor:
        middle, width = between.shape

        # Whole vectors of any processor.
        inner_room = -middle % 16
        outer_room = -following.size(0) % 16
        weight = functional.pad(between.t(), (0, inner_room)).contiguous()
        following_weight = functional.pad(following.t(), (0, outer_room)).contiguous()

        # A thread has molecules of its own.
        threads = torch.get_num_threads()
        share = torch.arange(threads + 1) * pairs.num_molecules // threads
        first_atoms = pairs.atom_ptr.index_select(0, share)

        sums = parts.new_zeros(pairs.num_atoms, following_weight.size(1))
        failed = loaded_extension().pair_layers(
            atoms=pairs.num_atoms, width=width, pairs=pairs.num_pairs, codes=own.size(0),
            threads=threads, middle=middle, inner=weight.size(1), padded=sums.size(1),
            begins=pairs.begins, code=pairs.code if coded else None,
            starts=torch.searchsorted(pairs.first, first_atoms), parts=parts.contiguous(),
            own=functional.pad(own, (0, inner_room)), weight=weight, next=following_weight,
            bias=functional.pad(bias, (0, outer_room)), sums=sums,
        )  # fmt: skip
        if failed:
            problem = "Pairs: an atom or code is out of range"
            expected = f"{pairs.num_atoms} atoms, {own.size(0)} rows"
            raise mismatch(IndexError, problem, expected, "others")
        return sums[:, : following.size(0)]


# Rows of atoms, for both orders of each pair, and back.


def order_rows(rows: Float[Tensor, "atom width"], pairs: Pairs) -> Float[Tensor, "two pair width"]:
    """Return the row of the first atom of both orders of each pair."""
    return _linear(rows, pairs, _begin_rows, _sum_begins)


def order_sum(rows: Float[Tensor, "two pair width"], pairs: Pairs) -> Float[Tensor, "atom width"]:
    """Sum, for each atom, the rows of the ordered pairs that begin with it."""
    return _linear(in_single(rows).contiguous(), pairs, _sum_begins, _begin_rows)


def _begin_rows(rows: Tensor, pairs: Pairs) -> Tensor:
    return rows.index_select(0, pairs.begins).view(2, -1, rows.size(1))


def _sum_begins(rows: Tensor, pairs: Pairs) -> Tensor:
    return _add_up(rows.reshape(2 * pairs.num_pairs, rows.size(2)), *pairs.orders)


# Rows of codes.


def code_rows(table: Float[Tensor, "code width"], pairs: Pairs) -> Float[Tensor, "pair width"]:
    """Look up each pair's code in a table."""
    return _linear(table, pairs, _look_up, _sum_codes)


def _look_up(table: Tensor, pairs: Pairs) -> Tensor:
    return table.index_select(0, pairs.code)


def _sum_codes(rows: Tensor, pairs: Pairs) -> Tensor:
    if not rows.is_cuda:
        return _add_up(rows, *pairs.by_code)
    # Summing a few long lists would use only a few processors.
    codes = torch.arange(pairs.num_codes, device=rows.device)
    return (codes[:, None] == pairs.code).to(rows.dtype) @ rows


def check_rows(
    owner: str, x: Tensor, rows: Tensor, widths: tuple[int, int], pairs: Pairs, coded: bool
) -> None:
    """Check that there is a row per atom, and per code or per pair, of these widths."""
    checked_shape(f"{owner}: x has the wrong shape", x, (pairs.num_atoms, widths[0]))
    unit, count = ("code", pairs.num_codes) if coded else ("pair", pairs.num_pairs)
    problem = f"{owner}: wrong shape of the rows per {unit}"
    checked_shape(problem, rows, (count, widths[1]), hint="coded says whether rows are per code")
