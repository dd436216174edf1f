"""Fused Tree-LSTMs save no more numbers for the backward pass than they need."""

import pytest
import torch
from torch import Tensor

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.products import MAKES, Products, use_products
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer

WIDTH = 6


def complete(levels: int) -> tuple[Tensor, int]:
    """Edges of a complete binary tree, and its number of nodes."""
    nodes = 2**levels - 1
    child = torch.arange(1, nodes)
    return torch.stack([child, (child - 1) // 2]), nodes


def kept(layer: RecursiveLayer, schedule: Levels, x: Tensor) -> int:
    """Count the numbers that autograd saves in a forward pass, except parameters and inputs."""
    found: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        found[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes() // 4
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        layer(x, schedule=schedule, inputs_only=True, level_order=True)
    for mine in (x, *layer.parameters()):
        found.pop(mine.untyped_storage().data_ptr(), None)
    return sum(found.values())


def case(layer: RecursiveLayer) -> tuple[Levels, Tensor, int, int]:
    edges, nodes = complete(7)
    leaves = 64
    has_input = torch.arange(nodes) >= nodes - leaves
    schedule = schedule_structure(edges, nodes, arity=layer.arity, has_input=has_input)
    return schedule, torch.randn(leaves, 3), leaves, nodes - leaves


@pytest.mark.parametrize("make", (NaryTreeLSTM, ChildSumTreeLSTM))
def test_with_gradients(make: type[RecursiveLayer]) -> None:
    layer = make(3, WIDTH)
    schedule, x, leaves, inner = case(layer)
    if layer.arity == 2:
        # c, tanh(c) and three gates of a leaf; and of an inner node five gates and two children.
        wanted = WIDTH * (5 * leaves + (2 + 5 + 2) * inner)
    else:
        # Of an inner node three gates and the sum; of each child h and the forget gate.
        wanted = WIDTH * (5 * leaves + (2 + 3 + 1) * inner + 2 * (leaves + inner - 1))
    # And a row of zeros for missing children before c and tanh(c).
    wanted += 2 * WIDTH
    for choice in (Products(), MAKES["AuthenticAMD"]):
        with use_products(choice):
            assert kept(layer, schedule, x) == wanted


def test_half_as_much_in_half_precision() -> None:
    layer = NaryTreeLSTM(3, WIDTH)
    schedule, x, leaves, inner = case(layer)
    # c of all nodes, after a row of zeros; half a number each for the rest.
    wanted = WIDTH * (1 + leaves + inner)
    wanted += WIDTH * (1 + 4 * leaves + (1 + 5 + 2) * inner) // 2
    # Input rows and weights, as they were cast.
    cell = layer.cell
    wanted += (x.numel() + cell.weight_input.numel() + cell.weight_hidden.numel()) // 2
    with use_products(Products()), torch.autocast("cpu", torch.bfloat16):
        assert kept(layer, schedule, x) == wanted


@pytest.mark.parametrize("make", (NaryTreeLSTM, ChildSumTreeLSTM))
def test_nothing_without_gradients(make: type[RecursiveLayer]) -> None:
    layer = make(3, WIDTH)
    schedule, x, _, _ = case(layer)
    recorded = layer(x, schedule=schedule, inputs_only=True)
    with torch.no_grad():
        assert kept(layer, schedule, x) == 0
        assert torch.equal(layer(x, schedule=schedule, inputs_only=True), recorded)
