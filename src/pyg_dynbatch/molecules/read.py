"""Read molecules and labels as a stream from CSV, TSV, SMILES and SDF files."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pyg_dynbatch.core.errors import checked_choice, mismatch, mismatch_text
from pyg_dynbatch.files import Lines, open_lines
from pyg_dynbatch.molecules.chemistry import MoleculeError, chem, rdkit_module, smiles_of_block

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
"""Format of the files with a suffix."""
_SEPARATORS = {"csv": ",", "tsv": "\t"}
_MISSING = ("", "nan", "na")
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which networks compute
_SHOWN = 80


@dataclass(frozen=True)
class TableOptions:
    """How cells of a table, and fields of an SDF, are written; names as in pandas.

    Args:
        smiles_column: Column of the SMILES; None for the one named smiles, in any case.
        sep: The character between cells; None for a comma in ``csv``, a tab in ``tsv`` files.
        decimal: The character before decimals. A minus may be a hyphen or U+2212.
        missing: Texts, in any case, that are missing labels, in addition to "", nan and NA.

    Example:
        >>> TableOptions(sep=";", decimal=",").number("-1,5")
        -1.5
    """

    smiles_column: str | None = None
    sep: str | None = None
    decimal: str = "."
    missing: tuple[str, ...] = ()

    @cached_property
    def _no_label(self) -> frozenset[str]:
        return frozenset((*_MISSING, *(text.strip().lower() for text in self.missing)))

    def is_missing(self, text: str) -> bool:
        """Return whether a cell is a missing label."""
        return text.strip().lower() in self._no_label

    def number(self, text: str) -> float | None:
        """Return the number in a cell, None if it is none within float32."""
        text = text.replace("\N{MINUS SIGN}", "-")
        if self.decimal != ".":
            # Points are no decimals then: as underscores, they are refused below.
            text = text.replace(".", "_").replace(self.decimal, ".")
        if "_" in text:  # Python would accept 1_000
            return None
        try:
            value = float(text)
        except ValueError:
            return None
        return value if abs(value) <= _LARGEST else None


@dataclass(frozen=True)
class RawMolecule:
    """One record of a file, as text.

    Args:
        row: Number of the record in the file, from 0.
        where: File and line of the record, for messages.
        smiles: The SMILES without blanks around it; ``""`` where the cell is empty, None in SDF.
        block: The mol block; None except in SDF.
        name: Name of the molecule; None where it has none, and in tables.
        targets: The labels in the order of the requested columns; None where one is missing.
        extra: All other columns or data fields, as text.
        source: Names and texts of all that the record says, in the order of the file: its columns,
            the SMILES and the name, or the name and the data fields.
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
          try:      bad="skip" to leave such rows out
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
            hint='bad="skip" to leave such rows out',
        )


def read_molecules(
    path: str | Path,
    *,
    target_columns: Sequence[str] | None = None,
    format: str | None = None,
    table: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> Iterator[RawMolecule]:
    r"""Read a file of molecules as a stream: a million records need no more memory than one.

    Every line end, ``\n``, ``\r\n`` or ``\r``, becomes ``\n``; then the module csv and RDKit's
    ``ForwardSDMolSupplier`` decide where records end.

    - ``csv``, ``tsv``: a line of column names, then records; empty lines are none. Of columns with
      one name the first is used, unless one of them is asked for.
    - ``smi``: a line with a SMILES, a blank or tab, a name. A first line that begins with
      ``smiles`` is skipped, as are empty lines and those that begin with ``#``.
    - ``sdf``: labels are data fields; the name is the first line of a record. If a record has a
      field twice, the last one is used.

    Any may be compressed (``.gz``). Text is UTF-8, with or without a byte order mark. Invalid
    molecules are yielded like others: the featurizer reports what is wrong with them.

    Args:
        path: The file.
        target_columns: Columns of the labels; None for no labels.
        format: ``"csv"``, ``"tsv"``, ``"smi"`` or ``"sdf"``; None to infer it from the suffix.
        table: Column of the SMILES, and how cells are written.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: With file and line, if the format is unknown, the file is empty, corrupt or not
            UTF-8, a column is missing or not unique, the number of cells differs, or a label is
            not a number within float32.

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
    suffix = Path(str(path).lower().removesuffix(".gz")).suffix
    kind = checked_choice(
        f"read_molecules: the format of {Path(path).name} is unknown",
        format or FORMATS.get(suffix, ""),
        ("csv", "tsv", "smi", "sdf"),
    )
    targets = tuple(target_columns or ())
    if kind == "smi" and targets:
        raise mismatch(
            ValueError,
            "read_molecules: smi files have no labels",
            "csv, tsv or sdf",
            ", ".join(targets),
            where=path,
        )

    is_empty = True
    with open_lines(path) as lines:
        if kind == "smi":
            records = _read_smi(lines)
        elif kind == "sdf":
            records = _read_sdf(lines, targets)
        else:
            records = _read_table(lines, table.sep or _SEPARATORS[kind], table, targets)
        for raw in records:
            is_empty = False
            yield _with_labels(raw, targets, table) if targets else raw
        if is_empty:
            raise mismatch(
                ValueError,
                f"{lines.name}: the file contains no molecules",
                f"at least one {kind} record",
                f"{lines.number} lines",
                where=path,
            )


def _with_labels(raw: RawMolecule, targets: Sequence[str], table: TableOptions) -> RawMolecule:
    """Return a record with the labels that its other columns hold."""
    labels = [_label(raw.extra.get(name, ""), name, raw.where, table) for name in targets]
    others = dict(raw.extra)
    for name in targets:
        others.pop(name, None)
    return replace(raw, targets=tuple(labels), extra=others)


def _label(cell: str, name: str, where: str, table: TableOptions) -> float | None:
    text = cell.strip()
    if table.is_missing(text):
        return None
    value = table.number(text)
    if value is None:
        raise mismatch(
            ValueError,
            f"read_molecules: a label of {name!r} is not a number",
            f"a number up to {_LARGEST:.2g}, or an empty cell, nan or NA if missing",
            repr(text),
            where=where,
            hint="the options decimal and missing of the table",
        )
    return value


def _read_table(
    lines: Lines, sep: str, table: TableOptions, targets: Sequence[str]
) -> Iterator[RawMolecule]:
    records = _cells(lines, sep)
    _, cells = next(records, (0, []))
    if not cells:
        raise mismatch(
            ValueError,
            f"{lines.name}: the file is empty",
            "a line that names the columns",
            f"{lines.number} lines",
            where=lines.path,
        )
    header = [name.strip() for name in cells]
    column = _find_smiles(header, table.smiles_column, f"{lines.path}:1")
    for name in targets:
        _check_column(header, name, f"{lines.path}:1")
    others = [name for name in header if name != header[column] or name in targets]
    index_of = {name: header.index(name) for name in others}

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
            extra={name: cells[index] for name, index in index_of.items()},
            source=(header, cells),
        )


def _find_smiles(header: Sequence[str], name: str | None, where: str) -> int:
    """Return the index of the column of SMILES."""
    if name is None:
        name = next((each for each in header if each.lower() == "smiles"), "smiles")
    _check_column(header, name, where)
    return header.index(name)


def _check_column(header: Sequence[str], name: str, where: str) -> None:
    """Raise an error unless exactly one column has a name."""
    count = header.count(name)
    if count != 1:
        raise mismatch(
            ValueError,
            f"read_molecules: {count or 'no'} columns are named {name!r}",
            "one, by the first line of the file",
            ", ".join(map(repr, header)),
            where=where,
            hint="--data.targets, --data.table.smiles_column or --data.table.sep of fit",
        )


def _cells(lines: Lines, sep: str) -> Iterator[tuple[int, list[str]]]:
    start = 1
    is_ended = False

    def watched() -> Iterator[str]:
        nonlocal is_ended
        yield from lines
        is_ended = True

    try:
        for cells in csv.reader(watched(), delimiter=sep):
            # The reader asks for a line after the last one only within a quoted cell.
            if is_ended:
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
            smiles = f"{smiles} {rest[:end]}"
            rest = rest[end:].strip()
        yield RawMolecule(
            row,
            f"{lines.path}:{lines.number}",
            smiles=smiles,
            name=rest or None,
            source=(("smiles", "name"), (smiles, rest)),
        )
        row += 1


def _read_sdf(lines: Lines, targets: Sequence[str]) -> Iterator[RawMolecule]:
    file = _SDFile(lines)
    seen: dict[str, None] = {}
    row = 0
    for first_line in file.records():
        record = _parsed(file.record, file.ends)
        is_readable = True
        if not record.is_regular:
            is_readable = file.read_as_rdkit()
            record = _parsed(file.record, file.ends)
        if not any(line.strip() for line in file.record):
            continue  # at the end of the file
        fault = record.fault(first_line, is_readable)
        fields = {} if fault else record.fields
        seen |= dict.fromkeys(fields)
        name = file.record[0].strip()
        yield RawMolecule(
            row,
            f"{lines.path}:{first_line}",
            block=record.block,
            name=name or None,
            extra=fields,
            source=(("name", *fields), (name, *fields.values())),
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


class _SDFile:
    """Lines of the records that RDKit's supplier finds.

    A regular record ends with the first line ``$$$$``. Of all others RDKit decides where they end;
    it gets the lines up to a line ``$$$$`` at a time, so that it reads no further than that.
    """

    def __init__(self, lines: Lines) -> None:
        self.record: list[str] = []
        self.ends: list[int] = []  # numbers of the lines $$$$ in the record, from 1
        self._lines = lines
        self._stream = iter(lines)
        self._num_sent = 0
        self._error: BaseException | None = None

    def records(self) -> Iterator[int]:
        """Read record by record; return the number of its first line, from 1."""
        while True:
            first_line = self._lines.number + 1
            self.record = []
            self.ends = []
            self._read_on()
            if not self.record:
                return
            yield first_line

    def _read_on(self) -> None:
        for line in self._stream:
            self.record.append(line)
            if line.startswith("$$$$"):
                self.ends.append(len(self.record))
                return

    def read_as_rdkit(self) -> bool:
        """Read on up to the end that RDKit finds; return whether it finds a molecule.

        If it finds no record in the lines at the end of a file, the record is empty.
        """
        self._num_sent = 0
        # Where a record ends does not depend on its chemistry.
        supplier = chem().ForwardSDMolSupplier(self, sanitize=False, removeHs=False)
        with rdkit_module("rdBase").BlockLogs():
            mol = next(supplier, self)
        if self._error is not None:
            raise self._error
        if mol is self:
            self.record = []
        return mol is not None

    def read(self, size: int) -> bytes:
        """Return the lines up to the next line ``$$$$``, whatever their size, to the supplier."""
        if self._num_sent == len(self.record):
            try:
                self._read_on()
            except BaseException as error:  # RDKit would lose it
                self._error = error
        text = "".join(self.record[self._num_sent :])
        self._num_sent = len(self.record)
        return text.encode()


# A header, whose field has a name or not, and the lines up to an empty one.
_FIELD = re.compile(r"^[ \t]*>(?:[^<\n]*<(.+)>)?.*\n((?:.+\n)*)", re.MULTILINE)
# Three lines of a header, then numbers and properties; other lines may hide M  END from RDKit.
_REGULAR_BLOCK = re.compile(r"(?:.*\n){3}(?:[ \d].*\n|M  (?!END).*\n)+M  END.*\n")


class _Record(NamedTuple):
    """What is in the lines of a record of an SDF file."""

    block: str
    fields: dict[str, str]
    inner_ends: Sequence[int]  # numbers of the lines $$$$ before the last line, from 1
    stray_line: str | None  # after the block, of no field
    is_plain: bool  # without stray lines and fields without a name
    is_regular: bool

    def fault(self, first_line: int, is_readable: bool) -> str:
        """Return why the lines may be several records or none; empty if they are one."""
        if self.inner_ends and not (is_readable and self.is_plain):
            line = first_line + self.inner_ends[0] - 1
            return f"RDKit finds no end of the record at $$$$ in line {line}"
        if self.stray_line is not None:
            return f"after M  END there is {self.stray_line[:_SHOWN]!r}, which is no field"
        return ""


def _parsed(lines: Sequence[str], ends: Sequence[int]) -> _Record:
    is_ended = ends[-1:] == [len(lines)]
    text = "".join(lines[:-1] if is_ended else lines)
    text += "" if text.endswith("\n") else "\n"
    last_of_block = text.find("\nM  END") + 1
    end = text.index("\n", last_of_block) + 1 if last_of_block else len(text)
    block = text[:end]

    data = text[end:]
    fields = dict(_FIELD.findall(data))
    has_unnamed = fields.pop("", None) is not None
    stray_line = next((line for line in _FIELD.sub("", data).split("\n") if line.strip()), None)
    is_plain = stray_line is None and not has_unnamed
    return _Record(
        block,
        {name: value.removesuffix("\n") for name, value in fields.items()},
        ends[:-1] if is_ended else ends,
        stray_line,
        is_plain,
        is_regular=(
            is_plain
            and is_ended
            and len(ends) == 1
            and _REGULAR_BLOCK.fullmatch(block) is not None
            and data[-2:] in ("", "\n\n")
        ),
    )
