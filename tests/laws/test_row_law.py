"""Law of rows: what is run on stacked rows is what is run row by row, also after training."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyg_dynbatch.autobatch import AutoBatch, autobatch
from tests.laws.row_law_cases import CASES, MIXES, RIGHT, Case, examples

RANDOM = {
    "one mask for all", "dropout", "noise", "dropout of features", "layer drop",
    "NumPy noise times zero", "noise of a generator",
}  # fmt: skip


class Root(nn.Module):
    """Records one call per example."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.keep, self.part = nn.Identity(), part

    def forward(self, rows: tuple[Any, ...]) -> Any:
        return self.part(*map(self.keep, rows))


def model_of(case: Case) -> AutoBatch:
    torch.manual_seed(0)
    part = case.make().double()
    root = Root(part)
    root.training = part.training
    return autobatch(root)


@cache
def way_of(name: str) -> str:
    """Return how a case is run: directly, in another way, opened or refused."""
    case = CASES[name]
    model, other = model_of(case), model_of(case)
    try:
        explanation = model.explain(list(examples(case)))
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        assert "autobatch: " in str(error), error
        torch.testing.assert_close(model.state_dict(), other.state_dict())
        return "refused"
    other(list(examples(case)), batch=False)
    torch.testing.assert_close(model.state_dict(), other.state_dict())
    ways = {op.name: op.way for op in explanation.operations}
    return ways.get("part", "opened")


# vmap has no batching rule for some functions and then warns about a slow loop.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm")
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_batched_only_if_its_rows_are_independent(name: str) -> None:
    case, way = CASES[name], way_of(name)
    assert way != ("refused" if case.direct else "direct")
    if case.refused:
        assert way in ("one by one", "opened", "refused")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm")
def test_few_cases_of_right_code_run_one_by_one() -> None:
    assert len(MIXES) + len(RIGHT) >= 60
    assert sum(way_of(name) not in ("direct", "fast") for name in RIGHT) <= len(RIGHT) // 20


def loss_of(results: Any) -> Tensor:
    """Sum up the results, differently weighted; smooth, so that roundings are not amplified."""
    leaves = [leaf.double() for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    weights = [torch.linspace(-1, 1, leaf.numel()).view(leaf.shape) for leaf in leaves]
    return sum((w * (leaf / 8).tanh()).mean() for w, leaf in zip(weights, leaves, strict=True))  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", [name for name in CASES if name not in RANDOM])
def test_training_equals_the_plain_loop(name: str) -> None:
    case = CASES[name]
    losses: list[list[Tensor]] = []
    for batch in (True, False):
        model = model_of(case)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, 0.05) if parameters else None
        losses.append([])
        for step in range(4):
            given = list(examples(case, seed=step))
            for row in tree_leaves(given):  # as hooks of gradients take for granted
                row.requires_grad_(row.is_floating_point())
            try:
                results = model(given, batch=batch)
            except (ValueError, RuntimeError, TypeError, AttributeError) as error:
                assert batch and case.refused and "autobatch: " in str(error), error
                return
            loss = loss_of(results)
            losses[-1].append(loss.detach())
            if optimizer is not None and loss.requires_grad:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
