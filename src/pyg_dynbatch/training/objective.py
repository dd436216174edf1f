"""Turn logits into a loss that means the same on one device and on many."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Reduction = Literal["sum", "mean", "per_tree"]

UNLABELLED = -1


def summed_cross_entropy(
    logits: Float[Tensor, "node class"], labels: Int[Tensor, " node"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Adds up the cross entropy of all labelled rows, and counts them, without a device sync.

    Args:
        logits: One row a node.
        labels: Class of each node, -1 where there is none.

    Returns:
        The sum of the losses, and the number of labelled rows.

    Example:
        >>> loss, count = summed_cross_entropy(torch.zeros(3, 2), torch.tensor([0, 1, -1]))
        >>> round(loss.item(), 4), count.item()
        (1.3863, 2)
    """
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(exact, labels, ignore_index=UNLABELLED, reduction="sum")
    return loss, (labels != UNLABELLED).sum()


def scaled_over_ranks(
    loss: Float[Tensor, ""],
    terms: Int[Tensor, ""] | None,
    world_size: int,
    add_up: Callable[[Tensor], Tensor],
) -> Float[Tensor, ""]:
    """Scales the sum of one rank so that the average of the gradients over ranks is right.

    Distributed training averages the gradients of the ranks, however many terms each of them
    has. For a mean over all terms of the global batch every rank must therefore hand in
    ``sum · ranks / (terms of all ranks)``, and for a sum ``sum · ranks``.

    Args:
        loss: Sum of the losses on this rank.
        terms: What the sum of all ranks is divided by, this rank's share; ``None`` for a sum.
        world_size: Number of ranks.
        add_up: Adds a tensor up over all ranks.

    Returns:
        The loss to call ``backward`` on.

    Example:
        >>> alone = scaled_over_ranks(torch.tensor(6.0), torch.tensor(3), 1, lambda t: t)
        >>> alone.item()
        2.0
    """
    if terms is None:
        return loss * world_size
    everywhere = add_up(terms.to(loss.dtype)) if world_size > 1 else terms.to(loss.dtype)
    return loss * world_size / everywhere.clamp(min=1)
