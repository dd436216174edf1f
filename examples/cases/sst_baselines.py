"""Models of sentences that see no tree: a network and a linear model on means of word vectors."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn


class MeanOfWords(nn.Module):
    """Classify every phrase from the mean of the vectors of its words; no other use of the tree."""

    def __init__(self, width: int, hidden: int, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        layers = [nn.Dropout(dropout), nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, classes))

    def forward(self, batch: Any) -> Tensor:
        """Compute the logits of all nodes."""
        return self.layers(means(batch))


def means(batch: Any) -> Tensor:
    """Average the rows of ``x`` of the words below each node; parents come before children."""
    size = np.ones(batch.num_nodes, dtype=np.int64)
    child, parent = batch.edge_index.numpy()
    for node, above in sorted(zip(child.tolist(), parent.tolist(), strict=True), reverse=True):
        size[above] += size[node]
    first = torch.arange(batch.num_nodes)
    last = first + torch.from_numpy(size)
    rows = torch.cat([batch.x, (batch.token >= 0).unsqueeze(1)], 1).double()
    sums = torch.cat([torch.zeros(1, rows.size(1)), rows.cumsum(0)])
    below = sums[last] - sums[first]
    return (below[:, :-1] / below[:, -1:]).float()


def linear(
    splits: Iterable[Any], columns: slice, penalties: Sequence[float]
) -> tuple[list[float], str]:
    """Fit logistic regressions of sentences on means of words.

    Args:
        splits: Loaders of train, dev and test.
        columns: Which features to use.
        penalties: Inverse penalties C; each metric has its own, chosen on dev.

    Returns:
        The accuracies of five and of two classes on the test, and what was chosen.
    """
    parts = []
    for loader in splits:
        batches = [(means(b)[b.root_index][:, columns], b.y[b.root_index]) for b in loader]
        parts.append([torch.cat(each).numpy() for each in zip(*batches, strict=True)])
    train, *tested = parts
    models = [LogisticRegression(C=penalty, max_iter=500).fit(*train) for penalty in penalties]
    dev, test = (np.array([_accuracies(model, *part) for model in models]) for part in tested)
    best = dev.argmax(0)
    chosen = ", ".join(str(penalties[row]) for row in best)
    return [float(test[row, metric]) for metric, row in enumerate(best)], f"C = {chosen}"


def _accuracies(model: LogisticRegression, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    chance = model.predict_proba(x)
    sided = (chance[:, 3:].sum(1) > chance[:, :2].sum(1)) == (y > 2)
    return (chance.argmax(1) == y).mean(), sided[y != 2].mean()
