"""Tree-LSTMs in C, whole schedules and block by block: as plain torch in twice the precision."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.native import NATIVE_SWITCH, loaded_extension
from pyg_dynbatch.core.products import MAKES, Products, use_products
from pyg_dynbatch.kernels import native
from pyg_dynbatch.kernels.native import NativeGates, NativeKernel
from pyg_dynbatch.nn import NaryTreeLSTM, RecursiveLayer
from tests.core.test_native import MUST_BUILD
from tests.kernels.fused import (
    CASES,
    assert_near,
    combs,
    everything,
    layers,
    run_fused,
    schedule_of,
)
from tests.strategies import few

pytestmark = pytest.mark.skipif(
    not MUST_BUILD and loaded_extension() is None, reason="no C extension"
)
SIX = (0, 0, 0, 1, 1, 4)


@pytest.fixture(autouse=True, scope="module")
def own_products() -> Iterator[None]:
    """Schedules are run in C, and large ones packed, on any processor."""
    with use_products(MAKES["AuthenticAMD"]):
        yield


@pytest.fixture(params=(1, pytest.param(2, marks=pytest.mark.long)))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=("as it is", "packed"))
def matrix(request: pytest.FixtureRequest) -> Iterator[None]:
    """How products of whole schedules read a matrix, whatever the number of rows."""
    worth_packing = 0 if request.param == "packed" else 10**9
    with mock.patch.object(native, "_WORTH_PACKING", worth_packing):
        yield


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """How whole schedules were run, call by call."""
    found: list[str] = []

    def spied(name: str) -> Callable[..., object]:
        function = getattr(NativeKernel, name)

        def call(*given: object) -> object:
            found.append(name)
            return function(*given)

        return call

    names = "forward", "backward"
    with mock.patch.multiple(NativeKernel, **{name: spied(name) for name in names}):
        yield found


def block_by_block() -> AbstractContextManager[None]:
    return use_products(Products())


def compare(
    layer: RecursiveLayer, schedule: Levels, inputs: Tensor, expand: bool = False, **options: object
) -> None:
    """C in single precision, at once and block by block, against torch in double precision."""
    wanted = everything(layer.double(), schedule, inputs, expand, **options)
    layer.float()
    assert_near(everything(layer, schedule, inputs, expand, **options), wanted)
    plain = NativeGates.forward
    spy = mock.patch.object(NativeGates, "forward", autospec=True, side_effect=plain)
    with block_by_block(), spy as forward:
        assert_near(everything(layer, schedule, inputs, expand, **options), wanted)
    assert forward.called


@given(
    parents=st.lists(st.integers(0, 10**6), min_size=1, max_size=41).map(
        lambda draws: [draw % max(k, 1) for k, draw in enumerate(draws)]
    ),
    width=st.sampled_from([1, 2, 7, 16, 33]),
    seed=st.integers(0, 99),
)
@few(20)
@pytest.mark.usefixtures("matrix")
def test_random_forests(parents: list[int], width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    has_input = torch.rand(len(parents), generator=generator) < 0.7
    for layer in layers(width):
        schedule = schedule_of(parents, layer.arity, has_input)
        inputs = torch.randn(sum(schedule.level_inputs), 3, generator=generator)
        compare(layer, schedule, inputs, inputs_only=True, level_order=bool(seed % 2))


# Rows of fewer than 16 columns (8 without AVX-512) are multiplied number by number.
@pytest.mark.parametrize("trees", (1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 29))
@pytest.mark.parametrize("width", (1, 5, 9, 19, 33, 100))
@pytest.mark.usefixtures("threads", "matrix")
def test_levels_of_every_size(trees: int, width: int, calls: list[str]) -> None:
    for layer in layers(width):
        schedule = combs(trees, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        found = everything(layer, schedule, inputs)
        assert_near(found, everything(layer.double(), schedule, inputs))
    assert calls == ["forward", "backward"] * 4


@pytest.mark.parametrize("variant", loaded_extension().variants() if loaded_extension() else ())
def test_every_variant(variant: str) -> None:
    best = loaded_extension().variant()
    try:
        loaded_extension().use_variant(variant)
        for width in (5, 20, 50):
            for layer in layers(width, (2,)):
                for trees in (3, 30):
                    schedule = combs(trees, layer)
                    compare(layer, schedule, torch.randn(schedule.num_nodes, 3))
    finally:
        loaded_extension().use_variant(best)
    with pytest.raises(ValueError, match="'none' is none of the variants"):
        loaded_extension().use_variant("none")


EXTREMES = (0.0, 80.0, 90.0, 104.0, 1e30, 3e38, float("inf"), float("nan"))


@pytest.mark.parametrize("number", [*EXTREMES, *(-number for number in EXTREMES)])
def test_extreme_numbers(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that saturate are 0 and 1, as in torch: a gradient may multiply them with 1e38."""
    for layer in layers(2, (2,)):
        schedule = combs(1, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        inputs[2] = number
        by_c = everything(layer, schedule, inputs)
        monkeypatch.setenv(NATIVE_SWITCH, "0")
        by_torch = everything(layer, schedule, inputs)
        monkeypatch.delenv(NATIVE_SWITCH)
        for got, expected in zip(by_c, by_torch, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.usefixtures("threads")
def test_large_blocks_and_equal_leaves() -> None:
    """Blocks of 128 rows and 130 columns are large enough for several threads."""
    for layer in layers(130, (2,)):
        schedule = schedule_of([max(k - 1, 0) // 3 for k in range(601)], layer.arity)
        compare(layer, schedule, torch.randn(601, 3))
        leaves = schedule.level_sizes[0]
        shared = {"leaf_inverse": torch.randint(0, 7, (leaves,)), "level_order": True}
        for expand in (False, True):
            compare(layer, schedule, torch.randn(608 - leaves, 3), expand, **shared)


@pytest.mark.parametrize("dropout", (0.0, 0.4))
@pytest.mark.parametrize("recorded", (False, True))
def test_levels_of_several_blocks(dropout: float, recorded: bool, calls: list[str]) -> None:
    """Levels of 300 nodes, some of which have an input; gates that are kept and that are not."""
    for layer in layers(9):
        layer.cell.recurrent_dropout = dropout
        schedule = combs(300, layer, torch.rand(2700) < 0.6)
        inputs = torch.randn(schedule.num_nodes, 3)
        run = everything if recorded else states
        found = run(layer, schedule, inputs)
        with block_by_block():
            assert_near(found, run(layer, schedule, inputs))
    assert len(calls) == (8 if recorded else 4)


@torch.no_grad()
def states(layer: RecursiveLayer, schedule: Levels, inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return [*layer(inputs, schedule=schedule, return_state=True)]


@pytest.mark.parametrize("name", CASES)
def test_every_case(name: str) -> None:
    for layer in layers(5, (2, 3)):
        schedule, inputs, options = CASES[name](layer)
        compare(layer, schedule, inputs, **options)


def test_the_same_at_every_run_recorded_or_not(calls: list[str]) -> None:
    for layer in layers(20):
        schedule = combs(5, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        first, second = (everything(layer, schedule, inputs) for _ in range(2))
        assert all(map(torch.equal, first, second))
        with torch.inference_mode():
            assert torch.equal(layer(inputs, schedule=schedule), first[0])
    assert calls == ["forward", "backward", "forward", "backward", "forward"] * 4


def test_tensors_in_other_layouts() -> None:
    """Weights and saved tensors that are not contiguous, gradients that are lazily negated."""
    for layer in layers(20):
        schedule, inputs = combs(2, layer), torch.randn(18, 3)
        wanted = everything(layer, schedule, inputs)
        hooks = lambda saved: saved.t().contiguous(), lambda kept: kept.t()  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            assert_near(everything(layer, schedule, inputs), wanted)
        layer.cell.weight_hidden.data = layer.cell.weight_hidden.data.t().contiguous().t()
        assert_near(everything(layer, schedule, inputs), wanted)
        inputs.requires_grad_()
        _, c = run_fused(layer, schedule, inputs, level_order=True)
        ones = torch.ones_like(c)
        (wanted_grad,) = torch.autograd.grad(c, inputs, -ones, retain_graph=True)
        (found,) = torch.autograd.grad(c, inputs, torch._neg_view(ones))
        assert torch.equal(found, wanted_grad)


def test_left_to_single_blocks(calls: list[str]) -> None:
    """If matrices are worth packing, nodes have several parents, or products are not single."""
    large = NaryTreeLSTM(3, 256)
    everything(large, combs(300, large), torch.randn(2700, 3))
    small = NaryTreeLSTM(3, 5)
    shared = schedule_structure(torch.tensor([[0, 1, 0, 1], [2, 2, 3, 3]]), 4, arity=2)
    everything(small, shared, torch.randn(4, 3))
    with torch.autocast("cpu", torch.float16):
        everything(small, combs(2, small), torch.randn(18, 3))
    with torch.autocast("cpu", torch.bfloat16):
        everything(large, combs(30, large), torch.randn(270, 3))
    everything(small.double(), combs(2, small), torch.randn(18, 3))
    assert not calls


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_weights_of_half_precision_under_autocast(dtype: torch.dtype) -> None:
    """C reads single precision alone: other weights are left to torch."""
    for layer in layers(5, (2,)):
        schedule = combs(3, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        h, c = layer(inputs, schedule=schedule, return_state=True)
        layer.to(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(inputs, schedule=schedule, return_state=True)
        torch.testing.assert_close(found[0].float(), h, rtol=0, atol=0.05)
        torch.testing.assert_close(found[1].float(), c, rtol=0, atol=0.05)


def test_far_and_near_numbers() -> None:
    """Saturated gates, gates near zero, and NaN."""
    schedule = schedule_structure(torch.empty(2, 0, dtype=torch.long), 9, arity=2)
    layer = NaryTreeLSTM(1, 4)
    with torch.no_grad():
        layer.cell.bias.zero_()
        layer.cell.weight_input.fill_(1.0)
    x = torch.tensor(
        [[0.0], [1e-30], [1e-6], [-1e-3], [0.4999], [0.5001], [-30.0], [500.0], [-500.0]]
    )
    h, c = run_fused(layer, schedule, x, level_order=True)
    exact = x.double()
    memory = exact.tanh() * exact.sigmoid()
    torch.testing.assert_close(c.double(), memory.expand(-1, 4), rtol=5e-7, atol=1e-37)
    right = (memory.tanh() * exact.sigmoid()).expand(-1, 4)
    torch.testing.assert_close(h.double(), right, rtol=1e-6, atol=1e-37)
    for bits in (0x7FC00000, -1, 0x7F800001):
        none = torch.full((9, 1), bits, dtype=torch.int32).view(torch.float32)
        assert run_fused(layer, schedule, none)[0].isnan().all()


@pytest.mark.parametrize("width", (9, 20))
def test_infinite_weights_stay_infinite(width: int) -> None:
    layer = NaryTreeLSTM(3, width)
    schedule = combs(2, layer)
    with torch.no_grad():
        # Far enough in the row to be read twice by the last lanes, and not the last entry.
        layer.cell.weight_hidden[:width, 2 * width - 5] = -torch.inf
    inputs = torch.randn(schedule.num_nodes, 3)
    found = layer(inputs, schedule=schedule)
    with block_by_block():
        torch.testing.assert_close(found, layer(inputs, schedule=schedule), equal_nan=True)
    assert not found.isnan().any()


def test_rows_and_weights_that_c_cannot_read_are_refused() -> None:
    for layer in layers(20):
        schedule = schedule_of(SIX, layer.arity)
        for rows, leaves, device in (
            (8, None, "cpu"),
            (6, 9, "cpu"),
            (0, 3, "cpu"),
            (6, 0, "meta"),
        ):
            leaf_inverse = torch.zeros(leaves, dtype=torch.long) if leaves else None
            given = schedule.to(device), torch.randn(rows, 3)
            with pytest.raises(ValueError, match="the schedule does not fit the input rows"):
                run_fused(layer, *given, leaf_inverse=leaf_inverse)
        for name in ("bias", "weight_hidden", "weight_input"):
            weight = getattr(layer.cell, name)
            for bad in (weight.double(), weight.to("meta"), weight[:-4], weight.bfloat16()):
                with pytest.raises((TypeError, ValueError), match="expected"):
                    changed = {f"cell.{name}": bad.detach()}
                    functional_call(layer, changed, (torch.randn(6, 3), None, schedule))


def test_a_tracer_sees_all_calls_of_torch() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    layer, x = NaryTreeLSTM(3, 4), torch.randn(9, 3)
    schedule = combs(1, layer)
    with torch.no_grad():
        traced = make_fx(lambda rows: layer(rows, schedule=schedule))(x)
        torch.testing.assert_close(traced(x), layer(x, schedule=schedule))
