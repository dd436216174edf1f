"""All ways to run one Tree-LSTM agree, and their records are complete; nothing here is timed."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.peers import OURS, PACKAGES, PEERS, RECURSIVE, WAYS, Padded, PeerModel, PeerTree
from benchmarks.trees import Shape

SMALL = ["--leaves", "4", "--units", "3", "--words", "9", "--batch-sizes", "1", "3"]
SMALL += ["--repeats", "1", "--loop-trees", "2"]
PLAIN = [name for name in WAYS if name not in PACKAGES]
MODULES = {"DGL": "dgl", "torchfold": "torchfold", "DyNet": "dynet"}


def trees_of(*leaves: int) -> list[PeerTree]:
    generator, found = np.random.default_rng(0), []
    for count in leaves:
        shape = Shape.draw("random", count, generator)
        found.append(PeerTree.of(shape, torch.from_numpy(generator.integers(0, 9, count))))
    return found


def model_of(units: int = 5) -> PeerModel:
    torch.manual_seed(0)
    return PeerModel(9, units)


def assert_same(wanted: list[Tensor], found: list[Tensor]) -> None:
    for right, mine in zip(wanted, found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)


def test_every_way_can_be_asked_for() -> None:
    assert [OURS, *PEERS] == list(WAYS)


@pytest.mark.parametrize("name", [name for name in PLAIN if name != RECURSIVE])
@pytest.mark.parametrize("leaves", [(1,), (2, 1, 7), (20, 3, 5, 5)])
def test_ways_agree(name: str, leaves: tuple[int, ...]) -> None:
    model, trees = model_of(), trees_of(*leaves)
    wanted = WAYS[RECURSIVE](model).results(trees)
    assert wanted[0].shape == (len(leaves), 5)
    assert len(wanted) == 1 + len(list(model.parameters()))
    if leaves != (1,):
        assert all(float(each.abs().max()) > 0 for each in wanted)
    assert_same(wanted, WAYS[name](model).results(trees))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKAGES)
def test_packages_agree(name: str) -> None:
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    model, trees = model_of(), trees_of(2, 1, 7)
    made, missing = peers.make_peers(model, [name])
    assert not missing
    assert_same(WAYS[RECURSIVE](model).results(trees), made[name].results(trees))


def test_padding_is_as_wide_as_the_widest_tree() -> None:
    batch = Padded(model_of()).prepare(trees_of(1, 2, 4))
    assert batch.token.shape == (3, 4)
    assert [each.shape[1] for each in batch.levels] == [each.shape[1] for each in batch.filled[1:]]
    assert sum(int(filled.sum()) for filled in batch.filled) == 1 + 3 + 7
    assert int(batch.filled[0][0].sum()) == 1
    assert not batch.filled[1][0].any()


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("dgl", "torchfold.torchfold", "dynet_config"):
        monkeypatch.setitem(sys.modules, module, None)
    made, missing = peers.make_peers(model_of(), list(PACKAGES))
    assert made == {}
    assert set(missing) == set(PACKAGES)
    assert all(reason.startswith("ModuleNotFoundError: import of") for reason in missing.values())


def test_records(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    records = run(peers, *SMALL, "--peers", *PEERS[:5], "DGL")
    timed = {(r["batch"], r["mode"], r["phase"]): r for r in records if r["phase"] != "left out"}
    assert set(timed) == {
        (batch, mode, phase)
        for batch in (1, 3)
        for mode in (OURS, *PEERS[:5])
        for phase in peers.PHASES
    }
    assert timed[3, RECURSIVE, "train"]["scaled_by"] == 1.5
    assert timed[1, RECURSIVE, "train"]["scaled_by"] == 1
    for (_, mode, phase), record in timed.items():
        assert (record["ratio_to"] == OURS) == (mode != OURS and phase != "prepare")
    shown = capsys.readouterr().out
    assert "ahead of the best peer: train " in shown
    assert "DGL is left out: ModuleNotFoundError: import of dgl" in shown
