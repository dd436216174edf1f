"""Tree-LSTMs under autocast with bfloat16: near a recursion in float64, in C and in plain torch."""

from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pyg_dynbatch.core import products
from pyg_dynbatch.core.native import NATIVE_SWITCH, loaded_extension
from pyg_dynbatch.core.products import MAKES, Products, RowProduct, use_products
from pyg_dynbatch.kernels import blocks
from pyg_dynbatch.kernels.blocks import (
    BlockKernel,
    Gates,
    RunPlan,
    RunRows,
    StateGradients,
    TorchGates,
    checked_leaf_inputs,
)
from pyg_dynbatch.kernels.native import NativeGates
from pyg_dynbatch.nn import NaryTreeLSTM
from pyg_dynbatch.nn.cell import run_levels
from tests.core.test_native import MUST_BUILD
from tests.kernels.fused import CASES, combs, everything, layers, run_fused, schedule_of
from tests.nn.recursion import KINDS, batched, features, gradients, make, placed, recurse
from tests.strategies import few

TREE_LSTMS = ("nary-1", "nary-2", "nary-4", "child-sum")
HAS_C = MUST_BUILD or loaded_extension() is not None
NEEDS_C = pytest.mark.skipif(not HAS_C, reason="no C extension")
SPECIAL = (
    *(0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 1.0039063, 8.4e37, -8.4e37, 2.0**-130),
    *(float("inf"), float("-inf"), float("nan")),
)


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """Small schedules are cast to bfloat16, too, on any processor."""
    with use_products(Products()):
        yield


@pytest.fixture(params=("torch", pytest.param("C", marks=NEEDS_C)))
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes the gates."""
    if request.param == "torch":
        monkeypatch.setenv(NATIVE_SWITCH, "0")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 2)


@pytest.fixture(params=(1, pytest.param(2, marks=pytest.mark.long)))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_near(found: Sequence[Tensor], wanted: Sequence[Tensor], rounding: float = 0.03) -> None:
    """As near as eight bits allow; the errors of several products and levels add up."""
    assert len(found) == len(wanted)
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == torch.float32
        difference = (mine.double() - right.double()).norm()
        assert difference <= rounding * max(right.norm(), 1)


def in_half(layer: torch.nn.Module, *given: object, **options: object) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return everything(layer, *given, **options)


@pytest.mark.parametrize("kind", TREE_LSTMS)
@few(12)
@given(data=st.data())
@pytest.mark.usefixtures("small_blocks", "kernels")
def test_near_a_recursion_in_double_precision(kind: str, data: st.DataObject) -> None:
    layer = make(kind)
    structure = data.draw(placed(layer.arity))
    schedule = structure.schedule(layer)
    x = features(structure.num_nodes).requires_grad_()
    states = recurse(layer, KINDS[kind][1], structure, x)
    # The same weights of the loss as for states in single precision.
    wanted = [*states, *gradients(layer, x, [part.float() for part in states])]
    layer.float()
    x = x.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, schedule=schedule, return_state=True)
    assert_near([*found, *gradients(layer, x, found)], wanted)


@pytest.mark.parametrize("kind", TREE_LSTMS)
@few(8)
@given(data=st.data())
@pytest.mark.usefixtures("small_blocks", "kernels")
def test_a_batch_is_its_trees_one_by_one(kind: str, data: st.DataObject) -> None:
    layer = make(kind).float()
    structures = data.draw(st.lists(placed(layer.arity), min_size=1, max_size=4))
    schedule = batched(structures, layer)
    x = features(schedule.num_nodes).float().requires_grad_()
    rows = x.split([each.num_nodes for each in structures])
    with torch.autocast("cpu", torch.bfloat16):
        alone = [
            layer(own, schedule=each.schedule(layer), return_state=True)
            for own, each in zip(rows, structures, strict=True)
        ]
        together = layer(x, schedule=schedule, return_state=True)
        by_level = run_levels(layer.cell, schedule, x.index_select(0, schedule.input_node))
    states = tuple(torch.cat(parts) for parts in zip(*alone, strict=True))
    wanted = [*states, *gradients(layer, x, states)]
    assert_near([*together, *gradients(layer, x, together)], wanted)
    # Its gates are rounded, too.
    assert_near([*by_level, *gradients(layer, x, by_level)], wanted, rounding=0.06)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("kernels")
def test_every_case(name: str) -> None:
    for layer in layers(5, (2, 3)):
        schedule, inputs, options = CASES[name](layer)
        wanted = everything(layer.double(), schedule, inputs, **options)
        assert_near(in_half(layer.float(), schedule, inputs, **options), wanted)


@NEEDS_C
@pytest.mark.parametrize("variant", loaded_extension().variants() if loaded_extension() else ())
@pytest.mark.usefixtures("threads")
def test_every_variant_of_c(variant: str) -> None:
    """Levels of several blocks, which are large enough for several threads."""
    best = loaded_extension().variant()
    spy = mock.patch.object(NativeGates, "forward", autospec=True, side_effect=NativeGates.forward)
    try:
        loaded_extension().use_variant(variant)
        for layer in layers(130, (2,)):
            schedule = schedule_of([max(k - 1, 0) // 3 for k in range(601)], layer.arity)
            inputs = torch.randn(601, 3)
            wanted = everything(layer.double(), schedule, inputs)
            with spy as forward:
                assert_near(in_half(layer.float(), schedule, inputs), wanted)
            assert forward.called
    finally:
        loaded_extension().use_variant(best)


@NEEDS_C
def test_c_computes_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round at the same places: the difference is a unit of the last bit here and there."""
    for layer in layers(20):
        schedule = combs(9, layer, torch.rand(81) < 0.7)
        inputs = torch.randn(schedule.num_nodes, 3)
        found = in_half(layer, schedule, inputs)
        with monkeypatch.context() as patch:
            patch.setenv(NATIVE_SWITCH, "0")
            wanted = in_half(layer, schedule, inputs)
        assert_near(found, wanted, rounding=0.005)


@pytest.mark.parametrize("gates", (TorchGates, pytest.param(NativeGates, marks=NEEDS_C)))
def test_gradients_are_rounded_to_the_nearest(gates: type[TorchGates]) -> None:
    """Ties to the even number; infinity and what is no number stay so."""
    # What is no number, whose bits rounding would carry into the sign.
    none = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    of_h = torch.cat([torch.tensor(SPECIAL), none])[:, None].expand(-1, 3).contiguous()
    schedule = schedule_of([*range(len(of_h))], 2)
    plan = RunPlan(schedule, len(of_h), block=128, half=True, keeps=True)
    rows = RunRows.of(plan, torch.empty(0), 3)
    rows.leaf_gates.fill_(0.5)
    rows.leaf_activated.fill_(1.0)
    incoming = StateGradients.of_results(plan, 4 * of_h, None, rows)
    grads = Gates(torch.empty_like(rows.leaf_gates))
    (block,) = plan.leaf_blocks()
    gates(plan, rows, inner=False).backward(block, Gates(rows.leaf_gates), incoming, grads)
    # The gradient of o before activation is that of h, times tanh(c), o and 1 - o.
    found = grads.rows[:, 6:]
    torch.testing.assert_close(found, of_h.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("gates", (TorchGates, pytest.param(NativeGates, marks=NEEDS_C)))
def test_states_are_not_rounded_but_what_products_read(gates: type[TorchGates]) -> None:
    for layer in layers(20):
        schedule = combs(9, layer)
        cell = layer.cell
        weights = cell.weight_input.bfloat16(), cell.weight_hidden.bfloat16(), cell.bias
        inputs = torch.randn(schedule.num_nodes, 3).bfloat16()
        with torch.no_grad():
            plan = RunPlan(schedule, checked_leaf_inputs(schedule, inputs, None), half=True)
            rows = BlockKernel(gates).forward(plan, inputs, weights)
        assert torch.equal(rows.read_hidden[1:], rows.hidden[1:].bfloat16())
        assert not torch.equal(rows.read_hidden[1:].float(), rows.hidden[1:])
        assert rows.memory.dtype == torch.float32
        assert torch.equal(rows.gathered, rows.read_hidden[plan.children])


@NEEDS_C
def test_casts_do_not_grow_with_the_levels() -> None:
    """Weights and input rows are cast once per run, and their gradients back."""

    def casts(length: int) -> int:
        schedule = schedule_of([*range(1, length), length - 1], 2)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            in_half(layer, schedule, torch.randn(length, 3))
        averages = profiler.key_averages()
        return sum(each.count for each in averages if each.key == "aten::_to_copy")

    layer = NaryTreeLSTM(3, 5)
    assert 0 < casts(4) == casts(20)


def test_packed_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_LARGE_MATRIX", 0)
    monkeypatch.setattr(products, "_MANY_ROWS", 0)
    with use_products(Products(packed=True)):
        product = RowProduct(torch.randn(7, 5).bfloat16())
        if product.packed is None:
            pytest.skip("oneDNN does not multiply bfloat16 on this processor")
        rows = torch.randn(150, 5).bfloat16()
        right = rows.double() @ product.weight.double().t()
        for size in (1, 8, 100, 128, 140):
            found = product(rows, 2, size).double()
            torch.testing.assert_close(found, right[2 : 2 + size], rtol=1e-2, atol=1e-2)
        for layer in layers(130, (2,)):
            schedule = combs(20, layer)
            inputs = torch.randn(schedule.num_nodes, 3)
            wanted = everything(layer.double(), schedule, inputs)
            assert_near(in_half(layer.float(), schedule, inputs), wanted)


@NEEDS_C
def test_small_schedules_are_left_in_single_precision() -> None:
    """A tree alone is computed in single precision, and many in half precision, to rounding."""
    with use_products(MAKES["AuthenticAMD"]):
        for layer in layers(300, (2,)):
            one, many = combs(1, layer), combs(120, layer)
            x = torch.randn(many.num_nodes, 3)
            alone = in_half(layer, one, x[:9])
            assert all(map(torch.equal, alone, everything(layer, one, x[:9])))
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                together = layer(x, schedule=many, return_state=True)
            exact = layer(x, schedule=many, return_state=True)
            assert not torch.equal(together[0], exact[0])
            assert_near([part[:9] for part in together], alone[:2])


def test_single_precision_is_the_same_before_and_after() -> None:
    for layer in layers(20):
        schedule = combs(9, layer)
        inputs = torch.randn(schedule.num_nodes, 3)
        before = everything(layer, schedule, inputs)
        assert not all(map(torch.equal, in_half(layer, schedule, inputs), before))
        assert all(map(torch.equal, everything(layer, schedule, inputs), before))


@NEEDS_C
def test_what_is_no_number_stays_none() -> None:
    layer = NaryTreeLSTM(3, 20)
    schedule = combs(1, layer)
    for bits in (0x7FC00000, -1, 0x7F800001):
        none = torch.full((9, 3), bits, dtype=torch.int32).view(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            assert all(part.isnan().all() for part in run_fused(layer, schedule, none))
