"""All levels of a small run in one call: the same as block by block, and only where allowed."""

import ctypes
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, c_void_p
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from pyg_dynbatch.core import native
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import NaryTreeLSTM, RecursiveLayer, fused_tree_lstm, native_levels, products
from pyg_dynbatch.nn.fused_gates import BLOCK
from pyg_dynbatch.nn.native_gates import gates_library
from pyg_dynbatch.nn.native_levels import multiply_address
from tests.nn.fused import assert_near, everything, layers
from tests.nn.test_native_gates import MUST_BUILD

# Where torch has MKL, C that builds and no sgemm_ must not pass for a machine without one.
MUST_RUN = MUST_BUILD and torch.backends.mkl.is_available()
pytestmark = pytest.mark.skipif(
    not MUST_RUN and (gates_library() is None or multiply_address() is None),
    reason="no C compiler, or no sgemm_ in the libraries of torch",
)


@pytest.fixture(params=(1, pytest.param(2, marks=pytest.mark.long)))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that run a whole schedule, as they are called."""
    found: list[str] = []

    def spied(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            found.append(name)
            return function(*given, **named)

        return call

    for name in ("forward_run", "backward_run"):
        monkeypatch.setattr(fused_tree_lstm, name, spied(name, getattr(native_levels, name)))
    return found


def combs(trees: int, layer: RecursiveLayer) -> Levels:
    """Trees of 9 nodes, 5 levels deep; their levels have as many nodes as there are trees."""
    return schedule_structure(plain_edges(trees, layer), 9 * trees, arity=layer.arity)


def plain_edges(trees: int, layer: RecursiveLayer) -> Tensor:
    below = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (6, 2), (7, 1), (8, 0)]
    if layer.arity == 1:
        below = [(child, child - 1) for child in range(1, 9)]
    edges = [(9 * t + child, 9 * t + parent) for t in range(trees) for child, parent in below]
    return torch.tensor(edges).t()


# Few rows are multiplied by our own C where they have 16 columns or more (8 without AVX-512).
@pytest.mark.parametrize("trees", (1, 2, 3, 4, 5, 6, 7, 8, 11))
@pytest.mark.parametrize("width", (1, 5, 9, 19, 33, 100))
@pytest.mark.usefixtures("threads")
def test_levels_of_every_size(trees: int, width: int, calls: list[str]) -> None:
    for layer in layers(width):
        schedule = combs(trees, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        found = everything(layer, schedule, inputs)
        assert_near(found, everything(layer.double(), schedule, inputs))
    assert calls == ["forward_run", "backward_run"] * 4


def test_the_same_at_every_run_and_as_block_by_block(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in layers(20):
        schedule = combs(5, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        at_once, again = (everything(layer, schedule, inputs) for _ in range(2))
        assert all(map(torch.equal, at_once, again))
        with monkeypatch.context() as without:
            without.setattr(fused_tree_lstm, "multiply_address", lambda: None)
            assert_near(at_once, everything(layer, schedule, inputs))
    assert len(calls) == 16


def test_gates_that_are_not_kept(calls: list[str]) -> None:
    for layer in layers(20):
        schedule = combs(5, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        wanted = layer(inputs, schedule=schedule)
        with torch.inference_mode():
            assert torch.equal(layer(inputs, schedule=schedule), wanted)
    assert calls == ["forward_run"] * 8


def test_weights_that_are_not_contiguous() -> None:
    for layer in layers(20):
        schedule = combs(2, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        wanted = everything(layer, schedule, inputs)
        layer.cell.weight_hidden.data = layer.cell.weight_hidden.data.t().contiguous().t()
        assert_near(everything(layer, schedule, inputs), wanted)


def test_left_to_single_blocks(calls: list[str]) -> None:
    """If matrices are worth packing, nodes have several parents, or products are not single."""
    large = NaryTreeLSTM(3, 256)
    schedule = combs(300, large)
    everything(large, schedule, torch.randn(schedule.num_nodes, 3))
    small = NaryTreeLSTM(3, 5)
    shared = schedule_structure(torch.tensor([[0, 1, 0, 1], [2, 2, 3, 3]]), 4, arity=2)
    everything(small, shared, torch.randn(4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        everything(small, combs(2, small), torch.randn(18, 3))
    everything(small.double(), combs(2, small), torch.randn(18, 3))
    assert not calls


@pytest.mark.parametrize("dropout", (0.0, 0.4))
@pytest.mark.parametrize("recorded", (False, True))
def test_levels_of_several_blocks(dropout: float, recorded: bool, calls: list[str]) -> None:
    """Levels of 300 nodes, some of which have an input; gates that are kept and that are not."""
    for layer in layers(9):
        layer.cell.recurrent_dropout = dropout
        plain = combs(300, layer)
        has_input = torch.rand(plain.num_nodes) < 0.6
        edges = plain_edges(300, layer)
        schedule = schedule_structure(
            edges, plain.num_nodes, arity=layer.arity, has_input=has_input
        )
        inputs = torch.randn(schedule.num_nodes, 3)

        run = everything if recorded else states
        found = run(layer, schedule, inputs)
        with pytest.MonkeyPatch.context() as without:
            without.setattr(fused_tree_lstm, "multiply_address", lambda: None)
            assert_near(found, run(layer, schedule, inputs))
    assert len(calls) == (8 if recorded else 4)


@torch.no_grad()
def states(layer: RecursiveLayer, schedule: Levels, inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return [*layer(inputs, schedule=schedule, return_state=True)]


@pytest.mark.parametrize("width", (9, 20))
def test_infinite_weights_stay_infinite(width: int) -> None:
    layer = NaryTreeLSTM(3, width)
    schedule = combs(2, layer)
    with torch.no_grad():
        # Far enough in the row to be read twice by the last lanes, and not the last entry.
        layer.cell.weight_hidden[:width, 2 * width - 5] = -torch.inf
    inputs = torch.randn(schedule.num_nodes, 3)
    found = layer(inputs, schedule=schedule)
    with pytest.MonkeyPatch.context() as without:
        without.setattr(fused_tree_lstm, "multiply_address", lambda: None)
        torch.testing.assert_close(found, layer(inputs, schedule=schedule), equal_nan=True)
    assert not found.isnan().any()


def test_a_function_that_does_not_multiply_is_rejected() -> None:
    idle = CFUNCTYPE(None, *[c_void_p] * 13)(lambda *given: None)
    assert not native_levels._multiplies(idle)


@pytest.mark.skipif(not MUST_RUN, reason="torch has no MKL here")
@pytest.mark.parametrize("default", ("meta", "float64"))
def test_found_and_raced_with_any_default_dtype_and_device(
    default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.FOLDER, str(tmp_path))  # no winner is kept there yet
    monkeypatch.delenv(native.RACE, raising=False)
    if default == "float64":
        torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta" if default == "meta" else "cpu"):
            assert multiply_address.__wrapped__() is not None
            assert native_levels.narrow_rows.__wrapped__() in (7, 8, 32, BLOCK)
            assert isinstance(products._packing_wins.__wrapped__(), bool)
            assert isinstance(products._transposed_wins.__wrapped__(), bool)
    finally:
        torch.set_default_dtype(torch.float32)
    kept = {path.name.partition("-")[2] for path in tmp_path.glob("fastest-*")}
    assert {name.rsplit("-", 1)[0] for name in kept} >= {"large-products", "weight-gradients"}


@pytest.mark.parametrize("name", ("bias", "weight_hidden", "weight_input"))
def test_weights_that_c_cannot_read(name: str) -> None:
    """Of another dtype, device or shape than the others."""
    for layer in layers(20):
        schedule = combs(2, layer)
        weight = getattr(layer.cell, name)
        for bad in (weight.double(), weight.to("meta"), weight[:-4], weight.bfloat16()):
            given = torch.randn(schedule.num_nodes, 3), None, schedule
            with pytest.raises((TypeError, ValueError), match="expected"):
                functional_call(layer, {f"cell.{name}": bad.detach()}, given)


def test_libraries_without_sgemm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", native_levels.__name__)
    with mock.patch.object(ctypes, "CDLL", return_value=object()):
        assert multiply_address.__wrapped__() is None
    assert "no sgemm_ in libtorch_cpu" in caplog.text
