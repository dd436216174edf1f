"""Load a user's own file of bracketed trees, one tree a line."""

from collections.abc import Sequence
from pathlib import Path

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets.cached import Content, Transform, TreeDataset
from pyg_dynbatch.datasets.download import sha256_of
from pyg_dynbatch.featurizers.bracketed import parse_bracketed
from pyg_dynbatch.featurizers.files import read_lines
from pyg_dynbatch.featurizers.parsed import ParsedTree
from pyg_dynbatch.featurizers.vocabulary import Vocabulary

_SPLIT = "trees"


class TreeFile(TreeDataset):
    """Holds the trees of one or several files in bracketed form.

    A node is ``(label token)``, ``(label child child ...)`` or ``(label token child ...)``. Give
    the vocabulary and the number of classes of the training file to the files that are to be
    read with it::

        train = TreeFile("train.txt")
        test = TreeFile("test.txt", vocabulary=train.vocabulary, num_classes=train.num_classes)

    Args:
        path: The file, or several, read one after another; any may be compressed (``.gz``).
        root: Folder for ``processed/``; None caches nothing.
        num_classes: Labels must be below this; None takes the largest label found plus one.
        labels: ``"required"`` at every node, ``"optional"``, or ``"none"``: then there is no
            field ``y``. See `parse_bracketed`.
        vocabulary: The words; None takes those of the files, in order of appearance.
        transform: Applied to an example each time it is taken.
        pre_transform: Applied to an example once, before it is cached.
        force_reload: Whether to parse again.

    Raises:
        FileNotFoundError: If there is no such file.
        OSError: If the cache folder cannot be written.
        ValueError: If a file is empty, not UTF-8, damaged, or cannot be parsed; file, line and
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
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
        force_reload: bool = False,
    ) -> None:
        super().__init__(root, transform, pre_transform)
        paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(one) for one in path]
        if not paths:
            raise ValueError(
                mismatch("TreeFile: there are no files", expected="one or more", got=0)
            )
        lines = {path: read_lines(path) for path in paths}

        def build() -> Content[ParsedTree]:
            trees = [
                parse_bracketed(line, f"{path}:{number}", num_classes=num_classes, labels=labels)
                for path in paths
                for number, line in enumerate(lines[path], start=1)
            ]
            words = vocabulary or Vocabulary.from_words(w for tree in trees for w in tree.words)
            classes = num_classes or 1 + max(max(tree.labels) for tree in trees)
            labelled = labels != "none"
            return Content(
                {_SPLIT: trees}, lambda t: t.to_data(words, labelled=labelled), words, classes
            )

        key = {
            "files": " ".join(sha256_of(path) for path in paths),
            "num_classes": str(num_classes),
            "labels": labels,
            "vocabulary": "" if vocabulary is None else vocabulary.digest(),
        }
        self._open(_SPLIT, key, build, force_reload)
