"""Data modules: three splits of any data set, and those of the data sets of this package."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from pyg_dynbatch.core.errors import checked_choice, checked_count, mismatch
from pyg_dynbatch.loading import PlanningLoader
from pyg_dynbatch.molecules.datasets import (
    NCI,
    MoleculeDataset,
    MoleculeFile,
    MoleculeNet,
    member_named,
)
from pyg_dynbatch.molecules.featurizer import MoleculeFeaturizer
from pyg_dynbatch.molecules.read import TableOptions, find_targets, read_molecules
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.molecules.splits import Split, SplitOptions, describe_leakage, make_split
from pyg_dynbatch.samplers import NodeBudgetBatchSampler
from pyg_dynbatch.trees.datasets import SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.trees.words import Vocabulary, WordVectors, read_word_vectors

SplitName = Literal["train", "val", "test"]


class DataModule(pl.LightningDataModule, ABC):
    """Build the loaders of three splits, with batches of a fixed number or total size of examples.

    Only the training split is shuffled, by torch's ``DistributedSampler``: under a Trainer, a seed
    and the epoch decide its order, on one rank too, so that a run which is resumed at the end of
    an epoch goes on as if it had never stopped. The seed is that of ``seed_everything``, or else
    torch's initial one, and is kept in checkpoints. Without a Trainer, every pass draws an order.

    On several ranks, no example of the other splits is counted twice. Of the training split,
    ``DistributedSampler`` repeats a few if their number is not a multiple of the number of ranks.

    A subclass opens the splits. A data set has ``len``, examples by number, and a ``schema``, which
    says how they are collated; ``sizes`` if ``max_size`` is given.

    Args:
        batch_size: Examples in a batch.
        max_size: If given, the largest sum of the ``sizes`` in a batch (nodes of trees, pairs of
            atoms of molecules), with any number of examples; a larger example becomes a separate
            batch, with a warning.
        num_workers: Loader processes; 0 loads in the training process.
    """

    splits: tuple[SplitName, ...] = ("train", "val", "test")
    """The splits that there are. Without ``test``, nothing is tested after ``fit``."""

    def __init__(
        self, batch_size: int = 100, max_size: int | None = None, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = checked_count(f"{type(self).__name__}: batch_size", batch_size)
        self.max_size = max_size
        self.num_workers = num_workers
        self._opened: dict[str, Any] = {}
        self._order_seed: int | None = None

    @abstractmethod
    def open(self, split: SplitName) -> Any:
        """Return one split."""

    def dataset(self, split: SplitName) -> Any:
        """Return one split, opened once."""
        checked_choice(f"{type(self).__name__}: there is no such split", split, self.splits)
        if split not in self._opened:
            self._opened[split] = self.open(split)
        return self._opened[split]

    @property
    def schema(self) -> Any:
        """What a model needs to know about the data."""
        return self.dataset("train").schema

    def collater(self) -> Any:
        """Return what merges examples: that of the model under a Trainer, or of the schema."""
        model = getattr(getattr(self.trainer, "lightning_module", None), "model", None)
        return model.collater() if hasattr(model, "collater") else self.schema.collater()

    def prepare_data(self) -> None:
        """Process the data in one process, before others open them."""
        for split in self.splits:
            self.open(split)

    def setup(self, stage: str) -> None:
        """Open all splits, so that faults come before training.

        Forget the seed of an earlier run; Lightning restores that of a checkpoint after this.
        """
        if stage != "fit":
            return
        self._order_seed = None
        for split in self.splits:
            if not len(self.dataset(split)):
                what = f"{type(self).__name__}: the {split} split is empty"
                raise mismatch(ValueError, what, "at least one example")

    def train_dataloader(self) -> Any:
        """Return a loader that shuffles the training split, differently in every epoch."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        """Return a loader of the validation split, in order."""
        return self._loader("val", shuffle=False)

    def test_dataloader(self) -> Any:
        """Return a loader of the test split, in order."""
        return self._loader("test", shuffle=False)

    def _loader(self, split: SplitName, shuffle: bool) -> Any:
        dataset = self.dataset(split)
        sampler = self._sampler(dataset, shuffle)
        collater = self.collater()
        options = self._loader_options()
        if self.max_size is not None:
            batches = self._budgeted(sampler, dataset.sizes, self.max_size)
        elif shuffle:
            return PlanningLoader(
                dataset, self.batch_size, None, collater, sampler=sampler, **options
            )
        else:
            # A budget of examples, as Lightning's own sampler would repeat some of them to make
            # the shares of the ranks equal.
            batches = NodeBudgetBatchSampler(sampler, [1] * len(dataset), self.batch_size)
        return PlanningLoader(dataset, 1, None, collater, batch_sampler=batches, **options)

    def _sampler(self, dataset: Any, shuffle: bool) -> Any:
        """Return what decides the order of a split and the share of this rank."""
        if self.trainer is None:
            return RandomSampler(dataset) if shuffle else SequentialSampler(dataset)
        return DistributedSampler(
            dataset,
            num_replicas=self.trainer.world_size,
            rank=self.trainer.global_rank,
            shuffle=shuffle,
            seed=self._seed(self.trainer),
        )

    def _budgeted(self, sampler: Any, sizes: list[int], budget: int) -> NodeBudgetBatchSampler:
        larger = [size for size in sizes if size > budget]
        if larger:
            rank_zero_warn(
                f"{type(self).__name__}: {len(larger):,} of {len(sizes):,} examples are larger "
                f"than max_size={budget:,} (the largest {max(larger):,}): a batch for each"
            )
        return NodeBudgetBatchSampler(sampler, sizes, budget, oversize="alone")

    def _loader_options(self) -> dict[str, Any]:
        accelerator = getattr(self.trainer, "accelerator", None)
        generator = None
        if self.trainer is not None:
            # Seeding the workers from the global generator would change the numbers that dropout
            # draws, differently in a resumed run.
            generator = torch.Generator().manual_seed(self._seed(self.trainer))
        return {
            "num_workers": self.num_workers,
            "generator": generator,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": isinstance(accelerator, CUDAAccelerator),
        }

    def _seed(self, trainer: pl.Trainer) -> int:
        """Return one seed for all ranks: of the checkpoint, of ``seed_everything``, or drawn."""
        if self._order_seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed() % 2**32))
            # All ranks build their loaders in the same order, so each of them calls this.
            self._order_seed = int(trainer.strategy.broadcast(own))
        return self._order_seed

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order."""
        return {"order_seed": self._order_seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the order of the run that is resumed."""
        self._order_seed = state_dict["order_seed"]

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Move a batch without waiting for the copy, which pinned memory makes asynchronous."""
        return batch.to(device, non_blocking=True)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the trainer, as Lightning's modules do."""
        return {**self.__dict__, "trainer": None}


class DatasetData(DataModule):
    """Splits that are given.

    Args:
        train: Data set to train on.
        val: Data set to choose the best checkpoint by.
        test: Data set to test; None for no test.
        schema: What collates the examples; None for that of the training set.
        **loading: Options of :class:`~pyg_dynbatch.lightning.DataModule`.

    Example:
        >>> recipe = ListOpsRecipe(train=8, val=2, test=0)
        >>> train, val = ListOps(None, "train", recipe=recipe), ListOps(None, "val", recipe=recipe)
        >>> DatasetData(train, val, batch_size=4).schema.num_classes
        10
    """

    def __init__(
        self, train: Any, val: Any, test: Any = None, *, schema: Any = None, **loading: Any
    ) -> None:
        super().__init__(**loading)
        self._given = {"train": train, "val": val, "test": test}
        self._schema = schema
        if test is None:
            self.splits = ("train", "val")

    @property
    def schema(self) -> Any:
        """What a model needs to know about the data."""
        return super().schema if self._schema is None else self._schema

    def open(self, split: SplitName) -> Any:
        """Return one split."""
        return self._given[split]


# Trees --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorOptions:
    """Which word vectors the embedding of a tree model starts from.

    Args:
        file: A text file in GloVe or word2vec form, also compressed (``.gz``).
        missing: Words without a vector: ``shared_uniform`` (one row for all of them, from
            U(-0.05, 0.05)), ``uniform`` (a row for each, U(-0.05, 0.05)), ``normal`` (a row for
            each, with the deviation of the vectors found) or ``zeros``.
        lower_case: Whether a word may have the vector of its lower-case form.
        scale: Factor on every vector.

    Example:
        >>> VectorOptions("glove.840B.300d.txt").missing
        'uniform'
    """

    file: str
    missing: Literal["shared_uniform", "uniform", "normal", "zeros"] = "uniform"
    lower_case: bool = True
    scale: float = 1.0

    def read(self, vocabulary: Vocabulary) -> WordVectors:
        """Read the vectors of words; those that are drawn depend on the seed of the run."""
        vectors = read_word_vectors(
            self.file,
            vocabulary,
            missing=self.missing,
            lower_case=self.lower_case,
            seed=torch.initial_seed() % 2**31,
        ).scaled(self.scale)
        return vectors.only_found() if self.missing == "shared_uniform" else vectors


class TreeData(DataModule):
    """Base of data modules of trees, whose words may have vectors.

    Args:
        vectors: Word vectors that the embedding starts from; None for random ones.
        **loading: Options of :class:`~pyg_dynbatch.lightning.DataModule`.
    """

    def __init__(self, vectors: VectorOptions | None = None, **loading: Any) -> None:
        super().__init__(**loading)
        self.vectors = vectors

    @abstractmethod
    def trees(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Return one split, with the words of the data set or these."""

    @cached_property
    def word_vectors(self) -> WordVectors | None:
        """The word vectors, if any."""
        if self.vectors is None:
            return None
        return self.vectors.read(self.trees("train", None).vocabulary)

    def open(self, split: SplitName) -> TreeDataset:
        """Return one split, whose words are those of the vectors if there are any."""
        vectors = self.word_vectors
        if vectors is None:
            return self.trees(split, None)
        dataset = self.trees(split, vectors.vocabulary)
        dataset.word_vectors = vectors
        return dataset

    def setup(self, stage: str) -> None:
        """Open all splits; report how many words have a vector."""
        super().setup(stage)
        if stage == "fit" and self.word_vectors is not None:
            counts = {str(split): self.dataset(split).token_counts() for split in self.splits}
            for line in self.word_vectors.coverage(counts):
                rank_zero_info(f"word vectors, {line}")


class SSTData(TreeData):
    """The Stanford Sentiment Treebank: binary trees, five classes on every node.

    Args:
        root: Folder for downloads and processed files.
        raw_dir: Folder with ``train.txt``, ``dev.txt`` and ``test.txt``; left out, ``root/raw``,
            where they are downloaded to.
        vocabulary: Words of ``all`` splits (a word that only the test split has can use its
            pretrained vector), or of the ``train`` split alone.
        verify: Whether files other than the published ones are an error.
        vectors: Word vectors that the embedding starts from.
        batch_size: Trees in a batch.
        max_size: The largest number of nodes in a batch, in place of ``batch_size``.
        num_workers: Loader processes.

    Example:
        >>> SSTData(batch_size=25, vectors=VectorOptions("glove.txt")).batch_size
        25
    """

    def __init__(
        self,
        root: str = "data/sst",
        raw_dir: str | None = None,
        vocabulary: Literal["all", "train"] = "all",
        verify: bool = True,
        vectors: VectorOptions | None = None,
        batch_size: int = 100,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            vectors, batch_size=batch_size, max_size=max_size, num_workers=num_workers
        )
        self.root = root
        self.raw_dir = raw_dir
        self.vocabulary = vocabulary
        self.verify = verify

    def trees(self, split: SplitName, vocabulary: Vocabulary | None) -> SST:
        """Return one split."""
        words = vocabulary or self.vocabulary
        return SST(self.root, split, words, raw_dir=self.raw_dir, verify=self.verify)


class ListOpsData(DataModule):
    """ListOps, generated when needed: nested operations on digits, ten classes at the root.

    Args:
        root: Folder for processed files.
        form: ``operator`` nodes with up to five ordered arguments, or the published ``binary``
            parse with all pieces at the leaves.
        recipe: What to generate.
        tsv_dir: Folder with ``train.tsv``, ``val.tsv`` and ``test.tsv`` in the published format,
            to be read instead.
        batch_size: Trees in a batch.
        max_size: The largest number of nodes in a batch, in place of ``batch_size``.
        num_workers: Loader processes.

    Example:
        >>> ListOpsData(recipe=ListOpsRecipe(train=100, val=10, test=10)).batch_size
        100
    """

    def __init__(
        self,
        root: str = "data/listops",
        form: Literal["operator", "binary"] = "operator",
        recipe: ListOpsRecipe = ListOpsRecipe(),  # noqa: B008 - frozen
        tsv_dir: str | None = None,
        batch_size: int = 100,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, max_size, num_workers)
        self.root = root
        self.form = form
        self.recipe = recipe
        self.tsv_dir = tsv_dir

    def open(self, split: SplitName) -> ListOps:
        """Return one split."""
        tsv = None if self.tsv_dir is None else os.path.join(self.tsv_dir, f"{split}.tsv")
        return ListOps(self.root, split, self.form, self.recipe, tsv)


class TreeFileData(TreeData):
    """Your own files of bracketed trees, one tree per line, plain or compressed (``.gz``).

    Args:
        train_file: Trees to train on; they also define the words and classes.
        val_file: Trees to choose the best checkpoint by.
        test_file: Trees to test; left out, nothing is tested.
        root: Folder for processed files; left out, the files are parsed at every start.
        labels: Whether every node has a label (``required``), or some have (``optional``).
        classes: Number of classes; left out, the largest label of ``train_file`` plus one.
        vectors: Word vectors that the embedding starts from.
        batch_size: Trees in a batch.
        max_size: The largest number of nodes in a batch, in place of ``batch_size``.
        num_workers: Loader processes.

    Example:
        >>> TreeFileData("train.txt", "val.txt").splits
        ('train', 'val')
    """

    def __init__(
        self,
        train_file: str,
        val_file: str,
        test_file: str | None = None,
        root: str | None = None,
        labels: Literal["required", "optional"] = "required",
        classes: int | None = None,
        vectors: VectorOptions | None = None,
        batch_size: int = 25,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            vectors, batch_size=batch_size, max_size=max_size, num_workers=num_workers
        )
        self.files = {"train": train_file, "val": val_file}
        self.splits = ("train", "val")
        if test_file is not None:
            self.files["test"] = test_file
            self.splits = ("train", "val", "test")
        self.root = root
        self.labels = labels
        self.classes = classes

    @cached_property
    def _training(self) -> TreeFile:
        return TreeFile(self.files["train"], self.root, self.classes, self.labels)

    def trees(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeFile:
        """Return one file."""
        training = self._training
        if training.num_classes < 1:
            what = "TreeFileData: no node has a label"
            expected = "at least one label, such as the 3 of (3 word)"
            raise mismatch(ValueError, what, expected, where=self.files["train"])
        words = vocabulary or training.vocabulary
        file = self.files[split]
        return TreeFile(file, self.root, training.num_classes, self.labels, words)


# Molecules ----------------------------------------------------------------------------------------


PairSet = Literal["all", "connected", "bonds"] | int


class MoleculeDataModule(DataModule):
    """Base of data modules of molecules, which are split here.

    A checkpoint holds the split, so that it is never tested on the molecules it was trained on.

    Args:
        split: How the molecules are split.
        pairs: Pairs of atoms that the model sees: ``all``, ``connected`` (within a fragment),
            ``bonds``, or the largest number of bonds between two atoms, 1 to 7.
        self_pairs: Whether each atom is also paired with itself.
        featurizer: Describes a molecule; None for ``MoleculeFeaturizer()``.
        batch_size: Molecules in a batch.
        max_size: The largest number of pairs of atoms in a batch, in place of ``batch_size``.
        num_workers: Processes that load, and that featurize.
    """

    kind: PropertyKind
    num_classes: int = 2
    smiles_column: str | None = None

    def __init__(
        self,
        split: SplitOptions = SplitOptions(),  # noqa: B008 - frozen
        pairs: PairSet = "all",
        self_pairs: bool = True,
        featurizer: MoleculeFeaturizer | None = None,
        batch_size: int = 64,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, max_size, num_workers)
        self.split = split
        self.pairs = pairs
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
        targets = molecules.targets
        wrong = np.argwhere(~np.isnan(targets) & ~np.isin(targets, np.arange(classes)))
        if len(wrong):
            row, target = wrong[0]
            what = f"{type(self).__name__}: a label is out of range"
            expected = f"whole numbers from 0 to {classes - 1}"
            where = f"{molecules.smiles[row]}, target {molecules.target_names[target]}"
            hint = "kind: regression for values, kind: multiclass for more classes"
            raise mismatch(
                ValueError, what, expected, f"{targets[row, target]:g}", where=where, hint=hint
            )
        return molecules

    @cached_property
    def parts(self) -> Split:
        """The numbers of the molecules of every split."""
        seed = self.split.seed
        molecules = self.molecules
        return make_split(
            self.split,
            int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed,
            smiles=molecules.smiles,
            targets=molecules.targets,
            target_names=molecules.target_names,
            kind=self.kind,
            column=self.column,
        )

    def column(self, name: str) -> list[str]:
        """Return the column that assigns molecules to splits."""
        what = f"{type(self).__name__}: this data set has no column to split by"
        raise mismatch(ValueError, what, "MoleculeFileData, or a different method", name)

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
            self.pairs,
            self.self_pairs,
            self.smiles_column,
        )

    def setup(self, stage: str) -> None:
        """Open all splits; check the targets before training, and report the data."""
        super().setup(stage)
        if stage != "fit":
            return
        counts = ", ".join(f"{len(self.dataset(split)):,} {split}" for split in self.splits)
        rank_zero_info(f"molecules: {counts} ({self.split.method} split)")
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
            if len(np.unique(known)) < 2:
                got = f"{known[0]:g} in all {len(known)} molecules" if len(known) else "no target"
                text = f"nothing can be learned from the target {name!r}: {got} of the training set"
                if len(self.molecules.target_names) == 1:
                    what = f"{type(self).__name__}: {text}"
                    raise mismatch(ValueError, what, "two different values")
                rank_zero_warn(text)
        if np.isnan(self.dataset("val").targets).all():
            what = f"{type(self).__name__}: no molecule of the validation split has a target"
            raise mismatch(ValueError, what, "at least one", hint="other fractions of the split")

    def _digest(self) -> str:
        return hashlib.sha256("\n".join(self.molecules.smiles).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the order, and the split."""
        parts = {split: getattr(self.parts, split).tolist() for split in self.splits}
        return {**super().state_dict(), "split": parts, "molecules": self._digest()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the split of a checkpoint, which belongs to the same molecules."""
        super().load_state_dict(state_dict)
        if state_dict["molecules"] != self._digest():
            what = f"{type(self).__name__}: the checkpoint was trained on other molecules"
            hint = "for other molecules, pyg-dynbatch predict"
            raise mismatch(ValueError, what, "the same file, in the same order", hint=hint)
        numbers = {name: np.array(part, np.int64) for name, part in state_dict["split"].items()}
        self.parts = Split(**numbers)
        self._opened = {}


class NCIData(MoleculeDataModule):
    """4,999 molecules that come with RDKit, with their polar surface areas.

    Args:
        root: Folder for processed files; None keeps the molecules in memory.
        split: How the molecules are split.
        pairs: Pairs of atoms, see :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.
        self_pairs: Whether each atom is also paired with itself.
        featurizer: Describes a molecule.
        batch_size: Molecules in a batch.
        max_size: The largest number of pairs in a batch, in place of ``batch_size``.
        num_workers: Processes that load, and that featurize.

    Example:
        >>> NCIData(batch_size=32, pairs=2).kind
        'regression'
    """

    kind = "regression"

    def __init__(
        self,
        root: str | None = "data/nci",
        split: SplitOptions = SplitOptions(),  # noqa: B008 - frozen
        pairs: PairSet = "all",
        self_pairs: bool = True,
        featurizer: MoleculeFeaturizer | None = None,
        batch_size: int = 64,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(split, pairs, self_pairs, featurizer, batch_size, max_size, num_workers)
        self.root = root

    def load(self) -> NCI:
        """Return all molecules."""
        return NCI(self.root, self.featurizer, num_workers=self.num_workers)


class MoleculeNetData(MoleculeDataModule):
    """A data set of MoleculeNet.

    Args:
        name: ``ESOL``, ``FreeSolv``, ``Lipophilicity``, ``BBBP``, ``Tox21``, ``ToxCast``,
            ``SIDER``, ``ClinTox``, ``HIV``, ``BACE``, ``MUV`` or ``QM8``.
        root: Folder of downloads and processed files; by default ``data/`` and the name.
        raw_dir: Folder of the raw file; by default ``root/raw``, to which it is downloaded.
        verify: Whether the file must be the published one.
        split: How the molecules are split.
        pairs: Pairs of atoms, see :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.
        self_pairs: Whether each atom is also paired with itself.
        featurizer: Describes a molecule.
        batch_size: Molecules in a batch.
        max_size: The largest number of pairs in a batch, in place of ``batch_size``.
        num_workers: Processes that load, and that featurize.

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
        split: SplitOptions = SplitOptions(),  # noqa: B008 - frozen
        pairs: PairSet = "all",
        self_pairs: bool = True,
        featurizer: MoleculeFeaturizer | None = None,
        batch_size: int = 64,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(split, pairs, self_pairs, featurizer, batch_size, max_size, num_workers)
        _, member = member_named(name)
        self.name = name
        self.kind = member.kind
        self.smiles_column = member.smiles_column
        self.root = root or f"data/{name.lower()}"
        self.raw_dir = raw_dir
        self.verify = verify

    def load(self) -> MoleculeNet:
        """Return all molecules."""
        return MoleculeNet(
            self.root,
            self.name,
            self.featurizer,
            self.raw_dir,
            self.verify,
            num_workers=self.num_workers,
        )


class MoleculeFileData(MoleculeDataModule):
    """The molecules of a CSV, TSV or SDF file.

    Args:
        file: The file.
        targets: Columns (or SDF fields) to learn; by default all columns of numbers, except whole
            numbers that never repeat, like record numbers. What was found is reported.
        kind: ``regression``, ``binary`` (labels 0 and 1) or ``multiclass`` (labels 0, 1, ...); by
            default ``binary`` if all targets are 0 or 1, ``regression`` otherwise.
        num_classes: Number of classes of ``multiclass``.
        table: Column of the SMILES, and how cells are written.
        root: Folder for processed files; None keeps the molecules in memory.
        split: How the molecules are split.
        pairs: Pairs of atoms, see :class:`~pyg_dynbatch.lightning.MoleculeDataModule`.
        self_pairs: Whether each atom is also paired with itself.
        featurizer: Describes a molecule.
        batch_size: Molecules in a batch.
        max_size: The largest number of pairs in a batch, in place of ``batch_size``.
        num_workers: Processes that load, and that featurize.

    Example:
        >>> MoleculeFileData("mine.csv", ["melts"], kind="binary").kind
        'binary'
    """

    def __init__(
        self,
        file: str,
        targets: list[str] | None = None,
        kind: PropertyKind | None = None,
        num_classes: int = 2,
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        root: str | None = None,
        split: SplitOptions = SplitOptions(),  # noqa: B008 - frozen
        pairs: PairSet = "all",
        self_pairs: bool = True,
        featurizer: MoleculeFeaturizer | None = None,
        batch_size: int = 64,
        max_size: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__(split, pairs, self_pairs, featurizer, batch_size, max_size, num_workers)
        self.file = file
        self.targets = targets
        self.num_classes = num_classes
        self.table = table
        self.smiles_column = table.smiles_column
        self.root = root
        if targets is None or kind is None:
            found = find_targets(file, table, targets, kind)
            self.targets = list(found.names)
            kind = found.kind
            rank_zero_info(f"{file}: {found}")
            if found.are_classes:
                rank_zero_warn(
                    f"{file}: the targets 0, 1, 2, ... look like classes, but are learned as "
                    "numbers; kind: multiclass for classes, kind: regression for numbers"
                )
        self.kind = kind

    def load(self) -> MoleculeFile:
        """Return all molecules; records that are none are skipped and reported."""
        return MoleculeFile(
            self.file,
            self.root,
            self.featurizer,
            self.targets or (),
            self.kind,
            self.table,
            bad="skip",
            num_workers=self.num_workers,
        )

    def column(self, name: str) -> list[str]:
        """Return a column of the file, for every molecule; a missing SDF field is empty."""
        texts: dict[int, str] = {}
        known: Mapping[str, str] = {}
        for record in read_molecules(self.file, table=self.table):
            known = {**known, **record.extra}
            texts[record.row] = record.extra.get(name, "")
        if name not in known:
            what = "MoleculeFileData: the column to split by is missing"
            raise mismatch(ValueError, what, f"one of {', '.join(known)}", name, where=self.file)
        rows: Any = self.molecules.columns.fields["row"]
        return [texts[row] for row in rows.tolist()]
