"""Load the Stanford Sentiment Treebank, five classes on every node of a binary tree."""

from pathlib import Path

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.datasets.cached import (
    Content,
    Transform,
    TreeDataset,
    choose_split,
    name_of_vocabulary,
)
from pyg_dynbatch.datasets.download import (
    check_sha256,
    download_verified,
    extract_member,
    sha256_of,
)
from pyg_dynbatch.featurizers.bracketed import parse_bracketed
from pyg_dynbatch.featurizers.files import read_lines
from pyg_dynbatch.featurizers.parsed import ParsedTree
from pyg_dynbatch.featurizers.vocabulary import Vocabulary

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
    """Holds one split of the Stanford Sentiment Treebank.

    Binarised constituency trees of 11,855 sentences of film reviews. Every node has a label ``y``
    from 0 (very negative) to 4 (very positive); leaves have a ``token``, inner nodes -1. Case is
    kept, as in the protocols of Tai et al. and of TensorFlow Fold.

    The raw files are taken from `raw_dir` or ``root/raw``, there also out of the archive if it
    lies there, and are downloaded to ``root/raw`` otherwise.

    Args:
        root: Folder for ``raw/`` and ``processed/``; None caches nothing and needs `raw_dir`.
        split: ``"train"`` (8,544 trees), ``"dev"`` or ``"val"`` (1,101), ``"test"`` (2,210).
        vocabulary: ``"all"``: the words of all three splits (21,701), so that words that only the
            dev and test sets have can be given pretrained vectors; ``"train"``: those of the
            training set (18,280); or a vocabulary.
        raw_dir: Folder with ``train.txt``, ``dev.txt`` and ``test.txt``.
        verify: Whether files other than the published ones are refused.
        transform: Applied to an example each time it is taken.
        pre_transform: Applied to an example once, before it is cached.
        force_reload: Whether to parse again.

    Raises:
        ConnectionError: If there are no raw files and they cannot be downloaded.
        FileNotFoundError: If `raw_dir` lacks a file.
        OSError: If the cache folder cannot be written.
        ValueError: If a file is damaged, not the published one, or cannot be parsed.

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
        transform: Transform | None = None,
        pre_transform: Transform | None = None,
        force_reload: bool = False,
    ) -> None:
        super().__init__(root, transform, pre_transform)
        split = choose_split(split, _SPLITS, {"val": "dev"}, "SST")
        given = None if raw_dir is None else Path(raw_dir)
        folder = given or (None if root is None else Path(root) / "raw")
        files = _find_files(folder, may_download=given is None, verify=verify)
        self._open(
            split,
            {
                **{name: sha256_of(path) for name, path in files.items()},
                "vocabulary": name_of_vocabulary(vocabulary, "SST"),
            },
            lambda: _build(files, vocabulary),
            force_reload,
        )


def _find_files(folder: Path | None, *, may_download: bool, verify: bool) -> dict[str, Path]:
    if folder is None:
        raise ValueError(
            mismatch("SST: there is no folder", expected="root or raw_dir", got="neither")
        )
    files = {name: folder / f"{name}.txt" for name in _SPLITS}
    absent = [path.name for path in files.values() if not path.is_file()]
    advice = (
        f"put train.txt, dev.txt and test.txt, or {_ARCHIVE} from {_URL}, into {folder}, "
        "or pass raw_dir="
    )
    archive = folder / _ARCHIVE
    if absent and not may_download and not archive.is_file():
        raise FileNotFoundError(
            mismatch(
                "SST: raw files are missing",
                expected="train.txt, dev.txt and test.txt",
                got=f"no {', no '.join(absent)}",
                where=folder,
                mend=advice,
            )
        )
    if absent:
        archive = download_verified(_URL, folder, _ARCHIVE_SHA256, "SST", mend=advice)
        for name in absent:
            extract_member(archive, f"trees/{name}", folder / name, "SST")
    if verify:
        for name, path in files.items():
            check_sha256(path, _SHA256[name], "SST", "verify=False if the change is intended")
    return files


def _build(files: dict[str, Path], vocabulary: str | Vocabulary) -> Content[ParsedTree]:
    parsed = {name: _parse(path) for name, path in files.items()}
    if isinstance(vocabulary, Vocabulary):
        words = vocabulary
    else:
        counted = parsed.values() if vocabulary == "all" else [parsed["train"]]
        words = Vocabulary.from_words(w for trees in counted for t in trees for w in t.words)
    return Content(parsed, lambda tree: tree.to_data(words), words, _CLASSES)


def _parse(path: Path) -> list[ParsedTree]:
    return [
        parse_bracketed(line, f"{path}:{number}", num_classes=_CLASSES)
        for number, line in enumerate(read_lines(path), start=1)
    ]
