"""Measure predictions property by property, with tables, intervals and pictures."""

import csv
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional import (
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    spearman_corrcoef,
)
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from pyg_dynbatch.core.files import whole_file
from pyg_dynbatch.molecules.schema import MoleculeSchema, PropertyKind
from pyg_dynbatch.training.report import CALIBRATION, PARITY, TASK_TABLE
from pyg_dynbatch.visualize import draw_calibration, draw_parity, new_figure, save_figure

MAIN_METRIC: dict[PropertyKind, str] = {
    "regression": "rmse",
    "binary": "roc_auc",
    "multiclass": "accuracy",
}
"""Name of the metric that one property is judged by, by kind."""

METRICS: dict[PropertyKind, tuple[str, ...]] = {
    "regression": ("rmse", "mae", "r2", "spearman", "scaled_rmse"),
    "binary": ("roc_auc", "prc_auc", "accuracy"),
    "multiclass": ("accuracy", "roc_auc"),
}
"""Names of all metrics, by kind of property."""

IN_UNITS = ("rmse", "mae")
"""Metrics in the unit of their property, of which several properties have no mean."""

_NAN = float("nan")


class PredictionBuffer(Metric):
    """Collects predictions and targets of one pass, over all devices."""

    full_state_update = False
    prediction: list[Tensor]
    target: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("prediction", [], dist_reduce_fx="cat")
        self.add_state("target", [], dist_reduce_fx="cat")

    def update(
        self, prediction: Float[Tensor, "molecule output"], target: Float[Tensor, "molecule task"]
    ) -> None:
        """Adds the molecules of a batch."""
        self.prediction.append(prediction.detach().float())
        self.target.append(target.detach().float())

    def compute(self) -> tuple[Tensor, Tensor]:
        """Puts all molecules one after another; a single number loses its dimensions."""
        return _joined(self.prediction), _joined(self.target)

    def table(
        self, num_tasks: int
    ) -> tuple[Float[Tensor, "molecule output"], Float[Tensor, "molecule task"]]:
        """Gives predictions and targets of all molecules of all devices, on the host."""
        prediction, target = (part.cpu() for part in self.compute())
        rows = target.numel() // num_tasks
        return prediction.reshape(rows, -1), target.reshape(rows, num_tasks)


def _joined(parts: Any) -> Tensor:
    # After a reduction over devices the list has become one tensor.
    return torch.cat(parts) if isinstance(parts, list) else parts


def classes_of(target: Float[Tensor, " molecule"]) -> int:
    """Counts the different labels of one property."""
    return int(target.unique().numel())


def property_scores(
    prediction: Float[Tensor, "molecule number"],
    target: Float[Tensor, " molecule"],
    kind: PropertyKind,
    deviation: float = 1.0,
) -> dict[str, float]:
    """Measures the predictions of one property."""
    known = ~torch.isnan(target)
    guess, gold = prediction[known].double().cpu(), target[known].double().cpu()
    if gold.numel() == 0:
        return dict.fromkeys(METRICS[kind], _NAN)
    if kind == "regression":
        scores = _of_values(guess[:, 0], gold)
        return {**scores, "scaled_rmse": scores["rmse"] / deviation}
    label = gold.long()
    if kind == "multiclass":
        areas = [_area(guess[:, c], (label == c).long()) for c in range(guess.size(1))]
        defined = torch.tensor([area for area in areas if area == area])
        return {
            "accuracy": float((guess.argmax(1) == label).double().mean()),
            "roc_auc": float(defined.mean()) if len(defined) else _NAN,
        }
    return {
        "roc_auc": _area(guess[:, 0], label),
        "prc_auc": _precision(guess[:, 0], label),
        "accuracy": float(((guess[:, 0] > 0.5) == (label == 1)).double().mean()),
    }


def _of_values(guess: Tensor, gold: Tensor) -> dict[str, float]:
    scores = {
        "rmse": float(mean_squared_error(guess, gold, squared=False)),
        "mae": float(mean_absolute_error(guess, gold)),
        "r2": _NAN,
        "spearman": _NAN,
    }
    if gold.numel() > 1 and classes_of(gold) > 1:
        scores["r2"] = float(r2_score(guess, gold))
        if classes_of(guess) > 1:
            scores["spearman"] = float(spearman_corrcoef(guess, gold))
    return scores


def _area(guess: Tensor, label: Tensor) -> float:
    return float(binary_auroc(guess, label)) if classes_of(label.double()) == 2 else _NAN


def _precision(guess: Tensor, label: Tensor) -> float:
    if classes_of(label.double()) != 2:
        return _NAN
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No positive samples")
        return float(binary_average_precision(guess, label))


def scores_by_task(
    prediction: Float[Tensor, "molecule output"],
    target: Float[Tensor, "molecule task"],
    kind: PropertyKind,
    deviation: Float[Tensor, " task"] | None = None,
) -> list[dict[str, float]]:
    """Measures the predictions of every property."""
    each = prediction.unflatten(1, (target.size(1), -1))
    units = [1.0] * target.size(1) if deviation is None else deviation.tolist()
    return [
        property_scores(each[:, task], target[:, task], kind, unit)
        for task, unit in enumerate(units)
    ]


def mean_scores(scores: list[dict[str, float]], kind: PropertyKind) -> dict[str, float]:
    """Averages metrics over the properties for which they are defined."""
    means = {}
    for name in METRICS[kind]:
        if len(scores) > 1 and name in IN_UNITS:
            continue
        defined = [each[name] for each in scores if each[name] == each[name]]
        means[name] = sum(defined) / len(defined) if defined else _NAN
    return means


_CELLS_AT_ONCE = 4_000_000
_MEAN = "mean"


@dataclass(frozen=True)
class TaskRow:
    """Holds one line of the table of properties."""

    name: str
    molecules: int
    positives: int | None
    status: str
    scores: dict[str, float]
    interval: tuple[float, float]


@dataclass(frozen=True)
class TestedSplit:
    """Holds what a test has found, for tables and pictures."""

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
    """Measures every property and their mean."""
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
    """Names the properties that are not in the mean, and why; their targets alone tell."""
    columns = (column[~column.isnan()] for column in target.unbind(1))
    found = [(name, _status(known, kind)) for name, known in zip(names, columns, strict=True)]
    return [f"{name} ({status})" for name, status in found if status != "counted"]


def write_task_table(path: Path, rows: Sequence[TaskRow], kind: PropertyKind) -> Path:
    """Writes the table as CSV; cells that are not defined stay empty."""
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
    """Computes the area under the ROC curve for many weightings of the same scores at once."""
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


_MOST_SHOWN = 12


def report_test(folder: Path, tested: TestedSplit, resamples: int) -> list[TaskRow]:
    """Writes the table of properties and draws parity (regression) or calibration (binary)."""
    schema = tested.schema
    rows = task_table(
        tested.prediction,
        tested.target,
        schema.task_names,
        schema.kind,
        resamples,
        tested.deviation,
    )
    write_task_table(folder / TASK_TABLE, rows, schema.kind)
    if schema.kind != "multiclass":
        _draw(folder, tested, rows)
    return rows


def _draw(folder: Path, tested: TestedSplit, rows: list[TaskRow]) -> None:
    schema = tested.schema
    known = [t for t in range(schema.num_tasks) if rows[t].molecules]
    counted = known[:_MOST_SHOWN]
    if not counted:
        return
    columns = min(4, len(counted))
    figure, axes = new_figure(math.ceil(len(counted) / columns), columns, 3.8, 3.8)
    for place in axes[len(counted) :]:
        place.set_axis_off()
    gold, guess = tested.target.double().numpy(), tested.prediction.double().numpy()
    raw = tested.uncalibrated
    for place, task in zip(axes, counted, strict=False):
        given = (place, gold[:, task], guess[:, task], _title(rows[task], schema.kind))
        if schema.kind == "regression":
            draw_parity(*given)
        else:
            before = None if raw is None else raw[:, task].double().numpy()
            draw_calibration(*given, uncalibrated=before)
    if len(known) < schema.num_tasks or len(counted) < len(known):
        figure.suptitle(_left_out(schema.num_tasks, len(counted), len(known)))
    name = PARITY if schema.kind == "regression" else CALIBRATION
    save_figure(figure, folder / name)


def _left_out(tasks: int, drawn: int, known: int) -> str:
    unknown = f", {tasks - known} without targets" if known < tasks else ""
    return f"{drawn} of {tasks} properties{unknown}; all of them: {TASK_TABLE}"


def _title(row: TaskRow, kind: str) -> str:
    main = MAIN_METRIC[kind]  # type: ignore[index]
    score = row.scores[main]
    found = f"{main} {score:.3f}" if score == score else row.status
    return f"{row.name}\n{found}, {row.molecules:,} molecules"
