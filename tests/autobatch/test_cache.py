"""What is recorded once per structure, and why other examples are recorded each time."""

import copy
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch.autobatch import (
    AutoBatch,
    Stack,
    attend,
    autobatch,
    cond,
    emit,
    rows,
    total,
    while_loop,
)
from pyg_dynbatch.autobatch import cache as caches
from pyg_dynbatch.autobatch.cache import Example, Kept, example_of, rebuilt, structure_of

Forward = Callable[[Any, Any], Any]
RUNS: list[int] = []
"""One item for each time that the Python code of a model runs."""


class Model(nn.Module):
    """A model of one function."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.part, self.word = nn.Linear(3, 3), nn.Embedding(9, 3)
        self.weight, self.drop = nn.Parameter(torch.ones(3)), nn.Dropout(0.5)
        self.register_buffer("shift", torch.zeros(3))
        self.points, self.table = torch.ones(3), {"a": [torch.full((3,), 2.0)]}
        self.state, self.list = 0, [0]

    def forward(self, example: Any) -> Any:
        RUNS.append(1)
        return self.function(self, example)


def runs(call: Callable[[], Any]) -> int:
    """Return how often Python code of models runs in a call."""
    RUNS.clear()
    call()
    return len(RUNS)


def cached(function: Forward) -> AutoBatch:
    return autobatch(Model(function), cache=True)


def vectors(count: int = 4) -> list[Tensor]:
    return [*torch.randn(count, 3, generator=torch.Generator().manual_seed(0))]


def read_inside_a_mode(m: Any, x: Tensor) -> Any:
    with torch.device("cpu"):
        y = m.part(x)
        return y * 2 if y.sum() > 0 else y + torch.zeros(3)


def python_random(m: Any, x: Tensor) -> Any:
    random.random()
    return m.part(x)


def numpy_random(m: Any, x: Tensor) -> Any:
    np.random.rand()  # noqa: NPY002
    return m.part(x)


def attribute(m: Any, x: Tensor) -> Any:
    m.state += 1
    return m.part(x)


def appended(m: Any, x: Tensor) -> Any:
    m.list.append(1)
    return m.part(x)


def buffer(m: Any, x: Tensor) -> Any:
    m.shift.add_(1)
    return m.part(x)


def memory(m: Any, x: Tensor) -> Any:
    return m.part(x) + torch.from_numpy(np.ones(3, np.float32))


def changed_memory(m: Any, x: Tensor) -> Any:
    array = np.ones(3, np.float32)
    constant = torch.as_tensor(array)
    y = m.part(x) + constant
    array[:] = 2
    return y + constant


def of_another(m: Any, given: Any) -> Any:
    SEEN.append(m.part(given[0]))
    return SEEN[-1] + SEEN[0]


def result_of_another(m: Any, given: Any) -> Any:
    SEEN.append(m.part(given[0]))
    return SEEN[0]


SEEN: list[Any] = []
GLOBAL, GENERATOR = torch.ones(3), torch.Generator()
THING = object()

# The reason, whether its line is known, and the function.
REFUSED: dict[str, tuple[str, bool, Forward]] = {
    "branch": ("it reads a value", True, lambda m, x: m.part(x) * (2 if m.part(x)[0] > 0 else 1)),
    "item": ("it reads a value", True, lambda m, x: m.part(x) * m.part(x).sum().item()),
    "inside a mode": ("it reads a value", True, read_inside_a_mode),
    "list of an argument": (
        "it reads tolist of an argument at once", True, lambda m, x: m.part(x) * x.tolist()[0]
    ),
    "comparison": (
        "it reads equal of an argument at once", True, lambda m, x: m.part(x) * torch.equal(x, x)
    ),
    "array": (
        "it reads array of an argument at once", True,
        lambda m, x: m.part(x) * float(np.asarray(x)[0]),
    ),
    "computed": (
        "it computes sum of an argument at once", True, lambda m, x: m.part(x) * x.sum()
    ),
    "view": ("it computes getitem of an argument at once", True, lambda m, x: m.part(x) * x[0]),
    "beside a parameter": ("at once", True, lambda m, x: m.part(x * m.weight)),
    "of a parameter": (
        "it computes tanh of 'weight' at once", True, lambda m, x: m.part(x) * m.weight.tanh()
    ),
    "list of a parameter": (
        "it reads tolist of 'weight' at once", True,
        lambda m, x: m.part(x) * m.weight.tolist()[0],
    ),
    "of an attribute": (
        "it computes mul of a tensor that the model holds", True,
        lambda m, x: m.part(x) + m.points * 2,
    ),
    "attribute in place": (
        "of a tensor that the model holds", True, lambda m, x: (m.points.mul_(1), m.part(x))[1]
    ),
    "layout": ("is laid out", True, lambda m, x: m.part(x) * (1 + x.is_contiguous())),
    "random": ("random numbers by rand", True, lambda m, x: m.part(x) + 0 * torch.rand(3)),
    "random in place": (
        "random numbers by uniform_", True, lambda m, x: m.part(x) + 0 * torch.zeros(3).uniform_()
    ),
    "generator": (
        "it gives randn an object of class Generator", True,
        lambda m, x: m.part(x) + 0 * torch.randn(3, generator=GENERATOR),
    ),
    "hidden argument": (
        "it gives tensor an object of class deque", True,
        lambda m, x: m.part(x) + torch.tensor(deque([1.0, 2.0]))[0],
    ),
    "Python's generator": ("random numbers of Python", False, python_random),
    "NumPy's generator": ("random numbers of NumPy", False, numpy_random),
    "new value": ("it changes 'state' of the model", False, attribute),
    "new item": ("it changes 'list' of the model", False, appended),
    "buffer": ("it computes add of 'shift' at once", True, buffer),
    "object": ("its result holds an object of class", False, lambda m, x: (m.part(x), THING)),
    "parameter": ("it uses 'weight' as data", False, lambda m, x: (m.part(x), m.weight)),
    "unknown tensor": ("neither an argument nor built", True, lambda m, x: m.part(x) + GLOBAL),
    "memory": ("neither an argument nor built", True, memory),
    "changed memory": ("it changes a tensor that it has used", False, changed_memory),
    "new leaf": (
        "a tensor that requires gradients", True,
        lambda m, x: m.part(x) + torch.ones(3, requires_grad=True),
    ),
}  # fmt: skip


def test_hooks_of_the_model_itself_that_come_later_are_seen() -> None:
    plain = Model(lambda m, x: m.part(x))
    model, examples = autobatch(plain, cache=True), [torch.ones(3), torch.zeros(3)]
    before = model(examples)
    plain.register_forward_hook(lambda part, given, y: y * 2)
    for _ in range(2):
        torch.testing.assert_close(model(examples), before * 2)


@pytest.mark.parametrize("name", REFUSED)
def test_why_examples_are_recorded_each_time(name: str) -> None:
    words, has_line, function = REFUSED[name]
    model, plain = cached(function), autobatch(Model(function))
    for number in range(2):
        (remark,) = (r for r in model.explain(vectors()).remarks if "recorded each time" in r)
        assert words in remark and remark.startswith("4 examples are")
        assert ("test_cache.py:" in remark) is has_line
        assert runs(lambda: model(vectors())) == 4
        if name not in ("buffer", "new item", "new value"):
            torch.testing.assert_close(
                model(vectors())[0], plain(vectors(), batch=False)[0], msg=str(number)
            )


@pytest.mark.parametrize("function", [of_another, result_of_another])
def test_what_uses_a_value_of_another_example_is_not_kept(function: Forward) -> None:
    SEEN.clear()
    examples = [(x, number) for number, x in enumerate(vectors())]
    (remark,) = cached(function).explain(examples).remarks
    assert "another example" in remark and remark.startswith("3 examples")


def close(found: Any, expected: Any) -> None:
    """Compare results: tensors, and what else is in them."""
    if isinstance(expected, Named):
        close(vars(found), vars(expected))
    elif isinstance(expected, dict):
        close([*found.items()], [*expected.items()])
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Named:
    KIND: ClassVar[str] = "named"
    name: str
    value: Any


class Outside:
    """An object without a structure."""


@dataclass
class Extended(Outside):
    value: int = 0


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Outside(), "class Outside"), (np.ones(3), "class ndarray"), ({1}, "class set"),
        (Extended(), "class Extended"), (nn.Parameter(torch.ones(3)), "class Parameter"),
        (torch.float32, "class dtype"), (np.float64(1), "class float64"), (print, "class builtin"),
        (endless(), "too large"),
    ],
)  # fmt: skip
def test_arguments_without_a_structure(value: Any, words: str) -> None:
    examples = [(x, [value]) for x in vectors()]
    model = cached(lambda m, given: m.part(given[0]))
    for _ in range(2):
        (remark,) = model.explain(examples).remarks
        assert words in remark and "4 examples are recorded each time" in remark
    torch.testing.assert_close(model(examples), model(examples, batch=False))


X, Y = torch.ones(3), torch.ones(3)
DIFFERENT: list[Any] = [
    1, 1.0, True, 1 + 0j, "1", b"1", None, 0.0, -0.0, 0, False, "", float("nan"), (), [], {},
    (1, 2), [1, 2], ((1,), 2), (1, (2,)), {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"b": 2, "a": 1},
    Pair(1, 2), Named("a", 1), Named("b", 1), (Named("a", 1), 1),
    (X, X), (X, Y), X, torch.ones(3, dtype=torch.float64), torch.ones(3, requires_grad=True),
    torch.ones(4), torch.ones(3, 1), torch.tensor(1), (X, Y, X), (X, Y, Y), (X, 0), ("x", 0),
    {"a": X}, {"a": (X,)}, [X], 2**70, 2**70 + 1,
]  # fmt: skip


@pytest.mark.parametrize("find", [example_of, structure_of])
def test_structures_differ(find: Callable[[Any], Example]) -> None:
    keys = [find((value, "end")).key for value in DIFFERENT]
    assert None not in keys and len(set(keys)) == len(keys)


NESTED = st.recursive(
    st.sampled_from([X, Y, torch.ones(2), torch.tensor(1)]) | st.integers(-2, 2) | st.booleans()
    | st.floats(-1, 1) | st.text("ab", max_size=2) | st.none() | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


@pytest.mark.skipif(caches._structure is None, reason="the C extension was not built")
@hypothesis.given(NESTED, NESTED)
def test_c_tells_the_structures_apart_that_the_definition_does(one: Any, other: Any) -> None:
    fast, defined = ([find(each) for each in (one, other)] for find in (example_of, structure_of))
    assert all(isinstance(each.key, bytes) for each in fast)
    assert (fast[0].key == fast[1].key) == (defined[0].key == defined[1].key)
    for each, definition in zip(fast, defined, strict=True):
        assert all(map(is_, each.tensors, definition.tensors))
        assert len(each.tensors) == len(definition.tensors)


def test_examples_are_rebuilt_from_their_structure() -> None:
    for value in DIFFERENT:
        given = structure_of(([value], "end"))
        again = structure_of(rebuilt(given.key or (), given.tensors))
        assert again.key == given.key and type(again.value[0][0]) is type(value)
        pairs = zip(again.tensors, given.tensors, strict=True)
        assert all(one is other for one, other in pairs)
        if not given.tensors and value == value:
            assert again.value == given.value


def test_equal_structures_have_equal_keys() -> None:
    def example() -> Any:
        x = torch.randn(3)
        return {"tree": (1, [x, torch.randn(2), x]), "n": Named("a", Pair(2.5, None))}

    first, second = example_of(example()), example_of(example())
    assert first.key == second.key and len(first.tensors) == 2
    deep: Any = ()
    for _ in range(20_000):
        deep = (deep,)
    assert example_of(deep).key is not None


def structures(m: Any, example: Any) -> Any:
    x, (y, extra) = example["x"], example["pair"]
    z = m.part(x) + y
    for name in extra:
        z = z * len(name)
    return Named("result", (z, {"n": len(extra)})), example["scale"]


def stacks(m: Any, given: Any) -> Any:
    x, number = given
    count = Stack.of([number]).top
    state = m.part(x), torch.tensor(0)
    y, _ = while_loop(lambda y, n: n < count, lambda y, n: (m.part(y).tanh() + x, n + 1), state)
    stack = Stack.of([x, y]).push(m.weight)
    return cond(count > 2, lambda: stack.top * y, lambda: stack.pop()[1].top), stack.size


def emitting(m: Any, given: Any) -> Any:
    x, words = given
    for word in words:
        emit("word", m.word(word) + x)
        emit("constant", torch.tensor(2.0))
    emit("argument", x)
    return m.part(x), x, torch.ones(2), len(words)


def with_views(m: Any, x: Any) -> Any:
    return m.part(x) * m.weight[0] + m.part.weight[1] + m.part(x) @ m.part.weight.T


def of_constants(m: Any, number: int) -> Any:
    x = torch.arange(3.0) * number + torch.tensor([0.1, 0.2, 0.3])
    if bool((x > 100).any()):
        x = x * 0
    return m.part(x.tanh()) + m.word(torch.tensor(number)) + torch.zeros_like(x)


def of_attributes(m: Any, x: Any) -> Any:
    return m.part(m.points) * x + m.table["a"][0] - m.part(m.points)


def ragged(m: Any, given: Any) -> Any:
    matrix, query = given
    states = [m.part(row) for row in rows(matrix)]
    return total(states) + attend(m.part(query), states) + total([], like=query)


def matrices() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 3, 2, 1)
    return [(torch.randn(n, 3, generator=generator), torch.ones(3) * n) for n in sizes]


Examples = Callable[[], list[Any]]
KEPT: dict[str, tuple[Forward, Examples]] = {
    "module": (lambda m, x: m.part(x), vectors),
    "views of parameters": (with_views, vectors),
    "constants": (of_constants, lambda: [1, 2, 1, 3]),
    "attributes": (of_attributes, vectors),
    "loops, branches and stacks": (
        stacks, lambda: [(x, torch.tensor(n)) for n, x in enumerate(vectors())]
    ),
    "emitted": (
        emitting,
        lambda: [(x, [torch.tensor(k) for k in range(n)]) for n, x in enumerate(vectors())],
    ),
    "lists": (ragged, matrices),
    "structures": (
        structures,
        lambda: [
            {"x": x, "pair": Pair(x * n, ("a", "bc")[: n % 2]), "scale": n % 2 + 0.5}
            for n, x in enumerate(vectors(6))
        ],
    ),
    "no gradient": (lambda m, x: m.part(x) + m.part(x).detach(), vectors),
    "plain values": (lambda m, n: (n, str(n)), lambda: [1, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_structures_are_recorded_once(name: str) -> None:
    function, examples = KEPT[name]
    model = cached(function)
    for number in range(4):
        given = examples()
        expected = model(given, batch=False)
        emitted = model.emitted
        structures = len({example_of(value).key for value in given})
        with torch.set_grad_enabled(number < 3):
            calls = runs(lambda given=given, wanted=expected: close(model(given), wanted))
        assert calls == (structures if number in (0, 3) else 0)
        torch.testing.assert_close(model.emitted, emitted)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(0.9).add_(0.05)


def test_equal_numbers_stay_apart() -> None:
    model = cached(lambda m, given: m.word(given[0]) - m.word(given[1]))
    for first, second in ((1, 1), (1, 2), (3, 3), (0, 5)):
        given = [(torch.tensor(first), torch.tensor(second))] * 2
        torch.testing.assert_close(model(given), model(given, batch=False))
    one = torch.tensor(1)
    assert runs(lambda: model([(one, one)])) == 1, "the same object is another structure"


def test_gradients_flow_to_arguments_and_attributes() -> None:
    model = cached(lambda m, x: m.part(x) * m.points)
    model.plain.points = torch.ones(3).requires_grad_()  # type: ignore[assignment]
    for _ in range(2):
        given = [x.requires_grad_() for x in vectors()]
        wanted = [*given, model.plain.points]
        found, expected = (
            torch.autograd.grad(model(given, batch=batch).square().sum(), wanted)
            for batch in (True, False)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["global", "attribute", "buffer", "view of a parameter"])
def test_an_argument_that_the_model_knows_otherwise(name: str) -> None:
    def function(m: Any, given: Any) -> Any:
        x, y = given
        own = {"global": lambda: GLOBAL, "attribute": lambda: m.points, "buffer": lambda: m.shift}
        return m.part(x) * y + own.get(name, lambda: m.weight[1])()

    model = cached(function)
    plain: Any = model.plain
    with torch.no_grad():
        known = {"global": GLOBAL, "attribute": plain.points, "buffer": plain.shift}
        argument = known.get(name, plain.weight[:])
        for first in (argument, torch.zeros(3), argument):
            given = [(first, torch.ones(3) * n) for n in range(3)]
            for _ in range(2):
                torch.testing.assert_close(model(given), model(given, batch=False))
        assert runs(lambda: model(given)) == (0 if name in ("attribute", "buffer") else 3)


def test_functions_that_return_their_argument() -> None:
    model = cached(lambda m, x: m.part(x.to("cpu").float().contiguous()) + x.to(m.weight))
    for given in (vectors(), vectors(), [torch.ones(3, 2)[:, 0]]):
        torch.testing.assert_close(model(given), model(given, batch=False))
    assert runs(lambda: model(vectors())) == 0
    wide = cached(lambda m, x: m.part(x.float()))
    doubles = [x.double() for x in vectors()]
    assert runs(lambda: [wide(doubles) for _ in range(2)]) == 8, "a copy is computed at once"


def test_a_changed_attribute_and_clear() -> None:
    model = cached(lambda m, x: m.part(x) * m.state + m.points)
    model(vectors())
    model.plain.points.mul_(2)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(model(vectors()), model(vectors(), batch=False))
    model.plain.state = 3  # type: ignore[assignment]
    model.plain.points = torch.zeros(3)
    model.clear()
    assert runs(lambda: model(vectors())) == 1
    torch.testing.assert_close(model(vectors()), model(vectors(), batch=False))


def test_the_mode_is_part_of_the_structure() -> None:
    model = cached(lambda m, x: m.part(x) * (2 if m.training else 3))
    for _ in range(2):
        for mode in (True, False):
            torch.testing.assert_close(model.train(mode)(vectors()), model(vectors(), batch=False))
    assert runs(lambda: model(vectors())) == 0
    model.plain.part.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    assert runs(lambda: model(vectors())) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert model(vectors()).dtype == model(vectors(), batch=False).dtype == torch.bfloat16


def test_dropout_is_drawn_anew() -> None:
    model = cached(lambda m, x: m.drop(m.part(x)) + 0 * m.part(x))
    given = [torch.ones(3)] * 50
    first, second = model(given), model(given)
    assert not torch.equal(first, second) and len(first.unique(dim=0)) > 4


def test_copies_keep_the_option_and_no_recordings() -> None:
    model = cached(with_views)
    model(vectors())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.cache and runs(lambda twin=twin: twin(vectors())) == 1
        torch.testing.assert_close(twin(vectors()), model(vectors()))
    assert not copy.copy(autobatch(model.plain)).cache
    assert runs(lambda: autobatch(model.plain)(vectors())) == 4


def test_batches_are_collated_of_what_is_kept() -> None:
    model = cached(with_views)
    assert runs(lambda: model.collate(vectors())) == 1
    assert runs(lambda: model.collate(vectors())) == 0
    batch = pickle.loads(pickle.dumps(model.collate(vectors())))
    torch.testing.assert_close(model(batch), model(vectors(), batch=False))
    refused = cached(lambda m, x: m.part(x * 2))
    for _ in range(2):
        assert runs(lambda: refused.collate(vectors())) == 4
        torch.testing.assert_close(refused(refused.collate(vectors())), refused(vectors()))


def test_examples_that_read_beside_those_that_are_kept() -> None:
    def function(m: Any, given: Any) -> Any:
        x, reads = given
        y = m.part(x)
        for _ in range(reads):
            y = y * 2 if y.sum() > 0 else m.part(y)
            y = y + torch.tensor([1.0, 2.0, 3.0])
        emit("y", y)
        return m.part(y)

    model = cached(function)
    given = [(x, n % 3) for n, x in enumerate(vectors(12))]
    for number in range(3):
        expected, emitted = model(given, batch=False), model.emitted
        calls = runs(lambda wanted=expected: torch.testing.assert_close(model(given), wanted))
        assert calls == (9, 8, 8)[number]
        torch.testing.assert_close(model.emitted, emitted)


def test_results_of_different_structures_are_refused() -> None:
    model = cached(lambda m, n: (m.word(torch.tensor(n)),) * n)
    assert len(model([2, 2])) == 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"different structures[\s\S]*example 1"):
            model([2, 3])
    shapes = cached(lambda m, n: m.word(torch.tensor(0))[:n])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"different shapes[\s\S]*example 1"):
            shapes([1, 2])


def test_an_error_names_the_example() -> None:
    model = cached(lambda m, word: m.word(word))
    model([torch.tensor(1)])
    with pytest.raises(IndexError) as caught:
        model([torch.tensor(n) for n in (1, 2, 10)])
    assert "example 2" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="on a different device"):
        model([torch.tensor(1, device="meta")])


def test_explanations_count_what_is_kept() -> None:
    model = cached(with_views)
    first, second = model.explain(vectors()), model.explain(vectors())
    assert (first.replayed, second.replayed) == (3, 4)
    assert first.kept == second.kept > 0 and first.steps == second.steps
    assert "4 of 4 examples replayed" in str(second)
    assert "replayed" not in str(autobatch(model.plain).explain(vectors()))


def test_threads_keep_recordings_of_their_own() -> None:
    model, found = cached(with_views), dict[int, Any]()

    def run(number: int) -> None:
        for _ in range(10):
            found[number] = model([x * number for x in vectors()])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, result in found.items():
        expected = model([x * number for x in vectors()], batch=False)
        torch.testing.assert_close(result, expected)
    assert len(found) == 3


def kept_of(model: AutoBatch) -> caches.Cache:
    (table,) = vars(model._local).values()
    found: caches.Cache = table.cache
    return found


@pytest.mark.parametrize("count", [600, pytest.param(5_000, marks=pytest.mark.long)])
def test_memory_is_limited(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4000
    monkeypatch.setattr(caches, "MOST_INTEGERS", limit)
    model = cached(of_constants)
    for first in range(10, count, 20):
        model([number % 9 for number in range(3)])  # used all the time
        given = [(number % 9) + 9 * number for number in range(first, first + 20)]
        model.plain.function = lambda m, n: of_constants(m, n % 9)
        model(given)
        cache = kept_of(model)
        assert 0 < cache.size <= limit
        assert cache.size == sum(entry.size for entry in cache.entries.values())
        assert len(cache.entries) < limit
    assert runs(lambda: model([0, 1, 2])) == 0
    kept = [entry for entry in cache.entries.values() if isinstance(entry, Kept)]
    assert kept and all(entry.size >= entry.code.size for entry in kept)


def test_what_is_larger_than_the_limit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MOST_INTEGERS", 10)
    model = cached(with_views)
    for _ in range(2):
        assert runs(lambda: model(vectors())) == 4
    assert kept_of(model).size == 0
