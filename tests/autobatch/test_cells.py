"""Calls of recurrent cells: step by step, and equal to one by one."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyg_dynbatch.autobatch import autobatch, emit
from pyg_dynbatch.nn import ChildSumTreeLSTMCell, NaryTreeLSTMCell, TreeGRUCell, TreeRNNCell
from tests.strategies import few

WIDTH = 3
CELLS = {
    "nary": lambda: NaryTreeLSTMCell(WIDTH, WIDTH, 3),
    "child-sum": lambda: ChildSumTreeLSTMCell(WIDTH, WIDTH),
    "gru": lambda: TreeGRUCell(WIDTH, WIDTH, 3),
    "rnn": lambda: TreeRNNCell(WIDTH, WIDTH, 3),
}


class Recursion(nn.Module):
    """A tree is a word or None, and a list of trees or None."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.word, self.cell, self.head = nn.Embedding(9, WIDTH), cell, nn.Linear(WIDTH, 2)

    def state(self, tree: Any) -> Any:
        word, children = tree
        x = None if word is None else self.word(torch.tensor(word))
        states = [None if child is None else self.state(child) for child in children]
        if self.cell.arity is None:
            states = [state for state in states if state is not None]
            return self.cell(x, states) if states else self.cell(x)
        return self.cell(x, *states) if any(s is not None for s in states) else self.cell(x)

    def hidden(self, tree: Any) -> Any:
        state = self.state(tree)
        return state[0] if isinstance(state, tuple) else state

    def forward(self, tree: Any) -> Any:
        hidden = self.hidden(tree)
        emit("hidden", hidden)
        return self.head(hidden)


def trees(depth: int = 4) -> Any:
    words = st.integers(0, 8)
    leaf = st.tuples(words, st.just([None, None, None]))

    def inner(children: Any) -> Any:
        slots = st.lists(st.none() | children, min_size=3, max_size=3)
        some = slots.filter(lambda found: any(child is not None for child in found))
        return st.tuples(st.none() | words, some)

    return st.recursive(leaf, inner, max_leaves=depth * 3)


def check(plain: nn.Module, examples: list[Any], batches: int = 3) -> Any:
    """Compare every way to run the examples with one by one: values, gradients, emitted rows."""
    model = autobatch(plain.double())
    expected = model(examples, batch=False)
    rows = {name: found.rows for name, found in model.emitted.items()}
    parameters, options = list(model.parameters()), {"materialize_grads": True}
    wanted = torch.autograd.grad(expected.square().sum(), parameters, **options)
    ways = [lambda: examples, lambda: model.collate(examples)]
    for way in ways[:batches]:
        found = model(way())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        for name, emitted in model.emitted.items():
            torch.testing.assert_close(emitted.rows, rows[name], rtol=0, atol=1e-10)
        grads = torch.autograd.grad(found.square().sum(), parameters, **options)
        torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-10)
    return model


@pytest.mark.parametrize("kind", CELLS)
@few(10)
@given(examples=st.lists(trees(), min_size=1, max_size=5))
def test_batched_equals_one_by_one(kind: str, examples: list[Any]) -> None:
    check(Recursion(CELLS[kind]()), examples)


LEAF = (1, [None, None, None])
TREE = (None, [(2, [LEAF, None, (None, [LEAF, LEAF, None])]), None, LEAF])


@pytest.mark.parametrize("kind", CELLS)
def test_calls_of_a_cell_are_batched(kind: str) -> None:
    model = check(Recursion(CELLS[kind]()), [TREE, LEAF, TREE])
    explanation = model.explain([TREE, LEAF, TREE])
    cells = [op for op in explanation.operations if op.name.startswith("cell")]
    assert {op.way for op in cells} == {"direct"}
    assert sum(op.calls for op in cells) == 15
    assert explanation.steps == 3  # leaves, all that is above them in a tree, and heads


class Shared(Recursion):
    """A state with two parents, and a state that other modules read."""

    def forward(self, tree: Any) -> Any:
        state = self.state(tree)
        joined = self.cell(None, state, state, None)
        return self.head(joined[0]) + self.head(state[1])


class Feedback(Recursion):
    """The input of a call depends on a state."""

    def forward(self, tree: Any) -> Any:
        state = self.state(tree)
        return self.head(self.cell(state[0].tanh(), state, None, None)[0])


class Mixed(Recursion):
    """A child whose parts come from different calls."""

    def forward(self, tree: Any) -> Any:
        (h, _), (_, c) = self.state(tree), self.state(LEAF)
        return self.head(self.cell(None, (h, c), None, None)[0])


class Reader(Recursion):
    """A later flush continues with states of an earlier one."""

    def forward(self, tree: Any) -> Any:
        state = self.state(tree)
        if self.head(state[0])[0] > self.head(state[0])[1]:
            state = self.cell(None, state, None, None)
        return self.head(self.cell(None, state, state, None)[0])


@pytest.mark.parametrize("kind", [Shared, Feedback, Mixed])
def test_states_that_form_no_tree(kind: Any) -> None:
    check(kind(CELLS["nary"]()), [TREE, LEAF, TREE])


def test_continues_after_a_read() -> None:
    check(Reader(CELLS["nary"]()), [TREE, LEAF, TREE], batches=1)


class UpAndDown(Recursion):
    """The states of one cell are the inputs of another, and a tree of calls comes between."""

    def __init__(self) -> None:
        super().__init__(CELLS["gru"]())
        self.down, self.mix = TreeRNNCell(WIDTH, WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, tree: Any) -> Any:
        state, path = None, [tree]
        while any(path[-1][1]):
            path.append(next(child for child in path[-1][1] if child))
        for node in path:
            x = self.mix(self.hidden(node)).relu()
            state = self.down(x) if state is None else self.down(x, state)
        return self.head(state)


def test_cell_after_cell() -> None:
    check(UpAndDown(), [TREE, LEAF, TREE])


class Crossed(nn.Module):
    """Each of two cells reads states of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = TreeRNNCell(WIDTH, WIDTH, 1), TreeRNNCell(WIDTH, WIDTH, 1)

    def forward(self, x: Any) -> Any:
        a, b = self.one(x), self.two(x)
        a, b = self.one(x, a), self.two(x, b)
        for _ in range(2):
            a, b = self.one(b, a), self.two(a, b)
        return a + b


def test_cells_that_depend_on_each_other() -> None:
    examples = list(torch.randn(3, WIDTH, dtype=torch.float64))
    check(Crossed(), examples)


def test_recurrent_dropout_differs_per_call() -> None:
    plain = Recursion(NaryTreeLSTMCell(WIDTH, WIDTH, 3, recurrent_dropout=0.5)).double()
    model = autobatch(plain)
    assert model([TREE] * 20).unique(dim=0).size(0) > 10
    check(plain.eval(), [TREE, LEAF])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batched_equals_one_by_one_under_autocast(dtype: torch.dtype) -> None:
    model = autobatch(Recursion(CELLS["nary"]()))
    with torch.autocast("cpu", dtype):
        found, expected = (model([TREE, LEAF], batch=batch) for batch in (True, False))
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", CELLS)
def test_single_nodes(kind: str) -> None:
    cell = CELLS[kind]().double()
    x, children = torch.randn(2, WIDTH).double(), []
    for _ in range(2):
        children.append(cell(torch.randn(2, WIDTH).double()))
    rows = (children,) if cell.arity is None else (children[0], None, children[1])
    together = cell(x, *rows)

    def at(state: Any, n: int) -> Any:
        if isinstance(state, list):
            return [at(each, n) for each in state]
        if state is None or isinstance(state, torch.Tensor):
            return state if state is None else state[n]
        return tuple(part[n] for part in state)

    for n in range(2):
        alone = cell(x[n], *(at(each, n) for each in rows))
        torch.testing.assert_close(alone, at(together, n))


def test_invalid_calls_of_cells() -> None:
    cell = CELLS["gru"]()
    with pytest.raises(TypeError, match="neither an input nor a child"):
        cell(None, None, None, None)
    with pytest.raises(ValueError, match="wrong number of children"):
        cell(None, torch.zeros(WIDTH))
