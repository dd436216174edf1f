"""Blocks that read Python objects, and what they do not accept."""

import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch import blocks as td
from pyg_dynbatch.cli import one_line
from tests.blocks.harness import builds, message, numbers


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_tensors_of_anything(make: Any) -> None:
    builds(td.Vector(2), [([1.5, 2.0], [1.5, 2.0])], depth=0)
    assert td.Vector(2).eval(make([1.5, 2.0]), tolist=True) == [1.5, 2.0]
    assert td.Map(td.Vector(1)).eval(make([[1.5], [2.0]]), tolist=True) == [[1.5], [2.0]]


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "bool", "bfloat16"])
def test_dtypes(dtype: str) -> None:
    found = td.Scalar(dtype).eval(torch.tensor(1, dtype=getattr(torch, dtype)))
    assert found.dtype is getattr(torch, dtype) and found == td.Scalar(dtype).eval(1) == 1


def test_wrong_shape_and_dtype() -> None:
    text = message(ValueError, td.Vector(2).eval, [1.0])
    assert "Root: shape differs" in text and "float32[2]" in text
    text = message(TypeError, (td.Map(td.Scalar("int64")) >> td.Sum()).eval, [1, 0.5])
    assert "Scalar: dtype differs" in text and "got:      float64[], 0.5" in text
    assert "where:    block Root.Map.Scalar" in text
    assert "'a'" in message(TypeError, td.Scalar().eval, "a")
    model = td.Compiler.create(numbers() >> td.Sum())
    assert "where:    example 1, block Root.Map.Scalar" in message(TypeError, model, [[1], [None]])


@pytest.mark.parametrize(
    ("dtype", "data"), [("uint8", 300), ("uint8", -1), ("int32", 2**40), ("int16", np.int64(40000))]
)
def test_integers_beyond_the_dtype(dtype: str, data: Any) -> None:
    model = td.Compiler.create(td.Map(td.Scalar(dtype)) >> td.Sum())
    text = message(ValueError, model, [[1, data]])
    assert "Scalar: a number is out of range" in text
    assert f"expected: {dtype}[], from " in text and f"got:      {data}" in text
    assert "where:    example 0, block Root.Map.Scalar" in text
    assert td.Scalar("uint8").eval(255) == 255 and td.Scalar("bool").eval(1.0)


def test_strings_and_whole_floats() -> None:
    block = td.Map(td.Scalar("int32")) >> td.Map(td.Function(torch.neg))
    found = block.eval([1, "2", 3.0, np.float32(4), "-5"], tolist=True)
    assert found == [-1, -2, -3, -4, 5]
    assert td.Vector(2, "int64").eval(np.array([1.0, 2.0]), tolist=True) == [1, 2]
    assert td.Vector(2, "int64").eval(torch.tensor([1.0, 2.0]), tolist=True) == [1, 2]
    assert td.Map(td.Scalar("int64")).eval([2**60 + 1, 3.0], tolist=True) == [2**60 + 1, 3]
    assert td.Vector(2).eval(["1.5", "1e3"], tolist=True) == [1.5, 1000.0]
    assert td.Scalar("complex64").eval("1+2j") == 1 + 2j
    for bad in ("0.5", 0.5, "one", "", float("nan"), float("inf"), np.nan, 1e300, "9" * 30):
        text = message(TypeError, td.Map(td.Scalar("int32")).eval, [1, "2", bad, 3])
        assert "Scalar: dtype differs" in text and repr(bad) in text
    assert "out of range" in message(ValueError, td.Scalar("uint8").eval, "300")
    assert "out of range" in message(ValueError, td.Scalar("uint8").eval, 300.0)


def test_input_transform() -> None:
    builds(td.InputTransform(len) >> td.Scalar(), [("abc", 3.0)], depth=0)
    assert "py_fn cannot be called" in message(TypeError, td.InputTransform, 3)

    def fails(value: Any) -> Any:
        raise KeyError(value)

    model = td.Compiler.create({"a": td.InputTransform(fails) >> td.Scalar()} >> td.GetItem(0))
    text = message(KeyError, model, [{"a": 1}])
    assert "where:    example 0, block Root.Record['a'].InputTransform" in text


def test_one_hot() -> None:
    builds(td.OneHot(3), [(1, [0.0, 1.0, 0.0]), (0, [1.0, 0.0, 0.0])], depth=0)
    builds(td.OneHot(-2, 0), [(-2, [1.0, 0.0])])
    builds(td.OneHot(1, 3, dtype="int64"), [(2, [0, 1])])
    for bad in ((0,), (3, 3), (3, 1)):
        assert "the range is empty" in message(IndexError, td.OneHot, *bad)
    text = message(KeyError, (td.Map(td.OneHot(2)) >> td.Sum()).eval, [0, 2])
    assert "OneHot: unknown key 2" in text and "Root.Map.OneHot" in text


def test_one_hot_from_list() -> None:
    builds(td.OneHotFromList(["a", "b"]), [("b", [0.0, 1.0])], depth=0)
    builds(td.OneHotFromList(["a", "b"], strict=False), [("c", [0.0, 0.0]), ("a", [1.0, 0.0])])
    assert "unknown key 'c'" in message(KeyError, td.OneHotFromList(["a"]).eval, "c")
    assert "occurs twice" in message(AssertionError, td.OneHotFromList, ["a", "a"])


def test_optional() -> None:
    builds(td.Optional(td.Vector(2)), [([1, 2], [1.0, 2.0]), (None, [0.0, 0.0])], depth=0)
    builds(td.Optional(numbers()), [([1], [1.0]), (None, [])])
    one = td.Optional(td.Scalar(), td.FromTensor(torch.tensor(7.0)))
    builds(one, [(None, 7.0), (1, 1.0)])
    twice = td.Optional({"a": td.Scalar(), "b": numbers()})
    builds(twice, [(None, (0.0, [])), ({"a": 1, "b": [2]}, (1.0, [2.0]))])
    text = message(TypeError, td.Optional, td.Scalar(), td.Zeros(3))
    assert "Optional: the output type differs" in text and "got:      float32[3]" in text
    assert "this type has no zeros" in message(TypeError, td.Optional, td.Identity())


def test_external_rows() -> None:
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    row = td.Map(td.InputRow("x", 2)) >> td.Sum()
    model = td.Compiler.create(row)
    found = model([[0, (0, 2)], [1]], inputs={"x": x}).output
    assert found.tolist() == [[0.0, 2.0], [6.0, 7.0]]
    found.sum().backward()
    assert x.grad is not None and x.grad.sum(1).tolist() == [4.0, 0.0, 0.0, 2.0]
    assert "the row does not exist" in message(IndexError, model, [[-1]], {"x": x})
    model = td.Compiler.create(td.AllOf(*[td.InputRow(f"x{k}", 1) for k in range(3)]))
    rows = {f"x{k}": torch.arange(4.0).view(4, 1) + 10 * k for k in range(3)}
    parts = [part.flatten().tolist() for part in model([1, 0, 0], inputs=rows).output]
    assert parts == [[1, 2, 3], [11, 12, 13], [21, 22, 23]]


def test_records() -> None:
    one = td.Record({"a": td.Scalar()})
    builds(one, [({"a": 1}, (1.0,))])
    ordered = td.Record(OrderedDict([("b", td.Scalar()), ("a", td.Scalar())]))
    builds(ordered, [({"a": 1, "b": 2}, (2.0, 1.0))])
    builds(td.Record([(slice(1, 3), numbers())]), [([1, 2, 3, 4], ([2.0, 3.0],))])
    builds(
        (td.Scalar(), td.Scalar()) >> td.Record((td.Function(torch.neg), td.Identity())),
        [((1, 2), (-1.0, 2.0))],
    )
    builds(td.Record(()), [("anything", ())])
    builds(td.Record({"a": td.Identity(), "b": td.Identity()}), [({"a": 1, "b": "x"}, (1, "x"))])


def test_record_wires_by_key() -> None:
    made = td.Composition()
    with made.scope():
        fields = td.Record({"b": td.Scalar(), "a": td.Scalar("int64")}).reads(made.input)
        made.output.reads(fields["b"], fields["a"])
    builds(made, [({"a": 1, "b": 2}, (2.0, 1))])


def test_record_errors() -> None:
    pair = td.TupleType([], [])
    unordered = td.Record({"a": td.Identity(), "b": td.Identity()})
    assert "without order" in message(RuntimeError, unordered.set_input_type, pair)
    short = td.Record((td.Identity(),))
    assert "wrong number of inputs" in message(TypeError, short.set_input_type, pair)
    assert "type differs" in message(TypeError, td.Record((td.Scalar(),)).set_output_type, pair)
    text = message(KeyError, td.Record({"a": td.Scalar()}).eval, {})
    assert "got:      KeyError: 'a'" in text and "where:    block Root" in text
    one = td.Record({"a": td.Identity()})
    assert "a wrong kind of input" in message(TypeError, one.set_input_type, 3)


def test_all_of() -> None:
    assert td.AllOf().eval("anything") is None
    builds(td.AllOf(td.Scalar()), [(1, (1.0,))])
    builds(td.AllOf(td.Scalar(), td.Scalar("int64"), td.Scalar()), [(1, (1.0, 1, 1.0))])
    shapes = td.AllOf(numbers(), td.Vector(2), td.Zeros(3), td.Void())
    builds(shapes, [([1, 2], ([1.0, 2.0], [1.0, 2.0], [0.0] * 3, None))])
    assert td.AllOf(td.Identity(), td.Identity()).eval(1) == (1, 1)


class OwnError(KeyError):
    """An error class of the user, with its own text."""

    def __str__(self) -> str:
        return f"no {self.args[0]} here"


def test_an_error_in_a_host_function_keeps_its_class_and_gets_a_location() -> None:
    def look_up(value: Any) -> Any:
        if value == "bad":
            raise OwnError(value)
        return 1.0

    inside = td.Map(td.InputTransform(look_up, name="look") >> td.Scalar()) >> td.Sum()
    model = td.Compiler.create(inside)
    for call in (model, model.collate):
        with pytest.raises(OwnError) as caught:
            call([["good"], ["good", "bad"]])
        assert caught.value.__notes__ == ["  where:    example 1, block Root.Map.look"]
        assert one_line(caught.value) == "no bad here where: example 1, block Root.Map.look"
        assert caught.traceback[-1].name == "look_up"
    kept = pickle.loads(pickle.dumps(caught.value))
    assert one_line(kept) == one_line(caught.value), "loader workers send it unchanged"


@pytest.mark.parametrize("bad", [3, "ab", [td.Scalar()], None])
def test_what_is_not_a_set_of_blocks(bad: Any) -> None:
    assert "Record: not a set of blocks" in message(TypeError, td.Record, bad)
    text = message(TypeError, td.OneOf, len, bad)
    assert "OneOf: not a set of blocks" in text and repr(bad) in text
