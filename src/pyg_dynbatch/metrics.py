"""Metrics of the predictions of a whole split, in float64.

``guess`` holds the predictions, ``gold`` the targets; ``score`` is larger the surer a model is that
an example is positive. A metric of which the data leave no value, such as a correlation with a
constant, is NaN.
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
    if not _has_different_values(gold):
        return np.nan
    return float(1 - mse(guess, gold) / gold.var())


def pearson(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return the linear correlation."""
    if not _has_different_values(guess) or not _has_different_values(gold):
        return np.nan
    return float(np.corrcoef(guess, gold)[0, 1])


def spearman(guess: ExampleValues, gold: ExampleValues) -> float:
    """Return Spearman's rank correlation; tied values get their mean rank."""
    return pearson(_ranks(guess), _ranks(gold))


def average_precision(score: ExampleValues, positive: np.ndarray) -> float:
    """Return the average precision, the area under the curve as steps; tied scores are one."""
    if not _has_different_values(positive):
        return np.nan
    # One threshold per distinct score, the highest first.
    _, threshold, num_examples = np.unique(-score, return_inverse=True, return_counts=True)
    num_positives = np.bincount(threshold, positive)
    precisions = np.cumsum(num_positives) / np.cumsum(num_examples)
    return float(num_positives @ precisions / num_positives.sum())


def roc_auc(score: ExampleValues, positive: np.ndarray) -> float:
    """Return the area under the ROC curve, by ranks; tied scores count one half."""
    if not _has_different_values(positive):
        return np.nan
    num_positives = int(positive.sum())
    num_negatives = positive.size - num_positives
    # How many pairs of a positive and a negative are in the right order (Mann and Whitney).
    num_ordered = _ranks(score)[positive].sum() - num_positives**2 / 2
    return float(num_ordered / (num_positives * num_negatives))


def majority_accuracy(gold: np.ndarray) -> float:
    """Return the accuracy of one answer for all examples, their most frequent class."""
    _, counts = np.unique(gold, return_counts=True)
    return float(counts.max() / counts.sum())


def _has_different_values(values: np.ndarray) -> bool:
    """Return whether there are two different values."""
    return bool(values.size) and bool(values.min() < values.max())


def _ranks(values: ExampleValues) -> ExampleValues:
    """Return how many values are smaller, and half of those that are equal, itself included."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - counts / 2
    return ranks[group]
