import os
from functools import partial
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from pyg_dynbatch.core.levels import Levels, schedule_structure
from pyg_dynbatch.core.native import NATIVE_SWITCH, extension
from pyg_dynbatch.core.structure import slots_of
from pyg_dynbatch.nn import NaryTreeLSTM
from tests.strategies import Dag, structures, trees

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


def test_nodes_with_an_input() -> None:
    schedule = made(has_input=torch.tensor([True, True, False, True]))
    assert schedule.input_node.tolist() == [0, 1, 3]
    assert schedule.level_inputs == (2, 0, 1)


def test_nodes_without_input_come_last_in_their_level() -> None:
    schedule = made(has_input=torch.tensor([False, True, True, True]))
    assert schedule.input_node.tolist() == [1, 2, 3]
    assert schedule.row.tolist() == [2, 1, 3, 4]


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
    assert schedule.level_sizes == (3,)
    assert schedule.level_children == (0,)


def test_examples_of_a_batch_are_known():
    edges = torch.tensor([[0, 3], [1, 4]])
    schedule = schedule_structure(edges, 5, example_sizes=[2, 0, 3])
    assert schedule.num_examples == 3
    assert schedule.stats().examples == 3


@pytest.mark.skipif(extension() is None, reason="no extension")
def test_edges_that_are_not_contiguous_are_scheduled_in_c() -> None:
    edges = torch.tensor([[0, 1], [9, 9], [1, 2], [9, 9]])[::2].t()
    assert not edges.is_contiguous()
    has_input = torch.tensor([True, False]).repeat(3)[::2]
    with mock.patch("pyg_dynbatch.core.levels._lay_out", side_effect=NotImplementedError):
        found = schedule_structure(edges, 3, has_input=has_input)
    wanted = schedule_structure(edges.contiguous(), 3, has_input=has_input.contiguous())
    assert torch.equal(found.index, wanted.index)
    assert found.level_sizes == wanted.level_sizes


CHANGES: dict[str, Any] = {
    "in place": lambda rows: rows.fill_(2**40),
    "through .data": lambda rows: rows.data.fill_(2**40),
    "through NumPy": lambda rows: rows.numpy().fill(2**40),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_levels_are_refused_however_they_were_changed(change: str, mode: Any) -> None:
    layer = NaryTreeLSTM(4, 8)
    x = torch.randn(3, 4)
    edge_index = torch.tensor([[0, 1], [2, 2]])
    with mode():
        levels = schedule_structure(edge_index, 3, arity=2)
        layer(x, edge_index, levels)
        CHANGES[change](levels.children)
        with pytest.raises(ValueError, match="do not fit each other"):
            layer(x, edge_index, levels)
