"""Laws of the recurrent layers: other examples, their order and node numbers change nothing."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_dynbatch.nn import RecursiveLayer, TreeRNNCell
from tests.nn.recursion import (
    IN,
    OUT,
    SMALL,
    Placed,
    assert_equal,
    batched,
    features,
    make,
    placed,
    whole,
)
from tests.strategies import SHAPES, few

FEW = few(4)


def run(layer: RecursiveLayer, examples: list[Placed], rows: list[Tensor]) -> list[Tensor]:
    """Run a layer on a batch, and split the result by example."""
    sizes = [example.num_nodes for example in examples]
    schedule = batched(examples, layer)
    return list(layer(torch.cat(rows), schedule=schedule).split(sizes))


def gradients(layer: RecursiveLayer, results: list[Tensor]) -> list[Tensor]:
    loss = sum((part * part.detach().cos()).sum() for part in results)
    return list(torch.autograd.grad(loss, list(layer.parameters())))


@pytest.mark.parametrize("direction", ("bottom_up", "top_down"))
@pytest.mark.parametrize("kind", SMALL)
@FEW
@given(data=st.data())
def test_layer_batched_is_the_layer_alone(kind: str, direction: str, data: st.DataObject) -> None:
    layer = make(kind, direction=direction)
    only_trees = direction == "top_down" and layer.arity is not None
    strategy = st.lists(placed(layer.arity, only_trees), min_size=1, max_size=4)
    examples = data.draw(strategy)
    rows = [features(e.num_nodes, seed=n) for n, e in enumerate(examples)]
    check(layer, examples, rows, data.draw(st.permutations(range(len(examples)))))


def check(
    layer: RecursiveLayer, examples: list[Placed], rows: list[Tensor], order: list[int]
) -> None:
    """Compare a batch with its examples one at a time, and with the batch in a different order."""
    together = run(layer, examples, rows)
    alone = [run(layer, [e], [x])[0] for e, x in zip(examples, rows, strict=True)]
    assert_equal(together, alone)
    assert_equal(gradients(layer, together), gradients(layer, alone))
    moved = run(layer, [examples[n] for n in order], [rows[n] for n in order])
    assert_equal(moved, [together[n] for n in order])


class MixingCell(TreeRNNCell):
    """Faulty: subtract the mean over all rows of a level."""

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor, ...]:
        (state,) = super().step(projected, children)
        return (state - state.mean(0),)


def test_a_layer_that_mixes_rows_breaks_the_law() -> None:
    layer = RecursiveLayer(MixingCell(IN, OUT)).double()
    examples = [whole(SHAPES[name](), 2) for name in ("chain", "balanced")]
    with pytest.raises(AssertionError, match="not close"):
        check(layer, examples, [features(e.num_nodes) for e in examples], [1, 0])


@pytest.mark.parametrize("kind", SMALL)
@FEW
@given(data=st.data())
def test_numbers_of_the_nodes_do_not_matter(kind: str, data: st.DataObject) -> None:
    layer = make(kind)
    example = data.draw(placed(layer.arity))
    number = torch.tensor(data.draw(st.permutations(range(example.num_nodes))), dtype=torch.long)
    x = features(example.num_nodes)
    h = layer(x, example.edge_index, child_slot=example.child_slot)
    moved = torch.empty_like(x)
    moved[number] = x
    h_moved = layer(moved, number[example.edge_index], child_slot=example.child_slot)
    assert_equal([h_moved[number]], [h])


@pytest.mark.parametrize("kind", SMALL)
def test_the_same_input_twice_is_the_same_to_the_bit(kind: str) -> None:
    layer = make(kind)
    example = whole(SHAPES["diamond"](), layer.arity)
    x = features(example.num_nodes)
    first, second = (layer(x, schedule=example.schedule(layer)) for _ in range(2))
    assert torch.equal(first, second)
