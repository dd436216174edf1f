"""The digest of a host function: equal in every run, and different after a change."""

import re
import sys
from functools import lru_cache, partial, singledispatch
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core.fingerprint import digest
from tests.core.helpers import message

WORDS = {"a": 1, "b": 2}
TABLE = ModuleType("a_table_of_words")
TABLE.words = ["a", "b"]  # type: ignore[attr-defined]


class Vocabulary:
    """Numbers words; holds them in its state, and more of them in its class."""

    more = ["c"]

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __call__(self, word: str) -> int:
        return (self.words + self.more).index(word)


def number(word: str) -> int:
    return WORDS[word]


def by_number(word: str) -> int:
    return number(word) + 1


def in_a_module(word: str) -> int:
    return TABLE.words.index(word)  # type: ignore[no-any-return]


def imports(word: str) -> int:
    import a_table_of_words

    return a_table_of_words.words.index(word)


@lru_cache
def remembers(word: str) -> int:
    return WORDS[word]


def inner_function(word: str) -> list[int]:
    return [one() for one in [lambda: WORDS[word]]]


def offset(word: str) -> int:
    return len(word) + offset.by  # type: ignore[attr-defined,no-any-return]


def by_offset(word: str) -> int:
    return offset(word) + 1


@singledispatch
def dispatched(word: str) -> int:
    return offset(word)


remembers.by = offset.by = 1  # type: ignore[attr-defined]


def closure_over(held: Any) -> Any:
    return lambda word: held(word) if callable(held) else held[word]


VOCABULARY = Vocabulary(["a", "b"])
READERS = {
    "global": (number, lambda: WORDS.update(c=3)),
    "through another function": (by_number, lambda: WORDS.update(c=3)),
    "inner function": (inner_function, lambda: WORDS.update(c=3)),
    "cache around it": (remembers, lambda: WORDS.update(c=3)),
    "attribute of a module": (in_a_module, lambda: TABLE.words.append("c")),
    "imported inside": (imports, lambda: TABLE.words.append("c")),
    "closure": (closure_over(WORDS), lambda: WORDS.update(c=3)),
    "partial": (partial(closure_over, WORDS), lambda: WORDS.update(c=3)),
    "object": (VOCABULARY, lambda: VOCABULARY.words.append("c")),
    "attribute of a function": (offset, lambda: setattr(offset, "by", 2)),
    "attribute of a function it calls": (by_offset, lambda: setattr(offset, "by", 2)),
    "attribute through a dispatch": (dispatched, lambda: setattr(offset, "by", 2)),
    "attribute of a cache": (remembers, lambda: setattr(remembers, "by", 2)),
    "method": (VOCABULARY.__call__, lambda: VOCABULARY.words.append("c")),
    "class": (closure_over(Vocabulary), lambda: Vocabulary.more.append("d")),
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "a_table_of_words", TABLE)
    yield
    WORDS.pop("c", None)
    remembers.by = offset.by = 1  # type: ignore[attr-defined]
    TABLE.words[2:], VOCABULARY.words[2:], Vocabulary.more[1:] = [], [], []


@pytest.mark.parametrize("kind", READERS)
def test_what_a_function_reads_counts(kind: str) -> None:
    read, change = READERS[kind]
    before = digest(read)
    assert digest(read) == before
    change()
    assert digest(read) != before


def test_all_kinds_of_data_count() -> None:
    held: list[Any] = [
        1, 1.0, True, None, ..., 1j, "1", b"1", range(3), slice(3), [1], (1,), {1}, frozenset([1]),
        {1: 2}, {1: 3}, {2: 1, 1: 2}, {1: 2, 2: 1}, np.arange(3), np.zeros(3), torch.zeros(3),
        torch.ones(3), re.compile("a"), re.compile("b"), Path("a"), torch.float32, len, str.split,
        int, np.int64, Vocabulary(["a"]), Vocabulary(["b"]), lambda: 1, lambda: 2,
        [[1], 2], [1, [2]],
    ]  # fmt: skip
    found = [digest(value) for value in held]
    assert len(set(found)) == len(held)
    assert found == [digest(value) for value in held]
    circle: list[Any] = [1]
    circle.append(circle)
    assert digest(circle) == digest(circle) != found[10]
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert digest(deep) != digest(deep[0])


def test_a_changed_vocabulary_is_traced_again(tmp_path: Path) -> None:
    file = tmp_path / "kept"

    def kept() -> list[float]:
        model = td.Compiler(td.InputTransform(by_number) >> td.Scalar())
        return model(list(td.TracedExamples(model.tracer, ["a", "b"], file))).output.tolist()

    assert kept() == [2, 3]
    written = file.stat().st_mtime_ns
    assert kept() == [2, 3] and file.stat().st_mtime_ns == written
    try:
        WORDS["b"] = 7
        assert kept() == [2, 8]
    finally:
        WORDS["b"] = 2
    assert kept() == [2, 3]


def test_objects_without_a_digest_raise_an_error(tmp_path: Path) -> None:
    with (tmp_path / "words").open("w") as stream:
        function = closure_over(stream)
        tracer = td.Compiler(td.InputTransform(function) >> td.Scalar()).tracer
        text = message(TypeError, td.TracedExamples, tracer, [], tmp_path / "kept")
        assert "cannot decide whether a file is up to date" in text and "TextIOWrapper" in text
        assert len(td.TracedExamples(tracer, [])) == 0, "without a file no digest is needed"
