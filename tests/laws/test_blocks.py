"""Law of blocks: batched is call by call, and the inferred type is that of the result.

For random well-typed expressions and their inputs::

    Compiler(block)(examples).output == [block.eval(example) for example in examples]
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from tests.blocks.harness import three_ways

# Not a strategy: the checks of annotations draw random numbers, which strategies must not.
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Drawn(NamedTuple):
    """A block, the type that it must have, and inputs for it."""

    block: td.Block
    kind: td.ResultType
    inputs: st.SearchStrategy[Any]


def blocks_of(draw: Draw, depth: int = 3) -> Drawn:
    """Draw a block that takes host objects."""
    names = ["leaf", "leaf", *MAKERS] if depth else ["leaf", "leaf"]
    name = draw(st.sampled_from(names))
    if name == "leaf":
        return vector(draw(st.integers(1, 2)))
    return MAKERS[name](draw, depth - 1)


NUMBER = st.integers(-3, 3).map(lambda n: n / 2)


def vector(size: int) -> Drawn:
    inputs = st.lists(NUMBER, min_size=size, max_size=size)
    return Drawn(td.Vector(size), td.TensorType((size,)), inputs)


def sequence(draw: Draw, depth: int) -> Drawn:
    block, kind, inputs = blocks_of(draw, depth)
    return Drawn(td.Map(block), td.SequenceType(kind), st.lists(inputs, max_size=3))


def record(draw: Draw, depth: int) -> Drawn:
    fields = {str(n): blocks_of(draw, depth) for n in range(draw(st.integers(1, 3)))}
    block = td.Record({name: field.block for name, field in fields.items()})
    kind = td.TupleType(*(field.kind for field in fields.values()))
    inputs = st.fixed_dictionaries({name: field.inputs for name, field in fields.items()})
    return Drawn(block, kind, inputs)


def optional(draw: Draw, depth: int) -> Drawn:
    block, kind, inputs = blocks_of(draw, depth)
    return Drawn(td.Optional(block), kind, st.none() | inputs)


def one_of(draw: Draw, depth: int) -> Drawn:
    """Take the second of two elements, or give zeros if there are none."""
    block, kind, inputs = blocks_of(draw, depth)
    chosen = td.OneOf(len, {2: td.GetItem(1) >> block, 0: td.Zeros(kind)})
    pairs = st.tuples(st.just(0), inputs).map(list)
    return Drawn(chosen, kind, st.just([]) | pairs)


class Grow(nn.Module):
    """A linear map of a sum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(self.linear(a + 2 * b))


def last_output(cell: td.Block, size: int) -> td.Block:
    twice = cell >> td.AllOf(td.Identity(), td.Identity())
    return td.RNN(twice, td.Zeros(size)) >> td.GetItem(1)


def from_the_end(cell: td.Block, size: int) -> td.Block:
    return td.Slice(step=-1) >> td.Fold(cell, td.FromTensor(torch.ones(size)))


# From a sequence of vectors of a size to a vector.
REDUCTIONS: dict[str, Callable[[td.Block, int], td.Block]] = {
    "reduce": lambda cell, size: td.Reduce(cell),
    "fold": lambda cell, size: td.Fold(cell, td.Zeros(size)),
    "sum": lambda cell, size: td.Sum(),
    "mean": lambda cell, size: td.Mean(),
    "max": lambda cell, size: td.Max(),
    "rnn": last_output,
    "ngrams": lambda cell, size: td.NGrams(2) >> td.Map(cell) >> td.Sum(),
    "nth": from_the_end,
}


def reduced(draw: Draw, depth: int) -> Drawn:
    size = draw(st.integers(1, 2))
    block, kind, inputs = vector(size)
    reduction = REDUCTIONS[draw(st.sampled_from(list(REDUCTIONS)))]
    tail = reduction(td.Function(Grow(size)), size)
    return Drawn(td.Map(block) >> tail, kind, st.lists(inputs, max_size=5))


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a * b, torch.tanh(a - b)


def zipped(draw: Draw, depth: int) -> Drawn:
    """Combine each element of a sequence with the same value."""
    size = draw(st.integers(1, 2))
    one, kind, inputs = vector(size)
    inner: td.Block
    result: td.ResultType
    if draw(st.sampled_from(["concat", "both"])) == "concat":
        inner = td.Concat() >> nn.Linear(2 * size, 3)
        result = td.TensorType((3,))
    else:
        inner = td.Function(both)
        result = td.TupleType(kind, kind)
    pairs = {"all": td.Vector(size) >> td.Broadcast(), "each": td.Map(one)}
    fields = st.fixed_dictionaries({"all": inputs, "each": st.lists(inputs, max_size=3)})
    return Drawn(pairs >> td.ZipWith(inner), td.SequenceType(result), fields)


def tree(draw: Draw, depth: int) -> Drawn:
    """Recurse over nested lists."""
    size = draw(st.integers(1, 2))
    leaf, kind, inputs = vector(size)
    node = td.ForwardDeclaration(td.PyObjectType(), kind, memoize=draw(st.booleans()))
    total = td.Reduce(td.Function(Grow(size))) if draw(st.booleans()) else td.Sum()
    of_kids = td.GetItem("kids") >> td.Map(node()) >> total
    of_leaf = td.GetItem("leaf") >> leaf
    node.resolve_to(td.OneOf(lambda tree: "kids" in tree, {True: of_kids, False: of_leaf}))

    def with_kids(trees: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(trees, max_size=3).map(lambda kids: {"kids": kids})

    leaves = inputs.map(lambda numbers: {"leaf": numbers})
    return Drawn(node.target, kind, st.recursive(leaves, with_kids, max_leaves=8))


def shared(draw: Draw, depth: int) -> Drawn:
    """Use one layer twice."""
    layer = td.FC(2, torch.tanh)
    block, _, inputs = vector(2)
    negative = td.Vector(2) >> td.Function(torch.neg)
    return Drawn(td.AllOf(block >> layer, negative >> layer), td.TupleType(2, 2), inputs)


MAKERS: dict[str, Callable[[Draw, int], Drawn]] = {
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
    terminals = terminals_of(kind, result)
    for terminal, value in zip(terminals, kind.flatten(result), strict=True):
        assert isinstance(terminal, td.TensorType)
        assert tuple(value.shape) == terminal.shape
        assert value.dtype is terminal.torch_dtype


def terminals_of(kind: td.ResultType, result: Any) -> list[td.ResultType]:
    terminals: list[td.ResultType] = []
    kind.for_each_terminal(lambda terminal, _: terminals.append(terminal), result)
    return terminals
