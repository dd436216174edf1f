"""A batch that was saved is read again without unpickling code."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core.padding import LevelBuckets
from pyg_dynbatch.data import DynTreeData, MoleculeData, allow_batches
from pyg_dynbatch.loader import Collater, MoleculeCollater
from pyg_dynbatch.molecules.pair_table import PairTable
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


def padded() -> Any:
    buckets = LevelBuckets.fit([Collater(arity=2)(TREES).schedule])
    return Collater(arity=2, buckets=buckets)(TREES)


@pytest.mark.parametrize(
    ("make", "plans"),
    [
        (lambda: Collater(arity=2, direction="bottom_up")(TREES), ["schedule"]),
        (lambda: Collater(direction="both")(TREES), ["schedule", "schedule_down"]),
        (lambda: Collater(follow_batch=["depth"])(TREES), ["schedule"]),  # merged by PyG
        (padded, ["schedule"]),
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
