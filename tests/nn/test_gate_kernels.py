"""What computes gates is chosen by device, dtype, what is installed, and two switches."""

import pytest
import torch

from pyg_dynbatch.nn import gate_kernels
from pyg_dynbatch.nn.fused_plan import NodeRows
from pyg_dynbatch.nn.plain_gates import PlainGates

pytestmark = pytest.mark.usefixtures("no_switch")


class OtherGates(PlainGates):
    """Stands for kernels that this machine need not have."""


def chosen(dtype: torch.dtype = torch.float32) -> object:
    return gate_kernels.gate_kernels(torch.zeros(1, 2, dtype=dtype))


@pytest.fixture
def no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in (gate_kernels.SWITCH, gate_kernels.NATIVE_SWITCH):
        monkeypatch.delenv(switch, raising=False)


@pytest.fixture
def gpu_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "_on_gpu", lambda like: True)
    monkeypatch.setattr(gate_kernels, "_on_cpu", lambda like: False)


@pytest.mark.usefixtures("gpu_everywhere")
def test_plain_torch_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_kernels._triton_gates.cache_clear()
    monkeypatch.setattr(gate_kernels, "find_spec", lambda name: None)
    assert chosen() is PlainGates
    gate_kernels._triton_gates.cache_clear()


@pytest.mark.usefixtures("gpu_everywhere")
def test_triton_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "_triton_gates", lambda: OtherGates)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert chosen(dtype) is OtherGates
    assert chosen(torch.float64) is PlainGates
    monkeypatch.setenv(gate_kernels.SWITCH, "0")
    assert chosen() is PlainGates


def test_plain_torch_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_kernels._native_library.cache_clear()
    monkeypatch.setattr(gate_kernels, "native_library", lambda source: None)
    try:
        assert chosen() is PlainGates
    finally:
        gate_kernels._native_library.cache_clear()


def test_c_on_cpus_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_kernels, "_native_gates", lambda: OtherGates)
    assert chosen() is OtherGates
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert chosen(dtype) is PlainGates
    monkeypatch.setenv(gate_kernels.NATIVE_SWITCH, "0")
    assert chosen() is PlainGates


def test_plain_torch_for_tensors_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(gate_kernels, "_native_gates", lambda: OtherGates)
    with FakeTensorMode():
        assert chosen() is PlainGates


def test_kernels_are_made_with_the_rows_of_a_pass() -> None:
    rows = torch.zeros(3, 2)
    nodes = NodeRows(rows, rows, rows)
    assert gate_kernels.gate_kernels(rows)(nodes).squashes in (True, False)
