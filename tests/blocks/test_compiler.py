"""Compiled blocks: as modules, in loaders, with pools, in files, in drawings."""

import pickle
import random
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core.policy import DependencyGraph, depth_policy
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


def test_module() -> None:
    model = td.Compiler.create(sentence())
    result = model(TREES)
    assert result.output.shape == (4, 3) and result.output_tensors[0] is result.output
    assert torch.equal(result.metric_tensors["scores"], result.output)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names)) == 5
    again = td.Compiler.create(sentence())
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(TREES).output, result.output)
    assert model.double()(TREES).output.dtype is torch.float64
    assert "OneOf" in repr(model) and model.root.output_type == td.TensorType((3,))


def test_policies_get_the_names_of_operations() -> None:
    names: set[str] = set()

    def policy(graph: DependencyGraph) -> np.ndarray:
        names.update(graph.names)
        return depth_policy(graph)

    model = td.Compiler.create(sentence(), policy=policy)
    assert model(TREES).output.size(0) == len(TREES)
    assert {"embedding", "concat", "fc"} <= names


def test_two_steps() -> None:
    chained = td.Compiler().compile(td.Scalar())
    chained.init_loom()
    assert chained([1.0]).output.tolist() == [1.0]
    model = td.Compiler()
    for use in (lambda: model.collate, lambda: model([1])):
        assert "used before init_loom" in message(RuntimeError, use)
    for use in (lambda: model.tracer, lambda: model.root, model.init_loom):
        assert "used before compile" in message(RuntimeError, use)
    model.compile(td.Scalar())
    assert not model.is_loom_initialized and "init_loom" in message(RuntimeError, model, [1])
    assert "compile was called before" in message(RuntimeError, model.compile, td.Scalar())
    model.init_loom()
    assert model.is_loom_initialized and model([1, 2]).output.tolist() == [1, 2]
    assert "init_loom was called before" in message(RuntimeError, model.init_loom)


def test_max_depth() -> None:
    model = td.Compiler.create(sentence(), max_depth=5)
    assert model.max_depth(TREES[0]) == 6
    text = message(AssertionError, model, [4, TREES[0]])
    assert "deeper than max_depth" in text and "example 1" in text
    assert td.Compiler.create(td.Scalar()).max_depth(1) == 0


def test_loaders() -> None:
    model = td.Compiler.create(sentence())
    wanted = model(TREES).output
    for workers in (0, 2):
        loader = DataLoader(TREES, batch_size=2, collate_fn=model.collate, num_workers=workers)
        batches = list(loader)
        assert [len(batch) for batch in batches] == [2, 2]
        found = torch.cat([model(batch).output for batch in batches])
        torch.testing.assert_close(found, wanted)


def test_tracer_has_no_parameters(tmp_path: Path) -> None:
    tracer = td.Compiler.create(sentence()).tracer
    text = pickle.dumps(tracer)
    assert b"Parameter" not in text and b"torch.nn" not in text
    again = pickle.loads(text)
    assert again(TREES[0]).code.tolist() == tracer(TREES[0]).code.tolist()
    td.TracedExamples(tracer, TREES, file := tmp_path / "kept")
    written = file.read_bytes()
    td.TracedExamples(again, TREES, file)
    assert file.read_bytes() == written, "it is the same model to a file"
    assert "operations" in repr(tracer)


def test_traced_ahead() -> None:
    model = td.Compiler.create(sentence())
    batch = model.collate(TREES)
    wanted = model(batch).output
    assert batch.to("cpu").num_examples == len(batch) == 4 and "4 examples" in repr(batch)
    assert torch.equal(model(pickle.loads(pickle.dumps(batch))).output, wanted)
    traced = list(model.build_loom_inputs(iter(TREES)))
    assert torch.equal(model(traced[::-1]).output, wanted.flip(0))
    batches = list(model.build_loom_input_batched(TREES, batch_size=3))
    assert [len(batch) for batch in batches] == [3, 1]
    labelled = td.Compiler.create((td.Scalar(), td.Identity()) >> td.Metric("m"))
    for keep, labels in ((True, ["a"]), (False, [None])):
        (batch,) = labelled.build_loom_input_batched([(1, "a")], metric_labels=keep)
        assert labelled(batch).metric_labels == {"m": labels}


@pytest.mark.long
def test_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    model = td.Compiler.create(sentence())
    check_errors_name_the_example(model)
    wanted = model(TREES).output
    assert model.pool is None
    with model.multiprocessing_pool(1) as pool:
        assert model.pool is pool
        found = list(model.build_loom_inputs(TREES, chunk_size=2, ordered=True))
        torch.testing.assert_close(model(found).output, wanted)
        loose = [model(batch).output for batch in model.build_loom_input_batched(TREES, 2)]
        torch.testing.assert_close(torch.cat(loose).sum(), wanted.sum())
        kept = td.TracedExamples(model.tracer, TREES, pool=pool)
        torch.testing.assert_close(model([kept[0], kept[3]]).output, wanted[[0, 3]])
        check_errors_name_the_example(model)
        monkeypatch.setattr("pyg_dynbatch.blocks.compiler.pool_of", lambda *_: mock.MagicMock())
        one, other = model.multiprocessing_pool(1), model.multiprocessing_pool(1)
        assert one.__enter__() is model.pool
        other.__enter__()
        assert "contexts overlap" in message(AssertionError, one.__exit__, None, None, None)
        other.__exit__(None, None, None)
        assert model.pool is pool
    assert model.pool is None


def check_errors_name_the_example(model: td.Compiler) -> None:
    bad = [*TREES, [1, "no number"]]
    for trace in (
        lambda: list(model.build_loom_inputs(bad)),
        lambda: list(model.build_loom_input_batched(bad, 2)),
        lambda: td.TracedExamples(model.tracer, bad, pool=model.pool),
    ):
        assert "where:    example 4, block Root" in message(TypeError, trace)


def test_pools_take_functions_that_cannot_be_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = td.Compiler.create(td.InputTransform(lambda x: x + 1) >> td.Scalar())
    with model.multiprocessing_pool(1):
        found = list(model.build_loom_inputs([1, 2, 3], ordered=True))
    assert model(found).output.tolist() == [2, 3, 4]
    # Where processes cannot be forked.
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: ["spawn"])
    text = message(TypeError, model.multiprocessing_pool(1).__enter__)
    assert "a function cannot be sent to other processes" in text and "lambda" in text
    assert "def at the top of a module" in text and model.pool is None


def test_a_file_of_something_else_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for content in (b"my notes", pickle.dumps([1, 2, 3]), b""):
        file.write_bytes(content)
        tracer = td.Compiler.create(td.Scalar()).tracer
        with pytest.warns(UserWarning, match="moved to notes.txt.corrupt"):
            td.TracedExamples(tracer, [1], file)
        assert (tmp_path / "notes.txt.corrupt").read_bytes() == content


def test_reading_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = td.AllOf(td.GetItem(0) >> td.Scalar(), td.GetItem(1))
    each = td.Map(pair >> td.Metric("m")) >> td.Void()
    other = td.Map(td.GetItem(0) >> td.Scalar("int64") >> td.Metric("n")) >> td.Void()
    model = td.Compiler.create(td.AllOf(each, other, td.Length()) >> td.GetItem(2))
    examples = [[(1, "a"), (2, ("b", 2.5))], [], [(3, None)], [(4, {"c": [None, True]})]]
    file = tmp_path / "kept"
    td.TracedExamples(model.tracer, examples, file)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("code was run")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    wanted, found = model(examples), model(list(td.TracedExamples(model.tracer, examples, file)))
    assert torch.equal(wanted.output, found.output)
    assert wanted.metric_labels == found.metric_labels
    assert found.metric_labels["m"][1] == ("b", 2.5) and found.metric_labels["n"] == [None] * 4
    for name in ("m", "n"):
        assert torch.equal(wanted.metric_tensors[name], found.metric_tensors[name])
        assert torch.equal(wanted.metric_examples[name], found.metric_examples[name])
    for _ in range(2):
        assert len(td.TracedExamples(model.tracer, [], tmp_path / "empty")) == 0
    for label in (object(), np.int64(3), float("nan")):
        bad = [[(1, "a")], [(1, label)]]
        text = message(TypeError, td.TracedExamples, model.tracer, bad, tmp_path / "bad")
        assert "a label of metric 'm' cannot be kept" in text and "example 1" in text


def test_kept_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = td.Compiler.create(sentence())
    file = tmp_path / "deep" / "train.traced"
    first_time = td.TracedExamples(model.tracer, TREES, file)
    assert len(first_time) == 4 and file.exists()
    calls = []
    trace = td.Tracer.__call__
    monkeypatch.setattr(td.Tracer, "__call__", lambda *a: (calls.append(1), trace(*a))[1])
    again = td.TracedExamples(td.Compiler.create(sentence()).tracer, TREES, file)
    assert not calls and torch.equal(model(list(again)).output, model(list(first_time)).output)
    other = td.Compiler.create(sentence() >> td.Function(torch.neg))
    td.TracedExamples(other.tracer, TREES, file)
    td.TracedExamples(other.tracer, TREES[:2], file)
    assert len(calls) == 6, "a different model and different examples are traced again"
    assert [path.name for path in file.parent.iterdir()] == ["train.traced"]


def test_graphs_as_examples() -> None:
    block = td.GetItem("x") >> td.Map(td.Vector(2)) >> td.Sum()
    data = [Data(x=torch.tensor([[1.0, 2.0], [3.0, 4.0]])), Data(x=torch.zeros(0, 2))]
    assert td.Compiler.create(block)(data).output.tolist() == [[4.0, 6.0], [0.0, 0.0]]


def test_explain() -> None:
    model = td.Compiler.create(
        (numbers(), td.Scalar() >> td.Broadcast()) >> td.ZipWith(add()) >> td.Sum()
    )
    assert model.explain(([1, 2], 3)).splitlines() == [
        "call 0: add(1.0, 3.0)  Root.Map.Function",
        "call 1: add(2.0, 3.0)  Root.Map.Function",
        "call 2: sum([call 0, call 1])  Root.Sum",
    ]
    halves = td.Vector(4) >> td.Function(lambda x: x.chunk(2, 1))
    model = td.Compiler.create(halves >> td.GetItem(1) >> td.FC(1, name="fc"))
    text = model.explain([1.5, 2.25, 3.125, 4.0625])
    assert "[1.5, 2.25, 3.125..." in text and "fc(call 0.1)" in text
    assert "(row 3)" in td.Compiler.create(td.InputRow("x", 2)).explain(3)


def test_drawings() -> None:
    text = td.drawing_of(sentence())
    assert "Pipe: object -> float32[3]" in text
    assert "├─ OneOf = tree: object -> float32[4]" in text
    assert "[True] Pipe: object -> float32[4]" in text
    assert "tree: object -> float32[4]" in text
    model = td.Compiler.create(sentence())
    lines = model.draw_schedule(TREES).splitlines()
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


def test_iterators() -> None:
    eaten = td.EdibleIterator(x for x in (1, 2, 3))
    assert eaten.value is None and next(eaten) == 1
    for _ in range(2):
        assert np.asarray(eaten, np.float32).tolist() == [2, 3] == np.array(eaten).tolist()
    assert eaten.value.tolist() == [2, 3] and list(eaten) == []


def test_batches_and_epochs() -> None:
    assert list(td.group_by_batches(range(5), 2, truncate=True)) == [[0, 1], [2, 3]]
    source = iter(range(20))
    assert list(td.epochs(source, n=1)) == [source]
    first_epoch, *others = (list(e) for e in td.epochs(range(20), 3, prng=random.Random(0)))
    assert first_epoch == list(range(20)) != others[0] != others[1]
    assert all(sorted(epoch) == first_epoch for epoch in others)
    halves = td.epochs(range(4), 2, shuffle=False)
    assert next(iter(next(halves))) == 0
    assert list(next(halves)) == [0, 1, 2, 3]
    assert [list(e) for e in islice(td.epochs([1, 2], 0, shuffle=False), 4)] == [[1, 2]] * 4
    _, by_function = td.epochs(range(20), 2, prng=random.Random(0).random)
    assert sorted(by_function) == list(range(20)) != by_function


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
        assert caught.traceback[-1].name == "look_up"
    kept = pickle.loads(pickle.dumps(caught.value))
    assert kept.__notes__ == caught.value.__notes__, "loader workers send it unchanged"
