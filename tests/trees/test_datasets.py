"""Cached data sets of trees: whole or absent, renewed when anything changes; your own files."""

import gzip
import hashlib
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.loader import DataLoader

from pyg_dynbatch.columns import Columns
from pyg_dynbatch.data import DynTreeData, Vocabulary
from pyg_dynbatch.datasets import SST, TreeDataset, TreeFile
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.loader import DataLoader as OwnLoader
from pyg_dynbatch.trees import datasets as sst
from pyg_dynbatch.trees.datasets import choose_split
from tests.conftest import Server
from tests.trees.helpers import assert_same, bracketed


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    path = tmp_path / "trees.txt"
    path.write_text("(3 (2 good) (1 fun))\n(0 bad)\n(1 (0 (1 a) (1 bad)) (2 film))\n")
    return path


def cached_files(root: Path) -> list[str]:
    folder = root / "processed"
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("pre_"))


def twice(data: DynTreeData) -> DynTreeData:
    data.y = 2 * data.y
    return data


class Interrupt:
    """Stops the process at the second example, as Ctrl-C would."""

    seen = 0

    def __call__(self, data: DynTreeData) -> DynTreeData:
        self.seen += 1
        if self.seen == 2:
            raise KeyboardInterrupt
        return data


def same(one: TreeDataset, other: TreeDataset) -> bool:
    for pair in zip(one, other, strict=True):
        assert_same(*pair)
    return one.vocabulary == other.vocabulary


def test_what_is_read_back_is_what_was_built(trees, tmp_path, monkeypatch):
    in_memory = TreeFile(trees)
    built = TreeFile(trees, tmp_path)
    assert len(cached_files(tmp_path)) == 1
    monkeypatch.setattr("pyg_dynbatch.trees.datasets.parse_bracketed", None)
    loaded = TreeFile(trees, tmp_path)
    assert same(in_memory, built) and same(built, loaded)
    assert loaded.num_classes == 4 and loaded.num_tokens == 6
    assert [data.num_nodes for data in loaded] == loaded.sizes == [3, 1, 5]
    assert isinstance(loaded[0], DynTreeData)
    with pytest.raises(TypeError):
        TreeFile(trees, tmp_path, force_reload=True)


def test_any_change_makes_another_file(trees: Path, tmp_path: Path) -> None:
    TreeFile(trees, tmp_path)
    assert TreeFile(trees, tmp_path, num_classes=9).num_classes == 9
    assert TreeFile(trees, tmp_path, vocabulary=Vocabulary(["bad"])).num_tokens == 2
    assert TreeFile(trees, tmp_path, labels="optional")[1].y.tolist() == [0]
    assert len(cached_files(tmp_path)) == 4
    trees.write_text("(1 (0 new) (1 text))\n")
    assert TreeFile(trees, tmp_path)[0].y.tolist() == [1, 0, 1]
    assert len(cached_files(tmp_path)) == 5


def test_another_pre_transform_is_warned_of_as_in_pyg(trees: Path, tmp_path: Path) -> None:
    first = TreeFile(trees, tmp_path)
    with pytest.warns(UserWarning, match="pre_transform"):
        TreeFile(trees, tmp_path, pre_transform=twice)
    doubled = TreeFile(trees, tmp_path, pre_transform=twice, force_reload=True)
    assert torch.equal(doubled[0].y, 2 * first[0].y)
    assert TreeFile(trees, pre_transform=lambda data: twice(data))[1].y.tolist() == [0]


def test_an_interrupted_build_or_write_leaves_nothing(trees, tmp_path, monkeypatch) -> None:
    def half(content: object, path: Path) -> None:
        path.write_bytes(b"PK half of a file")
        raise KeyboardInterrupt

    def refuse(content: object, path: Path) -> None:
        raise PermissionError(13, "Permission denied")  # a superuser may write everywhere

    with pytest.raises(KeyboardInterrupt):
        TreeFile(trees, tmp_path, pre_transform=Interrupt())
    refused = "PermissionError: Permission denied"
    for save, error, match in ((half, KeyboardInterrupt, None), (refuse, OSError, refused)):
        monkeypatch.setattr(torch, "save", save)
        with pytest.raises(error, match=match):
            TreeFile(trees, tmp_path)
    monkeypatch.undo()
    assert cached_files(tmp_path) == []
    (tmp_path / "file").write_text("where a folder should be")
    with pytest.raises(OSError, match="file"):
        TreeFile(trees, tmp_path / "file")
    (tmp_path / "processed").mkdir(exist_ok=True)
    (tmp_path / "processed" / ".trees.0123.tmp").write_bytes(b"of a process that was killed")
    assert len(TreeFile(trees, tmp_path)) == 3


def test_a_damaged_file_is_reported(trees: Path, tmp_path: Path) -> None:
    TreeFile(trees, tmp_path)
    (name,) = cached_files(tmp_path)
    path = tmp_path / "processed" / name
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cannot be used[\s\S]*delete it"):
        TreeFile(trees, tmp_path)


def test_a_worker_gets_the_path(trees: Path, tmp_path: Path) -> None:
    trees.write_text("(3 (2 good) (1 fun))\n" * 1000)
    dataset = TreeFile(trees, tmp_path)
    sent = pickle.dumps(dataset)
    assert len(sent) < 10_000
    assert same(pickle.loads(sent), dataset)
    assert len(pickle.dumps(TreeFile(trees))) > 10_000


def test_parts_of_a_data_set_count_their_own(trees: Path) -> None:
    dataset = TreeFile(trees)
    part = dataset[torch.tensor([2, 1])]
    assert part.sizes == [5, 1]
    words = dataset.vocabulary
    counts = dict(zip(words.words, part.token_counts().tolist(), strict=True))
    assert counts == {"<unk>": 0, "good": 0, "fun": 0, "bad": 2, "a": 1, "film": 1}
    assert dataset.token_counts().sum() == 6
    assert dataset[:0].sizes == [] and dataset[:0].token_counts().sum() == 0


def test_one_example_alone(trees: Path, tmp_path: Path) -> None:
    trees.write_text("(3 (2 good) (1 fun))\n")
    for _ in range(2):
        dataset = TreeFile(trees, tmp_path)
        assert (len(dataset), dataset.sizes, dataset[0].num_nodes) == (1, [3], 3)
        assert int(dataset.token_counts().sum()) == 2
    found = dataset.__getitems__([0, 0])
    assert [tree.num_nodes for tree in found] == [3, 3]
    assert Collater()(found).num_graphs == 2


def test_loaders_get_the_trees_of_a_batch_as_columns(trees: Path) -> None:
    dataset = TreeFile(trees)
    columns = dataset.__getitems__([2, 0])
    assert isinstance(columns, Columns)
    assert [tree.num_nodes for tree in columns] == [5, 3]
    part = dataset[1:]
    assert [tree.num_nodes for tree in part.__getitems__([1, -2])] == [5, 1]
    with pytest.raises(IndexError):
        part.__getitems__([2])
    loader = OwnLoader(dataset, batch_size=3, arity=2)
    (batch,) = loader
    wanted = Collater(arity=2)([dataset[0], dataset[1], dataset[2]])
    assert batch.schedule == wanted.schedule
    assert torch.equal(batch.token, wanted.token)
    (stock,) = DataLoader(pickle.loads(pickle.dumps(dataset)), batch_size=3)
    assert torch.equal(stock.edge_index, wanted.edge_index)


def test_a_transform_is_applied_to_each_example(trees: Path) -> None:
    found = TreeFile(trees, transform=twice).__getitems__([0])
    assert isinstance(found, list)
    assert found[0].y.tolist() == [6, 4, 2]


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_labels_and_words_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "(3 (2 good) (7 fun))", "(0 bad)", "")
    dataset = TreeFile(path)
    assert (len(dataset), dataset.num_classes) == (2, 8)
    assert dataset.vocabulary.words == ("<unk>", "good", "fun", "bad")
    other = TreeFile(str(path), vocabulary=Vocabulary(["bad"]), num_classes=9)
    assert other.num_classes == 9 and other[1].token.tolist() == [1]


def test_unlabelled_nodes_and_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "(1 (good) (-1 fun))", "((2 a) (b))")
    dataset = TreeFile(path, labels="optional")
    assert [data.y.tolist() for data in dataset] == [[1, -1, -1], [-1, 2, -1]]
    assert dataset.num_classes == 3
    with pytest.raises(ValueError, match="a label is missing"):
        TreeFile(path)
    bare = TreeFile(write(tmp_path / "b.txt", "(+ (3) (4))"), labels="none")
    assert "y" not in bare[0] and bare.num_classes == 0
    assert bare[0].token.tolist() == [1, 2, 3]
    several = TreeFile([path, tmp_path / "b.txt"], labels="optional")
    assert [data.num_nodes for data in several] == [3, 3, 3]


FINE = "(1 good)"


BAD_FILES = [
    (f"{FINE}\n(3 (2 a) (2 b)\n{FINE}", r"1 bracket is never closed[\s\S]*a.txt:2:15"),
    (f"{FINE}\n(3 (4 a) (2 b))\n{FINE}", r"a label is out of range[\s\S]*a.txt:2:5"),
    ("", "a.txt: the file is empty"),
    (None, "a.txt: there is no such file"),
    ("(1 caf\u00e9)".encode("utf-16"), r"the text is not UTF-8[\s\S]*a.txt:1:1"),
    (gzip.compress(b"(1 (0 a)\n", mtime=0), r"a\.txt:1:"),
    (gzip.compress(b"(1 (0 a)\n", mtime=0)[:-9], r"the compressed file is[\s\S]*where:    .*a.txt"),
]


@pytest.mark.parametrize(("content", "words"), BAD_FILES)
def test_faults_are_named_by_place(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        TreeFile(path, num_classes=4)


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "", "(1 good)", " \t", "(0 bad)\r", "\r", "(2 fun)", "", "")
    with pytest.warns(UserWarning, match=r"a.txt: 3 of 6 lines are blank"):
        dataset = TreeFile(path)
    assert [tree.y.tolist() for tree in dataset] == [[1], [0], [2]]
    for text in ("(1 good)\n\n(3 (2 a)", "(1 good)\n\n\u00a0\n(1 good)"):
        path.write_text(text, encoding="utf-8")
        with pytest.warns(UserWarning), pytest.raises(ValueError, match=r"a.txt:3:"):
            TreeFile(path)
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="the file is empty"):
        TreeFile(path)


def test_files_and_splits_are_named() -> None:
    with pytest.raises(ValueError, match="TreeFile: no files are given"):
        TreeFile([])
    with pytest.raises(ValueError, match=r"X: unknown split[\s\S]*'train' or 'dev'[\s\S]*all"):
        choose_split("all", ("train", "dev"), {}, "X")


def test_compressed_files(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.txt", "(3 (2 good) (1 fun))", "(0 bad)")
    packed = tmp_path / "a.txt.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert same(TreeFile(plain), TreeFile(packed, tmp_path))


SPLITS = ("train", "dev", "test")


@pytest.fixture
def raw(samples: Path) -> Path:
    return samples / "sst"


@pytest.fixture
def archive(raw: Path, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the samples the published files, and packs and serves them as the archive is."""
    path = tmp_path / "there" / "trainDevTestTrees_PTB.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as opened:
        for split in SPLITS:
            opened.write(raw / f"{split}.txt", f"trees/{split}.txt")
    digests = {s: hashlib.sha256((raw / f"{s}.txt").read_bytes()).hexdigest() for s in SPLITS}
    server.files[path.name] = path.read_bytes()
    monkeypatch.setattr(sst, "_URL", server.url(path.name))
    monkeypatch.setattr(sst, "_ARCHIVE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(sst, "_SHA256", digests)
    return path


def test_fields(raw: Path) -> None:
    dataset = SST(None, "train", raw_dir=raw, verify=False)
    assert (len(dataset), dataset.num_classes, dataset.sizes) == (3, 5, [9, 9, 3])
    data = dataset[1]
    data.validate(require_tree=True)
    assert data.token.max() < dataset.num_tokens
    assert data.y.tolist() == [1, 2, 0, 1, 1, 2, 2, 2, 2]
    words = [dataset.vocabulary[t] if t >= 0 else None for t in data.token.tolist()]
    assert words == [None, "It", None, None, "drags", "-LRB-", None, "2\u00a01\\/2", "-RRB-"]


def test_vocabularies(raw: Path) -> None:
    def words(vocabulary: str | Vocabulary) -> set[str]:
        return set(SST(None, "dev", vocabulary, raw, verify=False).vocabulary.words)

    assert {"The", "delight", "end"} <= words("all")
    assert {"The"} <= words("train") and not {"delight", "end"} & words("train")
    assert words(Vocabulary(["mess"])) == {"<unk>", "mess"}
    assert SST(None, "dev", "train", raw, verify=False)[0].token.tolist() == [-1, 0, 0]


def test_the_cache_knows_vocabulary_and_text(raw: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(raw, tmp_path / "raw"))
    for vocabulary in ("all", "train"):
        for split in SPLITS:
            SST(tmp_path, split, vocabulary, verify=False)
    assert len(cached_files(tmp_path)) == 6
    (folder / "test.txt").write_text("(0 (2 New) (2 words))\n")
    assert SST(tmp_path, "test", verify=False)[0].y.tolist() == [0, 2, 2]
    assert "New" in SST(tmp_path, "train", verify=False).vocabulary


def test_downloads_and_unpacks(archive: Path, server: Server, raw: Path, tmp_path: Path) -> None:
    published = server.files[archive.name]
    server.files[archive.name] = published[:-30]
    with pytest.raises(ValueError, match=r"SST: .* has a wrong checksum"):
        SST(tmp_path / "root", "train")
    assert not list((tmp_path / "root" / "raw").iterdir())
    server.files[archive.name] = published
    assert len(SST(tmp_path / "root", "val")) == 2
    for split in SPLITS:
        unpacked = tmp_path / "root" / "raw" / f"{split}.txt"
        assert unpacked.read_bytes() == (raw / f"{split}.txt").read_bytes()
    server.files.clear()
    assert len(SST(tmp_path / "root", "test")) == 1
    assert len(SST(None, "train", raw_dir=archive.parent)) == 3  # an archive put in place
    hint = "put train.txt, dev.txt and test.txt, or trainDevTestTrees_PTB.zip"
    match = rf"SST: the download failed[\s\S]*{hint}[\s\S]*{tmp_path / 'other'}.*raw_dir="
    with pytest.raises(ConnectionError, match=match):
        SST(tmp_path / "other", "train")


FAULTS_OF_SST = [
    ({"raw_dir": "only"}, r"SST: raw files are missing[\s\S]*no dev.txt"),
    ({}, r"SST: no folder is given[\s\S]*root or raw_dir"),
    ({"raw_dir": "raw"}, r"train.txt has a wrong checksum[\s\S]*verify=False"),
    ({"raw_dir": "raw", "split": "valid"}, "SST: unknown split"),
    ({"raw_dir": "raw", "verify": False, "vocabulary": "some"}, r"vocabulary[\s\S]*'some'"),
    ({"raw_dir": "bad", "verify": False}, r"a label is out of range[\s\S]*bad/dev.txt:2:5"),
    ({"raw_dir": "empty", "verify": False}, "dev.txt: the file is empty"),
]


@pytest.mark.parametrize(("options", "words"), FAULTS_OF_SST)
def test_faults_are_named(raw: Path, tmp_path: Path, monkeypatch, options, words) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("bad", "(2 (2 a) (2 b))\n(3 (5 a) (2 b))\n"), ("empty", ""), ("raw", None)):
        folder = Path(shutil.copytree(raw, name))
        if text is not None:
            (folder / "dev.txt").write_text(text)
    Path("only").mkdir()
    shutil.copy(raw / "train.txt", "only")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        SST(None, **{"split": "train", **options})


@pytest.mark.long
def test_the_real_files(shared_data: Callable[[str], Path], tmp_path: Path) -> None:
    raw = shared_data("sst")
    sets = {split: SST(tmp_path, split, raw_dir=raw) for split in SPLITS}
    assert [len(one) for one in sets.values()] == [8544, 1101, 2210]
    assert [sum(one.sizes) for one in sets.values()] == [318_582, 41_447, 82_600]
    assert [int(one.token_counts().sum()) for one in sets.values()] == [163_563, 21_274, 42_405]
    assert {one.num_tokens for one in sets.values()} == {21_702}
    test = sets["test"]
    roots = torch.cat([data.y[data.root_index] for data in test])
    assert torch.bincount(roots).tolist() == [279, 633, 389, 510, 399]
    lines = (raw / "test.txt").read_text(encoding="utf-8").split("\n")
    assert all(bracketed(test[i], test.vocabulary) == lines[i] for i in range(0, 2210, 97))
    train = sets["train"]
    assert int(train.columns.fields["depth"].max()) == 29
    assert sum("\u00a0" in word for word in train.vocabulary.words) == 2
    assert int((train.token_counts() > 0).sum()) == 18_280
