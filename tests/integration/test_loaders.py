"""Loaders and samplers inside a real Lightning trainer, on one rank and on two."""

import json
import warnings
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from pyg_dynbatch.core.schedule import Schedule
from pyg_dynbatch.data import from_parents
from pyg_dynbatch.loader import DataLoader, NodeBudgetBatchSampler, node_counts
from tests.training.helpers import bare_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*(num_workers|DistributedSampler|fork)")
COUNT = 41


def examples():
    return [
        from_parents(range(-1, n % 7), target=torch.tensor([n]), y=torch.zeros(n % 7 + 1))
        for n in range(COUNT)
    ]


class Recorder(pl.LightningModule):
    """Notes which examples came in which step, and makes its loaders in the hooks."""

    def __init__(self, folder: Path, kind: str, inside: bool = True):
        super().__init__()
        self.folder = folder
        self.kind = kind
        self.inside = inside
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list = []
        self.stop_after: int | None = None

    def note(self, stage: str, batch, batch_idx: int) -> None:
        assert isinstance(batch.schedule, Schedule)
        assert batch.schedule.arity == 3
        assert batch.schedule.num_nodes == batch.num_nodes
        self.seen.append([stage, self.current_epoch, batch_idx, batch.target.tolist()])

    def training_step(self, batch, batch_idx):
        self.note("fit", batch, batch_idx)
        return (self.weight * batch.num_nodes).sum()

    def validation_step(self, batch, batch_idx):
        self.note("validate", batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.note("predict", batch, batch_idx)
        return batch.target

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loader(self, shuffle: bool) -> DataLoader:
        return make_loader(self.kind, shuffle)

    def train_dataloader(self):
        return self.loader(True)

    def val_dataloader(self):
        return self.loader(False)

    def predict_dataloader(self):
        return self.loader(False)

    def on_fit_end(self):
        self.write("fit")

    def on_validation_end(self):
        if not self.trainer.sanity_checking and self.trainer.state.fn == "validate":
            self.write("validate")

    def on_predict_end(self):
        self.write("predict")

    def write(self, name: str) -> None:
        path = self.folder / f"{name}_{self.global_rank}.json"
        path.write_text(json.dumps(self.seen))


class WithoutLoaders(Recorder):
    train_dataloader = None
    val_dataloader = None
    predict_dataloader = None


def make_loader(kind: str, shuffle: bool) -> DataLoader:
    data = examples()
    if kind == "plain":
        return DataLoader(data, batch_size=4, shuffle=shuffle, arity=3, seed=0)
    sampler = NodeBudgetBatchSampler(None, node_counts(data), max_nodes=20, shuffle=shuffle)
    return DataLoader(data, batch_sampler=sampler, arity=3)


def trainer(folder: Path, ranks: int = 1, **options) -> pl.Trainer:
    return bare_trainer(folder, ranks, **{"max_epochs": 2, **options})


def read(folder: Path, name: str, ranks: int) -> list[list]:
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in range(ranks)]


def of_stage(rows: list, stage: str, epoch: int | None = None) -> list[list[int]]:
    return [row[3] for row in rows if row[0] == stage and epoch in (None, row[1])]


@pytest.mark.parametrize("kind", ["plain", "budget"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("inside", [True, False], ids=["hooks", "given"])
def test_fit_validate_and_predict(tmp_path, kind, ranks, inside):
    make = Recorder if inside else WithoutLoaders
    train = () if inside else (make_loader(kind, True), make_loader(kind, False))
    held = () if inside else (make_loader(kind, False),)
    trainer(tmp_path, ranks).fit(make(tmp_path, kind), *train)
    trainer(tmp_path, ranks).validate(make(tmp_path, kind), *held, verbose=False)
    trainer(tmp_path, ranks).predict(make(tmp_path, kind), *held, return_predictions=False)

    fit = read(tmp_path, "fit", ranks)
    epochs = [[of_stage(rows, "fit", epoch) for rows in fit] for epoch in (0, 1)]
    assert epochs[0] != epochs[1], "set_epoch reached the sampler"
    for epoch in epochs:
        assert len({len(batches) for batches in epoch}) == 1
        check_seen(epoch, exact=kind == "budget" or ranks == 1)
    for stage in ("validate", "predict"):
        rows = read(tmp_path, stage, ranks)
        once = kind == "budget" or ranks == 1 or stage == "predict"
        check_seen([of_stage(part, stage) for part in rows], exact=once)
    if kind == "budget" and ranks == 1:
        assert sum(of_stage(read(tmp_path, "predict", 1)[0], "predict"), []) == list(range(COUNT))


def check_seen(ranks: list[list[list[int]]], exact: bool) -> None:
    seen = Counter(number for batches in ranks for batch in batches for number in batch)
    assert set(seen) == set(range(COUNT))
    if exact:
        assert max(seen.values()) == 1
    else:
        assert sum(seen.values()) == COUNT + 1, "Lightning's own padding to an even number"


@pytest.mark.parametrize("kind", ["plain", "budget"])
def test_predictions_come_with_their_numbers(tmp_path, kind):
    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            self.pairs = list(zip(predictions, batch_indices[0], strict=True))

    writer = Writer("epoch")
    trainer(tmp_path, callbacks=[writer]).predict(Recorder(tmp_path, kind))
    assert writer.pairs
    for predicted, indices in writer.pairs:
        assert predicted.tolist() == indices


class Stop(pl.Callback):
    """Saves in the middle of an epoch."""

    def __init__(self, path: Path, step: int):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("kind", ["plain", "budget"])
@pytest.mark.parametrize("step", [3, 12])
def test_a_run_stopped_in_an_epoch_goes_on_with_the_next_batch(tmp_path, kind, step):
    whole = Recorder(tmp_path, kind)
    path = tmp_path / "stopped.ckpt"
    trainer(tmp_path, limit_val_batches=0, max_epochs=3, callbacks=[Stop(path, step)]).fit(whole)
    rest = Recorder(tmp_path, kind)
    trainer(tmp_path, limit_val_batches=0, max_epochs=3).fit(rest, ckpt_path=path)
    assert [row[3] for row in rest.seen] == [row[3] for row in whole.seen[step:]]
    assert torch.equal(rest.weight, whole.weight)


def test_a_run_stopped_between_epochs_shuffles_on(tmp_path):
    saved = pl.callbacks.ModelCheckpoint(tmp_path / "saved", filename="epoch", every_n_epochs=1)
    whole, rest = Recorder(tmp_path, "budget"), Recorder(tmp_path, "budget")
    trainer(tmp_path, limit_val_batches=0, max_epochs=3).fit(whole)
    options = {"limit_val_batches": 0, "enable_checkpointing": True, "callbacks": [saved]}
    # Saving over the old file is meant here.
    warnings.filterwarnings("ignore", "Checkpoint directory")
    trainer(tmp_path, max_epochs=2, **options).fit(Recorder(tmp_path, "budget"))
    path = saved.best_model_path
    trainer(tmp_path, max_epochs=3, **options).fit(rest, ckpt_path=path)
    assert rest.seen == [row for row in whole.seen if row[1] == 2]


def test_ranks_are_found_without_a_distributed_sampler(tmp_path):
    options = {"use_distributed_sampler": False, "limit_val_batches": 0}
    trainer(tmp_path, 2, **options).fit(Recorder(tmp_path, "budget"))
    rows = read(tmp_path, "fit", 2)
    for epoch in (0, 1):
        check_seen([of_stage(part, "fit", epoch) for part in rows], exact=True)
