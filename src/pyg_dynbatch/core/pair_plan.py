"""Enumerate pairs of atoms and the pairs of every atom, by offsets and repeats alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch


class HalfPairs(NamedTuple):
    """Unordered pairs, sorted by first and then by second atom.

    ``column`` is where each one stood in what it was made from.
    """

    first: np.ndarray
    second: np.ndarray
    column: np.ndarray
    code: np.ndarray


_NONE = np.zeros(0, dtype=np.int64)


def checked_sizes(name: str, sizes: Sequence[int] | Tensor) -> np.ndarray:
    """Turns numbers of atoms into an array.

    Raises:
        ValueError: If one is negative, or they are no plain list.
    """
    atoms = np.asarray(sizes.cpu() if isinstance(sizes, Tensor) else sizes, dtype=np.int64)
    if atoms.ndim != 1:
        raise ValueError(
            mismatch(
                f"{name}: sizes are no plain list",
                expected="the number of atoms of each molecule",
                got=f"an array of shape {list(atoms.shape)}",
            )
        )
    if atoms.size and atoms.min() < 0:
        example = int(np.argmax(atoms < 0))
        raise ValueError(
            mismatch(
                f"{name}: a molecule has a negative number of atoms",
                expected="0 or more",
                got=int(atoms[example]),
                where=f"example {example}",
            )
        )
    return atoms


def checked_codes(
    pair_code: Tensor, atoms: np.ndarray, kept: Tensor | None, num_codes: int | None
) -> tuple[np.ndarray, int]:
    """Compares codes with the numbers of atoms and of codes.

    Raises:
        ValueError: If there are too many or too few, or one is too large.
    """
    stored = atoms * (atoms + 1) // 2
    code = pair_code.detach().cpu().numpy().astype(np.int64)
    if code.size != stored.sum():
        raise ValueError(
            mismatch(
                "Pairs.from_codes: the number of codes does not fit the atoms",
                expected=f"{int(stored.sum())} codes, N (N + 1) / 2 for N atoms",
                got=f"{code.size} codes",
                where=f"a batch of {atoms.size} molecules with {int(atoms.sum())} atoms",
                mend="codes of all pairs i <= j with self pairs, whichever of them are used",
            )
        )
    if num_codes is None:
        num_codes = int(code.max(initial=0)) + 1
    outside = (code < 0) | (code >= num_codes)
    if outside.any() or (kept is not None and kept.numel() != num_codes):
        wrong = int(np.argmax(outside)) if outside.any() else -1
        example = int(np.searchsorted(np.cumsum(stored), wrong, side="right"))
        raise ValueError(
            mismatch(
                "Pairs.from_codes: a code is outside of the table",
                expected=f"codes 0 to {num_codes - 1}",
                got=int(code[wrong]) if wrong >= 0 else f"{kept.numel()} in kept",  # type: ignore[union-attr]
                where=f"example {example}" if wrong >= 0 else "kept",
                mend="the table with which the codes were made",
            )
        )
    return code, num_codes


def triangles(atoms: np.ndarray) -> HalfPairs:
    """Enumerates all pairs i <= j of each molecule, row by row."""
    _, left = _places(atoms)
    first = np.repeat(np.arange(left.size), left)
    column = np.arange(first.size)
    return HalfPairs(first, first + column - _row_starts(left)[first], column, _NONE)


def filtered(half: HalfPairs, keep: np.ndarray | None) -> HalfPairs:
    """Drops pairs; the code may be left out."""
    if keep is None:
        return half
    chosen = np.flatnonzero(keep)
    return HalfPairs(*(part[chosen] if part.size else part for part in half))


def of_pair_index(pair_index: np.ndarray, num_atoms: int, atoms: np.ndarray) -> HalfPairs:
    """Sorts a list of pairs, and takes each one once.

    Raises:
        ValueError: If an atom is out of range, a pair joins two molecules, or the sizes do not
            add up to the number of atoms.
    """
    if pair_index.ndim != 2 or len(pair_index) != 2 or atoms.sum() != num_atoms:
        raise ValueError(
            mismatch(
                "Pairs.from_pair_index: pair_index or sizes have another form",
                expected=f"pair_index [2, pair], sizes of {num_atoms} atoms together",
                got=f"pair_index {list(pair_index.shape)}, sizes of {int(atoms.sum())} atoms",
            )
        )
    outside = np.any((pair_index < 0) | (pair_index >= num_atoms), axis=0)
    _complain("an atom is out of range", f"atoms 0 to {num_atoms - 1}", pair_index, outside)
    molecule = np.repeat(np.arange(atoms.size), atoms)[pair_index]
    strange = molecule[0] != molecule[1]
    _complain("a pair joins two molecules", "two atoms of one molecule", pair_index, strange)
    low, high = pair_index.min(0), pair_index.max(0)
    key, column = np.unique(low.astype(np.int64) * num_atoms + high, return_index=True)
    first, second = np.divmod(key, max(num_atoms, 1))
    return HalfPairs(first, second, column, _NONE)


def incidence_of(
    half: HalfPairs, atoms: np.ndarray, full: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists for every atom the pairs that contain it.

    Args:
        half: The pairs.
        atoms: Number of atoms of each molecule.
        full: Whether these are all pairs, self pairs included; then nothing need be sorted.

    Returns:
        First entry of each atom, the pair of each entry, and the other atom of that pair.
    """
    if full:
        _, left = _places(atoms)
        degree = np.repeat(atoms, atoms)
        ptr = np.concatenate([[0], np.cumsum(degree)])
        owner = np.repeat(np.arange(left.size), degree)
        start = np.repeat(np.repeat(np.cumsum(atoms) - atoms, atoms), degree)
        other = np.arange(owner.size) - ptr[owner] + start
        low = np.minimum(owner, other)
        return ptr, _row_starts(left)[low] + np.maximum(owner, other) - low, other
    number = np.arange(half.first.size)
    proper = np.flatnonzero(half.first != half.second)
    # The pairs in which an atom is the second come before those in which it is the first.
    owner = np.concatenate([half.second[proper], half.first])
    order = np.argsort(owner, kind="stable")
    entry = np.concatenate([number[proper], number])[order]
    other = np.concatenate([half.first[proper], half.second])[order]
    count = np.bincount(owner, minlength=int(atoms.sum()))
    return np.concatenate([[0], np.cumsum(count)]), entry, other


def ends_of(half: HalfPairs) -> tuple[np.ndarray, np.ndarray]:
    """Lists the atoms of each pair, that of a self pair once, and where each pair begins."""
    ptr = np.concatenate([[0], np.cumsum(2 - (half.first == half.second))])
    end = np.empty(ptr[-1], dtype=np.int64)
    end[ptr[:-1]] = half.first
    end[ptr[1:] - 1] = half.second
    return end, ptr


def orders_of(
    num_pairs: int, ptr: np.ndarray, entry: np.ndarray, other: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lists for each atom the ordered pairs that begin there, both orders of a self pair."""
    owner = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    alone = other == owner
    end = np.cumsum(1 + alone)
    order = np.repeat(entry + num_pairs * (other <= owner), 1 + alone)
    order[end[alone] - 1] -= num_pairs
    return order, np.concatenate([[0], end])[ptr]


def counts_of(
    code: np.ndarray, incidence: tuple[np.ndarray, np.ndarray, np.ndarray], num_codes: int
) -> list[np.ndarray]:
    """Counts codes atom by atom, and lists the pairs of each code and where each code begins."""
    ptr, entry, _ = incidence
    owner = np.repeat(np.arange(ptr.size - 1), np.diff(ptr))
    cells = (ptr.size - 1) * num_codes
    count = np.bincount(owner * num_codes + code[entry], minlength=cells)
    # Narrow integers are sorted by counting.
    order = np.argsort(code.astype(np.uint16) if num_codes <= 2**16 else code, kind="stable")
    by_code = np.cumsum(np.bincount(code, minlength=num_codes))
    return [count, order, np.concatenate([[0], by_code])]


def _places(atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gives each atom's place in its molecule, and how many atoms come from it on."""
    size = np.repeat(atoms, atoms)
    place = np.arange(size.size) - np.repeat(np.cumsum(atoms) - atoms, atoms)
    return place, size - place


def _row_starts(left: np.ndarray) -> np.ndarray:
    return np.cumsum(left) - left


def _complain(what: str, expected: str, pair_index: np.ndarray, wrong: Any) -> None:
    if wrong.any():
        column = int(np.argmax(wrong))
        raise ValueError(
            mismatch(
                f"Pairs.from_pair_index: {what}",
                expected=expected,
                got=f"atoms {pair_index[0, column]} and {pair_index[1, column]}",
                where=f"column {column}",
            )
        )
