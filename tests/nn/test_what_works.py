"""The table of docs/speed.md: which ways of PyTorch to run a model work, and which are refused."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from pyg_dynbatch.core import TensorType, schedule_recordings
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import (
    DAGNN,
    NaryTreeLSTM,
    NaryTreeLSTMCell,
    Pairs,
    TopologicalConv,
    TreeGRU,
    WeaveStack,
)
from pyg_dynbatch.testing import recording_of_structure
from tests.core.helpers import as_users_run_it, cell_engine

EDGES = torch.tensor([[0, 1], [2, 2]])
X = torch.randn(3, 4)


class Sum(nn.Module):
    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return x + left + right


class InEngine(nn.Module):
    """An engine that is called like the layers."""

    arity = 2

    def __init__(self) -> None:
        super().__init__()
        self.row = TensorType((4,))
        self.engine, node = cell_engine(Sum(), self.row, 2, self.row)
        structure = Data(edge_index=EDGES, num_nodes=3)
        self.steps = schedule_recordings([recording_of_structure(node, structure)])

    def forward(self, x: Tensor, schedule: Levels) -> Tensor:
        return self.engine(self.steps, {self.row: x})["node"]


class InDAGNN(nn.Module):
    """The nodes that a DAGNN embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DAGNN(4, 4, 1, bidirectional=False)

    def forward(self, x: Tensor, schedule: Levels) -> Tensor:
        return self.model.embed(x, EDGES, schedule=schedule)[:, 4:]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: NaryTreeLSTM(4, 4),
    "level by level": lambda: TreeGRU(4, 4),
    "topological": lambda: TopologicalConv(SAGEConv(4, 4)),
    "engine": InEngine,
    "dagnn": InDAGNN,
}


class Whole(nn.Module):
    """A model on one batch, of the rows alone."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        arity = getattr(layer, "arity", None)
        self.schedule = schedule_structure(EDGES, 3, arity=arity)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, schedule=self.schedule)


def dual(model: nn.Module) -> object:
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(X, X))


def twice(model: nn.Module) -> object:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)


def batched(model: nn.Module) -> object:
    x = X.clone().requires_grad_()
    h = model(x)
    several = torch.func.vmap(lambda grad: torch.autograd.grad(h, x, grad, retain_graph=True))
    return several(torch.ones(2, *h.shape))


def rows_of_gradients(model: nn.Module) -> object:
    x = X.clone().requires_grad_()
    h = model(x)
    return torch.autograd.grad(h, x, torch.ones(2, *h.shape), is_grads_batched=True)


def jacobian(model: nn.Module) -> object:
    return torch.autograd.functional.jacobian(model, X, vectorize=True)


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "func.grad": (lambda m: torch.func.grad(lambda x: m(x).sum())(X), "a transform of torch.func"),
    "func.vjp": (lambda m: torch.func.vjp(m, X), "a transform of torch.func"),
    "func.jvp": (lambda m: torch.func.jvp(m, (X,), (X,)), "a transform of torch.func"),
    "func.vmap": (lambda m: torch.func.vmap(m)(X[None]), "a transform of torch.func"),
    "forward mode": (dual, "forward-mode derivatives"),
    "batched gradients": (batched, "a transform of torch.func"),
    "is_grads_batched": (rows_of_gradients, "a batch of gradients"),
    "jacobian": (jacobian, "a batch of gradients"),
    "second derivatives": (twice, "second derivatives"),
    "export": (lambda m: torch.export.export(m, (X,), strict=False), "torch.export"),
    "trace": (lambda m: torch.jit.trace(m, (X,)), "torch.jit.trace"),
    "script": (lambda m: torch.jit.script(m.layer), "torch.jit.script"),
}


# PyTorch itself says that TorchScript has no future.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", REFUSED)
@pytest.mark.parametrize("kind", LAYERS)
def test_refused_through_a_schedule(kind: str, way: str) -> None:
    if way == "export" and not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("a layer cannot find out that this torch exports it")
    model, (run, named) = Whole(LAYERS[kind]()), REFUSED[way]
    before = model(X)
    with as_users_run_it(), pytest.raises(RuntimeError, match=named) as caught:
        run(model)
    assert "schedule" in str(caught.value)
    assert "expected:" in str(caught.value)
    # What was refused leaves nothing behind.
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("kind", LAYERS)
def test_one_graph_without_breaks_is_refused(kind: str) -> None:
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip("this torch shows no reason")
    model = Whole(LAYERS[kind]())
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="differs from batch to batch.*use fullgraph=False"):
        compiled(X)


@pytest.mark.parametrize("norm", (None, "batch", "layer"))
def test_weave_works_without_a_schedule(norm: str | None) -> None:
    stack, pairs = WeaveStack(4, 2, 3, norm=norm), Pairs.from_codes(torch.tensor([0, 1, 0]), [2])

    def model(x: Tensor) -> Tensor:
        return stack(x, torch.eye(2), pairs)

    wanted = torch.autograd.functional.jacobian(model, X[:2])
    found = torch.autograd.functional.jacobian(model, X[:2], vectorize=True)
    torch.testing.assert_close(found, wanted)


class OfRows(nn.Module):
    """A cell as a function of its input rows."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.register_buffer("zeros", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, (self.zeros, self.zeros), (self.zeros, self.zeros))[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_cell_alone_is_plain_torch() -> None:
    cell = OfRows(NaryTreeLSTMCell(4, 4))
    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(cell(x).square().sum(), x, create_graph=True)
    with as_users_run_it():
        found = torch.func.grad(lambda rows: cell(rows).square().sum())(X)
        torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(torch.func.vmap(cell)(X[None])[0], cell(X))
        for run in (torch.export.export(cell, (X,)).module(), torch.jit.trace(cell, (X,))):
            torch.testing.assert_close(run(2 * X), cell(2 * X))
        with pytest.raises(
            RuntimeError, match="NaryTreeLSTMCell: torch.jit.script does not support"
        ):
            torch.jit.script(cell)
    assert torch.autograd.grad(wanted.sum(), x)[0].abs().sum() > 0


@pytest.mark.parametrize("kind", sorted(LAYERS.keys() - {"engine"}))
@pytest.mark.parametrize(
    ("x", "got"),
    (
        (X.double(), "got:      torch.float64"),
        (X.bfloat16(), "got:      torch.bfloat16"),
        (X.to("meta"), "float32 tensor [3, 4] on meta"),
        (X.to_sparse(), "float32 tensor [3, 4], torch.sparse_coo"),
        (X.long(), "int64 tensor [3, 4]"),
        (X.numpy(), "ndarray"),
    ),
)
def test_rows_of_invalid_shape_or_dtype_are_refused(kind: str, x: Tensor, got: str) -> None:
    model = Whole(LAYERS[kind]())
    with as_users_run_it(), pytest.raises(TypeError, match="input rows") as caught:
        model(x)
    assert got in str(caught.value)


@pytest.mark.parametrize("kind", sorted(LAYERS.keys() - {"engine", "dagnn"}))
def test_edges_without_values_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match=r"dense edges[\s\S]*on meta"):
        LAYERS[kind]()(X, EDGES.to("meta"))


@pytest.mark.parametrize("kind", sorted(LAYERS.keys() - {"engine"}))
def test_autocast_takes_rows_of_half_precision(kind: str) -> None:
    model = Whole(LAYERS[kind]())
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X.bfloat16()).shape == X.shape
        with pytest.raises(TypeError, match="differ in dtype"):
            model(X.double())
