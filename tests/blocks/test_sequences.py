"""Map, folds, recurrent cells, reductions: values, empty sequences, depth, and errors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyg_dynbatch import blocks as td
from pyg_dynbatch.core import RaggedRows
from tests.blocks.harness import add, builds, endless, message, numbers, three_ways

# Map


def test_map() -> None:
    assert numbers().input_type == td.PyObjectType()
    assert td.Map(td.InputTransform(len)).eval(["a", "bc"]) == [1, 2]
    builds(numbers(), [([1, 2], [1.0, 2.0]), ([], [])], depth=0)
    builds(numbers() >> td.Map(td.Function(torch.neg)), [([1, 2], [-1.0, -2.0]), ([], [])], 1)
    pair_sum = td.Map((td.Scalar(), td.Scalar())) >> td.Map(add())
    builds(pair_sum, [([(1, 2), (3, 4)], [3.0, 7.0])], depth=1)


def test_map_of_constants_nothing_and_maps() -> None:
    builds(td.Map(td.Void() >> td.FromTensor(torch.tensor(2.0))), [([1, 1], [2.0, 2.0])])
    assert td.Map(td.Void()).eval([1, 2]) == [None, None]
    block = td.Map(numbers()) >> td.Map(td.Map(td.Function(torch.neg)))
    builds(block, [([[1], [], [2, 3]], [[-1.0], [], [-2.0, -3.0]]), ([], [])], depth=1)


def test_map_over_tuples() -> None:
    same = td.AllOf(td.Scalar(), td.Scalar()) >> td.Map(td.Function(torch.neg))
    builds(same, [(1, [-1.0, -1.0])], depth=1)
    differ = lambda: td.AllOf(td.Scalar(), td.Vector(1)) >> td.Map(td.Identity())  # noqa: E731
    assert "the items of the tuple differ" in message(TypeError, differ)
    assert "the input is not a sequence" in message(TypeError, lambda: td.Scalar() >> td.Map(add()))


def test_map_of_an_endless_sequence() -> None:
    block = {"s": numbers(), "b": endless() >> td.Map(td.Function(torch.neg))}
    builds(block >> td.ZipWith(add()), [({"s": [1, 2], "b": 3}, [-2.0, -1.0])], depth=2)


def test_fold() -> None:
    fold = numbers() >> td.Fold(add(), td.FromTensor(torch.tensor(10.0)))
    builds(fold, [([1, 2, 3], 16.0), ([], 10.0)], depth=3)


def test_fold_over_host_objects_and_tuples() -> None:
    combine = (td.Identity(), td.Scalar()) >> add()
    builds(td.Fold(combine, td.Zeros([])), [([1, 2], 3.0), ([], 0.0)], depth=2)
    both = td.AllOf(td.Scalar(), td.Scalar()) >> td.Fold(add(), td.Zeros("float32"))
    builds(both, [(3, 6.0)])
    state = td.Fold(
        (td.Identity(), td.Scalar()) >> td.Function(lambda s, x: (s[1], s[0] + x)),
        td.Zeros(([], [])),
    )
    builds(state, [([1, 2, 3], (2.0, 4.0))])


def test_fold_errors() -> None:
    assert "never ends" in message(TypeError, lambda: endless() >> td.Fold(add(), td.Zeros([])))
    three = td.Function(lambda a, b, c: a).set_input_type((1, 1, 1))
    assert "the input of combine_block is not a pair" in message(
        TypeError, td.Fold, three, td.Zeros(1)
    )
    assert "got:      nothing" in message(TypeError, td.Fold, add(), td.Scalar())
    vectors = lambda: numbers() >> td.Fold(td.Function(lambda a, b: b), td.Zeros(2))  # noqa: E731
    assert "the output type differs" in message(TypeError, vectors)


def running(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return x * state, x + state


def test_rnn() -> None:
    block = numbers() >> td.RNN(td.Function(running), td.FromTensor(torch.tensor(1.0)))
    builds(block, [([2, 3], ([2.0, 9.0], 6.0)), ([], ([], 1.0))], depth=2)
    block = (numbers(), td.Scalar()) >> td.RNN(td.Function(running), initial_state_from_input=True)
    builds(block, [(([2, 3], 1), ([2.0, 9.0], 6.0)), (([], 5), ([], 5.0))], depth=2)


def test_rnn_of_torch_cells() -> None:
    for cell in (nn.LSTMCell(1, 2), nn.GRUCell(1, 2), nn.RNNCell(1, 2)):
        block = td.Map(td.Vector(1)) >> td.RNN(cell)
        wrapped = td.Map(td.Vector(1)) >> td.RNN(td.ScopedLayer(cell))
        three_ways(block >> td.GetItem(1), [[[1.0], [2.0]], [], [[3.0]]])
        outputs, state = block.eval([[1.0], [2.0]])
        torch.testing.assert_close((outputs, state), wrapped.eval([[1.0], [2.0]]))
        x = torch.tensor([[1.0]])
        again = cell(torch.tensor([[2.0]]), cell(x))
        last = again[0] if isinstance(again, tuple) else again
        torch.testing.assert_close(outputs[-1], last[0])
        torch.testing.assert_close(outputs[-1], state[0] if isinstance(state, tuple) else state)


def test_parts_are_attributes() -> None:
    zeros, element, combine = td.Zeros([]), td.Scalar(), add()
    fold = td.Fold(combine, zeros)
    assert td.Map(element).element_block is element and td.NGrams(3).n == 3
    assert fold.combine_block is combine and fold.start_block is zeros
    again, default = add(), td.Zeros([])
    reduce = td.Reduce(again, default)
    assert reduce.combine_block is again and reduce.default_block is default
    assert td.Reduce(add()).default_block is None


def test_hierarchical_rnn() -> None:
    words, sentence = td.ScopedLayer(nn.GRUCell(1, 2)), td.ScopedLayer(nn.GRUCell(2, 2))
    word = td.Map(td.Vector(1)) >> td.RNN(words) >> td.GetItem(1)
    block = td.Map(word) >> td.RNN(sentence) >> td.GetItem(1)
    three_ways(block, [[[[1.0], [2.0]], [[3.0]]], [], [[], [[4.0]]]])
    assert block.max_depth([[[1.0], [2.0]], [[3.0]]]) == 4


def test_lstm_cell_as_a_composition() -> None:
    cell = td.Composition()
    with cell.scope():
        x, state = cell.input[0], cell.input[1]
        new = td.Function(torch.tanh).reads(add().reads(x, state))
        cell.output.reads(new, new)
    block = numbers() >> td.RNN(cell, td.Zeros([])) >> td.GetItem(1)
    builds(block, [([0, 0], 0.0), ([], 0.0)], depth=4)


def test_rnn_errors() -> None:
    both = lambda: td.RNN(add(), td.Zeros([]), True)  # noqa: E731
    assert "given twice" in message(ValueError, both)
    never = lambda: endless() >> td.RNN(td.Function(running), td.Zeros([]))  # noqa: E731
    assert "never ends" in message(TypeError, never)
    no_pair = lambda: numbers() >> td.RNN(add(), td.Zeros([]))  # noqa: E731
    assert "the cell's output is not a pair" in message(TypeError, no_pair)
    changed = td.Function(lambda x, s: (x, torch.stack([s, s], 1)))
    changing = lambda: numbers() >> td.RNN(changed, td.Zeros([]))  # noqa: E731
    assert "the state changes its type" in message(TypeError, changing)
    unknown = (numbers() >> td.RNN(td.Function(running))).eval
    assert "the type of the zeros cannot be inferred" in message(TypeError, unknown, [1])
    single = lambda: numbers() >> td.RNN(td.Function(running), None, True)  # noqa: E731
    assert "the input is not a pair" in message(TypeError, single)


def test_mean_of_many_in_half_precision() -> None:
    for dtype in ("float64", "bfloat16"):
        model = td.Compiler.create(td.Map(td.Scalar(dtype)) >> td.Mean())
        found = model([[0.5] * 600, [], [1.0] * 2]).output
        assert found[1:].tolist() == [0.0, 1.0] and str(found.dtype) == f"torch.{dtype}"
        assert dtype == "bfloat16" or found[0] == 0.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the host waits for a GPU only")
@pytest.mark.parametrize("make", [td.Sum, td.Mean, td.Min, td.Max])
def test_reductions_do_not_wait_for_the_gpu(make: Any) -> None:
    ragged = RaggedRows(torch.ones(3, device="cuda"), torch.tensor([0, 0, 2], device="cuda"), 4)
    engine: Any = td.Compiler.create(numbers() >> make()).engine
    (reduce,) = (each for each in engine.operations if each.signature.inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = reduce(ragged)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.tolist() == [2.0 if make is td.Sum else 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("n", "depth"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (9, 4)])
def test_reduce_is_balanced_and_in_order(n: int, depth: int) -> None:
    def join(a: Tensor, b: Tensor) -> Tensor:
        return 10 ** (torch.floor(torch.log10(b)) + 1) * a + b

    block = td.Map(td.Scalar("float64")) >> td.Reduce(td.Function(join))
    digits = list(range(1, n + 1))
    expected = float("".join(map(str, digits))) if n else 0.0
    builds(block, [(digits, expected)], depth)


def test_reduce_default_and_errors() -> None:
    block = numbers() >> td.Reduce(add(), default_block=td.FromTensor(torch.tensor(-1.0)))
    builds(block, [([], -1.0), ([1, 2], 3.0)])
    assert "never ends" in message(TypeError, lambda: endless() >> td.Reduce(add()))
    objects = lambda: td.InputTransform(list) >> td.Reduce(add())  # noqa: E731
    assert "a wrong kind of input" in message(TypeError, objects)
    pair = td.Reduce(td.Function(lambda a, b: torch.stack([a, b], 1)))
    assert "the output type differs" in message(TypeError, lambda: numbers() >> pair)
    pairs = td.Map((td.Scalar(), td.Scalar())) >> td.Reduce(td.Function(lambda a, b: (a[1], b[0])))
    builds(pairs, [([(1, 2), (3, 4)], (2.0, 3.0)), ([], (0.0, 0.0))])


@pytest.mark.parametrize(
    ("make", "expected"),
    [(td.Sum, [4.0, 9.0]), (td.Mean, [4 / 3, 3.0]), (td.Min, [-1.0, 2.0]), (td.Max, [4.0, 4.0])],
)
def test_totals(make: Any, expected: list[float]) -> None:
    rows = [[1, 2], [4, 3], [-1, 4]]
    block = td.Map(td.Vector(2)) >> make()
    builds(block, [(rows, expected), ([], [0.0, 0.0]), ([[5, 6]], [5.0, 6.0])], depth=1)
    matrices = td.Map(td.Tensor([2, 1])) >> make()
    columns = [[[a], [b]] for a, b in rows]
    builds(matrices, [(columns, [[value] for value in expected])], depth=1)
    both = td.AllOf(td.Scalar(), td.Scalar()) >> make()
    assert both.eval(2.0) == (4.0 if make is td.Sum else 2.0)
    assert "never ends" in message(TypeError, lambda: endless() >> make())
    tuples = lambda: td.Map((td.Scalar(), td.Scalar())) >> make()  # noqa: E731
    assert "the elements are not tensors" in message(TypeError, tuples)


def test_totals_of_integers() -> None:
    block = td.Map(td.Scalar("int64"))
    assert (block >> td.Sum()).eval([1, 2]) == 3
    assert (td.Map(td.Scalar("int32")) >> td.Max()).eval([-2, -1]) == -1
    for dtype in ("int64", "int8", "bool"):
        text = message(TypeError, lambda: td.Map(td.Scalar(dtype)) >> td.Mean())  # noqa: B023
        assert "Mean: the elements have an invalid dtype" in text and "Root.Mean" in text
        assert "tensor.float()" in text
    assert (td.Map(td.Scalar("complex64")) >> td.Mean()).eval([1, 3j]) == 0.5 + 1.5j
    for extreme in (td.Min, td.Max):
        text = message(TypeError, lambda: td.Map(td.Scalar("complex64")) >> extreme())  # noqa: B023
        assert "the elements have an invalid dtype" in text


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_network_over_sequences_is_not_a_cell(kind: Any) -> None:
    text = message(TypeError, td.RNN, kind(2, 3))
    assert f"RNN: nn.{kind.__name__} runs over whole sequences" in text
    assert f"expected: nn.{kind.__name__}Cell" in text
