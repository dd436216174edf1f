"""The benchmark of DAGs runs on tiny sizes, and the recipe of masks computes what it says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import dags


def test_records(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch-sizes", "3", "--widths", "4", "--batches", "1", "--repeats", "1"]
    records = run(dags, "--cases", "architectures", *sizes)
    found = {(r["mode"], r["phase"]) for r in records}
    modes = (dags.OURS, dags.MASKS, dags.EDGES)
    assert found == {(mode, phase) for mode in modes for phase in dags.PHASES}
    for record in records:
        assert (record["nodes"], record["levels"]) == (24, 8)
        assert 7 * 3 <= record["edges"] <= 28 * 3
    assert "times as long" in capsys.readouterr().out


def test_masks_select_each_node_once() -> None:
    edges = torch.tensor([[0, 0, 1, 2], [1, 2, 3, 3]])
    batch = SimpleNamespace(edge_index=edges, num_nodes=4)
    for whole, own in zip(dags.levels_of(batch, False), dags.levels_of(batch, True), strict=True):
        masks = torch.stack([mask for mask, _ in whole])
        assert masks.sum(0).tolist() == [1, 1, 1, 1]
        assert [e.size(1) for _, e in whole] == [4, 4, 4]
        assert [e.size(1) for _, e in own] == [0, 2, 2]
