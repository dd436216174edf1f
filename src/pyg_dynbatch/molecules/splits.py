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
SplitMethod = Literal["random", "scaffold", "scaffold_balanced", "column"]

_DEFAULT_FRACTIONS: Fractions = (0.8, 0.1, 0.1)
_OTHER_NAMES = {
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "training": "train",
    "testing": "test",
}
"""How files may name the parts, besides ``PARTS``."""
_TOLERANCE = 1e-6
"""For fractions and what they give, which floating-point numbers do not hold exactly."""


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
    fractions: Fractions = _DEFAULT_FRACTIONS
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


def random_split(
    num_examples: int, fractions: Fractions = _DEFAULT_FRACTIONS, seed: int = 0
) -> Split:
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
    num_train, num_val, _ = _part_sizes(num_examples, fractions)
    order = np.random.default_rng(seed).permutation(num_examples)
    train = order[:num_train]
    val = order[num_train : num_train + num_val]
    test = order[num_train + num_val :]
    return _sorted_split(train, val, test)


def scaffold_split(
    smiles: Sequence[str], fractions: Fractions = _DEFAULT_FRACTIONS, seed: int | None = None
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
    sizes = _part_sizes(len(smiles), fractions)

    molecules_of: defaultdict[str, list[int]] = defaultdict(list)
    for molecule, text in enumerate(smiles):
        molecules_of[_scaffold_or_empty(text)].append(molecule)
    groups = list(molecules_of.values())

    if seed is None:
        return _split_largest_first(groups, fractions, len(smiles))
    return _split_balanced(groups, sizes, seed)


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
        written = "" if is_missing else str(value).strip().lower()
        name = _OTHER_NAMES.get(written, written)
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
    return _sorted_split(*parts.values())


def describe_leakage(split: Split, smiles: Sequence[str]) -> str:
    """Describe the molecules that are in two parts of a split, however they are written.

    Example:
        >>> split = Split(np.array([0, 1]), np.array([2]), np.array([3]))
        >>> describe_leakage(split, ["CO", "CC", "CCC", "OC"])
        '1 molecule in both train and test, such as CO'
    """
    molecules_of_parts = [set(_canonical_texts(smiles, part)) for part in split]
    descriptions = []
    leaked: set[str] = set()
    for first, second in combinations(range(len(PARTS)), 2):
        in_both = molecules_of_parts[first] & molecules_of_parts[second]
        leaked |= in_both
        if in_both:
            molecules = "molecule" if len(in_both) == 1 else "molecules"
            parts = f"{PARTS[first]} and {PARTS[second]}"
            descriptions.append(f"{len(in_both)} {molecules} in both {parts}")

    if not descriptions:
        return "no molecule is in two parts"
    return f"{', '.join(descriptions)}, such as {', '.join(sorted(leaked)[:3])}"


def _scaffold_or_empty(smiles: str) -> str:
    try:
        return murcko_scaffold(smiles)
    except MoleculeError:
        return ""


def _split_largest_first(
    groups: list[list[int]], fractions: Fractions, num_molecules: int
) -> Split:
    """Fill train, then val, then test: the split of MoleculeNet."""
    room_of_train = fractions[0] * num_molecules + _TOLERANCE
    room_of_both = (fractions[0] + fractions[1]) * num_molecules + _TOLERANCE

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
    return _sorted_split(train, val, test)


def _split_balanced(groups: list[list[int]], sizes: tuple[int, int, int], seed: int) -> Split:
    """Give each group to the first part with room for it: the large groups first, both shuffled."""
    num_train, num_val, num_test = sizes
    largest_late_group = min(num_val, num_test) / 2
    large = [group for group in groups if len(group) > largest_late_group]
    small = [group for group in groups if len(group) <= largest_late_group]

    # A late large group would find no room in val or test.
    generator = np.random.default_rng(seed)
    order = [large[i] for i in generator.permutation(len(large))]
    order += [small[i] for i in generator.permutation(len(small))]

    train: list[int] = []
    val: list[int] = []
    test: list[int] = []
    for group in order:
        if len(train) + len(group) <= num_train:
            train += group
        elif len(val) + len(group) <= num_val:
            val += group
        else:
            test += group
    return _sorted_split(train, val, test)


def _part_sizes(num_examples: int, fractions: Fractions) -> tuple[int, int, int]:
    """Check the fractions, and return the number of examples of each part."""
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > _TOLERANCE:
        raise mismatch(
            ValueError,
            "split: the fractions cannot be used",
            "three, at least 0, with the sum 1",
            list(fractions),
        )
    num_train = int(fractions[0] * num_examples + _TOLERANCE)
    num_val = int(fractions[1] * num_examples + _TOLERANCE)
    # What rounding leaves goes to the last part that has a share.
    if fractions[2] != 0:
        return num_train, num_val, num_examples - num_train - num_val
    if fractions[1] != 0:
        return num_train, num_examples - num_train, 0
    return num_examples, 0, 0


def _sorted_split(*parts: Sequence[int] | np.ndarray) -> Split:
    train, val, test = (np.sort(np.array(part, dtype=np.int64)) for part in parts)
    return Split(train, val, test)


def _canonical_texts(smiles: Sequence[str], part: Int64[np.ndarray, " example"]) -> Iterator[str]:
    for molecule in part.tolist():
        try:
            yield canonical_smiles(smiles[molecule])
        except MoleculeError:
            continue  # two texts that cannot be read are not known to be one molecule
