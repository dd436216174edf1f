"""The command line: the metric that chooses the best checkpoint."""

import pytest

from pyg_dynbatch.tasks import TreeClassification, TreeRelatedness
from pyg_dynbatch.training.command import check_monitor
from tests.training.helpers import SIZES


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("val/pearson", "max"), ("val/mse", "min"), ("val/loss", "min"), ("train/loss", "min")],
)
def test_metrics_that_can_choose(monitor: str, mode: str) -> None:
    check_monitor(monitor, mode, TreeRelatedness(num_tokens=4, **SIZES))


def test_a_metric_that_is_not_logged_is_refused() -> None:
    task = TreeClassification(num_tokens=4, num_classes=3, polarity=True, **SIZES)
    check_monitor("val/binary_accuracy", "max", task)
    with pytest.raises(ValueError, match="EarlyStopping cannot choose") as caught:
        check_monitor("val/node_acuracy", "max", task, "EarlyStopping")
    assert "or one of train/loss, train/accuracy" in str(caught.value)
    assert "did you mean 'val/node_accuracy'?" in str(caught.value)
    assert "try:      --trainer.callbacks.monitor val/node_accuracy" in str(caught.value)


@pytest.mark.parametrize(
    ("monitor", "hint"),
    [
        ("val/los", "--checkpoint.monitor val/loss --checkpoint.mode min"),
        ("val/accuracy", "--checkpoint.monitor val/pearson --checkpoint.mode max"),
        ("val/loss", "--checkpoint.monitor val/loss --checkpoint.mode min"),
        ("val/mse", "--checkpoint.monitor val/mse --checkpoint.mode min"),
    ],
)
def test_metrics_that_would_choose_wrongly(monitor: str, hint: str) -> None:
    with pytest.raises(ValueError, match="cannot choose by this metric") as caught:
        check_monitor(monitor, "max", TreeRelatedness(num_tokens=4, **SIZES))
    assert f"got:      checkpoint.monitor {monitor}, checkpoint.mode max" in str(caught.value)
    assert f"try:      {hint}" in str(caught.value)
