"""Data modules of trees, whose words may have vectors."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.lightning.data import DataModule, SplitName
from pyg_dynbatch.trees.datasets import SST, TreeDataset, TreeFile
from pyg_dynbatch.trees.listops import ListOps, ListOpsRecipe
from pyg_dynbatch.trees.words import Vocabulary, WordVectors, read_word_vectors


@dataclass(frozen=True)
class VectorOptions:
    """Which word vectors the embedding of a tree model starts from.

    Args:
        file: A text file in GloVe or word2vec form, also compressed (``.gz``).
        missing: Words without a vector: ``shared_uniform`` (one row for all of them, from
            U(-0.05, 0.05)) or ``uniform`` (a row for each, U(-0.05, 0.05)).
        lower_case: Whether a word may have the vector of its lower-case form.
        scale: Factor on every vector.

    Example:
        >>> VectorOptions("glove.840B.300d.txt").missing
        'uniform'
    """

    file: str
    missing: Literal["uniform", "shared_uniform"] = "uniform"
    lower_case: bool = True
    scale: float = 1.0

    def read(self, vocabulary: Vocabulary) -> WordVectors:
        """Read the vectors of words; those that are drawn depend on the seed of the run."""
        return read_word_vectors(
            self.file,
            vocabulary,
            missing=self.missing,
            lower_case=self.lower_case,
            seed=torch.initial_seed() % 2**31,
        ).scaled(self.scale)


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
    def _all_vectors(self) -> WordVectors | None:
        """The word vectors, if any."""
        if self.vectors is None:
            return None
        return self.vectors.read(self.trees("train", None).vocabulary)

    @cached_property
    def word_vectors(self) -> WordVectors | None:
        """The vectors of the embedding: words without one may be one word."""
        vectors = self._all_vectors
        if vectors is None or self.vectors is None:
            return None
        return vectors.only_found() if self.vectors.missing == "shared_uniform" else vectors

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
        if stage == "fit" and self._all_vectors is not None:
            counts = {str(split): self.trees(split, None).token_counts() for split in self.splits}
            for line in self._all_vectors.coverage(counts):
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
        **loading: Options of :class:`~pyg_dynbatch.lightning.TreeData`.

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
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
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
        **loading: Options of :class:`~pyg_dynbatch.lightning.DataModule`.

    Example:
        >>> ListOpsData(recipe=ListOpsRecipe(train=100, val=10, test=10)).batch_size
        100
    """

    def __init__(
        self,
        root: str = "data/listops",
        form: Literal["operator", "binary"] = "operator",
        recipe: ListOpsRecipe = ListOpsRecipe(),  # noqa: B008 - frozen
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.root = root
        self.form = form
        self.recipe = recipe

    def open(self, split: SplitName) -> ListOps:
        """Return one split."""
        return ListOps(self.root, split, self.form, self.recipe)


class TreeFileData(TreeData):
    """Your own files of bracketed trees, one tree per line, plain or compressed (``.gz``).

    Args:
        train_file: Trees to train on; they also define the words and classes.
        val_file: Trees to choose the best checkpoint by.
        test_file: Trees to test; left out, nothing is tested.
        root: Folder for processed files; left out, the files are parsed at every start.
        labels: Whether every node has a label (``required``), or some have (``optional``).
        classes: Number of classes; left out, the largest label of ``train_file`` plus one.
        **loading: Options of :class:`~pyg_dynbatch.lightning.TreeData`.

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
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
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
            problem = "TreeFileData: no node has a label"
            expected = "at least one label, such as the 3 of (3 word)"
            raise mismatch(ValueError, problem, expected, where=self.files["train"])
        if split == "train" and vocabulary is None:
            return training
        words = vocabulary or training.vocabulary
        file = self.files[split]
        return TreeFile(file, self.root, training.num_classes, self.labels, words)
