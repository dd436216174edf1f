"""Split a data set: at random, by classes, in folds, by scaffolds, or as a column says."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets.split import PARTS, Split
from pyg_dynbatch.featurizers.scaffold import murcko_scaffold
from pyg_dynbatch.featurizers.smiles import MoleculeError

Fractions = tuple[float, float, float]

_USUAL: Fractions = (0.8, 0.1, 0.1)
# Other names that files use for the parts.
_NAMES = {"valid": "val", "validation": "val", "dev": "val", "training": "train", "testing": "test"}
_SUM = 1e-6


def random_split(num_examples: int, fractions: Fractions = _USUAL, seed: int = 0) -> Split:
    """Splits by a shuffle that depends on the seed alone.

    Args:
        num_examples: Number of examples.
        fractions: Share of train, val and test; what rounding leaves over goes to test.
        seed: Seed of the shuffle.

    Returns:
        The split.

    Raises:
        ValueError: If the fractions are no shares of a whole.

    Example:
        >>> random_split(10, seed=1).sizes
        (8, 1, 1)
    """
    sizes = _sizes(num_examples, fractions)
    order = np.random.default_rng(seed).permutation(num_examples)
    return _cut(order, sizes, "random", seed)


def stratified_split(
    labels: Sequence[float | int] | np.ndarray,
    fractions: Fractions = _USUAL,
    seed: int = 0,
    bins: int | None = None,
) -> Split:
    """Splits so that every part has each class, or each range of a value, in about equal share.

    Examples are sorted by label (by bin of equal counts, if there are bins), at random among
    equals, and dealt to the parts in turn. Examples without a label (NaN) are a class too, and
    no part of any range.

    Args:
        labels: One label an example.
        fractions: Share of train, val and test.
        seed: Seed of the shuffle.
        bins: Number of ranges a continuous label is cut into; None takes it as classes.

    Returns:
        The split.

    Raises:
        ValueError: If the fractions are no shares of a whole, or there is no range.

    Example:
        >>> labels = [0] * 80 + [1] * 20
        >>> split = stratified_split(labels)
        >>> [int(np.take(labels, numbers).sum()) for _, numbers in split.parts()]
        [16, 2, 2]
    """
    values = np.array(labels, dtype=np.float64)
    sizes = np.array(_sizes(len(values), fractions))
    if bins is not None:
        if bins < 1:
            raise ValueError(
                mismatch("stratified_split: bins is out of range", expected="1 or more", got=bins)
            )
        known = ~np.isnan(values)
        ranks = np.argsort(np.argsort(values[known], kind="stable"), kind="stable")
        values[known] = ranks * bins // max(int(known.sum()), 1)
    chance = np.random.default_rng(seed).permutation(len(values))
    order = np.lexsort((chance, values))
    parts: list[list[int]] = [[], [], []]
    for taken, example in enumerate(order.tolist(), start=1):
        # Whoever lags most behind its share of what was dealt so far gets the next one.
        owed = sizes * taken / len(values) - [len(part) for part in parts]
        parts[int(owed.argmax())].append(example)
    return _split(parts, "stratified", seed, len(values))


def kfold_splits(
    num_examples: int, folds: int = 5, seed: int = 0, repeats: int = 1, val: bool = True
) -> list[Split]:
    """Makes the splits of a cross validation, perhaps several times over.

    Every example is in the test part of exactly one split of each repeat.

    Args:
        num_examples: Number of examples.
        folds: Number of parts of nearly equal size.
        seed: Seed of the first repeat's shuffle; the next repeats take the next seeds.
        repeats: How often all folds are made anew.
        val: Whether the fold after the test fold validates; else there is no validation part.

    Returns:
        ``folds`` splits for each repeat.

    Raises:
        ValueError: If there are too few folds or examples.

    Example:
        >>> [split.sizes for split in kfold_splits(10, folds=5)[:2]]
        [(6, 2, 2), (6, 2, 2)]
    """
    least = 3 if val else 2
    if not least <= folds <= num_examples:
        raise ValueError(
            mismatch(
                "kfold_splits: the number of folds is out of range",
                expected=f"{least} to {num_examples}, the number of examples",
                got=folds,
            )
        )
    splits = []
    for repeat in range(seed, seed + repeats):
        order = np.random.default_rng(repeat).permutation(num_examples)
        pieces = np.array_split(order, folds)
        for fold in range(folds):
            after = (fold + 1) % folds if val else None
            kept = [piece for i, piece in enumerate(pieces) if i not in (fold, after)]
            middle = order[:0] if after is None else pieces[after]
            name = f"fold {fold + 1} of {folds}"
            splits.append(
                Split(
                    np.concatenate(kept),
                    middle,
                    pieces[fold],
                    name,
                    repeat,
                    num_examples=num_examples,
                )
            )
    return splits


def scaffold_split(
    smiles: Sequence[str], fractions: Fractions = _USUAL, seed: int | None = None
) -> Split:
    """Splits so that molecules of one Murcko scaffold are in one part.

    Without a seed the split is the deterministic one of MoleculeNet: sets of equal scaffold are
    taken by size, the biggest first (of equally big ones that whose first molecule comes last),
    and fill train, then val, then test. So the test part has the rare scaffolds.

    With a seed it is the balanced one: sets bigger than half of val or test come first, all
    others after them, both shuffled, and each goes to the first part that has room for it.

    A SMILES that cannot be read, and a molecule without rings, has the empty scaffold.

    Args:
        smiles: One text a molecule.
        fractions: Share of train, val and test.
        seed: Seed of the balanced split; None for the deterministic one.

    Returns:
        The split.

    Raises:
        ImportError: If RDKit is not installed.
        ValueError: If the fractions are no shares of a whole.

    Reference:
        Wu et al. (2018), doi:10.1039/C7SC02664A, section 3.2, for the deterministic split; Yang
        et al. (2019), doi:10.1021/acs.jcim.9b00237, for the balanced one.

    Example:
        >>> rings = ["C1CC1", "CC1CC1", "CCC1CC1", "OC1CC1", "c1ccccc1"]
        >>> scaffold_split(rings, (0.8, 0.2, 0.0)).val.tolist()
        [4]
    """
    sizes = _sizes(len(smiles), fractions)
    sets: defaultdict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(smiles):
        sets[_scaffold_of(text)].append(number)
    if seed is None:
        order = sorted(sets.values(), key=lambda group: (len(group), group[0]), reverse=True)
        return _split(_filled(order, fractions, len(smiles)), "scaffold", None, len(smiles))
    # A set without room in val or test of its half size would unbalance them.
    big = [group for group in sets.values() if len(group) > min(sizes[1:]) / 2]
    small = [group for group in sets.values() if len(group) <= min(sizes[1:]) / 2]
    generator = np.random.default_rng(seed)
    order = [groups[i] for groups in (big, small) for i in generator.permutation(len(groups))]
    parts: list[list[int]] = [[], [], []]
    for group in order:
        roomy = [i for i in (0, 1) if len(parts[i]) + len(group) <= sizes[i]]
        parts[roomy[0] if roomy else 2] += group
    return _split(parts, "scaffold balanced", seed, len(smiles))


def column_split(
    values: Sequence[Any] | Mapping[int, Any], rows: Sequence[int] | np.ndarray
) -> Split:
    """Splits as a column of the source says.

    Args:
        values: For each record of the source ``"train"``, ``"val"`` (or ``"valid"``,
            ``"validation"``, ``"dev"``) or ``"test"``, in any case; empty, None or NaN (what
            pandas makes of an empty cell) for no part.
        rows: For each example the number of its record: ``dataset.rows``.

    Returns:
        The split.

    Raises:
        ValueError: If a value is none of these, or there is no value for a record.

    Example:
        >>> column_split(["train", "bad row", "Valid", "test"], rows=[0, 2, 3])
        Split(column: train=1, val=1, test=1, digest=d1e673d5936484d6)
    """
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    for example, row in enumerate(int(row) for row in rows):
        try:
            given = values[row]
        except (IndexError, KeyError) as error:
            raise ValueError(
                mismatch(
                    "column_split: there is no value for a record",
                    expected="one value for every record of the source",
                    got=f"{len(values)} values, none for record {row}",
                )
            ) from error
        missing = given is None or given != given  # NaN alone is unequal to itself
        name = "" if missing else str(given).strip().lower()
        name = _NAMES.get(name, name)
        if name and name not in parts:
            raise ValueError(
                mismatch(
                    "column_split: a value names no part",
                    expected=", ".join(PARTS),
                    got=repr(given),
                    where=f"record {row}",
                )
            )
        if name:
            parts[name].append(example)
    return _split(list(parts.values()), "column", None, len(rows))


def _scaffold_of(smiles: str) -> str:
    try:
        return murcko_scaffold(smiles)
    except MoleculeError:
        # A blank row; it has no target and does no harm in any part.
        return ""


def _filled(groups: Sequence[list[int]], fractions: Fractions, total: int) -> list[list[int]]:
    parts: list[list[int]] = [[], [], []]
    first, second = fractions[0] * total, (fractions[0] + fractions[1]) * total
    for group in groups:
        if len(parts[0]) + len(group) <= first + _SUM:
            parts[0] += group
        elif len(parts[0]) + len(parts[1]) + len(group) <= second + _SUM:
            parts[1] += group
        else:
            parts[2] += group
    return parts


def _sizes(total: int, fractions: Fractions) -> tuple[int, int, int]:
    shares = [float(share) for share in fractions]
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > _SUM:
        raise ValueError(
            mismatch(
                "split: the fractions are no shares of a whole",
                expected="three numbers of 0 or more whose sum is 1",
                got=list(fractions),
            )
        )
    train, val = int(shares[0] * total + _SUM), int(shares[1] * total + _SUM)
    return train, val, total - train - val


def _cut(order: np.ndarray, sizes: tuple[int, int, int], method: str, seed: int | None) -> Split:
    first, second = sizes[0], sizes[0] + sizes[1]
    parts = (order[:first], order[first:second], order[second:])
    return Split(*parts, method, seed, num_examples=len(order))


def _split(parts: Sequence[Any], method: str, seed: int | None, total: int) -> Split:
    train, val, test = (np.array(part, dtype=np.int64) for part in parts)
    return Split(train, val, test, method, seed, num_examples=total)
