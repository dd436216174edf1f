"""Offer packed molecules as a data set that needs no memory for what is not in use."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64
from torch import Tensor
from torch.utils.data import Dataset, Subset

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.pair_table import PairTable
from pyg_dynbatch.data.molecule import MoleculeData
from pyg_dynbatch.data.molecule_columns import MoleculeColumns
from pyg_dynbatch.datasets.bad_rows import BadMolecule
from pyg_dynbatch.datasets.build import build_store
from pyg_dynbatch.datasets.featurize import FeaturizeOptions, Featurizer
from pyg_dynbatch.datasets.store import FORMAT, MoleculeStore
from pyg_dynbatch.featurizers.molecule_files import RawMolecule

Transform = Callable[[MoleculeData], Any]


class PackedMolecules(Dataset[MoleculeData]):
    r"""Reads molecules out of a folder that a data set or ``build_store`` has written.

    The files are mapped into memory by each process that reads them, so a million molecules need
    no more memory than a thousand, and loader workers share what the system keeps of the files.
    Asked for the molecules of a batch at once, as loaders do, it hands them over as columns that
    ``MoleculeCollater`` makes a batch of without building one object a molecule.

    Args:
        source: The folder, or an open store.
        featurizer: If given, what must have made the molecules.
        transform: Applied to a molecule each time it is taken.

    Raises:
        FileNotFoundError: If there is no finished store in the folder.
        ValueError: If it is damaged, or another featurizer made it.

    Example:
        >>> import tempfile
        >>> from pyg_dynbatch.datasets import MoleculeFile
        >>> root = Path(tempfile.mkdtemp())
        >>> size = (root / "mine.csv").write_text("smiles,melts\nCO,-97.6\nCCO,-114\n")
        >>> folder = MoleculeFile(root / "mine.csv", root, target_columns=["melts"]).folder
        >>> molecules = PackedMolecules(folder)
        >>> len(molecules), molecules.task_names, molecules[1].smiles, len(molecules[:1])
        (2, ('melts',), 'CCO', 1)
    """

    def __init__(
        self,
        source: str | Path | MoleculeStore,
        featurizer: Featurizer | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.store = source if isinstance(source, MoleculeStore) else MoleculeStore.open(source)
        self.transform = transform
        made = self.store.header["featurizer_digest"]
        if featurizer is not None and featurizer.digest != made:
            raise ValueError(
                mismatch(
                    "packed molecules: another featurizer made them",
                    expected=f"featurizer {featurizer.digest}: {featurizer!r}",
                    got=f"featurizer {made}: {json.dumps(self.featurizer_spec)}",
                    where=self.folder or "memory",
                    mend="featurize again into another folder, or use "
                    "MoleculeFeaturizer.from_spec(dataset.featurizer_spec)",
                )
            )

    @property
    def folder(self) -> Path | None:
        """Where the shards are; None in memory."""
        source = self.store.shards[0].source
        return None if isinstance(source, bytes) else source.parent

    @property
    def featurizer_spec(self) -> dict[str, Any]:
        """What ``MoleculeFeaturizer.from_spec`` builds the featurizer from."""
        return dict(self.store.header["featurizer"])

    @cached_property
    def pair_table(self) -> PairTable:
        """What the pair codes mean."""
        return PairTable.from_dict(self.store.header["pair_table"])

    @property
    def atom_names(self) -> tuple[str, ...]:
        """Names of the atom features."""
        return tuple(self.store.header["atom_names"])

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the targets."""
        return tuple(self.store.header["task_names"])

    @property
    def descriptor_names(self) -> tuple[str, ...]:
        """Names of the descriptors of whole molecules, if there are any."""
        return tuple(self.store.header.get("descriptor_names", ()))

    @cached_property
    def descriptors(self) -> Float32[np.ndarray, "molecule descriptor"]:
        """All descriptors of whole molecules, NaN where one is unknown."""
        if not self.descriptor_names:
            return np.empty((len(self), 0), np.float32)
        return self.store.gathered("descriptor")

    @cached_property
    def targets(self) -> Float32[np.ndarray, "molecule task"]:
        """All targets, NaN where one is missing."""
        return self.store.gathered("y")

    @cached_property
    def num_atoms(self) -> Int64[np.ndarray, " molecule"]:
        """Number of atoms of every molecule, read without reading the molecules."""
        return self.store.num_atoms()

    @cached_property
    def rows(self) -> Int64[np.ndarray, " molecule"]:
        """For every molecule the number of its record in the source, from 0."""
        return self.store.gathered("row")

    @cached_property
    def errors(self) -> tuple[BadMolecule, ...]:
        """The records that could not be used."""
        return self.store.errors()

    @cached_property
    def _reasons(self) -> dict[int, str]:
        return {error.row: error.reason for error in self.errors}

    def smiles(self, i: int | np.integer) -> str:
        """Reads the SMILES of one molecule.

        Args:
            i: Its number.

        Returns:
            The text as it was given.
        """
        return self.store.smiles(int(i))

    def status(self, i: int | np.integer) -> str:
        """Tells whether a molecule is one, or stands in the place of a bad record.

        Args:
            i: Its number.

        Returns:
            ``"ok"``, or the reason why the record could not be used.
        """
        return self._reasons.get(int(self.rows[i]), "ok")

    def check(self) -> None:
        """Reads every file once and compares checksums.

        Raises:
            ValueError: If one is damaged.
        """
        self.store.check()

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, i: Any) -> Any:
        """Reads one molecule; of a slice, a mask or several numbers makes a ``Subset``."""
        if not isinstance(i, int | np.integer):
            chosen = np.arange(len(self))[i.cpu().numpy() if isinstance(i, Tensor) else i]
            if chosen.ndim:
                return Subset(self, chosen.tolist())
            i = int(chosen)
        data = self.store.columns([int(i)])[0]
        return data if self.transform is None else self.transform(data)

    def __getitems__(self, chosen: Sequence[int] | np.ndarray) -> MoleculeColumns | list[Any]:
        """Reads the molecules of a batch at once, which loaders ask for."""
        columns = self.store.columns(chosen)
        if self.transform is None:
            return columns
        return [self.transform(data) for data in columns]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} molecules, {len(self.task_names)} tasks)"


def open_or_build(
    root: str | Path | None,
    name: str,
    key: Mapping[str, str],
    read: Callable[[], Iterable[RawMolecule]],
    featurizer: Featurizer,
    *,
    task_names: Sequence[str],
    options: FeaturizeOptions,
) -> MoleculeStore:
    """Opens the store of a source, or makes it.

    The folder carries a hash of all that its content depends on in its name, so that a change of
    the source, of the featurizer or of the policy makes another one.

    Args:
        root: The folder is made in ``root/processed``; None keeps the store in memory.
        name: Name of the data set.
        key: What the records depend on, such as the checksum of the file.
        read: Reads the records.
        featurizer: Describes one molecule.
        task_names: Names of the targets.
        options: How to featurize.

    Returns:
        The store.

    Raises:
        OSError: If the folder cannot be written.
        ValueError: At the first bad row under the policy ``"raise"``, or if no row is left.
    """
    folder = None
    if root is not None:
        # Not the policy alone: with another one, whole shards without bad rows are kept.
        parts = {**key, "format": FORMAT, "featurizer": featurizer.digest}
        parts["tasks"] = json.dumps(list(task_names))
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
        folder = Path(root) / "processed" / f"{name.lower()}.{digest}"
        found = None if options.force else _finished(folder, options)
        if found is not None:
            return found
    return build_store(
        folder,
        read(),
        featurizer,
        task_names=task_names,
        options=options,
        name=name,
        wait=True,  # all ranks of a run come here at once
    )


def _finished(folder: Path, options: FeaturizeOptions) -> MoleculeStore | None:
    try:
        store = MoleculeStore.open(folder)
    except (FileNotFoundError, ValueError):
        # Not finished, or damaged: what is whole is kept when the store is made.
        return None
    fits = store.header["bad"] == options.bad or not store.header["num_errors"]
    return store if fits else None
