"""Compiled blocks: as modules, in loaders, in drawings."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, is_list, numbers
from tests.core.helpers import message


def sentence() -> td.Block:
    """A recursive model whose functions can be pickled."""
    tree = td.ForwardDeclaration(td.PyObjectType(), 4, name="tree")
    join = td.Concat() >> td.FC(4, torch.tanh)
    pair = td.Record((tree(), tree())) >> join
    leaf = td.Scalar("int64") >> td.Embedding(10, 4)
    tree.resolve_to(td.OneOf(is_list, {True: pair, False: leaf}))
    score = td.FC(3, activation=None) >> td.AllOf(td.Identity(), td.Metric("scores"))
    return tree.target >> score >> td.GetItem(0)


TREES: list[Any] = [[1, [2, 3]], 4, [[1, 1], [2, [3, 4]]], [5, 6]]


def test_a_compiler_is_a_module_of_the_weights_of_its_blocks() -> None:
    model = td.Compiler(sentence())
    result = model(TREES)
    assert result.output.shape == (4, 3) and result.output_tensors[0] is result.output
    assert torch.equal(result.metric_tensors["scores"], result.output)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) == 5
    again = td.Compiler(sentence())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(TREES).output, result.output)
    assert model.double()(TREES).output.dtype is torch.float64
    assert "OneOf" in repr(model) and model.root.output_type == td.TensorType((3,))


def test_the_name_of_fold() -> None:
    model = td.Compiler.create(sentence(), 2)
    assert type(model) is td.Compiler and model([4]).output.shape == (1, 3)
    assert model.collate.max_depth == 2


def test_equal_leaves_are_computed_once() -> None:
    model = td.Compiler(td.Map(td.OneHot(3) >> nn.Linear(3, 2)) >> td.Sum())
    batch = model.collate([[0, 1, 0, 0], [1, 1, 2]])
    assert batch.steps[0].size == 3


def test_the_depth_of_an_example_is_limited() -> None:
    model = td.Compiler(sentence(), max_depth=5)
    assert model.max_depth(TREES[0]) == 6
    text = message(AssertionError, model, [4, TREES[0]])
    assert "deeper than max_depth" in text and "example 1" in text
    assert td.Compiler(td.Scalar()).max_depth(1) == 0


def test_loaders_with_and_without_workers_give_the_same() -> None:
    model = td.Compiler(sentence())
    wanted = model(TREES).output
    for workers in (0, 2):
        loader = DataLoader(TREES, batch_size=2, collate_fn=model.collate, num_workers=workers)
        batches = list(loader)
        assert [len(batch) for batch in batches] == [2, 2]
        found = torch.cat([model(batch).output for batch in batches])
        torch.testing.assert_close(found, wanted)


def test_tracer_has_no_parameters() -> None:
    tracer = td.Compiler(sentence()).tracer
    text = pickle.dumps(tracer)
    assert b"Parameter" not in text and b"torch.nn" not in text
    again = pickle.loads(text)
    assert again(TREES[0]).code.tolist() == tracer(TREES[0]).code.tolist()
    assert "operations" in repr(tracer)


def test_examples_traced_ahead_give_the_same() -> None:
    model = td.Compiler(sentence())
    batch = model.collate(TREES)
    wanted = model(batch).output
    assert batch.to("cpu").num_examples == len(batch) == 4 and "4 examples" in repr(batch)
    assert torch.equal(model(pickle.loads(pickle.dumps(batch))).output, wanted)
    traced = [model.tracer(tree) for tree in TREES]
    assert torch.equal(model(traced[::-1]).output, wanted.flip(0))
    labelled = td.Compiler((td.Scalar(), td.Identity()) >> td.Metric("m"))
    assert labelled([labelled.tracer((1, "a"))]).metric_labels == {"m": ["a"]}


@pytest.mark.long
def test_traced_in_worker_processes() -> None:
    model = td.Compiler(sentence())
    options: Any = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = DataLoader(TREES, batch_size=2, collate_fn=model.collate, **options)
    found = torch.cat([model(batch).output for batch in loader])
    traced = list(DataLoader(TREES, batch_size=None, collate_fn=model.tracer, **options))
    for output in (found, model(traced).output):
        torch.testing.assert_close(output, model(TREES).output)


def test_errors_name_the_example() -> None:
    model = td.Compiler(sentence())
    bad = [*TREES, [1, "no number"]]
    for trace in (lambda: model.collate(bad), lambda: td.TracedExamples(model.tracer, bad)):
        assert "where:    example 4, block Root" in message(TypeError, trace)


def test_examples_may_be_graphs() -> None:
    block = td.GetItem("x") >> td.Map(td.Vector(2)) >> td.Sum()
    data = [Data(x=torch.tensor([[1.0, 2.0], [3.0, 4.0]])), Data(x=torch.zeros(0, 2))]
    assert td.Compiler(block)(data).output.tolist() == [[4.0, 6.0], [0.0, 0.0]]


def test_an_explanation_lists_the_calls() -> None:
    model = td.Compiler((numbers(), td.Scalar() >> td.Broadcast()) >> td.ZipWith(add()) >> td.Sum())
    assert model.explain(([1, 2], 3)).splitlines() == [
        "call 0: add(1.0, 3.0)  Root.Map.Function",
        "call 1: add(2.0, 3.0)  Root.Map.Function",
        "call 2: sum([call 0, call 1])  Root.Sum",
    ]
    halves = td.Vector(4) >> td.Function(lambda x: x.chunk(2, 1))
    model = td.Compiler(halves >> td.GetItem(1) >> td.FC(1, name="fc"))
    text = model.explain([1.5, 2.25, 3.125, 4.0625])
    assert "[1.5, 2.25, 3.125..." in text and "fc(call 0.1)" in text
    assert "(row 3)" in td.Compiler(td.InputRow("x", 2)).explain(3)


def test_drawings_show_types_and_steps() -> None:
    text = td.drawing_of(sentence())
    assert "Pipe: object -> float32[3]" in text
    assert "├─ OneOf = tree: object -> float32[4]" in text
    assert "[True] Pipe: object -> float32[4]" in text
    assert "tree: object -> float32[4]" in text
    model = td.Compiler(sentence())
    lines = td.schedule_text(model.collate(TREES)).splitlines()
    assert lines[0].startswith("step 0  embedding") and lines[0].endswith("6")
    assert len(lines) == len(model.collate(TREES).steps)
    assert td.schedule_text(model.collate([4])).startswith("step 0  embedding+fc ")


def test_eval_takes_any_input_type() -> None:
    block = td.Function(torch.neg).set_input_type(2)
    assert block.eval([1, 2], tolist=True) == [-1, -2]
    pairs = td.Map(add()).set_input_type(td.SequenceType(([], [])))
    assert pairs.eval([(1, 2), (3, 4)], tolist=True) == [3, 7]
    endless = td.Map(td.Function(torch.neg)).set_input_type(td.BroadcastSequenceType([]))
    assert next(endless.eval(1.0)) == -1
    assert td.Identity().set_input_type(((), td.VoidType())).eval(((), None)) == ((), None)


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
    model = td.Compiler(inside)
    for call in (model, model.collate):
        with pytest.raises(OwnError) as caught:
            call([["good"], ["good", "bad"]])
        assert caught.value.__notes__ == ["  where:    example 1, block Root.Map.look"]
        assert caught.traceback[-1].name == "look_up"
    kept = pickle.loads(pickle.dumps(caught.value))
    assert kept.__notes__ == caught.value.__notes__, "loader workers send it unchanged"
