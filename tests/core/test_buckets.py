"""Shapes found from a sample hold it, and cost no more than one shape for all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.core import Schedule
from pyg_dynbatch.core.padding import LevelBuckets, padded_form, shape_of
from tests.core.helpers import message
from tests.core.test_padding import filled, schedule_of, small


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


def test_a_split_is_made_where_it_saves_most() -> None:
    buckets = LevelBuckets.fit(chains(*[2] * 9, *[20] * 3), 2, margin=0.0)
    assert [len(shape.sizes) for shape in buckets.shapes] == [2, 20]
    # All alike: there is nothing to split.
    assert len(LevelBuckets.fit(chains(3, 3, 3), 5).shapes) == 1


def test_the_cheapest_shape_is_taken() -> None:
    few, many = (chains(length)[0] for length in (2, 30))
    shapes = [shape_of(many), shape_of(few)._replace(inputs=(9, 9)), shape_of(few)]
    buckets = LevelBuckets(shapes, level_rows=10)
    assert buckets.shape_for(few) == shape_of(few)
    assert repr(buckets) == "LevelBuckets(3 shapes of 2 to 30 nodes)"


def test_schedules_that_fit_nowhere_stay_as_they_are() -> None:
    short, long = chains(2, 9)
    buckets = LevelBuckets.fit([short])
    assert buckets.pad(long) is long
    assert buckets.padding([long, short]).fitting == 0.5
    assert buckets.padding([long]) == (0.0, 1.0, 1.0, 0)


def test_levels_are_made_larger_by_the_margin() -> None:
    (shape,) = LevelBuckets.fit([small()], margin=0.5).shapes
    assert shape.inputs == (3, 2)


def test_what_is_no_sample_is_refused() -> None:
    ragged = Schedule.from_structure(torch.tensor([[0, 1], [2, 2]]), 3)
    assert "2 schedules of 2 kinds" in message(ValueError, LevelBuckets.fit, [small(), ragged])
    assert "0 schedules of 0 kinds" in message(ValueError, LevelBuckets.fit, [])
    assert "number=0" in message(ValueError, LevelBuckets.fit, [small()], 0)
    negative = message(ValueError, lambda: LevelBuckets.fit([small()], margin=-0.1))
    assert "margin=-0.1" in negative
    assert "0 shapes, level_rows=64" in message(ValueError, LevelBuckets, [])
