"""Keep the parsed trees of a data set on disk so that each file is parsed once."""

import hashlib
import json
import pickle
import warnings
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch_geometric.data import InMemoryDataset

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.core.files import write_atomically
from pyg_dynbatch.core.progress import Progress
from pyg_dynbatch.data.packing import node_counts
from pyg_dynbatch.data.tree import DynTreeData
from pyg_dynbatch.data.tree_columns import TreeTable
from pyg_dynbatch.featurizers.files import load_tensors
from pyg_dynbatch.featurizers.vocabulary import Vocabulary

Transform = Callable[[Any], Any]
Item = TypeVar("Item")

# Part of every cache name: raise it when the meaning of a field changes.
_FORMAT = "pyg_dynbatch.trees.1"


@dataclass(frozen=True)
class Content(Generic[Item]):
    """Holds what a data set consists of before it is cached.

    Attributes:
        splits: The examples of each split, as they were read.
        featurize: Turns one of them into a data object.
        vocabulary: The words of all of them.
        num_classes: Number of classes.
    """

    splits: Mapping[str, Sequence[Item]]
    featurize: Callable[[Item], DynTreeData]
    vocabulary: Vocabulary
    num_classes: int


class TreeDataset(InMemoryDataset, ABC):
    """Loads one split from the cache, or builds all splits and caches them.

    The cache file carries a hash of all that its content depends on (raw files, options,
    ``pre_transform``) in its name, so a change of any of them builds anew. It appears under that
    name only when it is complete, and a damaged one is built again with a warning. PyG's own
    ``process`` is not used: it writes its markers one by one and trusts them afterwards.

    Of ``pre_transform`` its pickle counts: a function's name, an object's class and state. That a
    function's body was edited is not noticed; delete ``processed/`` or force a reload then.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None caches nothing.
        transform: Applied to an example each time it is taken.
        pre_transform: Applied to an example once, before it is cached; with a root it must be one
            that can be pickled.

    Raises:
        ValueError: If there is a root, and ``pre_transform`` cannot be pickled.

    Example:
        >>> from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
        >>> dataset = ListOps(None, "val", recipe=ListOpsRecipe(train=0, val=8, test=0))
        >>> isinstance(dataset, TreeDataset), sum(dataset.node_counts) == dataset[:].y.numel()
        (True, True)
    """

    def __init__(
        self,
        root: str | Path | None,
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
    ) -> None:
        super().__init__(None if root is None else str(root), transform, pre_transform, log=False)
        # PyG puts "???" in the place of no folder, and a cache would be written there.
        self.root = None if root is None else str(root)
        self._table: TreeTable | None = None
        self._vocabulary = Vocabulary([])
        self._classes = 0

    def _open(
        self, split: str, key: Mapping[str, str], build: Callable[[], Content[Any]], force: bool
    ) -> None:
        """Fills the data set with one split.

        Args:
            split: Its name.
            key: All that the content depends on.
            build: Makes the content of all splits.
            force: Whether to build even if there is a cache.
        """
        cached, digest = None, ""
        folder = None if self.root is None else Path(self.processed_dir)
        if folder is not None:
            name = _name_of(self.pre_transform, type(self).__name__)
            key = {**key, "format": _FORMAT, "pre_transform": name}
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
            cached = folder / f"{split}.{digest}.pt"
        if cached is not None and cached.is_file() and not force:
            try:
                self._fill(load_tensors(cached, _FORMAT, type(self).__name__))
                return
            except ValueError:
                what = f"{type(self).__name__}: a damaged cache is built again"
                warnings.warn(f"{what}: {cached}", stacklevel=3)
        content = build()
        if not content.splits.get(split):
            raise ValueError(
                mismatch(
                    f"{type(self).__name__}: the split {split!r} is empty",
                    expected="one example or more",
                    got=0,
                )
            )
        for name, items in content.splits.items():
            packed = self._pack(name, items, content)
            if folder is not None:
                write_atomically(folder / f"{name}.{digest}.pt", _saver(packed))
            if name == split:
                self._fill(packed)

    def _pack(self, split: str, items: Sequence[Item], content: Content[Item]) -> dict[str, Any]:
        examples = []
        with Progress(f"{type(self).__name__}: {split}", "trees", len(items)) as progress:
            for item in items:
                examples.append(content.featurize(item))
                progress.update()
        if self.pre_transform is not None:
            examples = [self.pre_transform(example) for example in examples]
        data, slices = self.collate(examples)
        return {
            "format": _FORMAT,
            "data": data.to_dict(),
            "slices": None if slices is None else dict(slices),
            "words": list(content.vocabulary.words),
            "lower_case": content.vocabulary.lower_case,
            "num_classes": content.num_classes,
        }

    def _fill(self, packed: Mapping[str, Any]) -> None:
        unknown, *words = packed["words"]
        self._vocabulary = Vocabulary(words, unknown, packed["lower_case"])
        self._classes = packed["num_classes"]
        self._data = DynTreeData.from_dict(packed["data"])
        self.slices = packed["slices"]

    @property
    def vocabulary(self) -> Vocabulary:
        """Gives the words whose rows ``token`` holds."""
        return self._vocabulary

    @property
    def num_tokens(self) -> int:
        """Gives the number of rows of the vocabulary, row 0 for unknown words included."""
        return len(self._vocabulary)

    @property
    def num_classes(self) -> int:
        """Gives the number of classes, whether or not all occur in this split."""
        return self._classes

    @property
    def node_counts(self) -> list[int]:
        """Gives the number of nodes of every example without building any of them."""
        return node_counts(self)

    def token_counts(self) -> Int[Tensor, " row"]:
        """Counts how often each row of the vocabulary occurs.

        Returns:
            One count for each row.
        """
        token = self._data.token
        if self._indices is not None:
            starts = self._starts().tolist()
            parts = [token[starts[i] : starts[i + 1]] for i in self.indices()]
            token = torch.cat([*parts, token[:0]])  # the last one for a data set of no examples
        return torch.bincount(token[token >= 0], minlength=self.num_tokens)

    def __getitems__(self, chosen: Sequence[int]) -> Sequence[Any]:
        """Takes the trees of a batch at once, which loaders ask for, as columns if it can."""
        columns = None
        if self.transform is None and self.slices is not None:
            if self._table is None or self._table.slices is not self.slices:
                self._table = TreeTable(self.slices)
            where = self.indices()
            columns = self._table.take(self._data, [where[i] for i in chosen])
        return [self[i] for i in chosen] if columns is None else columns

    def _starts(self) -> Int[Tensor, " start"]:
        if self.slices is None:  # PyG keeps no slices of a single example
            return torch.tensor([0, self._data.depth.size(0)])
        return self.slices["depth"]


def choose_split(split: str, known: Sequence[str], aliases: Mapping[str, str], what: str) -> str:
    """Translates the name of a split into the one the data set uses.

    Args:
        split: The name given.
        known: The names used.
        aliases: Other names for them.
        what: Name of the data set, for messages.

    Returns:
        One of `known`.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> choose_split("val", ("train", "dev", "test"), {"val": "dev"}, "SST")
        'dev'
    """
    name = aliases.get(split, split)
    if name not in known:
        raise ValueError(
            mismatch(f"{what}: there is no such split", expected=", ".join(known), got=split)
        )
    return name


def name_of_vocabulary(vocabulary: str | Vocabulary, what: str) -> str:
    """Names the choice of a vocabulary for the cache.

    Args:
        vocabulary: ``"all"``, ``"train"`` or a vocabulary.
        what: Name of the data set, for messages.

    Returns:
        The name.

    Raises:
        ValueError: If the choice is unknown.

    Example:
        >>> name_of_vocabulary("all", "SST")
        'all'
    """
    if isinstance(vocabulary, Vocabulary):
        return vocabulary.digest()
    if vocabulary not in ("all", "train"):
        raise ValueError(
            mismatch(
                f"{what}: vocabulary is unknown",
                expected="'all', 'train' or a Vocabulary",
                got=repr(vocabulary),
            )
        )
    return vocabulary


def _saver(packed: dict[str, Any]) -> Callable[[Path], None]:
    return lambda temporary: torch.save(packed, temporary)


def _name_of(transform: Transform | None, what: str) -> str:
    if transform is None:
        return ""
    try:
        # Not its repr, which hides options (PyG's transforms) or is the same for all lambdas.
        pickled = pickle.dumps(transform, protocol=4)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            mismatch(
                f"{what}: nothing tells this pre_transform from another one",
                expected="one that can be pickled, to name the cache by",
                got=f"{transform!r} ({error})",
                mend="a top-level function or object, or root=None",
            )
        ) from error
    return hashlib.sha256(pickled).hexdigest()
