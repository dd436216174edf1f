"""Every layer against a plain recursion in float64: values and gradients."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

from pyg_dynbatch.nn.cell import run_levels
from tests.kernels.fused import run_fused
from tests.nn.recursion import (
    IN,
    KINDS,
    OUT,
    SMALL,
    Placed,
    assert_equal,
    features,
    gradients,
    make,
    placed,
    recurse,
)
from tests.strategies import few

FEW = few(12)


def check_against_recursion(
    kind: str, structure: Placed, direction: str = "bottom_up", all_inputs: bool = False
) -> None:
    layer = make(kind, direction=direction)
    x = features(structure.num_nodes).requires_grad_()
    if all_inputs:
        structure = Placed(structure.places, (True,) * structure.num_nodes)
    wanted = recurse(layer, KINDS[kind][1], structure, x)
    wanted_gradients = gradients(layer, x, wanted)
    schedule = structure.schedule(layer)
    found = layer(x, structure.edge_index, schedule, return_state=True)
    assert_equal(found, wanted)
    assert_equal(gradients(layer, x, found), wanted_gradients)
    generic = run_levels(layer.cell, schedule, x.index_select(0, schedule.input_node))
    assert_equal(generic, wanted)
    assert_equal(gradients(layer, x, generic), wanted_gradients)


@pytest.mark.parametrize(
    ("kind", "direction"),
    [*((kind, "bottom_up") for kind in KINDS), *((kind, "top_down") for kind in SMALL)],
)
@FEW
@given(data=st.data())
def test_layer_is_the_recursion(kind: str, direction: str, data: st.DataObject) -> None:
    arity = make(kind).arity
    only_trees = direction == "top_down" and arity is not None
    check_against_recursion(kind, data.draw(placed(arity, only_trees=only_trees)), direction)


@pytest.mark.parametrize("direction", ("bottom_up", "top_down"))
@pytest.mark.parametrize("kind", SMALL)
@FEW
@given(data=st.data())
def test_edge_masks_weight_what_is_read(kind: str, direction: str, data: st.DataObject) -> None:
    layer = make(kind, direction=direction)
    structure = data.draw(placed(layer.arity, only_trees=direction == "top_down"))
    x, edges = features(structure.num_nodes).requires_grad_(), structure.edge_index
    weight = torch.rand(structure.num_nodes, structure.num_nodes, dtype=torch.float64)
    weight.requires_grad_()
    schedule, bottom_up = structure.schedule(layer), direction == "bottom_up"
    plain = layer(x, edges, schedule)
    set_masks(layer, weight[edges[0], edges[1]], edges, apply_sigmoid=False)
    found = layer(x, edges, schedule, return_state=True)
    wanted = recurse(
        layer, KINDS[kind][1], structure, x, weight=weight if bottom_up else weight.t()
    )
    assert_equal(found, wanted)
    assert_equal(
        [*of_weight(found, weight), *gradients(layer, x, found)],
        [*of_weight(wanted, weight), *gradients(layer, x, wanted)],
    )
    clear_masks(layer)
    assert torch.equal(layer(x, edges, schedule), plain)


def of_weight(states: Sequence[Tensor], weight: Tensor) -> Sequence[Tensor]:
    total = sum(part.square().sum() for part in states)
    return torch.autograd.grad(
        total, weight, retain_graph=True, allow_unused=True, materialize_grads=True
    )


class Masks:
    """Stands in for dropout: applies the rows of a given mask, in level order."""

    def __init__(self, keep: Tensor) -> None:
        self.keep, self.used = keep, 0

    def __call__(self, rows: Tensor, probability: float) -> Tensor:
        assert probability == 0.5
        self.used += rows.size(0)
        return rows * self.keep[self.used - rows.size(0) : self.used]


@pytest.mark.parametrize("kind", ("nary-2", "child-sum", "gru-3"))
@FEW
@given(data=st.data())
def test_recurrent_dropout_with_a_given_mask(kind: str, data: st.DataObject) -> None:
    layer = make(kind, recurrent_dropout=0.5).train()
    structure = data.draw(placed(layer.arity))
    x = features(structure.num_nodes).requires_grad_()
    schedule = structure.schedule(layer)
    keep = torch.randint(0, 2, (structure.num_nodes, OUT)).double() * 2
    row = schedule.row - 1
    wanted = recurse(layer, KINDS[kind][1], structure, x, keep[row])
    inputs = x.index_select(0, schedule.input_node)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", Masks(keep))
        found = run_levels(layer.cell, schedule, inputs)
    assert_equal(found, wanted)
    assert_equal(gradients(layer, x, found), gradients(layer, x, wanted))
    if kind != "gru-3":
        inputs = x.index_select(0, schedule.input_node)
        fused = run_fused(layer, schedule, inputs, dropout_mask=keep)
        assert_equal(fused, wanted)
        wanted = recurse(layer, KINDS[kind][1], structure, x, keep[row])
        assert_equal(gradients(layer, x, fused), gradients(layer, x, wanted))


@pytest.mark.parametrize("kind", ("nary-2", "child-sum", "gru-3"))
def test_recurrent_dropout_is_drawn_while_training_only(kind: str) -> None:
    layer = make(kind, recurrent_dropout=0.5)
    plain = make(kind)
    x = features(1).expand(4000, IN)
    edges = torch.empty(2, 0, dtype=torch.long)
    assert torch.equal(layer.eval()(x, edges), plain(x, edges))
    layer.train()
    with torch.no_grad():
        state = layer(x, edges, return_state=True)[-1]
        again = layer(x, edges, return_state=True)[-1]
    assert not torch.equal(state, again)
    whole_state = plain(x[:1], edges, return_state=True)[-1]
    kept = state != 0
    assert 0.47 < kept.double().mean() < 0.53
    torch.testing.assert_close(state[kept], (2 * whole_state).expand_as(state)[kept])
