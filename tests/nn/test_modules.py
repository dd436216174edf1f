"""Laws of every layer as a module of torch: parameters, copies, precision, resetting."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

from pyg_dynbatch.nn import DAGNN, DirectedStack, Pairs, TopologicalConv, WeaveStack
from tests.nn.recursion import IN, SMALL, make
from tests.strategies import balanced

TREE = balanced(2)
Run = Callable[[nn.Module, Tensor], Tensor]


def over_edges(layer: nn.Module, x: Tensor) -> Tensor:
    edges = TREE.edge_index if x.size(0) == TREE.num_nodes else TREE.edge_index[:, :0]
    return layer(x, edges)


def over_nodes(model: Any, x: Tensor) -> Tensor:
    return over_edges(model.embed, x)


def over_pairs(stack: nn.Module, x: Tensor) -> Tensor:
    pairs = Pairs.from_codes(torch.arange(x.size(0) * (x.size(0) + 1) // 2) % 2, [x.size(0)])
    return stack(x, torch.eye(max(pairs.num_codes, 1), 2, dtype=x.dtype), pairs)


def drawn(layer: nn.Module) -> nn.Module:
    """The layer in double precision, with biases that are not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.double().parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator).double())
    return layer


LAYERS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    **{kind: (lambda kind=kind: make(kind), over_edges) for kind in SMALL},
    "GCNConv": (lambda: drawn(TopologicalConv(pyg.GCNConv(IN, IN))), over_edges),
    "SAGEConv": (lambda: drawn(TopologicalConv(pyg.SAGEConv(IN, IN), "top_down")), over_edges),
    "GATConv": (lambda: drawn(TopologicalConv(pyg.GATConv(IN, IN))), over_edges),
    "DAGNN": (lambda: drawn(DAGNN(IN, 4)), over_nodes),
    "weave": (lambda: drawn(WeaveStack(IN, 2, 8)), over_pairs),
    "weave, batch": (lambda: drawn(WeaveStack(IN, 2, 8, norm="batch")), over_pairs),
    "weave, directed": (lambda: drawn(DirectedStack(IN, 2, 8)), over_pairs),
    "weave, layer": (lambda: drawn(WeaveStack(IN, 2, 8, norm="layer")), over_pairs),
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def features(nodes: int = TREE.num_nodes) -> Tensor:
    return torch.randn(nodes, IN, generator=torch.Generator().manual_seed(2)).double()


def gradients(layer: nn.Module, of: Tensor) -> list[Tensor]:
    layer.zero_grad()
    of.sum().backward()
    named = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert [name for name, grad in named.items() if grad is None] == []
    return [grad.clone() for grad in named.values()]


@every_layer
@pytest.mark.parametrize("nodes", (TREE.num_nodes, 3, 0))
def test_every_parameter_gets_a_gradient(kind: str, nodes: int) -> None:
    layer, run = LAYERS[kind][0](), LAYERS[kind][1]
    found = run(layer, features(nodes).requires_grad_())
    assert found.size(0) == nodes
    grads = gradients(layer, found)
    assert all(grad.isfinite().all() for grad in grads)
    assert nodes or not any(grad.any() for grad in grads)


@every_layer
def test_copies_pickles_states_and_new_draws(kind: str) -> None:
    layer, run = LAYERS[kind][0](), LAYERS[kind][1]
    layer.eval()
    x, before = features(), {name: each.clone() for name, each in layer.state_dict().items()}
    wanted = run(layer, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(run(twin, x), wanted)
    draws = []
    for _ in range(2):
        torch.manual_seed(5)
        layer.reset_parameters()
        draws.append({name: each.clone() for name, each in layer.named_parameters()})
        assert all(not torch.equal(before[name], each) for name, each in draws[-1].items())
    assert all(map(torch.equal, draws[0].values(), draws[1].values()))
    layer.load_state_dict(before)
    assert torch.equal(run(layer, x), wanted)


@every_layer
def test_frozen_parameters_let_the_gradient_through(kind: str) -> None:
    layer, run = LAYERS[kind][0](), LAYERS[kind][1]
    x = features().requires_grad_()
    (wanted,) = torch.autograd.grad(run(layer, x).sum(), x)
    layer.requires_grad_(False)
    (found,) = torch.autograd.grad(run(layer, x).sum(), x)
    torch.testing.assert_close(found, wanted)
    assert not run(layer, x.detach()).requires_grad


@every_layer
def test_low_precision_and_autocast_are_near(kind: str) -> None:
    layer, run = LAYERS[kind][0](), LAYERS[kind][1]
    x = features()
    exact = run(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(run(layer, x), exact)  # double precision is left alone
    with torch.autocast("cpu", torch.bfloat16):
        found = run(layer.float(), x.float())
    torch.testing.assert_close(found.double(), exact, rtol=0.1, atol=0.1)
    grads = gradients(layer, found)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    low = run(layer.bfloat16(), x.bfloat16())
    assert low.dtype == torch.bfloat16 or "weave" in kind
    torch.testing.assert_close(low.double(), exact, rtol=0.2, atol=0.2)
    assert all(grad.isfinite().all() for grad in gradients(layer, low))


@every_layer
def test_inference_is_the_forward_pass(kind: str) -> None:
    layer, run = LAYERS[kind][0]().eval(), LAYERS[kind][1]
    wanted = run(layer, features())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(run(layer, features()), wanted)
    gradients(layer, run(layer, features()))


@every_layer
def test_anomaly_detection_finds_nothing(kind: str) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        layer = LAYERS[kind][0]()
        gradients(layer, LAYERS[kind][1](layer, features()))
