"""Items, slices, lengths, zips and windows on every kind of container."""

import itertools
from typing import Any

import pytest
import torch

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, builds, endless, message, numbers


def three() -> td.Block:
    return td.AllOf(td.Scalar(), td.Scalar("int64"), td.Zeros(2))


def test_get_item() -> None:
    builds(td.GetItem("a") >> td.Scalar(), [({"a": 1}, 1.0)])
    builds(td.GetItem(-1) >> td.Scalar(), [([1, 2], 2.0)])
    builds(numbers() >> td.GetItem(1), [([1, 2], 2.0)])
    builds(three() >> td.GetItem(1), [(3, 3)])
    builds(three() >> td.GetItem(slice(1, None)), [(3, (3, [0.0, 0.0]))])
    builds(numbers() >> td.GetItem(slice(1)), [([1, 2], [1.0])])
    assert td.GetItem(2).key == 2


def test_get_item_errors() -> None:
    text = message(KeyError, td.GetItem("a").eval, {})
    assert "Root: the input does not fit" in text and "where:    block Root" in text
    model = td.Compiler.create(td.Map(td.GetItem(1) >> td.Scalar()) >> td.Sum())
    text = message(IndexError, model, [[[1, 2]], [[1]]])
    assert "where:    example 1, block Root.Map.GetItem" in text
    assert "the item does not exist" in message(IndexError, lambda: three() >> td.GetItem(3))
    assert "never ends" in message(TypeError, lambda: endless() >> td.GetItem(0))
    assert "a wrong kind of input" in message(TypeError, lambda: td.Scalar() >> td.GetItem(0))


def test_slice() -> None:
    assert td.Slice(start=1, stop=3).eval("abcd") == "bc"
    builds(numbers() >> td.Slice(step=-1), [([1, 2, 3], [3.0, 2.0, 1.0]), ([], [])])
    builds(three() >> td.Slice(stop=2), [(3, (3.0, 3))])
    builds(td.Record(()) >> td.Slice(stop=2), [(1, ())])
    assert "positional argument" in message(TypeError, td.Slice, 1)
    assert "never ends" in message(TypeError, lambda: endless() >> td.Slice(start=1))


def test_length() -> None:
    builds(td.Length(), [("abc", 3.0), ("", 0.0)], depth=0)
    builds(numbers() >> td.Length("int64"), [([1, 2], 2), ([], 0)])
    builds(three() >> td.Length(), [(1, 3.0)])
    builds(td.Record(()) >> td.Length(), [(1, 0.0)])
    assert "never ends" in message(TypeError, lambda: endless() >> td.Length())


def test_nth() -> None:
    block = (numbers(), td.Identity()) >> td.Nth()
    builds(block, [(([5, 6], 1), 6.0), (([5, 6], -1), 6.0)])
    assert td.Nth().eval(([1, 2], 0)) == 1
    text = message(IndexError, block.eval, ([5], 1))
    assert "got:      IndexError" in text and "where:    block Root.Nth" in text


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((3, 3, 3), "not a sequence and an index"),
        ((td.SequenceType(3), 3), "not a sequence and an index"),
        ((td.BroadcastSequenceType(3), td.PyObjectType()), "never ends"),
        ((3, td.PyObjectType()), "the input is not a sequence"),
    ],
)
def test_nth_errors(given: Any, what: str) -> None:
    assert what in message(TypeError, td.Nth().set_input_type, given)


def test_broadcast_and_zip() -> None:
    block = (numbers(), endless()) >> td.Zip()
    builds(block, [(([1, 2], 3), [(1.0, 3.0), (2.0, 3.0)]), (([], 3), [])])
    twice = (endless(), numbers(), numbers(), endless()) >> td.ZipWith(
        td.Function(lambda a, b, c, d: a + b * c - d)
    )
    builds(twice, [((1, [2, 3], [4, 5], 6), [3.0, 10.0])], depth=1)
    kind = td.BroadcastSequenceType(3)
    assert td.Broadcast().set_input_type(3).output_type == kind
    assert td.Broadcast().set_output_type(kind).input_type == td.TensorType(3)


def test_zip_stops_at_the_shortest() -> None:
    builds((numbers(), numbers()) >> td.Zip(), [(([1, 2, 3], [4]), [(1.0, 4.0)])])
    assert td.Zip().eval(("abc", [1, 2])) == [("a", 1), ("b", 2)]


def test_zip_of_endless_sequences_is_endless() -> None:
    both = (endless(), endless()) >> td.Zip()
    assert both.output_type == td.BroadcastSequenceType(([], []))
    mapped = (numbers(), (endless(), endless()) >> td.ZipWith(add())) >> td.ZipWith(add())
    builds(mapped, [(([1, 2], (3, 4)), [8.0, 9.0])], depth=2)


def test_endless_results_are_endless_iterators() -> None:
    pair = (endless(), endless()) >> td.Zip()
    cases = [
        (endless(), 42, 42.0),
        (endless() >> td.NGrams(2), 4, (4.0, 4.0)),
        (pair, [1, 2], (1.0, 2.0)),
    ]
    for block, given, wanted in cases:
        found = block.eval(given, tolist=True)
        assert isinstance(found, itertools.repeat) and next(found) == next(found) == wanted
    rows = (td.Map(endless()) >> td.GetItem(slice(2))).eval([1, 2, 3], tolist=True)
    assert [next(row) for row in rows] == [1.0, 2.0]
    lifted = td.NGrams(2).set_input_type(td.BroadcastSequenceType(td.SequenceType([])))
    for given in (itertools.repeat([1, 2]), [1, 2]):
        assert next(lifted.eval(given, tolist=True)) == ([1.0, 2.0], [1.0, 2.0])


def test_zip_kept_for_two_readers() -> None:
    made = td.Composition()
    with made.scope():
        zipped = td.Zip().reads(td.Record((numbers(), endless())).reads(made.input))
        made.output.reads(td.Length().reads(zipped), (td.Map(add()) >> td.Sum()).reads(zipped))
    builds(made, [(([1, 2], 3), (2.0, 9.0))])


def test_folds_over_zips() -> None:
    cell = td.Function(lambda state, pair: state + pair[0] * pair[1])
    block = (numbers(), endless()) >> td.Zip() >> td.Fold(cell, td.Zeros("float32"))
    builds(block, [(([1, 2], 3), 9.0), (([], 3), 0.0)], depth=2)
    objects = (td.Identity(), td.Broadcast()) >> td.Zip()
    assert objects.eval(("ab", 1)) == [("a", 1), ("b", 1)]
    texts = (td.Identity(), td.Broadcast()) >> td.ZipWith(td.InputTransform(str))
    assert texts.eval(("a", 1)) == ["('a', 1)"]


def test_zip_errors() -> None:
    assert "no sequence to zip" in message(TypeError, lambda: td.Record(()) >> td.Zip())
    assert "an item is not a sequence" in message(
        TypeError, lambda: (numbers(), td.Scalar()) >> td.Zip()
    )


def test_ngrams() -> None:
    assert td.NGrams(1).eval("ab") == [("a",), ("b",)]
    builds(
        numbers() >> td.NGrams(2) >> td.Map(add()), [([1, 2, 3], [3.0, 5.0]), ([1], [])], depth=1
    )
    repeated = (numbers(), endless() >> td.NGrams(2)) >> td.Zip()
    builds(repeated, [(([1], 2), [(1.0, (2.0, 2.0))])])
    for bad in (0, -1):
        assert "NGrams: the size of a window" in message(ValueError, td.NGrams, bad)


def test_broadcast_host_objects_are_read_after_it() -> None:
    def both(endless: Any) -> td.Block:
        return (numbers(), endless) >> td.ZipWith(add())

    builds(both(td.Broadcast() >> numbers()), [(([1, 2], 3), [4.0, 5.0])], depth=1)
    negative = td.Broadcast() >> numbers() >> td.Map(td.Function(torch.neg))
    builds(both(negative), [(([1, 2], 3), [-2.0, -1.0]), (([], 3), [])])
    wired = td.Composition()
    with wired.scope():
        endless = numbers().reads(td.Broadcast().reads(wired.input[1]))
        wired.output.reads(td.Zip().reads(numbers().reads(wired.input[0]), endless))
    builds(wired, [(([1, 2], 3), [(1.0, 3.0), (2.0, 3.0)])])
    text = message(TypeError, lambda: td.Broadcast() >> numbers() >> td.Sum())
    assert text.startswith("Sum: the sequence never ends")
    stated = numbers().set_input_type(td.PyObjectType())
    endless_type = td.BroadcastSequenceType(td.PyObjectType())
    assert "type differs" in message(TypeError, stated.set_input_type, endless_type)
