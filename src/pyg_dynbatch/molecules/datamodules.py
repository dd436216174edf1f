"""Lightning data modules: NCI, MoleculeNet, molecule files and packed folders."""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
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
from pyg_dynbatch.molecules import splits
from pyg_dynbatch.molecules.data import MoleculeLoader
from pyg_dynbatch.molecules.datasets import NCI, MoleculeFile, MoleculeNet, member_named
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.features.pair_table import check_pair_set
from pyg_dynbatch.molecules.files.build import ERRORS, FeaturizeOptions
from pyg_dynbatch.molecules.files.read import (
    SMILES_COLUMN,
    FoundTargets,
    TableOptions,
    find_targets,
    read_molecules,
)
from pyg_dynbatch.molecules.files.store import PackedMolecules
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.molecules.splits import Split, SplitOptions
from pyg_dynbatch.samplers import pair_counts
from pyg_dynbatch.training.data import SPLITS, SplitDataModule, SplitName

_SHOWN = 5

PairSet = Literal["all", "connected", "bonds"] | int


class MoleculeDataModule(SplitDataModule):
    """Split a set of molecules and build the loaders of the three splits.

    Args:
        split: How the molecules are split.
        pairs: Pairs of atoms that the model sees: ``all``, ``connected`` (within a fragment),
            ``bonds``, or the largest number of bonds between two atoms, 1 to 7.
        self_pairs: Whether each atom is paired with itself too.
        featurizer: Describes a molecule; ``MoleculeFeaturizer()`` by default.
        reading: Policy for bad rows, and the number of processes that featurize.
        batch_size: Molecules per batch.
        max_pairs: If given, the limit of a batch instead of `batch_size`: pairs of atoms, before
            `pairs` selects among them. A larger molecule is a separate batch.
        num_workers: Loader processes; 0 loads in the training process.
        predict_split: The split that ``predict`` runs over.

    Raises:
        ValueError: If the set of pairs is unknown, or an option is out of range.
    """

    kind: PropertyKind
    classes: int = 2  # of a multiclass property

    own_targets: ClassVar[bool] = True
    """Whether the user chooses the targets, so that one that cannot be learned is an error."""

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
        check_pair_set(pairs)  # now, as the first batch may be hours away
        self.split, self.pairs, self.self_pairs = split, pairs, self_pairs
        self.max_pairs, self.featurizer, self.reading = max_pairs, featurizer, reading
        self._restored = False

    @abstractmethod
    def load(self) -> PackedMolecules:
        """Load all molecules."""

    @cached_property
    def molecules(self) -> PackedMolecules:
        """All molecules; their labels were checked."""
        molecules = self.load()
        if self.kind == "regression":
            return molecules
        targets, classes = molecules.targets, 2 if self.kind == "binary" else self.classes
        wrong = np.argwhere(~np.isnan(targets) & ~np.isin(targets, np.arange(classes)))
        for row, task in wrong[:1]:
            expected, got = f"whole numbers from 0 to {classes - 1}", f"{targets[row, task]:g}"
            where = f"row {molecules.rows[row]}, column {molecules.task_names[task]}"
            hint = "kind: regression for values, kind: multiclass for more classes"
            raise self._error("a label is out of range", expected, got, where, hint)
        return molecules

    @cached_property
    def used_split_seed(self) -> int:
        """The seed of the split; by default that of the run."""
        seed = self.split.seed
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed

    @cached_property
    def parts(self) -> Split:
        """The molecules of every split."""
        seed = self.used_split_seed
        split = splits.make_split(self.molecules, self.split, seed, self.kind, self.column)
        if self.split.method == "file" and split.molecules is None:
            what = "the split has only row numbers, so that the molecules cannot be checked"
            rank_zero_warn(f"{self.split.file}: {what}")
        return split.for_molecules(self.molecules.texts(), self._where)

    @property
    def _where(self) -> object:
        return getattr(self, "file", None) or self.molecules.folder or ""

    def _error(
        self, what: str, expected: str, got: str, where: object = "", hint: str = ""
    ) -> ValueError:
        what = f"{type(self).__name__}: {what}"
        return mismatch(ValueError, what, expected, got, where=where, hint=hint)

    def column(self, name: str) -> Mapping[int, str]:
        """Read the column that assigns records to splits: its text by number of the record."""
        what = "this data set has no column to split by"
        raise self._error(what, "MoleculeFileData, or a different method", f"column {name!r}")

    @property
    def schema(self) -> dict[str, Any]:
        """What a model needs from the data, as plain values."""
        molecules = self.molecules
        return MoleculeSchema(
            featurizer=molecules.featurizer_spec,
            atom_channels=len(molecules.atom_names),
            pair_table=molecules.pair_table,
            task_names=molecules.task_names,
            kind=self.kind,
            num_classes=self.classes,
            pairs=self.pairs,
            self_pairs=self.self_pairs,
        ).as_dict()

    def indices(self, split: SplitName) -> np.ndarray:
        """Return the indices of a split into :attr:`molecules`."""
        return np.asarray(getattr(self.parts, split))

    def dataset(self, split: SplitName) -> Subset:
        """Return one split."""
        return Subset(self.molecules, self.indices(split).tolist())

    def targets(self, split: SplitName) -> Float[Tensor, "molecule task"]:
        """Return the targets of a split, NaN where unknown."""
        return torch.from_numpy(np.array(self.molecules.targets[self.indices(split)]))

    def descriptors(self, split: SplitName) -> Float[Tensor, "molecule descriptor"]:
        """Return the descriptors of whole molecules of a split, NaN where unknown."""
        return torch.from_numpy(np.array(self.molecules.descriptors[self.indices(split)]))

    def sizes(self, split: SplitName) -> list[int]:
        """Count the pairs of atoms of every molecule."""
        return pair_counts(self.dataset(split))

    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> MoleculeLoader:
        """Return a loader whose batches have their pairs of atoms."""
        options = {"pairs": self.pairs, "self_pairs": self.self_pairs, **options}
        table = self.molecules.pair_table
        return MoleculeLoader(dataset, table, batch_size=batch_size, **options)

    def setup(self, stage: str) -> None:
        """Load and split the molecules; before training, check the targets and report the data."""
        super().setup(stage)
        # The test split too, which is needed when the training is over.
        for split in SPLITS if stage == "fit" else self.splits_of(stage):
            if not len(self.indices(split)):
                what, got = f"the {split} split is empty", f"none of {len(self.molecules)}"
                raise self._error(what, "at least one molecule", got, self._where)
        if stage != "fit":
            return
        counts = ", ".join(f"{len(self.indices(split)):,} {split}" for split in SPLITS)
        rank_zero_info(f"molecules: {counts}; split {self.parts.method} {self.parts.digest}")
        if self.own_targets:
            self._check_targets()
        self.check_parts()
        if self.molecules.errors:
            bad, folder = self.molecules.errors, self.molecules.folder
            report = "only written if root is given" if folder is None else folder / ERRORS
            first = f"the first {bad[0].where}: {bad[0].reason}"
            rank_zero_info(f"bad rows: {len(bad):,}, {first}; list of all: {report}")
        if self.split.leakage:
            texts = splits.canonical_texts(self.molecules.texts())
            rank_zero_info(f"leakage: {splits.describe_leakage(self.parts, texts)}")
            if found := splits.describe_duplicates(texts, self.molecules.targets):
                rank_zero_info(f"duplicates: {found}")

    def _check_targets(self) -> None:
        """Raise an error for targets that cannot be learned, and for labels in a regression."""
        targets, names = self.molecules.targets, self.molecules.task_names
        for name, known in _constant(targets, names).items():
            got = f"{known[0]:g} in all {len(known)} rows that have one" if len(known) else "none"
            what = f"there is nothing to learn from the target {name!r}"
            expected, hint = "at least two different values", "leave it out of the targets"
            raise self._error(what, expected, got, self._where, hint)
        if self.kind == "regression" and np.isin(targets[~np.isnan(targets)], (0, 1)).all():
            expected = "values other than 0 and 1 for kind: regression"
            what, got = "the targets are labels, not values", f"only 0 and 1 in {names[:_SHOWN]}"
            raise self._error(what, expected, got, self._where, "--data.init_args.kind binary")

    def check_parts(self) -> None:
        """Report targets that are constant in a split; raise an error if none can be learned."""
        names = self.molecules.task_names
        for measured in ("val", "test"):
            if not self.targets(measured).isnan().all():
                continue
            what = f"the {measured} split has no target, so that no metric is defined"
            if measured == "val":
                hint = "different fractions, or a different split"
                raise self._error(what, "at least one", f"none of {names}", self._where, hint)
            rank_zero_warn(f"{type(self).__name__}: {what}")
        checked: tuple[SplitName, ...] = ("train", "val") if self.kind == "binary" else ("train",)
        for split in checked:
            found = _constant(self.targets(split).numpy(), names)
            values = self.kind == "regression"
            if values and (unknown := [name for name, known in found.items() if not len(known)]):
                what, got = "the training split has no target of a property", ", ".join(unknown)
                hint = "leave it out of the targets, or different fractions"
                raise self._error(what, "at least one of each", f"none of {got}", self._where, hint)
            if len(found) == len(names) and not values:
                what, got = f"all targets of the {split} split are constant", f"none of {names}"
                hint = "--data.init_args.split.method stratified, or different fractions"
                raise self._error(what, "at least two different values", got, self._where, hint)
            if found:
                shown = ", ".join([*found][:_SHOWN]) + ", …" * (len(found) > _SHOWN)
                share = f"{len(found)} of {len(names)} properties ({shown})"
                share += ", which are not standardized" * values
                rank_zero_info(f"constant targets of the {split} split: {share}")

    def describe_examples(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """Return record numbers and SMILES of molecules, given their indices in the split."""
        chosen = self.indices(self.predict_split)[numbers]
        texts = np.array(self.molecules.texts(), dtype=object)
        return {"row": self.molecules.rows[chosen], "smiles": texts[chosen]}

    def state_dict(self) -> dict[str, Any]:
        """Return the split, so that a checkpoint is never tested on its training molecules."""
        options = {**asdict(self.split), "seed": self.parts.seed}
        del options["leakage"]
        split = {"split": self.parts.as_dict(), "split_options": options}
        return {**super().state_dict(), **split}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the split of a checkpoint if only the order of the rows has changed."""
        if not isinstance(state_dict.get("split"), Mapping):
            what, got = "the checkpoint does not list its molecules", "one of an earlier version"
            hint = "train again, or predict with --checkpoint and --input"
            raise self._error(what, "the hashes of its molecules", got, hint=hint)
        noted = Split.from_dict(state_dict["split"])
        mapped = noted.for_molecules(self.molecules.texts(), self._where)
        if mapped == self.parts:
            super().load_state_dict(state_dict)
            return
        own = self.state_dict()["split_options"]
        changed = {k: value for k, value in state_dict["split_options"].items() if own[k] != value}
        drawn = self.split.method not in ("column", "file") and not self._restored
        if mapped is noted or changed or not drawn:
            advice = changed or {"method": "file", "file": "RUN/split.json"}
            hint = " ".join(
                f"--data.init_args.split.{key} {json.dumps(value, separators=(',', ':'))}"
                for key, value in advice.items()
            ).replace('"', "")
            what = "the checkpoint was trained on a different split"
            raise self._error(what, repr(mapped), repr(self.parts), self._where, hint)
        rank_zero_info("split: the rows are in a different order; molecules stay in their splits")
        self.parts, self._restored = mapped, True
        super().load_state_dict(state_dict)


def _constant(targets: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the known values of the targets without two different ones, by name."""
    known = (column[~np.isnan(column)] for column in targets.T)
    pairs = zip(names, known, strict=True)
    return {name: values for name, values in pairs if len(np.unique(values)) < 2}


class NCIData(MoleculeDataModule):
    """Load 5,000 molecules that come with RDKit, with their polar surface areas.

    Args:
        root: Folder of the packed molecules; ``None`` keeps them in memory.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

    Example:
        >>> NCIData(batch_size=32, pairs=2).kind
        'regression'
    """

    kind = "regression"

    def __init__(self, root: str | None = "data/nci", **loading: Any) -> None:
        super().__init__(**loading)
        self.root = root

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return kind and name of the property."""
        return {"kind": cls.kind, "targets": ["TPSA"]}

    def load(self) -> PackedMolecules:
        """Load all molecules."""
        return NCI(self.root, self.featurizer, self.reading)


class MoleculeNetData(MoleculeDataModule):
    """Load a data set of MoleculeNet.

    Args:
        name: ``ESOL``, ``FreeSolv``, ``Lipophilicity``, ``BBBP``, ``Tox21``, ``ToxCast``,
            ``SIDER``, ``ClinTox``, ``HIV``, ``BACE``, ``MUV`` or ``QM8``.
        root: Folder of downloads and packed molecules; by default ``data/`` and the name.
        raw_dir: Folder of the raw file; by default ``root/raw``, to which it is downloaded.
        verify: Whether the file must be the published one.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

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
        self.member, self.raw_dir, self.verify = name, raw_dir, verify
        self.kind = self.known_facts({"name": name})["kind"]
        self.root = root or f"data/{name.lower()}"

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Look up kind and names of the properties."""
        _, member = member_named(options["name"])
        names = map(str, range(member.tasks)) if isinstance(member.tasks, int) else member.tasks
        return {"kind": member.task_type, "targets": list(names)}

    def load(self) -> PackedMolecules:
        """Load all molecules."""
        given = (self.root, self.member, self.featurizer, self.raw_dir, self.verify)
        return MoleculeNet(*given, self.reading)


class MoleculeFileData(MoleculeDataModule):
    """Load the molecules of a CSV, TSV or SDF file.

    Args:
        file: The file.
        targets: Columns (or SDF properties) to learn; by default all columns of numbers, except
            whole numbers that never repeat, like record numbers. What was found is reported.
        kind: ``regression``, ``binary`` (labels 0 and 1, an error in a regression) or
            ``multiclass`` (labels 0, 1, ...); by default ``binary`` if all targets are 0 or 1,
            ``regression`` otherwise.
        classes: Number of classes of ``multiclass``.
        table: Column of the SMILES, and how cells are written: ``smiles_column``, ``sep``,
            ``decimal``, ``missing``.
        root: Folder of the packed molecules; ``None`` keeps them in memory.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

    Example:
        >>> MoleculeFileData("mine.csv", ["melts"], kind="binary").kind
        'binary'
    """

    def __init__(
        self,
        file: str,
        targets: list[str] | str | None = None,
        kind: PropertyKind | None = None,
        classes: int = 2,
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        root: str | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        facts = self.known_facts({"file": file, "targets": targets, "kind": kind, "table": table})
        if not facts["targets"]:
            raise self._error(
                "there is nothing to learn",
                "the name of a column",
                "none",
                hint="--data.init_args.targets '[solubility]'",
            )
        self.file = file
        self.columns = facts["targets"]
        self.kind = facts["kind"]
        self.classes = classes
        self.table = table
        self.root = root
        self.found: FoundTargets | None = facts.get("found")

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return kind and names of the targets, found in the file unless they are given."""
        targets, kind = options.get("targets"), options.get("kind")
        targets = [targets] if isinstance(targets, str) else targets
        if targets == [] or (targets and kind):
            return {"kind": kind, "targets": targets}
        table = options.get("table") or TableOptions()
        if isinstance(table, Mapping):  # as LightningCLI has parsed it
            table = TableOptions(**{**table, "missing": tuple(table.get("missing", ()))})
        found = find_targets(options["file"], table, targets, kind)
        return {"kind": found.kind, "targets": list(found.names), "found": found}

    def setup(self, stage: str) -> None:
        """Report what was found in the file, too."""
        if stage == "fit" and self.found:
            rank_zero_info(f"{self.file}: {self.found}")
            if self.found.are_classes:
                rank_zero_warn(
                    f"{self.file}: the targets 0, 1, 2, ... look like classes, but are learned as "
                    "numbers; kind: multiclass for classes, kind: regression for numbers"
                )
        super().setup(stage)

    def state_dict(self) -> dict[str, Any]:
        """Return the split, and the column that holds the molecules."""
        return {**super().state_dict(), SMILES_COLUMN: self.table.smiles_column}

    def load(self) -> PackedMolecules:
        """Load all molecules."""
        return MoleculeFile(
            self.file, self.root, self.featurizer, self.columns, self.reading, table=self.table
        )

    def column(self, name: str) -> Mapping[int, str]:
        """Read a column of the file by number of the record; a missing SDF field is empty."""
        texts: dict[int, str] = {}
        seen: dict[str, str] = {}
        for record in read_molecules(self.file, table=self.table):
            # A record of an SDF file holds only the fields it has a value for.
            seen |= record.extra
            texts[record.row] = record.extra.get(name, "")
        if name not in seen:
            what, expected = "the column to split by is missing", f"one of {', '.join(seen)}"
            raise self._error(what, expected, repr(name), self.file)
        return texts


class PackedMoleculeData(MoleculeDataModule):
    """Load the molecules of a folder that ``pyg-dynbatch featurize`` has packed.

    The original file is not needed, and RDKit only for splits by scaffold and for the search for
    leakage. A featurizer is only compared with that of the folder; ``reading`` is not used.

    Args:
        root: The folder.
        kind: ``regression``, ``binary`` (labels 0 and 1, an error in a regression) or
            ``multiclass`` (labels 0, 1, ...).
        classes: Number of classes of ``multiclass``.
        **loading: Options of :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.

    Example:
        >>> PackedMoleculeData("packed", "binary", pairs="bonds").root
        'packed'
    """

    def __init__(
        self, root: str, kind: PropertyKind = "regression", classes: int = 2, **loading: Any
    ) -> None:
        super().__init__(**loading)
        self.root, self.kind, self.classes = root, kind, classes

    @classmethod
    def known_facts(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Read the names of the targets in the folder."""
        return {"kind": options["kind"], "targets": PackedMolecules(options["root"]).task_names}

    def load(self) -> PackedMolecules:
        """Open the folder."""
        molecules = PackedMolecules(self.root, self.featurizer)
        molecules.check()  # once, not in every loader process
        if not molecules.task_names:
            hint = "pyg-dynbatch featurize --targets NAME into a new folder"
            expected = "at least one target"
            raise self._error("there is nothing to learn", expected, "none", self.root, hint)
        return molecules
