"""Batched equals one by one: values and gradients of random programs."""

import copy
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.autobatch.programs import Example, Random, examples, gradients
from tests.strategies import few

# torch.vmap has no batching rule for attention without weights.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def random_model(reads: float = 0.0, peeks: float = 0.0) -> AutoBatch:
    """Create a model in training mode with default initial weights."""
    torch.manual_seed(0)
    return autobatch(Random(reads, peeks).double())


def train(model: AutoBatch, gradients: list[torch.Tensor]) -> None:
    """Move all weights, so that what initial values hide comes out."""
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=False):
            gradient = gradient.nan_to_num(0, 0, 0)
            parameter -= 0.05 * gradient / (1 + gradient.abs().max())


def outcome(model: AutoBatch, drawn: list[Example], batch: bool = True) -> tuple[Any, Any]:
    """Return what a model returns and emits, and the gradients."""
    result = model(drawn, batch=batch)
    found = gradients(model, drawn, result)
    zeros = [
        torch.zeros((), dtype=torch.float64) if gradient is None else gradient for gradient in found
    ]
    return (result, model.emitted["vector"]), zeros


def check(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        # No gradient one by one is a gradient of zeros when examples are batched.
        size = max(1.0, float(mine.abs().nan_to_num(0, 0, 0).max()))
        options: Any = {"rtol": 1e-10, "atol": 1e-10 * size, "equal_nan": True}
        torch.testing.assert_close(mine, other.expand_as(mine), **options)


seeds, counts, lengths = st.integers(0, 2**20), st.integers(1, 6), st.integers(0, 25)


@pytest.mark.parametrize("reads", [0.0, 0.3])
@few(10)
@given(seed=seeds, count=counts, length=lengths)
def test_batched_equals_one_by_one(reads: float, seed: int, count: int, length: int) -> None:
    model, drawn = random_model(reads), examples(seed, count, length)
    for _ in range(2):
        expected = outcome(model, drawn, batch=False)
        check(outcome(model, drawn), expected)
        train(model, expected[1])


def check_many(reads: float) -> None:
    torch.set_num_threads(1)
    model = random_model(reads)
    for seed in range(40):
        drawn = examples(seed + int(1000 * reads), 250, 5)
        expected = outcome(model, drawn, batch=False)
        check(outcome(model, drawn), expected)
        train(model, expected[1])


@pytest.mark.long
@pytest.mark.parametrize("reads", [0.0, 0.1])
def test_batched_equals_one_by_one_on_many_programs(
    reads: float, another_process: Executor
) -> None:
    another_process.submit(check_many, reads).result()


@pytest.mark.parametrize("fibers", [True, False])
@few(10)
@given(seed=seeds, count=counts, length=lengths)
def test_flushes_change_nothing(fibers: bool, seed: int, count: int, length: int) -> None:
    drawn = examples(seed, count, length)
    with pytest.MonkeyPatch.context() as patch:
        if not fibers:
            patch.setattr("pyg_dynbatch.autobatch.fibers.greenlet", None)
        check(outcome(random_model(peeks=0.3), drawn), outcome(random_model(), drawn))


@few(10)
@given(seed=seeds, count=counts, length=lengths)
def test_batch_normalization_while_training_is_refused_or_right(
    seed: int, count: int, length: int
) -> None:
    model, drawn = random_model(), examples(seed, count, length)
    model.train()  # also batch normalization, which is in evaluation mode in the other laws
    expected = outcome(copy.deepcopy(model), drawn, batch=False)
    try:
        found = outcome(model, drawn)
    except ValueError as error:
        assert "BatchNorm1d" in str(error)
    else:
        check(found, expected)
