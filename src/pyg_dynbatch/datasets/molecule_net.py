"""Load the data sets of MoleculeNet, from files in place or downloaded once."""

import csv
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

from torch_geometric.datasets import MoleculeNet as PyGMoleculeNet

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets.download import download_verified, sha256_of
from pyg_dynbatch.datasets.featurize import FeaturizeOptions, Featurizer
from pyg_dynbatch.datasets.packed import PackedMolecules, Transform, open_or_build
from pyg_dynbatch.featurizers.molecule import MoleculeFeaturizer
from pyg_dynbatch.featurizers.molecule_files import read_molecules

# Columns that are neither the SMILES nor a target.
_NO_TASKS = ("mol_id",)
_QM8_URL_NAME = "qm8.csv"
_QM8_TASKS = tuple(
    f"{what}-{method}" for method in ("CC2", "PBE0", "CAM") for what in ("E1", "E2", "f1", "f2")
)


@dataclass(frozen=True)
class Member:
    """Describes one data set of the collection.

    Attributes:
        title: Its name.
        task_type: ``"regression"`` or ``"binary"``.
        tasks: Columns of the targets; a number stands for all but the SMILES, so many.
        smiles_column: Column of the SMILES.
        sha256: Checksum of the text of the file with plain line ends, where it is known.
        also: Further names a file in place may have.
        first_of_repeated: Whether the file has targets twice under one name; the first counts.
    """

    title: str
    task_type: str
    tasks: tuple[str, ...] | int
    smiles_column: str = "smiles"
    sha256: str = ""
    also: tuple[str, ...] = ()
    first_of_repeated: bool = False


MEMBERS = {
    "esol": Member(
        "ESOL",
        "regression",
        ("measured log solubility in mols per litre",),
        sha256="8c06a76f0c6487d29ab0f903e6a7a7139f189ab3c1178f159c8be8964602f189",
    ),
    "freesolv": Member(
        "FreeSolv",
        "regression",
        ("expt",),
        sha256="a4fbf3b28fe2e604d6bd7ea0e20b4494ff732400a80f58d1b393677cfbc1b06c",
    ),
    "lipo": Member(
        "Lipophilicity",
        "regression",
        ("exp",),
        sha256="3d2a409dc8bdf620876bb7257faf4996df29a19dd0244d0b4a6a8064c306cded",
        also=("lipophilicity.csv",),
    ),
    "bbbp": Member(
        "BBBP",
        "binary",
        ("p_np",),
        sha256="6aecd84110e8c0549bc4e2e486c52267d4e775178fca8999f5465029e31e75bb",
    ),
    "tox21": Member(
        "Tox21",
        "binary",
        12,
        sha256="7d7e7facd853a63e79ddce4e9c3fcb7a0d83a1c300b603031c0f2c64fbe77761",
    ),
    "toxcast": Member("ToxCast", "binary", 617),
    "sider": Member("SIDER", "binary", 27),
    "clintox": Member("ClinTox", "binary", ("FDA_APPROVED", "CT_TOX")),
    "hiv": Member("HIV", "binary", ("HIV_active",)),
    "bace": Member("BACE", "binary", ("Class",), smiles_column="mol"),
    "muv": Member("MUV", "binary", 17),
    # The PBE0 columns stand there for two basis sets.
    "qm8": Member("QM8", "regression", _QM8_TASKS, first_of_repeated=True),
}
_ALIASES = {"lipophilicity": "lipo", "delaney": "esol", "sampl": "freesolv"}


class MoleculeNet(PackedMolecules):
    r"""Holds one data set of MoleculeNet: ESOL, FreeSolv, Lipophilicity, BBBP, Tox21, and others.

    The raw file is looked for in `raw_dir`, under its published name, as ``<name>.csv``, or laid
    out as PyG does (``<name>/raw/``), packed by gzip or not; then in ``root/raw``; else it is
    downloaded there from where PyG takes it. The content of the five files whose checksum is
    known is checked; of others the checksum is noted at the first download.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None keeps the packed molecules in memory
            and needs `raw_dir`.
        name: ``"ESOL"``, ``"FreeSolv"``, ``"Lipophilicity"``, ``"BBBP"``, ``"Tox21"``,
            ``"ToxCast"``, ``"SIDER"``, ``"ClinTox"``, ``"HIV"``, ``"BACE"``, ``"MUV"`` or
            ``"QM8"``, in any case.
        featurizer: Describes a molecule; None takes ``MoleculeFeaturizer()``.
        raw_dir: Folder with the file.
        verify: Whether another content than the known one is refused.
        options: Policy for bad rows (some sets have a few), processes.
        transform: Applied to a molecule each time it is taken.

    Raises:
        ConnectionError: If there is no raw file and it cannot be downloaded.
        FileNotFoundError: If `raw_dir` lacks the file.
        ImportError: If RDKit is not installed.
        ValueError: If there is no such data set, or the file has another content or other
            columns.

    Reference:
        Wu et al. (2018), MoleculeNet: a benchmark for molecular machine learning,
        doi:10.1039/C7SC02664A.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> size = (folder / "freesolv.csv").write_text("iupac,smiles,expt,calc\nx,CO,-5.1,-3\n")
        >>> dataset = MoleculeNet(None, "FreeSolv", raw_dir=folder, verify=False)
        >>> dataset.task_names, dataset.task_type, dataset[0].y
        (('expt',), 'regression', tensor([[-5.1000]]))
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
        if verify and member.sha256:
            _check_content(path, member)
        tasks = _tasks_of(path, member)
        store = open_or_build(
            root,
            member.title,
            {"file": sha256_of(path)},
            lambda: read_molecules(
                path,
                smiles_column=member.smiles_column,
                target_columns=list(tasks),
                first_of_repeated=member.first_of_repeated,
            ),
            featurizer or MoleculeFeaturizer(),
            task_names=tasks,
            options=options,
        )
        super().__init__(store, transform=transform)
        self.name = member.title
        self.task_type = member.task_type


def member_named(name: str) -> tuple[str, Member]:
    """Finds a data set of the collection, with its key, by its name in any case."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in MEMBERS:
        raise ValueError(
            mismatch(
                "MoleculeNet: there is no such data set",
                expected=", ".join(member.title for member in MEMBERS.values()),
                got=name,
            )
        )
    return key, MEMBERS[key]


def _published_name(key: str) -> str:
    return _QM8_URL_NAME if key == "qm8" else str(PyGMoleculeNet.names[key][1])


def _find(key: str, member: Member, root: str | Path | None, raw_dir: str | Path | None) -> Path:
    published = _published_name(key)
    plain = [published.removesuffix(".gz"), f"{key}.csv", *member.also]
    names = [name for stem in plain for name in (stem, f"{stem}.gz")]
    advice = f"put {published} (or {key}.csv) into a folder and pass raw_dir=that folder"
    if raw_dir is None and root is None:
        raise ValueError(
            mismatch("MoleculeNet: there is no folder", expected="root or raw_dir", got="neither")
        )
    folders = [Path(raw_dir or Path(str(root)) / "raw")]
    folders.append(folders[0] / key / "raw")
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    if raw_dir is not None:
        raise FileNotFoundError(
            mismatch(
                f"MoleculeNet: the raw file of {member.title} is missing",
                expected=" or ".join(dict.fromkeys(names)),
                where=raw_dir,
                mend=advice,
            )
        )
    url = PyGMoleculeNet.url.format(published)
    return download_verified(url, folders[0], None, f"MoleculeNet {member.title}", mend=advice)


def _open(path: Path) -> BufferedIOBase:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _check_content(path: Path, member: Member) -> None:
    with _open(path) as handle:
        content = handle.read().replace(b"\r\n", b"\n")
    got = hashlib.sha256(content).hexdigest()
    if got != member.sha256:
        raise ValueError(
            mismatch(
                f"MoleculeNet: {path.name} is not the published file of {member.title}",
                expected=f"sha256 {member.sha256}, with plain line ends",
                got=f"sha256 {got}, {len(content):,} bytes",
                where=path,
                mend="verify=False if the change is intended",
            )
        )


def _tasks_of(path: Path, member: Member) -> tuple[str, ...]:
    with _open(path) as handle:
        columns = next(csv.reader(_text(handle)), [])
    given = tuple(name for name in columns if name not in (member.smiles_column, *_NO_TASKS))
    if isinstance(member.tasks, int):
        tasks, fits = given, len(given) == member.tasks
        wanted = f"{member.tasks} columns of targets"
    else:
        tasks, fits = member.tasks, set(member.tasks) <= set(columns)
        wanted = ", ".join(member.tasks)
    if not fits or member.smiles_column not in columns:
        raise ValueError(
            mismatch(
                f"MoleculeNet: the columns of {path.name} are not those of {member.title}",
                expected=f"{wanted}, and {member.smiles_column!r}",
                got=f"{len(columns)} columns: {', '.join(columns[:8])}",
                where=path,
            )
        )
    return tasks


def _text(handle: BufferedIOBase) -> Iterator[str]:
    for number, line in enumerate(handle):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8")
