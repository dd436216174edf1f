"""Two processes train, measure and count what one does."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import SGD

from pyg_dynbatch.datasets import ListOps, ListOpsRecipe, SplitOptions
from pyg_dynbatch.lightning import DatasetData, Task, TreeFileData
from pyg_dynbatch.models import MoleculeModel
from tests.molecules.molecules import EVEN, SMALL, molecule_data
from tests.training.helpers import FORKS, bare_trainer, task, trainer, tree_files, weights_of

pytestmark = FORKS

TRAIN, VAL, TEST = 24, 9, 11  # an even number to train on, odd ones to measure
RECIPE = ListOpsRecipe(train=TRAIN, val=VAL, test=TEST, max_depth=4, max_length=30)


def label_some(tree: Any) -> Any:
    """Label every third node besides the roots, so that ranks differ in their labelled rows."""
    labels = tree.y.clone()
    labels[::3] = torch.arange(tree.num_nodes)[::3] % 10
    labels[tree.root_index] = tree.y[tree.root_index]
    tree.y = labels
    return tree


def labelled(**loading: Any) -> DatasetData:
    splits = ("train", "val", "test")
    return DatasetData(
        *[ListOps(None, split, recipe=RECIPE, transform=label_some) for split in splits], **loading
    )


def classifier(data: Any, **options: Any) -> Task:
    torch.manual_seed(3)
    return task(data, partial(SGD, lr=0.05), cell="nary", arity=5, **options)


class Metrics(pl.Callback):
    """Keep what the first rank has logged in a file, since a forked process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(dict(trainer.callback_metrics), self.path)


def fitted(folder: Path, ranks: int, reduction: str, batches: int, **loading: Any) -> Any:
    """Return weights before and after two epochs, and metrics."""
    data = labelled(**loading)
    module = classifier(data, reduction=reduction)
    start = weights_of(module.double())
    end, metrics = run_on_ranks(
        folder, ranks, module, data, max_epochs=2, accumulate_grad_batches=batches
    )
    return start, end, metrics


def run_on_ranks(folder: Path, ranks: int, module: Task, data: Any, **options: Any) -> Any:
    """Train in double precision, and return weights and metrics."""
    written = folder / "metrics.pt"
    run = bare_trainer(folder, ranks, precision="64-true", callbacks=[Metrics(written)], **options)
    run.fit(module, datamodule=data)
    return weights_of(module), torch.load(written, weights_only=True)


def largest_change(start: dict[str, torch.Tensor], end: dict[str, torch.Tensor]) -> float:
    return max(
        float((end[name].double() - old.double()).abs().max()) for name, old in start.items()
    )


# Per rank: batches of trees, two batches accumulated, and one batch by nodes, for which the ranks
# get about as many nodes each but not as many trees.
SHARES: dict[str, Any] = {
    "trees": ({"batch_size": 8}, {"batch_size": 4}, 1),
    "accumulated": ({"batch_size": 8}, {"batch_size": 2}, 2),
    "nodes": ({"max_size": 10**6}, {"max_size": 10**6}, 1),
}
CASES = [("trees", "mean"), ("accumulated", "per_example"), ("nodes", "sum")]
LONG = [(share, how) for share in SHARES for how in ("mean", "sum", "per_example")]


@pytest.mark.parametrize(
    ("share", "reduction"),
    [*CASES, *[pytest.param(*each, marks=pytest.mark.long) for each in LONG if each not in CASES]],
)
def test_two_ranks_are_one_of_twice_the_batch(tmp_path: Path, share: str, reduction: str) -> None:
    whole, half, batches = SHARES[share]
    start, alone, metrics = fitted(tmp_path, 1, reduction, 1, **whole)
    _, both, metrics_of_both = fitted(tmp_path, 2, reduction, batches, **half)
    assert {"train/loss", "val/loss", "val/accuracy", "val/node_accuracy"} <= set(metrics)
    torch.testing.assert_close(metrics_of_both, metrics, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(both, alone, atol=1e-10, rtol=1e-10)
    assert largest_change(start, alone) > 1e-3, "the steps are big enough to differ"


# Molecules: the atoms of a batch are normalized together, so the ranks must share statistics.


def fitted_molecules(folder: Path, ranks: int, batch_size: int, **network: Any) -> Any:
    """Return weights before one epoch of two whole batches; after it weights with running
    statistics, and metrics.
    """
    split = SplitOptions("random", seed=0, fractions=EVEN)
    pair_set = "bonds" if network.get("messages") == "directed" else "all"
    data = molecule_data(folder, batch_size=batch_size, split=split, pair_set=pair_set)
    assert len(data.dataset("train")) == 2 * ranks * batch_size
    torch.manual_seed(3)
    model = MoleculeModel(data.schema, **{**SMALL, "atom_norm": "batch", **network})
    module = Task(model.double(), partial(SGD, lr=0.1))
    start = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    end, metrics = run_on_ranks(folder, ranks, module, data, max_epochs=1)
    return start, end, metrics


NETWORKS = [{}, {"norm": "batch"}, {"readout": "histogram"}, {"messages": "directed"}]


@pytest.mark.long
@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_two_ranks_with_shared_statistics_are_one_of_twice_the_batch(
    tmp_path: Path, network: dict[str, str]
) -> None:
    start, alone, metrics = fitted_molecules(tmp_path, 1, 8, sync=True, **network)
    _, both, metrics_of_both = fitted_molecules(tmp_path, 2, 4, sync=True, **network)
    assert {"train/loss", "val/loss", "val/scaled_rmse"} <= set(metrics)
    torch.testing.assert_close(metrics_of_both, metrics, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(both, alone, atol=1e-6, rtol=1e-6)
    assert largest_change(start, alone) > 1e-3


@pytest.mark.long
def test_statistics_that_are_not_shared_make_a_difference(tmp_path: Path) -> None:
    _, alone, _ = fitted_molecules(tmp_path, 1, 8)
    _, both, _ = fitted_molecules(tmp_path, 2, 4)
    assert largest_change(alone, both) > 1e-3


LOADING = [{"batch_size": 2}, pytest.param({"max_size": 60}, marks=pytest.mark.long)]


@pytest.mark.parametrize("loading", LOADING)
def test_no_example_is_tested_twice(tmp_path: Path, loading: dict[str, int]) -> None:
    results = []
    for ranks in (1, 2):
        data = labelled(**loading)
        module = classifier(data)
        run = bare_trainer(tmp_path, ranks, precision="64-true", callbacks=[KeepTested(tmp_path)])
        (logged,) = run.test(module, datamodule=data, verbose=False)
        table = torch.load(tmp_path / "tested.pt", weights_only=True)
        results.append((logged, len(table), Counter(map(tuple, table.tolist()))))
    assert results[1][0] == pytest.approx(results[0][0], abs=1e-9)
    assert results[0][1:] == results[1][1:]
    assert results[0][1] == sum(labelled().dataset("test").sizes)


class KeepTested(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_test_end(self, trainer: pl.Trainer, module: Any) -> None:
        columns = [
            torch.from_numpy(module.test_table[name]).double() for name in ("node", "target")
        ]
        chance = torch.from_numpy(module.test_table["probability"]).round(decimals=6)
        if trainer.is_global_zero:
            torch.save(torch.column_stack([*columns, chance]), self.folder / "tested.pt")


class OwnSeeds(pl.Callback):
    """Seed every rank differently before the loaders are made, and note what they load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        torch.manual_seed(100 + trainer.global_rank)

    def on_train_batch_start(self, trainer: pl.Trainer, _: Any, batch: Any, __: int) -> None:
        path = self.folder / f"seen_{trainer.global_rank}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{tree.token.tolist()}\n" for tree in batch.to_data_list())


@pytest.mark.parametrize("loading", LOADING)
def test_ranks_with_seeds_of_their_own_share_one_epoch(
    tmp_path: Path, loading: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = labelled(**loading)
    run = bare_trainer(tmp_path, 2, limit_val_batches=0, callbacks=[OwnSeeds(tmp_path)])
    run.fit(classifier(data), datamodule=data)
    seen = "".join((tmp_path / f"seen_{rank}.txt").read_text() for rank in (0, 1)).splitlines()
    assert sorted(seen) == sorted(str(tree.token.tolist()) for tree in data.dataset("train"))


@pytest.mark.parametrize(
    "cell", ["child_sum", *[pytest.param(cell, marks=pytest.mark.long) for cell in ("nary", "gru")]]
)
def test_a_rank_with_single_nodes_only_takes_part(tmp_path: Path, cell: str) -> None:
    lines = "(1 word)\n(2 (0 a) (1 (1 b) (2 c)))\n"
    paths = [tmp_path / name for name in ("train.txt", "val.txt")]
    for path in paths:
        path.write_text(lines)
    data = TreeFileData(*map(str, paths), classes=5, batch_size=1)
    module = task(data, partial(SGD, lr=0.5), cell=cell)
    before = weights_of(module)
    bare_trainer(tmp_path, 2, max_epochs=2).fit(module, datamodule=data)
    for name, weight in module.named_parameters():
        assert torch.isfinite(weight).all()
        assert not torch.equal(weight, before[name]), name


@pytest.mark.long
def test_spawned_ranks(tmp_path: Path) -> None:
    """Everything that a run sends to a process can be pickled, and its files are found again."""
    data = tree_files(tmp_path, batch_size=4, num_workers=1)
    module = task(data)
    run = trainer(tmp_path, devices=2, strategy="ddp_spawn")
    run.fit(module, datamodule=data)
    (logged,) = run.test(module, datamodule=data, verbose=False)
    assert {"test/loss", "test/accuracy", "test/node_accuracy"} <= set(logged)
