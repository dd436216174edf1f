"""Predict molecules with one or several checkpoints, in batches or as a stream of records."""

import csv
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch import prediction
from pyg_dynbatch.console import Progress
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import atomic_file, part_of
from pyg_dynbatch.molecules.data import MoleculeCollater, MoleculeData
from pyg_dynbatch.molecules.features.base import part_to_spec
from pyg_dynbatch.molecules.features.descriptors import FeatureFile
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files.build import CHUNK, featurize_stream, packing_of
from pyg_dynbatch.molecules.files.read import BadMolecule, RawMolecule
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel, property_columns
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.samplers import pack_in_order

_NOTED = 8 * CHUNK  # rows after which a killed run continues
_FEATURE_FILE = f":{FeatureFile.__qualname__}"


class Predicted(NamedTuple):
    """Predictions of some molecules, with deviations and fingerprints if requested."""

    values: Float[np.ndarray, "molecule output"]
    deviation: Float[np.ndarray, "molecule output"] | None = None
    fingerprint: Float[np.ndarray, "molecule number"] | None = None


class MoleculePredictor(prediction.Predictor):
    """Predict properties of molecules with the mean of several checkpoints.

    Its uncertainty is the standard deviation over the checkpoints and their passes with dropout.

    Args:
        checkpoints: Paths of checkpoints, or models or tasks, with the same features and
            properties.
        device: Where to compute.
        dropout: Passes with dropout; 0 for one pass without.
        max_pairs: Maximum number of pairs of atoms per batch; a larger molecule has its own.
        max_atoms: Maximum number of atoms of a molecule; as in training by default.
        features: File of the numbers of a :class:`~pyg_dynbatch.data.FeatureFile` for the molecules
            to predict; that of training by default.
        records: The molecules of its rows, for an ``.npy`` file.

    Raises:
        ValueError: If a checkpoint is not one of molecules, two predict different properties, a
            model has no dropout, or the device cannot be used.

    Example:
        >>> from pyg_dynbatch.lightning import MoleculeProperty
        >>> from pyg_dynbatch.models import MoleculeSchema
        >>> made = MoleculeFeaturizer()
        >>> schema = MoleculeSchema(made.spec, len(made.atom_names), made.pair_table, ("logS",))
        >>> task = MoleculeProperty(schema.as_dict(), hidden=4, atom_out=4, readout="sum", head=[])
        >>> predictor = MoleculePredictor([task])
        >>> predictor.predict([predictor.featurizer("CCO"), predictor.featurizer("C")]).values.shape
        (2, 1)
    """

    def __init__(
        self,
        checkpoints: Sequence[str | Path | nn.Module],
        device: str = "cpu",
        dropout: int = 0,
        max_pairs: int = 200_000,
        max_atoms: int | None = None,
        features: str | None = None,
        records: str | None = None,
    ) -> None:
        super().__init__(checkpoints, device)
        self.models: list[MoleculePropertyModel] = []
        for given in checkpoints:
            model: Any = getattr(given, "model", given)  # that of a task
            if not isinstance(model, nn.Module):
                contents = prediction.read_checkpoint(model)
                model = MoleculePropertyModel.from_checkpoint(contents, given)
            self.models.append(model.eval().to(self.device))
            with prediction.naming_file("a model" if isinstance(given, nn.Module) else given):
                self.models[0].check_origin({"schema": model.schema.as_dict()})
        self.schema: MoleculeSchema = self.models[0].schema
        if dropout == 1 or dropout < 0:
            what = "MoleculePredictor: a deviation needs several passes"
            raise mismatch(ValueError, what, "dropout of at least 2, or 0 for none", dropout)
        if dropout and not all(map(_dropout_layers, self.models)):
            what, got = "MoleculePredictor: the model has no dropout to switch on", "dropout 0"
            hint = "several checkpoints, whose predictions differ"
            raise mismatch(ValueError, what, "a model with dropout above 0", got, hint=hint)
        self.dropout, self.max_pairs, self.max_atoms = dropout, max_pairs, max_atoms
        self.features = features, records
        schema = self.schema
        self.collater = MoleculeCollater(schema.pair_table, schema.pairs, schema.self_pairs)

    @property
    def featurizer(self) -> MoleculeFeaturizer:
        """The featurizer the checkpoints were trained with."""
        if not self.schema.featurizer:
            what = "MoleculePredictor: the checkpoint has no featurizer"
            raise mismatch(ValueError, what, "a spec in its schema", "none")
        spec = dict(self.schema.featurizer)
        if self.max_atoms is not None:
            spec["options"] = {**spec["options"], "max_atoms": self.max_atoms}
        file, records = self.features
        if file is not None:
            parts = [*spec.get("descriptors", ())]
            places = [k for k, part in enumerate(parts) if part["class"].endswith(_FEATURE_FILE)]
            if not places:
                what = "MoleculePredictor: the model was not trained with a FeatureFile"
                raise mismatch(ValueError, what, "no file of features", file)
            for place in places:
                parts[place] = _from_file(parts[place], file, records)
            spec["descriptors"] = parts
        return MoleculeFeaturizer.from_spec(spec)

    def predict(self, molecules: Sequence[MoleculeData], fingerprints: bool = False) -> Predicted:
        """Predict molecules in order; ``fingerprints`` are those of the first checkpoint."""
        parts = [self._one_batch(chosen, fingerprints) for chosen in self.batches(molecules)]
        if not parts:
            return Predicted(np.zeros((0, self.schema.num_outputs), dtype=np.float32))
        columns = zip(*parts, strict=True)
        return Predicted._make(None if c[0] is None else np.concatenate(c) for c in columns)

    def batches(self, molecules: Sequence[MoleculeData]) -> Iterator[Sequence[MoleculeData]]:
        """Split molecules into batches of limited size, in order."""
        # Columns of a packed data set are used as they are where they fit.
        columns = getattr(molecules, "fields", None)
        if columns is not None and 0 < len(columns["pair_code"]) <= self.max_pairs:
            yield molecules
            return
        listed = list(molecules)
        sizes = [int(molecule.pair_code.numel()) for molecule in listed]
        for batch in pack_in_order(range(len(listed)), sizes, self.max_pairs):
            yield [listed[number] for number in batch]

    def _one_batch(self, molecules: Sequence[MoleculeData], fingerprints: bool) -> Predicted:
        batch = self.collater(molecules)
        batch = batch if self.device.type == "cpu" else batch.to(self.device)
        prints = None
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(prediction.evaluating(model))
            rows = [row for model in self.models for row in self._passes(model, batch)]
            if fingerprints:
                prints = self.models[0].weave.fingerprint(batch).float().cpu().numpy()
        samples = torch.stack(rows)
        deviation = samples.std(0).cpu().numpy() if len(samples) > 1 else None
        return Predicted(samples.mean(0).cpu().numpy(), deviation, prints)

    def _passes(self, model: MoleculePropertyModel, batch: Any) -> Iterator[Tensor]:
        if not self.dropout:
            yield model.predicted(model(batch))
            return
        layers = _dropout_layers(model)
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
                    yield model.predicted(model(batch))
        finally:
            for layer in layers:
                layer.eval()


def _from_file(part: dict[str, Any], file: str, records: str | None) -> dict[str, Any]:
    """Replace the file of features in the spec of descriptors."""
    column = part["options"]["smiles_column"]
    new = FeatureFile(file, records if file.endswith(".npy") else None, column)
    if list(new.names) != part["names"]:
        what = "MoleculePredictor: the file of features has other columns than in training"
        wanted, got = (
            f"{len(names)} columns, {', '.join(names[:9])}" for names in (part["names"], new.names)
        )
        raise mismatch(ValueError, what, wanted, got, where=file)
    return part_to_spec(new)


def _dropout_layers(model: MoleculePropertyModel) -> list[nn.Module]:
    layers = model.network.modules()
    return [layer for layer in layers if isinstance(layer, nn.Dropout) and layer.p > 0]


class StreamRow(NamedTuple):
    """One record and its prediction, or what is wrong with it."""

    record: RawMolecule
    error: BadMolecule | None
    cells: Sequence[str]
    fingerprint: Float[np.ndarray, " number"] | None

    @property
    def status(self) -> str:
        """``ok`` or the reason of the error."""
        if self.error is None:
            return "ok"
        atom = "" if self.error.atom is None else f" (atom {self.error.atom})"
        return f"{self.error.reason}{atom}"


def predict_stream(
    records: Iterable[RawMolecule],
    predictor: MoleculePredictor,
    num_workers: int = 0,
    fingerprints: bool = False,
) -> Iterator[StreamRow]:
    """Predict records in their order; memory does not grow with the stream."""
    featurizer, wanted = predictor.featurizer, predictor.schema.pair_table
    if featurizer.pair_table != wanted:
        tables = wanted, featurizer.pair_table
        expected, got = (f"pair table {table.digest()}" for table in tables)
        what = "predict: the featurizer makes different pair codes"
        hint = "the version of pyg_dynbatch that made the checkpoint"
        raise mismatch(ValueError, what, expected, got, hint=hint)
    packing = packing_of(featurizer, 0)
    # Workers read ahead: records wait here for their results.
    waiting: deque[RawMolecule] = deque()

    def seen() -> Iterator[RawMolecule]:
        for record in records:
            waiting.append(record)
            yield record

    blank = [""] * len(column_names(predictor))
    for piece in featurize_stream(seen(), featurizer, bad="blank", num_workers=num_workers):
        errors = {error.row: error for error in piece.errors}
        molecules = packing.unpack(piece.arrays, np.arange(len(piece.arrays["row"])))
        found = predictor.predict(molecules, fingerprints)
        columns = named_columns(found, predictor.schema).values()
        texts = ([prediction.cell(value) or "nan" for value in column] for column in columns)
        for number, cells in enumerate(zip(*texts, strict=True)):
            record = waiting.popleft()
            mark = None if found.fingerprint is None else found.fingerprint[number]
            if (error := errors.get(record.row)) is not None:
                yield StreamRow(record, error, blank, None if mark is None else mark * np.nan)
                continue
            if record.smiles is None:  # a record of an SDF; the featurizer has written it
                record = replace(record, smiles=molecules.fields["smiles"][number])
            yield StreamRow(record, None, cells, mark)


def named_columns(found: Predicted, schema: MoleculeSchema) -> dict[str, np.ndarray]:
    """Return all columns of predictions by name."""
    columns = property_columns(torch.from_numpy(found.values), schema)
    if found.deviation is not None:
        # Of several classes, the largest deviation.
        each = torch.from_numpy(found.deviation).unflatten(1, (schema.num_tasks, -1)).amax(2)
        names = [f"deviation_{name}" for name in schema.task_names]
        columns |= zip(names, each.unbind(1), strict=True)
    return prediction.numbered_columns(columns)


def column_names(predictor: MoleculePredictor) -> list[str]:
    """Name the columns of the predictions of a stream."""
    several = len(predictor.models) > 1 or predictor.dropout > 0
    row = np.zeros((1, predictor.schema.num_outputs), dtype=np.float32)
    found = Predicted(row, row if several else None)
    return [*named_columns(found, predictor.schema)]


class Columns(NamedTuple):
    """The columns of an output file, in this order: of the input, of the record, predicted."""

    predicted: Sequence[str]
    kept: tuple[str, ...] = ()  # names in the input
    own: Sequence[str] = ("row", "name", "smiles", "status")

    @property
    def shown(self) -> list[str]:
        """Names of the kept columns in the output, where one name is not used twice."""
        reserved = {*self.own, *self.predicted}
        taken = {*self.kept, *reserved}
        shown = []
        for name in self.kept:
            new = name
            while name in reserved and new in taken:
                new = f"input_{new}"
            taken.add(new)
            shown.append(new)
        return shown

    def cells(self, row: StreamRow) -> list[object]:
        """Return all cells of one row."""
        record = row.record
        names, kept = record.source
        if tuple(names) != self.kept:  # the fields of an SDF record, or none are kept
            found = dict(zip(names, kept, strict=True))
            kept = [found.get(name, "") for name in self.kept]
        own = {"row": record.row, "name": record.name or "", "smiles": record.smiles or ""}
        own["status"] = row.status
        return [*kept, *(own[name] for name in self.own), *row.cells]


def open_columns(
    read: Callable[..., Iterator[RawMolecule]], predicted: list[str], narrow: bool, where: str
) -> tuple[Columns, Iterator[RawMolecule]]:
    """Open records with `read`, and report under which names their columns are written."""
    records = read()
    first = next(records)
    kept = () if narrow else tuple(first.source[0])
    if first.smiles is None and not narrow:
        if where == "-":
            what = "predict: the fields of an SDF are known only at its end"
            expected, hint = "a file, which can be read twice", "--narrow, which omits the fields"
            raise mismatch(ValueError, what, expected, "standard input", hint=hint)
        kept = tuple(dict.fromkeys(name for record in read() for name in record.source[0]))
    columns = Columns(predicted, kept)
    if kept and first.smiles is not None:  # its name and SMILES are among the kept columns
        columns = columns._replace(own=("row", "status"))
    for name, shown in zip(kept, columns.shown, strict=True):
        if name != shown:
            print(f"the column {name!r} of the input is written as {shown!r}", file=sys.stderr)
    return columns, chain([first], records)


def predict_file(
    read: Callable[..., Iterator[RawMolecule]],
    predictor: MoleculePredictor,
    files: "PredictionFiles",
    where: str,
    narrow: bool,
    num_workers: int,
) -> None:
    """Predict the records that `read` opens, from where `files` end."""
    columns, records = open_columns(read, column_names(predictor), narrow, where)
    if files.rows:
        print(f"continuing after {files.rows:,} records", file=sys.stderr)
    left = islice(records, files.rows, None)
    rows = predict_stream(left, predictor, num_workers, files.fingerprints is not None)
    width = predictor.models[0].weave.fingerprint_channels if files.fingerprints else 0
    files.write(rows, columns, width)


class PredictionFiles:
    """The table of a stream of predictions, and the file of its fingerprints.

    Until they are complete the files are named ``FILE.part``. If the run has an identity, a note
    next to the table counts the rows in them, so that the same run can continue if it is killed.
    """

    def __init__(
        self, table: str, fingerprints: str | None = None, identity: Mapping[str, Any] | None = None
    ) -> None:
        if fingerprints is not None and Path(fingerprints).suffix not in (".npy", ".csv"):
            what = "fingerprints: unknown kind of file"
            raise mismatch(ValueError, what, ".npy or .csv", fingerprints)
        self.fingerprints, self.identity = fingerprints, identity
        self.rows, self.bad, self.reason = 0, 0, ""  # the reason of the first bad row
        self.note = Path(f"{part_of(table)}.json")
        self._is_text = str(fingerprints).endswith(".csv")
        self._paths = (table, fingerprints)
        self._sizes: Sequence[int | None] = [None if identity is None else 0] * 2
        parts = [part_of(path) for path in self._paths if path is not None]
        if identity is not None and all(path.is_file() for path in (self.note, *parts)):
            self._continue(identity, parts)

    def _continue(self, identity: Mapping[str, Any], parts: Sequence[Path]) -> None:
        """Take over the counts of a run that was killed."""
        noted = json.loads(self.note.read_text(encoding="utf-8"))
        hint = f"delete {' and '.join(map(str, [*parts, self.note]))} to start again"
        other = [key for key in identity if noted["identity"].get(key) != identity[key]]
        if other:
            what = "predict: cannot continue a different run"
            got, wanted = f"a different {', '.join(other)}", "that of the unfinished output"
            raise mismatch(ValueError, what, wanted, got, where=parts[0], hint=hint)
        (self.rows, self.bad, self.reason), self._sizes = noted["counts"], noted["sizes"]
        used = [size for size, path in zip(self._sizes, self._paths, strict=True) if path]
        for part, size in zip(parts, used, strict=True):
            if (found := part.stat().st_size) < (size or 0):
                what = "predict: the unfinished output has been shortened"
                wanted, got = f"at least {size:,} bytes", f"{found:,} bytes"
                raise mismatch(ValueError, what, wanted, got, where=part, hint=hint)

    def write(self, rows: Iterable[StreamRow], columns: Columns, width: int = 0) -> None:
        """Write rows after those that are in the files; ``width`` is that of a fingerprint."""
        with ExitStack() as stack:
            if self.identity is not None:
                stack.push(self._remove_note)
                if not self.rows:
                    # It is about files that are overwritten now.
                    self.note.unlink(missing_ok=True)
            is_stream = self._paths[0] == "-"
            files: list[Any] = [
                None if path is None else stack.enter_context(_opened(path, mode, size))
                for path, mode, size in zip(self._paths, ("w", "wb"), self._sizes, strict=True)
            ]
            file, prints = files
            writer = csv.writer(file, lineterminator="\n")
            if not self.rows:
                writer.writerow([*columns.shown, *columns.own, *columns.predicted])
                self._write_header(prints, width)
            # A bar among the rows would spoil them.
            visible = not is_stream or not sys.stdout.isatty()
            progress = stack.enter_context(Progress("predicting", "records", shown=visible))
            for row in rows:
                writer.writerow(columns.cells(row))
                if prints is not None and row.fingerprint is not None:
                    prints.write(self._print(row.record.row, row.fingerprint))
                self.rows += 1
                progress.update()
                if row.error is not None:
                    self.bad += 1
                    self.reason = self.reason or f"row {row.record.row}: {row.status}"
                if self.rows % _NOTED == 0:
                    self._write_note(files)
            file.flush()
            if prints is not None and not self._is_text:
                prints.seek(0)
                self._write_header(prints, width)

    def _write_header(self, prints: Any, width: int) -> None:
        if prints is not None and self._is_text:
            prints.write(f"row,{','.join(f'f{number}' for number in range(width))}\n".encode())
        elif prints is not None:
            # Written again at the end: numpy leaves room for any number of rows.
            header = {"descr": "<f4", "fortran_order": False, "shape": (self.rows, width)}
            np.lib.format.write_array_header_1_0(prints, header)

    def _print(self, row: int, found: Float[np.ndarray, " number"]) -> bytes:
        if not self._is_text:
            return np.ascontiguousarray(found, dtype="<f4").tobytes()
        return f"{row},{','.join(found.astype(str)).replace('nan', '')}\n".encode()

    def _write_note(self, files: Sequence[Any]) -> None:
        if self.identity is None:
            return
        for file in filter(None, files):
            file.flush()
        sizes = [0 if file is None else os.fstat(file.fileno()).st_size for file in files]
        counts = (self.rows, self.bad, self.reason)
        content = {"identity": self.identity, "counts": counts, "sizes": sizes}
        new = self.note.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        new.replace(self.note)

    def _remove_note(self, kind: type[BaseException] | None, *_: object) -> None:
        # A run that is killed can continue; one that has failed would fail again. If another
        # process writes the files, the note belongs to that one.
        if kind is None or issubclass(kind, Exception) and kind is not BlockingIOError:
            self.note.unlink(missing_ok=True)
            self.note.with_suffix(".new").unlink(missing_ok=True)


def _opened(path: str, mode: str, size: int | None) -> AbstractContextManager[Any]:
    if path == "-":
        return nullcontext(sys.stdout)
    text = {} if "b" in mode else {"newline": "", "encoding": "utf-8"}
    return atomic_file(path, mode, resume_at=size, **text)
