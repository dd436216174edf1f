"""Layers, and their states and gradients, for the tests of fused Tree-LSTMs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer
from pyg_dynbatch.nn.fused_tree_lstm import fused_tree_lstm


def layers(width: int, arities: Sequence[int] = (1, 2, 3), **options: Any) -> Iterator:
    """N-ary layers, and a child-sum one, with biases."""
    torch.manual_seed(0)
    made = [NaryTreeLSTM(3, width, arity, **options) for arity in arities]
    for layer in (*made, ChildSumTreeLSTM(3, width, **options)):
        with torch.no_grad():
            layer.cell.bias.normal_()
        yield layer


def on_gpu(dtype: torch.dtype) -> Tensor:
    """A tensor without values, on a GPU that need not be there."""
    with FakeTensorMode():
        return torch.empty(1, 2, dtype=dtype, device="cuda")


def run_fused(
    layer: RecursiveLayer, schedule: Levels, inputs: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Runs a Tree-LSTM with a given dropout mask, for instance."""
    cell: Any = layer.cell
    weights = cell.weight_input, cell.weight_hidden, cell.bias
    return fused_tree_lstm(schedule, inputs, weights, **options)


def everything(
    layer: RecursiveLayer, schedule: Levels, inputs: Tensor, expand: bool = False, **options: Any
) -> list[Tensor]:
    """States and all gradients; with the same draws of dropout every time."""
    inputs = inputs.detach().to(layer.cell.bias.dtype).requires_grad_()
    torch.manual_seed(7)
    if "dropout_mask" in options:
        h, c = run_fused(layer, schedule, inputs, **options)
    else:
        h, c = layer(inputs, schedule=schedule, return_state=True, **options)
    if expand:
        # All gradients of a state are one number.
        loss = h.sum() + 2 * c.sum()
    else:
        weights = torch.linspace(-1, 2, h.numel(), dtype=torch.float64).view_as(h)
        loss = (h.double() * weights).sum() + (c.double() * weights.flip(0)).sum()
    return [h, c, *torch.autograd.grad(loss, [*layer.parameters(), inputs])]


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for mine, right in zip(found, wanted, strict=True):
        scale = max(right.abs().max().item(), 1.0) if right.numel() else 1.0
        torch.testing.assert_close(mine.double(), right.double(), rtol=2e-5, atol=2e-6 * scale)
