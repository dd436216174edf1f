"""Read molecules and labels from CSV, TSV, SMILES and SDF files, and report records that fail."""

import csv
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.files import Lines, atomic_file, existing, open_lines

_SUFFIXES = {
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "smi": (".smi", ".smiles", ".txt"),
    "sdf": (".sdf", ".sd"),
}
FORMATS = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
MISSING = ("", "nan", "na")
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which networks compute

_CENSORED = re.compile(r"[<>≤≥~≈]")  # a measurement known only to be below or above a bound
# Without the second bracket, a line such as ">5 <100" is a value, not the header of a field.
_FIELD = re.compile(r">[^<]*<(.*)>")


@dataclass(frozen=True)
class RawMolecule:
    """One record of a file, as text.

    Args:
        row: Number of the record in the file, from 0.
        where: File and line of the record, for messages.
        smiles: The SMILES without blanks around it; ``""`` where the cell is empty, None in SDF.
        block: The mol block; None except in SDF.
        name: Name of the molecule; None where it has none.
        targets: The labels in the order of the requested columns; None where one is missing.
        extra: All other columns or data fields, as text.
        source: Names and texts of all columns or data fields in the order of the file, if
            requested; never of a SMILES file.

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
    r"""Read a file of molecules as a stream: a million records need no more memory than one.

    - ``csv``, ``tsv``: a line of column names, then one record per line; quoted cells may hold
      commas and line ends. Blank lines are skipped; a line of empty cells is a record.
    - ``smi``: a SMILES, a blank, a name. A first line that begins with ``smiles`` is skipped, as
      are lines that begin with ``#``.
    - ``sdf``: labels are data fields; the name is the first line of a record.

    Any may be compressed (``.gz``). Text is UTF-8, with or without a byte order mark. Invalid
    molecules are yielded like others: the featurizer reports what is wrong with them.

    Args:
        path: The file, or ``"-"`` for standard input.
        smiles_column: Column of the SMILES; None for the one named smiles, in any case.
        target_columns: Columns of the labels; None for no labels.
        name_column: Column of the names (csv, tsv).
        format: ``"csv"``, ``"tsv"``, ``"smi"`` or ``"sdf"``; None to infer it from the suffix.
        missing: Texts, in any case, that are missing labels, in addition to "", nan and NA.
        first_of_repeated: Whether to use the first of several columns with the same name, instead
            of raising an error.
        keep_source: Whether each record keeps all its columns as `source`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: With file and line, if the format is unknown, the file is empty, corrupt or not
            UTF-8, a column is missing, the number of cells differs, or a label is not a finite
            number.

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
        what = "read_molecules: target_columns is one text, not a list of names"
        hint = f"target_columns=[{target_columns!r}]"
        raise mismatch(TypeError, what, "a list of names", repr(target_columns), hint=hint)
    kind = _format_of(str(path), format)
    targets = tuple(target_columns or ())
    if twice := [name for name, count in Counter(targets).items() if count > 1]:
        what = "read_molecules: a target is named twice"
        raise mismatch(ValueError, what, "different columns", ", ".join(twice), where=path)
    if kind in ("smi", "sdf") and (named := smiles_column or name_column):
        what = f"read_molecules: {kind} files have no columns of SMILES or names"
        raise mismatch(ValueError, what, "such columns for csv, tsv", named, where=path)
    if kind == "smi" and targets:
        what, got = "read_molecules: smi files have no labels", ", ".join(targets)
        hint = "a csv file with a line of column names"
        raise mismatch(ValueError, what, "csv, tsv or sdf", got, where=path, hint=hint)
    if str(path) != "-":
        existing(path, f"a {kind} file of molecules")
    labels = frozenset(targets)
    empty = frozenset((*MISSING, *(token.strip().lower() for token in missing)))

    def read() -> Iterator[RawMolecule]:
        found = False
        with open_lines(path) as lines:
            if kind == "smi":
                records = _read_smi(lines)
            elif kind == "sdf":
                records = _read_sdf(lines, targets)
            else:
                names = (smiles_column, targets, name_column, first_of_repeated)
                records = _read_table(lines, _DELIMITERS[kind], *names)
            for raw in records:
                found = True
                yield replace(
                    raw,
                    targets=tuple(_label(raw, name, empty) for name in targets),
                    extra={name: raw.extra[name] for name in raw.extra if name not in labels},
                    source=raw.source if keep_source else ((), ()),
                )
            if not found:
                what = f"{lines.name}: the file contains no molecules"
                got = f"{lines.number} lines"
                raise mismatch(ValueError, what, f"at least one {kind} record", got, where=path)

    return read()


def _label(raw: RawMolecule, name: str, missing: Collection[str]) -> float | None:
    text = raw.extra.get(name, "").strip()
    if text.lower() in missing:
        return None
    value = _number(text)
    if value is None:
        kind = "a censored value" if _CENSORED.match(text) else "not a finite number"
        what = f"read_molecules: the label {name!r} is {kind}"
        expected = f"a number up to {_LARGEST:.2g}, or an empty cell, nan or NA if missing"
        hint = f"missing=[{text!r}] (featurize: --missing), if that is a missing label"
        raise mismatch(ValueError, what, expected, repr(text), where=raw.where, hint=hint)
    return value


def _number(text: str) -> float | None:
    """Return a number that float32 can hold, or None; Python would accept 1_000 too."""
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        return None
    return value if abs(value) <= _LARGEST else None


def _format_of(path: str, given: str | None) -> str:
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    found = FORMATS.get(suffix) if given is None else given
    if found in _SUFFIXES:
        return str(found)
    expected = f"{', '.join(sorted(_SUFFIXES))} ({' '.join(FORMATS)}, also with .gz)"
    what, got = "read_molecules: the format is unknown", path if given is None else repr(given)
    raise mismatch(ValueError, what, expected, got, hint='format="csv" (--format csv)')


def _read_table(
    lines: Lines,
    delimiter: str,
    smiles: str | None,
    targets: Sequence[str],
    name: str | None,
    first_of_repeated: bool,
) -> Iterator[RawMolecule]:
    records = _cells(lines, delimiter)
    _, header = next(records, (0, []))
    if not header:
        what, got = f"{lines.name}: the file is empty", f"{lines.number} lines"
        raise mismatch(ValueError, what, "a line that names the columns", got, where=lines.path)
    header = [each.strip() for each in header]
    others = list(targets) if name is None else [*targets, name]
    column = _find_smiles(header, smiles, others, first_of_repeated, f"{lines.path}:1")
    hidden = {header[column], name}.difference(targets)
    named = None if name is None else header.index(name)
    others_at = {each: header.index(each) for each in header if each not in hidden}
    for row, (start, cells) in enumerate(records):
        if len(cells) != len(header):
            what = f"{lines.name}: the number of cells is not that of the columns"
            names, got = (f"{len(texts)}: {', '.join(texts)[:200]}" for texts in (header, cells))
            where, hint = f"{lines.path}:{start}", "quotes around separators"
            raise mismatch(ValueError, what, names, got, where=where, hint=hint)
        yield RawMolecule(
            row,
            f"{lines.path}:{start}",
            smiles=cells[column].strip(),
            name=None if named is None else cells[named].strip(),
            extra={each: cells[index] for each, index in others_at.items()},
            source=(header, cells),
        )


def _cells(lines: Lines, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    start, ended = 1, False

    def watched() -> Iterator[str]:
        nonlocal ended
        yield from lines
        ended = True

    try:
        for cells in csv.reader(watched(), delimiter=delimiter):
            # The reader asks for a line after the last one only within a quoted cell.
            if ended:
                raise csv.Error("a quote that is opened here and never closed")
            # A line of separators is a record: without it all later row numbers would be wrong.
            if len(cells) > 1 or any(cell.strip() for cell in cells):
                yield start, cells
            start = lines.number + 1
    except csv.Error as error:
        what = f"{lines.name}: the table cannot be read"
        expected, where = "cells between separators, quotes in pairs", f"{lines.path}:{start}"
        raise mismatch(ValueError, what, expected, error, where=where) from error


def _find_smiles(
    header: list[str], smiles: str | None, others: list[str], first_of_repeated: bool, where: str
) -> int:
    """Return the index of the column of SMILES; check that it and the others exist, once."""
    found = [n for n in header if (n == smiles if smiles else n.lower() == "smiles")]
    missing = ([] if found else [smiles or "smiles"]) + [n for n in others if n not in header]
    if missing:
        what = f"read_molecules: column {', '.join(map(repr, missing))} not found"
        expected = f"one of: {', '.join(map(repr, header))}"
        got = ", ".join([smiles or "smiles", *others])
        hint = "smiles_column=…, target_columns=[…]; the first line names the columns"
        if len(header) == 1 and re.search(r"[;,\t|]", header[0]):
            hint = "commas between the cells of a CSV file, or tabs with format tsv"
        raise mismatch(ValueError, what, expected, got, where=where, hint=hint)
    twice = [name for name in others if header.count(name) > 1]
    twice += found if len(found) > 1 else []
    if twice and not first_of_repeated:
        what, wanted = "read_molecules: two columns have the same name", "one column of each name"
        raise mismatch(ValueError, what, wanted, ", ".join(map(repr, twice)), where=where)
    return header.index(found[0])


def _read_smi(lines: Lines) -> Iterator[RawMolecule]:
    row, header = 0, False
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not (row or header) and text[:6].lower() == "smiles" and not text[6:7].strip():
            header = True
            continue
        row += 1
        smiles, _, rest = text.replace("\t", " ").partition(" ")
        rest = rest.strip()
        if rest.startswith("|") and "|" in rest[1:]:  # the extension of CXSMILES
            end = rest.index("|", 1) + 1
            smiles, rest = f"{smiles} {rest[:end]}", rest[end:].strip()
        yield RawMolecule(row - 1, f"{lines.path}:{lines.number}", smiles=smiles, name=rest or None)


def _read_sdf(lines: Lines, targets: Sequence[str]) -> Iterator[RawMolecule]:
    # Not with RDKit's suppliers, which read no streams and give molecules without block and line.
    seen: dict[str, None] = {}
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
            yield _sdf_molecule(record, row, where, fields)
            row += 1
        record, start = [], lines.number + 1
    never = [name for name in targets if name not in seen]
    if row and never:
        what = f"read_molecules: no record has the field {', '.join(map(repr, never))}"
        expected = f"some of: {', '.join(map(repr, seen)) or 'no fields'}"
        raise mismatch(ValueError, what, expected, ", ".join(targets), where=lines.path)


def _sdf_molecule(record: list[str], row: int, where: str, fields: dict[str, str]) -> RawMolecule:
    ends = (index for index, text in enumerate(record) if text.startswith("M  END"))
    return RawMolecule(
        row,
        where,
        block="\n".join(record[: next(ends, len(record) - 1) + 1]) + "\n",
        name=record[0].strip() or None,
        extra=fields,
        source=(tuple(fields), tuple(fields.values())),
    )


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


_SHOWN = 80


@dataclass(frozen=True)
class BadMolecule:
    """Why one record of a source is not a molecule.

    Args:
        row: Number of the record in its source, from 0.
        where: File and line.
        smiles: The text; None if there is none.
        reason: What is wrong.
        atom: The atom at fault, from 0; None if it is not a single one.

    Example:
        >>> print(BadMolecule(3, "mine.csv:5", "C(", "an open bracket").complaint("MoleculeFile"))
        MoleculeFile: row 3 cannot be used.
          expected: a molecule
          got:      an open bracket, in 'C('
          where:    mine.csv:5
          try:      bad="skip" (--bad skip) to omit such rows, "blank" to keep them without atoms
    """

    row: int
    where: str
    smiles: str | None
    reason: str
    atom: int | None = None

    def complaint(self, name: str) -> str:
        """Return the message of the error with which `name`, a reader, stops at this record."""
        text = self.smiles or ""
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
        atom = "" if self.atom is None else f" (atom {self.atom})"
        what, got = f"{name}: row {self.row} cannot be used", f"{self.reason}{atom}, in {shown!r}"
        hint = 'bad="skip" (--bad skip) to omit such rows, "blank" to keep them without atoms'
        return mismatch_text(what, "a molecule", got, where=self.where, hint=hint)


def write_error_report(path: str | Path, errors: Iterable[BadMolecule]) -> Path:
    """Write a CSV file with one line per bad row, atomically.

    Args:
        path: The file, which is returned.
        errors: The bad rows.

    Example:
        >>> import tempfile
        >>> bad = BadMolecule(3, "mine.csv:5", "C(", "an open bracket")
        >>> path = write_error_report(f"{tempfile.mkdtemp()}/errors.csv", [bad])
        >>> path.read_text().splitlines()
        ['row,where,smiles,reason,atom', '3,mine.csv:5,C(,an open bracket,']
    """
    with atomic_file(path, newline="", encoding="utf-8") as file:
        write_errors(file, errors)
    return Path(path)


def write_errors(file: Any, errors: Iterable[BadMolecule] = (), *, header: bool = True) -> None:
    """Write bad rows to an open CSV file."""
    columns = [field.name for field in fields(BadMolecule)]
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(asdict(error) for error in errors)


def summary_of(first: BadMolecule, bad: int, total: int) -> str:
    """Count bad rows and name the first."""
    return (
        f"{bad:,} of {total:,} rows cannot be used; the first: row {first.row} "
        f"({first.where}): {first.reason}"
    )


_SHOWN_TARGETS = 12


class FoundTargets(NamedTuple):
    """The kind and the names of the targets, and why other columns are none."""

    kind: str
    names: tuple[str, ...]
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(self.names[:_SHOWN_TARGETS]) + ", …" * (len(self.names) > _SHOWN_TARGETS)
        text = f"targets ({self.kind}): {names}"
        return f"{text}; not targets: {', '.join(self.others)}" if self.others else text


class _Column:
    """What the cells of a column have in common."""

    def __init__(self) -> None:
        self.labels = self.numbers = True  # numbers of records: whole, and all different
        self.seen: set[float] = set()
        self.count, self.bad, self.num_bad = 0, "", 0

    def add(self, text: str) -> None:
        if (value := _number(text)) is None:
            self.bad, self.num_bad = self.bad or text, self.num_bad + 1
            return
        self.count += 1
        self.labels &= value in (0, 1)
        self.numbers &= value.is_integer() and value not in self.seen
        if self.numbers or len(self.seen) < 2:
            self.seen.add(value)

    @property
    def reason(self) -> str:
        """Why this is no target; empty if it is one."""
        if self.bad:
            return f"not numbers, such as {self.bad[:_SHOWN]!r}"
        if len(self.seen) < 2:
            return "fewer than two different values"
        return "whole numbers that never repeat" if self.numbers else ""


def find_targets(
    path: str | Path,
    smiles_column: str | None,
    missing: Collection[str],
    targets: Collection[str] | None = None,
    kind: str | None = None,
) -> FoundTargets:
    """Find what is not given: all columns of numbers, which are labels if all are 0 or 1.

    Raises:
        ValueError: If there are none, both labels and values, or a few odd cells among numbers.
    """
    file = Path(path).absolute()
    stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else ()
    columns = _columns(str(file), smiles_column, tuple(missing), stamp)
    if targets is not None:
        all_labels = all(name in columns and columns[name].labels for name in targets)
        return FoundTargets(kind or ("binary" if all_labels else "regression"), tuple(targets))
    for name, column in columns.items():
        if column.count > column.num_bad > 0:
            odd = column.bad[:_SHOWN]
            kind = "censored values" if _CENSORED.match(odd) else "not numbers"
            what = f"some cells of {name!r} are {kind}"
            got = f"{column.num_bad} others, such as {odd!r}"
            hint = f"""--data.init_args.missing '["{odd}"]', or --data.init_args.targets '[NAME]'"""
            raise mismatch(ValueError, what, "numbers, or targets", got, where=path, hint=hint)
    usable = {name: column for name, column in columns.items() if not column.reason}
    labels = [name for name, column in usable.items() if column.labels]
    values = [name for name in usable if name not in labels]
    others = [f"{name} ({each.reason})" for name, each in columns.items() if each.reason]
    chosen: Any = {"binary": labels, "regression": values, "multiclass": [*usable]}
    kinds: list[Any] = [each for each in ("binary", "regression") if chosen[each]]
    kinds = kinds if kind is None else [kind] * bool(chosen[kind])
    if len(kinds) != 1:
        what = "the targets cannot be found in the file"
        got = "; ".join(f"{each}: {', '.join(chosen[each][:_SHOWN_TARGETS])}" for each in kinds)
        hint = "--data.init_args.targets '[NAME]', or --data.init_args.kind regression or binary"
        others += [f"{name} (labels)" for name in labels]
        got = got or ", ".join(others[:_SHOWN_TARGETS]) or "no columns"
        raise mismatch(ValueError, what, "values, or labels 0 and 1", got, where=path, hint=hint)
    names: list[str] = chosen[kinds[0]]
    left = ((name, "labels" if name in labels else "values") for name in usable)
    others += [f"{name} ({what})" for name, what in left if name not in names]
    return FoundTargets(kinds[0], tuple(names), tuple(others))


@lru_cache(maxsize=8)
def _columns(
    path: str, smiles_column: str | None, missing: tuple[str, ...], stamp: tuple[int, ...]
) -> dict[str, _Column]:
    empty = {*MISSING, *(text.strip().lower() for text in missing)}
    columns: dict[str, _Column] = {}
    for record in read_molecules(path, smiles_column=smiles_column):
        for name, cell in record.extra.items():
            column = columns.setdefault(name, _Column())
            text = cell.strip()
            if text.lower() not in empty:
                column.add(text)
    return columns
