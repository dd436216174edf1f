"""Read molecules and labels from CSV, TSV, SMILES and SDF files, and report records that fail."""

import csv
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.core.files import Lines, existing, open_lines, write_atomically

FORMATS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".smi": "smi",
    ".smiles": "smi",
    ".txt": "smi",
    ".sdf": "sdf",
    ".sd": "sdf",
}
MISSING = ("", "nan", "na")
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which targets are kept

# Without the second bracket, a line such as ">5 <100" is a value and no header of a field.
_FIELD = re.compile(r">[^<]*<(.*)>")


@dataclass(frozen=True)
class RawMolecule:
    """Holds one record of a file as it stands there.

    Args:
        row: Number of the record in the file, from 0.
        where: File and line of the record, for messages.
        smiles: The SMILES without blanks around it; ``""`` where the cell is empty, None in SDF.
        block: The mol block; None but in SDF.
        name: Name of the molecule; None where it has none.
        targets: The labels in the order of the columns asked for; None where one is missing.
        extra: All other columns or data fields, as text.
        source: Names and texts of all columns or data fields in the order of the file, if they
            were asked for; never of a SMILES file.

    Example:
        >>> RawMolecule(0, "a.smi:1", smiles="CO").targets
        ()
    """

    row: int
    where: str
    smiles: str | None = None
    block: str | None = None
    name: str | None = None
    targets: tuple[float | None, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)
    source: tuple[Sequence[str], Sequence[str]] = ((), ())


@dataclass(frozen=True)
class _Wanted:
    """What the caller has asked for."""

    smiles: str | None
    targets: tuple[str, ...]
    name: str | None
    missing: frozenset[str]
    first_of_repeated: bool
    keep_source: bool

    def labels(self, row: dict[str, str], where: str) -> tuple[float | None, ...]:
        return tuple(_label(row.get(name, ""), name, self.missing, where) for name in self.targets)

    def used(self) -> frozenset[str | None]:
        return frozenset((self.smiles, self.name, *self.targets))


def read_molecules(
    path: str | Path,
    *,
    smiles_column: str | None = None,
    target_columns: Sequence[str] | None = None,
    name_column: str | None = None,
    format: str | None = None,
    missing: Collection[str] = (),
    first_of_repeated: bool = False,
    keep_source: bool = False,
) -> Iterator[RawMolecule]:
    r"""Reads a file of molecules as a stream: a million records need no more memory than one.

    - ``csv``, ``tsv``: a line of column names, then one record per line; quoted cells may hold
      commas and line ends. Blank lines are no records; a line of empty cells is one. The cell of a
      SMILES holds nothing else, except ``|…|`` of CXSMILES after a blank.
    - ``smi``: a SMILES, a blank, a name; no line of column names is needed, one that begins with
      ``smiles`` is skipped, as are lines that begin with ``#``.
    - ``sdf``: labels are data fields; the name is the first line of a record.

    Any may be compressed (``.gz``). Text is UTF-8, with or without a byte order mark. Bad
    molecules are records like others: the featurizer says what is wrong with them.

    Args:
        path: The file, or ``"-"`` for standard input.
        smiles_column: Name of the column of SMILES; None for the one called smiles in whatever
            case.
        target_columns: Names of the columns of labels; None for no labels.
        name_column: Name of the column of names (csv, tsv).
        format: ``"csv"``, ``"tsv"``, ``"smi"`` or ``"sdf"``; None to go by the suffix.
        missing: What else than an empty cell, nan and NA (in whatever case) is a missing label.
        first_of_repeated: Whether of several columns of one name the first is taken; else they
            are refused where they are used.
        keep_source: Whether each record keeps all its columns as `source`.

    Yields:
        One `RawMolecule` a record, in the order of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the format is unknown, the file is empty, damaged or not UTF-8, there is
            no such column, a record has more or fewer cells than there are columns, or a label
            is not a finite number; says file and line.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = path.write_text("name,smiles,logP\nmethanol,CO ,-0.77\nwater,O,NA\n")
        >>> for raw in read_molecules(path, target_columns=["logP"]):
        ...     print(raw.row, raw.smiles, raw.targets, raw.extra)
        0 CO (-0.77,) {'name': 'methanol'}
        1 O (None,) {'name': 'water'}
    """
    if isinstance(target_columns, str):
        raise mismatch(
            TypeError,
            "read_molecules: target_columns is one text, not a list of names",
            "a list of column names",
            repr(target_columns),
            hint=f"target_columns=[{target_columns!r}]",
        )
    kind = _format_of(str(path), format)
    wanted = _Wanted(
        smiles_column,
        tuple(target_columns or ()),
        name_column,
        frozenset((*MISSING, *(token.strip().lower() for token in missing))),
        first_of_repeated,
        keep_source,
    )
    if kind in ("smi", "sdf") and (smiles_column or name_column):
        raise mismatch(
            ValueError,
            f"read_molecules: {kind} files have no columns of SMILES or names",
            "smiles_column and name_column for csv and tsv alone",
            smiles_column or name_column,
            where=path,
        )
    if kind == "smi" and wanted.targets:
        raise mismatch(
            ValueError,
            "read_molecules: smi files have no labels",
            "target_columns for csv, tsv and sdf",
            ", ".join(wanted.targets),
            where=path,
            hint="a csv file with a line of column names",
        )
    if str(path) != "-":
        existing(path, f"a {kind} file of molecules")
    return _read(path, kind, wanted)


def _read(path: str | Path, kind: str, wanted: _Wanted) -> Iterator[RawMolecule]:
    readers = {"csv": _read_table, "tsv": _read_table, "smi": _read_smi, "sdf": _read_sdf}
    with open_lines(path) as lines:
        records = 0
        for raw in readers[kind](lines, kind, wanted):
            records += 1
            yield raw
        if not records:
            raise mismatch(
                ValueError,
                f"{lines.name}: there are no molecules in the file",
                f"one {kind} record or more",
                f"{lines.number} lines",
                where=path,
            )


def _format_of(path: str, given: str | None) -> str:
    known = sorted(set(FORMATS.values()))
    if given is not None:
        if given in known:
            return given
        problem, got = "the format is unknown", repr(given)
    elif path == "-":
        problem, got = "standard input has no suffix that tells its format", "no format"
    else:
        suffix = Path(path.lower().removesuffix(".gz")).suffix
        if suffix in FORMATS:
            return FORMATS[suffix]
        problem, got = "the suffix tells no format", path
    raise mismatch(
        ValueError,
        f"read_molecules: {problem}",
        f"{', '.join(known)} ({' '.join(FORMATS)}, also with .gz)",
        got,
        hint="pass format=…",
    )


def _label(text: str, name: str, missing: frozenset[str], where: str) -> float | None:
    text = text.strip()
    if text.lower() in missing:
        return None
    try:
        value = math.nan if "_" in text else float(text)  # Python reads 1_000, nobody writes it
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise mismatch(
            ValueError,
            f"read_molecules: the label {name!r} is not a finite number",
            f"a number up to {_LARGEST:.2g}, or an empty cell, nan or NA if missing",
            repr(text),
            where=where,
            hint=f"missing=[{text!r}] (featurize: --missing), if that is a missing label",
        )
    return value


def _read_table(lines: Lines, kind: str, wanted: _Wanted) -> Iterator[RawMolecule]:
    records = _cells(lines, "," if kind == "csv" else "\t")
    _, header = next(records, (0, []))
    header = [name.strip() for name in header]
    column = _find_columns(header, wanted, f"{lines.path}:1")
    places = {name: header.index(name) for name in header}
    spare = sorted(places.keys() - wanted.used() - {header[column]}, key=places.__getitem__)
    for row, (start, cells) in enumerate(records):
        where = f"{lines.path}:{start}"
        if len(cells) != len(header):
            raise mismatch(
                ValueError,
                f"{lines.name}: a record has another number of cells than there are columns",
                f"{len(header)}: {', '.join(header)}",
                f"{len(cells)}: {', '.join(cells)[:200]}",
                where=where,
                hint="quote cells that hold the separator",
            )
        named = {name: cells[place] for name, place in places.items()}
        yield RawMolecule(
            row,
            where,
            smiles=cells[column].strip(),
            name=named[wanted.name].strip() if wanted.name else None,
            targets=wanted.labels(named, where),
            extra={name: named[name] for name in spare},
            source=(header, cells) if wanted.keep_source else ((), ()),
        )


def _cells(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    start, ended = 1, False

    def watched() -> Iterator[str]:
        nonlocal ended
        yield from lines
        ended = True

    problem: object = None
    try:
        for cells in csv.reader(watched(), delimiter=delimiter):
            # The reader asks for a line after the last one only within a quoted cell.
            if ended:
                problem = "a quote that is opened here and never closed"
                break
            # A line of separators is a record, and without it all numbers after it would be off.
            if len(cells) > 1 or any(cell.strip() for cell in cells):
                yield start, cells
            start = lines.number + 1
    except csv.Error as error:
        problem = error
    if problem is not None:
        raise mismatch(
            ValueError,
            f"{lines.name}: the table cannot be read",
            "cells between separators, quotes in pairs",
            problem,
            where=f"{lines.path}:{start}",
        )


def _find_columns(header: list[str], wanted: _Wanted, where: str) -> int:
    if wanted.smiles is None:
        found = [name for name in header if name.lower() == "smiles"]
        asked = ["smiles"]
    else:
        found, asked = [wanted.smiles], [wanted.smiles]
    asked += [name for name in (*wanted.targets, wanted.name) if name is not None]
    missing = [name for name in asked[1:] if name not in header]
    if not found or found[0] not in header:
        missing.insert(0, asked[0])
    if missing:
        raise mismatch(
            ValueError,
            f"read_molecules: there is no column {', '.join(map(repr, missing))}",
            f"one of: {', '.join(map(repr, header)) or 'no columns'}",
            ", ".join(asked),
            where=where,
            hint="smiles_column=…, target_columns=[…]; the first line names the columns",
        )
    twice = [name for name in (*found, *asked[1:]) if header.count(name) > 1]
    if (twice or len(found) > 1) and not wanted.first_of_repeated:
        raise mismatch(
            ValueError,
            "read_molecules: two columns have the same name",
            "different names for the columns that are used",
            ", ".join(map(repr, twice or found)),
            where=where,
        )
    return header.index(found[0])


def _read_smi(lines: Lines, kind: str, wanted: _Wanted) -> Iterator[RawMolecule]:
    row, header = 0, False
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not (row or header) and text[:6].lower() == "smiles" and not text[6:7].strip():
            header = True
            continue
        smiles, _, rest = text.replace("\t", " ").partition(" ")
        rest = rest.strip()
        if rest.startswith("|") and "|" in rest[1:]:  # the extension of CXSMILES
            end = rest.index("|", 1) + 1
            smiles, rest = f"{smiles} {rest[:end]}", rest[end:].strip()
        yield RawMolecule(row, f"{lines.path}:{lines.number}", smiles=smiles, name=rest or None)
        row += 1


def _read_sdf(lines: Lines, kind: str, wanted: _Wanted) -> Iterator[RawMolecule]:
    seen: dict[str, None] = {}
    used = wanted.used()
    record: list[str] = []
    row, start = 0, 1
    for line in chain(lines, ["$$$$"]):
        if not line.startswith("$$$$"):
            record.append(line.rstrip("\r\n"))
            continue
        if any(text.strip() for text in record):
            fields = _fields(record)
            seen |= dict.fromkeys(fields)
            where = f"{lines.path}:{start}"
            yield RawMolecule(
                row,
                where,
                block=_block(record),
                name=record[0].strip() or None,
                targets=wanted.labels(fields, where),
                extra={name: text for name, text in fields.items() if name not in used},
                source=(
                    (tuple(fields), tuple(fields.values())) if wanted.keep_source else ((), ())
                ),
            )
            row += 1
        record, start = [], lines.number + 1
    never = [name for name in wanted.targets if name not in seen]
    if row and never:
        raise mismatch(
            ValueError,
            f"read_molecules: no record has the field {', '.join(map(repr, never))}",
            f"some of: {', '.join(map(repr, seen)) or 'no fields'}",
            ", ".join(wanted.targets),
            where=lines.path,
        )


def _block(record: list[str]) -> str:
    ends = (place for place, line in enumerate(record) if line.startswith("M  END"))
    return "\n".join(record[: next(ends, len(record) - 1) + 1]) + "\n"


def _fields(record: list[str]) -> dict[str, str]:
    fields: dict[str, list[str]] = {}
    values: list[str] | None = None
    for line in record:
        header = _FIELD.match(line)
        if header:
            values = fields.setdefault(header.group(1), [])
        elif not line.strip():
            values = None
        elif values is not None:
            values.append(line)
    return {name: "\n".join(lines) for name, lines in fields.items()}


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
        return mismatch_text(
            f"{name}: row {self.row} cannot be used",
            "a molecule",
            f"{self.reason}{atom}, in {shown!r}",
            where=self.where,
            hint='bad="skip" to leave such rows out, or bad="blank" to keep their places',
        )

    def as_dict(self) -> dict[str, Any]:
        """Gives the parts as plain values."""
        return asdict(self)


def check_policy(bad: str, name: str) -> str:
    """Refuses a policy for bad rows that does not exist."""
    if bad not in POLICIES:
        raise mismatch(
            ValueError,
            f"{name}: there is no such policy for bad rows",
            ", ".join(map(repr, POLICIES)),
            repr(bad),
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
    """Counts bad rows by reason."""
    first = errors[0]
    return (
        f"{len(errors):,} of {total:,} rows cannot be used; the first: row {first.row} "
        f"({first.where}): {first.reason}"
    )
