"""Training on molecules: losses, checkpoints, resuming, averages of weights and of models."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from matplotlib.figure import Figure
from torch_geometric.data import Batch

from pyg_dynbatch.datasets import Split
from pyg_dynbatch.lightning import (
    MoleculeProperty,
    PredictionTable,
    RateOptions,
    RunReport,
    SplitOptions,
    ensemble_of,
)
from pyg_dynbatch.models import MoleculePredictor, MoleculeSchema
from pyg_dynbatch.molecules.nets.properties import AveragedProperties, TargetScale
from pyg_dynbatch.molecules.task import (
    ScoredSplit,
    balanced_positive_weight,
    report_test,
    summed_property_loss,
)
from tests.console import rows_of
from tests.molecules.batches import TABLE
from tests.molecules.molecules import (
    SMALL,
    best_by,
    molecule_data,
    molecule_trainer,
    property_task,
    trained,
    with_descriptors,
)
from tests.training.helpers import last_of

RUNS = [
    ("regression", "scaled_rmse", "parity plot"),
    ("binary", "roc_auc", "calibration plot"),
    ("multiclass", "accuracy", None),
]


@pytest.mark.parametrize(("kind", "metric", "picture"), RUNS)
def test_fit_test_and_predict(tmp_path: Path, kind: str, metric: str, picture: str | None) -> None:
    data = molecule_data(tmp_path, kind)
    task = property_task(data, positive_weight="balanced")
    report, table = RunReport(), PredictionTable()
    mode = "min" if kind == "regression" else "max"
    run = molecule_trainer(tmp_path, 2, callbacks=[best_by(metric, mode), table, report])
    run.fit(task, datamodule=data)
    (result,) = run.test(task, datamodule=data, verbose=False)
    assert task.main_metric == metric
    assert result[f"test/{metric}"] == result[f"test/{metric}"]
    run.predict(task, datamodule=data, return_predictions=False)

    places = {name: path for name, path in report.places(run).items() if path.is_file()}
    expected = {"split", "learning curve", "task table", picture} - {None}
    assert set(places) == expected
    rows = rows_of(table.places(run)["predictions"])
    chosen = data.indices("test").tolist()
    assert [int(row["example"]) for row in rows] == list(range(len(chosen)))
    assert [row["smiles"] for row in rows] == [data.molecules.smiles(i) for i in chosen]
    for row, target in zip(rows, data.targets("test").tolist(), strict=True):
        written = [row["target_first"], row["target_second"]]
        assert [float(cell) if cell else None for cell in written] == [
            None if value != value else pytest.approx(value, rel=1e-5) for value in target
        ]
    if kind == "regression":
        errors = [(float(r["prediction_first"]), r["target_first"]) for r in rows]
        known = [(guess - float(gold)) ** 2 for guess, gold in errors if gold]
        first, second, mean = rows_of(places["task table"])
        assert float(first["rmse"]) == pytest.approx((sum(known) / len(known)) ** 0.5, rel=1e-3)
        # The properties have different units: of their errors there is a mean only after scaling.
        both = (first, second)
        assert "test/rmse" not in result
        assert [mean[name] for name in ("rmse", "mae")] == [""] * 2
        assert result["test/rmse_second"] == pytest.approx(float(second["rmse"]), rel=1e-3)
        pairs = zip(both, task.model.scale.deviation, strict=True)
        scaled = [float(row["rmse"]) / d for row, d in pairs]
        assert result["test/scaled_rmse"] == pytest.approx(float(sum(scaled)) / 2, rel=1e-3)
        assert float(mean["scaled_rmse"]) == pytest.approx(float(sum(scaled)) / 2, rel=1e-3)
        assert task.notes()[1] == f"test/rmse_second: {float(second['rmse']):.4g}"
    assert set(task.metric_names()) <= rows_of(Path(run.log_dir or "", "metrics.csv"))[0].keys()


def test_a_picture_of_many_tasks_says_how_many_are_left_out(tmp_path, monkeypatch):
    schema = dataclasses.replace(
        MoleculeSchema.from_dict(molecule_data(tmp_path).schema),
        task_names=tuple(f"t{number}" for number in range(15)),
        kind="binary",
    )
    target = torch.tensor([0.0, 1.0, 0.0, 1.0])[:, None].repeat(1, 15)
    target[:, 3] = torch.nan
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda _, text: titles.append(text))
    report_test(tmp_path, ScoredSplit(target.nan_to_num(0.5), target, schema))
    assert titles == ["12 of 15 properties, 1 without targets; all of them: task_metrics.csv"]


def test_resumed_run_equals_the_straight_one(tmp_path: Path) -> None:
    def run_of(epochs: int, path: str | None = None) -> str:
        torch.manual_seed(5)
        data = with_descriptors(tmp_path)
        task = property_task(data, dropout=0.2, rate=RateOptions("exponential", gamma=0.9))
        run = molecule_trainer(tmp_path, epochs)
        run.fit(task, datamodule=data, ckpt_path=path)
        return last_of(run)

    straight = torch.load(run_of(4), weights_only=True)
    resumed = torch.load(run_of(4, run_of(2)), weights_only=True)
    assert straight["epoch"] == resumed["epoch"] == 3
    for name, weight in straight["state_dict"].items():
        assert torch.equal(weight, resumed["state_dict"][name]), name


def test_averaged_weights(tmp_path: Path) -> None:
    data = with_descriptors(tmp_path)
    task = property_task(data)
    average = EMAWeightAveraging(decay=0.5)
    run = molecule_trainer(tmp_path, 2, callbacks=[average])
    run.fit(task, datamodule=data)
    saved = torch.load(last_of(run), weights_only=True)
    name = "model.network.lin_atom.weight"
    assert not torch.equal(saved["state_dict"][name], saved["current_model_state"][name])
    weights = saved["state_dict"]
    torch.testing.assert_close(weights["model.scale.mean"], data.targets("train").nanmean(0))
    mean = data.descriptors("train").double().nanmean(0).float()
    torch.testing.assert_close(weights["model.network.descriptors.mean"], mean)
    assert weights["model.network.descriptors.deviation"][-1] == 0


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        *((kind, molecule_data) for kind in ("regression", "binary", "multiclass")),
        ("regression", with_descriptors),
    ],
)
def test_ensemble_averages_in_the_units_of_the_data(tmp_path: Path, kind: str, make: Any) -> None:
    paths = [trained(tmp_path, kind, seed, make) for seed in (1, 2)]
    data = make(tmp_path, kind)
    members = MoleculePredictor(paths).models
    # A member that was trained on a different scale.
    members[1].scale.mean.add_(3.0)
    task = property_task(data)
    task.model.network = task.model.averaged(members)
    batch = next(iter(data.make_loader(data.dataset("test"), 20)))
    with torch.no_grad():
        each = [member.predicted(member(batch)) for member in members]
        found = task.model.predicted(task.eval()(batch))
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)
    assert isinstance(ensemble_of(property_task(data), paths).model.network, AveragedProperties)
    with pytest.raises(ValueError, match="AveragedProperties: no networks"):
        task.model.averaged([])


def test_checkpoint_of_molecules_described_differently(tmp_path: Path) -> None:
    path = trained(tmp_path)
    other = molecule_data(tmp_path, pairs=2)
    with pytest.raises(ValueError, match="described differently") as caught:
        ensemble_of(property_task(other), [path])
    assert "expected: pairs: 2" in str(caught.value)
    assert "got:      pairs: all" in str(caught.value)
    schema = other.schema
    schema["featurizer"] = {**schema["featurizer"], "rdkit": "1999.1"}
    property_task(other).model.check_origin({"schema": schema})  # only the version differs


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [1.0, float("nan")], [float("inf"), 1.0]])
def test_task_weights_fit_the_properties(tmp_path: Path, weights: list[float]) -> None:
    with pytest.raises(ValueError, match=r"task_weights do not fit[\s\S]*2 finite numbers >= 0"):
        property_task(molecule_data(tmp_path), task_weights=weights)


def test_properties_that_are_not_counted_are_noted(tmp_path, caplog):
    data = molecule_data(tmp_path, "binary")
    numbers = np.arange(len(data.molecules))
    # The test part has one class of the second property.
    split = Split(numbers[16:24], numbers[24:], numbers[:16], num_examples=len(numbers))
    split = split.for_molecules(data.molecules.texts()).write(tmp_path / "split.json")
    data = molecule_data(tmp_path, "binary", split=SplitOptions("file", file=str(split)))
    task = property_task(data)
    assert task.notes() == []
    run = molecule_trainer(tmp_path, callbacks=[RunReport()])
    run.test(task, datamodule=data, verbose=False)
    (line,) = task.notes()
    assert line.startswith("left out of test/roc_auc: 1 of 2 tasks: second (single class)")
    assert "left out" not in caplog.text  # the command line prints it, once


WRONG_SCHEMAS = [
    ({"task_names": []}, "the names of the properties cannot be used"),
    ({"task_names": ["a", "a"]}, "the names of the properties cannot be used"),
    ({"kind": "multiclass", "num_classes": 1}, "too few classes"),
    ({"kind": "other"}, "kind"),
]


@pytest.mark.parametrize(("change", "said"), WRONG_SCHEMAS)
def test_schema_that_cannot_be_used(tmp_path: Path, change: dict, said: str) -> None:
    schema = molecule_data(tmp_path).schema | change
    with pytest.raises((ValueError, TypeError), match=said):
        MoleculeProperty(schema)
    with pytest.raises(ValueError, match=r"does not describe molecules(?s:.)*got: +\['kind'\]"):
        MoleculeProperty({"kind": "binary"})


NAN = float("nan")
ONES = torch.ones(2)


def test_scale_is_that_of_the_known_targets() -> None:
    targets = torch.tensor([[1.0, 5.0, NAN], [3.0, NAN, NAN], [NAN, 5.0, NAN]])
    scale = TargetScale(3)
    scale.fit(targets)
    assert scale.mean.tolist() == [2.0, 5.0, 0.0]
    assert scale.deviation.tolist() == [1.0, 1.0, 1.0]
    found = scale.restored(scale.scaled(targets))
    torch.testing.assert_close(found, targets.double(), equal_nan=True)
    assert set(scale.state_dict()) == {"mean", "deviation"}


def test_targets_whose_squares_are_out_of_range_are_refused() -> None:
    schema = MoleculeSchema({}, 1, TABLE, ("one", "two"))
    task = MoleculeProperty(schema.as_dict(), **SMALL)
    for factor in (1e-300, 1e-170, 1e200, 1.5e308):
        targets = torch.tensor([[1, 0], [2, factor], [3, -factor]], dtype=torch.double)
        with pytest.raises(ValueError, match=r"target 'two'[\s\S]*another unit"):
            task.fit_targets(targets)
    task.fit_targets(targets / torch.tensor([1, 1e160], dtype=torch.double))
    with pytest.raises(ValueError, match="targets do not fit the properties"):
        task.fit_targets(targets[:, :1])


@pytest.mark.parametrize(("name", "loss"), [("mse", F.mse_loss), ("l1", F.l1_loss)])
def test_unknown_values_count_nowhere(name, loss) -> None:
    output = torch.randn(3, 2, requires_grad=True)
    target = torch.tensor([[0.5, NAN], [NAN, NAN], [1.0, -2.0]])
    total, terms = summed_property_loss(output, target, "regression", ONES, ONES, name)
    known = ~target.isnan()
    expected = loss(output[known], target[known], reduction="sum")
    torch.testing.assert_close(total, expected)
    assert terms.item() == 3
    (gradient,) = torch.autograd.grad(total, output)
    assert torch.equal(gradient == 0, ~known)
    assert torch.isfinite(gradient).all()


def test_weights_of_positives_and_of_properties_and_nothing_known() -> None:
    weights = torch.tensor([1.0, 0.5]), torch.tensor([3.0, 1.0])
    total, _ = summed_property_loss(torch.zeros(1, 2), torch.ones(1, 2), "binary", *weights)
    assert total.item() == pytest.approx(3.5 * 0.6931472)
    output = torch.randn(2, 2, requires_grad=True)
    total, terms = summed_property_loss(output, torch.full((2, 2), NAN), "binary", *weights)
    (gradient,) = torch.autograd.grad(total, output)
    assert (total.item(), terms.item(), gradient.abs().sum().item()) == (0.0, 0, 0.0)


def test_classes_lie_property_after_property() -> None:
    output = torch.randn(4, 6)
    target = torch.tensor([[0.0, 2.0], [1.0, NAN], [2.0, 1.0], [NAN, 0.0]])
    total, terms = summed_property_loss(output, target, "multiclass", ONES, ONES)
    expected = torch.zeros(())
    for task in range(2):
        known = ~target[:, task].isnan()
        logits = output[known, 3 * task : 3 * task + 3]
        expected += F.cross_entropy(logits, target[known, task].long(), reduction="sum")
    torch.testing.assert_close(total, expected)
    assert terms.item() == 6


def test_balanced_weight_of_single_classes_is_one() -> None:
    targets = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, NAN], [0.0, NAN, NAN]])
    assert balanced_positive_weight(targets).tolist() == [2.0, 1.0, 1.0]


def test_without_a_data_module_targets_are_not_standardized(tmp_path, caplog) -> None:
    data = molecule_data(tmp_path)
    task, loader = property_task(data), data.make_loader(data.dataset("train"), 4)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        molecule_trainer(tmp_path).test(task, loader, verbose=False)
    assert "targets are not standardized: no data module has targets" in caplog.text
    assert task.model.scale.deviation.eq(1).all()


def test_directed_messages_need_bonds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"need bonds[\s\S]*pairs: bonds[\s\S]*pairs: 2"):
        property_task(molecule_data(tmp_path, pairs=2), messages="directed")


def test_a_model_reads_the_pairs_of_its_schema(tmp_path: Path) -> None:
    """Batches of PyG's loaders have the codes of all pairs."""
    data = molecule_data(tmp_path, pairs=2, self_pairs=False)
    model, molecules = property_task(data).model.eval(), data.dataset("train")
    loader = data.make_loader(molecules, len(molecules))
    plain = Batch.from_data_list(list(molecules))
    torch.testing.assert_close(model(plain), model(next(iter(loader))))
    for options in ({"pairs": "all"}, {"pairs": "bonds"}, {"self_pairs": True}):
        other = data.make_loader(molecules, len(molecules), **options)
        with pytest.raises(ValueError, match="made for different pairs"):
            model(next(iter(other)))


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("messages", ["weave", "directed"])
def test_every_precision_trains(tmp_path: Path, precision: str, messages: str) -> None:
    data = molecule_data(tmp_path, pairs="bonds")
    task = property_task(data, messages=messages)
    molecule_trainer(tmp_path, precision=precision).fit(task, datamodule=data)
    assert all(torch.isfinite(each).all() for each in task.parameters())
