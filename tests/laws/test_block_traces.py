"""Laws of traces of blocks: only their own model takes them, files survive damage, tracing ends."""

import functools
import itertools
import os
import pickle
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyg_dynbatch import blocks as td
from tests.strategies import few

EXAMPLES = [[1.0, 2.0], [3.0], []]
each = lambda: td.Map(td.Scalar())  # noqa: E731


def closure(held: Any) -> Any:
    return lambda x: len(x) + (held[2] if isinstance(held, dict) else max(np.ravel([*held]))
                               if isinstance(held, list | set) else int(held))  # fmt: skip


def default(n: int) -> Any:
    return lambda x, n=n: len(x) + n


def numbered() -> Callable[[Any], Any]:
    """Return a function that reads an iterator, whose class has a `__next__`, too."""
    numbers = itertools.count()
    return lambda x: [n + 0 * next(numbers) for n in x]


def nested(n: int) -> Any:
    return lambda x: (lambda: closure(n)(x))()


def keyword(n: int) -> Any:
    return functools.partial(lambda x, *, n: len(x) + n, n=n)


class Reader:
    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, x: Any) -> int:
        return len(x) + self.n


def by_method(n: int) -> Any:
    return Reader(n).__call__


def by_module(n: int) -> Any:
    owner = nn.Linear(2, 2)
    owner.n = n  # type: ignore[assignment]
    return lambda x: len(x) + owner.n


def one_of(key: Any, keys: Any = (False, True)) -> td.Block:
    cases = each() >> td.Sum(), td.Zeros([])
    return td.OneOf(key, dict(zip(keys, cases, strict=True)))


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
    "one hot of others": lambda: td.InputTransform(len) >> td.OneHotFromList([2, 1, 0, 3]),
    "length": lambda: td.InputTransform(lambda x: len(x)) >> td.Scalar(),
    "length and one": lambda: td.InputTransform(lambda x: len(x) + 1) >> td.Scalar(),
    **{f"closure {n!r}": lambda n=n: td.InputTransform(closure(n)) >> td.Scalar()
       for n in (2, 3, [2], {2: 3}, {2: 4}, {3}, np.array(2), torch.tensor(2), torch.tensor(3))},
    **{f"{kind.__name__} {n}": lambda n=n, kind=kind: td.InputTransform(kind(n)) >> td.Scalar()
       for n in (5, 6) for kind in (default, nested, keyword, Reader, by_method, by_module)},
    **{f"case of {n}": lambda n=n: one_of(lambda x: len(x) > n) for n in (1, 2)},
    **{f"cases {keys}": lambda keys=keys: one_of(lambda x: len(x) > 1, keys)
       for keys in ([False, True], [True, False])},
    **{f"index {n}": lambda n=n: td.InputTransform(lambda x: [len(x), 0])
       >> td.GetItem(n) >> td.Scalar() for n in (0, 1)},
    **{f"metric label {n}": lambda n=n: td.AllOf(each() >> td.Sum(), td.InputTransform(default(n)))
       >> td.Metric("m") >> td.Void() for n in (1, 2)},
    **{f"slice {n}": lambda n=n: each() >> td.Slice(start=n) >> td.Sum() for n in (1, 2)},
    # These differ in what is computed on the device, so that a trace of one fits the other.
    **{f"adds {n}": lambda n=n: td.AllOf(each() >> td.Sum(), td.FromTensor(torch.tensor(n)))
       >> td.Function(torch.add) for n in (1.0, 2.0)},
    **{f"function {n}": lambda n=n: each() >> td.Sum() >> td.Function(lambda x: x + n)
       for n in (1, 2)},
    "numbered": lambda: td.InputTransform(numbered()) >> each() >> td.Max(),
}  # fmt: skip


def test_only_the_model_that_traced_them_takes_traces(tmp_path: Path) -> None:
    models = {name: td.Compiler(make()) for name, make in MODELS.items()}
    for name, model in models.items():
        kept = td.TracedExamples(model.tracer, EXAMPLES, tmp_path / name)
        traces = [kept[0]], [model.tracer(EXAMPLES[0])], model.collate(EXAMPLES[:1])
        # The weights differ.
        twin = td.Compiler(MODELS[name]())
        for traced in traces:
            again = pickle.loads(pickle.dumps(traced))
            for taker in (model, twin):
                taker.eval()(again)
        for other, different in models.items():
            fits = name.split()[0] == other.split()[0] in ("adds", "function")
            for traced in traces[1:] if other != name else ():
                if fits:
                    assert different(traced).output == different(EXAMPLES[:1]).output
                    continue
                with pytest.raises(ValueError, match="of a different model"):
                    different(traced)
        with pytest.raises(ValueError, match="of a different model"):
            td.Compiler(td.Scalar()).collate([kept[0]])


CALLS = 0


def counts(x: Any) -> int:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    return CALLS


@functools.lru_cache
def remembers(x: Any) -> int:
    return 1


def counter() -> Any:
    calls = 0

    def count(x: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Odd:
    @property
    def __class__(self) -> Any:
        raise RuntimeError

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError

    def __call__(self, x: Any) -> int:
        return 1


def reading(held: Any) -> Any:
    return lambda x: 1 if held else 0


CHANGING: dict[str, Callable[[], Any]] = {
    "global counter": lambda: counts,
    "counter in a closure": counter,
    "remembered results": lambda: lambda x: remembers(len(x)),
    "results in a dict": lambda: lambda x, known={}: known.setdefault(len(x), 1),  # noqa: B006
    "iterator": lambda: functools.partial(lambda numbers, x: next(numbers), itertools.count()),
    "generator": lambda: reading(n for n in range(3)),
    "open file": lambda: reading(sys.__stderr__),
    "lock": lambda: reading(threading.Lock()),
    "random numbers": lambda: lambda x: random.random(),  # noqa: S311
    "random generator": lambda: reading(random.Random()),  # noqa: S311
    "no state": Odd,
    "weights": lambda: reading([nn.Linear(1, 1), torch.rand(3, requires_grad=True)]),
    "object in itself": lambda: reading(cycle(3)),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_does_not_forbid_traces(kind: str) -> None:
    make = lambda: td.InputTransform(CHANGING[kind]()) >> td.Scalar()  # noqa: E731
    model = td.Compiler(make())
    traces = [model.tracer(one) for one in EXAMPLES]
    assert len(model(traces).output) == 3 == len(model(model.collate(EXAMPLES)).output)
    # Another one, compiled after functions have changed what they read.
    assert len(td.Compiler(make())(traces).output) == 3


SCRIPT = """
import multiprocessing, os, threading
from pyg_dynbatch import blocks as td

WORDS, LOCK = {"a", "b", "c"}, threading.Lock()

class Vocabulary:
    def __init__(self):
        self.words = WORDS

    def __call__(self, word):
        with LOCK:
            return word in self.words or word in {"x", "y", "z"}

def model():
    read = td.InputTransform(Vocabulary()) >> td.InputTransform(lambda word: word)
    return td.Compiler(read >> td.Scalar())

def fingerprint(_=None):
    return model().tracer.source.fingerprint

if __name__ == "__main__":
    found = {fingerprint()}
    for seed in "123":
        os.environ["PYTHONHASHSEED"] = seed
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.update(pool.map(fingerprint, [0]))
    print(*found)
"""


@pytest.mark.long
def test_the_fingerprint_is_the_same_in_other_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, tmp_path / "script.py"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.strip()) == 16


MODEL = td.Compiler(td.AllOf(each() >> td.Sum(), each() >> td.Max()))


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
    model = td.Compiler(tree(memoize))
    with pytest.raises(ValueError, match="an object contains itself") as caught:
        model([1.0, cycle(length)])
    assert "example 1" in str(caught.value)
    deep: Any = 1.0
    for _ in range(3000):
        deep = [deep]
    assert model([deep]).output == 1.0, "depth alone is no reason"


def test_max_depth_stops_tracing() -> None:
    model = td.Compiler(tree(wrap=lambda x: [list(x[0])]), max_depth=5)
    with pytest.raises(AssertionError, match="deeper than max_depth"):
        model([cycle(1)])
    assert td.Compiler(tree(), max_depth=1)([[[[1.0, 2.0]]]]).output == 3.0


READERS = {
    "two maps": td.AllOf(each() >> td.Sum(), each() >> td.Sum()),
    "two functions": td.AllOf(*[td.InputTransform(list) >> each() >> td.Sum() for _ in range(2)]),
}


@pytest.mark.parametrize("name", READERS)
def test_a_generator_is_not_read_twice(name: str) -> None:
    with pytest.raises(ValueError, match="an iterator is read twice"):
        READERS[name].eval(x for x in (1, 2))
    once = td.Compiler(each() >> td.Sum())
    examples = [(x for x in (1, 2)), iter([3])]
    assert once(examples).output.tolist() == [3, 3]
    with pytest.raises(ValueError, match="an iterator is read twice"):
        once(examples)
    made = td.InputTransform(lambda text: map(int, text.split())) >> each() >> td.Sum()
    assert td.Compiler(made)(["1 2"] * 2).output.tolist() == [3, 3]
