"""Split molecules at random, by scaffolds or by a column; find copies in two parts."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Int64

from pyg_dynbatch.core.errors import checked_choice, mismatch
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


SplitMethod = Literal["random", "scaffold", "scaffold_balanced", "column"]


@dataclass(frozen=True)
class SplitOptions:
    """Options for splitting molecules; their seed does not affect the weights.

    Args:
        method: ``random``; ``scaffold`` (rare Murcko scaffolds to test); ``scaffold_balanced``
            (scaffolds assigned at random); or ``column`` of your file, which names the parts:
            train, val, test.
        seed: Seed of the random methods; by default the seed of the run (``seed_everything``).
        fractions: Shares of train, val and test.
        column: Name of the column.

    Raises:
        ValueError: If the method is unknown, ``column`` has no name of a column, or another method
            has one.

    Example:
        >>> SplitOptions("scaffold_balanced", seed=3).fractions
        (0.8, 0.1, 0.1)
    """

    method: SplitMethod = "random"
    seed: int | None = None
    fractions: Fractions = _USUAL
    column: str | None = None

    def __post_init__(self) -> None:
        """Check what the method needs."""
        checked_choice("SplitOptions: unknown method", self.method, get_args(SplitMethod))
        if self.method == "column" and self.column is None:
            raise mismatch(
                ValueError, "SplitOptions: the method needs a column", "its name", "no column"
            )
        if self.method != "column" and self.column is not None:
            problem = f"SplitOptions: the method {self.method!r} reads no column"
            raise mismatch(ValueError, problem, "method: column", f"the column {self.column!r}")


def make_split(
    options: SplitOptions,
    seed: int,
    smiles: Sequence[str],
    column: Sequence[str | float | None] | None = None,
) -> Split:
    """Split molecules by any method.

    Args:
        options: The method and its options.
        seed: Seed of the random methods where the options have none.
        smiles: One text per molecule.
        column: One name of a part per molecule, for ``column``.

    Raises:
        ValueError: If an option does not fit the molecules.

    Example:
        >>> make_split(SplitOptions(fractions=(0.5, 0.5, 0.0)), 0, ["C", "CC", "CO", "CN"]).sizes
        (2, 2, 0)
    """
    seed = seed if options.seed is None else options.seed
    if options.method == "random":
        return random_split(len(smiles), options.fractions, seed)
    if options.method == "scaffold":
        return scaffold_split(smiles, options.fractions)
    if options.method == "scaffold_balanced":
        return scaffold_split(smiles, options.fractions, seed)
    if column is None:
        raise mismatch(ValueError, "make_split: the molecules have no columns", "a file with them")
    return column_split(column)
