import torch

from pyg_dynbatch.core import Engine, Operations, Ragged, Recording, TensorType, run_one_by_one
from tests.core.helpers import SCALAR, VECTOR, Vectors, chain_program, tree_program


def test_inputs_by_type_and_by_tag() -> None:
    word = TensorType((2,), tag="word")
    pair = (TensorType((), tag="pair"), SCALAR)
    recording = Recording()
    recording.output(recording.input(word, 1), "word")
    recording.output(recording.input(pair, 0), "pair")
    engine, rows = Engine(Operations()), torch.arange(8.0).view(4, 2)
    given = {"word": rows, pair: (torch.tensor([5.0, 6.0]), torch.tensor([7.0, 8.0]))}
    found = run_one_by_one(engine, [recording, recording], given)
    assert found["word"].tolist() == [[2.0, 3.0], [6.0, 7.0]]
    assert [part.tolist() for part in found["pair"]] == [[5.0, 6.0], [7.0, 8.0]]


def test_no_program_and_empty_programs() -> None:
    engine = Engine(Operations())
    assert run_one_by_one(engine, []) == {}
    assert run_one_by_one(engine, [Recording(), Recording()]) == {}


def test_every_call_is_a_batch_of_one() -> None:
    vectors, sizes = Vectors(), []
    vectors.engine.operations["mix"].register_forward_hook(lambda *a: sizes.append(len(a[2])))
    run_one_by_one(vectors.engine, [tree_program(vectors.mix, ((1, 2), (3, 4)))])
    assert sizes == [1, 1, 1]


def test_empty_ragged_arguments() -> None:
    row_type = TensorType((2,))
    operations = Operations()
    total = operations.add(lambda x: x.sum(), [Ragged(row_type)], [row_type], name="total")
    recording = Recording()
    recording.output(recording.call(total, []))
    assert run_one_by_one(Engine(operations), [recording])["output"].tolist() == [[0.0, 0.0]]


def test_second_derivatives_are_right() -> None:
    vectors = Vectors()
    vectors.engine.double()
    recording = Recording()
    row = recording.input(VECTOR, 0)
    recording.output(recording.call(vectors.mix, row, recording.call(vectors.squash, row)))

    def run(x: torch.Tensor) -> torch.Tensor:
        return run_one_by_one(vectors.engine, [recording], {VECTOR: x})["output"]

    x = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(run, x)


def test_chains_beyond_the_recursion_limit() -> None:
    vectors = Vectors()
    with torch.no_grad():
        found = run_one_by_one(vectors.engine, [chain_program(vectors.mix, 1200)])["output"]
    assert found.isfinite().all()
