"""Every choice of products computes what plain torch does, on every processor."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch.core import Signature, Steps, TensorType, linear, products, schedule_recordings
from pyg_dynbatch.core.products import (
    MAKES,
    Products,
    chosen_products,
    describe_products,
    use_products,
)
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer
from pyg_dynbatch.nn.cell import run_levels
from pyg_dynbatch.testing import recording_of_structure
from tests.core.helpers import cell_engine
from tests.kernels.fused import combs
from tests.strategies import chain

AMD, INTEL = MAKES["AuthenticAMD"], MAKES["GenuineIntel"]
INTEL_WITH_AMX = MAKES["GenuineIntel, amx_bf16"]
CHOICES = (Products(), Products(packed=True), Products(chunked_gradients=True), INTEL, AMD)
HAS_ONEDNN = torch.backends.mkldnn.is_available()
# Width and trees: small levels in the cache, and a large matrix with over 1,024 rows.
SIZES = (20, 3), (165, 260)
ROUNDING = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2}


def trees(width: int, count: int, kind: type[RecursiveLayer]) -> tuple[RecursiveLayer, Tensor]:
    """A layer and its inputs in double precision, the same at every call."""
    torch.manual_seed(0)
    layer = kind(3, width).double()
    inputs = torch.randn(9 * count, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.cell.bias.normal_()
        # As rounded to the lowest precision, so that all precisions are given the same numbers.
        for given in (inputs, *layer.parameters()):
            given.copy_(given.bfloat16())
    return layer, inputs


def states_and_gradients(
    states: Sequence[Tensor], parameters: Sequence[Tensor], inputs: Tensor
) -> list[Tensor]:
    loss = sum(part.square().sum() for part in states)
    gradients = torch.autograd.grad(loss, [*parameters, inputs])
    return [*(part.detach() for part in states), *gradients]


@cache
def by_plain_torch(width: int, count: int, kind: type[RecursiveLayer]) -> list[Tensor]:
    """In double precision, level by level, differentiated by autograd."""
    layer, inputs = trees(width, count, kind)
    schedule = combs(count, layer)
    inputs.requires_grad_()
    ordered = inputs.index_select(0, schedule.input_node)
    states = run_levels(layer.cell, schedule, ordered)
    return states_and_gradients(states, [*layer.parameters()], inputs)


def by_layer(
    width: int, count: int, kind: type[RecursiveLayer], dtype: torch.dtype
) -> list[Tensor]:
    layer, inputs = trees(width, count, kind)
    schedule = combs(count, layer)
    layer.to(dtype)
    inputs = inputs.to(dtype).requires_grad_()
    states = layer(inputs, schedule=schedule, return_state=True)
    return states_and_gradients(states, [*layer.parameters()], inputs)


def assert_rounded(computed: Sequence[Tensor], expected: Sequence[Tensor], part: float) -> None:
    """Differences are below a part of the largest number."""
    for mine, right in zip(computed, expected, strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=part * scale)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_trees_as_in_plain_torch(choice: Products, dtype: torch.dtype) -> None:
    for kind in (NaryTreeLSTM, ChildSumTreeLSTM):
        for width, count in SIZES:
            with use_products(choice):
                computed = by_layer(width, count, kind, dtype)
            assert_rounded(computed, by_plain_torch(width, count, kind), ROUNDING[dtype])


class Node(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(512, 256)

    def forward(self, x: Tensor, child: Tensor) -> Tensor:
        return torch.tanh(self.mix(torch.cat([x, child], 1)))


def chains(node: Signature) -> Steps:
    """Chains of 1, 2 and 3 nodes: 601, 600 and 520 rows per step, no height of oneDNN's kernels."""
    recordings = [
        recording_of_structure(node, Data(edge_index=chain(n).edge_index, num_nodes=n))
        for n in [1] + [2] * 80 + [3] * 520
    ]
    return schedule_recordings(recordings)


def by_engine(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    cell = Node()
    row = TensorType((256,))
    inputs = torch.randn(1721, 256).to(dtype).requires_grad_()
    engine, node = cell_engine(cell, row, 1, row)
    engine.to(dtype)
    steps = chains(node)
    rows = engine(steps, {row: inputs})["node"]
    computed = states_and_gradients([rows], [*cell.parameters()], inputs)
    with torch.inference_mode():
        return [*computed, engine(steps, {row: inputs})["node"]]


@cache
def by_engine_in_double_precision() -> list[Tensor]:
    with mock.patch.object(linear, "_MANY_ROWS", 1_000_000):
        return by_engine(torch.float64)


@pytest.mark.usefixtures("products_of_few_rows")
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_linear_as_in_plain_torch(choice: Products, dtype: torch.dtype) -> None:
    with mock.patch.object(products, "_pack", wraps=products._pack) as pack, use_products(choice):
        computed = by_engine(dtype)
    assert_rounded(computed, by_engine_in_double_precision(), ROUNDING[dtype])
    assert pack.called == (choice.packed and HAS_ONEDNN and dtype == torch.float32)


def digests(threads: int) -> list[str]:
    """Checksums of what every choice computes."""
    torch.set_num_threads(threads)
    checksums = []
    for choice in CHOICES:
        with use_products(choice):
            content = b"".join(
                part.numpy().tobytes()
                for width, count in SIZES
                for part in by_layer(width, count, NaryTreeLSTM, torch.float32)
            )
        checksums.append(hashlib.sha256(content).hexdigest())
    return checksums


def test_two_processes_compute_the_same_numbers(another_process: Executor) -> None:
    threads = torch.get_num_threads()
    assert another_process.submit(digests, threads).result() == digests(threads)


@pytest.fixture
def another_processor() -> Iterator[mock.Mock]:
    """A system without /proc/cpuinfo, whose processor is the value returned by the mock."""
    products._products_of_make.cache_clear()
    no_file = mock.patch.object(products, "Path", return_value=Path("nosuch"))
    with no_file, mock.patch.object(products.platform, "processor") as named:
        yield named
    products._products_of_make.cache_clear()


@pytest.mark.parametrize(
    ("processor", "choice", "reason"),
    [
        ("AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", AMD, "the rule for AuthenticAMD"),
        ("Intel64 Family 6 Model 85 Stepping 7, GenuineIntel", INTEL, "the rule for GenuineIntel"),
        (
            "GenuineIntel avx512_bf16 amx_bf16",
            INTEL_WITH_AMX,
            "the rule for GenuineIntel, amx_bf16",
        ),
        ("arm", Products(), "the rule for other makes"),
        ("", Products(), "the rule for other makes"),
    ],
)
def test_the_make_decides(
    processor: str, choice: Products, reason: str, another_processor: mock.Mock
) -> None:
    another_processor.return_value = processor
    assert chosen_products() == choice
    assert describe_products() == f"products   {choice}, {reason}"


def test_asked_for_until_the_block_is_left() -> None:
    before = chosen_products()
    asked = Products(own_nodes=3)
    with pytest.raises(KeyError), use_products(asked):
        assert chosen_products() == asked
        assert describe_products().endswith(", as asked for")
        raise KeyError
    assert chosen_products() == before
