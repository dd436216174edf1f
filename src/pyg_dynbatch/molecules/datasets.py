"""Data sets of molecules: packed folders, your own files, MoleculeNet, NCI."""

import csv
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_geometric.datasets import MoleculeNet as PyGMoleculeNet

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.files import download_verified, open_lines, sha256_of
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.rdkit_access import rdkit_data_folder
from pyg_dynbatch.molecules.files.build import FeaturizeOptions, build_store
from pyg_dynbatch.molecules.files.read import RawMolecule, TableOptions, read_molecules
from pyg_dynbatch.molecules.files.store import FORMAT, Featurizer, PackedMolecules, Transform


def open_or_build(
    root: str | Path | None,
    name: str,
    key: Mapping[str, str],
    records: Iterable[RawMolecule],
    featurizer: Featurizer | None,
    *,
    task_names: Sequence[str],
    options: FeaturizeOptions,
) -> PackedMolecules:
    """Open the packed molecules of a source, or build them from its records."""
    featurizer = featurizer or MoleculeFeaturizer()
    folder = None
    if root is not None:
        # Not the policy for bad rows, so that a new one keeps the parts without bad rows.
        parts = {**key, "format": FORMAT, "featurizer": featurizer.digest}
        parts["tasks"] = json.dumps(list(task_names))
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        folder = Path(root) / "processed" / f"{name.lower()}.{digest}"
        # If it is unfinished or corrupt, build_store keeps its valid parts.
        with suppress(FileNotFoundError, ValueError):
            found = PackedMolecules(folder)
            if not options.force and (found.header["bad"] == options.bad or not found.errors):
                return found
    # All ranks of a run get here at the same time; the others wait for the first.
    given: Any = {"task_names": task_names, "options": options, "name": name}
    return build_store(folder, records, featurizer, **given, wait=True)


_STRICT = FeaturizeOptions(bad="raise")


class MoleculeFile(PackedMolecules):
    r"""Molecules of a CSV, TSV, SMILES or SDF file; featurized again when the file changes.

    Args:
        path: The file, which may be compressed by gzip.
        root: Folder for ``processed/``; None to keep the packed molecules in memory.
        featurizer: None for ``MoleculeFeaturizer()``.
        target_columns: Columns, or SDF properties, of the targets; none for a file to predict.
        options: Policy for bad rows (by default, an error at the first one), processes.
        transform: Applied to a molecule each time it is accessed.
        table: Column of the SMILES, and how cells are written.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file cannot be read, a column is missing, or, by default, a row is not a
            molecule.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "mine.csv"
        >>> size = path.write_text("smiles,melts\nCO,-97.6\nCCO,-114\n")
        >>> dataset = MoleculeFile(path, target_columns=["melts"])
        >>> len(dataset), dataset.task_names, dataset.num_atoms.tolist()
        (2, ('melts',), [2, 3])
    """

    def __init__(
        self,
        path: str | Path,
        root: str | Path | None = None,
        featurizer: Featurizer | None = None,
        target_columns: Sequence[str] = (),
        options: FeaturizeOptions = _STRICT,
        transform: Transform | None = None,
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
    ) -> None:
        tasks = tuple(target_columns)
        # Before anything else, because its errors are the clearest.
        records = read_molecules(path, target_columns=list(tasks), table=table)
        key = {"file": sha256_of(path), "table": json.dumps(asdict(table))}
        facts = (root, Path(path).name.partition(".")[0], key)
        packed = open_or_build(*facts, records, featurizer, task_names=tasks, options=options)
        super().__init__(packed, transform=transform)


_QM8_TASKS = tuple(
    f"{what}-{method}" for method in ("CC2", "PBE0", "CAM") for what in ("E1", "E2", "f1", "f2")
)


@dataclass(frozen=True)
class Member:
    """A data set of MoleculeNet; `tasks` are names of columns, or the number of all columns."""

    title: str
    task_type: str
    tasks: tuple[str, ...] | int
    smiles_column: str = "smiles"
    also: tuple[str, ...] = ()  # other names of the file


MEMBERS = {
    "esol": Member("ESOL", "regression", ("measured log solubility in mols per litre",)),
    "freesolv": Member("FreeSolv", "regression", ("expt",)),
    "lipo": Member("Lipophilicity", "regression", ("exp",), also=("lipophilicity.csv",)),
    "bbbp": Member("BBBP", "binary", ("p_np",)),
    "tox21": Member("Tox21", "binary", 12),
    "toxcast": Member("ToxCast", "binary", 617),
    "sider": Member("SIDER", "binary", 27),
    "clintox": Member("ClinTox", "binary", ("FDA_APPROVED", "CT_TOX")),
    "hiv": Member("HIV", "binary", ("HIV_active",)),
    "bace": Member("BACE", "binary", ("Class",), smiles_column="mol"),
    "muv": Member("MUV", "binary", 17),
    # The file has the PBE0 columns twice, for two basis sets.
    "qm8": Member("QM8", "regression", _QM8_TASKS),
}
# Of the files with Unix line endings.
SHA256 = {
    "esol": "8c06a76f0c6487d29ab0f903e6a7a7139f189ab3c1178f159c8be8964602f189",
    "freesolv": "a4fbf3b28fe2e604d6bd7ea0e20b4494ff732400a80f58d1b393677cfbc1b06c",
    "lipo": "3d2a409dc8bdf620876bb7257faf4996df29a19dd0244d0b4a6a8064c306cded",
    "bbbp": "6aecd84110e8c0549bc4e2e486c52267d4e775178fca8999f5465029e31e75bb",
    "tox21": "7d7e7facd853a63e79ddce4e9c3fcb7a0d83a1c300b603031c0f2c64fbe77761",
}
_ALIASES = {"lipophilicity": "lipo", "delaney": "esol", "sampl": "freesolv"}


class MoleculeNet(PackedMolecules):
    r"""A data set of MoleculeNet: ESOL, FreeSolv, Lipophilicity, BBBP, Tox21, and others.

    The raw file is searched in `raw_dir`, or else in ``root/raw``, under its published name, as
    ``<name>.csv``, or where PyG puts it (``<name>/raw/``), compressed by gzip or not; without
    `raw_dir` it is downloaded from PyG's address. The checksums of five files are known; those of
    the others are recorded at the first download.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None to keep all in memory (with `raw_dir`).
        name: ESOL, FreeSolv, Lipophilicity, BBBP, Tox21, ToxCast, SIDER, ClinTox, HIV, BACE, MUV
            or QM8, in any case.
        featurizer: None for ``MoleculeFeaturizer()``.
        raw_dir: Folder with the file.
        verify: Whether to raise an error if the file is not the published one.
        options: Policy for bad rows (some sets have a few), processes.
        transform: Applied to a molecule each time it is accessed.

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
        >>> dataset.task_names, dataset.task_type, dataset[0].y.tolist()
        (('expt',), 'regression', [[-5.1]])
    """

    def __init__(
        self,
        root: str | Path | None,
        name: str,
        featurizer: Featurizer | None = None,
        raw_dir: str | Path | None = None,
        verify: bool = True,
        options: FeaturizeOptions = FeaturizeOptions(),  # noqa: B008 - frozen
        transform: Transform | None = None,
    ) -> None:
        key, member = member_named(name)
        path = _find(key, member, root, raw_dir)
        if verify and key in SHA256:
            _check_content(path, SHA256[key], member.title)
        tasks = _tasks_of(path, member)
        table = TableOptions(smiles_column=member.smiles_column)
        records = read_molecules(path, target_columns=list(tasks), table=table)
        facts = (root, member.title, {"file": sha256_of(path)})
        packed = open_or_build(*facts, records, featurizer, task_names=tasks, options=options)
        super().__init__(packed, transform=transform)
        self.name = member.title
        self.task_type = member.task_type


def member_named(name: str) -> tuple[str, Member]:
    """Find a data set of the collection, with its key, by its name in any case."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in MEMBERS:
        known = ", ".join(member.title for member in MEMBERS.values())
        raise mismatch(ValueError, "MoleculeNet: the name is unknown", known, name)
    return key, MEMBERS[key]


def _find(key: str, member: Member, root: str | Path | None, raw_dir: str | Path | None) -> Path:
    published = "qm8.csv" if key == "qm8" else str(PyGMoleculeNet.names[key][1])
    plain = [published.removesuffix(".gz"), f"{key}.csv", *member.also]
    names = [name for stem in plain for name in (stem, f"{stem}.gz")]
    hint = f"put {published} (or {key}.csv) into a folder and pass raw_dir=that folder"
    if raw_dir is None and root is None:
        raise mismatch(ValueError, "MoleculeNet: no folder is given", "root or raw_dir", "neither")
    raw = Path(raw_dir or Path(str(root)) / "raw")
    for path in (folder / name for folder in (raw, raw / key / "raw") for name in names):
        if path.is_file():
            return path
    if raw_dir is not None:
        what = f"MoleculeNet: the raw file of {member.title} is missing"
        wanted = " or ".join(dict.fromkeys(names))
        raise mismatch(FileNotFoundError, what, wanted, where=raw_dir, hint=hint)
    url = PyGMoleculeNet.url.format(published)
    return download_verified(url, raw, None, f"MoleculeNet {member.title}", hint=hint)


def _check_content(path: Path, sha256: str, title: str) -> None:
    raw = path.read_bytes()
    content = (gzip.decompress(raw) if path.suffix == ".gz" else raw).replace(b"\r\n", b"\n")
    got = hashlib.sha256(content).hexdigest()
    if got != sha256:
        what = f"MoleculeNet: {path.name} is not the published file of {title}"
        expected, got = f"sha256 {sha256}, with Unix line endings", f"sha256 {got}"
        hint = "verify=False if the change is intended"
        raise mismatch(ValueError, what, expected, got, where=path, hint=hint)


def _tasks_of(path: Path, member: Member) -> tuple[str, ...]:
    if isinstance(member.tasks, tuple):
        return member.tasks
    with open_lines(path) as lines:
        columns = next(csv.reader(lines), [])
    tasks = tuple(name for name in columns if name not in (member.smiles_column, "mol_id"))
    if len(tasks) != member.tasks:
        what = f"MoleculeNet: the columns of {path.name} are not those of {member.title}"
        got = f"{len(tasks)}: {', '.join(tasks[:8])}"
        raise mismatch(ValueError, what, f"{member.tasks} columns of targets", got, where=path)
    return tasks


class NCI(PackedMolecules):
    """4,999 molecules that come with RDKit, and their polar surface areas ``TPSA`` in Å².

    Args:
        root: Folder for ``processed/``; None to keep the packed molecules in memory.
        featurizer: None for ``MoleculeFeaturizer()``.
        options: Policy for bad rows, processes.
        transform: Applied to a molecule each time it is accessed.

    Raises:
        FileNotFoundError: If this RDKit comes without the file.

    Reference:
        Ertl, Rohde, Selzer (2000), doi:10.1021/jm000942e.

    Example:
        >>> nci = NCI()
        >>> nci[0].smiles, nci[0].y.tolist()
        ('CC1=CC(=O)C=CC1=O', [[34.14]])
    """

    task_type = "regression"

    def __init__(
        self,
        root: str | Path | None = None,
        featurizer: Featurizer | None = None,
        options: FeaturizeOptions = FeaturizeOptions(),  # noqa: B008 - frozen
        transform: Transform | None = None,
    ) -> None:
        path = rdkit_data_folder() / "NCI" / "first_5k.tpsa.csv"
        if not path.is_file():
            what, hint = "NCI: this RDKit lacks the file", "pip install --force-reinstall rdkit"
            raise mismatch(FileNotFoundError, what, path.name, where=path, hint=hint)
        facts = (root, "NCI", {"file": sha256_of(path)}, _read_nci(path))
        packed = open_or_build(*facts, featurizer, task_names=("TPSA",), options=options)
        super().__init__(packed, transform=transform)


def _read_nci(path: Path) -> Iterator[RawMolecule]:
    with open_lines(path) as lines:
        for row, line in enumerate(line for line in lines if not line.startswith("#")):
            smiles, _, value = line.rpartition(",")
            where = f"{path.name}:{lines.number}"
            yield RawMolecule(row, where, smiles, targets=(float(value),))
