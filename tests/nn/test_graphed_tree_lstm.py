"""Runs over padded levels, recorded and replayed, have the values and gradients of the layer.

A stand-in repeats the calls of a CUDA graph on the same memory; only the capture of a graph needs a
machine with a GPU.
"""

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch_geometric.data import Data

from pyg_dynbatch.core import Schedule
from pyg_dynbatch.core.padding import LevelBuckets, padded_form
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.models import TreeClassifier
from pyg_dynbatch.nn import ChildSumTreeLSTM, NaryTreeLSTM, RecursiveLayer, TreeGRU, fused_gates
from pyg_dynbatch.nn.graphed_tree_lstm import (
    Call,
    GraphedTreeLSTM,
    Recorder,
    Recording,
    recorder_for,
)
from tests import strategies
from tests.core.helpers import message
from tests.nn.recursion import assert_equal, batched, features, gradients, make, placed

KINDS, LAYERS = ("nary-2", "child-sum"), (NaryTreeLSTM, ChildSumTreeLSTM)
FEW = strategies.few(8)
EDGES = torch.tensor([[0, 1, 2, 3], [2, 2, 4, 4]])


class Counting(Recorder):
    """Counts recordings and replays, and lists the requested devices."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.devices: list[torch.device] = []

    def __call__(self, device: torch.device) -> Recorder:
        self.devices.append(device)
        return self

    def warm_up(self, call: Callable[[], object]) -> None:
        call()

    def record(self, call: Call) -> Recording:
        self.recorded += 1
        replay, results = super().record(call)

        def counted() -> None:
            self.replayed += 1
            replay()

        return Recording(counted, results)


def graphed(
    layer: RecursiveLayer, schedules: Sequence[Schedule], **options: Any
) -> tuple[GraphedTreeLSTM, Counting]:
    counts = Counting()
    buckets = LevelBuckets.fit(schedules, 2)
    return GraphedTreeLSTM(layer, buckets, recorder=counts, **options), counts


def forest(layer: RecursiveLayer, trees: int) -> Schedule:
    """Trees of five nodes, all with an input."""
    every = torch.cat([EDGES + 5 * k for k in range(trees)], 1)
    return Schedule.from_structure(
        every, 5 * trees, arity=layer.arity, direction=layer.direction
    )  # fmt: skip


def pair(
    make_layer: type[RecursiveLayer] = NaryTreeLSTM, trees: Sequence[int] = (2, 3), **options: Any
) -> tuple[RecursiveLayer, GraphedTreeLSTM, Counting, list[Schedule]]:
    """A layer, the same layer with graphs, the counts, and schedules of this many trees."""
    layer = make_layer(3, 4, **options)
    schedules = [forest(layer, number) for number in trees]
    return layer, *graphed(layer, schedules), schedules


def descend(layer: nn.Module, grads: Sequence[Tensor]) -> None:
    """Changes the parameters in place, as an optimiser does."""
    with torch.no_grad():
        for parameter, grad in zip(layer.parameters(), grads, strict=False):
            parameter -= 0.1 * grad


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(data=st.data())
def test_values_and_gradients_batch_after_batch(kind: str, data: st.DataObject) -> None:
    layer = make(kind)
    batch = st.lists(placed(layer.arity), min_size=1, max_size=4)
    structures = data.draw(st.lists(batch, min_size=1, max_size=4))
    level_order, some = data.draw(st.booleans()), data.draw(st.booleans())
    schedules = [batched(each, layer) for each in structures]
    fast, counts = graphed(layer, schedules)
    order = [*schedules, *schedules]
    for turn, schedule in enumerate(order):
        x = features(schedule.num_nodes, seed=turn).requires_grad_()
        options = {"schedule": schedule, "return_state": True, "level_order": level_order}
        if some:
            options["nodes"] = torch.arange(0, schedule.num_nodes, 2).flip(0)
        wanted, found = layer(x, **options), fast(x, **options)
        assert_equal(found, wanted)
        right = gradients(layer, x, wanted)
        assert_equal(gradients(fast, x, found), right)
        descend(layer, right)
    # One forward and one backward recording per shape, and one replay of each per batch.
    assert counts.recorded == 2 * fast.num_graphs <= 4
    assert counts.replayed == 2 * len(order)


@pytest.mark.parametrize("direction", ("bottom_up", "top_down"))
@pytest.mark.parametrize("make_layer", LAYERS)
def test_training_in_single_precision(make_layer: type[RecursiveLayer], direction: str) -> None:
    layer, fast, counts, schedules = pair(make_layer, direction=direction)
    plain = copy.deepcopy(layer)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, fast)]
    for turn in range(6):
        schedule = schedules[turn % 2]
        x = torch.randn(schedule.num_nodes, 3)
        for module, step in zip((plain, fast), steps, strict=True):
            step.zero_grad()
            module(x, schedule=schedule).square().sum().backward()
            step.step()
    assert counts.replayed == 12
    states = dict(fast.state_dict()), dict(plain.state_dict())
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("make_layer", LAYERS)
def test_without_a_backward_pass(make_layer: type[RecursiveLayer], mode: Callable[[], Any]) -> None:
    layer, fast, counts, schedules = pair(make_layer, (2, 2))
    for schedule in schedules:
        with mode():
            x = torch.randn(schedule.num_nodes, 3)
            torch.testing.assert_close(fast(x, schedule=schedule), layer(x, schedule=schedule))
    # What was recorded in inference mode does not get in the way outside.
    x = torch.randn(10, 3)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, schedule=schedules[0]), layer(x, schedule=schedules[0]))
    assert (counts.recorded, counts.replayed) == (1, 3)
    fast(x, schedule=schedules[0]).sum().backward()
    assert (counts.recorded, counts.replayed) == (3, 5)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert not fast(x, schedule=schedules[0]).requires_grad


def test_gradients_of_several_batches_add_up() -> None:
    layer, fast, _, schedules = pair()
    plain = copy.deepcopy(layer)
    for schedule in schedules:
        x = torch.randn(schedule.num_nodes, 3)
        for module in (plain, fast):
            module(x, schedule=schedule).sum().backward()
    found, wanted = ([p.grad for p in each.parameters()] for each in (fast, plain))
    torch.testing.assert_close(found, wanted)


def test_results_are_copies() -> None:
    layer, fast, counts, (schedule, _) = pair()
    found = []
    for _ in range(2):
        x = torch.randn(schedule.num_nodes, 3, requires_grad=True)
        h = fast(x, schedule=schedule)
        found.append([h.detach(), *torch.autograd.grad(h.sum(), [x, *fast.parameters()])])
        if len(found) == 1:
            kept = [each.clone() for each in found[0]]
    assert counts.replayed == 4
    for mine, right, other in zip(found[0], kept, found[1], strict=True):
        assert torch.equal(mine, right) and not torch.equal(mine, other)


def test_some_parameters_frozen_and_an_output_unused() -> None:
    layer, fast, counts, (schedule, _) = pair()
    layer.cell.weight_hidden.requires_grad_(False)
    x = torch.randn(schedule.num_nodes, 3, requires_grad=True)
    wanted, found = (m(x, schedule=schedule, return_state=True)[1].sum() for m in (layer, fast))
    leaves = [layer.cell.weight_input, layer.cell.bias, x]
    assert counts.replayed == 1
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves)
    )


def test_leaves_that_share_rows() -> None:
    layer, fast, counts, (schedule, _) = pair()
    leaves = schedule.level_inputs[0]
    leaf_inverse = torch.arange(leaves) % 2
    x = torch.randn(2 + schedule.num_nodes - leaves, 3, requires_grad=True)
    wanted, found = (m(x, schedule=schedule, leaf_inverse=leaf_inverse) for m in (layer, fast))
    assert counts.replayed == 1
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), x), torch.autograd.grad(wanted.sum(), x)
    )


def test_a_second_call_before_the_backward_pass_runs_the_layer() -> None:
    layer, fast, counts, (schedule, _) = pair()
    x, y = torch.randn(2, schedule.num_nodes, 3)
    first, second = fast(x, schedule=schedule), fast(y, schedule=schedule)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, schedule=schedule), layer(x, schedule=schedule))
    assert counts.replayed == 1
    found = torch.autograd.grad((first * second).sum(), list(fast.parameters()))
    first, second = layer(x, schedule=schedule), layer(y, schedule=schedule)
    torch.testing.assert_close(
        found, torch.autograd.grad((first * second).sum(), list(layer.parameters()))
    )
    assert counts.replayed == 2
    # Once the backward pass has run, or can no longer run, graphs are used again.
    forgotten = fast(x, schedule=schedule)
    del forgotten
    fast(y, schedule=schedule)
    assert counts.replayed == 4


def test_the_backward_pass_runs_once() -> None:
    _, fast, _, (schedule, _) = pair()
    x = torch.randn(schedule.num_nodes, 3)
    loss = fast(x, schedule=schedule).sum()
    loss.backward(retain_graph=True)
    text = message(RuntimeError, loss.backward)
    assert "backward() was called before" in text and "without graphs" in text
    loss = fast(x, schedule=schedule).sum()
    assert "second derivatives" in message(
        RuntimeError, torch.autograd.grad, loss, list(fast.parameters()), create_graph=True
    )


def test_parameters_changed_before_the_backward_pass_raise() -> None:
    _, fast, _, (schedule, _) = pair()
    loss = fast(torch.randn(schedule.num_nodes, 3), schedule=schedule).sum()
    with torch.no_grad():
        fast.cell.bias += 1
    assert "modified by an inplace operation" in message(RuntimeError, loss.backward)


def test_the_least_recently_used_run_is_dropped() -> None:
    layer, _, _, (few, more) = pair()
    counts = Counting()
    fast = GraphedTreeLSTM(
        layer, LevelBuckets.fit([few, more], 2), max_graphs=2, recorder=counts
    )  # fmt: skip

    @torch.no_grad()
    def call(schedule: Schedule, dtype: torch.dtype = torch.float32) -> int:
        x = torch.randn(schedule.num_nodes, 3, dtype=dtype)
        fast(x, schedule=schedule)
        assert fast.num_graphs <= 2
        return counts.recorded

    assert [call(few), call(more), call(few)] == [1, 2, 2]
    with torch.autocast("cpu", torch.bfloat16):
        assert call(few) == 3
    assert [call(few), call(more), call(few)] == [3, 4, 4]
    fast.clear()
    assert fast.num_graphs == 0 and call(few) == 5


def test_parameters_that_moved_are_recorded_again() -> None:
    layer, fast, counts, (schedule, _) = pair()
    x = torch.randn(schedule.num_nodes, 3)
    fast(x, schedule=schedule).sum().backward()
    fast.double()
    fast.zero_grad()
    x = x.double()
    torch.testing.assert_close(fast(x, schedule=schedule), layer(x, schedule=schedule))
    assert counts.recorded == 4 and fast.num_graphs == 1 and len(counts.devices) == 2


@pytest.mark.parametrize("make_layer", LAYERS)
def test_autocast(make_layer: type[RecursiveLayer]) -> None:
    layer, fast, counts, (schedule, _) = pair(make_layer)
    x = torch.randn(schedule.num_nodes, 3, requires_grad=True)
    exact = fast(x, schedule=schedule)
    exact.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = fast(x, schedule=schedule), layer(x, schedule=schedule)
    assert found.dtype == torch.float32 and counts.recorded == 4
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(found, exact)
    mine, right = (torch.autograd.grad(h.sum(), [x, *layer.parameters()]) for h in (found, wanted))
    torch.testing.assert_close(mine, right, rtol=0.03, atol=0.03)


def test_recurrent_dropout_is_drawn_at_every_replay() -> None:
    layer, fast, counts, (schedule, _) = pair(recurrent_dropout=0.5)
    x = torch.randn(schedule.num_nodes, 3)
    drawn = [fast(x, schedule=schedule).detach() for _ in range(2)]
    assert counts.recorded == 2 and not torch.equal(drawn[0], drawn[1])
    leaf = layer.eval()(x, schedule=schedule, return_state=True)[1][0].detach()
    layer.train()
    # Each entry of a leaf's memory is dropped, or twice what it is without dropout.
    memory = torch.stack(
        [fast(x, schedule=schedule, return_state=True)[1][0].detach() for _ in range(50)]
    )
    torch.testing.assert_close(memory.max(0).values.abs(), (2 * leaf).clamp(min=0))
    assert 0.3 < (memory == 0).float().mean() < 0.7
    fast.eval()
    torch.testing.assert_close(fast(x, schedule=schedule), layer(x, schedule=schedule))
    assert counts.recorded == 4


def test_a_batch_with_infinities_does_not_affect_the_next() -> None:
    layer, fast, _, schedules = pair(ChildSumTreeLSTM, (3, 1))
    fast.buckets = LevelBuckets.fit(schedules, 1)
    fast(torch.full((15, 3), torch.inf), schedule=schedules[0]).sum().backward()
    fast.zero_grad()
    x = torch.randn(5, 3, requires_grad=True)
    wanted, found = (m(x, schedule=schedules[1]) for m in (layer, fast))
    torch.testing.assert_close(found, wanted)
    leaves = [x, *layer.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves)
    )


def test_the_layer_runs_what_no_shape_holds() -> None:
    layer, fast, counts, (few, _) = pair()
    large = forest(layer, 50)
    x = torch.randn(250, 3)
    assert torch.equal(fast(x, schedule=large), layer(x, schedule=large))
    without = GraphedTreeLSTM(layer, recorder=counts)
    x = torch.randn(few.num_nodes, 3)
    assert torch.equal(without(x, schedule=few), layer(x, schedule=few))
    edges = torch.cat([EDGES, EDGES + 5], 1)
    assert torch.equal(without(x, edges), layer(x, edges))
    empty = Schedule.from_structure(torch.zeros(2, 0, dtype=torch.long), 0, arity=2)
    assert fast(torch.randn(0, 3), schedule=empty).shape == (0, 4)
    assert counts.recorded == 0
    # Edges alone will do where they can be padded.
    torch.testing.assert_close(fast(x, edges), layer(x, edges))
    assert counts.recorded == 2


def test_a_batch_without_any_input() -> None:
    layer = ChildSumTreeLSTM(3, 4)
    bare = Schedule.from_structure(EDGES, 5, has_input=torch.zeros(5, dtype=torch.bool))
    both = LevelBuckets.fit([bare, forest(layer, 1)], 1)
    fast = GraphedTreeLSTM(layer, both)
    fast(torch.full((5, 3), torch.inf), schedule=forest(layer, 1)).sum().backward()
    x = torch.randn(0, 3)
    wanted, found = (m(x, schedule=bare) for m in (layer, fast))
    torch.testing.assert_close(found, wanted)
    weights = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), weights), torch.autograd.grad(wanted.sum(), weights)
    )
    assert fast.num_graphs == 1


def test_copies_record_their_own() -> None:
    _, fast, counts, (schedule, _) = pair()
    x = torch.randn(schedule.num_nodes, 3)
    wanted = fast(x, schedule=schedule)
    twin = copy.deepcopy(fast)
    assert twin.num_graphs == 0
    torch.testing.assert_close(twin(x, schedule=schedule), wanted)
    twin = pickle.loads(pickle.dumps(GraphedTreeLSTM(NaryTreeLSTM(3, 4), fast.buckets)))
    twin.load_state_dict(NaryTreeLSTM(3, 4).state_dict())
    assert twin(x, schedule=schedule).shape == wanted.shape and twin.num_graphs == 1


def test_other_layers_are_refused() -> None:
    assert "got:      TreeGRU" in message(TypeError, GraphedTreeLSTM, TreeGRU(3, 4))
    assert "max_graphs is too small" in message(
        ValueError, lambda: GraphedTreeLSTM(NaryTreeLSTM(3, 4), max_graphs=0)
    )
    assert type(recorder_for(torch.device("cpu"))) is Recorder


def test_in_a_model() -> None:
    model = TreeClassifier(9, 5, 3, 4)
    schedules = [forest(model.encoder.layer, number) for number in (2, 3)]
    fast = copy.deepcopy(model)
    fast.encoder.layer, counts = graphed(fast.encoder.layer, schedules)
    assert list(fast.state_dict()) == list(model.state_dict())
    for number in (2, 3):
        tree = Data(edge_index=EDGES, token=torch.randint(9, (5,)), num_nodes=5)
        batch = Collater(arity=2)([tree] * number)
        losses = [each(batch).logsumexp(1).sum() for each in (model, fast)]
        grads = [
            torch.autograd.grad(loss, list(each.parameters()))
            for loss, each in zip(losses, (model, fast), strict=True)
        ]
        torch.testing.assert_close(grads[1], grads[0])
    assert counts.replayed == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")
@pytest.mark.parametrize("make_layer", LAYERS)
def test_cuda_graphs(make_layer: type[RecursiveLayer]) -> None:
    layer = make_layer(3, 4).double().cuda()
    buckets = LevelBuckets.fit([forest(layer, number) for number in (2, 3, 7)], 2)
    fast = GraphedTreeLSTM(layer)
    for turn in range(9):
        schedule = buckets.pad(forest(layer, (2, 3, 7)[turn % 3])).to("cuda")
        x = torch.randn(schedule.num_nodes, 3, dtype=torch.float64, device="cuda")
        x.requires_grad_()
        wanted, found = (m(x, schedule=schedule, return_state=True) for m in (layer, fast))
        assert_equal(found, wanted)
        right = gradients(layer, x, wanted)
        assert_equal(gradients(fast, x, found), right)
        descend(layer, right)
    assert fast.num_graphs == 2


class Calls(TorchDispatchMode):
    """Writes down every call: what is called, the forms of tensors, and all plain arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        plain = [
            (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each
            for each in tree_flatten((args, kwargs, found))[0]
        ]
        self.seen.append((str(func), plain))
        return found


@pytest.mark.parametrize("make_layer", LAYERS)
def test_batches_of_one_shape_make_the_same_calls(
    make_layer: type[RecursiveLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA graphs require: no call depends on the batch, and no value is read."""
    # One block a level, as on a GPU.
    monkeypatch.setattr(fused_gates, "BLOCK", 2**20)
    layer = make_layer(3, 4)
    twins = torch.tensor([[0, 1, 2, 4], [2, 3, 3, 3]]) if layer.arity is None else EDGES
    schedules = [
        Schedule.from_structure(
            edges, 5, arity=layer.arity, has_input=torch.tensor([True] * k + [False] * (5 - k))
        )
        for k, edges in ((5, EDGES), (2, twins), (3, twins.flip(1)))
    ]
    buckets = LevelBuckets.fit(schedules, 1)

    def calls(schedule: Schedule) -> list[Any]:
        x = torch.randn(schedule.stores[0].inputs, 3, requires_grad=True)
        with Calls() as log:
            h, c = layer.cell.run_schedule(schedule, x, level_order=True)
            torch.autograd.grad((h, c), [x, *layer.parameters()], (h.detach(), c.detach()))
        return log.seen

    plain, padded = (
        [calls(each) for each in group]
        for group in (schedules, [padded_form(buckets.pad(s)).schedule for s in schedules])
    )
    assert padded[0] == padded[1] == padded[2]
    assert plain[0] != plain[1]
    assert not any("_local_scalar_dense" in name for name, _ in padded[0])
