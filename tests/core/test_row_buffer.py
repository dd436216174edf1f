"""Gradients through a run: every way autograd can be asked for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyg_dynbatch.core import Engine, Operations, Recording, run_one_by_one
from pyg_dynbatch.core.row_buffer import Read, RowBuffer, Write, exchange, new_token
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.testing import assert_gradients_agree
from tests.core.helpers import VECTOR, Vectors


def recording(vectors: Vectors) -> Recording:
    """A small graph with shared parts, inputs read at two levels, and several outputs."""
    recording = Recording()
    a, b, c = (recording.input(VECTOR, row) for row in range(3))
    left = recording.call(vectors.mix, a, b)
    right = recording.call(vectors.mix, b, c)
    shared = recording.call(vectors.squash, left)
    top = recording.call(vectors.mix, shared, recording.call(vectors.mix, right, shared))
    top = recording.call(vectors.mix, top, a)
    for value in (top, shared, top):
        recording.output(value)
        recording.output(recording.call(vectors.score, value), "score")
    return recording


class Case:
    """The same numbers batched and one by one, in float64."""

    def __init__(self) -> None:
        self.vectors = Vectors()
        self.engine = self.vectors.engine.double()
        self.recordings = [recording(self.vectors) for _ in range(2)]
        self.schedule = schedule_recordings(self.recordings)
        self.x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
        self.leaves = [self.x, *self.engine.parameters()]
        self.weight = torch.randn(6, 3, dtype=torch.float64)

    def batched(self, x: Tensor | None = None) -> dict[str, Any]:
        return self.engine(self.schedule, {VECTOR: self.x if x is None else x})

    def one_by_one(self) -> dict[str, Any]:
        return run_one_by_one(self.engine, self.recordings, {VECTOR: self.x})

    def loss(self, found: dict[str, Any]) -> Tensor:
        return (found["output"] * self.weight).sum() + found["score"].square().sum()

    def wanted(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(self.one_by_one()), self.leaves)


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)


def test_a_retained_graph_twice() -> None:
    case = Case()
    loss, wanted = case.loss(case.batched()), case.wanted()
    for _ in range(3):
        assert_close(torch.autograd.grad(loss, case.leaves, retain_graph=True), wanted)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close([leaf.grad for leaf in case.leaves], [2 * right for right in wanted])


def test_two_runs_of_one_engine_in_one_loss() -> None:
    case = Case()
    loss = case.loss(case.batched()) + 2 * case.loss(case.batched())
    assert_close(torch.autograd.grad(loss, case.leaves), [3 * right for right in case.wanted()])


def test_one_output_after_the_other() -> None:
    case = Case()
    both = case.batched(), case.one_by_one()
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for name in ("score", "output", "score"):
        assert_close(*(torch.autograd.grad(f[name].sum(), case.leaves, **options) for f in both))


def test_gradients_of_some_leaves_then_of_others() -> None:
    case = Case()
    loss, wanted = case.loss(case.batched()), case.wanted()
    for chosen in ([0], [3, 1], [len(wanted) - 1], range(len(wanted)), [2]):
        found = torch.autograd.grad(loss, [case.leaves[n] for n in chosen], retain_graph=True)
        assert_close(found, [wanted[n] for n in chosen])


def captured(case: Case, run: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], list[Tensor]]:
    kept: list[Tensor] = []
    module = case.engine.operations["mix"].module
    handle = module.register_forward_hook(lambda m, args, out: kept.append(out))
    found = run()
    handle.remove()
    return found, kept


def test_an_intermediate_of_a_hook_in_the_loss() -> None:
    case = Case()
    leaves = [case.x, *case.engine.operations["mix"].parameters()]
    both = captured(case, case.batched), captured(case, case.one_by_one)
    losses = [(case.loss(found), sum(k.square().sum() for k in kept)) for found, kept in both]
    # The hook's part alone is no output; then both, then each again.
    for a, b in ((0, 1), (1, 1), (1, 0), (0, 1)):
        totals = [sum(w * part for w, part in ((a, x), (b, y)) if w) for x, y in losses]
        assert_close(*(torch.autograd.grad(t, leaves, retain_graph=True) for t in totals))


def test_the_gradient_of_an_intermediate() -> None:
    case = Case()
    found, kept = captured(case, case.batched)
    (gradient,) = torch.autograd.grad(case.loss(found), kept[0], retain_graph=True)
    (again,) = torch.autograd.grad(case.loss(found), kept[0])
    assert gradient.abs().sum() > 0
    assert torch.equal(gradient, again)


def test_a_backward_pass_within_another_over_one_run() -> None:
    x = torch.arange(3.0, requires_grad=True)
    buffer = RowBuffer(3)
    buffer.allocate((x,), (x.dtype,))
    token = buffer.write(new_token(x), 0, (2 * x,))
    (first,) = buffer.read(token, torch.tensor([0, 1]))
    (second,) = buffer.read(token, torch.tensor([1, 2]))
    inner = second.sum()
    within = list[Tensor]()

    def differentiate(gradient: Tensor) -> None:
        within.extend(torch.autograd.grad(inner, x, retain_graph=True))

    first.register_hook(differentiate)
    (first.sum() + second.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 4, 2]
    assert [each.tolist() for each in within] == [[0, 2, 2]]


def test_no_gradient_buffer_outlives_the_pass() -> None:
    rows, buffer = torch.randn(4, 2, requires_grad=True), RowBuffer(4)
    buffer.allocate((rows,), (rows.dtype,))
    token = buffer.write(new_token(rows), 0, (rows,))
    buffer.read(token, (1, 2))[0].sum().backward()
    assert rows.grad.sum() == 4
    assert buffer.gradients.totals == {}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_a_whole_run(use_reentrant: bool) -> None:
    case, calls = Case(), []
    module = case.engine.operations["mix"].module
    module.register_forward_hook(lambda *_: calls.append(1))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(case.batched(x).values())

    output, score = checkpoint(run, case.x, use_reentrant=use_reentrant)
    steps = len(calls)
    case.loss({"output": output, "score": score}).backward()
    assert len(calls) > steps
    assert_close([leaf.grad for leaf in case.leaves], case.wanted())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_inside_an_operation(use_reentrant: bool) -> None:
    case = Case()
    module = case.engine.operations["mix"].module
    wanted, plain = case.wanted(), module.forward
    module.forward = lambda *rows: checkpoint(plain, *rows, use_reentrant=use_reentrant)
    case.loss(case.batched()).backward()
    assert_close([leaf.grad for leaf in case.leaves], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    case = Case()
    case.engine.float()
    x = case.x.detach().float().requires_grad_()
    seen: list[torch.dtype] = []
    module = case.engine.operations["mix"].module
    handle = module.left.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=dtype):
        found = case.batched(x)
    handle.remove()
    assert set(seen) == {dtype}
    assert found["output"].dtype == torch.float32
    loss = (found["output"] * case.weight.float()).sum() + found["score"].square().sum()
    mine = torch.autograd.grad(loss, [x, *case.engine.parameters()])
    exact = case.batched(x)
    loss = (exact["output"] * case.weight.float()).sum() + exact["score"].square().sum()
    right = torch.autograd.grad(loss, [x, *case.engine.parameters()])
    torch.testing.assert_close(found["output"], exact["output"], rtol=0.05, atol=0.05)
    assert_close(mine, right, tolerance=0.2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    case = Case()
    with mode():
        found = case.batched()
    assert not any(rows.requires_grad for rows in found.values())
    with torch.no_grad():
        assert_close(found.values(), case.one_by_one().values())


def test_frozen_parameters() -> None:
    case = Case()
    case.engine.requires_grad_(False)
    assert case.batched()["output"].requires_grad
    assert not case.batched(case.x.detach())["output"].requires_grad
    case.engine.operations["score"].requires_grad_(True)
    found = case.batched(case.x.detach())
    found["score"].sum().backward()
    assert case.engine.operations["mix"].module.left.weight.grad is None
    assert case.engine.operations["score"].module.weight.grad.abs().sum() > 0


def test_only_later_operations_are_trained() -> None:
    """The first steps need no gradient, so the chain of reads and writes starts later."""
    case = Case()
    case.engine.operations["mix"].requires_grad_(False)
    x = case.x.detach()
    leaves = [*case.engine.operations["squash"].parameters()]
    found = torch.autograd.grad(case.loss(case.batched(x)), leaves)
    wanted = run_one_by_one(case.engine, case.recordings, {VECTOR: x})
    assert_close(found, torch.autograd.grad(case.loss(wanted), leaves))


def test_an_argument_that_the_module_ignores() -> None:
    case = Case()
    case.engine.operations["mix"].module.forward = lambda left, right: torch.tanh(left)
    wanted = torch.autograd.grad(case.loss(case.one_by_one()), case.x)
    assert_close(torch.autograd.grad(case.loss(case.batched()), case.x), wanted)


def test_a_tensor_hook_may_change_the_gradient() -> None:
    case = Case()
    x = case.x * 1
    x.register_hook(lambda gradient: 2 * gradient)
    (found,) = torch.autograd.grad(case.loss(case.batched(x)), case.x)
    assert_close([found], [2 * case.wanted()[0]])


def test_an_operation_may_return_its_gradient_unchanged() -> None:
    """The gradient of a sum is the slice of the gradient buffer itself."""
    operations, recording = Operations(), Recording()
    add = operations.add(torch.add, [VECTOR, VECTOR], [VECTOR], name="add")
    a, b, c, d = (recording.input(VECTOR, row) for row in range(4))
    top = recording.call(add, recording.call(add, d, b), recording.call(add, a, c))
    recording.output(recording.call(add, top, d))
    assert_gradients_agree(Engine(operations), [recording, recording], {VECTOR: torch.randn(8, 3)})


@pytest.mark.parametrize("index", [[], [0, 3, 3, 1, 2, 0]])
def test_several_arguments_in_one_gather(index: list[int]) -> None:
    rows = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    height = torch.arange(4)
    buffer = RowBuffer(4)
    buffer.allocate((rows, height), (torch.float64, torch.int64))
    token = buffer.write(new_token(rows), 0, (rows, height))
    pick = torch.tensor(index, dtype=torch.long)
    found = exchange(token, (), [Read(buffer, pick, 2), Read(buffer, (1, 2))])[1]
    two = pick[: len(pick) // 2], pick[len(pick) // 2 :]
    for place, part in enumerate((*two, torch.tensor([1, 2]))):
        assert found[place][0].equal(rows[part])
        assert found[place][1].equal(height[part])
    weights = [torch.randn_like(each[0]) for each in found]
    mine = sum((each[0] * w).sum() for each, w in zip(found, weights, strict=True))
    right = sum(
        (rows[part] * w).sum()
        for part, w in zip((*two, torch.tensor([1, 2])), weights, strict=True)
    )
    (wanted,) = torch.autograd.grad(right, rows)
    assert_close(torch.autograd.grad(mine, rows), [wanted])


def transposed(rows: Tensor) -> Tensor:
    return rows.transpose(1, 2) if rows.dim() == 3 else rows


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    "join",
    [
        lambda left, right: torch.stack([left, right], 1),
        lambda left, right: torch.stack([right, left], 1).conj(),
        lambda left, right: torch.stack([left, right.conj()], -1),
        lambda left, right: torch.stack([left, 2 * left + right]),
        lambda left, right: torch.stack([left, right, torch.ones_like(left)], 1),
        lambda left, right: torch.stack([transposed(left), right], 1),
        lambda left, right: (left + right).sum(0, keepdim=True),
    ],
)
def test_memory_layouts_of_the_gradients_of_two_arguments(
    join: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """They may be separate, the same, or expanded."""
    rows = torch.randn(4, *shape, dtype=dtype, requires_grad=True)
    buffer, pick = RowBuffer(4), torch.tensor([0, 3, 3, 1, 2, 0])
    buffer.allocate((rows,), (dtype,))
    token = buffer.write(new_token(rows), 0, (rows,))
    ((left,), (right,)) = exchange(token, (), [Read(buffer, pick, 2)])[1]
    found = join(left, right)
    weight = torch.randn_like(found)
    wanted = join(rows[pick[:3]], rows[pick[3:]])
    assert_close(
        torch.autograd.grad((found * weight).sum().abs(), rows),
        torch.autograd.grad((wanted * weight).sum().abs(), rows),
    )


def test_writing_and_reading_at_once() -> None:
    """Rows can be read at once, and their gradient is complete at the write."""
    rows = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    buffer = RowBuffer(4, zero_rows=1)
    buffer.allocate((rows,), (torch.float64,))
    token, found = exchange(new_token(rows), [Write(buffer, 1, (rows,))], [Read(buffer, (1, 2))])
    (again,) = buffer.read(token, torch.tensor([1, 1, 3, 0]))
    (mine,) = torch.autograd.grad((found[0][0] * 2).sum() + (again * 3).sum(), rows)
    assert mine[:, 0].tolist() == [8.0, 2.0, 3.0]
