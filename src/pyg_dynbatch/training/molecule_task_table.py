"""Measure a model property by property, with bootstrap intervals, and say what was left out."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from torch import Tensor

from pyg_dynbatch.core.files import whole_file
from pyg_dynbatch.training.molecule_metrics import (
    MAIN_METRIC,
    METRICS,
    mean_scores,
    scores_by_task,
)
from pyg_dynbatch.training.molecule_schema import MoleculeSchema, PropertyKind

_CELLS_AT_ONCE = 4_000_000
_MEAN = "mean"


@dataclass(frozen=True)
class TaskRow:
    """Holds one line of the table of properties.

    Args:
        name: The property, or ``mean``.
        molecules: How many known targets it has.
        positives: How many of them are positive; ``None`` unless the property is binary.
        status: ``counted``, ``single class`` or ``no target``.
        scores: Metrics by name.
        interval: Bootstrap interval of the main metric, NaN where it is not defined, as for the
            mean of several values, which have no unit in common.
    """

    name: str
    molecules: int
    positives: int | None
    status: str
    scores: dict[str, float]
    interval: tuple[float, float]


@dataclass(frozen=True)
class TestedSplit:
    """Holds what a test has found, for tables and pictures.

    Args:
        prediction: Values, or probabilities.
        target: Targets, NaN where unknown.
        schema: What the numbers mean.
        deviation: Deviations of the training targets of a regression.
        uncalibrated: Probabilities before they were calibrated, if they were.
    """

    __test__ = False  # pytest takes the name for that of a test

    prediction: Float[Tensor, "molecule output"]
    target: Float[Tensor, "molecule task"]
    schema: MoleculeSchema
    deviation: Float[Tensor, " task"] | None = None
    uncalibrated: Float[Tensor, "molecule output"] | None = None


def task_table(
    prediction: Float[Tensor, "molecule output"],
    target: Float[Tensor, "molecule task"],
    names: Sequence[str],
    kind: PropertyKind,
    resamples: int = 1000,
    deviation: Float[Tensor, " task"] | None = None,
) -> list[TaskRow]:
    """Measures every property and their mean.

    The interval is the middle 95 % of the main metric over resamples of the molecules, the same
    ones for all properties.

    Args:
        prediction: Values or probabilities, property after property.
        target: Targets, NaN where unknown.
        names: Names of the properties.
        kind: Kind of the properties.
        resamples: Number of bootstrap resamples; 0 for no interval.
        deviation: Deviations of the training targets of a regression; left out, all 1.

    Returns:
        One row a property; with several properties, one more for their mean.

    Example:
        >>> import torch
        >>> gold = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
        >>> rows = task_table(torch.tensor([[0.2, 0.9], [0.7, 0.8]]), gold, ["a", "b"], "binary", 0)
        >>> [(row.name, row.status, row.scores["roc_auc"]) for row in rows]
        [('a', 'counted', 1.0), ('b', 'single class', nan), ('mean', 'counted', 1.0)]
    """
    scores = scores_by_task(prediction, target, kind, deviation)
    draws = _resampled(prediction, target, kind, resamples)
    rows = []
    for task, name in enumerate(names):
        known = target[:, task][~target[:, task].isnan()]
        positives = int((known == 1).sum()) if kind == "binary" else None
        interval = _interval(draws[:, task])
        status = _status(known, kind)
        rows.append(TaskRow(name, known.numel(), positives, status, scores[task], interval))
    if len(names) > 1:
        counted = sum(row.molecules for row in rows)
        mean = mean_scores(scores, kind)
        means = np.zeros(0) if kind == "regression" else _means(draws)
        rows.append(TaskRow(_MEAN, counted, None, "counted", mean, _interval(means)))
    return rows


def _status(known: Tensor, kind: PropertyKind) -> str:
    if known.numel() == 0:
        return "no target"
    return "single class" if kind == "binary" and known.unique().numel() == 1 else "counted"


def left_out(
    target: Float[Tensor, "molecule task"], names: Sequence[str], kind: PropertyKind
) -> list[str]:
    """Names the properties that are not in the mean, and why; their targets alone tell.

    Args:
        target: Targets, NaN where unknown.
        names: Names of the properties.
        kind: Kind of the properties.

    Returns:
        One text a property.

    Example:
        >>> import torch
        >>> left_out(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), ["SR-ARE", "SR-p53"], "binary")
        ['SR-p53 (single class)']
    """
    columns = (column[~column.isnan()] for column in target.unbind(1))
    found = [(name, _status(known, kind)) for name, known in zip(names, columns, strict=True)]
    return [f"{name} ({status})" for name, status in found if status != "counted"]


def write_task_table(path: Path, rows: Sequence[TaskRow], kind: PropertyKind) -> Path:
    """Writes the table as CSV; cells that are not defined stay empty.

    Args:
        path: The file.
        rows: The table.
        kind: Kind of the properties.

    Returns:
        The path.
    """
    main, names = MAIN_METRIC[kind], METRICS[kind]
    with whole_file(path, newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["task", "molecules", "positives", "status", *names, f"{main}_low", f"{main}_high"]
        )
        for row in rows:
            numbers = [*(row.scores.get(name, float("nan")) for name in names), *row.interval]
            cells = ["" if number != number else f"{number:.6g}" for number in numbers]
            positives = "" if row.positives is None else row.positives
            writer.writerow([row.name, row.molecules, positives, row.status, *cells])
    return path


def _resampled(
    prediction: Tensor, target: Tensor, kind: PropertyKind, resamples: int
) -> np.ndarray:
    guess = prediction.double().cpu().numpy().reshape(target.size(0), target.size(1), -1)
    gold = target.double().cpu().numpy()
    found = np.full((resamples, gold.shape[1]), np.nan)
    done = 0
    for weight in _weights(gold.shape[0], resamples):
        for task in range(gold.shape[1]):
            known = ~np.isnan(gold[:, task])
            if known.any():
                part = slice(done, done + len(weight))
                found[part, task] = _weighted(
                    guess[known, task], gold[known, task], weight[:, known], kind
                )
        done += len(weight)
    return found


def _weights(molecules: int, resamples: int) -> Iterator[np.ndarray]:
    """Draws how often each molecule stands in each resample, a manageable number at a time."""
    generator = np.random.default_rng(0)
    at_once = max(1, _CELLS_AT_ONCE // max(1, molecules))
    chance = np.full(molecules, 1 / max(1, molecules))
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        yield generator.multinomial(molecules, chance, size=count).astype(float)


def _weighted(
    guess: np.ndarray, gold: np.ndarray, weight: np.ndarray, kind: PropertyKind
) -> np.ndarray:
    """Computes the main metric of one property under every row of weights."""
    total = weight.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        if kind == "regression":
            return np.sqrt(weight @ np.square(guess[:, 0] - gold) / total)
        if kind == "multiclass":
            return weight @ (guess.argmax(1) == gold).astype(float) / total
        return weighted_area(guess[:, 0], gold == 1, weight)


def weighted_area(
    score: Float[np.ndarray, " molecule"], positive: np.ndarray, weight: np.ndarray
) -> Float[np.ndarray, " resample"]:
    """Computes the area under the ROC curve for many weightings of the same scores at once.

    It is the share of pairs of a positive and a negative in the right order, ties half.

    Args:
        score: Scores.
        positive: Which are positive, ``[molecule]``.
        weight: Weights, ``[resample, molecule]``.

    Returns:
        Areas, NaN where a class has no weight.

    Example:
        >>> scores, labels = np.array([0.1, 0.4, 0.4]), np.array([False, True, False])
        >>> weighted_area(scores, labels, np.ones((1, 3)))
        array([0.75])
    """
    order = np.argsort(score, kind="stable")
    ranked, label = score[order], positive[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    ordered = weight[:, order]
    up = np.add.reduceat(ordered * label, starts, axis=1)
    down = np.add.reduceat(ordered * ~label, starts, axis=1)
    below = np.cumsum(down, axis=1) - down
    with np.errstate(invalid="ignore", divide="ignore"):
        return (up * (below + down / 2)).sum(1) / (up.sum(1) * down.sum(1))


def _means(draws: np.ndarray) -> np.ndarray:
    defined = ~np.isnan(draws)
    with np.errstate(invalid="ignore"):
        return np.where(defined, draws, 0.0).sum(1) / defined.sum(1)


def _interval(draws: np.ndarray) -> tuple[float, float]:
    defined = draws[~np.isnan(draws)]
    if defined.size == 0:
        return float("nan"), float("nan")
    low, high = np.percentile(defined, [2.5, 97.5])
    return float(low), float(high)
