import os
from functools import partial
from operator import attrgetter
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from pyg_dynbatch.core.levels import Levels, derive_levels, schedule_structure
from pyg_dynbatch.core.native import NATIVE_SWITCH
from pyg_dynbatch.core.steps import ZEROS
from pyg_dynbatch.core.structure import slots_of
from tests.core.helpers import message
from tests.strategies import Dag, chain, diamond, forests, star, structures, trees

EDGES = torch.tensor([[0, 1, 2], [2, 2, 3]])


def children_of(schedule: Levels, level: int) -> list[int]:
    return schedule.children.split(schedule.level_children)[level].tolist()


def made(**options: object) -> Levels:
    return schedule_structure(EDGES, 4, **options)


@given(structures())
def test_steps_are_the_levels(dag: Dag) -> None:
    schedule = schedule_structure(dag.edge_index, dag.num_nodes)
    sizes = [dag.depth.count(level) for level in range(max(dag.depth) + 1)]
    assert list(schedule.level_sizes) == sizes
    assert sum(sizes) == dag.num_nodes
    assert schedule.stats().critical_path == len(sizes)
    order = sorted(range(dag.num_nodes), key=lambda node: (dag.depth[node], node))
    assert schedule.input_node.tolist() == order


@given(structures(), st.data())
def test_c_follows_the_definition(dag: Dag, data: st.DataObject) -> None:
    def numbers(size: int, least: int, most: int) -> torch.Tensor:
        drawn = st.lists(st.integers(least, most), min_size=size, max_size=size)
        return torch.tensor(data.draw(drawn), dtype=torch.long)

    nodes, edges = dag.num_nodes, dag.edge_index
    if nodes and data.draw(st.booleans(), "edges that may form cycles"):
        edges = numbers(2 * dag.num_edges, -1, nodes).view(2, -1)
    anything = [dag.child_slot, numbers(edges.size(1), -1, 2), dag.child_slot.int()]
    options = {
        "child_slot": data.draw(st.sampled_from([None, *anything]), "child_slot"),
        "arity": data.draw(st.sampled_from([None, 0, 1, 2, 5]), "arity"),
        "has_input": data.draw(st.sampled_from([None, numbers(nodes, 0, 1).bool()]), "has_input"),
        "example_sizes": data.draw(
            st.sampled_from([None, [nodes, 0], [1, nodes - 1], [nodes + 1]])
        ),
        "direction": data.draw(st.sampled_from(["bottom_up", "top_down"]), "direction"),
    }
    found: list[Any] = []
    for switch in "01":
        with mock.patch.dict(os.environ, {NATIVE_SWITCH: switch}):
            try:
                found.append(schedule_structure(edges, nodes, **options))
            except ValueError as error:
                found.append(str(error))
    assert found[0] == found[1]
    if isinstance(found[0], Levels):
        facts = attrgetter("level_children", "single_parent", "checksums")
        assert facts(found[0]) == facts(found[1])
    event(type(found[0]).__name__)


@given(structures(), st.data())
def test_c_reads_tokens_as_the_definition_does(dag: Dag, data: st.DataObject) -> None:
    drawn = st.lists(st.integers(-2, 5), min_size=dag.num_nodes, max_size=dag.num_nodes)
    token = torch.tensor(data.draw(drawn), dtype=torch.long)
    fields = {"edge_index": dag.edge_index, "token": token}
    found: list[Any] = []
    for switch in "01":
        with mock.patch.dict(os.environ, {NATIVE_SWITCH: switch}):
            try:
                found.append(derive_levels("layer", fields, dag.num_nodes, None, "bottom_up"))
            except ValueError as error:
                found.append(str(error))
    assert found[0] == found[1]
    assert isinstance(found[0], Levels) == bool((token >= -1).all())
    if isinstance(found[0], Levels):
        assert found[0].checksums == found[1].checksums
        assert found[0].num_inputs == int((token >= 0).sum())
        assert found[1].index.untyped_storage().nbytes() == found[1].index.nbytes


def test_any_default_device() -> None:
    with torch.device("meta"):
        schedule = made()
    assert schedule == made()
    assert schedule.index.is_cpu


@given(trees())
def test_top_down_steps_are_the_distances_from_the_root(tree: Dag) -> None:
    schedule = schedule_structure(tree.edge_index, tree.num_nodes, direction="top_down")
    height = [0] * tree.num_nodes
    for node in reversed(tree.order):
        for child in tree.children[node]:
            height[child] = height[node] + 1
    assert list(schedule.level_sizes) == [height.count(level) for level in range(max(height) + 1)]


def test_inputs_and_results_lie_side_by_side() -> None:
    schedule = made(has_input=torch.tensor([True, True, False, True]))
    assert [step.arguments[0].start for step in schedule.to_steps().steps] == [1, ZEROS, 3]
    assert [step.results[0][1] for step in schedule.to_steps().steps] == [1, 3, 4]
    assert schedule.input_node.tolist() == [0, 1, 3]
    assert schedule.level_inputs == (2, 0, 1)


def test_nodes_without_input_come_last_in_their_level() -> None:
    schedule = made(has_input=torch.tensor([False, True, True, True]))
    assert schedule.input_node.tolist() == [1, 2, 3]
    assert schedule.to_steps().steps[0].arguments[0].rows_in(schedule.index).tolist() == [1, 0]


def test_forests_of_mixed_depth() -> None:
    schedule = schedule_structure(EDGES, 6)
    assert list(schedule.level_sizes) == [4, 1, 1]


def test_no_nodes() -> None:
    for arity in (None, 2):
        schedule = schedule_structure(torch.empty(2, 0, dtype=torch.long), 0, arity=arity)
        assert schedule.level_sizes == ()
        assert schedule.input_node.tolist() == []
        assert schedule.stats().steps == 0


def test_child_slots_order_ragged_children() -> None:
    schedule = made(child_slot=torch.tensor([1, 0, 0]))
    assert children_of(schedule, 1) == [2, 1]


def test_child_slots_leave_places_open() -> None:
    schedule = made(child_slot=torch.tensor([2, 0, 1]), arity=3)
    assert children_of(schedule, 1) == [2, 0, 1]
    assert children_of(schedule, 2) == [0, 3, 0]


@given(trees(), st.sampled_from(["bottom_up", "top_down"]))
def test_slots_left_out_are_those_of_the_edges_in_their_order(tree: Dag, direction: str) -> None:
    made_of = partial(schedule_structure, tree.edge_index, tree.num_nodes)
    slots = slots_of(tree.edge_index, tree.num_nodes)
    for arity in (3, None):
        options = {"arity": arity, "direction": direction}
        assert made_of(**options) == made_of(child_slot=slots, **options)


def test_top_down_parents_stand_in_the_place_of_the_child() -> None:
    schedule = made(arity=2, direction="top_down")
    assert children_of(schedule, 2) == [2, 0, 0, 2]


def test_arity_zero_takes_nodes_without_edges() -> None:
    schedule = schedule_structure(torch.empty(2, 0, dtype=torch.long), 3, arity=0)
    assert [len(step.arguments) for step in schedule.to_steps().steps] == [1]


def test_invalid_options() -> None:
    text = message(ValueError, made, direction="sideways")
    assert "schedule_structure: unknown direction" in text
    assert "'bottom_up' or 'top_down'" in text
    assert "invalid arity" in message(ValueError, made, arity=-1)


def test_a_cycle() -> None:
    edges = torch.tensor([[0, 1], [1, 0]])
    for direction in ("bottom_up", "top_down"):
        text = message(ValueError, schedule_structure, edges, 2, direction=direction)
        assert "edge_index has a cycle" in text


def test_an_edge_to_nowhere() -> None:
    text = message(ValueError, schedule_structure, EDGES, 3)
    assert "schedule_structure: an edge has a node that does not exist" in text
    assert "2 -> 3" in text


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("has_input", torch.ones(4), "float32 tensor [4]"),
        ("has_input", torch.ones(3, dtype=torch.bool), "bool tensor [3]"),
        ("child_slot", torch.tensor([0, 1]), "int64 tensor [2]"),
        ("child_slot", torch.tensor([0, -1, 0]), "smallest -1"),
        ("child_slot", torch.tensor([0.0, 1.0, 0.0]), "float32 tensor [3]"),
        ("child_slot", torch.tensor([0, 1, 0], dtype=torch.int32), "int32 tensor [3]"),
    ],
)
def test_invalid_fields(name: str, value: torch.Tensor, got: str) -> None:
    wanted = {
        "has_input": "bool tensor [4]",
        "child_slot": "int64 tensor [3], one number >= 0 per edge",
    }
    text = message(ValueError, made, **{name: value})
    assert f"{name} has an invalid shape, dtype or value" in text
    assert wanted[name] in text and got in text
    assert message(ValueError, made, arity=2, **{name: value}) == text


def test_a_child_beyond_the_arity() -> None:
    text = message(ValueError, schedule_structure, star(4).edge_index, 4, arity=2)
    assert "node 0 has a child beyond the arity" in text
    assert "child slots below 2" in text
    assert "slot 2" in text
    assert "arity=3, or arity=None" in text


def test_two_children_in_one_place() -> None:
    text = message(ValueError, made, child_slot=torch.tensor([1, 1, 0]), arity=2)
    assert "node 2 has two arguments in one slot" in text
    assert "slot 1 taken by nodes [0, 1]" in text


def test_a_top_down_node_with_two_parents() -> None:
    dag = diamond()
    options = {"arity": 1, "direction": "top_down", "child_slot": torch.zeros(4, dtype=torch.long)}
    text = message(ValueError, schedule_structure, dag.edge_index, 4, **options)
    assert "two arguments in one slot" in text
    assert "use arity=None" in text


@given(forests())
def test_ragged_segment_ids_rise(forest: Dag) -> None:
    schedule = schedule_structure(forest.edge_index, forest.num_nodes)
    segments = schedule.child_segment.split(schedule.level_children)
    for size, segment_ids in zip(schedule.level_sizes, segments, strict=True):
        assert (segment_ids.diff() >= 0).all()
        assert segment_ids.numel() == 0 or int(segment_ids.max()) < size


def test_a_long_chain() -> None:
    assert schedule_structure(chain(3000).edge_index, 3000, arity=1).num_levels == 3000


def test_examples_of_a_batch_are_known():
    edges = torch.tensor([[0, 3], [1, 4]])
    schedule = schedule_structure(edges, 5, example_sizes=[2, 0, 3])
    assert schedule.num_examples == 3
    assert schedule.example.tolist() == [0, 0, 2, 2, 2]
    assert schedule.stats().examples == 3


@pytest.mark.parametrize("sizes", [[2, 2], [6, -1], [2**63 - 1, 2**63 - 1, 7]])
def test_examples_must_add_up(sizes):
    with pytest.raises(ValueError, match="example_sizes does not fit the nodes") as error:
        schedule_structure(torch.zeros(2, 0, dtype=torch.long), 5, example_sizes=sizes)
    assert "add up to 5" in str(error.value)


@pytest.mark.parametrize("sizes", [[2.5, 2.5], [True, True], ["2", "3"]])
def test_examples_are_counted_in_integers(sizes):
    sizes = np.array(sizes)
    with pytest.raises(TypeError, match="example_sizes are not integers"):
        schedule_structure(torch.zeros(2, 0, dtype=torch.long), 5, example_sizes=sizes)
