"""Tree-LSTM layers, schedules, and states with all gradients, for the tests of kernels."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.kernels.tree_lstm import tree_lstm
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer


def layers(width: int, arities: Sequence[int] = (1, 2, 3), **options: Any) -> Iterator:
    """N-ary layers, and a child-sum one, with biases."""
    torch.manual_seed(0)
    made = [NaryTreeLSTM(3, width, arity, **options) for arity in arities]
    for layer in (*made, ChildSumTreeLSTM(3, width, **options)):
        with torch.no_grad():
            layer.cell.bias.normal_()
        yield layer


def schedule_of(
    parents: Sequence[int], arity: int | None, has_input: Tensor | None = None
) -> Levels:
    """Node k is a child of ``parents[k]`` unless that is k; as far as there are free slots."""
    taken = [0] * len(parents)
    edges = []
    for child, parent in enumerate(parents):
        if child != parent and (arity is None or taken[parent] < arity):
            taken[parent] += 1
            edges.append((child, parent))
    pairs = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()
    return schedule_structure(pairs, len(taken), arity=arity, has_input=has_input)


def combs(trees: int, layer: RecursiveLayer, has_input: Tensor | None = None) -> Levels:
    """Trees of 9 nodes, 5 levels deep; their levels have as many nodes as there are trees."""
    comb = range(-1, 8) if layer.arity == 1 else (0, 0, 1, 2, 3, 3, 2, 1, 0)
    parents = [9 * tree + max(parent, 0) for tree in range(trees) for parent in comb]
    return schedule_of(parents, layer.arity, has_input)


def run_fused(
    layer: RecursiveLayer, schedule: Levels, inputs: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Runs a Tree-LSTM with a given dropout mask, for instance."""
    cell: Any = layer.cell
    weights = cell.weight_input, cell.weight_hidden, cell.bias
    return tree_lstm(schedule, inputs, weights, **options)


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


Given = tuple[Levels, Tensor, dict[str, Any]]
"""A schedule, its input rows, and options of :func:`everything`."""

# Two trees, a chain and a lone node.
PARENTS = (2, 2, 6, 5, 5, 6, 6, 8, 9, 10, 10, 11)


def some_inputs(layer: RecursiveLayer) -> Given:
    """The last nodes of levels have no input."""
    has_input = torch.tensor([node not in (4, 5, 9) for node in range(12)])
    return schedule_of(PARENTS, layer.arity, has_input), torch.randn(12, 3), {}


def leaf_inputs(layer: RecursiveLayer) -> Given:
    has_input = torch.tensor([node in (0, 1, 3, 7, 11) for node in range(12)])
    return schedule_of(PARENTS, layer.arity, has_input), torch.randn(12, 3), {}


def many_parents(layer: RecursiveLayer) -> Given:
    edges = torch.tensor([[0, 1, 0, 1, 2, 0], [2, 2, 3, 3, 4, 4]])
    schedule = schedule_structure(edges, 5, arity=layer.arity)
    assert not schedule.single_parent
    return schedule, torch.randn(5, 3), {}


def dropout_mask(layer: RecursiveLayer, dtype: torch.dtype = torch.float32) -> Given:
    mask = torch.rand(5, 12, dtype=dtype).t() * 2  # not contiguous
    return schedule_of(PARENTS, layer.arity), torch.randn(12, 3), {"dropout_mask": mask}


def equal_leaves(layer: RecursiveLayer) -> Given:
    options = {"leaf_inverse": torch.tensor([1, 0, 1]), "level_order": True}
    return schedule_of((2, 2, 4, 4, 4), layer.arity), torch.randn(4, 3), options


def alone(nodes: int, *parents: int) -> Callable[[RecursiveLayer], Given]:
    parents = parents or tuple(range(nodes))
    return lambda layer: (schedule_of(parents, layer.arity), torch.randn(nodes, 3), {})


CASES: dict[str, Callable[[RecursiveLayer], Given]] = {
    "inputs at some nodes": some_inputs,
    "inputs at leaves": leaf_inputs,
    "one node": alone(1),
    "leaves": alone(3),
    "one edge": alone(2, 1, 1),
    "many parents": many_parents,
    "dropout": dropout_mask,
    "dropout in double precision": lambda layer: dropout_mask(layer, torch.float64),
    "equal leaves": equal_leaves,
    "equal leaves, gradients of one number": lambda layer: (
        *equal_leaves(layer)[:2],
        equal_leaves(layer)[2] | {"expand": True},
    ),
    "rows that are not contiguous": lambda layer: (
        schedule_of(PARENTS, layer.arity),
        torch.randn(3, 24).t()[::2],
        {},
    ),
}
