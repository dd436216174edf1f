"""Featurize a stream of records in several processes; pack it part by part, resumably."""

import hashlib
import json
import multiprocessing
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import numpy as np
import torch

import pyg_dynbatch
from pyg_dynbatch.console import Progress
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.files import locked_folder
from pyg_dynbatch.molecules.data import MoleculeArrays, MoleculeData
from pyg_dynbatch.molecules.features.rdkit_access import MoleculeError
from pyg_dynbatch.molecules.files import store
from pyg_dynbatch.molecules.files.read import (
    BadMolecule,
    RawMolecule,
    summary_of,
    write_error_report,
)
from pyg_dynbatch.molecules.files.store import Arrays, ColumnReader, Featurizer, PackedMolecules

POLICIES = ("raise", "skip", "blank")
CHUNK = 128  # records that are featurized at a time, and among which batches are formed

# Chunks queued per process: enough to keep it busy, few enough to need little memory.
_WAITING = 4


@dataclass(frozen=True)
class FeaturizeOptions:
    """Options for turning a source into packed molecules.

    Args:
        bad: Policy for rows that are not molecules: ``"raise"``, ``"skip"``, or ``"blank"``: keep
            the row, as a molecule without atoms and targets.
        num_workers: Number of processes; scripts need ``if __name__ == "__main__":``. 0 for none.
        block_size: Records saved together: an interruption loses at most this many.
        progress: Whether to show the progress: a bar on a terminal, lines elsewhere.
        force: Whether to rebuild everything.

    Raises:
        ValueError: If an option is out of range.

    Example:
        >>> FeaturizeOptions(bad="blank").num_workers
        0
    """

    bad: str = "skip"
    num_workers: int = 0
    block_size: int = 4_096
    progress: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        checked_choice("FeaturizeOptions: unknown policy for bad rows", self.bad, POLICIES)
        for name, lowest in (("num_workers", 0), ("block_size", 1)):
            if (given := getattr(self, name)) < lowest:
                what = f"FeaturizeOptions: {name} is out of range"
                raise mismatch(ValueError, what, f"at least {lowest}", given)


class Featurized(NamedTuple):
    """The packed molecules of some consecutive records, and the bad ones among them."""

    arrays: Arrays
    errors: tuple[BadMolecule, ...]


def _featurize(
    featurizer: Featurizer, packing: store.AtomPacking, bad: str, records: Sequence[RawMolecule]
) -> Featurized:
    """Featurize some records under a policy for bad rows."""
    molecules: list[MoleculeArrays] = []
    errors: list[BadMolecule] = []
    for record in records:
        try:
            molecules.append(_arrays_of(featurizer, record, packing.num_tasks))
        except MoleculeError as error:
            where = (record.row, record.where, record.smiles)
            errors.append(BadMolecule(*where, error.reason, error.atom))
            if bad == "raise":
                break
            if bad == "blank":
                blank = packing.blank._replace(smiles=_text_of(record), row=record.row)
                molecules.append(blank)
        except Exception as error:
            error.add_note(f"row {record.row} ({record.where}): {record.smiles!r}")
            raise
    return Featurized(packing.pack(molecules), tuple(errors))


def featurize_record(
    featurizer: Featurizer, record: RawMolecule, num_tasks: int | None = None
) -> MoleculeData:
    """Turn one record into a molecule with its targets, text and row.

    Args:
        featurizer: Converts the molecule.
        record: The record. Without a SMILES, its mol block is used; the text is then the canonical
            SMILES.
        num_tasks: Number of targets to keep; None for all.

    Raises:
        MoleculeError: If the record gives no molecule.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> record = RawMolecule(7, "mine.csv:9", "CO", targets=(0.5, None))
        >>> data = featurize_record(MoleculeFeaturizer(), record)
        >>> data.num_nodes, data.row, data.y_mask.tolist()
        (2, 7, [[True, False]])
    """
    return _arrays_of(featurizer, record, num_tasks).data()


def _arrays_of(
    featurizer: Featurizer, record: RawMolecule, num_tasks: int | None
) -> MoleculeArrays:
    text = record.text()
    found = featurizer.arrays(text)
    return found._replace(smiles=(text or "").strip(), row=record.row, y=record.targets[:num_tasks])


def _text_of(record: RawMolecule) -> str:
    return (record.smiles or "").strip()


def featurize_stream(
    records: Iterable[RawMolecule],
    featurizer: Featurizer,
    *,
    num_tasks: int = 0,
    bad: str = "blank",
    num_workers: int = 0,
) -> Iterator[Featurized]:
    """Featurize a stream of records in order, in chunks and in constant memory.

    Args:
        records: The records.
        featurizer: Converts one molecule.
        num_tasks: Number of targets to keep of every record.
        bad: ``"skip"``, ``"blank"``, or ``"raise"``: a chunk ends at its first bad record.
        num_workers: Number of processes; 0 to work in this one.

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
    options = FeaturizeOptions(bad, num_workers)
    packing = packing_of(featurizer, num_tasks)
    chunks = ((None, chunk) for chunk in in_chunks(records, CHUNK))
    with Workers(featurizer, packing, options.bad, options.num_workers) as workers:
        for _, piece in workers.run(chunks):
            yield piece


def packing_of(featurizer: Featurizer, num_tasks: int) -> store.AtomPacking:
    """Return the packing of the molecules of a featurizer."""
    return store.AtomPacking(
        featurizer.atom_kinds, featurizer.atom_names, num_tasks, len(featurizer.descriptor_names)
    )


def in_chunks(records: Iterable[RawMolecule], size: int) -> Iterator[list[RawMolecule]]:
    """Split a stream into lists."""
    stream = iter(records)
    while chunk := list(islice(stream, size)):
        yield chunk


class Workers(AbstractContextManager["Workers"]):
    """Featurizes chunks of records in several processes; results come in order."""

    def __init__(
        self, featurizer: Featurizer, packing: store.AtomPacking, bad: str, num_workers: int
    ) -> None:
        self._featurize = partial(_featurize, featurizer, packing, bad)
        self._most_waiting = _WAITING * num_workers
        self._pool: ProcessPoolExecutor | None = None
        if num_workers:
            # Not forked: a process copied from one that runs threads may hang.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_workers, spawn, _begin, (self._featurize,))

    def run(
        self, chunks: Iterable[tuple[Any, Sequence[RawMolecule]]]
    ) -> Iterator[tuple[Any, Featurized]]:
        """Featurize chunks, each with a mark that is returned with its result."""
        if self._pool is None:
            for mark, records in chunks:
                yield mark, self._featurize(records)
            return
        waiting: deque[tuple[Any, str, Future[Featurized]]] = deque()
        for mark, records in chunks:
            span = f"rows {records[0].row} to {records[-1].row}"
            # Without the other columns of the file, of which there may be hundreds.
            sent = [replace(record, extra={}, source=((), ())) for record in records]
            waiting.append((mark, span, self._pool.submit(_in_process, sent)))
            if len(waiting) > self._most_waiting:
                yield _result(*waiting.popleft())
        yield from starmap(_result, waiting)

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


_work: Callable[[Sequence[RawMolecule]], Featurized]  # of a worker process


def _begin(work: Callable[[Sequence[RawMolecule]], Featurized]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = work


def _in_process(records: Sequence[RawMolecule]) -> Featurized:
    return _work(records)


def _result(mark: Any, span: str, future: "Future[Featurized]") -> tuple[Any, Featurized]:
    try:
        return mark, future.result()
    except BrokenProcessPool as error:
        what, where = "featurize: a process died", f"{span}, or a few hundred rows after"
        hint = "num_workers=0 to see why; a script that starts processes needs "
        hint += '`if __name__ == "__main__":`; finished parts are kept'
        raise mismatch(RuntimeError, what, "", error, where=where, hint=hint) from error


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
    last complete part. At the end the parts are concatenated to one ``.npy`` file per column, and
    the header, which completes the store, is written last. Meanwhile the folder is locked. Parts
    of a finished store whose records have not changed are reused.

    Args:
        folder: Folder of the columns; None to keep them in memory.
        records: The records, which are read once, one part at a time.
        featurizer: Converts one molecule.
        task_names: Names of the targets of every record.
        options: Policy for bad rows, number of processes, size of the parts.
        name: Name of the caller, for messages and the progress bar.
        wait: Whether to wait for another process that writes to the folder, instead of raising
            an error.

    Returns:
        The molecules; ``errors.csv`` in their folder lists the rows that could not be used.

    Raises:
        OSError: If the folder cannot be written, or another process writes to it.
        RuntimeError: If a process died.
        ValueError: At the first bad row under the policy ``"raise"``, if no row is a molecule, or
            if the folder holds the finished store of a different featurizer.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> records = [RawMolecule(i, f"line {i}", text) for i, text in enumerate(["CO", "C"])]
        >>> options = FeaturizeOptions(progress=False)
        >>> molecules = build_store(None, records, MoleculeFeaturizer(), options=options)
        >>> len(molecules), molecules.num_atoms.tolist()
        (2, [2, 1])
    """
    with nullcontext() if folder is None else locked_folder(folder, wait):
        builder = StoreBuilder(folder, featurizer, tuple(task_names), options, name)
        builder.build(records)
        return builder.finish()


def valid_store(folder: Path, wanted: Featurizer | None = None) -> PackedMolecules | None:
    """Open a store if it is finished and unchanged; it must not be of a different featurizer."""
    try:
        header = store.read_header(folder)
    except (FileNotFoundError, ValueError):
        return None
    if wanted is not None:
        store.check_featurizer(header, wanted, folder)
    with suppress(FileNotFoundError, ValueError):
        columns = store.MappedColumns(folder, header["columns"])
        found = PackedMolecules((header, columns))
        found.check()
        columns.clear()  # closes the files: a large build has thousands
        return found
    return None


class StoreBuilder:
    """Collects the parts of a store; builds those that are not in the folder yet.

    An unfinished part is a store of its own, in a folder within the folder.
    """

    def __init__(
        self,
        folder: str | Path | None,
        featurizer: Featurizer,
        task_names: tuple[str, ...],
        options: FeaturizeOptions,
        name: str,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.options, self.name = options, name
        self.featurizer, self.packing = featurizer, packing_of(featurizer, len(task_names))
        columns = ("atom_names", "atom_kinds", "descriptor_names")
        self._header = {
            "format": store.FORMAT,
            "featurizer": featurizer.spec,
            "featurizer_digest": featurizer.digest,
            **{name: list(getattr(featurizer, name)) for name in columns},
            "pair_table": featurizer.pair_table.as_dict(),
            "task_names": list(task_names),
            "bad": options.bad,
            "pyg_dynbatch": pyg_dynbatch.__version__,
        }
        self.total = 0  # records
        self._digests: list[str] = []  # of the parts, in order
        self._earlier: PackedMolecules | None = None
        # The valid parts and the readers of their columns, by the digests of the parts.
        self._parts: dict[str, tuple[dict[str, Any], ColumnReader]] = {}
        if self.folder is not None and not options.force:
            for path in self.folder.glob(store.PARTS):
                self._reuse(valid_store(path), partial(_read, path))
            self._earlier = valid_store(self.folder, featurizer)
            self._reuse(self._earlier, getattr(self._earlier, "part", None))

    def _reuse(self, found: PackedMolecules | None, read: Any) -> None:
        """Take over the parts of a store, but no bad rows under a different policy."""
        for number, part in enumerate([] if found is None else found.parts):
            if part["bad"] == self.options.bad or not part["errors"]:
                self._parts[part["digest"]] = part, partial(read, number)

    def build(self, records: Iterable[RawMolecule]) -> None:
        """Read the records and build all parts that are missing."""
        options = self.options
        with (
            Progress(f"{self.name}: featurizing", "molecules", shown=options.progress) as done,
            Workers(self.featurizer, self.packing, options.bad, options.num_workers) as workers,
        ):
            results: list[Featurized] = []
            for (digest, last), result in workers.run(self._chunks(records, done)):
                if result.errors and options.bad == "raise":
                    raise ValueError(result.errors[0].complaint(self.name))
                results.append(result)
                if last:
                    self._save(digest, results)
                    results = []

    def _chunks(
        self, records: Iterable[RawMolecule], done: Progress
    ) -> Iterator[tuple[tuple[str, bool], list[RawMolecule]]]:
        """Read the records; yield chunks of the parts to be built.

        Each has a mark: the digest of its part, and whether it is the last chunk of that part.
        """
        # A part depends on these and on its records; and on the policy if any of them is bad.
        key = json.dumps([self._header[k] for k in ("format", "featurizer_digest", "task_names")])
        for block in in_chunks(records, self.options.block_size):
            self.total += len(block)
            hashed = hashlib.sha256(key.encode())
            for record in block:
                facts = (record.row, record.smiles, record.block, record.targets, record.fault)
                hashed.update(repr(facts).encode())
            digest = hashed.hexdigest()
            self._digests.append(digest)
            if digest in self._parts:
                done.update(len(block))
                continue
            for chunk in in_chunks(block, CHUNK):
                yield (digest, chunk[-1] is block[-1]), chunk
                done.update(len(chunk))

    def _save(self, digest: str, results: Sequence[Featurized]) -> None:
        """Save a part that is complete."""
        readers = [result.arrays.__getitem__ for result in results]
        arrays = store.join_packs(readers, results[0].arrays)
        part = {
            "digest": digest,
            "molecules": len(arrays["row"]),
            "errors": [asdict(error) for result in results for error in result.errors],
            "bad": self.options.bad,
        }
        read: ColumnReader = arrays.__getitem__
        if self.folder is not None:
            folder = self.folder / f"part-{digest[:16]}"
            store.write_store(folder, [read], arrays, {**self._header, "parts": [part]})
            read = partial(_read, folder, 0)
        self._parts[digest] = part, read

    def finish(self) -> PackedMolecules:
        """Join the parts; write the columns, the header and the report of bad rows."""
        found = [self._parts[digest] for digest in self._digests]
        # A part without bad rows may have been made under a different policy.
        parts = [{**part, "bad": self.options.bad} for part, _ in found]
        check_parts(self.name, parts, self.total)
        empty = self.packing.pack([])
        readers = [read for _, read in found]
        header = {**self._header, "parts": parts}
        if self.folder is None:
            return PackedMolecules((header, store.join_packs(readers, empty)))
        return finish_store(self.folder, readers, empty, header, self._earlier)


def _read(folder: Path, number: int, name: str) -> np.ndarray:
    """Read a column of a part; keep nothing open, as a large build has thousands of parts."""
    return PackedMolecules(folder).part(number, name)


def check_parts(name: str, parts: Sequence[Mapping[str, Any]], total: int) -> None:
    """Report the bad rows of a store; raise an error if there is no molecule."""
    bad = sum(len(part["errors"]) for part in parts)
    first = next((BadMolecule(**part["errors"][0]) for part in parts if part["errors"]), None)
    said = "no records" if first is None else summary_of(first, bad, total)
    if bad == total:
        raise mismatch(ValueError, f"{name}: no molecules", "at least one", said)
    if bad:
        print(f"{name}: {said}", file=sys.stderr)


def finish_store(
    folder: Path,
    readers: Sequence[ColumnReader],
    names: Iterable[str],
    header: Mapping[str, Any],
    earlier: PackedMolecules | None = None,
) -> PackedMolecules:
    """Write a store, unless `earlier` is the same, and the report of its bad rows; clean up."""
    if earlier is None or earlier.header.get("build") != store.digest_of(header):
        store.write_store(folder, readers, names, header)
    found = (error for part in header["parts"] for error in part["errors"])
    write_error_report(folder / ERRORS, (BadMolecule(**error) for error in found))
    # Remove the parts, unfinished files, and columns of other builds than the finished one.
    used = {
        store.HEADER,
        ERRORS,
        *(file for file, _, _ in store.read_header(folder)["columns"].values()),
    }
    for path in folder.glob(store.PARTS):
        rmtree(path, ignore_errors=True)
    for name in (store.HEADER, ERRORS, *(f"{name}-????????.npy" for name in names)):
        for path in (*folder.glob(name), *folder.glob(f".{name}.*.tmp")):
            if path.name not in used and path.is_file():
                # Windows keeps files that a process has mapped; the next build removes them.
                with suppress(PermissionError):
                    path.unlink()
    return PackedMolecules(folder)
