"""The Stanford Sentiment Treebank, on a small sample in its format and on the real files."""

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.data import Vocabulary, to_bracketed
from pyg_dynbatch.datasets import SST
from pyg_dynbatch.trees import datasets as sst
from tests.conftest import Server

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
    assert (len(dataset), dataset.num_classes, dataset.node_counts) == (3, 5, [9, 9, 3])
    data = dataset[1]
    data.validate(require_tree=True, num_classes=5, num_tokens=dataset.num_tokens)
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
    assert len(list((tmp_path / "processed").iterdir())) == 6
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"raw_dir": "only"}, r"SST: raw files are missing[\s\S]*no dev.txt"),
        ({}, r"SST: no folder is given[\s\S]*root or raw_dir"),
        ({"raw_dir": "raw"}, r"train.txt has a wrong checksum[\s\S]*verify=False"),
        ({"raw_dir": "raw", "split": "valid"}, "SST: unknown split"),
        ({"raw_dir": "raw", "verify": False, "vocabulary": "some"}, r"vocabulary[\s\S]*'some'"),
        ({"raw_dir": "bad", "verify": False}, r"a label is out of range[\s\S]*bad/dev.txt:2:5"),
        ({"raw_dir": "empty", "verify": False}, "dev.txt: the file is empty"),
    ],
)
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
    assert [sum(one.node_counts) for one in sets.values()] == [318_582, 41_447, 82_600]
    assert [int(one.token_counts().sum()) for one in sets.values()] == [163_563, 21_274, 42_405]
    assert {one.num_tokens for one in sets.values()} == {21_702}
    test = sets["test"]
    roots = torch.cat([data.y[data.root_index] for data in test])
    assert torch.bincount(roots).tolist() == [279, 633, 389, 510, 399]
    lines = (raw / "test.txt").read_text(encoding="utf-8").split("\n")
    assert all(to_bracketed(test[i], test.vocabulary) == lines[i] for i in range(0, 2210, 97))
    train = sets["train"]
    assert int(train._data.depth.max()) == 29
    assert sum("\u00a0" in word for word in train.vocabulary.words) == 2
    assert int((train.token_counts() > 0).sum()) == 18_280
