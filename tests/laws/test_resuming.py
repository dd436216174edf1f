"""Law: a run that is resumed from the end of an epoch is one that never stopped."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.lightning import DatasetData, RandomState
from pyg_dynbatch.models import TreeSchema
from pyg_dynbatch.nn import ChildSumTreeLSTM
from tests.training.helpers import FORKS, assert_equal_weights, bare_trainer, listops, task
from tests.trees.helpers import chain_tree

pytestmark = [*FORKS, pytest.mark.filterwarnings("ignore:.*(persistent_workers|Experiment logs)")]


class NoisyTrees:
    """Chains whose inputs are drawn anew whenever they are read."""

    schema = TreeSchema(num_tokens=0, num_classes=1)
    sizes = tuple(10 * (number % 4 + 1) for number in range(13))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int) -> DynTreeData:
        nodes = number % 4 + 1
        return chain_tree(nodes, x=torch.rand(nodes, 3), y=torch.full((nodes,), float(number)))


class OwnModel(pl.LightningModule):
    """A user's own module over a layer of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ChildSumTreeLSTM(3, 5)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = self.head(self.layer(batch.x, batch.edge_index, batch.schedule))
        return (rows[:, 0] - batch.y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def own(folder: Path, **options: Any) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    return OwnModel(), DatasetData(NoisyTrees(), NoisyTrees(), **options)


def trees(folder: Path, **options: Any) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    data = listops(folder / "data", **options)
    adagrad = partial(torch.optim.Adagrad, lr=0.05)
    dropout = {"output_dropout": 0.3, "recurrent_dropout": 0.3, "embedding_dropout": 0.2}
    return task(data, adagrad, "one_cycle", cell="nary", arity=5, **dropout), data


KINDS: dict[str, Callable[..., tuple[Any, Any]]] = {"trees": trees, "own": own}


class Run(NamedTuple):
    """The weights at the end of a run, and the folder of a checkpoint per epoch."""

    weights: dict[str, Tensor]
    checkpoints: Path


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def run(
    folder: Path,
    kind: str,
    loading: dict[str, Any],
    resume: Path | None = None,
    ranks: int = 1,
    workers: dict[str, Any] | None = None,
) -> Run:
    """Train three epochs, from the start or from a checkpoint."""
    pl.seed_everything(4, verbose=False)
    checkpoints = folder / ("resumed" if resume else "whole")
    module, data = KINDS[kind](folder, **loading, num_workers=2 if workers else 0)
    if workers:
        options = data._loader_options
        data._loader_options = lambda: {**options(), **workers}
    keep = ModelCheckpoint(checkpoints, "{epoch}", save_top_k=-1)
    trainer = bare_trainer(
        folder, ranks, max_epochs=3, callbacks=[RandomState(), keep], enable_checkpointing=True
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if ranks > 1:  # the weights of the forked ranks
        return Run(weights_in(checkpoints / "epoch=2.ckpt"), checkpoints)
    return Run(module.state_dict(), checkpoints)


def check(folder: Path, kind: str, epoch: int, loading: dict[str, Any], **options: Any) -> None:
    """Compare a run with one that is resumed after an epoch."""
    whole = run(folder, kind, loading, **options)
    checkpoint = whole.checkpoints / f"epoch={epoch}.ckpt"
    resumed = run(folder, kind, loading, checkpoint, **options)
    assert_equal_weights(resumed.weights, whole.weights)
    before = weights_in(checkpoint)
    assert any(not torch.equal(weight, before[name]) for name, weight in whole.weights.items())


@pytest.mark.parametrize("loading", [{"batch_size": 4}, {"max_size": 60}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_one_that_never_stopped(
    kind: str, loading: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, kind, 0, loading)


# Persistent workers go on drawing from epoch to epoch, so none draw the inputs of "own" here.
WORKERS = [
    ("trees", "fork", True),
    ("trees", "spawn", True),
    ("own", "fork", False),
    ("own", "spawn", False),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "start", "persistent"), WORKERS)
def test_a_resumed_run_with_workers_equals_one_that_never_stopped(
    kind: str, start: str, persistent: bool, tmp_path: Path
) -> None:
    workers = {"multiprocessing_context": start, "persistent_workers": persistent}
    check(tmp_path, kind, 1, {"batch_size": 8}, workers=workers)


@pytest.mark.long
@pytest.mark.parametrize("loading", [{"batch_size": 4}, {"max_size": 100}], ids=str)
def test_a_resumed_run_on_two_ranks_equals_one_that_never_stopped(
    loading: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, "trees", 1, loading, ranks=2)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("loading", [{"batch_size": 4}, {"max_size": 100}], ids=str)
def test_the_order_is_that_of_the_run_that_is_resumed(
    loading: dict[str, Any], ranks: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whatever the seed of the process that resumes it is."""
    whole = run(tmp_path, "trees", loading, ranks=ranks)
    seed = pl.seed_everything
    monkeypatch.setattr(pl, "seed_everything", lambda *_, **options: seed(99, **options))
    checkpoint = whole.checkpoints / "epoch=0.ckpt"
    resumed = run(tmp_path, "trees", loading, checkpoint, ranks)
    assert_equal_weights(resumed.weights, whole.weights)
