"""Read molecules and labels from CSV, TSV, SMILES and SDF files, and report records that fail."""

import csv
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pyg_dynbatch.core.errors import mismatch, mismatch_text
from pyg_dynbatch.files import Lines, atomic_file, existing, open_lines
from pyg_dynbatch.molecules.features.rdkit_access import (
    Mol,
    MoleculeError,
    chem,
    rdkit_module,
    smiles_of_block,
)

_SUFFIXES = {
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "smi": (".smi", ".smiles", ".txt"),
    "sdf": (".sdf", ".sd"),
}
FORMATS = {suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes}
_SEPARATORS = {"csv": ",", "tsv": "\t"}
_MISSING = ("", "nan", "na")
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which networks compute

_CENSORED = re.compile(r"[<>≤≥~≈]")  # known only to be below or above a bound


@dataclass(frozen=True)
class TableOptions:
    """How cells of a table, and fields of an SDF, are written; names as in pandas.

    Args:
        smiles_column: Column of the SMILES; None for the one named smiles, in any case.
        sep: The character between cells; None for a comma in ``csv``, a tab in ``tsv`` files.
        decimal: The character before decimals. A minus may be a hyphen or U+2212.
        missing: Texts, in any case, that are missing labels, in addition to "", nan and NA.

    Raises:
        ValueError: If `sep` or `decimal` is not one character.

    Example:
        >>> TableOptions(sep=";", decimal=",").number("-1,5")
        -1.5
    """

    smiles_column: str | None = None
    sep: str | None = None
    decimal: str = "."
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("sep", "decimal"):
            character = getattr(self, name)
            if character is not None and len(character) != 1:
                what = f"TableOptions: {name} is not one character"
                raise mismatch(ValueError, what, "such as ; or ,", repr(character))

    @cached_property
    def _no_label(self) -> frozenset[str]:
        return frozenset((*_MISSING, *(text.strip().lower() for text in self.missing)))

    def is_missing(self, text: str) -> bool:
        """Return whether a cell is a missing label."""
        return text.strip().lower() in self._no_label

    def number(self, text: str) -> float | None:
        """Return the number in a cell, None if it is not one; Python would accept 1_000 too."""
        text = text.replace("\N{MINUS SIGN}", "-")
        if self.decimal != ".":
            text = text.replace(".", "_").replace(self.decimal, ".")
        try:
            value = math.nan if "_" in text else float(text)
        except ValueError:
            return None
        return None if math.isnan(value) else value


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
        source: Names and texts of all columns or data fields in the order of the file; never of a
            SMILES file.
        fault: Why the text is not that of one molecule; empty if it may be.

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
    fault: str = ""

    def text(self) -> str | None:
        """Return the SMILES, or that of the mol block.

        Raises:
            MoleculeError: If the text is not that of one molecule.
        """
        if self.fault:
            raise MoleculeError(self.fault)
        if self.smiles is None and self.block is not None:
            return smiles_of_block(self.block)
        return self.smiles


def read_molecules(
    path: str | Path,
    *,
    target_columns: Sequence[str] | None = None,
    name_column: str | None = None,
    format: str | None = None,
    table: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> Iterator[RawMolecule]:
    r"""Read a file of molecules as a stream: a million records need no more memory than one.

    Every line end, ``\n``, ``\r\n`` or ``\r``, becomes ``\n``; then the module csv and RDKit's
    ``ForwardSDMolSupplier`` decide where records end.

    - ``csv``, ``tsv``: a line of column names, then records; empty lines are none. Of columns with
      one name the first is used, with a warning.
    - ``smi``: a line with a SMILES, a blank or tab, a name. A first line that begins with
      ``smiles`` is skipped, as are empty lines and those that begin with ``#``.
    - ``sdf``: labels are data fields; the name is the first line of a record. If a record has a
      field twice, the last one is used, with a warning.

    Any may be compressed (``.gz``). Text is UTF-8, with or without a byte order mark. Invalid
    molecules are yielded like others: the featurizer reports what is wrong with them.

    Args:
        path: The file, or ``"-"`` for standard input.
        target_columns: Columns of the labels; None for no labels.
        name_column: Column of the names (csv, tsv).
        format: ``"csv"``, ``"tsv"``, ``"smi"`` or ``"sdf"``; None to infer it from the suffix.
        table: Column of the SMILES, and how cells are written.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: With file and line, if the format is unknown, the file is empty, corrupt or not
            UTF-8, a column is missing, the number of cells differs, or a label is not a number
            within float32.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = path.write_text("name;smiles;logP\nmethanol;CO ;-0,77\nwater;O;NA\n")
        >>> options = TableOptions(sep=";", decimal=",")
        >>> for raw in read_molecules(path, target_columns=["logP"], table=options):
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
    _check_columns(kind, targets, table.smiles_column or name_column or table.sep, path)
    if str(path) != "-":
        existing(path, f"a {kind} file of molecules")
    labels = frozenset(targets)

    def read() -> Iterator[RawMolecule]:
        found = False
        with open_lines(path) as lines:
            if kind == "smi":
                records = _read_smi(lines)
            elif kind == "sdf":
                records = _read_sdf(lines, targets)
            else:
                records = _read_table(
                    lines, table.sep or _SEPARATORS[kind], table, targets, name_column
                )
            for raw in records:
                found = True
                yield replace(
                    raw,
                    targets=tuple(_label(raw, name, table) for name in targets),
                    extra={name: raw.extra[name] for name in raw.extra if name not in labels},
                )
            if not found:
                what = f"{lines.name}: the file contains no molecules"
                got = f"{lines.number} lines"
                raise mismatch(ValueError, what, f"at least one {kind} record", got, where=path)

    return read()


def _check_columns(
    kind: str, targets: Sequence[str], of_table: str | None, path: str | Path
) -> None:
    if twice := [name for name, count in Counter(targets).items() if count > 1]:
        what = "read_molecules: a target is named twice"
        raise mismatch(ValueError, what, "different columns", ", ".join(twice), where=path)
    if kind in ("smi", "sdf") and of_table:
        what = f"read_molecules: {kind} files have no columns of SMILES or names"
        raise mismatch(ValueError, what, "such columns for csv, tsv", of_table, where=path)
    if kind == "smi" and targets:
        what, got = "read_molecules: smi files have no labels", ", ".join(targets)
        hint = "a csv file with a line of column names"
        raise mismatch(ValueError, what, "csv, tsv or sdf", got, where=path, hint=hint)


def _label(raw: RawMolecule, name: str, table: TableOptions) -> float | None:
    text = raw.extra.get(name, "").strip()
    if table.is_missing(text):
        return None
    value = table.number(text)
    if value is not None and abs(value) <= _LARGEST:
        return value
    fault = _fault_of_number(text, table)
    what = f"read_molecules: a label of {name!r} is {fault}"
    expected = f"a number up to {_LARGEST:.2g}, or an empty cell, nan or NA if missing"
    hint = ""
    if fault == _WITH_COMMA:
        hint = 'decimal="," (--decimal ,)'
    elif _may_be_missing(text, fault):
        hint = f"missing=({text!r},) (--missing), if that is a missing label"
    raise mismatch(ValueError, what, expected, repr(text), where=raw.where, hint=hint)


_TOO_LARGE = "beyond float32"
_WITH_COMMA = "a number with a decimal comma"
_OF_BOUND = "a censored value"
_NO_NUMBER = "not a number"
_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)


def _fault_of_number(text: str, table: TableOptions) -> str:
    """Return why a cell is not a number within float32."""
    if table.number(text) is not None:
        return _TOO_LARGE
    if _CENSORED.match(text):
        return _OF_BOUND
    is_decimal = table.decimal == "." and _COMMA.fullmatch(text.replace("\N{MINUS SIGN}", "-"))
    return _WITH_COMMA if is_decimal else _NO_NUMBER


def _may_be_missing(text: str, fault: str) -> bool:
    """Return whether a cell is certainly not a measurement."""
    return fault == _NO_NUMBER and not any(character.isdigit() for character in text)


def _format_of(path: str, given: str | None) -> str:
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    found = FORMATS.get(suffix) if given is None else given
    if found in _SUFFIXES:
        return str(found)
    expected = f"{', '.join(sorted(_SUFFIXES))} ({' '.join(FORMATS)}, also with .gz)"
    what, got = "read_molecules: the format is unknown", path if given is None else repr(given)
    raise mismatch(ValueError, what, expected, got, hint='format="csv" (--format csv)')


def _read_table(
    lines: Lines, sep: str, table: TableOptions, targets: Sequence[str], name: str | None
) -> Iterator[RawMolecule]:
    records = _cells(lines, sep)
    _, header = next(records, (0, []))
    if not header:
        what, got = f"{lines.name}: the file is empty", f"{lines.number} lines"
        raise mismatch(ValueError, what, "a line that names the columns", got, where=lines.path)
    header = [each.strip() for each in header]
    others = list(targets) if name is None else [*targets, name]
    column = _find_smiles(header, table.smiles_column, others, f"{lines.path}:1")
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


def _cells(lines: Lines, sep: str) -> Iterator[tuple[int, list[str]]]:
    start, ended = 1, False

    def watched() -> Iterator[str]:
        nonlocal ended
        yield from lines
        ended = True

    try:
        for cells in csv.reader(watched(), delimiter=sep):
            # The reader asks for a line after the last one only within a quoted cell.
            if ended:
                raise csv.Error("a quote that is opened here and never closed")
            if cells:
                yield start, cells
            start = lines.number + 1
    except csv.Error as error:
        what = f"{lines.name}: the table cannot be read"
        expected, where = "cells between separators, quotes in pairs", f"{lines.path}:{start}"
        raise mismatch(ValueError, what, expected, error, where=where) from error


def _find_smiles(header: list[str], smiles: str | None, others: list[str], where: str) -> int:
    """Return the index of the column of SMILES; check that it and the others exist."""
    found = [n for n in header if (n == smiles if smiles else n.lower() == "smiles")]
    missing = ([] if found else [smiles or "smiles"]) + [n for n in others if n not in header]
    if missing:
        what = f"read_molecules: column {', '.join(map(repr, missing))} not found"
        expected = f"one of: {', '.join(map(repr, header))}"
        got = ", ".join([smiles or "smiles", *others])
        hint = "smiles_column=…, target_columns=[…]; the first line names the columns"
        if len(header) == 1 and (other := re.search(r"[;,\t|]", header[0])):
            hint = f"sep={other.group()!r} (--sep)"
        raise mismatch(ValueError, what, expected, got, where=where, hint=hint)
    twice = [name for name in others if header.count(name) > 1]
    twice += found if len(found) > 1 else []
    if twice:
        names = ", ".join(map(repr, twice))
        warnings.warn(
            f"{where}: several columns are named {names}; the first is used", stacklevel=2
        )
    return header.index(found[0])


def _read_smi(lines: Lines) -> Iterator[RawMolecule]:
    row, header = 0, False
    for line in lines:
        text = line.lstrip(" ").rstrip()  # a tab is not stripped: the SMILES before it is empty
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


class _SDFile:
    """File that RDKit's supplier reads up to a line ``$$$$`` at a time.

    Therefore the lines that were read when the supplier returns are those of the record.
    """

    def __init__(self, lines: Lines) -> None:
        self.record: list[str] = []
        self.ends: list[int] = []  # numbers of the lines $$$$ in the record, from 1
        self._error: BaseException | None = None
        self._lines = iter(lines)
        # Where a record ends does not depend on its chemistry.
        self._supplier = chem().ForwardSDMolSupplier(self, sanitize=False, removeHs=False)

    def read(self, size: int) -> bytes:
        """Return the lines up to the next line ``$$$$``, whatever their size."""
        start = len(self.record)
        try:
            for line in self._lines:
                self.record.append(line)
                if line.startswith("$$$$"):
                    self.ends.append(len(self.record))
                    break
        except BaseException as error:  # RDKit would lose it
            self._error = error
            return b""
        return "".join(self.record[start:]).encode()

    def molecules(self) -> Iterator[Mol | None]:
        """Read record by record; None where RDKit finds no molecule."""
        while True:
            self.record, self.ends = [], []
            with rdkit_module("rdBase").BlockLogs():
                mol = next(self._supplier, self)
            if self._error is not None:
                raise self._error
            if mol is self:
                return
            yield mol


# A header, whose field has a name or not, and the lines up to an empty one.
_ITEM = re.compile(r"^[ \t]*>(?:[^<\n]*<(.+)>)?.*\n((?:.+\n)*)", re.MULTILINE)


def _read_sdf(lines: Lines, targets: Sequence[str]) -> Iterator[RawMolecule]:
    file = _SDFile(lines)
    seen: dict[str, None] = {}
    repeated: set[str] = set()
    row, start = 0, 1
    for mol in file.molecules():
        where, first_line = f"{lines.path}:{start}", start
        start = lines.number + 1
        if not any(line.strip() for line in file.record):
            continue  # blank lines at the end of the file
        block, items, fault = _sdf_parts(file, first_line, mol is not None)
        names = [name for name, _ in items]
        seen |= dict.fromkeys(names)
        for name in {name for name in names if names.count(name) > 1} - repeated:
            text = f"the field {name!r} occurs twice in a record; the last one is used"
            warnings.warn(f"{where}: {text}", stacklevel=2)
            repeated.add(name)
        fields = dict(items)
        yield RawMolecule(
            row,
            where,
            block=block,
            name=file.record[0].strip() or None,
            extra=fields,
            source=(tuple(fields), tuple(fields.values())),
            fault=fault,
        )
        row += 1
    never = [name for name in targets if name not in seen]
    if row and never:
        what = f"read_molecules: no record has the field {', '.join(map(repr, never))}"
        expected = f"some of: {', '.join(map(repr, seen)) or 'no fields'}"
        raise mismatch(ValueError, what, expected, ", ".join(targets), where=lines.path)


def _sdf_parts(
    file: _SDFile, first_line: int, is_readable: bool
) -> tuple[str, list[tuple[str, str]], str]:
    """Split a record into its mol block and its fields; return why it may be several."""
    is_ended = file.ends[-1:] == [len(file.record)]
    text = "".join(file.record[:-1] if is_ended else file.record)
    text += "" if text.endswith("\n") else "\n"
    found = text.find("\nM  END") + 1
    end = text.index("\n", found) + 1 if found else len(text)
    block, data = text[:end], text[end:]
    items = _ITEM.findall(data)
    fields = [(name, value.removesuffix("\n")) for name, value in items if name]
    inner = file.ends[: len(file.ends) - is_ended]
    stray = _ITEM.sub("", data).split("\n")
    stray_line = next((line for line in stray if line.strip()), None)
    if inner and (not is_readable or len(fields) < len(items) or stray_line is not None):
        fault = f"RDKit finds no end of the record at $$$$ in line {first_line + inner[0] - 1}"
        fault += ", and takes what follows for a part of it"
        return block, [], f"{fault}: M  END must end a mol block, an empty line each named field"
    if stray_line is not None:
        fault = f"there are no fields but {stray_line[:_SHOWN]!r} after M  END"
        return block, [], f"{fault}: a field is a line such as > <name>, its value, an empty line"
    return block, fields, ""


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
_MOST_CLASSES = 20


class FoundTargets(NamedTuple):
    """The kind and the names of the targets, and why other columns are none."""

    kind: str
    names: tuple[str, ...]
    others: tuple[str, ...] = ()
    are_classes: bool = False  # whether the kind was not given, and all values are 0, 1, 2, ...

    def __str__(self) -> str:
        names = ", ".join(self.names[:_SHOWN_TARGETS]) + ", …" * (len(self.names) > _SHOWN_TARGETS)
        text = f"targets ({self.kind}): {names}"
        return f"{text}; not targets: {', '.join(self.others)}" if self.others else text


class _Column:
    """What the cells of a column have in common."""

    def __init__(self, table: TableOptions) -> None:
        self.table = table
        self.labels = self.numbers = True  # numbers of records: whole, and all different
        self.seen: set[float] = set()
        self.count = 0  # numbers
        self.num_bad = 0  # other cells
        self.bad = ""  # the first of them
        self.fault = ""  # why it is none
        self.faults: set[str] = set()  # why any is none

    def add(self, text: str) -> None:
        """Add a cell that is not missing."""
        value = self.table.number(text)
        if value is None or abs(value) > _LARGEST:
            fault = _fault_of_number(text, self.table)
            self.bad = self.bad or text
            self.fault = self.fault or fault
            self.faults.add(fault)
            self.num_bad += 1
            return
        self.count += 1
        self.labels &= value in (0, 1)
        self.numbers &= value.is_integer() and value not in self.seen
        if self.numbers or len(self.seen) < _MOST_CLASSES:
            self.seen.add(value)

    @property
    def classes(self) -> bool:
        """Whether the values are 0, 1, 2, ..., like the numbers of classes."""
        is_usual = not self.numbers and 2 < len(self.seen) < _MOST_CLASSES
        return is_usual and self.seen == set(range(len(self.seen)))

    @property
    def reason(self) -> str:
        """Why this is no target; empty if it is one."""
        if self.bad:
            return f"{self.fault}: {self.bad[:_SHOWN]!r}"
        if len(self.seen) < 2:
            return "fewer than two different values"
        return "whole numbers that never repeat" if self.numbers else ""


def find_targets(
    path: str | Path,
    table: TableOptions = TableOptions(),  # noqa: B008 - frozen
    targets: Collection[str] | None = None,
    kind: str | None = None,
) -> FoundTargets:
    """Find what is not given: all columns of numbers, which are labels if all are 0 or 1.

    Raises:
        ValueError: If there are none, both labels and values, or a few odd cells among numbers.
    """
    file = Path(path).absolute()
    stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else ()
    columns = _columns(str(file), table, stamp)
    if targets is None:
        found = _chosen_targets(columns, path, kind)
    else:
        all_labels = all(name in columns and columns[name].labels for name in targets)
        found_kind = kind or ("binary" if all_labels else "regression")
        found = FoundTargets(found_kind, tuple(targets))
    are_classes = all(name in columns and columns[name].classes for name in found.names)
    return found._replace(are_classes=kind is None and are_classes)


def _chosen_targets(
    columns: dict[str, _Column], path: str | Path, kind: str | None
) -> FoundTargets:
    _check_cells(columns, path)
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


def _check_cells(columns: dict[str, _Column], path: str | Path) -> None:
    """Raise an error for a few odd cells among numbers, and for numbers with decimal commas."""
    for name, column in columns.items():
        only_commas = column.num_bad > 0 and column.faults == {_WITH_COMMA}
        if not (column.count > column.num_bad > 0 or only_commas):
            continue
        what, odd = f"a cell of {name!r} is {column.fault}", column.bad[:_SHOWN]
        got = f"{column.num_bad} others, such as {odd!r}"
        hint = "--data.init_args.targets '[NAME]'"
        if only_commas:
            hint = f"--data.init_args.table.decimal ,; or {hint}"
        elif _may_be_missing(odd, column.fault):
            hint = f"""--data.init_args.table.missing '["{odd}"]', or {hint}"""
        raise mismatch(ValueError, what, "numbers, or targets", got, where=path, hint=hint)


@lru_cache(maxsize=8)
def _columns(path: str, table: TableOptions, stamp: tuple[int, ...]) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    for record in read_molecules(path, table=table):
        for name, cell in record.extra.items():
            column = columns.setdefault(name, _Column(table))
            text = cell.strip()
            if not table.is_missing(text):
                column.add(text)
    return columns
