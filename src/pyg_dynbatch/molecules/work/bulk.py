"""Featurize and predict a large file in shards, on any machines in any order, and merge them."""

import json
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

import pyg_dynbatch
from pyg_dynbatch import files
from pyg_dynbatch.clusters import compute
from pyg_dynbatch.console import check_outputs
from pyg_dynbatch.core.errors import checked_count, mismatch
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import rdkit_version
from pyg_dynbatch.molecules.files import build, store
from pyg_dynbatch.molecules.files.build import CHUNK, ERRORS, FeaturizeOptions
from pyg_dynbatch.molecules.files.read import read_molecules
from pyg_dynbatch.molecules.files.store import HEADER, Featurizer, PackedMolecules
from pyg_dynbatch.molecules.work.predict import MoleculePredictor, PredictionFiles, predict_file

MANIFEST = "manifest.json"
PREDICTIONS = "predictions.csv"
FORMAT = "pyg_dynbatch.shard.1"
_TABLES = (PREDICTIONS, ERRORS)
_FOLDERS = re.compile(r"shard-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Shard:
    """One of several equal shares of the blocks of a file.

    Args:
        number: Number of the shard, from 0.
        count: Number of shards.

    Raises:
        ValueError: If the number is not less than the count.

    Example:
        >>> shard = Shard.parse("1/3")
        >>> shard.folder, [row for row in range(12) if shard.has(row, block_size=2)]
        ('shard-0001-of-0003', [2, 3, 8, 9])
    """

    number: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        """Check the number."""
        if not 0 <= self.number < self.count:
            wanted = f"i/n with i from 0 to n-1, such as 0/{max(1, self.count)}"
            hint = f"sbatch --array=0-{max(1, self.count) - 1}, and i = $SLURM_ARRAY_TASK_ID"
            raise mismatch(ValueError, "the shard is out of range", wanted, self, hint=hint)

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read ``"i/n"``."""
        if not (found := re.fullmatch(r"(-?\d+)/(\d+)", text)):
            wanted = "i/n, such as 0/8 for the first of 8"
            raise mismatch(ValueError, "the shard cannot be read", wanted, repr(text))
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        """Name of the folder of the shard."""
        return f"shard-{self.number:04d}-of-{self.count:04d}"

    def has(self, row: int, block_size: int) -> bool:
        """Return whether the shard has a row of the file: its blocks are dealt like cards."""
        return row // block_size % self.count == self.number


@dataclass(frozen=True)
class _Job(ABC):
    """Description of work on a file, which can be sent to any process."""

    input: str | Path
    folder: str | Path
    _: KW_ONLY
    reading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the input."""
        if str(self.input) == "-":
            what, hint = "shards: standard input cannot be sharded", "save it to a file first"
            raise mismatch(ValueError, what, "a file, which can be read again", "-", hint=hint)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Plain values on which the results depend; all shards of a job have the same."""
        facts = {
            "work": type(self).__name__,
            "input": files.sha256_of(files.existing(self.input, "a file of molecules")),
            "reading": {name: value for name, value in self.reading.items() if value},
            "pyg_dynbatch": pyg_dynbatch.__version__,
            "rdkit": rdkit_version(),
        }
        # As read from a manifest, in which tuples are lists.
        plain: dict[str, Any] = json.loads(json.dumps(facts | self._facts()))
        return plain

    def run(self, shard: Shard) -> Path:
        """Process a shard unless it is finished; return its folder."""
        return self.prepare()(shard)

    def prepare(self) -> Callable[[Shard], Path]:
        """Return a function like :meth:`run` that loads what shards share only once."""
        return replace(self)._run  # of a copy, which keeps it as long as the function is used

    def absolute(self) -> "_Job":
        """Return a job whose files are found from the working folder of any process."""
        return replace(self, input=Path(self.input).absolute(), folder=Path(self.folder).absolute())

    @property
    def _forced(self) -> bool:
        """Whether to do the work again."""
        return False

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return the part of the identity that not all jobs have."""

    @abstractmethod
    def _fill(self, folder: Path, shard: Shard) -> dict[str, int]:
        """Write the files of a shard; count the records of the file, the shard, and bad ones."""

    def _run(self, shard: Shard) -> Path:
        identity = self._identity
        folder, what = Path(self.folder, shard.folder), f"shard {shard}"
        for parent in (folder.parent, folder):
            check_outputs(what, [parent / name for name in (HEADER, *_TABLES)], [self.input])
        with files.locked_folder(folder):
            manifest = None if self._forced else _read_manifest(folder)
            if manifest is not None:
                different = f"{what}: its folder is for different work"
                _check_same(different, identity, manifest["identity"], folder)
                if manifest["files"]:
                    print(f"{what}: finished before, nothing to do", file=sys.stderr)
                    return folder
            # Without files, it says that the folder is for this work, which is not finished.
            facts = {"format": FORMAT, "identity": identity, "shard": str(shard)}
            write = partial(store.write_checked, folder / MANIFEST, "manifest")
            write({**facts, "files": {}})
            try:
                counts = self._fill(folder, shard)
            except Exception:  # not if it is killed: then the same command continues
                (folder / MANIFEST).unlink(missing_ok=True)
                raise
            if counts["bad"] == counts["shard"]:
                text = "it has {shard:,} of {file:,} records, {bad:,} bad".format_map(counts)
                print(f"{what}: no molecules: {text}; see --block-size", file=sys.stderr)
            written = (path for path in sorted(folder.glob("[!.]*")) if path.name != MANIFEST)
            sums = {path.name: files.sha256_of(path) for path in written if path.is_file()}
            write({**facts, "records": counts, "files": sums})
        return folder


@dataclass(frozen=True)
class FeaturizeJob(_Job):
    r"""The work of ``featurize`` on a file; any process can run any shard.

    Args:
        input: File of molecules.
        folder: Folder of the job, which gets a folder per shard.
        reading: Options of ``read_molecules``, such as ``{"target_columns": ["logP"]}``.
        featurizer: Converts one molecule; the default is ``MoleculeFeaturizer()``.
        options: Policy for bad rows, number of processes, size of the blocks.

    Raises:
        ValueError: If the input is standard input.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> size = (folder / "mine.smi").write_text("CO\nC\nCCO\n")
        >>> options = FeaturizeOptions(block_size=2, progress=False)
        >>> job = FeaturizeJob(folder / "mine.smi", folder / "packed", options=options)
        >>> [PackedMolecules(job.run(Shard(i, 2))).texts() for i in (1, 0)]
        [['CCO'], ['CO', 'C']]
        >>> PackedMolecules(merge(folder / "packed")).texts()
        ['CO', 'C', 'CCO']
    """

    _: KW_ONLY
    featurizer: Featurizer = field(default_factory=MoleculeFeaturizer)
    options: FeaturizeOptions = FeaturizeOptions()

    @property
    def _forced(self) -> bool:
        return self.options.force

    def _facts(self) -> dict[str, Any]:
        options = {"block_size": self.options.block_size, "bad": self.options.bad}
        return {**options, "featurizer": self.featurizer.digest}

    def _fill(self, folder: Path, shard: Shard) -> dict[str, int]:
        # Merging would not replace the store of a different featurizer: say so before the work.
        if (folder.parent / HEADER).is_file() and not self.options.force:
            header = store.read_header(folder.parent)
            store.check_featurizer(header, self.featurizer, folder.parent)
        records = read_molecules(self.input, **self.reading)
        records.wanted = partial(shard.has, block_size=self.options.block_size)
        targets = tuple(self.reading.get("target_columns") or ())
        given = (targets, self.options, f"featurize {shard}")
        builder = build.StoreBuilder(folder, self.featurizer, *given)
        builder.build(records)
        builder.finish(may_be_empty=True)
        return {"file": records.total, "shard": builder.total, "bad": builder.bad}


@dataclass(frozen=True)
class PredictJob(_Job):
    """The work of ``predict`` on a file of molecules; any process can run any shard.

    Args:
        input: File of molecules.
        folder: Folder of the job, which gets a folder per shard.
        checkpoints: Paths of checkpoints; several are averaged.
        reading: Options of ``read_molecules``, such as ``{"smiles_column": "structure"}``.
        narrow: Whether to omit the columns of the input.
        dropout: Passes with dropout; 0 for one pass without.
        max_pairs: Maximum number of pairs of atoms per batch.
        max_atoms: Maximum number of atoms of a molecule; as in training by default.
        device: Where to compute.
        fingerprints: Name of a file of fingerprints, ``.npy`` or ``.csv``; None for none.
        num_workers: Number of processes that read molecules.
        block_size: Records dealt to shards together, a multiple of 128.

    Raises:
        ValueError: If the input is standard input, or an option is out of range.

    Example:
        >>> PredictJob("mine.csv", "out", ["best.ckpt"], fingerprints="prints.npy").block_size
        4096
    """

    checkpoints: Sequence[str | Path] = field(kw_only=False)
    _: KW_ONLY
    narrow: bool = False
    dropout: int = 0
    max_pairs: int = 200_000
    max_atoms: int | None = None
    device: str = "cpu"
    fingerprints: str | None = None
    num_workers: int = 0
    block_size: int = 4_096

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        # Batches are formed per chunk: with whole chunks, they are those of one process.
        if self.block_size < 1 or self.block_size % CHUNK:
            what = "PredictJob: the block size is out of range"
            wanted = f"a multiple of {CHUNK}, the records that are read at a time"
            raise mismatch(ValueError, what, wanted, self.block_size, hint="--block-size 4096")
        name = self.fingerprints
        if name is not None and (Path(name).name != name or name in _TABLES):
            what = "PredictJob: the fingerprints of a shard go to its folder"
            raise mismatch(ValueError, what, "the name of a file, such as prints.npy", name)

    def absolute(self) -> _Job:
        """Return a job whose files are found from the working folder of any process."""
        job = replace(self, checkpoints=[Path(path).absolute() for path in self.checkpoints])
        return super(PredictJob, job).absolute()

    def _facts(self) -> dict[str, Any]:
        names = ("narrow", "dropout", "max_pairs", "max_atoms", "fingerprints", "block_size")
        checkpoints = [files.existing(path, "a checkpoint") for path in self.checkpoints]
        return {
            **{name: getattr(self, name) for name in names},
            "checkpoints": list(map(files.sha256_of, checkpoints)),
            "device": self.device.partition(":")[0],
        }

    @cached_property
    def _predictor(self) -> MoleculePredictor:
        options = (self.device, self.dropout, self.max_pairs, self.max_atoms)
        return MoleculePredictor(self.checkpoints, *options)

    def _fill(self, folder: Path, shard: Shard) -> dict[str, int]:
        prints = None if self.fingerprints is None else str(folder / self.fingerprints)
        table, errors = (str(folder / name) for name in _TABLES)
        written = PredictionFiles(table, prints, self._identity, errors)
        read = partial(read_molecules, self.input, **self.reading)
        records = read(keep_source=not self.narrow)
        records.wanted = partial(shard.has, block_size=self.block_size)
        given = (str(self.input), self.narrow, self.num_workers)
        predict_file(read, self._predictor, written, *given, records, f"shard {shard}: ")
        return {"file": records.total, "shard": written.rows, "bad": written.bad}


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a shard; its ``files`` are empty until the shard is finished."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    hint = f"delete {folder} and run the shard again"
    return store.read_checked(path, "manifest", FORMAT, hint)


def _check_same(
    what: str, wanted: Mapping[str, Any], found: Mapping[str, Any], where: Path
) -> None:
    """Raise an error that names all values in which a shard differs."""
    names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    if names:
        expected, got = (
            "; ".join(f"{name}: {json.dumps(values.get(name))}" for name in names)
            for values in (wanted, found)
        )
        hint = f"another folder; or delete {where}"
        if wanted["work"] == FeaturizeJob.__name__:
            hint += "; or, to featurize it again, --force"
        raise mismatch(ValueError, what, expected, got, where=where, hint=hint)


def featurize(
    input: str | Path, folder: str | Path, *, shards: int = 1, client: Any = None, **options: Any
) -> PackedMolecules:
    r"""Featurize a file in shards, and merge them.

    Args:
        input: File of molecules.
        folder: Where the packed molecules go.
        shards: Number of shards.
        client: A ``dask.distributed.Client``, or the module ``ray``, whose workers can read and
            write the same paths; None for this process, shard by shard.
        **options: Those of :class:`FeaturizeJob`.

    Raises:
        OSError: If a folder cannot be written.
        ValueError: If the input cannot be used, or no record is a molecule.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> size = (root / "mine.smi").write_text("CO\nC\n")
        >>> options = FeaturizeOptions(block_size=1, progress=False)
        >>> featurize(root / "mine.smi", root / "packed", shards=2, options=options).texts()
        ['CO', 'C']
    """
    job = FeaturizeJob(input, folder, **options)
    return PackedMolecules(_run_all(job, shards, client, num_workers=job.options.num_workers))


def predict(
    input: str | Path,
    folder: str | Path,
    checkpoints: Sequence[str | Path],
    *,
    shards: int = 1,
    client: Any = None,
    **options: Any,
) -> Path:
    """Predict a file of molecules in shards, merge them, and return the path of the table.

    Args:
        input: File of molecules.
        folder: Where ``predictions.csv`` goes.
        checkpoints: Paths of checkpoints; several are averaged.
        shards: Number of shards.
        client: A ``dask.distributed.Client``, or the module ``ray``, whose workers can read and
            write the same paths; None for this process, shard by shard.
        **options: Those of :class:`PredictJob`.

    Raises:
        OSError: If a folder cannot be written.
        ValueError: If the input or a checkpoint cannot be used, or no record is a molecule.

    Example:
        >>> predict("-", "out", ["best.ckpt"], shards=8)
        Traceback (most recent call last):
        ValueError: shards: standard input cannot be sharded.
          expected: a file, which can be read again
          got:      -
          try:      save it to a file first
    """
    job = PredictJob(input, folder, checkpoints, **options)
    needs: Any = {"gpu": "cuda" in job.device, "num_workers": job.num_workers}
    return _run_all(job, shards, client, **needs) / PREDICTIONS


def _run_all(job: _Job, shards: int, client: Any, **needs: Any) -> Path:
    """Run all shards of a job, in this process or by a client, and merge them."""
    every = [Shard(number, shards) for number in range(checked_count("shards", shards))]
    work = (job if client is None else job.absolute()).prepare()
    list(compute(work, every, client, what="shard", **needs))
    return merge(job.folder)


def merge(folder: str | Path) -> Path:
    r"""Join the finished shards of a folder to what one process would have written.

    The packed molecules, or ``predictions.csv``, go to the folder itself. All shards are checked
    before: they must be complete, unchanged, and of the same work. They can be deleted afterwards.

    Args:
        folder: Folder of the job, which is returned.

    Raises:
        OSError: If the folder does not exist or cannot be written.
        ValueError: If shards are missing, changed or of different work, or no record is a molecule.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> size = (folder / "mine.smi").write_text("CO\nC\n")
        >>> job = FeaturizeJob(folder / "mine.smi", folder / "packed")
        >>> PackedMolecules(merge(job.run(Shard(0, 1)).parent)).texts()
        ['CO', 'C']
    """
    folder = Path(folder)
    names = (_FOLDERS.fullmatch(path.name) for path in folder.glob("shard-*"))
    found = Counter(int(name.group(2)) for name in names if name)
    if not found:
        what, wanted = "merge: the folder has no shards", "folders such as shard-0000-of-0008"
        hint = "pyg-dynbatch featurize --shard 0/8"
        raise mismatch(ValueError, what, wanted, where=folder, hint=hint)
    if len(found) > 1:
        what = "merge: the folder has shards of different counts"
        got = "; ".join(f"{number} of n = {n}" for n, number in sorted(found.items()))
        hint = "delete the shards of all counts but one"
        raise mismatch(ValueError, what, "one count", got, where=folder, hint=hint)
    shards = [Shard(number, *found) for number in range(*found)]
    with files.locked_folder(folder):
        manifests = _finished(folder, shards)
        predicted = manifests[0]["identity"]["work"] == PredictJob.__name__
        join = _join_tables if predicted else _join_stores
        join(folder, [folder / shard.folder for shard in shards], manifests)
    print(f"merged: {folder}; its shard-* folders can be deleted", file=sys.stderr)
    return folder


def _finished(folder: Path, shards: Sequence[Shard]) -> list[dict[str, Any]]:
    """Read the manifests of all shards; check that they are complete, unchanged, of one job."""
    read = [_read_manifest(folder / shard.folder) for shard in shards]
    manifests = [one for one in read if one and one["files"]]
    if missing := [i for i, one in enumerate(read) if not (one and one["files"])]:
        listed = _ranges(missing)
        what, got = f"merge: {len(missing):,} of {len(shards):,} shards are missing", f"no {listed}"
        hint = f"the same command with --shard i/{len(shards)}, i = {listed} "
        hint += f"(sbatch --array={listed})"
        raise mismatch(ValueError, what, "all of them, finished", got, where=folder, hint=hint)
    first, *_ = facts = [
        {**one["identity"], "records in the file": one["records"]["file"], "shard": one["shard"]}
        for one in manifests
    ]
    for shard, manifest, found in zip(shards, manifests, facts, strict=True):
        path = folder / shard.folder
        what = f"merge: shard {shard} is of different work than shard {shards[0]}"
        _check_same(what, {**first, "shard": str(shard)}, found, path)
        hint = f"delete {path} and run the shard again"
        for name, sha256 in manifest["files"].items():
            files.existing(path / name, f"a file of shard {shard}")
            files.check_sha256(path / name, sha256, f"merge: shard {shard}", hint)
    return manifests


def _ranges(numbers: Sequence[int]) -> str:
    """Write increasing numbers as in ``1,4-6``."""
    known = set(numbers)
    starts = [n for n in numbers if n - 1 not in known]
    spans = zip(starts, [n for n in numbers if n + 1 not in known], strict=True)
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _blocks(manifests: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the shard, its part, the first row and the number of rows of each block of the file."""
    total, size = manifests[0]["records"]["file"], manifests[0]["identity"]["block_size"]
    for block, row in enumerate(range(0, total, size)):
        part, shard = divmod(block, len(manifests))
        yield shard, part, row, min(size, total - row)


def _join_stores(
    folder: Path, paths: Sequence[Path], manifests: Sequence[Mapping[str, Any]]
) -> None:
    stores = [PackedMolecules(path) for path in paths]
    blocks = [(stores[shard], part) for shard, part, _, _ in _blocks(manifests)]
    parts = [packed.parts[number] for packed, number in blocks]
    build.check_parts("merge", parts, manifests[0]["records"]["file"])
    header = {**stores[0].header, "parts": parts}
    names = header.pop("columns")
    del header["build"]
    readers = [partial(packed.part, number) for packed, number in blocks]
    build.finish_store(folder, readers, names, header, build.valid_store(folder))


def _join_tables(
    folder: Path, paths: Sequence[Path], manifests: Sequence[Mapping[str, Any]]
) -> None:
    for name in manifests[0]["files"]:
        tables = [path / name for path in paths]
        for left in folder.glob(f".{name}.*.tmp"):  # by a merge that was killed
            left.unlink()
        if name.endswith(".npy"):
            write = partial(store.write_npy, _rows(tables, manifests))
            files.write_atomically(folder / name, write)
            continue
        with files.atomic_file(folder / name, "wb") as joined:
            # The names of the columns, of the first shard.
            ends = [_copy(path, 0, 1, None if i else joined) for i, path in enumerate(tables)]
            for shard, _, row, count in _blocks(manifests):
                end = row + count if name == ERRORS else None
                ends[shard] = _copy(tables[shard], ends[shard], count, joined, end)
    total, bad = (sum(one["records"][key] for one in manifests) for key in ("shard", "bad"))
    print(f"merge: {total - bad:,} of {total:,} records predicted", file=sys.stderr)
    if bad == total:
        what, got = "merge: no record is a molecule", f"{bad:,} bad records"
        raise mismatch(ValueError, what, "at least one", got, where=folder / PREDICTIONS)


def _rows(tables: Sequence[Path], manifests: Sequence[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    """Yield the fingerprints of each block."""
    size = manifests[0]["identity"]["block_size"]
    for shard, part, _, count in _blocks(manifests):
        yield np.load(tables[shard], mmap_mode="r")[part * size :][:count]


def _copy(path: Path, start: int, count: int, target: Any, end: int | None = None) -> int:
    """Copy records of a CSV file from a position on, and return the position after them.

    At most `count` are copied; if `end` is given, none whose row, its first cell, is `end` or more.
    """
    with path.open("rb") as file:
        file.seek(start)
        while count:
            line = file.readline()
            if end is not None and (not line or int(line.partition(b",")[0]) >= end):
                break
            record = [line]
            # Quotes come in pairs, also those within a cell; a quoted cell may hold line ends.
            while record[-1] and sum(each.count(b'"') for each in record) % 2:
                record.append(file.readline())
            start += sum(map(len, record))
            if target is not None:
                target.writelines(record)
            count -= 1
    return start
