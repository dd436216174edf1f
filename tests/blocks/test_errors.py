"""What is refused, and what the message says: what is wrong, expected and given, and where."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import add, endless, is_list, numbers, wired
from tests.core.helpers import message

OBJECT = td.PyObjectType()
PAIR = td.TupleType([], [])


def three() -> td.Block:
    return td.AllOf(td.Scalar(), td.Scalar("int64"), td.Zeros(2))


def pair() -> td.Block:
    return td.AllOf(td.Scalar(), td.Scalar())


def fails(value: Any) -> Any:
    raise KeyError(value)


def run(block: Any, *examples: Any, **inputs: Any) -> Any:
    return td.Compiler(block)(list(examples), inputs)


def read(make: Any, key: Any) -> Any:
    return wired(lambda made: make().reads(made.input)[key])


def as_truth_value(of: Any) -> Any:
    made = td.Composition()
    with made.scope():
        scalar = td.Scalar().reads(made.input)
        return 1 if of(made, scalar) else 2


def declared(*types: Any, **options: Any) -> td.ForwardDeclaration:
    return td.ForwardDeclaration(*types, name="expr", **options)


def resolved(times: int = 1) -> td.ForwardDeclaration:
    tree = declared(OBJECT, [])
    for _ in range(times):
        tree.resolve_to(td.Scalar())
    return tree


def refers_to_nothing_else() -> Any:
    loop = declared()
    loop.resolve_to(td.Map(loop()))
    return loop.target.eval([])


def remembers_tensors() -> Any:
    memo = td.ForwardDeclaration([], [], memoize=True)
    block = td.Scalar() >> memo()
    memo.resolve_to(td.Function(torch.neg))
    return block.eval(1)


def differs_from_its_declaration() -> Any:
    other = declared(OBJECT, 3)
    other()
    return other.resolve_to(td.Scalar())


def fails_in_a_declaration(example: Any) -> Any:
    tree = declared(OBJECT, [])
    case = {0: td.Scalar(), 1: td.Map(tree()) >> td.Sum()}
    tree.resolve_to(td.OneOf(lambda x: 7 if x == 9 else int(is_list(x)), case))
    return run(tree.target, [1], example)


def shared_by_two_widths() -> Any:
    shared = td.FC(2, name="shared")
    td.Vector(3) >> shared
    return td.Vector(4) >> shared


def connected(make: Any) -> Any:
    made, other, target = td.Composition(), td.Composition(), td.Scalar()
    made.connect(made.input, target)
    return made.connect(*make(made, other, target))


def in_a_circle(make: Any) -> Any:
    made = td.Composition()
    a, b, c = td.Identity(), td.Identity(), td.Identity()
    made.connect(a, b)
    made.connect((b, made.input), c)
    return made.connect(*make(a, b, c))


def unread(made: td.Composition) -> Any:
    x = td.Scalar().reads(made.input)
    td.Function(torch.neg).reads(x)
    return x


def without_output() -> Any:
    made = wired(lambda made: (td.Void().reads(td.Scalar().reads(made.input)), None)[1])
    message(TypeError, made.eval, 1.0)
    return made.set_output_type("float32").eval(1.0)


def overlapping() -> Any:
    one, other = td.Composition().scope(), td.Composition().scope()
    one.__enter__(), other.__enter__()
    try:
        one.__exit__(None, None, None)
    finally:
        other.__exit__(None, None, None)


def mismatched() -> Any:
    each = td.Map(td.Vector(3) >> td.Function(torch.neg), name="each")
    model = {"a": each} >> td.Record([("a", td.Sum())])
    return model >> td.Record([("a", td.Function(torch.exp).set_input_type(2))])


def one_of(*keys: Any) -> Any:
    return td.OneOf(len, [("b", td.Zeros(1)), *((key, td.Zeros(1)) for key in keys)])


def running(x: Any, state: Any) -> Any:
    return x * state, x + state


def embedding(wrong: int, shift: int = 0) -> td.Compiler:
    layer = td.Embedding(5, 1, mod_inputs=False)
    index = td.Scalar("int64") >> td.Function(lambda x: x + shift) if shift else td.Scalar("int64")
    return td.Compiler(td.Map(index >> layer) >> td.Sum())([[0], [1], [0, 3, wrong]])


NEVER = "the sequence never ends"
NO_SEQUENCE = "the input is not a sequence"
DIFFERS = "the output type differs"
NO_TENSORS = "the input does not consist of tensors"
MISSING = nn.UninitializedParameter()
DECLARED = "where:    example 1, block expr"

# The class of the error unless it is TypeError, the call, and parts of the message.
ERRORS: list[Any] = [
    # Items, sequences of sequences.
    (KeyError, lambda: td.GetItem("a").eval({}), "Root: the input does not fit", "block Root"),
    (IndexError, lambda: run(td.Map(td.GetItem(1) >> td.Scalar()) >> td.Sum(), [[1, 2]], [[1]]),
     "where:    example 1, block Root.Map.GetItem"),
    (IndexError, lambda: three() >> td.GetItem(3), "the item does not exist"),
    (lambda: td.Scalar() >> td.GetItem(0), "a wrong kind of input"),
    *((lambda make=make: endless() >> make(), NEVER) for make in (
        partial(td.GetItem, 0), partial(td.Slice, start=1), td.Length, td.Sum, td.Mean, td.Min,
        td.Max, lambda: td.Fold(add(), td.Zeros([])), lambda: td.Reduce(add()),
        lambda: td.RNN(td.Function(running), td.Zeros([])))),
    (lambda: td.Slice(1), "positional argument"),
    (IndexError, lambda: ((numbers(), td.Identity()) >> td.Nth()).eval(([5], 1)),
     "got:      IndexError", "where:    block Root.Nth"),
    *((lambda kind=kind: td.Nth().set_input_type(kind), what) for kind, what in (
        ((3, 3, 3), "not a sequence and an index"),
        ((td.SequenceType(3), 3), "not a sequence and an index"),
        ((td.BroadcastSequenceType(3), OBJECT), NEVER), ((3, OBJECT), NO_SEQUENCE))),
    (lambda: td.Record(()) >> td.Zip(), "no sequence to zip"),
    (lambda: (numbers(), td.Scalar()) >> td.Zip(), "an item is not a sequence"),
    *((ValueError, partial(td.NGrams, n), "NGrams: the size of a window") for n in (0, -1)),
    (lambda: td.Broadcast() >> numbers() >> td.Sum(), "Sum: " + NEVER),
    (lambda: numbers().set_input_type(OBJECT).set_input_type(
        td.BroadcastSequenceType(OBJECT)), "type differs"),
    (lambda: td.AllOf(td.Scalar(), td.Vector(1)) >> td.Map(td.Identity()),
     "the items of the tuple differ"),
    (lambda: td.Scalar() >> td.Map(add()), NO_SEQUENCE),
    # Folds and recurrent networks.
    (lambda: td.Fold(td.Function(lambda a, b, c: a).set_input_type((1, 1, 1)),
     td.Zeros(1)), "the input of combine_block is not a pair"),
    (lambda: td.Fold(add(), td.Scalar()), "got:      nothing"),
    (lambda: numbers() >> td.Fold(td.Function(lambda a, b: b), td.Zeros(2)), DIFFERS),
    (lambda: td.InputTransform(list) >> td.Reduce(add()), "a wrong kind of input"),
    (lambda: numbers() >> td.Reduce(td.Function(lambda a, b: torch.stack([a, b], 1))), DIFFERS),
    (ValueError, lambda: td.RNN(add(), td.Zeros([]), True), "given twice"),
    (lambda: numbers() >> td.RNN(add(), td.Zeros([])), "the cell's output is not a pair"),
    (lambda: numbers() >> td.RNN(
        td.Function(lambda x, s: (x, torch.stack([s, s], 1))), td.Zeros([])),
     "the state changes its type"),
    (lambda: (numbers() >> td.RNN(td.Function(running))).eval([1]),
     "the type of the zeros cannot be inferred"),
    (lambda: numbers() >> td.RNN(td.Function(running), None, True), "the input is not a pair"),
    *((lambda kind=kind: td.RNN(kind(2, 3)), f"expected: nn.{kind.__name__}Cell",
       f"RNN: nn.{kind.__name__} runs over whole sequences") for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    *((lambda make=make: td.Map((td.Scalar(), td.Scalar())) >> make(),
       "the elements are not tensors") for make in (td.Sum, td.Mean, td.Min, td.Max)),
    *((lambda make=make, dtype=dtype: td.Map(td.Scalar(dtype)) >> make(),
       f"{make.__name__}: the elements have an invalid dtype", f"Root.{make.__name__}",
       "tensor.float()") for make, dtype in ((td.Mean, "int64"), (td.Mean, "int8"),
       (td.Mean, "bool"), (td.Min, "complex64"), (td.Max, "complex64"))),
    # Graphs of blocks.
    *((lambda make=make, key=key: read(make, key), "the item does not exist", what,
       "where:    Root", repr(key)) for make, key, what in (
        (pair, 2, "2 items"), (pair, -3, "2 items"), (pair, "a", "2 items"),
        (lambda: td.Record({"a": td.Scalar()}), "b", "1 items"), (td.Scalar, 0, "float32[]"),
        (td.Void, 0, "nothing"))),
    (lambda: wired(unread).eval(1.0), "the output of Function is unused", "where:    Root"),
    (without_output, "the output is not connected", "td.VoidType()"),
    *((ValueError, lambda make=make: in_a_circle(make), "form a cycle") for make in (
        lambda a, b, c: [td.Identity()] * 2, lambda a, b, c: (b, a), lambda a, b, c: (c[0], a))),
    *((ValueError, lambda make=make: connected(make), what) for make, what in (
        (lambda made, other, target: (made.input, target), "the input of Scalar is connected"),
        (lambda made, other, _: (other.input, made.output), "of a different composition is used"),
        (lambda made, other, _: (made.input, other.output), "of a different composition is used"),
        (lambda made, *_: (made.output, td.Identity()), "the output of a composition is read"),
        (lambda made, *_: (td.Scalar(), made.input), "the input of a composition is written"))),
    (AssertionError, overlapping, "scopes overlap"),
    (AssertionError, lambda: td.Scalar().reads(td.Scalar()), "Scalar.reads: used outside a scope"),
    (lambda: wired(lambda made: add().reads(*[td.Scalar().reads(made.input)] * 3)),
     "cannot be called with (float32[], float32[], float32[])"),
    (lambda: td.Composition().set_output_type((2, 2)).output.set_input_type(2), "type differs"),
    (mismatched, "expected: (float32[2],)", "got:      (float32[3],)", "where:    Root.Record#3"),
    (lambda: td.convert_to_block(3), "cannot be turned into a block"),
    (lambda: td.Scalar() >> len, "cannot be turned into a block"),
    (lambda: [*map(td.Map, [td.Scalar(name="mine")] * 2)],
     "mine: already a child of Map", "Root.mine"),
    (lambda: iter(td.Scalar()), "not iterable"),
    *((lambda of=of: as_truth_value(of), "used as a truth value while blocks are wired",
       "td.OneOf") for of in (lambda made, scalar: scalar, lambda made, scalar: made.input,
                              lambda made, scalar: made.input[0])),
    # Choices, records, metrics.
    (ValueError, lambda: td.OneOf(len, {}), "it has no cases"),
    (lambda: td.OneOf(3, {1: td.Scalar()}), "key_fn: py_fn cannot be called"),
    (lambda: td.OneOf(len, {1: td.Scalar(), 2: td.Vector(2)}), "type differs",
     "expected: float32[]"),
    (lambda: td.Scalar() >> td.OneOf(len, {1: td.Identity()}), "expected: object"),
    *((ValueError, lambda keys=keys: one_of(*keys), "OneOf: a key occurs twice", "where:    Root",
       f"got:      {keys[0]!r}, {keys[1]!r}") for keys in (("a", "a"), (1, True))),
    *((lambda make=make: td.OneOf(make(), {0: td.Scalar()}), "output",
       "object, PyObjectType()", "where:    Root[key_fn].Function")
      for make in (lambda: td.FC(2), lambda: nn.Linear(2, 1))),
    (KeyError, lambda: run(td.Map(td.OneOf(lambda x: x, {"pair": td.Length(), "leaf": td.Length()}))
                           >> td.Sum(), ["pair"], ["other"]), "OneOf: unknown key 'other'.\n",
     "expected: 'leaf', 'pair'", "where:    example 1, block Root.Map.OneOf"),
    (IndexError, lambda: (td.Map(td.OneOf(len, {2: td.GetItem(5) >> td.Scalar(), 1: td.Length()}))
                          >> td.Sum()).eval(["ab"]), "Root.Map.OneOf[2].GetItem"),
    (ZeroDivisionError, lambda: td.Map(td.OneOf(lambda value: 1 // 0, {1: td.Length()})).eval("a"),
     "where:    block Root.OneOf[key_fn].key_fn"),
    (lambda: td.Metric(3), "name is not a string"),
    *((lambda kind=kind: td.Metric("m").set_input_type(kind),
       "neither a tensor nor a pair") for kind in ((3, 3), (3, OBJECT, 3), (OBJECT, 3))),
    (lambda: numbers() >> td.Metric("m"), "a wrong kind of input"),
    (lambda: td.AllOf(td.Scalar() >> td.Metric("m"), td.Scalar("int64")
                                 >> td.Metric("m")).eval(1), "metric 'm' is used with two types"),
    (RuntimeError, lambda: td.Record({"a": td.Identity(), "b": td.Identity()}).set_input_type(PAIR),
     "without order"),
    (lambda: td.Record((td.Identity(),)).set_input_type(PAIR), "wrong number of inputs"),
    (lambda: td.Record((td.Scalar(),)).set_output_type(PAIR), "type differs"),
    (KeyError, lambda: td.Record({"a": td.Scalar()}).eval({}), "got:      KeyError: 'a'",
     "where:    block Root"),
    (lambda: td.Record({"a": td.Identity()}).set_input_type(3), "a wrong kind of input"),
    *((lambda make=make, bad=bad: make(bad), "not a set of blocks", repr(bad))
      for make in (td.Record, partial(td.OneOf, len)) for bad in (3, "ab", [td.Scalar()], None)),
    (lambda: td.Optional(td.Scalar(), td.Zeros(3)), "Optional: " + DIFFERS, "got:      float32[3]"),
    (lambda: td.Optional(td.Identity()), "this type has no zeros"),
    # Declarations.
    (lambda: (td.Map(declared(OBJECT, [])()) >> td.Sum()).eval([1]),
     "expr: the forward declaration was never resolved", "Root.Map.expr"),
    (ValueError, lambda: resolved(2), "expr: resolved twice"),
    (ValueError, lambda: resolved()(), "expr: called after it was resolved"),
    (differs_from_its_declaration, DIFFERS),
    (refers_to_nothing_else, "cannot be inferred"),
    (remembers_tensors, "memoize works on host objects only"),
    (KeyError, lambda: fails_in_a_declaration([[2, [9]]]), DECLARED),
    (lambda: fails_in_a_declaration([["x"]]), DECLARED + "[0].Scalar"),
    # Host input.
    (ValueError, lambda: td.Vector(2).eval([1.0]), "Root: shape differs", "float32[2]"),
    (lambda: (td.Map(td.Scalar("int64")) >> td.Sum()).eval([1, 0.5]),
     "Scalar: dtype differs", "got:      float64[], 0.5", "where:    block Root.Map.Scalar"),
    (lambda: td.Scalar().eval("a"), "'a'"),
    (lambda: run(numbers() >> td.Sum(), [1], [None]), "where:    example 1, block Root.Map.Scalar"),
    *((ValueError, lambda dtype=dtype, data=data: run(td.Map(td.Scalar(dtype)) >> td.Sum(),
                                                      [1, data]),
       "Scalar: a number is out of range", f"expected: {dtype}[], from ", f"got:      {data}",
       "where:    example 0, block Root.Map.Scalar") for dtype, data in (
        ("uint8", 300), ("uint8", -1), ("int32", 2**40), ("int16", np.int64(40000)))),
    *((ValueError, lambda data=data: td.Scalar("uint8").eval(data), "out of range")
      for data in ("300", 300.0)),
    *((lambda bad=bad: td.Map(td.Scalar("int32")).eval([1, "2", bad, 3]),
       "Scalar: dtype differs", repr(bad)) for bad in (
        "0.5", 0.5, "one", "", float("nan"), float("inf"), np.nan, 1e300, "9" * 30)),
    (lambda: td.InputTransform(3), "py_fn cannot be called"),
    (KeyError, lambda: run({"a": td.InputTransform(fails) >> td.Scalar()} >> td.GetItem(0),
                           {"a": 1}), "where:    example 0, block Root.Record['a'].InputTransform"),
    *((IndexError, lambda bad=bad: td.OneHot(*bad), "the range is empty")
      for bad in ((0,), (3, 3), (3, 1))),
    (KeyError, lambda: (td.Map(td.OneHot(2)) >> td.Sum()).eval([0, 2]), "OneHot: unknown key 2",
     "Root.Map.OneHot"),
    (KeyError, lambda: td.OneHotFromList(["a"]).eval("c"), "unknown key 'c'"),
    (AssertionError, lambda: td.OneHotFromList(["a", "a"]), "occurs twice"),
    (IndexError, lambda: run(td.Map(td.InputRow("x", 2)) >> td.Sum(), [-1], x=torch.zeros(1, 2)),
     "the row does not exist"),
    # Constants, concatenations.
    (lambda: td.FromTensor([1.0]), "neither a tensor nor an array"),
    (lambda: td.FromTensor(MISSING), "not known yet"),
    *((lambda kind=kind: td.Zeros(kind), "this type has no zeros") for kind in (
        OBJECT, (3, OBJECT), td.SequenceType(OBJECT), td.SequenceType((3, OBJECT)),
        td.BroadcastSequenceType(3))),
    *((lambda items=items, options=options: td.Concat(**options).set_input_type(items),
       what) for items, options, what in (
        ((), {}, "no tensor to concatenate"), (((3, 3), 3), {}, "an item is not a tensor"),
        ((3, 3), {"concat_dim": 1}, "has no axis 1"),
        (([2, 3], [2, 4]), {}, "the other axes differ"), ((3, [3, "int32"]), {}, "dtypes differ"),
        ((OBJECT, 3), {}, "an item is not a tensor"),
        (td.TensorType(()), {}, "a wrong kind of input"))),
    # Functions.
    *((lambda function=function: td.Vector(2) >> td.Function(function, name="mine"),
       "mine: its function cannot be called with float32[2]", got, "where:    Root.mine")
      for function, got in ((lambda x: 3, "int, which is not a tensor"),
        (lambda x: x.sum(), "a scalar, without a batch axis"),
        (lambda x: x[:1], "1 and 1 rows for 2 and 3 rows"),
        (lambda x: x.new_zeros(2, 4), "2 and 2 rows for 2 and 3 rows"),
        (lambda x: (), "nothing, where tensors were expected"),
        (lambda x: x @ torch.zeros(5, 5), "RuntimeError"),
        (lambda x: x.new_zeros(x.size(0), x.size(0)), "rows of [2] and of [3]"))),
    (lambda: (td.Vector(2) >> td.Function(torch.neg, infer_output_type=False)).eval(1),
     "the output type cannot be inferred"),
    *((partial(make, 3), "tf_fn cannot be called") for make in (td.Function, td.Segment)),
    *((lambda make=make: make() >> td.Function(torch.neg), NO_TENSORS) for make in (
        lambda: td.InputTransform(len), numbers,
        lambda: td.AllOf(td.Scalar(), td.InputTransform(len)))),
    (lambda: td.Record(()) >> td.Function(torch.neg), "the input contains no tensors"),
    (lambda: td.AllOf(numbers(), numbers()) >> td.Segment(torch.add),
     "the input has two sequences"),
    # Layers.
    *((ValueError, lambda bad=bad: td.FC(1, input_keep_prob=bad), "is not a probability")
      for bad in (0, 1.5, "half")),
    *((lambda make=make: make() >> td.FC(2), "FC: a wrong input type",
       "a float32 vector") for make in (td.Scalar, lambda: td.Tensor([2, 2]),
                                        lambda: td.Vector(2, "int64"))),
    (shared_by_two_widths, "the input type differs", "float32[3]"),
    (lambda: td.FC(2).set_input_type(OBJECT), "a wrong kind of input"),
    (RuntimeError, lambda: td.FC(2).weights, "FC: the weights do not exist yet",
     "call the layer first"),
    (ValueError, lambda: td.Embedding(3, 2, torch.ones(2, 2)), "different shape"),
    *((lambda make=make: make() >> td.Embedding(3, 2), "an integer scalar")
      for make in (td.Scalar, lambda: td.Vector(1, "int64"))),
    *((IndexError, lambda wrong=wrong: embedding(wrong), f"got:      {wrong}", "from 0 to 4",
       "the index of a vector is out of range", "where:    example 2, block Root.Map.Function")
      for wrong in (7, -1)),
    *((IndexError, lambda wrong=wrong: embedding(wrong - 1, 1), f"got:      {wrong}", "from 0 to 4",
       "Embedding: the index of a vector is out of range", "operation 'embedding', step 0")
      for wrong in (7, -1)),
    (lambda: td.ScopedLayer(3), "layer_fn cannot be called"),
    *((lambda other=other: td.FC(2).set_input_type(3)(other),
       "FC: the input type differs") for other in (
        torch.ones(4, 2), torch.ones(4, 3, dtype=torch.int64), torch.ones(4, 3, 3))),
    (lambda: td.FC(2)([1.0, 2.0, 3.0]), "than batched tensors"),
    *((lambda other=other: td.Embedding(5, 2).set_input_type("int64")(other),
       "Embedding: the input type differs", "int64[]") for other in (
        torch.tensor([1.5]), torch.tensor([[1, 2]]))),
    (NotImplementedError, lambda: td.Layer()(torch.ones(1)), "_process"),
    (ValueError, lambda: td.create_variable_scope(""), "no name"),
    (lambda: td.create_variable_scope(3), "no name"),  # type: ignore[arg-type]
    (lambda: td.FC(2, name=3), "the name is not a string"),
    # Types.
    *((lambda bad=bad: td.convert_to_type(bad), "not a type", repr(bad))
      for bad in (None, 1.5, len, {"a": 1}, True)),
    (lambda: td.TensorType((), "string"), "unknown dtype"),
    (lambda: td.TensorType((None,)), "fully known"),
    (lambda: td.TensorType((-1,)), "negative dimension"),
    (lambda: td.TupleType(3, 3).flatten((1,)), "not an instance", "a tuple of 2"),
    # Compilers.
    *((lambda make=make: td.Compiler(make()), what) for make, what in (
        (td.Identity, "a host object in the output"),
        (lambda: td.AllOf(td.Scalar(), td.InputTransform(len)), "a host object in the output"),
        (numbers, "a sequence in the output"), (td.Void, "there is nothing to compute"),
        (lambda: td.Record(()), "there is nothing to compute"))),
    (lambda: td.Compiler(td.Scalar())(3), "cannot be iterated over", "[example]"),
    (ValueError, lambda: run(td.Scalar()), "the list of examples is empty"),
    (ValueError, lambda: td.Compiler(td.Scalar(), policy="depht"),
     "unknown policy 'depht'", "'agenda'"),
    (ValueError, lambda: td.Map(add()).set_input_type(td.SequenceType(([], []))).eval([(1, 2, 3)]),
     "wrong number of items"),
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_is_refused_is_said(case: tuple[Any, ...]) -> None:
    kind, call, *words = case if isinstance(case[0], type) else (TypeError, *case)
    text = message(kind, call)
    assert [word for word in words if word not in text] == [], text
