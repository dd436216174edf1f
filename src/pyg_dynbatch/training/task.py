"""Base of all tasks: metrics, loss over ranks, optimizer, learning-rate schedule, checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, distributed, nn
from torch_geometric.data import Batch
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from pyg_dynbatch.core.errors import checked_shape, mismatch
from pyg_dynbatch.prediction import Model, average
from pyg_dynbatch.training.optimizers import (
    OptimizerOptions,
    RateOptions,
    build_optimizer,
    build_scheduler,
    renew_rates,
)
from pyg_dynbatch.training.runs import SafeCheckpointIO, share_split

# Metrics ------------------------------------------------------------------------------------------


Values = Float[np.ndarray, " example"]
_NAN = float("nan")


def mse(guess: Values, gold: Values) -> float:
    """Return the mean squared error."""
    return float(np.square(guess - gold).mean())


def rmse(guess: Values, gold: Values) -> float:
    """Return the root of the mean squared error."""
    return mse(guess, gold) ** 0.5


def r2(guess: Values, gold: Values) -> float:
    """Return the share of the variance that is explained; NaN if there is none."""
    return float(1 - mse(guess, gold) / gold.var()) if varies(gold) else _NAN


def pearson(guess: Values, gold: Values) -> float:
    """Return the linear correlation; NaN if one side is constant."""
    return float(np.corrcoef(guess, gold)[0, 1]) if varies(guess) and varies(gold) else _NAN


def spearman(guess: Values, gold: Values) -> float:
    """Return Spearman's rank correlation; tied values get their mean rank."""
    return pearson(_ranks(guess), _ranks(gold))


def _ranks(values: Values) -> Values:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[place]


def average_precision(score: Values, positive: np.ndarray) -> float:
    """Return the average precision, the area under the curve as steps; tied scores are one."""
    _, place, counts = np.unique(-score, return_inverse=True, return_counts=True)
    hits = np.bincount(place, positive)
    return float(hits @ (np.cumsum(hits) / np.cumsum(counts)) / hits.sum())


def roc_auc(score: Values, positive: np.ndarray) -> float:
    """Return the area under the ROC curve, by ranks; tied scores count one half."""
    hits = int(positive.sum())
    return float((_ranks(score)[positive].sum() - hits**2 / 2) / (hits * (positive.size - hits)))


def varies(values: np.ndarray) -> bool:
    """Return whether there are two different values."""
    return bool(values.size) and bool(values.min() < values.max())


class Rows(Metric):
    """The rows of an epoch, of all batches and ranks.

    torchmetrics' ``CatMetric`` returns to single precision when it is moved to a device.
    """

    full_state_update = False
    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, *columns: Tensor) -> None:
        """Add a batch, given as columns or blocks of columns."""
        self.rows.append(torch.column_stack([column.detach().double() for column in columns]))

    def compute(self) -> Tensor:
        """Concatenate the rows."""
        return dim_zero_cat(self.rows)


class Agreement(Rows):
    """A formula of the predicted and true values of an epoch."""

    def __init__(self, formula: Callable[[Values, Values], float]) -> None:
        super().__init__()
        self.formula = formula

    def compute(self) -> Float[Tensor, ""]:
        """Apply the formula."""
        found = self.formula(*super().compute().cpu().numpy().T)
        return torch.tensor(found, device=self.device)


# Task ---------------------------------------------------------------------------------------------


Reduction = Literal["sum", "mean", "per_tree"]
Summed = tuple[Float[Tensor, ""], Int[Tensor, ""]]  # a sum of losses, and the number of its terms

UNLABELLED = -1


def summed_cross_entropy(
    logits: Float[Tensor, "node class"], labels: Int[Tensor, " node"]
) -> Summed:
    """Sum the cross entropy of all labelled rows, and count them, without a device sync."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(exact, labels, ignore_index=UNLABELLED, reduction="sum")
    return loss, (labels != UNLABELLED).sum()


class RatioMetric(Metric):
    """A sum over a count, of all batches and ranks; NaN if nothing was counted.

    torchmetrics' ``MeanMetric`` looks for NaN, which waits for the device, or ignores weights.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, start: float | int = 0.0) -> None:
        super().__init__()
        # An int as the start counts exactly, however large the sum becomes.
        self.add_state("total", torch.tensor(start), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, total: Float[Tensor, ""] | Int[Tensor, ""], count: Int[Tensor, ""]) -> None:
        """Add a batch."""
        # Not in place: validation may have made the states in inference mode.
        self.total = (self.total + total.detach()).to(self.total.dtype)
        self.count = (self.count + count).to(self.count.dtype)

    def compute(self) -> Float[Tensor, ""]:
        """Divide the sum by the count."""
        return self.total / self.count


STAGES = ("train", "val", "test")


class Task(pl.LightningModule, ABC):
    """Base of all tasks: trains a model on batches; subclasses define loss and metrics.

    Args:
        model: What is trained, and predicts.
        optimizer: Options of the optimizer.
        rate: Options of the learning-rate schedule.
        reduction: Divisor of the summed training loss, see :meth:`scaled_loss`.
        scores: Returns the metrics of one stage, by the names they are logged under.
    """

    main_metric: str
    """Name, without the stage, of the main metric of a run."""

    needs_targets: ClassVar[bool] = False
    """Whether the logged metrics depend on the names of the targets."""

    def __init__(
        self,
        model: Model,
        optimizer: OptimizerOptions,
        rate: RateOptions,
        reduction: Reduction = "mean",
        scores: Callable[[], dict[str, Metric]] = dict,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.reduction: Reduction = reduction
        self.optimizer_options = optimizer
        self.rate_options = rate
        self.losses = nn.ModuleDict({f"{stage}_loss": RatioMetric() for stage in STAGES})
        stages: Any = {f"{stage}_scores": nn.ModuleDict(scores()) for stage in STAGES}
        self.scores = nn.ModuleDict(stages)
        self.data_options: dict[str, Any] = {}
        """Options of the data module on the command line, for the checkpoint."""
        self._rates_changed = False
        self._terms: Tensor | None = None  # of the batches whose gradients are accumulated
        self._fresh = _written(model)  # until it starts from data, or weights are written

    def setup(self, stage: str) -> None:
        """Prepare how checkpoints are read; before ``fit``, start from the data.

        A checkpoint is restored after this, so on resuming its numbers are used.
        """
        if isinstance(self.trainer.precision_plugin, DoublePrecision):
            self.double()  # Lightning does so after it has restored the weights
        if type(self.trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            self.trainer.strategy.checkpoint_io = SafeCheckpointIO()
        if stage == "fit":
            self.start_from(getattr(self.trainer, "datamodule", None))

    def start_from(self, data: Any) -> None:
        """Take over from a data module what the training split decides, such as scales."""
        self._fresh = []

    def on_validation_start(self) -> None:
        """Start from the data if neither ``fit`` nor weights came before."""
        if self._fresh == _written(self.model):
            with torch.inference_mode(False):  # what the data keep is for training too
                self.start_from(getattr(self.trainer, "datamodule", None))

    on_test_start = on_predict_start = on_validation_start

    @classmethod
    def dry_run_instance(cls, options: Mapping[str, Any], data: Mapping[str, Any]) -> Any:
        """Build a task without data, to find wrong options early; None if that is impossible.

        Args:
            options: Options of the task, as plain values.
            data: Known facts of the data: ``kind`` and ``targets`` of properties.
        """
        return None

    def metric_names(self) -> tuple[str, ...]:
        """List the metrics logged in training."""
        scores: Any = self.scores["val_scores"]
        return tuple(f"{stage}/{name}" for stage in STAGES[:2] for name in ("loss", *scores))

    @classmethod
    def from_plain(cls, options: Mapping[str, Any]) -> Any:
        """Build a task from plain options, such as those in a checkpoint."""
        given = {name: value for name, value in options.items() if not name.startswith("_")}
        for name, record in {"optimizer": OptimizerOptions, "rate": RateOptions}.items():
            if given.get(name) is not None:
                given[name] = record(**given[name])
        return cls(**given)

    @abstractmethod
    def summed_loss(self, output: Tensor, batch: Batch) -> Summed:
        """Sum the losses of a batch; return the sum and the number of its terms.

        Args:
            output: What the network returns.
            batch: The batch.
        """

    def target(self, batch: Batch, *shape: int, name: str = "y") -> Any:
        """Return the targets of a batch, which must have this shape."""
        what = f"{type(self).__name__}: batch.{name} does not fit"
        return checked_shape(what, getattr(batch, name, None), shape)

    @abstractmethod
    def update_scores(self, stage: str, output: Tensor, batch: Batch) -> None:
        """Add a batch to the metrics of its stage."""

    def evaluate(self, batch: Batch, stage: str) -> Summed:
        """Log loss and scores of a batch."""
        output = self(batch)
        loss, terms = self.summed_loss(output, batch)
        self.log_loss(stage, loss, terms, batch)
        with torch.no_grad():
            self.update_scores(stage, output, batch)
        scores: Any = self.scores[f"{stage}_scores"]
        self.log_metrics(stage, list(scores.items()), batch)
        return loss, terms

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Compute the loss of a batch, without a device sync."""
        return self.scaled_loss(*self.evaluate(batch, "train"), batch, self.reduction)

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Evaluate a batch of the validation split."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Evaluate a batch of the test split."""
        self.evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> dict[str, Tensor]:
        """Return the columns of the table of predictions; ``example`` is relative to the batch."""
        columns = self.model.predict(batch)
        rows = {name: len(column) for name, column in columns.items()}
        if len({*rows.values()}) > 1:
            what = f"{type(self).__name__}: the targets of the batch do not fit"
            raise mismatch(ValueError, what, "as many as predictions", rows)
        return columns

    def forward(self, batch: Batch) -> Tensor:
        """Run the model."""
        return self.model(batch)

    def plain_options(self) -> dict[str, Any]:
        """Convert the option records to mappings of plain values for a checkpoint.

        The instantiator, as noted by the command line, converts them back.
        """
        return {
            "optimizer": asdict(self.optimizer_options),
            "rate": asdict(self.rate_options),
            "_instantiator": "lightning.pytorch.cli.instantiate_module",
        }

    @property
    def lr(self) -> float:
        """Learning rate of the weights, which Lightning's ``Tuner.lr_find`` reads and sets."""
        return self.optimizer_options.lr

    @lr.setter
    def lr(self, rate: float) -> None:
        self.optimizer_options = replace(self.optimizer_options, lr=rate)
        if "optimizer" in self.hparams:
            self.hparams["optimizer"] = asdict(self.optimizer_options)

    def configure_optimizers(self) -> Any:
        """Build the optimizer and, unless the rate is constant, its schedule."""
        optimizer = build_optimizer(self.model, self.optimizer_options)
        scheduler = build_scheduler(optimizer, self.rate_options, self._lengths)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def _lengths(self) -> tuple[float, float]:
        total = float(self.trainer.estimated_stepping_batches)
        batches = float(self.trainer.num_training_batches)
        return max(1.0, batches / self.trainer.accumulate_grad_batches), total

    def scaled_loss(
        self, loss: Float[Tensor, ""], terms: Int[Tensor, ""], batch: Batch, reduction: Reduction
    ) -> Float[Tensor, ""]:
        """Reduce a summed loss so that the gradients do not depend on how ranks share a batch.

        Nor do they depend on the number of batches whose gradients are accumulated: those are
        divided together, before the step of the optimizer.

        Args:
            loss: Sum of the losses of this rank.
            terms: Number of summed losses.
            batch: The batch, for its number of examples.
            reduction: Divisor: none (``sum``), the terms (``mean``) or the examples (``per_tree``).
        """
        world = distributed.get_world_size() if distributed.is_initialized() else 1
        # Lightning divides by the number of batches, and DDP by the number of ranks.
        batches = 1 if self._trainer is None else self.trainer.accumulate_grad_batches
        if reduction == "sum":
            return loss * (world * batches)
        if reduction == "per_tree":
            # Filled on the device: copying a number from the host would wait for it.
            terms = torch.full_like(terms, batch.num_graphs)
        if batches > 1:
            self._terms = terms if self._terms is None else self._terms + terms
            return loss * (world * batches)
        divisor = terms.to(loss.dtype)
        if world > 1:
            divisor = self.trainer.strategy.reduce(divisor, reduce_op="sum")
        return loss * world / divisor.clamp(min=1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Divide accumulated gradients by the number of their terms, on all ranks."""
        if self._terms is None:
            return
        kind = torch.promote_types(cast("torch.dtype", self.dtype), torch.float32)
        terms, self._terms = self._terms.to(kind), None
        if self.trainer.world_size > 1:
            terms = self.trainer.strategy.reduce(terms, reduce_op="sum")
        terms = terms.clamp(min=1)  # only now: a single rank may have none
        for weight in self.parameters():
            if weight.grad is not None and weight.grad.dtype == kind:
                weight.grad /= terms
            elif weight.grad is not None:  # in half precision, their number may overflow
                weight.grad.copy_(weight.grad.to(kind) / terms)

    def log_loss(self, stage: str, loss: Tensor, terms: Tensor, batch: Batch) -> None:
        """Log the mean loss per labelled row over the epoch, whatever the reduction in training."""
        metric = cast("RatioMetric", self.losses[f"{stage}_loss"])
        metric.update(loss, terms)
        self.log_metrics(stage, [("loss", metric)], batch)

    def log_metrics(self, stage: str, named: list[tuple[str, Metric]], batch: Batch) -> None:
        """Log metric objects, which are synchronised over ranks, under ``stage/name``."""
        for name, metric in named:
            shown = name == self.main_metric and stage != "train"
            # Lightning would take the number of nodes for the batch size.
            options: Any = {"prog_bar": shown, "batch_size": batch.num_graphs}
            self.log(f"{stage}/{name}", metric, on_step=False, on_epoch=True, **options)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the name of the task and the options of its data to the checkpoint."""
        checkpoint["pyg_dynbatch_task"] = type(self).__name__
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            for logger in self.trainer.loggers:
                logger.save()  # or a killed run loses what was logged before the checkpoint
        if self.data_options:
            checkpoint["pyg_dynbatch_data"] = self.data_options

    def report_test(self, folder: Path, trees: int) -> None:
        """Write tables and pictures of the last test to a folder; nothing by default."""

    def notes(self) -> list[str]:
        """Return more lines to print after a test; none by default."""
        return []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the weights fit this model, and share the split of the checkpoint."""
        self.model.check(checkpoint, type(self).__name__, self.hparams)
        theirs, ours = checkpoint.get("hyper_parameters", {}), self.plain_options()
        names = ("optimizer", "rate")
        self._rates_changed = any(theirs.get(name, ours[name]) != ours[name] for name in names)
        share_split(checkpoint, getattr(self._trainer, "datamodule", None))

    def on_train_start(self) -> None:
        """Apply options that were changed since the checkpoint."""
        self._terms = None  # of a fit that was interrupted
        if self._rates_changed:
            schedulers: Any = self.lr_schedulers() or []
            found = schedulers if isinstance(schedulers, list) else [schedulers]
            optimizer: Any = self.optimizers(use_pl_optimizer=False)
            renew_rates(optimizer, found, self.model, self.optimizer_options)
            self._rates_changed = False


def _written(model: nn.Module) -> list[tuple[int, int]]:
    """Return which weights a model has, and how often each was written."""
    return [(id(weight), weight._version) for weight in model.parameters()]


def ensemble_of(task: Task, checkpoints: Sequence[str | Path]) -> Task:
    """Return a task that predicts with the average of several checkpoints.

    Args:
        task: A task with the configuration of the checkpoints; it is not changed.
        checkpoints: Paths of checkpoints.

    Raises:
        ValueError: If no checkpoint is given, or one is invalid or belongs to a different model.

    Example:
        >>> from pyg_dynbatch.lightning import TreeClassification
        >>> task = TreeClassification(num_tokens=5, num_classes=2, hidden_channels=4)
        >>> contents = {"state_dict": task.state_dict(), "pytorch-lightning_version": "2.6"}
        >>> torch.save(contents, getfixture("tmp_path") / "a.ckpt")
        >>> averaged = ensemble_of(task, [getfixture("tmp_path") / "a.ckpt"])
        >>> type(averaged.model.network).__name__
        'AveragedNetwork'
    """
    averaged = deepcopy(task)
    averaged.model = average(task.model, task.hparams, checkpoints, type(task).__name__)
    return averaged
