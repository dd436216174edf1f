"""Linear layers within a run: one gradient per weight for all steps, and packed products."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyg_dynbatch.core.products import BLOCK, RowProduct, chosen_products, packs
from pyg_dynbatch.core.row_buffer import GradientBuffer

# A step packs the weight for itself alone. Measured: this pays off from a quarter as many rows on
# as for all levels of a fused layer, whose rule also counts rows.
_PACKS = 4
_ROWS_THAT_PACK = 256

# The mode below costs a microsecond for each call of torch within a step, so it is left out where
# a step has fewer rows.
_ROWS_THAT_TRAIN = 64


class RunProducts(TorchFunctionMode):
    """Computes ``torch.nn.functional.linear``, and so ``torch.nn.Linear``, in the steps of one run.

    Autograd alone computes the gradient of a weight for every step, and adds them up in memory of
    their own. Here they are summed in place, and handed to the parameter once, at the end of the
    backward pass. Steps of many rows multiply with weights packed for oneDNN where that is faster.

    Results are those of torch up to rounding. Under autocast, checkpoints and other hooks on saved
    tensors, transforms of ``torch.func`` and ``torch.compile``, they are left to torch.

    Example:
        >>> products, layer = RunProducts(), nn.Linear(3, 4)
        >>> with products.of_step(torch.device("cpu"), 1_000):
        ...     layer(torch.ones(1_000, 3)).shape
        torch.Size([1000, 4])
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[tuple[nn.Parameter, torch.dtype], tuple[Tensor, GradientBuffer]] = {}

    def of_step(self, device: torch.device, size: int) -> AbstractContextManager[object]:
        """Return the context of a step with this many rows."""
        if device.type != "cpu":
            return nullcontext()
        training = torch.is_grad_enabled()
        packing = size >= _ROWS_THAT_PACK and chosen_products().packed
        pays_off = packing or (training and size >= _ROWS_THAT_TRAIN)
        return self if pays_off else nullcontext()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or compute a linear map here."""
        if func is functional.linear:
            return self.linear(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``input @ weight.t() + bias``."""
        if input.dim() < 2 or not _is_plain(input, weight):
            return functional.linear(input, weight, bias)
        rows = input.reshape(-1, input.size(-1))
        result = self._linear_of_rows(rows, weight, bias)
        return result if input.dim() == 2 else result.unflatten(0, input.shape[:-1])

    def _linear_of_rows(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled():
            return _product(rows, weight, bias)
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return _Linear.apply(rows, weight, bias, None, None)
        key = weight, weight.dtype  # which a module may change within a run
        if key not in self.sums:
            gradients = GradientBuffer()
            gradients.forms = ((weight.shape, weight.dtype, weight.device),)
            self.sums[key] = _Summed.apply(weight, gradients), gradients
        return _Linear.apply(rows, weight, bias, *self.sums[key])


def _is_plain(rows: Tensor, weight: Tensor) -> bool:
    """Whether these are tensors for which the autograd functions below are right."""
    if torch.compiler.is_compiling():
        return False
    if type(rows) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False
    if rows.dtype != weight.dtype or weight.dim() != 2 or rows.size(-1) != weight.size(1):
        return False
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (torch.is_autocast_enabled(rows.device.type) or is_transformed or _are_hooked())


def _are_hooked() -> bool:
    """Whether saved tensors are replaced: a checkpoint computes them again after the run."""
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


# A product hands the gradient of its weight to a buffer. Autograd does not know about it: an empty
# tensor, made from the weight, links all products to the function that returns the sum.


class _Summed(Function):
    """Makes the empty tensor; its backward pass comes after those of all products."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradients: GradientBuffer) -> Tensor:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, None]:
        if torch.is_grad_enabled():  # the products returned the gradients themselves
            return None, None
        ((shape, dtype, _device),) = ctx.gradients.forms
        return ctx.gradients.take(0, shape[0], [dtype])[0], None


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        link: Tensor | None,
        gradients: GradientBuffer | None,
    ) -> Tensor:
        # The numbers of the weight, too: it may get others by ``weight.data = ...``.
        ctx.save_for_backward(rows, weight, weight.detach())
        ctx.gradients = gradients
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, numbers = ctx.saved_tensors
        for_rows, for_weight, for_bias, *_ = ctx.needs_input_grad
        of_rows = of_weight = None
        if for_weight:
            if ctx.gradients is None or torch.is_grad_enabled():
                of_weight = gradient.t() @ rows
            else:
                ctx.gradients.add_product(gradient, rows)
        if for_rows:
            # A backward pass that is itself recorded takes functions that autograd knows.
            recorded = torch.is_grad_enabled()
            of_rows = gradient @ weight if recorded else _product(gradient, numbers.t())
        of_bias = gradient.sum(0) if for_bias else None
        return of_rows, of_weight, of_bias, None, None
