"""Types: short forms, flattening, hashing, sizes."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from pyg_dynbatch import blocks as td
from pyg_dynbatch.blocks.types import dtype_of

OBJECT = td.PyObjectType()


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (3, td.TensorType((3,))),
        ([], td.TensorType(())),
        ([2, 3], td.TensorType((2, 3))),
        ([2, 3, "int32"], td.TensorType((2, 3), "int32")),
        ("int64", td.TensorType((), "int64")),
        (torch.int64, td.TensorType((), "int64")),
        (np.int64(3), td.TensorType((3,))),
        (torch.Size([2, 3]), td.TensorType((2, 3))),
        ((), td.TupleType()),
        ((3, "int64"), td.TupleType(td.TensorType((3,)), td.TensorType((), "int64"))),
        (OBJECT, OBJECT),
    ],
)
def test_short_forms_are_converted_to_types(short: Any, long: td.ResultType) -> None:
    assert td.convert_to_type(short) == long


def test_dtypes_of_numpy_and_torch_are_the_same() -> None:
    assert dtype_of(np.float32) is torch.float32
    assert td.TensorType((), np.int64) == td.TensorType((), torch.int64)
    assert td.TensorType((), "float64").torch_dtype is torch.float64


def test_types_are_equal_by_value() -> None:
    types = {td.TensorType([3]), td.TensorType((3,), torch.float32), td.TensorType((3,), "int32")}
    assert len(types) == 2
    assert td.TupleType(3) == td.TupleType([3]) != td.TupleType(3, 3)
    assert td.SequenceType(3) != td.BroadcastSequenceType(3)
    assert len({td.PyObjectType(), td.PyObjectType(), td.VoidType()}) == 2
    assert td.TensorType((2, 3)).ndim == 2


def test_tuple_type_is_a_sequence() -> None:
    pair = td.TupleType(3, "int64", ())
    assert len(pair) == 3 and list(pair)[2] == td.TupleType()
    assert pair[:2] == td.TupleType(3, "int64") and pair[-1] == td.TupleType()


def test_tuple_type_takes_an_iterable_of_types() -> None:
    items = [td.TensorType([]), OBJECT]
    pair = td.TupleType(*items)
    assert td.TupleType(items) == td.TupleType(tuple(items)) == td.TupleType(iter(items)) == pair
    assert td.TupleType(dict.fromkeys(items)) == td.TupleType(kind for kind in items) == pair
    assert td.TupleType(()) == td.TupleType(iter(())) == td.TupleType()
    assert td.TupleType((td.TensorType([]),) * 0) == td.convert_to_type(())
    assert td.TupleType(pair) == td.TupleType((pair,)) != pair
    assert td.convert_to_type((tuple(items),)) == td.TupleType(pair)


def test_a_tensor_type_is_an_array_of_zeros() -> None:
    kind = td.TensorType((1, 2), "int32")
    for zeros in (np.array(kind), np.asarray(kind), np.array(kind, copy=None), np.zeros_like(kind)):
        assert zeros.dtype == np.int32 and zeros.tolist() == [[0, 0]]
    assert np.ones_like(kind).tolist() == [[1, 1]] and np.array(kind, np.float64).dtype == float
    assert td.TupleType([2, 3]) == td.TupleType(td.TensorType((2, 3))), "a shape, not items"
    assert td.TupleType((3, 3)) == td.TupleType(td.TupleType(3, 3)), "short forms, not items"


def test_canonical_types_merge_objects() -> None:
    canonical = td.canonicalize_type
    assert canonical((OBJECT, OBJECT)) == OBJECT
    assert canonical(td.SequenceType((OBJECT, td.SequenceType(OBJECT)))) == OBJECT
    assert canonical((OBJECT, 3)) == td.TupleType(OBJECT, 3)
    assert canonical(()) == td.TupleType()
    assert canonical(td.BroadcastSequenceType(OBJECT)) == td.BroadcastSequenceType(OBJECT)


@pytest.mark.parametrize(
    ("kind", "size", "terminals", "instance", "flat"),
    [
        (td.TensorType((2,)), 1, 1, "a", ["a"]),
        (OBJECT, 1, 1, "a", ["a"]),
        (td.VoidType(), 0, 0, None, []),
        (td.TupleType(), 0, 0, (), []),
        (td.TupleType(3, (OBJECT, 3)), 3, 3, ("a", ("b", "c")), ["a", "b", "c"]),
        (td.SequenceType(3), None, 1, ["a", "b"], ["a", "b"]),
        (td.TupleType(td.SequenceType(3), 3), None, 2, (["a", "b"], "c"), ["a", "b", "c"]),
    ],
)
def test_unflatten_is_the_inverse_of_flatten(
    kind: td.ResultType, size: int | None, terminals: int, instance: Any, flat: list[Any]
) -> None:
    assert kind.size == size
    assert len(kind.terminal_types()) == terminals
    assert kind.flatten(instance) == flat
    assert kind.unflatten(iter(flat), instance) == instance
    seen: list[Any] = []
    kind.for_each_terminal(lambda _, value: seen.append(value), instance)
    assert seen == flat


def test_an_endless_sequence_has_the_terminals_of_its_value() -> None:
    kind = td.BroadcastSequenceType((3, td.SequenceType(3)))
    instance = itertools.repeat(("a", ["b", "c"]))
    assert kind.flatten(instance) == ["a", "b", "c"]
    found = kind.unflatten(iter("abc"), instance)
    assert isinstance(found, itertools.repeat) and next(found) == ("a", ["b", "c"])
    assert td.BroadcastSequenceType((3, 3)).size == 2


def test_types_are_shown_in_short() -> None:
    assert td.FC(2).set_input_type(None).input_type is None
    kinds = (td.TupleType(3), td.BroadcastSequenceType("int64"), td.VoidType(), OBJECT)
    assert list(map(str, kinds)) == ["(float32[3],)", "[int64[], …]", "nothing", "object"]
    assert td.drawing_of(td.Identity()) == "Identity: ? -> ?"
