"""Law: a derivative written by hand has a right second derivative, or refuses to be recorded."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.autograd import Function, grad, gradcheck, gradgradcheck

from pyg_dynbatch import schedule_structure
from pyg_dynbatch.autobatch import programs
from pyg_dynbatch.core import linear
from pyg_dynbatch.core.row_buffer import RowBuffer, new_token
from pyg_dynbatch.nn import NaryTreeLSTM, WeaveStack, weave
from pyg_dynbatch.nn.pairs import Pairs, order_relu, pair_sum
from pyg_dynbatch.nn.readout import GaussianHistogramAggregation

SOURCE = Path(__file__).parents[2] / "src"
Call = Callable[..., Tensor]
Case = tuple[Call, list[Tensor]]

EDGES = torch.tensor([[1, 2, 3], [0, 0, 1]])
STEPS = schedule_structure(EDGES, 4, arity=2)
PAIRS = Pairs.all_pairs([3, 1])
CODED = Pairs.from_codes(torch.tensor([0, 1, 1, 0, 1, 0, 0]), [3, 1], num_codes=2)


def rows(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def of_layer(layer: nn.Module, *given: Any, width: int = 3) -> Case:
    """A layer as a function of its input rows and its parameters."""
    torch.manual_seed(0)
    layer = layer.double().requires_grad_()
    names = list(dict(layer.named_parameters()))

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        by_name = dict(zip(names, weights, strict=True))
        result = torch.func.functional_call(layer, by_name, (x, *given))
        return result[0] if isinstance(result, tuple) else result

    return call, [*rows((4, width)), *layer.parameters()]


def through_a_buffer() -> Case:
    def call(x: Tensor) -> Tensor:
        buffer = RowBuffer(3)
        buffer.allocate((x[:1],), (x.dtype,))
        token = buffer.write(new_token(x), 0, (x,))
        return buffer.read(token, torch.tensor([2, 0]))[0]

    return call, rows((3, 2))


def shared_weight() -> Case:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        gradient = linear.WeightGradient()
        link = linear._Summed.apply(weight, gradient)
        return linear._Linear.apply(x, weight, None, link, gradient)

    return call, rows((4, 3), (2, 3))


def own_weight() -> Case:
    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear._Linear.apply(x, weight, bias, None, None)

    return call, rows((4, 3), (2, 3), (2,))


def split_and_merged() -> Case:
    def call(*tensors: Tensor) -> Tensor:
        parts = [torch.tensor([2, 0]), torch.tensor([1])]
        pieces = programs.split(parts, [[0, 1], [0, 1]], tensors)
        return torch.stack(list(programs.merge(parts, pieces)))

    return call, rows((3, 2), (3, 2))


def moments_of_ranks() -> Case:
    def call(mean: Tensor, var: Tensor) -> Tensor:
        return torch.stack(weave._OverRanks.apply(mean, var.square(), 3)[:2])

    return call, rows((2,), (2,))


CASES: dict[str, Callable[[], Case]] = {
    "autobatch.programs._Merge": split_and_merged,
    "autobatch.programs._Split": split_and_merged,
    "core.row_buffer._Exchange": through_a_buffer,
    "core.linear._Linear": own_weight,
    "core.linear._Summed": shared_weight,
    "kernels.tree_lstm._TreeLSTM": lambda: of_layer(NaryTreeLSTM(3, 2), EDGES),
    "nn.pairs._PairMap": lambda: (lambda x: pair_sum(x, PAIRS), rows((7, 2))),
    "nn.pairs._OrderReLU": lambda: (lambda x: order_relu(x, PAIRS), rows((4, 2))),
    "nn.pairs._SumUpdatedPairs": lambda: of_layer(
        WeaveStack(3, 2, 2), torch.eye(2).double(), CODED
    ),
    "nn.readout._Histogram": lambda: of_layer(GaussianHistogramAggregation()),
    "nn.weave._Normalize": lambda: of_layer(weave.CountedBatchNorm(3)),
    "nn.weave._OverRanks": moments_of_ranks,
}

REFUSED = {
    "core.row_buffer._Exchange": "Engine, through a schedule",
    "kernels.tree_lstm._TreeLSTM": "Engine, through a schedule",
    "nn.weave._Normalize": "CountedBatchNorm in training",
    "nn.weave._OverRanks": "CountedBatchNorm in training",
}


def below(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def modules_with_functions() -> set[str]:
    """Name the modules whose text says that they define functions of autograd."""
    names = set[str]()
    for path in (SOURCE / "pyg_dynbatch").rglob("*.py"):
        text = path.read_text("utf-8")
        if "autograd" in text and "Function" in text:
            names.add(".".join(path.relative_to(SOURCE).with_suffix("").parts))
    return names


def test_every_derivative_written_by_hand_has_a_case() -> None:
    modules = modules_with_functions()
    for name in modules:
        importlib.import_module(name)
    ours = [kind for kind in below(Function) if kind.__module__ in modules]
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in ours}
    assert {name.removeprefix("pyg_dynbatch.") for name in names} == set(CASES)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def loss_of(call: Call, *tensors: Tensor) -> Tensor:
    """Weigh a result; of a constant gradient autograd alone would not see what is missing."""
    result = call(*tensors)
    weights = torch.linspace(1, 2, result.numel()).double()
    return (result * weights.view_as(result)).sum()


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_second_derivatives_are_right(name: str) -> None:
    call, tensors = CASES[name]()

    def first(*tensors: Tensor) -> tuple[Tensor, ...]:
        return grad(loss_of(call, *tensors), tensors, create_graph=True)

    assert gradgradcheck(call, tensors)
    assert gradcheck(first, tensors)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", REFUSED)
def test_second_derivatives_are_refused(name: str) -> None:
    call, tensors = CASES[name]()
    message = rf"{REFUSED[name]}: second derivatives are not available\.\n  expected: backward"
    with pytest.raises(RuntimeError, match=message):
        loss_of(call, *tensors).backward(create_graph=True)
    for tensor in tensors:
        with pytest.raises(RuntimeError, match=message):
            grad(loss_of(call, *tensors), tensor, create_graph=True)
    loss_of(call, *tensors).backward(retain_graph=True)  # alone, first derivatives are there
