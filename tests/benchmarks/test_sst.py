"""The benchmark of sentiment trees on tiny sizes; nothing here is timed."""

from typing import Any

import pytest

from benchmarks import sst, tree_lstm
from pyg_dynbatch.trees.models import TreeClassifier

SMALL = ["--batch-sizes", "3", "--units", "4", "--embedding", "5", "--trees", "6"]
SMALL += ["--batches", "1", "--repeats", "1", "--loop-trees", "2"]


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(sst, *SMALL, "--modes", *sst.MODES)
    by_key = {(r["mode"], r["phase"]): r for r in records}
    bare_phases = ("forward", "backward", "train", "inference")
    assert set(by_key) == {
        *((mode, phase) for mode in sst.MODES for phase in sst.PHASES),
        *((bare, phase) for bare in ("bare", "bare, packed") for phase in bare_phases),
        *(("one by one", phase) for phase in ("train", "inference")),
        *(("host", phase) for phase in ("fetch", "collate")),
    }
    for mode in sst.MODES:
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
    for text in ("of the training step", "GFLOP", "train x packed", "records.json"):
        assert text in shown


def test_batches_larger_than_the_data_repeat_trees() -> None:
    assert [len(members) for members in sst.draw(2, 3, 4, seed=0)] == [3] * 4
    assert sorted(sst.draw(3, 3, 1, seed=0)[0]) == [0, 1, 2]


def test_other_cells_are_refused() -> None:
    model = TreeClassifier(9, 5, 4, 3, cell="child_sum")
    with pytest.raises(TypeError, match="no plain code for this cell"):
        tree_lstm.Weights.of(model.encoder.layer.cell)
