"""Large levels are run in blocks, which does not change the results."""

import pytest
import torch
from torch import Tensor

from pyg_dynbatch.core import Schedule
from pyg_dynbatch.nn import NaryTreeLSTMCell, RecursiveCell, TreeGRUCell, TreeRNNCell
from pyg_dynbatch.nn import recursive as levels


def results(cell: RecursiveCell, schedule: Schedule, x: Tensor) -> list[Tensor]:
    """States and all gradients."""
    x = x.clone().requires_grad_()
    states = levels.run_levels(cell, schedule, x)
    total = sum((part * torch.arange(1.0, 1 + part.size(1))).sum() for part in states)
    return [*states, *torch.autograd.grad(total, [x, *cell.parameters()])]


@pytest.mark.parametrize("make", (NaryTreeLSTMCell, TreeGRUCell, TreeRNNCell))
def test_blocks(make: type[RecursiveCell], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    cell = make(3, 4, arity=2).double()
    child = torch.arange(1, 60)
    edges, has_input = torch.stack([child, (child - 1) // 2]), torch.rand(60) < 0.6
    schedule = Schedule.from_structure(edges, 60, arity=2, has_input=has_input)
    x = torch.randn(sum(schedule.level_inputs), 3, dtype=torch.float64)
    right = results(cell, schedule, x)
    calls, step = [], cell.step

    def counted(projected: Tensor, children: object) -> object:
        if children is not None:
            calls.append(projected.size(0))
        return step(projected, children)

    monkeypatch.setattr(cell, "step", counted)
    state_bytes = sum(part[:1].nbytes for part in right[: len(cell.state_channels)])
    monkeypatch.setattr(levels, "_BLOCK_BYTES", 5 * state_bytes)
    for mine, wanted in zip(results(cell, schedule, x), right, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    sizes = [each.size for each in schedule.steps[1:]]
    assert max(calls) == 5 < max(sizes) and sum(calls) == sum(sizes)
    assert len(calls) == sum(-(-size // 5) for size in sizes)
