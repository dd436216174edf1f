"""Split molecules at random, by classes, folds, scaffolds or a column; find copies in two parts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Float, Int64

from pyg_dynbatch.core.errors import checked_choice, checked_count, checked_range, mismatch
from pyg_dynbatch.molecules.chemistry import MoleculeError, canonical_smiles, murcko_scaffold

PARTS = ("train", "val", "test")
Fractions: TypeAlias = tuple[float, float, float]

_USUAL: Fractions = (0.8, 0.1, 0.1)
# Other names of the parts in files.
_NAMES = {"valid": "val", "validation": "val", "dev": "val", "training": "train", "testing": "test"}
_ROUNDING = 1e-6


class Split(NamedTuple):
    """Sorted indices of the examples of the three parts of a data set.

    Args:
        train: Indices of the examples to train on.
        val: Indices of those for model selection.
        test: Indices of those for the final evaluation.

    Example:
        >>> random_split(4, (0.5, 0.25, 0.25)).sizes
        (2, 1, 1)
    """

    train: Int64[np.ndarray, " train"]
    val: Int64[np.ndarray, " val"]
    test: Int64[np.ndarray, " test"]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of examples of each part."""
        return len(self.train), len(self.val), len(self.test)


def random_split(num_examples: int, fractions: Fractions = _USUAL, seed: int = 0) -> Split:
    """Split at random; the shuffle depends only on the seed.

    Args:
        num_examples: Number of examples.
        fractions: Share of train, val and test; what rounding leaves goes to test.
        seed: Seed of the shuffle.

    Raises:
        ValueError: If the fractions are not three numbers that sum to 1.

    Example:
        >>> random_split(10, seed=1).sizes
        (8, 1, 1)
    """
    train, val, _ = _sizes(num_examples, fractions)
    order = np.random.default_rng(seed).permutation(num_examples)
    return _split(order[:train], order[train : train + val], order[train + val :])


def stratified_split(
    labels: Sequence[float] | Float[np.ndarray, " example"],
    fractions: Fractions = _USUAL,
    seed: int = 0,
    bins: int | None = None,
) -> Split:
    """Split so that each class, or range of a value, has about the same share in every part.

    Examples without a label (NaN) form a separate class.

    Args:
        labels: One label per example.
        fractions: Share of train, val and test.
        seed: Seed of the shuffle.
        bins: Number of ranges of equal counts for a continuous label; None for classes.

    Raises:
        ValueError: If the fractions are not three numbers that sum to 1, or `bins` is below 1.

    Example:
        >>> labels = [0.0] * 80 + [1.0] * 20
        >>> [int(np.take(labels, part).sum()) for part in stratified_split(labels)]
        [16, 2, 2]
    """
    values = np.array(labels, dtype=np.float64)
    sizes = np.array(_sizes(len(values), fractions))
    if bins is not None:
        checked_count("stratified_split: bins", bins)
        is_known = ~np.isnan(values)
        ranks = np.argsort(np.argsort(values[is_known], kind="stable"), kind="stable")
        values[is_known] = ranks * bins // max(len(ranks), 1)
    chance = np.random.default_rng(seed).permutation(len(values))
    order = np.lexsort((chance, values))
    parts: tuple[list[int], ...] = ([], [], [])
    for num_assigned, example in enumerate(order.tolist(), start=1):
        # Assign to the part furthest below its share of the examples so far.
        owed = sizes * num_assigned / len(values) - [len(part) for part in parts]
        parts[int(owed.argmax())].append(example)
    return _split(*parts)


def kfold_splits(num_examples: int, folds: int = 5, seed: int = 0) -> list[Split]:
    """Return the splits of a cross validation: every example is tested once.

    Args:
        num_examples: Number of examples.
        folds: Number of parts of nearly equal size; the one after the test fold validates.
        seed: Seed of the shuffle.

    Returns:
        One split per fold.

    Raises:
        ValueError: If there are too few folds or examples.

    Example:
        >>> [split.sizes for split in kfold_splits(10, folds=5)[:2]]
        [(6, 2, 2), (6, 2, 2)]
    """
    checked_range("kfold_splits: the number of folds", folds, f"[3, {num_examples}]")
    pieces = np.array_split(np.random.default_rng(seed).permutation(num_examples), folds)
    splits = []
    for fold in range(folds):
        test, val, *train = pieces[fold:] + pieces[:fold]
        splits.append(_split(np.concatenate(train), val, test))
    return splits


def scaffold_split(
    smiles: Sequence[str], fractions: Fractions = _USUAL, seed: int | None = None
) -> Split:
    """Split so that all molecules of a Murcko scaffold are in the same part.

    Without a seed the split is the deterministic one of MoleculeNet: the molecules of each
    scaffold form a set, and the sets, the largest first (of equally large ones, the one whose first
    molecule comes last), fill train, then val, then test. With a seed it is the balanced one: sets
    larger than half of val or test come first, then all others, both shuffled, each to the first
    part with room for it.

    A SMILES that cannot be read, and a molecule without rings, has the empty scaffold.

    Args:
        smiles: One text per molecule.
        fractions: Share of train, val and test.
        seed: Seed of the balanced split; None for the deterministic one.

    Raises:
        ValueError: If the fractions are not three numbers that sum to 1.

    Reference:
        Wu et al. (2018), doi:10.1039/C7SC02664A, section 3.2, for the deterministic split; Yang
        et al. (2019), doi:10.1021/acs.jcim.9b00237, for the balanced one.

    Example:
        >>> rings = ["C1CC1", "CC1CC1", "CCC1CC1", "OC1CC1", "c1ccccc1"]
        >>> scaffold_split(rings, (0.8, 0.2, 0.0)).val.tolist()
        [4]
    """
    sizes = _sizes(len(smiles), fractions)
    groups_of: defaultdict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(smiles):
        groups_of[_scaffold_or_empty(text)].append(number)
    groups = list(groups_of.values())
    if seed is None:
        return _by_size(groups, fractions, len(smiles))
    return _balanced(groups, sizes, seed)


def _scaffold_or_empty(smiles: str) -> str:
    try:
        return murcko_scaffold(smiles)
    except MoleculeError:
        return ""


def _by_size(groups: list[list[int]], fractions: Fractions, total: int) -> Split:
    room_of_train = fractions[0] * total + _ROUNDING
    room_of_both = (fractions[0] + fractions[1]) * total + _ROUNDING
    train: list[int] = []
    val: list[int] = []
    test: list[int] = []
    for group in sorted(groups, key=lambda group: (-len(group), -group[0])):
        if len(train) + len(group) <= room_of_train:
            train += group
        elif len(train) + len(val) + len(group) <= room_of_both:  # what train has left, too
            val += group
        else:
            test += group
    return _split(train, val, test)


def _balanced(groups: list[list[int]], sizes: tuple[int, int, int], seed: int) -> Split:
    generator = np.random.default_rng(seed)
    half = min(sizes[1:]) / 2
    big = [group for group in groups if len(group) > half]
    others = [group for group in groups if len(group) <= half]
    # A late big set would find no room in val or test.
    order = [big[i] for i in generator.permutation(len(big))]
    order += [others[i] for i in generator.permutation(len(others))]
    train: list[int] = []
    val: list[int] = []
    test: list[int] = []
    for group in order:
        if len(train) + len(group) <= sizes[0]:
            train += group
        elif len(val) + len(group) <= sizes[1]:
            val += group
        else:
            test += group
    return _split(train, val, test)


def column_split(values: Sequence[str | float | None]) -> Split:
    """Split by a column of the source.

    Args:
        values: For each example ``"train"``, ``"val"`` (or ``"valid"``, ``"validation"``,
            ``"dev"``) or ``"test"``, in any case; empty, None or NaN for no part.

    Raises:
        ValueError: If a value is none of these.

    Example:
        >>> column_split(["train", "Valid", "", "test"]).val.tolist()
        [1]
    """
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    for example, value in enumerate(values):
        is_missing = value is None or value != value  # NaN alone is unequal to itself
        name = "" if is_missing else str(value).strip().lower()
        name = _NAMES.get(name, name)
        if name not in ("", *PARTS):
            raise mismatch(
                ValueError,
                "column_split: a value is not the name of a part",
                ", ".join(PARTS),
                repr(value),
                where=f"example {example}",
            )
        if name:
            parts[name].append(example)
    return _split(*parts.values())


def _sizes(total: int, fractions: Fractions) -> tuple[int, int, int]:
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > _ROUNDING:
        raise mismatch(
            ValueError,
            "split: the fractions cannot be used",
            "three, at least 0, with the sum 1",
            list(fractions),
        )
    train = int(fractions[0] * total + _ROUNDING)
    val = int(fractions[1] * total + _ROUNDING)
    if fractions[2] == 0:  # what rounding leaves goes to the last part that has a share
        return (train, total - train, 0) if fractions[1] else (total, 0, 0)
    return train, val, total - train - val


def _split(*parts: Sequence[int] | np.ndarray) -> Split:
    train, val, test = (np.sort(np.array(part, dtype=np.int64)) for part in parts)
    return Split(train, val, test)


def describe_leakage(split: Split, smiles: Sequence[str]) -> str:
    """Describe the molecules that are in two parts of a split, however they are written.

    Example:
        >>> split = Split(np.array([0, 1]), np.array([2]), np.array([3]))
        >>> describe_leakage(split, ["CO", "CC", "CCC", "OC"])
        '1 molecule in both train and test, such as CO'
    """
    texts = [set(_canonical_texts(smiles, part)) for part in split]
    descriptions = []
    examples: set[str] = set()
    for first, second in combinations(range(len(PARTS)), 2):
        common = texts[first] & texts[second]
        examples |= common
        if common:
            molecules = "molecule" if len(common) == 1 else "molecules"
            parts = f"{PARTS[first]} and {PARTS[second]}"
            descriptions.append(f"{len(common)} {molecules} in both {parts}")
    if not descriptions:
        return "no molecule is in two parts"
    return f"{', '.join(descriptions)}, such as {', '.join(sorted(examples)[:3])}"


def _canonical_texts(smiles: Sequence[str], part: Int64[np.ndarray, " example"]) -> Iterator[str]:
    for number in part.tolist():
        try:
            yield canonical_smiles(smiles[number])
        except MoleculeError:
            continue  # two texts that cannot be read are not known to be one molecule


SplitMethod = Literal["random", "stratified", "scaffold", "scaffold_balanced", "column", "kfold"]


@dataclass(frozen=True)
class SplitOptions:
    """Options for splitting molecules; their seed does not affect the weights.

    Args:
        method: ``random``; ``stratified`` (each class, or range of values, of one target in equal
            shares); ``scaffold`` (rare Murcko scaffolds to test); ``scaffold_balanced`` (scaffolds
            assigned at random); ``column`` (of your file: train, val, test); or ``kfold`` (fold
            ``fold`` tests, the next one validates; another seed is another repeat).
        seed: Seed of the random methods; by default the seed of the run (``seed_everything``).
        fractions: Shares of train, val and test.
        folds: Number of folds.
        fold: Index of the fold to test, from 0.
        target: Name of the target of ``stratified``; not needed if there is only one.
        bins: Number of ranges for ``stratified``; by default 10 for values, none for classes.
        column: Name of the column.

    Raises:
        ValueError: If the method is unknown, or ``column`` has no name of a column.

    Example:
        >>> SplitOptions("kfold", folds=10, fold=3).seed is None
        True
    """

    method: SplitMethod = "random"
    seed: int | None = None
    fractions: Fractions = _USUAL
    folds: int = 5
    fold: int = 0
    target: str | None = None
    bins: int | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        """Check what the method needs."""
        checked_choice("SplitOptions: unknown method", self.method, get_args(SplitMethod))
        if self.method == "column" and self.column is None:
            raise mismatch(
                ValueError, "SplitOptions: the method needs a column", "its name", "no column"
            )


def make_split(
    options: SplitOptions,
    seed: int,
    *,
    smiles: Sequence[str],
    targets: Float[np.ndarray, "molecule task"],
    target_names: Sequence[str],
    kind: str = "regression",
    column: Sequence[str | float | None] | None = None,
) -> Split:
    """Split molecules by any method.

    Args:
        options: The method and its options.
        seed: Seed of the random methods where the options have none.
        smiles: One text per molecule, for scaffolds.
        targets: One row per molecule, NaN where unknown, for ``stratified``.
        target_names: Name of every column of `targets`.
        kind: ``"regression"`` for values, anything else for classes.
        column: One name of a part per molecule, for ``column``.

    Raises:
        ValueError: If an option does not fit the molecules.

    Example:
        >>> options = SplitOptions("random", fractions=(0.5, 0.5, 0.0))
        >>> targets = np.zeros((4, 1))
        >>> make_split(options, 0, smiles=["C"] * 4, targets=targets, target_names=["y"]).sizes
        (2, 2, 0)
    """
    seed = seed if options.seed is None else options.seed
    if options.method == "random":
        return random_split(len(smiles), options.fractions, seed)
    if options.method == "stratified":
        labels = targets[:, _index_of_target(options.target, target_names)]
        bins = 10 if options.bins is None and kind == "regression" else options.bins
        return stratified_split(labels, options.fractions, seed, bins)
    if options.method == "scaffold":
        return scaffold_split(smiles, options.fractions)
    if options.method == "scaffold_balanced":
        return scaffold_split(smiles, options.fractions, seed)
    if options.method == "kfold":
        checked_choice("SplitOptions: unknown fold", options.fold, range(options.folds))
        return kfold_splits(len(smiles), options.folds, seed)[options.fold]
    if column is None:
        raise mismatch(ValueError, "make_split: the molecules have no columns", "a file with them")
    return column_split(column)


def _index_of_target(name: str | None, names: Sequence[str]) -> int:
    if name is None and len(names) == 1:
        return 0
    return names.index(checked_choice("SplitOptions: no target to stratify by", name, names))
