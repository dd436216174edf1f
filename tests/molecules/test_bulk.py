"""Shards of a file, in any order and after interruptions, merge to what one process writes."""

import gzip
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyg_dynbatch.cli import main
from pyg_dynbatch.data import MoleculeFeaturizer, read_molecules
from pyg_dynbatch.datasets import FeaturizeOptions, PackedMolecules, build_store
from pyg_dynbatch.models import MoleculePredictor
from pyg_dynbatch.molecules import FeaturizeJob, PredictJob, Shard, featurize, merge, predict
from pyg_dynbatch.molecules.work import predict as molecule_predict
from tests.molecules.molecules import trained
from tests.molecules.packed import (
    Counting,
    Letters,
    files_of,
    kill,
    killed,
    killed_at_file,
    open_files_limited,
)
from tests.test_files import files_of_at_most


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FeaturizeJob:
    """30 records in blocks of 4, of which two are bad; the second of 3 shards has rows 4 to 7."""
    monkeypatch.chdir(tmp_path)
    rows = ["ab!" if n in (5, 22) else "abcxyz"[: n % 6 + 1] for n in range(30)]
    Path("in.smi").write_text("\n".join(rows) + "\n", encoding="utf-8")
    options = FeaturizeOptions(block_size=4, progress=False)
    return FeaturizeJob("in.smi", "out", featurizer=Letters(), options=options)


def shards(n: int, seed: int = 0) -> list[Shard]:
    every = [Shard(number, n) for number in range(n)]
    random.Random(seed).shuffle(every)
    return every


def one_process(job: FeaturizeJob, folder: str = "one") -> dict[str, bytes]:
    targets = job.reading.get("target_columns", ())
    records = read_molecules(job.input, **job.reading)
    build_store(folder, records, job.featurizer, task_names=targets, options=job.options)
    return files_of(folder)


def write_molecules(kind: str, number: int, seed: int) -> tuple[str, dict[str, Any]]:
    """Write a file in which some records are bad and some cells hold line ends."""
    draw = random.Random(seed)
    smiles = ["C1CC" if draw.random() < 0.2 else "C" * draw.randint(1, 5) for _ in range(number)]
    path = Path(f"in.{kind}")
    if kind == "smi.gz":
        path.write_bytes(gzip.compress("".join(f"{each} a\n" for each in smiles).encode()))
        return str(path), {}
    if kind == "csv":
        lines = [f'"a ""{n}"",\n\nb",{each},{n}\n' for n, each in enumerate(smiles)]
        path.write_text('"no\nte",smiles,y\n' + "".join(lines), encoding="utf-8")
        return str(path), {"target_columns": ["y"]}
    from rdkit import Chem

    good = Chem.MolToMolBlock(Chem.MolFromSmiles("OCC"))
    blocks = [good if each != "C1CC" else "bad\n\n\n" for each in smiles]
    text = "".join(
        f"{block}>  <{'y' if n % 3 else 'z'}>\n{n}\n\n$$$$\n" for n, block in enumerate(blocks)
    )
    path.write_text(text, encoding="utf-8")
    return str(path), {"target_columns": ["y"]}


@pytest.mark.parametrize(
    "kind", ["csv", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("smi.gz", "sdf"))]
)
@pytest.mark.parametrize("seed", range(3))
def test_merged_stores_are_those_of_one_process(tmp_path, monkeypatch, kind, seed):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    path, reading = write_molecules(kind, draw.randint(5, 40), seed)
    options = FeaturizeOptions(draw.choice(["skip", "blank"]), 0, draw.randint(1, 9), False)
    job = FeaturizeJob(path, "out", reading=reading, options=options)
    for shard in shards(draw.randint(1, 9), seed):
        job.run(shard)
    assert merge("out") == Path("out")
    assert files_of("out") == one_process(job)
    assert PackedMolecules("out").errors == PackedMolecules("one").errors


FILES = [
    ("csv", "p.npy", {"--narrow": ""}),
    pytest.param("csv", "p.csv", {}, marks=pytest.mark.long),
    pytest.param("smi.gz", "", {}, marks=pytest.mark.long),
    pytest.param("sdf", "", {}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("kind", "prints", "options"), FILES)
def test_merged_predictions_are_those_of_one_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: str,
    kind: str,
    prints: str,
    options: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path, _ = write_molecules(kind, 400, 1)
    argv = ["predict", "--checkpoint", checkpoint, "--input", path, *options, "--output"]
    assert main([*argv, "one.csv", *(["--fingerprints", prints] if prints else [])]) == 0
    more: dict[str, Any] = {"fingerprints": prints} if prints else {}
    more["narrow"] = "--narrow" in options
    run = PredictJob(path, "out", [checkpoint], block_size=128, **more).prepare()
    for shard in shards(3):
        run(shard)
    merge("out")
    assert Path("out/predictions.csv").read_bytes() == Path("one.csv").read_bytes()
    if prints:
        assert Path("out", prints).read_bytes() == Path(prints).read_bytes()
    build_store("packed", read_molecules(path), MoleculeFeaturizer())
    assert read_errors("out") == read_errors("packed")


def read_errors(folder: str) -> list[str]:
    return Path(folder, "errors.csv").read_text(encoding="utf-8").splitlines()


def test_both_functions(letters: FeaturizeJob, checkpoint: str, monkeypatch: Any) -> None:
    given: dict[str, Any] = {"featurizer": letters.featurizer, "options": letters.options}
    made = featurize("in.smi", "out", shards=3, **given)
    assert made.rows.tolist() == [n for n in range(30) if n not in (5, 22)]
    assert files_of("out") == one_process(letters)
    Path("c.smi").write_text("CCO\nC\n" * 100, encoding="utf-8")
    table = predict("c.smi", "p", [checkpoint], shards=2, block_size=128)
    assert table == Path("p/predictions.csv") and len(table.read_text().splitlines()) == 201
    with pytest.raises(ValueError, match="shards is too small"):
        featurize("in.smi", "out", shards=0)


def test_a_killed_shard_of_a_store_continues(letters: FeaturizeJob, capsys: Any) -> None:
    for shard in (Shard(0, 2), Shard(1, 2)):
        stopped = replace(letters, featurizer=Counting(11, kill))
        killed(lambda job=stopped, shard=shard: job.run(shard))  # type: ignore[misc]
        with pytest.raises(ValueError, match="shards are missing"):
            merge("out")
        counting = Counting()
        replace(letters, featurizer=counting).run(shard)
        assert counting.asked == (16 if shard.number == 0 else 14) - 8
    merge("out")
    assert files_of("out") == one_process(letters)


@pytest.mark.long
def test_a_killed_shard_of_predictions_continues(tmp_path, monkeypatch, checkpoint, capsys):
    monkeypatch.chdir(tmp_path)
    path, _ = write_molecules("csv", 700, 1)
    job = PredictJob(path, "out", [checkpoint], block_size=256, fingerprints="p.npy")
    predict_some = MoleculePredictor.predict
    calls: list[object] = []

    def stopping(*given: Any) -> object:
        calls.append(given)
        if len(calls) == 3:
            kill()
        return predict_some(*given)

    monkeypatch.setattr(MoleculePredictor, "predict", stopping)
    monkeypatch.setattr(molecule_predict, "_NOTED", 128)
    killed(lambda: job.run(Shard(0, 2)))
    monkeypatch.setattr(MoleculePredictor, "predict", predict_some)
    other = replace(job, narrow=True)
    with pytest.raises(ValueError, match="its folder is for different work") as caught:
        other.run(Shard(0, 2))
    assert "narrow: true" in str(caught.value) and "narrow: false" in str(caught.value)
    capsys.readouterr()
    job.run(Shard(0, 2))
    assert "shard 0/2: continuing after 256 records" in capsys.readouterr().err
    job.run(Shard(1, 2))
    argv = ["--checkpoint", checkpoint, "--input", path, "--fingerprints", "p.npy"]
    assert main(["predict", *argv, "--output", "one.csv"]) == 0

    killed_at_file(1, lambda: merge("out"))
    merge("out")
    assert set(files_of("out")) == {"predictions.csv", "errors.csv", "p.npy"}
    assert Path("out/predictions.csv").read_bytes() == Path("one.csv").read_bytes()
    assert np.array_equal(np.load("out/p.npy"), np.load("p.npy"), equal_nan=True)


def test_a_finished_shard_is_not_done_again(letters, checkpoint, monkeypatch, capsys):
    Path("c.smi").write_text("CCO\n", encoding="utf-8")
    for job in (letters, PredictJob("c.smi", "p", [checkpoint])):
        folder = job.run(Shard())
        times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(MoleculePredictor, "__init__", None)
            assert job.run(Shard()) == folder
        assert capsys.readouterr().err == "shard 0/1: finished before, nothing to do\n"
        assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_two_writers_of_a_shard(letters: FeaturizeJob) -> None:
    said = []

    def second() -> None:
        letters.run(Shard(1, 3))  # a different one
        with pytest.raises(OSError, match="the folder is in use") as caught:
            letters.run(Shard(0, 3))
        with pytest.raises(ValueError, match="2 of 3 shards are missing"):
            merge("out")
        said.append(str(caught.value))

    replace(letters, featurizer=Counting(3, second)).run(Shard(0, 3))
    assert f"process {os.getpid()} on " in said[0] and "shard-0000-of-0003" in said[0]
    letters.run(Shard(2, 3))
    merge("out")
    assert files_of("out") == one_process(letters)


def predict_job(option: str) -> Callable[[Any], PredictJob]:
    return lambda value: PredictJob("in.csv", "out", ["a.ckpt"], **{option: value})


CHANGES: dict[str, Callable[[FeaturizeJob], FeaturizeJob]] = {
    "featurizer": lambda job: replace(job, featurizer=Letters("changed")),
    "bad": lambda job: replace(job, options=replace(job.options, bad="blank")),
    "block_size": lambda job: replace(job, options=replace(job.options, block_size=5)),
    "reading": lambda job: replace(job, reading={"format": "smi"}),
    "input": lambda job: replace(job, input=str(shutil.copy("other.smi", "in2.smi"))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_shard_of_different_work_is_refused(letters: FeaturizeJob, name: str) -> None:
    Path("other.smi").write_text("ab\nbb\n", encoding="utf-8")
    other = CHANGES[name](letters)
    for number in (0, 1):
        letters.run(Shard(number, 2))
    before = files_of("out/shard-0001-of-0002")
    with pytest.raises(ValueError, match="shard 1/2: its folder is for different work") as caught:
        other.run(Shard(1, 2))
    assert f"expected: {name}: " in str(caught.value) and f"got:      {name}: " in str(caught.value)
    assert "--force" in str(caught.value)
    assert files_of("out/shard-0001-of-0002") == before

    replace(other, options=replace(other.options, force=True)).run(Shard(1, 2))
    what = "merge: shard 1/2 is of different work than shard 0/2"
    with pytest.raises(ValueError, match=what) as caught:
        merge("out")
    assert f"expected: {name}: " in str(caught.value)
    replace(other, options=replace(other.options, force=True)).run(Shard(0, 2))
    merge("out")
    assert files_of("out") == one_process(other)


def test_a_failed_shard_does_not_bind_its_folder(letters: FeaturizeJob) -> None:
    with pytest.raises(ValueError, match="row 5 cannot be used"):
        replace(letters, options=replace(letters.options, bad="raise")).run(Shard())
    letters.run(Shard())
    merge("out")
    assert files_of("out") == one_process(letters)


def test_the_store_of_a_different_featurizer_stays(letters: FeaturizeJob) -> None:
    before = one_process(letters, "out")
    other = replace(letters, featurizer=Letters("changed"))
    with pytest.raises(ValueError, match="a different featurizer made them"):
        other.run(Shard(0, 2))
    assert files_of("out") == before


def test_missing_shards_are_named(letters: FeaturizeJob) -> None:
    for number in (0, 2, 6):
        letters.run(Shard(number, 7))
    stopped = replace(letters, featurizer=Counting(1, kill))
    killed(lambda: stopped.run(Shard(3, 7)))
    with pytest.raises(ValueError, match="merge: 4 of 7 shards are missing") as caught:
        merge("out")
    assert "got:      no 1,3-5" in str(caught.value)
    assert "--shard i/7, i = 1,3-5 (sbatch --array=1,3-5)" in str(caught.value)
    assert not [path for path in Path("out").iterdir() if path.is_file()]


def test_what_cannot_be_merged(letters: FeaturizeJob) -> None:
    Path("empty").mkdir()
    for folder in ("empty", "none"):
        with pytest.raises(ValueError, match="merge: the folder has no shards"):
            merge(folder)
    assert not Path("none").exists()
    letters.run(Shard(0, 2))
    letters.run(Shard(1, 2))
    letters.run(Shard(0, 3))
    with pytest.raises(ValueError, match="shards of different counts") as caught:
        merge("out")
    assert "got:      2 of n = 2; 1 of n = 3" in str(caught.value)
    shutil.rmtree("out/shard-0000-of-0003")
    Path("out/shard-0001-of-0002").rename("kept")
    shutil.copytree("out/shard-0000-of-0002", "out/shard-0001-of-0002")
    with pytest.raises(ValueError, match="merge: shard 1/2 is of different work") as caught:
        merge("out")
    assert 'got:      shard: "0/2"' in str(caught.value)
    shutil.rmtree("out/shard-0001-of-0002")
    Path("kept").rename("out/shard-0001-of-0002")
    merge("out")
    assert files_of("out") == one_process(letters)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda c: c[:-1], marks=pytest.mark.long),
        pytest.param(lambda c: b"", marks=pytest.mark.long),
        lambda c: c[:-9] + b"?" * 9,
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "store.json", "errors.csv", "text-*.npy"])
def test_a_shard_that_has_changed_is_refused(letters, name, damage):
    run = letters.prepare()
    for number in (0, 1):
        run(Shard(number, 2))
    (path,) = Path("out/shard-0001-of-0002").glob(name)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with pytest.raises(ValueError, match=r"wrong checksum|manifest.json cannot be used") as caught:
        merge("out")
    assert str(path) in str(caught.value)
    assert "delete out/shard-0001-of-0002 and run the shard again" in str(caught.value)
    path.unlink()
    with pytest.raises((FileNotFoundError, ValueError), match="there is no such file|missing"):
        merge("out")
    assert not [path for path in Path("out").iterdir() if path.is_file()]
    shutil.rmtree("out/shard-0001-of-0002")
    run(Shard(1, 2))
    merge("out")
    assert files_of("out") == one_process(letters)


def test_merging_again_changes_nothing(letters: FeaturizeJob) -> None:
    for shard in shards(3):
        letters.run(shard)
    merge("out")
    times = {path: path.stat().st_mtime_ns for path in Path("out").glob("*.npy")}
    merge("out")
    assert times == {path: path.stat().st_mtime_ns for path in Path("out").glob("*.npy")}
    assert files_of("out") == one_process(letters)
    for path in Path("out").glob("shard-*"):
        shutil.rmtree(path)
    assert len(PackedMolecules("out")) == 28


def test_many_shards_need_few_open_files(letters: FeaturizeJob) -> None:
    run = pickle.loads(pickle.dumps(letters)).prepare()
    for shard in shards(30):
        run(shard)
    with open_files_limited(20):
        merge("out")
    assert files_of("out") == one_process(letters)


@pytest.mark.parametrize("after", [1, 6, 11])
def test_a_killed_merge_is_repeated(letters: FeaturizeJob, after: int) -> None:
    for shard in shards(2):
        letters.run(shard)
    killed_at_file(after, lambda: merge("out"))
    with pytest.raises(FileNotFoundError, match="not a finished store"):
        PackedMolecules("out")
    merge("out")
    assert files_of("out") == one_process(letters)


@pytest.mark.long
def test_shards_without_molecules(letters: FeaturizeJob, checkpoint: str, capsys: Any) -> None:
    Path("bad.smi").write_text("C\n" * 4 + "C1C\n" * 2, encoding="utf-8")
    options = FeaturizeOptions(block_size=2, progress=False)
    job = FeaturizeJob("bad.smi", "f", options=options)
    for shard in shards(5):
        job.run(shard)
    said = capsys.readouterr().err
    assert "shard 2/5: no molecules: it has 2 of 6 records, 2 bad; see --block-size" in said
    assert "shard 4/5: no molecules: it has 0 of 6 records, 0 bad" in said
    merge("f")
    assert files_of("f") == one_process(job)

    Path("bad.smi").write_text("C1C\n" * 300, encoding="utf-8")
    again = PredictJob("bad.smi", "p", [checkpoint], block_size=128)
    for one, folder in ((replace(job, folder="g"), "g"), (again, "p")):
        for shard in shards(3):
            one.run(shard)
        with pytest.raises(ValueError, match=r"merge: no (molecules|record is a molecule)"):
            merge(folder)
    assert len(Path("p/predictions.csv").read_text().splitlines()) == 301


def test_a_full_disk_leaves_no_finished_shard(letters: FeaturizeJob) -> None:
    with files_of_at_most(400), pytest.raises(OSError, match="the file cannot be written"):
        letters.run(Shard())
    with files_of_at_most(3_000), pytest.raises(OSError, match="the file cannot be written"):
        letters.run(Shard())
    letters.run(Shard())
    with files_of_at_most(1_000), pytest.raises(OSError, match="the file cannot be written"):
        merge("out")
    with pytest.raises(FileNotFoundError, match="not a finished store"):
        PackedMolecules("out")
    merge("out")
    assert files_of("out") == one_process(letters)


def test_where_shards_cannot_be_written(letters: FeaturizeJob) -> None:
    Path("file").write_text("no folder")
    with pytest.raises(OSError, match="the file cannot be written"):
        replace(letters, folder="file").run(Shard())
    Path("out").mkdir()
    shutil.copy("in.smi", "out/errors.csv")
    with pytest.raises(ValueError, match="an output is also an input"):
        replace(letters, input="out/errors.csv", reading={"format": "smi"}).run(Shard())


OUT_OF_RANGE = r"the shard is out of range[\s\S]*got: +%s\n[\s\S]*sbatch --array=0-"


WRONG = [
    *((Shard.parse, text, OUT_OF_RANGE % text) for text in ("3/3", "-1/3", "0/0")),
    *((Shard.parse, t, "cannot be read") for t in ("", "3", "a/b", "1/3/5", "1/-3")),
    (lambda path: FeaturizeJob(path, "out"), "-", "standard input cannot be sharded"),
    *((predict_job("block_size"), n, "block size is out of range") for n in (0, -128, 100)),
    (predict_job("fingerprints"), "a/b.npy", "the fingerprints of a shard"),
    (predict_job("fingerprints"), "predictions.csv", "the fingerprints of a shard"),
    (predict_job("fingerprints"), "errors.csv", "the fingerprints of a shard"),
    (lambda p: PredictJob(p, "o", ["a"]).run(Shard()), "none.csv", "there is no such file"),
]


@pytest.mark.parametrize(("make", "given", "words"), WRONG)
def test_what_is_no_shard_of_a_job(make: Any, given: Any, words: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        make(given)
