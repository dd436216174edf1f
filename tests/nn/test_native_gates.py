"""The gates in C: the same values and gradients as plain torch in twice the precision."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import NaryTreeLSTM, RecursiveLayer, fused_tree_lstm
from pyg_dynbatch.nn.native_gates import NativeGates, gates_library
from tests.nn.fused import assert_near, everything, layers, run_fused

# With GCC on Linux a build that fails must not pass for a machine that cannot build.
COMPILERS = [os.path.realpath(shutil.which(name) or name) for name in ("cc", "gcc")]
MUST_BUILD = sys.platform == "linux" and COMPILERS[0] == COMPILERS[1]
pytestmark = pytest.mark.skipif(
    not MUST_BUILD and gates_library() is None, reason="no C compiler that fits the OpenMP of torch"
)


@pytest.fixture
def with_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def forest(parents: list[int], arity: int | None, has_input: Tensor | None = None) -> Levels:
    """Node k + 1 is a child of ``parents[k]``, if that has a free slot."""
    taken = [0] * (len(parents) + 1)
    edges = []
    for child, parent in enumerate(parents, start=1):
        if arity is None or taken[parent] < arity:
            taken[parent] += 1
            edges.append((child, parent))
    pairs = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()
    return schedule_structure(pairs, len(taken), arity=arity, has_input=has_input)


def compare(
    layer: RecursiveLayer, schedule: Levels, inputs: Tensor, expand: bool = False, **options: object
) -> None:
    """C in single precision, at once and block by block, against torch in double precision."""
    wanted = everything(layer.double(), schedule, inputs, expand, **options)
    layer.float()
    assert_near(everything(layer, schedule, inputs, expand, **options), wanted)
    plain = NativeGates.forward
    with (
        mock.patch.object(fused_tree_lstm, "multiply_address", lambda: None),
        mock.patch.object(NativeGates, "forward", autospec=True, side_effect=plain) as forward,
    ):
        assert_near(everything(layer, schedule, inputs, expand, **options), wanted)
    assert forward.called


@given(
    parents=st.lists(st.integers(0, 10**6), max_size=40).map(
        lambda draws: [draw % (k + 1) for k, draw in enumerate(draws)]
    ),
    width=st.sampled_from([1, 2, 7, 16, 33]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_random_forests(parents: list[int], width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    has_input = torch.rand(len(parents) + 1, generator=generator) < 0.7
    for layer in layers(width):
        schedule = forest(parents, layer.arity, has_input)
        inputs = torch.randn(sum(schedule.level_inputs), 3, generator=generator)
        compare(layer, schedule, inputs, level_order=bool(seed % 2))


@pytest.mark.parametrize("threads", (1, 2))
def test_levels_of_several_blocks(threads: int, with_threads: Callable[[int], None]) -> None:
    with_threads(threads)
    # Blocks of 128 rows and 130 columns are large enough for several threads.
    for layer in layers(130, (2,)):
        schedule = forest([k // 3 for k in range(600)], layer.arity)
        compare(layer, schedule, torch.randn(601, 3))


def test_gradients_that_are_one_number() -> None:
    for layer in layers(5):
        schedule = forest([0, 0, 1, 1, 4], layer.arity)
        compare(layer, schedule, torch.randn(6, 3), expand=True, level_order=True)


def test_nodes_of_many_parents() -> None:
    edges = torch.tensor([[0, 1, 0, 1, 2], [2, 2, 3, 3, 4]])
    for layer in layers(5):
        if layer.arity in (None, 2):
            schedule = schedule_structure(edges, 5, arity=layer.arity)
            assert not schedule.single_parent
            compare(layer, schedule, torch.randn(5, 3))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_recurrent_dropout_whose_factors_are_not_contiguous(dtype: torch.dtype) -> None:
    for layer in layers(5):
        schedule = forest([0, 0, 1, 1, 4], layer.arity)
        mask = torch.rand(5, schedule.num_nodes, dtype=dtype).t() * 2
        compare(layer, schedule, torch.randn(6, 3), dropout_mask=mask)


@pytest.mark.parametrize("threads", (1, 2))
def test_equal_leaves_once(threads: int, with_threads: Callable[[int], None]) -> None:
    with_threads(threads)
    for layer in layers(70, (2,)):
        schedule = forest([k // 3 for k in range(600)], layer.arity)
        leaves = schedule.level_sizes[0]
        leaf_inverse = torch.randint(0, 7, (leaves,))
        for expand in (False, True):
            inputs = torch.randn(7 + schedule.num_nodes - leaves, 3)
            compare(layer, schedule, inputs, expand, leaf_inverse=leaf_inverse, level_order=True)


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


def test_lazily_negated_gradients() -> None:
    for layer in layers(5):
        schedule = forest([0, 0, 1, 1, 4], layer.arity)
        inputs = torch.randn(6, 3, requires_grad=True)
        _, c = run_fused(layer, schedule, inputs, level_order=True)
        ones = torch.ones_like(c)
        (wanted,) = torch.autograd.grad(c, inputs, -ones, retain_graph=True)
        (found,) = torch.autograd.grad(c, inputs, torch._neg_view(ones))
        assert torch.equal(found, wanted)


def test_hooks_may_change_the_layout_of_saved_tensors() -> None:
    for layer in layers(5):
        schedule, inputs = forest([0, 0, 1, 1, 4], layer.arity), torch.randn(6, 3)
        wanted = everything(layer, schedule, inputs)
        hooks = lambda saved: saved.t().contiguous(), lambda kept: kept.t()  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            found = everything(layer, schedule, inputs)
        torch.testing.assert_close(found, wanted)


def test_rows_that_do_not_fit_the_schedule_are_refused() -> None:
    for layer in layers(5):
        schedule = forest([0, 0, 1, 1, 4], layer.arity)
        cases = (8, None, "cpu"), (6, 9, "cpu"), (0, 3, "cpu"), (6, None, "meta")
        for rows, leaves, device in cases:
            leaf_inverse = None if leaves is None else torch.zeros(leaves, dtype=torch.long)
            with pytest.raises(ValueError, match="the schedule does not fit the input rows"):
                run_fused(
                    layer, schedule.to(device), torch.randn(rows, 3), leaf_inverse=leaf_inverse
                )


def test_a_tracer_sees_all_calls_of_torch() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    layer = NaryTreeLSTM(3, 4)
    schedule = forest([0, 0], 2)
    x = torch.randn(3, 3)
    with torch.no_grad():
        traced = make_fx(lambda rows: layer(rows, schedule=schedule))(x)
        torch.testing.assert_close(traced(x), layer(x, schedule=schedule))


def test_the_same_to_the_last_bit_at_every_run() -> None:
    for layer in layers(20):
        schedule = forest([k // 3 for k in range(200)], layer.arity)
        inputs = torch.randn(201, 3)
        first, second = (everything(layer, schedule, inputs) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
