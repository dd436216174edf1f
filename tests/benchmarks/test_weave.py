"""The weave benchmark runs on tiny sizes; its counts are those of torch, its ways agree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import weave
from benchmarks.bench import Stopwatch
from benchmarks.products import work
from benchmarks.weave import Machine, Ways, WeaveBatch, WeaveSizes
from pyg_dynbatch.molecules.data import MoleculeCollater
from pyg_dynbatch.molecules.features.featurizer import MoleculeFeaturizer
from pyg_dynbatch.nn.weave import WeaveStack

pytest.importorskip("rdkit")

SMALL = ["--molecules", "5", "--units", "4", "--repeats", "1", "--batches", "1"]
CPU = torch.device("cpu")

# The two layers as DeepChem has them, with its names.
STAND_IN = """
import torch

__version__ = "stand-in"


class feat:
    class WeaveFeaturizer:
        pass


class Layer:
    def __call__(self, inputs):
        atoms, pair, source, ends = (torch.as_tensor(each) for each in inputs)
        own = (atoms @ self.W_AA + self.b_AA).relu()
        received = (pair @ self.W_PA + self.b_PA).relu()
        total = torch.zeros_like(own).index_add(0, source, received)
        updated = (torch.cat([own, total], 1) @ self.W_A + self.b_A).relu() {fault}
        if hasattr(self, "W_AP"):
            there, back = (
                (atoms[each].flatten(1) @ self.W_AP + self.b_AP).relu()
                for each in (ends, ends.flip(1))
            )
            kept = (pair @ self.W_PP + self.b_PP).relu()
            pair = (torch.cat([there + back, kept], 1) @ self.W_P + self.b_P).relu()
        return updated, pair


class WeaveModel:
    def __init__(self, **options):
        assert options["batch_normalize"] is False and options["n_weave"] == 2
        self.model = self
        self.layers = [Layer(), Layer()]

    def named_parameters(self):
        return []
"""


def test_all_ways(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # The batches of two molecules are too large for the engine.
    options = ["--batch-sizes", "2", "--sizes", "3", "6", "--engine-pairs", "36"]
    records = run(weave, *SMALL, *options)
    measured = [r for r in records if not r["phase"].startswith("growth")]
    phases = ("forward", "backward", "train", "inference")
    for case, atoms, engine in (
        ("nci", None, []),
        *((weave.SINGLE, n, ["engine"]) for n in (3, 6)),
    ):
        modes = ["fused", "plain", *engine]
        ways = [(mode, phase) for mode in (*modes, "bare") for phase in phases]
        ways += [(mode, "memory") for mode in modes]
        mine = [r for r in measured if r["case"] == case and atoms in (None, r["atoms"])]
        assert sorted((r["mode"], r["phase"]) for r in mine) == sorted(ways)
    for record in measured:
        if record["phase"] != "memory":
            assert record["times_limit"] == record["median_seconds"] / record["limit_seconds"]
            assert record["molecules_per_second"] > 0
        assert 0 < record["flops_forward"] < record["plain_flops_forward"]
    growth = [r for r in records if r["phase"].startswith("growth")]
    assert {(r["mode"], r["phase"]) for r in growth} >= {("fused", "growth of train")}
    shown = capsys.readouterr().out
    assert "of plain, engine over fused" in shown and "MFLOP" in shown and "exponent" in shown


def test_a_case_without_any_way_is_named(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SMALL, "--batch-sizes", "1", "--modes", "engine", "--engine-pairs", "4"]
    records = run(weave, *options, "--sizes", "2", "3")
    left_out = [(r["case"], r["mode"]) for r in records if r["phase"] == "left out"]
    assert left_out == [("nci", "engine"), ("one molecule", "engine")]
    assert {r["atoms"] for r in records if r["phase"] == "train"} == {2}
    shown = capsys.readouterr().out
    assert "one molecule, batch 1 is left out: 9 ordered pairs, more than --engine-pairs" in shown
    run(weave, *options, "--sizes")
    assert "nci, batch 1 is left out" in capsys.readouterr().out


@pytest.mark.long
def test_beside_deepchem(run: Any, interpreter: Callable[[str], Path]) -> None:
    python = interpreter(STAND_IN.format(fault=""))
    options = ["--batch-sizes", "2", "--sizes", "--modes", "fused"]
    records = run(weave, *SMALL, *options, "--deepchem-python", str(python))
    (other,) = [r for r in records if r["mode"] == "deepchem's own"]
    assert (other["phase"], other["ratio_to"]) == ("inference", "fused")
    assert other["ratio"] > 0 and other["deepchem"] == "stand-in"


def test_a_deepchem_that_differs_is_not_timed(run: Any, interpreter: Callable[[str], Path]) -> None:
    python = interpreter(STAND_IN.format(fault="* 1.01"))
    options = ["--batch-sizes", "1", "--modes", "fused"]
    with pytest.raises(RuntimeError, match="DeepChem's WeaveModel computes something different"):
        run(weave, *SMALL, *options, "--deepchem-python", str(python))


@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_the_count_of_operations_is_that_of_torch(mode, monkeypatch):
    # The counter follows modules by global hooks, which the fast way would make room for.
    monkeypatch.setattr("torch.nn.modules.module._has_any_global_hook", lambda: False)
    featurizer = MoleculeFeaturizer("deepchem", "deepchem")
    table = featurizer.pair_table.features
    ways = Ways(WeaveStack(75, 14, 8), table)
    molecules = [featurizer(smiles) for smiles in ("CC(=O)O", "c1ccccc1", "O")]
    batch = WeaveBatch(molecules, MoleculeCollater(featurizer.pair_table), CPU)
    sizes = batch.sizes(8)
    counted = work(sizes.factored() if mode == "fused" else sizes.plain())
    # The counter of torch ignores addmm_, the product that the layer adds in place.
    unseen = 2 * sizes.pairs * 8 * 8 if mode == "fused" else 0
    with FlopCounterMode(display=False) as forward:
        ways.atoms(mode, batch)
    assert forward.get_total_flops() + unseen == counted["flops_forward"]
    with FlopCounterMode(display=False) as both:
        ways.train(mode, batch)
    assert both.get_total_flops() - forward.get_total_flops() == counted["flops_backward"]


def test_the_count_is_that_of_the_plan() -> None:
    # 25 atoms: 30.7 million operations over ordered pairs, about 4.5 factored.
    sizes = WeaveSizes(25, 325, 625, 25, 75, 14, 50)
    assert work(sizes.plain())["flops_forward"] == pytest.approx(30.7e6, rel=0.01)
    assert work(sizes.factored())["flops_forward"] == pytest.approx(4.5e6, rel=0.06)


def test_the_limit_is_the_slower_of_the_two() -> None:
    machine = Machine(CPU, width=8, numbers=100)
    lap = Stopwatch(CPU)
    machine.run(lap)
    assert set(lap.seconds) == {"multiply", "copy"}
    seconds = [{"multiply": 1.0, "copy": 3.0}, {"multiply": 2.0, "copy": 1.0}]
    assert machine.limit(seconds, 3 * machine.flops, machine.bytes) == 3.0
    assert machine.limit(seconds, machine.flops, 5 * machine.bytes) == 5.0


def test_growth_needs_two_sizes() -> None:
    where = {"case": weave.SINGLE, "mode": "fused", "phase": "train", "median_seconds": 1.0}
    assert list(weave.growth([{**where, "atoms": 10.0}])) == []
