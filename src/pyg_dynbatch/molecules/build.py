"""Featurize a stream of records in several processes, and pack it part by part, resumably."""

import hashlib
import json
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import numpy as np
import torch

import pyg_dynbatch
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import locked_folder, write_atomically
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.files import (
    BadMolecule,
    RawMolecule,
    check_policy,
    summary_of,
    write_error_report,
)
from pyg_dynbatch.molecules.rdkit_access import MoleculeError, canonical_smiles, parse_mol_block
from pyg_dynbatch.molecules.store import (
    FORMAT,
    Arrays,
    AtomPacking,
    ColumnReader,
    Featurizer,
    MappedColumns,
    PackedMolecules,
    join_packs,
    read_header,
    remove_leftovers,
    write_columns,
    write_header,
)

CHUNK = 128  # records that are featurized at a time

# Chunks that wait for each process: enough that none is idle, few enough to need no memory.
_WAITING = 4


@dataclass(frozen=True)
class FeaturizeOptions:
    """Options for turning a source into packed molecules.

    Args:
        bad: Rows that are not molecules: ``"raise"``, ``"skip"``, or ``"blank"``: keep the place
            with a molecule of no atoms and no known target.
        num_workers: Processes, for which scripts need ``if __name__ == "__main__":``; 0 for none.
        shard_size: Rows saved together: at most so many are lost by an interruption.
        progress: Whether to show progress: a bar on a terminal, lines elsewhere.
        force: Whether to make everything again.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> FeaturizeOptions(bad="blank").num_workers
        0
    """

    bad: str = "skip"
    num_workers: int = 0
    shard_size: int = 16_384
    progress: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        check_policy(self.bad, "FeaturizeOptions")
        for name, lowest in (("num_workers", 0), ("shard_size", 1)):
            if (given := getattr(self, name)) < lowest:
                what = f"FeaturizeOptions: {name} is out of range"
                raise mismatch(ValueError, what, f"at least {lowest}", given)


class Featurized(NamedTuple):
    """What became of some consecutive records."""

    arrays: Arrays
    errors: tuple[BadMolecule, ...]


class _Job(NamedTuple):
    """What a process does with a chunk of records."""

    featurizer: Featurizer
    packing: AtomPacking
    bad: str

    def run(self, records: Sequence[RawMolecule]) -> Featurized:
        """Featurize some records."""
        molecules: list[MoleculeData] = []
        errors: list[BadMolecule] = []
        for record in records:
            try:
                molecules.append(featurize_record(self.featurizer, record, self.packing.num_tasks))
            except MoleculeError as error:
                where = (record.row, record.where, record.smiles)
                errors.append(BadMolecule(*where, error.reason, error.atom))
                if self.bad == "raise":
                    break
                if self.bad == "blank":
                    molecules.append(self._blank(record))
            except Exception as error:
                error.add_note(f"row {record.row} ({record.where}): {record.smiles!r}")
                raise
        return Featurized(self.packing.pack(molecules), tuple(errors))

    def _blank(self, record: RawMolecule) -> MoleculeData:
        tasks, whole = self.packing.num_tasks, self.packing.num_descriptors
        return MoleculeData(
            torch.zeros(0, self.packing.width),
            torch.zeros(0, dtype=torch.uint8),
            y=torch.full((1, tasks), torch.nan) if tasks else None,
            descriptor=torch.full((1, whole), torch.nan) if whole else None,
            smiles=(record.smiles or "").strip(),
            row=record.row,
        )


def featurize_record(
    featurizer: Featurizer, record: RawMolecule, num_tasks: int | None = None
) -> MoleculeData:
    """Turn one record into a molecule with its targets, text and row.

    Args:
        featurizer: Describes the molecule.
        record: The record; a mol block, if there is no SMILES, gives its canonical SMILES, whose
            atoms may be in another order than the rows.
        num_tasks: Number of targets wanted; None for all.

    Raises:
        MoleculeError: If the record gives no molecule.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> record = RawMolecule(7, "mine.csv:9", "CO", targets=(0.5, None))
        >>> data = featurize_record(MoleculeFeaturizer(), record)
        >>> data.num_nodes, data.row, data.y_mask.tolist()
        (2, 7, [[True, False]])
    """
    if record.smiles is None and record.block is not None:
        mol = parse_mol_block(record.block)
        data, data_smiles = featurizer(mol), canonical_smiles(mol)
    else:
        data, data_smiles = featurizer(record.smiles), (record.smiles or "").strip()
    data.smiles = data_smiles
    data.row = record.row
    targets = record.targets if num_tasks is None else record.targets[:num_tasks]
    if targets:
        values = [np.nan if value is None else value for value in targets]
        data.y = torch.tensor([values], dtype=torch.float32)
        data.y_mask = ~torch.isnan(data.y)
    return data


def featurize_stream(
    records: Iterable[RawMolecule],
    featurizer: Featurizer,
    *,
    num_tasks: int = 0,
    bad: str = "blank",
    num_workers: int = 0,
) -> Iterator[Featurized]:
    """Featurize a stream of records in order, some at a time, in constant memory.

    Args:
        records: The records.
        featurizer: Describes one molecule.
        num_tasks: Number of targets to keep of every record.
        bad: ``"skip"``, ``"blank"``, or ``"raise"``: a piece ends at its first bad record.
        num_workers: Processes; 0 works in this one.

    Raises:
        RuntimeError: If a process died.
        ValueError: If the policy is unknown.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> records = [RawMolecule(i, f"line {i}", text) for i, text in enumerate(["CO", "C("])]
        >>> (piece,) = featurize_stream(records, MoleculeFeaturizer())
        >>> [error.row for error in piece.errors], piece.arrays["row"].tolist()
        ([1], [0, 1])
    """
    check_policy(bad, "featurize_stream")
    packing = packing_of(featurizer, num_tasks)
    chunks = ((None, chunk) for chunk in in_chunks(records, CHUNK))
    with Workers(featurizer, packing, bad, num_workers) as workers:
        for _, piece in workers.run(chunks):
            yield piece


def packing_of(featurizer: Featurizer, num_tasks: int) -> AtomPacking:
    """Return how the molecules of a featurizer are packed."""
    return AtomPacking(
        featurizer.atom_kinds, featurizer.atom_names, num_tasks, len(featurizer.descriptor_names)
    )


def in_chunks(records: Iterable[RawMolecule], size: int) -> Iterator[list[RawMolecule]]:
    """Cut a stream into lists."""
    stream = iter(records)
    while chunk := list(islice(stream, size)):
        yield chunk


class Workers:
    """Runs chunks of records in processes; results come in order."""

    def __init__(
        self, featurizer: Featurizer, packing: AtomPacking, bad: str, num_workers: int
    ) -> None:
        self._job = _Job(featurizer, packing, bad)
        self._most_waiting = _WAITING * num_workers
        self._pool: ProcessPoolExecutor | None = None
        if num_workers:
            # Not forked: a process copied from one that runs threads may hang.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_workers, spawn, _begin, (self._job,))

    def run(
        self, chunks: Iterable[tuple[Any, Sequence[RawMolecule]]]
    ) -> Iterator[tuple[Any, Featurized]]:
        """Featurize chunks, each with a mark that comes back with its result."""
        if self._pool is None:
            for mark, records in chunks:
                yield mark, self._job.run(records)
            return
        waiting: deque[tuple[Any, str, Future[Featurized]]] = deque()
        for mark, records in chunks:
            span = f"rows {records[0].row} to {records[-1].row}"
            # Without the other columns of a file, of which there may be hundreds.
            sent = [
                replace(record, extra={}, source=((), ()))
                if record.extra or record.source[0]
                else record
                for record in records
            ]
            waiting.append((mark, span, self._pool.submit(_featurize_chunk, sent)))
            if len(waiting) > self._most_waiting:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


_JOB: list[_Job] = []


def _begin(job: _Job) -> None:
    torch.set_num_threads(1)
    _JOB[:] = [job]


def _featurize_chunk(records: Sequence[RawMolecule]) -> Featurized:
    return _JOB[0].run(records)


def _result(mark: Any, span: str, future: "Future[Featurized]") -> tuple[Any, Featurized]:
    try:
        return mark, future.result()
    except BrokenProcessPool as error:
        what, expected = "featurize: a process died", "processes that live until the end"
        where = f"{span}, or a few hundred rows after"
        hint = "num_workers=0 to see why; a script that starts processes needs "
        hint += '`if __name__ == "__main__":`; finished parts are kept'
        raise mismatch(RuntimeError, what, expected, error, where=where, hint=hint) from error


ERRORS = "errors.csv"


def build_store(
    folder: str | Path | None,
    records: Iterable[RawMolecule],
    featurizer: Featurizer,
    *,
    task_names: Sequence[str] = (),
    options: FeaturizeOptions = FeaturizeOptions(),  # noqa: B008 - frozen
    name: str = "featurize",
    wait: bool = False,
) -> PackedMolecules:
    """Featurize a stream of records into a folder of memory-mapped columns.

    Molecules are saved in parts, so that after an interruption the same call continues after the
    last whole part. At the end the parts are joined into one ``.npy`` file per column, and the
    header, without which a folder is not a store, is written last. Meanwhile the folder is locked.
    Parts of a finished store whose records have not changed are not made again.

    Args:
        folder: Where the columns go; None keeps them in memory.
        records: The records, read once, a part at a time.
        featurizer: Describes one molecule.
        task_names: Names of the targets of every record.
        options: Policy for bad rows, processes, size of the parts.
        name: Who asks, for messages and the progress bar.
        wait: Whether to wait for another process that fills the folder, rather than to refuse.

    Returns:
        The molecules; ``errors.csv`` in their folder lists the rows that could not be used.

    Raises:
        OSError: If the folder cannot be written, or another process is filling it.
        RuntimeError: If a process died.
        ValueError: At the first bad row under the policy ``"raise"``, if no row is a molecule, or
            if the folder holds a finished store of another featurizer.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> records = [RawMolecule(i, f"line {i}", text) for i, text in enumerate(["CO", "C"])]
        >>> options = FeaturizeOptions(progress=False)
        >>> molecules = build_store(None, records, MoleculeFeaturizer(), options=options)
        >>> len(molecules), molecules.num_atoms.tolist()
        (2, [2, 1])
    """
    with nullcontext() if folder is None else locked_folder(folder, wait):
        builder = _Builder(folder, featurizer, tuple(task_names), options, name)
        with (
            Progress(f"{name}: featurizing", "molecules", shown=options.progress) as done,
            Workers(featurizer, builder.packing, options.bad, options.num_workers) as workers,
        ):
            results: list[Featurized] = []
            for (number, digest, last), result in workers.run(builder.chunks(records, done)):
                if result.errors and options.bad == "raise":
                    raise ValueError(result.errors[0].complaint(name))
                results.append(result)
                if last:
                    builder.save(number, digest, results)
                    results = []
        return builder.finish()


class _Part(NamedTuple):
    """A finished part: its entry in the header, and how to read its columns."""

    facts: Mapping[str, Any]
    read: ColumnReader
    is_old: bool = False  # taken from the columns of a finished store


class _Builder:
    """Collects the parts of a store; makes those that are not in the folder yet."""

    def __init__(
        self,
        folder: str | Path | None,
        featurizer: Featurizer,
        task_names: tuple[str, ...],
        options: FeaturizeOptions,
        name: str,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.options = options
        self.name = name
        self.packing = packing_of(featurizer, len(task_names))
        self._names = list(self.packing.pack([]))
        self._header = {
            "format": FORMAT,
            "featurizer": featurizer.spec,
            "featurizer_digest": featurizer.digest,
            "atom_names": list(featurizer.atom_names),
            "atom_kinds": list(featurizer.atom_kinds),
            "descriptor_names": list(featurizer.descriptor_names),
            "pair_table": featurizer.pair_table.as_dict(),
            "task_names": list(task_names),
            "bad": options.bad,
            "pyg_dynbatch": pyg_dynbatch.__version__,
        }
        self._parts: dict[int, _Part] = {}
        self._records = 0
        self._finished = self._find_finished()

    def _find_finished(self) -> PackedMolecules | None:
        """Open the finished store of the folder, if it is whole; refuse another featurizer."""
        if self.folder is None or self.options.force:
            return None
        try:
            header = read_header(self.folder)
        except (FileNotFoundError, ValueError):
            return None
        made = header["featurizer_digest"]
        if made != self._header["featurizer_digest"]:
            what = f"{self.name}: another featurizer made what is in the folder"
            expected = f"featurizer {self._header['featurizer_digest']}"
            hint = "another folder, or force=True (--force) to replace it"
            where, got = self.folder, f"featurizer {made}"
            raise mismatch(ValueError, what, expected, got, where=where, hint=hint)
        try:
            found = PackedMolecules((header, MappedColumns(self.folder, header["columns"])))
            found.check()
        except (FileNotFoundError, ValueError):
            return None
        return found

    def chunks(
        self, records: Iterable[RawMolecule], done: Progress
    ) -> Iterator[tuple[tuple[int, str, bool], list[RawMolecule]]]:
        """Read the records and pass on those still to be done: number and hash of their part.

        The last value of a mark is True for the last chunk of a part.
        """
        for number, block in enumerate(in_chunks(records, self.options.shard_size)):
            self._records += len(block)
            digest = self._digest_of(block)
            kept = self._kept(number, digest)
            if kept is not None:
                self._parts[number] = kept
                done.update(len(block))
                continue
            for chunk in in_chunks(block, CHUNK):
                yield (number, digest, chunk[-1] is block[-1]), chunk
                done.update(len(chunk))

    def save(self, number: int, digest: str, results: Sequence[Featurized]) -> None:
        """Save a part that is complete."""
        arrays = join_packs([result.arrays.__getitem__ for result in results], self._names)
        facts = {
            "digest": digest,
            "molecules": len(arrays["row"]),
            "errors": [asdict(error) for result in results for error in result.errors],
            "bad": self.options.bad,
        }
        if self.folder is None:
            self._parts[number] = _Part(facts, arrays.__getitem__)
            return
        path = self.folder / part_name(number)
        write_atomically(path, lambda temporary: _write_part(temporary, arrays, facts))
        self._parts[number] = _Part(facts, partial(_read_part, path, digest))

    def finish(self) -> PackedMolecules:
        """Join the parts; write the columns, the report of bad rows and the header."""
        parts = [self._parts[number] for number in sorted(self._parts)]
        errors = [BadMolecule(**error) for part in parts for error in part.facts["errors"]]
        if not self._records or len(errors) == self._records:
            got = summary_of(errors, self._records) if errors else "no records"
            raise mismatch(ValueError, f"{self.name}: no molecules", "at least one", got)
        if errors:
            print(f"{self.name}: {summary_of(errors, self._records)}", file=sys.stderr)
        header = {**self._header, "parts": [part.facts for part in parts]}
        packs = [part.read for part in parts]
        if self.folder is None:
            return PackedMolecules((header, join_packs(packs, self._names)))
        old = self._finished
        if old is not None and all(part.is_old for part in parts) and len(parts) == len(old.parts):
            columns = old.header["columns"]
        else:
            columns = write_columns(self.folder, packs, self._names, header)
        write_header(self.folder, {**header, "columns": columns})
        write_error_report(self.folder / ERRORS, errors)
        remove_leftovers(self.folder, columns)
        return PackedMolecules(self.folder)

    def _kept(self, number: int, digest: str) -> _Part | None:
        """Find a part that was made earlier of the same records, if it is whole."""
        if self.folder is None or self.options.force:
            return None
        old = self._finished
        if old is not None and number < len(old.parts) and old.parts[number]["digest"] == digest:
            found = _Part(old.parts[number], partial(old.part, number), is_old=True)
        else:
            path = self.folder / part_name(number)
            try:
                facts = json.loads(_read_part(path, digest, "facts").tobytes())
                with ZipFile(path) as content:
                    if content.testzip() is not None:
                        return None
            except Exception:  # missing, damaged (zipfile raises many classes) or of other records
                return None
            found = _Part(facts, partial(_read_part, path, digest))
        same_policy = found.facts["bad"] == self.options.bad or not found.facts["errors"]
        return found if same_policy else None

    def _digest_of(self, block: Sequence[RawMolecule]) -> str:
        """Hash all that the content of a part depends on, except the policy."""
        key = [self._header[name] for name in ("format", "featurizer_digest", "task_names")]
        digest = hashlib.sha256(json.dumps(key).encode())
        for record in block:
            parts = (record.row, record.smiles, record.block, record.targets)
            digest.update(repr(parts).encode())
        return digest.hexdigest()


def part_name(number: int) -> str:
    """Name the file of a part, which is removed when the store is finished."""
    return f"part-{number:06d}.npz"


def _write_part(path: Path, arrays: Arrays, facts: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        noted = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        content: dict[str, Any] = {**arrays, "facts": noted}
        np.savez(file, **content)


def _read_part(path: Path, digest: str, name: str) -> np.ndarray:
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = json.loads(arrays["facts"].tobytes())["digest"]
            if found == digest:
                return arrays[name]
            got = f"made from {found[:16]}"
    except Exception as error:  # numpy and zipfile raise many classes for a damaged file
        got = f"{type(error).__name__}: {error}"
    what = "packed molecules: a part of the store was damaged or replaced"
    expected = f"a whole file, made from {digest[:16]}"
    hint = "delete the file and make the data set again; other parts are kept"
    raise mismatch(ValueError, what, expected, got, where=path, hint=hint)
