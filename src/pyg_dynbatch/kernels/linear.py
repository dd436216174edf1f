"""A linear layer for the modules that an engine calls step by step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from pyg_dynbatch.core.engine import current_run
from pyg_dynbatch.core.errors import check_first_derivative
from pyg_dynbatch.core.row_buffer import GradientBuffer
from pyg_dynbatch.kernels.blocks import BLOCK
from pyg_dynbatch.kernels.products import RowProduct, packs

# A step packs the weight for itself alone. Measured: this pays off from a quarter as many rows on
# as for all levels of a fused layer, whose rule also counts rows.
_PACKS = 4


class Linear(nn.Linear):
    """``torch.nn.Linear``, faster in modules that an engine calls once per step.

    Within a run of an :class:`~pyg_dynbatch.Engine`, the gradients of the weight are summed
    in place over all steps, and steps of many rows multiply with weights packed for oneDNN where
    fused layers do so, too. Elsewhere, and under autocast, checkpoints and other hooks
    on saved tensors, it computes what ``torch.nn.Linear`` does. The parameters are the same.

    Args:
        in_features: Width of an input row.
        out_features: Width of an output row.
        bias: Whether to add a bias.

    Shape:
        - input: ``[..., in_features]``
        - returns: ``[..., out_features]``

    Example:
        >>> layer = Linear(3, 4)
        >>> layer(torch.ones(2, 3)).shape
        torch.Size([2, 4])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Multiply rows."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.t() + bias`` as :class:`Linear` does, from given parameters.

    Args:
        x: Rows, ``[row, in]``.
        weight: ``[out, in]``; its gradient is summed in place if it is an ``nn.Parameter``.
        bias: ``[out]``.

    Returns:
        Rows, ``[row, out]``.

    Example:
        >>> linear(torch.ones(2, 3), torch.ones(1, 3)).tolist()
        [[3.0], [3.0]]
    """
    run = None if torch.compiler.is_compiling() else current_run.get()
    fits = x.dim() == 2 and x.dtype == weight.dtype
    if run is None or not fits or torch.is_autocast_enabled(x.device.type):
        return functional.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return _product(x, weight, bias)
    if _hooked():
        return functional.linear(x, weight, bias)
    if type(weight) is not nn.Parameter or not weight.requires_grad:
        return _Linear.apply(x, weight, bias, None)
    if weight not in run.shared:
        gradients = GradientBuffer()
        gradients.forms = ((weight.shape, weight.dtype, weight.device),)
        run.shared[weight] = _Shared.apply(weight, gradients), gradients
    shared, gradients = run.shared[weight]
    return _Linear.apply(x, shared, bias, gradients)


def _hooked() -> bool:
    """Return whether saved tensors are replaced: a checkpoint computes them again after the run."""
    # Newer than the oldest supported torch.
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top_hooks is None or top_hooks(True) is not None


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows, in blocks with a packed weight if that pays off."""
    size = rows.size(0)
    if not packs(weight, _PACKS * size):
        return functional.linear(rows, weight, bias)
    multiply = RowProduct(weight, bias, rows=_PACKS * size)
    product = rows.new_empty(size, weight.size(0))
    for first in range(0, size, BLOCK):
        product[first : first + BLOCK] = multiply(rows, first, min(BLOCK, size - first))
    return product


class _Shared(Function):
    """The weight itself; in the backward pass, the sum of its gradients over all steps."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: GradientBuffer) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, None]:
        ((shape, dtype, _),) = ctx.gradients.forms
        return ctx.gradients.take(0, shape[0], [dtype])[0], None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradients: GradientBuffer | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients = gradients
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("Linear", "torch.nn.Linear")
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        of_weight = None
        if for_weight and ctx.gradients is None:
            of_weight = gradient.t() @ x
        elif for_weight:
            ctx.gradients.add_product(gradient, x)
        of_x = _product(gradient, weight.t()) if for_x else None
        return of_x, of_weight, gradient.sum(0) if for_bias else None, None
