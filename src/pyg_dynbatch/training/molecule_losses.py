"""Losses of molecular properties of which some are unknown."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.molecule_schema import PropertyKind

RegressionLoss = Literal["mse", "l1", "huber"]

_WIDEST = math.log(20.0)
_HALVINGS = 50
_OF_REGRESSION = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.smooth_l1_loss}


class TargetScale(nn.Module):
    """Brings targets to mean 0 and standard deviation 1, and predictions back.

    Both numbers are fitted on the training split and are buffers, so every checkpoint has them.
    Of binary properties they scale the logits: the deviation is one over the temperature.

    Args:
        num_tasks: Number of properties.

    Example:
        >>> scale = TargetScale(1)
        >>> scale.fit(torch.tensor([[1.0], [3.0], [torch.nan]]))
        >>> scale.scaled(torch.tensor([[3.0]])).item(), scale.restored(torch.tensor([[1.0]])).item()
        (1.0, 3.0)
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_tasks))
        self.register_buffer("deviation", torch.ones(num_tasks))

    def fit(self, targets: Float[Tensor, "molecule task"]) -> None:
        """Measures mean and standard deviation of the known targets of every property.

        A property that is constant, or known nowhere, keeps the deviation 1.

        Args:
            targets: Targets, NaN where unknown.
        """
        exact = targets.double()
        mean = exact.nanmean(0).nan_to_num(0.0)
        deviation = (exact - mean).square().nanmean(0).nan_to_num(0.0).sqrt()
        self.mean.copy_(mean)
        self.deviation.copy_(torch.where(deviation > 1e-8, deviation, torch.ones_like(deviation)))

    def calibrate(
        self, logits: Float[Tensor, "molecule task"], target: Float[Tensor, "molecule task"]
    ) -> None:
        """Fits the temperatures of binary properties.

        Args:
            logits: What the model gives for the validation split.
            target: Labels 0 and 1, NaN where unknown.
        """
        self.deviation.copy_(1 / fitted_temperature(logits, target))

    def scaled(self, values: Float[Tensor, "molecule task"]) -> Float[Tensor, "molecule task"]:
        """Brings values to the scale of the model."""
        return (values - self.mean) / self.deviation

    def restored(self, outputs: Float[Tensor, "molecule task"]) -> Float[Tensor, "molecule task"]:
        """Brings outputs of the model to the units of the targets."""
        return outputs * self.deviation + self.mean


def known_cells(target: Float[Tensor, "molecule task"]) -> Bool[Tensor, "molecule task"]:
    """Finds the known targets.

    Args:
        target: Targets, NaN where unknown.

    Returns:
        True where a target is known.
    """
    return ~torch.isnan(target)


def summed_property_loss(
    output: Float[Tensor, "molecule output"],
    target: Float[Tensor, "molecule task"],
    kind: PropertyKind,
    weight: Float[Tensor, " task"],
    positive_weight: Float[Tensor, " task"],
    regression: RegressionLoss = "mse",
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    r"""Adds up the losses of the known cells, and counts them, without a device sync.

    .. math::
        L = \sum_{m,t \text{ known}} w_t \, \ell(o_{mt}, y_{mt})

    Args:
        output: What the model gives: values on the scale of the targets, logits of the positive
            class, or one logit a class, property after property.
        target: Targets on the scale of the model, NaN where unknown.
        kind: Kind of the properties.
        weight: Weight of each property.
        positive_weight: Weight of a positive label of each binary property.
        regression: Loss of a regression.

    Returns:
        The sum, and the number of known cells.

    Example:
        >>> one = torch.ones(1)
        >>> target = torch.tensor([[1.0], [torch.nan]])
        >>> loss, terms = summed_property_loss(torch.zeros(2, 1), target, "binary", one, one)
        >>> round(loss.item(), 4), terms.item()
        (0.6931, 1)
    """
    known = known_cells(target)
    # Put a number in the place of every NaN first: 0 * NaN is NaN, in the gradients too.
    filled = torch.where(known, target, torch.zeros_like(target))
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if kind == "regression":
        cells = _OF_REGRESSION[regression](exact, filled.to(exact.dtype), reduction="none")
    elif kind == "binary":
        cells = F.binary_cross_entropy_with_logits(
            exact,
            filled.to(exact.dtype),
            pos_weight=positive_weight.to(exact.dtype),
            reduction="none",
        )
    else:
        by_class = exact.unflatten(1, (target.size(1), -1)).movedim(-1, 1)
        cells = F.cross_entropy(by_class, filled.long(), reduction="none")
    weighted = torch.where(known, cells * weight.to(cells.dtype), torch.zeros_like(cells))
    return weighted.sum(), known.sum()


def balanced_positive_weight(targets: Float[Tensor, "molecule task"]) -> Float[Tensor, " task"]:
    """Computes the weight of a positive label that makes both classes count alike.

    Args:
        targets: Labels 0 and 1, NaN where unknown.

    Returns:
        Negatives over positives of each property; 1 where a class is absent.

    Example:
        >>> balanced_positive_weight(torch.tensor([[1.0], [0.0], [0.0], [torch.nan]]))
        tensor([2.])
    """
    positives = (targets == 1).sum(0)
    negatives = (targets == 0).sum(0)
    both = (positives > 0) & (negatives > 0)
    return torch.where(both, negatives / positives.clamp(min=1), torch.ones(targets.size(1)))


def fitted_temperature(
    logits: Float[Tensor, "molecule task"], target: Float[Tensor, "molecule task"]
) -> Float[Tensor, " task"]:
    r"""Finds the temperatures that make the known labels most likely.

    .. math::
        T_t = \operatorname*{arg\,min}_{T} - \sum_{m \text{ known}}
            \log \sigma\bigl((2 y_{mt} - 1) \, z_{mt} / T\bigr)

    Args:
        logits: Logits of the positive class.
        target: Labels 0 and 1, NaN where unknown.

    Returns:
        One temperature per property, from 0.05 to 20: logits that separate the labels, or rank them
        the wrong way round, have no best one.

    Raises:
        ValueError: If the known labels of a property are all alike, or there are none.

    Reference:
        Guo et al. (2017), arXiv:1706.04599, section 4.2.

    Example:
        >>> logits = torch.tensor([[4.0], [4.0], [4.0], [-4.0]])
        >>> label = torch.tensor([[1.0], [1.0], [0.0], [0.0]])
        >>> round(fitted_temperature(logits, label).item(), 2)
        3.64
    """
    known = known_cells(target)
    check_both_classes(target)
    label = torch.where(known, target, 0.5).double()
    score = torch.where(known, logits.double(), 0.0)
    low = torch.full((target.size(1),), -_WIDEST, dtype=torch.float64, device=target.device)
    high = -low
    # The loss is convex in 1/T, so its slope changes sign once.
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slope = (score * ((score * middle.exp()).sigmoid() - label)).sum(0)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    return (-(low + high) / 2).exp().float()


def check_both_classes(
    target: Float[Tensor, "molecule task"], names: Sequence[str] | None = None
) -> None:
    """Refuses validation labels that no temperature can be fitted to.

    Args:
        target: Labels 0 and 1, NaN where unknown.
        names: Names of the properties; left out, their numbers.

    Raises:
        ValueError: If the known labels of a property are all alike, or there are none.
    """
    both = (target == 0).any(0) & (target == 1).any(0)
    if not bool(both.all()):
        task = int((~both).nonzero()[0, 0])
        raise ValueError(
            mismatch(
                "calibration: the validation split has no labels of both classes",
                expected="labels 0 and 1 of every property",
                got=f"{int(known_cells(target)[:, task].sum())} labels, all alike",
                where=f"property {task if names is None else names[task]}",
                mend="a larger or stratified validation split, or calibration: none",
            )
        )
