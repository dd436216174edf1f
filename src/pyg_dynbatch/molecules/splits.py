"""Split molecules at random, by classes, folds, scaffolds or a column; find duplicates."""

import base64
import csv
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64, Int64

from pyg_dynbatch.core.errors import checked_choice, checked_count, checked_range, mismatch
from pyg_dynbatch.files import existing, write_atomically
from pyg_dynbatch.molecules.features.rdkit_access import (
    MoleculeError,
    canonical_smiles,
    murcko_scaffold,
)
from pyg_dynbatch.molecules.files.store import PackedMolecules
from pyg_dynbatch.molecules.schema import PropertyKind

PARTS = ("train", "val", "test")

_FORMAT = "pyg_dynbatch.split.1"
_KEY = "S6"  # 6-byte hashes: among a million molecules a collision has a probability of 0.2 %
_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of the three parts of a data set; an example is in at most one part.

    Args:
        train: Indices of the examples to train on.
        val: Indices of those for model selection.
        test: Indices of those for the final evaluation.
        method: How the split was made.
        seed: Seed of the split, if it had one.
        num_examples: Number of examples in the data set.
        molecules: Hash of every SMILES; added by :meth:`for_molecules`.

    Raises:
        ValueError: If an example is in two parts, twice in one, or not in the data set.

    Example:
        >>> split = Split(np.array([2, 0]), np.array([1]), np.array([3]), num_examples=4)
        >>> split.train.tolist(), split.digest
        ([0, 2], '9cfcfe545af82bd7')
    """

    train: Int64[np.ndarray, " train"]
    val: Int64[np.ndarray, " val"]
    test: Int64[np.ndarray, " test"]
    method: str = "given"
    seed: int | None = None
    num_examples: int = field(kw_only=True)
    molecules: np.ndarray | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Sort the indices; raise an error if parts overlap."""
        for name, numbers in self.parts():
            object.__setattr__(self, name, np.sort(np.asarray(numbers, dtype=np.int64)))
        joined = np.concatenate([numbers for _, numbers in self.parts()])
        outside = joined[(joined < 0) | (joined >= self.num_examples)]
        if outside.size:
            expected = f"numbers from 0 to {self.num_examples - 1}"
            raise mismatch(ValueError, "Split: no such example", expected, int(outside[0]))
        values, counts = np.unique(joined, return_counts=True)
        if (twice := values[counts > 1]).size:
            what = "Split: an example is in two parts, or twice in one"
            got = f"{len(twice)}, such as {twice[0]}"
            raise mismatch(ValueError, what, "every example in at most one part", got)

    def parts(self) -> Iterator[tuple[str, Int64[np.ndarray, " example"]]]:
        """Return the name and the indices of each part."""
        return ((name, getattr(self, name)) for name in PARTS)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of examples of each part."""
        return len(self.train), len(self.val), len(self.test)

    @cached_property
    def _part_of_each(self) -> np.ndarray:
        """Name of the part of each example; empty for none."""
        part = np.full(self.num_examples, "", "U5")
        for name, rows in self.parts():
            part[rows] = name
        return part

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits, equal for equal parts on every machine."""
        return hashlib.sha256(json.dumps(self._content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def _content(self) -> dict[str, Any]:
        """The molecules of the parts, as plain values."""
        content: dict[str, Any] = {"num_examples": self.num_examples}
        if self.molecules is not None:
            content["molecules"] = base64.b64encode(self.molecules.tobytes()).decode()
        return content | {name: numbers.tolist() for name, numbers in self.parts()}

    def for_molecules(self, smiles: Sequence[str], where: object = "") -> "Split":
        """Apply the split to the same molecules in any order, matched by SMILES as given.

        Args:
            smiles: One text per example of the data set.
            where: The file, for messages.

        Returns:
            The split of that data set, with its hashes.

        Raises:
            ValueError: If a molecule is missing or new, or the order differs and equal molecules
                are in several parts, so that they cannot be matched.

        Example:
            >>> rows = Split(np.array([0]), np.array([1]), np.array([2]), num_examples=3)
            >>> split = rows.for_molecules(["C", "CO", "CCO"])
            >>> split.for_molecules(["CCO", "C", "CO"]).test.tolist()
            [0]
        """
        size = np.dtype(_KEY).itemsize
        keys = [hashlib.blake2b(text.encode(), digest_size=size).digest() for text in smiles]
        given, stored = np.frombuffer(b"".join(keys), _KEY), self.molecules
        if stored is None:
            self._check_size(len(smiles), where)
            return replace(self, molecules=given)
        if np.array_equal(stored, given):
            return self
        old, new = np.argsort(stored, kind="stable"), np.argsort(given, kind="stable")
        if not np.array_equal(stored[old], given[new]):
            raise self._other_molecules(stored, given, smiles, where)
        part = self._part_of_each[old]
        copies = (given[new][1:] == given[new][:-1]) & (part[1:] != part[:-1])
        if copies.any():
            texts = list(dict.fromkeys(smiles[i] for i in new[1:][copies].tolist()))
            what = "Split: equal molecules in several parts cannot be distinguished"
            got = f"a different order, and {len(texts)} molecules in several parts, such as "
            got += ", ".join(map(repr, texts[:_SHOWN]))
            raise mismatch(ValueError, what, "the rows in their former order", got, where=where)
        train, val, test = (np.sort(new[part == name]) for name in PARTS)
        return replace(self, train=train, val=val, test=test, molecules=given)

    def _check_size(self, examples: int | None, where: object) -> None:
        if examples not in (None, self.num_examples):
            what, hint = "Split: the split belongs to a different data set", "the same file"
            expected, got = f"a split of {examples} examples", f"one of {self.num_examples}"
            raise mismatch(ValueError, what, expected, got, where=where, hint=hint)

    def _other_molecules(
        self, stored: np.ndarray, given: np.ndarray, smiles: Sequence[str], where: object
    ) -> ValueError:
        missing, new = _surplus(stored, given), _surplus(given, stored)
        lost = [f"example {i} ({self._part_of_each[i] or 'in no part'})" for i in missing]
        added = [f"example {i} ({smiles[i]!r})" for i in new]
        got = f"{len(smiles)} molecules"
        for name, found in (("missing", lost), ("new", added)):
            if found:
                more = ", …" * (len(found) > _SHOWN)
                got += f"; {len(found)} {name}: {', '.join(found[:_SHOWN])}{more}"
        what = "Split: the molecules are not those that were split"
        expected = f"the same {self.num_examples} molecules, in any order"
        hint = "the same file and policy for bad rows; for other molecules, pyg-dynbatch predict"
        return mismatch(ValueError, what, expected, got, where=where, hint=hint)

    def write(self, path: str | Path) -> Path:
        """Write the split, as JSON or, for a name that ends in ``.csv``, as a table.

        Args:
            path: The file, which is returned.

        Example:
            >>> import tempfile
            >>> split = Split(np.array([0]), np.array([1]), np.array([2]), num_examples=3)
            >>> path = split.write(f"{tempfile.mkdtemp()}/split.csv")
            >>> path.read_text().splitlines()[1:]
            ['example,part', '0,train', '1,val', '2,test']
            >>> Split.read(path).digest == split.digest
            True
        """
        facts = self.as_dict()
        text = json.dumps(facts)
        if Path(path).suffix == ".csv":
            head = {key: value for key, value in facts.items() if key not in PARTS}
            rows = (f"{i},{part}\n" for i, part in enumerate(self._part_of_each.tolist()) if part)
            text = f"# {json.dumps(head)}\nexample,part\n{''.join(rows)}"
        return write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, path: str | Path, num_examples: int | None = None) -> "Split":
        """Read a split that was written, and check that it is unchanged.

        Args:
            path: The file.
            num_examples: Number of examples of the data set it is meant for.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If it is not a split, was changed, or belongs to a different data set.
        """
        path = existing(path, "a written split")
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".csv":
                first, _, table = text.partition("\n")
                content = json.loads(first.removeprefix("#")) | {name: [] for name in PARTS}
                for line in csv.DictReader(table.splitlines()):
                    content[line["part"]].append(int(line["example"]))
            else:
                content = json.loads(text)
            split = cls.from_dict(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = "Split: the file is not an unchanged split"
            expected = f"a file that Split.write wrote, format {_FORMAT}"
            got = f"{type(error).__name__}: {error}"
            raise mismatch(ValueError, what, expected, got, where=path) from error
        split._check_size(num_examples, path)
        return split

    def as_dict(self) -> dict[str, Any]:
        """Return the split as plain values, which :meth:`from_dict` reads."""
        facts = {"format": _FORMAT, "method": self.method, "seed": self.seed, "digest": self.digest}
        return facts | self._content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Split":
        """Build the split that :meth:`as_dict` has written."""
        keys = content.get("molecules")
        train, val, test = (np.array(content[name], dtype=np.int64) for name in PARTS)
        split = cls(
            *(train, val, test, content["method"], content["seed"]),
            num_examples=content["num_examples"],
            molecules=None if keys is None else np.frombuffer(base64.b64decode(keys), _KEY),
        )
        if split.digest != content["digest"]:
            raise ValueError(f"hash {split.digest}, stored is {content['digest']}")
        return split

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={len(numbers)}" for name, numbers in self.parts())
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"{type(self).__name__}({self.method}{seed}: {sizes}, digest={self.digest})"


def _surplus(keys: np.ndarray, others: np.ndarray) -> list[int]:
    """Return the examples that have no counterpart among the others."""
    left = Counter(others.tolist())
    found = []
    for example, key in enumerate(keys.tolist()):
        left[key] -= 1
        if left[key] < 0:
            found.append(example)
    return found


Fractions = tuple[float, float, float]

_USUAL: Fractions = (0.8, 0.1, 0.1)
# Other names of the parts in files.
_NAMES = {"valid": "val", "validation": "val", "dev": "val", "training": "train", "testing": "test"}
_SUM = 1e-6


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
    sizes = _sizes(num_examples, fractions)
    order = np.random.default_rng(seed).permutation(num_examples)
    return _split(np.split(order, np.cumsum(sizes)[:2]), "random", seed, num_examples)


def stratified_split(
    labels: Sequence[float | int] | np.ndarray,
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
        >>> labels = [0] * 80 + [1] * 20
        >>> split = stratified_split(labels)
        >>> [int(np.take(labels, numbers).sum()) for _, numbers in split.parts()]
        [16, 2, 2]
    """
    values = np.array(labels, dtype=np.float64)
    sizes = np.array(_sizes(len(values), fractions))
    if bins is not None:
        checked_count("stratified_split: bins", bins)
        known = ~np.isnan(values)
        ranks = np.argsort(np.argsort(values[known], kind="stable"), kind="stable")
        values[known] = ranks * bins // max(int(known.sum()), 1)
    chance = np.random.default_rng(seed).permutation(len(values))
    order = np.lexsort((chance, values))
    parts: list[list[int]] = [[], [], []]
    for taken, example in enumerate(order.tolist(), start=1):
        # Assign to the part furthest below its share of the examples so far.
        owed = sizes * taken / len(values) - [len(part) for part in parts]
        parts[int(owed.argmax())].append(example)
    return _split(parts, "stratified", seed, len(values))


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
        parts = (np.concatenate(train), val, test)
        splits.append(_split(parts, f"fold {fold + 1} of {folds}", seed, num_examples))
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
    total = len(smiles)
    train, val, test = _sizes(total, fractions)
    sets: defaultdict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(smiles):
        # A blank row has no target, so that any part will do.
        sets[_text_or_none(murcko_scaffold, text) or ""].append(number)
    if seed is None:
        groups = sorted(sets.values(), key=lambda group: (-len(group), -group[0]))
        room = fractions[0] * total + _SUM, (fractions[0] + fractions[1]) * total + _SUM
    else:
        generator, half = np.random.default_rng(seed), min(val, test) / 2
        groups, room = [], (train, val)
        for is_big in (True, False):  # a late big set would find no room in val or test
            some = [group for group in sets.values() if (len(group) > half) == is_big]
            groups += [some[i] for i in generator.permutation(len(some))]
    parts: list[list[int]] = [[], [], []]
    for group in groups:
        # In the deterministic split val may also take what train has left.
        taken = len(parts[1]) + (len(parts[0]) if seed is None else 0)
        fits = len(parts[0]) + len(group) <= room[0], taken + len(group) <= room[1]
        parts[fits.index(True) if any(fits) else 2] += group
    method = "scaffold" if seed is None else "scaffold balanced"
    return _split(parts, method, seed, total)


def column_split(
    values: Sequence[Any] | Mapping[int, Any], rows: Sequence[int] | np.ndarray
) -> Split:
    """Split by a column of the source.

    Args:
        values: For each record of the source ``"train"``, ``"val"`` (or ``"valid"``,
            ``"validation"``, ``"dev"``) or ``"test"``, in any case; empty, None or NaN for
            no part.
        rows: For each example the number of its record: ``dataset.rows``.

    Raises:
        ValueError: If a value is none of these, or missing for a record.

    Example:
        >>> column_split(["train", "bad row", "Valid", "test"], rows=[0, 2, 3])
        Split(column: train=1, val=1, test=1, digest=d1e673d5936484d6)
    """
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    for example, row in enumerate(int(row) for row in rows):
        try:
            given = values[row]
        except (IndexError, KeyError) as error:
            what = "column_split: a record has no value"
            got = f"{len(values)} values, none for record {row}"
            raise mismatch(ValueError, what, "one value for every record", got) from error
        missing = given is None or given != given  # NaN alone is unequal to itself
        name = "" if missing else str(given).strip().lower()
        name = _NAMES.get(name, name)
        if name not in ("", *PARTS):
            what = "column_split: a value is not the name of a part"
            raise mismatch(ValueError, what, ", ".join(PARTS), repr(given), where=f"record {row}")
        if name:
            parts[name].append(example)
    return _split(list(parts.values()), "column", None, len(rows))


def _sizes(total: int, fractions: Fractions) -> tuple[int, int, int]:
    shares = [float(share) for share in fractions]
    if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1) > _SUM:
        what, expected = "split: the fractions cannot be used", "three, at least 0, with the sum 1"
        raise mismatch(ValueError, what, expected, list(fractions))
    train, val = int(shares[0] * total + _SUM), int(shares[1] * total + _SUM)
    return train, val, total - train - val


def _split(parts: Sequence[Any], method: str, seed: int | None, total: int) -> Split:
    train, val, test = (np.array(part, dtype=np.int64) for part in parts)
    return Split(train, val, test, method, seed, num_examples=total)


def canonical_texts(smiles: Sequence[str]) -> list[str | None]:
    """Return the canonical SMILES of every molecule; None for a text that cannot be read.

    Args:
        smiles: One text per molecule.

    Example:
        >>> canonical_texts(["OC", "CO", "C("])
        ['CO', 'CO', None]
    """
    return [_text_or_none(canonical_smiles, text) for text in smiles]


def _text_or_none(function: Callable[[str], str], smiles: str) -> str | None:
    try:
        return function(smiles)
    except MoleculeError:
        return None


def describe_leakage(split: Split, texts: Sequence[str | None]) -> str:
    """Describe the molecules that are in two parts of a split, from their canonical texts.

    Example:
        >>> split = Split(np.array([0, 1]), np.array([2]), np.array([3]), num_examples=4)
        >>> describe_leakage(split, canonical_texts(["CO", "CC", "CCC", "OC"]))
        '1 molecule in both train and test, such as CO'
    """
    parts = {name: {texts[i] or "" for i in numbers} - {""} for name, numbers in split.parts()}
    common = {pair: parts[pair[0]] & parts[pair[1]] for pair in combinations(parts, 2)}
    found = [
        f"{len(each)} molecule{'s' if len(each) > 1 else ''} in both {' and '.join(pair)}"
        for pair, each in common.items()
        if each
    ]
    examples = sorted(set().union(*common.values()))[:_SHOWN]
    such_as = f"{', '.join(found)}, such as {', '.join(examples)}"
    return such_as if found else "no molecule is in two parts"


def describe_duplicates(texts: Sequence[str | None], targets: np.ndarray) -> str:
    """Describe the molecules that occur more than once; return an empty text if there are none.

    Example:
        >>> describe_duplicates(canonical_texts(["CO", "CC", "OC"]), np.array([[1.0], [0], [0]]))
        '1 molecule occurs 2 times; 1 of them with different targets'
    """
    places: defaultdict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        if text is not None:
            places[text].append(number)
    groups = [group for group in places.values() if len(group) > 1]
    columns = ([column[~np.isnan(column)] for column in targets[group].T] for group in groups)
    conflicts = sum(any(len(set(known.tolist())) > 1 for known in each) for each in columns)
    occur = "molecule occurs" if len(groups) == 1 else "molecules occur"
    times = f"{sum(map(len, groups))} times; {conflicts} of them with different targets"
    return f"{len(groups)} {occur} {times}" if groups else ""


SplitMethod = Literal[
    "random", "stratified", "scaffold", "scaffold_balanced", "column", "kfold", "file"
]


@dataclass(frozen=True)
class SplitOptions:
    """Options for splitting molecules; their seed does not affect the weights.

    Args:
        method: ``random``; ``stratified`` (each class, or range of values, of one target in equal
            shares); ``scaffold`` (rare Murcko scaffolds to test); ``scaffold_balanced`` (scaffolds
            assigned at random); ``column`` (of your file: train, val, test); ``kfold`` (fold
            ``fold`` tests, the next one validates; another seed is another repeat); or ``file`` (a
            split that an earlier run has written, of the same molecules in any order).
        seed: Seed of the random methods; by default the seed of the run (``seed_everything``).
        fractions: Shares of train, val and test.
        folds: Number of folds.
        fold: Index of the fold to test, from 0.
        target: Name of the target of ``stratified``; not needed if there is only one.
        bins: Number of ranges for ``stratified``; by default 10 for values, none for classes.
        column: Name of the column.
        file: File of the split.
        leakage: Whether to report molecules that are in two parts or occur more than once.

    Example:
        >>> SplitOptions("kfold", folds=10, fold=3).seed is None
        True
    """

    method: SplitMethod = "random"
    seed: int | None = None
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    folds: int = 5
    fold: int = 0
    target: str | None = None
    bins: int | None = None
    column: str | None = None
    file: str | None = None
    leakage: bool = True


def make_split(
    molecules: PackedMolecules,
    options: SplitOptions,
    seed: int,
    kind: PropertyKind,
    column: Callable[[str], Mapping[int, str]],
) -> Split:
    """Split molecules."""
    count, fractions = len(molecules), options.fractions
    if options.method == "random":
        return random_split(count, fractions, seed)
    if options.method == "stratified":
        bins = 10 if options.bins is None and kind == "regression" else options.bins
        return stratified_split(_labels(molecules, options.target), fractions, seed, bins)
    if options.method in ("scaffold", "scaffold_balanced"):
        drawn = seed if options.method == "scaffold_balanced" else None
        return scaffold_split(molecules.texts(), fractions, drawn)
    if options.method == "kfold":
        checked_choice("SplitOptions: unknown fold", options.fold, range(options.folds))
        return kfold_splits(count, options.folds, seed)[options.fold]
    if options.method == "column":
        return column_split(column(_given(options, "column")), molecules.rows.tolist())
    return Split.read(_given(options, "file"))


def _labels(molecules: PackedMolecules, target: str | None) -> Float64[np.ndarray, " molecule"]:
    names = molecules.task_names
    if target is None and len(names) == 1:
        target = names[0]
    if target not in names:
        what, hint = "SplitOptions: no target to stratify by", "--data.init_args.split.target NAME"
        got = "none" if target is None else repr(target)
        raise mismatch(ValueError, what, f"one of {', '.join(names)}", got, hint=hint)
    return molecules.targets[:, names.index(target)]


def _given(options: SplitOptions, name: str) -> str:
    value = getattr(options, name)
    if value is None:
        what = f"SplitOptions: the method {options.method!r} needs a {name}"
        hint = f"--data.init_args.split.{name} NAME"
        raise mismatch(ValueError, what, f"the option {name}", "none", hint=hint)
    return str(value)
