"""Read molecules and labels from CSV, TSV, SMILES and SDF files, and report records that fail."""

import csv
import json
import math
import re
import shlex
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
SMILES_COLUMN = "smiles_column"
"""In a checkpoint: the column of SMILES that a data module was given, or None."""
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
                raise mismatch(
                    ValueError,
                    f"TableOptions: {name} is not one character",
                    "such as ; or ,",
                    repr(character),
                )

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
        raise mismatch(
            TypeError,
            "read_molecules: target_columns is one text, not a list of names",
            "a list of names",
            repr(target_columns),
            hint=f"target_columns=[{target_columns!r}]",
        )
    kind = format_of(str(path), format)
    targets = tuple(target_columns or ())
    _check_columns(kind, targets, table.smiles_column or name_column or table.sep, path)
    if str(path) != "-":
        existing(path, f"a {kind} file of molecules")
    labels = frozenset(targets)

    def read() -> Iterator[RawMolecule]:
        is_empty = True
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
                is_empty = False
                yield replace(
                    raw,
                    targets=tuple(_label(raw, name, table) for name in targets),
                    extra={name: raw.extra[name] for name in raw.extra if name not in labels},
                )
            if is_empty:
                raise mismatch(
                    ValueError,
                    f"{lines.name}: the file contains no molecules",
                    f"at least one {kind} record",
                    f"{lines.number} lines",
                    where=path,
                )

    return read()


def _check_columns(
    kind: str, targets: Sequence[str], of_table: str | None, path: str | Path
) -> None:
    if repeated := [name for name, count in Counter(targets).items() if count > 1]:
        raise mismatch(
            ValueError,
            "read_molecules: a target is named twice",
            "different columns",
            ", ".join(repeated),
            where=path,
        )
    if kind in ("smi", "sdf") and of_table:
        raise mismatch(
            ValueError,
            f"read_molecules: {kind} files have no columns of SMILES or names",
            "such columns for csv, tsv",
            of_table,
            where=path,
        )
    if kind == "smi" and targets:
        raise mismatch(
            ValueError,
            "read_molecules: smi files have no labels",
            "csv, tsv or sdf",
            ", ".join(targets),
            where=path,
            hint="a csv file with a line of column names",
        )


def _label(raw: RawMolecule, name: str, table: TableOptions) -> float | None:
    text = raw.extra.get(name, "").strip()
    if table.is_missing(text):
        return None
    value = table.number(text)
    if value is not None and abs(value) <= _LARGEST:
        return value
    fault = _fault_of_number(text, table)
    raise mismatch(
        ValueError,
        f"read_molecules: a label of {name!r} is {fault}",
        f"a number up to {_LARGEST:.2g}, or an empty cell, nan or NA if missing",
        repr(text),
        where=raw.where,
        hint=_option_for(text, fault),
    )


def _option_for(text: str, fault: str) -> str:
    """Name the option with which a cell that is no number can be read; empty if there is none."""
    if fault == _WITH_COMMA:
        return _option("decimal", ",")
    # Without digits, it is certainly not a measurement.
    if fault == _NO_NUMBER and not any(character.isdigit() for character in text):
        return f"if it is a missing label, {_option('missing', text)}"
    return ""


def _option(name: str, value: str) -> str:
    """Name an option of tables as ``fit``, the other commands and Python do."""
    of_fit = shlex.quote(json.dumps([value]) if name == "missing" else value)
    flag = f"--{name.replace('_', '-')} {shlex.quote(value)}"
    commands = "predict, featurize" if name in ("sep", "smiles_column") else "featurize"
    in_python = (value,) if name == "missing" else value
    return (
        f"--data.init_args.table.{name} {of_fit} (fit), {flag} ({commands}), "
        f"TableOptions({name}={in_python!r})"
    )


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


def format_of(path: str, given: str | None) -> str:
    """Return the format of a file: the one that is given, or that of its suffix."""
    suffix = Path(path.lower().removesuffix(".gz")).suffix
    kind = FORMATS.get(suffix) if given is None else given
    if kind in _SUFFIXES:
        return str(kind)
    raise mismatch(
        ValueError,
        "read_molecules: the format is unknown",
        f"{', '.join(sorted(_SUFFIXES))} ({' '.join(FORMATS)}, also with .gz)",
        path if given is None else repr(given),
        hint='another name of the file; or --format csv (predict, featurize), format="csv"',
    )


def _read_table(
    lines: Lines, sep: str, table: TableOptions, targets: Sequence[str], name: str | None
) -> Iterator[RawMolecule]:
    records = _cells(lines, sep)
    _, header = next(records, (0, []))
    if not header:
        raise mismatch(
            ValueError,
            f"{lines.name}: the file is empty",
            "a line that names the columns",
            f"{lines.number} lines",
            where=lines.path,
        )
    header = [each.strip() for each in header]
    others = list(targets) if name is None else [*targets, name]
    column = _find_smiles(header, table.smiles_column, others, f"{lines.path}:1")
    hidden = {header[column], name}.difference(targets)
    named = None if name is None else header.index(name)
    others_at = {each: header.index(each) for each in header if each not in hidden}
    for row, (start, cells) in enumerate(records):
        if len(cells) != len(header):
            raise mismatch(
                ValueError,
                f"{lines.name}: the number of cells is not that of the columns",
                f"{len(header)}: {', '.join(header)[:200]}",
                f"{len(cells)}: {', '.join(cells)[:200]}",
                where=f"{lines.path}:{start}",
                hint="quotes around separators",
            )
        yield RawMolecule(
            row,
            f"{lines.path}:{start}",
            smiles=cells[column].strip(),
            name=None if named is None else cells[named].strip(),
            extra={each: cells[index] for each, index in others_at.items()},
            source=(header, cells),
        )


def _cells(lines: Lines, sep: str) -> Iterator[tuple[int, list[str]]]:
    start = 1
    ended = False

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
        raise mismatch(
            ValueError,
            f"{lines.name}: the table cannot be read",
            "cells between separators, quotes in pairs",
            error,
            where=f"{lines.path}:{start}",
        ) from error


def _find_smiles(header: list[str], smiles: str | None, others: list[str], where: str) -> int:
    """Return the index of the column of SMILES; check that it and the others exist."""
    of_smiles = [n for n in header if (n == smiles if smiles else n.lower() == "smiles")]
    missing = ([] if of_smiles else [smiles or "smiles"]) + [n for n in others if n not in header]
    if missing:
        hint = "the first line names the columns"
        if not of_smiles:
            hint += f"; {_option('smiles_column', 'NAME')}"
        if len(header) == 1 and (other := re.search(r"[;,\t|]", header[0])):
            hint = _option("sep", other.group())
        raise mismatch(
            ValueError,
            f"read_molecules: column {', '.join(map(repr, missing))} not found",
            f"one of: {', '.join(map(repr, header))}",
            ", ".join([smiles or "smiles", *others]),
            where=where,
            hint=hint,
        )
    repeated = [name for name in others if header.count(name) > 1]
    repeated += of_smiles if len(of_smiles) > 1 else []
    if repeated:
        names = ", ".join(map(repr, repeated))
        warnings.warn(
            f"{where}: several columns are named {names}; the first is used", stacklevel=2
        )
    return header.index(of_smiles[0])


def _read_smi(lines: Lines) -> Iterator[RawMolecule]:
    row = 0
    has_header = False
    for line in lines:
        text = line.lstrip(" ").rstrip()  # a tab is not stripped: the SMILES before it is empty
        if not text or text.startswith("#"):
            continue
        if not (row or has_header) and text[:6].lower() == "smiles" and not text[6:7].strip():
            has_header = True
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
    row = 0
    last_line = 0
    for mol in file.molecules():
        first_line = last_line + 1
        last_line = lines.number
        where = f"{lines.path}:{first_line}"
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
        raise mismatch(
            ValueError,
            f"read_molecules: no record has the field {', '.join(map(repr, never))}",
            f"some of: {', '.join(map(repr, seen)) or 'no fields'}",
            ", ".join(targets),
            where=lines.path,
        )


def _sdf_parts(
    file: _SDFile, first_line: int, is_readable: bool
) -> tuple[str, list[tuple[str, str]], str]:
    """Split a record into its mol block and its fields; return why it may be several."""
    is_ended = file.ends[-1:] == [len(file.record)]
    text = "".join(file.record[:-1] if is_ended else file.record)
    text += "" if text.endswith("\n") else "\n"
    last_of_block = text.find("\nM  END") + 1
    end = text.index("\n", last_of_block) + 1 if last_of_block else len(text)
    block = text[:end]
    data = text[end:]
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
        return mismatch_text(
            f"{name}: row {self.row} cannot be used",
            "a molecule",
            f"{self.reason}{atom}, in {shown!r}",
            where=self.where,
            hint='bad="skip" (--bad skip) to omit such rows, "blank" to keep them without atoms',
        )


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
        chosen = _chosen_targets(columns, path, kind)
    else:
        all_labels = all(name in columns and columns[name].labels for name in targets)
        chosen = FoundTargets(kind or ("binary" if all_labels else "regression"), tuple(targets))
    are_classes = all(name in columns and columns[name].classes for name in chosen.names)
    return chosen._replace(are_classes=kind is None and are_classes)


def _chosen_targets(
    columns: dict[str, _Column], path: str | Path, kind: str | None
) -> FoundTargets:
    _check_cells(columns, path)
    usable = {name: column for name, column in columns.items() if not column.reason}
    labels = [name for name, column in usable.items() if column.labels]
    values = [name for name in usable if name not in labels]
    others = [f"{name} ({each.reason})" for name, each in columns.items() if each.reason]
    names_of = {"binary": labels, "regression": values, "multiclass": [*usable]}
    kinds = [each for each in ("binary", "regression") if names_of[each]]
    if kind is not None:
        kinds = [kind] if names_of[kind] else []
    if len(kinds) != 1:
        ambiguous = [f"{each}: {', '.join(names_of[each][:_SHOWN_TARGETS])}" for each in kinds]
        others += [f"{name} (labels)" for name in labels]
        raise mismatch(
            ValueError,
            "the targets cannot be found in the file",
            "values, or labels 0 and 1",
            "; ".join(ambiguous) or ", ".join(others[:_SHOWN_TARGETS]) or "no columns",
            where=path,
            hint="--data.init_args.targets '[NAME]', or --data.init_args.kind regression or binary",
        )
    names = names_of[kinds[0]]
    left_out = [name for name in usable if name not in names]
    others += [f"{name} ({'labels' if name in labels else 'values'})" for name in left_out]
    return FoundTargets(kinds[0], tuple(names), tuple(others))


def _check_cells(columns: dict[str, _Column], path: str | Path) -> None:
    """Raise an error for a few odd cells among numbers, and for numbers with decimal commas."""
    for name, column in columns.items():
        only_commas = column.num_bad > 0 and column.faults == {_WITH_COMMA}
        if not (column.count > column.num_bad > 0 or only_commas):
            continue
        odd = column.bad[:_SHOWN]
        options = [_option_for(odd, column.fault), "--data.init_args.targets '[NAME]'"]
        raise mismatch(
            ValueError,
            f"a cell of {name!r} is {column.fault}",
            "numbers, or targets",
            f"{column.num_bad} others, such as {odd!r}",
            where=path,
            hint="; or ".join(filter(None, options)),
        )


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
