"""Law of traces: only models with the same operations take them, and tracing ends."""

import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from pyg_dynbatch import blocks as td

EXAMPLES = [[1.0, 2.0], [3.0], []]


def each() -> td.Block:
    return td.Map(td.Scalar())


def column() -> td.Block:
    return each() >> td.Sum() >> td.Function(lambda x: x[:, None])


MODELS: dict[str, Callable[[], Any]] = {
    "sum": lambda: each() >> td.Sum(),
    "max": lambda: each() >> td.Max(),
    "sine": lambda: each() >> td.Map(td.Function(torch.sin)) >> td.Sum(),
    "cosine": lambda: each() >> td.Map(td.Function(torch.cos)) >> td.Sum(),
    "fold": lambda: each() >> td.Fold(td.Function(torch.add), td.Zeros([])),
    "double": lambda: td.Map(td.Scalar("float64")) >> td.Sum(),
    "two outputs": lambda: td.AllOf(each() >> td.Sum(), td.Length()),
    "layer": lambda: column() >> nn.Linear(1, 2),
    "wider layer": lambda: column() >> nn.Linear(1, 3),
    "dropout": lambda: column() >> nn.Dropout(),
    "metric": lambda: td.Map(td.Scalar() >> td.Metric("m")) >> td.Void(),
    "other metric": lambda: td.Map(td.Scalar() >> td.Metric("n")) >> td.Void(),
    "one hot": lambda: td.InputTransform(len) >> td.OneHot(4),
    "wider one hot": lambda: td.InputTransform(len) >> td.OneHot(5),
}


@cache
def compiled(name: str) -> td.Compiler:
    return td.Compiler(MODELS[name]()).eval()


def traces(name: str) -> list[Any]:
    """Return an example that is traced alone, and one that is scheduled."""
    model = compiled(name)
    return [[model.tracer(EXAMPLES[0])], model.collate(EXAMPLES[:1])]


@pytest.mark.parametrize("name", MODELS)
def test_models_with_the_same_operations_accept_traces(name: str) -> None:
    with_other_weights = td.Compiler(MODELS[name]()).eval()
    for traced in traces(name):
        unpickled = pickle.loads(pickle.dumps(traced))
        compiled(name)(unpickled)
        with_other_weights(unpickled)


@pytest.mark.parametrize("name", MODELS)
def test_models_with_other_operations_refuse_traces(name: str) -> None:
    for traced in traces(name):
        for other in MODELS.keys() - {name}:
            with pytest.raises(ValueError, match="of a different model"):
                compiled(other)(traced)


def test_models_with_other_functions_of_the_user_accept_traces() -> None:
    one = td.Compiler(td.InputTransform(len) >> td.Scalar())
    two = td.Compiler(td.InputTransform(sum) >> td.Scalar())
    assert two([one.tracer([5.0]), [5.0]]).output.tolist() == [1.0, 5.0]


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
    model = td.Compiler(tree(memoize))
    with pytest.raises(ValueError, match="an object contains itself") as caught:
        model([1.0, cycle(length)])
    assert "example 1" in str(caught.value)
    assert model([[1.0]]).output == 1.0, "the next batch is not affected"


@pytest.mark.parametrize("memoize", [False, True])
def test_a_deep_object_is_no_cycle(memoize: bool) -> None:
    deep: Any = 1.0
    for _ in range(3000):
        deep = [deep]
    assert td.Compiler(tree(memoize))([deep]).output == 1.0


def test_max_depth_stops_tracing() -> None:
    model = td.Compiler(tree(wrap=lambda x: [list(x[0])]), max_depth=5)
    with pytest.raises(AssertionError, match="deeper than max_depth"):
        model([cycle(1)])


def test_max_depth_leaves_objects_alone_that_end() -> None:
    model = td.Compiler(tree(), max_depth=1)
    assert model([[[[1.0, 2.0]]]]).output == 3.0


READ_TWICE = {
    "two maps": td.AllOf(each() >> td.Sum(), each() >> td.Sum()),
    "two functions": td.AllOf(*[td.InputTransform(list) >> each() >> td.Sum() for _ in range(2)]),
}


@pytest.mark.parametrize("name", READ_TWICE)
def test_a_generator_is_not_read_twice(name: str) -> None:
    with pytest.raises(ValueError, match="an iterator is read twice"):
        READ_TWICE[name].eval(x for x in (1, 2))


def test_a_generator_is_read_in_one_call() -> None:
    model = td.Compiler(each() >> td.Sum())
    examples = [(x for x in (1, 2)), iter([3])]
    assert model(examples).output.tolist() == [3, 3]
    with pytest.raises(ValueError, match="an iterator is read twice"):
        model(examples)


def test_an_iterator_that_a_function_creates_is_read_for_every_example() -> None:
    numbers = td.InputTransform(lambda text: map(int, text.split()))
    model = td.Compiler(numbers >> each() >> td.Sum())
    assert model(["1 2", "1 2"]).output.tolist() == [3, 3]
