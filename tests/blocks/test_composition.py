"""Wired graphs, pipes, and what is wrong with wires."""

import copy
import cProfile
import pickle
import pstats
from enum import Enum, IntEnum, StrEnum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, builds, numbers, wired


def neg() -> td.Block:
    return td.Function(torch.neg)


def diamond(made: td.Composition) -> Any:
    x = td.Scalar().reads(made.input)
    return add().reads(neg().reads(x), td.Function(torch.exp).reads(x))


def nested(outer: td.Composition) -> Any:
    x, inner = td.Scalar().reads(outer.input), td.Composition()
    with inner.scope():
        inner.output.reads(add().reads(inner.input[0], inner.input[1]))
    return neg().reads(inner.reads(x, x))


def several_outputs(made: td.Composition) -> Any:
    pair = td.Record((td.Scalar(), td.Scalar("int64"))).reads(made.input)
    return pair[1], pair[0], pair


def slices_of_objects(made: td.Composition) -> Any:
    pair = td.AllOf(td.Identity(), td.Identity(), td.Length()).reads(made.input)[:2]
    return td.GetItem(1).reads(pair), td.GetItem(0).reads(made.input[1:])


def void_and_constants(made: td.Composition) -> Any:
    x = td.Scalar().reads(made.input)
    td.AllOf(td.Metric("m"), td.AllOf(td.Void(), td.Void())).reads(x)
    return add().reads(x, td.FromTensor(torch.tensor(2.0)))


def connected_in_any_order(made: td.Composition) -> None:
    b, a = add(), td.Scalar()
    made.connect((a, a), b)
    made.connect(b, made.output)
    made.connect(made.input, a)


# How blocks are wired, inputs with their values, and the depth of the first.
WIRES: list[Any] = [
    (diamond, [(0.0, 1.0), (1.0, 1.7182818)], 2),
    (nested, [(2.0, -4.0)], 2),
    (connected_in_any_order, [(3.0, 6.0)], 1),
    (several_outputs, [((1, 2), (2, 1.0, (1.0, 2)))]),
    (slices_of_objects, [([1, 2], ([1, 2], 2))]),
    (lambda made: add().reads(td.Map((td.Scalar(), td.Scalar())).reads(made.input)[1]),
     [([(1, 2), (3, 4)], 7.0)]),
    (lambda made: td.AllOf(td.Scalar(), td.Scalar(), td.Scalar("int64")).reads(made.input)[:2],
     [(4, (4.0, 4.0))]),
    (lambda made: td.FromTensor(torch.ones(1)).reads(), [("anything", [1.0])]),
    (lambda made: numbers().reads(made.input["x"])[1], [({"x": [5, 6]}, 6.0)]),
    (void_and_constants, [(1.0, (3.0, {"m": [1.0]}))]),
]  # fmt: skip


@pytest.mark.parametrize("case", WIRES, ids=lambda case: case[0].__name__)
def test_wired_graphs_give_what_is_expected(case: Any) -> None:
    wire, *wanted = case
    builds(wired(wire), *wanted)


Plain = Enum("Plain", {"KEY": 1})
Text = StrEnum("Text", {"KEY": "key"})
Number = IntEnum("Number", {"KEY": 1})


@pytest.mark.parametrize("key", [Plain.KEY, Text.KEY, Number.KEY, None, True, "a", (1, 2), 1.5])
def test_keys_of_any_kind(key: Any) -> None:
    made = wired(lambda made: td.Scalar().reads(td.Identity().reads(made.input)[key]))
    for block in (made, td.GetItem(key) >> td.Scalar(), td.Record({key: td.Scalar()})):
        found = td.Compiler(block)([{key: 3.0}]).output
        assert found[0] == 3.0


def test_no_output_must_be_intended() -> None:
    made = td.Composition().set_output_type(td.VoidType())
    with made.scope():
        td.Metric("m").reads(td.Scalar().reads(made.input))
    assert made.eval(1.0) == (None, {"m": [1.0]})


def test_long_chains_are_wired_in_linear_time() -> None:
    """The Python calls of wiring grow with the wires, not with their square."""

    def chain(stages: int, made: td.Composition) -> Any:
        x = td.Scalar().reads(made.input)
        for _ in range(stages):
            x = td.Identity().reads(x)
        return x

    def calls_of(stages: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(wired, partial(chain, stages))
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert calls_of(80) < 2.2 * calls_of(40)


def test_types_run_backwards() -> None:
    made = wired(lambda made: td.Identity().reads(td.Identity().reads(made.input)))
    made.set_output_type(3)
    assert made.input_type == made.children[0].input_type == td.TensorType((3,))


def test_pipes_of_pipes_are_one_pipe() -> None:
    assert isinstance(td.Pipe(), td.Identity)
    block = td.Scalar()
    assert td.Pipe(block) is block
    assert td.Pipe(td.Identity(), block, td.Identity()) is block
    whole = td.Pipe(td.Scalar(), td.Function(torch.neg)) >> td.Function(torch.exp)
    assert [type(part).__name__ for part in whole.children] == ["Scalar", "Function", "Function"]
    builds(whole, [(0.0, 1.0)], depth=2)
    typed = td.Identity().set_input_type(3) >> td.Function(torch.neg)
    assert typed.input_type == td.TensorType((3,))


def test_records_modules_and_tensors_become_blocks() -> None:
    linear = nn.Linear(2, 1)
    records = {"a": td.Scalar()}, [("a", td.Scalar())], (td.Scalar(), td.Scalar())
    kinds = {td.Record: records, td.Function: (linear, td.FC(2))}
    for kind, given in {**kinds, td.FromTensor: (torch.ones(2), np.ones(2))}.items():
        assert {type(td.convert_to_block(block_like)) for block_like in given} == {kind}
    builds({"a": td.Scalar()} >> td.GetItem(0), [({"a": 1}, 1.0)])
    for constant in (np.ones(2), torch.ones(2)):
        assert (constant >> neg()).eval(None, tolist=True) == [-1, -1]  # type: ignore[operator]
    assert (td.Vector(2) >> linear).eval([0, 0]).shape == (1,)


def test_blocks_take_arguments_in_the_order_of_fold() -> None:
    given = td.Block([td.Scalar()], 2, 3, "in Fold's order")
    assert given.name == "in Fold's order" and given.output_type == td.TensorType(3)


def test_the_text_of_a_wired_graph_makes_it() -> None:
    names = {name: getattr(td, name) for name in td.__all__}
    names |= {"neg": torch.neg, "exp": torch.exp, "add": torch.add}
    made = eval(text := repr(wired(diamond)), names)  # noqa: S307 - our own text
    assert repr(made) == text and made.eval(1.0) == pytest.approx(1.7182818)


def test_copies_give_the_same() -> None:
    model = wired(diamond) >> td.Function(nn.Identity())
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.eval(1.0) == model.eval(1.0)
