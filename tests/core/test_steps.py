import copy
import io
import pickle
from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given
from torch_geometric.data import Batch, Data

from pyg_dynbatch.core import Ragged, Recording, Signature
from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.steps import Steps
from tests.core.helpers import VECTOR, Vectors, chain_program, constants, tree_program
from tests.strategies import Dag, structures

VECTORS = Vectors()
SHAPES = [((1, 2), (3, 4)), 5, ((1, 2), 6)]


def recorded_schedule(policy: str = "depth") -> Steps:
    return schedule_recordings([tree_program(VECTORS.mix, s) for s in SHAPES], policy)


def structure_schedule(**options: Any) -> Levels:
    return schedule_structure(torch.tensor([[0, 1, 2], [2, 2, 4]]), 5, **options)


def through_torch(schedule: Any) -> Any:
    file = io.BytesIO()
    torch.save(schedule, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = {
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "clone": lambda s: s.clone(),
    "torch.save": through_torch,
    "to": lambda s: s.to("cpu"),
    "cpu": lambda s: s.cpu(),
}


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("made", [recorded_schedule, structure_schedule])
def test_copies_are_equal_and_run(made: Any, copier: str) -> None:
    schedule = made()
    twin = COPIERS[copier](schedule)
    assert twin == schedule
    if copier in ("pickle", "deepcopy", "clone", "torch.save"):
        assert twin.index.data_ptr() != schedule.index.data_ptr()
    if made is recorded_schedule:
        found, wanted = (VECTORS.engine(s)["output"] for s in (twin, schedule))
        assert torch.equal(found, wanted)


def test_what_makes_schedules_differ() -> None:
    schedule = recorded_schedule()
    assert schedule != schedule_recordings([tree_program(VECTORS.mix, s) for s in SHAPES[::-1]])
    assert schedule != structure_schedule()
    assert schedule != "schedule"
    changed = schedule.clone()
    changed.constants[0][0][0] += 1
    assert changed != schedule
    changed = schedule.clone()
    changed.index[0] += 1
    assert changed != schedule
    recording = Recording()
    recording.output(recording.input(VECTOR, 0))
    other = Recording()
    other.output(other.constant(VECTOR, [0.0] * 3))
    assert schedule_recordings([recording]) != schedule_recordings([other])
    with pytest.raises(TypeError):
        hash(schedule)


@pytest.mark.parametrize("schedule", [recorded_schedule(), structure_schedule()])
def test_moves_whole(schedule: Any) -> None:
    moved = schedule.to("meta")
    assert moved.device.type == "meta"
    assert schedule.device.type == "cpu" and not schedule.is_pinned()
    tensors = [part for parts in getattr(moved, "constants", ()) if parts for part in parts]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert schedule.to(torch.float64) is schedule
    assert schedule.to(torch.zeros(1, device="meta")).device.type == "meta"
    assert schedule.to(device=torch.device("meta"), non_blocking=True).index.dtype == torch.int64


def test_moves_with_a_pyg_batch() -> None:
    batch = Batch.from_data_list([Data(x=torch.zeros(2, 3)), Data(x=torch.zeros(3, 3))])
    batch.schedule = structure_schedule(arity=2)
    assert batch.clone().to("meta").schedule.device.type == "meta"
    schedule = batch.schedule
    for moved in (
        batch.clone(),
        copy.copy(batch),
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        batch.cpu(),
        batch.contiguous(),
        batch.detach(),
    ):
        assert moved.schedule == schedule
    assert batch.clone().schedule.index.data_ptr() != schedule.index.data_ptr()
    batch.share_memory_()
    assert batch.schedule.index.is_shared()
    assert "schedule" in batch.keys()  # noqa: SIM118


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinned_and_on_the_gpu() -> None:
    pinned = recorded_schedule().pin_memory()
    assert pinned.is_pinned()
    moved = pinned.cuda(non_blocking=True)
    assert moved.device.type == "cuda"
    moved.record_stream(torch.cuda.current_stream())
    assert moved.cpu() == recorded_schedule()
    vectors = copy.deepcopy(VECTORS.engine)
    found = vectors.cuda()(moved)["output"].cpu()
    assert found.allclose(VECTORS.engine(recorded_schedule())["output"], atol=1e-6)


def test_reads_well() -> None:
    schedule = recorded_schedule()
    assert repr(schedule) == "Steps(3 examples, 2 steps, 4 rows)"
    lines = str(schedule).splitlines()
    assert lines[0] == repr(schedule)
    assert lines[1].strip().startswith("0 mix x 2: ")
    assert "-> buffer 0[" in lines[1]
    assert lines[-1].strip() == "buffer 0: float32[3], 10 rows"
    assert "nothing" not in str(schedule)


def test_what_is_known_of_structures() -> None:
    levels = structure_schedule(arity=2, direction="bottom_up")
    assert repr(levels) == "Levels(1 examples, 3 levels, 5 nodes)"
    assert (levels.num_nodes, levels.num_edges, levels.arity) == (5, 3, 2)
    assert levels.direction == "bottom_up" and levels.single_parent
    assert levels.input_node.tolist() == [0, 1, 3, 2, 4]
    assert levels.level_inputs == levels.level_sizes == (3, 1, 1)
    assert levels.level_children == (6, 2, 2)
    assert levels.children.tolist() == [0] * 6 + [1, 2] + [4, 0]
    assert levels.row.tolist() == [1, 2, 4, 3, 5]


def test_rows_calls_and_examples() -> None:
    steps = recorded_schedule()
    assert steps.example_of("output").tolist() == [0, 1, 2]
    recording = Recording()
    total = Signature("total", (Ragged(VECTOR),), (VECTOR,))
    one, two = (recording.input(VECTOR, row) for row in (0, 1))
    recording.output(recording.call(total, [two, one, two]))
    steps = schedule_recordings([recording, recording])
    (step,) = steps.steps
    assert step.arguments[0].rows_in(steps.index).tolist() == [1, 0, 1, 3, 2, 3]
    assert step.arguments[0].calls_in(steps.index).tolist() == [0, 0, 0, 1, 1, 1]


@given(structures())
def test_edge_order_lists_the_edges_as_their_children_are_read(dag: Dag) -> None:
    levels = schedule_structure(dag.edge_index, dag.num_nodes, child_slot=dag.child_slot)
    child = dag.edge_index[0][levels.edge_order]
    assert levels.children.tolist() == levels.row[child].tolist()


def test_long_chains_are_quick_to_print_and_compare() -> None:
    schedule = schedule_recordings([chain_program(VECTORS.mix, 2000)])
    assert len(str(schedule).splitlines()) == 2000 + 2
    assert len(pickle.dumps(schedule)) < 1_000_000


def stats_of(*shapes: object, policy: str = "depth") -> object:
    return schedule_recordings([tree_program(VECTORS.mix, s) for s in shapes], policy).stats()


def test_a_small_tree_by_hand() -> None:
    stats = stats_of(((1, 2), 3))
    assert asdict(stats) == {
        "examples": 1,
        "steps": 2,
        "rows": 2,
        "merged_calls": 0,
        "critical_path": 2,
        "lower_bound": 2,
        "widths": (1, 1),
        "operations": ("mix", "mix"),
        "gathered_rows": 0,
        "fold_steps": 2,
    }


def test_folds_steps_are_every_operation_at_every_depth() -> None:
    recording = Recording()
    (state,) = constants(recording, 1)
    state = recording.call(VECTORS.squash, state)
    state = recording.call(VECTORS.mix, state, state)
    recording.output(recording.call(VECTORS.score, state))
    stats = schedule_recordings([recording]).stats()
    assert (stats.steps, stats.critical_path, stats.lower_bound) == (1, 1, 1)  # squash+mix+score
    assert stats.fold_steps == 9


def test_lower_bound_is_a_sum_over_operations() -> None:
    # One example is a chain of mixes, the other one of squashes: 3 + 4 steps, path of 4.
    squashes = Recording()
    (state,) = constants(squashes, 1)
    for _ in range(4):
        state = squashes.call(VECTORS.squash, state)
    squashes.output(state)
    stats = schedule_recordings([chain_program(VECTORS.mix, 3), squashes]).stats()
    assert (stats.critical_path, stats.lower_bound, stats.steps) == (4, 7, 7)


def test_a_structure_by_hand() -> None:
    stats = schedule_structure(torch.tensor([[0, 1], [1, 2]]), 3).stats()
    assert stats.widths == (1, 1, 1)
    assert stats.fold_steps == stats.lower_bound == stats.critical_path == 3
    assert (stats.rows, stats.gathered_rows) == (3, 2)


def test_no_calls() -> None:
    stats = schedule_recordings([Recording(), Recording()]).stats()
    assert (stats.examples, stats.steps, stats.rows) == (2, 0, 0)
    assert (stats.critical_path, stats.lower_bound, stats.fold_steps) == (0, 0, 0)
    recording = Recording()
    recording.output(recording.input(VECTOR, 3))
    stats = schedule_recordings([recording]).stats()
    assert (stats.steps, stats.critical_path) == (0, 0)
