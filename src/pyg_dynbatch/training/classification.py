"""Train and test a classifier of trees and of all their nodes."""

from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch_geometric.data import Batch

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.models import TreeClassifier
from pyg_dynbatch.training.metrics import TreeAccuracy
from pyg_dynbatch.training.objective import Reduction, summed_cross_entropy
from pyg_dynbatch.training.options import OptimizerOptions, RateOptions
from pyg_dynbatch.training.task import STAGES
from pyg_dynbatch.training.tree_task import TreeTask


class TreeClassification(TreeTask):
    """Trains a tree classifier with the cross entropy of labelled nodes.

    Logged for every stage: ``loss`` (mean over the labelled rows), ``accuracy`` (roots),
    ``node_accuracy`` (all labelled nodes), and with ``polarity`` also ``binary_accuracy`` and
    ``node_binary_accuracy``, each counted by the same model without training it for two classes.

    Args:
        num_tokens: Rows of the embedding.
        num_classes: Classes of a node.
        loss_on: Which nodes have a loss: all labelled ``nodes``, or ``roots`` alone.
        reduction: What the summed loss is divided by: nothing (``sum``), the labelled nodes
            (``mean``) or the trees of the batch (``per_tree``).
        polarity: Whether the classes are a scale around a neutral middle.
        optimizer: Options of the optimiser.
        rate: Options of the learning-rate schedule.
        **network: Everything else goes to
            :class:`~pyg_dynbatch.models.TreeClassifier`.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, table 2; Tai, Socher, Manning
        (2015), arXiv:1503.00075, section 4.1.

    Example:
        >>> task = TreeClassification(num_tokens=10, num_classes=5, hidden_channels=8)
        >>> task.hparams["hidden_channels"], task.main_metric
        (8, 'accuracy')
    """

    main_metric = "accuracy"
    labels_nodes = True

    def __init__(
        self,
        num_tokens: int,
        num_classes: int,
        loss_on: Literal["nodes", "roots"] = "nodes",
        reduction: Reduction = "mean",
        polarity: bool = False,
        optimizer: OptimizerOptions = OptimizerOptions(),  # noqa: B008 - frozen
        rate: RateOptions = RateOptions(),  # noqa: B008 - frozen
        **network: Any,
    ) -> None:
        classifier = TreeClassifier(num_tokens, num_classes, **network)
        super().__init__(classifier, optimizer, rate)
        self.save_hyperparameters(ignore=["optimizer", "rate"])
        self.save_hyperparameters(self.plain_options())
        if polarity and num_classes % 2 == 0:
            raise ValueError(
                mismatch(
                    "TreeClassification: polarity needs a neutral middle class",
                    expected="an odd number of classes",
                    got=num_classes,
                    mend="polarity: false",
                )
            )
        self.num_classes = num_classes
        self.loss_on = loss_on
        self.reduction: Reduction = reduction
        self.scores = nn.ModuleDict({f"{stage}_scores": TreeAccuracy(polarity) for stage in STAGES})

    def summed_loss(
        self, logits: Float[Tensor, "node class"], batch: Batch
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Adds up the cross entropy of the nodes that have a loss.

        Args:
            logits: One row a node.
            batch: The trees.

        Returns:
            The sum, and the number of its terms.
        """
        if self.loss_on == "roots":
            return summed_cross_entropy(logits[batch.root_index], batch.y[batch.root_index])
        return summed_cross_entropy(logits, batch.y)

    def _evaluate(self, batch: Batch, stage: str) -> tuple[Tensor, Tensor]:
        logits = self(batch)
        loss, terms = self.summed_loss(logits, batch)
        self.log_loss(stage, loss, terms, batch)
        scores = cast("TreeAccuracy", self.scores[f"{stage}_scores"])
        scores.update(logits.detach(), batch.y, batch.root_index)
        self.log_metrics(stage, scores.named(), batch)
        return loss, terms

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Float[Tensor, ""]:
        """Computes the loss of a batch; nothing in it waits for the device."""
        loss, terms = self._evaluate(batch, "train")
        return self.scaled_loss(loss, terms, batch, self.reduction)

    def validation_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Counts hits on the validation split."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int = 0) -> None:
        """Counts hits on the test split."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int = 0) -> dict[str, Tensor]:
        """Gives one row a node: its tree, its number there, and what the model says.

        Returns:
            Columns ``example``, ``node``, ``is_root``, ``prediction``, ``probability`` (one
            column a class) and ``target`` (-1 where there is none).
        """
        chance = self(batch).float().softmax(-1)
        example = batch.batch
        node = torch.arange(example.numel(), device=example.device) - batch.ptr[example]
        is_root = torch.zeros_like(example, dtype=torch.bool)
        is_root[batch.root_index] = True
        target = batch.y if "y" in batch else torch.full_like(example, -1)
        return {
            "example": example,
            "node": node,
            "is_root": is_root,
            "prediction": chance.argmax(-1),
            "probability": chance,
            "target": target,
        }
