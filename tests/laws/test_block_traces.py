"""Laws of traces of blocks: only their own model takes them, files survive damage, tracing ends."""

import itertools
import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyg_dynbatch import blocks as td
from tests.strategies import few

EXAMPLES = [[1.0, 2.0], [3.0], []]
each = lambda: td.Map(td.Scalar())  # noqa: E731


def sliced(n: int) -> Callable[[Any], Any]:
    return lambda x: x[:n]


def applied(function: Callable[[Any], Any], x: Any) -> Any:
    return function(x)


def numbered() -> Callable[[Any], Any]:
    """Return a function that reads an iterator, whose class has a `__next__`, too."""
    numbers = itertools.count()
    return lambda x: [n + 0 * next(numbers) for n in x]


def counting() -> Callable[[Any], Any]:
    """Return a function whose closure changes when it is called, and cannot be pickled."""
    seen, lock, calls = dict[int, Any](), threading.Lock(), 0

    def count(x: Any) -> Any:
        nonlocal calls
        with lock:
            seen[len(seen)] = x
        calls += 1
        return x

    return count


MODELS: dict[str, Callable[[], Any]] = {
    "sum": lambda: each() >> td.Sum(),
    "max": lambda: each() >> td.Max(),
    "sine": lambda: each() >> td.Map(td.Function(torch.sin)) >> td.Sum(),
    "cosine": lambda: each() >> td.Map(td.Function(torch.cos)) >> td.Sum(),
    "fold": lambda: each() >> td.Fold(td.Function(torch.add), td.Zeros([])),
    "double": lambda: td.Map(td.Scalar("float64")) >> td.Sum(),
    "vectors": lambda: td.Map(td.Scalar() >> td.Function(lambda x: x[:, None])) >> td.Sum(),
    "two outputs": lambda: td.AllOf(each() >> td.Sum(), td.Length()),
    "layer": lambda: each() >> td.Sum() >> td.Function(lambda x: x[:, None]) >> nn.Linear(1, 2),
    "wider layer": lambda: (
        each() >> td.Sum() >> td.Function(lambda x: x[:, None]) >> nn.Linear(1, 3)
    ),
    "dropout": lambda: (
        each() >> td.Sum() >> td.Function(lambda x: x[:, None]) >> nn.Sequential(nn.Dropout())
    ),
    "metric": lambda: td.Map(td.Scalar() >> td.Metric("m")) >> td.Void(),
    "one hot": lambda: td.InputTransform(len) >> td.OneHot(4),
    "one hot from 1": lambda: td.InputTransform(lambda x: len(x) + 1) >> td.OneHot(1, 5),
    "wider one hot": lambda: td.InputTransform(len) >> td.OneHot(5),
    "keys": lambda: td.OneOf(len, {n: each() >> td.Sum() for n in (0, 1, 2)}),
    "other keys": lambda: td.OneOf(len, {n: each() >> td.Sum() for n in (0, 1, 2, 3)}),
    "first": lambda: td.InputTransform(lambda x: x[:1]) >> each() >> td.Sum(),
    "last": lambda: td.InputTransform(lambda x: x[-1:]) >> each() >> td.Sum(),
    "default": lambda: td.InputTransform(lambda x, n=1: x[n:]) >> each() >> td.Sum(),
    "other default": lambda: td.InputTransform(lambda x, n=2: x[n:]) >> each() >> td.Sum(),
    "closure": lambda: td.InputTransform(sliced(1)) >> each() >> td.Sum(),
    "other closure": lambda: td.InputTransform(sliced(2)) >> each() >> td.Sum(),
    "inner": lambda: td.InputTransform(partial(applied, sliced(1))) >> each() >> td.Sum(),
    "other inner": lambda: td.InputTransform(partial(applied, sliced(2))) >> each() >> td.Sum(),
    "set": lambda: td.InputTransform(lambda x: [n for n in x if n in {1, 2}]) >> each() >> td.Sum(),
    **{f"slice {n}": lambda n=n: each() >> td.Slice(start=n) >> td.Sum() for n in (1, 2)},
    "numbered": lambda: td.InputTransform(numbered()) >> each() >> td.Max(),
    "counting": lambda: td.InputTransform(counting()) >> each() >> td.Sum(),
}


def test_only_the_model_that_traced_them_takes_traces(tmp_path: Path) -> None:
    models = {name: td.Compiler.create(make()) for name, make in MODELS.items()}
    for name, model in models.items():
        path = None if name == "counting" else tmp_path / name
        kept = td.TracedExamples(model.tracer, EXAMPLES, path)
        traces = [kept[0]], [model.tracer(EXAMPLES[0])], model.collate(EXAMPLES[:1])
        # The weights differ.
        twin = td.Compiler.create(MODELS[name]())
        for traced in traces:
            again = pickle.loads(pickle.dumps(traced))
            for taker in (model, twin):
                taker.eval()(again)
        for other, different in models.items():
            for traced in traces[1:] if other != name else ():
                with pytest.raises(ValueError, match="of a different model"):
                    different(traced)
        with pytest.raises(ValueError, match="of a different model"):
            td.Compiler.create(td.Scalar()).tracer.program(kept[0])


MODEL = td.Compiler.create(td.AllOf(each() >> td.Sum(), each() >> td.Max()))


@st.composite
def damages(draw: Any) -> Callable[[bytes], bytes]:
    """Draw a change of bytes anywhere in a file."""
    where, what = draw(st.floats(0, 1)), draw(st.sampled_from(["flip", "cut", "replace", "insert"]))
    some = draw(st.binary(min_size=1, max_size=100))

    def damage(whole: bytes) -> bytes:
        n = min(int(where * len(whole)), len(whole) - 1)
        ways = {
            "flip": whole[:n] + bytes([whole[n] ^ (some[0] or 1)]) + whole[n + 1 :],
            "cut": whole[:n],
            "replace": whole[:n] + some + whole[n + len(some) :],
            "insert": whole[:n] + some + whole[n:],
        }
        return ways[what]

    return damage


@few(10)
@given(damage=damages())
def test_a_damaged_file_is_written_anew(
    damage: Callable[[bytes], bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged"
    wanted = MODEL(EXAMPLES).output
    file.unlink(missing_ok=True)
    td.TracedExamples(MODEL.tracer, EXAMPLES, file)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = td.TracedExamples(MODEL.tracer, EXAMPLES, file)
    assert len(said) == (damage(whole) != whole)
    again = td.TracedExamples(MODEL.tracer, EXAMPLES, file)
    for kept in (found, again):
        assert all(map(torch.equal, MODEL(list(kept)).output, wanted))


def tree(memoize: bool = False, wrap: Callable[[Any], Any] = lambda x: x) -> td.Block:
    node = td.ForwardDeclaration(td.PyObjectType(), td.TensorType(()), memoize=memoize)
    inside = td.InputTransform(wrap) >> td.Map(node()) >> td.Sum()
    node.resolve_to(td.OneOf(lambda x: isinstance(x, list), {True: inside, False: td.Scalar()}))
    return node.target  # type: ignore[return-value]


def cycle(length: int) -> list[Any]:
    whole: list[Any] = []
    inner = whole
    for _ in range(length - 1):
        inner.append([])
        inner = inner[0]
    inner.append(whole)
    return whole


@pytest.mark.parametrize("memoize", [False, True])
@pytest.mark.parametrize("length", [1, 3, 1500])
def test_a_cycle_is_refused(length: int, memoize: bool) -> None:
    model = td.Compiler.create(tree(memoize))
    with pytest.raises(ValueError, match="an object contains itself") as caught:
        model([1.0, cycle(length)])
    assert "example 1" in str(caught.value)
    deep: Any = 1.0
    for _ in range(3000):
        deep = [deep]
    assert model([deep]).output == 1.0, "depth alone is no reason"


def test_max_depth_stops_tracing() -> None:
    model = td.Compiler.create(tree(wrap=lambda x: [list(x[0])]), max_depth=5)
    with pytest.raises(AssertionError, match="deeper than max_depth"):
        model([cycle(1)])
    assert td.Compiler.create(tree(), max_depth=1)([[[[1.0, 2.0]]]]).output == 3.0


READERS = {
    "two maps": td.AllOf(each() >> td.Sum(), each() >> td.Sum()),
    "two functions": td.AllOf(*[td.InputTransform(list) >> each() >> td.Sum() for _ in range(2)]),
}


@pytest.mark.parametrize("name", READERS)
def test_a_generator_is_not_read_twice(name: str) -> None:
    with pytest.raises(ValueError, match="an iterator is read twice"):
        READERS[name].eval(x for x in (1, 2))
    once = td.Compiler.create(each() >> td.Sum())
    examples = [(x for x in (1, 2)), iter([3])]
    assert once(examples).output.tolist() == [3, 3]
    with pytest.raises(ValueError, match="an iterator is read twice"):
        once(examples)
    made = td.InputTransform(lambda text: map(int, text.split())) >> each() >> td.Sum()
    assert td.Compiler.create(made)(["1 2"] * 2).output.tolist() == [3, 3]
