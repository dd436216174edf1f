"""A table of sites that grows says the same as one that was made at once."""

import random

import numpy as np
import pytest

from pyg_dynbatch.core.operation import Ragged, Signature
from pyg_dynbatch.core.recording import CALL, CONSTANT, INPUT, Recording, Site, Sites
from pyg_dynbatch.core.scheduling import schedule_recordings
from pyg_dynbatch.core.types import TensorType

TYPES = [TensorType((n,)) for n in range(4)]
FACTS = (
    *("signatures", "row_types", "number_of_type", "argument_types", "result_types"),
    *("most_results", "most_arguments"),
)


def drawn(rng: random.Random, number: int) -> Site:
    results = tuple(rng.choices(TYPES, k=rng.randint(1, 3)))
    if kind := rng.choice([CONSTANT, INPUT, CALL]) != CALL:
        return Site(kind, results[:1])
    inputs = [rng.choice([row, Ragged(row)]) for row in rng.choices(TYPES, k=rng.randint(1, 3))]
    return Site(CALL, results, Signature(f"f{number}", tuple(inputs), results))


@pytest.mark.parametrize("seed", range(5))
def test_growing(seed: int) -> None:
    rng, grown = random.Random(seed), Sites()  # noqa: S311
    for number in range(20):
        grown.append(drawn(rng, number))
        whole = Sites(list(grown))
        assert grown == whole and hash(grown) == hash(whole)
        for name in FACTS:
            assert getattr(grown, name) == getattr(whole, name)
        for mine, other in zip(grown.table[1:], whole.table[1:], strict=True):
            assert np.array_equal(mine, other)


def test_a_refused_site_is_not_added() -> None:
    row, wide = TYPES[:2]
    recording, other = Recording(), Recording()
    value = recording.constant(row, [])
    result = recording.call(Signature("f", (row,), (row,)), value)
    with pytest.raises(TypeError, match="two signatures are called 'f'"):
        recording.call(Signature("f", (row,), (wide,)), value)
    recording.output(recording.call(Signature("g", (row,), (row,)), result))
    assert [site.signature and site.signature.name for site in recording.sites] == [None, "f", "g"]
    assert len(other.sites) == 0, "an empty table is no one's"
    assert schedule_recordings([recording, recording]).num_examples == 2
