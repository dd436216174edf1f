"""Train and test a model of molecular properties, some of which are unknown."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import checked_shape, mismatch
from pyg_dynbatch.molecules.features.pair_table import PairTable
from pyg_dynbatch.molecules.nets.properties import MoleculePropertyModel
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind, check_same
from pyg_dynbatch.nn.weave import CountedBatchNorm
from pyg_dynbatch.prediction import Columns, naming_file, read_checkpoint, write_table
from pyg_dynbatch.training.optimizers import OptimizerOptions, RateOptions
from pyg_dynbatch.training.runs import FILES, panels
from pyg_dynbatch.training.task import (
    Rows,
    Summed,
    Task,
    average_precision,
    r2,
    rmse,
    roc_auc,
    spearman,
    varies,
)
from pyg_dynbatch.visualize import draw_calibration, draw_parity, save_figure

# Metrics ------------------------------------------------------------------------------------------


METRICS: dict[PropertyKind, tuple[str, ...]] = {
    "regression": ("rmse", "mae", "r2", "spearman", "scaled_rmse"),
    "binary": ("roc_auc", "prc_auc", "accuracy"),
    "multiclass": ("accuracy", "roc_auc"),
}
"""Names of all metrics by kind of property; the first is the main one."""

IN_UNITS = ("rmse", "mae")
"""Metrics in the unit of their property, of which several properties have no mean."""

_NAN = float("nan")
_MOST_DRAWN, _MOST_SAID = 12, 5


def property_scores(
    prediction: Float[Tensor, "molecule number"],
    target: Float[Tensor, " molecule"],
    kind: PropertyKind,
    deviation: float = 1.0,
) -> dict[str, float]:
    """Measure the predictions of one property; NaN where a metric is not defined."""
    known = ~torch.isnan(target)
    guess, gold = (each[known].double().cpu().numpy() for each in (prediction, target))
    scores = dict.fromkeys(METRICS[kind], _NAN)
    if gold.size == 0:
        return scores
    if kind == "regression":
        guess = guess[:, 0]
        scores["rmse"] = rmse(guess, gold)
        scores["scaled_rmse"] = scores["rmse"] / deviation
        scores["mae"] = float(np.abs(guess - gold).mean())
        scores["r2"], scores["spearman"] = r2(guess, gold), spearman(guess, gold)
    elif kind == "binary":
        scores["accuracy"] = float(((guess[:, 0] > 0.5) == (gold == 1)).mean())
        if varies(gold):
            scores["roc_auc"] = roc_auc(guess[:, 0], gold == 1)
            scores["prc_auc"] = average_precision(guess[:, 0], gold == 1)
    else:
        scores["accuracy"] = float((guess.argmax(1) == gold).mean())
        # The mean over the classes for which the area is defined.
        classes = [c for c in range(guess.shape[1]) if varies(gold == c)]
        areas = [roc_auc(guess[:, c], gold == c) for c in classes]
        scores["roc_auc"] = float(np.mean(areas)) if areas else _NAN
    return scores


@dataclass(frozen=True)
class ScoredSplit:
    """Predictions of a split, in the units of the data or as probabilities, and their scores."""

    prediction: Float[Tensor, "molecule output"]
    target: Float[Tensor, "molecule task"]  # NaN where unknown
    schema: MoleculeSchema
    deviation: Float[Tensor, " task"] | None = None  # of the training targets

    @cached_property
    def scores(self) -> list[dict[str, float]]:
        """The metrics of every property."""
        tasks, kind = self.schema.num_tasks, self.schema.kind
        units = [1.0] * tasks if self.deviation is None else self.deviation.tolist()
        each = self.prediction.unflatten(1, (tasks, -1)).unbind(1)
        parts = zip(each, self.target.unbind(1), units, strict=True)
        return [property_scores(guess, gold, kind, unit) for guess, gold, unit in parts]

    @property
    def mean(self) -> dict[str, float]:
        """The mean of every metric over the properties for which it is defined."""
        several = len(self.scores) > 1
        names = [n for n in METRICS[self.schema.kind] if not (several and n in IN_UNITS)]
        rows = [[found[n] for n in names] for found in self.scores]
        means = torch.tensor(rows, dtype=torch.double).nanmean(0)
        return dict(zip(names, means.tolist(), strict=True))

    @property
    def status(self) -> list[str]:
        """``counted``, or why a property is not part of the mean."""
        found = []
        for column in self.target.unbind(1):
            known = column[~column.isnan()].numpy()
            single = self.schema.kind == "binary" and not varies(known)
            found.append("no target" if not known.size else "single class" if single else "counted")
        return found

    @property
    def left_out(self) -> list[str]:
        """The properties that are not part of the mean, and why."""
        pairs = zip(self.schema.task_names, self.status, strict=True)
        return [f"{name} ({status})" for name, status in pairs if status != "counted"]


def task_table(split: ScoredSplit) -> Columns:
    """Tabulate the metrics of every property and their mean."""
    schema = split.schema
    known = (~split.target.isnan()).sum(0).tolist()
    ones = (split.target == 1).sum(0).tolist()
    positives = ones if schema.kind == "binary" else [""] * schema.num_tasks
    facts = zip(schema.task_names, known, positives, split.status, strict=True)
    names = "task", "molecules", "positives", "status"
    rows: list[dict[str, Any]] = [
        {**dict(zip(names, own, strict=True)), **scores}
        for own, scores in zip(facts, split.scores, strict=True)
    ]
    if schema.num_tasks > 1:
        mean_row = {"task": "mean", "molecules": sum(known), "positives": "", "status": "counted"}
        rows.append({**mean_row, **split.mean})
    # Errors in different units have no mean.
    return {name: np.array([row.get(name, _NAN) for row in rows], dtype=object) for name in rows[0]}


def report_test(folder: Path, split: ScoredSplit) -> None:
    """Write the table of properties and draw parity (regression) or calibration (binary)."""
    table = task_table(split)
    write_table(folder / FILES["task table"], table)
    schema, main = split.schema, METRICS[split.schema.kind][0]
    known = [task for task in range(schema.num_tasks) if table["molecules"][task]]
    drawn = known[:_MOST_DRAWN]
    if schema.kind == "multiclass" or not drawn:
        return
    figure, axes = panels(len(drawn), 4, 3.8, 3.8)
    gold, guess = split.target.double().numpy(), split.prediction.double().numpy()
    for panel, task in zip(axes, drawn, strict=True):
        score, status = table[main][task], table["status"][task]
        found = status if np.isnan(score) else f"{main} {score:.4g}"
        title = f"{table['task'][task]}\n{found}, {table['molecules'][task]:,} molecules"
        if schema.kind == "regression":
            draw_parity(panel, gold[:, task], guess[:, task], title)
        else:
            draw_calibration(panel, gold[:, task], guess[:, task], title)
    if len(drawn) < schema.num_tasks:
        unknown = schema.num_tasks - len(known)
        without = f", {unknown} without targets" if unknown else ""
        share = f"{len(drawn)} of {schema.num_tasks} properties"
        figure.suptitle(f"{share}{without}; all of them: {FILES['task table']}")
    picture = "parity plot" if schema.kind == "regression" else "calibration plot"
    save_figure(figure, folder / FILES[picture])


# Training -----------------------------------------------------------------------------------------


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


class MoleculeProperty(Task):
    """Train a network with the mean loss of the known targets.

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
        optimizer: Options of the optimizer.
        rate: Options of the learning-rate schedule.
        **network: Options of :class:`~pyg_dynbatch.models.WeaveNet`.

    Raises:
        ValueError: If the schema cannot be used, or the weights do not fit the properties.

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
        optimizer: OptimizerOptions = OptimizerOptions("adamw", 1e-3),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        model = MoleculePropertyModel(schema, **network)
        super().__init__(model, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        known = model.schema
        weights = [1.0] * known.num_tasks if task_weights is None else task_weights
        if len(weights) != known.num_tasks or not all(0 <= weight < math.inf for weight in weights):
            what = "MoleculeProperty: task_weights do not fit the properties"
            raise mismatch(ValueError, what, f"{known.num_tasks} finite numbers >= 0", weights)
        self.schema = known
        self.loss: RegressionLoss = loss
        self.positive_weight = positive_weight
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
        schema = MoleculeSchema({}, 1, table, names, kind, pairs=data.get("pairs", "all")).as_dict()
        return cls.from_plain({**options, "schema": schema})

    def report_test(self, folder: Path, trees: int) -> None:
        """Write the table and the pictures of the last test."""
        if self.tested is not None:
            report_test(folder, self.tested)

    def metric_names(self) -> tuple[str, ...]:
        """List what the task logs during training."""
        names = ["loss", *METRICS[self.schema.kind], "tasks_counted"]
        if self.main_metric == "scaled_rmse":
            names = [name for name in names if name not in IN_UNITS]
            names += [f"{unit}_{name}" for name in self.schema.task_names for unit in IN_UNITS]
        return ("train/loss", *(f"val/{name}" for name in names))

    def setup(self, stage: str) -> None:
        """Prepare the layers for several ranks."""
        super().setup(stage)
        if stage == "fit" and getattr(self.trainer.strategy, "_layer_sync", None) is not None:
            CountedBatchNorm.synchronise(self.model.network)  # Lightning knows torch's classes only

    def start_from(self, data: Any) -> None:
        """Fit the scales of targets and descriptors, and label weights, on the training split."""
        super().start_from(data)
        if hasattr(data, "targets"):
            self.fit_targets(data.targets("train"))
            if self.schema.kind == "regression":
                scale = self.model.scale
                each = zip(self.schema.task_names, scale.mean, scale.deviation, strict=True)
                parts = [f"{name} (mean {m:.4g}, deviation {d:.4g})" for name, m, d in each]
                more = ", …" * (len(parts) > _MOST_SAID)
                rank_zero_info(f"targets are standardized: {', '.join(parts[:_MOST_SAID])}{more}")
            if getattr(self.model.network, "descriptors", None) is not None:
                self.fit_descriptors(data.descriptors("train"))
        elif self.schema.kind == "regression" and self.model.scale.deviation.eq(1).all():
            rank_zero_info("targets are not standardized: no data module has targets to train on")

    def fit_targets(self, targets: Float[Tensor, "molecule task"]) -> None:
        """Fit target scaling and label weights to targets, NaN where unknown, as ``fit`` does."""
        what = "MoleculeProperty: the targets do not fit the properties"
        checked_shape(what, targets, (len(targets), self.schema.num_tasks))
        if self.schema.kind == "regression":
            self.model.scale.fit(targets)
            deviations = self.model.scale.deviation.tolist()
            found = dict(zip(self.schema.task_names, deviations, strict=True))
            wrong = [name for name, deviation in found.items() if not 0 < deviation < math.inf]
            if wrong:
                what = f"the numbers of the target {wrong[0]!r} are too large or too close together"
                expected = "a deviation from 1e-160 to 1e150, as it is squared"
                got = f"{found[wrong[0]]:g}"
                raise mismatch(ValueError, what, expected, got, hint="convert them to another unit")
        elif self.schema.kind == "binary" and self.positive_weight == "balanced":
            self.positive.copy_(balanced_positive_weight(targets))

    def fit_descriptors(self, descriptors: Float[Tensor, "molecule descriptor"]) -> None:
        """Fit the scale of descriptors, NaN where unknown, as ``fit`` does."""
        network: Any = self.model.network
        network.descriptors.fit(descriptors)

    def summed_loss(self, output: Tensor, batch: Batch) -> Summed:
        """Sum the losses of the known targets."""
        target = self.target(batch, len(output), self.schema.num_tasks).to(output.device)
        if self.schema.kind == "regression":
            target = self.model.scale.scaled(target)
        weights = (self.task_weight, self.positive)
        return summed_property_loss(output, target, self.schema.kind, *weights, self.loss)

    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Collect outputs and targets unless they are of training."""
        if stage != "train":
            self.evaluated.update(output, batch.y.to(output.device))

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the validation split."""
        self._log_scores("val", self._scored(*self._collected()))

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
        return ScoredSplit(prediction, target, self.schema, self.model.scale.deviation.cpu())

    def _log_scores(self, stage: str, split: ScoredSplit) -> None:
        named = split.mean
        if self.main_metric == "scaled_rmse":
            for name, scores in zip(self.schema.task_names, split.scores, strict=True):
                named |= {f"{unit}_{name}": scores[unit] for unit in IN_UNITS}
        defined = [not math.isnan(scores[self.main_metric]) for scores in split.scores]
        named["tasks_counted"] = float(sum(defined))
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
        if missing := self.tested.left_out:
            share = f"{len(missing)} of {self.schema.num_tasks} tasks"
            lines.append(f"left out of test/{self.main_metric}: {share}: {', '.join(missing)}")
        return lines


# Pretrained encoders ------------------------------------------------------------------------------


_PARTS = ("weave", "lin_atom", "norm_atom", "readouts")
_DEFAULTS = {"messages": "weave", "num_modules": 2, "residual": False, "readout": "histogram"}
_ENCODER = ("model.network.pair_table", *(f"model.network.{part}." for part in _PARTS))


class Pretrained(Callback):
    """Load the encoder of a checkpoint before training: all before the head of a ``WeaveNet``.

    Targets, loss, head and descriptors may be different from those of the checkpoint; they begin
    anew. Atoms, pairs and the options of the encoder must be the same.

    Args:
        checkpoint: A checkpoint of a ``MoleculeProperty``.
        freeze: Whether the encoder keeps its weights and statistics, so that only the head is
            trained.

    Raises:
        ValueError: When training starts, if the encoder does not fit.

    Example:
        >>> Pretrained("runs/esol/version_0/best.ckpt", freeze=True).freeze
        True
    """

    def __init__(self, checkpoint: str, freeze: bool = False) -> None:
        self.checkpoint = checkpoint
        self.freeze = freeze
        self.continued = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Freeze the weights, before the optimizer is made."""
        if stage != "fit":
            return
        self.continued = False
        if not isinstance(pl_module, MoleculeProperty):
            what, got = "Pretrained: not a model of molecules", type(pl_module).__name__
            raise mismatch(ValueError, what, "a MoleculeProperty", got)
        for part in self._encoder(pl_module) if self.freeze else ():
            part.requires_grad_(False)

    def on_load_checkpoint(self, *given: Any) -> None:
        """Note that the weights come from the checkpoint of a continued run."""
        self.continued = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load the weights."""
        if not self.continued:
            with naming_file(self.checkpoint):
                self._load(pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the statistics of frozen normalizations."""
        for part in self._encoder(pl_module) if self.freeze else ():
            part.eval()

    def _encoder(self, task: Any) -> list[nn.Module]:
        return [getattr(task.model.network, name) for name in _PARTS]

    def _load(self, task: Any) -> None:
        contents = read_checkpoint(self.checkpoint)
        what, hint = "Pretrained: the encoder does not fit", "the options of the checkpoint"
        ours, theirs = map(_described, (task.hparams, contents.get("hyper_parameters", {})))
        check_same(what, ours, theirs, hint)
        own = task.state_dict()
        weights, fitting = (
            {name: each for name, each in state.items() if name.startswith(_ENCODER)}
            for state in (contents["state_dict"], own)
        )
        for name in sorted({*fitting, *weights}):
            both = (fitting, weights)
            shapes = [list(each[name].shape) if name in each else "none" for each in both]
            if shapes[0] != shapes[1]:
                where = name.removeprefix("model.")
                raise mismatch(ValueError, what, *shapes, where=where, hint=hint)
        task.load_state_dict(weights, strict=False)
        loaded, new = (_counts(names) for names in (weights, set(own) - set(weights)))
        unused = _counts(set(contents["state_dict"]) - set(weights))
        rank_zero_info(f"pretrained weights of {self.checkpoint}: {loaded}")
        rank_zero_info(f"new: {new}; not loaded: {unused}")


def _described(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the encoder sees of a molecule, and its options that have no weights."""
    schema = MoleculeSchema.from_dict(options.get("schema"))
    spec, own = schema.featurizer, {**_DEFAULTS, **options}
    own["readout"] = own["readout"] if isinstance(own["readout"], list) else [own["readout"]]
    given = {**spec.get("options", {}), "max_atoms": None}
    facts = {"atoms": spec.get("atoms"), "atom pairs": spec.get("pairs"), "options": given}
    facts |= {name: own[name] for name in _DEFAULTS}
    return {**facts, "pairs": schema.pairs, "self_pairs": schema.self_pairs}


def _counts(names: Any) -> str:
    """Count weights by the part of the model they belong to."""
    parts = Counter(".".join(name.removeprefix("model.").split(".")[:2]) for name in sorted(names))
    return ", ".join(f"{part} ({count})" for part, count in parts.items()) or "none"
