"""Law: in the steps of a run, linear layers give what torch gives call by call."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pyg_dynbatch.core import Engine, Operations, Recording, TensorType, linear
from pyg_dynbatch.core.linear import RunProducts
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.nn import RecursiveLayer, TreeRNNCell

VECTOR = TensorType((3,))
pytestmark = pytest.mark.usefixtures("products_of_few_rows")


class Mix(nn.Module):
    """Uses one weight twice per call, and a part of another, on rows of two and three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(3, 3)
        self.wide = nn.Linear(3, 6, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        part = functional.linear(input=right, weight=self.wide.weight[:3])
        stacked = self.both(torch.stack([left, self.wide(right)[:, :3]], 1))
        return torch.tanh(stacked[:, 0] - stacked[:, 1] + part)


class Checked(Mix):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, *rows: Tensor) -> Any:
        return checkpoint(super().forward, *rows, use_reentrant=self.reentrant)


class Mapped(Mix):
    """By torch.func.vmap within a step."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one_row = torch.func.vmap(lambda a, b: super(Mapped, self).forward(a[None], b[None])[0])
        return one_row(left, right)


class Force(Mix):
    """The gradient of an energy, which is differentiated once more in training."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        with torch.enable_grad():
            place = left if left.requires_grad else left.detach().requires_grad_()
            energy = super().forward(place, right).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return force


class Tangent(Mix):
    """A derivative in a direction, in forward mode."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: super(Tangent, self).forward(x, right), (left,), (right,))[
            1
        ]


class Replaced(Mix):
    """Replaces the data of a weight for each call."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        own = self.both.weight.data
        self.both.weight.data = 2 * own
        rows = super().forward(left, right)
        self.both.weight.data = own
        return rows


class InnerBackward(Mix):
    """Differentiates again, in the backward pass, a graph that belongs to the same run."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        rows = super().forward(left, right)
        if rows.requires_grad:
            place = left.detach().requires_grad_()
            inner = super().forward(place, right).square().sum()

            def differentiate(gradient: Tensor) -> None:
                torch.autograd.grad(inner, place, retain_graph=True)

            rows.register_hook(differentiate)
        return rows


class ManyGradients(Mix):
    """Computes several gradients at once within a step."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        with torch.enable_grad():
            place = left.detach().requires_grad_()
            rows = super().forward(place, right)
            unit = torch.eye(3, dtype=rows.dtype)[:, None].expand(3, *rows.shape)
            (each,) = torch.autograd.grad(rows, place, unit, True, is_grads_batched=True)
        return super().forward(left, right) + each.sum(0).detach()


class Unusual(Mix):
    """Products that only torch computes."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        weight = self.both.weight
        turned = functional.linear(left + 1j * right, torch.complex(weight, weight.t())).imag
        broadcast = functional.linear(left, weight, self.both.bias[None])
        no_columns = functional.linear(left[:, :0], weight[:, :0], self.both.bias)
        single = functional.linear(left[0], weight)
        return super().forward(left, right) + turned + broadcast + no_columns + 0 * single


class Halving(TorchFunctionMode):
    """A mode of the user."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is functional.linear else result


MODULES: dict[str, Callable[[], Mix]] = {
    "plain": Mix,
    "checkpoint": lambda: Checked(reentrant=False),
    "reentrant checkpoint": lambda: Checked(reentrant=True),
    "vmap": Mapped,
    "grad in a step": Force,
    "forward mode": Tangent,
    "replaced data": Replaced,
    "backward within backward": InnerBackward,
    "many gradients in a step": ManyGradients,
    "unusual products": Unusual,
}


class Case:
    """Recordings of one and of four calls of a module."""

    def __init__(self, module: Mix) -> None:
        torch.manual_seed(0)
        self.module = module.double()
        operations = Operations()
        mix = operations.add(self.module, [VECTOR, VECTOR], [VECTOR], name="mix")
        self.engine = Engine(operations).double()
        self.recordings = list[Recording]()
        for turns in (1, 4):
            recording = Recording()
            state = recording.input(VECTOR, 0)
            for row in range(turns):
                state = recording.call(mix, state, recording.input(VECTOR, row % turns))
            recording.output(state)
            self.recordings.append(recording)
        self.x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        self.leaves = [self.x, *self.module.parameters()]

    def in_steps(self) -> Tensor:
        schedule = schedule_recordings(self.recordings)
        rows: Tensor = self.engine(schedule, {VECTOR: self.x})["output"]
        return rows

    def call_by_call(self) -> Tensor:
        rows: Tensor = run_one_by_one(self.engine, self.recordings, {VECTOR: self.x})["output"]
        return rows


def of_some_leaves_then_of_others(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Any]:
    loss = run().square().sum() + leaves[1].sum()  # the weight also takes part outside the run
    chosen = ([0], [1], [0, 2], [3, 1], [0, 1, 2, 3], [1])
    return [
        torch.autograd.grad(loss, [leaves[n] for n in each], retain_graph=True, allow_unused=True)
        for each in chosen
    ]


def accumulated(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Any]:
    for leaf in leaves:
        leaf.grad = None
    for _ in range(2):
        (run().sum() + 2 * run().square().sum()).backward()
    return [leaf.grad for leaf in leaves]


def without_gradients(run: Callable[[], Tensor], _: list[Tensor]) -> list[Any]:
    with torch.no_grad():
        return [run()]


def with_a_frozen_weight(run: Callable[[], Tensor], leaves: list[Tensor]) -> list[Any]:
    frozen = leaves[1].requires_grad_(False)
    trained = [leaf for leaf in leaves if leaf is not frozen]
    gradients = torch.autograd.grad(run().sum(), trained, allow_unused=True)
    frozen.requires_grad_()
    return list(gradients)


WAYS = (of_some_leaves_then_of_others, accumulated, without_gradients, with_a_frozen_weight)


# Torch refuses autograd.grad() through a reentrant checkpoint.
MODULES_AND_WAYS = [
    (name, way)
    for name in MODULES
    for way in WAYS
    if name != "reentrant checkpoint" or way is accumulated
]


@pytest.mark.parametrize(("name", "way"), MODULES_AND_WAYS)
def test_steps_equal_single_calls(name: str, way: Callable[..., list[Any]]) -> None:
    case = Case(MODULES[name]())
    computed = way(case.in_steps, case.leaves)
    expected = way(case.call_by_call, case.leaves)
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)


def test_autocast_is_left_to_torch() -> None:
    case = Case(Mix())
    case.engine.float()
    case.x = case.x.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        computed, expected = case.in_steps(), case.call_by_call().float()
    torch.testing.assert_close(computed, expected, rtol=0.05, atol=0.05)


def test_a_mode_of_the_user_decides() -> None:
    case = Case(Mix())
    with Halving():
        computed = accumulated(case.in_steps, case.leaves)
        expected = accumulated(case.call_by_call, case.leaves)
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)


def test_frozen_rows_let_the_weight_change_before_the_backward_pass() -> None:
    layer = nn.Linear(3, 3)
    with RunProducts(layer).of_step(torch.device("cpu"), 2):
        rows = layer(torch.ones(2, 3))
    with torch.no_grad():
        layer.weight.mul_(2)
    rows.sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 3), 2.0))


@pytest.mark.parametrize(
    "module", [nn.TransformerEncoderLayer(4, 2, 8), nn.Embedding(3, 4), nn.GRUCell(3, 4)]
)
def test_attention_keeps_its_fast_path(module: nn.Module) -> None:
    has_attention = isinstance(module, nn.TransformerEncoderLayer)
    with RunProducts(module).of_step(torch.device("cpu"), 2):
        assert torch.overrides.has_torch_function((torch.ones(1),)) is not has_attention


def test_one_sum_per_weight_and_run() -> None:
    loss = Case(Mix()).in_steps().sum()
    waiting: list[Any] = [loss.grad_fn]
    functions = set[Any]()
    while waiting:
        function = waiting.pop()
        if function is not None and function not in functions:
            functions.add(function)
            waiting += [before for before, _ in function.next_functions]
    names = Counter(function.name() for function in functions)
    assert names["_SummedBackward"] == 2  # weights
    assert names["_LinearBackward"] == 4 * 3  # steps and products


def test_a_failed_run_leaves_nothing_behind() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("not today")

    operations, recording = Operations(), Recording()
    recording.output(
        recording.call(operations.add(fail, [VECTOR], [VECTOR]), recording.input(VECTOR, 0))
    )
    with pytest.raises(ValueError, match="not today"):
        Engine(operations)(schedule_recordings([recording]), {VECTOR: torch.ones(1, 3)})
    rows = functional.linear(torch.ones(1, 3), torch.ones(2, 3, requires_grad=True))
    assert rows.grad_fn is not None and "_Linear" not in rows.grad_fn.name()


class LinearCell(TreeRNNCell):
    """A cell as a user writes it."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.mix = nn.Linear(6, 3)

    def step(self, projected: Tensor, children: Any) -> Any:
        return (
            (torch.tanh(projected + self.mix(children[0].flatten(1))),)
            if children
            else (projected,)
        )


def test_layers_equal_those_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = RecursiveLayer(LinearCell()).double()
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5], [4, 4, 5, 5, 6, 6]])
    leaves = [x, *layer.parameters()]

    def computed() -> list[Tensor]:
        rows = layer(x, edges)
        return [rows, *torch.autograd.grad(rows.square().sum(), leaves, allow_unused=True)]

    in_place = computed()
    monkeypatch.setattr(linear, "_MANY_ROWS", 1_000)
    torch.testing.assert_close(in_place, computed(), rtol=1e-12, atol=1e-12)
