"""Run N-ary and child-sum Tree-LSTMs over a whole schedule in one autograd function.

The forward pass computes the leaves, and then the inner nodes level by level, from products with
weights (u, i, o and the forget gates f) to states (h and c). The backward pass goes from the roots
to the leaves; gradients of weights are products over all nodes at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyg_dynbatch.core.errors import describe_value, mismatch
from pyg_dynbatch.core.levels import Levels
from pyg_dynbatch.core.native import is_native
from pyg_dynbatch.core.products import RowProduct, sum_rows, weight_gradient
from pyg_dynbatch.core.row_buffer import check_backward
from pyg_dynbatch.core.types import without_autocast
from pyg_dynbatch.kernels.blocks import (
    BlockKernel,
    Gates,
    Kernel,
    RunPlan,
    RunRows,
    StateGradients,
    TorchGates,
    checked_leaf_inputs,
    operand_of,
    sum_segments,
)
from pyg_dynbatch.kernels.native import NativeGates, NativeKernel, casting_pays_off, runs_at_once


def tree_lstm(
    schedule: Levels,
    inputs: Tensor,
    weights: Sequence[Tensor],
    *,
    leaf_inverse: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    level_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run a Tree-LSTM over all levels of a schedule, which has the arity of the cell.

    Arguments are as for ``RecursiveCell.run_schedule``; ``weights`` are the cell's
    ``weight_input``, ``weight_hidden`` and ``bias``, and ``dropout_mask`` factors of u, one row per
    node. The precision of products is that of autocast, if it is enabled, or float32 where that is
    faster than bfloat16.
    """
    precision = _precision_of_products(schedule, inputs, weights)
    half = precision == torch.bfloat16 and weights[2].dtype == torch.float32
    keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (inputs, *weights))
    plan = RunPlan(
        schedule,
        checked_leaf_inputs(schedule, inputs, leaf_inverse),
        leaf_inverse=leaf_inverse,
        dropout_mask=dropout_mask,
        half=half,
        precision=None if half else precision,
        level_order=level_order,
        keeps=keeps,
    )
    _check_weights(inputs, weights, plan, mixed=precision is not None)

    if half:
        # Once per run, as autocast would; autograd casts the gradients back.
        inputs = inputs.to(torch.bfloat16)
        weights = (*(weight.to(torch.bfloat16) for weight in weights[:2]), weights[2])
    inputs = inputs.contiguous()

    kernel = choose_kernel(plan, inputs, weights)
    if keeps:
        states: tuple[Tensor, Tensor] = _TreeLSTM.apply(plan, kernel, inputs, *weights)
        return states
    return _forward(plan, kernel, inputs, weights)[0]


def _precision_of_products(
    schedule: Levels, inputs: Tensor, weights: Sequence[Tensor]
) -> torch.dtype | None:
    """The dtype to which the operands of products are cast for autocast, if they are."""
    device = inputs.device.type
    if not torch.is_autocast_enabled(device) or weights[2].dtype == torch.float64:
        return None
    precision = torch.get_autocast_dtype(device)
    if precision == torch.bfloat16 and not casting_pays_off(schedule, inputs, weights):
        return None
    return precision


def in_gate_order(iou: Tensor, f: Tensor) -> Tensor:
    """Join the rows of i, o and u, and those of f, in the order of the kernels: u, i, o, f."""
    io, u = iou.split_with_sizes((2 * f.size(0), f.size(0)))
    return torch.cat([u, io, f])


def choose_kernel(plan: RunPlan, inputs: Tensor, weights: Sequence[Tensor]) -> Kernel:
    """Choose what runs a schedule, once per call."""
    # Under autocast, weights may have another dtype than the inputs. If all products are in half
    # precision, states have the dtype of the bias.
    if not is_native(*(weights[2:] if plan.half else (inputs, *weights))):
        return BlockKernel(TorchGates)
    return NativeKernel() if runs_at_once(plan, weights) else BlockKernel(NativeGates)


def _forward(
    plan: RunPlan, kernel: Kernel, inputs: Tensor, weights: Sequence[Tensor]
) -> tuple[tuple[Tensor, Tensor], RunRows]:
    """Return h and c in the requested order, and all rows of the run."""
    with without_autocast(inputs):
        rows = kernel.forward(plan, inputs, weights)
    return (plan.in_order(rows.hidden), plan.in_order(rows.memory)), rows


class _TreeLSTM(Function):
    @staticmethod
    def forward(
        ctx: Any, plan: RunPlan, kernel: Kernel, inputs: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        states, rows = _forward(plan, kernel, inputs, weights)
        ctx.plan = plan
        ctx.kernel = kernel
        ctx.save_for_backward(inputs, *weights[:2], *rows.kept)
        ctx.set_materialize_grads(False)
        return states

    @staticmethod
    def backward(
        ctx: Any, grad_h: Tensor | None, grad_c: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        check_backward((grad_h, grad_c))
        plan: RunPlan = ctx.plan
        # Hooks on saved tensors may have changed the layout.
        saved: list[Any] = [
            None if part is None else part.contiguous() for part in ctx.saved_tensors
        ]
        inputs, weight_input, weight_hidden = saved[:3]
        rows = RunRows(*saved[3:])

        needs_inputs, _, needs_hidden, _ = ctx.needs_input_grad[2:]
        grad_inputs = torch.empty_like(inputs) if needs_inputs else None
        grad_hidden = None

        with without_autocast(inputs):
            incoming = StateGradients.of_results(plan, grad_h, grad_c, rows)
            grads, of_leaves = ctx.kernel.backward(plan, rows, weight_hidden, incoming)
            grad_weight, grad_bias = _input_gradients(
                plan, grads, of_leaves, inputs, weight_input, grad_inputs
            )
            if needs_hidden:
                grad_hidden = _hidden_gradient(plan, grads, rows)
        return None, None, grad_inputs, grad_weight, grad_hidden, grad_bias


def _hidden_gradient(plan: RunPlan, grads: Gates, rows: RunRows) -> Tensor:
    """Compute the gradient of the weight of h."""
    of_rows = weight_gradient(grads.rows, operand_of(plan, rows), plan.precision)
    if grads.forget is None:
        return of_rows
    return torch.cat([of_rows, weight_gradient(grads.forget, rows.gathered, plan.precision)])


def _input_gradients(
    plan: RunPlan,
    grads: Gates,
    of_leaves: Tensor,
    inputs: Tensor,
    weight: Tensor,
    grad_inputs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the inputs' weight and the bias, and write those of the inputs."""
    width = of_leaves.size(1) // 3
    own = slice(0, 3 * width)
    leaves = slice(0, plan.leaf_inputs)

    grad_weight = torch.empty_like(weight)
    # Leaves have no forget gates.
    grad_weight[own.stop :] = 0
    weight_gradient(of_leaves[leaves], inputs[leaves], plan.precision, grad_weight[own])
    if grad_inputs is not None:
        _write_input_gradients(plan, of_leaves, weight[own], grad_inputs[leaves])

    if inputs.size(0) > plan.leaf_inputs:
        of_inner = _input_product_gradients(plan, grads, width)
        if grad_inputs is not None:
            _write_input_gradients(plan, of_inner, weight, grad_inputs[plan.leaf_inputs :])
        grad_weight += weight_gradient(of_inner, inputs[plan.leaf_inputs :], plan.precision)

    if grads.forget is None:
        grad_bias = _fold_forget(sum_rows(grads.rows)[None], width)[0]
    else:
        grad_bias = torch.cat([sum_rows(grads.rows), sum_rows(grads.forget)])
    grad_bias[own] += sum_rows(of_leaves)
    return grad_weight, grad_bias


def _write_input_gradients(plan: RunPlan, grads: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write ``grads @ weight``, block by block."""
    product = RowProduct(weight.t(), precision=plan.precision, rows=out.size(0))
    for first in range(0, out.size(0), plan.block):
        size = min(plan.block, out.size(0) - first)
        product.into(out[first : first + size], grads, first, size)


def _input_product_gradients(plan: RunPlan, grads: Gates, width: int) -> Tensor:
    """The gradients of ``W x`` of the inner nodes with an input: all children share that of f."""
    rows = grads.rows
    if grads.forget is not None:
        rows = torch.cat([rows, sum_segments(grads.forget, plan.numbers, plan.child_start)], 1)
    if any(block.filled != block.size for block in plan.blocks):
        filled = [rows[b.first : b.first + b.filled] for b in plan.blocks if b.filled]
        rows = torch.cat(filled) if filled else rows[:0]
    return rows if grads.forget is not None else _fold_forget(rows, width)


def _fold_forget(grads: Tensor, width: int) -> Tensor:
    """Sum the forget gates of all children of a node, which share ``W x + b``."""
    folded = grads[:, : 4 * width].clone()
    for first in range(4 * width, grads.size(1), width):
        folded[:, 3 * width :] += grads[:, first : first + width]
    return folded


def _check_weights(
    inputs: Tensor, weights: Sequence[Tensor], plan: RunPlan, *, mixed: bool
) -> None:
    """Check what kernels read by address: ``functional_call`` can replace any weight."""
    width = weights[2].size(0) // 4
    slots = 1 if plan.ragged else plan.arity
    shapes = (4 * width, inputs.size(1)), ((3 + slots) * width, slots * width), (4 * width,)
    for weight, shape in zip(weights, shapes, strict=True):
        has_dtype = mixed or weight.dtype == inputs.dtype
        if weight.shape != shape or not has_dtype or weight.device != inputs.device:
            problem = "Tree-LSTM: a weight does not fit"
            expected = (
                f"{inputs.dtype}{list(shape)} on {inputs.device}, as inputs and other weights"
            )
            got = f"{describe_value(weight)} on {weight.device}"
            raise mismatch(ValueError, problem, expected, got)
