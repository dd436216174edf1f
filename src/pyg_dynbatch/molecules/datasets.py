"""Data sets of molecules: your own files, MoleculeNet, NCI."""

import csv
import gzip
import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch_geometric.datasets import MoleculeNet as PyGMoleculeNet
from tqdm import tqdm

from pyg_dynbatch.columns import Columns, Segments
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.dataset import ColumnsDataset
from pyg_dynbatch.files import download_verified, open_lines, sha256_of
from pyg_dynbatch.molecules.chemistry import MoleculeError, rdkit_data_folder
from pyg_dynbatch.molecules.data import MoleculeArrays, MoleculeData
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.processes import Processes
from pyg_dynbatch.molecules.read import BadMolecule, RawMolecule, TableOptions, read_molecules
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind

# Raise it when the meaning of a field changes: processed files are then made again.
_FORMAT = "molecules.6"

RECORDS_PER_PART = 10_000
"""Records that are written together, so that a killed run goes on after them."""

_CHUNK = 64  # records that are featurized, and sent to a process, at a time


class MoleculeDataset(ColumnsDataset):
    """Base of data sets of molecules: subclasses name their records.

    Processing writes parts of 10,000 records, and joins them at the end: a run that was killed goes
    on after the last part.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None keeps the molecules in memory.
        name: Name of the processed file.
        key: All that the records depend on, as plain values.
        targets: Names of the properties of a record.
        kind_of_targets: ``"regression"``, ``"binary"`` or ``"multiclass"``.
        featurizer: Describes a molecule; None for ``MoleculeFeaturizer()``.
        bad: What to do with records whose text is not a molecule: ``"raise"`` an error at the first
            one, or ``"skip"`` and list them in ``errors``. A label that is not of its kind is an
            error in any case: binary ones are 0 or 1, classes whole numbers from 0.
        processes: How many processes featurize; by default one per core, if it takes more than two
            seconds and the script has ``if __name__ == "__main__":``. 0 works in this one.
        **options: ``transform``, ``pre_transform`` and ``force_reload`` of PyG's data sets.

    Raises:
        ValueError: If a record is not a molecule, unless bad ones are skipped, or a label is not of
            its kind.
        RuntimeError: If a process has died.
    """

    kind = MoleculeData

    def __init__(
        self,
        root: str | Path | None,
        name: str,
        key: dict[str, Any],
        targets: Sequence[str],
        kind_of_targets: PropertyKind = "regression",
        *,
        featurizer: MoleculeFeaturizer | None = None,
        bad: str = "skip",
        processes: int | None = None,
        **options: Any,
    ) -> None:
        checked_choice(f"{type(self).__name__}: bad", bad, ("raise", "skip"))
        self.target_names = tuple(targets)
        self.kind_of_targets: PropertyKind = kind_of_targets
        self.featurizer = featurizer or MoleculeFeaturizer()
        self._bad = bad
        self._processes = processes
        content = {
            "format": _FORMAT,
            "targets": list(targets),
            "featurizer": self.featurizer.spec(),
            "bad": bad,
        }
        super().__init__(root, name, {**key, **content}, **options)

    @abstractmethod
    def records(self) -> Iterator[RawMolecule]:
        """Return all records, as text."""

    def build(self) -> dict[str, Columns]:
        """Featurize all records in memory."""
        with Processes(self._processes) as processes, self._progress() as progress:
            parts = [
                self._featurized(records, processes, progress) for records in self._parts(progress)
            ]
        return {self.name: self._joined(parts)}

    def process(self) -> None:
        """Featurize all records part by part, and join the parts."""
        folder = Path(self.processed_dir)
        # With the hash of all that the content depends on, so that other options have other parts.
        name = self.processed_file_names
        if self.force_reload:
            for file in folder.glob(f"{name}.part*"):
                file.unlink()

        files: list[Path] = []
        with Processes(self._processes) as processes, self._progress() as progress:
            for records in self._parts(progress):
                file = folder / f"{name}.part{len(files)}of{RECORDS_PER_PART}"
                if file.is_file():
                    progress.update(len(records))
                else:
                    self._featurized(records, processes, progress).save(file)
                files.append(file)

        parts = [Columns.load(file, MoleculeData) for file in files]
        self._joined(parts).save(folder / name)
        for file in files:
            file.unlink(missing_ok=True)

    def _progress(self) -> tqdm:
        """Return a bar of the molecules that are done, shown in a terminal only."""
        return tqdm(desc=self.name, unit=" molecules", disable=None)

    def _parts(self, progress: tqdm) -> Iterator[list[RawMolecule]]:
        """Yield all records in lists; tell the bar their number once it is known."""
        records = iter(self.records())  # one iterator for all parts: closing it ends the reading
        count = 0
        while part := list(islice(records, RECORDS_PER_PART)):
            count += len(part)
            if len(part) < RECORDS_PER_PART:
                progress.total = count
                progress.refresh()
            yield part

    def _featurized(
        self, records: Sequence[RawMolecule], processes: Processes, progress: tqdm
    ) -> Columns:
        # Without the other columns of the file, which would be sent to the processes.
        sent = [replace(record, extra={}, source=((), ())) for record in records]
        chunks = [sent[first : first + _CHUNK] for first in range(0, len(sent), _CHUNK)]
        results: list[MoleculeArrays | BadMolecule] = []
        try:
            for chunk in processes.map(partial(featurized, self.featurizer), chunks):
                results += chunk
                progress.update(len(chunk))
        except BrokenProcessPool as error:
            problem = f"{type(self).__name__}: a process that featurized has died"
            hint = "start again, which with a root goes on after the parts that are finished"
            raise mismatch(RuntimeError, problem, got=error, hint=hint) from error

        molecules = [each for each in results if isinstance(each, MoleculeArrays)]
        bad = [each for each in results if isinstance(each, BadMolecule)]
        if bad and self._bad == "raise":
            raise ValueError(bad[0].complaint(type(self).__name__))
        columns = self._columns(molecules)
        columns.facts = {"errors": [asdict(each) for each in bad]}
        return columns

    def _columns(self, molecules: Sequence[MoleculeArrays]) -> Columns:
        """Join the arrays of molecules."""
        num_atoms = np.array([len(each.x) for each in molecules], dtype=np.int64)
        num_pairs = num_atoms * (num_atoms + 1) // 2
        segments_of_atoms = Segments(num_atoms)
        segments_of_pairs = Segments(num_pairs)
        one_per_molecule = Segments(np.ones_like(num_atoms))

        # Something empty gives the width and dtype if there is no molecule.
        width = len(self.featurizer.atom_names)
        atom_rows = [np.empty((0, width), np.float32), *(each.x for each in molecules)]
        pair_codes = [np.empty(0, np.uint8), *(each.pair_code for each in molecules)]
        fields: dict[str, Any] = {
            "x": torch.from_numpy(np.concatenate(atom_rows)),
            "pair_code": torch.from_numpy(np.concatenate(pair_codes)),
            "smiles": [each.smiles or "" for each in molecules],
            "row": torch.tensor([each.row or 0 for each in molecules], dtype=torch.long),
        }
        segments = {
            "x": segments_of_atoms,
            "pair_code": segments_of_pairs,
            "smiles": one_per_molecule,
            "row": one_per_molecule,
        }

        if self.featurizer.descriptor_names:
            descriptors = np.array([each.descriptor for each in molecules], dtype=np.float32)
            shape = (len(molecules), len(self.featurizer.descriptor_names))
            fields["descriptor"] = torch.from_numpy(descriptors.reshape(shape))
            segments["descriptor"] = one_per_molecule

        if self.target_names:
            targets = np.array([each.y for each in molecules], dtype=np.float64)
            targets = targets.reshape(len(molecules), len(self.target_names))
            if self.kind_of_targets != "regression":
                num_classes = 2 if self.kind_of_targets == "binary" else None
                smiles = [each.smiles or "" for each in molecules]
                owner = type(self).__name__
                check_labels(owner, targets, num_classes, smiles, self.target_names)
            fields["y"] = torch.from_numpy(targets)
            segments["y"] = one_per_molecule
        return Columns(MoleculeData, segments_of_atoms, fields, segments, numbers=("row",))

    def _joined(self, parts: Sequence[Columns]) -> Columns:
        columns = Columns.joined(parts) if parts else self._columns([])
        columns.facts = {"errors": [each for part in parts for each in part.facts["errors"]]}
        if self.pre_transform is not None and len(columns):
            changed = Columns.of([self.pre_transform(example) for example in columns])
            if changed is None:
                problem = f"{type(self).__name__}: the pre_transform gives molecules unequal fields"
                raise mismatch(ValueError, problem, "the same fields, dtypes and widths")
            changed.facts = columns.facts
            return changed
        return columns

    @property
    def schema(self) -> MoleculeSchema:
        """What a model needs to know about the molecules, with all pairs of atoms."""
        return MoleculeSchema(self.target_names, self.kind_of_targets, featurizer=self.featurizer)

    @property
    def pair_table(self) -> PairTable:
        """What the codes of the pairs mean."""
        return self.featurizer.pair_table

    @property
    def sizes(self) -> list[int]:
        """Number of pairs of atoms of every molecule, which the time of a weave layer follows."""
        return self._chosen(self.columns.segments["pair_code"].sizes).tolist()

    @property
    def targets(self) -> Float[np.ndarray, "molecule target"]:
        """Targets, after the ``transform``; NaN where one is missing."""
        return self._rows_of("y", len(self.target_names))

    @property
    def descriptors(self) -> Float[np.ndarray, "molecule descriptor"]:
        """Descriptors of whole molecules, after the ``transform``; NaN where one is unknown."""
        return self._rows_of("descriptor", len(self.featurizer.descriptor_names))

    def _rows_of(self, name: str, width: int) -> np.ndarray:
        """Return the row that every molecule has of a field."""
        if name not in self.columns.fields:
            return np.full((len(self), width), np.nan, dtype=np.float32)
        if self.transform is None:
            column = cast(Tensor, self.columns.fields[name])
            return self._chosen(column.numpy())
        rows = [np.empty((0, width)), *(example[name].numpy() for example in self)]
        return np.concatenate(rows)

    def _chosen(self, values: np.ndarray) -> np.ndarray:
        return values[list(self.indices())]

    @property
    def smiles(self) -> list[str]:
        """The SMILES of every molecule, as given."""
        texts = cast(list[str], self.columns.fields["smiles"])
        return [texts[number] for number in self.indices()]

    @property
    def errors(self) -> list[BadMolecule]:
        """The records that are not molecules."""
        return [BadMolecule(**each) for each in self.columns.facts["errors"]]


def featurized(
    featurizer: MoleculeFeaturizer, records: Sequence[RawMolecule]
) -> list[MoleculeArrays | BadMolecule]:
    """Featurize records, or say of each why it is not a molecule."""

    def arrays_of(record: RawMolecule, text: str | None) -> MoleculeArrays:
        arrays = featurizer.arrays(text)
        return arrays._replace(smiles=(text or "").strip(), row=record.row, y=record.targets)

    # The texts of all mol blocks come first: to take turns needs a quarter more time.
    texts = [_attempted(RawMolecule.text, record) for record in records]
    return [
        text if isinstance(text, BadMolecule) else _attempted(arrays_of, record, text)
        for record, text in zip(records, texts, strict=True)
    ]


def _attempted(work: Callable[..., Any], record: RawMolecule, *arguments: Any) -> Any:
    """Return what is made of a record, or why it is not a molecule."""
    try:
        return work(record, *arguments)
    except MoleculeError as error:
        return BadMolecule(record.row, record.where, record.smiles, error.reason, error.atom)
    except Exception as error:
        error.add_note(f"row {record.row} ({record.where}): {record.smiles!r}")
        raise


def check_labels(
    owner: str,
    targets: Float[np.ndarray, "molecule target"],
    num_classes: int | None,
    smiles: Sequence[str],
    names: Sequence[str],
) -> None:
    """Raise an error for labels that are not classes, whole numbers from 0; NaN is none."""
    limit = math.inf if num_classes is None else num_classes
    is_class = (targets >= 0) & (targets < limit) & (targets == np.floor(targets))
    wrong = np.argwhere(~is_class & ~np.isnan(targets))
    if not len(wrong):
        return
    row, target = wrong[0]
    problem = f"{owner}: a label is out of range"
    highest = "" if num_classes is None else f" to {num_classes - 1}"
    hint = (
        "kind: regression for values, kind: multiclass for more classes, "
        "table.missing for a number that stands for none"
    )
    where = f"{smiles[row]}, target {names[target]}"
    expected = f"whole numbers from 0{highest}"
    got = f"{targets[row, target]:g}"
    raise mismatch(ValueError, problem, expected, got, where=where, hint=hint)


class MoleculeFile(MoleculeDataset):
    r"""Molecules of a CSV, TSV, SMILES or SDF file; featurized again when the file changes.

    Args:
        path: The file, which may be compressed by gzip.
        root: Folder for ``processed/``; None to keep the molecules in memory.
        featurizer: None for ``MoleculeFeaturizer()``.
        target_columns: Column, or SDF field, of the target, or several; none for a file to predict.
        kind_of_targets: ``"regression"``, ``"binary"`` or ``"multiclass"``.
        table: Column of the SMILES, and how cells are written.
        bad: What to do with records that are not molecules: ``"raise"`` or ``"skip"``.
        **options: As in :class:`~pyg_dynbatch.datasets.MoleculeDataset`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file cannot be read, a column is missing, or, by default, a row is not a
            molecule.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "mine.csv"
        >>> size = path.write_text("smiles,melts\nCO,-97.6\nCCO,-114\n")
        >>> dataset = MoleculeFile(path, target_columns=["melts"])
        >>> len(dataset), dataset.target_names, dataset.targets.tolist()
        (2, ('melts',), [[-97.6], [-114.0]])
    """

    def __init__(
        self,
        path: str | Path,
        root: str | Path | None = None,
        featurizer: MoleculeFeaturizer | None = None,
        target_columns: str | Sequence[str] = (),
        kind_of_targets: PropertyKind = "regression",
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        bad: str = "raise",
        **options: Any,
    ) -> None:
        self._path = path
        self._table = table
        columns = [target_columns] if isinstance(target_columns, str) else list(target_columns)
        self._columns_of_targets = columns
        super().__init__(
            root,
            Path(path).name.partition(".")[0],
            {"file": sha256_of(path), "table": asdict(table)},
            columns,
            kind_of_targets,
            featurizer=featurizer,
            bad=bad,
            **options,
        )

    def records(self) -> Iterator[RawMolecule]:
        """Read the file."""
        return read_molecules(
            self._path, target_columns=self._columns_of_targets, table=self._table
        )


# All other sets of MoleculeNet have labels 0 and 1.
_SETS_OF_VALUES = ("esol", "freesolv", "lipo")
# Of the files with Unix line endings.
SHA256 = {
    "esol": "8c06a76f0c6487d29ab0f903e6a7a7139f189ab3c1178f159c8be8964602f189",
    "freesolv": "a4fbf3b28fe2e604d6bd7ea0e20b4494ff732400a80f58d1b393677cfbc1b06c",
    "lipo": "3d2a409dc8bdf620876bb7257faf4996df29a19dd0244d0b4a6a8064c306cded",
    "bbbp": "6aecd84110e8c0549bc4e2e486c52267d4e775178fca8999f5465029e31e75bb",
    "tox21": "7d7e7facd853a63e79ddce4e9c3fcb7a0d83a1c300b603031c0f2c64fbe77761",
}


class MoleculeNet(MoleculeDataset):
    r"""A data set of MoleculeNet: ESOL, FreeSolv, Lipo, BBBP, Tox21, and others.

    Names, addresses and columns are those of PyG's ``MoleculeNet``. The raw file is searched in
    `raw_dir`, or else in ``root/raw``, under its published name or as ``<name>.csv``, compressed by
    gzip or not; without `raw_dir` it is downloaded. The checksums of five files are known; those of
    the others are recorded at the first download.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None to keep all in memory (with `raw_dir`).
        name: ESOL, FreeSolv, Lipo, PCBA, MUV, HIV, BACE, BBBP, Tox21, ToxCast, SIDER or ClinTox, in
            any case.
        featurizer: None for ``MoleculeFeaturizer()``.
        raw_dir: Folder with the file.
        verify: Whether to raise an error if the file is not the published one.
        **options: As in :class:`~pyg_dynbatch.datasets.MoleculeDataset`; some sets have a few bad
            rows, which are skipped.

    Raises:
        ConnectionError: If there is no raw file and it cannot be downloaded.
        FileNotFoundError: If `raw_dir` lacks the file.
        ValueError: If the name is unknown, or the file has different content or columns.

    Reference:
        Wu et al. (2018), doi:10.1039/C7SC02664A.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> size = (folder / "freesolv.csv").write_text("iupac,smiles,expt,calc\nx,CO,-5.1,-3\n")
        >>> dataset = MoleculeNet(None, "FreeSolv", raw_dir=folder, verify=False)
        >>> dataset.target_names, dataset.kind_of_targets, dataset[0].y.tolist()
        (('expt',), 'regression', [[-5.1]])
    """

    def __init__(
        self,
        root: str | Path | None,
        name: str,
        featurizer: MoleculeFeaturizer | None = None,
        raw_dir: str | Path | None = None,
        verify: bool = True,
        **options: Any,
    ) -> None:
        key = checked_choice("MoleculeNet: unknown name", name.lower(), PyGMoleculeNet.names)
        self._path = _find_raw_file(key, root, raw_dir)
        self._table = table_of(key)
        if verify and key in SHA256:
            _check_content(self._path, SHA256[key])
        super().__init__(
            root,
            key,
            {"file": sha256_of(self._path)},
            _targets_of(self._path, key),
            kind_of(key),
            featurizer=featurizer,
            **options,
        )

    def records(self) -> Iterator[RawMolecule]:
        """Read the file."""
        return read_molecules(self._path, target_columns=self.target_names, table=self._table)


def kind_of(key: str) -> PropertyKind:
    """Return the kind of the targets of a set of MoleculeNet."""
    return "regression" if key in _SETS_OF_VALUES else "binary"


def table_of(key: str) -> TableOptions:
    """Return how the file of a set of MoleculeNet is written."""
    return TableOptions(smiles_column="mol" if key == "bace" else "smiles")


def _find_raw_file(key: str, root: str | Path | None, raw_dir: str | Path | None) -> Path:
    """Find the file of a set of MoleculeNet, packed or not; else download it."""
    title, published, *_ = PyGMoleculeNet.names[key]
    if raw_dir is None and root is None:
        raise mismatch(ValueError, "MoleculeNet: no folder is given", "root or raw_dir", "neither")
    folder = Path(raw_dir or Path(str(root)) / "raw")
    names = {published.lower().removesuffix(".gz"), f"{key}.csv"}
    for path in sorted(folder.glob("*")):
        if path.name.lower().removesuffix(".gz") in names:
            return path
    hint = f"put {published} (or {key}.csv) into a folder and pass raw_dir=that folder"
    if raw_dir is not None:
        problem = f"MoleculeNet: the raw file of {title} is missing"
        raise mismatch(
            FileNotFoundError, problem, f"{published} or {key}.csv", where=folder, hint=hint
        )
    url = PyGMoleculeNet.url.format(published)
    return download_verified(url, folder, None, f"MoleculeNet {title}", hint=hint)


def _check_content(path: Path, expected: str) -> None:
    """Compare the checksum of a file, whatever its line ends."""
    raw = path.read_bytes()
    content = (gzip.decompress(raw) if path.suffix == ".gz" else raw).replace(b"\r\n", b"\n")
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != expected:
        raise mismatch(
            ValueError,
            f"MoleculeNet: {path.name} is not the published file",
            f"sha256 {expected}, with Unix line endings",
            f"sha256 {sha256}",
            where=path,
            hint="verify=False if the change is intended",
        )


def _targets_of(path: Path, key: str) -> tuple[str, ...]:
    """Return the names of the columns that are targets by PyG's table."""
    title, *_, chosen = PyGMoleculeNet.names[key]
    with open_lines(path) as lines:
        header = next(csv.reader(lines), [])

    if isinstance(chosen, slice):
        columns = list(range(len(header))[chosen])
        expected = chosen.stop - chosen.start
    else:
        columns = [chosen]
        expected = 1
    targets = tuple(header[column] for column in columns if -len(header) <= column < len(header))
    if len(targets) != expected or table_of(key).smiles_column in targets:
        problem = f"MoleculeNet: the columns of {path.name} are not those of {title}"
        raise mismatch(
            ValueError, problem, f"{expected} columns of targets", ", ".join(header[:8]), where=path
        )
    return targets


class NCI(MoleculeDataset):
    """4,999 molecules that come with RDKit, and their polar surface areas ``TPSA`` in Å².

    Args:
        root: Folder for ``processed/``; None to keep the molecules in memory.
        featurizer: None for ``MoleculeFeaturizer()``.
        **options: As in :class:`~pyg_dynbatch.datasets.MoleculeDataset`.

    Raises:
        FileNotFoundError: If this RDKit comes without the file.

    Reference:
        Ertl, Rohde, Selzer (2000), doi:10.1021/jm000942e.

    Example:
        >>> nci = NCI()
        >>> nci[0].smiles, nci[0].y.tolist()
        ('CC1=CC(=O)C=CC1=O', [[34.14]])
    """

    def __init__(
        self,
        root: str | Path | None = None,
        featurizer: MoleculeFeaturizer | None = None,
        **options: Any,
    ) -> None:
        self._path = rdkit_data_folder() / "NCI" / "first_5k.tpsa.csv"
        if not self._path.is_file():
            problem = "NCI: this RDKit lacks the file"
            hint = "pip install --force-reinstall rdkit"
            raise mismatch(FileNotFoundError, problem, self._path.name, where=self._path, hint=hint)
        key = {"file": sha256_of(self._path)}
        super().__init__(root, "nci", key, ["TPSA"], featurizer=featurizer, **options)

    def records(self) -> Iterator[RawMolecule]:
        """Read the file, which has no line of column names."""
        with open_lines(self._path) as lines:
            for row, line in enumerate(line for line in lines if not line.startswith("#")):
                smiles, _, value = line.rpartition(",")
                where = f"{self._path.name}:{lines.number}"
                yield RawMolecule(row, where, smiles, targets=(float(value),))
