"""Every benchmark runs on tiny sizes and leaves complete records; nothing here is timed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import main
from benchmarks.records import FIELDS

SCALING = ["scaling", "--sizes", "31", "62", "--tree-nodes", "31", "--units", "3", "--repeats", "2"]
SST = ["sst", "--batch-sizes", "3", "--units", "4", "--embedding", "5", "--trees", "6"]
SST_MODES = ("fused", "unshared", "generic", "engine", "graphed")
BARE = ("bare", "bare, packed")
SST += ["--batches", "2", "--repeats", "2", "--loop-trees", "2", "--modes", *SST_MODES]


def records_of(argv: list[str], folder: Path) -> list[dict[str, Any]]:
    file, figure = folder / "records.json", folder / "figure.svg"
    assert main([*argv, "--threads", "1", "--json", str(file), "--figure", str(figure)]) == 0
    assert figure.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    records: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    for record in records:
        assert set(FIELDS) <= set(record)
        assert not any(isinstance(value, list | dict) for value in record.values())
        assert (record["threads"], record["device"]) == (1, "cpu")
        assert record["median_seconds"] is None or record["median_seconds"] > 0
        assert (record["ratio"] is None) == (record["ratio_to"] is None)
    return records


def test_scaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = records_of(SCALING, tmp_path)
    measured = [r for r in records if "fitted" not in r]
    found = {(r["case"], r["mode"], r["nodes"], r["phase"]) for r in measured}
    phases = ("schedule", "forward", "backward", "train", "memory")
    assert found == {
        (case, mode, nodes, phase)
        for case in ("balanced", "random", "chain")
        for mode in ("fused", "generic", "engine")
        for nodes in (31, 62)
        for phase in phases
    }
    steps = {r["nodes"]: r["steps"] for r in measured if r["case"] == "chain"}
    assert steps == {31: 31, 62: 31}
    first = [r for r in measured if r["nodes"] == 31 and r["phase"] != "memory"]
    assert {r["ratio"] for r in first} == {1.0}
    growth = [r for r in records if "fitted" in r]
    assert {r["fitted"] for r in growth} == {"all sizes", "the two largest"}
    assert {r["nodes_from"] for r in growth} == {31}
    shown = capsys.readouterr().out
    assert "us/node" in shown and "growth" in shown and "records.json" in shown


def test_sst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = records_of(SST, tmp_path)
    by_key = {(r["mode"], r["phase"]): r for r in records}
    phases = ("forward", "backward", "optimizer", "train", "step", "inference")
    assert set(by_key) == {
        *((mode, phase) for mode in SST_MODES for phase in phases),
        *(
            (bare, phase)
            for bare in BARE
            for phase in ("forward", "backward", "train", "inference")
        ),
        *(("one by one", phase) for phase in ("train", "inference")),
        *(("host", phase) for phase in ("fetch", "collate")),
    }
    for mode in SST_MODES:
        assert by_key[mode, "train"]["ratio_to"] == "bare matrix products"
        assert by_key[mode, "train"]["ratio_to_packed"] > 0
        assert "ratio_to_packed" not in by_key[mode, "step"]
        assert by_key[mode, "step"]["median_seconds"] > by_key[mode, "train"]["median_seconds"]
    train = by_key["fused", "train"]
    assert train["trees_per_second"] == pytest.approx(3 / train["median_seconds"])
    assert by_key["one by one", "train"]["ratio_to"] == "fused"
    assert by_key["one by one", "train"]["scaled_by"] > 1
    assert by_key["bare", "train"]["flops"] > by_key["bare", "forward"]["flops"] > 0
    shown = capsys.readouterr().out
    assert "collate" in shown and "of the training step" in shown and "GFLOP" in shown
    assert "train x packed" in shown


def test_scaling_with_several_numbers_of_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, before = tmp_path / "records.json", torch.get_num_threads()
    argv = [*SCALING, "--shapes", "chain", "--modes", "fused", "--thread-counts", "1", "2"]
    assert main([*argv, "--json", str(file), "--figure", str(tmp_path / "figure.svg")]) == 0
    assert torch.get_num_threads() == before
    records = json.loads(file.read_text(encoding="utf-8"))
    by_key = {(r["threads"], r["nodes"], r["phase"]): r for r in records if "fitted" not in r}
    one, two = (by_key[threads, 62, "train"] for threads in (1, 2))
    assert two["gain"] == one["median_seconds"] / two["median_seconds"]
    assert two["gain_over_threads"] == 1 and "gain" not in one
    assert two["ratio"] == pytest.approx(
        two["median_seconds"] / 62 / (by_key[2, 31, "train"]["median_seconds"] / 31)
    )
    shown = capsys.readouterr().out
    assert "1 threads" in shown and "2 threads" in shown
    assert shown.count("train gain of threads") == 1


def test_more_trees_wanted_than_there_are(tmp_path: Path) -> None:
    argv = [*SST, "--trees", "2", "--modes", "fused", "--batches", "1"]
    assert {r["batch"] for r in records_of(argv, tmp_path)} == {3}


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    main(["scaling", "--sizes", "7", "--modes", "fused", "--repeats", "1", "--threads", "2"])
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["scaling", "--sizes", "0"], "expected: a number of 1 or more"),
        (["sst", "--batch-sizes", "many"], "got: many"),
        (["scaling", "--shapes", "star"], "invalid choice: 'star'"),
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "required"),
    ],
)
def test_wrong_option(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_unknown_device() -> None:
    with pytest.raises(ValueError, match="the device 'abacus' cannot be used"):
        main(["scaling", "--device", "abacus"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_device() -> None:
    with pytest.raises(ValueError, match="the device 'cuda' cannot be used"):
        main(["scaling", "--device", "cuda"])


def test_missing_raw_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="raw files are missing"):
        main(["sst", "--raw-dir", str(tmp_path)])
