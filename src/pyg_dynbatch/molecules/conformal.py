"""Split-conformal intervals for values and sets of classes, calibrated on the validation split."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.molecules.schema import MoleculeSchema
from pyg_dynbatch.prediction import ExactBuffers


class ConformalSets(ExactBuffers):
    r"""Intervals and sets that hold the target of a new molecule with a chosen probability.

    The score of a molecule is :math:`|y - \hat y|` for a value, :math:`1 - \hat p_y` for a class.
    The margin of a property is the :math:`\lceil (n + 1) c \rceil`-th smallest of its :math:`n`
    scores, for the coverage :math:`c`; a set holds everything whose score is at most the margin. If
    the molecules are exchangeable with those of the calibration, it holds the target with a
    probability of at least :math:`c`, on average over all molecules.

    Args:
        schema: What the predictions mean.
        coverage: The probability, between 0 and 1.

    Raises:
        ValueError: If the coverage is not between 0 and 1.

    Reference:
        Vovk, Gammerman, Shafer (2005), doi:10.1007/b106715; Sadinle, Lei, Wasserman (2019),
        doi:10.1080/01621459.2017.1395341 (sets of classes).
    """

    margin: Tensor

    def __init__(self, schema: MoleculeSchema, coverage: float) -> None:
        super().__init__()
        if not 0 < coverage < 1:
            what = "ConformalSets: the coverage is out of range"
            raise mismatch(ValueError, what, "between 0 and 1, such as 0.9", coverage)
        self.schema = schema
        self.coverage = coverage
        self.register_buffer("margin", torch.full((schema.num_tasks,), math.nan).double())

    @property
    def fitted(self) -> bool:
        """Whether the margins are known."""
        return not bool(self.margin.isnan().any())

    def check(self, targets: Float[Tensor, "molecule task"], names: Sequence[str]) -> None:
        """Raise an error if a property has too few targets for the coverage."""
        least = math.ceil(self.coverage / (1 - self.coverage) - 1e-9)
        for name, known in zip(names, (~targets.isnan()).sum(0).tolist(), strict=True):
            if known < least:
                what = f"coverage: too few validation targets of {name}"
                expected = f"at least {least} for a coverage of {self.coverage}"
                raise mismatch(ValueError, what, expected, known, hint="a larger validation split")

    def fit(
        self, values: Float[Tensor, "molecule output"], targets: Float[Tensor, "molecule task"]
    ) -> None:
        """Compute the margins from predictions and targets, NaN where unknown."""
        for task, (scores, target) in enumerate(zip(self._scores(values), targets.T, strict=True)):
            known = ~target.isnan()
            found = self._of_target(scores, target)[known].sort().values
            rank = math.ceil((len(found) + 1) * self.coverage - 1e-9)
            self.margin[task] = found[rank - 1] if rank <= len(found) else math.inf

    def columns(self, values: Float[Tensor, "molecule output"]) -> dict[str, Tensor]:
        """Name the ends of intervals, or whether each class is in the set, of every molecule."""
        columns: dict[str, Tensor] = {}
        names = self.schema.task_names
        for task, (name, scores) in enumerate(zip(names, self._scores(values), strict=True)):
            if self.schema.kind == "regression":
                columns[f"low_{name}"] = values[:, task] - self.margin[task]
                columns[f"high_{name}"] = values[:, task] + self.margin[task]
            else:
                columns[f"set_{name}"] = (scores <= self.margin[task]).long()
        return columns

    def measured(
        self, values: Float[Tensor, "molecule output"], targets: Float[Tensor, "molecule task"]
    ) -> list[dict[str, float]]:
        """Return the share of targets that are covered, and the mean width or size, by property."""
        size = "width" if self.schema.kind == "regression" else "set_size"
        found = []
        for task, (scores, target) in enumerate(zip(self._scores(values), targets.T, strict=True)):
            known, margin = ~target.isnan(), float(self.margin[task])  # on any device
            inside: Bool[Tensor, " known"] = self._of_target(scores, target)[known] <= margin
            sizes = (scores <= margin).sum(1)[known].double()
            mean = 2 * margin if self.schema.kind == "regression" else sizes.mean()
            found.append({"coverage": float(inside.double().mean()), size: float(mean)})
        return found

    def _scores(self, values: Tensor) -> list[Tensor]:
        """Return for every property the values, or the scores of all classes."""
        each = values.unflatten(1, (self.schema.num_tasks, -1)).unbind(1)
        if self.schema.kind == "regression":
            return list(each)
        if self.schema.kind == "binary":
            return [torch.cat([chance, 1 - chance], 1) for chance in each]
        return [1 - chance for chance in each]

    def _of_target(self, scores: Tensor, target: Tensor) -> Tensor:
        if self.schema.kind == "regression":
            return (scores[:, 0] - target).abs()
        return scores.gather(1, target.nan_to_num(0).long()[:, None])[:, 0]
