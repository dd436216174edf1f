"""Linear computes what torch.nn.Linear does, in an engine and elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pyg_dynbatch.autobatch import autobatch
from pyg_dynbatch.core import Engine, Operations, Recording, TensorType
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.nn import Linear, linear
from tests.core.helpers import message

VECTOR = TensorType((3,))


class Mix(nn.Module):
    """Uses one weight twice per call, and a part of another."""

    def __init__(self, make: Callable[..., nn.Linear], product: Callable[..., Tensor]) -> None:
        super().__init__()
        self.both, self.wide, self.product = make(3, 3), make(3, 6, bias=False), product

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        part = self.product(right, self.wide.weight[:3])
        return torch.tanh(self.both(left) - self.both(self.wide(right)[:, :3]) + part)


class Case:
    """The same recordings and parameters with Linear and with torch.nn.Linear."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        plain = Mix(nn.Linear, nn.functional.linear).to(dtype)
        self.ours = Mix(Linear, linear).to(dtype)
        self.ours.load_state_dict(plain.state_dict())
        self.modules = [self.ours, plain]
        self.recordings = [self.recording(turns) for turns in (1, 4)]
        self.engines = []
        for module in self.modules:
            operations = Operations()
            operations.add(module, [VECTOR, VECTOR], [VECTOR], name="mix")
            self.engines.append(Engine(operations).to(dtype))
        self.x = torch.randn(5, 3, dtype=dtype, requires_grad=True)

    def recording(self, turns: int) -> Recording:
        operations, recording = Operations(), Recording()
        mix = operations.add(self.modules[0], [VECTOR, VECTOR], [VECTOR], name="mix")
        state = recording.input(VECTOR, 0)
        for row in range(turns):
            state = recording.call(mix, state, recording.input(VECTOR, row if turns > 1 else 0))
        recording.output(state)
        return recording

    def run(self, engine: Engine) -> Tensor:
        found: Tensor = engine(schedule_recordings(self.recordings), {VECTOR: self.x})["output"]
        return found

    def both(self, compute: Callable[[Engine, list[Tensor]], Any]) -> list[Any]:
        return [compute(e, [self.x, *e.parameters()]) for e in self.engines]


def of_some_leaves_then_of_others(case: Case, engine: Engine, leaves: list[Tensor]) -> list[Any]:
    # The weight also takes part outside the run.
    loss = case.run(engine).square().sum() + leaves[1].sum()
    chosen = ([0], [1], [0, 2], [3, 1], [0, 1, 2, 3], [1])
    return [
        torch.autograd.grad(loss, [leaves[n] for n in each], retain_graph=True) for each in chosen
    ]


def accumulated(case: Case, engine: Engine, leaves: list[Tensor]) -> list[Any]:
    for leaf in leaves:
        leaf.grad = None
    for _ in range(2):
        (case.run(engine).sum() + 2 * case.run(engine).square().sum()).backward()
    return [leaf.grad for leaf in leaves]


def without_gradients(case: Case, engine: Engine, _: list[Tensor]) -> list[Any]:
    with torch.no_grad():
        found = case.run(engine)
    with torch.inference_mode():
        return [found, case.run(engine)]


def in_autocast(case: Case, engine: Engine, leaves: list[Tensor]) -> list[Any]:
    engine.float()
    with torch.autocast("cpu", torch.bfloat16):
        found = case.run(engine)
    return [found, *torch.autograd.grad(found.sum(), leaves)]


def frozen(case: Case, engine: Engine, leaves: list[Tensor]) -> list[Any]:
    engine.operations["mix"].module.both.weight.requires_grad_(False)
    found = case.run(engine)
    return [*torch.autograd.grad(found.sum(), [leaf for leaf in leaves if leaf.requires_grad])]


@pytest.mark.parametrize(
    "way", [of_some_leaves_then_of_others, accumulated, without_gradients, in_autocast, frozen]
)
def test_equals_linear_of_torch(way: Callable[..., list[Any]]) -> None:
    case = Case()
    found, wanted = case.both(lambda engine, leaves: way(case, engine, leaves))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_refused_in_a_run_only() -> None:
    case = Case()
    loss = case.run(case.engines[0]).square().sum()
    text = message(RuntimeError, torch.autograd.grad, loss, case.x, create_graph=True)
    assert "second derivatives" in text
    layer = Linear(3, 2).double()
    assert torch.autograd.gradgradcheck(layer, case.x)


def test_a_failed_run_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("not today")

    operations, recording = Operations(), Recording()
    recording.output(
        recording.call(operations.add(fail, [VECTOR], [VECTOR]), recording.input(VECTOR, 0))
    )
    with pytest.raises(ValueError, match="not today"):
        Engine(operations)(schedule_recordings([recording]), {VECTOR: torch.ones(1, 3)})
    x = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(Linear(3, 2).double(), x)


class Recursive(nn.Module):
    def __init__(self, make: Callable[..., nn.Linear]) -> None:
        super().__init__()
        self.mix, self.leaf = make(6, 3), make(3, 3)

    def forward(self, tree: Any) -> Tensor:
        if isinstance(tree, tuple):
            return torch.tanh(self.mix(torch.cat([self(part) for part in tree])))
        return torch.sigmoid(self.leaf(torch.full((3,), float(tree))))


def test_autobatch() -> None:
    trees = [1, (1, 2), ((1, 2), (3, (4, 5)))]
    torch.manual_seed(0)
    ours, plain = Recursive(Linear), Recursive(nn.Linear)
    plain.load_state_dict(ours.state_dict())
    batched = torch.stack(list(autobatch(ours)(trees)))
    one_by_one = torch.stack([plain(tree) for tree in trees])
    torch.testing.assert_close(batched, one_by_one)
    pairs = ((batched, ours), (one_by_one, plain))
    torch.testing.assert_close(
        *(torch.autograd.grad(rows.sum(), list(m.parameters())) for rows, m in pairs)
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    class Checked(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *rows: Tensor) -> Any:
            return checkpoint(self.inner, *rows, use_reentrant=reentrant)

    case = Case()
    operations = Operations()
    operations.add(Checked(case.ours), [VECTOR, VECTOR], [VECTOR], name="mix")
    case.engines[0] = Engine(operations).double()

    def gradients(engine: Engine, leaves: list[Tensor]) -> list[Any]:
        for leaf in leaves:
            leaf.grad = None
        case.run(engine).sum().backward()
        return [leaf.grad for leaf in leaves]

    torch.testing.assert_close(*case.both(gradients), rtol=1e-12, atol=1e-12)
