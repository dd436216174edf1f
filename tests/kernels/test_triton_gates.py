"""The Triton kernels compute the same as plain torch, and are chosen where they can run.

No GPU is needed: Triton interprets its kernels on CPU tensors in one process, and compiles them
for GPUs in another; ``triton_checks`` is what these processes run.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.kernels.tree_lstm import SWITCH
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer
from tests.kernels import triton_checks
from tests.nn.own_process import outcomes

KINDS = {"interpreted": "1", "compiled": "0"}
CHECKS = [name for name in vars(triton_checks) if name.split("_")[0] in KINDS]


@cache
def found(kind: str, folder: Path) -> dict[str, str | None]:
    """Runs all checks of a kind in one process, as Triton decides at its import how to run."""
    variables = {"TRITON_INTERPRET": KINDS[kind], "TRITON_CACHE_DIR": str(folder)}
    return outcomes(triton_checks, **variables)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", CHECKS)
def test_kernels(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "triton"
    failure = found(name.split("_")[0], folder)[name]
    assert failure is None, failure


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only on a GPU")
@pytest.mark.parametrize("make", (NaryTreeLSTM, ChildSumTreeLSTM))
def test_kernels_on_the_gpu(make: type[RecursiveLayer], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(3, 150).cuda()
    edges = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 4]])
    schedule = schedule_structure(edges, 5, arity=layer.arity).to("cuda")
    x = torch.randn(5, 3, device="cuda")
    found = triton_checks.everything(layer, schedule, x)
    monkeypatch.setenv(SWITCH, "0")
    wanted = triton_checks.everything(layer, schedule, x)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
