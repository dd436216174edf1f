"""Serve the molecules of NCI, MoleculeNet, a user's own file, and a packed folder."""

from collections.abc import Mapping
from typing import Any

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets import NCI, MoleculeFile, MoleculeNet, PackedMolecules
from pyg_dynbatch.datasets.molecule_net import member_named
from pyg_dynbatch.featurizers import read_molecules
from pyg_dynbatch.training.molecule_datamodule import MoleculeDataModule
from pyg_dynbatch.training.molecule_schema import PropertyKind


class NCIData(MoleculeDataModule):
    """Serves 5,000 molecules that come with RDKit, with their polar surface areas.

    Args:
        root: Folder of the packed molecules; left out, they are made anew in memory.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.molecule_datamodule.MoleculeDataModule`.

    Example:
        >>> NCIData(batch_size=32, pairs=2).kind
        'regression'
    """

    def __init__(self, root: str | None = "data/nci", **loading: Any) -> None:
        super().__init__(**loading)
        self.root = root

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Says that this is a regression of one property."""
        return {"kind": "regression", "targets": ["TPSA"]}

    @property
    def kind(self) -> PropertyKind:
        """Kind of the property: a regression."""
        return "regression"

    def load(self) -> PackedMolecules:
        """Loads all molecules."""
        return NCI(self.root, self.featurizer, self.reading)


class MoleculeNetData(MoleculeDataModule):
    """Serves a data set of MoleculeNet.

    Args:
        name: ``ESOL``, ``FreeSolv``, ``Lipophilicity``, ``BBBP``, ``Tox21``, ``ToxCast``,
            ``SIDER``, ``ClinTox``, ``HIV``, ``BACE``, ``MUV`` or ``QM8``.
        root: Folder for downloads and packed molecules; left out, ``data/`` and the name.
        raw_dir: Folder with the raw file; left out, ``root/raw``, where it is downloaded to.
        verify: Whether files other than the published ones are refused.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.molecule_datamodule.MoleculeDataModule`.

    Example:
        >>> MoleculeNetData("ESOL", max_pairs=20_000).root
        'data/esol'
    """

    own_targets = False

    def __init__(
        self,
        name: str,
        root: str | None = None,
        raw_dir: str | None = None,
        verify: bool = True,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.member = name
        self.root = root or f"data/{name.lower()}"
        self.raw_dir = raw_dir
        self.verify = verify

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Looks up the data set."""
        _, member = member_named(options["name"])
        names = map(str, range(member.tasks)) if isinstance(member.tasks, int) else member.tasks
        return {"kind": member.task_type, "targets": list(names)}

    @property
    def kind(self) -> PropertyKind:
        """Kind of the properties, which the data set says."""
        return self.loaded.task_type  # type: ignore[attr-defined]

    def load(self) -> PackedMolecules:
        """Loads all molecules."""
        return MoleculeNet(
            self.root, self.member, self.featurizer, self.raw_dir, self.verify, self.reading
        )


class MoleculeFileData(MoleculeDataModule):
    """Serves the molecules of a user's own CSV, TSV, SMILES or SDF file.

    Args:
        file: The file.
        targets: Its columns (or SDF properties) to learn.
        kind: ``regression``, ``binary`` (labels 0 and 1, which a regression refuses) or
            ``multiclass`` (labels 0, 1, ...).
        classes: Number of classes of ``multiclass``.
        smiles_column: Column of the SMILES; left out, the one that looks like it.
        root: Folder of the packed molecules; left out, they are made anew in memory.
        missing: Texts of missing targets, beside empty cells, nan and NA.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.molecule_datamodule.MoleculeDataModule`.

    Raises:
        ValueError: If there is no column to learn.

    Example:
        >>> MoleculeFileData("mine.csv", ["melts"], kind="binary").kind
        'binary'
    """

    def __init__(
        self,
        file: str,
        targets: list[str],
        kind: PropertyKind = "regression",
        classes: int = 2,
        smiles_column: str | None = None,
        root: str | None = None,
        missing: list[str] | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        if not targets:
            raise ValueError(
                mismatch(
                    "MoleculeFileData: there is nothing to learn",
                    expected="the name of one column or more as targets",
                    got="none",
                    mend="--data.init_args.targets '[solubility]'",
                )
            )
        self.file = file
        self.columns = targets
        self._kind: PropertyKind = kind
        self.classes = classes
        self.smiles_column = smiles_column
        self.root = root
        self.missing = missing or []

    @property
    def kind(self) -> PropertyKind:
        """Kind of the properties, as given."""
        return self._kind

    @property
    def num_labels(self) -> int:
        """Classes of a ``multiclass`` property, as given."""
        return self.classes

    def load(self) -> PackedMolecules:
        """Loads all molecules."""
        columns = (self.smiles_column, self.columns)
        return MoleculeFile(
            self.file, self.root, self.featurizer, *columns, self.reading, missing=self.missing
        )

    def column(self, name: str) -> Mapping[int, str]:
        """Reads a column of the file.

        Args:
            name: The column.

        Returns:
            Its texts by number of the record, empty where an SDF record has no such field.

        Raises:
            ValueError: If the file has no such column.
        """
        texts: dict[int, str] = {}
        seen: dict[str, None] = {}
        for record in read_molecules(self.file, smiles_column=self.smiles_column):
            seen |= dict.fromkeys(record.extra)
            # A record of an SDF file holds only the fields it has a value for.
            texts[record.row] = record.extra.get(name, "")
        if name not in seen:
            raise ValueError(
                mismatch(
                    "MoleculeFileData: there is no such column to split by",
                    expected=f"one of {', '.join(seen)}",
                    got=repr(name),
                    where=self.file,
                )
            )
        return texts


class PackedMoleculeData(MoleculeDataModule):
    """Serves the molecules of a folder that ``pyg-dynbatch featurize`` has packed.

    Neither the file they come from nor RDKit is needed, but for splits by scaffold and for the
    look at leakage. What describes them is written in the folder: a featurizer is only compared
    with it, and ``reading`` is of no use here.

    Args:
        root: The folder.
        kind: ``regression``, ``binary`` (labels 0 and 1, which a regression refuses) or
            ``multiclass`` (labels 0, 1, ...).
        classes: Number of classes of ``multiclass``.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.molecule_datamodule.MoleculeDataModule`.

    Example:
        >>> PackedMoleculeData("packed", "binary", pairs="bonds").root
        'packed'
    """

    def __init__(
        self, root: str, kind: PropertyKind = "regression", classes: int = 2, **loading: Any
    ) -> None:
        super().__init__(**loading)
        self.root = root
        self._kind: PropertyKind = kind
        self.classes = classes

    @property
    def kind(self) -> PropertyKind:
        """Kind of the properties, as given."""
        return self._kind

    @property
    def num_labels(self) -> int:
        """Classes of a ``multiclass`` property, as given."""
        return self.classes

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Reads the names of the targets in the folder."""
        return {"kind": options["kind"], "targets": PackedMolecules(options["root"]).task_names}

    def load(self) -> PackedMolecules:
        """Opens the folder.

        Raises:
            FileNotFoundError: If it holds no finished store.
            ValueError: If the store is damaged, has no targets, or another featurizer made it.
        """
        molecules = PackedMolecules(self.root, self.featurizer)
        if not molecules.task_names:
            raise ValueError(
                mismatch(
                    "PackedMoleculeData: there is nothing to learn",
                    expected="packed molecules with one target or more",
                    got="none",
                    where=self.root,
                    mend="pyg-dynbatch featurize --targets NAME into another folder",
                )
            )
        return molecules
