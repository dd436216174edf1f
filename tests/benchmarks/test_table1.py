"""Fold's Table 1 on tiny sizes: shapes, cells, records; nothing here is timed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import main, table1
from benchmarks.choices import CELLS, TREE_SHAPES
from benchmarks.protocol import Stopwatch
from benchmarks.table1_models import FoldCell, Table1Model
from benchmarks.table1_products import LevelProducts
from benchmarks.table1_trees import Shape, schedule_of
from pyg_dynbatch.nn import NaryTreeLSTM, TreeGRU
from pyg_dynbatch.trees.collate import Collater

CPU = torch.device("cpu")
ARGV = ["table1", "--batch-sizes", "1", "3", "--leaves", "5", "--units", "4", "--repeats", "2"]
WAYS = ("manual", "dynamic", "different shapes")


def shape_of(kind: str, leaves: int, seed: int = 0) -> Shape:
    return Shape.draw(kind, leaves, np.random.default_rng(seed))


@pytest.mark.parametrize("kind", TREE_SHAPES)
@pytest.mark.parametrize("leaves", [1, 2, 3, 8, 128])
def test_shapes(kind: str, leaves: int) -> None:
    shape = shape_of(kind, leaves)
    assert len(shape.leaves) == leaves
    assert len(shape.below) == 2 * leaves - 1
    tree = shape.example(torch.arange(leaves))
    tree.validate(require_tree=True, num_tokens=leaves)
    assert tree.token[shape.leaves].tolist() == list(range(leaves))
    assert tree.root_index.tolist() == [0]
    height = {"balanced": (leaves - 1).bit_length(), "sequence": leaves - 1}
    assert int(tree.depth.max()) == height.get(kind, int(tree.depth.max()))


def test_random_shapes_are_as_high_as_in_the_paper() -> None:
    heights = [
        float(
            shape_of("random", 128, seed).example(torch.zeros(128, dtype=torch.int64)).depth.max()
        )
        for seed in range(60)
    ]
    assert 13.0 < sum(heights) / 60 < 15.6  # 14.3 by simulation of the published program


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", TREE_SHAPES)
def test_by_hand_equals_dynamic(cell: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Table1Model(cell, 6, 9).double()
    shape, token = shape_of(kind, 9), torch.randint(0, 9, (4, 9))
    batch = Collater(arity=2)([shape.example(row) for row in token])
    by_hand, dynamic = model.by_hand(shape, token.t()), model.dynamic(batch)
    torch.testing.assert_close(dynamic, by_hand)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(by_hand.square().sum(), parameters)
    found = torch.autograd.grad(dynamic.square().sum(), parameters)
    for right, mine in zip(wanted, found, strict=True):
        torch.testing.assert_close(mine, right)


def test_fold_cell_against_its_equation() -> None:
    cell = FoldCell(3)
    left, right = torch.randn(2, 2, 3)
    f_left, f_right, i, g = cell.gates(torch.relu(cell.hidden(torch.cat([left, right], 1)))).chunk(
        4, 1
    )
    wanted = f_left.sigmoid() * left + f_right.sigmoid() * right + i.sigmoid() * g.tanh()
    torch.testing.assert_close(cell(torch.zeros(2, 3), left, right), wanted)
    assert sum(p.numel() for p in FoldCell(1024).parameters()) == 6_296_576


def test_no_hand_for_another_cell() -> None:
    model = Table1Model("tai", 4, 3)
    model.layer = TreeGRU(4, 4)
    with pytest.raises(TypeError, match=r"nobody wrote this cell.*\n.*\n.*TreeGRUCell"):
        model.by_hand(shape_of("random", 3), torch.zeros(3, 1, dtype=torch.int64))


def test_nothing_is_timed_when_the_cells_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: NaryTreeLSTM, *given: Any, **named: Any) -> torch.Tensor:
        return -right(self, *given, **named)

    right = NaryTreeLSTM.forward
    monkeypatch.setattr(NaryTreeLSTM, "forward", other)
    with pytest.raises(RuntimeError, match="dynamic computes something else"):
        main([*ARGV, "--cells", "tai"])


def test_products_are_those_of_the_paper() -> None:
    shapes = [shape_of("random", 128, seed) for seed in range(2)]
    schedule = schedule_of([s.example(torch.zeros(128, dtype=torch.int64)) for s in shapes])
    full = 2 * 127 * (2048 * 1024 + 1024 * 4096)  # 1.598 GFLOP a tree
    small = LevelProducts(schedule, [(2, 1), (1, 4)], None, CPU)
    assert small.flops * 1024**2 == 2 * full
    watch = Stopwatch(CPU)
    small.run(watch)
    assert set(watch.seconds) == {"forward", "backward", "inference"}
    first, second = small.parts
    torch.testing.assert_close(first.results, first.rows @ first.weight)
    torch.testing.assert_close(second.row_grads, second.results @ second.weight.t())
    torch.testing.assert_close(second.weight_grad, second.rows.t() @ second.results)
    tai = LevelProducts(schedule, [(2, 5)], (1, 3), CPU)
    assert tai.flops == 2 * 2 * (128 * 3 + 127 * 10)


def test_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, figure = tmp_path / "records.json", tmp_path / "figure.svg"
    argv = [*ARGV, "--cells", "fold", "tai", "--shapes", "random", "sequence", "--threads", "1"]
    assert main([*argv, "--json", str(file), "--figure", str(figure)]) == 0
    assert figure.is_file()
    records = json.loads(file.read_text(encoding="utf-8"))
    by_key = {(r["case"], r["batch"], r["mode"], r["phase"]): r for r in records}
    assert len(by_key) == len(records)
    assert {r["case"] for r in records} == {
        f"{cell}, {kind}" for cell in ("fold", "tai") for kind in ("random", "sequence")
    }
    assert ("fold, sequence", 3, "different shapes", "train") not in by_key
    for mode in WAYS:
        for phase in table1.PHASES:
            record = by_key["fold, random", 3, mode, phase]
            assert record["trees_per_second"] == pytest.approx(3 / record["median_seconds"])
            assert record["speedup"] > 0
            assert (record["ratio_to"] == "manual") == (mode != "manual")
        assert by_key["fold, random", 3, mode, "train"]["ratio_to_bare"] > 0
    alone = by_key["fold, random", 3, "manual, batch 1", "train"]
    assert alone["seconds_per_tree"] == alone["median_seconds"]
    whole = by_key["tai, random", 3, "dynamic", "train, end to end"]
    assert (
        whole["median_seconds"] >= by_key["tai, random", 3, "dynamic", "collate"]["median_seconds"]
    )
    shown = capsys.readouterr().out
    assert "table1: train, fold, random shapes, 5 leaves" in shown
    assert "cost" in shown and "end to end" in shown
