"""Baselines: the same split, tables and pictures as a network's, and scikit-learn's own numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pyg_dynbatch.data import MorganCounts, RDKitDescriptors, parse_smiles
from pyg_dynbatch.datasets import FeaturizeOptions
from pyg_dynbatch.lightning import MoleculeFileData, SplitOptions
from pyg_dynbatch.molecules.nets.properties import TargetScale
from pyg_dynbatch.molecules.work.baseline import Baseline
from tests.console import complaint, fit_small, prepare, rows_of, run
from tests.molecules.molecules import molecule_csv, molecule_data, property_task
from tests.test_cli_molecules import CONFIG

ensemble = pytest.importorskip("sklearn.ensemble")
linear_model = pytest.importorskip("sklearn.linear_model")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch, CONFIG)
    molecule_csv(tmp_path)
    return tmp_path


def described(texts: list[str], part: Any) -> np.ndarray:
    return np.stack([part.row(parse_smiles(text)) for text in texts])


@pytest.mark.long
def test_baselines_are_tested_as_a_network_is(folder: Path, capsys) -> None:
    fit_small(folder)
    assert run("baseline", "--run", "runs/small/version_0") == 0
    said = capsys.readouterr().out
    assert said.count("test/scaled_rmse: ") == said.count("val/scaled_rmse: ") == 2
    runs = [Path(f"runs/small/version_{number}") for number in range(3)]
    tables = [rows_of(each / "predictions.csv") for each in runs]
    facts = [[(row["row"], row["target_first"]) for row in table] for table in tables]
    assert facts[0] == facts[1] == facts[2] and len(facts[0]) == 8
    assert tables[0] != tables[1] != tables[2]
    assert all((each / "parity.png").is_file() for each in runs)
    names = [[row["task"] for row in rows_of(each / "task_metrics.csv")] for each in runs]
    assert names == [["first", "second", "mean"]] * 3
    other = ["--run", "runs/small/version_0", "--data.init_args.split.seed", "5"]
    said = complaint(capsys, "baseline", *other)
    assert "trained on a different split" in said and "best.ckpt" in said


def test_the_forest_is_that_of_scikit_learn(tmp_path: Path) -> None:
    data = molecule_data(tmp_path)
    task = property_task(data)
    task.fit_targets(data.targets("train"))
    task.model.network = Baseline(data, "forest", task.model.scale, seed=3)
    batch = next(iter(data.test_dataloader()))
    found = task.model.predicted(task(batch))
    texts = [data.molecules[int(number)].smiles for number in data.indices("train")]
    for column in range(2):
        gold = task.model.scale.scaled(data.targets("train"))[:, column].float().numpy()
        known = ~np.isnan(gold)
        forest = ensemble.RandomForestRegressor(500, random_state=3)
        forest.fit(described(texts, MorganCounts())[known], gold[known])
        expected = forest.predict(described(batch.smiles, MorganCounts()))
        scale = task.model.scale
        expected = expected * float(scale.deviation[column]) + float(scale.mean[column])
        np.testing.assert_allclose(found[:, column], expected, rtol=1e-4, atol=1e-4)


def test_the_linear_model_is_chosen_on_validation(tmp_path: Path) -> None:
    data = molecule_data(tmp_path)
    scale = TargetScale(2)
    network = Baseline(data, "linear", scale)
    x = described([m.smiles for m in data.dataset("train")], RDKitDescriptors())
    mean, deviation = x.mean(0), x.std(0)
    use = deviation > 1e-6 * np.abs(x).max(0)

    def inputs(texts: list[str]) -> np.ndarray:
        rows = described(texts, RDKitDescriptors())
        return ((rows - mean) / np.where(use, deviation, 1)).clip(-3, 3) * use

    assert np.isfinite(x).all()
    gold = data.targets("train")[:, 0].numpy()
    known = ~np.isnan(gold)
    held = data.targets("val")[:, 0].numpy()
    val = inputs([m.smiles for m in data.dataset("val")])
    errors = {}
    for strength in (0.1, 1.0, 10.0, 100.0, 1000.0):
        ridge = linear_model.Ridge(strength).fit(
            inputs([m.smiles for m in data.dataset("train")])[known], gold[known]
        )
        errors[strength] = float(np.nanmean((ridge.predict(val) - held) ** 2)), ridge
    best = min(errors, key=lambda strength: errors[strength][0])
    batch = next(iter(data.test_dataloader()))
    expected = errors[best][1].predict(inputs(batch.smiles))
    np.testing.assert_allclose(network(batch)[:, 0], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["forest", "linear"])
@pytest.mark.parametrize("kind", ["binary", "multiclass"])
def test_classes_have_probabilities(tmp_path: Path, method: str, kind: str) -> None:
    data = molecule_data(tmp_path, kind)
    task = property_task(data)
    task.model.network = Baseline(data, method, task.model.scale)
    batch = next(iter(data.train_dataloader()))
    chance = task.model.predicted(task(batch))
    classes = 3 if kind == "multiclass" else 1
    assert chance.shape == (8, 2 * classes)
    assert bool(((chance >= 0) & (chance <= 1)).all())
    if kind == "multiclass":
        torch.testing.assert_close(chance.unflatten(1, (2, 3)).sum(2), torch.ones(8, 2))
        # The second property has only the classes 0 and 1.
        assert chance.unflatten(1, (2, 3))[:, 1, 2].max() < 1e-4
    elif method == "forest":  # which has learned its training labels
        known = batch.y_mask
        assert bool(((chance > 0.5) == (batch.y == 1))[known].double().mean() > 0.9)


@pytest.mark.parametrize("method", ["forest", "linear"])
def test_bad_rows_that_are_kept_are_predicted_too(tmp_path: Path, method: str) -> None:
    texts = ["C" * n + "O" for n in range(1, 12)] + ["C1CC"]
    path = molecule_csv(tmp_path, smiles=texts)
    reading = FeaturizeOptions(bad="blank", progress=False)
    data = MoleculeFileData(str(path), ["second"], split=SplitOptions(), reading=reading)
    network = Baseline(data, method, TargetScale(1))
    for split in ("train", "val", "test"):
        loader = data.make_loader(data.dataset(split), batch_size=12)
        assert bool(network(next(iter(loader))).isfinite().all())


@pytest.mark.parametrize(
    "command",
    [
        "fit",
        "baseline --methods linear",
        pytest.param("repeat --times 2 --baselines", marks=pytest.mark.long),
    ],
)
def test_targets_that_cannot_be_learned_are_refused(folder: Path, command: str, capsys) -> None:
    parts = ("train", "train", "val", "test")
    rows = [f"{'C' * n},{n % 2},{n if n % 4 > 1 else ''},{n},{parts[n % 4]}" for n in range(1, 17)]
    text = "\n".join(["smiles,label,late,known,part", *rows])
    Path("regression.csv").write_text(text, encoding="utf-8")
    split = "--data.init_args.split.method column --data.init_args.split.column part"
    argv = [*command.split(), "--config", "small.yaml", *split.split()]
    for targets, said in (
        ("[label]", "the targets are labels, not values"),
        ("[late]", "the training split has no target of a property"),
        ("[known,late]", "got: none of late"),
        ("[known,known]", "all different; got: known, known"),
    ):
        options = ["--data.init_args.targets", targets, "--checkpoint.monitor", "val/r2"]
        options += ["--checkpoint.mode", "max"]
        assert said in complaint(capsys, *argv, *options)


def test_what_cannot_be_measured_is_refused(folder: Path, capsys) -> None:
    assert "forest, linear" in complaint(capsys, "baseline", "--methods", "magic").replace("'", "")
    trees = {**CONFIG, "checkpoint": {}, "report": {}}
    trees["model"] = {"class_path": "TreeClassification", "init_args": {"hidden_channels": 4}}
    trees["data"] = {"class_path": "ListOpsData", "init_args": {"root": "listops"}}
    Path("trees.yaml").write_text(yaml.safe_dump(trees), encoding="utf-8")
    said = complaint(capsys, "baseline", "--config", "trees.yaml")
    assert "baseline: only for molecules" in said and "TreeClassification" in said
    assert not Path("listops").exists()
