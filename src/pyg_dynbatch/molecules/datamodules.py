"""Lightning data modules of NCI, MoleculeNet, your own files and packed folders."""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import Subset

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.build import ERRORS, FeaturizeOptions
from pyg_dynbatch.molecules.data import MoleculeLoader
from pyg_dynbatch.molecules.datasets import NCI, MoleculeFile, MoleculeNet, member_named
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.files import read_molecules
from pyg_dynbatch.molecules.pair_table import check_pair_set
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.molecules.split_options import SplitOptions, make_split
from pyg_dynbatch.molecules.splits import Split, canonical_texts, find_duplicates, find_leakage
from pyg_dynbatch.molecules.store import PackedMolecules
from pyg_dynbatch.samplers import pair_counts
from pyg_dynbatch.training.data import SPLITS, SplitDataModule, SplitName

_SHOWN = 5

PairSet = Literal["all", "connected", "bonds"] | int


class MoleculeDataModule(SplitDataModule):
    """Splits a set of molecules and makes the loaders of the three parts.

    Args:
        split: How the molecules are divided.
        pairs: Which pairs of atoms the model sees: ``all``, ``connected`` (within a fragment),
            ``bonds``, or a number from 1 to 7: at most so many bonds apart.
        self_pairs: Whether each atom is paired with itself too.
        featurizer: Describes a molecule; left out, ``MoleculeFeaturizer()``.
        reading: Policy for bad rows, processes that featurize.
        batch_size: Molecules in a batch.
        max_pairs: If given, batches hold at most so many pairs of atoms, counted before `pairs`
            chooses among them, and any number of molecules. A larger molecule makes a batch of its
            own, with a warning.
        num_workers: Loader processes; 0 loads in the process that trains.
        predict_split: Which split ``predict`` runs over.

    Raises:
        ValueError: If there is no such set of pairs, or an option is out of range.
    """

    def __init__(
        self,
        split: SplitOptions = SplitOptions(),  # noqa: B008 - frozen
        pairs: PairSet = "all",
        self_pairs: bool = True,
        featurizer: MoleculeFeaturizer | None = None,
        reading: FeaturizeOptions = FeaturizeOptions(),  # noqa: B008 - frozen
        batch_size: int = 64,
        max_pairs: int | None = None,
        num_workers: int = 0,
        predict_split: SplitName = "test",
    ) -> None:
        super().__init__(batch_size, max_pairs, num_workers, predict_split)
        check_pair_set(pairs)  # here, as hours may pass until the first batch is made
        self.max_pairs = max_pairs
        self.split = split
        self.pairs = pairs
        self.self_pairs = self_pairs
        self.featurizer = featurizer
        self.reading = reading
        self._restored = False

    own_targets: ClassVar[bool] = True
    """Whether the targets are the user's choice, to be refused where one cannot be learned."""

    @abstractmethod
    def load(self) -> PackedMolecules:
        """Loads all molecules."""

    @property
    @abstractmethod
    def kind(self) -> PropertyKind:
        """Kind of the properties."""

    @property
    def num_labels(self) -> int:
        """Classes of a ``multiclass`` property."""
        return 2

    @cached_property
    def loaded(self) -> PackedMolecules:
        """All molecules, as they were loaded."""
        return self.load()

    @cached_property
    def molecules(self) -> PackedMolecules:
        """All molecules, with labels that fit their kind.

        Raises:
            ValueError: If a label is none of the classes.
        """
        molecules = self.loaded
        if self.kind != "regression":
            classes = 2 if self.kind == "binary" else self.num_labels
            check_labels(molecules, classes, type(self).__name__)
        return molecules

    @cached_property
    def used_split_seed(self) -> int:
        """The seed of the split: the one given, else that of the run."""
        if self.split.seed is not None:
            return self.split.seed
        return int(os.environ.get("PL_GLOBAL_SEED", 0))

    @cached_property
    def parts(self) -> Split:
        """Which molecules are in which split.

        Raises:
            ValueError: If the options cannot be used, or a written split has other molecules.
        """
        seed = self.used_split_seed
        split = make_split(self.molecules, self.split, seed, self.kind, self.column)
        if self.split.method == "file" and split.molecules is None:
            rank_zero_warn(
                f"{self.split.file}: the split knows row numbers alone; that the rows of the data "
                "are those it was made for is taken on trust"
            )
        return split.for_molecules(self.molecules.texts(), self._where)

    @property
    def _where(self) -> object:
        return getattr(self, "file", None) or self.molecules.folder or ""

    def column(self, name: str) -> Mapping[int, str]:
        """Reads a column of the source, for splits that a column says.

        Args:
            name: The column.

        Returns:
            Its texts by number of the record.

        Raises:
            ValueError: If the source has no columns.
        """
        raise mismatch(
            ValueError,
            f"{type(self).__name__}: this data set has no column that splits it",
            "MoleculeFileData, or another method",
            f"column {name!r}",
        )

    @property
    def schema(self) -> dict[str, Any]:
        """What a model must know, as plain values."""
        molecules = self.molecules
        return MoleculeSchema(
            featurizer=molecules.featurizer_spec,
            atom_channels=len(molecules.atom_names),
            pair_table=molecules.pair_table,
            task_names=molecules.task_names,
            kind=self.kind,
            num_classes=self.num_labels,
            pairs=self.pairs,
            self_pairs=self.self_pairs,
        ).as_dict()

    def indices(self, split: SplitName) -> np.ndarray:
        """Gives the numbers of the molecules of a split.

        Args:
            split: Which.

        Returns:
            Their numbers among :attr:`molecules`.
        """
        return np.asarray(getattr(self.parts, split))

    def dataset(self, split: SplitName) -> Subset:
        """Gives one split."""
        return Subset(self.molecules, self.indices(split).tolist())

    def targets(self, split: SplitName) -> Float[Tensor, "molecule task"]:
        """Gives the targets of a split, NaN where unknown.

        Args:
            split: Which.

        Returns:
            One row a molecule.
        """
        return torch.from_numpy(np.array(self.molecules.targets[self.indices(split)]))

    def descriptors(self, split: SplitName) -> Float[Tensor, "molecule descriptor"]:
        """Gives the descriptors of whole molecules of a split, NaN where unknown.

        Args:
            split: Which.

        Returns:
            One row a molecule, without columns if the featurizer gives no descriptors.
        """
        return torch.from_numpy(np.array(self.molecules.descriptors[self.indices(split)]))

    def sizes(self, split: SplitName) -> list[int]:
        """Counts the pairs of atoms of every molecule."""
        return pair_counts(self.dataset(split))

    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> MoleculeLoader:
        """Makes a loader whose batches carry their pairs of atoms."""
        options = {"pairs": self.pairs, "self_pairs": self.self_pairs, **options}
        table = self.molecules.pair_table
        return MoleculeLoader(dataset, table, batch_size=batch_size, **options)

    def setup(self, stage: str) -> None:
        """Loads and splits the molecules, and says what there is.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.

        Raises:
            ValueError: If a split that is needed is empty, or a target cannot be learned.
        """
        for split in self.splits_of(stage):
            if not len(self.indices(split)):
                raise mismatch(
                    ValueError,
                    f"{type(self).__name__}: the {split} split is empty",
                    "one molecule or more",
                    f"none of {len(self.molecules)}",
                    hint="other split options",
                )
        if stage == "fit":
            counts = ", ".join(f"{len(self.indices(split)):,} {split}" for split in SPLITS)
            rank_zero_info(f"molecules: {counts}; split {self.parts.method} {self.parts.digest}")
            if self.own_targets:
                check_targets(self.molecules, self.kind, type(self).__name__, self._where)
            self._check_parts()
            if self.molecules.errors:
                bad = self.molecules.errors[0]
                count = len(self.molecules.errors)
                folder = self.molecules.folder
                report = "given a root, a file lists them" if folder is None else folder / ERRORS
                first = f"the first {bad.where}: {bad.reason}"
                rank_zero_info(f"bad rows: {count:,}, {first}; all of them: {report}")
            if self.split.leakage:
                smiles = self.molecules.texts()
                texts = canonical_texts(smiles)
                rank_zero_info(f"leakage: {find_leakage(self.parts, smiles, texts)}")
                found = find_duplicates(smiles, self.molecules.targets, texts=texts)
                if found.groups:
                    rank_zero_info(f"duplicates: {found}")

    def _check_parts(self) -> None:
        """Looks for parts whose targets are all alike, which of classes cannot be used."""
        names = self.molecules.task_names
        parts: tuple[SplitName, ...] = ("train", "val") if self.kind == "binary" else ("train",)
        for part in parts:
            alike = [
                name
                for name, column in zip(names, self.targets(part).T, strict=True)
                if len(column[~column.isnan()].unique()) < 2
            ]
            if len(alike) == len(names) and self.kind != "regression":
                raise mismatch(
                    ValueError,
                    f"{type(self).__name__}: all targets of the {part} split are alike",
                    "a property with two different values or more",
                    f"none of {', '.join(names)}",
                    where=self._where,
                    hint="--data.init_args.split.method stratified, or other fractions",
                )
            if alike:
                shown = ", ".join(alike[:_SHOWN]) + ", …" * (len(alike) > _SHOWN)
                rank_zero_info(
                    f"targets of the {part} split that are all alike: {len(alike)} of {len(names)}"
                    f" properties ({shown})"
                )

    def describe_examples(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Gives the record numbers and SMILES of molecules to be predicted.

        Args:
            numbers: Numbers of the molecules within the split.

        Returns:
            Columns ``row`` and ``smiles``.
        """
        chosen = self.indices(self.predict_split)[numbers]
        texts = np.array(self.molecules.texts(), dtype=object)
        return {"row": self.molecules.rows[chosen], "smiles": texts[chosen]}

    def state_dict(self) -> dict[str, Any]:
        """Notes the split, so that a checkpoint is never tested on molecules it has seen."""
        options = {**asdict(self.split), "seed": self.parts.seed}
        del options["leakage"]
        return {"split": self.parts.as_dict(), "split_options": options}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the split of a checkpoint if the rows alone were reordered since.

        Args:
            state_dict: What the checkpoint holds.

        Raises:
            ValueError: If the molecules are others, or are divided in another way.
        """
        if not isinstance(state_dict.get("split"), Mapping):
            raise mismatch(
                ValueError,
                f"{type(self).__name__}: the checkpoint does not tell its molecules",
                "a checkpoint with the hashes of its molecules",
                "one of an earlier version",
                hint="train again, or predict with --checkpoint and --input",
            )
        noted = Split.from_dict(state_dict["split"])
        mapped = noted.for_molecules(self.molecules.texts(), self._where)
        if mapped == self.parts:
            return
        options, own = state_dict["split_options"], self.state_dict()["split_options"]
        changed = {key: value for key, value in options.items() if own[key] != value}
        drawn = self.split.method not in ("column", "file") and not self._restored
        if mapped is noted or changed or not drawn:
            raise self._another_split(mapped, changed)
        rank_zero_info("split: the rows are in another order; every molecule stays in its part")
        self.parts, self._restored = mapped, True

    def _another_split(self, mapped: Split, changed: Mapping[str, Any]) -> ValueError:
        options = "".join(
            f" --data.init_args.split.{key} {json.dumps(value, separators=(',', ':'))}"
            for key, value in changed.items()
        )
        written = " --data.init_args.split.method file --data.init_args.split.file RUN/split.json"
        return mismatch(
            ValueError,
            f"{type(self).__name__}: the checkpoint was trained on another split",
            repr(mapped),
            repr(self.parts),
            where=self._where,
            hint=(options or written).strip(),
        )


def check_labels(molecules: PackedMolecules, num_classes: int, name: str) -> None:
    """Looks for labels that are none of the classes."""
    targets = molecules.targets
    known = ~np.isnan(targets)
    wrong = known & ((targets < 0) | (targets >= num_classes) | (targets != np.round(targets)))
    if wrong.any():
        molecule, task = (int(part[0]) for part in np.nonzero(wrong))
        raise mismatch(
            ValueError,
            f"{name}: a label is out of range",
            f"whole numbers from 0 to {num_classes - 1}, or nothing where unknown",
            f"{targets[molecule, task]:g}",
            where=f"row {int(molecules.rows[molecule])}, column {molecules.task_names[task]}",
            hint="kind: regression for values, kind: multiclass for more classes",
        )


def check_targets(molecules: PackedMolecules, kind: PropertyKind, name: str, where: object) -> None:
    """Looks for targets that cannot be learned, and for labels that are taken for values."""
    targets = molecules.targets
    known = ~np.isnan(targets)
    for task, column in enumerate(molecules.task_names):
        values, counts = np.unique(targets[known[:, task], task], return_counts=True)
        if len(values) < 2:
            got = f"{values[0]:g} in all {counts[0]} rows that have one" if len(values) else "none"
            raise mismatch(
                ValueError,
                f"{name}: there is nothing to learn from the target {column!r}",
                "two different values or more",
                got,
                where=where,
                hint="leave it out of the targets",
            )
    if kind == "regression" and np.isin(targets[known], (0, 1)).all():
        raise mismatch(
            ValueError,
            f"{name}: the targets are labels, not values",
            "values other than 0 and 1 for kind: regression",
            f"0 and 1 alone in {', '.join(molecules.task_names[:_SHOWN])}",
            where=where,
            hint="--data.init_args.kind binary",
        )


class NCIData(MoleculeDataModule):
    """Serves 5,000 molecules that come with RDKit, with their polar surface areas.

    Args:
        root: Folder of the packed molecules; left out, they are made anew in memory.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.molecules.datamodules.MoleculeDataModule`.

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
            :class:`~pyg_dynbatch.molecules.datamodules.MoleculeDataModule`.

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
            :class:`~pyg_dynbatch.molecules.datamodules.MoleculeDataModule`.

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
            raise mismatch(
                ValueError,
                "MoleculeFileData: there is nothing to learn",
                "the name of one column or more as targets",
                "none",
                hint="--data.init_args.targets '[solubility]'",
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
            raise mismatch(
                ValueError,
                "MoleculeFileData: there is no such column to split by",
                f"one of {', '.join(seen)}",
                repr(name),
                where=self.file,
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
            :class:`~pyg_dynbatch.molecules.datamodules.MoleculeDataModule`.

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
            raise mismatch(
                ValueError,
                "PackedMoleculeData: there is nothing to learn",
                "packed molecules with one target or more",
                "none",
                where=self.root,
                hint="pyg-dynbatch featurize --targets NAME into another folder",
            )
        return molecules
