"""Tasks: what a step divides by, what is logged, the rates, and the start of a model."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Adagrad
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_dynbatch.lightning import Task, TreeFileData, VectorOptions
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.model import evaluating
from tests.core.helpers import has_float_modes
from tests.training.conftest import Fitted
from tests.training.helpers import (
    assert_equal_weights,
    bare_trainer,
    listops,
    task,
    trainer,
    tree_files,
    weights_of,
)

SPARSE = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Forbidden(TorchDispatchMode):
    """Fails on operations whose result the host waits for."""

    waits = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "unique"}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.waits, f"{name} makes the host wait"
        return function(*args, **(kwargs or {}))


def attached(module: Task, folder: Path) -> Task:
    module.trainer = bare_trainer(folder)
    return module


@pytest.mark.parametrize("cell", ["nary", "child_sum", "gru", "rnn"])
def test_training_step_does_not_wait_for_the_device(tmp_path: Path, cell: str) -> None:
    data = tree_files(tmp_path)
    module = attached(task(data, cell=cell, polarity=True), tmp_path)
    arity = None if cell == "child_sum" else 2
    batch = next(iter(DataLoader(data.dataset("train"), 5, arity=arity)))
    with Forbidden():
        module.training_step(batch).backward()


def test_training_rounds_subnormal_numbers_to_zero(tmp_path: Path) -> None:
    """Values and gradients; afterwards the mode is what it was."""
    if not has_float_modes():
        pytest.skip("the C extension is off or missing, or this processor has no such mode")
    torch.set_flush_denormal(False)
    data = tree_files(tmp_path)
    module = attached(task(data), tmp_path)
    batch = next(iter(DataLoader(data.dataset("train"), 5)))
    found = []

    def look(*_: Any) -> None:
        found.append(bool((torch.full((3,), 1e-30) * 1e-10).any()))

    module.model.register_forward_pre_hook(look)
    next(module.model.parameters()).register_hook(look)
    module.backward(module.training_step(batch))
    look()
    assert found == [False, False, True]


@pytest.mark.parametrize("loss_on", ["nodes", "roots"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "per_example"])
def test_reductions(tmp_path: Path, loss_on: str, reduction: str) -> None:
    data = tree_files(tmp_path)
    module = attached(task(data, loss_on=loss_on, reduction=reduction), tmp_path)
    batch = next(iter(DataLoader(data.dataset("train"), 5)))
    labels = batch.y.clone()
    labels[1] = -1
    batch.y = labels
    rows = batch.root_index if loss_on == "roots" else torch.arange(batch.num_nodes)
    known = rows[labels[rows] >= 0]
    total = F.cross_entropy(module.model(batch)[known], labels[known], reduction="sum")
    divisor = {"sum": 1, "mean": len(known), "per_example": 5}[reduction]
    torch.testing.assert_close(module.training_step(batch), total / divisor)


@SPARSE
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean", "per_example"])
def test_accumulated_batches_are_one_large_batch(
    tmp_path: Path, reduction: str, sparse: bool
) -> None:
    weights = []
    for batch_size, batches in ((8, 1), (2, 4)):
        data = tree_files(tmp_path, batch_size=batch_size)
        torch.manual_seed(1)
        options = {"reduction": reduction, "sparse_embedding": sparse}
        module = task(data, partial(SGD, lr=0.05), **options)
        run = bare_trainer(
            tmp_path, accumulate_grad_batches=batches, precision="64-true", limit_val_batches=0
        )
        run.fit(module, datamodule=data)
        assert run.global_step == 3
        weights.append(weights_of(module))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-10, atol=1e-10)


def test_logged_are_loss_and_metrics_of_the_whole_split(fitted: Fitted, tmp_path: Path) -> None:
    model = fitted.task.model
    trees = list(fitted.data.dataset("test"))
    batch = model.collater()(trees)
    with evaluating(model):
        loss, terms = model.loss(model(batch), batch)
    metrics = model.metrics({name: each.numpy() for name, each in model.predict(batch).items()})
    assert set(metrics) == {
        f"{prefix}{name}"
        for prefix in ("", "node_")
        for name in ("accuracy", "majority_accuracy", "binary_accuracy")
    }
    expected = {f"test/{name}": value for name, value in metrics.items()}
    expected["test/loss"] = float(loss / terms)
    for loading in ({"batch_size": 7}, {"batch_size": 2}, {"max_size": 11}):
        data = tree_files(tmp_path, **loading)
        run = bare_trainer(tmp_path)
        (logged,) = run.test(fitted.task, datamodule=data, verbose=False)
        assert logged == pytest.approx(expected, abs=1e-6)
        assert len(fitted.task.test_table["prediction"]) == sum(data.dataset("test").sizes)


def test_a_run_learns_and_logs_its_mean_loss(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    module = task(data, partial(torch.optim.Adam, lr=0.1))
    run = trainer(tmp_path, epochs=20, check_val_every_n_epoch=20)
    run.fit(module, datamodule=data)
    assert run.callback_metrics["train/loss"] < 0.8 < math.log(5)
    assert {"val/loss", "val/accuracy", "val/node_accuracy"} <= set(run.callback_metrics)
    names = {path.stem for path in Path(run.log_dir).glob("checkpoints/*.ckpt")}
    assert names == {"best", "last"}


@pytest.mark.parametrize("loss_on", ["nodes", "roots"])
def test_training_data_without_a_label_are_refused(tmp_path: Path, loss_on: str) -> None:
    train, val = tmp_path / "train.txt", tmp_path / "val.txt"
    train.write_text("((good) (film))\n" if loss_on == "nodes" else "((1 good) (0 film))\n")
    val.write_text("(1 (1 good) (0 film))\n")
    data = TreeFileData(str(train), str(val), labels="optional", classes=2)
    module = task(data, loss_on=loss_on)
    run = trainer(tmp_path, epochs=2)
    with pytest.raises(ValueError, match="Task: there is nothing to learn from"):
        run.fit(module, datamodule=data)
    assert run.current_epoch == 0
    assert not list(tmp_path.rglob("last.ckpt"))


class Rates(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("rate", ["constant", "cosine", "one_cycle"])
def test_rates_of_all_steps(tmp_path: Path, rate: str) -> None:
    data = listops(tmp_path)
    seen = Rates()
    run = bare_trainer(tmp_path, max_epochs=5, callbacks=[seen], limit_val_batches=0)
    run.fit(task(data, rate=rate), datamodule=data)
    assert len(seen.seen) == 20
    first = {"constant": 0.01, "cosine": 0.01, "one_cycle": 0.01 / 25}[rate]
    middle = {"constant": 0.01, "cosine": 0.005, "one_cycle": None}[rate]
    assert seen.seen[0] == pytest.approx(first)
    if middle is not None:
        assert seen.seen[10] == pytest.approx(middle)
    assert max(seen.seen) == pytest.approx(0.01, rel=0.01)
    if rate != "constant":
        assert seen.seen[-1] < 0.0003
        with pytest.raises(ValueError, match=f"rate {rate} needs to know the end"):
            bare_trainer(tmp_path, max_epochs=-1).fit(task(data, rate=rate), datamodule=data)


@SPARSE
def test_word_vectors_have_options_of_their_own(tmp_path: Path) -> None:
    """Adagrad with weight decay refuses sparse gradients, so theirs is zero (Tai et al. 2015)."""
    data = tree_files(tmp_path)
    module = task(
        data,
        partial(Adagrad, lr=0.05, weight_decay=1e-4),
        sparse_embedding=True,
        embedding_options={"lr": 0.1, "weight_decay": 0.0},
    )
    run = trainer(tmp_path)
    run.fit(module, datamodule=data)
    weights, words = run.optimizers[0].param_groups
    assert (weights["lr"], weights["weight_decay"]) == (0.05, 1e-4)
    assert (words["lr"], words["weight_decay"]) == (0.1, 0.0)
    (embedding,) = words["params"]
    assert embedding is module.model.embedding.weight
    both = {id(each) for group in (weights, words) for each in group["params"]}
    assert both == {id(each) for each in module.parameters()}


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions(tmp_path: Path, precision: Any) -> None:
    data = tree_files(tmp_path)
    module = task(data, cell="nary")
    run = bare_trainer(tmp_path, max_epochs=2, precision=precision)
    run.fit(module, datamodule=data)
    assert torch.isfinite(run.callback_metrics["train/loss"])
    expected = torch.float64 if precision == "64-true" else torch.float32
    assert {weight.dtype for weight in module.parameters()} == {expected}


# The start of a model: once, before its first training.


def with_vectors(folder: Path, value: int) -> Any:
    vectors = folder / f"vectors_{value}.txt"
    words = ("good", "bad", "film", "dull", "fun")
    vectors.write_text("".join(f"{word} {value} 0 1 2 3 4\n" for word in words))
    return tree_files(folder, vectors=VectorOptions(str(vectors)))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_a_model_starts_from_the_training_set_once(tmp_path: Path) -> None:
    still = partial(SGD, lr=0.0)
    module = task(first := with_vectors(tmp_path, 7), still)
    run = trainer(tmp_path)
    run.fit(module, datamodule=first)
    assert module.model.is_started
    assert module.model.embedding.weight[1:, 0].eq(7).all()
    # Neither another run, nor a resumed one, nor one from the weights starts it again.
    other = with_vectors(tmp_path, 8)
    bare_trainer(tmp_path).fit(module, datamodule=other)
    resumed = task(other, still)
    path = Path(run.log_dir) / "checkpoints" / "last.ckpt"
    bare_trainer(tmp_path, max_epochs=2).fit(resumed, datamodule=other, ckpt_path=path)
    copied = task(other, still)
    copied.load_state_dict(module.state_dict())
    bare_trainer(tmp_path).fit(copied, datamodule=other)
    for each in (module, resumed, copied):
        assert each.model.embedding.weight[1:, 0].eq(7).all()


def test_evaluating_first_changes_nothing(tmp_path: Path) -> None:
    weights = []
    for evaluates in (False, True):
        data = with_vectors(tmp_path, 7)
        torch.manual_seed(1)
        module = task(data)
        if evaluates:
            before = weights_of(module)
            bare_trainer(tmp_path).validate(module, datamodule=data, verbose=False)
            bare_trainer(tmp_path).test(module, datamodule=data, verbose=False)
            assert_equal_weights(module.state_dict(), before)
        torch.manual_seed(3)
        bare_trainer(tmp_path).fit(module, datamodule=data)
        weights.append(weights_of(module))
    assert_equal_weights(*weights)


def test_vectors_of_another_width_are_refused(tmp_path: Path) -> None:
    data = with_vectors(tmp_path, 7)
    with pytest.raises(ValueError, match="embedding_channels: 6"):
        bare_trainer(tmp_path).fit(task(data, embedding_channels=5), datamodule=data)
