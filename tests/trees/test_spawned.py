"""Pickling for another process leaves a data set as it was, here and there."""

import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from torch_geometric.data import Batch

from pyg_dynbatch.datasets import SST, ListOps, ListOpsRecipe, MoleculeFile, TreeFile
from pyg_dynbatch.loader import Collater, MoleculeCollater
from tests.trees.helpers import assert_same


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
