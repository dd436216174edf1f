"""No step of a fused layer reads the value of a tensor, which would wait for a GPU.

Tensors without values replace those of a device: reading a value raises an error.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.nn import DAGNN, ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer


def without_values(schedule: Levels) -> Levels:
    return schedule._apply(torch.empty_like)


@pytest.mark.parametrize("make", (NaryTreeLSTM, ChildSumTreeLSTM))
@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("half", (False, True))
@pytest.mark.parametrize("edges", ([[0, 1, 2, 3], [2, 2, 4, 4]], [[0, 1, 0, 1], [2, 2, 3, 3]]))
def test_fused_step_reads_no_value(
    make: type[RecursiveLayer], shared: bool, half: bool, edges: list[list[int]]
) -> None:
    nodes = 5
    schedule = schedule_structure(torch.tensor(edges), nodes, arity=make(3, 4).arity)
    leaves, others = schedule.level_inputs[0], sum(schedule.level_inputs[1:])
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer = make(3, 4)
        more: dict[str, Tensor] = {}
        x = torch.empty(nodes, 3, requires_grad=True)
        if shared:
            more = {"leaf_inverse": torch.zeros(leaves, dtype=torch.long)}
            x = torch.empty(2 + others, 3, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            h = layer(x, schedule=without_values(schedule), **more)
        found = torch.autograd.grad(h.sum(), [x, *layer.parameters()])
        assert h.shape == (nodes, 4) and found[0].shape == x.shape
        with pytest.raises(DataDependentOutputException):
            h.sum().item()


def test_dagnn_reads_no_value() -> None:
    edges = torch.tensor([[0, 0, 1, 2, 4], [1, 2, 3, 3, 5]])
    ways = ("bottom_up", "top_down")
    both = [schedule_structure(edges, 6, direction=way) for way in ways]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, x = DAGNN(3, 4), torch.empty(6, 3, requires_grad=True)
        names = zip(("schedule", "schedule_down"), map(without_values, both), strict=True)
        batch = torch.empty(6, dtype=torch.long)
        found = model(x, torch.empty(2, 5, dtype=torch.long), batch, batch_size=2, **dict(names))
        assert torch.autograd.grad(found.sum(), x)[0].shape == x.shape
