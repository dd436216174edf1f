"""Keep a split: which examples train, which validate, which test, and a hash that says so."""

import base64
import csv
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically

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
            raise ValueError(
                mismatch(
                    "Split: there is no such example",
                    expected=f"numbers from 0 to {self.num_examples - 1}",
                    got=int(joined[outside][0]),
                )
            )
        values, counts = np.unique(joined, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                mismatch(
                    "Split: an example is in two places",
                    expected="every example in one part at most",
                    got=f"example {int(values[counts > 1][0])} "
                    f"({int((counts > 1).sum())} such examples)",
                )
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
            raise ValueError(
                mismatch(
                    "Split: equal molecules in several parts cannot be told apart",
                    expected="the rows in the order they were divided in",
                    got=f"another order, and {len(texts)} molecules that are in several parts, "
                    f"such as {', '.join(map(repr, list(texts)[:_SHOWN]))}",
                    where=where,
                    mend="restore the order of the rows",
                )
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
        return ValueError(
            mismatch(
                "Split: the molecules are not those that were divided",
                expected=f"the same {self.num_examples} molecules, in any order",
                got=f"{len(smiles)} molecules; {'; '.join(said)}",
                where=where,
                mend="the file and the policy for bad rows that the split was made with; "
                "for other molecules pyg-dynbatch predict --checkpoint CKPT --input FILE",
            )
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
            raise FileNotFoundError(
                mismatch("Split: there is no such file", expected="a written split", where=path)
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
    return ValueError(
        mismatch(
            "Split: the split belongs to another data set",
            expected=f"a split of {given} examples",
            got=f"one of {noted}",
            where=where,
            mend="the same file and the same policy for bad rows as when it was made",
        )
    )


def _unreadable(path: Path, got: str) -> ValueError:
    return ValueError(
        mismatch(
            "Split: the file is no unchanged split",
            expected=f"a file that Split.write wrote, format {_FORMAT}",
            got=got,
            where=path,
        )
    )
