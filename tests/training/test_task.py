"""Tasks: losses, logged names, checkpoints, no waiting for the device, metrics to choose by."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.tuner import Tuner
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_dynbatch.lightning import (
    OptimizerOptions,
    RateOptions,
    TreeClassification,
    TreeRelatedness,
)
from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.training.command import check_monitor
from tests.training.helpers import SIZES, last_of, listops, task, trainer, tree_files


def batch_of(data, count: int = 5):
    return next(iter(DataLoader(data.dataset("train"), count)))


@pytest.mark.parametrize("loss_on", ["nodes", "roots"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "per_tree"])
def test_reductions(tmp_path: Path, loss_on: str, reduction: str) -> None:
    data = tree_files(tmp_path)
    module = task(data, loss_on=loss_on, reduction=reduction)
    batch = batch_of(data)
    module.eval()
    labels = batch.y.clone()
    labels[1] = -1
    batch.y = labels
    logits = module(batch)
    rows = batch.root_index if loss_on == "roots" else torch.arange(batch.num_nodes)
    known = rows[labels[rows] >= 0]
    losses = F.cross_entropy(logits[known], labels[known], reduction="none")
    divisor = {"sum": 1, "mean": len(known), "per_tree": 5}[reduction]
    loss, terms = module.summed_loss(logits, batch)
    found = module.scaled_loss(loss, terms, batch, module.reduction)
    torch.testing.assert_close(found, losses.sum() / divisor)


class Forbidden(TorchDispatchMode):
    """Fails on operations whose result the host waits for."""

    waits = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "unique"}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in self.waits, f"{name} makes the host wait"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cell", ["nary", "child_sum", "gru", "rnn"])
def test_training_step_does_not_wait_for_the_device(tmp_path: Path, cell: str) -> None:
    data = tree_files(tmp_path)
    module = task(data, cell=cell, polarity=True)
    arity = None if cell == "child_sum" else 2
    batch = next(iter(DataLoader(data.dataset("train"), 5, arity=arity)))
    module.log = lambda *args, **kwargs: None
    with Forbidden():
        module.training_step(batch).backward()


def test_all_metrics_are_logged_with_the_values_of_the_whole_split(tmp_path: Path) -> None:
    data = tree_files(tmp_path, batch_size=4)
    module = task(data, polarity=True)
    run = trainer(tmp_path)
    run.fit(module, datamodule=data)
    names = {"loss", "accuracy", "node_accuracy", "binary_accuracy", "node_binary_accuracy"}
    wanted = {f"{stage}/{name}" for stage in ("train", "val") for name in names}
    assert wanted <= set(run.callback_metrics)
    (result,) = run.test(module, datamodule=data, verbose=False)
    assert set(result) == {f"test/{name}" for name in names}
    batch = next(iter(DataLoader(data.dataset("test"), 7)))
    module.eval()
    with torch.no_grad():
        logits = module(batch)
    hit = logits.argmax(-1) == batch.y
    assert result["test/node_accuracy"] == pytest.approx(hit.float().mean().item())
    assert result["test/accuracy"] == pytest.approx(hit[batch.root_index].float().mean().item())
    assert result["test/loss"] == pytest.approx(F.cross_entropy(logits, batch.y).item())


def test_the_model_learns(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    module = task(data, optimizer=OptimizerOptions("adam", lr=0.1))
    run = trainer(tmp_path, epochs=20, check_val_every_n_epoch=20)
    run.fit(module, datamodule=data)
    assert run.callback_metrics["train/accuracy"] > 0.9


def test_hyper_parameters_are_plain_and_rebuild_the_model(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    module = task(
        data,
        optimizer=OptimizerOptions("adagrad", 0.1, embedding="sgd"),
        rate=RateOptions("exponential", gamma=0.9),
        loss_on="roots",
        sparse_embedding=True,
    )
    run = trainer(tmp_path)
    run.fit(module, datamodule=data)
    path = last_of(run)
    saved = torch.load(path, weights_only=True)
    assert saved["hyper_parameters"]["optimizer"]["embedding"] == "sgd"
    assert saved["hyper_parameters"]["hidden_channels"] == SIZES["hidden_channels"]
    again = TreeClassification.load_from_checkpoint(path, weights_only=True)
    assert again.optimizer_options == module.optimizer_options
    assert again.rate_options == module.rate_options
    assert again.loss_on == "roots"
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])


def test_checkpoint_of_a_different_model_or_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    data, other = tree_files(tmp_path / "a"), tree_files(tmp_path / "b")
    swapped = (tmp_path / "b" / "train.txt").read_text().replace("good", "great")
    (tmp_path / "b" / "train.txt").write_text(swapped)
    run = trainer(tmp_path)
    run.fit(task(data), datamodule=data)
    path = last_of(run)
    for change in ({"hidden_channels": 9}, {"cell": "gru"}):
        with pytest.raises(ValueError, match="belongs to a different model") as caught:
            trainer(tmp_path).test(task(data, **change), datamodule=data, ckpt_path=path)
        assert f"where:    {next(iter(change))}" in str(caught.value)
        assert "try:      use the configuration" in str(caught.value)
    with pytest.raises(ValueError, match="belongs to a different model") as caught:
        task(data).model.check({"pyg_dynbatch_task": "TreeRelatedness", "state_dict": {}})
    assert "got:      a checkpoint of TreeRelatedness" in str(caught.value)
    with pytest.raises(ValueError, match=r"was made with a different vocabulary[\s\S]*6 words"):
        trainer(tmp_path).test(task(other), datamodule=other, ckpt_path=path)


def test_polarity_needs_a_middle() -> None:
    with pytest.raises(ValueError, match="polarity needs a neutral middle class"):
        TreeClassification(4, 4, polarity=True, **SIZES)


@pytest.mark.parametrize("name", ["step", "exponential", "cosine", "constant"])
def test_schedules_run_in_a_trainer(tmp_path: Path, name: str) -> None:
    data = listops(tmp_path)
    module = task(data, rate=RateOptions(name, gamma=0.5, warmup=2))
    run = trainer(tmp_path, epochs=2)
    run.fit(module, datamodule=data)
    rate = run.optimizers[0].param_groups[0]["lr"]
    wanted = {"step": 0.01 * 0.25, "exponential": 0.01 * 0.25, "cosine": 0.0, "constant": 0.01}
    assert rate == pytest.approx(wanted[name], abs=1e-12)


def test_sparse_gradients_cannot_be_clipped(tmp_path: Path) -> None:
    data = listops(tmp_path)
    options = OptimizerOptions("adagrad")
    sparse = task(data, optimizer=options, sparse_embedding=True)
    with pytest.raises(ValueError, match="cannot clip the sparse gradients") as caught:
        trainer(tmp_path, gradient_clip_val=1.0).fit(sparse, datamodule=data)
    assert "sparse_embedding false" in str(caught.value)
    trainer(tmp_path, gradient_clip_val=1.0).fit(task(data, optimizer=options), datamodule=data)


def test_mixed_precision(tmp_path: Path) -> None:
    data = tree_files(tmp_path)
    module = task(data, cell="nary")
    run = trainer(tmp_path, epochs=2, precision="bf16-mixed")
    run.fit(module, datamodule=data)
    assert torch.isfinite(run.callback_metrics["train/loss"])
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}


def test_learning_rate_finder_sets_the_rate_and_leaves_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where Lightning keeps its checkpoint meanwhile
    data = listops(tmp_path)
    module, run = task(data), trainer(tmp_path, epochs=5)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    found = Tuner(run).lr_find(module, datamodule=data, num_training=20)
    assert found is not None
    assert module.lr == module.hparams["optimizer"]["lr"] == found.suggestion() != 0.01
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_metric_that_is_not_logged_is_refused() -> None:
    task = TreeClassification(num_tokens=4, num_classes=3, polarity=True, **SIZES)
    check_monitor("val/binary_accuracy", "max", task)
    for monitor, mode in (("val/pearson", "max"), ("val/mse", "min"), ("train/loss", "min")):
        check_monitor(monitor, mode, TreeRelatedness(num_tokens=4, **SIZES))
    with pytest.raises(ValueError, match="EarlyStopping cannot choose") as caught:
        check_monitor("val/node_acuracy", "max", task, "EarlyStopping")
    assert "or one of train/loss, train/accuracy" in str(caught.value)
    assert "did you mean 'val/node_accuracy'?" in str(caught.value)
    assert "try:      --trainer.callbacks.monitor val/node_accuracy" in str(caught.value)


WRONG_METRICS = [
    ("val/los", "--checkpoint.monitor val/loss --checkpoint.mode min"),
    ("val/accuracy", "--checkpoint.monitor val/pearson --checkpoint.mode max"),
    ("val/loss", "--checkpoint.monitor val/loss --checkpoint.mode min"),
    ("val/mse", "--checkpoint.monitor val/mse --checkpoint.mode min"),
]


@pytest.mark.parametrize(("monitor", "hint"), WRONG_METRICS)
def test_metrics_that_would_choose_wrongly(monitor: str, hint: str) -> None:
    with pytest.raises(ValueError, match="cannot choose by this metric") as caught:
        check_monitor(monitor, "max", TreeRelatedness(num_tokens=4, **SIZES))
    assert f"got:      checkpoint.monitor {monitor}, checkpoint.mode max" in str(caught.value)
    assert f"try:      {hint}" in str(caught.value)
