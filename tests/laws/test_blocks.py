"""Law of blocks: batched is call by call, and the inferred type is that of the result.

For random well-typed expressions and their inputs::

    Compiler(block)(examples).output == [block.eval(example) for example in examples]
"""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import three_ways

# Not a strategy: the checks of annotations draw random numbers, which strategies must not.
Draw = Callable[[st.SearchStrategy[Any]], Any]
Case = tuple[td.Block, td.ResultType, st.SearchStrategy[Any]]


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * b, torch.tanh(a - b)


class Grow(nn.Module):
    """A linear map of a sum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.linear(a + 2 * b))


NUMBER = st.integers(-3, 3).map(lambda n: n / 2)


def leaves(size: int) -> Case:
    """Return a block from a host object to a vector, its type and its inputs."""
    return td.Vector(size), td.TensorType((size,)), st.lists(NUMBER, min_size=size, max_size=size)


def blocks_of(draw: Draw, depth: int = 3) -> Case:
    """Draw a block from a host object, the type it must have, and inputs for it."""
    kind = draw(st.sampled_from(["leaf"] * 2 + (list(MAKERS) if depth else [])))
    if kind == "leaf":
        return leaves(draw(st.integers(1, 2)))
    return MAKERS[kind](draw, depth - 1)


def sequence(draw: Draw, depth: int) -> Case:
    block, kind, inputs = blocks_of(draw, depth)
    return td.Map(block), td.SequenceType(kind), st.lists(inputs, max_size=3)


def record(draw: Draw, depth: int) -> Case:
    parts = [blocks_of(draw, depth) for _ in range(draw(st.integers(1, 3)))]
    block = td.Record({str(n): part for n, (part, _, _) in enumerate(parts)})
    inputs = st.fixed_dictionaries({str(n): given for n, (_, _, given) in enumerate(parts)})
    return block, td.TupleType(*(kind for _, kind, _ in parts)), inputs


def optional(draw: Draw, depth: int) -> Case:
    block, kind, inputs = blocks_of(draw, depth)
    return td.Optional(block), kind, st.none() | inputs


def one_of(draw: Draw, depth: int) -> Case:
    block, kind, inputs = blocks_of(draw, depth)
    chosen = td.OneOf(len, {2: td.GetItem(1) >> block, 0: td.Zeros(kind)})
    return chosen, kind, st.just([]) | st.tuples(st.just(0), inputs).map(list)


def reduced(draw: Draw, depth: int) -> Case:
    """Draw a reduction of a sequence of vectors."""
    size = draw(st.integers(1, 2))
    vector, kind, inputs = leaves(size)
    way = draw(st.sampled_from(["reduce", "fold", "sum", "mean", "max", "rnn", "ngrams", "nth"]))
    cell = td.Function(Grow(size))
    tail: Any = {
        "reduce": lambda: td.Reduce(cell),
        "fold": lambda: td.Fold(cell, td.Zeros(size)),
        "sum": td.Sum,
        "mean": td.Mean,
        "max": td.Max,
        "rnn": lambda: (
            td.RNN(cell >> td.AllOf(td.Identity(), td.Identity()), td.Zeros(size)) >> td.GetItem(1)
        ),
        "ngrams": lambda: td.NGrams(2) >> td.Map(cell) >> td.Sum(),
        "nth": lambda: td.Slice(step=-1) >> td.Fold(cell, td.FromTensor(torch.ones(size))),
    }[way]()
    return td.Map(vector) >> tail, kind, st.lists(inputs, max_size=5)


def zipped(draw: Draw, depth: int) -> Case:
    """Draw a block that combines each element of a sequence with the same value."""
    size = draw(st.integers(1, 2))
    vector, kind, inputs = leaves(size)
    other, _, others = leaves(size)
    layer = draw(st.sampled_from(["concat", "both"]))
    inner: Any = td.Function(both)
    result: td.ResultType = td.TupleType(kind, kind)
    if layer == "concat":
        inner, result = td.Concat() >> nn.Linear(2 * size, 3), td.TensorType((3,))
    pairs = {"all": other >> td.Broadcast(), "each": td.Map(vector)}
    fields = st.fixed_dictionaries({"all": others, "each": st.lists(inputs, max_size=3)})
    return pairs >> td.ZipWith(inner), td.SequenceType(result), fields


def tree(draw: Draw, depth: int) -> Case:
    """Draw a recursion over nested lists."""
    size = draw(st.integers(1, 2))
    vector, kind, inputs = leaves(size)
    memoize = draw(st.booleans())
    node = td.ForwardDeclaration(td.PyObjectType(), kind, memoize=memoize)
    inside = td.Map(node()) >> (
        td.Reduce(td.Function(Grow(size))) if draw(st.booleans()) else td.Sum()
    )
    node.resolve_to(
        td.OneOf(
            lambda x: "kids" in x,
            {True: td.GetItem("kids") >> inside, False: td.GetItem("leaf") >> vector},
        )
    )
    leaf = inputs.map(lambda x: {"leaf": x})
    nested = st.recursive(
        leaf, lambda t: st.lists(t, max_size=3).map(lambda k: {"kids": k}), max_leaves=8
    )
    return node.target, kind, nested


def shared(draw: Draw, depth: int) -> Case:
    """Use one layer twice."""
    layer = td.FC(2, torch.tanh)
    vector, _, inputs = leaves(2)
    block = td.AllOf(vector >> layer, td.Vector(2) >> td.Function(torch.neg) >> layer)
    return block, td.TupleType(2, 2), inputs


MAKERS: Any = {
    "sequence": sequence,
    "record": record,
    "optional": optional,
    "one of": one_of,
    "reduced": reduced,
    "zipped": zipped,
    "tree": tree,
    "shared": shared,
}


@given(st.data())
def test_batched_is_call_by_call(data: st.DataObject) -> None:
    block, kind, inputs = blocks_of(data.draw)
    examples = data.draw(st.lists(inputs, min_size=1, max_size=3))
    assert block.output_type == kind or block.output_type is None
    three_ways(block, examples)
    assert block.output_type == kind


@given(st.data())
def test_types_are_inferred(data: st.DataObject) -> None:
    block, kind, inputs = blocks_of(data.draw)
    result = block.eval(data.draw(inputs))
    for terminal, value in zip(_terminals(kind, result), kind.flatten(result), strict=True):
        assert isinstance(terminal, td.TensorType)
        assert tuple(value.shape) == terminal.shape and value.dtype is terminal.torch_dtype


def _terminals(kind: td.ResultType, result: Any) -> list[td.ResultType]:
    found: list[td.ResultType] = []
    kind.for_each_terminal(lambda terminal, _: found.append(terminal), result)
    return found
