"""What computes gates is chosen by device, dtype, what is installed, and two switches."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pyg_dynbatch.nn import fused_tree_lstm
from pyg_dynbatch.nn.fused_gates import TorchGates
from tests.nn.fused import on_gpu

HALF = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("no_switch")


def chosen(dtype: torch.dtype = torch.float32) -> object:
    return fused_tree_lstm.choose_gates(torch.zeros(1, 2, dtype=dtype))


def chosen_on_gpu(dtype: torch.dtype = torch.float32) -> object:
    return fused_tree_lstm.choose_gates(on_gpu(dtype))


@pytest.fixture
def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in (fused_tree_lstm.SWITCH, fused_tree_lstm.NATIVE_SWITCH):
        monkeypatch.delenv(switch, raising=False)


@pytest.fixture
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_tree_lstm, "gates_library", lambda: object())


def test_plain_torch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_tree_lstm._triton_gates.cache_clear()
    monkeypatch.setattr(fused_tree_lstm, "find_spec", lambda name: None)
    assert chosen_on_gpu() is TorchGates
    fused_tree_lstm._triton_gates.cache_clear()


def test_triton_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from pyg_dynbatch.nn.triton_gates import TritonGates

    assert [chosen_on_gpu(dtype) for dtype in (torch.float32, *HALF)] == [TritonGates] * 3
    assert chosen_on_gpu(torch.float64) is TorchGates
    monkeypatch.setenv(fused_tree_lstm.SWITCH, "0")
    assert chosen_on_gpu() is TorchGates


def test_plain_torch_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_tree_lstm, "gates_library", lambda: None)
    assert chosen() is TorchGates


@pytest.mark.usefixtures("with_compiler")
def test_c_on_cpus_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen() is not TorchGates
    assert [chosen(dtype) for dtype in (torch.float64, *HALF)] == [TorchGates] * 3
    monkeypatch.setenv(fused_tree_lstm.NATIVE_SWITCH, "0")
    assert chosen() is TorchGates


@pytest.mark.usefixtures("with_compiler")
def test_plain_torch_for_tensors_without_values() -> None:
    with FakeTensorMode():
        assert chosen() is TorchGates
