"""Keep account of the molecules that could not be used: which, where, and why."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically

POLICIES = ("raise", "skip", "blank")

_SHOWN = 80


@dataclass(frozen=True)
class BadMolecule:
    """Says why one record of a source gave no molecule.

    Attributes:
        row: Number of the record in its source, from 0.
        where: File and line.
        smiles: The text; None where there was none.
        reason: What is wrong.
        atom: The atom to blame, from 0; None where it is no single one.

    Example:
        >>> print(BadMolecule(3, "mine.csv:5", "C(", "an open bracket").complaint("MoleculeFile"))
        MoleculeFile: row 3 cannot be used.
          expected: a molecule
          got:      an open bracket, in 'C('
          where:    mine.csv:5
          try:      bad="skip" to leave such rows out, or bad="blank" to keep their places
    """

    row: int
    where: str
    smiles: str | None
    reason: str
    atom: int | None = None

    def complaint(self, name: str) -> str:
        """Writes the message of the error that stops at this record.

        Args:
            name: Who reads the records.

        Returns:
            The message.
        """
        text = self.smiles or ""
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
        atom = "" if self.atom is None else f" (atom {self.atom})"
        return mismatch(
            f"{name}: row {self.row} cannot be used",
            expected="a molecule",
            got=f"{self.reason}{atom}, in {shown!r}",
            where=self.where,
            mend='bad="skip" to leave such rows out, or bad="blank" to keep their places',
        )

    def as_dict(self) -> dict[str, Any]:
        """Gives the parts as plain values."""
        return asdict(self)


def check_policy(bad: str, name: str) -> str:
    """Refuses a policy for bad rows that does not exist.

    Args:
        bad: ``"raise"``, ``"skip"`` or ``"blank"``.
        name: Who asks.

    Returns:
        The policy.

    Raises:
        ValueError: If there is no such policy.
    """
    if bad not in POLICIES:
        raise ValueError(
            mismatch(
                f"{name}: there is no such policy for bad rows",
                expected=", ".join(map(repr, POLICIES)),
                got=repr(bad),
            )
        )
    return bad


def write_error_report(path: str | Path, errors: Iterable[BadMolecule]) -> Path:
    """Writes a CSV file with one line for every bad row, whole or not at all.

    Args:
        path: The file.
        errors: The bad rows.

    Returns:
        The path.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> bad = BadMolecule(3, "mine.csv:5", "C(", "an open bracket")
        >>> path = write_error_report(f"{tempfile.mkdtemp()}/errors.csv", [bad])
        >>> path.read_text().splitlines()
        ['row,where,smiles,reason,atom', '3,mine.csv:5,C(,an open bracket,']
    """
    columns = [field.name for field in fields(BadMolecule)]

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(error.as_dict() for error in errors)

    return write_atomically(path, write)


def summary_of(errors: Sequence[BadMolecule], total: int) -> str:
    """Counts bad rows by reason.

    Args:
        errors: The bad rows.
        total: Number of all rows.

    Returns:
        One line.

    Example:
        >>> summary_of([BadMolecule(3, "mine.csv:5", "C(", "an open bracket")], 10)
        '1 of 10 rows cannot be used; the first: row 3 (mine.csv:5): an open bracket'
    """
    first = errors[0]
    return (
        f"{len(errors):,} of {total:,} rows cannot be used; the first: row {first.row} "
        f"({first.where}): {first.reason}"
    )
