"""Law of loops, branches and stacks: they give what plain Python gives, alone and in a batch."""

import pickle
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.laws.decisions import PLAIN, Random, collated, double_by_default, examples
from tests.strategies import few

SEEDS = st.integers(0, 2**30)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with double_by_default():
        yield


def models() -> tuple[AutoBatch, AutoBatch]:
    """Return a model, and one with the same weights in plain Python."""
    torch.manual_seed(0)
    decisions, plain = Random(), Random(PLAIN)
    plain.load_state_dict(decisions.state_dict())
    return autobatch(decisions), autobatch(plain)


def gradients(model: AutoBatch, result: Any, *others: Tensor) -> list[Tensor]:
    """Return the gradients of a weighted sum of all results: of parameters and other tensors."""
    leaves = [*model.parameters(), *others]
    loss = sum(leaf.sum() * 0 for leaf in leaves)  # a result may depend on none of them
    for value in tree_leaves(result):
        if value.is_floating_point():
            weights = torch.arange(1.0, value.numel() + 1).view(value.shape)
            loss = loss + (value * weights).sum()
    return list(torch.autograd.grad(loss, leaves))


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@few(12)
@given(SEEDS, st.integers(1, 7), st.integers(1, 2))
def test_random_programs_equal_plain_python(seed: int, count: int, programs: int) -> None:
    model, plain = models()
    batch = examples(seed, count, programs)
    vectors = [example.vector for example in batch]
    expected = plain(batch, batch=False)
    expected_gradients = gradients(plain, expected, *vectors)
    for is_batched in (False, True):
        got = model(batch, batch=is_batched)
        close(got, expected)
        close(gradients(model, got, *vectors), expected_gradients)


@few(12)
@given(SEEDS, st.integers(1, 7), st.integers(1, 2))
def test_later_calls_and_those_without_gradients_give_the_same(
    seed: int, count: int, programs: int
) -> None:
    model, plain = models()
    batch = examples(seed, count, programs)
    expected = plain(batch, batch=False)
    model(batch)
    close(model(batch), expected)  # with the signatures of before
    with torch.no_grad():
        close(model(batch), expected)
    with torch.inference_mode():
        close(model(batch), expected)


@few(12)
@given(SEEDS)
def test_schedules_give_the_same(seed: int) -> None:
    model, plain = models()
    batch = examples(seed, 5, 2, grad=False)
    scheduled = pickle.loads(pickle.dumps(model.collate(batch)))
    expected = plain(batch, batch=False)
    for _ in range(2):
        close(model(scheduled), expected)
    close(gradients(model, model(scheduled)), gradients(plain, expected))


@pytest.mark.parametrize("seed", [3, 4])
def test_schedules_of_a_different_process_mean_the_same(
    seed: int, another_process: Executor
) -> None:
    scheduled = pickle.loads(another_process.submit(collated, seed).result())
    model, plain = models()
    expected = plain(examples(seed, 6, 2, grad=False), batch=False)
    close(model(scheduled), expected)
