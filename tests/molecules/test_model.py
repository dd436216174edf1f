"""The model of molecular properties: loss, scales, metrics, checkpoints, averages."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from sklearn import metrics as sklearn_metrics
from torch import Tensor
from torch_geometric.data import Batch, Data

from pyg_dynbatch.data import MoleculeFeaturizer
from pyg_dynbatch.lightning import RandomState
from pyg_dynbatch.models import MoleculeModel, MoleculeSchema, load, predict
from pyg_dynbatch.molecules.models import TargetScale
from tests.molecules.molecules import (
    DESCRIBED,
    DESCRIPTORS,
    SMALL,
    SMILES,
    fitted,
    molecule_data,
    opened,
    property_task,
)
from tests.training.helpers import assert_equal_weights, bare_trainer, last_of, trainer

NAN = math.nan
KINDS = ["regression", "binary", "multiclass"]


def model_of(kind: Any = "regression", names: tuple[str, ...] = ("one", "two"), **options: Any):
    schema = MoleculeSchema(names, kind, num_classes=3)
    return MoleculeModel(schema, **{**SMALL, **options})


def loss_of(model: MoleculeModel, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    total, terms = model.loss(output, Data(y=target.double()))
    return total, int(terms)


# Loss.


LOSSES = [("mse", F.mse_loss), ("l1", F.l1_loss), ("huber", F.smooth_l1_loss)]


@pytest.mark.parametrize(("name", "loss"), LOSSES)
def test_unknown_values_count_nowhere(name: Any, loss: Any) -> None:
    output = torch.randn(3, 2, requires_grad=True)
    target = torch.tensor([[0.5, NAN], [NAN, NAN], [1.0, -2.0]])
    total, terms = loss_of(model_of(loss_of_values=name), output, target)
    known = ~target.isnan()
    torch.testing.assert_close(total, loss(output[known], target[known], reduction="sum"))
    assert terms == 3
    (gradient,) = torch.autograd.grad(total, output)
    assert torch.equal(gradient == 0, ~known) and gradient.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_known_target_is_no_loss(kind: str) -> None:
    model = model_of(kind)
    output = torch.randn(2, model.schema.num_outputs, requires_grad=True)
    total, terms = loss_of(model, output, torch.full((2, 2), NAN))
    (gradient,) = torch.autograd.grad(total, output)
    assert (total.item(), terms, gradient.abs().sum().item()) == (0.0, 0, 0.0)


def test_classes_lie_property_after_property() -> None:
    output = torch.randn(4, 6)
    target = torch.tensor([[0.0, 2.0], [1.0, NAN], [2.0, 1.0], [NAN, 0.0]])
    total, terms = loss_of(model_of("multiclass"), output, target)
    expected = torch.zeros(())
    for task in range(2):
        known = ~target[:, task].isnan()
        logits = output[known, 3 * task : 3 * task + 3]
        expected += F.cross_entropy(logits, target[known, task].long(), reduction="sum")
    torch.testing.assert_close(total, expected)
    assert terms == 6


class Targets:
    """A training set of which only the targets are known."""

    def __init__(self, targets: list[list[float]]) -> None:
        self.targets = np.array(targets)


def test_positive_labels_are_weighted_by_their_rarity() -> None:
    model = model_of("binary", ("one", "two", "three"), positive_weight="balanced")
    model.start_from(Targets([[1, 1, 0], [0, 1, NAN], [0, NAN, NAN]]))
    assert model.positive.tolist() == [2.0, 1.0, 1.0]  # of a single class: 1
    total, _ = loss_of(model, torch.zeros(1, 3), torch.ones(1, 3))
    assert total.item() == pytest.approx(4 * math.log(2))
    plain = model_of("binary")
    plain.start_from(Targets([[1, 1], [0, 1], [0, 1]]))
    assert plain.positive.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [lambda y: y[:1], lambda y: y.unsqueeze(-1), lambda y: None])
def test_targets_of_another_shape_are_not_broadcast(kind: str, change: Any) -> None:
    model = model_of(kind)
    batch = Data(y=change(torch.zeros(4, 2)))
    with pytest.raises(ValueError, match=r"batch\.y"):
        model.loss(torch.randn(4, model.schema.num_outputs), batch)


# Scales.


def test_scale_is_that_of_the_known_targets() -> None:
    targets = torch.tensor([[1.0, 5.0, NAN], [3.0, NAN, NAN], [NAN, 5.0, NAN]])
    scale = TargetScale(3)
    scale.fit(targets, "abc")
    assert scale.mean.tolist() == [2.0, 5.0, 0.0]
    assert scale.deviation.tolist() == [1.0, 1.0, 1.0]
    restored = scale.restored(scale.scaled(targets))
    torch.testing.assert_close(restored, targets.double(), equal_nan=True)


def test_targets_whose_squares_are_out_of_range_are_refused() -> None:
    for factor in (1e-300, 1e-170, 1e200, 1.5e308):
        targets = [[1, 0], [2, factor], [3, -factor]]
        with pytest.raises(ValueError, match=r"target 'two'(?s:.*)another unit"):
            model_of().start_from(Targets(targets))


def test_descriptors_are_scaled_as_in_the_training_set(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, featurizer=DESCRIBED)
    task, _ = fitted(data, tmp_path)
    scale = task.model.net.descriptors
    assert scale.num_inputs == len(DESCRIPTORS)
    rows = torch.from_numpy(data.dataset("train").descriptors).double()
    torch.testing.assert_close(scale.mean.double(), rows.nanmean(0), rtol=1e-6, atol=0)
    assert scale.deviation[-1] == 0  # the same for all
    # Neither testing nor training goes on fits it again.
    scale.mean += 1
    marked = scale.mean.clone()
    bare_trainer(tmp_path).test(task, datamodule=data, verbose=False)
    bare_trainer(tmp_path).fit(task, datamodule=data)
    assert torch.equal(scale.mean, marked)


# Metrics.


class Batched(dict):
    """A batch with targets alone."""

    @property
    def y(self) -> Tensor:
        return self["y"]


def scored(model: MoleculeModel, output: Tensor, target: Tensor) -> dict[str, float]:
    columns = model.columns(model.values(output), Batched(y=target))
    return model.metrics({name: column.numpy() for name, column in columns.items()})


def test_metrics_of_a_regression_are_those_of_scikit_learn() -> None:
    model = model_of(names=("one",))
    output = torch.randn(40, 1)
    target = output.double() + torch.randn(40, 1)
    model.start_from(Targets(target.tolist()))
    target[::7] = NAN
    known = ~target[:, 0].isnan()
    gold = target[known, 0].numpy()
    guess = model.values(output)[known, 0].numpy()
    error = sklearn_metrics.mean_squared_error(gold, guess) ** 0.5
    ranks = [np.argsort(np.argsort(values)) for values in (gold, guess)]
    expected = {
        "rmse": error,
        "mae": sklearn_metrics.mean_absolute_error(gold, guess),
        "r2": sklearn_metrics.r2_score(gold, guess),
        "spearman": np.corrcoef(*ranks)[0, 1],
        "scaled_rmse": error / model.scale.deviation.item(),
    }
    assert scored(model, output, target) == pytest.approx(expected)


def test_metrics_of_labels_are_those_of_scikit_learn() -> None:
    output = torch.randn(60, 2).round(decimals=1)  # with ties
    target = (torch.rand(60, 2) < 0.3).double()
    target[::7, 0] = NAN
    each = []
    for task in range(2):
        known = ~target[:, task].isnan()
        gold = target[known, task].numpy()
        score = output[known, task].numpy()
        each.append(
            (
                sklearn_metrics.roc_auc_score(gold, score),
                sklearn_metrics.average_precision_score(gold, score),
                sklearn_metrics.accuracy_score(gold, score > 0),
                sklearn_metrics.accuracy_score(gold, np.zeros_like(gold)),  # most are 0
            )
        )
    names = ("roc_auc", "prc_auc", "accuracy", "majority_accuracy")
    expected = dict(zip(names, np.mean(each, 0), strict=True))
    assert scored(model_of("binary"), output, target) == pytest.approx(expected)


def test_metrics_of_classes_are_those_of_scikit_learn() -> None:
    output = torch.randn(50, 3)
    target = torch.randint(0, 3, (50, 1)).double()
    gold = target[:, 0].numpy()
    chance = output.softmax(1).numpy()
    expected = {
        "accuracy": sklearn_metrics.accuracy_score(gold, chance.argmax(1)),
        "majority_accuracy": max(np.bincount(gold.astype(int))) / 50,
        "roc_auc": sklearn_metrics.roc_auc_score(gold, chance, multi_class="ovr"),
    }
    assert scored(model_of("multiclass", ("one",)), output, target) == pytest.approx(expected)


def test_errors_of_several_units_have_no_mean() -> None:
    model = model_of()
    assert (model.monitor, model.mode) == ("scaled_rmse", "min")
    output = torch.randn(9, 2)
    target = torch.randn(9, 2).double() * torch.tensor([1, 1e6])
    model.start_from(Targets(target.tolist()))
    found = scored(model, output, target)
    assert set(found) == {
        *("rmse_one", "rmse_two", "mae_one", "mae_two"),
        *("r2", "spearman", "scaled_rmse"),
    }
    scaled = [
        found[f"rmse_{name}"] / model.scale.deviation[n] for n, name in enumerate(("one", "two"))
    ]
    assert found["scaled_rmse"] == pytest.approx(sum(scaled) / 2)


def test_what_is_not_defined_is_left_out() -> None:
    output = torch.randn(4, 2)
    target = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, NAN], [1.0, 1.0]]).double()
    found = scored(model_of("binary"), output, target)
    one = sklearn_metrics.roc_auc_score(target[:, 0], output[:, 0])
    assert found["roc_auc"] == pytest.approx(one)  # the other property has a single class
    assert scored(model_of("binary"), output, torch.full((4, 2), NAN).double()) == {}
    constant = scored(model_of(names=("one",)), output[:, :1], torch.ones(4, 1).double())
    assert set(constant) == {"rmse", "mae", "scaled_rmse"}
    ones = scored(model_of("multiclass", ("one",)), torch.randn(4, 3), torch.ones(4, 1).double())
    assert set(ones) == {"accuracy", "majority_accuracy"}


# Tables of predictions.


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_a_table(kind: str) -> None:
    model = model_of(kind)
    output = torch.randn(5, model.schema.num_outputs)
    values = model.values(output)
    columns = model.columns(values, Batched(y=torch.zeros(5, 2)), values.abs())
    by_property = values.unflatten(1, (2, -1)).unbind(1)
    for name, value in zip(("one", "two"), by_property, strict=True):
        prediction = columns[f"prediction_{name}"]
        if kind == "regression":
            assert torch.equal(prediction, value[:, 0])
        elif kind == "binary":
            assert torch.equal(columns[f"probability_{name}"], value[:, 0])
            assert torch.equal(prediction, (value[:, 0] > 0.5).long())
        else:
            torch.testing.assert_close(value.sum(1), torch.ones(5))
            assert torch.equal(prediction, value.argmax(1))
        assert columns[f"deviation_{name}"].shape == value.squeeze(1).shape
        assert columns[f"target_{name}"].shape == (5,)
    assert len(columns) == (6 if kind == "regression" else 8)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_predicts_what_the_task_did(tmp_path: Path, kind, described: bool) -> None:
    featurizer = DESCRIBED if described else MoleculeFeaturizer()
    data = molecule_data(tmp_path, kind, featurizer=featurizer)
    weight = "balanced" if data.kind == "binary" else "none"
    task = property_task(data, positive_weight=weight)
    run = trainer(tmp_path, callbacks=[])
    run.fit(task, datamodule=data)
    task.model.save(tmp_path / "saved.ckpt")
    run.save_checkpoint(tmp_path / "last.ckpt")
    bare_trainer(tmp_path).test(task, datamodule=data, verbose=False)
    molecules = data.dataset("test")
    for path in (tmp_path / "saved.ckpt", tmp_path / "last.ckpt"):
        model = load(path)
        assert_equal_weights(model.state_dict(), task.model.state_dict())
        table = predict(model, molecules)
        texts = predict(model, molecules.smiles, batch_size=3)
        for name, column in task.test_table.items():
            np.testing.assert_array_equal(table[name], column)
            if not name.startswith("target"):
                np.testing.assert_allclose(texts[name], column, rtol=1e-4, atol=1e-5)
        assert texts["smiles"].tolist() == molecules.smiles


def test_several_models_are_averaged_in_the_units_of_the_data(tmp_path: Path) -> None:
    models = [opened(tmp_path, "regression", seed, True) for seed in (1, 2)]
    models[1].scale.mean.add_(3.0)  # as if it was trained on other molecules
    alone = np.stack([predict(model, SMILES)["prediction_second"] for model in models])
    table = predict(models, SMILES, batch_size=5)
    np.testing.assert_allclose(table["prediction_second"], alone.mean(0), rtol=1e-5)
    np.testing.assert_allclose(table["deviation_second"], alone.std(0), rtol=1e-4)
    with pytest.raises(ValueError, match="different featurizer"):
        predict([models[0], opened(tmp_path, "regression")], SMILES)


def test_prediction_rests_on_the_descriptors(tmp_path: Path) -> None:
    model = opened(tmp_path, "regression", 1, True)
    molecule = model.schema.featurizer("CCO")
    before = predict(model, [molecule])["prediction_first"]
    molecule.descriptor = molecule.descriptor * 100
    assert predict(model, [molecule])["prediction_first"] != before
    with pytest.raises(ValueError, match=r"batch\.descriptor does not fit"):
        predict(model, [MoleculeFeaturizer()("CCO")])


# Training.


def each_epoch() -> ModelCheckpoint:
    return ModelCheckpoint(filename="last", save_on_train_epoch_end=True)


def test_averaged_weights(tmp_path: Path) -> None:
    data = molecule_data(tmp_path, featurizer=DESCRIBED)
    task = property_task(data)
    run = trainer(tmp_path, 2, callbacks=[EMAWeightAveraging(decay=0.5), each_epoch()])
    run.fit(task, datamodule=data)
    saved = torch.load(last_of(run), weights_only=True)
    name = "model.net.lin_atom.weight"
    assert not torch.equal(saved["state_dict"][name], saved["current_model_state"][name])
    # What the training set decides is not averaged with what was there before.
    mean = torch.from_numpy(np.nanmean(data.dataset("train").targets, 0))
    torch.testing.assert_close(saved["state_dict"]["model.scale.mean"], mean)
    assert saved["state_dict"]["model.net.descriptors.deviation"][-1] == 0


def test_a_resumed_run_equals_the_straight_one(tmp_path: Path) -> None:
    def weights_after(epochs: int, start: str | None = None) -> dict[str, Tensor]:
        torch.manual_seed(5)
        data = molecule_data(tmp_path, featurizer=DESCRIBED)
        task = property_task(data, dropout=0.2)
        run = trainer(tmp_path, epochs, callbacks=[RandomState(), each_epoch()])
        run.fit(task, datamodule=data, ckpt_path=start)
        paths.append(last_of(run))
        return task.state_dict()

    paths: list[str] = []
    weights_after(2)
    straight = weights_after(4)
    assert_equal_weights(weights_after(4, paths[0]), straight)


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("messages", ["weave", "directed"])
def test_every_precision_trains(tmp_path: Path, precision: Any, messages: str) -> None:
    data = molecule_data(tmp_path, pair_set="bonds")
    task = property_task(data, messages=messages)
    bare_trainer(tmp_path, precision=precision).fit(task, datamodule=data)
    assert all(weight.isfinite().all() for weight in task.parameters())
    assert task.model.scale.mean.dtype == torch.float64


# Options.


def test_a_model_reads_the_pairs_of_its_schema(tmp_path: Path) -> None:
    """Batches of PyG's loaders have the codes of all pairs."""
    data = molecule_data(tmp_path, pair_set=2, self_pairs=False)
    model = property_task(data).model.eval()
    molecules = list(data.dataset("train"))
    torch.testing.assert_close(
        model(Batch.from_data_list(molecules)), model(model.collater()(molecules))
    )
    for options in ({"pair_set": "all"}, {"pair_set": "bonds"}, {"self_pairs": True}):
        other = molecule_data(tmp_path, **options).schema.collater()
        with pytest.raises(ValueError, match="different pairs"):
            model(other(molecules))


REFUSED = [
    (lambda: MoleculeSchema(()), "at least one name"),
    (lambda: MoleculeSchema(("a", "a")), "all different"),
    (lambda: MoleculeSchema(("a",), "other"), "kind"),
    (lambda: MoleculeSchema(("a",), "multiclass", num_classes=1), "too few classes"),
    (lambda: MoleculeSchema(("a",), pair_set=9), "set of pairs"),
    (lambda: model_of(loss_of_values="l3"), "loss_of_values"),
    (lambda: model_of(positive_weight="all"), "positive_weight"),
    (lambda: model_of(messages="directed"), "need bonds"),
]


@pytest.mark.parametrize(("make", "word"), REFUSED)
def test_options_that_cannot_be_used(make: Any, word: str) -> None:
    with pytest.raises((ValueError, TypeError), match=word):
        make()
