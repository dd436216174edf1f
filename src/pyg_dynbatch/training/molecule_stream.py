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
from pyg_dynbatch.datasets import featurize_stream
from pyg_dynbatch.datasets.featurize import packing_of
from pyg_dynbatch.featurizers import MoleculeFeaturizer, RawMolecule
from pyg_dynbatch.training.molecule_predictor import MoleculePredictor, Predicted
from pyg_dynbatch.training.molecule_property import property_columns
from pyg_dynbatch.training.molecule_schema import MoleculeSchema

_LEADING = ("row", "name", "smiles", "status")


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


class StreamCounts(NamedTuple):
    """Counts what a stream held.

    Args:
        rows: Records read.
        bad: Records without a prediction.
        reason: Why the first bad one has none.
    """

    rows: int
    bad: int
    reason: str


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
        Names of the columns behind ``row``, ``name``, ``smiles`` and ``status``.
    """
    several = len(predictor.tasks) > 1 or predictor.dropout > 0
    values = torch.zeros(1, predictor.schema.num_outputs)
    return [
        name for name, _ in named_columns(values, values if several else None, predictor.schema)
    ]


def write_stream(
    rows: Iterable[StreamRow],
    columns: Sequence[str],
    output: str,
    fingerprints: str | None = None,
) -> StreamCounts:
    """Writes a stream of rows as CSV, and fingerprints as ``.npy`` or ``.csv``.

    Files appear under their names only when they are whole.

    Args:
        rows: The rows.
        columns: Names of the columns of predictions.
        output: The file, or ``-`` for standard output.
        fingerprints: The file of fingerprints; left out, there is none.

    Returns:
        How many rows there were, and how many of them bad.

    Raises:
        ValueError: If the file of fingerprints is neither ``.npy`` nor ``.csv``.
    """
    count, bad, reason = 0, 0, ""
    with ExitStack() as stack:
        file = stack.enter_context(_opened(output))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*_LEADING, *columns])
        marks = stack.enter_context(fingerprint_file(fingerprints)) if fingerprints else None
        for row in rows:
            record = row.record
            leading = [record.row, record.name or "", record.smiles or "", row.status]
            writer.writerow([*leading, *row.cells])
            if marks is not None and row.fingerprint is not None:
                marks.add(row.fingerprint)
            count += 1
            if row.status != "ok":
                bad, reason = bad + 1, reason or f"row {record.row}: {row.status}"
    return StreamCounts(count, bad, reason)


class _Npy:
    """Writes rows of an array whose number is known only at the end."""

    def __init__(self, file: BufferedIOBase) -> None:
        self.file, self.rows, self.width = file, 0, 0

    def add(self, row: np.ndarray) -> None:
        if self.rows == 0:
            self.width = row.size
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

    def __init__(self, file: BufferedIOBase) -> None:
        self.file, self.rows = file, 0

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
def fingerprint_file(path: str) -> Iterator[Any]:
    """Opens a file for fingerprints, one row at a time.

    Args:
        path: A file that ends in ``.npy`` or ``.csv``.

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
    with whole_file(path, "wb") as file:
        table = kind(file)
        yield table
        table.finish()


@contextmanager
def _opened(output: str) -> Iterator[IO[str]]:
    if output == "-":
        yield sys.stdout
        sys.stdout.flush()
        return
    with whole_file(output, newline="", encoding="utf-8") as file:
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
