"""Load SICK relatedness: pairs of sentences with a score from 1 to 5."""

import math
import re
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.files import read_lines, sha256_of
from pyg_dynbatch.trees.data import DynTreeData
from pyg_dynbatch.trees.datasets import Content, TreeDataset, choose_split
from pyg_dynbatch.trees.text import ParsedTree, forest_to_data, parse_parents
from pyg_dynbatch.trees.words import Vocabulary

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
        files = _find_files(folder, trees)
        key = {str(p.relative_to(folder)): sha256_of(p) for p in chain(*files.values())}
        key["trees"] = trees
        super().__init__(root, split, key, partial(_build, files), vocabulary, **options)


def _find_files(folder: Path, trees: str) -> dict[str, list[Path]]:
    """Find, for each split, either one table or the files of words, scores and parents."""
    checked_choice("SICK: unknown trees", trees, _TREES)
    names = ["a.toks", "b.toks", "sim.txt"]
    names += [f"{sentence}.{_PARENT_FILES[trees]}" for sentence in "ab" if trees != "chain"]
    files = {split: [folder / split / name for name in names] for split in _SPLITS}
    absent = [path for path in chain(*files.values()) if not path.is_file()]
    if not absent:
        return files
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


def _build(files: dict[str, list[Path]]) -> Content:
    pairs = {
        split: _read_table(paths[0]) if len(paths) == 1 else _read_folder(paths)
        for split, paths in files.items()
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
