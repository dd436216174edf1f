import copy
import pickle
import random
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core import (
    Engine,
    Operation,
    Operations,
    Ragged,
    Recording,
    Signature,
    TensorType,
)
from pyg_dynbatch.core.operation import draws_random_numbers, row_type_of
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.nn import NaryTreeLSTMCell
from tests.core.helpers import SCALAR, VECTOR, as_users_run_it


class Noise(nn.Module):
    """Declares that it draws random numbers."""

    random = True

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_signature_reads_well() -> None:
    with as_users_run_it():
        signature = Signature("sum", [Ragged((VECTOR, SCALAR)), VECTOR], [VECTOR, SCALAR])
    assert str(signature) == (
        "sum(Ragged((float32[3], float32[])), float32[3]) -> float32[3], float32[]"
    )
    assert signature == Signature("sum", (Ragged((VECTOR, SCALAR)), VECTOR), (VECTOR, SCALAR))
    assert pickle.loads(pickle.dumps(signature)) == signature
    assert hash(signature) == hash(copy.deepcopy(signature))


def test_an_engine_takes_signatures_of_the_same_types_alone() -> None:
    operations = Operations()
    own = operations.add(lambda *rows: rows[0], [VECTOR, Ragged(SCALAR)], [SCALAR], name="node")
    engine = Engine(operations)
    assert engine.operation_of(copy.deepcopy(own)) is operations["node"]
    for inputs, outputs in (
        ((VECTOR, SCALAR), (SCALAR,)),
        ((VECTOR,), (SCALAR,)),
        ((VECTOR, Ragged(SCALAR)), (SCALAR, SCALAR)),
        ((VECTOR, Ragged(VECTOR)), (SCALAR,)),
    ):
        with pytest.raises(TypeError, match="different signature"):
            engine.operation_of(Signature("node", inputs, outputs))


def test_row_types_of_arguments() -> None:
    assert row_type_of(Ragged(VECTOR)) == row_type_of(VECTOR) == VECTOR


def test_operation_calls_its_module() -> None:
    signature = Signature("twice", (SCALAR,), (SCALAR,))
    assert Operation(signature, lambda x: 2 * x)(torch.tensor([1.0, 2.0])).tolist() == [2.0, 4.0]


class Declared(nn.Module):
    """Declares that it draws none."""

    random = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def own_forward(self: nn.Module, x: Tensor) -> Tensor:
    return torch.rand_like(x)


def with_own_forward() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.forward = MethodType(own_forward, linear)
    return linear


def with_hook() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda module, args, result: torch.rand_like(result))
    return linear


def with_parametrization() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(2, 2), "weight", OwnLayer())


class OwnLayer(nn.Linear):
    """Declares nothing."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Linear(2, 2).forward, False),
        (nn.Dropout(0.5), True),
        (nn.Dropout(0.0), True),
        (nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.1)), True),
        (nn.RReLU(), True),
        (nn.FractionalMaxPool2d(2, output_size=1), True),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1), False),
        (nn.TransformerEncoderLayer(2, 1), True),
        (NaryTreeLSTMCell(3, 3, 2, recurrent_dropout=0.5), True),
        (NaryTreeLSTMCell(3, 3, 2), False),
        (td.FC(2), False),
        (td.FC(2, activation=torch.rand_like), True),
        (td.FC(2, activation=lambda x: x), None),
        (td.FC(2, input_keep_prob=0.5), True),
        (td.Embedding(3, 2), False),
        (td.ScopedLayer(nn.LSTMCell(2, 2)), False),
        (td.ScopedLayer(own_forward), None),
        (nn.Sequential(Noise()), True),
        (Noise().forward, True),
        (Declared(), False),
        (Declared().forward, False),
        (nn.Sequential(Declared(), nn.Dropout(0.5)), True),
        (OwnLayer(), None),
        (nn.Sequential(Declared(), OwnLayer()), None),
        (OwnLayer().forward, None),
        (MethodType(own_forward, nn.Linear(2, 2)), None),
        (with_own_forward(), None),
        (with_hook(), None),
        (with_parametrization(), None),
        (partial(nn.Dropout(0.5), inplace=False), True),
        (partial(nn.Linear(2, 2)), None),
        (torch.add, False),
        (torch.softmax, False),
        (torch.dropout, True),
        (torch.bernoulli, True),
        (nn.functional.dropout, None),
        (lambda x: x, None),
    ],
)
def test_what_draws_random_numbers_is_known(module: Any, draws: bool | None) -> None:
    assert draws_random_numbers(module) is draws
    inputs = [VECTOR]
    assert Operations().add(module, inputs, inputs, name="call").random is (draws is not False)
    declared = Operations().add(module, inputs, inputs, name="call", random=not draws)
    assert declared.random is not draws


def test_modules_without_arguments_draw_only_if_that_is_known() -> None:
    assert not Operations().add(lambda: torch.zeros(1, 3), [], [VECTOR], name="start").random
    with pytest.raises(ValueError, match="random, but without an argument"):
        Operations().add(nn.Dropout(0.5), [], [VECTOR])


class DropsState(nn.Module):
    def forward(self, x: Tensor, state: tuple[Tensor]) -> Tensor:
        return nn.functional.dropout(x + state[0], 0.5, self.training)


class DrawsWhenEvaluated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x + torch.randn_like(x)


def reads_a_value(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if x.max() < 1e9 else x


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (lambda rows: nn.functional.dropout(rows.sum(), 0.5), [Ragged(VECTOR)]),
        (DropsState(), [VECTOR, (VECTOR,)]),
        (DrawsWhenEvaluated(), [VECTOR]),
        (reads_a_value, [VECTOR]),
        (lambda x: x + random.random(), [VECTOR]),
        (lambda x: torch.distributions.Normal(x, 1.0).sample(), [VECTOR]),
        (lambda x: x.no_such_method(), [VECTOR]),
    ],
)
def test_calls_that_draw_are_not_merged(module: Any, inputs: list[Any]) -> None:
    assert Operations().add(module, inputs, [VECTOR], name="call").random


def test_one_module_has_one_signature_an_input_type() -> None:
    operations, shared = Operations(), nn.Tanh()
    first = operations.add(shared, [VECTOR], [VECTOR], name="squash")
    assert operations.add(shared, [VECTOR], [VECTOR], name="other") is first
    second = operations.add(shared, [SCALAR], [SCALAR])
    assert second.name == "tanh"
    third = operations.add(nn.Tanh(), [SCALAR], [SCALAR])
    assert third.name == "tanh_1"
    assert operations.signatures == (first, second, third)
    assert len(operations) == 3
    assert "squash" in operations
    assert "other" not in operations
    assert operations["squash"].module is shared
    assert [operation.signature.name for operation in operations] == ["squash", "tanh", "tanh_1"]


def test_a_method_brings_its_module() -> None:
    operations, layer = Operations(), nn.Linear(3, 3)
    first = operations.add(layer.forward, [VECTOR], [VECTOR], name="layer")
    assert operations.add(layer.forward, [VECTOR], [VECTOR]) is first
    operations.add(partial(layer.forward), [VECTOR], [VECTOR], name="part")
    assert {id(p) for p in operations.parameters()} == {id(layer.weight), id(layer.bias)}
    copied = copy.deepcopy(operations).double()
    assert copied["layer"](torch.zeros(1, 3, dtype=torch.float64)).dtype == torch.float64
    assert layer.weight.dtype == torch.float32


def test_random_leaves_of_a_cell_are_not_merged() -> None:
    cell = NaryTreeLSTMCell(2, 8, 2, recurrent_dropout=0.5)
    operations, state, vector = Operations(), cell.state_type, TensorType((2,))
    node = operations.add(cell, [vector, state, state], [state], name="node")
    recording = Recording()
    zeros = recording.constant(state, (torch.zeros(8), torch.zeros(8)))
    for _ in range(2):
        recording.output(recording.call(node, recording.constant(vector, [1.0, 2.0]), zeros, zeros))
    _, c = Engine(operations)(schedule_recordings([recording]))["output"]
    assert not torch.equal(c[0], c[1])


def test_a_name_may_be_that_of_a_method() -> None:
    operations = Operations()
    for name in ("double", "values", "type", "forward", "training"):
        operations.add(nn.Linear(3, 3), [VECTOR], [VECTOR], name=name)
    assert [s.name for s in operations.signatures][:2] == ["double", "values"]
    copied = copy.deepcopy(operations).double()
    assert copied["double"].module.weight.dtype == torch.float64
    assert len(pickle.loads(pickle.dumps(operations)).state_dict()) == 10


def test_shared_parameters_are_counted_once() -> None:
    operations, shared = Operations(), nn.Linear(3, 3)
    operations.add(shared, [VECTOR], [VECTOR])
    operations.add(shared, [TensorType((3,), tag="other")], [VECTOR])
    assert len(list(Engine(operations).parameters())) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_knows_its_own_modules(again) -> None:
    operations, cell = Operations(), NaryTreeLSTMCell(3, 3)
    operations.add(nn.Linear(3, 3), [VECTOR], [VECTOR], name="linear")
    operations.add(cell.forward, [VECTOR], [VECTOR], name="method")
    copied = again(operations)
    for _ in range(2):
        for name in ("linear", "method"):
            called = copied[name].module
            assert copied.add(called, [VECTOR], [VECTOR]) is copied[name].signature
        copied.add(operations["linear"].module, [VECTOR], [VECTOR], name="other")
        assert len(copied) == 3
    assert len(operations) == 2
