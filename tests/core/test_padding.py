"""Padded schedules have the same nodes, inputs and children; buckets hold their sample."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core import Schedule
from pyg_dynbatch.core.layout import LevelShape
from pyg_dynbatch.core.padding import (
    LevelBuckets,
    PaddedForm,
    padded_form,
    padded_schedule,
    schedule_of_shape,
    shape_of,
)
from tests.core.helpers import message
from tests.strategies import Dag, structures

ARITIES = (None, 3)


@st.composite
def filled(draw: st.DrawFn) -> tuple[Dag, list[bool]]:
    """A structure, some of whose nodes have an input."""
    dag = draw(structures(8, 3))
    flags = st.lists(st.booleans(), min_size=dag.num_nodes, max_size=dag.num_nodes)
    return dag, draw(flags)


def schedule_of(structure: tuple[Dag, list[bool]], arity: int | None) -> Schedule:
    dag, flags = structure
    return Schedule.from_structure(
        dag.edge_index,
        dag.num_nodes,
        child_slot=dag.child_slot,
        arity=arity,
        has_input=torch.tensor(flags),
    )


@st.composite
def wider(draw: st.DrawFn, *shapes: LevelShape) -> LevelShape:
    """A shape that holds all of these, with more of everything and up to two more levels."""
    levels = max(len(shape.inputs) for shape in shapes) + draw(st.integers(0, 2))
    more = st.lists(st.integers(0, 3), min_size=levels, max_size=levels)

    def largest(columns: list[tuple[int, ...]], extra: list[int]) -> tuple[int, ...]:
        padded = [column + (0,) * (levels - len(column)) for column in columns]
        return tuple(map(sum, zip(map(max, zip(*padded, strict=True)), extra, strict=True)))

    first = shapes[0]
    extra = [0, *draw(more)[1:]] if first.arity is None else [0] * levels
    edges = largest([shape.edges for shape in shapes], extra)
    return LevelShape(
        first.arity,
        first.direction,
        largest([shape.inputs for shape in shapes], draw(more)),
        # One more node per level, as padding edges need padding nodes.
        largest([shape.others for shape in shapes], [1 + count for count in draw(more)]),
        edges,
        draw(st.booleans()) and all(shape.single_parent for shape in shapes),
    )


def padded(schedule: Schedule, shape: LevelShape) -> PaddedForm:
    form = padded_form(padded_schedule(schedule, shape))
    assert form is not None
    return form


@given(st.sampled_from(ARITIES), st.data())
def test_every_node_keeps_its_inputs_and_children(arity: int | None, data: st.DataObject) -> None:
    schedule = schedule_of(data.draw(filled()), arity)
    shape = data.draw(wider(shape_of(schedule)))
    form = padded(schedule, shape)
    assert tuple(step.size for step in form.schedule.steps) == shape.sizes
    assert shape_of(form.schedule) == shape
    place = form.node_position.tolist()
    assert len(set(place)) == schedule.num_nodes
    rows = schedule.rows_of(schedule.outputs["node"].rows).tolist()
    new = {0: 0} | {row: at + 1 for row, at in zip(rows, place, strict=True)}

    def read(each: Schedule) -> dict[int, tuple[int, list[int]]]:
        """Input row and child rows of every state row."""
        found = {}
        for step in each.steps:
            given = each.rows_of(step.arguments[0]).tolist()
            children = each.children_of(step).tolist()
            if arity is None:
                segment_ids = each.segment_ids_of(step.arguments[1]).tolist()
                pairs = list(zip(segment_ids, children, strict=True))
                below = [[c for o, c in pairs if o == k] for k in range(step.size)]
            else:
                below = [children[arity * k : arity * (k + 1)] for k in range(step.size)]
            first = step.results[0][1]
            found |= {first + k: (given[k], below[k]) for k in range(step.size)}
        return found

    old, changed = read(schedule), read(form.schedule)
    for row, (read_row, below) in old.items():
        own, children = changed[new[row]]
        assert bool(own) == bool(read_row)
        assert not own or form.input_row[own - 1] == read_row - 1
        assert children == [new[child] for child in below]
    # Padding nodes only read each other.
    for row in set(changed) - set(new.values()):
        assert not set(changed[row][1]) & (set(new.values()) - {0})


@given(st.sampled_from(ARITIES), st.data())
def test_all_but_row_numbers_depends_on_the_shape_alone(
    arity: int | None, data: st.DataObject
) -> None:
    first, second = (schedule_of(data.draw(filled()), arity) for _ in range(2))
    shape = data.draw(wider(shape_of(first), shape_of(second)))
    one, two = padded(first, shape).schedule, padded(second, shape).schedule
    for name in ("signatures", "stores", "steps", "outputs", "num_examples", "structure"):
        assert getattr(one, name) == getattr(two, name)
    assert one.index.shape == two.index.shape
    assert int(one.index.min()) >= 0 and int(one.index.max()) <= shape.nodes


@given(st.data())
def test_ragged_children_are_adjacent(data: st.DataObject) -> None:
    schedule = schedule_of(data.draw(filled()), None)
    padded_one = padded(schedule, data.draw(wider(shape_of(schedule)))).schedule
    nodes, starts = padded_one.num_nodes, padded_one.child_start
    segment_ids = [
        step.results[0][1] - 1 + segment
        for step in padded_one.steps
        for segment in padded_one.segment_ids_of(step.arguments[1]).tolist()
    ]
    assert segment_ids == sorted(segment_ids) and len(segment_ids) == padded_one.num_edges
    counts = torch.bincount(torch.tensor(segment_ids, dtype=torch.long), minlength=nodes)
    assert starts.tolist() == (counts.cumsum(0) - counts).tolist()


def small() -> Schedule:
    return Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3, arity=2)


def test_the_schedule_itself_stays_and_moves_with_its_padded_form() -> None:
    schedule = small()
    shape = shape_of(schedule)._replace(inputs=(3, 2))
    both = padded_schedule(schedule, shape)
    assert (both.steps, both.stores, both.outputs) == (
        schedule.steps,
        schedule.stores,
        schedule.outputs,
    )
    assert both.index[: schedule.index.numel()].tolist() == schedule.index.tolist()
    right = padded_form(both)
    assert right is not None
    for copy in (both.clone(), both.cpu(), pickle.loads(pickle.dumps(both))):
        form = padded_form(copy)
        assert form is not None and form.schedule == right.schedule
        assert form.input_row.tolist() == right.input_row.tolist()
    again = padded_schedule(both, shape._replace(inputs=(2, 1)))
    assert again.index.numel() < both.index.numel()
    assert schedule_of_shape(shape, right.schedule.index) == right.schedule


def test_schedules_that_cannot_be_padded() -> None:
    text = message(ValueError, padded_schedule, small(), shape_of(small())._replace(inputs=(1, 1)))
    assert "cannot be padded to this shape" in text and "inputs=(2, 1)" in text
    assert "on meta" in message(ValueError, padded_schedule, small().to("meta"), shape_of(small()))
    flat = Schedule.from_structure(torch.zeros(2, 0, dtype=torch.long), 2, arity=0)
    assert "nodes without child slots" in message(ValueError, shape_of, flat)


def test_which_shapes_hold_others() -> None:
    shape = shape_of(Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3))
    assert shape.holds(shape) and shape.nodes == 3
    assert not shape._replace(inputs=(2,), others=(0,), edges=(0,)).holds(shape)
    assert not shape._replace(direction="top_down").holds(shape)
    assert shape._replace(single_parent=False).holds(shape)
    assert not shape.holds(shape._replace(single_parent=False))
    # A padding edge needs a padding leaf and a padding node.
    for others in ((0, 0), (0, 1), (1, 0)):
        assert not shape._replace(edges=(0, 3), others=others).holds(shape)
    assert shape._replace(edges=(0, 3), others=(1, 1)).holds(shape)
    assert not shape._replace(edges=(0, 1), others=(1, 1)).holds(shape)


@given(st.sampled_from((None, 3)), st.integers(1, 5), st.sampled_from((0.0, 0.3)), st.data())
def test_fitted_shapes_hold_the_sample(
    arity: int | None, number: int, margin: float, data: st.DataObject
) -> None:
    structures = data.draw(st.lists(filled(), min_size=1, max_size=8))
    sample = [schedule_of(each, arity) for each in structures]
    buckets = LevelBuckets.fit(sample, number, margin=margin)
    assert 1 <= len(buckets.shapes) <= number
    for schedule in sample:
        chosen = buckets.shape_for(schedule)
        assert chosen is not None and chosen.holds(shape_of(schedule))
        form = padded_form(buckets.pad(schedule))
        assert form is not None and form.shape == chosen
    found = buckets.padding(sample)
    assert found.fitting == 1 and found.nodes >= 1 and found.levels >= 1
    assert found.shapes <= len(buckets.shapes)


def chains(*lengths: int) -> list[Schedule]:
    def chain(length: int) -> Schedule:
        nodes = torch.arange(length)
        return Schedule.from_structure(torch.stack([nodes[:-1], nodes[1:]]), length, arity=1)

    return [chain(length) for length in lengths]


def test_more_shapes_pad_less() -> None:
    sample = chains(*range(1, 33))
    nodes = [LevelBuckets.fit(sample, n, margin=0.0).padding(sample).nodes for n in (1, 2, 4, 32)]
    assert nodes[0] == pytest.approx(32 * 32 / sum(range(33)))
    assert nodes == sorted(nodes, reverse=True) and nodes[-1] < 1.05
    # The first split saves most; a sample of equal schedules is not split.
    buckets = LevelBuckets.fit(chains(*[2] * 9, *[20] * 3), 2, margin=0.0)
    assert [len(shape.sizes) for shape in buckets.shapes] == [2, 20]
    assert len(LevelBuckets.fit(chains(3, 3, 3), 5).shapes) == 1


def test_the_cheapest_shape_is_taken() -> None:
    few, many = (chains(length)[0] for length in (2, 30))
    shapes = [shape_of(many), shape_of(few)._replace(inputs=(9, 9)), shape_of(few)]
    buckets = LevelBuckets(shapes, level_rows=10)
    assert buckets.shape_for(few) == shape_of(few)
    assert repr(buckets) == "LevelBuckets(3 shapes of 2 to 30 nodes)"


def test_schedules_that_fit_into_no_shape() -> None:
    short, long = chains(2, 9)
    buckets = LevelBuckets.fit([short])
    assert buckets.pad(long) is long
    assert buckets.padding([long, short]).fitting == 0.5
    assert buckets.padding([long]) == (0.0, 1.0, 1.0, 0)


def test_arguments_of_fit() -> None:
    (shape,) = LevelBuckets.fit([small()], margin=0.5).shapes
    assert shape.inputs == (3, 2)
    ragged = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3)
    for sample, options, found in (
        ([small(), ragged], {}, "2 schedules of 2 kinds"),
        ([], {}, "0 schedules of 0 kinds"),
        ([small()], {"number": 0}, "number=0"),
        ([small()], {"margin": -0.1}, "margin=-0.1"),
    ):
        assert found in message(ValueError, LevelBuckets.fit, sample, **options)
    assert "0 shapes, level_rows=64" in message(ValueError, LevelBuckets, [])
