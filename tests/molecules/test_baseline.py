"""Baselines: the same split, tables and pictures as a network's, and scikit-learn's own numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from pyg_dynbatch.data import MoleculeFeaturizer, MorganCounts, RDKitDescriptors
from pyg_dynbatch.datasets import FeaturizeOptions
from pyg_dynbatch.lightning import MoleculeFileData, SplitOptions
from pyg_dynbatch.molecules.nets.tabular import METHODS, TabularModel
from pyg_dynbatch.molecules.work.select import fit_tabular
from pyg_dynbatch.nn import StandardizedInputs
from tests.console import complaint, fit_small, prepare, rows_of, run
from tests.molecules.molecules import DESCRIPTORS, molecule_csv, molecule_data, property_task
from tests.test_cli_molecules import CONFIG

ensemble = pytest.importorskip("sklearn.ensemble")
linear_model = pytest.importorskip("sklearn.linear_model")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, monkeypatch, CONFIG)
    molecule_csv(tmp_path)
    return tmp_path


BOTH = [RDKitDescriptors(DESCRIPTORS), MorganCounts()]


def described(data: MoleculeFileData, part: str) -> np.ndarray:
    train, rows = (data.descriptors(each).nan_to_num(0).numpy() for each in ("train", part))
    frequent = (train > 0).sum(0) >= 5
    frequent[: len(DESCRIPTORS)] = True
    return rows[:, frequent]


def data_with(tmp_path: Path, kind: str = "regression", **options: Any) -> MoleculeFileData:
    return molecule_data(tmp_path, kind, featurizer=MoleculeFeaturizer(descriptors=BOTH), **options)


def fitted(data: MoleculeFileData, method: str) -> Any:
    """A task whose network is a model of descriptors."""
    task = property_task(data)
    task.model.network = fit_tabular(task, data, method, seed=3, trees=20)
    return task


@pytest.mark.long
def test_baselines_are_tested_as_a_network_is(folder: Path, capsys) -> None:
    fit_small(folder)
    assert run("baseline", "--run", "runs/small/version_0") == 0
    said = capsys.readouterr().out
    assert said.count("test/scaled_rmse: ") == said.count("val/scaled_rmse: ") == 3
    runs = [Path(f"runs/small/version_{number}") for number in range(4)]
    tables = [rows_of(each / "predictions.csv") for each in runs]
    facts = [[(row["row"], row["target_first"]) for row in table] for table in tables]
    assert facts[0] == facts[1] == facts[2] == facts[3] and len(facts[0]) == 8
    assert tables[0] != tables[1] != tables[2] != tables[3]
    assert all((each / "parity.png").is_file() for each in runs)
    names = [[row["task"] for row in rows_of(each / "task_metrics.csv")] for each in runs]
    assert names == [["first", "second", "mean"]] * 4
    other = ["--run", "runs/small/version_0", "--data.init_args.split.seed", "5"]
    said = complaint(capsys, "baseline", *other)
    assert "trained on a different split" in said and "best.ckpt" in said


def test_trees_are_those_of_scikit_learn(tmp_path: Path) -> None:
    data = data_with(tmp_path)
    models = {
        "forest": ensemble.ExtraTreesRegressor(20, max_features=1 / 3, random_state=3),
        "boosting": ensemble.HistGradientBoostingRegressor(
            max_iter=300, learning_rate=0.05, max_leaf_nodes=15, max_features=0.3, random_state=3
        ),
    }
    for method, model in models.items():
        task = fitted(data, method)
        scale = task.model.scale
        found = task.model.predicted(task(next(iter(data.test_dataloader()))))
        for column in range(2):
            gold = scale.scaled(data.targets("train"))[:, column].float().numpy()
            known = ~np.isnan(gold)
            expected = model.fit(described(data, "train")[known], gold[known])
            expected = expected.predict(described(data, "test"))
            expected = expected * float(scale.deviation[column]) + float(scale.mean[column])
            np.testing.assert_allclose(found[:, column], expected, rtol=1e-4, atol=1e-4)


def test_the_linear_model_is_chosen_on_validation(tmp_path: Path) -> None:
    data = data_with(tmp_path)
    task = fitted(data, "linear")
    count = len(DESCRIPTORS)
    x, held_x, test_x = (data.descriptors(part)[:, :count] for part in ("train", "val", "test"))
    scaling = StandardizedInputs(count)
    scaling.fit(x)
    scale = task.model.scale
    gold, held = (scale.scaled(data.targets(part))[:, 0].numpy() for part in ("train", "val"))
    known = ~np.isnan(gold)
    errors = {}
    for strength in (0.1, 1.0, 10.0, 100.0, 1000.0):
        ridge = linear_model.Ridge(strength).fit(scaling(x).numpy()[known], gold[known])
        errors[strength] = float(np.nanmean((ridge.predict(scaling(held_x)) - held) ** 2)), ridge
    best = min(errors, key=lambda strength: errors[strength][0])
    expected = errors[best][1].predict(scaling(test_x))
    found = task(next(iter(data.test_dataloader())))[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["binary", "multiclass"])
def test_classes_have_probabilities(tmp_path: Path, method: str, kind: str) -> None:
    data = data_with(tmp_path, kind)
    task = fitted(data, method)
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


@pytest.mark.parametrize("method", METHODS)
def test_a_property_of_one_class_is_certain(tmp_path: Path, method: str) -> None:
    data = data_with(tmp_path, "binary")
    x, y = data.descriptors("train"), data.targets("train")
    y[:, 1] = 1
    task = property_task(data)
    task.model.network = TabularModel(task.schema, method)
    task.model.network.fit((x, y), (x, y), trees=20)
    other = TabularModel(task.schema, method)
    other.load_state_dict(task.model.network.state_dict())
    for network in (task.model.network, other):
        chance = network(next(iter(data.test_dataloader()))).sigmoid()
        assert chance[:, 1].min() > 0.999 and chance[:, 0].min() < 0.999


@pytest.mark.parametrize("method", METHODS)
def test_bad_rows_that_are_kept_are_predicted_too(tmp_path: Path, method: str) -> None:
    texts = ["C" * n + "O" for n in range(1, 12)] + ["C1CC"]
    path = molecule_csv(tmp_path, smiles=texts)
    reading = FeaturizeOptions(bad="blank", progress=False)
    given: Any = {"split": SplitOptions(), "reading": reading}
    given["featurizer"] = MoleculeFeaturizer(descriptors=BOTH)
    data = MoleculeFileData(str(path), ["second"], **given)
    task = fitted(data, method)
    for split in ("train", "val", "test"):
        loader = data.make_loader(data.dataset(split), batch_size=12)
        assert bool(task(next(iter(loader))).isfinite().all())


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_restored_from_a_state(tmp_path: Path, method: str) -> None:
    data = data_with(tmp_path, "binary")
    network = fitted(data, method).model.network
    torch.save(network.state_dict(), tmp_path / "state.pt")
    other = TabularModel(network.schema, method)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    batch = next(iter(data.test_dataloader()))
    torch.testing.assert_close(other(batch), network(batch), rtol=0, atol=0)


def test_a_state_runs_no_code(tmp_path: Path) -> None:
    network = fitted(data_with(tmp_path), "linear").model.network
    network.models = [linear_model.Ridge(), partial(print, "code from a checkpoint")]
    state = network.get_extra_state()
    with pytest.raises(Exception, match=r"[Uu]ntrusted"):
        network.set_extra_state(state)


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
        options += ["--data.init_args.kind", "regression"]
        options += ["--checkpoint.mode", "max"]
        assert said in complaint(capsys, *argv, *options)


def test_what_cannot_be_measured_is_refused(folder: Path, capsys) -> None:
    assert "forest, boosting, linear" in complaint(
        capsys, "baseline", "--methods", "magic"
    ).replace("'", "")
    trees = {**CONFIG, "checkpoint": {}, "report": {}}
    trees["model"] = {"class_path": "TreeClassification", "init_args": {"hidden_channels": 4}}
    trees["data"] = {"class_path": "ListOpsData", "init_args": {"root": "listops"}}
    Path("trees.yaml").write_text(yaml.safe_dump(trees), encoding="utf-8")
    said = complaint(capsys, "baseline", "--config", "trees.yaml")
    assert "baseline: only for molecules" in said and "TreeClassification" in said
    assert not Path("listops").exists()
