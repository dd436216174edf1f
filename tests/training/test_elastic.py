"""A run continues on a different number of ranks: same batches, losses, weights, random numbers."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from pyg_dynbatch.tasks import ListOpsData
from pyg_dynbatch.training import OptimizerOptions, RandomState, RateOptions
from tests.molecules.molecules import molecule_data, property_task
from tests.training.helpers import FORKS, bare_trainer, listops, task

pytestmark = [
    *FORKS,
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Seen(pl.Callback):
    """Write down the examples of every batch, its step and a random number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, number: int
    ) -> None:
        nodes = batch.x if "x" in batch else batch.token
        fingerprint = sorted(
            float(part.double().sum()) for part in nodes.split(batch.ptr.diff().tolist())
        )
        line = [trainer.global_step, fingerprint]
        with (self.folder / f"seen{trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")


def steps_of(folder: Path) -> dict[int, list[Any]]:
    """The batches of every step on all ranks, sorted."""
    steps: dict[int, list[Any]] = {}
    for path in folder.glob("seen*"):
        for line in path.read_text().splitlines():
            step, examples = json.loads(line)
            steps.setdefault(step, []).append(examples)
    return {step: sorted(batches) for step, batches in steps.items()}


def trees(folder: Path, **options: Any) -> Any:
    data = listops(folder / "data", **{"batch_size": 4, "virtual_ranks": 4, **options})
    torch.manual_seed(7)
    rates = RateOptions("cosine", warmup=3)
    steps: Any = {"optimizer": OptimizerOptions("adam", lr=0.01), "rate": rates}
    return task(data, cell="nary", arity=5, output_dropout=0.3, **steps).double(), data


def molecules(folder: Path, norm: str = "layer", **options: Any) -> Any:
    data = molecule_data(folder, "regression", **{"batch_size": 3, "virtual_ranks": 4, **options})
    torch.manual_seed(7)
    move = data.transfer_batch_to_device

    def in_double(batch: Any, *args: Any) -> Any:
        batch.x = batch.x.double()
        return move(batch, *args)

    data.transfer_batch_to_device = in_double  # type: ignore[method-assign]
    norms: Any = {"norm": norm, "atom_norm": norm, "optimizer": OptimizerOptions("sgd", lr=0.05)}
    return property_task(data, dropout=0.3, readout="sum", **norms).double(), data


def run(
    folder: Path, ranks: int, make: Any, resume: Path | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Train two epochs; return the weights, the metrics, and the folder of all checkpoints."""
    here = folder / f"{ranks}-{resume.parent.name if resume else 'all'}"
    here.mkdir()
    module, data = make
    every = ModelCheckpoint(here, "{step}", every_n_train_steps=1, save_top_k=-1, monitor=None)
    given: dict[str, Any] = {"max_epochs": 2, "precision": "64-true", **options}
    given |= {"callbacks": [RandomState(), every, Seen(here)], "enable_checkpointing": True}
    trainer = bare_trainer(folder, ranks, **given)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.state_dict(), metrics, here


def assert_equal_runs(one: Any, other: Any) -> None:
    for name, weight in one[0].items():
        torch.testing.assert_close(other[0][name], weight, rtol=1e-10, atol=1e-10)
    shared = one[1].keys() & other[1].keys()
    assert {"train/loss", "val/loss", "train/imbalance"} <= shared
    for name in shared:
        assert other[1][name] == pytest.approx(one[1][name], rel=1e-6), name


@pytest.mark.parametrize("make", [trees, pytest.param(molecules, marks=pytest.mark.long)])
def test_a_run_stopped_within_an_epoch_goes_on_with_any_number_of_ranks(
    tmp_path: Path, make: Any
) -> None:
    whole = run(tmp_path, 4, make(tmp_path))
    steps = steps_of(whole[2])
    assert all(len(batches) == 4 for batches in steps.values())
    two = run(tmp_path, 2, make(tmp_path))
    assert steps_of(two[2]) == steps
    assert_equal_runs(whole, two)
    middle = len(steps) // 2 + 1
    assert middle % (len(steps) // 2) > 0, "neither the start nor the end of an epoch"
    for ranks in (1, 4):
        rest = run(
            tmp_path, ranks, make(tmp_path, virtual_ranks=None), two[2] / f"step={middle}.ckpt"
        )
        assert steps_of(rest[2]) == {step: b for step, b in steps.items() if step >= middle}
        assert_equal_runs(whole, rest)


@pytest.mark.long
def test_batch_statistics_are_those_of_a_virtual_rank(tmp_path: Path) -> None:
    whole, alone = (run(tmp_path, ranks, molecules(tmp_path, "batch")) for ranks in (4, 1))
    assert alone[1]["train/loss"] == pytest.approx(whole[1]["train/loss"], rel=1e-6)
    different = {
        name.rpartition(".")[2]
        for name, weight in whole[0].items()
        if not torch.allclose(alone[0][name], weight, rtol=1e-10, atol=1e-10)
    }
    assert different == {"running_mean", "running_var"}


def test_one_rank_resumes_within_an_epoch(tmp_path: Path) -> None:
    whole = run(tmp_path, 1, trees(tmp_path, virtual_ranks=None))
    step = 3 * len(steps_of(whole[2])) // 4
    rest = run(tmp_path, 1, trees(tmp_path, virtual_ranks=None), whole[2] / f"step={step}.ckpt")
    for name, weight in whole[0].items():
        assert torch.equal(rest[0][name], weight), name
    assert rest[1] == whole[1]


def test_another_batch_size_waits_for_the_end_of_an_epoch(tmp_path: Path) -> None:
    first = run(tmp_path, 1, trees(tmp_path, virtual_ranks=None), max_epochs=1)
    steps = len(steps_of(first[2]))
    larger = trees(tmp_path, virtual_ranks=None, batch_size=6)
    with pytest.raises(ValueError, match=r"batch_size differs[\s\S]*at the end of an epoch"):
        run(tmp_path, 1, larger, first[2] / f"step={steps // 2}.ckpt")
    for path in tmp_path.glob(f"1-{first[2].name}/*"):
        path.unlink()
    (tmp_path / f"1-{first[2].name}").rmdir()
    second = run(tmp_path, 1, larger, first[2] / f"step={steps}.ckpt")
    assert len(steps_of(second[2])) == 10, "all of the 60 trees"


def test_by_default_the_first_run_decides(tmp_path: Path) -> None:
    whole = run(tmp_path, 2, trees(tmp_path, virtual_ranks=None))
    last = max(steps_of(whole[2]))
    alone = run(tmp_path, 1, trees(tmp_path, virtual_ranks=None), whole[2] / f"step={last}.ckpt")
    assert_equal_runs(whole, alone)
    with pytest.raises(
        torch.multiprocessing.ProcessRaisedException,
        match=r"not a multiple[\s\S]*expected: 1, 2 ranks[\s\S]*4 ranks",
    ):
        run(tmp_path, 4, trees(tmp_path, virtual_ranks=None), whole[2] / f"step={last}.ckpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 2}, r"virtual_ranks differs[\s\S]*expected: 4\s+got: +2"),
        ({"batch_size": 5}, "max_nodes differs"),
        ({"virtual_ranks": 1}, "virtual_ranks differs"),
    ],
)
def test_another_plan_is_refused(tmp_path: Path, options: Any, message: str) -> None:
    first = run(tmp_path, 1, trees(tmp_path), max_epochs=1)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, 1, trees(tmp_path, **options), first[2] / "step=2.ckpt")


class FewerTrees(ListOpsData):
    """Other data with the same words."""

    def sizes(self, split: Any) -> list[int]:
        return super().sizes(split)[::-1]


def test_changed_data_are_refused(tmp_path: Path) -> None:
    first = run(tmp_path, 1, trees(tmp_path), max_epochs=1)
    module, data = trees(tmp_path)
    data.__class__ = type("ListOpsData", (FewerTrees,), {})
    with pytest.raises(ValueError, match="cannot resume, the training data have changed"):
        run(tmp_path, 1, (module, data), first[2] / "step=2.ckpt")


def test_accumulation_counts_steps_of_all_virtual_ranks(tmp_path: Path) -> None:
    options: Any = {"accumulate_grad_batches": 2, "limit_train_batches": 2, "max_epochs": 3}
    whole = run(tmp_path, 4, trees(tmp_path), **options)
    module, data = trees(tmp_path)
    alone = run(tmp_path, 1, (module, data), **options)
    assert_equal_runs(whole, alone)
    assert sorted(steps_of(alone[2])) == [0, 1, 2]
    assert all(len(batches) == 8 for batches in steps_of(alone[2]).values())
    # The options of a trainer are multiplied once, however often it fits.
    trainer = bare_trainer(tmp_path, max_epochs=1, limit_train_batches=1)
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, datamodule=data)
        assert (trainer.accumulate_grad_batches, trainer.global_step) == (4, epochs)


def test_a_schedule_of_accumulation_is_refused(tmp_path: Path) -> None:
    module, data = trees(tmp_path)
    trainer = bare_trainer(tmp_path, callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(ValueError, match="would replace the batches of virtual ranks"):
        trainer.fit(module, datamodule=data)


def test_synchronised_statistics_of_a_part_of_a_step_are_refused(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, "regression", batch_size=3, virtual_ranks=2)
    with pytest.raises(ValueError, match=r"a part of each step[\s\S]*expected: 2 ranks"):
        bare_trainer(tmp_path).fit(
            property_task(data, sync=True, atom_norm="batch"), datamodule=data
        )
