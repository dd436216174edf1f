"""The public laws find a mistake and name it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_dynbatch import testing
from pyg_dynbatch.core import Engine, Operations, Ragged, Recording, Signature, TensorType
from pyg_dynbatch.core.levels import schedule_structure
from pyg_dynbatch.data import DynTreeData
from pyg_dynbatch.loader import Collater
from pyg_dynbatch.nn import RecursiveCell
from tests.core.helpers import SCALAR, VECTOR

TREE = Data(edge_index=torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
LAWS = [testing.assert_batching_agrees, testing.assert_gradients_agree]
LAWS.append(testing.assert_order_is_free)


def engine_of(module: Any) -> tuple[Engine, list[Recording]]:
    """Return an engine with one operation, and two recordings that call it on different rows."""
    operations, recordings = Operations(), []
    signature = operations.add(module, [VECTOR], [VECTOR], name="odd")
    for number in (1.0, 2.0):
        recording = Recording()
        recording.output(recording.call(signature, recording.input(VECTOR, 0)))
        recording.output(recording.call(signature, recording.constant(VECTOR, [number, 0.0, 1.0])))
        recordings.append(recording)
    return Engine(operations), recordings


ROWS = {VECTOR: torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}


def mixing(x: Tensor) -> Tensor:
    """Mix rows of different calls: the classic mistake."""
    return x - x.mean(0)


def scaled_gradient(x: Tensor) -> Tensor:
    """Return correct values with a gradient that depends on the number of rows."""
    return x.detach() + (x - x.detach()) / len(x)


def always_dropping(x: Tensor) -> Tensor:
    """Ignore that the module is in evaluation mode."""
    return nn.functional.dropout(x, 0.5)


def test_correct_operations_pass_and_stay_unchanged() -> None:
    engine, recordings = engine_of(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    for law in LAWS:
        law(engine, recordings, ROWS)
    assert engine.training
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in engine.parameters())


def test_batching_and_order_laws_are_broken() -> None:
    engine, recordings = engine_of(mixing)
    with pytest.raises(AssertionError) as caught:
        testing.assert_batching_agrees(engine, recordings, ROWS)
    text = str(caught.value)
    assert "Law 'values: batched (depth) = one by one' is broken" in text
    assert "Mismatched elements: 11 / 12" in text
    assert "(up to 1e-10 allowed)" in text
    assert "item ['output']" in text
    with pytest.raises(AssertionError, match="do not depend on other examples' is broken"):
        testing.assert_order_is_free(engine, recordings, ROWS)


@pytest.mark.parametrize("law", LAWS)
def test_dropout_in_evaluation_mode_breaks_every_law(law: Any) -> None:
    with pytest.raises(AssertionError, match="is broken"):
        law(*engine_of(always_dropping), ROWS)


def test_gradient_law_is_broken() -> None:
    engine, recordings = engine_of(scaled_gradient)
    testing.assert_batching_agrees(engine, recordings, ROWS)
    with pytest.raises(AssertionError, match="gradients: batched(?s:.*)'input float32"):
        testing.assert_gradients_agree(engine, recordings, ROWS)


def test_the_tolerance_counts() -> None:
    engine, recordings = engine_of(lambda x: x * (1 + 1e-6 * len(x)))
    testing.assert_batching_agrees(engine, recordings, ROWS, tolerance=1e-4)
    with pytest.raises(AssertionError, match="up to 1e-08 allowed"):
        testing.assert_batching_agrees(engine, recordings, ROWS, tolerance=1e-8)


def test_inputs_of_several_types_are_split_by_example() -> None:
    word, pair = TensorType((), torch.int64, "word"), (VECTOR, SCALAR)
    operations, recordings = Operations(), []
    embed = operations.add(nn.Embedding(5, 3), [word], [VECTOR], name="embed")
    scale = operations.add(
        lambda p, v: p[0] * p[1][:, None] + v, [pair, VECTOR], [VECTOR], name="s"
    )
    for words in ([0, 1], [], [2]):
        recording = Recording()
        for row in range(len(words)):
            embedded = recording.call(embed, recording.input(word, row))
            recording.output(recording.call(scale, recording.input(pair, 0), embedded))
        recordings.append(recording)
    given = {"word": torch.tensor([3, 1, 4]), pair: (torch.randn(2, 3), torch.randn(2))}
    for law in LAWS:
        law(Engine(operations), recordings, given)


def test_programs_of_structures() -> None:
    node = Signature("node", (TensorType((2,), tag="input"), VECTOR, VECTOR), (VECTOR,))
    structure = TREE.clone()
    structure.child_slot = torch.tensor([1, 0])
    structure.has_input = torch.tensor([True, False, True])
    recording = testing.recording_of_structure(node, structure)
    assert recording.num_calls == 3
    assert recording.num_inputs[node.inputs[0]] == 3
    ragged = Signature("node", (VECTOR, Ragged(VECTOR)), (VECTOR,))
    assert testing.recording_of_structure(ragged, TREE).depth == 2


class Sum(RecursiveCell):
    """A correct ragged cell, or one that ignores which rows belong to which node."""

    def __init__(self, mixing: bool) -> None:
        super().__init__(3, 3, arity=None)
        self.mixing = mixing

    def step(self, projected: Tensor, children: Any) -> tuple[Tensor]:
        if children is None:
            return (torch.tanh(projected),)
        (total,) = children.sum()
        (rows,) = children.rows
        return (torch.tanh(projected + (rows.sum(0) if self.mixing else total)),)


def test_cell_law_is_broken() -> None:
    with pytest.raises(AssertionError, match="batched .* = one by one' (?s:.*)'node'"):
        testing.assert_cell_agrees(Sum(mixing=True), [TREE, TREE])


def test_steps_of_structures_and_programs_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    testing.assert_cell_agrees(Sum(mixing=False), [TREE])
    other = schedule_structure(torch.tensor([[0, 1], [1, 2]]), 3)
    monkeypatch.setattr(testing, "schedule_structure", lambda *_, **__: other)
    with pytest.raises(AssertionError, match="step sizes: structures = recordings' is broken"):
        testing.assert_cell_agrees(Sum(mixing=False), [TREE])


class Heads(nn.Linear):
    """Classify the roots, by mistake relative to the mean of the batch."""

    def forward(self, batch: Any) -> Any:
        rows = super().forward(batch.x[batch.root_index])
        return {"rows": rows - rows.mean(0), "number": batch.root_index * 0}


def trees() -> list[DynTreeData]:
    return [DynTreeData(torch.tensor([[0], [1]]), x=torch.randn(2, 3)) for _ in range(3)]


def test_model_law_is_broken() -> None:
    with pytest.raises(AssertionError, match="batch = each example alone' (?s:.*)'rows'"):
        testing.assert_model_agrees(Heads(3, 2), trees(), Collater())


def test_results_with_a_different_shape_or_name() -> None:
    model = nn.Module()
    model.forward = lambda batch: batch.x.mean(0, keepdim=True)
    with pytest.raises(AssertionError, match="'shape' do not match"):
        testing.assert_model_agrees(model, trees(), Collater())
    model.forward = lambda batch: {str(batch.num_graphs == 1): batch.root_index}
    with pytest.raises(AssertionError, match="is broken.\nThe keys of the mappings do not match"):
        testing.assert_model_agrees(model, trees(), Collater())
