"""Predict a stream of molecules, one row out for every record in, bad records included."""

import csv
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import whole_file
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.datasets import featurize_stream
from pyg_dynbatch.datasets.featurize import CHUNK, packing_of
from pyg_dynbatch.featurizers import MoleculeFeaturizer, RawMolecule
from pyg_dynbatch.training.molecule_predictor import MoleculePredictor, Predicted
from pyg_dynbatch.training.molecule_property import property_columns
from pyg_dynbatch.training.molecule_schema import MoleculeSchema
from pyg_dynbatch.training.unfinished import StreamCounts, Unfinished


class StreamRow(NamedTuple):
    """Holds one record and what came of it.

    Args:
        record: The record.
        status: ``ok``, or why there is no prediction.
        cells: Texts of the columns of predictions, empty for a bad record.
        fingerprint: Its fingerprint, NaN for a bad record; ``None`` if not asked for.
    """

    record: RawMolecule
    status: str
    cells: list[str]
    fingerprint: Float[np.ndarray, " number"] | None


class Columns(NamedTuple):
    """Says which columns stand before the predictions.

    Args:
        kept: Columns of the input.
        shown: The names they are written under.
        own: Columns of ours: ``row``, ``name``, ``smiles`` or ``status``.
    """

    kept: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    own: tuple[str, ...] = ("row", "name", "smiles", "status")

    def cells(self, record: RawMolecule, status: str) -> list[object]:
        """Gives the cells of one record."""
        names, cells = record.source
        if self.kept and tuple(names) != self.kept:  # the fields of an SDF record
            found = dict(zip(names, cells, strict=True))
            cells = [found.get(name, "") for name in self.kept]
        said = {
            "row": record.row,
            "name": record.name or "",
            "smiles": record.smiles or "",
            "status": status,
        }
        return [*cells, *(said[name] for name in self.own)]


def all_columns(kept: Sequence[str], own: Sequence[str], predicted: Sequence[str]) -> Columns:
    """Keeps all columns of the input; one that is called like one of ours is renamed.

    Args:
        kept: Columns of the input.
        own: Columns of ours that stand behind them.
        predicted: Columns of the predictions.

    Returns:
        The columns.

    Example:
        >>> all_columns(["smiles", "status"], ["row", "status"], ["prediction_logS"]).shown
        ('smiles', 'input_status')
    """
    taken = {*kept, *own, *predicted}
    shown = []
    for name in kept:
        new = name
        while new in own or new in predicted or (new != name and new in taken):
            new = f"input_{new}"
        taken.add(new)
        shown.append(new)
    return Columns(tuple(kept), tuple(shown), tuple(own))


def predict_stream(
    records: Iterable[RawMolecule],
    predictor: MoleculePredictor,
    num_workers: int = 0,
    fingerprints: bool = False,
) -> Iterator[StreamRow]:
    """Predicts records in their order; memory does not grow with the stream.

    Args:
        records: The records.
        predictor: Who predicts.
        num_workers: Processes that turn records into molecules; 0 does it in this one.
        fingerprints: Whether to give fingerprints.

    Yields:
        One row a record.
    """
    featurizer = predictor.featurizer
    _check_pair_table(featurizer, predictor.schema)
    packing = packing_of(featurizer, 0)
    # Workers read ahead: what they have read waits here for its result.
    waiting: deque[RawMolecule] = deque()

    def seen() -> Iterator[RawMolecule]:
        for record in records:
            waiting.append(record)
            yield record

    pieces = featurize_stream(seen(), featurizer, bad="blank", num_workers=num_workers)
    blank = [""] * len(column_names(predictor))
    for piece in pieces:
        count = len(piece.arrays["row"])
        said = {error.row: _status(error) for error in piece.errors}
        molecules = packing.unpack(piece.arrays, np.arange(count))
        found = predictor.predict(molecules, fingerprints)
        cells = _cells(found, predictor.schema)
        for number in range(count):
            record = waiting.popleft()
            status = said.get(record.row, "ok")
            bad = status != "ok"
            if record.smiles is None and not bad:
                # A record of an SDF has no text of its own; the featurizer has written one.
                record = replace(record, smiles=molecules.fields["smiles"][number])
            mark = None if found.fingerprint is None else found.fingerprint[number]
            mark = np.full_like(mark, np.nan) if bad and mark is not None else mark
            yield StreamRow(record, status, blank if bad else cells[number], mark)


def column_names(predictor: MoleculePredictor) -> list[str]:
    """Names the columns that the predictions of a stream have.

    Args:
        predictor: Who predicts.

    Returns:
        Names of the columns behind ``status``.
    """
    several = len(predictor.tasks) > 1 or predictor.dropout > 0
    values = torch.zeros(1, predictor.schema.num_outputs)
    return [
        name for name, _ in named_columns(values, values if several else None, predictor.schema)
    ]


def write_stream(
    rows: Iterable[StreamRow],
    predicted: Sequence[str],
    output: str,
    fingerprints: str | None = None,
    columns: Columns = Columns(),  # noqa: B008 - immutable
    unfinished: Unfinished | None = None,
) -> StreamCounts:
    """Writes a stream of rows as CSV, and fingerprints as ``.npy`` or ``.csv``.

    Files appear under their names only when they are whole.

    Args:
        rows: The rows, those that are missing in `unfinished`.
        predicted: Names of the columns of predictions.
        output: The file, or ``-`` for standard output.
        fingerprints: The file of fingerprints; left out, there is none.
        columns: What stands before the predictions.
        unfinished: Notes how far the files are, so that a killed run can go on.

    Returns:
        How many rows there were, and how many of them bad.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the file of fingerprints is neither ``.npy`` nor ``.csv``.
    """
    note = Unfinished() if unfinished is None else unfinished
    count, bad, reason = note.counts
    with ExitStack() as stack:
        stack.enter_context(note)
        size, print_size = note.sizes or (None, None)
        file = stack.enter_context(_opened(output, size))
        writer = csv.writer(file, lineterminator="\n")
        if not count:
            writer.writerow([*columns.shown, *columns.own, *predicted])
        marks = None
        if fingerprints:
            marks = stack.enter_context(fingerprint_file(fingerprints, count, print_size))
        # A bar among the rows would spoil them.
        among = output == "-" and sys.stdout.isatty()
        progress = stack.enter_context(Progress("predicting", "records", shown=not among))
        for row in rows:
            writer.writerow([*columns.cells(row.record, row.status), *row.cells])
            if marks is not None and row.fingerprint is not None:
                marks.add(row.fingerprint)
            count += 1
            progress.update()
            if row.status != "ok":
                bad, reason = bad + 1, reason or f"row {row.record.row}: {row.status}"
            if count % CHUNK == 0:
                note.keep(StreamCounts(count, bad, reason), file, marks and marks.file)
    return StreamCounts(count, bad, reason)


class _Npy:
    """Writes rows of an array whose number is known only at the end."""

    def __init__(self, file: BufferedIOBase, rows: int) -> None:
        self.file, self.rows, self.width = file, rows, 0

    def add(self, row: np.ndarray) -> None:
        self.width = row.size
        if self.rows == 0:
            self._write_header()
        self.file.write(np.ascontiguousarray(row, dtype="<f4").tobytes())
        self.rows += 1

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        # It keeps its length whatever the first number of the shape is.
        shape = (self.rows, self.width)
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self.file, header)


class _Csv:
    """Writes rows as text."""

    def __init__(self, file: BufferedIOBase, rows: int) -> None:
        self.file, self.rows = file, rows

    def add(self, row: np.ndarray) -> None:
        if self.rows == 0:
            header = ",".join(["row", *(f"f{number}" for number in range(row.size))])
            self.file.write(f"{header}\n".encode())
        cells = ",".join("" if value != value else f"{value:.6g}" for value in row.tolist())
        self.file.write(f"{self.rows},{cells}\n".encode())
        self.rows += 1

    def finish(self) -> None:
        """Has nothing left to do."""


@contextmanager
def fingerprint_file(path: str, rows: int = 0, resume_at: int | None = None) -> Iterator[Any]:
    """Opens a file for fingerprints, one row at a time.

    Args:
        path: A file that ends in ``.npy`` or ``.csv``.
        rows: How many an unfinished file holds.
        resume_at: As in :func:`~pyg_dynbatch.core.files.whole_file`.

    Yields:
        An object with ``add(row)``.

    Raises:
        ValueError: If the file is of another kind.
    """
    kinds: dict[str, type[_Npy] | type[_Csv]] = {".npy": _Npy, ".csv": _Csv}
    kind = kinds.get(Path(path).suffix)
    if kind is None:
        raise ValueError(
            mismatch(
                "fingerprints: the kind of file is not known",
                expected=" or ".join(kinds),
                got=path,
            )
        )
    with whole_file(path, "wb", resume_at=resume_at) as file:
        table = kind(file, rows)
        yield table
        table.finish()


@contextmanager
def _opened(output: str, resume_at: int | None) -> Iterator[IO[str]]:
    if output == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    with whole_file(output, resume_at=resume_at, newline="", encoding="utf-8") as file:
        yield file


def _status(error: Any) -> str:
    return error.reason if error.atom is None else f"{error.reason} (atom {error.atom})"


def named_columns(
    values: torch.Tensor, deviation: torch.Tensor | None, schema: MoleculeSchema
) -> list[tuple[str, list[Any]]]:
    """Names every single column of numbers.

    Args:
        values: Values, or probabilities.
        deviation: Their standard deviation, if there is one.
        schema: What they mean.

    Returns:
        Names and cells, column by column.
    """
    named: list[tuple[str, list[Any]]] = []
    for name, column in property_columns(values, schema).items():
        if column.ndim == 1:
            named.append((name, column.tolist()))
            continue
        named += [(f"{name}_{number}", part.tolist()) for number, part in enumerate(column.t())]
    if deviation is not None:
        each = deviation.unflatten(1, (schema.num_tasks, -1))
        for task, name in enumerate(schema.task_names):
            # Of several classes the least certain one speaks for the property.
            worst = each[:, task].amax(1)
            named.append((f"deviation_{name}", worst.tolist()))
    return named


def _cells(found: Predicted, schema: MoleculeSchema) -> list[list[str]]:
    deviation = None if found.deviation is None else torch.from_numpy(found.deviation)
    named = named_columns(torch.from_numpy(found.values), deviation, schema)
    texts = [[_text(value) for value in column] for _, column in named]
    return [list(row) for row in zip(*texts, strict=True)]


def _text(value: float | int) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _check_pair_table(featurizer: MoleculeFeaturizer, schema: MoleculeSchema) -> None:
    if featurizer.pair_table != schema.pair_table:
        raise ValueError(
            mismatch(
                "predict: the featurizer of this machine makes other pair codes",
                expected=f"pair table {schema.pair_table.digest()}, as in the checkpoint",
                got=f"pair table {featurizer.pair_table.digest()}",
                mend="the version of pyg_dynbatch that made the checkpoint",
            )
        )
