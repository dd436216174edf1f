"""Average what several networks of one kind predict."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch
from pyg_dynbatch.training.molecule_losses import TargetScale
from pyg_dynbatch.training.molecule_schema import PropertyKind


class AveragedNetwork(nn.Module):
    r"""Averages the probabilities that several networks give, and returns their logarithm.

    .. math::
        \log \bar p = \log \frac1K \sum_k \mathrm{softmax}(z_k)

    The softmax of the result is :math:`\bar p` again, so it takes the place of one network's
    logits, or of its log-probabilities.

    Args:
        members: The networks.

    Raises:
        ValueError: If there is no network.

    Reference:
        Looks et al. (2017), arXiv:1702.02181, table 2, last row.

    Example:
        >>> members = [nn.Linear(2, 3), nn.Linear(2, 3)]
        >>> AveragedNetwork(members)(torch.ones(1, 2)).exp().sum().round().item()
        1.0
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members:
            raise ValueError(
                mismatch("AveragedNetwork: no networks", expected="one or more", got=0)
            )
        self.members = nn.ModuleList(members)

    def forward(self, batch: Any) -> Float[Tensor, "row class"]:
        """Averages over the members.

        Args:
            batch: What the members take.

        Returns:
            Log-probabilities, one row for each row of the members' results.
        """
        logs = torch.stack([F.log_softmax(member(batch), dim=-1) for member in self.members])
        return logs.logsumexp(0) - math.log(len(self.members))


def predicted_values(
    output: Float[Tensor, "molecule output"],
    scale: TargetScale,
    kind: PropertyKind,
    num_tasks: int,
) -> Float[Tensor, "molecule output"]:
    """Turns outputs of a network into values in the units of the data, or probabilities.

    Args:
        output: What the network gives.
        scale: Scale of the targets it was trained on, or of calibrated logits.
        kind: Kind of the properties.
        num_tasks: Number of properties.

    Returns:
        Values or probabilities, property after property.

    Example:
        >>> predicted_values(torch.zeros(1, 2), TargetScale(1), "multiclass", 1)
        tensor([[0.5000, 0.5000]])
    """
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if kind == "regression":
        return scale.restored(exact)
    if kind == "binary":
        return scale.restored(exact).sigmoid()
    return exact.unflatten(1, (num_tasks, -1)).softmax(-1).view_as(exact)


class AveragedProperties(nn.Module):
    """Averages the values or probabilities that several networks give for molecules.

    Every member was trained on the scale of its own training split; values are averaged in the
    units of the data, and what comes out can take the place of one network's outputs.

    Args:
        members: The networks, each with the scale of its targets.
        scale: Scale of the result.
        kind: Kind of the properties.
        num_tasks: Number of properties.

    Raises:
        ValueError: If there is no network.

    Example:
        >>> scale = TargetScale(1)
        >>> members = [(nn.Linear(2, 1), scale), (nn.Linear(2, 1), scale)]
        >>> AveragedProperties(members, scale, "binary", 1)(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        members: Sequence[tuple[nn.Module, TargetScale]],
        scale: TargetScale,
        kind: PropertyKind,
        num_tasks: int,
    ) -> None:
        super().__init__()
        if not members:
            raise ValueError(
                mismatch("AveragedProperties: no networks", expected="one or more", got=0)
            )
        self.members = nn.ModuleList(network for network, _ in members)
        self.scales = nn.ModuleList(own for _, own in members)
        self.scale = scale
        self.kind: PropertyKind = kind
        self.num_tasks = num_tasks

    def forward(self, batch: Any) -> Float[Tensor, "molecule output"]:
        """Averages over the members.

        Args:
            batch: What the members take.

        Returns:
            Scaled values, logits, or log-probabilities.
        """
        outputs = [member(batch) for member in self.members]
        if self.kind != "multiclass":
            scales: list[TargetScale] = list(self.scales)  # type: ignore[arg-type]
            pairs = zip(outputs, scales, strict=True)
            values = torch.stack([scale.restored(output) for output, scale in pairs])
            if self.kind == "regression":
                return self.scale.scaled(values.mean(0))
            # log(p / (1 - p)) of the mean probability, exact also where p is nearly 0 or 1.
            mean = F.logsigmoid(values).logsumexp(0) - F.logsigmoid(-values).logsumexp(0)
            return self.scale.scaled(mean)
        logs = torch.stack(outputs).unflatten(2, (self.num_tasks, -1)).log_softmax(-1)
        return (logs.logsumexp(0) - math.log(len(outputs))).view_as(outputs[0])
