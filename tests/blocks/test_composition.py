"""Wired graphs, pipes, and what is wrong with wires."""

import copy
import pickle
import sys
from enum import Enum, IntEnum, StrEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, builds, message, numbers, wired


def diamond() -> td.Composition:
    made = td.Composition(name="diamond")
    with made.scope():
        x = td.Scalar().reads(made.input)
        left, right = td.Function(torch.neg).reads(x), td.Function(torch.exp).reads(x)
        made.output.reads(add().reads(left, right))
    return made


def test_diamond() -> None:
    builds(diamond(), [(0.0, 1.0), (1.0, 1.7182818)], depth=2)


def test_nested_scopes() -> None:
    outer, inner = td.Composition(), td.Composition()
    with outer.scope():
        x = td.Scalar().reads(outer.input)
        with inner.scope():
            inner.output.reads(add().reads(inner.input[0], inner.input[1]))
        inner.reads(x, x)
        outer.output.reads(td.Function(torch.neg).reads(inner))
    builds(outer, [(2.0, -4.0)], depth=2)


def test_children_are_sorted_by_what_they_need() -> None:
    made = td.Composition()
    b, a = add(), td.Scalar()
    made.connect((a, a), b)
    made.connect(b, made.output)
    made.connect(made.input, a)
    builds(made, [(3.0, 6.0)], depth=1)


def test_several_outputs_and_items() -> None:
    def wire(made: td.Composition) -> Any:
        pair = td.Record((td.Scalar(), td.Scalar("int64"))).reads(made.input)
        return pair[1], pair[0], pair

    builds(wired(wire), [((1, 2), (2, 1.0, (1.0, 2)))])
    pairs = wired(lambda made: add().reads(td.Map((td.Scalar(), td.Scalar())).reads(made.input)[1]))
    builds(pairs, [([(1, 2), (3, 4)], 7.0)])


def test_slices_and_reading_nothing() -> None:
    three = td.AllOf(td.Scalar(), td.Scalar(), td.Scalar("int64"))
    builds(wired(lambda made: three.reads(made.input)[:2]), [(4, (4.0, 4.0))])
    constant = wired(lambda made: td.FromTensor(torch.ones(1)).reads())
    assert constant.eval("anything", tolist=True) == [1.0]

    def wire(made: td.Composition) -> Any:
        pair = td.AllOf(td.Identity(), td.Identity(), td.Length()).reads(made.input)[:2]
        return td.GetItem(1).reads(pair), td.GetItem(0).reads(made.input[1:])

    assert wired(wire).eval([1, 2]) == ([1, 2], 2)


Plain = Enum("Plain", {"KEY": 1})
Text = StrEnum("Text", {"KEY": "key"})
Number = IntEnum("Number", {"KEY": 1})


@pytest.mark.parametrize("key", [Plain.KEY, Text.KEY, Number.KEY, None, True, "a", (1, 2), 1.5])
def test_keys_of_any_kind(key: Any) -> None:
    made = wired(lambda made: td.Scalar().reads(td.Identity().reads(made.input)[key]))
    for block in (made, td.GetItem(key) >> td.Scalar(), td.Record({key: td.Scalar()})):
        found = td.Compiler.create(block)([{key: 3.0}]).output
        assert found[0] == 3.0


def test_items_of_host_objects_and_sequences() -> None:
    made = wired(lambda made: numbers().reads(made.input["x"])[1])
    builds(made, [({"x": [5, 6]}, 6.0)])


def test_void_and_constants_inside() -> None:
    def wire(made: td.Composition) -> Any:
        x = td.Scalar().reads(made.input)
        td.AllOf(td.Metric("m"), td.AllOf(td.Void(), td.Void())).reads(x)
        return add().reads(x, td.FromTensor(torch.tensor(2.0)))

    assert wired(wire).eval(1.0) == (3.0, {"m": [1.0]})


def test_no_output_must_be_intended() -> None:
    made = td.Composition().set_output_type(td.VoidType())
    with made.scope():
        td.Metric("m").reads(td.Scalar().reads(made.input))
    assert made.eval(1.0) == (None, {"m": [1.0]})
    made = td.Composition()
    with made.scope():
        td.Void().reads(td.Scalar().reads(made.input))
    for _ in range(2):
        text = message(TypeError, made.eval, 1.0)
        assert "the output is not connected" in text and "td.VoidType()" in text
        made.set_output_type("float32")


def test_items_that_are_not_there() -> None:
    def read(make: Any, key: Any) -> None:
        wired(lambda made: make().reads(made.input)[key])

    pair = lambda: td.AllOf(td.Scalar(), td.Scalar())  # noqa: E731
    record = lambda: td.Record({"a": td.Scalar()})  # noqa: E731
    for make, key, what in (
        (pair, 2, "2 items"), (pair, -3, "2 items"), (pair, "a", "2 items"),
        (record, "b", "1 items"), (td.Scalar, 0, "float32[]"), (td.Void, 0, "nothing"),
    ):  # fmt: skip
        text = message(TypeError, read, make, key)
        assert "the item does not exist" in text and what in text and "where:    Root" in text
        assert repr(key) in text


def test_unused_output() -> None:
    def wire(made: td.Composition) -> Any:
        x = td.Scalar().reads(made.input)
        td.Function(torch.neg).reads(x)
        return x

    text = message(TypeError, wired(wire).eval, 1.0)
    assert "the output of Function is unused" in text and "where:    Root" in text


def test_circle() -> None:
    made = td.Composition()
    a, b, c = td.Identity(), td.Identity(), td.Identity()
    assert "form a cycle" in message(ValueError, made.connect, a, a)
    made.connect(a, b)
    made.connect((b, made.input), c)
    assert "form a cycle" in message(ValueError, made.connect, b, a)
    assert "form a cycle" in message(ValueError, made.connect, c[0], a)


def test_long_chains_are_wired_in_linear_time() -> None:
    """The Python calls of wiring grow with the wires, not with their square."""

    def calls_of(stages: int) -> int:
        made, calls = td.Composition(), 0

        def count(frame: Any, event: str, given: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            with made.scope():
                x = td.Scalar().reads(made.input)
                for _ in range(stages):
                    x = td.Identity().reads(x)
                made.output.reads(x)
        finally:
            sys.setprofile(None)
        return calls

    assert calls_of(80) < 2.2 * calls_of(40)


def test_invalid_connections() -> None:
    made, other, target = td.Composition(), td.Composition(), td.Scalar()
    made.connect(made.input, target)
    foreign = "of a different composition is used"
    for source, sink, what in (
        (made.input, target, "the input of Scalar is connected already"),
        (other.input, made.output, foreign),
        (made.input, other.output, foreign),
        (made.output, td.Identity(), "is read"),
        (td.Scalar(), made.input, "is written"),
    ):
        assert what in message(ValueError, made.connect, source, sink)


def test_scopes_must_not_overlap() -> None:
    one, other = td.Composition().scope(), td.Composition().scope()
    one.__enter__(), other.__enter__()
    assert "scopes overlap" in message(AssertionError, one.__exit__, None, None, None)
    other.__exit__(None, None, None)
    text = message(AssertionError, td.Scalar().reads, td.Scalar())
    assert "Scalar.reads: used outside a scope" in text


def test_wrong_number_of_inputs_and_outputs() -> None:
    made = td.Composition().set_output_type((2, 2))
    with made.scope():
        x = td.Scalar().reads(made.input)
        text = message(TypeError, add().reads, x, x, x)
        assert "cannot be called with (float32[], float32[], float32[])" in text
        assert "type differs" in message(
            TypeError, made.output.reads, td.Vector(2).reads(made.input)
        )


def test_types_run_backwards() -> None:
    made = td.Composition()
    with made.scope():
        x, y = td.Identity().reads(made.input), td.Identity()
        y.reads(x)
        made.output.reads(y)
    made.set_output_type(3)
    assert made.input_type == x.input_type == td.TensorType((3,))


def test_mismatch_when_wired_and_where() -> None:
    inner = td.Vector(3) >> td.Function(torch.neg)
    model = {"a": td.Map(inner, name="each")} >> td.Record([("a", td.Sum())])
    other = td.Record([("a", td.Function(torch.exp).set_input_type(2))])
    text = message(TypeError, lambda: model >> other)
    assert "expected: (float32[2],)" in text and "got:      (float32[3],)" in text
    assert "where:    Root.Record#3" in text


def test_pipes() -> None:
    assert isinstance(td.Pipe(), td.Identity)
    block = td.Scalar()
    assert td.Pipe(block) is block
    assert td.Pipe(td.Identity(), block, td.Identity()) is block
    whole = td.Pipe(td.Scalar(), td.Function(torch.neg)) >> td.Function(torch.exp)
    assert [type(part).__name__ for part in whole.children] == ["Scalar", "Function", "Function"]
    builds(whole, [(0.0, 1.0)], depth=2)
    typed = td.Identity().set_input_type(3) >> td.Function(torch.neg)
    assert typed.input_type == td.TensorType((3,))


def test_lifting() -> None:
    linear = nn.Linear(2, 1)
    for block_like, kind in [
        ({"a": td.Scalar()}, td.Record),
        ([("a", td.Scalar())], td.Record),
        ((td.Scalar(), td.Scalar()), td.Record),
        (linear, td.Function),
        (td.FC(2), td.Function),
        (torch.ones(2), td.FromTensor),
        (np.ones(2), td.FromTensor),
    ]:
        assert type(td.convert_to_block(block_like)) is kind
    assert "cannot be turned into a block" in message(TypeError, td.convert_to_block, 3)
    assert "cannot be turned" in message(TypeError, lambda: td.Scalar() >> len)
    builds({"a": td.Scalar()} >> td.GetItem(0), [({"a": 1}, 1.0)])
    assert (np.ones(2) >> td.Function(torch.neg)).eval(None, tolist=True) == [-1, -1]
    assert (torch.ones(2) >> td.Function(torch.neg)).eval(None, tolist=True) == [-1, -1]
    assert (td.Vector(2) >> linear).eval([0, 0]).shape == (1,)


def test_one_parent() -> None:
    block = td.Scalar(name="mine")
    td.Map(block)
    text = message(TypeError, td.Map, block)
    assert "mine: already a child of Map" in text and "sharing" not in text
    assert "Root.mine" in text
    given = td.Block([td.Scalar()], 2, 3, "in Fold's order")
    assert given.name == "in Fold's order" and given.output_type == td.TensorType(3)


def test_blocks_have_no_items_and_no_truth_value() -> None:
    assert "not iterable" in message(TypeError, iter, td.Scalar())
    made = td.Composition()
    with made.scope():
        scalar = td.Scalar().reads(made.input)
        for wired in (scalar, made.input, made.input[0]):
            text = message(TypeError, lambda wired=wired: 1 if wired else 2)
            assert "used as a truth value while blocks are wired" in text and "td.OneOf" in text


def test_the_text_of_a_wired_graph_makes_it() -> None:
    names = {name: getattr(td, name) for name in td.__all__}
    names |= {"neg": torch.neg, "exp": torch.exp, "add": torch.add}
    made = eval(repr(diamond()), names)  # noqa: S307 - our own text
    assert repr(made) == repr(diamond()) and made.eval(1.0) == pytest.approx(1.7182818)


def test_copies() -> None:
    model = diamond() >> td.Function(nn.Identity())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.eval(1.0) == model.eval(1.0)
