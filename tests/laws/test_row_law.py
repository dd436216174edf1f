"""Law of rows: what is run on stacked rows is what is run row by row, also after training."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.laws.row_law_cases import CASES, MIXES, RIGHT, WRONG, Case, examples

# vmap has no batching rule for some functions and then warns about a slow loop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm"),
]
RANDOM = {
    "one mask for all", "dropout", "noise", "dropout of features", "layer drop",
    "NumPy noise times zero", "noise of a generator",
}  # fmt: skip


class Root(nn.Module):
    """Records one call per example."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.keep = nn.Identity()
        self.part = part

    def forward(self, rows: tuple[Any, ...]) -> Any:
        return self.part(*map(self.keep, rows))


def model_of(case: Case) -> AutoBatch:
    torch.manual_seed(0)
    part = case.make().double()
    root = Root(part)
    root.training = part.training
    return autobatch(root)


class Refused(Exception):
    """Autobatch does not run a case, and says so."""


@contextmanager
def refusals_say_so() -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        assert "autobatch: " in str(error), error
        raise Refused from error


class Explained(NamedTuple):
    """How a case is run: directly, in another way, opened or refused; and the state it leaves."""

    way: str
    state: dict[str, Tensor]


@cache
def explained(name: str) -> Explained:
    model = model_of(CASES[name])
    try:
        with refusals_say_so():
            explanation = model.explain(list(examples(CASES[name])))
    except Refused:
        return Explained("refused", model.state_dict())
    ways = {operation.name: operation.way for operation in explanation.operations}
    return Explained(ways.get("part", "opened"), model.state_dict())


@pytest.mark.parametrize("name", RIGHT)
def test_independent_rows_are_not_refused(name: str) -> None:
    assert explained(name).way != "refused"


@pytest.mark.parametrize("name", [*WRONG, *MIXES])
def test_rows_that_are_mixed_are_not_stacked_for_the_call_itself(name: str) -> None:
    assert explained(name).way != "direct"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
def test_what_vmap_gets_wrong_is_opened_refused_or_run_one_by_one(name: str) -> None:
    assert explained(name).way in ("one by one", "opened", "refused")


@pytest.mark.parametrize("name", CASES)
def test_buffers_are_those_of_the_plain_loop_or_unchanged_if_it_is_refused(name: str) -> None:
    way, state = explained(name)
    plain = model_of(CASES[name])
    if way != "refused":
        plain(list(examples(CASES[name])), batch=False)
    torch.testing.assert_close(state, plain.state_dict())


def test_few_cases_of_right_code_run_one_by_one() -> None:
    assert len(MIXES) + len(RIGHT) >= 60
    slow = [name for name in RIGHT if explained(name).way not in ("direct", "fast")]
    assert len(slow) <= len(RIGHT) // 20, slow


def training_examples(case: Case, step: int) -> list[tuple[Tensor, ...]]:
    """Draw examples whose rows require gradients, as hooks of gradients take for granted."""
    batch = list(examples(case, seed=step))
    for row in tree_leaves(batch):
        row.requires_grad_(row.is_floating_point())
    return batch


def loss_of(results: Any) -> Tensor:
    """Sum up the results, differently weighted; smooth, so that roundings are not amplified."""
    loss = torch.zeros((), dtype=torch.float64)
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor):
            weights = torch.linspace(-1, 1, leaf.numel()).view(leaf.shape)
            loss = loss + (weights * (leaf.double() / 8).tanh()).mean()
    return loss


def losses_of_training(case: Case, *, batch: bool) -> list[Tensor]:
    model = model_of(case)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.05) if parameters else None
    losses = []
    for step in range(4):
        given = training_examples(case, step)
        with refusals_say_so():
            results = model(given, batch=batch)
        loss = loss_of(results)
        losses.append(loss.detach())
        if optimizer is not None and loss.requires_grad:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", [name for name in CASES if name not in RANDOM])
def test_training_equals_the_plain_loop(name: str) -> None:
    case = CASES[name]
    try:
        batched = losses_of_training(case, batch=True)
    except Refused:
        assert case.refused
        return
    one_by_one = losses_of_training(case, batch=False)
    torch.testing.assert_close(batched, one_by_one, rtol=1e-9, atol=1e-9)
