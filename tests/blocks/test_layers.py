"""Layers: values, errors, sharing, copies."""

import copy
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import builds, three_ways
from tests.core.helpers import message


def test_fc_is_a_linear_map_and_an_activation() -> None:
    layer = td.FC(2, initializer=nn.init.ones_)
    builds(td.Vector(3) >> layer, [([1, 2, 3], [6.0, 6.0]), ([-1, -2, -3], [0.0, 0.0])], depth=1)
    linear = td.FC(2, activation=None, initializer=nn.init.ones_)
    builds(td.Vector(3) >> linear, [([-1, -2, -3], [-6.0, -6.0])])
    assert layer.output_size == 2 and layer.weights.shape == (2, 3) and layer.bias.shape == (2,)
    three_ways(td.Map(td.Vector(3) >> td.FC(4, torch.tanh)) >> td.Sum(), [[[1, 2, 3]], []])


def test_a_layer_that_reads_twice_shares_its_weights() -> None:
    made, layer = td.Composition(), td.FC(2)
    with made.scope():
        one, two = (layer.reads(td.Vector(3).reads(made.input)) for _ in range(2))
        made.output.reads(one, two)
    first, second = made.eval([1, 2, 3])
    assert torch.equal(first, second) and first.shape == (2,)


def test_initial_weights_of_fc_have_the_deviation_of_their_activation() -> None:
    relu6 = nn.functional.relu6
    for activation, scale in ((torch.relu, 1.43), (relu6, 1.43), (torch.tanh, 1.15), (None, 1.0)):
        layer = td.FC(400, activation)
        layer.build(300)
        bound = scale * (3 / 300) ** 0.5
        assert layer.weights.abs().max() <= bound
        assert layer.weights.std().item() == pytest.approx(scale / 300**0.5, rel=0.02)
    other = td.FC(100, torch.sigmoid)
    other.build(100)
    assert other.weights.abs().max() <= 0.02 and torch.equal(other.bias, torch.zeros(100))


def test_fc_weight_norm_and_normalization() -> None:
    layer = td.FC(2, activation=None, weight_norm=True)
    three_ways(td.Vector(3) >> layer, [[1, 2, 3], [0, 1, 0]])
    assert layer.scales.tolist() == [1.0, 1.0]
    torch.testing.assert_close(layer.weights.norm(dim=1), layer.scales)
    options = {"initializer": nn.init.ones_, "normalization_fn": torch.neg}
    builds(td.Vector(1) >> td.FC(2, **options), [([-1], [1.0, 1.0])])
    builds(td.Vector(1) >> td.FC(2, activation=None, **options), [([1], [1.0, 1.0])])


@pytest.mark.parametrize(
    "make", [lambda given: td.FC(3, initializer=given), partial(td.Embedding, 3, 2)]
)
def test_initial_weights_are_given_filled_or_returned(make: Any) -> None:
    wanted = torch.arange(6.0).view(3, 2)

    def first_weights(given: Any) -> Tensor:
        layer = make(given)
        layer.build(2 if isinstance(layer, td.FC) else "int64")
        return layer.weights

    ways = (wanted, wanted.numpy(), lambda table: wanted, lambda table: table.copy_(wanted))
    for given in (*ways, lambda table: (table.copy_(wanted), None)[1]):
        found = first_weights(given)
        assert torch.equal(found, wanted) and found.data_ptr() != wanted.data_ptr()
    text = message(ValueError, first_weights, lambda table: torch.ones(2, 2))
    assert "the initial weights have a different shape" in text and "[3, 2]" in text
    text = message(ValueError, first_weights, lambda table: None)
    assert "the initial weights are not all set" in text and "6 of 6 entries" in text


def test_dropout_of_fc_draws_per_call() -> None:
    layer = td.FC(50, activation=None, initializer=nn.init.ones_, output_keep_prob=0.5)
    model = td.Compiler(td.Vector(1) >> layer)
    batch = model.collate([[1.0]] * 3)
    assert batch.steps[0].size == 3, "equal calls draw different numbers"
    assert set(model(batch).output.unique().tolist()) == {0.0, 2.0}
    model.eval()
    assert set(model(batch).output.unique().tolist()) == {1.0}
    entrance = td.FC(1, activation=None, initializer=nn.init.ones_, input_keep_prob=0.5)
    found = td.Compiler(td.Vector(64) >> entrance)([[1.0] * 64]).output
    assert 0 < found < 128


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_embedding_reads_rows_modulo_its_size(dtype: str) -> None:
    table = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    layer = td.Embedding(3, 2, initializer=torch.tensor(table))
    builds(td.Scalar(dtype) >> layer, [(1, [3.0, 4.0]), (5, [5.0, 6.0])], depth=1)
    if dtype != "uint8":
        again = td.Scalar(dtype) >> td.Embedding(3, 2, initializer=torch.tensor(table))
        assert again.eval(-4, tolist=True) == [3.0, 4.0]


def test_embedding_options() -> None:
    fixed = td.Embedding(3, 2, trainable=False)
    assert not fixed.weights.requires_grad
    assert td.Embedding(3, 2, nn.init.ones_).weights.unique().tolist() == [1.0]
    strict = td.Scalar("int64") >> td.Embedding(3, 2, mod_inputs=False)
    assert strict.eval(2).shape == (2,)


def test_only_an_index_that_is_read_must_be_in_range() -> None:
    node = td.Composition()
    with node.scope():
        number = td.Scalar("int64").reads(td.GetItem(0).reads(node.input))
        found = td.Embedding(5, 1, mod_inputs=False)
        case = td.OneOf(td.GetItem(0), {True: td.GetItem(1) >> found, False: td.Zeros(1)})
        node.output.reads(case.reads(td.GetItem(1).reads(node.input), number))
    model = td.Compiler(node)
    assert model([(7, False)]).output.tolist() == [[0.0]]
    assert "out of range" in message(IndexError, model, [(7, True)])


def test_a_shared_layer_batches_together() -> None:
    layer = td.FC(3, name="shared")
    block = {"a": td.Vector(3) >> layer, "b": td.Vector(3) >> layer}
    model = td.Compiler(block)
    stats = model.collate([{"a": [1, 2, 3], "b": [4, 5, 6]}] * 2).stats()
    assert stats.widths == (2,) and len(list(model.parameters())) == 2
    both = td.AllOf(*(td.Scalar() >> td.Function(torch.tanh) for _ in range(2)))
    assert td.Compiler(both).collate([1.0, 2.0]).stats().steps == 1


def test_operations_are_named_after_what_is_called() -> None:
    block = td.Vector(2) >> td.ScopedLayer(nn.Linear(2, 2)) >> td.FC(2) >> nn.Tanh()
    model = td.Compiler(block >> td.Function(torch.neg, name="minus"))
    names = [s.name for s in model.engine.operations.signatures]
    assert names == ["linear", "fc", "tanh", "minus"]


def test_scoped_layer() -> None:
    assert td.ScopedLayer(nn.GRUCell(2, 3)).state_size == 3
    assert td.ScopedLayer(nn.GRUCell(2, 3)).output_size == 3
    plain = td.ScopedLayer(torch.neg)
    assert plain.state_size is None and plain.output_size is None and plain.state_type is None
    builds(td.Scalar() >> plain, [(1, -1.0)])


def test_layers_lift() -> None:
    layer = td.FC(2)
    block: Any = layer >> td.FC(1)
    assert [type(part).__name__ for part in block.children] == ["Function", "Function"]
    assert isinstance(td.Vector(3) >> td.FC(2), td.Block)
    for constant in (np.ones(3, np.float32), torch.ones(3)):
        lifted: Any = constant >> td.FC(2, initializer=nn.init.ones_)
        assert lifted.eval(None, tolist=True) == [3.0, 3.0]


def test_a_layer_is_called_with_rows() -> None:
    layer = td.FC(2)
    assert layer(torch.ones(4, 3)).shape == (4, 2)
    with pytest.raises(TypeError, match="differ in dtype"):
        layer(torch.ones(4, 3).double())
    assert layer.input_type == td.TensorType((3,))
    assert layer.double()(torch.ones(4, 3).double()).dtype is torch.float64
    assert td.Embedding(5, 2)(torch.tensor([1, 2])).shape == (2, 2)


def test_names_are_unique() -> None:
    assert td.create_variable_scope("scope") == "scope"
    assert td.create_variable_scope("scope") == "scope_1"
    assert td.FC(2, name="mine").name == "mine"


def test_copies_give_the_same_with_weights_of_their_own() -> None:
    model = td.Compiler(td.Map(td.Vector(2) >> td.FC(3)) >> td.Sum())
    examples = [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]]
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(examples).output, model(examples).output)
        assert not set(again.parameters()) & set(model.parameters())
