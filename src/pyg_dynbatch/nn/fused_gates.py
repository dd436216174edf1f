"""The gates of Tree-LSTMs, forwards and backwards, in place on the rows of one block."""

from collections.abc import Sequence

import torch
from torch import Tensor

# A plain number for every device and dtype; written as a tensor so that -1 + 2x is one pass.
_MINUS_ONE = torch.tensor(-1.0)


def finish_candidate(squashed: Tensor) -> None:
    """Makes tanh(x) of sigmoid(2x), in place.

    Args:
        squashed: What the logistic function gave of the doubled rows.
    """
    torch.add(_MINUS_ONE, squashed, alpha=2, out=squashed)


def new_states(
    gates: Sequence[Tensor],
    memory: Tensor,
    squashed: Tensor,
    hidden: Tensor,
    keep: Tensor | None,
    carried: bool,
) -> None:
    """Writes ``c = i * u (+ what is carried)``, ``tanh(c)`` and ``h = o * tanh(c)``.

    Args:
        gates: u, i, o.
        memory: Where c goes; holds what the forget gates let through if ``carried``.
        squashed: Where tanh(c) goes.
        hidden: Where h goes.
        keep: Factors of u (recurrent dropout).
        carried: Whether there are children.
    """
    u, i, o = gates
    candidate = u if keep is None else u * keep
    if carried:
        memory.addcmul_(i, candidate)
    else:
        torch.mul(i, candidate, out=memory)
    torch.mul(memory, 2, out=squashed)
    finish_candidate(squashed.sigmoid_())
    torch.mul(o, squashed, out=hidden)


def gate_gradients(
    gates: Sequence[Tensor],
    grads: Tensor,
    totals: tuple[Tensor, Tensor],
    squashed: Tensor,
    keep: Tensor | None,
) -> Tensor:
    """Writes the gradients of u, i, o after activation; gives that of the memory.

    Args:
        gates: u, i, o.
        grads: Where the gradients go, in that order, side by side.
        totals: Gradients of h and c; both are used up.
        squashed: tanh(c).
        keep: Factors of u.

    Returns:
        The gradient of c, that through h included.
    """
    u, i, o = gates
    hidden, memory = totals
    width = u.size(1)
    torch.mul(hidden, squashed, out=grads[:, 2 * width : 3 * width])
    hidden.mul_(o)
    memory += torch.ops.aten.tanh_backward.grad_input(hidden, squashed, grad_input=hidden)
    candidate = memory if keep is None else memory * keep
    torch.mul(candidate, i, out=grads[:, :width])
    torch.mul(candidate, u, out=grads[:, width : 2 * width])
    return memory


def through_activations(gates: Tensor, grads: Tensor, width: int) -> None:
    """Takes gradients of u and of all other gates back through tanh and the logistic function.

    Args:
        gates: Activated; u first.
        grads: Changed in place.
        width: Columns of u.
    """
    through_tanh, u = grads[:, :width], gates[:, :width]
    torch.ops.aten.tanh_backward.grad_input(through_tanh, u, grad_input=through_tanh)
    through_logistic(gates[:, width:], grads[:, width:])


def through_logistic(gates: Tensor, grads: Tensor) -> None:
    """Takes gradients back through the logistic function, in place.

    Args:
        gates: Activated.
        grads: Changed in place.
    """
    torch.ops.aten.sigmoid_backward.grad_input(grads, gates, grad_input=grads)
