"""Split molecules at random, by classes, folds, scaffolds or a column; find duplicates."""

import base64
import csv
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.molecules.rdkit_access import MoleculeError, canonical_smiles, murcko_scaffold

PARTS = ("train", "val", "test")

_FORMAT = "pyg_dynbatch.split.1"
_KEY = "S6"  # bytes of a hash; two of a million molecules share one with a chance of 0.2 %
_SHOWN = 3


@dataclass(frozen=True, eq=False)
class Split:
    """Names the examples of the three parts by their numbers in the data set.

    An example may be in no part at all, never in two.

    Args:
        train: Numbers of the examples to train on.
        val: Numbers of those to choose by.
        test: Numbers of those to judge by.
        method: How the split was made.
        seed: Seed of it, if it had one.
        num_examples: Number of examples in the data set.
        molecules: A hash of the SMILES of every example, which :meth:`for_molecules` adds; None for
            a split that knows row numbers alone.

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
        """Sorts the numbers and refuses overlaps."""
        for name, numbers in self.parts():
            object.__setattr__(self, name, np.sort(np.asarray(numbers, dtype=np.int64)))
        joined = np.concatenate([numbers for _, numbers in self.parts()])
        outside = (joined < 0) | (joined >= self.num_examples)
        if outside.any():
            raise mismatch(
                ValueError,
                "Split: there is no such example",
                f"numbers from 0 to {self.num_examples - 1}",
                int(joined[outside][0]),
            )
        values, counts = np.unique(joined, return_counts=True)
        if (counts > 1).any():
            raise mismatch(
                ValueError,
                "Split: an example is in two places",
                "every example in one part at most",
                f"example {int(values[counts > 1][0])} ({int((counts > 1).sum())} such examples)",
            )

    def parts(self) -> Iterator[tuple[str, Int64[np.ndarray, " example"]]]:
        """Gives the name and the numbers of each part."""
        return ((name, getattr(self, name)) for name in PARTS)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of examples of each part."""
        return len(self.train), len(self.val), len(self.test)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits, equal for equal parts on every machine."""
        content: dict[str, Any] = {name: numbers.tolist() for name, numbers in self.parts()}
        content["num_examples"] = self.num_examples
        if self.molecules is not None:
            content["molecules"] = _text_of(self.molecules)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def for_molecules(self, smiles: Sequence[str], where: object = "") -> "Split":
        """Finds the molecules of this split in a data set whose rows may stand in another order.

        A molecule is known by its SMILES as given. A split without hashes gets those of `smiles`.

        Args:
            smiles: One text per example of the data set.
            where: The file, for messages.

        Returns:
            The split of that data set, with its hashes.

        Raises:
            ValueError: If a molecule is missing or new, or if the rows are in another order and
                one molecule stands in several rows and parts.

        Example:
            >>> rows = Split(np.array([0]), np.array([1]), np.array([2]), num_examples=3)
            >>> split = rows.for_molecules(["C", "CO", "CCO"])
            >>> split.for_molecules(["CCO", "C", "CO"]).test.tolist()
            [0]
        """
        given = _keys_of(smiles)
        noted = self.molecules
        if noted is None:
            if len(smiles) != self.num_examples:
                raise _other_data(self.num_examples, len(smiles), where)
            return replace(self, molecules=given)
        if np.array_equal(noted, given):
            return self
        old, new = np.argsort(noted, kind="stable"), np.argsort(given, kind="stable")
        if not np.array_equal(noted[old], given[new]):
            raise self._other_molecules(
                _surplus(noted, given), _surplus(given, noted), smiles, where
            )
        part = np.zeros(self.num_examples, np.int8)
        for number, (_, rows) in enumerate(self.parts(), start=1):
            part[rows] = number
        copies = (given[new][1:] == given[new][:-1]) & (part[old][1:] != part[old][:-1])
        if copies.any():
            texts = dict.fromkeys(smiles[i] for i in new[1:][copies].tolist())
            raise mismatch(
                ValueError,
                "Split: equal molecules in several parts cannot be told apart",
                "the rows in the order they were divided in",
                f"another order, and {len(texts)} molecules that are in several parts, "
                f"such as {', '.join(map(repr, list(texts)[:_SHOWN]))}",
                where=where,
                hint="restore the order of the rows",
            )
        place = np.empty_like(old)
        place[old] = new
        train, val, test = (place[rows] for _, rows in self.parts())
        return replace(self, train=train, val=val, test=test, molecules=given)

    def _other_molecules(
        self, missing: list[int], new: list[int], smiles: Sequence[str], where: object
    ) -> ValueError:
        parts = {int(i): name for name, rows in self.parts() for i in rows}
        lost = [f"example {i} ({parts.get(i, 'in no part')})" for i in missing[:_SHOWN]]
        added = [f"example {i} ({smiles[i]!r})" for i in new[:_SHOWN]]
        found = (("missing", len(missing), lost), ("new", len(new), added))
        said = [
            f"{n} {name}: {', '.join(some)}{', …' * (n > _SHOWN)}" for name, n, some in found if n
        ]
        return mismatch(
            ValueError,
            "Split: the molecules are not those that were divided",
            f"the same {self.num_examples} molecules, in any order",
            f"{len(smiles)} molecules; {'; '.join(said)}",
            where=where,
            hint="the file and the policy for bad rows that the split was made with; "
            "for other molecules pyg-dynbatch predict --checkpoint CKPT --input FILE",
        )

    def write(self, path: str | Path) -> Path:
        """Writes the split, as JSON or, for a name that ends in ``.csv``, as a table.

        Args:
            path: The file.

        Returns:
            The path.

        Raises:
            OSError: If the file cannot be written.

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
        if Path(path).suffix == ".csv":
            facts = {key: value for key, value in facts.items() if key not in PARTS}
            named = sorted((int(i), name) for name, numbers in self.parts() for i in numbers)
            lines = [f"# {json.dumps(facts)}", "example,part", *(f"{i},{p}" for i, p in named)]
            text = "\n".join(lines) + "\n"
        else:
            text = json.dumps(facts)
        return write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))

    @classmethod
    def read(cls, path: str | Path, num_examples: int | None = None) -> "Split":
        """Reads a split that was written, and checks that it is unchanged.

        Args:
            path: The file.
            num_examples: Number of examples of the data set it shall be used for.

        Returns:
            The split.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If it is no split, was changed, or belongs to another data set.
        """
        path = Path(path)
        if not path.is_file():
            raise mismatch(
                FileNotFoundError, "Split: there is no such file", "a written split", where=path
            )
        try:
            split = cls.from_dict(_read(path))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if num_examples not in (None, split.num_examples):
            raise _other_data(split.num_examples, num_examples, path)
        return split

    def as_dict(self) -> dict[str, Any]:
        """Writes the split as plain values, which :meth:`from_dict` reads."""
        facts: dict[str, Any] = {
            "format": _FORMAT,
            "method": self.method,
            "seed": self.seed,
            "num_examples": self.num_examples,
            "digest": self.digest,
        }
        if self.molecules is not None:
            facts["molecules"] = _text_of(self.molecules)
        return facts | {name: rows.tolist() for name, rows in self.parts()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Split":
        """Reads what :meth:`as_dict` has written.

        Args:
            content: The mapping.

        Returns:
            The split.

        Raises:
            KeyError: If something is missing.
            ValueError: If something was changed.
        """
        train, val, test = (np.array(content[name], dtype=np.int64) for name in PARTS)
        keys = content.get("molecules")
        split = cls(
            train,
            val,
            test,
            content["method"],
            content["seed"],
            num_examples=content["num_examples"],
            molecules=None if keys is None else np.frombuffer(base64.b64decode(keys), _KEY),
        )
        if split.digest != content["digest"]:
            raise ValueError(f"hash {split.digest}, noted is {content['digest']}")
        return split

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={len(numbers)}" for name, numbers in self.parts())
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"{type(self).__name__}({self.method}{seed}: {sizes}, digest={self.digest})"


def _keys_of(smiles: Sequence[str]) -> np.ndarray:
    size = np.dtype(_KEY).itemsize
    keys = [hashlib.blake2b(text.encode(), digest_size=size).digest() for text in smiles]
    return np.frombuffer(b"".join(keys), _KEY)


def _text_of(keys: np.ndarray) -> str:
    return base64.b64encode(keys.tobytes()).decode()


def _surplus(keys: np.ndarray, others: np.ndarray) -> list[int]:
    """Lists the examples that have no counterpart among the others."""
    left = Counter(others.tolist())
    found = []
    for example, key in enumerate(keys.tolist()):
        left[key] -= 1
        if left[key] < 0:
            found.append(example)
    return found


def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".csv":
        return json.loads(text)
    first, _, table = text.partition("\n")
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    for line in csv.DictReader(table.splitlines()):
        parts[line["part"]].append(int(line["example"]))
    return json.loads(first.removeprefix("#")) | parts


def _other_data(noted: int, given: int | None, where: object) -> ValueError:
    return mismatch(
        ValueError,
        "Split: the split belongs to another data set",
        f"a split of {given} examples",
        f"one of {noted}",
        where=where,
        hint="the same file and the same policy for bad rows as when it was made",
    )


def _unreadable(path: Path, got: str) -> ValueError:
    return mismatch(
        ValueError,
        "Split: the file is no unchanged split",
        f"a file that Split.write wrote, format {_FORMAT}",
        got,
        where=path,
    )


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
            raise mismatch(ValueError, "stratified_split: bins is out of range", "1 or more", bins)
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
        raise mismatch(
            ValueError,
            "kfold_splits: the number of folds is out of range",
            f"{least} to {num_examples}, the number of examples",
            folds,
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
            raise mismatch(
                ValueError,
                "column_split: there is no value for a record",
                "one value for every record of the source",
                f"{len(values)} values, none for record {row}",
            ) from error
        missing = given is None or given != given  # NaN alone is unequal to itself
        name = "" if missing else str(given).strip().lower()
        name = _NAMES.get(name, name)
        if name and name not in parts:
            raise mismatch(
                ValueError,
                "column_split: a value names no part",
                ", ".join(PARTS),
                repr(given),
                where=f"record {row}",
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
        raise mismatch(
            ValueError,
            "split: the fractions are no shares of a whole",
            "three numbers of 0 or more whose sum is 1",
            list(fractions),
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


@dataclass(frozen=True)
class Leakage:
    """Counts the molecules that are in more than one part of a split."""

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
    """Lists the molecules that occur more than once in a data set."""

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
