"""Turn a stream of records into packed molecules, in several processes, in order."""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pair_table import PairTable
from pyg_dynbatch.data.molecule import MoleculeData
from pyg_dynbatch.datasets.atom_packing import Arrays, AtomPacking
from pyg_dynbatch.datasets.bad_rows import BadMolecule, check_policy
from pyg_dynbatch.featurizers.molecule_files import RawMolecule
from pyg_dynbatch.featurizers.scaffold import canonical_smiles
from pyg_dynbatch.featurizers.smiles import MoleculeError, parse_mol_block

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
                raise ValueError(
                    mismatch(
                        f"FeaturizeOptions: {name} is out of range",
                        expected=f"{lowest} or more",
                        got=getattr(self, name),
                    )
                )


class Featurized(NamedTuple):
    """Holds what became of some consecutive records.

    Attributes:
        arrays: The packed molecules.
        errors: The records that gave none.
    """

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
        >>> from pyg_dynbatch.featurizers import MoleculeFeaturizer
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
        >>> from pyg_dynbatch.featurizers import MoleculeFeaturizer
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
    """Says how the molecules of a featurizer are packed.

    Args:
        featurizer: Describes one molecule.
        num_tasks: Number of targets to keep.

    Returns:
        The packing.
    """
    return AtomPacking(
        featurizer.atom_kinds,
        featurizer.atom_names,
        num_tasks,
        len(featurizer.descriptor_names),
    )


def in_chunks(records: Iterable[RawMolecule], size: int) -> Iterator[list[RawMolecule]]:
    """Cuts a stream into lists.

    Args:
        records: The stream.
        size: Length of every list but the last.

    Yields:
        The lists.
    """
    stream = iter(records)
    while chunk := list(islice(stream, size)):
        yield chunk


class Workers:
    """Runs chunks of records in processes and hands the results back in order.

    Args:
        featurizer: Describes one molecule.
        packing: Packs them.
        bad: The policy for bad records.
        num_workers: Processes; 0 works in this one.
    """

    def __init__(
        self, featurizer: Featurizer, packing: AtomPacking, bad: str, num_workers: int
    ) -> None:
        self._job = _Job(featurizer, packing, bad)
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def run(
        self, chunks: Iterable[tuple[Any, Sequence[RawMolecule]]]
    ) -> Iterator[tuple[Any, Featurized]]:
        """Featurizes chunks.

        Args:
            chunks: Each with anything to be handed back beside its result.

        Yields:
            For each chunk what came with it, and the result.

        Raises:
            RuntimeError: If a process died.
        """
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
        raise RuntimeError(
            mismatch(
                "featurize: a process died",
                expected="processes that live until the end",
                got=error,
                where=f"{span}, or a few hundred rows after",
                mend="num_workers=0 to see why; a script that starts processes needs "
                '`if __name__ == "__main__":`; finished shards are kept',
            )
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
