"""Predict molecules with one or several checkpoints, in batches or as a stream of records."""

import csv
import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from io import BufferedIOBase
from pathlib import Path
from typing import Any, NamedTuple

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
from pyg_dynbatch.samplers import pack_in_order
from pyg_dynbatch.training.checkpoints import naming_file, read_checkpoint
from pyg_dynbatch.training.predictions import checked_device, numbered_columns

_MOST_PAIRS = 200_000
_NPY_HEADER = 128  # bytes; numpy pads the header so that the number of rows can grow


class Predicted(NamedTuple):
    """Predictions of some molecules, with deviations and fingerprints if requested."""

    values: Float[np.ndarray, "molecule output"]
    deviation: Float[np.ndarray, "molecule output"] | None = None
    fingerprint: Float[np.ndarray, "molecule number"] | None = None


def load_property_task(
    path: str | Path, checkpoint: Mapping[str, Any] | None = None
) -> MoleculeProperty:
    """Build the model of a checkpoint from the checkpoint alone; no code in it is run."""
    return MoleculeProperty.from_checkpoint(checkpoint or read_checkpoint(path), path)


class MoleculePredictor:
    """Predict properties of molecules with the mean of several checkpoints.

    Its uncertainty is the standard deviation over the checkpoints and their passes with dropout.

    Args:
        checkpoints: Paths of checkpoints, or models, with the same features and properties.
        device: Where to compute.
        dropout: Passes with dropout; 0 for one pass without.
        max_pairs: Most pairs of atoms per batch; a larger molecule is a batch of its own.
        max_atoms: Most atoms of a molecule; as in training by default.

    Raises:
        ValueError: If a checkpoint is of another kind, they differ in what they predict, the model
            has no dropout, or the device cannot be used.

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
            raise mismatch(ValueError, "MoleculePredictor: no checkpoints", "at least one", 0)
        self.device = checked_device(device)
        loaded = [
            one.eval() if isinstance(one, MoleculeProperty) else load_property_task(one)
            for one in checkpoints
        ]
        self.tasks = [task.to(self.device) for task in loaded]
        self.schema: MoleculeSchema = self.tasks[0].schema
        for task, given in zip(self.tasks[1:], checkpoints[1:], strict=True):
            with naming_file("a model" if isinstance(given, MoleculeProperty) else given):
                self.tasks[0].check_origin({"schema": task.schema.as_dict()})
        if dropout == 1 or dropout < 0:
            what = "MoleculePredictor: a deviation needs several passes"
            raise mismatch(ValueError, what, "dropout of at least 2, or 0 for none", dropout)
        if dropout and not all(map(_dropout_layers, self.tasks)):
            what = "MoleculePredictor: the model has no dropout to switch on"
            hint = "several checkpoints, whose predictions differ"
            expected = "a checkpoint trained with dropout above 0"
            raise mismatch(ValueError, what, expected, "dropout 0", hint=hint)
        self.dropout = dropout
        self.max_pairs = max_pairs
        self.max_atoms = max_atoms
        schema = self.schema
        self.collater = MoleculeCollater(schema.pair_table, schema.pairs, schema.self_pairs)

    @property
    def featurizer(self) -> MoleculeFeaturizer:
        """The featurizer the checkpoints were trained with."""
        if not self.schema.featurizer:
            what = "MoleculePredictor: the checkpoint does not say how molecules were described"
            raise mismatch(ValueError, what, "the spec of a featurizer in the schema", "none")
        spec = dict(self.schema.featurizer)
        if self.max_atoms is not None:
            spec["options"] = {**spec["options"], "max_atoms": self.max_atoms}
        return MoleculeFeaturizer.from_spec(spec)

    def predict(self, molecules: Sequence[MoleculeData], fingerprints: bool = False) -> Predicted:
        """Predict molecules in order; ``fingerprints`` are those of the first checkpoint."""
        parts = [self._one_batch(chosen, fingerprints) for chosen in self.batches(molecules)]
        if not parts:
            return Predicted(np.zeros((0, self.schema.num_outputs), dtype=np.float32))
        columns = zip(*parts, strict=True)
        return Predicted._make(None if c[0] is None else np.concatenate(c) for c in columns)

    def batches(self, molecules: Sequence[MoleculeData]) -> Iterator[Sequence[MoleculeData]]:
        """Cut molecules into batches of limited size, in order."""
        # Columns of a packed data set are used as they are where they fit.
        columns = getattr(molecules, "fields", None)
        if columns is not None and 0 < len(columns["pair_code"]) <= self.max_pairs:
            yield molecules
            return
        listed = list(molecules)
        sizes = [int(molecule.pair_code.numel()) for molecule in listed]
        for batch in pack_in_order(range(len(listed)), sizes, self.max_pairs):
            yield [listed[number] for number in batch]

    @torch.no_grad()
    def _one_batch(self, molecules: Sequence[MoleculeData], fingerprints: bool) -> Predicted:
        batch = self.collater(molecules).to(self.device)
        samples = torch.stack([row for task in self.tasks for row in self._passes(task, batch)])
        deviation = samples.std(0).cpu().numpy() if len(samples) > 1 else None
        network: Any = self.tasks[0].network
        prints = network.fingerprint(batch).float().cpu().numpy() if fingerprints else None
        return Predicted(samples.mean(0).cpu().numpy(), deviation, prints)

    def _passes(self, task: MoleculeProperty, batch: Any) -> Iterator[Tensor]:
        if not self.dropout:
            yield task.predicted(task(batch)).float()
            return
        layers = _dropout_layers(task)
        cuda = [self.device] if self.device.type == "cuda" else []
        try:
            for layer in layers:
                layer.train()
            # The random state of the caller is restored, and equal input gives equal predictions.
            # torch.manual_seed would seed the generators of all other GPUs as well.
            with torch.random.fork_rng(devices=cuda):
                torch.default_generator.manual_seed(0)
                for device in cuda:
                    with torch.cuda.device(device):
                        torch.cuda.manual_seed(0)
                for _ in range(self.dropout):
                    yield task.predicted(task(batch)).float()
        finally:
            for layer in layers:
                layer.eval()


def _dropout_layers(task: MoleculeProperty) -> list[nn.Module]:
    layers = task.network.modules()
    return [layer for layer in layers if isinstance(layer, nn.Dropout) and layer.p > 0]


class StreamCounts(NamedTuple):
    """Number of records of a stream, number of bad ones, and the first reason."""

    rows: int = 0
    bad: int = 0
    reason: str = ""


class Unfinished:
    """The unfinished files of a killed run, and the note beside them of how far it came.

    Within the context the note is kept up to date; only a killed run leaves it behind. Without an
    output nothing can be resumed.
    """

    def __init__(
        self,
        output: str | None = None,
        fingerprints: str | None = None,
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self.identity = dict(identity or {})
        self.counts = StreamCounts()
        self.note = None if output is None else Path(f"{part_of(output)}.json")
        self.sizes: Sequence[int | None] = (None, None) if output is None else (0, 0)
        parts = [part_of(path) for path in (output, fingerprints) if path is not None]
        if self.note is None or not all(path.is_file() for path in (self.note, *parts)):
            return
        noted = json.loads(self.note.read_text(encoding="utf-8"))
        theirs = noted["identity"]
        other = [key for key in self.identity if theirs.get(key) != self.identity[key]]
        if other:
            what, got = "predict: another run has left an unfinished output", ", ".join(other)
            expected = "the input, checkpoints and options of that run, to go on"
            hint = f"delete {' and '.join(map(str, [*parts, self.note]))} to start anew"
            raise mismatch(ValueError, what, expected, f"another {got}", where=parts[0], hint=hint)
        self.counts, self.sizes = StreamCounts(*noted["counts"]), noted["sizes"]

    def keep(self, counts: StreamCounts, *files: Any) -> None:
        """Note that so many rows are written to the files."""
        if self.note is None:
            return
        for file in files:
            if file is not None:
                file.flush()
        sizes = [0 if file is None else os.fstat(file.fileno()).st_size for file in files]
        new = self.note.with_suffix(".new")
        content = {"identity": self.identity, "counts": counts, "sizes": sizes}
        new.write_text(json.dumps(content), encoding="utf-8")
        new.replace(self.note)

    def __enter__(self) -> "Unfinished":
        if self.note is not None and not self.counts.rows:
            # It is about files that this run overwrites.
            self.note.unlink(missing_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A run that is killed can be resumed; one that has failed would fail again.
        if self.note is not None and (kind is None or issubclass(kind, Exception)):
            self.note.unlink(missing_ok=True)
            self.note.with_suffix(".new").unlink(missing_ok=True)


class StreamRow(NamedTuple):
    """One record and its prediction; the status is ``ok`` or what is wrong."""

    record: RawMolecule
    status: str
    cells: Sequence[str]
    fingerprint: Float[np.ndarray, " number"] | None


class Columns(NamedTuple):
    """The columns before the predictions."""

    kept: tuple[str, ...] = ()  # of the input
    shown: tuple[str, ...] = ()  # how these are called in the output
    own: tuple[str, ...] = ("row", "name", "smiles", "status")

    def cells(self, record: RawMolecule, status: str) -> list[object]:
        """Return the cells of one record."""
        names, cells = record.source
        if self.kept and tuple(names) != self.kept:  # the fields of an SDF record
            found = dict(zip(names, cells, strict=True))
            cells = [found.get(name, "") for name in self.kept]
        own = {"row": record.row, "name": record.name, "smiles": record.smiles, "status": status}
        return [*cells, *("" if own[name] is None else own[name] for name in self.own)]


def all_columns(kept: Sequence[str], own: Sequence[str], predicted: Sequence[str]) -> Columns:
    """Keep all columns of the input; one that has the name of an output column is renamed."""
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
    """Predict records in their order; memory does not grow with the stream."""
    featurizer, wanted = predictor.featurizer, predictor.schema.pair_table
    if featurizer.pair_table != wanted:
        what = "predict: the featurizer of this machine makes other pair codes"
        expected = f"pair table {wanted.digest()}, as in the checkpoint"
        got = f"pair table {featurizer.pair_table.digest()}"
        hint = "the version of pyg_dynbatch that made the checkpoint"
        raise mismatch(ValueError, what, expected, got, hint=hint)
    packing = packing_of(featurizer, 0)
    # Workers read ahead: what they have read waits here for its result.
    waiting: deque[RawMolecule] = deque()

    def seen() -> Iterator[RawMolecule]:
        for record in records:
            waiting.append(record)
            yield record

    blank = [""] * len(column_names(predictor))
    for piece in featurize_stream(seen(), featurizer, bad="blank", num_workers=num_workers):
        reasons = {
            error.row: error.reason if error.atom is None else f"{error.reason} (atom {error.atom})"
            for error in piece.errors
        }
        molecules = packing.unpack(piece.arrays, np.arange(len(piece.arrays["row"])))
        found = predictor.predict(molecules, fingerprints)
        for number, cells in enumerate(_cells(found, predictor.schema)):
            record = waiting.popleft()
            mark = None if found.fingerprint is None else found.fingerprint[number]
            status = reasons.get(record.row, "ok")
            if status != "ok":
                cells, mark = blank, None if mark is None else np.full_like(mark, np.nan)
            elif record.smiles is None:  # a record of an SDF; the featurizer has written it
                record = replace(record, smiles=molecules.fields["smiles"][number])
            yield StreamRow(record, status, cells, mark)


def _cells(found: Predicted, schema: MoleculeSchema) -> Iterator[Sequence[str]]:
    deviation = None if found.deviation is None else torch.from_numpy(found.deviation)
    named = named_columns(torch.from_numpy(found.values), deviation, schema)
    texts = (
        [f"{value:.6g}" if isinstance(value, float) else str(value) for value in column]
        for _, column in named
    )
    return zip(*texts, strict=True)


def named_columns(
    values: torch.Tensor, deviation: torch.Tensor | None, schema: MoleculeSchema
) -> list[tuple[str, list[Any]]]:
    """List all columns of predictions with their names."""
    columns = property_columns(values, schema)
    if deviation is not None:
        # Of several classes, the largest deviation.
        largest = deviation.unflatten(1, (schema.num_tasks, -1)).amax(2)
        for name, column in zip(schema.task_names, largest.unbind(1), strict=True):
            columns[f"deviation_{name}"] = column
    return list(numbered_columns(columns).items())


def column_names(predictor: MoleculePredictor) -> list[str]:
    """Name the columns of the predictions of a stream."""
    several = len(predictor.tasks) > 1 or predictor.dropout > 0
    values = torch.zeros(1, predictor.schema.num_outputs)
    named = named_columns(values, values if several else None, predictor.schema)
    return [name for name, _ in named]


def write_stream(
    rows: Iterable[StreamRow],
    predicted: Sequence[str],
    output: str,
    fingerprints: str | None = None,
    columns: Columns = Columns(),  # noqa: B008 - immutable
    unfinished: Unfinished | None = None,
) -> StreamCounts:
    """Write a stream of rows as CSV, and fingerprints as ``.npy`` or ``.csv``."""
    note = Unfinished() if unfinished is None else unfinished
    count, bad, reason = note.counts
    with ExitStack() as stack:
        stack.enter_context(note)
        size, print_size = note.sizes
        opened = whole_file(output, resume_at=size, newline="", encoding="utf-8")
        file = stack.enter_context(nullcontext(sys.stdout) if output == "-" else opened)
        writer = csv.writer(file, lineterminator="\n")
        if not count:
            writer.writerow([*columns.shown, *columns.own, *predicted])
        prints = None
        if fingerprints:
            prints = stack.enter_context(fingerprint_file(fingerprints, count, print_size))
        # A bar among the rows would spoil them.
        visible = output != "-" or not sys.stdout.isatty()
        progress = stack.enter_context(Progress("predicting", "records", shown=visible))
        for row in rows:
            writer.writerow([*columns.cells(row.record, row.status), *row.cells])
            if prints is not None and row.fingerprint is not None:
                prints.add(row.fingerprint)
            count += 1
            progress.update()
            if row.status != "ok":
                bad, reason = bad + 1, reason or f"row {row.record.row}: {row.status}"
            if count % CHUNK == 0:
                note.keep(StreamCounts(count, bad, reason), file, prints and prints.file)
        file.flush()
    return StreamCounts(count, bad, reason)


class _Fingerprints:
    """Write rows as text, or as an array whose number of rows is known only at the end."""

    def __init__(self, file: BufferedIOBase, rows: int, suffix: str) -> None:
        self.file, self.rows, self.is_text = file, rows, suffix == ".csv"

    def add(self, row: np.ndarray) -> None:
        if self.rows == 0:
            self._write_header(row.size)
        if self.is_text:
            cells = ("" if value != value else f"{value:.6g}" for value in row.tolist())
            self.file.write(f"{self.rows},{','.join(cells)}\n".encode())
        else:
            self.file.write(np.ascontiguousarray(row, dtype="<f4").tobytes())
        self.rows += 1

    def finish(self) -> None:
        if not self.is_text:
            width = (self.file.tell() - _NPY_HEADER) // (4 * self.rows) if self.rows else 0
            self.file.seek(0)
            self._write_header(width)

    def _write_header(self, width: int) -> None:
        if self.is_text:
            names = ["row", *(f"f{number}" for number in range(width))]
            self.file.write(f"{','.join(names)}\n".encode())
        else:
            header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, width)}
            np.lib.format.write_array_header_1_0(self.file, header)


@contextmanager
def fingerprint_file(path: str, rows: int = 0, resume_at: int | None = None) -> Iterator[Any]:
    """Open a file for fingerprints, one row at a time."""
    suffix = Path(path).suffix
    if suffix not in (".npy", ".csv"):
        what = "fingerprints: the kind of file is not known"
        raise mismatch(ValueError, what, ".npy or .csv", path)
    with whole_file(path, "wb", resume_at=resume_at) as file:
        table = _Fingerprints(file, rows, suffix)
        yield table
        table.finish()
