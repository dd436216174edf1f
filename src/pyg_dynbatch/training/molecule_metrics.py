"""Measure predictions of molecular properties, property by property, known cells alone."""

import warnings
from typing import Any

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

from pyg_dynbatch.training.molecule_schema import PropertyKind

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


class CellTable(Metric):
    """Collects predictions and targets of one pass, over all devices.

    Example:
        >>> cells = CellTable()
        >>> cells.update(torch.tensor([[0.5]]), torch.tensor([[1.0]]))
        >>> cells.table(num_tasks=1)
        (tensor([[0.5000]]), tensor([[1.]]))
    """

    full_state_update = False
    prediction: list[Tensor]
    target: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("prediction", [], dist_reduce_fx="cat")
        self.add_state("target", [], dist_reduce_fx="cat")

    def update(
        self,
        prediction: Float[Tensor, "molecule output"],
        target: Float[Tensor, "molecule task"],
    ) -> None:
        """Adds the molecules of a batch.

        Args:
            prediction: Values, or probabilities.
            target: Targets, NaN where unknown.
        """
        self.prediction.append(prediction.detach().float())
        self.target.append(target.detach().float())

    def compute(self) -> tuple[Tensor, Tensor]:
        """Puts all molecules one after another; a single number loses its dimensions."""
        return _joined(self.prediction), _joined(self.target)

    def table(
        self, num_tasks: int
    ) -> tuple[Float[Tensor, "molecule output"], Float[Tensor, "molecule task"]]:
        """Gives predictions and targets of all molecules of all devices, on the host.

        Args:
            num_tasks: Number of properties.

        Returns:
            Predictions and targets.
        """
        prediction, target = (part.cpu() for part in self.compute())
        rows = target.numel() // num_tasks
        return prediction.reshape(rows, -1), target.reshape(rows, num_tasks)


def _joined(parts: Any) -> Tensor:
    # After a reduction over devices the list has become one tensor.
    return torch.cat(parts) if isinstance(parts, list) else parts


def classes_of(target: Float[Tensor, " molecule"]) -> int:
    """Counts the different labels of one property.

    Args:
        target: Known labels.

    Returns:
        How many there are.
    """
    return int(target.unique().numel())


def property_scores(
    prediction: Float[Tensor, "molecule number"],
    target: Float[Tensor, " molecule"],
    kind: PropertyKind,
    deviation: float = 1.0,
) -> dict[str, float]:
    """Measures the predictions of one property.

    Args:
        prediction: The value, the probability of the positive class, or that of every class.
        target: Targets, NaN where unknown; these molecules are left out.
        kind: Kind of the property.
        deviation: Of a regression, the unit of ``scaled_rmse``: that of the training targets.

    Returns:
        Metrics by name; NaN for one that is not defined, such as the area under the curve of
        labels that are all alike.

    Example:
        >>> chance, gold = torch.tensor([[0.1], [0.9]]), torch.tensor([0.0, 1.0])
        >>> found = property_scores(chance, gold, "binary")
        >>> found["roc_auc"], found["accuracy"]
        (1.0, 1.0)
    """
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
    """Measures the predictions of every property.

    Args:
        prediction: Values or probabilities, property after property.
        target: Targets, NaN where unknown.
        kind: Kind of the properties.
        deviation: Deviations of the training targets of a regression; left out, all 1.

    Returns:
        Metrics by name, one mapping a property.
    """
    each = prediction.unflatten(1, (target.size(1), -1))
    units = [1.0] * target.size(1) if deviation is None else deviation.tolist()
    return [
        property_scores(each[:, task], target[:, task], kind, unit)
        for task, unit in enumerate(units)
    ]


def mean_scores(scores: list[dict[str, float]], kind: PropertyKind) -> dict[str, float]:
    """Averages metrics over the properties for which they are defined.

    Metrics in the units of several properties have no mean and are left out.

    Args:
        scores: What :func:`scores_by_task` gave.
        kind: Kind of the properties.

    Returns:
        Means by name, NaN for a metric that is defined nowhere.

    Example:
        >>> mean_scores([{"accuracy": 1.0, "roc_auc": float("nan")}], "multiclass")["accuracy"]
        1.0
    """
    means = {}
    for name in METRICS[kind]:
        if len(scores) > 1 and name in IN_UNITS:
            continue
        defined = [each[name] for each in scores if each[name] == each[name]]
        means[name] = sum(defined) / len(defined) if defined else _NAN
    return means
