import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch_geometric.data import Data

from pyg_dynbatch.core import Engine, Operations, RaggedRows, Recording, TensorType
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps
from pyg_dynbatch.core.types import describe
from pyg_dynbatch.testing import recording_of_structure
from tests.core.helpers import SCALAR, VECTOR, WORD, Vectors, cell_engine, message, tree_program
from tests.strategies import Dag, structures

STATE = (TensorType((3,)), TensorType((), torch.int64))
ROW = TensorType((2,), tag="input")


class Cell(nn.Module):
    """Sums its children; the state is a vector and the height."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor, children: RaggedRows) -> tuple[Tensor, Tensor]:
        rows, heights = children.rows
        total = x.new_zeros(children.num_calls, 3).index_add(0, children.segment_ids, rows)
        height = torch.zeros(children.num_calls, dtype=torch.int64)
        height = height.scatter_reduce(0, children.segment_ids, heights + 1, "amax")
        return torch.tanh(self.linear(x) + total), height


@given(structures())
def test_tuple_states_of_several_dtypes(dag: Dag) -> None:
    engine, node = cell_engine(Cell(), STATE, None, ROW)
    engine.double()
    structure = Data(edge_index=dag.edge_index, num_nodes=dag.num_nodes)
    schedule = schedule_recordings([recording_of_structure(node, structure)])
    x = torch.randn(dag.num_nodes, 2, dtype=torch.float64)
    h, height = engine(schedule, {ROW: x})["node"]
    assert height.tolist() == dag.depth
    assert h.dtype == torch.float64
    linear = engine.operations["node"].module.linear
    for number in dag.order:
        below = sum((h[child] for child in dag.children[number]), torch.zeros(3))
        expected = torch.tanh(linear(x[number]) + below)
        assert h[number].allclose(expected, rtol=0, atol=1e-12)


def test_complex_rows_carry_gradients() -> None:
    number = TensorType((), torch.complex128)
    operations, recording = Operations(), Recording()
    square = operations.add(lambda x: x * x, [number], [number], name="square")
    recording.output(recording.call(square, recording.call(square, recording.input(number, 0))))
    schedule, engine = schedule_recordings([recording]), Engine(operations)
    z = torch.tensor([1.0 + 2.0j], dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: engine(schedule, {number: z})["output"], z)


def test_float_and_integer_results_of_one_operation() -> None:
    operations, recording = Operations(), Recording()
    largest = operations.add(
        lambda x: tuple(x.max(1)), [VECTOR], [SCALAR, TensorType((), torch.int64)], name="largest"
    )
    value, place = recording.call(largest, recording.input(VECTOR, 0))
    recording.output(value, "value")
    recording.output(place, "place")
    x = torch.tensor([[1.0, 5.0, 2.0]], requires_grad=True)
    found = Engine(operations)(schedule_recordings([recording]), {VECTOR: x})
    assert found["place"].tolist() == [1]
    assert not found["place"].requires_grad
    found["value"].sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_integers_and_float64_keep_their_dtype(dtype: torch.dtype) -> None:
    exact = TensorType((), dtype)
    operations, recording = Operations(), Recording()
    add = operations.add(torch.add, [exact, exact], [exact], name="add")
    state = recording.constant(exact, 1)
    for _ in range(40):
        state = recording.call(add, state, state)
    recording.output(recording.call(add, state, recording.constant(exact, 1)))
    found = Engine(operations)(schedule_recordings([recording]))["output"]
    assert found.tolist() == [2**40 + 1]  # float32 and int32 cannot hold it
    assert found.dtype == dtype and not found.requires_grad


def test_outputs_may_be_changed() -> None:
    vectors, recording = Vectors(), Recording()
    state = recording.call(vectors.squash, recording.input(VECTOR, 0))
    recording.output(state, "state")
    recording.output(recording.call(vectors.score, state), "score")
    schedule, x = schedule_recordings([recording]), torch.randn(1, 3)

    def gradient(change: bool) -> Tensor:
        vectors.engine.zero_grad()
        found = vectors.engine(schedule, {VECTOR: x})
        if change:
            found["state"].detach().mul_(100)
        found["score"].sum().backward()
        return vectors.engine.operations["score"].module.weight.grad.clone()

    assert torch.equal(gradient(change=True), gradient(change=False))


def test_outputs_keep_no_buffer_alive() -> None:
    vectors = Vectors()
    recording = Recording()
    for number in range(100):
        value = recording.call(vectors.squash, recording.input(VECTOR, number))
    recording.output(value)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found = vectors.engine(schedule_recordings([recording]), {VECTOR: torch.zeros(100, 3)})
        assert found["output"].untyped_storage().nbytes() == 3 * 4


def test_working_precision_follows_double() -> None:
    vectors = Vectors()
    recordings = [tree_program(vectors.mix, ((1, 2), 3))]
    schedule = schedule_recordings(recordings)
    assert vectors.engine(schedule)["output"].dtype == torch.float32
    assert vectors.engine.double()(schedule)["output"].dtype == torch.float64
    assert vectors.engine.bfloat16()(schedule)["output"].dtype == torch.bfloat16
    assert vectors.engine.working_dtype(torch.int64) == torch.int64
    assert "_precision" not in "".join(vectors.engine.state_dict())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copied_models(copier: Any) -> None:
    vectors = Vectors()
    schedule = schedule_recordings([tree_program(vectors.mix, ((1, 2), 3))])
    wanted = vectors.engine(schedule)["output"]
    wanted.sum().backward()
    twin = copier(vectors.engine)
    assert torch.equal(twin(schedule)["output"], wanted)
    assert repr(twin) == "Engine(mix, squash, score)"
    twin.load_state_dict(vectors.engine.state_dict())
    with torch.no_grad():
        twin.operations["mix"].module.left.weight += 1
    assert not torch.equal(twin(schedule)["output"], wanted)
    assert torch.equal(vectors.engine(schedule)["output"], wanted)


def test_functional_call() -> None:
    vectors = Vectors()
    schedule = schedule_recordings([tree_program(vectors.mix, ((1, 2), 3))])
    values = {n: torch.zeros_like(p).requires_grad_() for n, p in vectors.engine.named_parameters()}
    found = torch.func.functional_call(vectors.engine, values, (schedule,))["output"]
    assert found.tolist() == [[0.0, 0.0, 0.0]]
    found.sum().backward()
    assert any(value.grad is not None for value in values.values())
    assert all(parameter.grad is None for parameter in vectors.engine.parameters())


def test_hooks_fire_once_a_step() -> None:
    vectors, forward, backward = Vectors(), [], []
    module = vectors.engine.operations["mix"].module
    module.register_forward_hook(lambda m, args, out: forward.append(len(out)))
    module.register_full_backward_hook(lambda m, into, out: backward.append(len(out[0])))
    recording = Recording()
    first, second = (recording.input(VECTOR, row) for row in range(2))
    state = recording.call(vectors.mix, first, second)
    recording.output(recording.call(vectors.mix, recording.call(vectors.mix, second, state), state))
    schedule = schedule_recordings([recording] * 2)
    x = torch.randn(4, 3, requires_grad=True)
    vectors.engine(schedule, {VECTOR: x})["output"].sum().backward()
    assert forward == [step.size for step in schedule.steps]
    assert backward == forward[::-1] == [2, 2, 2]


def test_ragged_sum() -> None:
    rows = RaggedRows(torch.arange(6.0).view(3, 2), torch.tensor([1, 1, 3]), 4)
    assert rows.sum().tolist() == [[0, 0], [2, 4], [0, 0], [4, 5]]
    first, second = rows._replace(rows=(rows.rows, rows.rows[:, 0])).sum()
    assert first.equal(rows.sum()) and second.equal(rows.sum()[:, 0])


class Join(nn.Module):
    """Two ordered children."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, left + 2 * right], 1)))


def engine_and_steps(join: Join) -> tuple[Engine, Steps]:
    """Four leaves, two nodes above them, and a root."""
    engine, node = cell_engine(join, VECTOR, 2, VECTOR)
    edges = torch.tensor([[0, 1, 4, 5, 2, 6], [2, 2, 6, 6, 3, 3]])
    structure = Data(edge_index=edges, num_nodes=7)
    return engine, schedule_recordings([recording_of_structure(node, structure)])


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_change_in_place_is_refused_for_every_argument(place: int, requires_grad: bool) -> None:
    class Careless(Join):
        def forward(self, *arguments: Tensor) -> Tensor:
            # Constants, rows side by side, and gathered ones.
            arguments[place].add_(1)
            return super().forward(*arguments)

    engine, schedule = engine_and_steps(Careless())
    x = torch.zeros(7, 3, requires_grad=requires_grad)
    text = message(RuntimeError, engine, schedule, {VECTOR: x})
    assert "Operation 'node': its module changed an argument in place" in text


def test_a_run_reads_no_value() -> None:
    """A GPU would be waited for; tensors without values stand for its tensors."""
    _, schedule = engine_and_steps(Join())
    with FakeTensorMode(allow_non_fake_inputs=True):
        engine, _ = cell_engine(Join(), VECTOR, 2, VECTOR)
        x = torch.empty(7, 3, requires_grad=True)
        h = engine(schedule._apply(torch.empty_like), {VECTOR: x})["node"]
        found = torch.autograd.grad(h.sum(), [x, *engine.parameters()])
        assert [rows.shape for rows in found] == [(7, 3), (3, 6), (3,)]
        with pytest.raises(DataDependentOutputException):
            h.sum().item()


PAIR = (VECTOR, SCALAR)


def reading(row_type: Any, rows: int = 2) -> Steps:
    recording = Recording()
    for row in range(rows):
        recording.output(recording.input(row_type, row))
    return schedule_recordings([recording])


def complaint(error: type[Exception], row_type: Any, inputs: Any) -> str:
    return message(error, Engine(Operations()), reading(row_type), inputs)


def test_missing_inputs_and_wrong_numbers_of_rows() -> None:
    text = complaint(ValueError, WORD, {"wrod": torch.zeros(2)})
    assert "Engine: the inputs of type int64[]<word> are missing" in text
    assert "2 rows" in text
    assert "inputs for wrod" in text
    assert "engine(schedule, inputs={'word': rows})" in text
    text = complaint(ValueError, VECTOR, None)
    assert "inputs for nothing" in text
    assert "<row type>" in text
    text = complaint(ValueError, VECTOR, {VECTOR: torch.zeros(5, 3)})
    assert "Engine: wrong number of input rows of type float32[3]" in text
    assert "float32 tensor [5, 3]" in text


@pytest.mark.parametrize(
    ("row_type", "rows", "got"),
    [
        (VECTOR, [1.0, 2.0], "list"),
        (VECTOR, torch.tensor(1.0), "float32 tensor []"),
        (VECTOR, (torch.zeros(2, 3), None), "float32 tensor [2, 3], nothing"),
        (VECTOR, torch.zeros(2, 4), "float32 tensor [2, 4]"),
        (VECTOR, torch.zeros(2, 3, dtype=torch.int64), "int64 tensor [2, 3]"),
        (WORD, torch.zeros(2), "float32 tensor [2]"),
        (PAIR, (torch.zeros(2, 3), torch.zeros(2, 1)), "float32 tensor [2, 1]"),
        (PAIR, torch.zeros(2, 3), "float32 tensor [2, 3]"),
    ],
)
def test_input_rows_of_a_wrong_type(row_type: Any, rows: Any, got: str) -> None:
    text = complaint(TypeError, row_type, {row_type: rows})
    assert f"Engine: input rows of type {describe(row_type)} do not fit" in text
    assert f"2 rows of {describe(row_type)}" in text and got in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_floating_inputs_of_any_precision(dtype: torch.dtype) -> None:
    found = Engine(Operations())(reading(VECTOR), {VECTOR: torch.ones(2, 3, dtype=dtype)})
    assert found["output"].dtype == torch.float32


def returning(module: Any, *outputs: Any) -> str:
    operations, recording = Operations(), Recording()
    signature = operations.add(module, [VECTOR], outputs or [VECTOR], name="odd")
    recording.call(signature, recording.constant(VECTOR, [0.0] * 3))
    recording.call(signature, recording.constant(VECTOR, [1.0] * 3))
    return message(TypeError, Engine(operations), schedule_recordings([recording]))


ONE_ROW_PER_CALL = "step 0 … 2 rows of float32[3] … one row per call, along the first axis"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda x: x[:, :2], "float32 tensor [2, 2]"),
        (lambda x: x.long(), "int64 tensor [2, 3]"),
        (lambda x: x.mean(0, keepdim=True), "float32 tensor [1, 3]"),
        (lambda x: (x, x), "float32 tensor [2, 3], float32 tensor [2, 3]"),
        (lambda x: None, "nothing"),
        (lambda x: x.sum(), "float32 tensor []"),
    ],
)
def test_invalid_results_of_a_module(module: Any, words: str) -> None:
    text = returning(module)
    wanted = f"Operation 'odd': invalid results of its module … {ONE_ROW_PER_CALL} … {words}"
    assert [part for part in wanted.split(" … ") if part not in text] == [], text


@pytest.mark.parametrize("module", [lambda x: x, lambda x: (x,), lambda x: [x, x]])
def test_too_few_results(module: Any) -> None:
    text = returning(module, VECTOR, VECTOR)
    assert "2 results: odd(float32[3]) -> float32[3], float32[3]" in text


@pytest.mark.parametrize(
    ("module", "row_type"),
    [
        (torch.nn.ReLU(inplace=True), VECTOR),
        (lambda x: x.add_(1), VECTOR),
        (lambda x: x[:1].zero_() + x, VECTOR),
        (lambda x: x[1].add_(1), PAIR),
    ],
)
def test_an_in_place_change_of_an_argument_raises(module: Any, row_type: Any) -> None:
    operations, recording = Operations(), Recording()
    result = SCALAR if row_type is PAIR else VECTOR
    signature = operations.add(module, [row_type], [result], name="odd")
    zeros = [0.0] * 3
    recording.call(
        signature, recording.constant(row_type, (zeros, 1.0) if result == SCALAR else zeros)
    )
    run = partial(Engine(operations), schedule_recordings([recording]))
    text = message(RuntimeError, run)
    assert "Operation 'odd': its module changed an argument in place" in text
    assert "step 0" in text and "inplace=False" in text
    with torch.inference_mode():
        assert message(RuntimeError, run) == text


def test_an_in_place_change_of_other_tensors_is_fine() -> None:
    operations, recording = Operations(), Recording()
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(inplace=True))
    signature = operations.add(module, [VECTOR], [VECTOR], name="fine")
    recording.output(recording.call(signature, recording.constant(VECTOR, [0.0] * 3)))
    Engine(operations)(schedule_recordings([recording]))["output"].sum().backward()
