"""Train and test a model of molecular properties, some of which are unknown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.metrics import (
    IN_UNITS,
    MAIN_METRIC,
    METRICS,
    PredictionBuffer,
    TestedSplit,
    left_out,
    mean_scores,
    report_test,
    scores_by_task,
)
from pyg_dynbatch.molecules.models import WeaveNet
from pyg_dynbatch.molecules.pair_table import PairTable
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import Task

RegressionLoss = Literal["mse", "l1", "huber"]

_WIDEST = math.log(20.0)
_HALVINGS = 50
_OF_REGRESSION = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


class TargetScale(nn.Module):
    """Brings targets to mean 0 and standard deviation 1, and predictions back."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_tasks))
        self.register_buffer("deviation", torch.ones(num_tasks))

    def fit(self, targets: Float[Tensor, "molecule task"]) -> None:
        """Measures mean and standard deviation of the known targets of every property."""
        exact = targets.double()
        mean = exact.nanmean(0).nan_to_num(0.0)
        deviation = (exact - mean).square().nanmean(0).nan_to_num(0.0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-8, deviation, torch.ones_like(deviation)))

    def calibrate(
        self, logits: Float[Tensor, "molecule task"], target: Float[Tensor, "molecule task"]
    ) -> None:
        """Fits the temperatures of binary properties."""
        self.deviation.copy_(1 / fitted_temperature(logits, target))

    def scaled(self, values: Float[Tensor, "molecule task"]) -> Float[Tensor, "molecule task"]:
        """Brings values to the scale of the model."""
        return (values - self.mean) / self.deviation

    def restored(self, outputs: Float[Tensor, "molecule task"]) -> Float[Tensor, "molecule task"]:
        """Brings outputs of the model to the units of the targets."""
        return outputs * self.deviation + self.mean


def known_cells(target: Float[Tensor, "molecule task"]) -> Bool[Tensor, "molecule task"]:
    """Finds the known targets."""
    return ~torch.isnan(target)


def summed_property_loss(
    output: Float[Tensor, "molecule output"],
    target: Float[Tensor, "molecule task"],
    kind: PropertyKind,
    weight: Float[Tensor, " task"],
    positive_weight: Float[Tensor, " task"],
    regression: RegressionLoss = "mse",
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    r"""Adds up the losses of the known cells, and counts them, without a device sync."""
    known = known_cells(target)
    # Put a number in the place of every NaN first: 0 * NaN is NaN, in the gradients too.
    filled = torch.where(known, target, torch.zeros_like(target))
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if kind == "regression":
        cells = _OF_REGRESSION[regression](exact, filled.to(exact.dtype), reduction="none")
    elif kind == "binary":
        cells = F.binary_cross_entropy_with_logits(
            exact,
            filled.to(exact.dtype),
            pos_weight=positive_weight.to(exact.dtype),
            reduction="none",
        )
    else:
        by_class = exact.unflatten(1, (target.size(1), -1)).movedim(-1, 1)
        cells = F.cross_entropy(by_class, filled.long(), reduction="none")
    weighted = torch.where(known, cells * weight.to(cells.dtype), torch.zeros_like(cells))
    return weighted.sum(), known.sum()


def balanced_positive_weight(targets: Float[Tensor, "molecule task"]) -> Float[Tensor, " task"]:
    """Computes the weight of a positive label that makes both classes count alike."""
    positives = (targets == 1).sum(0)
    negatives = (targets == 0).sum(0)
    both = (positives > 0) & (negatives > 0)
    return torch.where(both, negatives / positives.clamp(min=1), torch.ones(targets.size(1)))


def fitted_temperature(
    logits: Float[Tensor, "molecule task"], target: Float[Tensor, "molecule task"]
) -> Float[Tensor, " task"]:
    r"""Finds the temperatures that make the known labels most likely."""
    known = known_cells(target)
    check_both_classes(target)
    label = torch.where(known, target, 0.5).double()
    score = torch.where(known, logits.double(), 0.0)
    low = torch.full((target.size(1),), -_WIDEST, dtype=torch.float64, device=target.device)
    high = -low
    # The loss is convex in 1/T, so its slope changes sign once.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slope = (score * ((score * middle.exp()).sigmoid() - label)).sum(0)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return (-(low + high) / 2).exp().float()


def check_both_classes(
    target: Float[Tensor, "molecule task"], names: Sequence[str] | None = None
) -> None:
    """Refuses validation labels that no temperature can be fitted to."""
    both = (target == 0).any(0) & (target == 1).any(0)
    if not bool(both.all()):
        task = int((~both).nonzero()[0, 0])
        raise mismatch(
            ValueError,
            "calibration: the validation split has no labels of both classes",
            "labels 0 and 1 of every property",
            f"{int(known_cells(target)[:, task].sum())} labels, all alike",
            where=f"property {task if names is None else names[task]}",
            hint="a larger or stratified validation split, or calibration: none",
        )


def predicted_values(
    output: Float[Tensor, "molecule output"], scale: TargetScale, kind: PropertyKind, num_tasks: int
) -> Float[Tensor, "molecule output"]:
    """Turns outputs of a network into values in the units of the data, or probabilities."""
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if kind == "regression":
        return scale.restored(exact)
    if kind == "binary":
        return scale.restored(exact).sigmoid()
    return exact.unflatten(1, (num_tasks, -1)).softmax(-1).view_as(exact)


class AveragedProperties(nn.Module):
    """Averages the values or probabilities that several networks give for molecules.

    Every member was trained on the scale of its own training split; values are averaged in the
    units of the data, and what comes out can take the place of one network's outputs.

    Args:
        members: The networks, each with the scale of its targets.
        scale: Scale of the result.
        kind: Kind of the properties.
        num_tasks: Number of properties.

    Raises:
        ValueError: If there is no network.

    Example:
        >>> scale = TargetScale(1)
        >>> members = [(nn.Linear(2, 1), scale), (nn.Linear(2, 1), scale)]
        >>> AveragedProperties(members, scale, "binary", 1)(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        members: Sequence[tuple[nn.Module, TargetScale]],
        scale: TargetScale,
        kind: PropertyKind,
        num_tasks: int,
    ) -> None:
        super().__init__()
        if not members:
            raise mismatch(ValueError, "AveragedProperties: no networks", "one or more", 0)
        self.members = nn.ModuleList(network for network, _ in members)
        self.scales = nn.ModuleList(own for _, own in members)
        self.scale = scale
        self.kind: PropertyKind = kind
        self.num_tasks = num_tasks

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Averages over the members.

        Args:
            batch: What the members take.

        Returns:
            Scaled values, logits, or log-probabilities.
        """
        outputs = [member(batch) for member in self.members]
        if self.kind != "multiclass":
            scales: list[TargetScale] = list(self.scales)  # type: ignore[arg-type]
            pairs = zip(outputs, scales, strict=True)
            values = torch.stack([scale.restored(output) for output, scale in pairs])
            if self.kind == "regression":
                return self.scale.scaled(values.mean(0))
            # log(p / (1 - p)) of the mean probability, exact also where p is nearly 0 or 1.
            mean = F.logsigmoid(values).logsumexp(0) - F.logsigmoid(-values).logsumexp(0)
            return self.scale.scaled(mean)
        logs = torch.stack(outputs).unflatten(2, (self.num_tasks, -1)).log_softmax(-1)
        return (logs.logsumexp(0) - math.log(len(outputs))).view_as(outputs[0])


class MoleculeProperty(Task):
    """Trains a weave network with the mean loss of the known targets.

    Regression targets are brought to mean 0 and deviation 1 of the training split; metrics and
    predictions are in the units of the data. Logged for training: ``loss``; for validation and
    test also ``rmse``, ``mae``, ``r2``, ``spearman``, ``scaled_rmse`` (regression), ``roc_auc``,
    ``prc_auc``, ``accuracy`` (binary), ``accuracy``, ``roc_auc`` (multiclass), each the mean over
    the properties for which it is defined, and ``tasks_counted``, the number of these.
    Errors in units are not averaged: several regressions log ``rmse_NAME`` and ``mae_NAME`` and
    are judged by ``scaled_rmse``, errors divided by the deviation of the training targets.

    If the featurizer gives descriptors of whole molecules, the head reads them too, standardised
    by mean and deviation of the training split.

    Args:
        schema: How molecules become numbers, and what the properties are: what
            :meth:`~pyg_dynbatch.molecules.schema.MoleculeSchema.as_dict` gives. On the
            command line the data module tells it.
        loss: Loss of a regression.
        positive_weight: Weight of the positive labels of binary properties: ``none`` or
            ``balanced``, negatives over positives of the training split.
        task_weights: Weight of each property in the loss; left out, all 1.
        calibration: ``none``, or ``temperature``: divides the logits of each binary property by a
            number that makes the labels of the validation split most likely, fitted after each
            validation and kept in the checkpoint. Ranks stay, probabilities become honest.
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.
        **network: Everything else goes to :class:`~pyg_dynbatch.models.WeaveNet`.

    Raises:
        ValueError: If the schema cannot be used, the weights do not fit the properties, or
            properties that are not binary are to be calibrated.

    Reference:
        Temperature scaling: Guo et al. (2017), arXiv:1706.04599.

    Example:
        >>> from pyg_dynbatch.molecules.pair_table import PairTable
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> schema = MoleculeSchema({}, 5, table, ("logS",)).as_dict()
        >>> task = MoleculeProperty(schema, hidden=4, atom_out=4, head=[3])
        >>> task.main_metric, task.hparams["positive_weight"]
        ('rmse', 'none')
    """

    positive: Tensor
    task_weight: Tensor
    needs_targets = True

    def __init__(
        self,
        schema: dict[str, Any],
        loss: RegressionLoss = "mse",
        positive_weight: Literal["none", "balanced"] = "none",
        task_weights: list[float] | None = None,
        calibration: Literal["none", "temperature"] = "none",
        optimizer: OptimizerOptions = OptimizerOptions("adamw", 1e-3),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        known = MoleculeSchema.from_dict(schema)
        features = known.pair_table.features
        net = WeaveNet(
            known.atom_channels,
            known.num_outputs,
            features,
            num_descriptors=len(known.descriptor_names),
            **network,
        )
        super().__init__(net, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        self.schema = known
        self.loss: RegressionLoss = loss
        self.positive_weight = positive_weight
        self.calibration = calibration
        if calibration != "none" and known.kind != "binary":
            raise mismatch(
                ValueError,
                "MoleculeProperty: only probabilities of labels 0 and 1 can be calibrated",
                "kind: binary, or calibration: none",
                f"kind: {known.kind}, calibration: {calibration}",
            )
        several = known.kind == "regression" and known.num_tasks > 1
        self.main_metric = "scaled_rmse" if several else MAIN_METRIC[known.kind]
        self.scale = TargetScale(known.num_tasks)
        self.register_buffer("positive", torch.ones(known.num_tasks))
        weights = torch.tensor(_checked_weights(task_weights, known))
        self.register_buffer("task_weight", weights, persistent=False)
        self.val_cells = PredictionBuffer()
        self.test_cells = PredictionBuffer()
        self.tested: TestedSplit | None = None

    @classmethod
    def made_up(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Makes a task of these options for bonds between atoms with one feature."""
        table = PairTable(torch.eye(2)[:, 1:], ("bonded",), torch.tensor([0, 1]))
        weights = options.get("task_weights") or [1.0]
        names = tuple(data.get("targets") or map(str, range(len(weights))))
        kind = data.get("kind", "regression")
        schema = MoleculeSchema({}, 1, table, names, kind).as_dict()
        return cls.from_plain({**options, "schema": schema})

    def report_test(self, folder: Path, resamples: int) -> None:
        """Writes the table and the pictures of what the last test has found."""
        if self.tested is not None:
            report_test(folder, self.tested, resamples)

    def metric_names(self) -> tuple[str, ...]:
        """Lists what the task logs while it trains."""
        names = ["loss", *METRICS[self.schema.kind], "tasks_counted"]
        if self.main_metric == "scaled_rmse":
            names = [name for name in names if name not in IN_UNITS]
            names += [f"{unit}_{name}" for name in self.schema.task_names for unit in IN_UNITS]
        return ("train/loss", *(f"val/{name}" for name in names))

    def setup(self, stage: str) -> None:
        """Fits the scales of targets and descriptors, and label weights, on the training split.

        A checkpoint is restored after this, so on resuming its numbers win.

        Args:
            stage: ``fit``, ``validate``, ``test`` or ``predict``.
        """
        super().setup(stage)
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage != "fit" or not hasattr(data, "targets"):
            return
        self.fit_targets(data.targets("train"))
        if self.calibration != "none":
            check_both_classes(data.targets("val"), self.schema.task_names)
        if self.schema.descriptor_names:
            self.fit_descriptors(data.descriptors("train"))

    def fit_targets(self, targets: Float[Tensor, "molecule task"]) -> None:
        """Fits target scaling and label weights; called by itself when there is a data module.

        Args:
            targets: Targets to train on, NaN where unknown.
        """
        if self.schema.kind == "regression":
            self.scale.fit(targets)
        elif self.schema.kind == "binary" and self.positive_weight == "balanced":
            self.positive.copy_(balanced_positive_weight(targets))

    def fit_descriptors(self, descriptors: Float[Tensor, "molecule descriptor"]) -> None:
        """Fits the scale of descriptors; called by itself when there is a data module.

        Args:
            descriptors: Those of the molecules to train on, NaN where unknown.
        """
        network: Any = self.network
        network.descriptors.fit(descriptors)

    def averaged(self, members: Sequence[Any]) -> AveragedProperties:
        """Averages values in the units of the data, or probabilities."""
        parts = [(member.network, member.scale) for member in members]
        return AveragedProperties(parts, self.scale, self.schema.kind, self.schema.num_tasks)

    def predicted(
        self, output: Float[Tensor, "molecule output"]
    ) -> Float[Tensor, "molecule output"]:
        """Turns outputs of the network into values in the units of the data, or probabilities.

        Args:
            output: What the network gives.

        Returns:
            Values or probabilities.
        """
        return predicted_values(output, self.scale, self.schema.kind, self.schema.num_tasks)

    def _summed(
        self, output: Float[Tensor, "molecule output"], batch: Batch
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        target = batch.y.to(output.device)
        if self.schema.kind == "regression":
            target = self.scale.scaled(target)
        weights = (self.task_weight, self.positive)
        return summed_property_loss(output, target, self.schema.kind, *weights, self.loss)

    def _evaluate(self, batch: Batch, stage: str) -> tuple[Tensor, Tensor, Tensor]:
        output = self(batch)
        loss, terms = self._summed(output, batch)
        self.log_loss(stage, loss, terms, batch)
        return output, loss, terms

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Computes the loss of a batch; nothing in it waits for the device."""
        _, loss, terms = self._evaluate(batch, "train")
        return self.scaled_loss(loss, terms, batch, "mean")

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Collects outputs on the validation split."""
        self.val_cells.update(self._evaluate(batch, "val")[0], batch.y)

    def test_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Collects outputs on the test split."""
        self.test_cells.update(self._evaluate(batch, "test")[0], batch.y)

    def on_validation_epoch_end(self) -> None:
        """Measures the validation split, and fits the temperatures of probabilities on it."""
        output, target = self.val_cells.table(self.schema.num_tasks)
        trial = self.trainer.sanity_checking or getattr(self.trainer, "fast_dev_run", False)
        if self.calibration != "none" and self.trainer.state.fn == "fit" and not trial:
            self.scale.calibrate(output, target)
        self._log_scores("val", self._on_host(output), target)
        self.val_cells.reset()

    def on_test_epoch_end(self) -> None:
        """Measures the test split, and keeps the predictions for tables and pictures."""
        output, target = self.test_cells.table(self.schema.num_tasks)
        prediction = self._on_host(output)
        self._log_scores("test", prediction, target)
        deviation = self.scale.deviation.cpu()
        calibrated = self.schema.kind == "binary" and bool((deviation != 1).any())
        # The outputs of an average are those of calibrated members.
        raw = calibrated and not isinstance(self.network, AveragedProperties)
        uncalibrated = output.sigmoid() if raw else None
        self.tested = TestedSplit(prediction, target, self.schema, deviation, uncalibrated)
        self.test_cells.reset()

    def _on_host(self, output: Tensor) -> Tensor:
        return self.predicted(output.to(self.scale.mean.device)).cpu()

    def _log_scores(self, stage: str, prediction: Tensor, target: Tensor) -> None:
        deviation = self.scale.deviation.cpu()
        scores = scores_by_task(prediction, target, self.schema.kind, deviation)
        counted = sum(each[self.main_metric] == each[self.main_metric] for each in scores)
        means = mean_scores(scores, self.schema.kind)
        if self.main_metric == "scaled_rmse":
            for name, each in zip(self.schema.task_names, scores, strict=True):
                means |= {f"{unit}_{name}": each[unit] for unit in IN_UNITS}
        for name, value in {**means, "tasks_counted": float(counted)}.items():
            shown = name == self.main_metric
            self.log(f"{stage}/{name}", value, prog_bar=shown, sync_dist=True)

    def notes(self) -> list[str]:
        """Says what has no mean in the last test: errors in units, and what could not count.

        Returns:
            Lines to print.
        """
        if self.tested is None:
            return []
        found, names = self.tested, self.schema.task_names
        if self.main_metric == "scaled_rmse":
            scores = scores_by_task(found.prediction, found.target, "regression")
            pairs = zip(names, scores, strict=True)
            lines = [f"test/rmse_{name}: {each['rmse']:.4g}" for name, each in pairs]
        else:
            lines = []
        missing = left_out(found.target, names, self.schema.kind)
        if not missing:
            return lines
        share = f"{len(missing)} of {self.schema.num_tasks} tasks"
        return [*lines, f"left out of test/{self.main_metric}: {share}: {', '.join(missing)}"]

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> dict[str, Tensor]:
        """Gives one row a molecule.

        Returns:
            Columns ``example``; for every property ``prediction_NAME`` (the value, or the class),
            ``probability_NAME`` (of the positive class, or one column a class) and, where the
            molecules have targets, ``target_NAME``.
        """
        values = self.predicted(self(batch))
        columns = {"example": torch.arange(values.size(0), device=values.device)}
        columns.update(property_columns(values, self.schema))
        if "y" in batch:
            for task, name in enumerate(self.schema.task_names):
                columns[f"target_{name}"] = batch.y[:, task]
        return columns

    def check_origin(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Refuses weights that were trained on molecules described in another way.

        Args:
            hyper_parameters: Those of the checkpoint.

        Raises:
            ValueError: If features, pairs or properties differ.
        """
        theirs, ours = hyper_parameters.get("schema"), self.schema.as_dict()
        if theirs is None or theirs == ours:
            return
        names = [name for name in ours if _kept(theirs, name) != _kept(ours, name)]
        if not names:
            return
        found = [_difference(name, _kept(ours, name), _kept(theirs, name)) for name in names]
        raise mismatch(
            ValueError,
            "MoleculeProperty: the checkpoint was trained on molecules described differently",
            "; ".join(f"{part}: {_short(own)}" for part, own, _ in found),
            "; ".join(f"{part}: {_short(other)}" for part, _, other in found),
            hint="use the configuration the checkpoint was made with",
        )


def property_columns(
    values: Float[Tensor, "molecule output"], schema: MoleculeSchema
) -> dict[str, Tensor]:
    """Names the columns of a table of predictions."""
    columns: dict[str, Tensor] = {}
    each = values.unflatten(1, (schema.num_tasks, -1))
    for task, name in enumerate(schema.task_names):
        found = each[:, task]
        if schema.kind == "regression":
            columns[f"prediction_{name}"] = found[:, 0]
        elif schema.kind == "binary":
            columns[f"prediction_{name}"] = (found[:, 0] > 0.5).long()
            columns[f"probability_{name}"] = found[:, 0]
        else:
            columns[f"prediction_{name}"] = found.argmax(1)
            columns[f"probability_{name}"] = found
    return columns


def _kept(schema: Mapping[str, Any], name: str) -> object:
    """Leaves out which versions made the features; the featurizer warns of these itself."""
    value = schema.get(name)
    if name == "featurizer" and isinstance(value, Mapping):
        return {key: part for key, part in value.items() if key not in ("rdkit", "pyg_dynbatch")}
    return value


def _difference(name: str, own: object, other: object) -> tuple[str, object, object]:
    """Finds the first part in which two nested values differ, and names it."""
    if isinstance(own, Mapping) and isinstance(other, Mapping):
        for key in {**own, **other}:
            if own.get(key) != other.get(key):
                return _difference(f"{name}.{key}", own.get(key), other.get(key))
    return name, own, other


def _checked_weights(given: Sequence[float] | None, schema: MoleculeSchema) -> list[float]:
    weights = [1.0] * schema.num_tasks if given is None else [float(weight) for weight in given]
    if len(weights) != schema.num_tasks or any(weight < 0 for weight in weights):
        raise mismatch(
            ValueError,
            "MoleculeProperty: task_weights do not fit the properties",
            f"{schema.num_tasks} numbers, 0 or more",
            weights,
        )
    return weights


def _short(value: object, length: int = 80) -> str:
    text = str(value)
    return text if len(text) <= length else f"{text[:length]}…"
