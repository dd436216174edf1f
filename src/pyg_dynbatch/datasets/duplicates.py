"""Find molecules that occur more than once: between the parts of a split, or in disagreement."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyg_dynbatch.datasets.split import Split
from pyg_dynbatch.featurizers.scaffold import canonical_smiles
from pyg_dynbatch.featurizers.smiles import MoleculeError

_SHOWN = 3


@dataclass(frozen=True)
class Leakage:
    """Counts the molecules that are in more than one part of a split.

    Attributes:
        counts: For two parts the number of different molecules they have in common.
        examples: A few of them, as canonical SMILES.

    Example:
        >>> print(Leakage({"train/test": 1}, ("CO",)))
        1 molecule in both train and test, such as CO
    """

    counts: dict[str, int]
    examples: tuple[str, ...]

    @property
    def total(self) -> int:
        """Number of molecules in common, summed over the pairs of parts."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        if not self.total:
            return "no molecule is in two parts"
        found = [
            f"{count} molecule{'s' if count > 1 else ''} in both {' and '.join(pair.split('/'))}"
            for pair, count in self.counts.items()
            if count
        ]
        return f"{', '.join(found)}, such as {', '.join(self.examples)}"


@dataclass(frozen=True)
class Duplicates:
    """Lists the molecules that occur more than once in a data set.

    Attributes:
        groups: For each such molecule the numbers of its examples.
        conflicts: Those of the groups whose known targets differ.

    Example:
        >>> print(Duplicates(((0, 2), (1, 5)), ((0, 2),)))
        2 molecules occur 4 times; 1 of them with different targets
    """

    groups: tuple[tuple[int, ...], ...]
    conflicts: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        times = sum(map(len, self.groups))
        count = len(self.groups)
        return (
            f"{count} molecule{' occurs' if count == 1 else 's occur'} {times} times; "
            f"{len(self.conflicts)} of them with different targets"
        )


def canonical_texts(smiles: Sequence[str]) -> list[str | None]:
    """Writes every molecule in its canonical form.

    Args:
        smiles: One text a molecule.

    Returns:
        Canonical SMILES; None for a text that cannot be read.

    Raises:
        ImportError: If RDKit is not installed.

    Example:
        >>> canonical_texts(["OC", "CO", "C("])
        ['CO', 'CO', None]
    """
    found: list[str | None] = []
    for text in smiles:
        try:
            found.append(canonical_smiles(text))
        except MoleculeError:
            found.append(None)
    return found


def find_leakage(
    split: Split, smiles: Sequence[str], texts: Sequence[str | None] | None = None
) -> Leakage:
    """Looks for molecules that are in two parts of a split, however they are written.

    Args:
        split: The split.
        smiles: One text an example.
        texts: `canonical_texts` of them, if they are at hand; None makes them.

    Returns:
        What was found.

    Raises:
        ImportError: If RDKit is not installed.

    Example:
        >>> split = Split(np.array([0, 1]), np.array([2]), np.array([3]), num_examples=4)
        >>> find_leakage(split, ["CO", "CC", "CCC", "OC"]).counts
        {'train/val': 0, 'train/test': 1, 'val/test': 0}
    """
    texts = canonical_texts(smiles) if texts is None else texts
    parts = {name: {texts[i] for i in numbers} - {None} for name, numbers in split.parts()}
    pairs = [("train", "val"), ("train", "test"), ("val", "test")]
    common = {f"{one}/{other}": parts[one] & parts[other] for one, other in pairs}
    shown = sorted({text for texts in common.values() for text in texts if text is not None})
    counts = {pair: len(found) for pair, found in common.items()}
    return Leakage(counts, tuple(shown[:_SHOWN]))


def find_duplicates(
    smiles: Sequence[str],
    targets: Any = None,
    tolerance: float = 0.0,
    texts: Sequence[str | None] | None = None,
) -> Duplicates:
    """Looks for molecules that occur more than once, and for those whose targets disagree.

    Args:
        smiles: One text an example.
        targets: ``[molecule, task]``, NaN where missing; None to look at the molecules alone.
        tolerance: Targets that differ by no more than this agree.
        texts: `canonical_texts` of the SMILES, if they are at hand; None makes them.

    Returns:
        What was found.

    Raises:
        ImportError: If RDKit is not installed.

    Example:
        >>> find_duplicates(["CO", "CC", "OC"], [[1.0], [0.0], [0.0]]).conflicts
        ((0, 2),)
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(canonical_texts(smiles) if texts is None else texts):
        if text is not None:
            places[text].append(number)
    groups = tuple(tuple(group) for group in places.values() if len(group) > 1)
    if targets is None:
        return Duplicates(groups, ())
    values = np.asarray(targets, dtype=np.float64)
    conflicts = [group for group in groups if _spread(values[list(group)]) > tolerance]
    return Duplicates(groups, tuple(conflicts))


def _spread(values: np.ndarray) -> float:
    """Largest difference between known targets of one task."""
    known = ~np.isnan(values)
    highest = np.where(known, values, -np.inf).max(axis=0)
    lowest = np.where(known, values, np.inf).min(axis=0)
    return float(np.where(known.any(axis=0), highest - lowest, 0.0).max(initial=0.0))
