"""Measure predictions property by property, with a table, bootstrap intervals and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.prediction import Columns, write_table
from pyg_dynbatch.training.exact import average_precision, r2, rmse, spearman, varies
from pyg_dynbatch.training.report import FILES, panels
from pyg_dynbatch.visualize import draw_calibration, draw_parity, save_figure

METRICS: dict[PropertyKind, tuple[str, ...]] = {
    "regression": ("rmse", "mae", "r2", "spearman", "scaled_rmse"),
    "binary": ("roc_auc", "prc_auc", "accuracy"),
    "multiclass": ("accuracy", "roc_auc"),
}
"""Names of all metrics by kind of property; the first is the main one."""

IN_UNITS = ("rmse", "mae")
"""Metrics in the unit of their property, of which several properties have no mean."""

_NAN = float("nan")
_WEIGHTS_AT_ONCE = 4_000_000
_MOST_DRAWN = 12


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
            scores["roc_auc"] = _area(guess[:, 0], gold == 1)
            scores["prc_auc"] = average_precision(guess[:, 0], gold == 1)
    else:
        scores["accuracy"] = float((guess.argmax(1) == gold).mean())
        # The mean over the classes for which the area is defined.
        areas = [_area(chance, gold == c) for c, chance in enumerate(guess.T) if varies(gold == c)]
        scores["roc_auc"] = float(np.mean(areas)) if areas else _NAN
    return scores


def _area(score: np.ndarray, positive: np.ndarray) -> float:
    return float(weighted_area(score, positive, np.ones((1, score.size)))[0])


@dataclass(frozen=True)
class ScoredSplit:
    """Predictions of a split, in the units of the data or as probabilities, and their scores."""

    prediction: Float[Tensor, "molecule output"]
    target: Float[Tensor, "molecule task"]  # NaN where unknown
    schema: MoleculeSchema
    deviation: Float[Tensor, " task"] | None = None  # of the training targets
    uncalibrated: Float[Tensor, "molecule output"] | None = None
    sets: Sequence[Mapping[str, float]] | None = None  # coverage and size by property

    @cached_property
    def scores(self) -> list[dict[str, float]]:
        """The metrics of every property."""
        tasks = self.schema.num_tasks
        units = [1.0] * tasks if self.deviation is None else self.deviation.tolist()
        each = self.prediction.unflatten(1, (tasks, -1)).unbind(1)
        parts = zip(each, self.target.unbind(1), units, strict=True)
        return [property_scores(guess, gold, self.schema.kind, unit) for guess, gold, unit in parts]

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
            known = column[~column.isnan()]
            single = self.schema.kind == "binary" and not varies(known.numpy())
            reason = "single class" if single else "counted"
            found.append(reason if known.numel() else "no target")
        return found

    @property
    def left_out(self) -> list[str]:
        """The properties that are not part of the mean, and why."""
        pairs = zip(self.schema.task_names, self.status, strict=True)
        return [f"{name} ({status})" for name, status in pairs if status != "counted"]


def task_table(split: ScoredSplit, resamples: int = 1000) -> Columns:
    """Tabulate the metrics of every property and their mean, with 95 % bootstrap intervals."""
    schema, main = split.schema, METRICS[split.schema.kind][0]
    known = (~split.target.isnan()).sum(0).tolist()
    ones = (split.target == 1).sum(0).tolist()
    positives = ones if schema.kind == "binary" else [""] * schema.num_tasks
    names = ("task", "molecules", "positives", "status")
    facts = zip(schema.task_names, known, positives, split.status, strict=True)
    rows: list[dict[str, Any]] = [
        dict(zip(names, fact, strict=True)) | scores
        for fact, scores in zip(facts, split.scores, strict=True)
    ]
    for row, measured in zip(rows, split.sets or [], strict=False):
        row |= measured
    draws = _resampled(split, resamples)
    if schema.num_tasks > 1:
        rows.append(dict(zip(names, ("mean", sum(known), "", "counted"), strict=True)) | split.mean)
        # Errors in different units have no mean.
        mean = draws.nanmean(1, keepdim=True) * (_NAN if main in IN_UNITS else 1.0)
        draws = torch.cat([draws, mean], 1)
    ends = torch.tensor([0.025, 0.975], dtype=draws.dtype)
    for row, column in zip(rows, draws.unbind(1), strict=True):
        row[f"{main}_low"], row[f"{main}_high"] = column.nanquantile(ends).tolist()
    # The mean has no entry for errors in units, or for sets.
    return {name: np.array([row.get(name, _NAN) for row in rows], dtype=object) for name in rows[0]}


def _resampled(split: ScoredSplit, resamples: int) -> Float[Tensor, "resample task"]:
    """Compute the main metric of every property for resamples of the molecules."""
    gold = split.target.double().numpy()
    guess = split.prediction.double().numpy().reshape(*gold.shape, -1)
    molecules, tasks = gold.shape
    found = np.full((max(1, resamples), tasks), np.nan)
    generator = np.random.default_rng(0)
    chance = np.full(molecules, 1 / molecules)
    at_once = max(1, _WEIGHTS_AT_ONCE // molecules)
    for start in range(0, resamples, at_once):
        count = min(at_once, resamples - start)
        # How often each molecule is in each resample.
        weight = generator.multinomial(molecules, chance, size=count).astype(float)
        for task in range(tasks):
            known = ~np.isnan(gold[:, task])
            if known.any():
                parts = guess[known, task], gold[known, task], weight[:, known]
                found[start : start + count, task] = _weighted(*parts, split.schema.kind)
    return torch.from_numpy(found)


def _weighted(
    guess: np.ndarray, gold: np.ndarray, weight: np.ndarray, kind: PropertyKind
) -> np.ndarray:
    """Compute the main metric of one property for every row of weights."""
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
    """Compute the area under the ROC curve for many weightings of the same scores at once."""
    order = np.argsort(score, kind="stable")
    ranked, label = score[order], positive[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    ordered = weight[:, order]
    up = np.add.reduceat(ordered * label, starts, axis=1)
    down = np.add.reduceat(ordered * ~label, starts, axis=1)
    below = np.cumsum(down, axis=1) - down
    with np.errstate(invalid="ignore", divide="ignore"):
        return (up * (below + down / 2)).sum(1) / (up.sum(1) * down.sum(1))


def report_test(folder: Path, split: ScoredSplit, resamples: int) -> None:
    """Write the table of properties and draw parity (regression) or calibration (binary)."""
    table = task_table(split, resamples)
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
            raw = None if split.uncalibrated is None else split.uncalibrated[:, task].numpy()
            draw_calibration(panel, gold[:, task], guess[:, task], title, uncalibrated=raw)
    if len(drawn) < schema.num_tasks:
        unknown = schema.num_tasks - len(known)
        without = f", {unknown} without targets" if unknown else ""
        share = f"{len(drawn)} of {schema.num_tasks} properties"
        figure.suptitle(f"{share}{without}; all of them: {FILES['task table']}")
    picture = "parity plot" if schema.kind == "regression" else "calibration plot"
    save_figure(figure, folder / FILES[picture])
