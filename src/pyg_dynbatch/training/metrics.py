"""Count hits as Fold's sentiment example does: at roots and nodes, in five classes or in two."""

import warnings
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric, PearsonCorrCoef, SpearmanCorrCoef

from pyg_dynbatch.training.objective import UNLABELLED


class HitRate(Metric):
    """Measures the share of hits among the rows that count; not a number if none counts.

    Example:
        >>> rate = HitRate()
        >>> rate.update(torch.tensor([True, False, True]), torch.tensor([True, True, False]))
        >>> rate.compute().item()
        0.5
    """

    full_state_update = False
    higher_is_better = True
    hits: Tensor
    rows: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, hit: Bool[Tensor, " row"], counts: Bool[Tensor, " row"]) -> None:
        """Adds rows.

        Args:
            hit: Whether each row is a hit.
            counts: Whether each row counts at all.
        """
        self.hits += (hit & counts).sum()
        self.rows += counts.sum()

    def compute(self) -> Float[Tensor, ""]:
        """Divides hits by rows."""
        return self.hits / self.rows


class MeanLoss(Metric):
    """Measures the mean loss of a labelled row; not a number if there is none.

    Example:
        >>> mean = MeanLoss()
        >>> mean.update(torch.tensor(6.0), torch.tensor(3))
        >>> mean.update(torch.tensor(6.0), torch.tensor(1))
        >>> mean.compute().item()
        3.0
    """

    full_state_update = False
    higher_is_better = False
    total: Tensor
    rows: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, loss: Float[Tensor, ""], rows: Int[Tensor, ""]) -> None:
        """Adds a batch.

        Args:
            loss: Sum of its losses.
            rows: How many losses it sums up.
        """
        self.total += loss.detach()
        self.rows += rows

    def compute(self) -> Float[Tensor, ""]:
        """Divides the sum by the rows."""
        return self.total / self.rows


def class_hits(
    logits: Float[Tensor, "row class"], labels: Int[Tensor, " row"]
) -> tuple[Bool[Tensor, " row"], Bool[Tensor, " row"]]:
    """Finds the rows whose likeliest class is the gold one, and the rows that have a gold one.

    Args:
        logits: One row a node.
        labels: Gold class, -1 where there is none.

    Returns:
        Hits, and the rows that count.
    """
    return logits.argmax(-1) == labels, labels != UNLABELLED


def polarity_hits(
    logits: Float[Tensor, "row class"], labels: Int[Tensor, " row"]
) -> tuple[Bool[Tensor, " row"], Bool[Tensor, " row"]]:
    """Finds the rows whose side of the middle class is right; rows of the middle do not count.

    A row is positive if the classes above the middle have more probability together than those
    below: for five classes ``p3 + p4 > p0 + p1``.

    Args:
        logits: One row a node; an odd number of classes in rising order.
        labels: Gold class, -1 where there is none.

    Returns:
        Hits, and the rows that count.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0, 9.0, 0.0, 1.0]])
        >>> polarity_hits(logits, torch.tensor([3]))
        (tensor([True]), tensor([True]))
    """
    middle = logits.size(-1) // 2
    chance = logits.float().softmax(-1)
    positive = chance[:, middle + 1 :].sum(-1) > chance[:, :middle].sum(-1)
    return positive == (labels > middle), (labels != UNLABELLED) & (labels != middle)


class TreeAccuracy(nn.Module):
    """Holds the accuracies of one pass over the data, by the names they are logged under.

    Args:
        polarity: Whether the classes are a scale around a neutral middle, so that the two-way
            accuracy is of interest too.

    Example:
        >>> accuracy = TreeAccuracy()
        >>> logits, labels = torch.eye(2), torch.tensor([0, 0])
        >>> accuracy.update(logits, labels, torch.tensor([1]))
        >>> {name: metric.compute().item() for name, metric in accuracy.named()}
        {'accuracy': 0.0, 'node_accuracy': 0.5}
    """

    def __init__(self, polarity: bool = False) -> None:
        super().__init__()
        self.polarity = polarity
        self.accuracy = HitRate()
        self.node_accuracy = HitRate()
        if polarity:
            self.binary_accuracy = HitRate()
            self.node_binary_accuracy = HitRate()

    def update(
        self,
        logits: Float[Tensor, "node class"],
        labels: Int[Tensor, " node"],
        roots: Int[Tensor, " root"],
    ) -> None:
        """Adds the nodes of a batch.

        Args:
            logits: One row a node.
            labels: Gold class of each node, -1 where there is none.
            roots: Node numbers of the roots.
        """
        hit, counts = class_hits(logits, labels)
        self.accuracy.update(hit[roots], counts[roots])
        self.node_accuracy.update(hit, counts)
        if self.polarity:
            hit, counts = polarity_hits(logits, labels)
            self.binary_accuracy.update(hit[roots], counts[roots])
            self.node_binary_accuracy.update(hit, counts)

    def named(self) -> list[tuple[str, Metric]]:
        """Lists the metrics with their names."""
        return [(name, m) for name, m in self.named_children() if isinstance(m, Metric)]


class ScoreAgreement(nn.Module):
    """Holds Pearson's r, Spearman's rho and the mean squared error of predicted scores.

    Example:
        >>> agreement = ScoreAgreement()
        >>> agreement.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 5.0]))
        >>> {name: round(metric.compute().item(), 3) for name, metric in agreement.named()}
        {'pearson': 0.996, 'spearman': 1.0, 'mse': 0.333}
    """

    def __init__(self) -> None:
        super().__init__()
        self.pearson = PearsonCorrCoef()
        with warnings.catch_warnings():
            # It keeps every score of the pass; a pass is a few thousand pairs.
            warnings.filterwarnings("ignore", message="Metric `SpearmanCorrcoef`")
            self.spearman = SpearmanCorrCoef()
        self.mse = MeanSquaredError()

    def update(self, predicted: Float[Tensor, " example"], gold: Float[Tensor, " example"]) -> None:
        """Adds the pairs of a batch.

        Args:
            predicted: Predicted scores.
            gold: Gold scores.
        """
        for _, metric in self.named():
            metric.update(predicted.float(), gold.float())

    def named(self) -> list[tuple[str, Metric]]:
        """Lists the metrics with their names."""
        return [(name, m) for name, m in self.named_children() if isinstance(m, Metric)]
