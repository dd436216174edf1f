"""Load a user's own file of molecules."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from pyg_dynbatch.datasets.download import sha256_of
from pyg_dynbatch.datasets.featurize import FeaturizeOptions, Featurizer
from pyg_dynbatch.datasets.packed import PackedMolecules, Transform, open_or_build
from pyg_dynbatch.featurizers.molecule import MoleculeFeaturizer
from pyg_dynbatch.featurizers.molecule_files import read_molecules

_STRICT = FeaturizeOptions(bad="raise")


class MoleculeFile(PackedMolecules):
    r"""Holds the molecules of a CSV, TSV, SMILES or SDF file, packed by gzip or not.

    The file is read as a stream and featurized once; later the packed molecules are opened, as
    long as neither the file nor the featurizer changes.

    Args:
        path: The file.
        root: Folder for ``processed/``; None keeps the packed molecules in memory.
        featurizer: Describes a molecule; None takes ``MoleculeFeaturizer()``.
        smiles_column: Column of the SMILES; None takes what `read_molecules` finds.
        target_columns: Columns, or SDF properties, of the targets; none for a file to predict.
        options: What to do with bad rows (by default stop at the first), processes.
        transform: Applied to a molecule each time it is taken.
        missing: What else than an empty cell, nan and NA is a missing target, such as ``"?"``.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If RDKit is not installed.
        OSError: If the folder cannot be written.
        ValueError: If the file cannot be read, a column is missing, or, unless the options say
            otherwise, a row is no molecule.

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
        smiles_column: str | None = None,
        target_columns: Sequence[str] = (),
        options: FeaturizeOptions = _STRICT,
        transform: Transform | None = None,
        missing: Collection[str] = (),
    ) -> None:
        path = Path(path)
        tasks = tuple(target_columns)
        # First, as it says best why a file cannot be used; no record is read as yet.
        records = read_molecules(
            path, smiles_column=smiles_column, target_columns=list(tasks), missing=missing
        )
        key = {"file": sha256_of(path), "smiles_column": str(smiles_column)}
        if missing:
            key["missing"] = json.dumps(sorted(missing))
        store = open_or_build(
            root,
            path.name.partition(".")[0],
            key,
            lambda: records,
            featurizer or MoleculeFeaturizer(),
            task_names=tasks,
            options=options,
        )
        super().__init__(store, transform=transform)
