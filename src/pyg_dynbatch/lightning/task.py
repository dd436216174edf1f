"""Train any model: its loss over ranks, its metrics over epochs, its optimizer and rate."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
from jaxtyping import Float, Int
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch_geometric.data import Data

from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.core.subnormals import flushed_subnormals
from pyg_dynbatch.model import HEADER, Loss, Model, Table, check_same_model, joined_columns

OptimizerCallable = Callable[[Iterable], Optimizer]
Rate = Literal["constant", "cosine", "one_cycle"]
Stage = Literal["train", "val", "test"]
OfRank = TypeVar("OfRank")


class Task(pl.LightningModule):
    """Train a :class:`~pyg_dynbatch.models.Model`.

    A model returns the sum of the losses of a batch and the number of its terms (labelled nodes,
    known targets). Logged are ``train/loss``, ``val/loss`` and ``test/loss``, the mean over all
    terms of an epoch and all ranks, and for validation and test the metrics of the model. They are
    computed once per epoch from the predictions of all batches and ranks.

    Before training, the model takes over what the training set of the data module decides, such as
    the scales of targets (:meth:`~pyg_dynbatch.models.Model.start_from`). That happens once: the
    weights hold whether it has.

    Args:
        model: What is trained.
        optimizer: Makes the optimizer from the parameter groups of the model; None for torch's
            ``Adam``.
        rate: ``"constant"``; ``"cosine"``, which falls to 0 along half a cosine; or
            ``"one_cycle"``, which rises from a twenty-fifth of the rate in the first 30 % of the
            steps and then falls to 0, each along half a cosine (Smith, Topin 2018,
            arXiv:1708.07120).

    Example:
        >>> from pyg_dynbatch.models import TreeClassifier, TreeSchema
        >>> model = TreeClassifier(TreeSchema(num_tokens=10, num_classes=5), hidden_channels=8)
        >>> task = Task(model, lambda groups: torch.optim.Adam(groups, lr=0.002), rate="cosine")
        >>> task.model.monitor
        'accuracy'
    """

    def __init__(
        self, model: Model, optimizer: OptimizerCallable | None = None, rate: Rate = "constant"
    ) -> None:
        super().__init__()
        checked_choice("Task: rate", rate, ("constant", "cosine", "one_cycle"))
        self.model = model
        # Not the default argument: jsonargparse would keep Adam's eps for another class.
        self.optimizer = optimizer or torch.optim.Adam
        self.rate: Rate = rate
        self.test_table: Table = {}
        """The table of predictions of the last test, of all ranks."""
        # Of the batches of an epoch, from its start until its end on this rank.
        self._losses: dict[str, list[Loss]] = {"train": [], "val": [], "test": []}
        self._columns: list[dict[str, Tensor]] = []  # of validation or test
        self._terms: Tensor | None = None  # of the batches whose gradients are accumulated

    def setup(self, stage: str) -> None:
        """Let the model start from the training set; a checkpoint is restored after this."""
        if isinstance(self.trainer.precision_plugin, DoublePrecision):
            # Lightning does so only after it has restored the weights, which are then rounded.
            self.double()
        is_sparse = any(getattr(module, "sparse", False) for module in self.model.modules())
        if stage == "fit" and is_sparse and self.trainer.gradient_clip_val:
            problem = "Task: torch cannot clip the sparse gradients of the embedding"
            hint = "--model.sparse_embedding false"
            got = f"gradient_clip_val {self.trainer.gradient_clip_val}"
            raise mismatch(ValueError, problem, "no gradient_clip_val", got, hint=hint)

        dataset_of = getattr(getattr(self.trainer, "datamodule", None), "dataset", None)
        if stage == "fit" and dataset_of is not None and not self.model.is_started:
            self.model.start_from(dataset_of("train"))
            self.model.is_started.fill_(True)

    def forward(self, batch: Data) -> Tensor:
        """Run the model."""
        return self.model(batch)

    # Steps. Lightning calls them in this order; an epoch of validation follows each of training,
    # before the latter ends:
    #
    # on_train_epoch_start → (training_step → backward → on_before_optimizer_step) → …
    # → on_validation_epoch_start → validation_step → … → on_validation_epoch_end
    # → on_train_epoch_end

    def training_step(self, batch: Data, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Return what is differentiated for a batch (see _scaled), without a device sync."""
        with flushed_subnormals():
            loss, terms = self.model.loss(self.model(batch), batch)
        self._losses["train"].append((loss.detach(), terms))
        return self._scaled(loss, terms, batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate; behind saturated gates, gradients are subnormal."""
        with flushed_subnormals():
            super().backward(loss, *args, **kwargs)

    def validation_step(self, batch: Data, batch_idx: int = 0) -> None:
        """Keep the loss and the predictions of a batch."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Data, batch_idx: int = 0) -> None:
        """Keep the loss and the predictions of a batch."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Data, stage: Stage) -> None:
        output = self.model(batch)
        self._losses[stage].append(self.model.loss(output, batch))
        self._columns.append(self.model.columns(self.model.values(output), batch))

    def on_train_epoch_start(self) -> None:
        """Forget what an interrupted epoch has left."""
        self._losses["train"] = []
        self._terms = None

    def on_validation_epoch_start(self) -> None:
        """Forget what an interrupted epoch has left."""
        self._losses["val"] = []
        self._columns = []

    def on_test_epoch_start(self) -> None:
        """Forget what an interrupted epoch has left."""
        self._losses["test"] = []
        self._columns = []

    def on_train_epoch_end(self) -> None:
        """Log the mean loss; raise an error if it had no terms, as nothing was learned then."""
        batches = len(self._losses["train"])  # none if a run goes on at the end of an epoch
        mean_loss = self._mean_loss("train")
        if batches and not mean_loss:
            raise mismatch(
                ValueError,
                "Task: there is nothing to learn from, as the loss of a whole epoch has no terms",
                "a labelled node or a known target in the training data",
                f"none in {batches} batches of this process",
                hint="a look at the labels or targets of a batch, mostly batch.y",
            )
        self._log("train", mean_loss)

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss and the metrics of the model."""
        self._log("val", {**self._mean_loss("val"), **self.model.metrics(self._table())})

    def on_test_epoch_end(self) -> None:
        """Log the mean loss and the metrics of the model."""
        self.test_table = self._table()
        self._log("test", {**self._mean_loss("test"), **self.model.metrics(self.test_table)})

    def _mean_loss(self, stage: Stage) -> dict[str, float]:
        """Return the mean over all terms of all ranks; nothing if there are none."""
        own_losses = [(float(loss), int(terms)) for loss, terms in self._losses[stage]]
        self._losses[stage] = []
        losses = [pair for of_rank in self._of_all_ranks(own_losses) for pair in of_rank]
        total = sum(loss for loss, _ in losses)
        count = sum(terms for _, terms in losses)
        return {"loss": total / count} if count else {}

    def _table(self) -> Table:
        """Return the table of predictions of all ranks."""
        own_tables = [
            {name: value.cpu().numpy() for name, value in columns.items()}
            for columns in self._columns
        ]
        self._columns = []
        tables = [table for of_rank in self._of_all_ranks(own_tables) for table in of_rank]
        return joined_columns(tables) if tables else {}

    def _of_all_ranks(self, own: OfRank) -> list[OfRank]:
        """Return what each rank has."""
        if self.trainer.world_size == 1:
            return [own]
        gathered: list[Any] = [None] * self.trainer.world_size
        distributed.all_gather_object(gathered, own)
        return gathered

    def _log(self, stage: Stage, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            shown = name in ("loss", self.model.monitor)
            # All ranks have computed the same value; without sync_dist, Lightning would warn.
            self.log(f"{stage}/{name}", value, prog_bar=shown, sync_dist=True)

    # Optimizer.

    def configure_optimizers(self) -> Optimizer | OptimizerLRSchedulerConfig:
        """Build the optimizer and, unless the rate is constant, its schedule."""
        optimizer = self.optimizer(self.model.parameter_groups())
        if self.rate == "constant":
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        if steps == float("inf"):
            problem = f"Task: the rate {self.rate} needs to know the end of training"
            raise mismatch(ValueError, problem, "a trainer with max_epochs or max_steps", "neither")
        factor = partial(_FACTORS[self.rate], int(steps))
        # A checkpoint holds nothing of a lambda: a run that goes on for longer ends where it ends.
        scheduler = LambdaLR(optimizer, lambda step: factor(step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    # Gradients: whatever the number of ranks and of accumulated batches, those of the sum of all
    # losses, divided as the model says. Lightning divides by the number of accumulated batches, and
    # DDP by the number of ranks, so both are multiplied before.
    #
    # reduction     divided by                          where
    # sum           nothing
    # mean          the terms of all ranks              at once; accumulated: before the step
    # per_example   the examples of all ranks           at once; accumulated: before the step

    def _scaled(
        self, loss: Float[Tensor, ""], terms: Int[Tensor, ""], batch: Data
    ) -> Float[Tensor, ""]:
        """Return the summed loss of a batch, scaled for the gradients above."""
        ranks = self.trainer.world_size
        batches = self.trainer.accumulate_grad_batches
        if self.model.reduction == "sum":
            return loss * (ranks * batches)
        if self.model.reduction == "per_example":
            # Filled on the device: copying a number from the host would wait for it.
            terms = torch.full_like(terms, batch.num_graphs)
        if batches > 1:
            self._terms = terms if self._terms is None else self._terms + terms
            return loss * (ranks * batches)
        divisor = terms.to(loss.dtype)
        if ranks > 1:
            divisor = self.trainer.strategy.reduce(divisor, reduce_op="sum")
        return loss * ranks / divisor.clamp(min=1)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Divide accumulated gradients, now that the number of their terms is known."""
        if self._terms is None:
            return
        terms = self._terms.float()
        self._terms = None
        if self.trainer.world_size > 1:
            terms = self.trainer.strategy.reduce(terms, reduce_op="sum")
        terms = terms.clamp(min=1)  # only now: a single rank may have none
        for weight in self.parameters():
            if weight.grad is not None:
                # In half precision the number of terms may overflow.
                exact = torch.promote_types(weight.grad.dtype, torch.float32)
                weight.grad.copy_(weight.grad.to(exact) / terms)

    # Checkpoints.

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what :func:`~pyg_dynbatch.load` needs to build the model."""
        checkpoint[HEADER] = self.model.header()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raise an error if the checkpoint belongs to a model with other options."""
        check_same_model(self.model, checkpoint)


# Factors on the rate ------------------------------------------------------------------------------


def _half_cosine(start: float, end: float, done: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def _cosine(steps: int, step: int) -> float:
    return _half_cosine(1.0, 0.0, step / steps)


def _one_cycle(steps: int, step: int) -> float:
    done = step / steps
    if done < _RISE:
        return _half_cosine(1 / 25, 1.0, done / _RISE)
    return _half_cosine(1.0, 0.0, (done - _RISE) / (1.0 - _RISE))


_RISE = 0.3
_FACTORS = {"cosine": _cosine, "one_cycle": _one_cycle}
