"""The text of a block, layer or type is the call that makes it."""

import pytest
import torch

from pyg_dynbatch import blocks as td

TEXTS = """
TensorType((2, 3), 'int32')
TupleType(TensorType((3,), 'float32'), SequenceType(PyObjectType()), VoidType())
BroadcastSequenceType(TupleType())
Tensor([2, 1], 'int32')
Scalar('int64', name='age')
Vector(3)
InputRow('x', 2)
InputTransform(len)
OneHot(1, 3, dtype='int64')
OneHotFromList(['a', 'b'], strict=False)
Optional(Scalar(), Zeros('float32'))
Record({'b': Scalar(), 'a': Scalar()})
Record([('b', Scalar())])
Record((Scalar(),))
AllOf(Scalar(), Void(), name='both')
OneOf(len, {1: Scalar(), 2: Length()})
OneOf(len, [('b', Scalar()), ('a', Length())], name='choose')
OneOf(GetItem(0), (Length(),), GetItem(1))
Identity()
Void(name='away')
Metric('m')
Function(add, name='plus')
Function(add, infer_output_type=False)
Segment(add)
Concat(1, True)
Concat(flatten=True, name='join')
FromTensor(tensor([1., 2.]))
Map(Scalar())
Fold(Function(add), Zeros('float32'), name='f')
RNN(Function(add), initial_state_from_input=True)
Reduce(Function(add), Zeros('float32'))
Sum()
Mean(name='m')
Min()
Max()
GetItem(slice(1, None, None))
Slice(start=1, step=2)
Length('int64')
Nth()
Broadcast()
Zip()
Pipe(Zip(), Map(Function(add)))
NGrams(3, name='trigrams')
Composition([Identity()], wires=[('input', 0), ((0, [0, 1], [0, slice(2, None, None)]), 'output')])
ForwardDeclaration(PyObjectType(), TensorType((3,), 'float32'), name='tree', memoize=True)
Layer()
FC(2, activation=None, weight_norm=True, name='fc')
FC(2, activation=tanh, input_keep_prob=0.5)
Embedding(3, 2, trainable=False, mod_inputs=False)
ScopedLayer(tanh)
""".strip().splitlines()
NAMES = {name: getattr(td, name) for name in td.__all__}
NAMES |= {"add": torch.add, "tanh": torch.tanh, "tensor": torch.tensor}


@pytest.mark.parametrize("text", TEXTS)
def test_text_can_be_read_back(text: str) -> None:
    assert repr(eval(text, NAMES)) == text  # noqa: S307 - our own text


def test_text_of_what_is_no_call() -> None:
    tree = td.ForwardDeclaration(name="tree")
    assert repr(td.Map(tree())) == "Map(tree())"
    assert repr(td.Scalar() >> td.Void()) == "Pipe(Scalar(), Void())"
    assert repr(td.Map(td.Scalar(torch.int64))) == "Map(Scalar('int64'))"
