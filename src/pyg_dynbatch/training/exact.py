"""Formulas of agreement in double precision, and metrics that apply them to an epoch."""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

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
