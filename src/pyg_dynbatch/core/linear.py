"""Linear layers within a run: one gradient per weight for all steps, and packed products."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable, forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyg_dynbatch.core.products import BLOCK, RowProduct, packs

# The mode below costs a microsecond for each call of torch within a step. Measured on AMD (Zen 4),
# where training and inference take so much of the time without it, trees of 20 words (modes
# ``generic-torch`` and ``engine-torch`` of benchmarks.sst):
#
#   units, trees     a cell in a layer     recorded calls
#     300, 512          0.93, 0.91           0.90, 0.85
#     300, 256          0.91, 0.93           0.92, 0.88
#     300, 64           1.02, 1.03           1.02, 1.03
#     150, 512          1.02, 1.02           1.01, 1.01
_MANY_ROWS = 512
_LARGE_MATRIX = 2**18

# `packs` has a rule for the rows of all levels of a fused layer. A step packs the weight for itself
# alone, and this pays off from half as many rows on (measured): each counts as two.
_ROWS_PER_ROW_OF_A_STEP = 2


# Layers that choose another way, with other results for masked rows, while a mode is active.
_WITH_FAST_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)

_AS_TORCH: AbstractContextManager[None] = nullcontext()


class RunProducts(TorchFunctionMode):
    """Computes ``torch.nn.functional.linear``, and so ``torch.nn.Linear``, in the steps of one run.

    Autograd alone computes the gradient of a weight for every step, and adds them up in memory of
    their own. Here they are summed in place, and handed to the parameter once, at the end of the
    backward pass. On AMD, products are those of oneDNN, with a packed weight. Both pay off, and are
    done, for many rows and large weights alone.

    Results are those of torch up to rounding. Under autocast, checkpoints and other hooks on saved
    tensors, transforms of ``torch.func`` and ``torch.compile``, they are left to torch.

    Args:
        module: What the steps call. Its parameters say whether products are large enough.

    Example:
        >>> layer = nn.Linear(512, 512)
        >>> with RunProducts(layer).of_step(torch.device("cpu"), 1_000):
        ...     layer(torch.ones(1_000, 512)).shape
        torch.Size([1000, 512])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Of each weight, the link (see below) and the sum of its gradients.
        self.sums: dict[tuple[nn.Parameter, torch.dtype], tuple[Tensor, WeightGradient]] = {}

    def of_step(self, device: torch.device, size: int) -> AbstractContextManager[object]:
        """Return the context of a step with this many rows."""
        if size < _MANY_ROWS or device.type != "cpu" or not self._pays_off:
            return _AS_TORCH
        return self

    @cached_property
    def _pays_off(self) -> bool:
        if any(isinstance(part, _WITH_FAST_PATHS) for part in self.module.modules()):
            return False
        weights = (each for each in self.module.parameters() if each.dim() == 2)
        return any(weight.numel() >= _LARGE_MATRIX for weight in weights)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or compute a linear map here."""
        kwargs = kwargs or {}
        if func is functional.linear and "out" not in kwargs and _is_plain(*args, **kwargs):
            return self.linear(*args, **kwargs)
        return func(*args, **kwargs)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``input @ weight.t() + bias``, of plain tensors."""
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
            weight_gradient = WeightGradient()
            self.sums[key] = _Summed.apply(weight, weight_gradient), weight_gradient
        return _Linear.apply(rows, weight, bias, *self.sums[key])


def _is_plain(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether these are tensors, and this is a moment, for which the functions below are right."""
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    # A mode of the user, below ours, may compute something else.
    if is_transformed or is_traced or torch._C._len_torch_function_stack():
        return False
    given = (input, weight) if bias is None else (input, weight, bias)
    if any(type(each) not in (Tensor, nn.Parameter) or each.is_nested for each in given):
        return False
    if input.dim() < 2 or weight.dim() != 2 or weight.numel() < _LARGE_MATRIX:
        return False
    if input.size(-1) != weight.size(1) or not weight.dtype.is_floating_point:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    if any(each.dtype != weight.dtype or each.layout != torch.strided for each in given):
        return False
    return not (torch.is_autocast_enabled(input.device.type) or _are_hooked())


def _are_hooked() -> bool:
    """Whether saved tensors are replaced: a checkpoint computes them again after the run."""
    # Newer than the oldest supported torch.
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top_hooks is None or top_hooks(True) is not None


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows, in blocks with a packed weight if that pays off."""
    size = rows.size(0)
    counted = _ROWS_PER_ROW_OF_A_STEP * size
    if not packs(weight, counted):
        return functional.linear(rows, weight, bias)
    multiply = RowProduct(weight, bias, rows=counted)
    product = rows.new_empty(size, weight.size(0))
    for first in range(0, size, BLOCK):
        product[first : first + BLOCK] = multiply(rows, first, min(BLOCK, size - first))
    return product


class WeightGradient:
    """Sum of the gradients of a weight over the steps of a run, for each backward pass.

    In a pass: add(gradient, rows) for each product → take(), once
    """

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}  # by the number of the pass: one may run within another

    def add(self, gradient: Tensor, rows: Tensor) -> None:
        """Add that of a product with rows, given the gradient of the product."""
        backward_pass = torch._C._current_graph_task_id()
        total = self.sums.get(backward_pass)
        if total is not None:
            total.addmm_(gradient.t(), rows)
            return
        self.sums[backward_pass] = gradient.t() @ rows

        def forget() -> None:  # a pass for other gradients alone does not take the sum
            self.sums.pop(backward_pass, None)

        Variable._execution_engine.queue_callback(forget)

    def take(self) -> Tensor | None:
        """Return the sum of this backward pass; None if there were no gradients."""
        return self.sums.pop(torch._C._current_graph_task_id(), None)


# A product hands the gradient of its weight to the sum. Autograd does not know about it: an empty
# tensor, the link, is made from the weight and given to all products. So the backward pass reaches
# the function that made the link, and returns the sum, after all products:
#
#     link = _Summed.apply(weight, weight_gradient)
#     y = _Linear.apply(x, weight, bias, link, weight_gradient), and so on for each step


class _Summed(Function):
    """Makes the link; its backward pass returns the sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, weight_gradient: WeightGradient) -> Tensor:
        ctx.weight_gradient = weight_gradient
        ctx.set_materialize_grads(False)
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, None]:
        return ctx.weight_gradient.take(), None


class _Linear(Function):
    """Multiplies rows; its backward pass adds to the sum, or without one returns the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        link: Tensor | None,
        weight_gradient: WeightGradient | None,
    ) -> Tensor:
        for_rows, for_weight, *_ = ctx.needs_input_grad
        # The numbers of the weight, too: it may get others by ``weight.data = ...``.
        saved_weight = (weight, weight.detach()) if for_rows else (None, None)
        ctx.save_for_backward(rows if for_weight else None, *saved_weight)
        ctx.weight_gradient = weight_gradient
        ctx.set_materialize_grads(False)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        rows, weight, numbers = ctx.saved_tensors
        for_rows, for_weight, for_bias, *_ = ctx.needs_input_grad
        # A pass that is recorded, or runs for many gradients at once, takes what torch knows.
        is_batched = torch._C._functorch.is_legacy_batchedtensor(gradient)
        is_plain = not (torch.is_grad_enabled() or is_batched)
        of_rows = of_weight = None
        if for_weight:
            if is_plain and ctx.weight_gradient is not None:
                ctx.weight_gradient.add(gradient, rows)
            else:
                of_weight = gradient.t() @ rows
        if for_rows:
            of_rows = _product(gradient, numbers.t()) if is_plain else gradient @ weight
        of_bias = gradient.sum(0) if for_bias else None
        return of_rows, of_weight, of_bias, None, None
