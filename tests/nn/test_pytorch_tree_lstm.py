"""Weights of the package pytorch-tree-lstm, against a recursion that uses its names."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from pyg_dynbatch.nn import ChildSumTreeLSTM
from tests.nn.recursion import refused
from tests.strategies import Dag, diamond, few, star, structures

PREFIX = "_tree_lstm._tree_lstm."


def drawn(width_in: int = 3, width: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        **{"W_iou.weight": (3 * width, width_in), "W_iou.bias": (3 * width,)},
        **{"U_iou.weight": (3 * width, width), "U_f.weight": (width, width)},
        **{"W_f.weight": (width, width_in), "W_f.bias": (width,)},
    }
    options = {"generator": generator, "dtype": torch.float64}
    return {key: torch.randn(shape, **options) for key, shape in shapes.items()}


def recursion(state: Mapping[str, Tensor], dag: Dag, x: Tensor) -> Tensor:
    """The rows h."""
    return states(state, dag, x)[0]


def states(state: Mapping[str, Tensor], dag: Dag, x: Tensor) -> tuple[Tensor, Tensor]:
    """Tai et al. (2015), equations 2-8, with the gates i, o, u in one matrix: h and c."""
    h: dict[int, Tensor] = {}
    c: dict[int, Tensor] = {}
    for node in dag.order:
        below = dag.children[node]
        gates = state["W_iou.weight"] @ x[node] + state["W_iou.bias"]
        gates = gates + state["U_iou.weight"] @ sum(
            (h[k] for k in below), torch.zeros_like(state["W_f.bias"])
        )
        i, o, u = gates.chunk(3)
        c[node] = torch.sigmoid(i) * torch.tanh(u)
        for k in below:
            own = state["W_f.weight"] @ x[node] + state["W_f.bias"]
            c[node] = c[node] + torch.sigmoid(own + state["U_f.weight"] @ h[k]) * c[k]
        h[node] = torch.sigmoid(o) * torch.tanh(c[node])
    each = range(dag.num_nodes)
    return torch.stack([h[node] for node in each]), torch.stack([c[node] for node in each])


def check(state: dict[str, Tensor], dag: Dag, tolerance: float) -> None:
    layer = ChildSumTreeLSTM.from_pytorch_tree_lstm(state)
    weight = state["W_f.weight"]
    x = torch.randn(dag.num_nodes, weight.size(1), dtype=weight.dtype)
    options = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(layer(x, dag.edge_index), recursion(state, dag, x), **options)


@few(10)
@given(dag=structures(10, 4))
def test_equals_the_recursion(dag: Dag) -> None:
    check(drawn(), dag, 1e-12)


def test_equals_the_recursion_on_the_state_of_route_distances(
    shared_data: Callable[[str], Path],
) -> None:
    whole = torch.load(shared_data("routes/dummy_state.pt"), weights_only=True)["state_dict"]
    state = {key.removeprefix(PREFIX): value for key, value in whole.items() if PREFIX in key}
    for dag in (star(6), diamond()):
        check(state, dag, 1e-6)
        check({key: value.double() for key, value in state.items()}, dag, 1e-12)
    refused(ValueError, lambda: ChildSumTreeLSTM.from_pytorch_tree_lstm(whole), "prefix")


def test_the_weights_are_copied_and_can_be_trained() -> None:
    state = drawn()
    layer = ChildSumTreeLSTM.from_pytorch_tree_lstm(state)
    before = {key: value.clone() for key, value in state.items()}
    layer(torch.ones(4, 3, dtype=torch.float64), diamond().edge_index).sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    assert all(torch.equal(before[key], state[key]) for key in state)


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "missing": ({"U_f.weight": None}, ("wrong keys", "expected: W_f.weight, U_f.weight")),
    "unknown": ({"U_f.bias": torch.zeros(2)}, ("wrong keys", "U_f.bias")),
    "shape": ({"U_iou.weight": torch.zeros(6, 3)}, ("U_iou.weight", "[6, 2]", "[6, 3]")),
    "width": ({"W_f.weight": torch.zeros(2)}, ("W_f.weight", "[out, in]", "tensor [2]")),
    "dtype": ({"W_iou.bias": torch.zeros(6).long()}, ("W_iou.bias", "int64")),
    "no tensor": ({"W_f.weight": "x"}, ("W_f.weight", "str")),
}


@pytest.mark.parametrize("name", BAD)
def test_other_states_are_refused(name: str) -> None:
    changed, parts = BAD[name]
    state: Any = {k: v for k, v in {**drawn(), **changed}.items() if v is not None}
    refused(ValueError, lambda: ChildSumTreeLSTM.from_pytorch_tree_lstm(state), *parts)
