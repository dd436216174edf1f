"""Train and test a model of molecular properties, some of which are unknown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.metrics import IN_UNITS, METRICS, ScoredSplit, report_test
from pyg_dynbatch.molecules.nets.properties import AveragedProperties, MoleculePropertyModel
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.nn.weave import CountedBatchNorm
from pyg_dynbatch.training.elastic import sampler_of
from pyg_dynbatch.training.exact import Rows
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import Summed, Task

RegressionLoss = Literal["mse", "l1", "huber"]

_REGRESSION_LOSSES = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


def summed_property_loss(
    output: Float[Tensor, "molecule output"],
    target: Float[Tensor, "molecule task"],
    kind: PropertyKind,
    weight: Float[Tensor, " task"],
    positive_weight: Float[Tensor, " task"],
    regression: RegressionLoss = "mse",
) -> Summed:
    """Sum the losses of the known targets, and count them, without a device sync."""
    known = ~target.isnan()
    # Replace every NaN first: 0 * NaN is NaN, in the gradients too.
    filled = torch.where(known, target, torch.zeros_like(target))
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if kind == "multiclass":
        by_class = exact.unflatten(1, (target.size(1), -1)).movedim(-1, 1)
        losses = F.cross_entropy(by_class, filled.long(), reduction="none")
    elif kind == "binary":
        losses = F.binary_cross_entropy_with_logits(
            exact, filled.to(exact), pos_weight=positive_weight.to(exact), reduction="none"
        )
    else:
        losses = _REGRESSION_LOSSES[regression](exact, filled.to(exact), reduction="none")
    weighted = torch.where(known, losses * weight.to(losses.dtype), torch.zeros_like(losses))
    return weighted.sum(), known.sum()


def balanced_positive_weight(targets: Float[Tensor, "molecule task"]) -> Float[Tensor, " task"]:
    """Compute negatives over positives; 1 for properties with a single class."""
    positives = (targets == 1).sum(0)
    negatives = (targets == 0).sum(0)
    both = (positives > 0) & (negatives > 0)
    return torch.where(both, negatives / positives.clamp(min=1), torch.ones(targets.size(1)))


def check_both_classes(target: Float[Tensor, "molecule task"], names: Sequence[str]) -> None:
    """Raise an error if no temperature can be fitted to the labels of a property."""
    for name, column in zip(names, target.unbind(1), strict=True):
        labels = column[~column.isnan()]
        if labels.unique().numel() < 2:
            what = "calibration: the validation split has no labels of both classes"
            got, hint = f"{len(labels)} equal labels of {name}", "a stratified split"
            raise mismatch(ValueError, what, "labels 0 and 1 of every property", got, hint=hint)


class MoleculeProperty(Task):
    """Train a weave network with the mean loss of the known targets.

    Regression targets, and descriptors that the head reads, are scaled to mean 0 and deviation 1
    of the training split; metrics and predictions are in the units of the data.

    Logged for training: ``loss``; for validation and test also ``rmse``, ``mae``, ``r2``,
    ``spearman``, ``scaled_rmse`` (regression), ``roc_auc``, ``prc_auc``, ``accuracy`` (binary),
    ``accuracy``, ``roc_auc`` (multiclass), each the mean over the properties for which it is
    defined, and ``tasks_counted``, the number of these. Errors in units are not averaged: several
    regressions log ``rmse_NAME`` and ``mae_NAME``, and ``scaled_rmse`` (errors divided by the
    deviation of the training targets) is the main metric.

    Args:
        schema: :meth:`~pyg_dynbatch.molecules.schema.MoleculeSchema.as_dict` of a schema; the
            command line takes it from the data module.
        loss: Loss of a regression.
        positive_weight: Weight of positive labels: ``none`` or ``balanced``, negatives over
            positives of the training split.
        task_weights: Weight of each property in the loss; all 1 by default.
        calibration: ``none`` or ``temperature``: divide the logits of each binary property by the
            temperature that makes the labels of the validation split most likely, fitted after
            each validation and kept in the checkpoint. It does not change the ranks.
        coverage: If given, predictions have intervals, or sets of classes, that hold the target
            with this probability: :class:`ConformalSets`, fitted after each validation.
        optimizer: Options of the optimizer.
        rate: Options of the learning-rate schedule.
        **network: Options of :class:`~pyg_dynbatch.models.WeaveNet`.

    Raises:
        ValueError: If the schema cannot be used, the weights do not fit the properties, or
            properties that are not binary are to be calibrated.

    Reference:
        Temperature scaling: Guo et al. (2017), arXiv:1706.04599.

    Example:
        >>> from pyg_dynbatch.molecules.features.pair_table import PairTable
        >>> table = PairTable(torch.tensor([[0.0], [1.0]]), ("bonded",), torch.tensor([0, 1]))
        >>> schema = MoleculeSchema({}, 5, table, ("logS",)).as_dict()
        >>> task = MoleculeProperty(schema, hidden=4, atom_out=4, head=[3])
        >>> task.main_metric, task.hparams["positive_weight"]
        ('rmse', 'none')
    """

    model: MoleculePropertyModel
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
        coverage: float | None = None,
        optimizer: OptimizerOptions = OptimizerOptions("adamw", 1e-3),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        model = MoleculePropertyModel(schema, coverage, **network)
        super().__init__(model, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        known = model.schema
        if calibration != "none" and known.kind != "binary":
            what = "MoleculeProperty: only labels 0 and 1 can be calibrated"
            got = f"kind: {known.kind}, calibration: {calibration}"
            raise mismatch(ValueError, what, "kind: binary, or calibration: none", got)
        weights = [1.0] * known.num_tasks if task_weights is None else task_weights
        if len(weights) != known.num_tasks or any(weight < 0 for weight in weights):
            what = "MoleculeProperty: task_weights do not fit the properties"
            raise mismatch(ValueError, what, f"{known.num_tasks} numbers, 0 or more", weights)
        self.schema = known
        self.loss: RegressionLoss = loss
        self.positive_weight = positive_weight
        self.calibration = calibration
        several = known.kind == "regression" and known.num_tasks > 1
        self.main_metric = "scaled_rmse" if several else METRICS[known.kind][0]
        self.register_buffer("positive", torch.ones(known.num_tasks))
        self.register_buffer("task_weight", torch.tensor(weights).float(), persistent=False)
        # One row per molecule: outputs, then targets, of which some are NaN.
        self.evaluated = Rows()
        self.tested: ScoredSplit | None = None

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Build a task for bonds between atoms with one feature."""
        table = PairTable(torch.eye(2)[:, 1:], ("bonded",), torch.tensor([0, 1]))
        weights = options.get("task_weights") or [1.0]
        names = tuple(data.get("targets") or map(str, range(len(weights))))
        kind = data.get("kind", "regression")
        schema = MoleculeSchema({}, 1, table, names, kind).as_dict()
        return cls.from_plain({**options, "schema": schema})

    def report_test(self, folder: Path, trees: int, resamples: int) -> None:
        """Write the table and the pictures of the last test."""
        if self.tested is not None:
            report_test(folder, self.tested, resamples)

    def metric_names(self) -> tuple[str, ...]:
        """List what the task logs during training."""
        names = ["loss", *METRICS[self.schema.kind], "tasks_counted"]
        if self.main_metric == "scaled_rmse":
            names = [name for name in names if name not in IN_UNITS]
            names += [f"{unit}_{name}" for name in self.schema.task_names for unit in IN_UNITS]
        return ("train/loss", *(f"val/{name}" for name in names))

    def setup(self, stage: str) -> None:
        """Fit the scales of targets and descriptors, and label weights, on the training split.

        A checkpoint is restored after this, so on resuming its numbers are used.
        """
        super().setup(stage)
        if stage == "fit" and getattr(self.trainer.strategy, "_layer_sync", None) is not None:
            CountedBatchNorm.synchronise(self.model.network)  # Lightning knows torch's classes only
        data: Any = getattr(self.trainer, "datamodule", None)
        if stage == "fit" and hasattr(data, "targets"):
            self.fit_targets(data.targets("train"))
            if self.calibration != "none":
                check_both_classes(data.targets("val"), self.schema.task_names)
            if self.model.conformal is not None:
                self.model.conformal.check(data.targets("val"), self.schema.task_names)
            if self.schema.descriptor_names:
                self.fit_descriptors(data.descriptors("train"))

    def on_train_start(self) -> None:
        """Check that statistics are not synchronized over a part of the virtual ranks only."""
        super().on_train_start()
        sampler = sampler_of(self.trainer)
        parts = 1 if sampler is None else sampler.batches_per_step
        norms = (each for each in self.modules() if isinstance(each, CountedBatchNorm))
        if parts > 1 and any(norm.sync for norm in norms):
            what = "MoleculeProperty: sync would use the statistics of a part of each step"
            expected = f"{parts * self.trainer.world_size} ranks, as many as virtual ranks"
            hint = "norm='layer', atom_norm=None, or no sync"
            raise mismatch(ValueError, what, expected, self.trainer.world_size, hint=hint)

    def fit_targets(self, targets: Float[Tensor, "molecule task"]) -> None:
        """Fit target scaling and label weights to targets, NaN where unknown, as ``setup`` does."""
        if self.schema.kind == "regression":
            self.model.scale.fit(targets)
            found = dict(
                zip(self.schema.task_names, self.model.scale.deviation.tolist(), strict=True)
            )
            wrong = [name for name, deviation in found.items() if not 0 < deviation < math.inf]
            if wrong:
                what = f"the numbers of the target {wrong[0]!r} are too large or too close together"
                expected = "a deviation from 1e-160 to 1e150, as it is squared"
                got = f"{found[wrong[0]]:g}"
                raise mismatch(ValueError, what, expected, got, hint="convert them to another unit")
        elif self.schema.kind == "binary" and self.positive_weight == "balanced":
            self.positive.copy_(balanced_positive_weight(targets))

    def fit_descriptors(self, descriptors: Float[Tensor, "molecule descriptor"]) -> None:
        """Fit the scale of descriptors, NaN where unknown, as ``setup`` does."""
        network: Any = self.model.network
        network.descriptors.fit(descriptors)

    def summed_loss(self, output: Tensor, batch: Batch) -> Summed:
        """Sum the losses of the known targets."""
        target = batch.y.to(output.device)
        if self.schema.kind == "regression":
            target = self.model.scale.scaled(target)
        weights = (self.task_weight, self.positive)
        return summed_property_loss(output, target, self.schema.kind, *weights, self.loss)

    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Collect outputs and targets unless they are of training."""
        if stage != "train":
            self.evaluated.update(output, batch.y.to(output.device))

    def on_validation_epoch_end(self) -> None:
        """Fit the temperatures of probabilities, and log the metrics of the validation split."""
        output, target = self._collected()
        trainer: Any = self.trainer
        trial = trainer.sanity_checking or trainer.fast_dev_run
        fitting = trainer.state.fn == "fit" and not trial
        if self.calibration != "none" and fitting:
            check_both_classes(target, self.schema.task_names)
            self.model.scale.calibrate(output, target)
        if self.model.conformal is not None and fitting:
            values = self.model.predicted(output.to(self.model.scale.mean.device))
            self.model.conformal.fit(values, target.to(values))
        self._log_scores("val", self._scored(output, target))

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the test split, and keep its predictions for tables and pictures."""
        self.tested = self._scored(*self._collected())
        self._log_scores("test", self.tested)

    def _collected(self) -> tuple[Tensor, Tensor]:
        rows, tasks = self.evaluated.compute().cpu(), self.schema.num_tasks
        self.evaluated.reset()
        return rows[:, :-tasks].float(), rows[:, -tasks:]

    def _scored(self, output: Tensor, target: Tensor) -> ScoredSplit:
        prediction = self.model.predicted(output.to(self.model.scale.mean.device)).cpu()
        deviation = self.model.scale.deviation.cpu()
        calibrated = self.schema.kind == "binary" and bool((deviation != 1).any())
        # The outputs of an average are those of calibrated members.
        raw = calibrated and not isinstance(self.model.network, AveragedProperties)
        uncalibrated = output.sigmoid() if raw else None
        measured = None if self.model.sets is None else self.model.sets.measured(prediction, target)
        return ScoredSplit(prediction, target, self.schema, deviation, uncalibrated, measured)

    def _log_scores(self, stage: str, split: ScoredSplit) -> None:
        named = split.mean
        if self.main_metric == "scaled_rmse":
            for name, scores in zip(self.schema.task_names, split.scores, strict=True):
                named |= {f"{unit}_{name}": scores[unit] for unit in IN_UNITS}
        defined = [not math.isnan(scores[self.main_metric]) for scores in split.scores]
        named["tasks_counted"] = float(sum(defined))
        if stage == "test" and split.sets:
            shares = torch.tensor([each["coverage"] for each in split.sets])
            named["coverage"] = float(shares.nanmean())
        for name, value in named.items():
            shown = name == self.main_metric
            self.log(f"{stage}/{name}", value, prog_bar=shown, sync_dist=True)

    def notes(self) -> list[str]:
        """List errors in units, and the properties that are not part of the mean."""
        if self.tested is None:
            return []
        lines = []
        if self.main_metric == "scaled_rmse":
            pairs = zip(self.schema.task_names, self.tested.scores, strict=True)
            lines = [f"test/rmse_{name}: {scores['rmse']:.4g}" for name, scores in pairs]
        if self.model.conformal is not None and self.tested.sets:
            wanted, tested = (
                self.model.conformal.coverage,
                zip(self.schema.task_names, self.tested.sets, strict=True),
            )
            parts = [f"{name} {each['coverage']:.3f}" for name, each in tested]
            lines.append(f"coverage, calibrated for {wanted}: {', '.join(parts)}")
        if missing := self.tested.left_out:
            share = f"{len(missing)} of {self.schema.num_tasks} tasks"
            lines.append(f"left out of test/{self.main_metric}: {share}: {', '.join(missing)}")
        return lines
