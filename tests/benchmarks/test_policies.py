"""The policies benchmark runs on tiny sizes; the recordings it records are what they are called."""

import random
from typing import Any

import pytest

from benchmarks import policies
from benchmarks.policies import draw_batches
from pyg_dynbatch.core.recording import records_of
from pyg_dynbatch.core.scheduling import schedule_recordings


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # Few and small: the search calls small functions very often, and tests check every call.
    shapes = ("chain", "turns")
    sizes = ["--batch-sizes", "1", "3", "--fit", "1", "--batches", "2", "--repeats", "1"]
    records = run(policies, *sizes, "--shapes", *shapes)
    found = {(r["case"], r["batch"], r["mode"], r["data"]): r for r in records}
    assert len(found) == len(records) == len(shapes) * 2 * 3 * 2
    for (shape, batch, mode, data), record in found.items():
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
    assert "steps / bound" in shown and "turns" in shown


OPERATIONS = [
    ("chain", {"cell", "label"}),
    ("tree", {"word", "join_0"}),
    ("lattice", {"character", "word"}),
    ("turns", {"cell_0", "cell_1"}),
    ("typed tree", {"word", "join_0", "join_1"}),
    ("typed tree 4", {"word", "join_0", "join_1", "join_2", "join_3"}),
]


@pytest.mark.parametrize(("shape", "operations"), OPERATIONS)
def test_shapes(shape: str, operations: set[str]) -> None:
    first, again = (draw_batches(shape, 4, 2, random.Random(3)) for _ in range(2))
    for recordings, same in zip(first, again, strict=True):
        schedule = schedule_recordings(recordings)
        assert schedule == schedule_recordings(same)
        names = "+".join(schedule.stats().operations)  # some are fused
        assert {*names.split("+")} == operations
    assert schedule != schedule_recordings(first[0])


def test_words_of_a_lattice_are_read_where_they_end() -> None:
    (recordings,) = draw_batches("lattice", 20, 1, random.Random(0))
    records = [(p, record) for p in recordings for record in records_of(p.sites, p.code)]
    calls = [(p.sites[r.number].signature, r) for p, r in records if p.sites[r.number].signature]
    words = [signature.name for signature, _ in calls].count("word")
    read = sum(len(values) for _, record in calls for values in record.arguments)
    characters = sum(p.num_calls for p in recordings) - words
    # Every call reads an input and a state; words that end within the sentence are read once.
    assert 0 < read - 2 * (words + characters) <= words
