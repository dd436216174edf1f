"""Two processes train, measure and predict what one does."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from pyg_dynbatch.datasets import ListOpsRecipe
from pyg_dynbatch.lightning import (
    ListOpsData,
    OptimizerOptions,
    PredictionTable,
    TreeClassification,
    TreeDataModule,
)
from tests.console import rows_of
from tests.molecules.molecules import molecule_data, property_task
from tests.training.helpers import FORKS, SIZES, bare_trainer

pytestmark = FORKS

TRAIN, VAL, TEST = 24, 9, 11  # an even number to train on, odd ones to measure
RECIPE = ListOpsRecipe(train=TRAIN, val=VAL, test=TEST, max_depth=4, max_length=30)
# One step an epoch over all trees, in any order: by number of trees, or by number of nodes, when
# the ranks get about as many nodes each but not as many trees.
SHARES = {"trees": {1: {"batch_size": 24}, 2: {"batch_size": 12}}}
SHARES["nodes"] = {ranks: {"batch_size": 4, "max_nodes": 10**6} for ranks in (1, 2)}


class LabelledNodes(ListOpsData):
    """Labels every third node besides the roots, so that ranks differ in their labelled rows."""

    def load(self, split: Any, vocabulary: Any) -> Any:
        dataset = super().load(split, vocabulary)
        dataset.transform = label_some
        return dataset


def label_some(tree: Any) -> Any:
    labels = tree.y.clone()
    labels[::3] = torch.arange(tree.num_nodes)[::3] % 10
    labels[tree.root_index] = tree.y[tree.root_index]
    tree.y = labels
    return tree


class WholeSteps(pl.Callback):
    """Fails unless every epoch is one step of all processes over all examples."""

    def __init__(self, examples: int, epochs: int) -> None:
        self.examples, self.epochs = examples, epochs

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert batch_idx == 0
        shares = trainer.strategy.reduce(torch.tensor(batch.num_graphs), reduce_op="sum")
        assert int(shares) == self.examples

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert trainer.global_step == self.epochs


def trainer(folder: Path, ranks: int, start: str = "ddp_fork", **options: Any) -> pl.Trainer:
    strategy = start if ranks > 1 else "auto"
    given = {"max_epochs": 2, "precision": "64-true", "strategy": strategy, **options}
    return bare_trainer(folder, ranks, **given)


def classifier(data: TreeDataModule, reduction: str = "mean", **options: Any) -> TreeClassification:
    torch.manual_seed(3)
    given = {"cell": "nary", "arity": 5, "optimizer": OptimizerOptions("sgd", lr=0.05), **SIZES}
    return TreeClassification(
        data.num_tokens, data.num_classes, reduction=reduction, **given, **options
    )


def fitted(
    folder: Path, ranks: int, share: dict[str, int], reduction: str, **options: Any
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights after two steps, and the metrics of the second epoch."""
    data = LabelledNodes(str(folder / "data"), recipe=RECIPE, **share)
    module = classifier(data, reduction).double()  # the weights of the ranks are copied into it
    run = trainer(folder, ranks, callbacks=[WholeSteps(TRAIN, 2)], **options)
    run.fit(module, datamodule=data)
    return module.state_dict(), dict(run.callback_metrics)


def assert_same(
    alone: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    both: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
    start: dict[str, torch.Tensor],
) -> None:
    assert {"train/loss", "train/accuracy", "val/loss", "val/node_accuracy"} <= set(alone[1])
    assert both[1].keys() == alone[1].keys()
    for name, value in alone[1].items():
        torch.testing.assert_close(both[1][name], value, atol=1e-6, rtol=1e-6)
    moved = 0.0
    for name, weight in alone[0].items():
        torch.testing.assert_close(both[0][name], weight, atol=1e-12, rtol=1e-12)
        moved = max(moved, float((weight - start[name]).abs().max()))
    assert moved > 1e-3, "the steps are big enough to differ"


LOADING = [{"batch_size": 2}, pytest.param({"max_nodes": 60}, marks=pytest.mark.long)]
ALL = [(share, reduction) for reduction in ("sum", "mean", "per_tree") for share in SHARES]


@pytest.mark.parametrize(
    ("share", "reduction"),
    [pytest.param(*each, marks=[pytest.mark.long] * (n % 3 > 0)) for n, each in enumerate(ALL)],
)
def test_weights_and_metrics_are_those_of_one_process(tmp_path, share, reduction):
    alone = fitted(tmp_path, 1, SHARES[share][1], reduction)
    both = fitted(tmp_path, 2, SHARES[share][2], reduction)
    start = classifier(LabelledNodes(str(tmp_path / "data"), recipe=RECIPE)).double()
    assert_same(alone, both, start.state_dict())


class InDouble(pl.Callback):
    """Converts the features of atoms, which Lightning does not find in a batch."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        batch.x = batch.x.double()


def molecule_weights(
    folder: Path, ranks: int, kind: str, norm: str | None, lightning: bool = False, **network: Any
) -> list[Any]:
    """Return the state of the network before and after a step of plain descent, 16 molecules."""
    data = molecule_data(folder, kind, batch_size=16 // ranks)
    torch.manual_seed(3)
    sgd = OptimizerOptions("sgd", lr=0.5)
    task = property_task(data, optimizer=sgd, norm=norm, atom_norm=norm, **network).double()
    before = {name: value.clone() for name, value in task.model.network.state_dict().items()}
    options: Any = {"precision": "64-true", "sync_batchnorm": lightning, "limit_val_batches": 0}
    run = bare_trainer(folder, ranks, callbacks=[WholeSteps(16, 1), InDouble()], **options)
    run.fit(task, datamodule=data)
    return [before, dict(task.model.network.state_dict())]


NORMS = [
    *(("regression", None, {}), ("binary", "layer", {})),
    *(("binary", "batch", {"sync": True}), ("regression", "batch", {"lightning": True})),
]


@pytest.mark.parametrize(("kind", "norm", "sync"), NORMS)
def test_molecules_move_the_weights_as_in_one_process(tmp_path, kind, norm, sync):
    # Every fifth target is unknown, so that the processes differ in the number of their terms.
    before, alone = molecule_weights(tmp_path, 1, kind, norm)
    _, both = molecule_weights(tmp_path, 2, kind, norm, **sync)
    torch.testing.assert_close(both, alone, rtol=1e-10, atol=1e-10)
    moved = max(float((value - before[name]).abs().max()) for name, value in alone.items())
    assert moved > 1e-3, "big enough to differ"


def test_without_sync_every_process_has_its_own_batch_statistics(tmp_path: Path) -> None:
    _, alone = molecule_weights(tmp_path, 1, "binary", "batch")
    _, both = molecule_weights(tmp_path, 2, "binary", "batch")
    assert not torch.allclose(both["norm_atom.running_mean"], alone["norm_atom.running_mean"])


def test_synchronising_no_batch_statistics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match=r"(?s)no batch stat.*sync_batchnorm"):
        molecule_weights(tmp_path, 2, "binary", "layer", lightning=True)


@pytest.mark.parametrize("loading", LOADING)
def test_every_example_is_counted_and_predicted_once(tmp_path, loading):
    results = []
    for ranks in (1, 2):
        data = LabelledNodes(str(tmp_path / "data"), recipe=RECIPE, **loading)
        table = PredictionTable(str(tmp_path / str(ranks)), node_name="nodes.csv")
        (result,) = trainer(tmp_path, ranks).test(classifier(data), datamodule=data, verbose=False)
        run = trainer(tmp_path, ranks, callbacks=[table])
        run.predict(classifier(data), datamodule=data, return_predictions=False)
        results.append(result)
    assert results[1] == pytest.approx(results[0], abs=1e-6)
    assert set(results[0]) == {"test/loss", "test/accuracy", "test/node_accuracy"}
    files = sorted(path.name for path in (tmp_path / "2").iterdir())
    assert files == ["nodes.csv", "predictions.csv"]
    for name in files:
        assert rows_of(tmp_path / "2" / name) == rows_of(tmp_path / "1" / name)
    trees = rows_of(tmp_path / "2" / "predictions.csv")
    assert [row["example"] for row in trees] == [str(number) for number in range(TEST)]


class OwnSeeds(pl.Callback):
    """Seeds every rank differently before the loaders are made, and notes what they load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        torch.manual_seed(100 + trainer.global_rank)

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        path = self.folder / f"seen_{trainer.global_rank}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{tree.token.tolist()}\n" for tree in batch.to_data_list())


@pytest.mark.parametrize("loading", LOADING)
def test_ranks_with_seeds_of_their_own_share_one_epoch(tmp_path, loading, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = ListOpsData(str(tmp_path / "data"), recipe=RECIPE, **loading)
    run = trainer(tmp_path, 2, max_epochs=1, limit_val_batches=0, callbacks=[OwnSeeds(tmp_path)])
    run.fit(classifier(data), datamodule=data)
    seen = [
        line for rank in (0, 1) for line in (tmp_path / f"seen_{rank}.txt").read_text().splitlines()
    ]
    assert sorted(seen) == sorted(str(tree.token.tolist()) for tree in data.dataset("train"))
