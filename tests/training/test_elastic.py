"""A run continues on a different number of ranks: same batches, losses, weights, random numbers."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint

from pyg_dynbatch.lightning import LastCheckpoint, OptimizerOptions, RandomState, RateOptions
from tests.molecules.molecules import molecule_data, property_task
from tests.training.helpers import FORKS, bare_trainer, checkpointing, listops, task, trainer

pytestmark = FORKS


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


def note_losses(module: Any, folder: Path) -> None:
    """Write down step, summed loss and terms of every training batch, in full precision."""
    evaluate = module.evaluate

    def noted(batch: Any, stage: str) -> Any:
        loss, terms = evaluate(batch, stage)
        if stage == "train":
            with (folder / f"loss{module.global_rank}").open("a") as file:
                file.write(json.dumps([module.global_step, loss.item(), terms.item()]) + "\n")
        return loss, terms

    module.evaluate = noted


def losses_of(folder: Path) -> dict[int, float]:
    """The mean loss of every step over all ranks."""
    sums: dict[int, Any] = {}
    for path in folder.glob("loss*"):
        for line in path.read_text().splitlines():
            step, *found = json.loads(line)
            sums[step] = np.add(sums.get(step, 0), found)
    return {step: loss / max(1, terms) for step, (loss, terms) in sums.items()}


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
    options = {"norm": norm, "atom_norm": norm if norm == "batch" else None}
    if norm == "batch":  # Adam would scale up the rounding of gradients that are zero
        options |= {"optimizer": OptimizerOptions("sgd", lr=0.05), "readout": "sum"}
    return property_task(data, dropout=0.3, **options).double(), data


def run(
    folder: Path, ranks: int, make: Any, resume: Path | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, Any], Path]:
    """Train two epochs; return the weights, the metrics, and the folder of all checkpoints."""
    here = folder / f"{ranks}-{resume.parent.name if resume else 'all'}"
    here.mkdir()
    module, data = make
    note_losses(module, here)
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
    losses = losses_of(other[2])
    expected = {step: loss for step, loss in losses_of(one[2]).items() if step in losses}
    assert losses == pytest.approx(expected, rel=1e-10, abs=0)
    assert losses.keys() == steps_of(other[2]).keys()
    shared = one[1].keys() & other[1].keys()
    assert {"train/loss", "val/loss", "train/imbalance"} <= shared
    for name in shared:
        assert other[1][name] == pytest.approx(one[1][name], rel=1e-6), name


@pytest.mark.long
@pytest.mark.parametrize("make", [trees, molecules])
def test_a_run_stopped_within_an_epoch_goes_on_with_any_number_of_ranks(tmp_path, make):
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


@pytest.mark.long
def test_a_rank_may_have_no_labelled_rows(tmp_path: Path) -> None:
    def make() -> Any:
        module, data = trees(tmp_path)
        evaluate = module.evaluate

        def in_some_batches(batch: Any, stage: str) -> Any:
            loss, terms = evaluate(batch, stage)
            labelled = batch.token.sum() % 4 == 0
            return loss * labelled, terms * labelled

        module.evaluate = in_some_batches
        return module, data

    one, two = (run(tmp_path, ranks, make(), max_epochs=1) for ranks in (1, 2))
    assert_equal_runs(one, two)


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


@pytest.mark.long
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


def test_another_plan_is_refused(tmp_path: Path) -> None:
    first = run(tmp_path, 1, trees(tmp_path), max_epochs=1)
    with pytest.raises(ValueError, match=r"virtual_ranks differs[\s\S]*expected: 4\s+got: +2"):
        run(tmp_path, 1, trees(tmp_path, virtual_ranks=2), first[2] / "step=2.ckpt")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_was_not_finished_is_repeated(tmp_path: Path, ranks: int) -> None:
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if args[-1] == 10:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    options: Any = {"accumulate_grad_batches": 3, "max_epochs": 2}
    given: Any = {"virtual_ranks": None, "batch_size": 2}
    whole = run(tmp_path, ranks, trees(tmp_path, **given), **options)
    module, data = trees(tmp_path, **given)
    stopped = bare_trainer(tmp_path, ranks, precision="64-true", **{**options, "max_epochs": 1})
    stopped.callbacks += [RandomState(), Save()]  # type: ignore[attr-defined]
    stopped.fit(module, datamodule=data)
    rest = run(tmp_path, ranks, trees(tmp_path, **given), tmp_path / "middle.ckpt", **options)
    assert steps_of(rest[2]) == {s: b for s, b in steps_of(whole[2]).items() if s >= 3}
    if ranks > 1:  # one virtual rank continues the random numbers, of the repeated batches too
        for name, weight in whole[0].items():
            torch.testing.assert_close(rest[0][name], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("limit", [0.4, pytest.param(2, marks=pytest.mark.long)])
def test_limits_are_of_steps(tmp_path: Path, limit: float) -> None:
    options: Any = {"limit_train_batches": limit, "val_check_interval": 0.5, "max_epochs": 2}
    whole, alone = (run(tmp_path, ranks, trees(tmp_path), **options) for ranks in (4, 1))
    assert steps_of(whole[2]) == steps_of(alone[2])
    assert_equal_runs(whole, alone)
    # The checkpoint at the end of an epoch that was cut short begins the next one.
    middle = len(steps_of(whole[2])) // 2
    rest = run(tmp_path, 2, trees(tmp_path), whole[2] / f"step={middle}.ckpt", **options)
    assert steps_of(rest[2]) == {s: b for s, b in steps_of(whole[2]).items() if s >= middle}
    assert_equal_runs(whole, rest)


@pytest.mark.long
def test_an_interrupted_step_leaves_nothing_behind(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise RuntimeError("stop")

    module, data = trees(tmp_path)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"):
        bare_trainer(tmp_path, callbacks=[Stop()]).fit(module, datamodule=data)
    module.load_state_dict(before)
    torch.manual_seed(7)
    again = run(tmp_path, 1, (module, data))
    assert_equal_runs(again, run(tmp_path, 2, trees(tmp_path)))


def test_a_loader_without_its_data_module_needs_accumulation(tmp_path: Path) -> None:
    module, data = trees(tmp_path)
    trainer = bare_trainer(tmp_path, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"not accumulated[\s\S]*accumulate_grad_batches=4"):
        trainer.fit(module, data.train_dataloader(), data.val_dataloader())


def test_last_checkpoint_of_an_epoch_is_written_at_its_end(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("stop")

    def fit(name: str, *stop: pl.Callback, resume: str | None = None) -> pl.Trainer:
        module, data = trees(tmp_path, virtual_ranks=None)
        (tmp_path / name).mkdir(exist_ok=True)
        keep = [checkpointing(), LastCheckpoint(every_n_train_steps=1), RandomState(), *stop]
        run = trainer(tmp_path / name, 2, precision="64-true", callbacks=keep)
        run.fit(module, datamodule=data, ckpt_path=resume)
        return run

    with pytest.raises(RuntimeError, match="stop"):
        fit("stopped", Stop())
    (last,) = (tmp_path / "stopped").rglob("last.ckpt")
    contents = torch.load(last, weights_only=True)
    best = next(state for key, state in contents["callbacks"].items() if "'monitor'" in key)
    assert best["best_model_path"], "the validation of the epoch comes before"
    whole, rest = fit("whole"), fit("rest", resume=str(last))
    shared = whole.callback_metrics.keys() - {"train/nodes", "train/imbalance"}
    for name in shared:
        assert rest.callback_metrics[name] == whole.callback_metrics[name], name


@pytest.mark.long
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
    with pytest.raises(ValueError, match="would override that over virtual ranks"):
        trainer.fit(module, datamodule=data)


def test_synchronised_statistics_of_a_part_of_a_step_are_refused(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, "regression", batch_size=3, virtual_ranks=2)
    with pytest.raises(ValueError, match=r"a part of each step[\s\S]*expected: 2 ranks"):
        bare_trainer(tmp_path).fit(
            property_task(data, sync=True, atom_norm="batch"), datamodule=data
        )
