"""The value of every kind of block: alone, call by call, and in mini-batches, with gradients."""

import itertools
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core import RaggedRows
from tests.blocks.harness import add, builds, endless, numbers, three_ways, wired
from tests.core.helpers import message

OBJECT = td.PyObjectType()


def neg() -> td.Block:
    return td.Function(torch.neg)


def constant(value: float) -> td.Block:
    return td.FromTensor(torch.tensor(value))


def three() -> td.Block:
    return td.AllOf(td.Scalar(), td.Scalar("int64"), td.Zeros(2))


def pair() -> td.Block:
    return td.Record((td.Scalar(), td.Scalar()))


def running(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x * state, x + state


def added_to(endless_block: td.Block) -> td.Block:
    return (numbers(), endless_block) >> td.ZipWith(add())


def zip_of_two_readers(made: td.Composition) -> Any:
    zipped = td.Zip().reads(td.Record((numbers(), endless())).reads(made.input))
    return td.Length().reads(zipped), (td.Map(add()) >> td.Sum()).reads(zipped)


def wired_broadcast(made: td.Composition) -> Any:
    repeated = numbers().reads(td.Broadcast().reads(made.input[1]))
    return td.Zip().reads(numbers().reads(made.input[0]), repeated)


def record_by_key(made: td.Composition) -> Any:
    fields = td.Record({"b": td.Scalar(), "a": td.Scalar("int64")}).reads(made.input)
    return fields["b"], fields["a"]


def tanh_cell(made: td.Composition) -> Any:
    new = td.Function(torch.tanh).reads(add().reads(made.input[0], made.input[1]))
    return new, new


# Blocks with pairs of an input and its value, and the depth of the first.
VALUES: list[Any] = [
    # Items, slices, lengths.
    (td.GetItem("a") >> td.Scalar(), [({"a": 1}, 1.0)]),
    (td.GetItem(-1) >> td.Scalar(), [([1, 2], 2.0)]),
    (numbers() >> td.GetItem(1), [([1, 2], 2.0)]),
    (three() >> td.GetItem(1), [(3, 3)]),
    (three() >> td.GetItem(slice(1, None)), [(3, (3, [0.0, 0.0]))]),
    (numbers() >> td.GetItem(slice(1)), [([1, 2], [1.0])]),
    (td.Slice(start=1, stop=3), [("abcd", "bc")]),
    (numbers() >> td.Slice(step=-1), [([1, 2, 3], [3.0, 2.0, 1.0]), ([], [])]),
    (three() >> td.Slice(stop=2), [(3, (3.0, 3))]),
    (td.Record(()) >> td.Slice(stop=2), [(1, ())]),
    (td.Length(), [("abc", 3.0), ("", 0.0)], 0),
    (numbers() >> td.Length("int64"), [([1, 2], 2), ([], 0)]),
    (three() >> td.Length(), [(1, 3.0)]),
    (td.Record(()) >> td.Length(), [(1, 0.0)]),
    ((numbers(), td.Identity()) >> td.Nth(), [(([5, 6], 1), 6.0), (([5, 6], -1), 6.0)]),
    (td.Nth(), [(([1, 2], 0), 1)]),
    # Zips and windows.
    ((numbers(), endless()) >> td.Zip(), [(([1, 2], 3), [(1.0, 3.0), (2.0, 3.0)]), (([], 3), [])]),
    ((endless(), numbers(), numbers(), endless())
     >> td.ZipWith(td.Function(lambda a, b, c, d: a + b * c - d)),
     [((1, [2, 3], [4, 5], 6), [3.0, 10.0])], 1),
    ((numbers(), numbers()) >> td.Zip(), [(([1, 2, 3], [4]), [(1.0, 4.0)])]),
    (td.Zip(), [(("abc", [1, 2]), [("a", 1), ("b", 2)])]),
    (added_to((endless(), endless()) >> td.ZipWith(add())), [(([1, 2], (3, 4)), [8.0, 9.0])], 2),
    (wired(zip_of_two_readers), [(([1, 2], 3), (2.0, 9.0))]),
    ((numbers(), endless()) >> td.Zip()
     >> td.Fold(td.Function(lambda state, x: state + x[0] * x[1]), td.Zeros("float32")),
     [(([1, 2], 3), 9.0), (([], 3), 0.0)], 2),
    ((td.Identity(), td.Broadcast()) >> td.Zip(), [(("ab", 1), [("a", 1), ("b", 1)])]),
    ((td.Identity(), td.Broadcast()) >> td.ZipWith(td.InputTransform(str)),
     [(("a", 1), ["('a', 1)"])]),
    (td.NGrams(1), [("ab", [("a",), ("b",)])]),
    (numbers() >> td.NGrams(2) >> td.Map(add()), [([1, 2, 3], [3.0, 5.0]), ([1], [])], 1),
    ((numbers(), endless() >> td.NGrams(2)) >> td.Zip(), [(([1], 2), [(1.0, (2.0, 2.0))])]),
    (added_to(td.Broadcast() >> numbers()), [(([1, 2], 3), [4.0, 5.0])], 1),
    (added_to(td.Broadcast() >> numbers() >> td.Map(neg())),
     [(([1, 2], 3), [-2.0, -1.0]), (([], 3), [])]),
    (wired(wired_broadcast), [(([1, 2], 3), [(1.0, 3.0), (2.0, 3.0)])]),
    # Maps, folds, recurrent networks, reductions.
    (td.Map(td.InputTransform(len)), [(["a", "bc"], [1, 2])]),
    (numbers(), [([1, 2], [1.0, 2.0]), ([], [])], 0),
    (numbers() >> td.Map(neg()), [([1, 2], [-1.0, -2.0]), ([], [])], 1),
    (td.Map(pair()) >> td.Map(add()), [([(1, 2), (3, 4)], [3.0, 7.0])], 1),
    (td.Map(td.Void() >> constant(2.0)), [([1, 1], [2.0, 2.0])]),
    (td.Map(td.Void()), [([1, 2], [None, None])]),
    (td.Map(numbers()) >> td.Map(td.Map(neg())),
     [([[1], [], [2, 3]], [[-1.0], [], [-2.0, -3.0]]), ([], [])], 1),
    (td.AllOf(td.Scalar(), td.Scalar()) >> td.Map(neg()), [(1, [-1.0, -1.0])], 1),
    (added_to(endless() >> td.Map(neg())), [(([1, 2], 3), [-2.0, -1.0])], 2),
    (numbers() >> td.Fold(add(), constant(10.0)), [([1, 2, 3], 16.0), ([], 10.0)], 3),
    (td.Fold((td.Identity(), td.Scalar()) >> add(), td.Zeros([])), [([1, 2], 3.0), ([], 0.0)], 2),
    (td.AllOf(td.Scalar(), td.Scalar()) >> td.Fold(add(), td.Zeros("float32")), [(3, 6.0)]),
    (td.Fold((td.Identity(), td.Scalar()) >> td.Function(lambda s, x: (s[1], s[0] + x)),
             td.Zeros(([], []))), [([1, 2, 3], (2.0, 4.0))]),
    (numbers() >> td.RNN(td.Function(running), constant(1.0)),
     [([2, 3], ([2.0, 9.0], 6.0)), ([], ([], 1.0))], 2),
    ((numbers(), td.Scalar()) >> td.RNN(td.Function(running), initial_state_from_input=True),
     [(([2, 3], 1), ([2.0, 9.0], 6.0)), (([], 5), ([], 5.0))], 2),
    (numbers() >> td.RNN(wired(tanh_cell), td.Zeros([])) >> td.GetItem(1), [([0, 0], 0.0)], 4),
    (numbers() >> td.Reduce(add(), default_block=constant(-1.0)), [([], -1.0), ([1, 2], 3.0)]),
    (td.Map(pair()) >> td.Reduce(td.Function(lambda a, b: (a[1], b[0]))),
     [([(1, 2), (3, 4)], (2.0, 3.0)), ([], (0.0, 0.0))]),
    # Host input and constants.
    (td.Vector(2), [([1.5, 2.0], [1.5, 2.0])], 0),
    (td.InputTransform(len) >> td.Scalar(), [("abc", 3.0)], 0),
    (td.OneHot(3), [(1, [0.0, 1.0, 0.0]), (0, [1.0, 0.0, 0.0])], 0),
    (td.OneHot(-2, 0), [(-2, [1.0, 0.0])]),
    (td.OneHot(1, 3, dtype="int64"), [(2, [0, 1])]),
    (td.OneHotFromList(["a", "b"]), [("b", [0.0, 1.0])], 0),
    (td.OneHotFromList(["a", "b"], strict=False), [("c", [0.0, 0.0]), ("a", [1.0, 0.0])]),
    *((td.Zeros(kind), [(None, value)]) for kind, value in (
        (3, [0.0] * 3), (("int64", [2]), (0, [0.0, 0.0])), (td.VoidType(), None),
        (td.SequenceType(3), []), ((), ()))),
    # Tuples.
    (td.Record({"a": td.Scalar()}), [({"a": 1}, (1.0,))]),
    (td.Record(OrderedDict([("b", td.Scalar()), ("a", td.Scalar())])),
     [({"a": 1, "b": 2}, (2.0, 1.0))]),
    (td.Record([(slice(1, 3), numbers())]), [([1, 2, 3, 4], ([2.0, 3.0],))]),
    (pair() >> td.Record((neg(), td.Identity())), [((1, 2), (-1.0, 2.0))]),
    (td.Record(()), [("anything", ())], 0),
    (td.Record({"a": td.Identity(), "b": td.Identity()}), [({"a": 1, "b": "x"}, (1, "x"))]),
    (td.Record({None: td.Scalar(), "a": td.Scalar(), 1j: td.Scalar(), 2j: td.Scalar()}),
     [({None: 1, "a": 2, 1j: 3, 2j: 4}, (1.0, 2.0, 3.0, 4.0))]),
    (wired(record_by_key), [({"a": 1, "b": 2}, (2.0, 1))]),
    (td.AllOf(), [("anything", None)]),
    (td.AllOf(td.Scalar()), [(1, (1.0,))]),
    (td.AllOf(td.Scalar(), td.Scalar("int64"), td.Scalar()), [(1, (1.0, 1, 1.0))]),
    (td.AllOf(numbers(), td.Vector(2), td.Zeros(3), td.Void()),
     [([1, 2], ([1.0, 2.0], [1.0, 2.0], [0.0] * 3, None))]),
    (td.AllOf(td.Identity(), td.Identity()), [(1, (1, 1))]),
    ((td.Scalar(), td.Vector(2), td.Scalar()) >> td.Concat(),
     [((1, [2, 3], 4), [1.0, 2.0, 3.0, 4.0])], 1),
    ((td.Tensor([1, 2]), td.Tensor([2, 2])) >> td.Concat(0),
     [(([[1, 2]], [[3, 4], [5, 6]]), [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])]),
    ((td.Tensor([2, 1]), td.Tensor([2, 2])) >> td.Concat(concat_dim=1),
     [(([[1], [2]], [[3, 4], [5, 6]]), [[1.0, 3.0, 4.0], [2.0, 5.0, 6.0]])]),
    ((td.Vector(1), (td.Vector(1), (td.Vector(1),))) >> td.Concat(flatten=True),
     [(([1], ([2], ([3],))), [1.0, 2.0, 3.0])]),
    # Choices.
    (td.Optional(td.Vector(2)), [([1, 2], [1.0, 2.0]), (None, [0.0, 0.0])], 0),
    (td.Optional(numbers()), [([1], [1.0]), (None, [])]),
    (td.Optional(td.Scalar(), constant(7.0)), [(None, 7.0), (1, 1.0)]),
    (td.Optional({"a": td.Scalar(), "b": numbers()}),
     [(None, (0.0, [])), ({"a": 1, "b": [2]}, (1.0, [2.0]))]),
    (td.OneOf(lambda x: x < 0, {True: td.Scalar() >> neg(), False: td.Scalar()}),
     [(-2.0, 2.0), (3.0, 3.0)]),
    (td.OneOf(len, [(1, td.GetItem(0) >> td.Scalar()), (2, td.Length())]),
     [([5], 5.0), ([5, 6], 2.0)]),
    (td.OneOf(lambda x: int(x > 0), (td.Scalar(), td.Zeros([]))), [(-1.0, -1.0), (1.0, 0.0)]),
    (td.OneOf(len, OrderedDict([(1, td.Length())])), [("a", 1.0)]),
    (td.OneOf(type, {str: td.Length(), int: td.Scalar()}), [("abc", 3.0), (5, 5.0)]),
    (td.OneOf(td.GetItem("kind"), {"neg": neg(), "exp": td.Function(torch.exp)},
              pre_block=td.GetItem("x") >> td.Scalar()),
     [({"kind": "neg", "x": 2}, -2.0), ({"kind": "exp", "x": 0}, 1.0)], 1),
    ((td.Identity(), td.Scalar())
     >> td.OneOf(td.GetItem(0), {"a": td.GetItem(1), "b": td.GetItem(1) >> neg()}),
     [(("a", 1), 1.0), (("b", 1), -1.0)]),
    (td.Identity(), [({"a": 1}, {"a": 1})], 0),
    (td.Void(), [(1, None)], 0),
    (td.Scalar() >> td.Void(), [(1, None)]),
]  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=lambda case: repr(case[0]))
def test_blocks_give_what_is_expected(case: Any) -> None:
    builds(*case)


@pytest.mark.parametrize(("n", "depth"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (9, 4)])
def test_reduce_is_balanced_and_in_order(n: int, depth: int) -> None:
    def join(a: Tensor, b: Tensor) -> Tensor:
        return 10 ** (torch.floor(torch.log10(b)) + 1) * a + b

    block = td.Map(td.Scalar("float64")) >> td.Reduce(td.Function(join))
    digits = list(range(1, n + 1))
    builds(block, [(digits, float("".join(map(str, digits)) or 0))], depth)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(td.Sum, [4.0, 9.0]), (td.Mean, [4 / 3, 3.0]), (td.Min, [-1.0, 2.0]), (td.Max, [4.0, 4.0])],
)
def test_totals_are_taken_element_by_element(make: Any, expected: list[float]) -> None:
    rows = [[1, 2], [4, 3], [-1, 4]]
    block = td.Map(td.Vector(2)) >> make()
    builds(block, [(rows, expected), ([], [0.0, 0.0]), ([[5, 6]], [5.0, 6.0])], depth=1)
    matrices = td.Map(td.Tensor([2, 1])) >> make()
    builds(matrices, [([[[a], [b]] for a, b in rows], [[value] for value in expected])], depth=1)
    both = td.AllOf(td.Scalar(), td.Scalar()) >> make()
    assert both.eval(2.0) == (4.0 if make is td.Sum else 2.0)


def test_totals_of_other_dtypes() -> None:
    assert (td.Map(td.Scalar("int64")) >> td.Sum()).eval([1, 2]) == 3
    assert (td.Map(td.Scalar("int32")) >> td.Max()).eval([-2, -1]) == -1
    assert (td.Map(td.Scalar("complex64")) >> td.Mean()).eval([1, 3j]) == 0.5 + 1.5j
    for dtype in ("float64", "bfloat16"):
        model = td.Compiler(td.Map(td.Scalar(dtype)) >> td.Mean())
        found = model([[0.5] * 600, [], [1.0] * 2]).output
        assert found[1:].tolist() == [0.0, 1.0] and str(found.dtype) == f"torch.{dtype}"
        assert dtype == "bfloat16" or found[0] == 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the host waits for a GPU only")
@pytest.mark.parametrize("make", [td.Sum, td.Mean, td.Min, td.Max])
def test_reductions_do_not_wait_for_the_gpu(make: Any) -> None:
    ragged = RaggedRows(torch.ones(3, device="cuda"), torch.tensor([0, 0, 2], device="cuda"), 4)
    engine: Any = td.Compiler(numbers() >> make()).engine
    (reduce,) = (each for each in engine.operations if each.signature.inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = reduce(ragged)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == [2.0 if make is td.Sum else 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("cell", [nn.LSTMCell(1, 2), nn.GRUCell(1, 2), nn.RNNCell(1, 2)])
def test_rnn_of_torch_cells(cell: Any) -> None:
    block = td.Map(td.Vector(1)) >> td.RNN(cell)
    wrapped = td.Map(td.Vector(1)) >> td.RNN(td.ScopedLayer(cell))
    three_ways(block >> td.GetItem(1), [[[1.0], [2.0]], [], [[3.0]]])
    outputs, state = block.eval([[1.0], [2.0]])
    torch.testing.assert_close((outputs, state), wrapped.eval([[1.0], [2.0]]))
    again = cell(torch.tensor([[2.0]]), cell(torch.tensor([[1.0]])))
    last = again[0] if isinstance(again, tuple) else again
    torch.testing.assert_close(outputs[-1], last[0])
    torch.testing.assert_close(outputs[-1], state[0] if isinstance(state, tuple) else state)


def test_an_rnn_may_read_states_of_another() -> None:
    words, sentence = td.ScopedLayer(nn.GRUCell(1, 2)), td.ScopedLayer(nn.GRUCell(2, 2))
    word = td.Map(td.Vector(1)) >> td.RNN(words) >> td.GetItem(1)
    block = td.Map(word) >> td.RNN(sentence) >> td.GetItem(1)
    three_ways(block, [[[[1.0], [2.0]], [[3.0]]], [], [[], [[4.0]]]])
    assert block.max_depth([[[1.0], [2.0]], [[3.0]]]) == 4


def test_endless_results_are_endless_iterators() -> None:
    both = (endless(), endless()) >> td.Zip()
    assert both.output_type == td.BroadcastSequenceType(([], []))
    windows = endless() >> td.NGrams(2)
    for block, given, wanted in (
        *((endless(), 42, 42.0), (windows, 4, (4.0, 4.0))),
        (both, [1, 2], (1.0, 2.0)),
    ):
        found = block.eval(given, tolist=True)
        assert isinstance(found, itertools.repeat) and next(found) == next(found) == wanted
    rows = (td.Map(endless()) >> td.GetItem(slice(2))).eval([1, 2, 3], tolist=True)
    assert [next(row) for row in rows] == [1.0, 2.0]
    lifted = td.NGrams(2).set_input_type(td.BroadcastSequenceType(td.SequenceType([])))
    for given in (itertools.repeat([1, 2]), [1, 2]):
        assert next(lifted.eval(given, tolist=True)) == ([1.0, 2.0], [1.0, 2.0])


def test_types_and_parts_are_attributes() -> None:
    kind = td.BroadcastSequenceType(3)
    assert td.Broadcast().set_input_type(3).output_type == kind
    assert td.Broadcast().set_output_type(kind).input_type == td.TensorType(3)
    assert td.Identity().set_output_type(3).input_type == td.TensorType((3,))
    assert numbers().input_type == OBJECT
    one, other, more, most = add(), td.Zeros([]), add(), td.Zeros([])
    fold, reduce = td.Fold(one, other), td.Reduce(more, most)
    assert fold.combine_block is one and fold.start_block is other
    assert reduce.combine_block is more and reduce.default_block is most
    element = td.Scalar()
    assert td.Map(element).element_block is element and td.Reduce(add()).default_block is None
    assert td.NGrams(3).n == 3 and td.GetItem(2).key == 2
    cases = td.Length(), td.Scalar()
    assert td.OneOf(type, dict(zip((str, int), cases, strict=True))).cases == [*cases]


@pytest.mark.parametrize("cases", [1, 7])
def test_one_of_many_cases(cases: int) -> None:
    blocks = {n: td.GetItem(n) >> td.Scalar() for n in range(cases)}
    model = td.Compiler(td.OneOf(lambda x: x["key"], blocks, pre_block=td.GetItem("rows")))
    keys, rows = sorted({0, cases // 2, cases - 1}), list(range(cases))
    assert model([{"key": key, "rows": rows} for key in keys]).output.tolist() == keys
    assert "unknown key" in message(KeyError, model, [{"key": cases, "rows": rows}])


@pytest.mark.long
def test_one_of_more_cases_than_python_parses_in_one_chain() -> None:
    model = td.Compiler(td.OneOf(lambda x: x, {n: td.Zeros(1) for n in range(2000)}))
    assert model([0, 1999]).output.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_tensors_are_made_of_arrays_and_lists(make: Any) -> None:
    assert td.Vector(2).eval(make([1.5, 2.0]), tolist=True) == [1.5, 2.0]
    assert td.Map(td.Vector(1)).eval(make([[1.5], [2.0]]), tolist=True) == [[1.5], [2.0]]


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "bool", "bfloat16"])
def test_values_have_the_stated_dtype(dtype: str) -> None:
    found = td.Scalar(dtype).eval(torch.tensor(1, dtype=getattr(torch, dtype)))
    assert found.dtype is getattr(torch, dtype) and found == td.Scalar(dtype).eval(1) == 1


def test_strings_and_whole_floats() -> None:
    block = td.Map(td.Scalar("int32")) >> td.Map(neg())
    assert block.eval([1, "2", 3.0, np.float32(4), "-5"], tolist=True) == [-1, -2, -3, -4, 5]
    for given in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])):
        assert td.Vector(2, "int64").eval(given, tolist=True) == [1, 2]
    assert td.Map(td.Scalar("int64")).eval([2**60 + 1, 3.0], tolist=True) == [2**60 + 1, 3]
    assert td.Vector(2).eval(["1.5", "1e3"], tolist=True) == [1.5, 1000.0]
    assert td.Scalar("complex64").eval("1+2j") == 1 + 2j
    assert td.Scalar("uint8").eval(255) == 255 and td.Scalar("bool").eval(1.0)


def test_external_rows_are_read_and_have_gradients() -> None:
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    model = td.Compiler(td.Map(td.InputRow("x", 2)) >> td.Sum())
    found = model([[0, (0, 2)], [1]], inputs={"x": x}).output
    assert found.tolist() == [[0.0, 2.0], [6.0, 7.0]]
    found.sum().backward()
    assert x.grad is not None and x.grad.sum(1).tolist() == [4.0, 0.0, 0.0, 2.0]
    model = td.Compiler(td.AllOf(*[td.InputRow(f"x{k}", 1) for k in range(3)]))
    rows = {f"x{k}": torch.arange(4.0).view(4, 1) + 10 * k for k in range(3)}
    parts = [part.flatten().tolist() for part in model([1, 0, 0], inputs=rows).output]
    assert parts == [[1, 2, 3], [11, 12, 13], [21, 22, 23]]


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1.0, 2.0]), np.array([1, 2]), nn.Parameter(torch.ones(2)), np.float32(1)],
)
def test_a_constant_is_its_tensor(tensor: Any) -> None:
    block, expected = td.FromTensor(tensor), torch.as_tensor(tensor)
    assert block.eval(None, tolist=True) == expected.tolist() and block.max_depth(None) == 0
    assert block.tensor is tensor or torch.equal(block.tensor, expected)


def test_gradients_flow_into_tensors() -> None:
    learned = nn.Parameter(torch.tensor(2.0))
    outside = learned * 3
    three_ways(td.AllOf(td.Scalar(), td.FromTensor(learned)) >> add(), [1.0, 2.0])
    model = td.Compiler(td.AllOf(td.Scalar(), td.FromTensor(outside)) >> add())
    model([1.0, 2.0]).output.sum().backward()
    assert learned.grad == 6.0
    model = td.Compiler(td.FromTensor(learned) >> td.AllOf(td.Identity(), td.Metric("m")))
    assert [parameter is learned for parameter in model.parameters()] == [True]
    result = model([1.0, 2.0])
    (result.output[0].sum() + result.metric_tensors["m"].sum()).backward()
    assert learned.grad == 6.0 + 4.0


def test_metrics_of_different_lengths() -> None:
    block = numbers() >> td.Map(td.Metric("each")) >> td.Void()
    assert block.eval([1, 2]) == (None, {"each": [1.0, 2.0]})
    model = td.Compiler({"a": block, "b": td.Vector(2) >> td.Metric("b")} >> td.Void())
    found = model([{"a": [1, 2], "b": [0, 1]}, {"a": [], "b": [2, 3]}, {"a": [3], "b": [4, 5]}])
    assert found.metric_tensors["each"].tolist() == [1.0, 2.0, 3.0]
    assert found.metric_examples["each"].tolist() == [0, 0, 2]
    assert found.metric_tensors["b"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert found.output is None and found.output_tensors == []


def test_metrics_keep_their_labels_in_order() -> None:
    block = td.Map((td.Scalar(), td.Identity()) >> td.Metric("m")) >> td.Void()
    values = [(1.0, "a"), (2.0, {"b": 1})]
    assert block.eval(values, tolist=True)[1] == {"m": values}
    found = td.Compiler(block)([[(1, "a")], [], [(2, "b"), (3, None)]])
    assert found.metric_labels == {"m": ["a", "b", None]}
    assert found.metric_tensors["m"].tolist() == [1.0, 2.0, 3.0]


def test_metrics_without_values_and_in_two_positions() -> None:
    model = td.Compiler(td.Map(td.Vector(2, "int64") >> td.Metric("m")) >> td.Void())
    found = model([[], []])
    values = found.metric_tensors["m"]
    assert values.shape == (0, 2) and values.dtype is torch.int64
    assert found.metric_examples["m"].numel() == 0
    more = td.Scalar() >> td.Function(lambda x: x + 1) >> td.Metric("m")
    assert td.AllOf(td.Scalar() >> td.Metric("m"), more).eval(1.0)[1] == {"m": [1.0, 2.0]}
