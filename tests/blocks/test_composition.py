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
from tests.blocks.harness import add, builds, numbers, wired


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


def test_types_run_backwards() -> None:
    made = td.Composition()
    with made.scope():
        x, y = td.Identity().reads(made.input), td.Identity()
        y.reads(x)
        made.output.reads(y)
    made.set_output_type(3)
    assert made.input_type == x.input_type == td.TensorType((3,))


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
    builds({"a": td.Scalar()} >> td.GetItem(0), [({"a": 1}, 1.0)])
    assert (np.ones(2) >> td.Function(torch.neg)).eval(None, tolist=True) == [-1, -1]
    assert (torch.ones(2) >> td.Function(torch.neg)).eval(None, tolist=True) == [-1, -1]
    assert (td.Vector(2) >> linear).eval([0, 0]).shape == (1,)


def test_blocks_take_arguments_in_the_order_of_fold() -> None:
    given = td.Block([td.Scalar()], 2, 3, "in Fold's order")
    assert given.name == "in Fold's order" and given.output_type == td.TensorType(3)


def test_the_text_of_a_wired_graph_makes_it() -> None:
    names = {name: getattr(td, name) for name in td.__all__}
    names |= {"neg": torch.neg, "exp": torch.exp, "add": torch.add}
    made = eval(repr(diamond()), names)  # noqa: S307 - our own text
    assert repr(made) == repr(diamond()) and made.eval(1.0) == pytest.approx(1.7182818)


def test_copies() -> None:
    model = diamond() >> td.Function(nn.Identity())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.eval(1.0) == model.eval(1.0)
