"""Fused runs have the results of level-by-level runs, whichever kernels they use."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_dynbatch.core import products
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.products import Products, RowProduct, use_products
from pyg_dynbatch.kernels import blocks
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer
from pyg_dynbatch.nn.cell import run_levels
from pyg_dynbatch.nn.recursive import level_row
from tests.core.helpers import as_users_run_it
from tests.nn.recursion import IN, assert_equal, batched, features, gradients, make, placed
from tests.strategies import few

FUSED = ("nary-2", "child-sum")
FEW = few(12)


@pytest.fixture
def small_blocks() -> Iterator[None]:
    """Cuts levels into blocks of two nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 2)
        yield


@pytest.fixture
def pack_all() -> Iterator[None]:
    """Packs matrices of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_LARGE_MATRIX", 0)
        patch.setattr(products, "_MANY_ROWS", 0)
        with use_products(Products(packed=True)):
            if not products.packs(torch.ones(1, 1), 1):
                pytest.skip("this torch has no oneDNN")
            yield


@pytest.mark.parametrize("kind", FUSED)
@FEW
@given(data=st.data())
@pytest.mark.usefixtures("small_blocks")
def test_blocks_within_a_level(kind: str, data: st.DataObject) -> None:
    layer = make(kind)
    structures = data.draw(st.lists(placed(layer.arity), min_size=1, max_size=5))
    schedule = batched(structures, layer)
    x = features(schedule.num_nodes).requires_grad_()
    wanted = run_levels(layer.cell, schedule, x.index_select(0, schedule.input_node))
    found = layer(x, schedule=schedule, return_state=True)
    assert_equal(found, wanted)
    assert_equal(gradients(layer, x, found), gradients(layer, x, wanted))


@pytest.mark.parametrize("kind", (*FUSED, "gru-3"))
@FEW
@given(data=st.data())
def test_equal_leaves_once_and_level_order(kind: str, data: st.DataObject) -> None:
    layer = make(kind)
    structure = data.draw(placed(layer.arity))
    schedule = structure.schedule(layer)
    leaves, others = schedule.level_inputs[0], sum(schedule.level_inputs[1:])
    distinct = data.draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, distinct - 1), min_size=leaves, max_size=leaves)
    leaf_inverse = torch.tensor(data.draw(rows), dtype=torch.long)
    x = features(distinct + others).requires_grad_()
    spread = torch.cat([x[leaf_inverse], x[distinct:]])
    wanted = run_levels(layer.cell, schedule, spread)
    found = layer(
        x, schedule=schedule, leaf_inverse=leaf_inverse, level_order=True, return_state=True
    )
    found = tuple(part.index_select(0, level_row(schedule)) for part in found)
    assert_equal(found, wanted)
    assert_equal(gradients(layer, x, found), gradients(layer, x, wanted))


@pytest.mark.parametrize("kind", (*FUSED, "gru-3"))
@FEW
@given(data=st.data())
def test_some_nodes_alone(kind: str, data: st.DataObject) -> None:
    layer = make(kind)
    structure = data.draw(placed(layer.arity))
    schedule, nodes = structure.schedule(layer), structure.num_nodes
    # Any order, none at all, one of them again and again.
    chosen = data.draw(st.lists(st.integers(0, nodes - 1), max_size=2 * nodes))
    picked = torch.tensor(chosen, dtype=torch.long)
    x = features(nodes).requires_grad_()
    wanted = layer(x, schedule=schedule, return_state=True)
    wanted = tuple(part.index_select(0, picked) for part in wanted)
    found = layer(x, schedule=schedule, nodes=picked, return_state=True)
    assert_equal(found, wanted)
    assert_equal((layer(x, schedule=schedule, nodes=picked),), wanted[:1])
    assert_equal(gradients(layer, x, found), gradients(layer, x, wanted))


@pytest.mark.parametrize("nodes", [[0, -1], [0, 3], [[0]], [True, False], [1.0]], ids=str)
def test_invalid_nodes(nodes: list[object]) -> None:
    layer = make("nary-2")
    schedule = schedule_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
    with as_users_run_it(), pytest.raises((IndexError, RuntimeError), match=r"(?i)index"):
        layer(features(3), schedule=schedule, nodes=torch.tensor(nodes))


def test_invalid_rows_of_leaves() -> None:
    layer = make("nary-2")
    schedule = schedule_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)
    with pytest.raises(ValueError, match=r"(?s)leaf_inverse does not fit.*2 leaves with an input"):
        layer(features(2), schedule=schedule, leaf_inverse=torch.tensor([0]))


def forest(layer: RecursiveLayer, trees: int = 90) -> Levels:
    """Trees of five nodes, the last of which have no input."""
    edges = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 4]])
    every = torch.cat([edges + 5 * k for k in range(trees)], 1)
    has_input = torch.arange(5 * trees) < 5 * trees - 30
    return schedule_structure(every, 5 * trees, arity=layer.arity, has_input=has_input)


def states_and_gradients(layer: RecursiveLayer, schedule: Levels, x: Tensor) -> list[Tensor]:
    found = layer(x, schedule=schedule, return_state=True)
    weights = torch.linspace(-1, 2, found[0].numel()).view_as(found[0])
    loss = sum((part * weights.to(part.dtype)).sum() for part in found)
    return [*found, *torch.autograd.grad(loss, [*layer.parameters(), x])]


@pytest.mark.parametrize("make_layer", (NaryTreeLSTM, ChildSumTreeLSTM))
@pytest.mark.usefixtures("pack_all")
def test_packed_products_in_single_precision(make_layer: type[RecursiveLayer]) -> None:
    torch.manual_seed(0)
    layer = make_layer(9, 11)
    with torch.no_grad():
        layer.cell.bias.normal_()
    schedule = forest(layer)
    x = torch.randn(schedule.num_nodes, 9, requires_grad=True)
    packed = states_and_gradients(layer, schedule, x)
    exact = states_and_gradients(layer.double(), schedule, x.detach().double().requires_grad_())
    for mine, right in zip(packed, exact, strict=True):
        assert 0 < (mine - right).norm() / right.norm() < 1e-5


@pytest.mark.parametrize("make_layer", (NaryTreeLSTM, ChildSumTreeLSTM))
def test_autocast_keeps_states_and_gradients_single(make_layer: type[RecursiveLayer]) -> None:
    torch.manual_seed(0)
    layer = make_layer(9, 11)
    schedule = forest(layer)
    x = torch.randn(schedule.num_nodes, 9, requires_grad=True)
    wanted = states_and_gradients(layer, schedule, x)
    with use_products(Products()), torch.autocast("cpu", torch.bfloat16):
        found = states_and_gradients(layer, schedule, x)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == torch.float32
        difference = (mine - right).norm() / right.norm()
        # Eight bits of mantissa, so equal to the last bit would mean that nothing was rounded.
        assert 0 < difference < 0.02


@pytest.mark.usefixtures("pack_all")
def test_products_of_every_height() -> None:
    rows, weight, bias = torch.randn(150, 5), torch.randn(7, 5), torch.randn(7)
    product = RowProduct(weight, bias)
    right = rows @ weight.t() + bias
    for size in range(1, 141):
        torch.testing.assert_close(product(rows, 2, size), right[2 : 2 + size])


@pytest.mark.parametrize("rows", (0, 1, 63, 64, 200, 1100))
@pytest.mark.parametrize("chunked", (False, True))
def test_gradients_of_weights_in_chunks(rows: int, chunked: bool) -> None:
    grads, given = torch.randn(rows, 7), torch.randn(rows, 5)
    out = torch.full((7, 5), 3.0)
    with use_products(Products(chunked_gradients=chunked)):
        returned = products.weight_gradient(grads, given, None)
        written = products.weight_gradient(grads, given, None, out)
    expected = grads.double().t() @ given.double()
    torch.testing.assert_close(returned.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(written, returned)
    assert torch.equal(written, out)


def test_onednn_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LARGE_MATRIX", 0)
    monkeypatch.setattr(products, "_MANY_ROWS", 0)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with use_products(Products(packed=True)):
        assert RowProduct(torch.ones(3, IN)).packed is None
