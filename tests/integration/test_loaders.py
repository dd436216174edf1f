"""Loaders and samplers in a Lightning trainer, on one rank and on two."""

import json
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, SequentialSampler

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.loader import DataLoader, NodeBudgetBatchSampler, node_counts
from tests.training.helpers import bare_trainer
from tests.trees.helpers import chain_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*(num_workers|DistributedSampler|fork)")
COUNT = 41


def examples():
    return [
        chain_tree(n % 7 + 1, target=torch.tensor([n]), y=torch.zeros(n % 7 + 1))
        for n in range(COUNT)
    ]


class Recorder(pl.LightningModule):
    """Record the examples of every step; create the loaders in the hooks."""

    def __init__(self, folder: Path, kind: str):
        super().__init__()
        self.folder, self.kind = folder, kind
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list = []

    def record(self, stage: str, batch, batch_idx: int) -> None:
        assert isinstance(batch.schedule, Levels)
        assert batch.schedule.arity == 3
        assert batch.schedule.num_nodes == batch.num_nodes
        self.seen.append([stage, self.current_epoch, batch_idx, batch.target.tolist()])

    def training_step(self, batch, batch_idx):
        self.record("fit", batch, batch_idx)
        return (self.weight * batch.num_nodes).sum()

    def validation_step(self, batch, batch_idx):
        self.record("validate", batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.record("predict", batch, batch_idx)
        return batch.target

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return make_loader(self.kind, shuffle=True)

    def val_dataloader(self):
        return make_loader(self.kind, shuffle=False)

    predict_dataloader = val_dataloader

    def on_fit_end(self):
        self.write("fit")

    def on_validation_end(self):
        if self.trainer.state.fn == "validate":
            self.write("validate")

    def on_predict_end(self):
        self.write("predict")

    def write(self, name: str) -> None:
        path = self.folder / f"{name}_{self.global_rank}.json"
        path.write_text(json.dumps(self.seen))


class WithoutLoaders(Recorder):
    train_dataloader = val_dataloader = predict_dataloader = None


def make_loader(kind: str, shuffle: bool) -> DataLoader:
    data = examples()
    if kind == "plain":
        return DataLoader(data, batch_size=4, shuffle=shuffle, arity=3)
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    sampler = NodeBudgetBatchSampler(order, node_counts(data), max_nodes=20)
    return DataLoader(data, batch_sampler=sampler, arity=3)


def trainer(folder: Path, ranks: int = 1, **options) -> pl.Trainer:
    return bare_trainer(folder, ranks, **{"max_epochs": 2, **options})


def read(folder: Path, stage: str, ranks: int, epoch: int | None = None) -> list[list[list[int]]]:
    """Return the examples of every batch of a stage, by rank."""
    files = [folder / f"{stage}_{rank}.json" for rank in range(ranks)]
    return [
        [
            row[3]
            for row in json.loads(file.read_text())
            if row[0] == stage and epoch in (None, row[1])
        ]
        for file in files
    ]


@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler")
@pytest.mark.parametrize(
    ("kind", "ranks", "hooks"),
    [("plain", 1, False), ("plain", 2, True), ("budget", 1, False), ("budget", 2, True)],
)
def test_fit_validate_and_predict(tmp_path, kind, ranks, hooks):
    model = Recorder if hooks else WithoutLoaders
    given = () if hooks else (make_loader(kind, False),)
    train = () if hooks else (make_loader(kind, True), *given)
    trainer(tmp_path, ranks).fit(model(tmp_path, kind), *train)
    trainer(tmp_path, ranks).validate(model(tmp_path, kind), *given, verbose=False)
    trainer(tmp_path, ranks).predict(model(tmp_path, kind), *given, return_predictions=False)

    epochs = [read(tmp_path, "fit", ranks, epoch) for epoch in (0, 1)]
    assert epochs[0] != epochs[1], "set_epoch must reach the sampler"
    for epoch in epochs:
        assert len({len(batches) for batches in epoch}) == 1
        check_seen(epoch, exact=kind == "budget" or ranks == 1)
    for stage in ("validate", "predict"):
        once = kind == "budget" or ranks == 1 or stage == "predict"
        check_seen(read(tmp_path, stage, ranks), exact=once)
    if kind == "budget" and ranks == 1:
        assert sum(read(tmp_path, "predict", 1)[0], []) == list(range(COUNT))


def check_seen(ranks: list[list[list[int]]], exact: bool) -> None:
    seen = Counter(number for batches in ranks for batch in batches for number in batch)
    assert set(seen) == set(range(COUNT))
    if exact:
        assert max(seen.values()) == 1
    else:
        assert sum(seen.values()) == COUNT + 1, "Lightning pads to an even number"
