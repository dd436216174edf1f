"""Make a store of packed molecules, shard by shard, going on where an earlier run has stopped."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyg_dynbatch
from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import locked_folder
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.datasets.atom_packing import join_packs
from pyg_dynbatch.datasets.bad_rows import BadMolecule, summary_of, write_error_report
from pyg_dynbatch.datasets.featurize import (
    CHUNK,
    Featurized,
    FeaturizeOptions,
    Featurizer,
    Workers,
    in_chunks,
    packing_of,
)
from pyg_dynbatch.datasets.shard import Shard, shard_bytes, write_shard
from pyg_dynbatch.datasets.store import (
    FORMAT,
    HEADER,
    MoleculeStore,
    read_header,
    shard_name,
    write_header,
)
from pyg_dynbatch.featurizers.molecule_files import RawMolecule

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
        >>> from pyg_dynbatch.featurizers import MoleculeFeaturizer
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
            raise ValueError(
                mismatch(
                    f"{self.name}: another featurizer made what is in the folder",
                    expected=f"featurizer {self._header['featurizer_digest']}",
                    got=f"featurizer {found['featurizer_digest']}",
                    where=self.folder,
                    mend="another folder, or force=True (featurize: --force) to replace it",
                )
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
            raise ValueError(
                mismatch(
                    f"{self.name}: there is no molecule",
                    expected="one or more",
                    got=summary_of(errors, self._records) if errors else "no records",
                )
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
