"""The replacement of pytorch-tree-lstm: reference figures of that package, and a recursion."""

import copy
import importlib
import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from pyg_dynbatch.compat import tree_lstm as treelstm
from pyg_dynbatch.compat.tree_lstm import (
    TreeLSTM,
    batch_tree_input,
    calculate_evaluation_orders,
    unbatch_tree_tensor,
    util,
)
from tests.nn.recursion import refused
from tests.strategies import Dag, batches, deep, few, star, structures

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


EMPTY: dict[str, Any] = {
    "list": [],
    "array (0,)": np.array([]),
    "array (0, 2)": np.zeros((0, 2)),
    "tensor (0,)": torch.tensor([]),
    "tensor (0, 2)": torch.zeros(0, 2, dtype=torch.int64),
}


@pytest.fixture(autouse=True)
def _trees_and_graphs() -> Iterator[None]:
    """Forget who has warned of several parents, and let graphs be run without a warning."""
    util._warned.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is a child in")
        yield


def as_tree(dag: Dag, x: Tensor) -> dict[str, Tensor]:
    """What the package takes for a structure; edges in the order of the structure."""
    edges = dag.edge_index.flip(0).t()
    node_order = torch.tensor(dag.depth)
    return {
        "features": x, "node_order": node_order, "adjacency_list": edges,
        "edge_order": node_order[edges[:, 0]],
    }  # fmt: skip


def called(layer: nn.Module, tree: dict[str, Any]) -> tuple[Tensor, Tensor]:
    names = ("features", "node_order", "adjacency_list", "edge_order")
    found: tuple[Tensor, Tensor] = layer(*(tree[name] for name in names))
    return found


def layer_of(state: dict[str, Tensor]) -> TreeLSTM:
    layer = TreeLSTM(state["W_f.weight"].size(1), state["W_f.weight"].size(0))
    layer.to(state["W_f.weight"].dtype).load_state_dict(state, strict=True)
    return layer


class Reference:
    """The numbers computed for the package."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self.stored = {name: stored[name] for name in stored.files if "kind" not in name}

    def get(self, name: str) -> Tensor:
        return torch.from_numpy(self.stored[name])

    def all(self, prefix: str) -> dict[str, Tensor]:
        names = [name for name in self.stored if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.get(name) for name in names}

    def layer(self, dtype: torch.dtype) -> TreeLSTM:
        layer = TreeLSTM(int(self.stored["in_features"]), int(self.stored["out_features"]))
        layer.load_state_dict(self.all("state_"), strict=True)
        return layer.to(dtype)

    def tree(self, number: int, dtype: torch.dtype) -> dict[str, Tensor]:
        tree = self.all(f"t{number:02}_")
        return {**tree, "features": tree["features"].to(dtype)}

    def check(self, found: Any, number: int, tolerance: float) -> None:
        for rows, name in zip(found, "hc", strict=True):
            wanted = self.get(f"t{number:02}_{name}")
            torch.testing.assert_close(rows.double(), wanted, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def reference(shared_data: Callable[[str], Path]) -> Reference:
    return Reference(shared_data("tree_lstm/reference.npz"))


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)


@PRECISIONS
def test_trees_of_the_reference(reference: Reference, dtype: Any, tolerance: float) -> None:
    layer = reference.layer(dtype)
    for number in range(30):
        tree = reference.tree(number, dtype)
        reference.check(called(layer, tree), number, tolerance)
        orders = calculate_evaluation_orders(tree["adjacency_list"].numpy(), len(tree["features"]))
        for found, name in zip(orders, ("node_order", "edge_order"), strict=True):
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, tree[name].numpy())


@PRECISIONS
def test_the_batch_of_the_reference(reference: Reference, dtype: Any, tolerance: float) -> None:
    layer, batch = (
        reference.layer(dtype),
        batch_tree_input([reference.tree(number, dtype) for number in range(30)]),
    )
    h, c = (unbatch_tree_tensor(rows, batch["tree_sizes"]) for rows in called(layer, batch))
    for number, rows in enumerate(zip(h, c, strict=True)):
        reference.check(rows, number, tolerance)
    loss = torch.stack([rows[0] for rows in h]).sum()
    assert loss.item() == pytest.approx(float(reference.stored["loss"]), rel=10 * tolerance)
    loss.backward()
    options = {"rtol": 100 * tolerance, "atol": 20 * tolerance}
    for name, wanted in reference.all("grad_").items():
        torch.testing.assert_close(layer.get_parameter(name).grad.double(), wanted, **options)


@PRECISIONS
def test_any_order_of_edges(reference: Reference, dtype: Any, tolerance: float) -> None:
    layer = reference.layer(dtype)
    for case in range(5):
        number = int(reference.stored[f"shuffled{case}_tree"])
        shuffled = reference.all(f"shuffled{case}_")
        tree = {**reference.tree(number, dtype), **shuffled}
        reference.check(called(layer, tree), number, tolerance)


def test_a_seed_gives_the_weights_of_the_package(reference: Reference) -> None:
    torch.manual_seed(0)
    found, wanted = TreeLSTM(7, 5).state_dict(), reference.all("state_")
    assert list(found) == [
        f"{n}.{p}"
        for n in ("W_iou", "U_iou", "W_f", "U_f")
        for p in ("weight", "bias")
        if n[0] == "W" or p == "weight"
    ]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@few(12)
@given(dag=structures(10, 4), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_states_and_gradients_equal_those_of_a_recursion(dag: Dag, dtype: torch.dtype) -> None:
    state = {name: value.requires_grad_() for name, value in drawn().items()}
    layer = layer_of({name: value.detach().to(dtype) for name, value in state.items()})
    x = torch.randn(dag.num_nodes, 3, dtype=torch.float64, requires_grad=True)
    mine = x.detach().to(dtype).requires_grad_()
    weights = torch.randn(2, dag.num_nodes, 2, dtype=torch.float64)
    found, wanted = called(layer, as_tree(dag, mine)), states(state, dag, x)
    options = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-6}
    sums = []
    for mine_of, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine_of.double(), right, **options)
    for rows in (found, wanted):
        sums.append(sum((w * row.double()).sum() for w, row in zip(weights, rows, strict=True)))
    names = list(dict(layer.named_parameters()))
    right = torch.autograd.grad(
        sums[1], [x, *(state[name] for name in names)], materialize_grads=True
    )
    ours = torch.autograd.grad(sums[0], [mine, *layer.parameters()])
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(
            one.double(), other, rtol=10 * options["atol"], atol=50 * options["atol"]
        )


@few(12)
@given(dags=batches(structures(8, 3)))
def test_a_batch_equals_its_trees(dags: list[Dag]) -> None:
    layer = layer_of(drawn())
    trees = [as_tree(dag, torch.randn(dag.num_nodes, 3, dtype=torch.float64)) for dag in dags]
    batch = batch_tree_input([{**tree, "label": 1} for tree in trees])
    assert list(batch) == ["features", "node_order", "edge_order", "adjacency_list", "tree_sizes"]
    assert batch["tree_sizes"] == [dag.num_nodes for dag in dags]
    each = [called(layer, tree) for tree in trees]
    for rows, alone in zip(called(layer, batch), zip(*each, strict=True), strict=True):
        parts = unbatch_tree_tensor(rows, batch["tree_sizes"])
        assert all(part._is_view() for part in parts)
        for part, wanted in zip(parts, alone, strict=True):
            torch.testing.assert_close(part, wanted, rtol=0, atol=1e-12)


def test_edges_that_are_there_twice_count_twice() -> None:
    dag = Dag(((), (0, 0), (0, 1), (1, 2, 2)))
    layer = layer_of(drawn())
    features = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    tree = as_tree(dag, features)
    for found, wanted in zip(called(layer, tree), states(drawn(), dag, features), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *weights: Tensor) -> Any:
        replaced = dict(zip(names, weights, strict=True))
        given = x, tree["node_order"], tree["adjacency_list"], tree["edge_order"]
        return torch.func.functional_call(layer, replaced, given)

    assert torch.autograd.gradcheck(run, (features, *layer.parameters()), fast_mode=True)


@pytest.mark.parametrize("empty", EMPTY)
def test_trees_of_one_node(empty: str) -> None:
    """Alone, and among others, in any place of a batch."""
    layer, edges = layer_of(drawn()), EMPTY[empty]
    assert [order.tolist() for order in calculate_evaluation_orders(edges, 1)] == [[0], []]
    x, larger = torch.randn(1, 3).double(), as_tree(star(4), torch.randn(4, 3).double())
    one = {"features": x, "node_order": np.array([0]), "adjacency_list": edges, "edge_order": []}
    wanted = states(drawn(), Dag(((),)), x)
    for order in ([], np.array([]), torch.tensor([], dtype=torch.int64)):
        found = called(layer, {**one, "edge_order": order})
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for trees in ([one], [one, larger], [larger, one, one, larger]):
        batch = batch_tree_input(trees)
        assert batch["adjacency_list"].dtype == torch.int64
        parts = [unbatch_tree_tensor(r, batch["tree_sizes"]) for r in called(layer, batch)]
        for number, tree in enumerate(trees):
            alone = called(layer, tree)
            found = tuple(rows[number] for rows in parts)
            torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def test_a_lone_node_gives_every_weight_a_gradient() -> None:
    layer = layer_of(drawn())
    h, _ = layer(torch.ones(1, 3).double(), torch.tensor([0]), torch.tensor([]), torch.tensor([]))
    h.sum().backward()
    assert all(weight.grad is not None for weight in layer.parameters())
    assert not layer.U_f.weight.grad.any() and not layer.U_iou.weight.grad.any()


def test_integers_and_arrays_of_any_kind_are_read() -> None:
    layer, tree = layer_of(drawn()), as_tree(star(4), torch.randn(4, 3).double())
    wanted = called(layer, tree)
    orders = ("node_order", "adjacency_list", "edge_order")
    for kind in (
        Tensor.int,
        Tensor.short,
        Tensor.numpy,
        Tensor.tolist,
        lambda t: t.t().clone().t(),
        lambda t: np.array(t.flip(-1).tolist())[..., ::-1],
    ):
        other = {**tree, **{name: kind(tree[name]) for name in orders}}
        for each in (other, batch_tree_input([other])):
            torch.testing.assert_close(called(layer, each), wanted, rtol=0, atol=0)
    # As torch.cat makes it of an empty edge_order in single precision.
    found = called(layer, {**tree, "edge_order": tree["edge_order"].float()})
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_nodes_may_be_evaluated_later_than_they_could_be() -> None:
    layer, tree = layer_of(drawn()), as_tree(Dag(((), (0,), (), (1, 2))), torch.ones(4, 3).double())
    wanted = called(layer, tree)
    later = {"node_order": torch.tensor([0, 3, 0, 7]), "edge_order": torch.tensor([3, 7, 7])}
    torch.testing.assert_close(called(layer, {**tree, **later}), wanted)


# Edges 1 -> 0, 2 -> 1, 2 -> 0.
WRONG: dict[str, tuple[type[Exception], dict[str, Any], tuple[str, ...]]] = {
    "order of a leaf": (
        ValueError, {"node_order": [1, 1, 2]},
        ("node_order contradicts adjacency_list", "0 without children", "got:      1", "node 0"),
    ),
    "leaf below 0": (ValueError, {"node_order": [-1, 1, 2]}, ("got:      -1", "node 0")),
    "parent at 0": (
        ValueError, {"node_order": [0, 0, 1], "edge_order": [0, 1, 1]}, ("got:      0", "node 1"),
    ),
    "parent with its child": (
        ValueError, {"node_order": [0, 1, 1], "edge_order": [1, 1, 1]},
        ("node_order", "more than that of the children", "edge 1"),
    ),
    "other edge order": (
        ValueError, {"edge_order": [1, 2, 1]}, ("edge_order", "that of the parent", "edge 2"),
    ),
    "too few nodes": (ValueError, {"node_order": [0, 1]}, ("node_order", "[3]", "[2]")),
    "too many edges": (ValueError, {"edge_order": [1, 2, 2, 2]}, ("edge_order", "[3]", "[4]")),
    "no edges": (
        ValueError, {"adjacency_list": [], "edge_order": []}, ("0 without children", "node 1"),
    ),
    "cycle": (
        ValueError, {"adjacency_list": [[1, 0], [2, 1], [0, 2]]},
        ("TreeLSTM: adjacency_list", "cycle", "0 -> 1 -> 2 -> 0"),
    ),
    "loop": (ValueError, {"adjacency_list": [[1, 0], [2, 2], [2, 0]]}, ("cycle", "2 -> 2")),
    "no such node": (
        ValueError, {"adjacency_list": [[1, 0], [3, 1], [2, 0]]},
        ("a node that does not exist", "0 to 2", "1 -> 3", "edge 1"),
    ),
    "negative node": (ValueError, {"adjacency_list": [[1, 0], [2, -1], [2, 0]]}, ("-1 -> 2",)),
    "turned edges": (
        TypeError, {"adjacency_list": [[1, 2, 2], [0, 1, 0]]}, ("[edge, 2]", "int64 tensor [2, 3]"),
    ),
    "fractions": (TypeError, {"adjacency_list": [[1.0, 0.0]] * 3}, ("integers", "float32")),
    "features": (TypeError, {"features": torch.ones(3, 4)}, ("features", "3]", "[3, 4]")),
    "no node": (TypeError, {"features": torch.ones(0, 3)}, ("1 or more nodes", "[0, 3]")),
    "precision": (TypeError, {"features": torch.ones(3, 3)}, ("dtype", "float64", "float32")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_structures_are_refused(name: str) -> None:
    error, changed, parts = WRONG[name]
    right = as_tree(Dag(((), (0,), (1, 0))), torch.ones(3, 3).double())
    assert right["adjacency_list"].tolist() == [[1, 0], [2, 1], [2, 0]]
    fields = {
        key: torch.tensor(value) if isinstance(value, list) else value
        for key, value in changed.items()
    }
    refused(error, lambda: called(layer_of(drawn()), {**right, **fields}), *parts)


def test_orders_of_a_chain_far_longer_than_the_recursion_limit() -> None:
    edges = deep().edge_index.flip(0).t().flip(0)
    node_order, edge_order = calculate_evaluation_orders(edges, 10_000)
    assert node_order.tolist() == list(range(10_000))
    assert edge_order.tolist() == list(range(9_999, 0, -1))


def test_orders_of_impossible_trees_are_refused() -> None:
    orders = calculate_evaluation_orders
    refused(ValueError, lambda: orders([(0, 1), (1, 0)], 2), "calculate_evaluation_orders", "cycle")
    refused(ValueError, lambda: orders([(0, 2)], 2), "does not exist", "2 -> 0")
    refused(TypeError, lambda: orders([0, 1], 2), "integers [edge, 2]")


def test_impossible_batches_are_refused() -> None:
    tree = as_tree(star(3), torch.ones(3, 2))
    edges = torch.tensor([[0, 1], [0, 3]])
    cases: list[tuple[type[Exception], Any, tuple[str, ...]]] = [
        (ValueError, [], ("the list is empty",)),
        (ValueError, [tree, {**tree, "adjacency_list": edges}], ("below 3", "[0, 3]", "tree 1")),
        (ValueError, [{**tree, "adjacency_list": edges - 1}], ("[-1, 0]", "tree 0")),
        (ValueError, [tree, {**tree, "node_order": [1]}], ("node_order", "[3]", "tree 1")),
        (ValueError, [{**tree, "edge_order": [1]}], ("edge_order", "[2]", "tree 0")),
        (TypeError, [{**tree, "adjacency_list": edges[0]}], ("[edge, 2]", "int64 tensor [2]")),
        (ValueError, [tree, {"features": tree["features"]}], ("entry is missing", "tree 1")),
        (ValueError, [tree, {**tree, "features": torch.ones(3, 1)}], ("[3, 2]", "tree 1")),
    ]
    for error, trees, parts in cases:
        refused(error, lambda trees=trees: batch_tree_input(trees), *parts)
    with pytest.raises(RuntimeError, match="split"):
        unbatch_tree_tensor(torch.ones(3, 2), [1, 1])


NO_NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": Tensor.to_sparse,
    "csr": lambda values: values.reshape(len(values), -1).to_sparse_csr(),
    "meta": lambda values: values.to("meta"),
    "nested": lambda values: torch.nested.nested_tensor([values]),
    "nothing": lambda values: None,
    "text": lambda values: "abc",
    "objects": lambda values: [None] * len(values),
    "different lengths": lambda values: [[0], [1, 2]],
}


@pytest.mark.filterwarnings("ignore:.*prototype stage", "ignore:Sparse CSR")
@pytest.mark.parametrize("entry", ("features", "node_order", "edge_order", "adjacency_list"))
@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_entries_that_are_no_dense_numbers_are_refused(kind: str, entry: str) -> None:
    tree = as_tree(star(3), torch.ones(3, 2))
    wrong = {**tree, entry: NO_NUMBERS[kind](tree[entry])}
    said = f"invalid {entry}", "expected:", "dense", "got:"
    refused(TypeError, lambda: called(TreeLSTM(2, 2), wrong), *said)
    refused(TypeError, lambda: batch_tree_input([tree, wrong]), *said)
    if entry == "adjacency_list":
        refused(TypeError, lambda: calculate_evaluation_orders(wrong[entry], 3), *said)


def test_arrays_and_lists_are_read_as_tensors() -> None:
    tree = as_tree(star(3), torch.ones(3, 2))
    arrays = {name: each.numpy() for name, each in tree.items()}
    lists = {name: each.tolist() for name, each in tree.items()} | {"features": arrays["features"]}
    layer = TreeLSTM(2, 2)
    for each in (arrays, lists):
        assert torch.equal(called(layer, each)[0], called(layer, tree)[0])
        assert torch.equal(batch_tree_input([each])["features"], tree["features"])


@pytest.mark.parametrize(
    "edges", ([[0, 1], [0, 2], [1, 3], [2, 3]], [[0, 3], [0, 3], [0, 1], [0, 2]])
)
def test_a_node_with_several_parents_is_said_once(edges: list[list[int]]) -> None:
    orders = [torch.from_numpy(order) for order in calculate_evaluation_orders(edges, 4)]
    util._warned.clear()
    layer, given = TreeLSTM(3, 2), (torch.ones(4, 3), orders[0], torch.tensor(edges), orders[1])
    for name, call in (
        ("TreeLSTM", lambda: layer(*given)),
        ("calculate_evaluation_orders", lambda: calculate_evaluation_orders(edges, 4)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
            call()
        (said,) = [str(each.message) for each in caught]
        assert said.startswith(f"{name}: node 3 is a child in 2 edges")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.ones(2, 3), *(torch.tensor(t) for t in ([1, 0], [[0, 1]], [1])))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_other_precisions(dtype: torch.dtype) -> None:
    state, dag = drawn(), Dag(((), (0,), (), (1, 2), (3,)))
    layer, x = layer_of(state).to(dtype), torch.randn(5, 3).to(dtype)
    h, c = called(layer, as_tree(dag, x))
    assert h.dtype == c.dtype == dtype
    wanted = states(
        {name: value.to(dtype).double() for name, value in state.items()}, dag, x.double()
    )
    tolerance = max(torch.finfo(dtype).eps, 1e-12) * 8
    torch.testing.assert_close((h.double(), c.double()), wanted, rtol=0, atol=tolerance)
    h.sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in layer.parameters())


@pytest.mark.parametrize("inputs", (torch.float32, torch.bfloat16))
def test_autocast(inputs: torch.dtype) -> None:
    state, dag = drawn(), Dag(((), (0,), (), (1, 2), (3,)))
    layer, x = layer_of(state).float(), torch.randn(5, 3).to(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        h, c = called(layer, as_tree(dag, x))
    wanted = states(state, dag, x.double())
    torch.testing.assert_close((h.double(), c.double()), wanted, rtol=0, atol=0.05)
    h.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in layer.parameters())


def test_copies_and_files_compute_the_same() -> None:
    layer, tree = layer_of(drawn()), as_tree(star(5), torch.randn(5, 3).double())
    wanted, whole = called(layer, tree), io.BytesIO()
    torch.save(layer, whole)
    whole.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in (*copies, torch.load(whole, weights_only=False)):
        with torch.no_grad():
            found = called(other, tree)
        assert not found[0].requires_grad
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (layer.in_features, layer.out_features) == (3, 2)


def test_state_dicts_are_those_of_four_linear_layers() -> None:
    options = {"W_iou": (3, 6, True), "U_iou": (2, 6, False), "W_f": (3, 2, True)}
    options["U_f"] = (2, 2, False)
    theirs = nn.Module()
    for name, (width_in, width, bias) in options.items():
        theirs.add_module(name, nn.Linear(width_in, width, bias))
    layer = TreeLSTM(3, 2)
    assert list(layer.state_dict()) == list(theirs.state_dict())
    layer.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(layer.state_dict(), strict=True)


def test_a_weight_may_be_replaced_and_a_layer_that_is_not_called_may_not() -> None:
    tree = as_tree(star(3), torch.ones(3, 3))
    layer = TreeLSTM(3, 2)
    plain = called(layer, tree)[0]
    parametrizations.weight_norm(layer.W_iou)
    torch.testing.assert_close(called(layer, tree)[0], plain)
    with torch.no_grad():
        layer.W_iou.parametrizations.weight.original0.mul_(2)
    assert not torch.allclose(called(layer, tree)[0], plain)
    layer.U_f.register_forward_hook(lambda *_: None)
    refused(ValueError, lambda: called(layer, tree), "U_f is not called", "without hooks")
    layer.U_f = nn.Linear(2, 2)
    refused(ValueError, lambda: called(layer, tree), "U_f is not called", "without bias")
    layer.U_f = nn.Sequential(nn.Linear(2, 2))
    refused(ValueError, lambda: called(layer, tree), "U_f is not called", "Sequential")


def test_names_are_where_the_package_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "treelstm", treelstm)
    monkeypatch.setitem(sys.modules, "treelstm.util", treelstm.util)
    monkeypatch.setitem(sys.modules, "treelstm.tree_lstm", treelstm.tree_lstm)
    for name in ("calculate_evaluation_orders", "batch_tree_input", "unbatch_tree_tensor"):
        for module in ("treelstm", "treelstm.util"):
            assert getattr(importlib.import_module(module), name) is getattr(util, name)
    for module in ("treelstm", "treelstm.tree_lstm"):
        assert importlib.import_module(module).TreeLSTM is TreeLSTM


def test_the_model_of_route_distances(shared_data: Callable[[str], Path]) -> None:
    """As its users call it: distances equal those of its weights in a recursion."""
    whole = torch.load(shared_data("routes/dummy_state.pt"), weights_only=True)["state_dict"]
    # The molecules below each molecule of a route; the last route has one.
    routes = [((1, 2), (), ()), ((1, 2), (3,), (), (4,), ()), ((1, 2, 3), (), (), ()), ((),)]
    torch.manual_seed(0)
    model = nn.Module()
    dense = nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0), nn.Linear(16, 16), nn.ReLU()
    model._compression, model._tree_lstm = nn.Sequential(*dense), TreeLSTM(16, 16)
    part = "_tree_lstm."
    model.load_state_dict({k.removeprefix(part): v for k, v in whole.items() if part in k})
    state = {k.removeprefix(PREFIX): v.double() for k, v in whole.items() if PREFIX in k}
    features, adjacency, orders, wanted = [], [], [], []
    for route in routes:
        fingerprints = torch.randint(2, (len(route), 32)).float()
        wanted.append(states(state, Dag(route), model._compression(fingerprints).double())[0][0])
        # Their collate function: plain arrays, of shape (0,) for a route of one molecule.
        edges = np.array([(p, c) for p, below in enumerate(route) for c in below])
        some = calculate_evaluation_orders(edges, len(route)) if len(edges) else ([0], [])
        features.append(fingerprints)
        adjacency.append(torch.tensor(edges, dtype=torch.int64) + sum(map(len, features[:-1])))
        orders.append([torch.tensor(order, dtype=torch.int64) for order in some])
    node_order, edge_order = map(torch.cat, zip(*orders, strict=True))
    rows = model._compression(torch.cat(features))
    h, _ = model._tree_lstm(rows, node_order, torch.cat(adjacency), edge_order)
    roots = torch.stack([part[0, :] for part in torch.split(h, [len(x) for x in features], dim=0)])
    distances = torch.pdist(torch.stack(wanted)).float()
    torch.testing.assert_close(torch.pdist(roots), distances, rtol=0, atol=1e-6)
    first = batch_tree_input(
        [{"features": model._compression(x), "node_order": n, "edge_order": e, "adjacency_list": a}
         for x, a, (n, e) in zip(features[:1], adjacency[:1], orders[:1], strict=True)]
    )  # fmt: skip
    torch.testing.assert_close(called(model._tree_lstm, first)[0][0], roots[0], rtol=0, atol=1e-6)
