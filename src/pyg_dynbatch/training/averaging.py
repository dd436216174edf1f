"""Average what several networks of one kind predict."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pyg_dynbatch.core.errors import mismatch


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
