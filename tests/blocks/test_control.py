"""Choices, pass-through blocks, and metrics."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, builds, message, numbers


def test_one_of_forms() -> None:
    neg = td.Scalar() >> td.Function(torch.neg)
    by_name = td.OneOf(lambda x: x < 0, {True: neg, False: td.Scalar()})
    builds(by_name, [(-2.0, 2.0), (3.0, 3.0)])
    pairs = td.OneOf(len, [(1, td.GetItem(0) >> td.Scalar()), (2, td.Length())])
    builds(pairs, [([5], 5.0), ([5, 6], 2.0)])
    counted = td.OneOf(lambda x: int(x > 0), (td.Scalar(), td.Zeros([])))
    builds(counted, [(-1.0, -1.0), (1.0, 0.0)])
    single = td.OneOf(len, OrderedDict([(1, td.Length())]))
    builds(single, [("a", 1.0)])


def test_keys_without_an_order_keep_the_given_one() -> None:
    length, number = td.Length(), td.Scalar()
    block = td.OneOf(type, {str: length, int: number})
    builds(block, [("abc", 3.0), (5, 5.0)])
    assert block.cases == [length, number]
    mixed = {None: td.Scalar(), "a": td.Scalar(), 1j: td.Scalar(), 2j: td.Scalar()}
    record = td.Record(mixed)
    assert record.children == list(mixed.values())
    builds(record, [({None: 1, "a": 2, 1j: 3, 2j: 4}, (1.0, 2.0, 3.0, 4.0))])


def test_one_of_key_blocks_and_pre_block() -> None:
    key = td.GetItem("kind")
    block = td.OneOf(
        key,
        {"neg": td.Function(torch.neg), "exp": td.Function(torch.exp)},
        pre_block=td.GetItem("x") >> td.Scalar(),
    )
    builds(block, [({"kind": "neg", "x": 2}, -2.0), ({"kind": "exp", "x": 0}, 1.0)], depth=1)
    assert [type(case).__name__ for case in block.cases] == ["Function", "Function"]


def test_one_of_on_tuples() -> None:
    block = td.OneOf(
        td.GetItem(0), {"a": td.GetItem(1), "b": td.GetItem(1) >> td.Function(torch.neg)}
    )
    given = (td.Identity(), td.Scalar()) >> block
    builds(given, [(("a", 1), 1.0), (("b", 1), -1.0)])


@pytest.mark.parametrize("cases", [1, 7])
def test_one_of_many_cases(cases: int) -> None:
    blocks = {n: td.GetItem(n) >> td.Scalar() for n in range(cases)}
    model = td.Compiler.create(td.OneOf(lambda x: x["key"], blocks, pre_block=td.GetItem("rows")))
    keys, rows = sorted({0, cases // 2, cases - 1}), list(range(cases))
    assert model([{"key": key, "rows": rows} for key in keys]).output.tolist() == keys
    assert "unknown key" in message(KeyError, model, [{"key": cases, "rows": rows}])


def test_one_of_more_cases_than_python_parses_in_one_chain() -> None:
    model = td.Compiler.create(td.OneOf(lambda x: x, {n: td.Zeros(1) for n in range(2000)}))
    assert model([0, 1999]).output.tolist() == [[0.0], [0.0]]


def test_one_of_errors() -> None:
    assert "it has no cases" in message(ValueError, td.OneOf, len, {})
    assert "key_fn: py_fn cannot be called" in message(TypeError, td.OneOf, 3, {1: td.Scalar()})
    differ = message(TypeError, td.OneOf, len, {1: td.Scalar(), 2: td.Vector(2)})
    assert "type differs" in differ and "expected: float32[]" in differ
    text = message(TypeError, lambda: td.Scalar() >> td.OneOf(len, {1: td.Identity()}))
    assert "expected: object" in text


@pytest.mark.parametrize("keys", [("a", "a"), (1, True)])
def test_one_of_with_equal_keys(keys: Any) -> None:
    text = message(
        ValueError, td.OneOf, len, [("b", td.Zeros(1)), *((k, td.Zeros(1)) for k in keys)]
    )
    assert "OneOf: a key occurs twice" in text
    assert f"got:      {keys[0]!r}, {keys[1]!r}" in text and "where:    Root" in text


@pytest.mark.parametrize("module", [td.FC(2), torch.nn.Linear(2, 1)])
def test_a_layer_cannot_choose(module: Any) -> None:
    text = message(TypeError, td.OneOf, module, {0: td.Scalar()})
    assert "output" in text and "object, PyObjectType()" in text
    assert "where:    Root[key_fn].Function" in text


def test_unknown_key() -> None:
    inner = td.OneOf(lambda x: x, {"pair": td.Length(), "leaf": td.Length()})
    model = td.Compiler.create(td.Map(inner) >> td.Sum())
    text = message(KeyError, model, [["pair"], ["other"]])
    assert text.startswith("OneOf: unknown key 'other'.\n")
    assert "expected: 'leaf', 'pair'" in text
    assert "where:    example 1, block Root.Map.OneOf" in text


def test_paths_name_the_case_and_the_key_function() -> None:
    inner = td.OneOf(len, {2: td.GetItem(5) >> td.Scalar(), 1: td.Length()})
    text = message(IndexError, (td.Map(inner) >> td.Sum()).eval, ["ab"])
    assert "Root.Map.OneOf[2].GetItem" in text
    bad = td.OneOf(lambda value: 1 // 0, {1: td.Length()})
    text = message(ZeroDivisionError, td.Map(bad).eval, ["a"])
    assert "where:    block Root.OneOf[key_fn].key_fn" in text


def test_identity_and_void() -> None:
    assert td.Identity().eval({"a": 1}) == {"a": 1}
    assert td.Identity().set_output_type(3).input_type == td.TensorType((3,))
    assert td.Void().eval(1) is (td.Scalar() >> td.Void()).eval(1) is None
    assert td.Record(()).eval("x") == ()
    assert td.Record(()).max_depth("x") == td.Void().max_depth(1) == td.Identity().max_depth(1) == 0


def test_metrics_of_different_lengths() -> None:
    block = numbers() >> td.Map(td.Metric("each")) >> td.Void()
    assert block.eval([1, 2]) == (None, {"each": [1.0, 2.0]})
    model = td.Compiler.create({"a": block, "b": td.Vector(2) >> td.Metric("b")} >> td.Void())
    found = model([{"a": [1, 2], "b": [0, 1]}, {"a": [], "b": [2, 3]}, {"a": [3], "b": [4, 5]}])
    assert found.metric_tensors["each"].tolist() == [1.0, 2.0, 3.0]
    assert found.metric_examples["each"].tolist() == [0, 0, 2]
    assert found.metric_tensors["b"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert found.output is None and found.output_tensors == []


def test_metric_labels() -> None:
    block = td.Map((td.Scalar(), td.Identity()) >> td.Metric("m")) >> td.Void()
    assert block.eval([(1, "a"), (2, {"b": 1})], tolist=True)[1] == {
        "m": [(1.0, "a"), (2.0, {"b": 1})]
    }
    model = td.Compiler.create(block)
    found = model([[(1, "a")], [], [(2, "b"), (3, None)]])
    assert found.metric_labels == {"m": ["a", "b", None]}
    assert found.metric_tensors["m"].tolist() == [1.0, 2.0, 3.0]


def test_metrics_without_values_and_in_two_positions() -> None:
    model = td.Compiler.create(td.Map(td.Vector(2, "int64") >> td.Metric("m")) >> td.Void())
    found = model([[], []])
    values = found.metric_tensors["m"]
    assert values.shape == (0, 2) and values.dtype is torch.int64
    assert found.metric_examples["m"].numel() == 0
    more = td.Scalar() >> td.Function(lambda x: x + 1) >> td.Metric("m")
    assert td.AllOf(td.Scalar() >> td.Metric("m"), more).eval(1.0)[1] == {"m": [1.0, 2.0]}


def test_metric_errors() -> None:
    assert "name is not a string" in message(TypeError, td.Metric, 3)
    for kind in ((3, 3), (3, td.PyObjectType(), 3), (td.PyObjectType(), 3)):
        text = message(TypeError, td.Metric("m").set_input_type, kind)
        assert "neither a tensor nor a pair" in text
    assert "a wrong kind of input" in message(TypeError, lambda: numbers() >> td.Metric("m"))
    two = td.AllOf(td.Scalar() >> td.Metric("m"), td.Scalar("int64") >> td.Metric("m"))
    assert "metric 'm' is used with two types" in message(TypeError, two.eval, 1)


def test_gradients_stop_nowhere() -> None:
    x = torch.nn.Parameter(torch.tensor(2.0))
    block = td.AllOf(td.Scalar(), td.FromTensor(x)) >> add()
    result = td.Compiler.create(block >> td.AllOf(td.Identity(), td.Metric("m")))([1.0, 2.0])
    (result.output[0].sum() + result.metric_tensors["m"].sum()).backward()
    assert x.grad == pytest.approx(4.0)
