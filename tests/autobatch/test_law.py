"""Batched equals one by one: values and gradients of random programs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_dynbatch.autobatch import autobatch
from tests.autobatch.programs import Random, examples, gradients


def check(reads: float, seed: int, count: int, length: int) -> None:
    torch.manual_seed(0)
    model = autobatch(Random(reads).double())
    drawn = examples(seed, count, length)
    batched = model(drawn)
    emitted = model.emitted["vector"]
    single = model(drawn, batch=False)
    torch.testing.assert_close(batched, single, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(emitted, model.emitted["vector"], rtol=1e-10, atol=1e-10)
    ours, theirs = gradients(model, drawn, batched), gradients(model, drawn, single)
    for mine, other in zip(ours, theirs, strict=True):
        expected = torch.zeros_like(mine) if other is None and mine is not None else other
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reads", [0.0, 0.3])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 6), length=st.integers(0, 25))
def test_batched_equals_one_by_one(reads: float, seed: int, count: int, length: int) -> None:
    check(reads, seed, count, length)
