"""The policies benchmark runs on tiny sizes; the programs it records are what they are called."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import main
from benchmarks.choices import PROGRAM_SHAPES
from benchmarks.policies import SHAPES, draw_batches
from benchmarks.records import FIELDS
from pyg_dynbatch.core import Schedule


def test_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figure = tmp_path / "records.json", tmp_path / "figure.svg"
    # Few and small: the search calls small functions very often, and tests check every call.
    shapes = ("chain", "turns")
    argv = ["policies", "--batch-sizes", "1", "3", "--fit", "1", "--batches", "2", "--repeats", "1"]
    argv += ["--shapes", *shapes]
    assert main([*argv, "--threads", "1", "--json", str(file), "--figure", str(figure)]) == 0
    assert figure.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    found = {(r["case"], r["batch"], r["mode"], r["data"]): r for r in records}
    assert len(found) == len(records) == len(shapes) * 2 * 3 * 2
    for (shape, batch, mode, data), record in found.items():
        assert set(FIELDS) <= set(record)
        assert record["ratio"] == pytest.approx(record["steps"] / record["lower_bound"])
        assert record["ratio"] >= 1
        assert record["critical_path"] <= record["steps"]
        if mode == "learned":
            for other in ("depth", "agenda"):
                assert record["steps"] <= found[shape, batch, other, data]["steps"]
        if shape in ("chain", "tree"):
            assert record["ratio"] == 1
        assert (record["median_seconds"] is None) == (data == "learned from")
    shown = capsys.readouterr().out
    assert "steps / bound" in shown and "turns, 3" in shown


@pytest.mark.parametrize(
    ("shape", "operations"),
    [
        ("chain", {"cell", "label"}),
        ("tree", {"word", "join_0"}),
        ("lattice", {"character", "word"}),
        ("turns", {"cell_0", "cell_1"}),
        ("typed tree", {"word", "join_0", "join_1"}),
        ("typed tree 4", {"word", "join_0", "join_1", "join_2", "join_3"}),
    ],
)
def test_shapes(shape: str, operations: set[str]) -> None:
    first, again = (draw_batches(shape, 4, 2, random.Random(3)) for _ in range(2))
    for programs, same in zip(first, again, strict=True):
        schedule = Schedule.from_programs(programs)
        assert schedule == Schedule.from_programs(same)
        assert set(schedule.stats().operations) == operations
    assert schedule != Schedule.from_programs(first[0])


def test_every_shape_can_be_asked_for() -> None:
    assert tuple(SHAPES) == PROGRAM_SHAPES


def test_words_of_a_lattice_are_read_where_they_end() -> None:
    (programs,) = draw_batches("lattice", 20, 1, random.Random(0))
    words = [p.signatures[kind].name for p in programs for kind in p.call_signature].count("word")
    read = sum(len(p.read_value) for p in programs)
    characters = sum(p.num_calls for p in programs) - words
    # Every call reads an input and a state; words that end within the sentence are read once.
    assert 0 < read - 2 * (words + characters) <= words
