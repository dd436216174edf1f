"""Fold's Table 1 on tiny sizes: shapes, cells, records; nothing here is timed."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import table1
from benchmarks.table1 import CELLS, FoldCell, Table1Model
from benchmarks.trees import TREE_SHAPES, Shape
from pyg_dynbatch.trees.data import Collater

SMALL = ["--batch-sizes", "1", "3", "--leaves", "5", "--units", "4", "--repeats", "1"]
WAYS = ("manual", "dynamic", "different shapes")


def shape_of(kind: str, leaves: int) -> Shape:
    return Shape.draw(kind, leaves, np.random.default_rng(0))


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


@pytest.mark.parametrize(("cell", "kind"), [("fold", "random"), ("tai", "sequence")])
def test_records(run: Any, cell: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(table1, *SMALL, "--cells", cell, "--shapes", kind)
    assert {r["case"] for r in records} == {f"{cell}, {kind}"}
    by_key = {(r["batch"], r["mode"], r["phase"]): r for r in records}
    assert len(by_key) == len(records)
    ways = WAYS if kind == "random" else WAYS[:2]
    assert ((3, "different shapes", "train") in by_key) == (kind == "random")
    for mode in ways:
        for phase in table1.PHASES:
            record = by_key[3, mode, phase]
            assert record["trees_per_second"] == pytest.approx(3 / record["median_seconds"])
            assert record["speedup"] > 0
            assert (record["ratio_to"] == "manual") == (mode != "manual")
        assert by_key[3, mode, "train"]["ratio_to_bare"] > 0
    alone = by_key[3, "manual, batch 1", "train"]
    assert alone["seconds_per_tree"] == alone["median_seconds"]
    whole, collate = (by_key[3, "dynamic", phase] for phase in ("train, end to end", "collate"))
    assert whole["median_seconds"] >= collate["median_seconds"]
    shown = capsys.readouterr().out
    assert f"table1: train, {cell}, {kind} shapes, 5 leaves" in shown
    assert "cost" in shown and "end to end" in shown
