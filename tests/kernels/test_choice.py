"""What computes gates is chosen by device, dtype, what is installed, and two switches."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pyg_dynbatch.core.native import NATIVE_SWITCH, is_native
from pyg_dynbatch.kernels import tree_lstm
from pyg_dynbatch.kernels.blocks import TorchGates
from pyg_dynbatch.kernels.native import NativeGates
from pyg_dynbatch.kernels.tree_lstm import SWITCH, choose_gates
from tests.kernels.fused import on_gpu

HALF = (torch.bfloat16, torch.float16)


def single(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(1, 2, dtype=dtype)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """No switches, and an extension whether it was built or not."""
    for switch in (SWITCH, NATIVE_SWITCH):
        monkeypatch.delenv(switch, raising=False)

    def pretend(extension: bool) -> None:
        found = SimpleNamespace(tree_lstm_nodes=None) if extension else None
        monkeypatch.setattr("pyg_dynbatch.core.native.loaded_extension", lambda: found)

    pretend(True)
    return pretend


def test_c_on_cpus_in_single_precision(
    installed: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_gates(single()) is NativeGates
    assert [choose_gates(single(dtype)) for dtype in (torch.float64, *HALF)] == [TorchGates] * 3
    with FakeTensorMode():
        assert choose_gates(single()) is TorchGates  # no values
    installed(False)
    assert choose_gates(single()) is TorchGates
    installed(True)
    monkeypatch.setenv(NATIVE_SWITCH, "0")
    assert choose_gates(single()) is TorchGates
    assert not is_native(single())


def test_triton_on_gpus_in_single_and_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pyg_dynbatch.kernels.triton_gates import TritonGates

    singles = torch.float32, *HALF
    assert [choose_gates(on_gpu(dtype)) for dtype in singles] == [TritonGates] * 3
    assert choose_gates(on_gpu(torch.float64)) is TorchGates
    monkeypatch.setenv(SWITCH, "0")
    assert choose_gates(on_gpu(torch.float32)) is TorchGates


def test_torch_on_gpus_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    tree_lstm._triton_gates.cache_clear()
    monkeypatch.setattr(tree_lstm, "find_spec", lambda name: None)
    assert choose_gates(on_gpu(torch.float32)) is TorchGates
    tree_lstm._triton_gates.cache_clear()
