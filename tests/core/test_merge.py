import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pyg_dynbatch.core import Engine, Operations, Ragged, Recording, Signature, TensorType
from pyg_dynbatch.core.reference import run_one_by_one
from pyg_dynbatch.core.scheduling import schedule_recordings
from tests.core.helpers import SCALAR, VECTOR, WORD, Vectors, tree_program


class Words:
    """An embedding, a random squash on top, and a learned start state without an argument."""

    def __init__(self) -> None:
        operations = Operations()
        table = nn.Embedding(10, 3)
        self.embed = operations.add(table, [WORD], [VECTOR], name="embed")
        self.squash = operations.add(nn.Tanh(), [VECTOR], [VECTOR], name="squash")
        self.drop = operations.add(nn.Dropout(0.5), [VECTOR], [VECTOR], name="drop")
        self.start = operations.add(Start(), [], [VECTOR], name="start")
        self.engine = Engine(operations)

    def recording(self, words: list[int], *path: str) -> Recording:
        recording = Recording()
        for word in words:
            value = recording.call(self.embed, recording.constant(WORD, word))
            for name in path:
                value = recording.call(getattr(self, name), value)
            recording.output(value)
        return recording


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 3))

    def forward(self) -> torch.Tensor:
        return 1 * self.row


def widths(recordings: list[Recording]) -> dict[str, int]:
    stats = schedule_recordings(recordings).stats()
    return dict(zip(stats.operations, stats.widths, strict=True))


def assert_agree(engine: Engine, recordings: list[Recording]) -> None:
    found = engine(schedule_recordings(recordings))["output"]
    assert found.allclose(run_one_by_one(engine, recordings)["output"], atol=1e-6)


def test_equal_calls_on_equal_constants_are_made_once() -> None:
    words = Words()
    recordings = [words.recording([1, 2, 1], "squash"), words.recording([2, 3], "squash")]
    assert widths(recordings) == {"embed+squash": 3}
    assert schedule_recordings(recordings).stats().merged_calls == 4
    assert schedule_recordings(recordings).constants[0][0].tolist() == [1, 2, 3]
    assert_agree(words.engine, recordings)


@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 3)] * n), min_size=1))
)
def test_calls_differ_if_any_argument_does(rows: list[tuple[int, ...]]) -> None:
    called, recording = Signature("called", (WORD,) * len(rows[0]), (WORD,)), Recording()
    for row in rows:
        recording.output(recording.call(called, *(recording.constant(WORD, n) for n in row)))
    schedule = schedule_recordings([recording])
    assert schedule.steps[0].size == len(set(rows))
    # The k-th output is the result of the first equal call.
    distinct = list(dict.fromkeys(rows))
    found = schedule.outputs["output"].rows.rows_in(schedule.index)
    assert (found - found.min()).tolist() == [distinct.index(row) for row in rows]


def test_random_operations_are_not_merged() -> None:
    words = Words()
    recordings = [words.recording([1] * 50, "drop", "squash")]
    assert widths(recordings) == {"embed": 1, "drop+squash": 50}
    rows = words.engine(schedule_recordings(recordings))["output"]
    assert len({tuple(row) for row in rows.tolist()}) > 1


def test_calls_on_inputs_are_not_merged() -> None:
    words, recording = Words(), Recording()
    for row in (0, 0, 1):
        recording.output(recording.call(words.squash, recording.input(VECTOR, row)))
    assert widths([recording]) == {"squash": 3}


def test_the_lowest_calls_of_a_recursive_operation_are_merged() -> None:
    vectors = Vectors()
    recordings = [tree_program(vectors.mix, shape) for shape in (((1, 2), 3), ((1, 2), (1, 2)))]
    assert widths(recordings)["mix"] == 2
    assert schedule_recordings(recordings).stats().widths == (1, 2)
    assert_agree(vectors.engine, recordings)


def test_an_operation_without_arguments_is_made_once() -> None:
    words, recording = Words(), Recording()
    for _ in range(3):
        recording.output(recording.call(words.squash, recording.call(words.start)))
    assert widths([recording, recording]) == {"start": 1, "squash": 1}
    assert_agree(words.engine, [recording, recording])
    words.engine(schedule_recordings([recording, recording]))["output"].sum().backward()
    row = words.engine.operations["start"].module.row
    assert row.grad.allclose(6 * (1 - torch.tanh(torch.ones(1, 3)) ** 2))


def test_constants_of_two_types_are_not_confused() -> None:
    recording = Recording()
    recording.output(recording.constant(SCALAR, 0.0), "float")
    recording.output(recording.constant(WORD, 0), "word")
    recording.output(recording.constant((SCALAR, WORD), (0.0, 0)), "pair")
    recording.output(recording.constant((SCALAR, WORD), (0.0, 1)), "pair")
    found = Engine(Operations())(schedule_recordings([recording, recording]))
    assert found["float"].dtype == torch.float32
    assert found["word"].dtype == torch.int64
    assert found["pair"][1].tolist() == [0, 1, 0, 1]


def test_programs_of_different_languages() -> None:
    """Examples may know types, operations and outputs that others do not."""
    vectors, operations = Vectors(), Operations()
    double = operations.add(lambda x: 2 * x, [SCALAR], [SCALAR], name="double")
    mix = operations.add(
        vectors.engine.operations["mix"].module, [VECTOR] * 2, [VECTOR], name="mix"
    )
    numbers, empty = Recording(), Recording()
    numbers.output(numbers.call(double, numbers.constant(SCALAR, 3.0)), "number")
    recordings = [empty, tree_program(mix, (1, 2)), numbers, empty, tree_program(mix, (1, 3))]
    schedule = schedule_recordings(recordings)
    assert schedule.num_examples == 5
    found = Engine(operations)(schedule)
    assert found["number"].tolist() == [6.0]
    assert schedule.example_of("number").tolist() == [2]
    assert schedule.example_of("output").tolist() == [1, 4]
    assert found["output"].shape == (2, 3)


def test_inputs_of_all_examples_stand_one_after_another() -> None:
    recordings = []
    for rows, declared in (([1, 0], 2), ([], 3), ([0], 1)):
        recording = Recording()
        for row in rows:
            recording.output(recording.input(SCALAR, row))
        recording.declare_inputs(SCALAR, declared)
        recordings.append(recording)
    found = Engine(Operations())(schedule_recordings(recordings), {SCALAR: torch.arange(6.0)})
    assert found["output"].tolist() == [1.0, 0.0, 5.0]


def test_ragged_arguments_of_a_type_without_values() -> None:
    operations = Operations()
    total = operations.add(
        lambda x: x.sum(), [Ragged(VECTOR)], [VECTOR], name="total", random=False
    )
    recording = Recording()
    recording.output(recording.call(total, []))
    found = Engine(operations)(schedule_recordings([recording, recording]))["output"]
    assert found.tolist() == [[0.0] * 3] * 2


def test_constants_without_entries_are_all_equal():
    empty, operations = TensorType((0,)), Operations()
    total = operations.add(
        lambda rows: rows.sum(1), [empty], [TensorType(())], name="total", random=False
    )
    recording = Recording()
    for _ in range(3):
        recording.output(recording.call(total, recording.constant(empty, [])))
    schedule = schedule_recordings([recording, recording])
    assert schedule.stats().rows == 1
    assert Engine(operations)(schedule)["output"].tolist() == [0.0] * 6


def test_equal_ragged_calls_are_made_once_and_others_apart() -> None:
    operations = Operations()
    inputs = [Ragged(SCALAR), Ragged(SCALAR)]
    less = operations.add(
        lambda a, b: a.sum() - b.sum(), inputs, [SCALAR], name="less", random=False
    )
    recording = Recording()
    one, two = (recording.constant(SCALAR, float(n)) for n in (1, 2))
    for left, right in (([one], [two]), ([one, two], []), ([], [one, two]), ([two], [one])):
        recording.output(recording.call(less, left, right))
    engine, recordings = Engine(operations), [recording, recording]
    stats = schedule_recordings(recordings).stats()
    assert (stats.merged_calls, stats.rows) == (4, 4)
    assert engine(schedule_recordings(recordings))["output"].tolist() == [-1.0, 3.0, -3.0, 1.0] * 2
