"""What computes gates is chosen by device, dtype, what is installed, and one switch."""

from collections.abc import Callable
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pyg_dynbatch.core.native import NATIVE_SWITCH, is_native
from pyg_dynbatch.core.products import Products, use_products
from pyg_dynbatch.kernels.blocks import BlockKernel, RunPlan, TorchGates
from pyg_dynbatch.kernels.native import NativeGates
from pyg_dynbatch.kernels.tree_lstm import choose_kernel
from tests.kernels.fused import combs
from tests.nn.recursion import make

SCHEDULE = combs(1, make("nary-2"))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """No switch, and an extension whether it was built or not."""
    monkeypatch.delenv(NATIVE_SWITCH, raising=False)

    def pretend(extension: bool) -> None:
        module = Mock(spec=ModuleType, tree_lstm_nodes=None) if extension else None
        monkeypatch.setattr("pyg_dynbatch.core.native.loaded_extension", lambda: module)

    pretend(True)
    return pretend


def gates(
    dtype: torch.dtype = torch.float32, device: str = "cpu", products: torch.dtype | None = None
) -> type[TorchGates]:
    """Return what computes gates block by block; under autocast for products of a dtype."""
    bias = torch.zeros(SCHEDULE.num_nodes, 3, dtype=dtype, device=device)
    inputs = bias.to(products or dtype)
    plan = RunPlan(SCHEDULE, SCHEDULE.level_inputs[0], block=128, half=products is not None)
    with use_products(Products()):
        kernel = choose_kernel(plan, inputs, (inputs, inputs, bias))
    assert isinstance(kernel, BlockKernel)
    return kernel.gates


def test_c_on_cpus_in_single_precision(
    installed: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gates() is NativeGates
    assert gates(products=torch.bfloat16) is NativeGates
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert gates(dtype) is TorchGates
    with FakeTensorMode():  # no values
        assert gates() is TorchGates
        assert gates(device="cuda") is TorchGates
    installed(False)
    assert gates() is TorchGates
    installed(True)
    monkeypatch.setenv(NATIVE_SWITCH, "0")
    assert gates() is TorchGates
    assert not is_native(torch.zeros(1))
