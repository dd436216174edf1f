"""Stores are made part by part, and continuing after any interruption gives the same store."""

import errno
import os
import shutil
import tracemalloc
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from pyg_dynbatch import files
from pyg_dynbatch.datasets import FeaturizeOptions, PackedMolecules, build_store
from pyg_dynbatch.molecules.files.build import ERRORS
from pyg_dynbatch.molecules.files.read import RawMolecule
from pyg_dynbatch.molecules.files.store import HEADER
from tests.molecules.packed import (
    TASKS,
    Counting,
    Letters,
    assert_same,
    files_of,
    killed_at_file,
    open_files_limited,
    records,
)

COUNT, BAD = 50, (5, 33)


def options(**changes) -> FeaturizeOptions:
    return FeaturizeOptions(**({"block_size": 20, "progress": False} | changes))


def build(folder, count=COUNT, rows=BAD, featurizer=None, **changes) -> PackedMolecules:
    given = {"task_names": TASKS, "options": options(**changes), "name": "Mine"}
    return build_store(folder, records(count, rows), featurizer or Letters(), **given)


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}


def parts(folder: Path) -> list[Path]:
    """Lists the folders of the parts in the order they were written."""
    return sorted(folder.glob("part-*"), key=lambda path: path.stat().st_mtime_ns)


def assert_equal(one: PackedMolecules, other: PackedMolecules) -> None:
    assert len(one) == len(other)
    for i in range(len(one)):
        assert_same(one[i], other[i])


def column(folder, name):
    (path,) = folder.glob(f"{name}-*.npy")
    return path


def test_a_store_on_disk_is_that_in_memory(tmp_path):
    in_memory = build(None)
    on_disk = build(tmp_path / "store")
    assert in_memory.folder is None and on_disk.folder == tmp_path / "store"
    assert_equal(in_memory, on_disk)
    assert_equal(in_memory, PackedMolecules(tmp_path / "store"))
    columns = ["bits", "codes", "counts", "reals", "row", "text", "y"]
    columns += ["atom_start", "pair_start", "text_start"]
    names = [ERRORS, HEADER, *(column(tmp_path / "store", name).name for name in columns)]
    assert sorted(files_of(tmp_path / "store")) == sorted(names)
    assert np.load(column(tmp_path / "store", "y"), mmap_mode="r").shape == (48, 2)


def test_bad_rows_are_reported(tmp_path, capsys):
    dataset = build(tmp_path)
    assert [error.row for error in dataset.errors] == list(BAD)
    lines = (tmp_path / ERRORS).read_text().splitlines()
    assert lines[0] == "row,where,smiles,reason,atom"
    assert lines[1].startswith("5,memory:7,")
    assert len(lines) == 3
    assert "Mine: 2 of 50 rows cannot be used; the first: row 5" in capsys.readouterr().err
    assert dataset.rows.tolist() == [i for i in range(COUNT) if i not in BAD]


def test_blank_keeps_places(tmp_path):
    dataset = build(tmp_path, bad="blank")
    assert dataset.rows.tolist() == list(range(COUNT))
    assert dataset[33].num_nodes == 0
    assert np.isnan(dataset.targets[33]).all()
    assert not np.isnan(dataset.targets[32, 0])
    assert {error.row: error.reason for error in dataset.errors}[33] == "an exclamation mark"


def test_raise_stops_and_keeps_complete_parts(tmp_path):
    with pytest.raises(ValueError, match="Mine: row 33 cannot be used") as caught:
        build(tmp_path, rows=(33,), bad="raise")
    assert "an exclamation mark (atom" in str(caught.value)
    assert "memory:35" in str(caught.value)
    assert len(parts(tmp_path)) == 1
    # The first part has no bad row, so it fits every policy.
    made = build(tmp_path, rows=(33,), featurizer=(counting := Counting()))
    assert len(made) == COUNT - 1 and counting.asked == 30


def interrupted(folder, **changes):
    """Leaves the whole parts of the first 44 molecules."""
    with pytest.raises(KeyboardInterrupt):
        build(folder, featurizer=Counting(45, interrupt), **changes)


def interrupt():
    raise KeyboardInterrupt


def test_only_missing_parts_are_built(tmp_path):
    build(tmp_path)
    whole, before = files_of(tmp_path), times(tmp_path)
    build(tmp_path, featurizer=(counting := Counting()))
    assert counting.asked == 0
    assert times(tmp_path) == before
    interrupted(tmp_path / "again")
    with pytest.raises(FileNotFoundError, match="not a finished store"):
        PackedMolecules(tmp_path / "again")
    (parts(tmp_path / "again")[0] / HEADER).unlink()
    build(tmp_path / "again", featurizer=(counting := Counting()))
    assert counting.asked == 30
    assert files_of(tmp_path / "again") == whole
    build(tmp_path / "again", featurizer=(forced := Counting()), force=True)
    assert forced.asked == COUNT


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:-1] + b"?"])
@pytest.mark.parametrize("name", [HEADER, "text-*.npy"])
def test_a_corrupt_part_is_rebuilt(tmp_path, name, damage):
    interrupted(tmp_path / "a")
    (path,) = parts(tmp_path / "a")[1].glob(name)
    path.write_bytes(damage(path.read_bytes()))
    build(tmp_path / "a", featurizer=(counting := Counting()))
    assert counting.asked == 30
    build(tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:-1] + b"?"])
@pytest.mark.parametrize("name", ["codes", "atom_start"])
def test_a_corrupt_column_is_rebuilt(tmp_path, name, damage):
    build(tmp_path)
    whole = files_of(tmp_path)
    path = column(tmp_path, name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path.name} cannot be used") as caught:
        PackedMolecules(tmp_path)[3]
    assert str(path) in str(caught.value) and "build the data set again" in str(caught.value)
    build(tmp_path)
    assert files_of(tmp_path) == whole


@pytest.mark.parametrize(
    ("file", "featurized", "finished"),
    [(1, 40, False), (15, 20, False), (23, 0, False), (33, 0, False), (34, 0, True)],
)
def test_a_killed_build_goes_on(tmp_path, file, featurized, finished):
    """Killed while it writes 2 parts, 10 columns, the header or the report of bad rows."""
    folder = tmp_path / "killed"
    before, whole = build(folder, rows=(7,)), build(tmp_path / "whole")

    killed_at_file(file, lambda: build(folder))
    with pytest.warns(UserWarning, match="later build of the folder"):
        assert_equal(PackedMolecules(folder), whole if finished else before)
    build(folder, featurizer=(counting := Counting()))
    assert counting.asked == featurized
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_another_source_another_featurizer_another_policy(tmp_path):
    build(tmp_path)
    before = times(tmp_path)
    counting = Counting()
    other = build(tmp_path, rows=(5, 34), featurizer=counting)
    assert [error.row for error in other.errors] == [5, 34]
    assert counting.asked == 20
    assert_equal(other, build(None, rows=(5, 34)))
    column(tmp_path, "text").write_text("corrupt")
    with pytest.raises(ValueError, match="a different featurizer made them") as caught:
        build(tmp_path, featurizer=Letters("changed"))
    assert str(tmp_path) in str(caught.value)
    build(tmp_path, featurizer=Letters("changed"), force=True)
    after = times(tmp_path)
    assert all(after.get(name) != before[name] for name in before)
    assert len(build(tmp_path, featurizer=Letters("changed"), bad="blank")) == COUNT


def test_one_process_at_a_time_fills_a_folder(tmp_path, capsys):
    said, waited = [], []

    def second() -> None:
        with pytest.raises(OSError, match="the folder is in use") as caught:
            build(tmp_path / "a", rows=(7,))
        said.append(str(caught.value))
        waiting = Thread(target=lambda: waited.append(build_waiting()))
        waiting.start()
        said.append(waiting)

    def build_waiting():
        counting = Counting()
        given = records(COUNT, BAD)
        build_store(tmp_path / "a", given, counting, task_names=TASKS, options=options(), wait=True)
        return counting.asked

    build(tmp_path / "a", featurizer=Counting(45, second))
    said[1].join()
    assert f"process {os.getpid()} on " in said[0] and str(tmp_path / "a") in said[0]
    assert waited == [0]
    assert "waiting for process" in capsys.readouterr().err
    build(tmp_path / "b")
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_without_locks_a_foreign_part_is_found_at_the_end(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(files, "lock_descriptor", refused)
    with pytest.warns(UserWarning, match="cannot be locked"):
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "other", rows=(7,), featurizer=Counting(45, interrupt))
        (foreign,) = parts(tmp_path / "other")[0].glob("text-*.npy")

        def replace():
            (mine,) = parts(tmp_path / "mine")[0].glob("text-*.npy")
            shutil.copy(foreign, mine)

        with pytest.raises(ValueError, match=r"text-\w+.npy cannot be used"):
            build(tmp_path / "mine", featurizer=Counting(45, replace))
    with pytest.raises(FileNotFoundError, match="not a finished store"):
        PackedMolecules(tmp_path / "mine")


def test_many_parts_need_few_open_files(tmp_path):
    with open_files_limited(60):
        interrupted(tmp_path, block_size=2)
        build(tmp_path, block_size=2)


def test_a_part_is_hashed_in_little_memory():
    tracemalloc.start()
    build_store(None, [RawMolecule(0, "", "ab", "x" * 10**6)] * 50, Letters())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6


def test_parts_that_were_left_over_are_not_part_of_it(tmp_path):
    (tmp_path / "part-time").mkdir()
    (tmp_path / ("part-" + "0" * 16)).mkdir()
    build(tmp_path)
    assert [path.name for path in tmp_path.glob("part-*")] == ["part-time"]
    shorter = build(tmp_path, count=30, rows=())
    assert len(shorter) == len(PackedMolecules(tmp_path)) == 30
    assert_equal(shorter, build(None, count=30, rows=()))


def test_nothing_at_all():
    with pytest.raises(ValueError, match=r"Mine: no molecules[\s\S]*got:      no records"):
        build(None, count=0)
    with pytest.raises(ValueError, match=r"no molecules[\s\S]*2 of 2 rows cannot be used"):
        build(None, count=2, rows=(0, 1))


def test_long_work_says_how_far_it_is(capsys, monkeypatch):
    clock = iter(range(0, 1000, 20))
    monkeypatch.setattr("pyg_dynbatch.console.time.monotonic", lambda: next(clock))
    build_store(None, records(60), Letters(), task_names=TASKS, options=options(progress=True))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and lines[-1].startswith("featurize: featurizing: 60 molecules in ")
    assert not any(" 0 molecules" in line for line in lines)


def test_short_work_shows_one_line_or_no_bar(capsys, monkeypatch):
    given = {"task_names": TASKS, "options": options(progress=True)}
    build_store(None, records(30), Letters(), **given)
    assert capsys.readouterr().err == "featurize: featurizing: 30 molecules in 0 s\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    build_store(None, records(30), Letters(), **given)
    assert capsys.readouterr().err.strip() == ""  # done before a bar is worth while
