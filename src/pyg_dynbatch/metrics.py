"""Metrics of the predictions of a whole split, in float64.

A metric of which the data leave no value, such as a correlation with a constant, is NaN.
"""

import numpy as np
from jaxtyping import Float

ExampleValues = Float[np.ndarray, " example"]


def mse(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return the mean squared error."""
    return float(np.square(guess - gold).mean())


def rmse(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return the root of the mean squared error."""
    return mse(guess, gold) ** 0.5


def mae(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return the mean absolute error."""
    return float(np.abs(guess - gold).mean())


def r2(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return the share of the variance that is explained."""
    return float(1 - mse(guess, gold) / gold.var()) if varies(gold) else np.nan


def pearson(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return the linear correlation."""
    return float(np.corrcoef(guess, gold)[0, 1]) if varies(guess) and varies(gold) else np.nan


def spearman(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return Spearman's rank correlation; tied values get their mean rank."""
    return pearson(_ranks(guess), _ranks(gold))


def average_precision(score: ExampleValues, positive: np.ndarray) -> float:
    """Return the average precision, the area under the curve as steps; tied scores are one."""
    if not varies(positive):
        return np.nan
    _, place, counts = np.unique(-score, return_inverse=True, return_counts=True)
    hits = np.bincount(place, positive)
    return float(hits @ (np.cumsum(hits) / np.cumsum(counts)) / hits.sum())


def roc_auc(score: ExampleValues, positive: np.ndarray) -> float:
    """Return the area under the ROC curve, by ranks; tied scores count one half."""
    if not varies(positive):
        return np.nan
    hits = int(positive.sum())
    return float((_ranks(score)[positive].sum() - hits**2 / 2) / (hits * (positive.size - hits)))


def majority_accuracy(gold: np.ndarray) -> float:
    """Return the accuracy of one answer for all examples, their most frequent class."""
    _, counts = np.unique(gold, return_counts=True)
    return float(counts.max() / counts.sum())


def varies(values: np.ndarray) -> bool:
    """Return whether there are two different values."""
    return bool(values.size) and bool(values.min() < values.max())


def _ranks(values: ExampleValues) -> ExampleValues:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[place]
