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

from pyg_dynbatch.autobatch import autobatch
from tests.laws.decisions import PLAIN, Random, collated, double_by_default, examples
from tests.strategies import few

SEEDS = st.integers(0, 2**30)


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with double_by_default():
        yield


def models() -> tuple[Random, Random]:
    torch.manual_seed(0)
    decisions, plain = Random(), Random(PLAIN)
    plain.load_state_dict(decisions.state_dict())
    return decisions, plain


def gradients(model: Any, result: Any, *others: Tensor) -> list[Tensor]:
    """Gradients of a weighted sum of all results: of parameters and other tensors."""
    wanted = [*model.parameters(), *others]
    loss = sum(tensor.sum() * 0 for tensor in wanted)
    for leaf in tree_leaves(result):
        if leaf.is_floating_point():
            loss = loss + (leaf * torch.arange(1.0, leaf.numel() + 1).view(leaf.shape)).sum()
    return list(torch.autograd.grad(loss, wanted))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@few(12)
@given(SEEDS, st.integers(1, 7), st.integers(1, 2))
def test_random_programs_equal_plain_python(seed: int, count: int, programs: int) -> None:
    decisions, plain = models()
    given, batched = examples(seed, count, programs), autobatch(decisions)
    expected = autobatch(plain)(given, batch=False)
    alone, together = batched(given, batch=False), batched(given)
    close(alone, expected)
    close(together, expected)
    vectors = [each.vector for each in given]
    wanted = gradients(plain, expected, *vectors)
    close(gradients(decisions, alone, *vectors), wanted)
    close(gradients(decisions, together, *vectors), wanted)
    close(batched(given), expected)  # with the signatures of before
    with torch.no_grad():
        close(batched(given), expected)
    with torch.inference_mode():
        close(batched(given), expected)


@few(12)
@given(SEEDS)
def test_schedules_give_the_same(seed: int) -> None:
    decisions, plain = models()
    given, batched = examples(seed, 5, 2, grad=False), autobatch(decisions)
    expected = autobatch(plain)(given, batch=False)
    batch = pickle.loads(pickle.dumps(batched.collate(given)))
    for _ in range(2):
        close(batched(batch), expected)
    close(gradients(decisions, batched(batch)), gradients(plain, expected))


def test_schedules_of_a_different_process_mean_the_same(another_process: Executor) -> None:
    results = another_process.map(collated, [3, 4])
    decisions, plain = models()
    batched = autobatch(decisions)
    for seed, result in zip((3, 4), results, strict=True):
        given = examples(seed, 6, 2, grad=False)
        close(batched(pickle.loads(result)), autobatch(plain)(given, batch=False))
