"""The public laws find what is wrong, and name it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch.core import (
    Engine,
    Operations,
    Program,
    Ragged,
    RaggedRows,
    Schedule,
    Signature,
    TensorType,
)
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.testing import (
    assert_batching_agrees,
    assert_cell_agrees,
    assert_gradients_agree,
    assert_model_agrees,
    assert_order_is_free,
    program_of_structure,
)
from tests.core.helpers import VECTOR

TREE = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3)


def engine_of(module: Any) -> tuple[Engine, list[Program]]:
    """An engine of one operation, and two programs that call it on different rows."""
    operations, programs = Operations(), []
    signature = operations.add(module, [VECTOR], [VECTOR], name="odd")
    for number in (1.0, 2.0):
        program = Program()
        program.output(program.call(signature, program.input(VECTOR, 0)))
        program.output(program.call(signature, program.constant(VECTOR, [number, 0.0, 1.0])))
        programs.append(program)
    return Engine(operations), programs


ROWS = {VECTOR: torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}


class LooksAside(nn.Module):
    """Mixes rows of different calls: the classic mistake."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class FlatGradient(nn.Module):
    """Right values, but a gradient that depends on the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + (x - x.detach()) / len(x)


def test_good_operations_pass_and_stay_as_they_are() -> None:
    engine, programs = engine_of(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    for law in (assert_batching_agrees, assert_gradients_agree, assert_order_is_free):
        law(engine, programs, ROWS)
    assert engine.training
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in engine.parameters())


def test_batching_and_order_laws_are_broken() -> None:
    engine, programs = engine_of(LooksAside())
    with pytest.raises(AssertionError) as caught:
        assert_batching_agrees(engine, programs, ROWS)
    text = str(caught.value)
    assert "Law 'batched (depth) = one by one' is broken" in text
    assert "Mismatched elements: 11 / 12" in text
    assert "(up to 1e-10 allowed)" in text
    assert "item ['output']" in text
    with pytest.raises(AssertionError, match="do not depend on other examples' is broken"):
        assert_order_is_free(engine, programs, ROWS)


def test_gradient_law_is_broken() -> None:
    engine, programs = engine_of(FlatGradient())
    assert_batching_agrees(engine, programs, ROWS)
    with pytest.raises(AssertionError, match="gradients batched(?s:.*)'input float32"):
        assert_gradients_agree(engine, programs, ROWS)


def test_the_tolerance_counts() -> None:
    class Nearly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + 1e-6 * len(x))

    engine, programs = engine_of(Nearly())
    assert_batching_agrees(engine, programs, ROWS, tolerance=1e-4)
    with pytest.raises(AssertionError, match="up to 1e-08 allowed"):
        assert_batching_agrees(engine, programs, ROWS, tolerance=1e-8)


def test_inputs_of_several_types_are_cut_by_example() -> None:
    word, pair = TensorType((), torch.int64, "word"), (VECTOR, TensorType(()))
    operations, programs = Operations(), []
    embed = operations.add(nn.Embedding(5, 3), [word], [VECTOR], name="embed")
    scale = operations.add(
        lambda p, v: p[0] * p[1][:, None] + v, [pair, VECTOR], [VECTOR], name="s"
    )
    for words in ([0, 1], [], [2]):
        program = Program()
        for row in range(len(words)):
            embedded = program.call(embed, program.input(word, row))
            program.output(program.call(scale, program.input(pair, 0), embedded))
        programs.append(program)
    given = {"word": torch.tensor([3, 1, 4]), pair: (torch.randn(2, 3), torch.randn(2))}
    for law in (assert_batching_agrees, assert_gradients_agree, assert_order_is_free):
        law(Engine(operations), programs, given)


def test_programs_of_structures() -> None:
    node = Signature("node", (TensorType((2,), tag="input"), VECTOR, VECTOR), (VECTOR,))
    structure = TREE.clone()
    structure.child_slot = torch.tensor([1, 0])
    structure.has_input = torch.tensor([True, False, True])
    program = program_of_structure(node, structure)
    assert program.num_calls == 3
    assert program.num_inputs[program.row_types.index(node.inputs[0])] == 3
    ragged = Signature("node", (VECTOR, Ragged(VECTOR)), (VECTOR,))
    assert program_of_structure(ragged, TREE).depth == 2


class Lopsided(nn.Module):
    """A ragged cell that forgets which rows belong to which node."""

    def forward(self, x: Tensor, children: RaggedRows) -> Tensor:
        return torch.tanh(x + children.rows.sum(0))


def test_cell_law_is_broken() -> None:
    with pytest.raises(AssertionError, match="recorded programs = one by one' (?s:.*)'node'"):
        assert_cell_agrees(Lopsided(), VECTOR, [TREE, TREE], in_channels=3)


class Model(nn.Module):
    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(3, 2), mean

    def forward(self, batch: Any) -> Any:
        rows = self.linear(batch.x[batch.root_index])
        return {"rows": rows - rows.mean(0) if self.mean else rows, "number": batch.root_index * 0}


def trees() -> list[DynTreeData]:
    return [DynTreeData(torch.tensor([[0], [1]]), x=torch.randn(2, 3)) for _ in range(3)]


def test_model_law() -> None:
    assert_model_agrees(Model(mean=False), trees(), Collater())
    with pytest.raises(AssertionError, match="batch = each example alone' (?s:.*)'rows'"):
        assert_model_agrees(Model(mean=True), trees(), Collater())


def test_results_of_another_shape_or_name() -> None:
    class Odd(nn.Module):
        def forward(self, batch: Any) -> Any:
            return self.answer(batch)

    model = Odd()
    model.answer = lambda batch: batch.x.mean(0, keepdim=True)
    with pytest.raises(AssertionError, match="'shape' do not match"):
        assert_model_agrees(model, trees(), Collater())
    model.answer = lambda batch: {str(batch.num_graphs == 1): batch.root_index}
    with pytest.raises(AssertionError, match="keys of the mappings do not match"):
        assert_model_agrees(model, trees(), Collater())


class Sum(nn.Module):
    def forward(self, x: Tensor, children: RaggedRows) -> Tensor:
        return torch.tanh(x + children.sum())


def test_steps_of_structures_and_programs_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Schedule.from_structure(torch.tensor([[0, 1], [1, 2]]), 3)
    monkeypatch.setattr(Schedule, "from_structure", lambda *_, **__: other)
    with pytest.raises(AssertionError, match="step sizes differ"):
        assert_cell_agrees(Sum(), VECTOR, [TREE], in_channels=3)
