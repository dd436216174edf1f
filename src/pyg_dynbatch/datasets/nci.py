"""Load 4,999 molecules of the NCI set, which come with RDKit: no download, no network."""

from collections.abc import Iterator
from pathlib import Path

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets.download import sha256_of
from pyg_dynbatch.datasets.featurize import FeaturizeOptions, Featurizer
from pyg_dynbatch.datasets.packed import PackedMolecules, Transform, open_or_build
from pyg_dynbatch.featurizers.files import read_lines
from pyg_dynbatch.featurizers.molecule import MoleculeFeaturizer
from pyg_dynbatch.featurizers.molecule_files import RawMolecule
from pyg_dynbatch.featurizers.rdkit_access import rdkit_data_folder

_FILE = "first_5k.tpsa.csv"


class NCI(PackedMolecules):
    """Holds 4,999 molecules of the National Cancer Institute with their polar surface areas.

    The target ``TPSA`` (topological polar surface area, Å²) was computed by others, with the
    program of the method's author; it lies in the RDKit package beside the molecules.

    Args:
        root: Folder for ``processed/``; None keeps the packed molecules in memory.
        featurizer: Describes a molecule; None takes ``MoleculeFeaturizer()``.
        options: Policy for bad rows, processes.
        transform: Applied to a molecule each time it is taken.

    Raises:
        FileNotFoundError: If this RDKit has no such file.
        ImportError: If RDKit is not installed.

    Reference:
        Ertl, Rohde, Selzer (2000), Fast calculation of molecular polar surface area,
        doi:10.1021/jm000942e.

    Example:
        >>> nci = NCI()
        >>> nci[0].smiles, nci[0].y
        ('CC1=CC(=O)C=CC1=O', tensor([[34.1400]]))
    """

    task_type = "regression"

    def __init__(
        self,
        root: str | Path | None = None,
        featurizer: Featurizer | None = None,
        options: FeaturizeOptions = FeaturizeOptions(),  # noqa: B008 - frozen
        transform: Transform | None = None,
    ) -> None:
        path = rdkit_data_folder() / "NCI" / _FILE
        if not path.is_file():
            raise FileNotFoundError(
                mismatch(
                    "NCI: this RDKit comes without the file",
                    expected=f"NCI/{_FILE} among the data of RDKit",
                    where=path,
                    mend="pip install --force-reinstall rdkit",
                )
            )
        store = open_or_build(
            root,
            "NCI",
            {"file": sha256_of(path)},
            lambda: _read(path),
            featurizer or MoleculeFeaturizer(),
            task_names=("TPSA",),
            options=options,
        )
        super().__init__(store, transform=transform)


def _read(path: Path) -> Iterator[RawMolecule]:
    row = 0
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            continue
        smiles, _, value = line.rpartition(",")
        yield RawMolecule(row, f"{path.name}:{number}", smiles, targets=(float(value),))
        row += 1
