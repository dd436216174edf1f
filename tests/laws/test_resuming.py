"""A run that is resumed from the end of an epoch is one that never stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.lightning import RandomState, SplitDataModule
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.nn import ChildSumTreeLSTM
from tests.molecules.molecules import molecule_data, property_task
from tests.training.helpers import FORKS, bare_trainer, listops, task
from tests.trees.helpers import chain_tree

pytestmark = [*FORKS, pytest.mark.filterwarnings("ignore:.*(persistent_workers|Experiment logs)")]


class NoisyTrees:
    """Chains whose inputs are drawn anew whenever they are read."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, number: int) -> DynTreeData:
        nodes = number % 4 + 1
        return chain_tree(nodes, x=torch.rand(nodes, 3), y=torch.full((nodes,), float(number)))


class OwnData(SplitDataModule):
    """A user's own data, split and loader."""

    def dataset(self, split: Any) -> NoisyTrees:
        return NoisyTrees()

    def sizes(self, split: Any) -> list[int]:
        return [number % 4 + 1 for number in range(13)]

    def make_loader(self, dataset: Any, batch_size: int = 1, **options: Any) -> DataLoader:
        return DataLoader(dataset, batch_size=batch_size, **options)


class OwnModel(pl.LightningModule):
    """A user's own module over a layer of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = ChildSumTreeLSTM(3, 5)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.x.to(self.dtype)
        rows = self.head(self.layer(x, batch.edge_index, batch.schedule))
        return (rows[:, 0] - batch.y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), batch_size=batch.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def trees(folder: Path, **options: Any) -> tuple[Any, Any]:
    data = listops(folder / "data", **options)
    return task(data, cell="nary", arity=5, output_dropout=0.3), data


def molecules(folder: Path, **options: Any) -> tuple[Any, Any]:
    if "max_nodes" in options:
        options["max_pairs"] = 20 * options.pop("max_nodes")
    data = molecule_data(folder, "regression", **options)
    return property_task(data, dropout=0.3), data


def own(folder: Path, **options: Any) -> tuple[Any, Any]:
    if "max_nodes" in options:
        options["budget"] = options.pop("max_nodes") // 10
    return OwnModel(), OwnData(**options)


KINDS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "trees": trees,
    "molecules": molecules,
    "own": own,
}


def run(
    folder: Path,
    kind: str,
    resume: Path | None = None,
    ranks: int = 1,
    loading: dict[str, Any] | None = None,
    **workers: Any,
) -> tuple[dict[str, Tensor], Path]:
    """Train three epochs; return the weights, and the folder of a checkpoint per epoch."""
    pl.seed_everything(4, verbose=False)
    here = folder / ("resumed" if resume else "whole")
    module, data = KINDS[kind](folder, **(loading or {}), num_workers=2 if workers else 0)
    if workers:
        options = data._loader_options
        data._loader_options = lambda: {**options(), **workers}
    keep = ModelCheckpoint(here, "{epoch}", save_top_k=-1)
    trainer = bare_trainer(
        folder, ranks, max_epochs=3, callbacks=[RandomState(), keep], enable_checkpointing=True
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if ranks > 1:  # the weights of the forked ranks
        return torch.load(here / "epoch=2.ckpt", weights_only=True)["state_dict"], here
    return module.state_dict(), here


def check(folder: Path, kind: str, epoch: int, **options: Any) -> None:
    whole, checkpoints = run(folder, kind, **options)
    resumed, _ = run(folder, kind, checkpoints / f"epoch={epoch}.ckpt", **options)
    assert whole.keys() == resumed.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
    first = torch.load(checkpoints / f"epoch={epoch}.ckpt", weights_only=True)["state_dict"]
    assert any(not torch.equal(weight, first[name]) for name, weight in whole.items())


@pytest.mark.parametrize("loading", [{"batch_size": 4}, {"max_nodes": 60}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_in_one_process(kind: str, loading: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, kind, 0, loading=loading)


# Persistent workers go on drawing from epoch to epoch, so none draw the inputs of "own" here.
WORKERS = [
    ("trees", "fork", True),
    ("molecules", "spawn", True),
    ("own", "fork", False),
    ("own", "spawn", False),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "start", "persistent"), WORKERS)
def test_with_workers(kind: str, start: str, persistent: bool, tmp_path: Path) -> None:
    workers = {"multiprocessing_context": start, "persistent_workers": persistent}
    check(tmp_path, kind, 1, loading={"batch_size": 8}, **workers)


@pytest.mark.long
@pytest.mark.parametrize("loading", [{"batch_size": 4}, {"max_nodes": 100}], ids=str)
@pytest.mark.parametrize("kind", ["trees", "molecules"])
def test_on_two_ranks(kind: str, loading: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, kind, 1, ranks=2, loading=loading)


def test_the_order_is_that_of_the_run_that_is_resumed(tmp_path: Path, monkeypatch: Any) -> None:
    """Whatever the seed of the process that resumes it is."""
    whole, checkpoints = run(tmp_path, "trees", loading={"batch_size": 4})
    seed = pl.seed_everything
    monkeypatch.setattr(pl, "seed_everything", lambda *_, **options: seed(99, **options))
    checkpoint = checkpoints / "epoch=0.ckpt"
    resumed, _ = run(tmp_path, "trees", checkpoint, loading={"batch_size": 4})
    for name, weight in whole.items():
        assert torch.equal(weight, resumed[name]), name
