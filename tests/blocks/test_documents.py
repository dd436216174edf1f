"""Blocks inferred from example documents: encodings, batches, and what is refused."""

import itertools
import json
import math
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch import blocks as td
from pyg_dynbatch.blocks import documents
from pyg_dynbatch.blocks.schema import pieces_of
from tests.blocks.harness import three_ways
from tests.core.helpers import message
from tests.strategies import few
from tests.test_docs import ROOT

NUMBERS = st.integers(-3, 10**6) | st.floats(-1e6, 1e6)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
KEYS = st.sampled_from("ab") | st.text(max_size=3)
DOCUMENTS = st.recursive(
    LEAVES,
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(KEYS, parts, max_size=3),
    max_leaves=12,
)


def inferred(samples: list[Any], overrides: Any = None) -> Any:
    return td.from_examples(samples, 3, overrides)


def rows(samples: list[Any], documents: list[Any], overrides: Any = None) -> torch.Tensor:
    """The vectors of documents, of a block with random parameters."""
    torch.manual_seed(0)
    model = td.Compiler.create(td.from_examples(samples, 16, overrides))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model(documents).output.detach()


@few(6)
@given(st.lists(DOCUMENTS, min_size=1, max_size=5), st.integers(1, 5))
def test_batched_is_one_by_one(documents: list[Any], known: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if known < len(documents) else "error")
        three_ways(inferred(documents[:known]), documents)


@few(15)
@given(st.lists(DOCUMENTS, min_size=1, max_size=5))
def test_the_schema_is_plain_and_lists_every_part(documents: list[Any]) -> None:
    schema = inferred(documents).schema
    again = type(schema).from_dict(json.loads(json.dumps(schema.as_dict())))
    assert again == schema
    for document in documents:
        parts = list(again.walk(document))
        assert not any(part.problem for part in parts)
        assert all(f"{part.schema_path} " in str(schema) for part in parts)


def test_the_text_shows_every_choice() -> None:
    samples = [{"name": f"n{n}", "kind": "ab"[n % 2], "size": n + 0.5} for n in range(4)]
    samples += [{"parts": [{"code": 7}, {"code": 7}]}, {"parts": [], "kind": None, "other": True}]
    lines = str(inferred(samples).schema).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "6 documents",
        "$ object keys: 5",
        "$.name string texts, words and trigrams: 12; missing in 2 of 6",
        "$.kind null missing in 1 of 6",
        '$.kind string categories (2): "a", "b"; missing in 1 of 6',
        "$.size number mean 2; deviation 1.118; missing in 2 of 6",
        "$.parts array mean+max+sum of its elements; missing in 4 of 6",
        "$.parts[] object keys: 1",
        "$.parts[].code number mean 7; deviation 1; categories (1): 7",
        "$.other boolean categories (2): false, true; missing in 5 of 6",
    ]


def test_values_that_differ_have_different_vectors() -> None:
    samples: list[Any] = [
        {"x": x} for x in (None, True, False, 0.5, 2.5, "a", "b c", [], {}, [1.5])
    ]
    samples += [{}, {"x": [1.5, 1.5]}, {"x": {"y": 1.5}}]
    found = rows(samples, samples)
    distance = torch.cdist(found, found) + torch.eye(len(samples))
    assert (distance > 1e-4).all()


def test_keys_seen_later_and_their_order_do_not_matter() -> None:
    first = [{"a": 1.5, "b": "x"}, {"c": [2.5]}]
    second = [{"c": [2.5]}, {"b": "x", "a": 1.5}]
    found = inferred(first).schema
    assert found == inferred(second).schema
    assert set(found.nodes["$"].kinds["object"]["fields"]) == {"a", "b", "c"}


def test_an_unknown_part_is_said_once_and_treated_as_missing() -> None:
    samples = [{"a": 1.5, "b": [1.5]}, {"a": 2.5, "b": []}]
    block = inferred(samples)
    model = td.Compiler.create(block)
    with pytest.warns(UserWarning) as said:
        found = model([{"a": "x", "z": 1}, {"z": 2, "b": [None]}, {}, {"b": [None]}]).output
    assert [str(warning.message) for warning in said] == [
        "documents: ignored at $.a: string, expected number",
        "documents: ignored at $.z: unknown key",
        "documents: ignored at $.b[]: null, expected number",
    ]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_a_width_of_zero_is_refused() -> None:
    assert "width" in message(ValueError, lambda: td.from_examples([{"a": 1.0}], 0))


def test_unknown_parts_can_be_refused() -> None:
    model = td.Compiler.create(td.from_examples([{"a": [{"b": 1.5}]}], unknown="refuse"))
    text = message(ValueError, model, [{"a": []}, {"a": [{"b": 1}, {"b": 2, "c d": 3}]}])
    assert '$.a[1]["c d"]' in text and "unknown key" in text and "example 1" in text


def test_numbers_are_standardized_and_categories_know_others() -> None:
    samples = [{"x": float(10**9 + n) + 0.5, "k": n % 2} for n in range(8)]
    node = inferred(samples).schema.nodes["$.x"].kinds["number"]
    assert node == pytest.approx({"mean": 10**9 + 4.0, "deviation": math.sqrt(63 / 12)})
    near, far, farther = rows(samples, [{"x": 0.5}, {"x": -1e9}, {"x": -1e140}], {"$.k": "ignore"})
    assert torch.equal(near, far) and torch.equal(far, farther)  # ten deviations away
    categories = {"$.k": "categories", "$.x": "ignore"}
    one, two, unknown, other = rows(samples, [{"k": k} for k in (0, 1, 5, 7)], categories)
    assert torch.equal(unknown, other) and not torch.equal(one, two)


def test_choices_can_be_overridden() -> None:
    samples = [{"id": n, "code": "ab"[n % 2], "items": [n, 1]} for n in range(6)]
    choices = {"$.id": "ignore", "$.code": "text", "$.items": "sum", "$.items[]": "number"}
    text = str(inferred(samples, choices).schema)
    assert "$.id       ignored" in text and "sum of its elements" in text
    assert "trigrams" in text and "categories" not in text
    changed = [{**sample, "id": "anything"} for sample in samples]
    assert torch.equal(rows(samples, samples, choices), rows(samples, changed, choices))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"$.b": "ignore"}, ["nothing at $.b", "print(schema)"]),
        ({"$.a": "text"}, ["'text'", "number at $.a"]),
        ({"$.a": "median"}, ["'median'", "categories"]),
        ({"$.a": "like $.b"}, ["like $.b", "$.a", "contains"]),
    ],
)
def test_an_override_that_fits_nothing_is_refused(overrides: Any, words: list[str]) -> None:
    text = message(ValueError, inferred, [{"a": 1.5}], overrides)
    assert all(word in text for word in words)


def test_only_different_readouts_can_be_joined() -> None:
    names = ["mean", "max", "sum", "number", "categories", "text", "ignore", "like $", ""]
    for pair in itertools.product(names, repeat=2):
        choice = "+".join(pair)
        if set(pair) < {"mean", "max", "sum"} and pair[0] != pair[1]:
            assert f"{choice} of its elements" in str(
                inferred([{"a": [1.5]}], {"$.a": choice}).schema
            )
        else:
            text = message(ValueError, inferred, [{"a": [1.5]}], {"$.a": choice})
            assert "$.a" in text and choice in text


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], ["no documents"]),
        ([{"a": [math.nan]}], ["$.a[]", "NaN"]),
        ([{"a": 10**400}], ["$.a", "1e+150"]),
        ([{"a": (1,)}], ["$.a", "tuple"]),
        ([{"a": {1: 2}}], ["$.a", "int 1"]),
    ],
)
def test_what_json_cannot_hold_is_refused(samples: Any, words: list[str]) -> None:
    text = message(ValueError, inferred, samples)
    assert all(word in text for word in words)


def nested(levels: int) -> dict[str, Any]:
    document: dict[str, Any] = {"value": 0.5}
    for level in range(levels):
        document = {"replies": [document], "value": float(level)}
    return document


def test_deep_documents_are_refused_or_recursive() -> None:
    text = message(ValueError, inferred, [nested(100)])
    assert "64 levels" in text and "like $" in text
    inferred([nested(10)]).eval(nested(10))
    block = inferred([nested(100), nested(3)], {"$.replies[]": "like $"})
    assert "$.replies[] is like $" in str(block.schema)
    model = td.Compiler.create(block)
    assert model([nested(100), nested(7)]).output.isfinite().all()
    three_ways(block, [nested(3), {}])


@pytest.mark.long
def test_a_long_list_takes_little_memory() -> None:
    """Texts took 483 MB with a record per piece, and more with a vector per piece."""
    run = [sys.executable, str(ROOT / "examples" / "cases" / "json_memory.py")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)  # noqa: S603
    found = re.findall(r"(\w+) +(\d+) MB", done.stdout)
    assert [name for name, _ in found] == ["numbers", "objects", "texts"]
    assert all(int(size) <= 300 for _, size in found)


TEXTS = ["red apple", "Red  apple", "apple pie", "red red wine", ""]


def test_a_text_is_the_sum_of_its_pieces() -> None:
    block = td.from_examples(TEXTS, 4, {"$": "text"})
    pieces = block.schema.nodes["$"].kinds["string"]["pieces"]
    assert "=apple pie" not in pieces and pieces["~red"] == 3 and pieces["*<re"] == 3
    model = td.Compiler.create(block)
    (table,) = (each for each in model.parameters() if len(each) == len(pieces) + 1)
    rows = dict(zip(pieces, table[1:], strict=True))
    found = model(["red red new", "", "zzz"]).output
    parts = ["~red"] * 2 + ["*<re", "*red", "*ed>"] * 2  # of "new", no text has a piece
    expected = torch.stack([rows[piece] for piece in parts]).double().sum(0)
    torch.testing.assert_close(found[0].double(), expected, atol=1e-6, rtol=0)
    assert not found[1:].any()
    (gradient,) = torch.autograd.grad(found.sum(), table)
    counts = [0, *(parts.count(piece) for piece in pieces)]
    assert gradient[:, 0].tolist() == counts


def test_what_is_counted_is_weighted_as_by_scikit_learn() -> None:
    text = pytest.importorskip("sklearn.feature_extraction.text")
    samples = [{"x": ["red apple", each]} for each in TEXTS]
    schema = td.from_examples(samples, 4, {"$.x[]": "text"}).schema
    block = documents.counts_of(schema, 1)
    names = schema.nodes["$.x[]"].kinds["string"]["pieces"]
    tfidf = text.TfidfVectorizer(
        analyzer=lambda sample: [piece for each in sample["x"] for piece in pieces_of(each)],
        sublinear_tf=True,
        vocabulary=list(names),
    ).fit(samples)
    model = td.Compiler.create(block)
    (table,) = (each for each in model.parameters() if each.dim() == 2)
    first = next(n for n, (path, _) in enumerate(all_names(schema), 1) if path == "$.x[]")
    weights = torch.linspace(-1, 1, len(names))
    with torch.no_grad():
        table[first : first + len(names), 0] = weights / documents._FASTER
    expected = torch.from_numpy(tfidf.transform(samples).toarray()) @ weights.double()
    found = model(samples).output[:, 0].double()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def all_names(schema: Any) -> list[tuple[str, str]]:
    nodes = schema.nodes.items()
    return [(path, name) for path, node in nodes for name, _ in node.features(schema.documents)]


def test_numbers_and_lengths_are_counted() -> None:
    samples = [{"x": x, "y": [True] * n} for n, x in enumerate((0.5, 2.5, 4.5, 9.5))]
    schema = inferred(samples).schema
    model = td.Compiler.create(documents.counts_of(schema, 1))
    names = all_names(schema)
    assert len(set(names)) == len(names)
    (table,) = (each for each in model.parameters() if each.dim() == 2)
    (gradient,) = torch.autograd.grad(model([samples[3]]).output.sum(), table)
    counted = {names[n - 1]: value for n, value in enumerate(gradient[:, 0].tolist()) if value}
    mean = schema.nodes["$.x"].kinds["number"]["mean"]
    deviation = schema.nodes["$.x"].kinds["number"]["deviation"]
    expected = {("$", "object"): 1.0, ("$.x", "mean"): (9.5 - mean) / deviation}
    expected |= {("$.x", "near 1.5"): 1.0, ("$.y", "length 2"): 1.0, ("$.y[]", "true"): 1.0}
    assert counted == pytest.approx(
        {name: documents._FASTER * value for name, value in expected.items()}, abs=1e-4
    )


def test_a_schema_of_another_version_is_refused() -> None:
    plain = inferred([{"a": 1.5}]).schema.as_dict()
    del plain["version"]  # as before there was one
    text = message(ValueError, type(inferred([1]).schema).from_dict, plain)
    assert "version" in text and "train again" in text
