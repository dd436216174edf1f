"""Relatedness: the divergence, the scores, and a run on pairs of trees."""

import csv
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.loader import DataLoader
from pyg_dynbatch.tasks import SICKData, TreeRelatedness
from pyg_dynbatch.training import OptimizerOptions, PredictionTable
from pyg_dynbatch.trees.models import mean_score
from tests.training.helpers import SIZES, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The variance of predictions or target is close")


def pairs(samples: Path, folder: Path, trees: str = "dependency") -> SICKData:
    raw = str(samples / "sick")
    return SICKData(str(folder / "sick"), raw_dir=raw, trees=trees, batch_size=2)


def model(data: SICKData, **options) -> TreeRelatedness:
    chosen = OptimizerOptions("adagrad", lr=0.05)
    return TreeRelatedness(data.num_tokens, optimizer=chosen, **{**SIZES, **options})


def test_loss_is_the_divergence_from_the_target(tmp_path: Path, samples: Path) -> None:
    data = pairs(samples, tmp_path)
    module = model(data)
    batch = next(iter(DataLoader(data.dataset("train"), 2)))
    module.log = lambda *args, **kwargs: None
    found = module.training_step(batch)
    log_chance = module(batch)
    wanted = 0.0
    for row, target in zip(log_chance, batch.target, strict=True):
        wanted += sum((t * (t.log() - p)).item() for p, t in zip(row, target, strict=True) if t > 0)
    assert found.item() == pytest.approx(wanted / 2, abs=1e-5)
    torch.testing.assert_close(mean_score(batch.target), batch.score)


@pytest.mark.parametrize(
    ("trees", "options"),
    [
        ("dependency", {}),
        ("constituency", {"cell": "nary", "arity": 2}),
        ("chain", {"cell": "gru"}),
    ],
)
def test_a_whole_run(tmp_path: Path, samples: Path, trees: str, options: dict) -> None:
    data = pairs(samples, tmp_path, trees)
    module = model(data, **options)
    table = PredictionTable(str(tmp_path))
    run = trainer(tmp_path, callbacks=[table], enable_checkpointing=False)
    run.fit(module, datamodule=data)
    assert {f"val/{name}" for name in ("loss", "pearson", "spearman", "mse")} <= set(
        run.callback_metrics
    )
    run.test(module, datamodule=data, verbose=False)
    run.predict(module, datamodule=data)
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "example",
        "prediction",
        *(f"probability_{k}" for k in range(1, 6)),
        "target",
    ]
    for row, example in zip(rows, data.dataset("test"), strict=True):
        assert float(row["target"]) == pytest.approx(example.score.item(), abs=1e-4)
        assert 1.0 <= float(row["prediction"]) <= 5.0
