"""Featurize a stream of records in several processes, and pack it shard by shard, resumably."""

import hashlib
import json
import multiprocessing
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

import pyg_dynbatch
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import locked_folder
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.molecules.data import MoleculeData
from pyg_dynbatch.molecules.files import (
    BadMolecule,
    RawMolecule,
    check_policy,
    summary_of,
    write_error_report,
)
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.rdkit_access import MoleculeError, canonical_smiles, parse_mol_block
from pyg_dynbatch.molecules.store import (
    FORMAT,
    HEADER,
    Arrays,
    AtomPacking,
    MoleculeStore,
    Shard,
    join_packs,
    read_header,
    shard_bytes,
    shard_name,
    write_header,
    write_shard,
)

CHUNK = 128
"""Number of records that are featurized at a time."""

# Chunks that wait for each process: enough that none is idle, few enough to need no memory.
_WAITING = 4


@runtime_checkable
class Featurizer(Protocol):
    """Says what is asked of a featurizer; ``MoleculeFeaturizer`` has it all."""

    atom_names: tuple[str, ...]
    atom_kinds: tuple[str, ...]
    pair_table: PairTable
    descriptor_names: tuple[str, ...]

    @property
    def spec(self) -> dict[str, Any]:
        """Plain values that tell what made a store."""

    @property
    def digest(self) -> str:
        """A hash of them."""

    def __call__(self, molecule: Any) -> MoleculeData:
        """Describes one molecule, given as SMILES or RDKit molecule."""


@dataclass(frozen=True)
class FeaturizeOptions:
    """Says how a source becomes packed molecules.

    Args:
        bad: What to do with a row that is no molecule: ``"raise"``, ``"skip"``, or ``"blank"``:
            keep its place with a molecule of no atoms and no known target.
        num_workers: Processes; 0 works in this one. Scripts need the usual
            ``if __name__ == "__main__":`` with processes.
        shard_size: Rows of the source in one file. What is lost by an interruption is at most
            one such file; a batch touches as many files as it has molecules from.
        progress: Whether to show progress: a bar on a terminal, lines elsewhere.
        force: Whether to make everything anew.

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
        """Refuses options that cannot be meant."""
        check_policy(self.bad, "FeaturizeOptions")
        for name, lowest in (("num_workers", 0), ("shard_size", 1)):
            if getattr(self, name) < lowest:
                raise mismatch(
                    ValueError,
                    f"FeaturizeOptions: {name} is out of range",
                    f"{lowest} or more",
                    getattr(self, name),
                )


class Featurized(NamedTuple):
    """Holds what became of some consecutive records."""

    arrays: Arrays
    errors: tuple[BadMolecule, ...]


class _Job(NamedTuple):
    """Holds what a process has to know."""

    featurizer: Featurizer
    packing: AtomPacking
    bad: str

    def run(self, records: Sequence[RawMolecule]) -> Featurized:
        """Featurizes some records."""
        molecules: list[MoleculeData] = []
        errors: list[BadMolecule] = []
        for record in records:
            try:
                molecules.append(featurize_record(self.featurizer, record, self.packing.num_tasks))
            except MoleculeError as error:
                errors.append(_bad_molecule(record, error))
                if self.bad == "raise":
                    break
                if self.bad == "blank":
                    molecules.append(_blank(record, self.packing))
            except Exception as error:
                error.add_note(f"row {record.row} ({record.where}): {record.smiles!r}")
                raise
        return Featurized(self.packing.pack(molecules), tuple(errors))


def featurize_record(
    featurizer: Featurizer, record: RawMolecule, num_tasks: int | None = None
) -> MoleculeData:
    """Turns one record into a molecule with its targets, text and row.

    Args:
        featurizer: Describes the molecule.
        record: The record; a mol block is used where there is no SMILES.
        num_tasks: Number of targets wanted; None for as many as there are.

    Returns:
        The molecule. Of a mol block the canonical SMILES is kept, whose atoms may stand in
        another order than the rows.

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
    """Featurizes a stream of records in order, some at a time.

    Memory does not grow with the stream: records are read only a little ahead of the processes.

    Args:
        records: The records.
        featurizer: Describes one molecule.
        num_tasks: Number of targets to keep of every record.
        bad: ``"skip"`` or ``"blank"``; with ``"raise"`` a piece ends at the first bad record,
            which is then the only one in its ``errors``.
        num_workers: Processes; 0 works in this one.

    Yields:
        What became of the next records.

    Raises:
        RuntimeError: If a process died.
        ValueError: If there is no such policy.

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
    """Says how the molecules of a featurizer are packed."""
    return AtomPacking(
        featurizer.atom_kinds, featurizer.atom_names, num_tasks, len(featurizer.descriptor_names)
    )


def in_chunks(records: Iterable[RawMolecule], size: int) -> Iterator[list[RawMolecule]]:
    """Cuts a stream into lists."""
    stream = iter(records)
    while chunk := list(islice(stream, size)):
        yield chunk


class Workers:
    """Runs chunks of records in processes and hands the results back in order."""

    def __init__(
        self, featurizer: Featurizer, packing: AtomPacking, bad: str, num_workers: int
    ) -> None:
        self._job = _Job(featurizer, packing, bad)
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def run(
        self, chunks: Iterable[tuple[Any, Sequence[RawMolecule]]]
    ) -> Iterator[tuple[Any, Featurized]]:
        """Featurizes chunks."""
        if not self._num_workers:
            for mark, records in chunks:
                yield mark, self._job.run(records)
            return
        waiting: deque[tuple[Any, str, Future[Featurized]]] = deque()
        for mark, records in chunks:
            span = f"rows {records[0].row} to {records[-1].row}"
            waiting.append((mark, span, self._submit(records)))
            if len(waiting) > _WAITING * self._num_workers:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())

    def _submit(self, records: Sequence[RawMolecule]) -> "Future[Featurized]":
        if self._pool is None:
            # Started afresh: a process copied from one that runs threads may hang.
            self._pool = ProcessPoolExecutor(
                self._num_workers, multiprocessing.get_context("spawn"), _begin, (self._job,)
            )
        # No process looks at the other columns of a file, of which there may be hundreds.
        sent = [
            replace(record, extra={}, source=((), ()))
            if record.extra or record.source[0]
            else record
            for record in records
        ]
        return self._pool.submit(_featurize_chunk, sent)

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
        raise mismatch(
            RuntimeError,
            "featurize: a process died",
            "processes that live until the end",
            error,
            where=f"{span}, or a few hundred rows after",
            hint="num_workers=0 to see why; a script that starts processes needs "
            '`if __name__ == "__main__":`; finished shards are kept',
        ) from error


def _bad_molecule(record: RawMolecule, error: MoleculeError) -> BadMolecule:
    return BadMolecule(record.row, record.where, record.smiles, error.reason, error.atom)


def _blank(record: RawMolecule, packing: AtomPacking) -> MoleculeData:
    targets = torch.full((1, packing.num_tasks), torch.nan)
    whole = torch.full((1, packing.num_descriptors), torch.nan)
    return MoleculeData(
        torch.zeros(0, packing.width),
        torch.zeros(0, dtype=torch.uint8),
        y=targets if packing.num_tasks else None,
        descriptor=whole if packing.num_descriptors else None,
        smiles=(record.smiles or "").strip(),
        row=record.row,
    )


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
) -> MoleculeStore:
    """Featurizes a stream of records into a folder of shards.

    Each shard appears under its name only when it is complete, and remembers which records and
    which featurizer it was made from. Shards that are there already and fit are kept; after an
    interruption, whatever its cause, the same call goes on behind the last of them. The header,
    without which a folder is no store, is written last. Meanwhile the folder is locked.

    Args:
        folder: Where the shards go; None keeps them in memory.
        records: The records, read once, a shard at a time.
        featurizer: Describes one molecule.
        task_names: Names of the targets of every record.
        options: Policy for bad rows, processes, size of the shards.
        name: Who asks, for messages and the progress bar.
        wait: Whether to wait for another process that fills the folder, rather than to refuse.

    Returns:
        The store. Its folder also holds ``errors.csv`` with the rows that could not be used.

    Raises:
        OSError: If the folder cannot be written, or another process is filling it.
        RuntimeError: If a process died.
        ValueError: At the first bad row under the policy ``"raise"``, if no row is left, or if
            there is a finished store of another featurizer in the folder.

    Example:
        >>> from pyg_dynbatch.data import MoleculeFeaturizer
        >>> records = [RawMolecule(i, f"line {i}", text) for i, text in enumerate(["CO", "C"])]
        >>> options = FeaturizeOptions(progress=False)
        >>> store = build_store(None, records, MoleculeFeaturizer(), options=options)
        >>> len(store), store.num_atoms().tolist()
        (2, [2, 1])
    """
    with nullcontext() if folder is None else locked_folder(folder, wait):
        builder = _Builder(folder, featurizer, tuple(task_names), options, name)
        done = Progress(f"{name}: featurizing", "molecules", shown=options.progress)
        with (
            done,
            Workers(featurizer, builder.packing, options.bad, options.num_workers) as workers,
        ):
            for piece, result in workers.run(builder.pieces(records, done)):
                builder.take(piece, result)
                done.update(piece.num_records)
        return builder.finish()


class _Piece(NamedTuple):
    """Tells which part of which shard a chunk of records is."""

    shard: int
    digest: str
    num_records: int
    last: bool


class _Builder:
    """Knows which shards there are, and writes those that are missing."""

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
        self._waiting: list[Featurized] = []
        self._shards: dict[int, Shard] = {}
        self._digests: dict[int, str] = {}
        self._records = 0
        self._refuse_another_store()

    def _refuse_another_store(self) -> None:
        if self.folder is None or self.options.force:
            return
        try:
            found = read_header(self.folder)
        except (FileNotFoundError, ValueError):
            return  # not finished, or damaged: made anew
        if found["featurizer_digest"] != self._header["featurizer_digest"]:
            raise mismatch(
                ValueError,
                f"{self.name}: another featurizer made what is in the folder",
                f"featurizer {self._header['featurizer_digest']}",
                f"featurizer {found['featurizer_digest']}",
                where=self.folder,
                hint="another folder, or force=True (featurize: --force) to replace it",
            )

    def pieces(
        self, records: Iterable[RawMolecule], done: Progress
    ) -> Iterator[tuple[_Piece, list[RawMolecule]]]:
        """Reads the records of one shard after another and passes on those still to be done."""
        for number, block in enumerate(in_chunks(records, self.options.shard_size)):
            self._records += len(block)
            digest = self._digests[number] = self._digest_of(block)
            kept = self._kept(number, digest)
            if kept is not None:
                self._shards[number] = kept
                done.update(len(block))
                continue
            for first in range(0, len(block), CHUNK):
                part = block[first : first + CHUNK]
                yield _Piece(number, digest, len(part), first + CHUNK >= len(block)), part

    def take(self, piece: _Piece, result: Featurized) -> None:
        """Takes the next result; writes the shard when it is complete."""
        if result.errors and self.options.bad == "raise":
            raise ValueError(result.errors[0].complaint(self.name))
        self._waiting.append(result)
        if not piece.last:
            return
        arrays = join_packs([one.arrays for one in self._waiting])
        errors = [error.as_dict() for one in self._waiting for error in one.errors]
        molecules = len(arrays["row"])
        facts = {"molecules": molecules, "digest": piece.digest, "errors": errors}
        facts["bad"] = self.options.bad
        if self.folder is None:
            self._shards[piece.shard] = Shard(shard_bytes(arrays, facts))
        else:
            # While shards change, the folder is no finished store. Where there is no folder to
            # write to, writing the shard says so.
            with suppress(FileNotFoundError, NotADirectoryError):
                (self.folder / HEADER).unlink()
            path = write_shard(self.folder / shard_name(piece.shard), arrays, facts)
            self._shards[piece.shard] = Shard(path)
        self._waiting = []

    def finish(self) -> MoleculeStore:
        """Writes the header and the report of bad rows."""
        numbers = sorted(self._shards)
        shards = [self._shards[number] for number in numbers]
        counts = [shard.facts["molecules"] for shard in shards]
        errors = [BadMolecule(**error) for shard in shards for error in shard.facts["errors"]]
        if not self._records or len(errors) == self._records:
            raise mismatch(
                ValueError,
                f"{self.name}: there is no molecule",
                "one or more",
                summary_of(errors, self._records) if errors else "no records",
            )
        if errors:
            print(f"{self.name}: {summary_of(errors, self._records)}", file=sys.stderr)
        header = {**self._header, "shards": counts, "records": self._records}
        header["digests"] = [self._digests[number] for number in numbers]
        header["num_errors"] = len(errors)
        if self.folder is not None:
            # Of an earlier, longer run; nobody reads them, but they count in the folder's size.
            kept = {shard_name(number) for number in self._shards}
            for path in self.folder.glob("shard-*.bin"):
                if path.name not in kept:
                    path.unlink()
            write_error_report(self.folder / ERRORS, errors)
            # Read anew: where folders cannot be locked, another process may have written here.
            shards = [Shard(self.folder / shard_name(number)) for number in numbers]
            MoleculeStore(header, shards).check()
            write_header(self.folder, header)
        return MoleculeStore(header, shards)

    def _kept(self, number: int, digest: str) -> Shard | None:
        """Finds the shard of an earlier run, if it is whole and was made from the same."""
        if self.folder is None or self.options.force:
            return None
        path = self.folder / shard_name(number)
        if not path.is_file():
            return None
        try:
            shard = Shard(path).check()
        except ValueError:
            # Damaged: made again, in the same place.
            return None
        facts = shard.facts
        same_policy = facts["bad"] == self.options.bad or not facts["errors"]
        return shard if facts["digest"] == digest and same_policy else None

    def _digest_of(self, block: Sequence[RawMolecule]) -> str:
        """Hashes all that the content of a shard depends on, but for the policy."""
        key: Mapping[str, Any] = {
            "format": FORMAT,
            "featurizer": self._header["featurizer_digest"],
            "tasks": self._header["task_names"],
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode())
        for record in block:
            parts = (record.row, record.smiles, record.block, record.targets)
            digest.update(repr(parts).encode())
        return digest.hexdigest()
