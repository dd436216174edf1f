"""Data sets of trees: the Stanford Sentiment Treebank, and bracketed files of your own."""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

import torch
from jaxtyping import Int
from torch import Tensor

from pyg_dynbatch import files
from pyg_dynbatch.columns import Columns
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.dataset import ColumnsDataset, columns_of
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.schema import TreeSchema
from pyg_dynbatch.trees.text import ParsedTree, parse_bracketed
from pyg_dynbatch.trees.words import Vocabulary, WordVectors

# Raise it when the meaning of a field changes: processed files are then made again.
_FORMAT = "trees.4"


class TreeDataset(ColumnsDataset):
    """Base of data sets of trees: subclasses read the trees of all splits.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None keeps the trees in memory.
        split: Name of the split.
        key: All that the trees depend on, as plain values.
        vocabulary: The words of ``"all"`` splits, of the ``"train"`` split, or a vocabulary.
        num_classes: Number of classes; None for the largest label plus one.
        labels: How text has labels, see :func:`~pyg_dynbatch.data.parse_bracketed`.
        **options: ``transform``, ``pre_transform`` and ``force_reload`` of PyG's data sets.

    Raises:
        OSError: If the processed file cannot be written.
        ValueError: If the split is empty, or the vocabulary is none of these.

    Example:
        >>> from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
        >>> dataset = ListOps(None, "val", recipe=ListOpsRecipe(train=0, val=8, test=0))
        >>> isinstance(dataset, TreeDataset), len(dataset.sizes), dataset.num_classes
        (True, 8, 10)
    """

    kind = DynTreeData

    word_vectors: WordVectors | None = None
    """The vectors of the words, from which a model starts its embedding."""

    def __init__(
        self,
        root: str | Path | None,
        split: str,
        key: Mapping[str, Any],
        *,
        vocabulary: str | Vocabulary = "all",
        num_classes: int | None = None,
        labels: str = "required",
        **options: Any,
    ) -> None:
        if isinstance(vocabulary, str):
            checked_choice(f"{type(self).__name__}: vocabulary", vocabulary, ("all", "train"))
        self._chosen_vocabulary = vocabulary
        self._chosen_classes = num_classes
        self._labels = labels
        words = vocabulary if isinstance(vocabulary, str) else vocabulary.digest()
        content = {"format": _FORMAT, "words": words, "classes": num_classes, "labels": labels}
        super().__init__(root, split, {**key, **content}, **options)
        self.schema = TreeSchema.of(self.columns.facts)
        """The words and classes, for a model."""

    @abstractmethod
    def read(self) -> Mapping[str, Sequence[ParsedTree]]:
        """Return the trees of all splits."""

    def build(self) -> dict[str, Columns]:
        """Turn the trees of all splits into columns."""
        splits = self.read()
        if not splits.get(self.name):
            problem = f"{type(self).__name__}: the split {self.name!r} is empty"
            raise mismatch(ValueError, problem, "at least one tree")

        vocabulary = self._vocabulary_of(splits)
        classes = self._chosen_classes
        if classes is None:
            classes = 1 + max(max(tree.labels) for trees in splits.values() for tree in trees)
        schema = TreeSchema(len(vocabulary), classes, vocabulary, self._labels)
        # Without a folder to keep them in, the other splits are not needed.
        kept = splits if self.has_process else {self.name: splits[self.name]}
        return {
            name: self._columns(trees, vocabulary, schema) for name, trees in kept.items() if trees
        }

    def _vocabulary_of(self, splits: Mapping[str, Sequence[ParsedTree]]) -> Vocabulary:
        if isinstance(self._chosen_vocabulary, Vocabulary):
            return self._chosen_vocabulary
        counted = splits.values() if self._chosen_vocabulary == "all" else [splits["train"]]
        return Vocabulary.from_words(
            word for trees in counted for tree in trees for word in tree.words
        )

    def _columns(
        self, trees: Sequence[ParsedTree], vocabulary: Vocabulary, schema: TreeSchema
    ) -> Columns:
        labelled = self._labels != "none"
        examples = [tree.to_data(vocabulary, labelled=labelled) for tree in trees]
        if self.pre_transform is not None:
            examples = [self.pre_transform(example) for example in examples]
        return columns_of(examples, schema.as_dict(), type(self).__name__)

    @property
    def vocabulary(self) -> Vocabulary:
        """The words whose rows the trees hold."""
        return cast(Vocabulary, self.schema.vocabulary)  # build() has made the schema

    @property
    def num_tokens(self) -> int:
        """Number of rows of the vocabulary, row 0 for unknown words included."""
        return self.schema.num_tokens

    @property
    def num_classes(self) -> int:
        """Number of classes, whether or not all occur in this split."""
        return self.schema.num_classes

    def token_counts(self) -> Int[Tensor, " row"]:
        """Count how often each row of the vocabulary occurs."""
        token = cast(Tensor, self.columns[list(self.indices())].fields["token"])
        return torch.bincount(token[token >= 0], minlength=self.num_tokens)


def _parse_lines(path: Path, parse: Callable[[str, str], ParsedTree]) -> list[ParsedTree]:
    """Call ``parse`` with every line of a file but blank ones, with file and line for messages."""
    lines = files.read_lines(path)
    filled = [number for number, line in enumerate(lines) if line.strip(" \t")]
    num_blank = len(lines) - len(filled)
    if num_blank:
        text = f"{path}: {num_blank} of {len(lines)} lines are blank, and skipped"
        warnings.warn(text, stacklevel=2)
    return [parse(lines[number], f"{path}:{number + 1}") for number in filled]


def choose_split(split: str, known: Sequence[str], aliases: Mapping[str, str], owner: str) -> str:
    """Return the name that the data set uses for a split."""
    return checked_choice(f"{owner}: unknown split", aliases.get(split, split), known)


_URL = "https://nlp.stanford.edu/sentiment/trainDevTestTrees_PTB.zip"
_ARCHIVE = "trainDevTestTrees_PTB.zip"
_ARCHIVE_SHA256 = "5c613a4f673fc74097d523a2c83f38e0cc462984d847b82c7aaf36b01cbbbfcc"
_SHA256 = {
    "train": "e2f3f41b0b1e6d4dddc0effe3bfc2d27ed8928079aa9a03d652311614fc5feb7",
    "dev": "0e9336aed6e4730e19f58d00a77b3f0297efdb755f7b5e598c98a05e3f97ea40",
    "test": "6e54806dee95cf80cd918e7dfb3f6770f6df24bf826f289a4d1f709e1c8f6761",
}
_SPLITS = tuple(_SHA256)
_CLASSES = 5


class SST(TreeDataset):
    """One split of the Stanford Sentiment Treebank.

    Binarised constituency trees of 11,855 sentences of film reviews. Every node has a label ``y``
    from 0 (very negative) to 4 (very positive); leaves have a ``token``, inner nodes -1. Case is
    kept, as in the protocols of Tai et al. and of TensorFlow Fold.

    The raw files are taken from `raw_dir` or ``root/raw``, or from the archive there, and are
    downloaded to ``root/raw`` otherwise.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None caches nothing and needs `raw_dir`.
        split: ``"train"`` (8,544 trees), ``"dev"`` or ``"val"`` (1,101), ``"test"`` (2,210).
        vocabulary: ``"all"``: the words of all three splits (21,701), so that those of the dev and
            test sets can have pretrained vectors; ``"train"`` (18,280); or a vocabulary.
        raw_dir: Folder with ``train.txt``, ``dev.txt`` and ``test.txt``.
        verify: Whether files other than the published ones are an error.
        **options: ``transform``, ``pre_transform`` and ``force_reload``, see
            :class:`~pyg_dynbatch.datasets.TreeDataset`.

    Raises:
        ConnectionError: If there are no raw files and they cannot be downloaded.
        FileNotFoundError: If `raw_dir` lacks a file.
        ValueError: If a file is corrupt, not the published one, or cannot be parsed.

    Reference:
        Socher, Perelygin, Wu, Chuang, Manning, Ng and Potts (2013), EMNLP, D13-1170.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("train", "dev", "test"):
        ...     size = Path(folder, f"{name}.txt").write_text("(3 (2 good) (2 fun))")
        >>> dataset = SST(None, "train", raw_dir=folder, verify=False)
        >>> dataset[0].y, dataset[0].token, dataset.num_classes
        (tensor([3, 2, 2]), tensor([-1,  1,  2]), 5)
    """

    def __init__(
        self,
        root: str | Path | None,
        split: str = "train",
        vocabulary: str | Vocabulary = "all",
        raw_dir: str | Path | None = None,
        verify: bool = True,
        **options: Any,
    ) -> None:
        split = choose_split(split, _SPLITS, {"val": "dev"}, "SST")
        self._raw = _find_sst(root, raw_dir, verify)
        super().__init__(
            root,
            split,
            key={name: files.sha256_of(path) for name, path in self._raw.items()},
            vocabulary=vocabulary,
            num_classes=_CLASSES,
            **options,
        )

    def read(self) -> dict[str, list[ParsedTree]]:
        """Read the three files."""
        parse = partial(parse_bracketed, num_classes=_CLASSES)
        return {name: _parse_lines(path, parse) for name, path in self._raw.items()}


def _find_sst(root: str | Path | None, raw_dir: str | Path | None, verify: bool) -> dict[str, Path]:
    """Find the raw file of each split; unpack those that are missing from the archive."""
    if root is None and raw_dir is None:
        raise mismatch(ValueError, "SST: no folder is given", "root or raw_dir", "neither")
    folder = Path(raw_dir or Path(str(root)) / "raw")
    path_of_split = {name: folder / f"{name}.txt" for name in _SPLITS}
    absent = [path.name for path in path_of_split.values() if not path.is_file()]
    if absent:
        _unpack_sst(folder, absent, may_download=raw_dir is None)

    if verify:
        hint = "verify=False if the change is intended"
        for name, path in path_of_split.items():
            files.check_sha256(path, _SHA256[name], "SST", hint)
    return path_of_split


def _unpack_sst(folder: Path, absent: Sequence[str], *, may_download: bool) -> None:
    """Write absent files from the archive in the folder, or from a download."""
    names = "train.txt, dev.txt and test.txt"
    hint = f"put {names}, or {_ARCHIVE} from {_URL}, into {folder}, or pass raw_dir="
    if not may_download and not (folder / _ARCHIVE).is_file():
        problem = "SST: raw files are missing"
        got = f"no {', no '.join(absent)}"
        raise mismatch(FileNotFoundError, problem, names, got, where=folder, hint=hint)

    archive = files.download_verified(_URL, folder, _ARCHIVE_SHA256, "SST", hint=hint)
    with ZipFile(archive) as opened:
        for name in absent:
            write = partial(Path.write_bytes, data=opened.read(f"trees/{name}"))
            files.write_atomically(folder / name, write)


class TreeFile(TreeDataset):
    """The trees of one or several files in bracketed form.

    See :func:`~pyg_dynbatch.data.parse_bracketed` for the form. Pass the ``vocabulary`` and
    ``num_classes`` of the training file to other files.

    Args:
        path: The file, or several, read one after another; any may be compressed (``.gz``). Blank
            lines are skipped, and counted in a warning.
        root: Folder for ``processed/``; None keeps the trees in memory.
        num_classes: Labels must be below this; None takes the largest label found plus one.
        labels: ``"required"`` at every node, ``"optional"``, or ``"none"`` (no field ``y``).
        vocabulary: The words; None takes those of the files, in order of appearance.
        **options: As in :class:`~pyg_dynbatch.datasets.TreeDataset`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file is empty, not UTF-8, corrupt, or cannot be parsed; file, line and
            column are named.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "mine.txt"
        >>> size = path.write_text("(3 (2 good) (1 fun))")
        >>> trees = TreeFile(path)
        >>> len(trees), trees.num_classes, trees.vocabulary.words
        (1, 4, ('<unk>', 'good', 'fun'))
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        root: str | Path | None = None,
        num_classes: int | None = None,
        labels: str = "required",
        vocabulary: Vocabulary | None = None,
        **options: Any,
    ) -> None:
        paths = [path] if isinstance(path, str | Path) else path
        self._paths = [files.existing(each, "a text file") for each in paths]
        if not self._paths:
            raise mismatch(ValueError, "TreeFile: no files are given", "at least one")
        super().__init__(
            root,
            split="trees",
            key={"files": [files.sha256_of(each) for each in self._paths]},
            vocabulary=vocabulary or "all",
            num_classes=num_classes,
            labels=labels,
            **options,
        )

    def read(self) -> dict[str, list[ParsedTree]]:
        """Read the files."""
        parse = partial(parse_bracketed, num_classes=self._chosen_classes, labels=self._labels)
        return {"trees": [tree for path in self._paths for tree in _parse_lines(path, parse)]}
