"""Saved batches are loaded without unpickling code; pickling leaves a data set as it was."""

import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch_geometric.data import Batch, Data

from pyg_dynbatch.data import DynTreeData, MoleculeData, allow_batches
from pyg_dynbatch.datasets import SST, ListOps, ListOpsRecipe, MoleculeFile, TreeFile
from pyg_dynbatch.loader import Collater, MoleculeCollater
from pyg_dynbatch.molecules.features.pair_table import PairTable
from tests.trees.helpers import assert_same

TREES = [DynTreeData(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 2
PLAIN = [Data(edge_index=tree.edge_index, num_nodes=3) for tree in TREES]
TABLE = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
OXYGEN = MoleculeData(torch.ones(2, 3), torch.tensor([0, 1, 0], dtype=torch.uint8), smiles="O=O")


class OwnTree(DynTreeData):
    """A user's own class."""


allow_batches(OwnTree)
OWN = [OwnTree(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)] * 2


def test_batches_without_a_schedule_need_pyg_alone() -> None:
    assert b"pyg_dynbatch" not in pickle.dumps(Batch.from_data_list(PLAIN))


@pytest.mark.parametrize(
    ("make", "plans"),
    [
        (lambda: Collater(arity=2, direction="bottom_up")(TREES), ["schedule"]),
        (lambda: Collater(direction="both")(TREES), ["schedule", "schedule_down"]),
        (lambda: Collater(follow_batch=["depth"])(TREES), ["schedule"]),  # merged by PyG
        (lambda: Collater(arity=2)(PLAIN), ["schedule"]),
        (lambda: Collater(arity=2)(OWN), ["schedule"]),
        (lambda: MoleculeCollater(TABLE)([OXYGEN] * 3), ["pairs"]),
    ],
)
def test_loads_without_unpickling_code(make: Any, plans: list[str], tmp_path: Path) -> None:
    batch = make()
    torch.save(batch, tmp_path / "batch.pt")
    again = torch.load(tmp_path / "batch.pt", weights_only=True)
    assert list(again.keys()) == list(batch.keys()) and set(plans) <= set(batch.keys())
    assert_same(batch, again)


class Batches(torch.utils.data.Dataset[Batch]):
    """Makes one batch of each data set, wherever it is asked."""

    def __init__(self, parts: Sequence[tuple[Any, Any]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> Batch:
        dataset, collater = self.parts[i]
        return collater(dataset.__getitems__([2, 0, 1]))


def all_kinds(folder: Path, samples: Path) -> Batches:
    trees = folder / "trees.txt"
    trees.write_text("(3 (2 good) (1 fun))\n(0 bad)\n(1 (0 (1 a) (1 bad)) (2 film))\n" * 100)
    recipe = ListOpsRecipe(train=100, val=1, test=1)
    molecules = MoleculeFile(samples / "molecules" / "freesolv.csv", target_columns=["expt"])
    datasets = [
        SST(None, "train", raw_dir=samples / "sst", verify=False),
        TreeFile(trees),
        ListOps(None, "train", recipe=recipe),
    ]
    collaters = [(dataset, Collater()) for dataset in datasets]
    return Batches([*collaters, (molecules, MoleculeCollater(molecules.pair_table))])


@pytest.mark.parametrize(
    "context",
    [None, *(pytest.param(name, marks=pytest.mark.long) for name in ("spawn", "forkserver"))],
)
def test_batches_before_there_and_afterwards(
    context: str | None, tmp_path: Path, samples: Path
) -> None:
    batches = all_kinds(tmp_path, samples)
    before = [batches[i] for i in range(len(batches))]
    if context is None:
        sent = pickle.loads(ForkingPickler.dumps(batches))
        there: Any = [sent[i] for i in range(len(batches))]
    else:
        there = torch.utils.data.DataLoader(
            batches, batch_size=None, num_workers=1, multiprocessing_context=context
        )
    for wanted, found in zip(before, there, strict=True):
        assert_same(wanted, found)
    for i, wanted in enumerate(before):
        assert_same(wanted, batches[i])
