"""Constants, zeros, and concatenation."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, builds, message, three_ways


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1.0, 2.0]), np.array([1, 2]), nn.Parameter(torch.ones(2)), np.float32(1)],
)
def test_from_tensor(tensor: Any) -> None:
    block = td.FromTensor(tensor)
    expected = torch.as_tensor(tensor).tolist()
    assert block.eval(None, tolist=True) == expected
    assert block.max_depth(None) == 0
    assert block.tensor is tensor or torch.equal(block.tensor, torch.as_tensor(tensor))


def test_gradients_flow_into_tensors() -> None:
    learned = nn.Parameter(torch.tensor(2.0))
    outside = learned * 3
    three_ways(td.AllOf(td.Scalar(), td.FromTensor(learned)) >> add(), [1.0, 2.0])
    model = td.Compiler.create(td.AllOf(td.Scalar(), td.FromTensor(outside)) >> add())
    model([1.0, 2.0]).output.sum().backward()
    assert learned.grad == 6.0
    assert [p is learned for p in td.Compiler.create(td.FromTensor(learned)).parameters()] == [True]


def test_from_tensor_errors() -> None:
    assert "neither a tensor nor an array" in message(TypeError, td.FromTensor, [1.0])
    missing = nn.UninitializedParameter()
    assert "not known yet" in message(TypeError, td.FromTensor, missing)


@pytest.mark.parametrize(
    "kind",
    [
        td.PyObjectType(),
        (3, td.PyObjectType()),
        td.SequenceType(td.PyObjectType()),
        td.SequenceType((3, td.PyObjectType())),
        td.BroadcastSequenceType(3),
    ],
)
def test_what_has_no_zeros(kind: Any) -> None:
    assert "this type has no zeros" in message(TypeError, td.Zeros, kind)


def test_zeros() -> None:
    kinds = [
        (3, [0.0] * 3),
        (("int64", [2]), (0, [0.0, 0.0])),
        (td.VoidType(), None),
        (td.SequenceType(3), []),
        ((), ()),
    ]
    for kind, expected in kinds:
        assert td.Zeros(kind).eval(None, tolist=True) == expected


def test_concat() -> None:
    scalars = (td.Scalar(), td.Vector(2), td.Scalar()) >> td.Concat()
    builds(scalars, [((1, [2, 3], 4), [1.0, 2.0, 3.0, 4.0])], depth=1)
    rows = (td.Tensor([1, 2]), td.Tensor([2, 2])) >> td.Concat(0)
    builds(rows, [(([[1, 2]], [[3, 4], [5, 6]]), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])])
    columns = (td.Tensor([2, 1]), td.Tensor([2, 2])) >> td.Concat(concat_dim=1)
    builds(columns, [(([[1], [2]], [[3, 4], [5, 6]]), [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]])])
    nested = (td.Vector(1), (td.Vector(1), (td.Vector(1),))) >> td.Concat(flatten=True)
    builds(nested, [(([1], ([2], ([3],))), [1.0, 2.0, 3.0])])


@pytest.mark.parametrize(
    ("items", "arguments", "what"),
    [
        ((), {}, "no tensor to concatenate"),
        (((3, 3), 3), {}, "an item is not a tensor"),
        ((3, 3), {"concat_dim": 1}, "has no axis 1"),
        (([2, 3], [2, 4]), {}, "the other axes differ"),
        ((3, [3, "int32"]), {}, "dtypes differ"),
        ((td.PyObjectType(), 3), {}, "an item is not a tensor"),
        (td.TensorType(()), {}, "a wrong kind of input"),
    ],
)
def test_concat_errors(items: Any, arguments: Any, what: str) -> None:
    assert what in message(TypeError, td.Concat(**arguments).set_input_type, items)
