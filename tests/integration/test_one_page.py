"""The example on one page computes the same values and gradients as the engine."""

import random

import torch
from torch import nn

from pyg_dynbatch import Engine, Operations, Recording, TensorType
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.example_files import defined_in


def test_the_page_equals_the_engine() -> None:
    page = defined_in("dynamic_batching_in_one_page")
    width = page["WIDTH"]
    random.seed(1)
    torch.manual_seed(1)
    merges = {name: page["Merge"]().double() for name in page["OPERATORS"]}
    modules = nn.ModuleDict({"leaf": nn.Embedding(2, width).double(), **merges})
    recordings = [page["record"](page["random_tree"](6)[0]) for _ in range(30)]

    operations, state = Operations(), TensorType((width,), torch.float64)
    bit = TensorType((), torch.int64)
    calls = {"leaf": operations.add(modules["leaf"], [bit], [state], name="leaf")}
    for name in merges:
        calls[name] = operations.add(modules[name], [state, state], [state], name=name)
    recorded = []
    for recording in recordings:
        ours, values = Recording(), []
        for call in recording:
            read = [values[argument] for argument in call.arguments]
            values.append(
                ours.call(calls[call.operation], *(read or [ours.constant(bit, call.constant)]))
            )
        ours.output(values[-1])
        recorded.append(ours)
    merged = schedule_recordings(recorded)
    steps, roots = page["schedule"](recordings)
    assert len(steps) == len(merged.steps)

    found = page["run"](modules, steps, roots)
    expected = Engine(operations)(merged)["output"]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((result * weight).sum(), list(modules.parameters()))
        for result in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
