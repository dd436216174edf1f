import copy
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Dropout(0.5), True),
        (nn.Dropout(0.0), True),
        (nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.1)), True),
        (nn.RReLU(), True),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1), False),
        (torch.add, False),
        (NaryTreeLSTMCell(3, 3, 2, recurrent_dropout=0.5), True),
        (NaryTreeLSTMCell(3, 3, 2), False),
        (nn.Sequential(Noise()), True),
        (Noise().forward, True),
        (partial(nn.Dropout(0.5), inplace=False), True),
        (nn.Linear(2, 2).forward, False),
    ],
)
def test_dropout_is_found(module: object, draws: bool) -> None:
    assert bool(draws_random_numbers(module)) is draws
    inputs = [VECTOR]
    assert Operations().add(module, inputs, inputs, random=not draws).random is not draws


class DropsState(nn.Module):
    def forward(self, x: Tensor, state: tuple[Tensor]) -> Tensor:
        return nn.functional.dropout(x + state[0], 0.5, self.training)


class DrawsWhenEvaluated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x + torch.randn_like(x)


def reads_a_value(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if x.max() < 1e9 else x


DRAWING: list[tuple[Any, list[Any], bool]] = [
    (lambda rows: nn.functional.dropout(rows.sum(), 0.5), [Ragged(VECTOR)], True),
    (lambda rows: rows.sum(), [Ragged(VECTOR)], False),
    (DropsState(), [VECTOR, (VECTOR,)], True),
    (lambda x, state: x + state[0], [VECTOR, (VECTOR,)], False),
    (DrawsWhenEvaluated(), [VECTOR], True),
    (reads_a_value, [VECTOR], True),
    (lambda x: x + random.random(), [VECTOR], True),
    (lambda x: torch.distributions.Normal(x, 1.0).sample(), [VECTOR], True),
    (lambda x: x.no_such_method(), [VECTOR], True),  # nothing is known of it
]


@pytest.mark.parametrize(("module", "inputs", "draws"), DRAWING)
def test_calls_that_draw_are_not_merged(module: Any, inputs: list[Any], draws: bool) -> None:
    assert Operations().add(module, inputs, [VECTOR], name="call").random is draws


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
