"""Serve SST, ListOps, SICK and a user's own bracketed files."""

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch_geometric.data import Data

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets import SICK, SST, ListOps, ListOpsRecipe, TreeDataset, TreeFile
from pyg_dynbatch.featurizers import Vocabulary
from pyg_dynbatch.training.datamodule import TreeDataModule
from pyg_dynbatch.training.split_datamodule import SplitName


class SSTData(TreeDataModule):
    """Serves the Stanford Sentiment Treebank: binary trees, five classes on every node.

    Args:
        root: Folder for downloads and for the cache.
        raw_dir: Folder with ``train.txt``, ``dev.txt`` and ``test.txt``; left out, ``root/raw``,
            where they are downloaded to.
        vocabulary: Words of ``all`` splits, or of the ``train`` split alone. A pretrained vector
            is of use to a word that only the test split has.
        verify: Whether files other than the published ones are refused.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.datamodule.TreeDataModule`.

    Example:
        >>> from pyg_dynbatch.training import VectorOptions
        >>> data = SSTData(batch_size=25, vectors=VectorOptions("glove", "glove.txt"))
        >>> data.num_classes
        5
    """

    num_classes = 5

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
        self.words: Literal["all", "train"] = vocabulary
        self.verify = verify

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Loads one split."""
        words = vocabulary if vocabulary is not None else self.words
        return SST(self.root, split, words, self.raw_dir, self.verify)


class ListOpsData(TreeDataModule):
    """Serves ListOps, generated on the spot: nested operations on digits, ten classes at the root.

    Args:
        root: Folder for the cache.
        form: ``operator`` nodes with up to five ordered arguments, or the published ``binary``
            parse with all pieces at the leaves.
        recipe: What to generate.
        tsv_dir: Folder with ``train.tsv``, ``val.tsv`` and ``test.tsv`` in the published format,
            to be read instead.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.datamodule.TreeDataModule`.

    Example:
        >>> ListOpsData(recipe=ListOpsRecipe(train=100, val=10, test=10)).num_classes
        10
    """

    num_classes = 10

    def __init__(
        self,
        root: str = "data/listops",
        form: Literal["operator", "binary"] = "operator",
        recipe: ListOpsRecipe = ListOpsRecipe(),  # noqa: B008 - frozen
        tsv_dir: str | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.root = root
        self.form: Literal["operator", "binary"] = form
        self.recipe = recipe
        self.tsv_dir = tsv_dir

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Loads one split."""
        _refuse(vocabulary, "ListOpsData")
        tsv = None if self.tsv_dir is None else Path(self.tsv_dir) / f"{split}.tsv"
        return ListOps(self.root, split, self.form, self.recipe, tsv)

    def node_texts(self, tree: Data, vocabulary: Vocabulary) -> list[str]:
        """Returns the text that a picture shows at each node, operators without their bracket."""
        return [text.removeprefix("[") for text in super().node_texts(tree, vocabulary)]


class SICKData(TreeDataModule):
    """Serves SICK relatedness: pairs of trees with a distribution over the scores 1 to 5.

    Args:
        root: Folder for the cache.
        raw_dir: Folder with the raw files; left out, ``root/raw``.
        trees: Which parses: ``dependency``, ``constituency``, or ``chain`` for none.
        vocabulary: Words of ``all`` splits, or of the ``train`` split alone.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.datamodule.TreeDataModule`.

    Example:
        >>> SICKData(batch_size=25).num_classes
        5
    """

    num_classes = 5

    def __init__(
        self,
        root: str = "data/sick",
        raw_dir: str | None = None,
        trees: Literal["dependency", "constituency", "chain"] = "dependency",
        vocabulary: Literal["all", "train"] = "all",
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.root = root
        self.raw_dir = raw_dir
        self.trees: Literal["dependency", "constituency", "chain"] = trees
        self.words: Literal["all", "train"] = vocabulary

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Loads one split."""
        words = vocabulary if vocabulary is not None else self.words
        return SICK(self.root, split, self.trees, words, self.raw_dir)


class TreeFileData(TreeDataModule):
    """Serves a user's own files of bracketed trees, one tree a line, plain or compressed (``.gz``).

    Args:
        train_file: Trees to train on; they also define the classes.
        val_file: Trees to choose the best checkpoint by.
        test_file: Trees to test and predict; left out, those of ``val_file``.
        root: Folder for the cache; left out, the files are parsed at every start.
        labels: Whether every node has a label (``required``), or some have (``optional``).
        vocabulary: Words of the ``train`` file, or of ``all`` files. With the first, a checkpoint
            goes with any further ``test_file``.
        classes: Number of classes; left out, the largest label of ``train_file`` plus one.
        **loading: Everything else goes to
            :class:`~pyg_dynbatch.training.datamodule.TreeDataModule`.

    Example:
        >>> TreeFileData("train.txt", "val.txt", classes=3).num_classes
        3
    """

    def __init__(
        self,
        train_file: str,
        val_file: str,
        test_file: str | None = None,
        root: str | None = None,
        labels: Literal["required", "optional"] = "required",
        vocabulary: Literal["train", "all"] = "train",
        classes: int | None = None,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.files = {"train": train_file, "val": val_file, "test": test_file or val_file}
        self.root = root
        self.labels: Literal["required", "optional"] = labels
        self.words = vocabulary
        self.classes = classes

    @cached_property
    def _defining(self) -> TreeFile:
        """The trees that say which words and classes there are."""
        return TreeFile(self._defining_files, self.root, self.classes, self.labels)

    @property
    def _defining_files(self) -> list[str]:
        files = self.files.values() if self.words == "all" else [self.files["train"]]
        return list(dict.fromkeys(files))

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of classes.

        Raises:
            ValueError: If it is not given and no node of the files that define it has a label.
        """
        if self.classes is not None:
            return self.classes
        found = self._defining.num_classes
        if found < 1:
            raise ValueError(
                mismatch(
                    "TreeFileData: no node has a label",
                    expected="a label, such as the 3 of (3 word), at one node or more",
                    got="unlabelled nodes alone",
                    where=", ".join(self._defining_files),
                    mend="labels in the file, or the number of classes as the option classes",
                )
            )
        return found

    def load(self, split: SplitName, vocabulary: Vocabulary | None) -> TreeDataset:
        """Loads one file."""
        words = self._defining.vocabulary if vocabulary is None else vocabulary
        return TreeFile(self.files[split], self.root, self.num_classes, self.labels, words)


def _refuse(vocabulary: Vocabulary | None, name: str) -> None:
    if vocabulary is not None:
        raise ValueError(
            mismatch(
                f"{name}: the pieces of this data set have no pretrained vectors",
                expected="vectors.source: none",
                got=f"a vocabulary of {len(vocabulary)} words",
            )
        )
