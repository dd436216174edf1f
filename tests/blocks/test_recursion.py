"""Recursion: declared, resolved, deep, memoized, both ways along a tree."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core import RaggedRows
from tests.blocks.harness import add, builds, is_list, three_ways
from tests.core.helpers import message

OBJECT = td.PyObjectType()


def tree_sum(**options: Any) -> td.Block:
    tree = td.ForwardDeclaration(OBJECT, [], name="tree", **options)
    pair = td.Map(tree()) >> td.Fold(add(), td.Zeros("float32"))
    tree.resolve_to(td.OneOf(is_list, {True: pair, False: td.Scalar()}))
    return tree.target


def test_a_declaration_may_refer_to_itself() -> None:
    builds(tree_sum(), [([[1, 2], 3], 6.0), (4, 4.0), ([], 0.0)], depth=4)
    builds(td.Map(tree_sum()) >> td.Sum(), [([[1, [2]], 3], 6.0)])
    builds(tree_sum() >> td.Function(torch.neg), [([1, 2], -3.0)])


def test_two_references_in_one_expression() -> None:
    tree = td.ForwardDeclaration(OBJECT, [])
    both = {"l": tree(), "r": tree()} >> add()
    tree.resolve_to(td.OneOf(lambda x: isinstance(x, dict), {True: both, False: td.Scalar()}))
    builds(tree.target, [({"l": {"l": 1, "r": 2}, "r": 3}, 6.0)], depth=2)


def test_types_are_inferred_through_declarations() -> None:
    tree = td.ForwardDeclaration()
    reference = tree()
    tree.resolve_to(td.Scalar())
    assert reference.input_type == OBJECT and reference.output_type == td.TensorType(())
    block = td.Map(reference) >> td.Sum()
    builds(block, [([1, 2], 3.0)])


def test_two_declarations_may_refer_to_each_other() -> None:
    even = td.ForwardDeclaration(OBJECT, [], name="even")
    odd = td.ForwardDeclaration(OBJECT, [], name="odd")
    less = td.InputTransform(lambda n: n - 1)
    one = td.FromTensor(torch.tensor(1.0))
    to_odd = less >> odd()
    to_even = td.AllOf(td.InputTransform(lambda n: n - 1) >> even(), one) >> add()
    even.resolve_to(td.OneOf(bool, {False: td.Zeros([]), True: to_odd}))
    odd.resolve_to(td.OneOf(bool, {False: td.Zeros([]), True: to_even}))
    builds(even.target, [(5, 2.0), (0, 0.0), (6, 3.0)])


def test_orphaned_declarations_are_tolerated() -> None:
    td.ForwardDeclaration(OBJECT, [])()
    inner = td.ForwardDeclaration(OBJECT, [])
    inner()
    builds(tree_sum(), [([1], 1.0)])


def test_inputs_may_be_deeper_than_the_recursion_limit() -> None:
    deep: Any = 1
    for _ in range(2_000):
        deep = [deep]
    neg = td.ForwardDeclaration(OBJECT, [])
    case = td.GetItem(0) >> neg() >> td.Function(torch.neg)
    neg.resolve_to(td.OneOf(is_list, {True: case, False: td.Scalar()}))
    model = td.Compiler(neg.target)
    assert model.max_depth(deep) == 2_000
    assert model([deep, [1]]).output.tolist() == [1.0, -1.0]


def test_blocks_may_be_nested_deeply() -> None:
    block: td.Block = td.Scalar()
    deep: Any = 3
    for _ in range(30):
        block, deep = td.Map(block), [deep]
    assert block.eval(deep, tolist=True) == deep
    pipe: td.Block = td.Scalar()
    for _ in range(30):
        pipe = pipe >> td.Identity() >> td.AllOf(td.Identity()) >> td.GetItem(0)
    assert pipe.eval(2.0) == 2.0


class ChildSum(nn.Module):
    """The smallest child-sum cell: any number of children, a state of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, children: RaggedRows) -> tuple[Tensor, Tensor]:
        c, h = children.sum()
        h = torch.tanh(self.linear(x + h))
        return c + h, h


def child_sum(memoize: bool = False) -> td.Block:
    tree = td.ForwardDeclaration(OBJECT, (2, 2), memoize=memoize)
    children = td.GetItem("children") >> td.Map(tree())
    tree.resolve_to(td.AllOf(td.GetItem("x") >> td.Vector(2), children) >> td.Segment(ChildSum()))
    return tree.target


def node(x: float, *children: Any) -> dict[str, Any]:
    return {"x": [x, -x], "children": list(children)}


def test_child_sum_of_any_arity() -> None:
    wide = node(1, *(node(i) for i in range(20)))
    chain = node(0)
    for i in range(30):
        chain = node(i, chain)
    three_ways(child_sum(), [wide, chain, node(3), node(1, wide, chain)])
    assert child_sum().max_depth(chain) == 31


def test_shared_parts_are_evaluated_once() -> None:
    leaf = node(1)
    middle = [node(2, leaf), node(3, leaf)]
    graph = node(4, *middle, leaf)
    once, again = td.Compiler(child_sum(True)), td.Compiler(child_sum(False))
    assert once.tracer(graph).num_calls == 4
    assert again.tracer(graph).num_calls == 6
    again.load_state_dict(once.state_dict())
    for a, b in zip(once([graph, leaf]).output, again([graph, leaf]).output, strict=True):
        torch.testing.assert_close(a, b)
    three_ways(child_sum(True), [graph, leaf, graph])


def test_memory_is_kept_for_one_example_only() -> None:
    model, loop = td.Compiler(child_sum(True)), node(1)
    assert [model.tracer(loop).num_calls for _ in range(2)] == [1, 1]
    loop["children"].append(loop)
    text = message(ValueError, model, [node(1), loop])
    assert "an object contains itself" in text and "example 1" in text


def test_both_directions_along_a_tree() -> None:
    """States from below, read again on the way down: each node adds its parent's to its own."""
    up = td.ForwardDeclaration(OBJECT, [], memoize=True)
    below = td.GetItem("children") >> td.Map(up()) >> td.Sum()
    total = td.AllOf(td.GetItem("x") >> td.GetItem(0) >> td.Scalar(), below) >> add()
    down = td.ForwardDeclaration((OBJECT, []), td.VoidType())
    body = td.Composition()
    with body.scope():
        here, parent = body.input[0], body.input[1]
        state = add().reads(up().reads(here), parent)
        td.Metric("down").reads(state)
        children = td.GetItem("children").reads(here)
        pairs = td.Zip().reads(children, td.Broadcast().reads(state))
        (td.Map(down()) >> td.Void()).reads(pairs)
    up.resolve_to(total)
    down.resolve_to(body)
    root = td.AllOf(td.Identity(), td.Zeros([])) >> down.target
    tree = node(1, node(2, node(3)), node(4))
    # From below: 10, 5, 3, 4; on the way down each adds what its parent has.
    assert root.eval(tree) == (None, {"down": [10.0, 15.0, 18.0, 14.0]})


@pytest.mark.parametrize("policy", ["depth", "agenda"])
def test_unused_recursion_runs_once_at_the_end(policy: str) -> None:
    tree = td.ForwardDeclaration(OBJECT, [], name="tree")
    state = td.OneOf(is_list, {True: td.Map(tree()) >> td.Sum(), False: td.Scalar()})
    score = td.Function(torch.exp, name="score") >> td.Metric("score")
    tree.resolve_to(state >> td.AllOf(td.Identity(), score) >> td.GetItem(0))
    model = td.Compiler(tree.target, policy=policy)
    stats = model.collate([[[1, 2], [3, [4, 5]]], 6]).stats()
    assert stats.operations.count("score") == 1 and stats.operations[-1] == "score"
