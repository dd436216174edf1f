"""Keep a split: which examples train, which validate, which test, and a hash that says so."""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically

PARTS = ("train", "val", "test")

_FORMAT = "pyg_dynbatch.split.1"


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
        content = {name: numbers.tolist() for name, numbers in self.parts()}
        content["num_examples"] = self.num_examples
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

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
        facts = {
            "format": _FORMAT,
            "method": self.method,
            "seed": self.seed,
            "num_examples": self.num_examples,
            "digest": self.digest,
        }
        if Path(path).suffix == ".csv":
            named = sorted((int(i), name) for name, numbers in self.parts() for i in numbers)
            lines = [f"# {json.dumps(facts)}", "example,part", *(f"{i},{p}" for i, p in named)]
            text = "\n".join(lines) + "\n"
        else:
            text = json.dumps(facts | {name: rows.tolist() for name, rows in self.parts()})
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
            facts, parts = _read(path)
            split = cls(
                np.array(parts["train"], dtype=np.int64),
                np.array(parts["val"], dtype=np.int64),
                np.array(parts["test"], dtype=np.int64),
                method=facts["method"],
                seed=facts["seed"],
                num_examples=facts["num_examples"],
            )
            digest = facts["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if split.digest != digest:
            raise _unreadable(path, f"hash {split.digest}, noted is {digest}")
        if num_examples not in (None, split.num_examples):
            raise ValueError(
                mismatch(
                    "Split: the split belongs to another data set",
                    expected=f"a split of {num_examples} examples",
                    got=f"one of {split.num_examples}",
                    where=path,
                    mend="the same file and the same policy for bad rows as when it was made",
                )
            )
        return split

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Split) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={len(numbers)}" for name, numbers in self.parts())
        seed = "" if self.seed is None else f", seed={self.seed}"
        return f"{type(self).__name__}({self.method}{seed}: {sizes}, digest={self.digest})"


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Sequence[int]]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".csv":
        content = json.loads(text)
        return content, {name: content[name] for name in PARTS}
    first, _, table = text.partition("\n")
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    for line in csv.DictReader(table.splitlines()):
        parts[line["part"]].append(int(line["example"]))
    return json.loads(first.removeprefix("#")), parts


def _unreadable(path: Path, got: str) -> ValueError:
    return ValueError(
        mismatch(
            "Split: the file is no unchanged split",
            expected=f"a file that Split.write wrote, format {_FORMAT}",
            got=got,
            where=path,
        )
    )
