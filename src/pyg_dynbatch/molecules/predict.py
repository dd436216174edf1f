"""Predict molecules with one or several checkpoints, one by one or as a stream of records."""

import csv
import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import part_of, whole_file
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.molecules.build import CHUNK, featurize_stream, packing_of
from pyg_dynbatch.molecules.data import MoleculeCollater, MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files import RawMolecule
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.molecules.task import MoleculeProperty, property_columns
from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.predictions import checked_device

_MOST_PAIRS = 200_000


@dataclass(frozen=True)
class Predicted:
    """Holds what was predicted for some molecules."""

    values: Float[np.ndarray, "molecule output"]
    deviation: Float[np.ndarray, "molecule output"] | None = None
    fingerprint: Float[np.ndarray, "molecule number"] | None = None


def load_property_task(
    path: str | Path, checkpoint: Mapping[str, Any] | None = None
) -> MoleculeProperty:
    """Builds the model of a checkpoint from the checkpoint alone; no code in it is run."""
    return MoleculeProperty.from_checkpoint(checkpoint or read_checkpoint(path), path)


class MoleculePredictor:
    """Predicts properties of molecules, in batches bounded by their pairs of atoms.

    With several checkpoints the prediction is the mean of what they predict. How sure it is, is
    the standard deviation over the checkpoints and, with ``dropout``, over so many passes of
    each with its dropout switched on.

    Args:
        checkpoints: Paths of checkpoints, or models, that describe molecules and properties alike.
        device: Where to compute.
        dropout: Passes with dropout; 0 for one pass without.
        max_pairs: Most pairs of atoms in a batch; a larger molecule is a batch of its own.
        max_atoms: Most atoms of a molecule; left out, as many as in training.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        ValueError: If a checkpoint is of another kind, they differ in what they predict, or
            there is no dropout to switch on; or the device cannot be used.

    Example:
        >>> from pyg_dynbatch.tasks import MoleculeProperty, MoleculeSchema
        >>> made = MoleculeFeaturizer()
        >>> schema = MoleculeSchema(made.spec, len(made.atom_names), made.pair_table, ("logS",))
        >>> task = MoleculeProperty(schema.as_dict(), hidden=4, atom_out=4, readout="sum", head=[])
        >>> predictor = MoleculePredictor([task])
        >>> predictor.predict([predictor.featurizer("CCO"), predictor.featurizer("C")]).values.shape
        (2, 1)
    """

    def __init__(
        self,
        checkpoints: Sequence[str | Path | MoleculeProperty],
        device: str = "cpu",
        dropout: int = 0,
        max_pairs: int = _MOST_PAIRS,
        max_atoms: int | None = None,
    ) -> None:
        if not checkpoints:
            raise mismatch(ValueError, "MoleculePredictor: no checkpoints", "one or more", 0)
        self.device = checked_device(device)
        loaded = [
            one.eval() if isinstance(one, MoleculeProperty) else load_property_task(one)
            for one in checkpoints
        ]
        self.tasks = [task.to(self.device) for task in loaded]
        self.schema: MoleculeSchema = self.tasks[0].schema
        for task, path in zip(self.tasks[1:], checkpoints[1:], strict=True):
            _check_alike(self.tasks[0], task, path)
        self.dropout = dropout
        self.max_pairs = max_pairs
        self.max_atoms = max_atoms
        if dropout:
            self._check_dropout()
        schema = self.schema
        self.collater = MoleculeCollater(schema.pair_table, schema.pairs, schema.self_pairs)

    @property
    def featurizer(self) -> MoleculeFeaturizer:
        """The featurizer the checkpoints were trained with.

        Raises:
            ValueError: If it is not known, or cannot be built here.
        """
        if not self.schema.featurizer:
            raise mismatch(
                ValueError,
                "MoleculePredictor: the checkpoint does not say how molecules were described",
                "the spec of a featurizer in the schema",
                "none",
            )
        spec = dict(self.schema.featurizer)
        if self.max_atoms is not None:
            spec["options"] = {**spec["options"], "max_atoms": self.max_atoms}
        return MoleculeFeaturizer.from_spec(spec)

    def predict(self, molecules: Sequence[MoleculeData], fingerprints: bool = False) -> Predicted:
        """Predicts molecules.

        Args:
            molecules: The molecules, described by the featurizer of the checkpoints.
            fingerprints: Whether to give fingerprints too: those of the first checkpoint.

        Returns:
            One row a molecule, in order.
        """
        parts = [self._one_batch(chosen, fingerprints) for chosen in self.batches(molecules)]
        if not parts:
            empty = np.zeros((0, self.schema.num_outputs), dtype=np.float32)
            return Predicted(empty)
        values, deviations, prints = zip(*parts, strict=True)
        return Predicted(
            np.concatenate(values),
            None if deviations[0] is None else np.concatenate(deviations),
            None if prints[0] is None else np.concatenate(prints),
        )

    def batches(self, molecules: Sequence[MoleculeData]) -> Iterator[Sequence[MoleculeData]]:
        """Cuts molecules into batches of bounded size, in order.

        Args:
            molecules: The molecules.

        Yields:
            Lists of molecules.
        """
        # Columns of a packed data set stay together where they fit: they need no taking apart.
        columns = getattr(molecules, "fields", None)
        if columns is not None and 0 < len(columns["pair_code"]) <= self.max_pairs:
            yield molecules
            return
        batch: list[MoleculeData] = []
        pairs = 0
        for molecule in molecules:
            more = int(molecule.pair_code.numel())
            if batch and pairs + more > self.max_pairs:
                yield batch
                batch, pairs = [], 0
            batch.append(molecule)
            pairs += more
        if batch:
            yield batch

    @torch.no_grad()
    def _one_batch(
        self, molecules: Sequence[MoleculeData], fingerprints: bool
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        batch = self.collater(molecules).to(self.device)
        samples = torch.stack(
            [sample for task in self.tasks for sample in self._passes(task, batch)]
        )
        several = len(samples) > 1
        deviation = samples.std(0).cpu().numpy() if several else None
        network: Any = self.tasks[0].network
        prints = network.fingerprint(batch).float().cpu().numpy() if fingerprints else None
        return samples.mean(0).cpu().numpy(), deviation, prints

    def _passes(self, task: MoleculeProperty, batch: Any) -> Iterator[Tensor]:
        if not self.dropout:
            yield task.predicted(task(batch)).float()
            return
        layers = _dropouts(task)
        own = [self.device] if self.device.type == "cuda" else []
        try:
            for layer in layers:
                layer.train()
            # The caller's random numbers stay as they are, and the same file gives the same
            # figures. torch.manual_seed would seed the generators of all other GPUs as well.
            with torch.random.fork_rng(devices=own):
                torch.default_generator.manual_seed(0)
                for device in own:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(0)
                for _ in range(self.dropout):
                    yield task.predicted(task(batch)).float()
        finally:
            for layer in layers:
                layer.eval()

    def _check_dropout(self) -> None:
        if self.dropout < 2:
            raise mismatch(
                ValueError,
                "MoleculePredictor: a deviation needs several passes",
                "dropout of 2 or more, or 0 for none",
                self.dropout,
            )
        if not all(_dropouts(task) for task in self.tasks):
            raise mismatch(
                ValueError,
                "MoleculePredictor: the model has no dropout to switch on",
                "a checkpoint trained with dropout above 0",
                "dropout 0",
                hint="several checkpoints, whose predictions differ",
            )


def _dropouts(task: MoleculeProperty) -> list[nn.Module]:
    layers = task.network.modules()
    return [layer for layer in layers if isinstance(layer, nn.Dropout) and layer.p > 0]


def _check_alike(first: MoleculeProperty, other: MoleculeProperty, path: Any) -> None:
    with naming_file(path):
        first.check_origin({"schema": other.schema.as_dict()})


class StreamCounts(NamedTuple):
    """Counts what a stream held."""

    rows: int = 0
    bad: int = 0
    reason: str = ""


class Unfinished:
    """Knows what a killed run has left of its files; the note beside them ends with the run."""

    def __init__(
        self,
        output: str | None = None,
        fingerprints: str | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.identity = dict(identity or {})
        self.counts = StreamCounts()
        self.note = None if output is None else Path(f"{part_of(output)}.json")
        self.sizes: tuple[int, int] | None = None if output is None else (0, 0)
        parts = [part_of(path) for path in (output, fingerprints) if path is not None]
        if self.note is not None and all(path.is_file() for path in (self.note, *parts)):
            self._read(self.note, parts)

    def _read(self, note: Path, parts: list[Path]) -> None:
        noted = json.loads(note.read_text(encoding="utf-8"))
        theirs = noted["identity"]
        other = [key for key in self.identity if theirs.get(key) != self.identity[key]]
        if other:
            raise mismatch(
                ValueError,
                "predict: another run has left an unfinished output",
                "the input, checkpoints and options of that run, to go on",
                f"another {', '.join(other)}",
                where=parts[0],
                hint=f"delete {' and '.join(map(str, [*parts, note]))} to start anew",
            )
        self.counts = StreamCounts(*noted["counts"])
        first, second = noted["sizes"]
        self.sizes = (first, second)

    def keep(self, counts: StreamCounts, *files: Any) -> None:
        """Notes that so many rows are written to the files."""
        if self.note is None:
            return
        for file in files:
            if file is not None:
                file.flush()
        sizes = [0 if file is None else os.fstat(file.fileno()).st_size for file in files]
        content = {"identity": self.identity, "counts": counts, "sizes": sizes}
        new = self.note.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        new.replace(self.note)

    def __enter__(self) -> "Unfinished":
        if self.note is not None and not self.counts.rows:
            # It tells of files that this run writes over.
            self.note.unlink(missing_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A run that is stopped can go on; one that has failed would fail again.
        if self.note is not None and (kind is None or issubclass(kind, Exception)):
            self.note.unlink(missing_ok=True)
            self.note.with_suffix(".new").unlink(missing_ok=True)


class StreamRow(NamedTuple):
    """Holds one record and what came of it."""

    record: RawMolecule
    status: str
    cells: list[str]
    fingerprint: Float[np.ndarray, " number"] | None


class Columns(NamedTuple):
    """Says which columns stand before the predictions."""

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
    """Keeps all columns of the input; one that is called like one of ours is renamed."""
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
    """Predicts records in their order; memory does not grow with the stream."""
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
    """Names the columns that the predictions of a stream have."""
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
    """Writes a stream of rows as CSV, and fingerprints as ``.npy`` or ``.csv``."""
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
    """Opens a file for fingerprints, one row at a time."""
    kinds: dict[str, type[_Npy] | type[_Csv]] = {".npy": _Npy, ".csv": _Csv}
    kind = kinds.get(Path(path).suffix)
    if kind is None:
        raise mismatch(
            ValueError, "fingerprints: the kind of file is not known", " or ".join(kinds), path
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
    """Names every single column of numbers."""
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
        raise mismatch(
            ValueError,
            "predict: the featurizer of this machine makes other pair codes",
            f"pair table {schema.pair_table.digest()}, as in the checkpoint",
            f"pair table {featurizer.pair_table.digest()}",
            hint="the version of pyg_dynbatch that made the checkpoint",
        )
