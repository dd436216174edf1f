"""Data modules of molecules, which are split here."""

import hashlib
import os
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch_geometric.datasets import MoleculeNet as PyGMoleculeNet

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.lightning.data import DataModule, SplitName
from pyg_dynbatch.molecules.datasets import (
    NCI,
    MoleculeDataset,
    MoleculeFile,
    MoleculeNet,
    check_labels,
    kind_of,
    table_of,
)
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.read import TableOptions, read_molecules
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.molecules.splits import Split, SplitOptions, describe_leakage, make_split

PairSet = Literal["all", "connected", "bonds"] | int


class MoleculeDataModule(DataModule):
    """Base of data modules of molecules, which are split here.

    ``load`` returns all molecules, ``parts`` the numbers of those in every split, and ``open`` one
    split. A checkpoint holds the split, so that it is never tested on the molecules it was trained
    on.

    Args:
        split: How the molecules are split.
        pair_set: Pairs of atoms that the model sees: ``all``, ``connected`` (within a fragment),
            ``bonds``, or the largest number of bonds between two atoms, 1 to 7.
        self_pairs: Whether each atom is also paired with itself.
        featurizer: Describes a molecule; None for ``MoleculeFeaturizer()``.
        batch_size: Molecules in a batch.
        max_size: The largest number of pairs of atoms in a batch, in place of ``batch_size``.
        num_workers: Processes that load; 0 loads in the training process.
        processes: Processes that featurize; by default one per core, if it takes more than two
            seconds and the script has ``if __name__ == "__main__":``.
    """

    kind: PropertyKind
    num_classes: int = 2
    table: TableOptions = TableOptions()

    def __init__(
        self,
        split: SplitOptions = SplitOptions(),  # noqa: B008 - frozen
        pair_set: PairSet = "all",
        self_pairs: bool = True,
        featurizer: MoleculeFeaturizer | None = None,
        batch_size: int = 64,
        max_size: int | None = None,
        num_workers: int = 0,
        processes: int | None = None,
    ) -> None:
        super().__init__(batch_size, max_size, num_workers)
        self.processes = processes
        self.split = split
        self.pair_set = pair_set
        self.self_pairs = self_pairs
        self.featurizer = featurizer or MoleculeFeaturizer()

    @abstractmethod
    def load(self) -> MoleculeDataset:
        """Return all molecules."""

    @cached_property
    def molecules(self) -> MoleculeDataset:
        """All molecules; their labels were checked."""
        molecules = self.load()
        if self.kind == "regression":
            return molecules
        classes = 2 if self.kind == "binary" else self.num_classes
        check_labels(
            type(self).__name__,
            molecules.targets,
            classes,
            molecules.smiles,
            molecules.target_names,
        )
        return molecules

    @cached_property
    def parts(self) -> Split:
        """The numbers of the molecules of every split."""
        molecules = self.molecules
        return make_split(
            self.split,
            int(os.environ.get("PL_GLOBAL_SEED", 0)),
            molecules.smiles,
            self.column(self.split.column) if self.split.column else None,
        )

    def column(self, name: str) -> list[str]:
        """Return the column that assigns molecules to splits."""
        problem = f"{type(self).__name__}: this data set has no column to split by"
        raise mismatch(ValueError, problem, "MoleculeFileData, or a different method", name)

    def open(self, split: SplitName) -> MoleculeDataset:
        """Return the molecules of a split."""
        return self.molecules[getattr(self.parts, split)]

    @property
    def schema(self) -> MoleculeSchema:
        """What a model needs to know about the molecules."""
        return MoleculeSchema(
            self.molecules.target_names,
            self.kind,
            self.num_classes,
            self.featurizer,
            self.pair_set,
            self.self_pairs,
            self.table,
        )

    def setup(self, stage: str) -> None:
        """Open all splits; check the targets before training, and report the data."""
        super().setup(stage)
        if stage != "fit":
            return

        counts = ", ".join(f"{len(self.dataset(split)):,} {split}" for split in self.splits)
        omitted = len(self.molecules) - sum(len(self.dataset(split)) for split in self.splits)
        unused = f", {omitted:,} in no part" if omitted else ""
        rank_zero_info(f"molecules: {counts}{unused} ({self.split.method} split)")
        rank_zero_info(describe_leakage(self.parts, self.molecules.smiles))
        errors = self.molecules.errors
        if errors:
            first = f"{errors[0].where}: {errors[0].reason}"
            rank_zero_warn(f"{len(errors):,} records are not molecules; the first is {first}")
        self._check_targets()

    def _check_targets(self) -> None:
        """Raise an error if there is nothing to learn, or nothing to choose a checkpoint by."""
        train = self.dataset("train").targets
        for name, column in zip(self.molecules.target_names, train.T, strict=True):
            known = column[~np.isnan(column)]
            if len(np.unique(known)) >= 2:
                continue
            got = f"{known[0]:g} in all {len(known)} molecules" if len(known) else "no target"
            text = f"nothing can be learned from the target {name!r}: {got} of the training set"
            if len(self.molecules.target_names) == 1:
                problem = f"{type(self).__name__}: {text}"
                raise mismatch(ValueError, problem, "two different values")
            rank_zero_warn(text)

        if np.isnan(self.dataset("val").targets).all():
            problem = f"{type(self).__name__}: no molecule of the validation split has a target"
            raise mismatch(ValueError, problem, "at least one", hint="other fractions of the split")

    def _digest(self) -> str:
        digest = hashlib.sha256("\n".join(self.molecules.smiles).encode())
        digest.update(np.ascontiguousarray(self.molecules.targets).tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order, and the split."""
        parts = {split: getattr(self.parts, split).tolist() for split in self.splits}
        return {**super().state_dict(), "split": parts, "molecules": self._digest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the split of a checkpoint, which belongs to the same molecules."""
        super().load_state_dict(state_dict)
        if state_dict["molecules"] != self._digest():
            problem = (
                f"{type(self).__name__}: the checkpoint was trained on other molecules or targets"
            )
            hint = "for other molecules, pyg-dynbatch predict"
            raise mismatch(ValueError, problem, "the same file, in the same order", hint=hint)
        splits = state_dict["split"].items()
        self.parts = Split(**{name: np.array(numbers, np.int64) for name, numbers in splits})
        self._opened = {}


class NCIData(MoleculeDataModule):
    """4,999 molecules that come with RDKit, with their polar surface areas.

    Args:
        root: Folder for processed files; None keeps the molecules in memory.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

    Example:
        >>> NCIData(batch_size=32, pair_set=2).kind
        'regression'
    """

    kind = "regression"

    def __init__(self, root: str | None = "data/nci", **loading: Any) -> None:
        super().__init__(**loading)
        self.root = root

    def load(self) -> NCI:
        """Return all molecules."""
        return NCI(self.root, self.featurizer, processes=self.processes)


class MoleculeNetData(MoleculeDataModule):
    """A data set of MoleculeNet.

    Args:
        name: ESOL, FreeSolv, Lipo, PCBA, MUV, HIV, BACE, BBBP, Tox21, ToxCast, SIDER or ClinTox.
        root: Folder of downloads and processed files; by default ``data/`` and the name.
        raw_dir: Folder of the raw file; by default ``root/raw``, to which it is downloaded.
        verify: Whether the file must be the published one.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

    Example:
        >>> MoleculeNetData("ESOL", max_size=20_000).root
        'data/esol'
    """

    def __init__(
        self,
        name: str,
        root: str | None = None,
        raw_dir: str | None = None,
        verify: bool = True,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        key = checked_choice("MoleculeNetData: unknown name", name.lower(), PyGMoleculeNet.names)
        self.member = key
        self.kind = kind_of(key)
        self.table = table_of(key)
        self.root = root or f"data/{key}"
        self.raw_dir = raw_dir
        self.verify = verify

    def load(self) -> MoleculeNet:
        """Return all molecules."""
        return MoleculeNet(
            self.root,
            self.member,
            self.featurizer,
            self.raw_dir,
            self.verify,
            processes=self.processes,
        )


class MoleculeFileData(MoleculeDataModule):
    """The molecules of a CSV, TSV or SDF file.

    Args:
        file: The file.
        targets: Columns (or SDF fields) to learn.
        kind: ``regression``, ``binary`` (labels 0 and 1) or ``multiclass`` (labels 0, 1, ...).
        num_classes: Number of classes of ``multiclass``.
        table: Column of the SMILES, and how cells are written.
        root: Folder for processed files; None keeps the molecules in memory.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

    Example:
        >>> MoleculeFileData("mine.csv", "melts", kind="binary").targets
        ['melts']
    """

    def __init__(
        self,
        file: str,
        targets: list[str] | str,
        kind: PropertyKind = "regression",
        num_classes: int = 2,
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        root: str | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.file = file
        self.targets = [targets] if isinstance(targets, str) else [str(name) for name in targets]
        self.kind: PropertyKind = kind
        self.num_classes = num_classes
        self.table = table
        self.root = root

    def load(self) -> MoleculeFile:
        """Return all molecules; records that are none are skipped and reported."""
        return MoleculeFile(
            self.file,
            self.root,
            self.featurizer,
            self.targets,
            self.kind,
            self.table,
            bad="skip",
            processes=self.processes,
        )

    def setup(self, stage: str) -> None:
        """Open all splits; say whether values look like classes."""
        super().setup(stage)
        targets = self.molecules.targets
        values = np.unique(targets[~np.isnan(targets)])
        are_classes = len(values) > 1 and np.array_equal(values, np.arange(len(values)))
        if stage == "fit" and self.kind == "regression" and are_classes:
            rank_zero_warn(
                f"{self.file}: all targets are whole numbers from 0 to {len(values) - 1}; if they "
                "are classes, choose kind: binary or multiclass"
            )

    def column(self, name: str) -> list[str]:
        """Return a column of the file, for every molecule; a missing SDF field is empty."""
        texts: dict[int, str] = {}
        known: Mapping[str, str] = {}
        for record in read_molecules(self.file, table=self.table):
            known = {**known, **record.extra}
            texts[record.row] = record.extra.get(name, "")
        if name not in known:
            problem = "MoleculeFileData: the column to split by is missing"
            raise mismatch(ValueError, problem, f"one of {', '.join(known)}", name, where=self.file)
        rows: Any = self.molecules.columns.fields["row"]
        return [texts[row] for row in rows.tolist()]
