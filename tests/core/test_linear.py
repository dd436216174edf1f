"""Time and memory of a run and its backward pass grow with the rows, never with rows x steps."""

from inspect import signature

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data

from pyg_dynbatch.core import Signature, Steps, TensorType, schedule_recordings
from pyg_dynbatch.testing import recording_of_structure
from tests.core.helpers import as_users_run_it, cell_engine
from tests.strategies import chain

WIDTH = 64
VECTOR = TensorType((WIDTH,))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / WIDTH)

    def forward(self, x: Tensor, child: Tensor) -> Tensor:
        return torch.tanh(x + self.weight * child)


def steps_of_chain(node: Signature, num_nodes: int) -> Steps:
    structure = Data(edge_index=chain(num_nodes).edge_index, num_nodes=num_nodes)
    return schedule_recordings([recording_of_structure(node, structure)])


def bytes_per_node(num_nodes: int, train: bool) -> tuple[float, float]:
    """Return the peak of the memory in use, and the sum of all allocations, per node of a chain."""
    engine, node = cell_engine(Cell(), VECTOR, 1, VECTOR)
    schedule = steps_of_chain(node, num_nodes)
    x = torch.randn(num_nodes, WIDTH, requires_grad=train)
    engine(steps_of_chain(node, 2), {VECTOR: x[:2]})
    # torch 2.4 has no such option, and newer versions warn if it is not given.
    events = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    with (
        as_users_run_it(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, **events) as found,
    ):
        rows = engine(schedule, {VECTOR: x})["node"]
        if train:
            rows.sum().backward()
        del rows
    changes = [
        event.nbytes()
        for event in found.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    peak = total = used = 0
    for change in changes:
        used += change
        total += max(change, 0)
        peak = max(peak, used)
    return peak / num_nodes, total / num_nodes


@pytest.mark.parametrize("train", [True, False])
def test_bytes_per_node_do_not_grow_with_the_depth(train: bool) -> None:
    (small_peak, small_total), (peak, total) = (bytes_per_node(n, train) for n in (50, 200))
    row = WIDTH * 4
    assert small_peak >= row
    assert peak < 1.1 * small_peak
    assert total < 1.1 * small_total
    # A buffer per level would be 200 rows per node.
    assert total < 60 * row


def test_autograd_keeps_a_few_rows_per_node() -> None:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    engine, node = cell_engine(Cell(), VECTOR, 1, VECTOR)
    schedule = steps_of_chain(node, 500)
    x = torch.randn(500, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rows = engine(schedule, {VECTOR: x})["node"]
    assert sum(kept.values()) < 5 * 500 * WIDTH * 4
    rows.sum().backward()
