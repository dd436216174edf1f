"""Batched = one by one on very many random programs."""

import random

import pytest
import torch

from pyg_dynbatch.core import Schedule, run_one_by_one
from tests.laws.languages import VECTOR, Language, recorded, sketch_of
from tests.laws.test_programs import flat, inputs_of
from tests.nn.recursion import assert_equal

CHUNKS, BATCHES, PROGRAMS = 20, 100, 50


@pytest.mark.parametrize(
    ("chunk", "batches"),
    [(0, 4), *(pytest.param(n, BATCHES, marks=pytest.mark.long) for n in range(CHUNKS))],
)
def test_batched_is_one_by_one(chunk: int, batches: int) -> None:
    """Check one chunk; all long chunks together are 100,000 programs."""
    language, numbers = Language(), random.Random(chunk)
    for _ in range(batches):
        batch = [sketch_of(numbers.randint) for _ in range(PROGRAMS)]
        programs = [recorded(language, sketch) for sketch in batch]
        inputs = {VECTOR: inputs_of(batch)}
        with torch.no_grad():
            wanted = run_one_by_one(language.engine, programs, inputs)
            policy = numbers.choice(("depth", "agenda"))
            found = language.engine(Schedule.from_programs(programs, policy), inputs)
        assert list(found) == list(wanted)
        assert_equal(flat(found), flat(wanted))
