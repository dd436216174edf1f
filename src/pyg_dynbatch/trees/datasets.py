"""Cached data sets of trees: SST, SICK and your own bracketed files."""

import hashlib
import json
import math
import pickle
import re
import warnings
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch_geometric.data import InMemoryDataset

from pyg_dynbatch import files
from pyg_dynbatch.console import Progress
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.files import read_lines, sha256_of
from pyg_dynbatch.loading import Segments, is_plain
from pyg_dynbatch.samplers import node_counts
from pyg_dynbatch.trees.contextual import ContextualVectors, SentenceEncoder
from pyg_dynbatch.trees.data import DynTreeData, TreeColumns
from pyg_dynbatch.trees.text import ParsedTree, forest_to_data, parse_bracketed, parse_parents
from pyg_dynbatch.trees.words import Vocabulary

Transform = Callable[[Any], Any]
Item = TypeVar("Item")

# Part of every cache name: raise it when the meaning of a field changes.
_FORMAT = "pyg_dynbatch.trees.3"


@dataclass(frozen=True)
class Content:
    """What a data set consists of before it is cached."""

    splits: Mapping[str, Sequence[Any]]  # items with an attribute ``words``, for the vocabulary
    featurize: Callable[[Any, Vocabulary], DynTreeData]  # makes an example of an item
    num_classes: int


class TreeDataset(InMemoryDataset, ABC):
    """Load one split from the cache, or build all splits and cache them.

    The name of the cache file holds a hash of all that its content depends on: raw files, options,
    and the pickle of ``pre_transform`` (a function's name, an object's class and state; an edited
    function body is not noticed). The file is written atomically; a corrupt one is rebuilt with a
    warning.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None caches nothing.
        split: Name of the split.
        key: All that the content depends on, by name.
        build: Reads all splits.
        vocabulary: The words of ``"all"`` splits, of the ``"train"`` split, or a vocabulary.
        transform: Applied to an example each time it is taken.
        pre_transform: Applied to an example once, before it is cached; with a root it must be one
            that can be pickled.
        encoder: Gives every word a vector within its sentence, in the field ``x`` of a node. Those
            of a split are computed once and kept in a file beside the cached trees, which is
            mapped into memory.
        force_reload: Whether to rebuild the cache; a file of vectors stays until it is deleted.

    Raises:
        OSError: If the cache folder cannot be written.
        ValueError: If the split is empty, or if there is a root and ``pre_transform`` cannot be
            pickled; with an encoder, if there are no sentences, or if the file of their vectors is
            damaged or belongs to others.

    Example:
        >>> from pyg_dynbatch.datasets import ListOps, ListOpsRecipe
        >>> dataset = ListOps(None, "val", recipe=ListOpsRecipe(train=0, val=8, test=0))
        >>> isinstance(dataset, TreeDataset), sum(dataset.node_counts) == dataset[:].y.numel()
        (True, True)
    """

    labels: str = "none"
    """How text has the labels of its nodes, as in :func:`~pyg_dynbatch.data.parse_bracketed`."""

    def __init__(
        self,
        root: str | Path | None,
        split: str,
        key: Mapping[str, str],
        build: Callable[[], Content],
        vocabulary: str | Vocabulary = "all",
        *,
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
        encoder: SentenceEncoder | None = None,
        force_reload: bool = False,
    ) -> None:
        super().__init__(None if root is None else str(root), transform, pre_transform, log=False)
        # PyG replaces None by "???", and a cache would be written there.
        self.root = None if root is None else str(root)
        self._segments: tuple[tuple[Any, Any], dict[str, Segments]] = ((None, None), {})
        name = type(self).__name__
        if not isinstance(vocabulary, Vocabulary) and vocabulary not in ("all", "train"):
            what, expected = f"{name}: unknown vocabulary", "all, train or a Vocabulary"
            raise mismatch(ValueError, what, expected, repr(vocabulary))
        build = cache(build)
        packed = ending = None
        if root is not None:
            words = vocabulary if isinstance(vocabulary, str) else vocabulary.digest()
            fixed = {"format": _FORMAT, "words": words, "transform": _name_of(pre_transform, name)}
            text = json.dumps({**key, **fixed}, sort_keys=True)
            ending = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.pt"
            packed = None if force_reload else self._cached(f"{split}.{ending}")
        packed = packed or self._build(split, build(), vocabulary, ending)
        # The words whose rows ``token`` holds.
        self.vocabulary = Vocabulary.from_dict(packed["vocabulary"])
        self._classes = packed["num_classes"]
        self.data, self.slices = DynTreeData.from_dict(packed["data"]), packed["slices"]
        self.vectors: ContextualVectors | None = None
        """The vectors that an encoder gives the words."""
        if encoder is not None:
            trees = Path(self.processed_dir, f"{split}.{ending}") if ending else None
            read = partial(self._sentences, build, split)
            before = [0, *(self._data.token >= 0).cumsum(0).tolist()]
            ends = [0, -1] if self.slices is None else self.slices["token"].tolist()
            first = [before[node] for node in ends]
            self.vectors = ContextualVectors.of(encoder, first, read, trees)

    def _sentences(self, build: Callable[[], Content], split: str) -> list[list[str]]:
        trees = [tree for item in build().splits[split] for tree in getattr(item, "trees", [item])]
        if self.pre_transform is not None or not isinstance(trees[0], ParsedTree):
            what = f"{type(self).__name__}: an encoder needs the sentences as they are"
            raise mismatch(ValueError, what, "words at the nodes of trees, no pre_transform")
        return [tree.words for tree in trees]

    def get(self, idx: int) -> Any:
        """Take one example, with the vectors of its words."""
        example = super().get(idx)
        if self.vectors is not None and "x" not in example:
            example.x = self.vectors(example.token, [idx])
        return example

    def _cached(self, name: str) -> dict[str, Any] | None:
        path, what = Path(self.processed_dir, name), type(self).__name__
        try:
            return files.load_tensors(path, _FORMAT, what) if path.is_file() else None
        except ValueError:
            warnings.warn(f"{what}: rebuilding a corrupt cache: {path}", stacklevel=4)
            return None

    def _build(
        self, split: str, content: Content, vocabulary: str | Vocabulary, ending: str | None
    ) -> dict[str, Any]:
        """Build one split; with an ending for their names, build and cache the others as well."""
        splits = content.splits
        if not splits.get(split):
            what = f"{type(self).__name__}: the split {split!r} is empty"
            raise mismatch(ValueError, what, "at least one example")
        if isinstance(vocabulary, str):
            counted = splits.values() if vocabulary == "all" else [splits["train"]]
            words = (word for items in counted for item in items for word in item.words)
            vocabulary = Vocabulary.from_words(words)
        built = [split] if ending is None else splits
        packed = {name: self._pack(name, content, vocabulary) for name in built}
        for name, part in packed.items() if ending else ():
            path = Path(self.processed_dir, f"{name}.{ending}")
            files.write_atomically(path, partial(torch.save, part))
        return packed[split]

    # Not PyG's own ``process``, which writes its markers one by one and trusts them afterwards.
    def _pack(self, split: str, content: Content, vocabulary: Vocabulary) -> dict[str, Any]:
        examples, items = [], content.splits[split]
        with Progress(f"{type(self).__name__}: {split}", "trees", len(items)) as progress:
            for item in items:
                examples.append(content.featurize(item, vocabulary))
                progress.update()
        if self.pre_transform is not None:
            examples = [self.pre_transform(example) for example in examples]
        data, slices = self.collate(examples)
        return {
            "format": _FORMAT,
            "data": data.to_dict(),
            "slices": None if slices is None else dict(slices),
            "vocabulary": vocabulary.as_dict(),
            "num_classes": content.num_classes,
        }

    @property
    def num_tokens(self) -> int:
        """Number of rows of the vocabulary, row 0 for unknown words included; 0 with an encoder."""
        return 0 if self.vectors is not None else len(self.vocabulary)

    @property
    def num_classes(self) -> int:
        """Number of classes, whether or not all occur in this split."""
        return self._classes

    @property
    def node_counts(self) -> list[int]:
        """Number of nodes of every example, found without building any of them."""
        return node_counts(self)

    def token_counts(self) -> Int[Tensor, " row"]:
        """Count how often each row of the vocabulary occurs."""
        token = self._data.token
        # PyG keeps no slices of a single example.
        sizes = [token.numel()] if self.slices is None else self.slices["depth"].diff().numpy()
        nodes = Segments(sizes)
        columns = TreeColumns(nodes, {"token": token}, {"token": nodes})
        token = columns[list(self.indices())].fields["token"]
        return torch.bincount(token[token >= 0], minlength=len(self.vocabulary))

    def __getitems__(self, chosen: Sequence[int]) -> Sequence[Any]:
        """Take the trees of a batch at once, as columns if possible; loaders call this."""
        columns = self._columns() if self.transform is None else None
        if columns is None:
            return [self[i] for i in chosen]
        where = self.indices()
        rows = [where[i] for i in chosen]
        taken = columns[rows]
        if self.vectors is not None and "x" not in taken.fields:
            taken.fields["x"] = self.vectors(taken.fields["token"], rows)
            taken.segments["x"] = taken.segments["token"]
        return taken

    def _columns(self) -> TreeColumns | None:
        """Return all trees that PyG joined as columns; None where PyG has to take them out."""
        # PyG names `_data` as the way to the joined examples that does not warn.
        store = self._data.stores[0]
        source = self.slices, vars(store).get("_num_nodes")
        if None in source:
            return None
        if not all(map(is_, self._segments[0], source)):
            self._segments = source, _segments_of(*source)
        segments = self._segments[1]
        fields = {key: store[key] for key in segments if key in store and key != "num_nodes"}
        named = {"edge_index"} <= fields.keys() <= TreeColumns.named
        if not named or not all(map(is_plain, fields.values())):
            return None
        return TreeColumns(segments["num_nodes"], fields, {key: segments[key] for key in fields})


def _segments_of(slices: Mapping[str, Tensor], num_nodes: list[int]) -> dict[str, Segments]:
    """Find where the rows of each example are, for every field and for the nodes."""
    sizes = {"num_nodes": np.array(num_nodes)}
    sizes |= {key: starts.diff().numpy() for key, starts in slices.items()}
    known: dict[bytes, Segments] = {}
    # Fields with equal sizes share one object, so that their rows are found once per batch. Copies:
    # pickling moves the slices, and a view would then read freed memory.
    return {
        key: known.setdefault(each.tobytes(), Segments(each.copy())) for key, each in sizes.items()
    }


def parse_lines(path: Path, parse: Callable[[str, str], Item]) -> list[Item]:
    """Call ``parse`` with every line of a file but blank ones, with file and line for messages."""
    lines = files.read_lines(path)
    filled = [number for number, line in enumerate(lines) if line.strip(" \t")]
    if blank := len(lines) - len(filled):
        warnings.warn(f"{path}: {blank} of {len(lines)} lines are blank, and skipped", stacklevel=2)
    return [parse(lines[number], f"{path}:{number + 1}") for number in filled]


def choose_split(split: str, known: Sequence[str], aliases: Mapping[str, str], what: str) -> str:
    """Return the name that the data set uses for a split."""
    return checked_choice(f"{what}: unknown split", aliases.get(split, split), known)


def _name_of(transform: Transform | None, what: str) -> str:
    if transform is None:
        return ""
    try:
        # Not its repr, which hides options (PyG's transforms) or is the same for all lambdas.
        pickled = pickle.dumps(transform, protocol=4)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        what, got = f"{what}: pre_transform cannot be pickled", f"{transform!r} ({error})"
        hint = "a top-level function or object, or root=None"
        raise mismatch(ValueError, what, got=got, hint=hint) from error
    return hashlib.sha256(pickled).hexdigest()


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

    labels = "required"

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
        raw = _find_sst(root, raw_dir, verify)
        key = {name: files.sha256_of(path) for name, path in raw.items()}
        super().__init__(root, split, key, partial(_build_sst, raw), vocabulary, **options)


def _find_sst(root: str | Path | None, raw_dir: str | Path | None, verify: bool) -> dict[str, Path]:
    """Find the raw files; unpack them where they are missing, from an archive or a download."""
    if root is None and raw_dir is None:
        raise mismatch(ValueError, "SST: no folder is given", "root or raw_dir", "neither")
    folder = Path(raw_dir or Path(str(root)) / "raw")
    raw = {name: folder / f"{name}.txt" for name in _SPLITS}
    absent = [path.name for path in raw.values() if not path.is_file()]
    names = "train.txt, dev.txt and test.txt"
    hint = f"put {names}, or {_ARCHIVE} from {_URL}, into {folder}, or pass raw_dir="
    if absent and raw_dir is not None and not (folder / _ARCHIVE).is_file():
        what, got = "SST: raw files are missing", f"no {', no '.join(absent)}"
        raise mismatch(FileNotFoundError, what, names, got, where=folder, hint=hint)
    if absent:
        archive = files.download_verified(_URL, folder, _ARCHIVE_SHA256, "SST", hint=hint)
        with ZipFile(archive) as opened:
            for name in absent:
                write = partial(Path.write_bytes, data=opened.read(f"trees/{name}"))
                files.write_atomically(folder / name, write)
    for name, path in raw.items() if verify else ():
        files.check_sha256(path, _SHA256[name], "SST", "verify=False if the change is intended")
    return raw


def _build_sst(raw: dict[str, Path]) -> Content:
    parse = partial(parse_bracketed, num_classes=_CLASSES)
    parsed = {name: parse_lines(path, parse) for name, path in raw.items()}
    return Content(parsed, ParsedTree.to_data, _CLASSES)


_SPLIT = "trees"


class TreeFile(TreeDataset):
    """The trees of one or several files in bracketed form.

    See :func:`~pyg_dynbatch.data.parse_bracketed` for the form. Pass the ``vocabulary`` and
    ``num_classes`` of the training file to other files.

    Args:
        path: The file, or several, read one after another; any may be compressed (``.gz``). Blank
            lines are skipped, and counted in a warning.
        root: Folder for ``processed/``; None caches nothing.
        num_classes: Labels must be below this; None takes the largest label found plus one.
        labels: ``"required"`` at every node, ``"all_or_none"``, ``"optional"``, or ``"none"`` (no
            field ``y``).
        vocabulary: The words; None takes those of the files, in order of appearance.
        **options: ``transform``, ``pre_transform`` and ``force_reload``, see
            :class:`~pyg_dynbatch.datasets.TreeDataset`.

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
        given = [path] if isinstance(path, str | Path) else path
        paths = [files.existing(each, "a text file") for each in given]
        if not paths:
            raise mismatch(ValueError, "TreeFile: no files are given", "at least one")

        def build() -> Content:
            parse = partial(parse_bracketed, num_classes=num_classes, labels=labels)
            trees = [tree for path in paths for tree in parse_lines(path, parse)]
            classes = num_classes or 1 + max(max(tree.labels) for tree in trees)
            featurize = partial(ParsedTree.to_data, labelled=labels != "none")
            return Content({_SPLIT: trees}, featurize, classes)

        self.labels = labels
        key = {"files": " ".join(map(files.sha256_of, paths)), "labels": labels}
        key["num_classes"] = str(num_classes)
        super().__init__(root, _SPLIT, key, build, vocabulary or "all", **options)


# SICK ---------------------------------------------------------------------------------------------


_TREES = ("dependency", "constituency", "chain")
_SPLITS = ("train", "dev", "test")
_CLASSES = 5
_PARENT_FILES = {"dependency": "parents", "constituency": "cparents"}
_TABLES = {
    "train": ["SICK_train.txt"],
    "dev": ["SICK_trial.txt"],
    "test": ["SICK_test_annotated.txt", "SICK_test.txt"],
}
_WORDS = re.compile(r"\w+|[^\w\s]")


def score_to_target(score: float, num_classes: int = _CLASSES) -> Float[Tensor, "one class"]:
    r"""Distribute a score between the two integers next to it.

    :math:`p_i = y - \lfloor y \rfloor` for :math:`i = \lfloor y \rfloor + 1`,
    :math:`p_i = \lfloor y \rfloor - y + 1` for :math:`i = \lfloor y \rfloor`, and 0 otherwise, so
    that :math:`\sum_i i\,p_i = y`.

    Args:
        score: The score y, 1 to `num_classes`.
        num_classes: The largest score.

    Reference:
        Tai, Socher and Manning (2015), arXiv 1503.00075, section 4.2.

    Example:
        >>> score_to_target(3.25)
        tensor([[0.0000, 0.0000, 0.7500, 0.2500, 0.0000]])
    """
    target = torch.zeros(1, num_classes)
    below = min(int(score), num_classes - 1)
    target[0, below - 1] = below + 1 - score
    target[0, below] = score - below
    return target


@dataclass(frozen=True)
class _Pair:
    """Two parsed sentences and their score."""

    trees: list[ParsedTree]
    score: float

    @property
    def words(self) -> list[str]:
        return [word for tree in self.trees for word in tree.words]


class SICK(TreeDataset):
    r"""One split of the SICK relatedness task.

    One example is a pair of sentences: a forest of two trees with their roots in ``root_index``,
    in the order of the sentences. ``score`` ``[1]`` is the relatedness, 1 to 5; ``target``
    ``[1, 5]`` is the same as a distribution (see `score_to_target`).

    Nothing is downloaded, as a parser has to make the parses. `raw_dir` or ``root/raw`` holds
    either folders ``train``, ``dev``, ``test`` with ``a.toks``, ``b.toks``, ``sim.txt`` and
    ``a.parents``, ``b.parents`` or ``a.cparents``, ``b.cparents``, from the preparation script of
    the Tree-LSTM release; or, for chains only, the tables ``SICK_train.txt``, ``SICK_trial.txt``,
    ``SICK_test_annotated.txt``.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None caches nothing and needs `raw_dir`.
        split: ``"train"``, ``"dev"`` (or ``"val"``, ``"trial"``), ``"test"``.
        trees: ``"dependency"``: a word at every node, for the child-sum Tree-LSTM;
            ``"constituency"``: words at the leaves, for the binary one; ``"chain"``: each word
            above the one before it, which makes a Tree-LSTM a sequential LSTM.
        vocabulary: ``"all"``, ``"train"`` or a vocabulary, as in `SST`.
        raw_dir: Folder with the raw files.
        **options: ``transform``, ``pre_transform`` and ``force_reload``, see
            :class:`~pyg_dynbatch.datasets.TreeDataset`.

    Raises:
        FileNotFoundError: If raw files are missing.
        ValueError: If a file cannot be parsed; file and line are named.

    Reference:
        Marelli et al. (2014), SemEval, S14-2001; Tai, Socher and Manning (2015),
        arXiv 1503.00075, section 5.2.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> table = "sentence_A\tsentence_B\trelatedness_score\nA man sings\tHe sings\t4.5"
        >>> for name in ("train", "trial", "test"):
        ...     size = Path(folder, f"SICK_{name}.txt").write_text(table)
        >>> pair = SICK(None, trees="chain", raw_dir=folder)[0]
        >>> pair.root_index, pair.score, pair.target
        (tensor([2, 4]), tensor([4.5000]), tensor([[0.0000, 0.0000, 0.0000, 0.5000, 0.5000]]))
    """

    def __init__(
        self,
        root: str | Path | None,
        split: str = "train",
        trees: str = "dependency",
        vocabulary: str | Vocabulary = "all",
        raw_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        split = choose_split(split, _SPLITS, {"val": "dev", "trial": "dev"}, "SICK")
        folder = Path(raw_dir or Path(root or ".") / "raw")
        found = _find_sick(folder, trees)
        key = {str(p.relative_to(folder)): sha256_of(p) for p in chain(*found.values())}
        key["trees"] = trees
        super().__init__(root, split, key, partial(_build_sick, found), vocabulary, **options)


def _find_sick(folder: Path, trees: str) -> dict[str, list[Path]]:
    """Find, for each split, either one table or the files of words, scores and parents."""
    checked_choice("SICK: unknown trees", trees, _TREES)
    names = ["a.toks", "b.toks", "sim.txt"]
    names += [f"{sentence}.{_PARENT_FILES[trees]}" for sentence in "ab" if trees != "chain"]
    found = {split: [folder / split / name for name in names] for split in _SPLITS}
    absent = [path for path in chain(*found.values()) if not path.is_file()]
    if not absent:
        return found
    tables = {
        split: [folder / name for name in names if (folder / name).is_file()][:1]
        for split, names in _TABLES.items()
    }
    if trees == "chain" and all(tables.values()):
        return tables
    what, expected = "SICK: raw files are missing", f"in train/, dev/, test/: {', '.join(names)}"
    got = f"no {absent[0].relative_to(folder)}, {len(absent)} files missing"
    hint = "the preparation script of the Tree-LSTM release; trees='chain' needs only "
    hint += ", ".join(names[0] for names in _TABLES.values()) + " of SemEval 2014 task 1"
    raise mismatch(FileNotFoundError, what, expected, got, where=folder, hint=hint)


def _build_sick(found: dict[str, list[Path]]) -> Content:
    pairs = {
        split: _read_table(paths[0]) if len(paths) == 1 else _read_folder(paths)
        for split, paths in found.items()
    }
    return Content(pairs, _featurize, _CLASSES)


def _featurize(pair: _Pair, vocabulary: Vocabulary) -> DynTreeData:
    data = forest_to_data(pair.trees, vocabulary, labelled=False)
    data.target = score_to_target(pair.score)
    data.score = torch.tensor([pair.score])
    return data


def _read_folder(paths: list[Path]) -> list[_Pair]:
    columns = [read_lines(path) for path in paths]
    for path, column in zip(paths, columns, strict=True):
        if len(column) != len(columns[0]):
            what, got = "SICK: two files of a split differ in length", f"{len(column)} lines"
            expected = f"{len(columns[0])} lines, as in {paths[0].name}"
            raise mismatch(ValueError, what, expected, got, where=path)
    pairs = []
    for number, (first, second, score, *parents) in enumerate(zip(*columns, strict=True), start=1):
        # One sentence after the other: its words, its parents if any, and the file to name.
        sentences = zip((first, second), parents or (None, None), paths[3:] or paths, strict=False)
        trees = [_tree(text.split(" "), above, f"{p}:{number}") for text, above, p in sentences]
        pairs.append(_Pair(trees, _score(score, f"{paths[2]}:{number}")))
    return pairs


def _read_table(path: Path) -> list[_Pair]:
    header, *lines = read_lines(path)
    titles, wanted = header.split("\t"), ("sentence_A", "sentence_B", "relatedness_score")
    if not set(wanted) <= set(titles):
        what, expected = "SICK: the table lacks a column", ", ".join(wanted)
        raise mismatch(ValueError, what, expected, ", ".join(titles), where=f"{path}:1")
    pairs = []
    for number, line in enumerate(lines, start=2):
        fields, where = line.split("\t"), f"{path}:{number}"
        if len(fields) != len(titles):
            what, expected = "SICK: wrong number of fields", f"{len(titles)} divided by tabs"
            raise mismatch(ValueError, what, expected, len(fields), where=where)
        *sentences, score = (fields[titles.index(name)] for name in wanted)
        trees = [_tree(_WORDS.findall(sentence), None, where) for sentence in sentences]
        pairs.append(_Pair(trees, _score(score, where)))
    return pairs


def _tree(words: list[str], parents: str | None, where: str) -> ParsedTree:
    words = list(filter(None, words))
    if not words:
        raise mismatch(ValueError, "SICK: a sentence is empty", "at least one word", where=where)
    chain = " ".join(map(str, [*range(2, len(words) + 1), 0]))
    return parse_parents(chain if parents is None else parents, words, where)


def _score(text: str, where: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if 1.0 <= score <= _CLASSES:
        return score
    what = f"SICK: the relatedness is not a number from 1 to {_CLASSES}"
    raise mismatch(ValueError, what, got=repr(text), where=where)
